#include "forward.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <initializer_list>
#include <new>
#include <vector>

#include "pack.h"
#include "pool.h"

namespace {

// Bytes of weights that a thread takes at a time. Long stretches are read faster. Where many rows go through them, group
// after group, a stretch should fit into the second cache, and be long: all rows pass by for each of them.
constexpr int64_t LEAST_BYTES = 4096, MOST_BYTES = 131072, MOST_NEAR_BYTES = 262144;
constexpr int FEW_ROWS = 8;
constexpr int ROWS_OF_A_BLOCK = 8;    // rows of one sequence whose keys are read together
constexpr int ITEMS_PER_THREAD = 16;  // of attention: so many are shared evenly, whatever they take

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

int padded_size(const Model &model) { return (model.page_size + KV_GROUP - 1) / KV_GROUP * KV_GROUP; }
int padded_dim(const Model &model) { return (model.head_dim + 15) / 16 * 16; }

// Bytes of the keys, or of the values, of one page, layer and kv head. kv/host_store.py has the same layout.
int64_t kv_block_bytes(const Model &model) {
    const int64_t size = padded_size(model), elements = size * padded_dim(model);
    if (model.kv_type == KV_Q8) return elements + int64_t(sizeof(float)) * size;
    return elements * (model.kv_type == KV_F16 ? 2 : 4);
}

Rounded cut_rounded(Cutter &cutter, int64_t rows, int64_t columns, int lanes) {
    const int64_t numbers = rows * columns, blocks = numbers / BLOCK + 1;
    return {cutter.cut<int8_t>(numbers),           cutter.cut<float>(blocks),
            cutter.cut<float>(blocks),             cutter.cut<int8_t>(numbers / 16 + 16),
            cutter.cut<int32_t>((numbers / 16 + 1) * lanes), cutter.cut<int32_t>(blocks)};
}

Rounded from_column(const Rounded &all, int64_t at, int lanes) {
    return {all.rounded + at, all.scales + at / BLOCK, all.weighted + at / BLOCK, all.digits + at / 16,
            all.starts + at / 16 * lanes, all.lowered + at / BLOCK};
}

Activations activations_of(const Matrix &matrix, const float *values, const Rounded &from) {
    return {values, from.rounded, from.scales, from.weighted, from.digits, from.starts, from.lowered, matrix.columns};
}

struct Buffers {
    float *x, *normed, *queries, *keys, *values, *seen, *gate, *up;
    float *entered;  // of a head: what its first layer reads
    float *partials;  // of attention, see AttentionPlan
    Rounded by_block, by_super;

    Buffers(Cutter &cutter, const Model &model, int64_t rows, int64_t widest, int lanes, int64_t num_partials)
        : x(cutter.cut<float>(rows * model.width)),
          normed(cutter.cut<float>(rows * model.width)),
          queries(cutter.cut<float>(rows * model.num_heads * model.head_dim)),
          keys(cutter.cut<float>(rows * model.num_kv_heads * model.head_dim)),
          values(cutter.cut<float>(rows * model.num_kv_heads * model.head_dim)),
          seen(cutter.cut<float>(rows * model.num_heads * model.head_dim)),
          gate(cutter.cut<float>(rows * model.ffn_width)),
          up(cutter.cut<float>(rows * model.ffn_width)),
          entered(cutter.cut<float>(model.input_norm ? rows * 2 * model.width : 0)),
          partials(cutter.cut<float>(num_partials)),
          by_block(cut_rounded(cutter, rows, widest, lanes)),
          by_super(cut_rounded(cutter, rows, widest, lanes)) {}
};

// Neighbouring rows of one sequence, and the chunks of keys that they attend to.
struct RowBlock {
    int first_row, num_rows, first_chunk, num_chunks;
};

// How the attention of a pass is shared among threads: by blocks of rows, kv heads, and pieces of the keys. With one
// piece, a thread merges the chunks of keys as it goes through them. With several, the partial softmax of every chunk
// is kept, and all are merged afterwards: in the same order, so the numbers are the same.
struct AttentionPlan {
    std::vector<RowBlock> blocks;
    int pieces = 1;
    int most_chunks = 0;  // of a block

    AttentionPlan(const Model &model, const Pass &pass, int threads) {
        for (int row = 0; row < pass.num_rows; row++) {
            const int extras = pass.extra_ends[row] - (row ? pass.extra_ends[row - 1] : 0);
            const int first = pass.firsts[row] / KV_CHUNK, end = (pass.runs[row] + extras + KV_CHUNK - 1) / KV_CHUNK;
            const bool joins = !blocks.empty() && pass.tables[row] == pass.tables[row - 1] &&
                               blocks.back().num_rows < ROWS_OF_A_BLOCK && blocks.back().first_chunk == first;
            if (!joins) blocks.push_back({row, 0, first, 0});
            RowBlock &block = blocks.back();
            block.num_rows++;
            block.num_chunks = std::max(block.num_chunks, end - first);
            most_chunks = std::max(most_chunks, block.num_chunks);
        }
        const int num_items = int(blocks.size()) * model.num_kv_heads, wanted = ITEMS_PER_THREAD * threads;
        // Of many rows the partials of all chunks would take too much memory, and they are shared evenly without pieces.
        if (threads > 1 && num_items < wanted && pass.num_rows <= 4 * threads)
            pieces = std::max(1, std::min(most_chunks, (wanted + num_items - 1) / std::max(1, num_items)));
    }

    // Numbers for partials: of all chunks, or of one block for each thread (merged ones and those of one chunk).
    int64_t num_partials(const Model &model, int64_t num_rows, int threads) const {
        const int64_t size = partial_size(padded_dim(model));
        if (pieces > 1) return num_rows * model.num_heads * most_chunks * size;
        return 2 * int64_t(threads) * ROWS_OF_A_BLOCK * (model.num_heads / model.num_kv_heads) * size;
    }
};

struct Product {
    const Matrix *matrix;
    float *out;
    const float *bias;
    bool add;
};

class Run {
  public:
    Run(const Model &model, const Pass &pass, const Kernels &kernels, const Buffers &buffers, const AttentionPlan &plan)
        : model_(model),
          pass_(pass),
          kernels_(kernels),
          pool_(Pool::get()),
          buffers_(buffers),
          rows_(pass.num_rows),
          plan_(plan) {}

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

  private:
    // Whether anything is made of what comes out of layer number `layer` (from 1). Of the last one it may be that nothing
    // is: where a prompt is read, only keys and values stay.
    bool is_wanted(int layer) const {
        const int *hidden = pass_.hidden_layers;
        return layer < pass_.num_layers || pass_.num_wanted ||
               std::any_of(hidden, hidden + pass_.num_hidden, [&](int wanted) { return wanted >= layer; });
    }

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
        const Product queries{&layer.queries, b.queries, layer.query_bias, false};
        const Product keys{&layer.keys, b.keys, layer.key_bias, false};
        const Product values{&layer.values, b.values, layer.value_bias, false};
        const bool is_read = is_wanted(number + 1);
        if (is_read) multiply({queries, keys, values}, read, rows_);
        else multiply({keys, values}, read, rows_);
        const int heads = model_.num_kv_heads;
        pool_.share(rows_ * heads, [&](int item) {
            const int row = item / heads, head = item % heads;
            if (is_read) turn_queries(layer, row, head);
            store_key(layer, number, row, head);
        });
        if (!is_read) return;
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

    KvView kv_view(int layer, int head) const {
        const int64_t block = kv_block_bytes(model_), of_a_layer = 2 * model_.num_kv_heads * block;
        uint8_t *keys = model_.kv_cache + layer * of_a_layer + head * block;
        return {keys,           keys + model_.num_kv_heads * block, model_.num_layers * of_a_layer, model_.kv_type,
                model_.page_size, padded_size(model_),              model_.head_dim,                padded_dim(model_)};
    }

    const float *turns_of(int64_t row) const {
        return pass_.turns + int64_t(pass_.positions[row]) * 2 * model_.rotary_pairs;
    }

    // The queries that look at a key head, of one row.
    void turn_queries(const Layer &layer, int64_t row, int head) {
        const int dim = model_.head_dim;
        const float scale = 1.0f / sqrtf(float(dim));
        for (int q = 0; q < group(); q++) {
            float *query = buffers_.queries + (row * model_.num_heads + head * group() + q) * dim;
            norm_head(query, layer.query_norm);
            kernels_.rotate(query, turns_of(row), model_.rotary_pairs, model_.interleaved);
            for (int d = 0; d < dim; d++) query[d] *= scale;
        }
    }

    void store_key(const Layer &layer, int number, int64_t row, int head) {
        const int64_t at = (row * model_.num_kv_heads + head) * model_.head_dim;
        float *key = buffers_.keys + at;
        norm_head(key, layer.key_norm);
        kernels_.rotate(key, turns_of(row), model_.rotary_pairs, model_.interleaved);
        kernels_.store_kv(kv_view(number, head), pass_.places[row], key, buffers_.values + at);
    }

    void norm_head(float *x, const float *weight) const {
        if (weight) kernels_.norm(x, kernels_.scale_of(x, model_.eps, model_.head_dim), weight, model_.head_dim, x);
    }

    void attend(const Layer &layer, int number) {
        const int heads = model_.num_kv_heads, pieces = plan_.pieces;
        pool_.share(int(plan_.blocks.size()) * heads * pieces, [&](int item) {
            const RowBlock &block = plan_.blocks[size_t(item / (heads * pieces))];
            const int head = item / pieces % heads, piece = item % pieces, chunks = block.num_chunks;
            const KvView kv = kv_view(number, head);
            const int first = chunks * piece / pieces, end = chunks * (piece + 1) / pieces;
            for (int chunk = first; chunk < end; chunk++)
                attend_block(layer, kv, block, head, block.first_chunk + chunk);
            if (pieces == 1)
                for (int row = 0; row < block.num_rows; row++)
                    for (int q = 0; q < group(); q++)
                        finish_query(block.first_row + row, head * group() + q, own_partial(row * group() + q));
        });
        if (pieces > 1)
            pool_.share(rows_ * model_.num_heads, [&](int item) { merge_query(layer, item / model_.num_heads, item); });
    }

    // One chunk of keys with all queries of a block that attend to them. Rows of a chain share a call: each sees the
    // same keys as the one before it, and one more. Rows of a tree see different ones.
    void attend_block(const Layer &layer, const KvView &kv, const RowBlock &block, int head, int chunk) {
        Query queries[MAX_QUERIES];
        int count = 0;
        Visible shared{};
        const auto compute = [&] {
            if (count) kernels_.attend_chunk(kv, shared, queries, count);
            count = 0;
        };
        for (int in_block = 0; in_block < block.num_rows; in_block++) {
            const int row = block.first_row + in_block;
            const Visible visible = visible_chunk(layer, row, chunk);
            const int num_keys = visible.last - visible.first + visible.num_extras;
            if (num_keys <= 0) continue;
            if (visible.first != shared.first || visible.num_extras || shared.num_extras) compute();
            shared = visible;
            for (int q = 0; q < group(); q++) {
                const int64_t query = int64_t(row) * model_.num_heads + head * group() + q;
                queries[count++] = {buffers_.queries + query * model_.head_dim,
                                    partial_of(block, in_block * group() + q, query, chunk, is_first(layer, row, chunk)),
                                    num_keys};
                if (count == kernels_.queries) compute();
            }
        }
        compute();
        if (plan_.pieces == 1) merge_block(layer, block, chunk);
    }

    // Where the partial of a query and a chunk goes. Of a block that is merged at once: the first chunk is the start.
    float *partial_of(const RowBlock &block, int in_block, int64_t query, int chunk, bool is_first) const {
        if (plan_.pieces > 1) return kept_partial(query, chunk - block.first_chunk);
        return own_partial(is_first ? in_block : ROWS_OF_A_BLOCK * group() + in_block);
    }

    float *kept_partial(int64_t query, int chunk) const {
        return buffers_.partials + (query * plan_.most_chunks + chunk) * partial_size(padded_dim(model_));
    }

    // Of this thread: merged partials of a block's queries, then those of one chunk.
    float *own_partial(int index) const {
        const int64_t of_a_thread = 2 * ROWS_OF_A_BLOCK * group();
        return buffers_.partials + (Pool::number() * of_a_thread + index) * partial_size(padded_dim(model_));
    }

    void merge_block(const Layer &layer, const RowBlock &block, int chunk) const {
        for (int in_block = 0; in_block < block.num_rows; in_block++) {
            const int row = block.first_row + in_block;
            const Visible visible = visible_chunk(layer, row, chunk);
            if (visible.last - visible.first + visible.num_extras <= 0 || is_first(layer, row, chunk)) continue;
            for (int index = in_block * group(); index < (in_block + 1) * group(); index++)
                kernels_.merge_partial(own_partial(index), own_partial(ROWS_OF_A_BLOCK * group() + index),
                                       padded_dim(model_));
        }
    }

    // The partials of all chunks of one query, in order.
    void merge_query(const Layer &layer, int row, int64_t query) const {
        const Visible visible = visible_to(layer, row);
        const int skipped = pass_.firsts[row] / KV_CHUNK, first = first_key(visible) / KV_CHUNK - skipped;
        const int end = (visible.extra_start + visible.num_extras + KV_CHUNK - 1) / KV_CHUNK - skipped;
        float *merged = kept_partial(query, first);
        for (int chunk = first + 1; chunk < end; chunk++)
            kernels_.merge_partial(merged, kept_partial(query, chunk), padded_dim(model_));
        finish_query(row, int(query % model_.num_heads), merged);
    }

    void finish_query(int row, int head, const float *merged) const {
        float *out = buffers_.seen + (int64_t(row) * model_.num_heads + head) * model_.head_dim;
        const float inverse = 1.0f / merged[padded_dim(model_) + 1];
        for (int d = 0; d < model_.head_dim; d++) out[d] = merged[d] * inverse;
    }

    int group() const { return model_.num_heads / model_.num_kv_heads; }

    // The part of what a row sees that lies in a chunk.
    Visible visible_chunk(const Layer &layer, int row, int chunk) const {
        Visible visible = visible_to(layer, row);
        const int start = chunk * KV_CHUNK, end = start + KV_CHUNK;
        const int first_extra = std::clamp(start - visible.extra_start, 0, visible.num_extras);
        const int last_extra = std::clamp(end - visible.extra_start, 0, visible.num_extras);
        visible.last = std::min(visible.last, end);
        visible.first = std::min(std::max(visible.first, start), visible.last);
        visible.extras += first_extra;
        visible.num_extras = last_extra - first_extra;
        return visible;
    }

    // Whether this is the first chunk that a row sees anything of.
    bool is_first(const Layer &layer, int row, int chunk) const {
        return first_key(visible_to(layer, row)) / KV_CHUNK == chunk;
    }

    static int first_key(const Visible &visible) {
        return visible.first < visible.last ? visible.first : visible.extra_start;
    }

    // The keys that a row attends to in a layer.
    Visible visible_to(const Layer &layer, int row) const {
        const int begin = row ? pass_.extra_ends[row - 1] : 0, num_extras = pass_.extra_ends[row] - begin;
        const int run_end = pass_.runs[row];
        int first = pass_.firsts[row];
        if (layer.window) first += int(std::max<int64_t>(0, pass_.positions[row] - layer.window + 1));
        const int hidden = std::clamp(first - run_end, 0, num_extras);  // a window may begin among the extras
        return {pass_.pages + pass_.tables[row], std::min(first, run_end), run_end, pass_.extras + begin + hidden,
                num_extras - hidden,             run_end + hidden,         run_end};
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
    const AttentionPlan &plan_;
};

int64_t widest(const Model &model) {
    const int64_t entered = model.input_norm ? 2 * int64_t(model.width) : model.width;
    return std::max({entered, int64_t(model.ffn_width), int64_t(model.num_heads) * model.head_dim});
}

}  // namespace

void forward(const Model &model, const Pass &pass, const Kernels &kernels) {
    thread_local Scratch scratch;  // the caller's: another thread may be preparing its own pass
    const int64_t rows = std::max(pass.num_rows, pass.num_wanted);
    for (bool done = false; !done;) {
        const int threads = Pool::get().size();
        const AttentionPlan plan(model, pass, threads);
        const int64_t partials = plan.num_partials(model, rows, threads);
        Cutter counting(nullptr);
        Buffers(counting, model, rows, widest(model), kernels.lanes, partials);
        scratch.reserve(size_t(counting.used()));
        Cutter cutter(scratch.memory());
        Run run(model, pass, kernels, Buffers(cutter, model, rows, widest(model), kernels.lanes, partials), plan);
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
