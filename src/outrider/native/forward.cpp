#include "forward.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <initializer_list>
#include <new>

#include "pack.h"
#include "pool.h"

namespace {

// Bytes of weights that a thread takes at a time. Long stretches are read faster. Where many rows go through them, group
// after group, a stretch should fit into the second cache, and be long: all rows pass by for each of them.
constexpr int64_t LEAST_BYTES = 4096, MOST_BYTES = 131072, MOST_NEAR_BYTES = 262144;
constexpr int FEW_ROWS = 8;
constexpr int KEYS_AT_A_TIME = 64;

// Memory for one pass, kept for the next: fresh pages cost more than the arithmetic of a short pass.
class Scratch {
  public:
    ~Scratch() { free(memory_); }
    void reserve(size_t bytes) {
        if (bytes <= size_) return;
        free(memory_);
        memory_ = nullptr;
        size_ = 0;
        if (posix_memalign(&memory_, 64, bytes)) throw std::bad_alloc();
        size_ = bytes;
    }
    uint8_t *memory() const { return static_cast<uint8_t *>(memory_); }

  private:
    void *memory_ = nullptr;
    size_t size_ = 0;
};

// Gives out pieces of the scratch; with no memory it only counts.
class Cutter {
  public:
    explicit Cutter(uint8_t *memory) : memory_(memory) {}
    template <class T> T *cut(int64_t count) {
        const int64_t at = used_;
        used_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return memory_ ? reinterpret_cast<T *>(memory_ + at) : nullptr;
    }
    int64_t used() const { return used_; }

  private:
    uint8_t *memory_;
    int64_t used_ = 0;
};

Rounded cut_rounded(Cutter &cutter, int64_t rows, int64_t columns, int lanes) {
    const int64_t numbers = rows * columns;
    return {cutter.cut<int8_t>(numbers), cutter.cut<float>(numbers / BLOCK + 1), cutter.cut<float>(numbers / BLOCK + 1),
            cutter.cut<int8_t>(numbers / 16 + 16), cutter.cut<int32_t>((numbers / 16 + 1) * lanes)};
}

Rounded from_column(const Rounded &all, int64_t at, int lanes) {
    return {all.rounded + at, all.scales + at / BLOCK, all.weighted + at / BLOCK, all.digits + at / 16,
            all.starts + at / 16 * lanes};
}

Activations activations_of(const Matrix &matrix, const float *values, const Rounded &from) {
    return {values, from.rounded, from.scales, from.weighted, from.digits, from.starts, matrix.columns};
}

struct Buffers {
    float *x, *normed, *queries, *keys, *values, *seen, *gate, *up;
    float *entered;  // of a head: what its first layer reads
    float *scores;   // for each thread; or, of a few rows, for each query
    float *inverse;  // one over the sum of a query's weights
    Rounded by_block, by_super;

    Buffers(Cutter &cutter, const Model &model, int64_t rows, int64_t widest, int lanes, int64_t scores_room)
        : x(cutter.cut<float>(rows * model.width)),
          normed(cutter.cut<float>(rows * model.width)),
          queries(cutter.cut<float>(rows * model.num_heads * model.head_dim)),
          keys(cutter.cut<float>(rows * model.num_kv_heads * model.head_dim)),
          values(cutter.cut<float>(rows * model.num_kv_heads * model.head_dim)),
          seen(cutter.cut<float>(rows * model.num_heads * model.head_dim)),
          gate(cutter.cut<float>(rows * model.ffn_width)),
          up(cutter.cut<float>(rows * model.ffn_width)),
          entered(cutter.cut<float>(model.input_norm ? rows * 2 * model.width : 0)),
          scores(cutter.cut<float>(scores_room)),
          inverse(cutter.cut<float>(rows * model.num_heads)),
          by_block(cut_rounded(cutter, rows, widest, lanes)),
          by_super(cut_rounded(cutter, rows, widest, lanes)) {}
};

struct Product {
    const Matrix *matrix;
    float *out;
    const float *bias;
    bool add;
};

class Run {
  public:
    Run(const Model &model, const Pass &pass, const Kernels &kernels, const Buffers &buffers, bool few)
        : model_(model),
          pass_(pass),
          kernels_(kernels),
          pool_(Pool::get()),
          buffers_(buffers),
          rows_(pass.num_rows),
          room_(room_of(pass)),
          few_(few) {}

    void all() {
        pool_.share(rows_, [&](int row) {
            if (model_.input_norm) enter(row);
            else embed(row, buffers_.x + int64_t(row) * model_.width);
        });
        hand_out(0);
        for (int layer = 0; layer < pass_.num_layers; layer++) {
            run_layer(layer);
            hand_out(layer + 1);
        }
        finish();
    }

    // Whether there are fewer things to look at than threads can share evenly.
    static bool are_few(const Model &model, int64_t rows, int threads) { return rows * model.num_kv_heads < 4 * threads; }

    // Numbers for the scores of one query with all keys it may see, and the rest of a vector.
    static int64_t room_of(const Pass &pass) {
        int64_t most = 0;
        for (int row = 0; row < pass.num_rows; row++) {
            const int64_t extras = pass.extra_ends[row] - (row ? pass.extra_ends[row - 1] : 0);
            most = std::max(most, pass.runs[row] + extras);
        }
        return (most + 2 * MAX_LANES - 1) / MAX_LANES * MAX_LANES;
    }

  private:
    void embed(int row, float *out) const { unpack_row(model_.embedding, pass_.tokens[row], kernels_.lanes, out); }

    // A head's first layer reads the embedding and the hidden state side by side, each normed; the latter passes it by.
    void enter(int row) const {
        const int width = model_.width;
        const float *input = pass_.inputs + int64_t(row) * width;
        float *embedding = buffers_.entered + int64_t(row) * 2 * width, *beside = embedding + width;
        embed(row, embedding);
        norm(embedding, model_.layers[0].attention_norm, embedding);
        norm(input, model_.input_norm, beside);
        memcpy(buffers_.x + int64_t(row) * width, model_.keeps_normed ? beside : input, sizeof(float) * width);
    }

    void norm(const float *x, const float *weight, float *out) const {
        kernels_.norm(x, kernels_.scale_of(x, model_.eps, model_.width), weight, model_.width, out);
    }

    void run_layer(int number) {
        const Layer &layer = model_.layers[number];
        const Buffers &b = buffers_;
        const int64_t width = model_.width, head_rows = int64_t(model_.num_heads) * model_.head_dim;
        const bool enters = model_.input_norm && number == 0;
        const float *read = enters ? b.entered : b.normed;
        if (enters) prepare(b.entered, 2 * width, nullptr, nullptr, {&layer.queries, &layer.keys, &layer.values});
        else prepare(b.x, width, layer.attention_norm, b.normed, {&layer.queries, &layer.keys, &layer.values});
        multiply({{&layer.queries, b.queries, layer.query_bias, false},
                  {&layer.keys, b.keys, layer.key_bias, false},
                  {&layer.values, b.values, layer.value_bias, false}},
                 read, rows_);
        const int heads = model_.num_kv_heads;
        pool_.share(rows_ * heads, [&](int item) { place(layer, number, item / heads, item % heads); });
        attend(layer, number);
        prepare(b.seen, head_rows, nullptr, nullptr, {&layer.attention_out});
        multiply({{&layer.attention_out, b.x, nullptr, true}}, b.seen, rows_);
        prepare(b.x, width, layer.ffn_norm, b.normed, {&layer.gate, &layer.up});
        feed(layer);
        prepare(b.gate, model_.ffn_width, nullptr, nullptr, {&layer.down});
        multiply({{&layer.down, b.x, nullptr, true}}, b.gate, rows_);
    }

    // Rows as the matrices want them: normed if there is a norm, rounded if their weights are.
    void prepare(const float *x, int64_t width, const float *norm, float *normed,
                 std::initializer_list<const Matrix *> readers) {
        bool wanted[3] = {false, false, false};
        for (const Matrix *reader : readers) wanted[rounding_of(reader->type)] = true;
        if (!norm && !wanted[BY_BLOCK] && !wanted[BY_SUPER]) return;  // alike for all threads
        // A few rows are cut into pieces, so that nobody is idle; the sum of squares is cheap enough to be taken twice.
        const int pieces = rows_ >= pool_.size() ? 1 : int((width + SUPER - 1) / SUPER);
        pool_.share(rows_ * pieces, [&](int item) {
            const int64_t row = item / pieces, first = item % pieces * SUPER;
            const int64_t count = pieces == 1 ? width : std::min<int64_t>(SUPER, width - first);
            prepare_row(x + row * width, row, width, first, count, norm, normed, wanted);
        });
    }

    void prepare_row(const float *x, int64_t row, int64_t width, int64_t first, int64_t count, const float *norm,
                     float *normed, const bool *wanted) {
        const int64_t at = row * width + first;
        if (norm) {
            const float scale = kernels_.scale_of(x, model_.eps, int(width));
            kernels_.norm(x + first, scale, norm + first, int(count), normed + at);
            x = normed + row * width;
        }
        for (Rounding how : {BY_BLOCK, BY_SUPER})
            if (wanted[how])
                kernels_.round_row(x + first, int(count), how, from_column(rounded(how), at, kernels_.lanes));
    }

    const Rounded &rounded(Rounding how) const { return how == BY_SUPER ? buffers_.by_super : buffers_.by_block; }

    Activations activations(const Matrix &matrix, const float *values) const {
        const Rounding how = rounding_of(matrix.type);
        return activations_of(matrix, values, how == NONE ? Rounded{} : rounded(how));
    }

    int num_tiles(const Matrix &matrix) const { return (matrix.rows + kernels_.lanes - 1) / kernels_.lanes; }

    // Tiles a thread takes at a time: small enough that all end together, large enough to be worth taking.
    int step(int64_t total_bytes, int64_t bytes_of_one, int num_rows) const {
        const int64_t most = num_rows <= FEW_ROWS ? MOST_BYTES : MOST_NEAR_BYTES;
        const int64_t bytes = std::clamp(total_bytes / (8 * pool_.size()), LEAST_BYTES, most);
        return int(std::max<int64_t>(1, bytes / bytes_of_one));
    }

    // Matrices that read the same rows, one after the other.
    void multiply(std::initializer_list<Product> products, const float *values, int num_rows) {
        int64_t total = 0;
        for (const Product &product : products) total += num_tiles(*product.matrix) * product.matrix->tile_bytes;
        int count = 0;
        for (const Product &product : products) count += num_steps(*product.matrix, total, num_rows);
        pool_.share(count, [&](int item) {
            for (const Product &product : products) {
                const Matrix &matrix = *product.matrix;
                const int steps = num_steps(matrix, total, num_rows);
                if (item >= steps) {
                    item -= steps;
                    continue;
                }
                const int size = step(total, matrix.tile_bytes, num_rows), first = item * size;
                kernels_.multiply(matrix, first, std::min(first + size, num_tiles(matrix)),
                                  activations(matrix, values), num_rows, product.out, matrix.rows, product.bias,
                                  product.add);
                return;
            }
        });
    }

    int num_steps(const Matrix &matrix, int64_t total_bytes, int num_rows) const {
        const int size = step(total_bytes, matrix.tile_bytes, num_rows);
        return (num_tiles(matrix) + size - 1) / size;
    }

    // The gated feed-forward up to its last matrix: gate and up of the same outputs, then silu(gate) * up.
    void feed(const Layer &layer) {
        const int tiles = num_tiles(layer.gate);
        const int64_t both = layer.gate.tile_bytes + layer.up.tile_bytes;
        const int size = step(tiles * both, both, rows_);
        const int64_t width = model_.ffn_width;
        const Activations for_gate = activations(layer.gate, buffers_.normed);
        const Activations for_up = activations(layer.up, buffers_.normed);
        pool_.share((tiles + size - 1) / size, [&](int item) {
            const int first = item * size, last = std::min(first + size, tiles);
            kernels_.multiply(layer.gate, first, last, for_gate, rows_, buffers_.gate, width, nullptr, false);
            kernels_.multiply(layer.up, first, last, for_up, rows_, buffers_.up, width, nullptr, false);
            const int64_t start = int64_t(first) * kernels_.lanes;
            const int count = int(std::min<int64_t>(int64_t(last) * kernels_.lanes, width) - start);
            for (int64_t row = 0; row < rows_; row++)
                kernels_.gate(buffers_.gate + row * width + start, buffers_.up + row * width + start, count);
        });
    }

    Held held(int layer, int head) const {
        const int padded_size = (model_.page_size + TOKENS - 1) / TOKENS * TOKENS;
        const int padded_dim = (model_.head_dim + 15) / 16 * 16;
        const int64_t one = int64_t(padded_size) * padded_dim, of_a_layer = held_numbers(model_);
        float *keys = model_.held + layer * of_a_layer + head * one;
        return {keys, keys + model_.num_kv_heads * one, model_.num_layers * of_a_layer, model_.page_size, padded_size, model_.head_dim,
                padded_dim};
    }

    // A key head of a row and the queries that look at it are normed and turned; key and value go where they belong.
    void place(const Layer &layer, int number, int64_t row, int head) {
        const int dim = model_.head_dim, group = model_.num_heads / model_.num_kv_heads;
        const float *turns = pass_.turns + int64_t(pass_.positions[row]) * 2 * model_.rotary_pairs;
        const float scale = 1.0f / sqrtf(float(dim));
        for (int q = 0; q < group; q++) {
            float *query = buffers_.queries + (row * model_.num_heads + head * group + q) * dim;
            norm_head(query, layer.query_norm);
            turn(query, turns);
            for (int d = 0; d < dim; d++) query[d] *= scale;
        }
        float *key = buffers_.keys + (row * model_.num_kv_heads + head) * dim;
        norm_head(key, layer.key_norm);
        turn(key, turns);
        const Held to = held(number, head);
        const int page = pass_.places[row] / model_.page_size, within = pass_.places[row] % model_.page_size;
        float *keys = to.keys + page * to.page_stride + within;
        for (int d = 0; d < dim; d++) keys[d * to.padded_size] = key[d];
        const float *value = buffers_.values + (row * model_.num_kv_heads + head) * dim;
        memcpy(to.values + page * to.page_stride + within * to.padded_dim, value, sizeof(float) * dim);
    }

    void norm_head(float *x, const float *weight) const {
        if (weight) kernels_.norm(x, kernels_.scale_of(x, model_.eps, model_.head_dim), weight, model_.head_dim, x);
    }

    void turn(float *x, const float *turns) const {
        if (model_.interleaved) turn_pairs(x, x + 1, 2, turns);
        else turn_pairs(x, x + model_.rotary_pairs, 1, turns);
    }

    void turn_pairs(float *__restrict first, float *__restrict second, int step, const float *__restrict turns) const {
        for (int pair = 0; pair < model_.rotary_pairs; pair++) {
            const float a = first[pair * step], b = second[pair * step];
            const float cosine = turns[2 * pair], sine = turns[2 * pair + 1];
            first[pair * step] = a * cosine - b * sine;
            second[pair * step] = a * sine + b * cosine;
        }
    }

    // Heads that share keys look together, up to MAX_QUERIES of them.
    void attend(const Layer &layer, int number) {
        const int group = model_.num_heads / model_.num_kv_heads;
        const int parts = (group + MAX_QUERIES - 1) / MAX_QUERIES, size = (group + parts - 1) / parts;
        const int per_row = model_.num_kv_heads * parts;
        const auto looking = [&](int item) {
            const int row = item / parts % rows_, head = item / (parts * rows_), first = item % parts * size;
            return Looking{row, head, head * group + first, std::min(size, group - first)};
        };
        if (few_) return attend_in_parts(layer, number, rows_ * per_row, looking);
        pool_.share(rows_ * per_row, [&](int item) {
            const Looking who = looking(item);
            const float *queries[MAX_QUERIES];
            float *out[MAX_QUERIES];
            heads_of(who, queries, out);
            float *scores = buffers_.scores + Pool::number() * MAX_QUERIES * room_;
            if (who.count > 0)
                kernels_.attend(held(number, who.kv_head), sight_of(layer, who.row), queries, who.count, out, scores,
                                room_);
        });
    }

    // A few queries of a row that look at the same keys.
    struct Looking {
        int row, kv_head, first, count;
    };

    // With a few rows there is too little for all threads, or it cannot be shared evenly: keys are cut into stretches, then
    // values by dimensions. No sum is cut, so nothing changes.
    template <class Who> void attend_in_parts(const Layer &layer, int number, int num_looking, const Who &looking) {
        const int stretches = int((room_ + KEYS_AT_A_TIME - 1) / KEYS_AT_A_TIME);
        pool_.share(num_looking * stretches, [&](int item) {
            const Looking who = looking(item / stretches);
            Sight sight = sight_of(layer, who.row);
            const int skipped = item % stretches * KEYS_AT_A_TIME, first = sight.first + skipped;
            const bool is_last = first + KEYS_AT_A_TIME >= sight.last;
            if (who.count <= 0 || (skipped && first >= sight.last)) return;
            sight.first = first;
            if (!is_last) {
                sight.last = first + KEYS_AT_A_TIME;
                sight.num_extras = 0;
            }
            const float *queries[MAX_QUERIES];
            float *out[MAX_QUERIES];
            heads_of(who, queries, out);
            kernels_.match(held(number, who.kv_head), sight, queries, who.count, scores_of(who) + skipped, room_);
        });
        pool_.share(rows_ * model_.num_heads, [&](int item) {
            const Sight sight = sight_of(layer, item / model_.num_heads);
            const int keys = sight.last - sight.first + sight.num_extras;
            buffers_.inverse[item] = kernels_.weigh(buffers_.scores + item * room_, keys);
        });
        const int parts = (model_.head_dim + 15) / 16;
        pool_.share(num_looking * parts, [&](int item) {
            const Looking who = looking(item / parts);
            if (who.count <= 0) return;
            const float *queries[MAX_QUERIES];
            float *out[MAX_QUERIES];
            heads_of(who, queries, out);
            const float *inverse = buffers_.inverse + int64_t(who.row) * model_.num_heads + who.first;
            kernels_.mix(held(number, who.kv_head), sight_of(layer, who.row), scores_of(who), room_, item % parts * 16,
                         who.count, inverse, out);
        });
    }

    float *scores_of(const Looking &who) const {
        return buffers_.scores + (int64_t(who.row) * model_.num_heads + who.first) * room_;
    }

    void heads_of(const Looking &who, const float **queries, float **out) const {
        for (int q = 0; q < who.count; q++) {
            const int64_t at = (int64_t(who.row) * model_.num_heads + who.first + q) * model_.head_dim;
            queries[q] = buffers_.queries + at;
            out[q] = buffers_.seen + at;
        }
    }

    // What a row sees in a layer.
    Sight sight_of(const Layer &layer, int row) const {
        const int begin = row ? pass_.extra_ends[row - 1] : 0;
        Sight sight{pass_.pages + pass_.tables[row], pass_.firsts[row], pass_.runs[row], pass_.extras + begin,
                    pass_.extra_ends[row] - begin};
        if (layer.window) {
            const int oldest = int(std::max<int64_t>(0, pass_.positions[row] - layer.window + 1));
            sight.first = std::min(sight.first + oldest, sight.last);
            while (sight.num_extras && pass_.extra_positions[sight.extras - pass_.extras] < oldest) {
                sight.extras++;
                sight.num_extras--;
            }
        }
        return sight;
    }

    void hand_out(int layer) {
        const int64_t numbers = int64_t(rows_) * model_.width;
        for (int at = 0; at < pass_.num_hidden; at++)
            if (pass_.hidden_layers[at] == layer)
                pool_.share(1, [&](int) { memcpy(pass_.hidden[at], buffers_.x, sizeof(float) * numbers); });
    }

    // The output norm and the logits of the rows that are wanted.
    void finish() {
        const int64_t width = model_.width;
        for (int at = 0; at < pass_.num_hidden; at++)
            if (pass_.hidden_layers[at] == model_.num_layers + 1)
                pool_.share(rows_, [&](int row) {
                    norm(buffers_.x + row * width, model_.output_norm, pass_.hidden[at] + row * width);
                });
        if (!pass_.num_wanted) return;
        bool wanted[3] = {false, false, false};
        wanted[rounding_of(model_.output.type)] = true;
        pool_.share(pass_.num_wanted, [&](int row) {
            prepare_row(buffers_.x + pass_.wanted[row] * width, row, width, 0, width, model_.output_norm,
                        buffers_.normed, wanted);
        });
        multiply({{&model_.output, pass_.logits, nullptr, false}}, buffers_.normed, pass_.num_wanted);
    }

    const Model &model_;
    const Pass &pass_;
    const Kernels &kernels_;
    Pool &pool_;
    const Buffers buffers_;
    const int rows_;
    const int64_t room_;
    const bool few_;  // see are_few
};

int64_t widest(const Model &model) {
    const int64_t entered = model.input_norm ? 2 * int64_t(model.width) : model.width;
    return std::max({entered, int64_t(model.ffn_width), int64_t(model.num_heads) * model.head_dim});
}

}  // namespace

int64_t held_numbers(const Model &model) {
    const int64_t padded_size = (model.page_size + TOKENS - 1) / TOKENS * TOKENS;
    const int64_t padded_dim = (model.head_dim + 15) / 16 * 16;
    return 2 * model.num_kv_heads * padded_size * padded_dim;
}

void forward(const Model &model, const Pass &pass, const Kernels &kernels) {
    thread_local Scratch scratch;  // the caller's: another thread may be preparing its own pass
    const int64_t rows = std::max(pass.num_rows, pass.num_wanted);
    for (bool done = false; !done;) {
        const int threads = Pool::get().size();
        const bool few = Run::are_few(model, pass.num_rows, threads);
        const int64_t scores = Run::room_of(pass) * (few ? rows * model.num_heads : int64_t(MAX_QUERIES) * threads);
        Cutter counting(nullptr);
        Buffers(counting, model, rows, widest(model), kernels.lanes, scores);
        scratch.reserve(size_t(counting.used()));
        Cutter cutter(scratch.memory());
        Run run(model, pass, kernels, Buffers(cutter, model, rows, widest(model), kernels.lanes, scores),
                few);
        done = Pool::get().run([&] { run.all(); }, threads);
    }
}

void multiply_rows(const Matrix &matrix, const float *rows, int count, float *out, const Kernels &kernels) {
    thread_local Scratch scratch;
    const Rounding how = rounding_of(matrix.type);
    const int64_t columns = matrix.columns;
    Cutter counting(nullptr);
    cut_rounded(counting, count, columns, kernels.lanes);
    scratch.reserve(size_t(counting.used()));
    Cutter cutter(scratch.memory());
    const Rounded to = how == NONE ? Rounded{} : cut_rounded(cutter, count, columns, kernels.lanes);
    const Activations read = activations_of(matrix, rows, to);
    const int tiles = (matrix.rows + kernels.lanes - 1) / kernels.lanes, step = 16;
    Pool &pool = Pool::get();
    pool.run([&] {
        if (how != NONE)
            pool.share(count, [&](int row) {
                const int64_t at = row * columns;
                kernels.round_row(rows + at, int(columns), how, from_column(to, at, kernels.lanes));
            });
        pool.share((tiles + step - 1) / step, [&](int item) {
            kernels.multiply(matrix, item * step, std::min(item * step + step, tiles), read, count, out, matrix.rows,
                             nullptr, false);
        });
    });
}
