// What the parts of the library hand to each other: a packed matrix, rounded activations, and the kernels of one
// instruction set as a table of functions.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "sampling_table.h"

// Numbers of GGUF's own types.
enum Type : int32_t {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
};

constexpr int BLOCK = 32;         // weights of a row that share a scale
constexpr int SUPER = 256;        // weights of a row that share a scale of scales (the K types)
constexpr int MAX_LANES = 16;     // outputs side by side in a tile, at most
constexpr int KV_GROUP = 16;      // keys of a page that lie side by side
constexpr int KV_CHUNK = 64;      // keys of one partial softmax
constexpr int MAX_QUERIES = 8;    // queries that one call of `attend_chunk` takes, at most

// A matrix in tiles of `lanes` rows. In a tile, what belongs to one block of inputs lies together, row beside row, so
// that one load serves all rows of the tile (see pack.cpp).
struct Matrix {
    const uint8_t *data;
    int32_t type;
    int32_t rows;     // outputs
    int32_t columns;  // inputs
    int32_t padding;
    int64_t tile_bytes;
};

// How activations are rounded for a type of weights.
enum Rounding : int32_t { NONE = 0, BY_BLOCK = 1, BY_SUPER = 2 };

static inline Rounding rounding_of(int32_t type) {
    if (type == F32 || type == F16) return NONE;
    return type >= Q4_K ? BY_SUPER : BY_BLOCK;
}

// Rows of activations, as numbers and rounded to int8 with a scale per block or super-block.
struct Activations {
    const float *values;    // [rows, columns]
    const int8_t *rounded;  // [rows, columns]
    const float *scales;    // [rows, columns / 32], the same for all blocks of a super-block
    const float *weighted;  // [rows, columns / 32]: scale times the sum of the block (by block only)
    const int8_t *digits;   // [rows, columns / 256, 16]: sums of eight blocks, low digits (of 64), then high (by super)
    const int32_t *starts;  // [rows, columns / 16, lanes]: where sums of 16 products less 32 begin (by super)
    const int32_t *lowered;  // [rows, columns / 32]: -128 times the sum of the block (by block only)
    int64_t columns;        // of a row
};

// The same, to be written.
struct Rounded {
    int8_t *rounded;
    float *scales, *weighted;
    int8_t *digits;
    int32_t *starts, *lowered;
};

// The keys that a query attends to: a run of its sequence, then single tokens (its ancestors in a tree), in order.
struct Visible {
    const int32_t *pages;   // of the sequence
    int32_t first, last;    // the run: first <= index < last
    const int32_t *extras;  // indices in the sequence
    int32_t num_extras;
    int32_t extra_start;  // the place of the first extra in the order of keys, which is that of positions
    int32_t end;          // of the keys that are read after these, for prefetching
};

// How the KV cache stores numbers. Q8: int8, with a scale for every token and head.
enum KvType : int32_t { KV_F32 = 0, KV_F16 = 1, KV_Q8 = 2 };

// The cache of one layer and one kv head. Page p begins p * page_bytes behind `keys` and `values`.
struct KvView {
    uint8_t *keys;    // [scales of its tokens, if Q8], [head_dim, padded_size]
    uint8_t *values;  // [scales of its tokens, if Q8], [padded_size, padded_dim]
    int64_t page_bytes;
    int32_t type;
    int32_t page_size, padded_size;  // tokens of a page; the same, rounded up to KV_GROUP
    int32_t head_dim, padded_dim;    // the same, rounded up to 16
};

// A partial softmax of one query: weighted values [padded_dim], maximum of the scores, sum of the weights.
static inline int64_t partial_size(int64_t padded_dim) { return padded_dim + 16; }

struct Query {
    const float *vector;  // [head_dim]
    float *partial;       // where its partial softmax goes
    int32_t num_keys;     // of those that are visible, the first so many are for this query
};

struct Kernels {
    const char *name;
    int lanes;
    int queries;  // that one call of `attend_chunk` takes
    // Tiles first..last-1 of a matrix times `rows` rows. out[row * stride + output] = product (+ bias), or += product.
    void (*multiply)(const Matrix &matrix, int first, int last, const Activations &rows, int num_rows, float *out,
                     int64_t stride, const float *bias, bool add);
    void (*round_row)(const float *values, int count, Rounding how, const Rounded &out);
    // out = x * scale * weight; `scale_of` gives one over the root mean square of x.
    float (*scale_of)(const float *x, float eps, int count);
    void (*norm)(const float *x, float scale, const float *weight, int count, float *out);
    void (*rotate)(float *x, const float *table, int num_pairs, bool interleaved);
    // gate = silu(gate) * up
    void (*gate)(float *gate, const float *up, int count);
    // Partial softmaxes of up to `queries` queries over a chunk of keys.
    void (*attend_chunk)(const KvView &kv, const Visible &visible, const Query *queries, int num_queries);
    // merged = the softmax of the keys behind `merged` and those behind `partial`
    void (*merge_partial)(float *merged, const float *partial, int padded_dim);
    // Rounds a key and a value to the type of the cache and stores them. token: page * page_size + place in the page.
    void (*store_kv)(const KvView &kv, int token, const float *key, const float *value);
    SamplingKernels sampling;
};
