// Sixteen lanes of AVX-512, with the dot-product instructions (VNNI) where the file that includes this is compiled for them.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

struct V {
    static constexpr bool HAS_MATMUL = false;  // see vec_neon.h
    static constexpr int GROUP = 8;  // rows whose sums fit into the registers beside the weights
    static constexpr int LANES = 16;
    static constexpr int AHEAD = 2560, LOCALITY = 3;  // how far weights are prefetched, and whether they are kept near
    static constexpr int QUERIES = 6;  // of one pass over keys, and vectors of sums that fit into the registers with them
    static constexpr int SUMS = 24;
    using F = __m512;
    using I = __m512i;
    using B = __m512i;  // four bytes for each lane

    static F zero() { return _mm512_setzero_ps(); }
    static F set(float value) { return _mm512_set1_ps(value); }
    static F load(const float *at) { return _mm512_loadu_ps(at); }
    static void store(float *at, F x) { _mm512_storeu_ps(at, x); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F min(F a, F b) { return _mm512_min_ps(a, b); }
    static F abs(F a) { return _mm512_abs_ps(a); }
    static F fma(F sum, F a, F b) { return _mm512_fmadd_ps(a, b, sum); }
    static float sum(F a) { return _mm512_reduce_add_ps(a); }
    static float most(F a) { return _mm512_reduce_max_ps(a); }
    static F mul_one(F a, float b) { return mul(a, set(b)); }
    static F fma_one(F sum, F a, float b) { return fma(sum, a, set(b)); }
    static F half(const uint16_t *at) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
    }

    // To half precision; what is too large becomes the largest number.
    static void store_half(uint16_t *at, F x) {
        const F most = set(65504.0f);
        x = _mm512_min_ps(most, _mm512_max_ps(sub(zero(), most), x));  // in this order a NaN stays one
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), _mm512_cvtps_ph(x, 8));
    }

    static I int_zero() { return _mm512_setzero_si512(); }
    static I int_add(I a, I b) { return _mm512_add_epi32(a, b); }
    static int32_t int_sum(I a) { return _mm512_reduce_add_epi32(a); }
    static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
    static I to_int(F x) { return _mm512_cvtps_epi32(x); }  // to the nearest, ties to even
    static F exponent(I power) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(power, _mm512_set1_epi32(127)), 23));
    }
    static void store_bytes(int8_t *at, I x) {
        _mm_storeu_si128(reinterpret_cast<__m128i *>(at), _mm512_cvtepi32_epi8(x));
    }

    static I from_bytes(const int8_t *at) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
    }

    static constexpr int32_t BIAS_BITS = 0;  // converting is cheap here (see vec_neon.h)
    static I start() { return int_zero(); }
    static I start_at(const int32_t *at) { return _mm512_loadu_si512(at); }
    static F finish(I sum) { return to_float(sum); }
    static F upper_half(const uint16_t *at) {
        const I wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }

    static B bytes(const uint8_t *at) { return _mm512_loadu_si512(at); }
    // There are no shifts of bytes: pairs are shifted, and what came over from the neighbour is masked away.
    static B only(B x, int mask) { return _mm512_and_si512(x, _mm512_set1_epi8(char(mask))); }
    static B low(B x) { return only(x, 0x0F); }
    static B high(B x) { return only(_mm512_srli_epi16(x, 4), 0x0F); }
    static B both(B a, B b) { return _mm512_or_si512(a, b); }
    static B six(B x) { return only(x, 0x3F); }
    static B upper(B a, B b, B c) {
        return both(both(only(_mm512_srli_epi16(a, 6), 0x03), only(_mm512_srli_epi16(b, 4), 0x0C)),
                    only(_mm512_srli_epi16(c, 2), 0x30));
    }
    template <int from> static B lift(B x, uint8_t mask) {
        if constexpr (from > 4) return only(_mm512_srli_epi16(x, from - 4), mask);
        else return only(_mm512_slli_epi16(x, 4 - from), mask);
    }

    using Row = const int8_t *;
    static Row row(const int8_t *at) { return at; }
    static Row short_row(const int8_t *at) { return at; }
    template <int g> static B four(Row row) {
        int32_t bits;
        memcpy(&bits, row + 4 * g, 4);
        return _mm512_set1_epi32(bits);
    }
#ifdef __AVX512VNNI__
    static constexpr bool IN_PAIRS = false;
    // Written out, since compilers load what is multiplied by an instruction of its own.
    template <int g> static I dot(I sum, B weights, Row row) {
        struct Four {
            int8_t x[4];
        };
        __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(reinterpret_cast<const Four *>(row)[g]));
        return sum;
    }
    template <int g> static I dot_in_order(I sum, B weights, const Row &row) { return dot<g>(sum, weights, row); }
    // The instruction takes unsigned weights: those with a sign are made 128 too large, and their sums begin that much
    // lower. Both are exact.
    static B eights(const uint8_t *at) { return _mm512_xor_si512(bytes(at), _mm512_set1_epi8(char(0x80))); }
    static I start_eights(const int32_t *lowered) { return _mm512_set1_epi32(*lowered); }
    template <int g> static I dot_signed(I sum, B weights, Row row) { return dot<g>(sum, weights, row); }
#else
    static B eights(const uint8_t *at) { return bytes(at); }
    static I start_eights(const int32_t *) { return start(); }
    static constexpr bool IN_PAIRS = true;  // see vec_avx2.h
    // The instruction takes unsigned weights: signs go over to the activations.
    template <int g> static B turned(B weights, Row row) {
        const B inputs = four<g>(row);
        return _mm512_mask_sub_epi8(inputs, _mm512_movepi8_mask(weights), _mm512_setzero_si512(), inputs);
    }
    template <int g, bool is_signed = false> static I pairs(B weights, Row row) {
        if constexpr (is_signed) return _mm512_maddubs_epi16(_mm512_abs_epi8(weights), turned<g>(weights, row));
        else return _mm512_maddubs_epi16(weights, four<g>(row));
    }
    static I add_pairs(I a, I b) { return _mm512_add_epi16(a, b); }
    static I widen(I sum, I pairs) { return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1))); }
    static void make_now(I &sum) { __asm__("" : "+v"(sum)); }  // see kernels.h
    template <int g> static I dot(I sum, B weights, Row row) { return widen(sum, pairs<g>(weights, row)); }
#endif
};

}  // namespace
