// Attention over the paged KV cache, included by kernels.h.
//
// The keys of a sequence are processed in chunks of KV_CHUNK. Each chunk gives a partial softmax for every query: the
// maximum of its scores, the sum of its weights and the weighted values. Partials are merged in the order of chunks, so
// the result does not depend on which thread computed which chunk, or on what else is in the batch.
#pragma once

namespace {

constexpr int PREFETCHED_KEYS = 2 * KV_GROUP;  // how far keys are prefetched

// How LANES elements of the cache become floats. SCALED: every token has a scale of its own.
struct KvF32 {
    using Element = float;
    static constexpr bool SCALED = false;
    static INLINE F load(const float *at) { return V::load(at); }
};

struct KvF16 {
    using Element = uint16_t;
    static constexpr bool SCALED = false;
    static INLINE F load(const uint16_t *at) { return V::half(at); }
};

struct KvQ8 {
    using Element = int8_t;
    static constexpr bool SCALED = true;
    static INLINE F load(const int8_t *at) { return V::to_float(V::from_bytes(at)); }
};

// A page of one kv head: scales of its tokens (if SCALED), then elements.
template <class Kv> INLINE const float *page_scales(const uint8_t *block, const KvView &kv, int page) {
    return reinterpret_cast<const float *>(block + page * kv.page_bytes);
}

template <class Kv> INLINE const typename Kv::Element *page_elements(const uint8_t *block, const KvView &kv, int page) {
    const int64_t scales = Kv::SCALED ? int64_t(sizeof(float)) * kv.padded_size : 0;
    return reinterpret_cast<const typename Kv::Element *>(block + page * kv.page_bytes + scales);
}

// Scores of Q queries with KV_GROUP keys that lie side by side. Even and odd dimensions have sums of their own, so that
// consecutive multiply-adds do not wait for each other. `later_keys` and `values` are read soon: they are prefetched.
template <class Kv, int Q>
INLINE void score_group(const typename Kv::Element *keys, const float *scales, int64_t stride, int head_dim,
                        const float *const *queries, float *out, int out_stride,
                        const typename Kv::Element *later_keys, const typename Kv::Element *values) {
    constexpr int VECTORS = KV_GROUP / LANES;
    F sums[2][Q][VECTORS];
    for (int part = 0; part < 2; part++)
        for (int q = 0; q < Q; q++)
            for (int v = 0; v < VECTORS; v++) sums[part][q][v] = V::zero();
    for (int d = 0; d < head_dim; d += 2) {
        __builtin_prefetch(later_keys + d * KV_GROUP);
        __builtin_prefetch(values + d * KV_GROUP);
        if constexpr (sizeof(typename Kv::Element) == 4) {  // two dimensions are two cache lines
            __builtin_prefetch(later_keys + (d + 1) * KV_GROUP);
            __builtin_prefetch(values + (d + 1) * KV_GROUP);
        }
        UNROLL for (int part = 0; part < 2; part++, keys += stride)
            UNROLL for (int v = 0; v < VECTORS; v++) {
                const F key = Kv::load(keys + v * LANES);
                UNROLL for (int q = 0; q < Q; q++)
                    sums[part][q][v] = V::fma_one(sums[part][q][v], key, queries[q][d + part]);
            }
    }
    UNROLL for (int v = 0; v < VECTORS; v++) {
        const F scale = Kv::SCALED ? V::load(scales + v * LANES) : V::set(1.0f);
        UNROLL for (int q = 0; q < Q; q++) {
            const F sum = V::add(sums[0][q][v], sums[1][q][v]);
            V::store(out + q * out_stride + v * LANES, Kv::SCALED ? V::mul(sum, scale) : sum);
        }
    }
}

template <class Kv, int Q>
INLINE void score_chunk(const KvView &kv, const Visible &visible, const float *const *queries,
                        float (*scores)[KV_CHUNK]) {
    float group_scores[Q][KV_GROUP];
    const auto score = [&](int index, float *out, int out_stride) {
        const int page = visible.pages[index / kv.page_size], group = index % kv.page_size / KV_GROUP * KV_GROUP;
        const int later = index + PREFETCHED_KEYS < visible.end ? index + PREFETCHED_KEYS : index;
        const auto *keys = page_elements<Kv>(kv.keys, kv, page) + group;
        const auto *later_keys = page_elements<Kv>(kv.keys, kv, visible.pages[later / kv.page_size]);
        const auto *values = page_elements<Kv>(kv.values, kv, page) + group * kv.padded_dim;
        const float *scales = page_scales<Kv>(kv.keys, kv, page) + group;
        score_group<Kv, Q>(keys, scales, kv.padded_size, kv.head_dim, queries, out, out_stride, later_keys, values);
    };
    for (int index = visible.first; index < visible.last;) {
        const int within = index % kv.page_size, group = within / KV_GROUP * KV_GROUP;
        int count = group + KV_GROUP < kv.page_size ? group + KV_GROUP - within : kv.page_size - within;
        if (count > visible.last - index) count = visible.last - index;
        const int to = index - visible.first;
        if (count == KV_GROUP) {
            score(index, scores[0] + to, KV_CHUNK);
        } else {  // some of the group are not seen
            score(index, group_scores[0], KV_GROUP);
            for (int q = 0; q < Q; q++) memcpy(scores[q] + to, group_scores[q] + within - group, sizeof(float) * count);
        }
        index += count;
    }
    int done = -1;  // the group whose scores are there: nodes of a tree are neighbours
    for (int extra = 0; extra < visible.num_extras; extra++) {
        const int index = visible.extras[extra], within = index % kv.page_size, group = within / KV_GROUP * KV_GROUP;
        if (index - within + group != done) score(index, group_scores[0], KV_GROUP);
        done = index - within + group;
        for (int q = 0; q < Q; q++) scores[q][visible.last - visible.first + extra] = group_scores[q][within - group];
    }
}

// Turns scores into softmax weights relative to their maximum. Stores the maximum and the sum of the weights.
INLINE void softmax_chunk(float *scores, int count, float *max, float *sum) {
    const int padded = (count + LANES - 1) / LANES * LANES;
    for (int at = count; at < padded; at++) scores[at] = -INFINITY;
    F most = V::load(scores);
    for (int at = LANES; at < padded; at += LANES) most = V::max(most, V::load(scores + at));
    *max = V::most(most);
    const F peak = V::set(*max);
    F total = V::zero();
    for (int at = 0; at < padded; at += LANES) {
        const F weight = exponential(V::sub(V::load(scores + at), peak));
        V::store(scores + at, weight);
        total = V::add(total, weight);
    }
    *sum = V::sum(total);
}

// The values of all visible tokens in order, and their scales if there are some.
template <class Kv>
INLINE void find_values(const KvView &kv, const Visible &visible, const typename Kv::Element **values, float *scales) {
    const auto add = [&](int index) {
        const int page = visible.pages[index / kv.page_size], within = index % kv.page_size;
        *values++ = page_elements<Kv>(kv.values, kv, page) + int64_t(within) * kv.padded_dim;
        if constexpr (Kv::SCALED) *scales++ = page_scales<Kv>(kv.values, kv, page)[within];
    };
    for (int index = visible.first; index < visible.last; index++) add(index);
    for (int extra = 0; extra < visible.num_extras; extra++) add(visible.extras[extra]);
}

// Dimensions d to d + 16 * PARTS of the weighted values of Q queries, token after token: first those that all of them
// see, then what each sees beyond. (A weight of 0 would not do for the others: a value may be infinite.)
template <class Kv, int Q, int PARTS>
INLINE void mix_values(const typename Kv::Element *const *values, int seen_by_all, const Query *queries,
                       const float (*weights)[KV_CHUNK], int d) {
    constexpr int VECTORS = 16 * PARTS / LANES;
    F sums[Q][VECTORS];
    for (int q = 0; q < Q; q++)
        for (int v = 0; v < VECTORS; v++) sums[q][v] = V::zero();
    for (int at = 0; at < seen_by_all; at++)
        UNROLL for (int v = 0; v < VECTORS; v++) {
            const F value = Kv::load(values[at] + d + v * LANES);
            UNROLL for (int q = 0; q < Q; q++) sums[q][v] = V::fma_one(sums[q][v], value, weights[q][at]);
        }
    UNROLL for (int q = 0; q < Q; q++)
        for (int at = seen_by_all; at < queries[q].num_keys; at++)
            UNROLL for (int v = 0; v < VECTORS; v++)
                sums[q][v] = V::fma_one(sums[q][v], Kv::load(values[at] + d + v * LANES), weights[q][at]);
    UNROLL for (int q = 0; q < Q; q++)
        UNROLL for (int v = 0; v < VECTORS; v++) V::store(queries[q].partial + d + v * LANES, sums[q][v]);
}

template <class Kv, int Q>
void attend_with(const KvView &kv, const Visible &visible, const Query *queries) {
    alignas(64) float scores[Q][KV_CHUNK];
    const float *vectors[Q];
    for (int q = 0; q < Q; q++) vectors[q] = queries[q].vector;
    score_chunk<Kv, Q>(kv, visible, vectors, scores);
    int seen_by_all = KV_CHUNK;
    for (int q = 0; q < Q; q++) {
        const int count = queries[q].num_keys;
        float *max_and_sum = queries[q].partial + kv.padded_dim;
        softmax_chunk(scores[q], count, max_and_sum, max_and_sum + 1);
        if (count < seen_by_all) seen_by_all = count;
    }
    const typename Kv::Element *values[KV_CHUNK];
    float scales[KV_CHUNK];
    find_values<Kv>(kv, visible, values, scales);
    if constexpr (Kv::SCALED)
        for (int q = 0; q < Q; q++)
            for (int at = 0; at < queries[q].num_keys; at++) scores[q][at] *= scales[at];
    constexpr int MOST = V::SUMS / Q * LANES / 16;  // as many sums as fit into the registers
    constexpr int PARTS = MOST >= 4 ? 4 : MOST >= 2 ? 2 : 1;
    int d = 0;
    for (; d + 16 * PARTS <= kv.padded_dim; d += 16 * PARTS) mix_values<Kv, Q, PARTS>(values, seen_by_all, queries, scores, d);
    for (; d < kv.padded_dim; d += 16) mix_values<Kv, Q, 1>(values, seen_by_all, queries, scores, d);
}

template <class Kv, int Q = V::QUERIES>
INLINE void attend_by_count(const KvView &kv, const Visible &visible, const Query *queries, int num_queries) {
    if constexpr (Q > 0) {
        if (num_queries == Q) attend_with<Kv, Q>(kv, visible, queries);
        else attend_by_count<Kv, Q - 1>(kv, visible, queries, num_queries);
    }
}

void attend_chunk(const KvView &kv, const Visible &visible, const Query *queries, int num_queries) {
    switch (kv.type) {
        case KV_F32: return attend_by_count<KvF32>(kv, visible, queries, num_queries);
        case KV_F16: return attend_by_count<KvF16>(kv, visible, queries, num_queries);
        case KV_Q8: return attend_by_count<KvQ8>(kv, visible, queries, num_queries);
    }
}

void merge_partial(float *merged, const float *partial, int padded_dim) {
    float *stats = merged + padded_dim;
    const float *other = partial + padded_dim;
    const float peak = stats[0] > other[0] ? stats[0] : other[0];
    float shifts[LANES] = {stats[0] - peak, other[0] - peak}, factors[LANES];
    V::store(factors, exponential(V::load(shifts)));
    for (int d = 0; d < padded_dim; d += LANES) {
        const F kept = V::mul_one(V::load(merged + d), factors[0]);
        V::store(merged + d, V::fma_one(kept, V::load(partial + d), factors[1]));
    }
    stats[0] = peak;
    stats[1] = stats[1] * factors[0] + other[1] * factors[1];
}

// A float with 12 significant bits, not below x (x >= 0): its products with int8 are exact, so values that are read back
// from the cache and stored again keep their bits. NaN and infinity stay broken.
INLINE float round_scale(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (bits >= 0x7F000000) return NAN;
    bits = (bits + 0xFFF) & ~uint32_t(0xFFF);
    memcpy(&x, &bits, 4);
    return x;
}

// One key or value to the cache, `stride` elements from one dimension to the next.
void store_row(const KvView &kv, uint8_t *block, int token, const float *x, int64_t at, int64_t stride) {
    const int page = token / kv.page_size, within = token % kv.page_size;
    uint8_t *start = block + page * kv.page_bytes;
    if (kv.type == KV_F32) {
        float *to = reinterpret_cast<float *>(start) + at;
        for (int d = 0; d < kv.head_dim; d++) to[d * stride] = x[d];
    } else if (kv.type == KV_F16) {
        uint16_t *to = reinterpret_cast<uint16_t *>(start) + at;
        for (int d = 0; d < kv.head_dim; d += LANES) {
            const int count = kv.head_dim - d < LANES ? kv.head_dim - d : LANES;
            float lanes[LANES] = {};
            uint16_t halves[LANES];
            memcpy(lanes, x + d, sizeof(float) * count);
            V::store_half(halves, V::load(lanes));
            for (int lane = 0; lane < count; lane++) to[(d + lane) * stride] = halves[lane];
        }
    } else {
        float most = 0.0f, broken = 0.0f;
        for (int d = 0; d < kv.head_dim; d++) {
            most = fabsf(x[d]) > most ? fabsf(x[d]) : most;
            broken += x[d] * 0.0f;  // stays 0 unless there is a NaN or an infinity
        }
        const float scale = broken == 0.0f ? round_scale(most / 127.0f) : NAN;
        int8_t *to = reinterpret_cast<int8_t *>(start + sizeof(float) * kv.padded_size) + at;
        for (int d = 0; d < kv.head_dim; d++) to[d * stride] = scale > 0.0f ? int8_t(nearbyintf(x[d] / scale)) : 0;
        reinterpret_cast<float *>(start)[within] = scale;
    }
}

void store_kv(const KvView &kv, int token, const float *key, const float *value) {
    const int within = token % kv.page_size;
    store_row(kv, kv.keys, token, key, within, kv.padded_size);
    store_row(kv, kv.values, token, value, int64_t(within) * kv.padded_dim, 1);
}

}  // namespace
