// Four lanes of NEON with the dot-product instructions (Armv8.2 and later), and with matrix products of int8 where the
// file that includes this is compiled for them (i8mm, Armv8.6).
#pragma once

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

namespace {

struct V {
    static constexpr int GROUP = 8;  // rows whose sums fit into the registers beside the weights
    static constexpr bool IN_PAIRS = false;  // there are instructions for whole dot products
    static constexpr int LANES = 4;
    static constexpr int AHEAD = 640, LOCALITY = 0;  // how far weights are prefetched, and whether they are kept: they
    // would drive from the caches what is needed again, and Python takes a third longer beside a pass
    static constexpr int QUERIES = 3;  // of one pass over keys, and vectors of sums that fit into the registers with them
    static constexpr int SUMS = 24;
    using F = float32x4_t;
    using I = int32x4_t;
    using B = uint8x16_t;  // four bytes for each lane

    static F zero() { return vdupq_n_f32(0.0f); }
    static F set(float value) { return vdupq_n_f32(value); }
    static F load(const float *at) { return vld1q_f32(at); }
    static void store(float *at, F x) { vst1q_f32(at, x); }
    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F sub(F a, F b) { return vsubq_f32(a, b); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    static F div(F a, F b) { return vdivq_f32(a, b); }
    static F max(F a, F b) { return vmaxq_f32(a, b); }
    static F min(F a, F b) { return vminq_f32(a, b); }
    static F abs(F a) { return vabsq_f32(a); }
    static F fma(F sum, F a, F b) { return vfmaq_f32(sum, a, b); }
    static float sum(F a) { return vaddvq_f32(a); }
    static float most(F a) { return vmaxvq_f32(a); }
    // One number for all lanes: read as it is used, since a load that spreads it costs as much as the arithmetic.
    static F mul_one(F a, float b) { return vmulq_n_f32(a, b); }
    static F fma_one(F sum, F a, float b) { return vfmaq_n_f32(sum, a, b); }
    static F half(const uint16_t *at) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))); }

    // To half precision; what is too large becomes the largest number, and a NaN stays one.
    static void store_half(uint16_t *at, F x) {
        const F most = set(65504.0f);
        vst1_u16(at, vreinterpret_u16_f16(vcvt_f16_f32(vminq_f32(most, vmaxq_f32(vnegq_f32(most), x)))));
    }

    static I int_zero() { return vdupq_n_s32(0); }
    static I int_add(I a, I b) { return vaddq_s32(a, b); }
    static int32_t int_sum(I a) { return vaddvq_s32(a); }
    static I to_int(F x) { return vcvtnq_s32_f32(x); }  // to the nearest, ties to even
    static F exponent(I power) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(power, vdupq_n_s32(127)), 23)); }
    static void store_bytes(int8_t *at, I x) {
        const int8x8_t narrow = vmovn_s16(vcombine_s16(vmovn_s32(x), vmovn_s32(x)));
        vst1_lane_s32(reinterpret_cast<int32_t *>(at), vreinterpret_s32_s8(narrow), 0);
    }

    static I from_bytes(const int8_t *at) {
        int32_t bits;
        memcpy(&bits, at, 4);
        return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(bits)))));
    }

    // Sums of products start at the bits of 1.5 * 2^23, whose last digit is 1: as a float they are then off by just that.
    // Converting would take four times as long as subtracting; |sum| must stay below 2^22.
    static constexpr float BIAS = 12582912.0f;
    static constexpr int32_t BIAS_BITS = 0x4B400000;
    static I start() {  // loaded each time, which is free beside the arithmetic; a copy would not be
        alignas(16) static const int32_t bits[4] = {BIAS_BITS, BIAS_BITS, BIAS_BITS, BIAS_BITS};
        I value;
        __asm__ volatile("ldr %q0, %1" : "=w"(value) : "m"(bits));
        return value;
    }
    static I start_at(const int32_t *at) { return vld1q_s32(at); }  // LANES times the same, BIAS_BITS included
    static F finish(I sum) { return vsubq_f32(vreinterpretq_f32_s32(sum), vdupq_n_f32(BIAS)); }
    static F to_float(I x) { return vcvtq_f32_s32(x); }

    // Small whole numbers, stored as the upper halves of floats.
    static F upper_half(const uint16_t *at) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(at), 16)); }

    static B bytes(const uint8_t *at) { return vld1q_u8(at); }
    static B eights(const uint8_t *at) { return bytes(at); }  // weights with a sign, see vec_avx512.h
    static I start_eights(const int32_t *) { return start(); }
    static B low(B x) { return vandq_u8(x, vdupq_n_u8(0x0F)); }
    static B high(B x) { return vshrq_n_u8(x, 4); }
    static B both(B a, B b) { return vorrq_u8(a, b); }
    static B six(B x) { return vandq_u8(x, vdupq_n_u8(0x3F)); }
    // The upper two bits of a, b and c as one number.
    static B upper(B a, B b, B c) { return vsriq_n_u8(vsriq_n_u8(vshrq_n_u8(c, 2), b, 4), a, 6); }
    // Bits of `x` that stand at `from` and are wanted at 4, those of `mask` only.
    template <int from> static B lift(B x, uint8_t mask) {
        if constexpr (from > 4) return vandq_u8(vshrq_n_u8(x, from - 4), vdupq_n_u8(mask));
        else if constexpr (from < 4) return vandq_u8(vshlq_n_u8(x, 4 - from), vdupq_n_u8(mask));
        else return vandq_u8(x, vdupq_n_u8(mask));
    }

    // 32 rounded activations. dot<g>: four bytes of each lane times activations 4g to 4g + 3.
    struct Row {
        int8x16_t first, second;
    };
    static Row row(const int8_t *at) { return {vld1q_s8(at), vld1q_s8(at + 16)}; }
    static Row short_row(const int8_t *at) { return {vld1q_s8(at), vdupq_n_s8(0)}; }  // 16 of them
    template <int g> static I dot(I sum, B weights, const Row &row) {
        return vdotq_laneq_s32(sum, vreinterpretq_s8_u8(weights), g < 4 ? row.first : row.second, g % 4);
    }
    // The same, but kept in the order they are written in. The compiler's own has rows wait for themselves: 5 to 10 % slower.
    template <int g> static I dot_in_order(I sum, B weights, const Row &row) {
        const int8x16_t four = g < 4 ? row.first : row.second;
        __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(sum) : "w"(weights), "w"(four), "i"(g % 4));
        return sum;
    }
    template <int g> static I dot_signed(I sum, B weights, const Row &row) { return dot<g>(sum, weights, row); }

#ifdef __ARM_FEATURE_MATMUL_INT8
    static constexpr bool HAS_MATMUL = true;
    static I interleave_first(I a, I b) { return vzip1q_s32(a, b); }
    static I interleave_second(I a, I b) { return vzip2q_s32(a, b); }
    static I even(I a, I b) { return vuzp1q_s32(a, b); }
    static I odd(I a, I b) { return vuzp2q_s32(a, b); }
    // Two neighbouring vectors have four inputs of four outputs each: eight inputs of the first two, and of the others.
    static B eight_first(B a, B b) {
        return vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
    }
    static B eight_second(B a, B b) {
        return vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
    }
    // Inputs 4g to 4g + 7 of two rows, g even.
    template <int g> static int8x16_t eight_of_two(const Row &a, const Row &b) {
        const int64x2_t one = vreinterpretq_s64_s8(g < 4 ? a.first : a.second);
        const int64x2_t other = vreinterpretq_s64_s8(g < 4 ? b.first : b.second);
        return vreinterpretq_s8_s64(g % 4 ? vzip2q_s64(one, other) : vzip1q_s64(one, other));
    }
    static I matmul(I sums, B weights, int8x16_t inputs) {
        return vmmlaq_s32(sums, vreinterpretq_s8_u8(weights), inputs);
    }
#else
    static constexpr bool HAS_MATMUL = false;
#endif
};

}  // namespace
