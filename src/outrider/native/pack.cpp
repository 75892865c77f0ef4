#include "pack.h"

#include <string.h>

#include "vec_portable.h"  // wide(): half precision to single

namespace {

struct Format {
    int block;         // weights
    int stored_bytes;  // of a block in the file
    int head;          // bytes per row of d, minimum and scales in a tile
    int quants;        // bytes per row of 32 weights in a tile
    int extra_bits;    // beyond four
};

constexpr Format format_of(int32_t type) {
    switch (type) {
        case Q4_0: return {32, 18, 2, 16, 0};
        case Q4_1: return {32, 20, 4, 16, 0};
        case Q5_0: return {32, 22, 2, 20, 1};
        case Q5_1: return {32, 24, 4, 20, 1};
        case Q8_0: return {32, 34, 2, 32, 4};
        case Q4_K: return {256, 144, 4 + 24, 16, 0};
        case Q5_K: return {256, 176, 4 + 24, 20, 1};
        case Q6_K: return {256, 210, 2 + 32, 24, 2};
    }
    return {0, 0, 0, 0, 0};
}

// Four weights of a row, or four bytes that hold eight: what a lane of a vector takes. Bytes of a word never mix.
using Word = uint32_t;

constexpr Word LOW = 0x0F0F0F0F, PAIR = 0x03030303, BIT = 0x01010101;

Word word_at(const uint8_t *at) {
    Word word;
    memcpy(&word, at, sizeof(word));
    return word;
}

constexpr bool has_minimum(int32_t type) { return type == Q4_1 || type == Q5_1 || type == Q4_K || type == Q5_K; }

// 32 weights from the lower or upper halves of 32 bytes: 0..15 to the lower halves of four words, 16..31 to the upper.
void read_nibbles(const uint8_t *at, bool upper, Word *words) {
    const int shift = upper ? 4 : 0;
    for (int v = 0; v < 4; v++)
        words[v] = (word_at(at + 4 * v) >> shift & LOW) | (word_at(at + 4 * v + 16) >> shift & LOW) << 4;
}

// Every fourth of 32 bits, together in a byte.
Word every_fourth(Word bits) {
    bits &= 0x11111111;
    bits = (bits | bits >> 3) & PAIR;
    bits = (bits | bits >> 6) & 0x000F000F;
    return (bits | bits >> 12) & 0xFF;
}

Word fifth_bits(const uint8_t *at) {
    const Word bits = Word(at[0]) | Word(at[1]) << 8 | Word(at[2]) << 16 | Word(at[3]) << 24;
    uint8_t bytes[4];
    for (int byte = 0; byte < 4; byte++) bytes[byte] = uint8_t(every_fourth(bits >> byte));
    return word_at(bytes);
}

// 32 weights of Q6_K: four bits of each from `low`, two from `high`. Every fourth word goes into the upper bits of three.
void read_sixes(const uint8_t *low, const uint8_t *high, int part, Word *words) {
    Word six[8];
    for (int v = 0; v < 8; v++)
        six[v] = (word_at(low + 4 * v) >> part / 2 * 4 & LOW) | (word_at(high + 4 * v) >> 2 * part & PAIR) << 4;
    for (int v = 0; v < 6; v++) words[v] = six[v + v / 3] | (six[v < 3 ? 3 : 7] >> v % 3 * 2 & PAIR) << 6;
}

// The 32 weights of a part of a stored block, a word for each vector of the tile.
template <int32_t TYPE> void read_part(const uint8_t *block, int part, Word *words) {
    constexpr int head = has_minimum(TYPE) ? 4 : 2;
    if constexpr (TYPE == Q4_0 || TYPE == Q4_1 || TYPE == Q8_0) {  // the file's bytes as they are
        memcpy(words, block + head, format_of(TYPE).quants);
    } else if constexpr (TYPE == Q5_0 || TYPE == Q5_1) {
        memcpy(words, block + head + 4, 16);
        words[4] = fifth_bits(block + head);
    } else if constexpr (TYPE == Q6_K) {
        const int half = part / 4;
        read_sixes(block + 64 * half + 32 * (part % 2), block + 128 + 32 * half, part % 4, words);
    } else {
        const uint8_t *bits = block + head + 12;
        read_nibbles(bits + (TYPE == Q5_K ? 32 : 0) + part / 2 * 32, part % 2, words);
        if constexpr (TYPE == Q5_K) {
            words[4] = 0;
            for (int v = 0; v < 8; v++) words[4] |= (word_at(bits + 4 * v) >> part & BIT) << v;
        }
    }
}

// Scales are whole numbers of at most 7 bits: the upper half of a float holds them exactly, and is a float in one step.
void write_scale(int scale, int number, int lane, int lanes, uint8_t *out) {
    const float value = float(scale);
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint16_t upper = uint16_t(bits >> 16);
    memcpy(out + 2 * (number * lanes + lane), &upper, 2);
}

float from_upper_half(uint16_t half) {
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Minima of a super-block are laid out like quants: four of a row together, row beside row.
int minimum_at(int block, int lane, int lanes) { return block / 4 * 4 * lanes + 4 * lane + block % 4; }

// Eight scales and eight minima of 6 bits in twelve bytes.
void write_scales(const uint8_t *at, int lane, int lanes, uint8_t *out) {
    const Word first = word_at(at), second = word_at(at + 4), third = word_at(at + 8);
    const Word minima[2] = {second & ~(PAIR << 6), (third >> 4 & LOW) | (second >> 6 & PAIR) << 4};
    const Word scales[2] = {first & ~(PAIR << 6), (third & LOW) | (first >> 6 & PAIR) << 4};
    uint8_t bytes[8];
    memcpy(bytes, scales, 8);
    for (int j = 0; j < 8; j++) write_scale(bytes[j], j, lane, lanes, out);
    for (int j = 0; j < 8; j += 4) memcpy(out + 16 * lanes + minimum_at(j, lane, lanes), minima + j / 4, 4);
}

template <int32_t TYPE> void write_head(const uint8_t *block, int lane, int lanes, uint8_t *out) {
    memcpy(out + 2 * lane, block + (TYPE == Q6_K ? 208 : 0), 2);
    if constexpr (has_minimum(TYPE)) memcpy(out + 2 * (lanes + lane), block + 2, 2);
    if constexpr (TYPE == Q4_K || TYPE == Q5_K) write_scales(block + 4, lane, lanes, out + 4 * lanes);
    if constexpr (TYPE == Q6_K)
        for (int j = 0; j < 16; j++) write_scale(int8_t(block[192 + j]), j, lane, lanes, out + 2 * lanes);
}

// One block of every row of a tile, vector after vector. `count` of the rows exist, the others are nothing but zeros.
template <int32_t TYPE, int LANES> void write_block(const uint8_t *const *rows, int count, uint8_t *out) {
    constexpr Format format = format_of(TYPE);
    constexpr int vectors = format.quants / 4;
    for (int lane = 0; lane < count; lane++) write_head<TYPE>(rows[lane], lane, LANES, out);
    out += format.head * LANES;
    for (int part = 0; part < format.block / 32; part++) {
        Word words[LANES][vectors];
        for (int lane = 0; lane < LANES; lane++) read_part<TYPE>(rows[lane], part, words[lane]);
        for (int v = 0; v < vectors; v++)
            for (int lane = 0; lane < LANES; lane++, out += sizeof(Word)) memcpy(out, &words[lane][v], sizeof(Word));
    }
}

template <int32_t TYPE, int LANES> void write_tile(const uint8_t **rows, int count, int64_t columns, uint8_t *out) {
    constexpr Format format = format_of(TYPE);
    for (int64_t b = 0; b < columns / format.block; b++) {
        write_block<TYPE, LANES>(rows, count, out);
        for (int lane = 0; lane < count; lane++) rows[lane] += format.stored_bytes;
        out += (format.head + format.block / 32 * format.quants) * LANES;
    }
}

// A few columns at a time, so that each row is read in pieces that lie together.
template <class Number, int LANES> void write_numbers(const uint8_t **rows, int count, int64_t columns, uint8_t *out) {
    Number piece[LANES][BLOCK] = {};
    for (int64_t first = 0; first < columns; first += BLOCK) {
        const int some = columns - first < BLOCK ? int(columns - first) : BLOCK;
        for (int lane = 0; lane < count; lane++)
            memcpy(piece[lane], rows[lane] + first * sizeof(Number), some * sizeof(Number));
        for (int k = 0; k < some; k++)
            for (int lane = 0; lane < LANES; lane++, out += sizeof(Number)) memcpy(out, &piece[lane][k], sizeof(Number));
    }
}

using Write = void (*)(const uint8_t **rows, int count, int64_t columns, uint8_t *out);

template <int LANES> Write writer_of(int32_t type) {
    switch (type) {
        case F32: return write_numbers<uint32_t, LANES>;
        case F16: return write_numbers<uint16_t, LANES>;
        case Q4_0: return write_tile<Q4_0, LANES>;
        case Q4_1: return write_tile<Q4_1, LANES>;
        case Q5_0: return write_tile<Q5_0, LANES>;
        case Q5_1: return write_tile<Q5_1, LANES>;
        case Q8_0: return write_tile<Q8_0, LANES>;
        case Q4_K: return write_tile<Q4_K, LANES>;
        case Q5_K: return write_tile<Q5_K, LANES>;
        case Q6_K: return write_tile<Q6_K, LANES>;
    }
    return nullptr;
}

// Where input k of a row stands among its 32: vector k / 4, byte k % 4 of its lane.
struct Place {
    int vector, byte;
    Place(int k, int lane) : vector(k / 4), byte(4 * lane + k % 4) {}
};

void read_quants(const uint8_t *at, int extra_bits, int lane, int lanes, uint8_t *quants) {
    const int width = 4 * lanes;
    for (int k = 0; k < 32; k++) {
        const Place place(k, lane);
        if (extra_bits == 4) {
            quants[k] = at[place.vector * width + place.byte];
            continue;
        }
        if (extra_bits == 2) {
            const uint8_t *group = at + place.vector / 4 * 3 * width + place.byte;
            quants[k] = uint8_t(place.vector % 4 < 3
                                    ? group[place.vector % 4 * width] & 63
                                    : group[0] >> 6 | (group[width] >> 6) << 2 | (group[2 * width] >> 6) << 4);
            continue;
        }
        int quant = at[place.vector % 4 * width + place.byte] >> (place.vector < 4 ? 0 : 4) & 0x0F;
        if (extra_bits == 1) quant |= (at[4 * width + place.byte] >> place.vector & 1) << 4;
        quants[k] = uint8_t(quant);
    }
}

uint16_t read_half(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, 2);
    return value;
}

// small: where the scales of a tile's super-block begin.
float scale_at(const uint8_t *small, int number, int lane, int lanes) {
    return from_upper_half(read_half(small + 2 * (number * lanes + lane)));
}

float value_of(int32_t type, float d, float minimum, const uint8_t *small, int lane, int lanes, int k, uint8_t quant) {
    switch (type) {
        case Q4_0: return d * float(quant - 8);
        case Q5_0: return d * float(quant - 16);
        case Q8_0: return d * float(int8_t(quant));
        case Q4_1:
        case Q5_1: return d * float(quant) + minimum;
        case Q6_K: return d * scale_at(small, k / 16, lane, lanes) * float(quant - 32);
    }
    const float scale = d * scale_at(small, k / 32, lane, lanes);
    return scale * float(quant) - minimum * float(small[16 * lanes + minimum_at(k / 32, lane, lanes)]);
}

int number_bytes(int32_t type) { return type == F32 ? 4 : type == F16 ? 2 : 0; }

// A lane's part of `count` units of so many bytes, which lie row beside row. Moves both to what comes behind them.
void copy_units(int count, int bytes, int lanes, int lane, int out_lane, const uint8_t *&at, uint8_t *&out) {
    for (int unit = 0; unit < count; unit++, at += bytes * lanes, out += bytes * lanes)
        memcpy(out + bytes * out_lane, at + bytes * lane, size_t(bytes));
}

}  // namespace

int64_t tile_bytes(int32_t type, int64_t columns, int lanes) {
    if (const int bytes = number_bytes(type)) return columns * bytes * lanes;
    const Format format = format_of(type);
    if (format.block == 0 || columns % format.block) return 0;
    return columns / format.block * (format.head + format.block / 32 * format.quants) * lanes;
}

int64_t stored_row_bytes(int32_t type, int64_t columns) {
    if (const int bytes = number_bytes(type)) return columns * bytes;
    const Format format = format_of(type);
    return format.block == 0 ? 0 : columns / format.block * format.stored_bytes;
}

void pack_tiles(const Matrix &matrix, const uint8_t *stored, int first, int last, int lanes, uint8_t *out) {
    static const uint8_t nothing[SUPER] = {};
    const int64_t row_bytes = stored_row_bytes(matrix.type, matrix.columns);
    const Write write = lanes == 4    ? writer_of<4>(matrix.type)
                        : lanes == 8  ? writer_of<8>(matrix.type)
                                      : writer_of<MAX_LANES>(matrix.type);
    for (int tile = first; tile < last; tile++) {
        uint8_t *at = out + tile * matrix.tile_bytes;
        const int count = matrix.rows - tile * lanes < lanes ? matrix.rows - tile * lanes : lanes;
        const uint8_t *rows[MAX_LANES];
        for (int lane = 0; lane < lanes; lane++)
            rows[lane] = lane < count ? stored + (int64_t(tile) * lanes + lane) * row_bytes : nothing;
        if (count < lanes) memset(at, 0, size_t(matrix.tile_bytes));
        write(rows, count, matrix.columns, at);
    }
}

bool has_sound_scales(const Matrix &matrix, const uint8_t *stored, int first, int last) {
    const Format format = format_of(matrix.type);
    if (format.block == 0) return true;
    const int64_t blocks_of_row = matrix.columns / format.block;
    const uint8_t *block = stored + first * blocks_of_row * format.stored_bytes;
    bool sound = true;
    for (int64_t b = 0; b < (last - first) * blocks_of_row; b++, block += format.stored_bytes) {
        sound &= (read_half(block + (matrix.type == Q6_K ? 208 : 0)) & 0x7C00) != 0x7C00;
        if (has_minimum(matrix.type)) sound &= (read_half(block + 2) & 0x7C00) != 0x7C00;
    }
    return sound;
}

void unpack_row(const Matrix &matrix, int row, int lanes, float *out) {
    const uint8_t *tile = matrix.data + row / lanes * matrix.tile_bytes;
    const int lane = row % lanes, bytes = number_bytes(matrix.type);
    if (bytes) {
        for (int64_t k = 0; k < matrix.columns; k++) {
            const uint8_t *at = tile + (k * lanes + lane) * bytes;
            if (bytes == 2) out[k] = wide(read_half(at));
            else memcpy(out + k, at, 4);
        }
        return;
    }
    const Format format = format_of(matrix.type);
    const int64_t block_bytes = int64_t(format.head + format.block / 32 * format.quants) * lanes;
    for (int64_t b = 0; b < matrix.columns / format.block; b++) {
        const uint8_t *at = tile + b * block_bytes;
        const float d = wide(read_half(at + 2 * lane));
        const bool has_minimum = matrix.type != Q6_K && format.head > 2;
        const float minimum = has_minimum ? wide(read_half(at + 2 * (lanes + lane))) : 0.0f;
        const uint8_t *small = at + (has_minimum ? 4 : 2) * lanes;
        uint8_t quants[SUPER];
        for (int part = 0; part < format.block / 32; part++)
            read_quants(at + (format.head + part * format.quants) * lanes, format.extra_bits, lane, lanes,
                        quants + 32 * part);
        for (int k = 0; k < format.block; k++)
            out[b * format.block + k] = value_of(matrix.type, d, minimum, small, lane, lanes, k, quants[k]);
    }
}

void copy_row(const Matrix &from, int row, const Matrix &to, int to_row, int lanes, uint8_t *out) {
    const uint8_t *at = from.data + row / lanes * from.tile_bytes;
    out += to_row / lanes * to.tile_bytes;
    const int lane = row % lanes, out_lane = to_row % lanes;
    if (const int bytes = number_bytes(from.type)) {
        copy_units(from.columns, bytes, lanes, lane, out_lane, at, out);
        return;
    }
    const Format format = format_of(from.type);
    const int minima = has_minimum(from.type) && format.block == SUPER ? 8 : 0;  // in bytes, four together
    for (int64_t b = 0; b < from.columns / format.block; b++) {
        copy_units((format.head - minima) / 2, 2, lanes, lane, out_lane, at, out);
        copy_units(minima / 4 + format.block / 32 * format.quants / 4, 4, lanes, lane, out_lane, at, out);
    }
}
