// Sampling on rows of logits: the twin of sampling/{warp,noise,accept,tree}.py for arrays on the CPU.
//
// Everything is done row by row and only for rows that a verdict needs: a draft that is refused ends its job, and what
// comes after it is never looked at. Nothing is written over: rows are shaped while they are read.

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "sampling.h"
#include "sampling_table.h"

#if defined(_WIN32)
#define EXPORTED extern "C" __declspec(dllexport)
#else
#define EXPORTED extern "C" __attribute__((visibility("default")))
#endif

const SamplingKernels &sampling_kernels(void);

// A place in a job's drafts: the root, or after a draft. -1 is nobody.
struct SamplingNode {
    int32_t row;  // of logits; -1 where a target that cannot rewind has none
    int32_t child;
    int32_t sibling;
    int32_t rank;   // earlier siblings
    int32_t draft;  // its token; -1 at roots
    int32_t depth;
};

namespace {

constexpr float INFINITE = __builtin_inff();
constexpr double SLACK = 1e-3;  // outweighs all rounding when a block is left out of a race

enum Stream : int32_t { TARGET = 0, DRAFT = 1, ACCEPT = 2, REPLACE = 3 };

struct Logits {
    const float *data;
    int64_t stride;
    int32_t size;

    const float *row(int64_t index) const { return data + index * stride; }
};

// Memory that calls of one thread use again: fresh pages cost more than the arithmetic.
struct Workspace {
    std::vector<float> tops, rest_tops, weights, values;
    std::vector<int32_t> ids;
    std::vector<uint64_t> keys, spare;

    void fit(int32_t size) {
        size_t blocks = (static_cast<size_t>(size) + SAMPLING_BLOCK - 1) / SAMPLING_BLOCK;
        if (tops.size() < blocks) {
            tops.resize(blocks);
            rest_tops.resize(blocks);
            weights.resize(blocks * SAMPLING_BLOCK);
        }
    }
};

thread_local Workspace workspace;

// ---- noise ---------------------------------------------------------------------------------------------------------

NoiseKey key_of(const SamplingJob &job, int32_t position, int32_t stream) {
    uint32_t counter = (static_cast<uint32_t>(position) * 4u + static_cast<uint32_t>(stream)) * 0x85EBCA6Bu;
    return {counter ^ static_cast<uint32_t>(job.first_word), static_cast<uint32_t>(job.second_word)};
}

int32_t bits_of(NoiseKey key, uint32_t id) {
    uint32_t bits = key.counter ^ (id * 0x9E3779B9u);
    bits ^= bits >> 16;
    bits *= 0x21F0AAADu;
    bits ^= key.second_word;
    bits ^= bits >> 15;
    bits *= 0xD35A2D97u;
    bits ^= bits >> 15;
    return static_cast<int32_t>(bits);
}

double unit(int32_t bits) { return bits * 0x1p-32 + (0.5 + 0x1p-33); }

float gumbel(int32_t bits) {
    float waiting = static_cast<float>(-log(unit(bits)));
    return -logf(waiting);
}

// The bits from which on noise can lift a token by more than `gap`, which is not positive where it leads. A token wins
// only if -log(u) < exp(-gap), and -log(u) is never below 1 - u. Above all bits where nothing can.
int64_t least_bits(double gap) {
    double chance = exp(SLACK - gap);
    if (chance >= 1.0) return INT32_MIN;
    if (chance < 0x1p-33) return int64_t{INT32_MAX} + 1;
    return static_cast<int64_t>((0.5 - chance) * 0x1p32) - 1;
}

// The Gumbel-max rule: the place with the highest log-probability plus noise, ties to the lowest id; -1 if nothing is
// possible. A source gives `size`, `top(block)`, `value(place)`, `id(place)` and `noise(key, block, bits)`.
// Blocks in which nobody can win are left out: their highest value and their highest noise tell.
template <class Source> class Race {
  public:
    Race(const Source &source, NoiseKey key) : source_(source), key_(key) {}

    int32_t run() {
        int32_t blocks = (source_.size + SAMPLING_BLOCK - 1) / SAMPLING_BLOCK, favourite = 0;
        float highest = -INFINITE;
        for (int32_t block = 0; block < blocks; block++) {
            float top = source_.raw_top(block);
            if (top > highest) {
                highest = top;
                favourite = block;
            }
        }
        visit(favourite);  // first: the better the score to beat, the fewer are looked at
        for (int32_t block = 0; block < blocks; block++) {
            if (block != favourite) visit(block);
        }
        return winner_;
    }

  private:
    void visit(int32_t block) {
        float top = source_.top(block);
        if (top == -INFINITE) return;
        int64_t least = least_bits(static_cast<double>(score_) - top);
        if (least > INT32_MAX) return;
        alignas(64) int32_t bits[SAMPLING_BLOCK];
        if (source_.noise(key_, block, bits) < least) return;
        int32_t start = block * SAMPLING_BLOCK;
        int32_t count = std::min(SAMPLING_BLOCK, source_.size - start);
        for (int32_t at = 0; at < count; at++) {
            if (bits[at] < least) continue;
            float value = source_.value(start + at);
            if (value == -INFINITE) continue;
            float score = value + gumbel(bits[at]);
            if (score > score_ || (score == score_ && source_.id(start + at) < source_.id(winner_))) {
                score_ = score;
                winner_ = start + at;
                least = least_bits(static_cast<double>(score_) - top);
            }
        }
    }

    const Source &source_;
    NoiseKey key_;
    float score_ = -INFINITE;
    int32_t winner_ = -1;
};

// ---- a row under its settings ---------------------------------------------------------------------------------------

// Floats in an order of unsigned integers, the highest first.
uint32_t falling(float value) {
    value += 0.0f;  // -0 and 0 are one
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x80000000u ? bits : ~(bits | 0x80000000u);
}

// Sorts by the upper 32 bits; equal ones stay as they are, in the order of their lower 32 bits.
void sort_keys(std::vector<uint64_t> &keys, std::vector<uint64_t> &spare, size_t count) {
    if (count < 1024) {
        std::sort(keys.begin(), keys.begin() + count);
        return;
    }
    constexpr int DIGIT = 11;
    constexpr uint32_t MASK = (1 << DIGIT) - 1;
    spare.resize(keys.size());
    for (int shift = 32; shift < 64; shift += DIGIT) {
        uint32_t starts[MASK + 1] = {}, sum = 0;
        for (size_t at = 0; at < count; at++) starts[(keys[at] >> shift) & MASK]++;
        for (uint32_t &start : starts) {
            uint32_t number = start;
            start = sum;
            sum += number;
        }
        for (size_t at = 0; at < count; at++) spare[starts[(keys[at] >> shift) & MASK]++] = keys[at];
        keys.swap(spare);
    }
}

// One row of logits under the settings of its job. The tokens that top-k and top-p leave are held as a list; without
// them the row itself is used, and what min-p rules out is left out on the way.
class Row {
  public:
    Row(const SamplingJob &job, const float *logits, int32_t size)
        : kernels_(sampling_kernels()), work_(workspace), job_(job), logits_(logits), size_(size) {
        work_.fit(size);
        bool has_nan = kernels_.scan(logits, size, work_.tops.data());
        peak_ = *std::max_element(work_.tops.begin(), work_.tops.begin() + num_blocks(size));
        is_usable_ = !has_nan && isfinite(peak_);
        // one bound for everything, so that all uses of the row agree about the token at its edge
        lowest_ = job.min_p > -INFINITE ? peak_ + job.min_p * job.temperature : -INFINITE;
        is_listed_ = is_usable_ && job.temperature > 0.0f && (job.top_k > 0 || job.top_p <= 1.0f);
        if (is_listed_) rank();
    }

    bool is_usable() const { return is_usable_; }

    int32_t argmax() const {
        int32_t block = 0;
        while (work_.tops[block] != peak_) block++;
        int32_t at = block * SAMPLING_BLOCK;
        while (logits_[at] != peak_) at++;
        return at;
    }

    int32_t draw(NoiseKey key) const {
        if (job_.temperature == 0.0f) return argmax();
        if (!is_listed_) return Race<Whole>({*this, size_}, key).run();
        return work_.ids[Race<List>({*this, listed_}, key).run()];
    }

    // Fills the weights: what every token (or every one of the list) has of the row's mass. `left` and the others
    // may be used after it.
    void weigh() {
        sum_ = is_listed_ ? exponentials_of_list() : exponentials_of_row(lowest_);
        scale_ = static_cast<float>(1.0 / sum_);
    }

    // What is left of a token, as a share of the whole row.
    float left(int64_t token) const {
        int64_t place = find(token);
        return place < 0 ? 0.0f : work_.weights[place] * scale_;
    }

    void remove(int64_t token) {
        int64_t place = find(token);
        if (place >= 0) work_.weights[place] = 0.0f;
    }

    // Subtracts a draft's probabilities times `mass`; returns what is left.
    float subtract(float mass, const float *probs) {
        double sum = 0.0;
        if (is_listed_) {
            for (int32_t at = 0; at < listed_; at++) {
                float rest = work_.weights[at] * scale_ - mass * probs[work_.ids[at]];
                work_.weights[at] = rest > 0.0f ? rest : 0.0f;
                sum += work_.weights[at];
            }
        } else {
            sum = kernels_.subtract(work_.weights.data(), size_, scale_, mass, probs);
        }
        scale_ = 1.0f;
        return static_cast<float>(sum);
    }

    // A token from what is left; from the row itself if that is nothing.
    int32_t draw_left(NoiseKey key) const {
        int32_t count = is_listed_ ? listed_ : size_;
        kernels_.scan(work_.weights.data(), count, work_.rest_tops.data());
        int32_t place = is_listed_ ? Race<ListLeft>({*this, count}, key).run() : Race<Left>({*this, count}, key).run();
        if (place < 0) return draw(key);
        return is_listed_ ? work_.ids[place] : place;
    }

    // The probabilities of all tokens.
    void write_probabilities(float *out) {
        weigh();
        if (!is_listed_) {
            for (int32_t at = 0; at < size_; at++) out[at] = work_.weights[at] * scale_;
            return;
        }
        memset(out, 0, size_ * sizeof(float));
        for (int32_t at = 0; at < listed_; at++) out[work_.ids[at]] = work_.weights[at] * scale_;
    }

    // The shaped logits of all tokens.
    void write_shaped(float *out) const {
        if (!is_listed_) {
            for (int32_t at = 0; at < size_; at++) out[at] = value(logits_[at]);
            return;
        }
        std::fill(out, out + size_, -INFINITE);
        for (int32_t at = 0; at < listed_; at++) out[work_.ids[at]] = work_.values[at];
    }

  private:
    static int32_t num_blocks(int32_t size) { return (size + SAMPLING_BLOCK - 1) / SAMPLING_BLOCK; }

    float shaped(float logit) const {
        float below = logit - peak_;
        return job_.temperature == 1.0f ? below : below / job_.temperature;
    }

    float value(float logit) const { return logit < lowest_ ? -INFINITE : shaped(logit); }

    int64_t find(int64_t token) const {
        if (token < 0 || token >= size_) return -1;
        if (!is_listed_) return token;
        const int32_t *ids = work_.ids.data();
        const int32_t *found = std::find(ids, ids + listed_, static_cast<int32_t>(token));
        return found == ids + listed_ ? -1 : found - ids;
    }

    double exponentials_of_row(float lowest) const {
        float scale = 1.0f / job_.temperature;
        return kernels_.exponentials(logits_, size_, peak_, scale, lowest, work_.weights.data());
    }

    double exponentials_of_list() const {
        return kernels_.exponentials(work_.values.data(), listed_, 0.0f, 1.0f, -INFINITE, work_.weights.data());
    }

    // top-k, then top-p of what is left, then min-p: each keeps the first so many of one order.
    void rank() {
        if (job_.top_k > 0) {
            gather(kth_highest(std::min(job_.top_k, size_)));
            sort_keys(work_.keys, work_.spare, num_keys_);
            num_keys_ = std::min<size_t>(num_keys_, job_.top_k);
            if (job_.top_p <= 1.0f) {
                list_keys(-INFINITE);
                double limit = static_cast<double>(job_.top_p) * exponentials_of_list(), before = 0.0;
                size_t kept = 0;
                while (kept < num_keys_ && before < limit) before += work_.weights[kept++];
                num_keys_ = kept;
            }
        } else {
            double limit = static_cast<double>(job_.top_p) * exponentials_of_row(-INFINITE);
            for (float floor : {-4.0f, -8.0f, -16.0f, -INFINITE}) {  // most tokens need not be ordered at all
                gather(floor);
                if (floor == -INFINITE || mass_of_keys(0, num_keys_) >= limit) break;
            }
            keep_mass(limit);
        }
        list_keys(job_.min_p);
        kernels_.scan(work_.values.data(), listed_, work_.tops.data());
    }

    // Of the keys, those that come after less than `limit` of mass. The others are split off, part by part: only the
    // part in which the limit lies is looked at again.
    void keep_mass(double limit) {
        std::vector<uint64_t> &keys = work_.keys;
        size_t start = 0, end = num_keys_;
        double before = 0.0;
        while (end - start > 64) {
            uint64_t first = keys[start], middle = keys[start + (end - start) / 2], last = keys[end - 1];
            uint64_t pivot = std::max(std::min(first, middle), std::min(std::max(first, middle), last));
            size_t split = start;
            for (size_t at = start; at < end; at++) {  // again without a branch
                uint64_t key = keys[at];
                keys[at] = keys[split];
                keys[split] = key;
                split += key < pivot;
            }
            double mass = mass_of_keys(start, split);
            if (before + mass < limit) {
                before += mass;
                start = split;
            } else {
                end = split;
            }
        }
        std::sort(keys.begin() + start, keys.begin() + end);
        while (start < end && before < limit) before += work_.weights[static_cast<uint32_t>(keys[start++])];
        num_keys_ = start;
    }

    // A shaped value that at least `count` tokens reach.
    float kth_highest(int32_t count) const {
        int32_t blocks = num_blocks(size_);
        std::vector<float> &copy = work_.values;
        if (count <= blocks) {
            copy.assign(work_.tops.begin(), work_.tops.begin() + blocks);
        } else {
            copy.assign(logits_, logits_ + size_);
        }
        std::nth_element(copy.begin(), copy.begin() + (count - 1), copy.end(), [](float a, float b) { return a > b; });
        return shaped(copy[count - 1]);
    }

    // The possible tokens from a shaped value on as keys of their order.
    void gather(float floor) {
        std::vector<uint64_t> &keys = work_.keys;
        if (keys.size() < static_cast<size_t>(size_)) keys.resize(size_);
        size_t count = 0;
        for (int32_t block = 0; block < num_blocks(size_); block++) {
            if (shaped(work_.tops[block]) < floor) continue;
            int32_t end = std::min(size_, (block + 1) * SAMPLING_BLOCK);
            for (int32_t at = block * SAMPLING_BLOCK; at < end; at++) {
                float value = shaped(logits_[at]);
                keys[count] = static_cast<uint64_t>(falling(value)) << 32 | static_cast<uint32_t>(at);
                count += (value >= floor) & (value > -INFINITE);  // no branch: it could not be foreseen
            }
        }
        num_keys_ = count;
    }

    double mass_of_keys(size_t start, size_t end) const {  // where the weights are those of the whole row
        double sums[4] = {};
        for (size_t at = start; at < end; at++) sums[at % 4] += work_.weights[static_cast<uint32_t>(work_.keys[at])];
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }

    // The tokens of the keys as the list, from a shaped value on.
    void list_keys(float floor) {
        size_t padded = static_cast<size_t>(num_blocks(static_cast<int32_t>(num_keys_))) * SAMPLING_BLOCK;
        work_.ids.assign(padded, 0);
        work_.values.resize(padded);
        listed_ = 0;
        for (size_t at = 0; at < num_keys_; at++) {
            int32_t id = static_cast<int32_t>(static_cast<uint32_t>(work_.keys[at]));
            float value = shaped(logits_[id]);
            if (value < floor) continue;
            work_.ids[listed_] = id;
            work_.values[listed_] = value;
            listed_++;
        }
    }

    // What a race may be run over: the row, the list, and what is left of either.
    struct Whole {
        const Row &row;
        int32_t size;
        float raw_top(int32_t block) const { return row.work_.tops[block]; }
        float top(int32_t block) const { return row.value(raw_top(block)); }
        float value(int32_t at) const { return row.value(row.logits_[at]); }
        int32_t id(int32_t at) const { return at; }
        int32_t noise(NoiseKey key, int32_t block, int32_t *bits) const {
            return row.kernels_.noise(key, block * SAMPLING_BLOCK, bits);
        }
    };

    struct Left : Whole {
        float raw_top(int32_t block) const { return this->row.work_.rest_tops[block]; }
        float top(int32_t block) const { return logarithm(raw_top(block)); }
        float value(int32_t at) const { return logarithm(this->row.work_.weights[at]); }
    };

    struct List {
        const Row &row;
        int32_t size;
        float raw_top(int32_t block) const { return row.work_.tops[block]; }
        float top(int32_t block) const { return raw_top(block); }
        float value(int32_t at) const { return row.work_.values[at]; }
        int32_t id(int32_t at) const { return row.work_.ids[at]; }
        int32_t noise(NoiseKey key, int32_t block, int32_t *bits) const {
            return row.kernels_.noise_of(key, row.work_.ids.data() + block * SAMPLING_BLOCK, bits);
        }
    };

    struct ListLeft : List {
        float raw_top(int32_t block) const { return this->row.work_.rest_tops[block]; }
        float top(int32_t block) const { return logarithm(raw_top(block)); }
        float value(int32_t at) const { return logarithm(this->row.work_.weights[at]); }
    };

    static float logarithm(float weight) { return weight > 0.0f ? logf(weight) : -INFINITE; }

    const SamplingKernels &kernels_;
    Workspace &work_;
    const SamplingJob &job_;
    const float *logits_;
    int32_t size_;
    int32_t listed_ = 0;
    size_t num_keys_ = 0;
    float peak_;
    float lowest_;
    float scale_ = 1.0f;
    double sum_ = 1.0;
    bool is_usable_;
    bool is_listed_;
};

// ---- judging --------------------------------------------------------------------------------------------------------

struct Proposal {
    const SamplingNode *nodes;
    const int64_t *tokens;
    const float *probs;  // null: every draft was certain of its token
    int64_t stride;
};

struct Verdict {
    int32_t node;
    int64_t next;
    int64_t fault;  // the row that was unusable, or -1
};

// Follows the target's own token as long as a child has it. Returns the child, or -1 when `next` has the last word.
int32_t match(Row &row, const SamplingJob &job, const Proposal &drafts, int32_t node, int32_t position,
              int64_t *next) {
    *next = row.draw(key_of(job, position, TARGET));
    int32_t child = drafts.nodes[node].child;
    while (child >= 0 && drafts.tokens[drafts.nodes[child].draft] != *next) child = drafts.nodes[child].sibling;
    return child;
}

// Keeps a child with probability min(1, p/q), one after another, each from what those before it left.
int32_t reject(Row &row, const SamplingJob &job, const Proposal &drafts, int32_t node, int32_t position,
               int64_t *next) {
    int32_t child = drafts.nodes[node].child;
    if (child < 0) {
        *next = row.draw(key_of(job, position, TARGET));
        return -1;
    }
    row.weigh();
    float mass = 1.0f;
    for (; child >= 0; child = drafts.nodes[child].sibling) {
        const SamplingNode &candidate = drafts.nodes[child];
        int64_t token = *next = drafts.tokens[candidate.draft];
        const float *probs = drafts.probs ? drafts.probs + candidate.draft * drafts.stride : nullptr;
        double uniform = unit(bits_of(key_of(job, position, ACCEPT), static_cast<uint32_t>(candidate.rank)));
        float left = row.left(token);
        double chance = probs ? static_cast<double>(probs[token]) : 1.0;
        if (uniform * chance * static_cast<double>(mass) < static_cast<double>(left)) return child;
        if (probs) {
            mass = row.subtract(mass, probs);
        } else {
            row.remove(token);
            mass -= left;
        }
    }
    *next = row.draw_left(key_of(job, position, REPLACE));
    return -1;
}

Verdict judge(const SamplingJob &job, int32_t length, int32_t root, const Logits &logits, const Proposal &drafts) {
    Verdict verdict{root, 0, -1};
    while (drafts.nodes[verdict.node].row >= 0) {
        const SamplingNode &node = drafts.nodes[verdict.node];
        Row row(job, logits.row(node.row), logits.size);
        if (!row.is_usable()) {
            verdict.fault = node.row;
            return verdict;
        }
        auto rule = job.is_matching ? match : reject;
        int32_t child = rule(row, job, drafts, verdict.node, length + node.depth, &verdict.next);
        if (child < 0) return verdict;
        verdict.node = child;
    }
    return verdict;
}

void write_one_hot(float *probs, int32_t size, int32_t token) {
    memset(probs, 0, size * sizeof(float));
    probs[token] = 1.0f;
}

}  // namespace

// Judges every job: `lengths` tokens long, its drafts those from node `roots` on.
// out [4, jobs]: drafts kept, the token that follows, the node it ended at, the unusable row or -1.
EXPORTED void outrider_judge(const float *logits, int64_t stride, int32_t size, const SamplingJob *jobs, int32_t count,
                             const int32_t *lengths, const int32_t *roots, const SamplingNode *nodes,
                             const int64_t *tokens, const float *probs, int64_t probs_stride, int64_t *out) {
    Proposal drafts{nodes, tokens, probs, probs_stride};
    for (int32_t index = 0; index < count; index++) {
        Verdict verdict = judge(jobs[index], lengths[index], roots[index], {logits, stride, size}, drafts);
        out[index] = nodes[verdict.node].depth;
        out[count + index] = verdict.next;
        out[2 * count + index] = verdict.node;
        out[3 * count + index] = verdict.fault;
    }
}

int32_t draw_token(const SamplingJob &job, const float *logits, int32_t size, int32_t position, int32_t stream,
                   float *probs) {
    Row row(job, logits, size);
    if (!row.is_usable()) return -1;
    const int32_t token = row.draw(key_of(job, position, stream));
    if (probs && !job.is_matching) row.write_probabilities(probs);
    else if (probs) write_one_hot(probs, size, token);
    return token;
}

// Draws a token from every row, each under a job of its own. out [2, rows]: the token, and whether the row was
// unusable. probs [rows, size] or null: see `draw_token`.
EXPORTED void outrider_draw(const float *logits, int64_t stride, int32_t size, const SamplingJob *jobs, int32_t count,
                            const int32_t *positions, const int32_t *streams, float *probs, int64_t *out) {
    for (int32_t index = 0; index < count; index++) {
        float *target = probs ? probs + static_cast<int64_t>(index) * size : nullptr;
        const float *row = logits + index * stride;
        const int32_t token = draw_token(jobs[index], row, size, positions[index], streams[index], target);
        out[index] = std::max(token, 0);
        out[count + index] = token < 0;
        if (target && token < 0) write_one_hot(target, size, 0);
    }
}

// Writes every row's shaped logits to shaped [rows, size]; zeros where faults [rows] says that it is unusable.
EXPORTED void outrider_shape(const float *logits, int64_t stride, int32_t size, const SamplingJob *jobs, int32_t count,
                             float *shaped, int64_t *faults) {
    for (int32_t index = 0; index < count; index++) {
        SamplingJob job = jobs[index];
        if (job.temperature == 0.0f) {  // greedy rows are not filtered
            job.temperature = 1.0f;
            job.top_k = 0;
            job.top_p = 2.0f;
            job.min_p = -INFINITE;
        }
        Row row(job, logits + index * stride, size);
        float *target = shaped + static_cast<int64_t>(index) * size;
        faults[index] = !row.is_usable();
        if (row.is_usable()) {
            row.write_shaped(target);
        } else {
            memset(target, 0, size * sizeof(float));
        }
    }
}
