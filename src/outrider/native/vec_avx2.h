// Eight lanes of AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

struct V {
    static constexpr bool HAS_MATMUL = false;  // see vec_neon.h
    static constexpr int GROUP = 4;  // rows whose sums fit into the registers beside the weights
    static constexpr int LANES = 8;
    static constexpr int AHEAD = 2560, LOCALITY = 3;  // how far weights are prefetched, and whether they are kept near
    static constexpr int QUERIES = 3;  // of one pass over keys, and vectors of sums that fit into the registers with them
    static constexpr int SUMS = 12;
    using F = __m256;
    using I = __m256i;
    using B = __m256i;  // four bytes for each lane

    static F zero() { return _mm256_setzero_ps(); }
    static F set(float value) { return _mm256_set1_ps(value); }
    static F load(const float *at) { return _mm256_loadu_ps(at); }
    static void store(float *at, F x) { _mm256_storeu_ps(at, x); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F min(F a, F b) { return _mm256_min_ps(a, b); }
    static F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
    static F fma(F sum, F a, F b) { return _mm256_fmadd_ps(a, b, sum); }
    static float sum(F a) {
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
    }
    static float most(F a) {
        __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        four = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
    }
    static F mul_one(F a, float b) { return mul(a, set(b)); }
    static F fma_one(F sum, F a, float b) { return fma(sum, a, set(b)); }
    static F half(const uint16_t *at) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at))); }

    // To half precision; what is too large becomes the largest number.
    static void store_half(uint16_t *at, F x) {
        const F most = set(65504.0f);
        x = _mm256_min_ps(most, _mm256_max_ps(sub(zero(), most), x));  // in this order a NaN stays one
        _mm_storeu_si128(reinterpret_cast<__m128i *>(at), _mm256_cvtps_ph(x, 8));
    }

    static I int_zero() { return _mm256_setzero_si256(); }
    static I int_add(I a, I b) { return _mm256_add_epi32(a, b); }
    static int32_t int_sum(I a) {
        __m128i four = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        four = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
        return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 1)));
    }
    static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
    static I to_int(F x) { return _mm256_cvtps_epi32(x); }  // to the nearest, ties to even
    static F exponent(I power) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(power, _mm256_set1_epi32(127)), 23));
    }
    static void store_bytes(int8_t *at, I x) {
        const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i *>(at), _mm_packs_epi16(pairs, pairs));
    }

    static I from_bytes(const int8_t *at) {
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(at)));
    }

    static constexpr int32_t BIAS_BITS = 0;  // converting is cheap here (see vec_neon.h)
    static I start() { return int_zero(); }
    static I start_at(const int32_t *at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)); }
    static F finish(I sum) { return to_float(sum); }
    static F upper_half(const uint16_t *at) {
        const I wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }

    static B bytes(const uint8_t *at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)); }
    static B eights(const uint8_t *at) { return bytes(at); }  // weights with a sign, see vec_avx512.h
    static I start_eights(const int32_t *) { return start(); }
    // There are no shifts of bytes: pairs are shifted, and what came over from the neighbour is masked away.
    static B only(B x, int mask) { return _mm256_and_si256(x, _mm256_set1_epi8(char(mask))); }
    static B low(B x) { return only(x, 0x0F); }
    static B high(B x) { return only(_mm256_srli_epi16(x, 4), 0x0F); }
    static B both(B a, B b) { return _mm256_or_si256(a, b); }
    static B six(B x) { return only(x, 0x3F); }
    static B upper(B a, B b, B c) {
        return both(both(only(_mm256_srli_epi16(a, 6), 0x03), only(_mm256_srli_epi16(b, 4), 0x0C)),
                    only(_mm256_srli_epi16(c, 2), 0x30));
    }
    template <int from> static B lift(B x, uint8_t mask) {
        if constexpr (from > 4) return only(_mm256_srli_epi16(x, from - 4), mask);
        else return only(_mm256_slli_epi16(x, 4 - from), mask);
    }

    using Row = const int8_t *;
    static Row row(const int8_t *at) { return at; }
    static Row short_row(const int8_t *at) { return at; }
    template <int g> static B four(Row row) {
        int32_t bits;
        memcpy(&bits, row + 4 * g, 4);
        return _mm256_set1_epi32(bits);
    }
    // Sums of two products are 16 bits wide on the way: weights must be at most 128. The instruction takes unsigned weights:
    // signs go over to the activations.
    static constexpr bool IN_PAIRS = true;
    template <int g, bool is_signed = false> static I pairs(B weights, Row row) {
        if constexpr (is_signed)
            return _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(four<g>(row), weights));
        else return _mm256_maddubs_epi16(weights, four<g>(row));
    }
    static I add_pairs(I a, I b) { return _mm256_add_epi16(a, b); }
    static I widen(I sum, I pairs) { return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))); }
    static void make_now(I &sum) { __asm__("" : "+x"(sum)); }  // see kernels.h
    template <int g> static I dot(I sum, B weights, Row row) { return widen(sum, pairs<g>(weights, row)); }
};

}  // namespace
