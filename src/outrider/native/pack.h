// From GGUF's blocks to tiles and back.
#pragma once

#include <stdint.h>

#include "table.h"

// Bytes of a tile of `lanes` rows; 0 for a type that has no tiles.
int64_t tile_bytes(int32_t type, int64_t columns, int lanes);

// Bytes of one row as GGUF stores it.
int64_t stored_row_bytes(int32_t type, int64_t columns);

// Tiles first..last-1 of a matrix whose rows lie at `stored`, into its data. Rows beyond the last are zero.
void pack_tiles(const Matrix &matrix, const uint8_t *stored, int first, int last, int lanes, uint8_t *out);

// Whether the scales of these stored rows are all finite; of weights that are not quantised, nothing is said.
bool has_sound_scales(const Matrix &matrix, const uint8_t *stored, int first, int last);

// One row of a packed matrix as numbers: exactly what GGUF's block says.
void unpack_row(const Matrix &matrix, int row, int lanes, float *out);

// A row of one packed matrix as a row of another of the same type and columns.
void copy_row(const Matrix &from, int row, const Matrix &to, int to_row, int lanes, uint8_t *out);
