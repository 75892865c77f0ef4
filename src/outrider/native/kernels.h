// The kernels, written once over the vector type V of the file that includes this.
//
// The bits of an output depend on its own row and weights alone: every sum runs in an order given by the shape of the
// model or by positions, never by how many rows are in the pass, and several rows are only ever computed side by side.
// Nothing of std:: here: the linker would merge its copies, and one compiled for a better CPU could be the one kept.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "sampling_kernels.h"
#include "table.h"

namespace {

using F = V::F;
using I = V::I;
using B = V::B;
constexpr int LANES = V::LANES;

// --- matrix products ---------------------------------------------------------------------------------------------

// 32 inputs of LANES outputs, as eight vectors: vector g has inputs 4g to 4g + 3 of every output. Fours are stored as
// nibbles, g and g + 4 in one vector; fifth bits and sixth follow in planes of their own.
struct Nibbles {
    static constexpr int BYTES = 16 * LANES;
    static constexpr bool SIGNED = false;
    static inline void unpack(const uint8_t *at, B *w) {
        for (int g = 0; g < 4; g++) {
            const B pair = V::bytes(at + 4 * LANES * g);
            w[g] = V::low(pair);
            w[g + 4] = V::high(pair);
        }
    }
};

struct Fives {
    static constexpr int BYTES = 20 * LANES;
    static constexpr bool SIGNED = false;
    static inline void unpack(const uint8_t *at, B *w) {
        Nibbles::unpack(at, w);
        const B plane = V::bytes(at + 16 * LANES);  // bit g of a byte belongs to vector g
        w[0] = V::both(w[0], V::lift<0>(plane, 0x10));
        w[1] = V::both(w[1], V::lift<1>(plane, 0x10));
        w[2] = V::both(w[2], V::lift<2>(plane, 0x10));
        w[3] = V::both(w[3], V::lift<3>(plane, 0x10));
        w[4] = V::both(w[4], V::lift<4>(plane, 0x10));
        w[5] = V::both(w[5], V::lift<5>(plane, 0x10));
        w[6] = V::both(w[6], V::lift<6>(plane, 0x10));
        w[7] = V::both(w[7], V::lift<7>(plane, 0x10));
    }
};

struct Sixes {
    static constexpr int BYTES = 24 * LANES;
    static constexpr bool SIGNED = false;
    static inline void unpack(const uint8_t *at, B *w) {
        Nibbles::unpack(at, w);
        for (int h = 0; h < 2; h++) {
            const B plane = V::bytes(at + (16 + 4 * h) * LANES);  // two bits for each of vectors 4h to 4h + 3
            w[4 * h] = V::both(w[4 * h], V::lift<0>(plane, 0x30));
            w[4 * h + 1] = V::both(w[4 * h + 1], V::lift<2>(plane, 0x30));
            w[4 * h + 2] = V::both(w[4 * h + 2], V::lift<4>(plane, 0x30));
            w[4 * h + 3] = V::both(w[4 * h + 3], V::lift<6>(plane, 0x30));
        }
    }
};

struct Eights {
    static constexpr int BYTES = 32 * LANES;
    static constexpr bool SIGNED = true;
    static inline void unpack(const uint8_t *at, B *w) {
        for (int g = 0; g < 8; g++) w[g] = V::bytes(at + 4 * LANES * g);
    }
};

template <class Quants> inline I dot_half(I sum, const B *w, const V::Row &row, bool second) {
    if constexpr (Quants::SIGNED) {
        if (!second) {
            sum = V::dot_signed<0>(sum, w[0], row);
            sum = V::dot_signed<1>(sum, w[1], row);
            sum = V::dot_signed<2>(sum, w[2], row);
            return V::dot_signed<3>(sum, w[3], row);
        }
        sum = V::dot_signed<4>(sum, w[4], row);
        sum = V::dot_signed<5>(sum, w[5], row);
        sum = V::dot_signed<6>(sum, w[6], row);
        return V::dot_signed<7>(sum, w[7], row);
    } else {
        if (!second) {
            sum = V::dot<0>(sum, w[0], row);
            sum = V::dot<1>(sum, w[1], row);
            sum = V::dot<2>(sum, w[2], row);
            return V::dot<3>(sum, w[3], row);
        }
        sum = V::dot<4>(sum, w[4], row);
        sum = V::dot<5>(sum, w[5], row);
        sum = V::dot<6>(sum, w[6], row);
        return V::dot<7>(sum, w[7], row);
    }
}

template <class Quants> inline I dot_block(I sum, const B *w, const V::Row &row) {
    return dot_half<Quants>(dot_half<Quants>(sum, w, row, false), w, row, true);
}

// Types with a scale per 32 weights: w = d * (q - OFFSET), or d * q + m.
// A block of a tile: d of every output, then m if there is one, then the quants.
template <class Quants, int OFFSET, bool MINIMUM> struct ByBlock {
    static constexpr int HEAD = (MINIMUM ? 4 : 2) * LANES;
    static constexpr int BYTES = HEAD + Quants::BYTES;

    template <int M>
    static inline void tile(const uint8_t *at, int columns, const Activations &rows, int first, F *sums) {
        const int blocks = columns / BLOCK;
        const int8_t *rounded[M];
        const float *scales[M], *weighted[M];
        const int32_t *block_sums[M];
        F total[M];
        for (int m = 0; m < M; m++) {
            const int64_t row = (first + m) * rows.columns;
            rounded[m] = rows.rounded + row;
            scales[m] = rows.scales + row / BLOCK;
            weighted[m] = rows.weighted + row / BLOCK;
            block_sums[m] = rows.sums + row / 16;
            total[m] = V::zero();
        }
        for (int b = 0; b < blocks; b++, at += BYTES) {
            B w[8];
            Quants::unpack(at + HEAD, w);
            const F d = V::half(reinterpret_cast<const uint16_t *>(at));
            F minimum;
            if constexpr (MINIMUM) minimum = V::half(reinterpret_cast<const uint16_t *>(at) + LANES);
            for (int m = 0; m < M; m++) {
                const V::Row row = V::row(rounded[m] + BLOCK * b);
                const I start = OFFSET ? V::int_set(-OFFSET * block_sums[m][2 * b]) : V::int_zero();
                const I product = dot_block<Quants>(start, w, row);
                total[m] = V::fma(total[m], V::to_float(product), V::mul(d, V::set(scales[m][b])));
                if constexpr (MINIMUM) total[m] = V::fma(total[m], minimum, V::set(weighted[m][b]));
            }
        }
        for (int m = 0; m < M; m++) sums[m] = total[m];
    }
};

// Q4_K and Q5_K: w = d * scale * q - dmin * minimum, with a scale and a minimum (6 bits) per 32 weights and d, dmin per
// 256. A super-block of a tile: d, dmin; eight scales, eight minima, as bytes; eight blocks of quants.
template <class Quants> struct BySuper {
    static constexpr int HEAD = 4 * LANES;
    static constexpr int BYTES = HEAD + 16 * LANES + 8 * Quants::BYTES;

    template <int M>
    static inline void tile(const uint8_t *at, int columns, const Activations &rows, int first, F *sums) {
        const int supers = columns / SUPER;
        const int8_t *rounded[M];
        const float *scales[M];
        const int32_t *block_sums[M];
        F total[M];
        for (int m = 0; m < M; m++) {
            const int64_t row = (first + m) * rows.columns;
            rounded[m] = rows.rounded + row;
            scales[m] = rows.scales + row / BLOCK;
            block_sums[m] = rows.sums + row / 16;
            total[m] = V::zero();
        }
        for (int s = 0; s < supers; s++, at += BYTES) {
            I products[M], minima[M];
            for (int m = 0; m < M; m++) products[m] = minima[m] = V::int_zero();
            const uint8_t *small = at + HEAD, *quants = small + 16 * LANES;
            for (int b = 0; b < 8; b++) {
                B w[8];
                Quants::unpack(quants + b * Quants::BYTES, w);
                const I scale = V::widen_unsigned(small + b * LANES);
                const I minimum = V::widen_unsigned(small + (8 + b) * LANES);
                for (int m = 0; m < M; m++) {
                    const V::Row row = V::row(rounded[m] + SUPER * s + BLOCK * b);
                    products[m] = V::int_fma(products[m], dot_block<Quants>(V::int_zero(), w, row), scale);
                    minima[m] = V::int_fma(minima[m], minimum, V::int_set(block_sums[m][16 * s + 2 * b]));
                }
            }
            const F d = V::half(reinterpret_cast<const uint16_t *>(at));
            const F dmin = V::half(reinterpret_cast<const uint16_t *>(at) + LANES);
            for (int m = 0; m < M; m++) {
                const F scale = V::set(scales[m][8 * s]);
                total[m] = V::fma(total[m], V::to_float(products[m]), V::mul(d, scale));
                total[m] = V::sub(total[m], V::mul(V::to_float(minima[m]), V::mul(dmin, scale)));
            }
        }
        for (int m = 0; m < M; m++) sums[m] = total[m];
    }
};

// Q6_K: w = d * scale * (q - 32), with a scale (int8) per 16 weights and d per 256.
// A super-block of a tile: d; sixteen scales as bytes; eight blocks of quants.
struct SixBySuper {
    static constexpr int HEAD = 2 * LANES;
    static constexpr int BYTES = HEAD + 16 * LANES + 8 * Sixes::BYTES;

    template <int M>
    static inline void tile(const uint8_t *at, int columns, const Activations &rows, int first, F *sums) {
        const int supers = columns / SUPER;
        const int8_t *rounded[M];
        const float *scales[M];
        const int32_t *half_sums[M];
        F total[M];
        for (int m = 0; m < M; m++) {
            const int64_t row = (first + m) * rows.columns;
            rounded[m] = rows.rounded + row;
            scales[m] = rows.scales + row / BLOCK;
            half_sums[m] = rows.sums + row / 16;
            total[m] = V::zero();
        }
        for (int s = 0; s < supers; s++, at += BYTES) {
            I products[M];
            for (int m = 0; m < M; m++) products[m] = V::int_zero();
            const uint8_t *small = at + HEAD, *quants = small + 16 * LANES;
            for (int b = 0; b < 8; b++) {
                B w[8];
                Sixes::unpack(quants + b * Sixes::BYTES, w);
                const I one = V::widen_signed(small + 2 * b * LANES);
                const I other = V::widen_signed(small + (2 * b + 1) * LANES);
                for (int m = 0; m < M; m++) {
                    const V::Row row = V::row(rounded[m] + SUPER * s + BLOCK * b);
                    // sums[2 b] is of the whole block, sums[2 b + 1] of its second half.
                    const int32_t second = half_sums[m][16 * s + 2 * b + 1];
                    const int32_t half = half_sums[m][16 * s + 2 * b] - second;
                    const I low = dot_half<Sixes>(V::int_set(-32 * half), w, row, false);
                    const I high = dot_half<Sixes>(V::int_set(-32 * second), w, row, true);
                    products[m] = V::int_fma(V::int_fma(products[m], low, one), high, other);
                }
            }
            const F d = V::half(reinterpret_cast<const uint16_t *>(at));
            for (int m = 0; m < M; m++) {
                const F scale = V::mul(d, V::set(scales[m][8 * s]));
                total[m] = V::fma(total[m], V::to_float(products[m]), scale);
            }
        }
        for (int m = 0; m < M; m++) sums[m] = total[m];
    }
};

// Floating-point weights: input after input, row beside row. Four sums for each output, so that one does not wait for
// the other.
template <class Number> struct Plain {
    static inline F load(const uint8_t *at) {
        if constexpr (sizeof(Number) == 2) return V::half(reinterpret_cast<const uint16_t *>(at));
        else return V::load(reinterpret_cast<const float *>(at));
    }

    template <int M>
    static inline void tile(const uint8_t *at, int columns, const Activations &rows, int first, F *sums) {
        constexpr int STEP = sizeof(Number) * LANES;
        F total[M][4];
        const float *values[M];
        for (int m = 0; m < M; m++) {
            values[m] = rows.values + (first + m) * rows.columns;
            for (int j = 0; j < 4; j++) total[m][j] = V::zero();
        }
        int column = 0;
        for (; column + 4 <= columns; column += 4, at += 4 * STEP) {
            for (int j = 0; j < 4; j++) {
                const F w = load(at + j * STEP);
                for (int m = 0; m < M; m++) total[m][j] = V::fma(total[m][j], w, V::set(values[m][column + j]));
            }
        }
        for (; column < columns; column++, at += STEP) {
            const F w = load(at);
            for (int m = 0; m < M; m++) total[m][0] = V::fma(total[m][0], w, V::set(values[m][column]));
        }
        for (int m = 0; m < M; m++)
            sums[m] = V::add(V::add(total[m][0], total[m][1]), V::add(total[m][2], total[m][3]));
    }
};

struct Target {
    float *out;
    int64_t stride;
    const float *bias;
    bool add;
    int num_outputs;  // of the matrix: the last tile may be wider
};

inline void put(const Target &target, int row, int output, F sum) {
    float *at = target.out + row * target.stride + output;
    const int count = target.num_outputs - output;
    if (count >= LANES) {
        if (target.bias) sum = V::add(sum, V::load(target.bias + output));
        V::store(at, target.add ? V::add(V::load(at), sum) : sum);
        return;
    }
    float lanes[LANES];
    V::store(lanes, sum);
    for (int lane = 0; lane < count; lane++) {
        const float value = target.bias ? lanes[lane] + target.bias[output + lane] : lanes[lane];
        at[lane] = target.add ? at[lane] + value : value;
    }
}

template <class Weights, int M>
inline void rows_of_tile(const uint8_t *tile, int columns, const Activations &rows, int first, const Target &target,
                         int output) {
    F sums[M];
    Weights::template tile<M>(tile, columns, rows, first, sums);
    for (int m = 0; m < M; m++) put(target, first + m, output, sums[m]);
}

constexpr int GROUP = 4;               // rows that share what was unpacked
constexpr int64_t NEAR_BYTES = 32768;  // of activations that stay in the first cache while tiles pass by

template <class Weights>
void multiply_tiles(const Matrix &matrix, int first, int last, const Activations &rows, int num_rows,
                    const Target &target) {
    const int64_t row_bytes = matrix.columns * (rows.rounded ? 1 : 4);
    int near_rows = int(NEAR_BYTES / row_bytes) / GROUP * GROUP;
    if (near_rows < GROUP) near_rows = GROUP;
    for (int start = 0; start < num_rows; start += near_rows) {
        const int end = start + near_rows < num_rows ? start + near_rows : num_rows;
        for (int tile = first; tile < last; tile++) {
            const uint8_t *data = matrix.data + tile * matrix.tile_bytes;
            const int output = tile * LANES;
            int row = start;
            for (; row + GROUP <= end; row += GROUP)
                rows_of_tile<Weights, GROUP>(data, matrix.columns, rows, row, target, output);
            if (end - row == 3) rows_of_tile<Weights, 3>(data, matrix.columns, rows, row, target, output);
            if (end - row == 2) rows_of_tile<Weights, 2>(data, matrix.columns, rows, row, target, output);
            if (end - row == 1) rows_of_tile<Weights, 1>(data, matrix.columns, rows, row, target, output);
        }
    }
}

void multiply(const Matrix &matrix, int first, int last, const Activations &rows, int num_rows, float *out,
              int64_t stride, const float *bias, bool add) {
    const Target target{out, stride, bias, add, matrix.rows};
    switch (matrix.type) {
        case F32: return multiply_tiles<Plain<float>>(matrix, first, last, rows, num_rows, target);
        case F16: return multiply_tiles<Plain<uint16_t>>(matrix, first, last, rows, num_rows, target);
        case Q4_0: return multiply_tiles<ByBlock<Nibbles, 8, false>>(matrix, first, last, rows, num_rows, target);
        case Q4_1: return multiply_tiles<ByBlock<Nibbles, 0, true>>(matrix, first, last, rows, num_rows, target);
        case Q5_0: return multiply_tiles<ByBlock<Fives, 16, false>>(matrix, first, last, rows, num_rows, target);
        case Q5_1: return multiply_tiles<ByBlock<Fives, 0, true>>(matrix, first, last, rows, num_rows, target);
        case Q8_0: return multiply_tiles<ByBlock<Eights, 0, false>>(matrix, first, last, rows, num_rows, target);
        case Q4_K: return multiply_tiles<BySuper<Nibbles>>(matrix, first, last, rows, num_rows, target);
        case Q5_K: return multiply_tiles<BySuper<Fives>>(matrix, first, last, rows, num_rows, target);
        case Q6_K: return multiply_tiles<SixBySuper>(matrix, first, last, rows, num_rows, target);
    }
}

// --- rows --------------------------------------------------------------------------------------------------------

inline float sum_lanes(F x) {
    float lanes[LANES], sum = 0.0f;
    V::store(lanes, x);
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

inline float max_lanes(F x) {
    float lanes[LANES];
    V::store(lanes, x);
    float most = lanes[0];
    for (int lane = 1; lane < LANES; lane++) most = lanes[lane] > most ? lanes[lane] : most;
    return most;
}

// To int8 with one scale for `size` numbers. Sums of 16 are kept as (whole block, its second half).
void round_row(const float *values, int count, Rounding how, int8_t *rounded, float *scales, float *weighted,
               int32_t *sums) {
    const int size = how == BY_SUPER ? SUPER : BLOCK;
    for (int start = 0; start < count; start += size) {
        F most = V::zero(), broken = V::zero();
        for (int at = start; at < start + size; at += LANES) {
            const F x = V::load(values + at);
            most = V::max(most, V::abs(x));
            broken = V::fma(broken, x, V::zero());  // stays 0 unless there is a NaN or an infinity
        }
        const float largest = max_lanes(most);
        const bool sound = sum_lanes(broken) == 0.0f;
        const F inverse = V::set(sound && largest > 0.0f ? 127.0f / largest : 0.0f);
        const float scale = sound ? largest / 127.0f : NAN;  // what is broken must be seen in the result
        for (int block = start; block < start + size; block += BLOCK) {
            I halves[2];
            for (int half = 0; half < 2; half++) {
                halves[half] = V::int_zero();
                for (int at = block + 16 * half; at < block + 16 * half + 16; at += LANES) {
                    const I whole = sound ? V::to_int(V::mul(V::load(values + at), inverse)) : V::int_zero();
                    V::store_bytes(rounded + at, whole);
                    halves[half] = V::int_add(halves[half], whole);
                }
            }
            // Sums of bytes are small enough to be exact as floats.
            const int32_t second = int32_t(sum_lanes(V::to_float(halves[1])));
            const int32_t sum = int32_t(sum_lanes(V::to_float(halves[0]))) + second;
            sums[block / 16] = sum;
            sums[block / 16 + 1] = second;
            scales[block / BLOCK] = scale;
            weighted[block / BLOCK] = scale * float(sum);
        }
    }
}

void norm(const float *x, const float *weight, float eps, int count, float *out) {
    F squares[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
    int at = 0;
    for (; at + 4 * LANES <= count; at += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            const F part = V::load(x + at + j * LANES);
            squares[j] = V::fma(squares[j], part, part);
        }
    float sum = sum_lanes(V::add(V::add(squares[0], squares[1]), V::add(squares[2], squares[3])));
    for (int rest = at; rest < count; rest++) sum += x[rest] * x[rest];
    const float inverse = 1.0f / sqrtf(sum / float(count) + eps);
    for (at = 0; at + LANES <= count; at += LANES)
        V::store(out + at, V::mul(V::mul(V::load(x + at), V::set(inverse)), V::load(weight + at)));
    for (; at < count; at++) out[at] = x[at] * inverse * weight[at];
}

// e^x to about one part in 10^7; x below -87 counts as -87.
inline F exponential(F x) {
    x = V::min(V::max(x, V::set(-87.0f)), V::set(88.0f));
    const I power = V::to_int(V::mul(x, V::set(1.44269504f)));
    const F n = V::to_float(power);
    F r = V::fma(x, n, V::set(-0.693359375f));  // ln 2 in two parts
    r = V::fma(r, n, V::set(2.12194440e-4f));
    F sum = V::set(1.9875691500e-4f);
    sum = V::fma(V::set(1.3981999507e-3f), sum, r);
    sum = V::fma(V::set(8.3334519073e-3f), sum, r);
    sum = V::fma(V::set(4.1665795894e-2f), sum, r);
    sum = V::fma(V::set(1.6666665459e-1f), sum, r);
    sum = V::fma(V::set(5.0000001201e-1f), sum, r);
    sum = V::fma(V::add(r, V::set(1.0f)), sum, V::mul(r, r));
    return V::mul(sum, V::exponent(power));
}

void gate(float *gate, const float *up, int count) {
    const F one = V::set(1.0f);
    for (int at = 0; at < count; at += LANES) {
        if (count - at < LANES) {  // the same numbers, through a vector of their own
            float gates[LANES] = {}, ups[LANES] = {};
            memcpy(gates, gate + at, sizeof(float) * (count - at));
            memcpy(ups, up + at, sizeof(float) * (count - at));
            const F x = V::load(gates);
            V::store(gates, V::mul(V::div(x, V::add(one, exponential(V::sub(V::zero(), x)))), V::load(ups)));
            memcpy(gate + at, gates, sizeof(float) * (count - at));
            return;
        }
        const F x = V::load(gate + at);
        V::store(gate + at, V::mul(V::div(x, V::add(one, exponential(V::sub(V::zero(), x)))), V::load(up + at)));
    }
}

void store_half(const float *values, int count, uint16_t *out) {
    int at = 0;
    for (; at + LANES <= count; at += LANES) V::store_half(out + at, V::load(values + at));
    if (at < count) {
        float last[LANES] = {};
        uint16_t halves[LANES];
        memcpy(last, values + at, sizeof(float) * (count - at));
        V::store_half(halves, V::load(last));
        memcpy(out + at, halves, sizeof(uint16_t) * (count - at));
    }
}

// --- attention ---------------------------------------------------------------------------------------------------

// Products of Q queries with TOKENS keys that lie side by side. Dimension after dimension, so no key waits for another.
template <int Q>
inline void match_keys(const uint16_t *keys, int64_t stride, int head_dim, const float *const *queries,
                       float (*out)[TOKENS]) {
    constexpr int VECTORS = TOKENS / LANES;
    F sums[Q][VECTORS];
    for (int q = 0; q < Q; q++)
        for (int v = 0; v < VECTORS; v++) sums[q][v] = V::zero();
    for (int d = 0; d < head_dim; d++, keys += stride)
        for (int v = 0; v < VECTORS; v++) {
            const F key = V::half(keys + v * LANES);
            for (int q = 0; q < Q; q++) sums[q][v] = V::fma(sums[q][v], key, V::set(queries[q][d]));
        }
    for (int q = 0; q < Q; q++)
        for (int v = 0; v < VECTORS; v++) V::store(out[q] + v * LANES, sums[q][v]);
}

template <int Q>
inline void match_all(const Held &held, const Sight &sight, const float *const *queries, float *scores, int64_t room) {
    float out[Q][TOKENS];
    for (int index = sight.first; index < sight.last;) {
        const int within = index % held.page_size, group = within / TOKENS * TOKENS;
        const uint16_t *keys = held.keys + sight.pages[index / held.page_size] * held.page_stride + group;
        match_keys<Q>(keys, held.padded_size, held.head_dim, queries, out);
        int count = group + TOKENS < held.page_size ? group + TOKENS - within : held.page_size - within;
        if (count > sight.last - index) count = sight.last - index;
        for (int q = 0; q < Q; q++)
            memcpy(scores + q * room + index - sight.first, out[q] + within - group, sizeof(float) * count);
        index += count;
    }
    int done = -1;  // the group whose products are in `out`; nodes of a tree are neighbours
    for (int extra = 0; extra < sight.num_extras; extra++) {
        const int index = sight.extras[extra], within = index % held.page_size, group = within / TOKENS * TOKENS;
        if (index - within + group != done) {
            const uint16_t *keys = held.keys + sight.pages[index / held.page_size] * held.page_stride + group;
            match_keys<Q>(keys, held.padded_size, held.head_dim, queries, out);
            done = index - within + group;
        }
        for (int q = 0; q < Q; q++) scores[q * room + sight.last - sight.first + extra] = out[q][within - group];
    }
}

// Scores become weights; returns one over their sum. Room for a whole last vector.
inline float weigh(float *scores, int count) {
    const int padded = (count + LANES - 1) / LANES * LANES;
    for (int at = count; at < padded; at++) scores[at] = -INFINITY;
    F most = V::load(scores);
    for (int at = LANES; at < padded; at += LANES) most = V::max(most, V::load(scores + at));
    const F peak = V::set(max_lanes(most));
    F sum = V::zero();
    for (int at = 0; at < padded; at += LANES) {
        const F weight = exponential(V::sub(V::load(scores + at), peak));
        V::store(scores + at, weight);
        sum = V::add(sum, weight);
    }
    return 1.0f / sum_lanes(sum);
}

template <int Q> struct Mixed {
    static constexpr int WIDTH = 16;  // dimensions at a time
    static constexpr int VECTORS = WIDTH / LANES;
    F sums[Q][VECTORS];

    inline void clear() {
        for (int q = 0; q < Q; q++)
            for (int v = 0; v < VECTORS; v++) sums[q][v] = V::zero();
    }
    inline void take(const uint16_t *values, const float *weights, int64_t room) {
        for (int v = 0; v < VECTORS; v++) {
            const F value = V::half(values + v * LANES);
            for (int q = 0; q < Q; q++) sums[q][v] = V::fma(sums[q][v], value, V::set(weights[q * room]));
        }
    }
};

template <int Q>
void attend_with(const Held &held, const Sight &sight, const float *const *queries, float *const *out, float *scores,
                 int64_t room) {
    match_all<Q>(held, sight, queries, scores, room);
    const int run = sight.last - sight.first;
    float inverse[Q];
    for (int q = 0; q < Q; q++) inverse[q] = weigh(scores + q * room, run + sight.num_extras);
    for (int d = 0; d < held.head_dim; d += Mixed<Q>::WIDTH) {
        Mixed<Q> mixed;
        mixed.clear();
        for (int index = sight.first; index < sight.last;) {
            const int within = index % held.page_size;
            int count = held.page_size - within;
            if (count > sight.last - index) count = sight.last - index;
            const uint16_t *values = held.values + sight.pages[index / held.page_size] * held.page_stride;
            values += within * held.padded_dim + d;
            const float *weights = scores + index - sight.first;
            for (int t = 0; t < count; t++) mixed.take(values + t * held.padded_dim, weights + t, room);
            index += count;
        }
        for (int extra = 0; extra < sight.num_extras; extra++) {
            const int index = sight.extras[extra];
            const uint16_t *values = held.values + sight.pages[index / held.page_size] * held.page_stride;
            mixed.take(values + index % held.page_size * held.padded_dim + d, scores + run + extra, room);
        }
        const int count = held.head_dim - d < Mixed<Q>::WIDTH ? held.head_dim - d : Mixed<Q>::WIDTH;
        for (int q = 0; q < Q; q++) {
            float whole[Mixed<Q>::WIDTH];
            for (int v = 0; v < Mixed<Q>::VECTORS; v++)
                V::store(whole + v * LANES, V::mul(mixed.sums[q][v], V::set(inverse[q])));
            memcpy(out[q] + d, whole, sizeof(float) * count);
        }
    }
}

void attend(const Held &held, const Sight &sight, const float *const *queries, int num_queries, float *const *out,
            float *scores, int64_t room) {
    switch (num_queries) {
        case 1: return attend_with<1>(held, sight, queries, out, scores, room);
        case 2: return attend_with<2>(held, sight, queries, out, scores, room);
        case 3: return attend_with<3>(held, sight, queries, out, scores, room);
        case 4: return attend_with<4>(held, sight, queries, out, scores, room);
    }
}

constexpr Kernels make_kernels(const char *name) {
    return {name, LANES, multiply, round_row, norm, gate, attend, store_half, make_sampling_kernels()};
}

}  // namespace
