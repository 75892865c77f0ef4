// The inner loops of sampling. Included once by the file of each instruction set, which gives its copy to the table.
//
// Every order of adding up is fixed here (16 running sums for each block, then block after block), so that a row's bits
// never depend on its neighbours. Random bits and maxima are the same on every machine; exponentials may differ in the
// last digit where multiplying and adding is one step.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "sampling_table.h"

namespace {
namespace sampling {

constexpr int32_t LANES = 16;

// Vectors as GCC and clang know them, as wide as the instruction set has them. Left to themselves, compilers find the
// loops below too hard.
#if defined(__AVX512F__)
constexpr int32_t WIDTH = 16;
#elif defined(__AVX__)
constexpr int32_t WIDTH = 8;
#else
constexpr int32_t WIDTH = 4;
#endif
constexpr int32_t GROUPS = LANES / WIDTH;
typedef float Floats __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Integers __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t Words __attribute__((vector_size(WIDTH * 4)));

template <typename Vector, typename Number> inline Vector load(const Number *from) {
    Vector vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}

template <typename Vector, typename Number> inline void store(Number *to, Vector vector) {
    memcpy(to, &vector, sizeof vector);
}

inline Floats all(float value) { return Floats{} + value; }

// a * b + c, in one step where there is an instruction for it.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Each step for all groups: they do not wait for each other.
inline void mix(Words *bits, uint32_t second_word) {
    for (int32_t at = 0; at < GROUPS; at++) bits[at] ^= bits[at] >> 16;
    for (int32_t at = 0; at < GROUPS; at++) bits[at] *= 0x21F0AAADu;
    for (int32_t at = 0; at < GROUPS; at++) bits[at] ^= second_word;
    for (int32_t at = 0; at < GROUPS; at++) bits[at] ^= bits[at] >> 15;
    for (int32_t at = 0; at < GROUPS; at++) bits[at] *= 0xD35A2D97u;
    for (int32_t at = 0; at < GROUPS; at++) bits[at] ^= bits[at] >> 15;
}

// The sum of 16 running sums: the upper half is added to the lower, again and again.
inline double sum_lanes(Floats *sums) {
    for (int32_t half = GROUPS / 2; half > 0; half /= 2) {
        for (int32_t group = 0; group < half; group++) sums[group] += sums[group + half];
    }
    float lanes[WIDTH];
    memcpy(lanes, sums, sizeof lanes);
    for (int32_t half = WIDTH / 2; half > 0; half /= 2) {
        for (int32_t lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
}

inline int32_t scan_block(const float *values, float *top) {
    Floats highest[GROUPS];
    Integers ordered = Integers{} - 1;
    for (int32_t group = 0; group < GROUPS; group++) highest[group] = all(-__builtin_inff());
    for (int32_t at = 0; at < SAMPLING_BLOCK; at += LANES) {
        for (int32_t group = 0; group < GROUPS; group++) {
            Floats value = load<Floats>(values + at + group * WIDTH);
            highest[group] = value > highest[group] ? value : highest[group];
            ordered &= value == value;
        }
    }
    for (int32_t group = 1; group < GROUPS; group++) {
        highest[0] = highest[group] > highest[0] ? highest[group] : highest[0];
    }
    float best = highest[0][0];
    for (int32_t lane = 1; lane < WIDTH; lane++) best = highest[0][lane] > best ? highest[0][lane] : best;
    *top = best;
    int32_t all_ordered = -1;
    for (int32_t lane = 0; lane < WIDTH; lane++) all_ordered &= ordered[lane];
    return ~all_ordered;
}

// The last block of a row, filled up with a value that changes nothing.
inline void fill_block(const float *values, int32_t size, float filling, float *block) {
    for (int32_t at = 0; at < SAMPLING_BLOCK; at++) block[at] = filling;
    memcpy(block, values, size * sizeof(float));
}

int32_t scan(const float *row, int32_t size, float *tops) {
    int32_t unordered = 0;
    int32_t start = 0;
    for (; start + SAMPLING_BLOCK <= size; start += SAMPLING_BLOCK) unordered |= scan_block(row + start, tops++);
    if (start < size) {
        float block[SAMPLING_BLOCK];
        fill_block(row + start, size - start, -__builtin_inff(), block);
        unordered |= scan_block(block, tops);
    }
    return unordered;
}

// 2^value for values from -126 to 0: a whole power, and a polynomial for what is left, -1/2 to 1/2 (its coefficients
// make the largest relative error small: 2e-9). Exactly 1 at 0. Each step is taken for all groups: they do not wait
// for each other.
inline void powers_of_two(Floats *values) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, held in the low bits
    Floats rounded[GROUPS], square[GROUPS], middle[GROUPS], high[GROUPS];
    for (int32_t at = 0; at < GROUPS; at++) rounded[at] = values[at] + magic;
    for (int32_t at = 0; at < GROUPS; at++) values[at] -= rounded[at] - magic;
    for (int32_t at = 0; at < GROUPS; at++) square[at] = values[at] * values[at];
    const Floats fifth = all(0.0013398875f), third = all(0.0555033237f);
    for (int32_t at = 0; at < GROUPS; at++) high[at] = multiply_add(values[at], fifth, all(0.00961843692f));
    for (int32_t at = 0; at < GROUPS; at++) high[at] = multiply_add(square[at], all(0.00015353362f), high[at]);
    for (int32_t at = 0; at < GROUPS; at++) middle[at] = multiply_add(values[at], third, all(0.240226477f));
    for (int32_t at = 0; at < GROUPS; at++) middle[at] = multiply_add(square[at], high[at], middle[at]);
    for (int32_t at = 0; at < GROUPS; at++) values[at] = multiply_add(values[at], all(0.693147182f), all(1.0f));
    for (int32_t at = 0; at < GROUPS; at++) values[at] = multiply_add(square[at], middle[at], values[at]);
    for (int32_t at = 0; at < GROUPS; at++) values[at] = (Floats)((Words)values[at] + ((Words)rounded[at] << 23));
}

inline double exponentials_block(const float *from, float shift, float scale, float lowest, float *out) {
    Floats sums[GROUPS] = {};
    for (int32_t start = 0; start < SAMPLING_BLOCK; start += LANES) {
        Floats values[GROUPS];
        Integers possible[GROUPS];
        for (int32_t at = 0; at < GROUPS; at++) {
            Floats value = load<Floats>(from + start + at * WIDTH);
            possible[at] = value >= lowest;
            values[at] = (value - shift) * scale;
        }
        powers_of_two(values);
        for (int32_t at = 0; at < GROUPS; at++) {
            Floats result = (Floats)((Integers)values[at] & possible[at]);
            store(out + start + at * WIDTH, result);
            sums[at] += result;
        }
    }
    return sum_lanes(sums);
}

double exponentials(const float *row, int32_t size, float shift, float scale, float lowest, float *out) {
    float possible = shift - 87.0f / scale;  // below it a float would lose digits, then vanish
    lowest = lowest > possible ? lowest : possible;
    lowest = lowest > -3.4e38f ? lowest : -3.4e38f;  // minus infinity is always out
    scale *= 1.44269504f;
    double sum = 0.0;
    int32_t start = 0;
    for (; start + SAMPLING_BLOCK <= size; start += SAMPLING_BLOCK) {
        sum += exponentials_block(row + start, shift, scale, lowest, out + start);
    }
    if (start < size) {
        float block[SAMPLING_BLOCK];
        fill_block(row + start, size - start, -__builtin_inff(), block);
        sum += exponentials_block(block, shift, scale, lowest, out + start);
    }
    return sum;
}

inline double subtract_block(float *values, float scale, float weight, const float *other) {
    Floats sums[GROUPS] = {};
    for (int32_t at = 0; at < SAMPLING_BLOCK; at += LANES) {
        for (int32_t group = 0; group < GROUPS; group++) {
            float *here = values + at + group * WIDTH;
            Floats rest = load<Floats>(here) * scale - load<Floats>(other + at + group * WIDTH) * weight;
            rest = (Floats)((Integers)rest & (rest > 0.0f));
            store(here, rest);
            sums[group] += rest;
        }
    }
    return sum_lanes(sums);
}

double subtract(float *values, int32_t size, float scale, float weight, const float *other) {
    double sum = 0.0;
    int32_t start = 0;
    for (; start + SAMPLING_BLOCK <= size; start += SAMPLING_BLOCK) {
        sum += subtract_block(values + start, scale, weight, other + start);
    }
    if (start < size) {
        float block[SAMPLING_BLOCK];
        fill_block(other + start, size - start, 0.0f, block);
        sum += subtract_block(values + start, scale, weight, block);
    }
    return sum;
}

// Mixes and stores the bits of LANES ids, and keeps the highest.
inline void finish_noise(Words *words, NoiseKey key, int32_t *bits, Integers *highest) {
    mix(words, key.second_word);
    for (int32_t at = 0; at < GROUPS; at++) {
        Integers value = (Integers)words[at];
        store(bits + at * WIDTH, value);
        highest[at] = value > highest[at] ? value : highest[at];
    }
}

inline int32_t highest_of(const Integers *values) {
    int32_t lanes[LANES], highest = INT32_MIN;
    memcpy(lanes, values, sizeof lanes);
    for (int32_t lane = 0; lane < LANES; lane++) highest = lanes[lane] > highest ? lanes[lane] : highest;
    return highest;
}

constexpr uint32_t GOLDEN = 0x9E3779B9u;

int32_t noise(NoiseKey key, int32_t first, int32_t *bits) {
    Words spread[GROUPS];  // ids times GOLDEN
    Integers highest[GROUPS];
    for (int32_t at = 0; at < GROUPS; at++) {
        highest[at] = Integers{} + INT32_MIN;
        for (int32_t lane = 0; lane < WIDTH; lane++) {
            spread[at][lane] = static_cast<uint32_t>(at * WIDTH + lane) * GOLDEN;
        }
        spread[at] += static_cast<uint32_t>(first) * GOLDEN;
    }
    for (int32_t start = 0; start < SAMPLING_BLOCK; start += LANES) {
        Words words[GROUPS];
        for (int32_t at = 0; at < GROUPS; at++) {
            words[at] = spread[at] ^ key.counter;
            spread[at] += LANES * GOLDEN;
        }
        finish_noise(words, key, bits + start, highest);
    }
    return highest_of(highest);
}

int32_t noise_of(NoiseKey key, const int32_t *ids, int32_t *bits) {
    Integers highest[GROUPS];
    for (int32_t at = 0; at < GROUPS; at++) highest[at] = Integers{} + INT32_MIN;
    for (int32_t start = 0; start < SAMPLING_BLOCK; start += LANES) {
        Words words[GROUPS];
        for (int32_t at = 0; at < GROUPS; at++) {
            words[at] = (load<Words>(ids + start + at * WIDTH) * GOLDEN) ^ key.counter;
        }
        finish_noise(words, key, bits + start, highest);
    }
    return highest_of(highest);
}

}  // namespace sampling

constexpr SamplingKernels make_sampling_kernels() {
    return {sampling::scan, sampling::exponentials, sampling::subtract, sampling::noise, sampling::noise_of};
}

}  // namespace
