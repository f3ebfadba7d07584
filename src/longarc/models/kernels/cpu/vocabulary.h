// From hidden states to log-probabilities of tokens, and to sampled tokens: one log-softmax for both.
#pragma once

#include "bf16.h"
#include "rows.h"

namespace longarc {

struct LogSum {
    float max, value;  // value = log sum exp of the row
};

// Divides a row of logits by the temperature in place and returns its log-sum-exp.
LONGARC_ONE_COPY inline LogSum log_sum_row(float* logits, int64_t width, float temperature) {
    if (temperature != 1.0f)
        over_vectors(width, [&](int64_t i, int n) {
            store_upto(logits + i, load_upto(logits + i, n) / splat(temperature), n);
        });
    float most = -INFINITY;
    Vec highest = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) highest = max(highest, load(logits + i));
    most = max_lanes(highest);
    for (; i < width; i++) most = logits[i] > most ? logits[i] : most;
    Vec total{};
    for (i = 0; i + LANES <= width; i += LANES) total += exp(load(logits + i) - most);
    float sum = sum_lanes(total);
    for (; i < width; i++) sum += exp(logits[i] - most);
    return {most, most + std::log(sum)};
}

// Sum over the row of p * logit, for the entropy log_sum - sum; a banned token (-inf) adds nothing.
inline float expected_logit_row(const float* logits, int64_t width, float log_sum) {
    Vec total{};
    over_vectors(width, [&](int64_t i, int n) {
        const Vec z = load_upto(logits + i, n);
        const Vec p = exp(z - log_sum);
        Vec term = z > -1e30f ? p * z : Vec{};
        if (n < LANES) {
            float lane[LANES];
            store(lane, term);
            term = load_first(lane, n);
        }
        total += term;
    });
    return sum_lanes(total);
}

constexpr int64_t DRAW_BLOCK = 64;  // a row that is drawn from is padded with zeros to whole blocks

// Inverts the cumulative sums of non-negative numbers at `uniform` in [0, 1) of their total: the first index whose sum
// exceeds the draw, the last possible one if rounding puts the draw on the very end. A zero is never drawn.
inline int64_t draw_weighted(const float* weights, int64_t width, double uniform, double* all = nullptr) {
    const int64_t num_blocks = (width + DRAW_BLOCK - 1) / DRAW_BLOCK;
    thread_local std::vector<double> mass;
    mass.resize(num_blocks);
    double total = 0.0;
    for (int64_t b = 0; b < num_blocks; b++) {
        double sums[4] = {};
        for (int64_t i = 0; i < DRAW_BLOCK; i += 4)
            for (int j = 0; j < 4; j++) sums[j] += weights[b * DRAW_BLOCK + i + j];
        mass[b] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        total += mass[b];
    }
    if (all) *all = total;
    const double draw = uniform * total;
    double before = 0.0;
    int64_t last = 0;
    for (int64_t b = 0; b < num_blocks; b++) {
        if (before + mass[b] > draw) {
            double sum = before;
            for (int64_t i = b * DRAW_BLOCK; i < (b + 1) * DRAW_BLOCK; i++) {
                if (weights[i] <= 0.0f) continue;
                last = i;
                sum += weights[i];
                if (sum > draw) return i;
            }
        }
        before += mass[b];
    }
    for (int64_t i = width; i-- > 0;)
        if (weights[i] > 0.0f) return i;
    return last;
}

// Probabilities of a row of logits, with zeros up to a whole block.
inline void probability_row(const float* logits, int64_t width, float log_sum, Floats& probability) {
    const int64_t padded = round_up(width, DRAW_BLOCK);
    probability.resize(padded);
    over_vectors(width, [&](int64_t i, int n) {
        const Vec z = load_upto(logits + i, n);
        // exp() stops at -87; below, a token has no probability.
        store_upto(&probability[i], z - log_sum < -87.0f ? Vec{} : exp(z - log_sum), n);
    });
    for (int64_t i = width; i < padded; i++) probability[i] = 0.0f;
}

// Draws from the distribution of one row of logits.
inline int64_t draw_row(const float* logits, int64_t width, float log_sum, double uniform) {
    thread_local Floats probability;
    probability_row(logits, width, log_sum, probability);
    return draw_weighted(probability.data(), width, uniform);
}

inline bool is_finite_row(const float* logits, int64_t width) {
    Vec bad{};
    over_vectors(width, [&](int64_t i, int n) {
        const Vec z = load_upto(logits + i, n);
        bad += z - z;  // 0, or NaN for infinities and NaN
    });
    return sum_lanes(bad) == 0.0f;
}

struct Drawn {
    int64_t token;
    float logprob;
    bool is_finite;
};

// Draws a token from one row of logits, which is divided by the temperature in place; temperature 0 takes the maximum.
inline Drawn sample_row(float* logits, int64_t vocab, float temperature, double uniform) {
    if (!is_finite_row(logits, vocab)) return {0, 0.0f, false};
    if (temperature == 0.0f) return {std::max_element(logits, logits + vocab) - logits, 0.0f, true};
    const LogSum sum = log_sum_row(logits, vocab, temperature);
    const int64_t token = draw_row(logits, vocab, sum.value, uniform);
    return {token, logits[token] - sum.value, true};
}

// The logits of some rows, and products with a weight too large to be packed as a whole: each thread packs
// slices of its part of the vocabulary, once for all rows of the block.
struct LogitBlock {
    static constexpr int64_t MOST_ROWS = 240, MOST_FLOATS = 1 << 25, SLICE = 1024;

    explicit LogitBlock(int64_t vocab)
        : vocab(vocab),
          stride(round_up(vocab, LANES) + LANES),  // no power of two, which would crowd a few cache sets
          rows(std::min(MOST_ROWS, std::max<int64_t>(TILE_ROWS, MOST_FLOATS / stride))) {
        thread_local Scratch scratch;
        logits = scratch.floats(rows * stride);
    }

    // logits = x w^T for `count` rows.
    template <class Number>
    void product(int64_t count, int64_t hidden, const float* x, const float* w, int64_t num_threads) const {
        thread_local Scratch rounded;
        const Operand<Number> in = operand<Number>(x, hidden, count, hidden, rounded);
        for_rows(vocab, num_threads, [&](int64_t begin, int64_t total) {
            thread_local Scratch scratch;
            Number* panels = scratch.numbers<Number>(packed_size(SLICE, in.steps));
            for (int64_t first = begin; first < begin + total; first += SLICE) {
                const int64_t columns = std::min(SLICE, begin + total - first);
                pack(w + first * hidden, hidden, 1, columns, hidden, panels);
                gemm(count, columns, in.steps, in.rows, in.stride, panels, logits + first, stride);
            }
        });
    }

    // y = logits w for `count` rows, summed over one slice of the vocabulary after another.
    template <class Number>
    void product_back(int64_t count, int64_t hidden, const float* w, float* y, int64_t num_threads) const {
        for_rows(hidden, num_threads, [&](int64_t begin, int64_t columns) {
            thread_local Scratch scratch, rounded;
            Number* panels = scratch.numbers<Number>(packed_size(columns, SLICE));
            for (int64_t first = 0; first < vocab; first += SLICE) {
                const int64_t size = std::min(SLICE, vocab - first);
                const Operand<Number> in = operand<Number>(logits + first, stride, count, size, rounded);
                pack(w + first * hidden + begin, 1, hidden, columns, size, panels);
                if (first == 0)
                    gemm(count, columns, in.steps, in.rows, in.stride, panels, y + begin, hidden);
                else
                    gemm<Store::ADD>(count, columns, in.steps, in.rows, in.stride, panels, y + begin, hidden);
            }
        });
    }

    const int64_t vocab, stride, rows;
    float* logits;
};

}  // namespace longarc
