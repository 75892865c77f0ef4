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

// KV_GROUP keys that lie side by side, and what is prefetched while they are read: later keys and the values of these.
template <class Kv> struct KeyGroup {
    const typename Kv::Element *keys, *later_keys, *values;
    const float *scales;
};

// Where a token of a sequence lies. Pages have any size, and dividing takes as long as a few keys do: a place is moved.
struct Place {
    int page;  // the how-manieth of the sequence
    int within;
    static INLINE Place of(const KvView &kv, int index) {
        const int page = index / kv.page_size;
        return {page, index - page * kv.page_size};
    }
    INLINE Place after(const KvView &kv, int count) const {
        Place place{page, within + count};
        for (; place.within >= kv.page_size; place.within -= kv.page_size) place.page++;
        return place;
    }
};

// The group that token `index` lies in, at `place`.
template <class Kv> INLINE KeyGroup<Kv> key_group(const KvView &kv, const Visible &visible, int index, Place place) {
    const int page = visible.pages[place.page], group = place.within / KV_GROUP * KV_GROUP;
    const Place later = index + PREFETCHED_KEYS < visible.end ? place.after(kv, PREFETCHED_KEYS) : place;
    return {page_elements<Kv>(kv.keys, kv, page) + group,
            page_elements<Kv>(kv.keys, kv, visible.pages[later.page]),
            page_elements<Kv>(kv.values, kv, page) + group * kv.padded_dim, page_scales<Kv>(kv.keys, kv, page) + group};
}

// Groups that are scored at a time: with wide vectors, one would load a number of a query for every multiply-add.
constexpr int GROUPS = LANES == KV_GROUP ? 2 : 1;

// Scores of Q queries with some groups of keys. Even and odd dimensions have sums of their own, so that consecutive
// multiply-adds do not wait for each other.
template <class Kv, int Q, int COUNT>
INLINE void score_groups(const KeyGroup<Kv> *groups, int64_t stride, int head_dim, const float *const *queries, float *out,
                         int out_stride) {
    constexpr int VECTORS = KV_GROUP / LANES;
    F sums[2][Q][COUNT * VECTORS];
    for (int part = 0; part < 2; part++)
        for (int q = 0; q < Q; q++)
            for (int v = 0; v < COUNT * VECTORS; v++) sums[part][q][v] = V::zero();
    for (int d = 0; d < head_dim; d += 2) {
        UNROLL for (int g = 0; g < COUNT; g++) {
            __builtin_prefetch(groups[g].later_keys + d * KV_GROUP);
            __builtin_prefetch(groups[g].values + d * KV_GROUP);
            if constexpr (sizeof(typename Kv::Element) == 4) {  // two dimensions are two cache lines
                __builtin_prefetch(groups[g].later_keys + (d + 1) * KV_GROUP);
                __builtin_prefetch(groups[g].values + (d + 1) * KV_GROUP);
            }
        }
        UNROLL for (int part = 0; part < 2; part++) {
            F keys[COUNT * VECTORS];
            UNROLL for (int v = 0; v < COUNT * VECTORS; v++)
                keys[v] = Kv::load(groups[v / VECTORS].keys + (d + part) * stride + v % VECTORS * LANES);
            UNROLL for (int q = 0; q < Q; q++)
                UNROLL for (int v = 0; v < COUNT * VECTORS; v++)
                    sums[part][q][v] = V::fma_one(sums[part][q][v], keys[v], queries[q][d + part]);
        }
    }
    UNROLL for (int v = 0; v < COUNT * VECTORS; v++) {
        const F scale = Kv::SCALED ? V::load(groups[v / VECTORS].scales + v % VECTORS * LANES) : V::set(1.0f);
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
    const auto is_whole = [&](int index, Place place) {
        return place.within % KV_GROUP == 0 && place.within + KV_GROUP <= kv.page_size && index + KV_GROUP <= visible.last;
    };
    const auto score = [&](int index, Place place) {
        const KeyGroup<Kv> group = key_group<Kv>(kv, visible, index, place);
        score_groups<Kv, Q, 1>(&group, kv.padded_size, kv.head_dim, queries, group_scores[0], KV_GROUP);
    };
    Place place = Place::of(kv, visible.first);
    for (int index = visible.first; index < visible.last;) {
        float *to = scores[0] + index - visible.first;
        KeyGroup<Kv> groups[GROUPS];
        int whole = 0;
        for (; whole < GROUPS && is_whole(index, place); index += KV_GROUP, place = place.after(kv, KV_GROUP))
            groups[whole++] = key_group<Kv>(kv, visible, index, place);
        if (whole == GROUPS) score_groups<Kv, Q, GROUPS>(groups, kv.padded_size, kv.head_dim, queries, to, KV_CHUNK);
        else if (whole) score_groups<Kv, Q, 1>(groups, kv.padded_size, kv.head_dim, queries, to, KV_CHUNK);
        if (whole) continue;
        const int within = place.within, group = within / KV_GROUP * KV_GROUP;  // some of it are not seen
        int count = group + KV_GROUP < kv.page_size ? group + KV_GROUP - within : kv.page_size - within;
        if (count > visible.last - index) count = visible.last - index;
        score(index, place);
        for (int q = 0; q < Q; q++) memcpy(to + q * KV_CHUNK, group_scores[q] + within - group, sizeof(float) * count);
        index += count;
        place = place.after(kv, count);
    }
    int done = -1;  // the group whose scores are there: nodes of a tree are neighbours
    for (int extra = 0; extra < visible.num_extras; extra++) {
        const int index = visible.extras[extra];
        const Place at = Place::of(kv, index);
        const int group = at.within / KV_GROUP * KV_GROUP;
        if (index - at.within + group != done) score(index, at);
        done = index - at.within + group;
        for (int q = 0; q < Q; q++) scores[q][visible.last - visible.first + extra] = group_scores[q][at.within - group];
    }
}

// Turns `padded` scores (whole vectors) of Q queries into softmax weights relative to their maximum, and stores the
// maximum and the sum of the weights behind each partial. Queries side by side: one alone would wait for itself.
template <int Q> INLINE void softmax(float (*scores)[KV_CHUNK], int padded, const Query *queries, int padded_dim) {
    F peaks[Q], totals[Q];
    UNROLL for (int q = 0; q < Q; q++) {
        F most = V::load(scores[q]);
        for (int at = LANES; at < padded; at += LANES) most = V::max(most, V::load(scores[q] + at));
        const float peak = V::most(most);
        queries[q].partial[padded_dim] = peak;
        peaks[q] = V::set(peak);
        totals[q] = V::zero();
    }
    for (int at = 0; at < padded; at += LANES)
        UNROLL for (int q = 0; q < Q; q++) {
            const F weight = exponential(V::sub(V::load(scores[q] + at), peaks[q]));
            V::store(scores[q] + at, weight);
            totals[q] = V::add(totals[q], weight);
        }
    UNROLL for (int q = 0; q < Q; q++) queries[q].partial[padded_dim + 1] = V::sum(totals[q]);
}

template <int Q> INLINE void softmax_chunk(float (*scores)[KV_CHUNK], const Query *queries, int padded_dim) {
    int padded[Q];
    bool alike = true;
    for (int q = 0; q < Q; q++) {
        padded[q] = (queries[q].num_keys + LANES - 1) / LANES * LANES;
        for (int at = queries[q].num_keys; at < padded[q]; at++) scores[q][at] = -INFINITY;
        alike = alike && padded[q] == padded[0];
    }
    if (alike) return softmax<Q>(scores, padded[0], queries, padded_dim);
    for (int q = 0; q < Q; q++) softmax<1>(scores + q, padded[q], queries + q, padded_dim);
}

// The values of all visible tokens in order, and their scales if there are some.
template <class Kv>
INLINE void find_values(const KvView &kv, const Visible &visible, const typename Kv::Element **values, float *scales) {
    const auto add = [&](Place place, int count) {  // tokens of one page
        const int page = visible.pages[place.page];
        const auto *from = page_elements<Kv>(kv.values, kv, page) + int64_t(place.within) * kv.padded_dim;
        for (int token = 0; token < count; token++) *values++ = from + int64_t(token) * kv.padded_dim;
        if constexpr (Kv::SCALED) {
            memcpy(scales, page_scales<Kv>(kv.values, kv, page) + place.within, sizeof(float) * count);
            scales += count;
        }
    };
    Place place = Place::of(kv, visible.first);
    for (int left = visible.last - visible.first; left > 0;) {
        const int left_in_page = kv.page_size - place.within, count = left < left_in_page ? left : left_in_page;
        add(place, count);
        place = place.after(kv, count);
        left -= count;
    }
    for (int extra = 0; extra < visible.num_extras; extra++) add(Place::of(kv, visible.extras[extra]), 1);
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
    softmax_chunk<Q>(scores, queries, kv.padded_dim);
    int seen_by_all = KV_CHUNK;
    for (int q = 0; q < Q; q++)
        if (queries[q].num_keys < seen_by_all) seen_by_all = queries[q].num_keys;
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
    const F own_factor = exponential(V::set(stats[0] - peak)), factor = exponential(V::set(other[0] - peak));
    for (int d = 0; d < padded_dim; d += LANES) {
        const F kept = V::mul(V::load(merged + d), own_factor);
        V::store(merged + d, V::fma(kept, V::load(partial + d), factor));
    }
    float sum[LANES];
    V::store(sum, V::add(V::mul(V::set(stats[1]), own_factor), V::mul(V::set(other[1]), factor)));
    stats[0] = peak;
    stats[1] = sum[0];
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
