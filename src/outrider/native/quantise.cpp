#include "quantise.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "vec_portable.h"  // wide(), narrow(): half precision and back

namespace {

constexpr int TOP = 15;  // the highest level
// The range of a block is cut at both ends: a few numbers far out would make the steps of all others larger.
constexpr float CUTS[] = {1.0f, 0.9f, 0.8f};
constexpr int FITS = 3;  // of scale and minimum to the levels, and of levels to those

constexpr int WIDTH = 4, PARTS = Q4_1_BLOCK / WIDTH;
typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));

struct Block {
    Floats part[PARTS];
};

struct Line {  // a level means minimum + scale * level
    float scale, minimum;
};

Line as_stored(Line line) { return {wide(narrow(line.scale)), wide(narrow(line.minimum))}; }

template <class Term> float sum(const Term &term) {
    Floats sums = {};
    for (int p = 0; p < PARTS; p++) sums += term(p);
    float all = 0.0f;
    for (int i = 0; i < WIDTH; i++) all += sums[i];
    return all;
}

// The nearest level of each number. Returns the error, squared and weighted.
float choose(const Block &numbers, const Block &weights, Line line, Block *levels) {
    const float steps = line.scale == 0.0f ? 0.0f : 1.0f / line.scale;
    return sum([&](int p) {
        Floats exact = (numbers.part[p] - line.minimum) * steps + 0.5f;
        exact = exact > 0.0f ? exact : Floats{};  // what is no number becomes 0, too
        exact = exact > TOP + 0.5f ? Floats{} + (TOP + 0.5f) : exact;
        levels->part[p] = __builtin_convertvector(__builtin_convertvector(exact, Ints), Floats);
        const Floats miss = line.minimum + line.scale * levels->part[p] - numbers.part[p];
        return weights.part[p] * miss * miss;
    });
}

// The line through numbers over their levels by least squares; `line` where they all have one level.
Line fit(const Block &numbers, const Block &weights, const Block &levels, Line line) {
    const Floats *x = levels.part, *y = numbers.part, *weight = weights.part;
    const float w = sum([&](int p) { return weight[p]; });
    const float wx = sum([&](int p) { return weight[p] * x[p]; });
    const float wxx = sum([&](int p) { return weight[p] * x[p] * x[p]; });
    const float wy = sum([&](int p) { return weight[p] * y[p]; });
    const float wxy = sum([&](int p) { return weight[p] * x[p] * y[p]; });
    const float spread = w * wxx - wx * wx;
    if (spread <= 1e-6f * w * wxx) return line;
    return {(w * wxy - wx * wy) / spread, (wxx * wy - wx * wxy) / spread};
}

}  // namespace

void quantise_block(const float *numbers, const float *weights, uint8_t *stored) {
    Block wanted, counts, levels, best_levels = {};
    memcpy(&wanted, numbers, sizeof(wanted));
    std::fill(counts.part, counts.part + PARTS, Floats{} + 1.0f);
    if (weights) memcpy(&counts, weights, sizeof(counts));
    const auto [low, high] = std::minmax_element(numbers, numbers + Q4_1_BLOCK);
    Line best = {0, 0};
    float least = INFINITY;
    for (const float cut : CUTS) {
        const float middle = 0.5f * (*low + *high), reach = 0.5f * (*high - *low) * cut;
        Line line = {2 * reach / TOP, middle - reach};
        for (int turn = 0; turn < FITS; turn++) {
            line = as_stored(line);
            const float error = choose(wanted, counts, line, &levels);
            if (error < least) least = error, best = line, best_levels = levels;
            line = fit(wanted, counts, levels, line);
        }
    }
    const uint16_t head[] = {narrow(best.scale), narrow(best.minimum)};
    memcpy(stored, head, sizeof(head));
    const int half = Q4_1_BLOCK / 2;
    const auto level = [&](int i) { return int(best_levels.part[i / WIDTH][i % WIDTH]); };
    for (int i = 0; i < half; i++) stored[4 + i] = uint8_t(level(i) | level(i + half) << 4);
}
