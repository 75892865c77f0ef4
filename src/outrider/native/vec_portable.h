// Four lanes in plain C++: what every other instruction set is tested against, and what runs where none fits.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

namespace {

inline float wide(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7FFF;
    uint32_t bits;
    if (rest >= 0x7C00) {
        bits = 0x7F800000 | (rest << 13);  // infinity and NaN
    } else if (rest >= 0x0400) {
        bits = (rest << 13) + 0x38000000;
    } else {  // below the normal ones: rest * 2^-24
        const float small = float(rest) * 5.9604644775390625e-8f;
        memcpy(&bits, &small, 4);
    }
    bits |= sign;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// To the nearest, ties to even; what is too large becomes the largest number.
inline uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000) return uint16_t(sign | 0x7E00);  // NaN
    if (bits >= 0x477FE000) return uint16_t(sign | 0x7BFF);
    if (bits < 0x38800000) {  // below the normal ones: a multiple of 2^-24
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        return uint16_t(sign | uint16_t(nearbyintf(magnitude * 16777216.0f)));
    }
    bits += 0xFFF + (bits >> 13 & 1);
    const uint32_t half = (bits - 0x38000000) >> 13;
    return uint16_t(sign | (half > 0x7BFF ? 0x7BFF : half));
}

struct V {
    static constexpr bool HAS_MATMUL = false;  // see vec_neon.h
    static constexpr int GROUP = 1;  // rows at a time: more would only take longer to compile
    static constexpr bool IN_PAIRS = false;
    static constexpr int LANES = 4;
    static constexpr int AHEAD = 640, LOCALITY = 3;  // how far weights are prefetched, and whether they are kept near
    static constexpr int QUERIES = 2;  // of one pass over keys, and vectors of sums that fit into the registers with them
    static constexpr int SUMS = 16;
    struct F {
        float x[4];
    };
    struct I {
        int32_t x[4];
    };
    struct B {
        uint8_t x[16];
    };
    template <class Out, class Do> static Out each(Do one) {
        Out out;
        for (int lane = 0; lane < 4; lane++) out.x[lane] = one(lane);
        return out;
    }

    static F zero() { return set(0.0f); }
    static F set(float value) { return {{value, value, value, value}}; }
    static F load(const float *at) { return {{at[0], at[1], at[2], at[3]}}; }
    static void store(float *at, F a) { memcpy(at, a.x, 16); }
    static F add(F a, F b) { return each<F>([&](int i) { return a.x[i] + b.x[i]; }); }
    static F sub(F a, F b) { return each<F>([&](int i) { return a.x[i] - b.x[i]; }); }
    static F mul(F a, F b) { return each<F>([&](int i) { return a.x[i] * b.x[i]; }); }
    static F div(F a, F b) { return each<F>([&](int i) { return a.x[i] / b.x[i]; }); }
    static F max(F a, F b) { return each<F>([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; }); }
    static F min(F a, F b) { return each<F>([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; }); }
    static F abs(F a) { return each<F>([&](int i) { return fabsf(a.x[i]); }); }
    // In two steps: a fused one is a slow library call where the CPU has none.
    static F fma(F sum, F a, F b) { return each<F>([&](int i) { return sum.x[i] + a.x[i] * b.x[i]; }); }
    static float sum(F a) { return (a.x[0] + a.x[1]) + (a.x[2] + a.x[3]); }
    static float most(F a) {
        const F pairs = max(a, {{a.x[1], a.x[0], a.x[3], a.x[2]}});
        return pairs.x[0] > pairs.x[2] ? pairs.x[0] : pairs.x[2];
    }
    static F mul_one(F a, float b) { return mul(a, set(b)); }
    static F fma_one(F sum, F a, float b) { return fma(sum, a, set(b)); }
    static F half(const uint16_t *at) { return each<F>([&](int i) { return wide(at[i]); }); }

    static void store_half(uint16_t *at, F a) {
        for (int lane = 0; lane < 4; lane++) at[lane] = narrow(a.x[lane]);
    }

    static I int_zero() { return int_set(0); }
    static I int_set(int32_t value) { return {{value, value, value, value}}; }
    static I int_add(I a, I b) { return each<I>([&](int i) { return a.x[i] + b.x[i]; }); }
    static int32_t int_sum(I a) { return a.x[0] + a.x[1] + a.x[2] + a.x[3]; }
    static F to_float(I a) { return each<F>([&](int i) { return float(a.x[i]); }); }
    static I to_int(F a) { return each<I>([&](int i) { return int32_t(nearbyintf(a.x[i])); }); }
    static F exponent(I power) {
        return each<F>([&](int i) {
            const uint32_t bits = uint32_t(power.x[i] + 127) << 23;
            float value;
            memcpy(&value, &bits, 4);
            return value;
        });
    }
    static void store_bytes(int8_t *at, I a) {
        for (int lane = 0; lane < 4; lane++) at[lane] = int8_t(a.x[lane]);
    }

    static I from_bytes(const int8_t *at) { return {{at[0], at[1], at[2], at[3]}}; }

    static constexpr int32_t BIAS_BITS = 0;
    static I start() { return int_zero(); }
    static I start_at(const int32_t *at) { return {{at[0], at[1], at[2], at[3]}}; }
    static F finish(I sum) { return to_float(sum); }
    static F upper_half(const uint16_t *at) {
        return each<F>([&](int i) {
            const uint32_t bits = uint32_t(at[i]) << 16;
            float value;
            memcpy(&value, &bits, 4);
            return value;
        });
    }

    template <class Do> static B each_byte(Do one) {
        B out;
        for (int at = 0; at < 16; at++) out.x[at] = uint8_t(one(at));
        return out;
    }
    static B bytes(const uint8_t *at) {
        B out;
        memcpy(out.x, at, 16);
        return out;
    }
    static B eights(const uint8_t *at) { return bytes(at); }  // weights with a sign, see vec_avx512.h
    static I start_eights(const int32_t *) { return start(); }
    static B low(B a) { return each_byte([&](int i) { return a.x[i] & 0x0F; }); }
    static B high(B a) { return each_byte([&](int i) { return a.x[i] >> 4; }); }
    static B both(B a, B b) { return each_byte([&](int i) { return a.x[i] | b.x[i]; }); }
    static B six(B a) { return each_byte([&](int i) { return a.x[i] & 0x3F; }); }
    static B upper(B a, B b, B c) {
        return each_byte([&](int i) { return a.x[i] >> 6 | (b.x[i] >> 6) << 2 | (c.x[i] >> 6) << 4; });
    }
    template <int from> static B lift(B a, uint8_t mask) {
        return each_byte([&](int i) { return (from > 4 ? a.x[i] >> (from > 4 ? from - 4 : 0)
                                                       : a.x[i] << (from > 4 ? 0 : 4 - from)) & mask; });
    }

    using Row = const int8_t *;
    static Row row(const int8_t *at) { return at; }
    static Row short_row(const int8_t *at) { return at; }
    template <int g> static I dot(I sum, B weights, Row row) {
        for (int lane = 0; lane < 4; lane++)
            for (int at = 0; at < 4; at++) sum.x[lane] += int8_t(weights.x[4 * lane + at]) * row[4 * g + at];
        return sum;
    }
    template <int g> static I dot_in_order(I sum, B weights, const Row &row) { return dot<g>(sum, weights, row); }
    template <int g> static I dot_signed(I sum, B weights, Row row) { return dot<g>(sum, weights, row); }
};

}  // namespace
