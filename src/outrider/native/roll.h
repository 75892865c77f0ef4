// Chains that a head guesses by itself: what is drawn from its rows is what it is fed next.
#pragma once

#include <stdint.h>

#include "forward.h"
#include "sampling.h"

struct Roll {
    int32_t num_chains, steps;
    int32_t vocab_size;       // tokens that may be drawn
    int32_t hidden_layer;     // which of its hidden states it goes on with (see Pass::hidden_layers)
    const int32_t *ids;       // [columns] the token of each row of the output; null: they are the tokens
    const SamplingJob *jobs;  // [chains]
    const int32_t *lengths;   // [chains] tokens before the first that is drawn
    const int32_t *streams;   // [chains] the noise to draw with
    int64_t *drawn;           // [chains, steps]
    float *probs;             // [chains, steps, vocab_size] what each was drawn from (see draw_token); or null
};

// `first` reads what is known; the rows it wants are the last of each chain, and nothing else is taken from it. There
// are pages for all that follows but the last token, which is not fed. False: a row was unusable, the rest is not drawn.
bool roll_on(const Model &model, const Pass &first, const Roll &roll, const Kernels &kernels);
