// One forward pass over a mixed batch: prompt chunks, single tokens, chains and trees. Throws std::bad_alloc.
// These structures are the plain C interface; native/binding.py has the same fields in the same order.
#pragma once

#include <stdint.h>

#include "table.h"

struct Layer {
    Matrix queries, keys, values, attention_out, gate, up, down;
    const float *attention_norm, *ffn_norm;
    const float *query_bias, *key_bias, *value_bias;  // or null
    const float *query_norm, *key_norm;               // of each head, or null
    int64_t window;                                   // positions a query sees, its own included; 0: all
};

struct Model {
    int32_t num_layers, width, num_heads, num_kv_heads, head_dim, ffn_width, num_columns;
    int32_t rotary_pairs, interleaved;  // dimensions (2i, 2i + 1) turn together, or (i, i + pairs)
    int32_t page_size;
    float eps;
    int32_t keeps_normed;  // of a head: what passes its first layer by is normed, too
    int32_t kv_type;       // see KvType
    Matrix embedding, output;
    const float *output_norm;
    const float *input_norm;  // of a head: for `Pass::inputs`; null for a model, which reads tokens alone
    const Layer *layers;
    uint8_t *kv_cache;  // [pages, layers, keys | values, kv heads, block]: see KvView
    int64_t num_pages;
};

struct Pass {
    int32_t num_rows, num_layers;  // layers to go through: all, or the first few
    const int32_t *tokens, *positions;
    const float *inputs;        // [rows, width] of a head: hidden states beside the tokens, see Run::enter
    const int32_t *places;      // where the row's own key and value go: page * page_size + place within
    const int32_t *pages;       // page tables of the sequences, one after the other
    const int32_t *tables;      // [rows] where the row's table begins in `pages`
    const int32_t *firsts;      // [rows] the first token of the sequence that the row sees; positions count from there
    const int32_t *runs;        // [rows] where what it sees ends
    const int32_t *extra_ends;  // [rows] where the row's own list ends in `extras`; it begins where the last one ended
    const int32_t *extras;      // single tokens it sees beside them: indices in the sequence, of consecutive positions
    const float *turns;         // [positions, pairs, 2]: cosine and sine
    int32_t num_wanted, num_hidden;
    const int32_t *wanted;         // rows whose logits are wanted
    float *logits;                 // [wanted, columns]
    const int32_t *hidden_layers;  // 0: after the embedding, n: after layer n, num_layers + 1: after the output norm
    float *const *hidden;          // [rows, width] each
};

void forward(const Model &model, const Pass &pass, const Kernels &kernels);

// rows [count, columns] times a matrix -> out [count, matrix rows]
void multiply_rows(const Matrix &matrix, const float *rows, int count, float *out, const Kernels &kernels);
