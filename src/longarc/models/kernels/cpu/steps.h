// Several decode steps of the same sequences in one call: a step's tokens are sampled here and fed to the next.
//
// The call ends early after a step in which a sequence came to its end or someone else wants a turn, so that the
// rows are the same in all steps and no step is wasted.
#pragma once

#include "new_rows.h"
#include "team.h"
#include "vocabulary.h"

namespace longarc {

struct Steps {
    int64_t max_steps, vocab;
    const void* output;            // packed output projection
    const float* temperatures;     // [row]
    const double* uniforms;        // [step][row]
    const int64_t *stop_ids, *stop_ends;  // stop ids of row r end at stop_ends[r], where those of row r + 1 begin
    const volatile int64_t* interrupt;    // set by another thread: no further step
    int64_t* tokens;               // out, [step][row]
    float* logprobs;               // out, [step][row]
    int64_t* is_finite;            // out, [row]: the logits of the last step
    int64_t num_steps;             // out: how many were made
};

constexpr int64_t DRAWN_ROWS = 64;  // whose logits exist at a time

inline int64_t logits_stride(int64_t vocab) {
    return round_up(vocab, LANES) + LANES;  // no power of two, which would crowd a few cache sets
}

// Projects hidden states to the vocabulary and draws a token for each. Every member of a team calls it; `logits` has
// room for DRAWN_ROWS rows.
template <class Number>
void draw_rows(const Rows& rows, int64_t hidden, const Steps& steps, float* logits, const Member& me) {
    thread_local Scratch rounded;
    const int64_t stride = logits_stride(steps.vocab);
    const Stretch columns = me.part(steps.vocab, PANEL);
    for (int64_t first = 0; first < rows.num; first += DRAWN_ROWS) {
        const int64_t count = std::min(DRAWN_ROWS, rows.num - first);
        const Operand<Number> in = operand<Number>(rows.hidden + first * hidden, hidden, count, hidden, rounded);
        gemm(count, columns.size(), in.steps, in.rows, in.stride,
             static_cast<const Number*>(steps.output) + columns.begin * in.steps, logits + columns.begin, stride);
        me.wait();
        const Stretch own = me.part(count);
        for (int64_t i = own.begin; i < own.end; i++) {
            const int64_t r = first + i, at = steps.num_steps * rows.num + r;
            const Drawn drawn =
                sample_row(logits + i * stride, steps.vocab, steps.temperatures[r], steps.uniforms[at]);
            steps.tokens[at] = drawn.token, steps.logprobs[at] = drawn.logprob;
            steps.is_finite[r] = drawn.is_finite;
        }
        me.wait();
    }
}

// Whether a row drew a stop id, or could not draw at all.
inline bool any_ends(const Steps& steps, const int64_t* tokens, int64_t num_rows) {
    const int64_t* stop = steps.stop_ids;
    for (int64_t r = 0; r < num_rows; r++) {
        if (!steps.is_finite[r]) return true;
        for (; stop < steps.stop_ids + steps.stop_ends[r]; stop++)
            if (*stop == tokens[r]) return true;
    }
    return false;
}

// The rows of one step after the other.
struct StepRows {
    Rows rows;
    std::vector<int64_t> positions;

    explicit StepRows(const Rows& first) : rows(first), positions(first.positions, first.positions + first.num) {
        rows.positions = positions.data();
    }

    // Counts a finished step and lets the rows go on with its tokens; false where there is no further step.
    bool advance(Steps& steps) {
        rows.tokens = steps.tokens + steps.num_steps++ * rows.num;
        if (*steps.interrupt || any_ends(steps, rows.tokens, rows.num)) return false;
        for (int64_t& position : positions) position++;
        return steps.num_steps < steps.max_steps;
    }
};

}  // namespace longarc
