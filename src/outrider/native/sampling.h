// What others ask of sampling.cpp.
#pragma once

#include <stdint.h>

// The settings of a request, as native/sampling.py writes them.
struct SamplingJob {
    int32_t first_word;  // the seed
    int32_t second_word;
    float temperature;    // 0: greedy
    int32_t top_k;        // 0: off
    float top_p;          // above 1: off
    float min_p;          // its logarithm; minus infinity: off
    int32_t is_matching;  // judged by the target's own token, or by rejection
};

// The token that a job draws from a row at a position; -1 where the row is unusable. probs [size] or null: what it was
// drawn from, one-hot where the job is judged by matching.
int32_t draw_token(const SamplingJob &job, const float *logits, int32_t size, int32_t position, int32_t stream,
                   float *probs);
