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

// Everything small is inlined, early enough that arrays of vectors live in registers.
#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

using F = V::F;
using I = V::I;
using B = V::B;
constexpr int LANES = V::LANES;

// --- matrix products ---------------------------------------------------------------------------------------------

// 32 inputs of LANES outputs, as eight vectors: vector g has inputs 4g to 4g + 3 of every output. Fours are stored as
// nibbles, g and g + 4 in one vector; fifth bits follow in a plane of their own.
struct Nibbles {
    static constexpr int BYTES = 16 * LANES;
    static constexpr int MOST = 15;  // of a weight, without its sign
    static constexpr bool SIGNED = false, IN_ORDER = true;
    static INLINE void unpack(const uint8_t *at, B *w) {
        for (int g = 0; g < 4; g++) {
            const B pair = V::bytes(at + 4 * LANES * g);
            w[g] = V::low(pair);
            w[g + 4] = V::high(pair);
        }
    }
};

struct Fives {
    static constexpr int BYTES = 20 * LANES;
    static constexpr int MOST = 31;  // of a weight, without its sign
    static constexpr bool SIGNED = false, IN_ORDER = true;
    static INLINE void unpack(const uint8_t *at, B *w) {
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

// Four vectors of six bits in three: the upper bits of all three are the fourth.
struct Sixes {
    static constexpr int BYTES = 24 * LANES;
    static constexpr int MOST = 63;  // of a weight, without its sign
    static constexpr bool SIGNED = false, IN_ORDER = false;
    static INLINE void unpack(const uint8_t *at, B *w) {
        for (int h = 0; h < 2; h++, at += 12 * LANES) {
            const B one = V::bytes(at), two = V::bytes(at + 4 * LANES), three = V::bytes(at + 8 * LANES);
            w[4 * h] = V::six(one);
            w[4 * h + 1] = V::six(two);
            w[4 * h + 2] = V::six(three);
            w[4 * h + 3] = V::upper(one, two, three);
        }
    }
};

struct Eights {
    static constexpr int BYTES = 32 * LANES;
    static constexpr int MOST = 128;  // of a weight, without its sign
    static constexpr bool SIGNED = true, IN_ORDER = false;
    static INLINE void unpack(const uint8_t *at, B *w) {
        for (int g = 0; g < 8; g++) w[g] = V::eights(at + 4 * LANES * g);
    }
};

// Vector g of the weights times the same inputs of M rows. One row after the other, so that no sum waits for itself;
// IN_ORDER is for quants where the compiler's own order is slower, as measured.
template <class Quants, int g, int M, class Vec>
INLINE void dot_step(I *sums, const B *w, const V::Row *rows) {
    UNROLL for (int m = 0; m < M; m++) {
        if constexpr (Quants::SIGNED) sums[m] = Vec::template dot_signed<g>(sums[m], w[g], rows[m]);
        else if constexpr (Quants::IN_ORDER && M > 1) sums[m] = Vec::template dot_in_order<g>(sums[m], w[g], rows[m]);
        else sums[m] = Vec::template dot<g>(sums[m], w[g], rows[m]);
    }
}

// Vectors `g` to `end` - 1 of the weights, added to sums of 16 bits. `Vec` is V: a name that is looked up late, since some
// vector types have no such sums.
template <class Quants, int g, int end, int M, class Vec>
INLINE void pair_steps(I *pairs, const B *w, const V::Row *rows) {
    if constexpr (g < end) {
        UNROLL for (int m = 0; m < M; m++) {
            pairs[m] = Vec::add_pairs(pairs[m], Vec::template pairs<g, Quants::SIGNED>(w[g], rows[m]));
            if constexpr (M > 2) Vec::make_now(pairs[m]);
        }
        pair_steps<Quants, g + 1, end, M, Vec>(pairs, w, rows);
    }
}

template <int g, int end, int M, class Vec>
INLINE void matmul_step(I *first, I *second, const B *w, const V::Row *rows) {
    if constexpr (g < end) {
        const B of_first = Vec::eight_first(w[g], w[g + 1]), of_second = Vec::eight_second(w[g], w[g + 1]);
        UNROLL for (int pair = 0; pair < M / 2; pair++) {
            const auto inputs = Vec::template eight_of_two<g>(rows[2 * pair], rows[2 * pair + 1]);
            first[pair] = Vec::matmul(first[pair], of_first, inputs);
            second[pair] = Vec::matmul(second[pair], of_second, inputs);
        }
        matmul_step<g + 2, end, M, Vec>(first, second, w, rows);
    }
}

// The same with an instruction that multiplies eight inputs of two outputs with those of two rows. The sums of two rows are
// interleaved on the way.
template <class Quants, int g, int end, int M, class Vec>
INLINE void matmul_steps(I *sums, const B *w, const V::Row *rows) {
    I first[M / 2], second[M / 2];  // outputs 0 and 1, 2 and 3
    UNROLL for (int pair = 0; pair < M / 2; pair++) {
        first[pair] = Vec::interleave_first(sums[2 * pair], sums[2 * pair + 1]);
        second[pair] = Vec::interleave_second(sums[2 * pair], sums[2 * pair + 1]);
    }
    matmul_step<g, end, M, Vec>(first, second, w, rows);
    UNROLL for (int pair = 0; pair < M / 2; pair++) {
        sums[2 * pair] = Vec::even(first[pair], second[pair]);
        sums[2 * pair + 1] = Vec::odd(first[pair], second[pair]);
    }
}

// Vectors `g` to `end` - 1 of the weights times the same inputs of M rows. Without an instruction for whole dot products,
// sums of two products have 16 bits; as many of those are added as surely fit before they are widened: eight of 4-bit
// weights, so a block of 32 is widened once. Of three rows and more each sum is made at once: compilers put all additions
// behind all products otherwise, and run out of registers. One or two have room, and lose a twentieth by it.
template <class Quants, int g, int end, int M, class Vec = V>
INLINE void dot_steps(I *sums, const B *w, const V::Row *rows) {
    if constexpr (g >= end) return;
    else if constexpr (Vec::HAS_MATMUL && M > 1) {
        matmul_steps<Quants, g, end, M / 2 * 2, Vec>(sums, w, rows);
        if constexpr (M % 2) dot_steps<Quants, g, end, 1, Vec>(sums + M - 1, w, rows + M - 1);
    } else if constexpr (Vec::IN_PAIRS) {
        constexpr int fit = 32767 / (2 * 127 * Quants::MOST), next = g + fit < end ? g + fit : end;
        I pairs[M];
        UNROLL for (int m = 0; m < M; m++) pairs[m] = Vec::template pairs<g, Quants::SIGNED>(w[g], rows[m]);
        pair_steps<Quants, g + 1, next, M, Vec>(pairs, w, rows);
        UNROLL for (int m = 0; m < M; m++) {
            sums[m] = Vec::widen(sums[m], pairs[m]);
            if constexpr (M > 2) Vec::make_now(sums[m]);
        }
        dot_steps<Quants, next, end, M, Vec>(sums, w, rows);
    } else {
        dot_step<Quants, g, M, Vec>(sums, w, rows);
        dot_steps<Quants, g + 1, end, M, Vec>(sums, w, rows);
    }
}

// Products of 32 weights with M rows, `stride` bytes apart. lowered: of the first row, for weights with a sign.
template <class Quants, int M>
INLINE void dot_block(I *sums, const B *w, const int8_t *rounded, int64_t stride, const int32_t *lowered = nullptr) {
    V::Row rows[M];
    UNROLL for (int m = 0; m < M; m++) {
        rows[m] = V::row(rounded + m * stride);
        sums[m] = Quants::SIGNED ? V::start_eights(lowered + m * stride / BLOCK) : V::start();
    }
    dot_steps<Quants, 0, 8, M>(sums, w, rows);
}

// Weights are read in order; asking for them early keeps the arithmetic from waiting.
template <int bytes> INLINE void fetch_ahead(const uint8_t *at) {
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch(at + V::AHEAD + line, 0, V::LOCALITY);
}

// Types with a scale per 32 weights: w = d * (q - OFFSET), or d * q + m.
// A block of a tile: d of every output, then m if there is one, then the quants.
template <class Quants, int OFFSET, bool MINIMUM> struct ByBlock {
    static constexpr int HEAD = (MINIMUM ? 4 : 2) * LANES;
    static constexpr int BYTES = HEAD + Quants::BYTES;

    template <int M>
    static INLINE void tile(const uint8_t *at, int columns, const Activations &rows, int first, F *sums) {
        const int blocks = columns / BLOCK;
        const int8_t *rounded = rows.rounded + first * rows.columns;
        const float *scales = rows.scales + first * rows.columns / BLOCK;
        const float *weighted = rows.weighted + first * rows.columns / BLOCK;
        const int32_t *lowered = rows.lowered + first * rows.columns / BLOCK;
        const int64_t stride = rows.columns, short_stride = rows.columns / BLOCK;
        F total[M];
        UNROLL for (int m = 0; m < M; m++) total[m] = V::zero();
        for (int b = 0; b < blocks; b++, at += BYTES) {
            B w[8];
            fetch_ahead<BYTES>(at);
            Quants::unpack(at + HEAD, w);
            const F d = V::half(reinterpret_cast<const uint16_t *>(at));
            F minimum = V::zero();
            if constexpr (MINIMUM) minimum = V::half(reinterpret_cast<const uint16_t *>(at) + LANES);
            else if constexpr (OFFSET) minimum = V::mul(d, V::set(-float(OFFSET)));
            I products[M];
            dot_block<Quants, M>(products, w, rounded + BLOCK * b, stride, lowered + b);
            UNROLL for (int m = 0; m < M; m++) {
                total[m] = V::fma(total[m], V::finish(products[m]), V::mul_one(d, scales[m * short_stride + b]));
                if constexpr (MINIMUM || OFFSET)
                    total[m] = V::fma_one(total[m], minimum, weighted[m * short_stride + b]);
            }
        }
        UNROLL for (int m = 0; m < M; m++) sums[m] = total[m];
    }
};

// Q4_K and Q5_K: w = d * scale * q - dmin * minimum, with a scale and a minimum (6 bits) per 32 weights and d, dmin per
// 256. A super-block of a tile: d, dmin; eight scales as upper halves of floats; eight minima, laid out like quants, since
// their products with the sums of the blocks are taken like those of quants; eight blocks of quants.
template <class Quants> struct BySuper {
    static constexpr int HEAD = 4 * LANES, SCALES = 16 * LANES, MINIMA = 8 * LANES;
    static constexpr int BYTES = HEAD + SCALES + MINIMA + 8 * Quants::BYTES;

    template <int M>
    static INLINE void tile(const uint8_t *at, int columns, const Activations &rows, int first, F *sums) {
        const int supers = columns / SUPER;
        const int8_t *rounded = rows.rounded + first * rows.columns;
        const float *scales = rows.scales + first * rows.columns / BLOCK;
        const int8_t *digits = rows.digits + first * rows.columns / 16;
        const int64_t stride = rows.columns;
        F total[M];
        UNROLL for (int m = 0; m < M; m++) total[m] = V::zero();
        for (int s = 0; s < supers; s++, at += BYTES) {
            const uint8_t *minima_at = at + HEAD + SCALES, *quants = minima_at + MINIMA;
            F products[M];
            UNROLL for (int m = 0; m < M; m++) products[m] = V::zero();
            for (int b = 0; b < 8; b++) {
                B w[8];
                fetch_ahead<Quants::BYTES>(quants + b * Quants::BYTES);
                Quants::unpack(quants + b * Quants::BYTES, w);
                const F scale = V::upper_half(reinterpret_cast<const uint16_t *>(at + HEAD) + b * LANES);
                I sums_of_block[M];
                dot_block<Quants, M>(sums_of_block, w, rounded + SUPER * s + BLOCK * b, stride);
                UNROLL for (int m = 0; m < M; m++) products[m] = V::fma(products[m], V::finish(sums_of_block[m]), scale);
            }
            const F d = V::half(reinterpret_cast<const uint16_t *>(at));
            const F minus_dmin = V::sub(V::zero(), V::half(reinterpret_cast<const uint16_t *>(at) + LANES));
            const B low_minima = V::bytes(minima_at), high_minima = V::bytes(minima_at + 4 * LANES);
            UNROLL for (int m = 0; m < M; m++) {
                const V::Row row = V::short_row(digits + (m * stride + SUPER * s) / 16);
                const I low = V::dot<1>(V::dot<0>(V::start(), low_minima, row), high_minima, row);
                const I high = V::dot<3>(V::dot<2>(V::start(), low_minima, row), high_minima, row);
                const F minima = V::fma(V::finish(low), V::finish(high), V::set(64.0f));
                const float scale = scales[(m * stride + SUPER * s) / BLOCK];
                const F whole = V::fma(V::mul(products[m], d), minima, minus_dmin);
                total[m] = V::fma_one(total[m], whole, scale);
            }
        }
        UNROLL for (int m = 0; m < M; m++) sums[m] = total[m];
    }
};

// Q6_K: w = d * scale * (q - 32), with a scale (int8) per 16 weights and d per 256.
// A super-block of a tile: d; sixteen scales as upper halves of floats; eight blocks of quants.
struct SixBySuper {
    static constexpr int HEAD = 2 * LANES, SCALES = 32 * LANES;
    static constexpr int BYTES = HEAD + SCALES + 8 * Sixes::BYTES;

    template <int M>
    static INLINE void tile(const uint8_t *at, int columns, const Activations &rows, int first, F *sums) {
        const int supers = columns / SUPER;
        const int8_t *rounded = rows.rounded + first * rows.columns;
        const float *scales = rows.scales + first * rows.columns / BLOCK;
        const int32_t *starts = rows.starts + first * rows.columns / 16 * LANES;
        const int64_t stride = rows.columns;
        F total[M];
        UNROLL for (int m = 0; m < M; m++) total[m] = V::zero();
        for (int s = 0; s < supers; s++, at += BYTES) {
            const uint16_t *small = reinterpret_cast<const uint16_t *>(at + HEAD);
            const uint8_t *quants = at + HEAD + SCALES;
            F products[M];
            UNROLL for (int m = 0; m < M; m++) products[m] = V::zero();
            for (int b = 0; b < 8; b++) {
                B w[8];
                fetch_ahead<Sixes::BYTES>(quants + b * Sixes::BYTES);
                Sixes::unpack(quants + b * Sixes::BYTES, w);
                const F one = V::upper_half(small + 2 * b * LANES);
                const F other = V::upper_half(small + (2 * b + 1) * LANES);
                V::Row inputs[M];
                I low[M], high[M];
                UNROLL for (int m = 0; m < M; m++) {
                    const int64_t column = m * stride + SUPER * s + BLOCK * b;
                    inputs[m] = V::row(rounded + column);
                    low[m] = V::start_at(starts + column / 16 * LANES);
                    high[m] = V::start_at(starts + (column / 16 + 1) * LANES);
                }
                dot_steps<Sixes, 0, 4, M>(low, w, inputs);
                dot_steps<Sixes, 4, 8, M>(high, w, inputs);
                UNROLL for (int m = 0; m < M; m++) {
                    products[m] = V::fma(products[m], V::finish(low[m]), one);
                    products[m] = V::fma(products[m], V::finish(high[m]), other);
                }
            }
            const F d = V::half(reinterpret_cast<const uint16_t *>(at));
            UNROLL for (int m = 0; m < M; m++) {
                const float scale = scales[(m * stride + SUPER * s) / BLOCK];
                total[m] = V::fma(total[m], products[m], V::mul_one(d, scale));
            }
        }
        UNROLL for (int m = 0; m < M; m++) sums[m] = total[m];
    }
};

// Floating-point weights: input after input, row beside row. Four sums for each output, so that one does not wait for
// the other.
template <class Number> struct Plain {
    static INLINE F load(const uint8_t *at) {
        if constexpr (sizeof(Number) == 2) return V::half(reinterpret_cast<const uint16_t *>(at));
        else return V::load(reinterpret_cast<const float *>(at));
    }

    template <int M>
    static INLINE void tile(const uint8_t *at, int columns, const Activations &rows, int first, F *sums) {
        constexpr int STEP = sizeof(Number) * LANES;
        F total[M][4];
        const float *values[M];
        UNROLL for (int m = 0; m < M; m++) {
            values[m] = rows.values + (first + m) * rows.columns;
            for (int j = 0; j < 4; j++) total[m][j] = V::zero();
        }
        int column = 0;
        for (; column + 4 <= columns; column += 4, at += 4 * STEP) {
            for (int j = 0; j < 4; j++) {
                const F w = load(at + j * STEP);
                UNROLL for (int m = 0; m < M; m++) total[m][j] = V::fma_one(total[m][j], w, values[m][column + j]);
            }
        }
        for (; column < columns; column++, at += STEP) {
            const F w = load(at);
            UNROLL for (int m = 0; m < M; m++) total[m][0] = V::fma_one(total[m][0], w, values[m][column]);
        }
        UNROLL for (int m = 0; m < M; m++)
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

INLINE void put(const Target &target, int row, int output, F sum) {
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

// Some tiles times M rows. A function of its own for each M: in one large function registers run out.
template <class Weights, int M>
__attribute__((noinline)) void sweep(const Matrix &matrix, int first, int last, const Activations &rows, int row,
                                     const Target &target) {
    const uint8_t *data = matrix.data + first * matrix.tile_bytes;
    for (int tile = first; tile < last; tile++, data += matrix.tile_bytes) {
        F sums[M];
        Weights::template tile<M>(data, matrix.columns, rows, row, sums);
        UNROLL for (int m = 0; m < M; m++) put(target, row + m, tile * LANES, sums[m]);
    }
}

// The rows that are left over from whole groups, at most M.
template <class Weights, int M>
INLINE void sweep_rest(int count, const Matrix &matrix, int first, int last, const Activations &rows, int row,
                       const Target &target) {
    if constexpr (M > 0) {
        if (count == M) sweep<Weights, M>(matrix, first, last, rows, row, target);
        else sweep_rest<Weights, M - 1>(count, matrix, first, last, rows, row, target);
    }
}

// Row group after row group: the tiles are few enough to stay in the first cache meanwhile.
template <class Weights>
void multiply_tiles(const Matrix &matrix, int first, int last, const Activations &rows, int num_rows,
                    const Target &target) {
    int row = 0;
    for (; row + V::GROUP <= num_rows; row += V::GROUP)
        sweep<Weights, V::GROUP>(matrix, first, last, rows, row, target);
    sweep_rest<Weights, V::GROUP - 1>(num_rows - row, matrix, first, last, rows, row, target);
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

// To int8 with one scale for a block or a super-block.
void round_row(const float *values, int count, Rounding how, const Rounded &out) {
    const int size = how == BY_SUPER ? SUPER : BLOCK;
    for (int start = 0; start < count; start += size) {
        F most = V::zero(), broken = V::zero();
        for (int at = start; at < start + size; at += LANES) {
            const F x = V::load(values + at);
            most = V::max(most, V::abs(x));
            broken = V::fma(broken, x, V::zero());  // stays 0 unless there is a NaN or an infinity
        }
        const float largest = V::most(most);
        const bool sound = V::sum(broken) == 0.0f;
        const float scale = sound ? largest / 127.0f : NAN;  // what is broken must be seen in the result
        const F inverse = V::set(sound && largest > 1e-30f ? 127.0f / largest : 0.0f);  // else it would be infinite
        for (int block = start; block < start + size; block += BLOCK) {
            I sums[2] = {V::int_zero(), V::int_zero()};  // of 16 numbers each
            for (int half = 0; half < 2; half++)
                for (int at = block + 16 * half; at < block + 16 * half + 16; at += LANES) {
                    const I whole = sound ? V::to_int(V::mul(V::load(values + at), inverse)) : V::int_zero();
                    V::store_bytes(out.rounded + at, whole);
                    sums[half] = V::int_add(sums[half], whole);
                }
            out.scales[block / BLOCK] = scale;
            if (how == BY_BLOCK) {
                const int32_t sum = V::int_sum(V::int_add(sums[0], sums[1]));
                out.weighted[block / BLOCK] = scale * float(sum);
                out.lowered[block / BLOCK] = -128 * sum;
                continue;
            }
            const int32_t halves[2] = {V::int_sum(sums[0]), V::int_sum(sums[1])}, sum = halves[0] + halves[1];
            int8_t *digits = out.digits + start / 16 + (block - start) / BLOCK;
            digits[0] = int8_t(sum & 63);
            digits[8] = int8_t(sum >> 6);
            for (int half = 0; half < 2; half++)
                for (int lane = 0; lane < LANES; lane++)
                    out.starts[(block / 16 + half) * LANES + lane] = V::BIAS_BITS - 32 * halves[half];
        }
    }
}

float scale_of(const float *x, float eps, int count) {
    F squares[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
    int at = 0;
    for (; at + 4 * LANES <= count; at += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            const F part = V::load(x + at + j * LANES);
            squares[j] = V::fma(squares[j], part, part);
        }
    float sum = V::sum(V::add(V::add(squares[0], squares[1]), V::add(squares[2], squares[3])));
    for (; at < count; at++) sum += x[at] * x[at];
    return 1.0f / sqrtf(sum / float(count) + eps);
}

void norm(const float *x, float scale, const float *weight, int count, float *out) {
    int at = 0;
    for (; at + LANES <= count; at += LANES)
        V::store(out + at, V::mul(V::mul_one(V::load(x + at), scale), V::load(weight + at)));
    for (; at < count; at++) out[at] = x[at] * scale * weight[at];
}

template <int step>
INLINE void rotate_pairs(float *__restrict first, float *__restrict second, const float *__restrict table, int count) {
    for (int pair = 0; pair < count; pair++) {
        const float a = first[pair * step], b = second[pair * step];
        const float cosine = table[2 * pair], sine = table[2 * pair + 1];
        first[pair * step] = a * cosine - b * sine;
        second[pair * step] = a * sine + b * cosine;
    }
}

// Pairs of dimensions turn by the angles of their position (RoPE). table: cosine and sine of each pair.
void rotate(float *x, const float *table, int num_pairs, bool interleaved) {
    if (interleaved) rotate_pairs<2>(x, x + 1, table, num_pairs);
    else rotate_pairs<1>(x, x + num_pairs, table, num_pairs);
}

// e^x to about one part in 10^7; x below -87 counts as -87.
INLINE F exponential(F x) {
    x = V::min(V::set(88.0f), V::max(V::set(-87.0f), x));  // in this order a NaN stays one on every CPU
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

}  // namespace

#include "attention_kernels.h"

namespace {

constexpr Kernels make_kernels(const char *name) {
    return {name,         LANES,         V::QUERIES, multiply,      round_row, scale_of, norm, rotate, gate,
            attend_chunk, merge_partial, store_kv,   make_sampling_kernels()};
}

}  // namespace
