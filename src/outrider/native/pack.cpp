#include "pack.h"

#include <string.h>

#include "vec_portable.h"  // wide(): half precision to single

namespace {

// A stored block: numbers 0..15 to 0..63 (or int8), its scales and minima, whatever the type.
struct Block {
    uint16_t d = 0, minimum = 0;  // half precision
    uint8_t quants[SUPER];
    uint8_t scales[16] = {}, minima[8] = {};
};

struct Format {
    int block;         // weights
    int stored_bytes;  // of a block in the file
    int head;          // bytes per row of d, minimum and scales in a tile
    int quants;        // bytes per row of 32 weights in a tile
    int extra_bits;    // beyond four
};

Format format_of(int32_t type) {
    switch (type) {
        case Q4_0: return {32, 18, 2, 16, 0};
        case Q4_1: return {32, 20, 4, 16, 0};
        case Q5_0: return {32, 22, 2, 20, 1};
        case Q5_1: return {32, 24, 4, 20, 1};
        case Q8_0: return {32, 34, 2, 32, 4};
        case Q4_K: return {256, 144, 4 + 16, 16, 0};
        case Q5_K: return {256, 176, 4 + 16, 20, 1};
        case Q6_K: return {256, 210, 2 + 16, 24, 2};
    }
    return {0, 0, 0, 0, 0};
}

uint16_t half_at(const uint8_t *at) { return uint16_t(at[0] | at[1] << 8); }

void read_nibbles(const uint8_t *at, uint8_t *quants) {
    for (int j = 0; j < 16; j++) {
        quants[j] = at[j] & 0x0F;
        quants[j + 16] = at[j] >> 4;
    }
}

void read_fifth_bits(const uint8_t *at, uint8_t *quants) {
    for (int j = 0; j < 32; j++) quants[j] |= ((at[j / 8] >> (j % 8)) & 1) << 4;
}

// Eight scales and eight minima of 6 bits in twelve bytes.
void read_scales(const uint8_t *at, Block &block) {
    for (int j = 0; j < 4; j++) {
        block.scales[j] = at[j] & 63;
        block.minima[j] = at[j + 4] & 63;
        block.scales[j + 4] = uint8_t((at[j + 8] & 0x0F) | (at[j] >> 6) << 4);
        block.minima[j + 4] = uint8_t((at[j + 8] >> 4) | (at[j + 4] >> 6) << 4);
    }
}

void read_super_nibbles(const uint8_t *at, uint8_t *quants) {
    for (int pair = 0; pair < 4; pair++)
        for (int j = 0; j < 32; j++) {
            quants[64 * pair + j] = at[32 * pair + j] & 0x0F;
            quants[64 * pair + 32 + j] = at[32 * pair + j] >> 4;
        }
}

void read_sixes(const uint8_t *low, const uint8_t *high, uint8_t *quants) {
    for (int part = 0; part < 2; part++, low += 64, high += 32, quants += 128)
        for (int j = 0; j < 32; j++) {
            quants[j] = uint8_t((low[j] & 0x0F) | (high[j] & 3) << 4);
            quants[j + 32] = uint8_t((low[j + 32] & 0x0F) | (high[j] >> 2 & 3) << 4);
            quants[j + 64] = uint8_t(low[j] >> 4 | (high[j] >> 4 & 3) << 4);
            quants[j + 96] = uint8_t(low[j + 32] >> 4 | (high[j] >> 6) << 4);
        }
}

Block read_block(int32_t type, const uint8_t *at) {
    Block block;
    if (type == Q6_K) {
        read_sixes(at, at + 128, block.quants);
        memcpy(block.scales, at + 192, 16);
        block.d = half_at(at + 208);
        return block;
    }
    block.d = half_at(at);
    at += 2;
    if (type == Q4_1 || type == Q5_1 || type == Q4_K || type == Q5_K) {
        block.minimum = half_at(at);
        at += 2;
    }
    if (type == Q8_0) {
        memcpy(block.quants, at, 32);
    } else if (type == Q4_0 || type == Q4_1) {
        read_nibbles(at, block.quants);
    } else if (type == Q5_0 || type == Q5_1) {
        read_nibbles(at + 4, block.quants);
        read_fifth_bits(at, block.quants);
    } else {
        read_scales(at, block);
        at += 12;
        if (type == Q5_K) {
            read_super_nibbles(at + 32, block.quants);
            for (int j = 0; j < SUPER; j++) block.quants[j] |= (at[j % 32] >> (j / 32) & 1) << 4;
        } else {
            read_super_nibbles(at, block.quants);
        }
    }
    return block;
}

// Where input k of a row stands among its 32: vector k / 4, byte k % 4 of its lane.
struct Place {
    int vector, byte;
    Place(int k, int lane) : vector(k / 4), byte(4 * lane + k % 4) {}
};

void write_quants(const uint8_t *quants, int extra_bits, int lane, int lanes, uint8_t *out) {
    const int width = 4 * lanes;  // bytes of a vector
    for (int k = 0; k < 32; k++) {
        const Place place(k, lane);
        if (extra_bits == 4) {
            out[place.vector * width + place.byte] = quants[k];
            continue;
        }
        if (extra_bits == 2) {  // three vectors of each four, and the fourth in their upper bits
            uint8_t *group = out + place.vector / 4 * 3 * width + place.byte;
            if (place.vector % 4 < 3) {
                group[place.vector % 4 * width] |= quants[k];
            } else {
                for (int part = 0; part < 3; part++) group[part * width] |= uint8_t((quants[k] >> 2 * part & 3) << 6);
            }
            continue;
        }
        out[place.vector % 4 * width + place.byte] |= uint8_t((quants[k] & 0x0F) << (place.vector < 4 ? 0 : 4));
        const int extra = quants[k] >> 4;
        if (extra_bits == 1) out[4 * width + place.byte] |= uint8_t(extra << place.vector);
    }
}

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

void write_half(uint16_t value, uint8_t *at) { memcpy(at, &value, 2); }

uint16_t read_half(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, 2);
    return value;
}

// Minima of a super-block are laid out like quants: four of a row together, row beside row.
int minimum_at(int block, int lane, int lanes) { return block / 4 * 4 * lanes + 4 * lane + block % 4; }

void write_block(const Block &block, int32_t type, const Format &format, int lane, int lanes, uint8_t *out) {
    write_half(block.d, out + 2 * lane);
    int head = 2 * lanes;
    if (type != Q6_K && format.head > 2) {
        write_half(block.minimum, out + head + 2 * lane);
        head += 2 * lanes;
    }
    if (format.block == SUPER) {
        for (int j = 0; j < 16; j++) {
            if (type == Q6_K) out[head + j * lanes + lane] = block.scales[j] ^ 0x80;  // signed: 128 is added
            else if (j < 8) out[head + j * lanes + lane] = block.scales[j];
            else out[head + 8 * lanes + minimum_at(j - 8, lane, lanes)] = block.minima[j - 8];
        }
    }
    out += format.head * lanes;
    for (int b = 0; b < format.block / 32; b++)
        write_quants(block.quants + 32 * b, format.extra_bits, lane, lanes, out + b * format.quants * lanes);
}

// small: where the scales of a tile's super-block begin.
float value_of(int32_t type, float d, float minimum, const uint8_t *small, int lane, int lanes, int k, uint8_t quant) {
    switch (type) {
        case Q4_0: return d * float(quant - 8);
        case Q5_0: return d * float(quant - 16);
        case Q8_0: return d * float(int8_t(quant));
        case Q4_1:
        case Q5_1: return d * float(quant) + minimum;
        case Q6_K: return d * float(small[k / 16 * lanes + lane] - 128) * float(quant - 32);
    }
    const float scale = d * float(small[k / 32 * lanes + lane]);
    return scale * float(quant) - minimum * float(small[8 * lanes + minimum_at(k / 32, lane, lanes)]);
}

int number_bytes(int32_t type) { return type == F32 ? 4 : type == F16 ? 2 : 0; }

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
    const int64_t row_bytes = stored_row_bytes(matrix.type, matrix.columns);
    const int bytes = number_bytes(matrix.type);
    const Format format = format_of(matrix.type);
    for (int tile = first; tile < last; tile++) {
        uint8_t *at = out + tile * matrix.tile_bytes;
        memset(at, 0, size_t(matrix.tile_bytes));
        for (int lane = 0; lane < lanes && tile * lanes + lane < matrix.rows; lane++) {
            const uint8_t *row = stored + (int64_t(tile) * lanes + lane) * row_bytes;
            if (bytes) {
                for (int64_t k = 0; k < matrix.columns; k++)
                    memcpy(at + (k * lanes + lane) * bytes, row + k * bytes, size_t(bytes));
                continue;
            }
            const int64_t block_bytes = int64_t(format.head + format.block / 32 * format.quants) * lanes;
            for (int64_t b = 0; b < matrix.columns / format.block; b++)
                write_block(read_block(matrix.type, row + b * format.stored_bytes), matrix.type, format, lane, lanes,
                            at + b * block_bytes);
        }
    }
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
