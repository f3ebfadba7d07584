// Attention of one query over keys that lie anywhere, one pointer each, and whose head is the value (MLA).
//
// Heads are worked on in groups of four. Numbers per key and head lie as [key][head of the group], so that one
// vector holds LANES / 4 keys of all four heads: no key is copied and nothing is transposed.
#pragma once

#include "attention.h"

namespace longarc {

constexpr int VECTOR_KEYS = LANES / GROUP;  // keys in one vector of scores
static_assert(VECTOR_KEYS >= 1);

struct RowKeys {
    const float* const* rows;  // by ascending position
    int64_t dim, value_dim, num;
};

// Rows that are fetched while others are worked on.
struct RowsAhead {
    const float* const* rows;
    int64_t num, dim;

    void fetch(int64_t index) const {
        if (index < num)
            for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(rows[index] + d);
    }
};

#if defined(LONGARC_HAS_SHUFFLE)
template <int STEP>
inline Vec sum_exchanged(Vec* rows) {
#pragma GCC unroll 16
    for (int r = 0; r < STEP; r++) {
        exchange<STEP>(rows[r], rows[r + STEP], std::make_integer_sequence<int, LANES>{});
        rows[r] += rows[r + STEP];
    }
    if constexpr (STEP > 1)
        return sum_exchanged<STEP / 2>(rows);
    else
        return rows[0];
}
#endif

// Lane i of the result is the sum over the lanes of rows[i], always in the same order; overwrites the rows.
inline Vec sum_each(Vec* rows) {
#if defined(LONGARC_HAS_SHUFFLE)
    return sum_exchanged<LANES / 2>(rows);
#else
    Vec sums;
    for (int i = 0; i < LANES; i++) sums[i] = sum_lanes(rows[i]);
    return sums;
#endif
}

// As row_scores; HAS_REST says whether `dim` is no multiple of LANES, FETCH whether there are rows ahead. Neither changes
// a number, but what need not be asked in the loop leaves registers to the sums.
template <bool HAS_REST, bool FETCH>
inline void row_scores_of(const float* q, int64_t q_stride, const RowKeys& keys, int64_t dim, float* scores,
                          const RowsAhead& ahead) {
    const int64_t whole = dim / LANES * LANES;
    for (int64_t j = 0; j < keys.num; j += VECTOR_KEYS) {
        const float* row[VECTOR_KEYS];
        for (int k = 0; k < VECTOR_KEYS; k++) row[k] = keys.rows[std::min(j + k, keys.num - 1)];
        Vec sums[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) sums[i] = Vec{};
        auto add = [&](int64_t d, auto load_key) {
            Vec key[VECTOR_KEYS];
#pragma GCC unroll 4
            for (int k = 0; k < VECTOR_KEYS; k++) key[k] = held(load_key(row[k] + d));
#pragma GCC unroll 4
            for (int h = 0; h < GROUP; h++) {
                const Vec x = held(load(q + h * q_stride + d));
#pragma GCC unroll 4
                for (int k = 0; k < VECTOR_KEYS; k++) sums[k * GROUP + h] = multiply_add(key[k], x, sums[k * GROUP + h]);
            }
        };
        for (int64_t d = 0; d < whole; d += LANES) add(d, [](const float* from) { return load(from); });
        if constexpr (HAS_REST) {
            const int rest = int(dim - whole);
            add(whole, [rest](const float* from) { return load_first(from, rest); });
        }
        if constexpr (FETCH)
            for (int k = 0; k < VECTOR_KEYS; k++) ahead.fetch(j + k);
        store(scores + j * GROUP, sum_each(sums));
    }
}

// scores[key][head] = q[head] . key for `dim` numbers of a key; q is padded with zeros to whole vectors. Behind the
// last key its score is repeated up to a whole vector.
inline void row_scores(const float* q, int64_t q_stride, const RowKeys& keys, int64_t dim, float* scores,
                       const RowsAhead& ahead) {
    if (dim % LANES)
        row_scores_of<true, true>(q, q_stride, keys, dim, scores, ahead);
    else if (ahead.num)
        row_scores_of<false, true>(q, q_stride, keys, dim, scores, ahead);
    else
        row_scores_of<false, false>(q, q_stride, keys, dim, scores, ahead);
}

// Combines the lanes of each head; every lane of the result holds its head's value.
template <class Combine>
inline Vec over_keys_of_vector(Vec value, Combine combine) {
    float lane[LANES];
    store(lane, value);
    for (int width = LANES / 2; width >= GROUP; width /= 2)
        for (int i = 0; i < width; i++) lane[i] = combine(lane[i], lane[i + width]);
    for (int i = GROUP; i < LANES; i++) lane[i] = lane[i - GROUP];
    return load(lane);
}

// Sets the numbers behind the last key to zero.
inline void end_with_zeros(float* per_key, int64_t num_keys) {
    for (int64_t i = num_keys * GROUP; i < round_up(num_keys, VECTOR_KEYS) * GROUP; i++) per_key[i] = 0.0f;
}

// Scores become exp(score - max).
inline void row_softmax(float* scores, int64_t num_keys, SoftmaxStats* stats) {
    const int64_t size = round_up(num_keys, VECTOR_KEYS) * GROUP;
    Vec most = load(scores), total{};
    for (int64_t i = LANES; i < size; i += LANES) most = max(most, load(scores + i));
    most = over_keys_of_vector(most, [](float a, float b) { return a > b ? a : b; });
    for (int64_t i = 0; i < size; i += LANES) store(scores + i, exp(load(scores + i) - most));
    end_with_zeros(scores, num_keys);
    for (int64_t i = 0; i < size; i += LANES) total += load(scores + i);
    total = over_keys_of_vector(total, [](float a, float b) { return a + b; });
    for (int h = 0; h < GROUP; h++) stats[h] = {most[h], 1.0f / total[h]};
}

// out[head] = factor[head] * sum over keys of weights[key][head] * row[d .. d + VECS * LANES)
template <int VECS>
inline void row_sums(const float* weights, const float* factors, const RowKeys& keys, int64_t d, int count, float* out,
                     int64_t out_stride, int64_t num_heads) {
    Vec sums[GROUP][VECS];
#pragma GCC unroll 4
    for (int h = 0; h < GROUP; h++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sums[h][v] = Vec{};
    for (int64_t j = 0; j < keys.num; j++) {
        const float* row = keys.rows[j] + d;
        Vec value[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) value[v] = held(VECS == 1 ? load_upto(row, count) : load(row + v * LANES));
#pragma GCC unroll 4
        for (int h = 0; h < GROUP; h++) {
            const Vec weight = splat(weights[j * GROUP + h]);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sums[h][v] = multiply_add(weight, value[v], sums[h][v]);
        }
    }
    for (int h = 0; h < num_heads; h++)
        for (int v = 0; v < VECS; v++)
            store_upto(out + h * out_stride + d + v * LANES, sums[h][v] * factors[h], VECS == 1 ? count : LANES);
}

inline void weighted_rows(const float* weights, const float* factors, const RowKeys& keys, int64_t width, float* out,
                          int64_t out_stride, int64_t num_heads) {
#if defined(__AVX512F__) || defined(__aarch64__)
    constexpr int VECS = 4;
#else
    constexpr int VECS = 2;  // there are 16 registers, and GROUP * VECS sums must fit
#endif
    int64_t d = 0;
    for (; d + VECS * LANES <= width; d += VECS * LANES)
        row_sums<VECS>(weights, factors, keys, d, LANES, out, out_stride, num_heads);
    for (; d < width; d += LANES)
        row_sums<1>(weights, factors, keys, d, int(std::min<int64_t>(LANES, width - d)), out, out_stride, num_heads);
}

struct RowScratch {
    Floats q, scores, d_out, d_scores, d_query;
    std::vector<SoftmaxStats> stats;  // one per head, whole groups

    void reserve(int64_t num_heads, int64_t num_keys) {
        const int64_t size = round_up(num_keys, VECTOR_KEYS) * GROUP;
        if (int64_t(scores.size()) < size) {
            scores.resize(size);
            d_scores.resize(size);
        }
        if (int64_t(stats.size()) < num_heads + GROUP) stats.resize(num_heads + GROUP);
    }
};

// Up to GROUP rows of `width` numbers, times `factor`, with zeros behind each row and for missing heads.
inline const float* padded_heads(const float* from, int64_t num_heads, int64_t width, float factor,
                                 Floats& to) {
    const int64_t stride = round_up(width, LANES);
    to.assign(GROUP * stride, 0.0f);
    for (int64_t h = 0; h < num_heads; h++)
        for (int64_t d = 0; d < width; d++) to[h * stride + d] = from[h * width + d] * factor;
    return to.data();
}

// All heads [head][dim] of one query; out is [head][value_dim]. Leaves statistics in scratch.stats and adds the
// probabilities of all heads to `mass` if there is one. Without a key the output is NaN. Not inlined: decoding and training must do the same arithmetic.
LONGARC_ONE_COPY inline void attend_rows(const float* q, float scale, int64_t num_heads, const RowKeys& keys,
                                         float* out, RowScratch& s, float* mass, const RowsAhead& ahead) {
    const int64_t stride = round_up(keys.dim, LANES);
    s.reserve(num_heads, keys.num);
    if (keys.num == 0) {
        std::fill(out, out + num_heads * keys.value_dim, NAN);
        std::fill(s.stats.begin(), s.stats.begin() + num_heads, SoftmaxStats{0.0f, NAN});
        return;
    }
    for (int64_t h = 0; h < num_heads; h += GROUP) {
        const int64_t heads = std::min<int64_t>(GROUP, num_heads - h);
        const float* q_h = padded_heads(q + h * keys.dim, heads, keys.dim, scale, s.q);
        float *weights = s.scores.data(), factors[GROUP];
        row_scores(q_h, stride, keys, keys.dim, weights, h == 0 ? ahead : RowsAhead{});
        row_softmax(weights, keys.num, &s.stats[h]);
        for (int i = 0; i < GROUP; i++) factors[i] = s.stats[h + i].factor;
        weighted_rows(weights, factors, keys, keys.value_dim, out + h * keys.value_dim, keys.value_dim, heads);
        if (mass)
            for (int64_t i = 0; i < heads; i++)
                for (int64_t j = 0; j < keys.num; j++) mass[j] += weights[j * GROUP + i] * factors[i];
    }
}

// Gradient rows are padded to whole vectors, so that they are added to without care for their end.
// to[key][d ..] += sum over heads of factors[key][head] * from[head][d ..], for VECS vectors from d on.
template <int VECS>
inline void add_head_gradients(const float* from, int64_t stride, const float* factors, int64_t num_keys, int64_t d,
                      float* const* to) {
    Vec head[GROUP][VECS];
#pragma GCC unroll 4
    for (int h = 0; h < GROUP; h++)
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) head[h][v] = load(from + h * stride + d + v * LANES);
    for (int64_t j = 0; j < num_keys; j++) {
        float* row = to[j] + d;
        Vec total[VECS];
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) total[v] = load(row + v * LANES);
#pragma GCC unroll 4
        for (int h = 0; h < GROUP; h++) {
            const Vec factor = splat(factors[j * GROUP + h]);
#pragma GCC unroll 2
            for (int v = 0; v < VECS; v++) total[v] = multiply_add(head[h][v], factor, total[v]);
        }
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) store(row + v * LANES, total[v]);
    }
}

inline void add_row_gradients(const float* from, int64_t width, const float* factors, int64_t num_keys,
                              float* const* to) {
    int64_t d = 0;
    for (; d + 2 * LANES <= width; d += 2 * LANES) add_head_gradients<2>(from, width, factors, num_keys, d, to);
    if (d < width) add_head_gradients<1>(from, width, factors, num_keys, d, to);
}

// Scores become probabilities, and the gradients of the probabilities those of the scores.
inline void row_softmax_backward(float* scores, float* d_scores, int64_t num_keys, const SoftmaxStats* stats,
                                 int64_t num_heads) {
    const int64_t size = round_up(num_keys, VECTOR_KEYS) * GROUP;
    float most_of[LANES], factor_of[LANES];
    for (int i = 0; i < LANES; i++) {
        const int h = i % GROUP;
        most_of[i] = h < num_heads ? stats[h].max : 0.0f, factor_of[i] = h < num_heads ? stats[h].factor : 0.0f;
    }
    const Vec most = load(most_of), factor = load(factor_of);
    for (int64_t i = 0; i < size; i += LANES) store(scores + i, exp(load(scores + i) - most) * factor);
    end_with_zeros(scores, num_keys);
    Vec dot{};
    for (int64_t i = 0; i < size; i += LANES) dot = multiply_add(load(scores + i), load(d_scores + i), dot);
    dot = over_keys_of_vector(dot, [](float a, float b) { return a + b; });
    for (int64_t i = 0; i < size; i += LANES) store(d_scores + i, load(scores + i) * (load(d_scores + i) - dot));
}

// Gradients of attend_rows: sets d_query, adds to the gradient row of each key.
inline void attend_rows_backward(const float* q, float scale, int64_t num_heads, const RowKeys& keys,
                                 const float* d_out, const SoftmaxStats* stats, float* d_query, float* const* d_rows,
                                 RowScratch& s) {
    const int64_t stride = round_up(keys.dim, LANES), value_stride = round_up(keys.value_dim, LANES);
    s.reserve(num_heads, keys.num);
    for (int64_t h = 0; h < num_heads; h += GROUP) {
        const int64_t heads = std::min<int64_t>(GROUP, num_heads - h);
        const float* q_h = padded_heads(q + h * keys.dim, heads, keys.dim, scale, s.q);
        const float* d_out_h = padded_heads(d_out + h * keys.value_dim, heads, keys.value_dim, 1.0f, s.d_out);
        float *weights = s.scores.data(), *d_scores = s.d_scores.data();
        row_scores(q_h, stride, keys, keys.dim, weights, {});
        row_scores(d_out_h, value_stride, keys, keys.value_dim, d_scores, {});
        row_softmax_backward(weights, d_scores, keys.num, stats + h, heads);
        const float factors[GROUP] = {scale, scale, scale, scale};
        weighted_rows(d_scores, factors, keys, keys.dim, d_query + h * keys.dim, keys.dim, heads);
        add_row_gradients(q_h, stride, d_scores, keys.num, d_rows);
        add_row_gradients(d_out_h, value_stride, weights, keys.num, d_rows);
    }
}

}  // namespace longarc
