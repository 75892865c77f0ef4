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

inline uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t sign = (bits >> 16) & 0x8000, rest = bits & 0x7FFFFFFF;
    if (rest > 0x7F800000) return uint16_t(sign | 0x7E00);
    if (rest >= 0x477FF000) return uint16_t(sign | 0x7C00);  // rounds to infinity
    if (rest < 0x38800000) {                                  // below the normal ones: a multiple of 2^-24
        float magnitude;
        memcpy(&magnitude, &rest, 4);
        return uint16_t(sign | uint32_t(nearbyintf(magnitude * 16777216.0f)));
    }
    const uint32_t odd = (rest >> 13) & 1;  // ties go to even
    return uint16_t(sign | ((rest - 0x38000000 + 0x0FFF + odd) >> 13));
}

struct V {
    static constexpr int LANES = 4;
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
    static F half(const uint16_t *at) { return each<F>([&](int i) { return wide(at[i]); }); }
    static void store_half(uint16_t *at, F a) {
        for (int lane = 0; lane < 4; lane++) at[lane] = narrow(a.x[lane]);
    }

    static I int_zero() { return int_set(0); }
    static I int_set(int32_t value) { return {{value, value, value, value}}; }
    static I int_add(I a, I b) { return each<I>([&](int i) { return a.x[i] + b.x[i]; }); }
    static I int_fma(I sum, I a, I b) { return each<I>([&](int i) { return sum.x[i] + a.x[i] * b.x[i]; }); }
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
    static I widen_unsigned(const uint8_t *at) { return {{at[0], at[1], at[2], at[3]}}; }
    static I widen_signed(const uint8_t *at) { return {{int8_t(at[0]), int8_t(at[1]), int8_t(at[2]), int8_t(at[3])}}; }

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
    static B low(B a) { return each_byte([&](int i) { return a.x[i] & 0x0F; }); }
    static B high(B a) { return each_byte([&](int i) { return a.x[i] >> 4; }); }
    static B both(B a, B b) { return each_byte([&](int i) { return a.x[i] | b.x[i]; }); }
    template <int from> static B lift(B a, uint8_t mask) {
        return each_byte([&](int i) { return (from > 4 ? a.x[i] >> (from > 4 ? from - 4 : 0)
                                                       : a.x[i] << (from > 4 ? 0 : 4 - from)) & mask; });
    }

    using Row = const int8_t *;
    static Row row(const int8_t *at) { return at; }
    template <int g> static I dot(I sum, B weights, Row row) {
        for (int lane = 0; lane < 4; lane++)
            for (int at = 0; at < 4; at++) sum.x[lane] += int8_t(weights.x[4 * lane + at]) * row[4 * g + at];
        return sum;
    }
    template <int g> static I dot_signed(I sum, B weights, Row row) { return dot<g>(sum, weights, row); }
};

}  // namespace
