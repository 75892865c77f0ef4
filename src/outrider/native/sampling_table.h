// The inner loops of sampling that every instruction set brings its own copy of.
#pragma once

#include <stdint.h>

// Rows are worked on in blocks: large enough that the loops run long, small enough that one number per block (its
// highest value) tells most blocks apart from those in which a draw can be won.
constexpr int32_t SAMPLING_BLOCK = 128;

// The part of a noise key that is the same for a whole row.
struct NoiseKey {
    uint32_t counter;
    uint32_t second_word;
};

struct SamplingKernels {
    // The highest value of each block into tops; returns whether there is a NaN anywhere in the row.
    int32_t (*scan)(const float *row, int32_t size, float *tops);
    // out[i] = exp((row[i] - shift) * scale), 0 where row[i] is below lowest; out has room for whole blocks.
    // Returns the sum. Nothing may be above shift.
    double (*exponentials)(const float *row, int32_t size, float shift, float scale, float lowest, float *out);
    // values[i] = max(0, values[i] * scale - weight * other[i]); returns the sum.
    double (*subtract)(float *values, int32_t size, float scale, float weight, const float *other);
    // The random bits of one block of ids first..first + SAMPLING_BLOCK - 1; returns the highest.
    int32_t (*noise)(NoiseKey key, int32_t first, int32_t *bits);
    // The same for SAMPLING_BLOCK ids from a list.
    int32_t (*noise_of)(NoiseKey key, const int32_t *ids, int32_t *bits);
};
