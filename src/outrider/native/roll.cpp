#include "roll.h"

#include <math.h>
#include <string.h>

#include <vector>

namespace {

class Chains {
  public:
    Chains(const Model &model, const Pass &first, const Roll &roll, const Kernels &kernels)
        : model_(model),
          roll_(roll),
          kernels_(kernels),
          pass_(first),
          logits_(size_t(roll.num_chains) * model.num_columns),
          hidden_(size_t(first.num_rows) * model.width),
          state_(hidden_.data()) {
        pass_.logits = logits_.data();
        pass_.num_hidden = 1;
        pass_.hidden_layers = &roll_.hidden_layer;
        pass_.hidden = &state_;
    }

    bool all() {
        for (int step = 0; step < roll_.steps; step++) {
            if (step == 1) settle();
            if (step > 0) move_on(step);
            forward(model_, pass_, kernels_);
            for (int chain = 0; chain < roll_.num_chains; chain++) {
                const int token = draw(chain, step);
                if (token < 0) return false;
                roll_.drawn[int64_t(chain) * roll_.steps + step] = token;
            }
        }
        return true;
    }

  private:
    // From the first pass to those of one row for each chain, which come behind its last one and go in with its state.
    void settle() {
        const size_t count = size_t(roll_.num_chains), bytes = sizeof(float) * size_t(model_.width);
        for (auto *list : {&tokens_, &positions_, &places_, &tables_, &firsts_, &runs_, &rows_, &extra_ends_})
            list->assign(count, 0);
        for (size_t chain = 0; chain < count; chain++) {
            const int row = pass_.wanted[chain];
            positions_[chain] = pass_.positions[row];
            tables_[chain] = pass_.tables[row];
            firsts_[chain] = pass_.firsts[row];
            runs_[chain] = pass_.runs[row];
            rows_[chain] = int32_t(chain);
            memmove(state_ + chain * model_.width, state_ + int64_t(row) * model_.width, bytes);
        }
        pass_.num_rows = roll_.num_chains;
        pass_.tokens = tokens_.data();
        pass_.positions = positions_.data();
        pass_.places = places_.data();
        pass_.tables = tables_.data();
        pass_.firsts = firsts_.data();
        pass_.runs = runs_.data();
        pass_.extra_ends = extra_ends_.data();
        pass_.wanted = rows_.data();
        pass_.inputs = state_;  // read at the beginning of a pass, written at its end
    }

    // What was drawn last stands one place further.
    void move_on(int step) {
        const int size = model_.page_size;
        for (int chain = 0; chain < roll_.num_chains; chain++) {
            const int place = runs_[chain]++;
            positions_[chain]++;
            places_[chain] = pass_.pages[tables_[chain] + place / size] * size + place % size;
            tokens_[chain] = int32_t(roll_.drawn[int64_t(chain) * roll_.steps + step - 1]);
        }
    }

    int draw(int chain, int step) {
        const SamplingJob &job = roll_.jobs[chain];
        const float *row = logits_.data() + int64_t(chain) * model_.num_columns;
        const int position = roll_.lengths[chain] + step, stream = roll_.streams[chain];
        const int64_t at = (int64_t(chain) * roll_.steps + step) * roll_.vocab_size;
        float *probs = roll_.probs ? roll_.probs + at : nullptr;
        if (!roll_.ids) return draw_token(job, row, roll_.vocab_size, position, stream, probs);
        if (job.temperature == 0.0f && !probs) {  // the highest of its own tokens is the highest of all
            const int own = draw_token(job, row, model_.num_columns, position, stream, nullptr);
            return own < 0 ? own : roll_.ids[own];
        }
        whole_.assign(size_t(roll_.vocab_size), -INFINITY);  // noise goes by the target's tokens
        for (int own = 0; own < model_.num_columns; own++) whole_[roll_.ids[own]] = row[own];
        return draw_token(job, whole_.data(), roll_.vocab_size, position, stream, probs);
    }

    const Model &model_;
    const Roll &roll_;
    const Kernels &kernels_;
    Pass pass_;
    std::vector<float> logits_, hidden_, whole_;
    float *state_;
    std::vector<int32_t> tokens_, positions_, places_, tables_, firsts_, runs_, rows_, extra_ends_;
};

}  // namespace

bool roll_on(const Model &model, const Pass &first, const Roll &roll, const Kernels &kernels) {
    return Chains(model, first, roll, kernels).all();
}
