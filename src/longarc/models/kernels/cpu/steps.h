// Several decode steps of the same sequences in one call: a step's tokens are sampled here and fed to the next.
//
// The call ends early after a step in which a sequence came to its end or someone else wants a turn, so that the
// rows are the same in all steps and no step is wasted.
#pragma once

#include "decode.h"
#include "vocabulary.h"

namespace longarc {

struct Steps {
    int64_t max_steps, vocab;
    const float* output;           // packed output projection
    const float* temperatures;     // [row]
    const double* uniforms;        // [step][row]
    const int64_t *stop_ids, *stop_ends;  // stop ids of row r end at stop_ends[r], where those of row r + 1 begin
    const volatile int64_t* interrupt;    // set by another thread: no further step
    int64_t* tokens;               // out, [step][row]
    float* logprobs;               // out, [step][row]
    int64_t* is_finite;            // out, [row]: the logits of the last step
    int64_t num_steps;             // out: how many were made
};

// Projects hidden states to the vocabulary and draws a token for each; logits of a block stay in the cache.
inline void draw_rows(const Rows& rows, int64_t hidden, const Steps& steps, int64_t step, int64_t num_threads) {
    constexpr int64_t BLOCK = 60;
    for_rows(rows.num, num_threads, [&](int64_t begin, int64_t total) {
        thread_local Scratch scratch;
        float* logits = scratch.floats(BLOCK * steps.vocab);
        const int64_t num_blocks = (total + BLOCK - 1) / BLOCK;
        for (int64_t b = 0; b < num_blocks; b++) {
            const int64_t first = begin + total * b / num_blocks, count = begin + total * (b + 1) / num_blocks - first;
            gemm(count, steps.vocab, hidden, rows.hidden + first * hidden, hidden, steps.output, logits, steps.vocab);
            for (int64_t i = 0; i < count; i++) {
                const int64_t r = first + i, at = step * rows.num + r;
                const Drawn drawn = sample_row(logits + i * steps.vocab, steps.vocab, steps.temperatures[r],
                                               steps.uniforms[at]);
                steps.tokens[at] = drawn.token, steps.logprobs[at] = drawn.logprob;
                steps.is_finite[r] = drawn.is_finite;
            }
        }
    });
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

// `run(rows)` takes rows through all layers.
template <class Run>
inline void run_steps(const Rows& first, int64_t hidden, Steps& steps, int64_t num_threads, Run run) {
    std::vector<int64_t> positions(first.positions, first.positions + first.num);
    Rows rows = first;
    rows.positions = positions.data();
    for (steps.num_steps = 0; steps.num_steps < steps.max_steps;) {
        run(rows);
        draw_rows(rows, hidden, steps, steps.num_steps, num_threads);
        rows.tokens = steps.tokens + steps.num_steps++ * rows.num;
        if (*steps.interrupt || any_ends(steps, rows.tokens, rows.num)) return;
        for (int64_t& position : positions) position++;
    }
}

}  // namespace longarc
