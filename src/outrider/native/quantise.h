// Numbers to four bits, for the weights of drafts.
#pragma once

#include <stdint.h>

constexpr int Q4_1_BLOCK = 32, Q4_1_BYTES = 20;  // weights of a block, bytes of one in a file

// Blocks of numbers as GGUF stores them in Q4_1: scale, minimum, 32 levels. weights: how much the error of each of the
// 32 counts; null: all alike.
void quantise_block(const float *numbers, const float *weights, uint8_t *stored);
