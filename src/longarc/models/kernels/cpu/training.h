// Selection and attention over packed sequences, forward and backward, without any [queries, keys] tensor.
//
// A run is consecutive queries of one sequence; its keys are listed by position. Runs of one tree (a shared
// prompt and what continues it) are worked on in order by one thread, so that gradients add up in one order.
#pragma once

#include "gemm.h"
#include "row_attention.h"

namespace longarc {

struct Run {
    int64_t first_query, num_queries, first_position, first_key;  // first_key: where its list begins in key_rows

    int64_t num_keys() const { return first_position + num_queries; }
};

struct Runs {
    const Run* run;
    int64_t num;
    const int64_t* key_rows;
};

// Runs whose sequences begin in the same row, in order.
inline std::vector<std::vector<int64_t>> trees_of(const Runs& runs) {
    std::vector<std::vector<int64_t>> trees;
    std::vector<std::pair<int64_t, int64_t>> roots;
    for (int64_t i = 0; i < runs.num; i++) roots.emplace_back(runs.key_rows[runs.run[i].first_key], i);
    std::stable_sort(roots.begin(), roots.end(), [](auto& a, auto& b) { return a.first < b.first; });
    for (size_t i = 0; i < roots.size(); i++) {
        if (i == 0 || roots[i].first != roots[i - 1].first) trees.emplace_back();
        trees.back().push_back(roots[i].second);
    }
    return trees;
}

struct SelectShape {
    int64_t num_heads, dim, topk;
};

// selected[query][topk]: rows in ascending order of position, then -1; none where scores are NaN.
inline void select_run(const SelectShape& shape, const Runs& runs, const Run& run, const float* queries,
                       const float* weights, const float* keys, int64_t* selected) {
    const int64_t* rows = runs.key_rows + run.first_key;
    const int64_t last = run.num_keys(), topk = shape.topk;
    Floats blocked(round_up(last, LANES) * shape.dim), scores(round_up(last, LANES));
    std::vector<int32_t> chosen(topk + LANES);
    if (last > topk)
        for (int64_t j = 0; j < last; j++) write_blocked(blocked.data(), j, keys + rows[j] * shape.dim, shape.dim);
    for (int64_t i = 0; i < run.num_queries; i++) {
        const int64_t query = run.first_query + i, visible = run.first_position + i + 1;
        int64_t* out = selected + query * topk;
        if (visible <= topk) {
            for (int64_t j = 0; j < topk; j++) out[j] = j < visible ? rows[j] : -1;
            continue;
        }
        index_scores(queries + query * shape.num_heads * shape.dim, weights + query * shape.num_heads,
                     shape.num_heads, shape.dim, blocked.data(), visible, scores.data());
        const bool is_ordered = choose_best(scores.data(), visible, topk, chosen.data());
        for (int64_t j = 0; j < topk; j++) out[j] = is_ordered ? rows[chosen[j]] : -1;
    }
}

// Queries [query][head][dim] over key heads; values are a table of their own, or (value == nullptr) the leading
// value_dim columns of the keys, which then have one head.
struct AttentionShape {
    int64_t num_heads, num_key_heads, dim, value_dim;
    int64_t topk;  // keys per query in `selected`, or without it the last ones that it sees; 0 = all that it sees;
                   // needs value == nullptr
    float scale;

    int64_t group() const { return num_heads / num_key_heads; }
};

struct AttentionInputs {
    const float *query, *key, *value;
    const int64_t* selected;  // [query][topk] or nullptr
};

// Keys and values of one key head, gathered by row number.
struct GatheredHead {
    Gathered keys, values;

    void gather(const AttentionShape& shape, const AttentionInputs& in, int64_t head, const int64_t* rows,
                int64_t num) {
        keys.gather(in.key + head * shape.dim, shape.num_key_heads * shape.dim, rows, num, shape.dim);
        values.gather(in.value + head * shape.value_dim, shape.num_key_heads * shape.value_dim, rows, num,
                      shape.value_dim);
    }

    Keys first(const AttentionShape& shape, int64_t num) const {
        return {keys.blocked.data(), shape.dim, values.rows.data(), values.stride, shape.value_dim, num,
                one_page(num), 0, 0};
    }
};

inline int64_t count_selected(const int64_t* rows, int64_t topk) {
    int64_t count = topk;
    while (count > 0 && rows[count - 1] < 0) count--;
    return count;
}

// The keys of a query where values are in the keys: the selected rows, or the last (or all) of the run up to itself.
template <class Pointer>
inline int64_t rows_seen(const AttentionShape& shape, const AttentionInputs& in, const Runs& runs, const Run& run,
                         int64_t index, Pointer table, int64_t stride, std::vector<Pointer>& rows) {
    const int64_t query = run.first_query + index, seen = run.first_position + index + 1;
    const int64_t last = shape.topk ? std::min(shape.topk, seen) : seen;
    const int64_t* numbers = in.selected ? in.selected + query * shape.topk : runs.key_rows + run.first_key + seen - last;
    const int64_t num = in.selected ? count_selected(numbers, shape.topk) : last;
    if (int64_t(rows.size()) < num) rows.resize(num);
    for (int64_t j = 0; j < num; j++) rows[j] = table + numbers[j] * stride;
    return num;
}

// As attention_run, where values are in the keys; mass [query][topk] or nullptr sums probabilities over heads.
inline void row_attention_run(const AttentionShape& shape, const AttentionInputs& in, const Runs& runs, const Run& run,
                              float* out, SoftmaxStats* stats, float* mass) {
    thread_local std::vector<const float*> rows;
    thread_local RowScratch scratch;
    for (int64_t i = 0; i < run.num_queries; i++) {
        const int64_t query = run.first_query + i, head = query * shape.num_heads;
        const int64_t num = rows_seen(shape, in, runs, run, i, in.key, shape.dim, rows);
        attend_rows(in.query + head * shape.dim, shape.scale, shape.num_heads,
                    {rows.data(), shape.dim, shape.value_dim, num}, out + head * shape.value_dim, scratch,
                    mass ? mass + query * shape.topk : nullptr, {});
        std::copy(scratch.stats.begin(), scratch.stats.begin() + shape.num_heads, stats + head);
    }
}

inline void row_attention_backward_run(const AttentionShape& shape, const AttentionInputs& in, const Runs& runs,
                                       const Run& run, const float* d_out, const SoftmaxStats* stats, float* d_query,
                                       float* d_key) {
    thread_local std::vector<const float*> rows;
    thread_local std::vector<float*> d_rows;
    thread_local RowScratch scratch;
    for (int64_t i = 0; i < run.num_queries; i++) {
        const int64_t query = run.first_query + i, head = query * shape.num_heads;
        const int64_t num = rows_seen(shape, in, runs, run, i, in.key, shape.dim, rows);
        rows_seen(shape, in, runs, run, i, d_key, round_up(shape.dim, LANES), d_rows);
        attend_rows_backward(in.query + head * shape.dim, shape.scale, shape.num_heads,
                             {rows.data(), shape.dim, shape.value_dim, num}, d_out + head * shape.value_dim,
                             stats + head, d_query + head * shape.dim, d_rows.data(), scratch);
    }
}

// Dense attention with values of their own: out [query][head][value_dim], stats [query][head].
inline void attention_run(const AttentionShape& shape, const AttentionInputs& in, const Runs& runs, const Run& run,
                          float* out, SoftmaxStats* stats) {
    thread_local GatheredHead gathered;
    thread_local AttendScratch scratch;
    for (int64_t g = 0; g < shape.num_key_heads; g++) {
        gathered.gather(shape, in, g, runs.key_rows + run.first_key, run.num_keys());
        for (int64_t i = 0; i < run.num_queries; i++) {
            const int64_t query = run.first_query + i, head = query * shape.num_heads + g * shape.group();
            attend(in.query + head * shape.dim, shape.scale, shape.group(),
                   gathered.first(shape, run.first_position + i + 1), out + head * shape.value_dim, scratch);
            std::copy(scratch.stats.begin(), scratch.stats.begin() + shape.group(), stats + head);
        }
    }
}

struct BackwardScratch {
    Floats weights, d_scores, q, d_out, d_query;
};

// A gradient table whose rows are padded to whole vectors, so that rows are added to without care for their end.
struct GradientRows {
    float* first;
    int64_t stride;
    const int64_t* rows;
};

// rows[j] += sum_h coefficients[h][j] * vectors[h], over vectors of `width` padded floats.
template <int HEADS>
inline void add_outer(const float* coefficients, int64_t coefficient_stride, const float* vectors, int64_t width,
                      int64_t num_keys, const GradientRows& to) {
    for (int64_t d = 0; d < width; d += LANES) {
        Vec v[HEADS];
        for (int h = 0; h < HEADS; h++) v[h] = load(vectors + h * width + d);
        for (int64_t j = 0; j < num_keys; j++) {
            float* row = to.first + to.rows[j] * to.stride + d;
            Vec total = load(row);
#pragma GCC unroll 4
            for (int h = 0; h < HEADS; h++)
                total = multiply_add(v[h], splat(coefficients[h * coefficient_stride + j]), total);
            store(row, total);
        }
    }
}

// Gradient of up to GROUP heads of one query; s.q holds the scaled, padded query and s.d_out the padded gradient.
template <int HEADS>
inline void heads_backward(const AttentionShape& shape, const GatheredHead& gathered,
                           int64_t num, const SoftmaxStats* stats, float* d_query, const GradientRows& d_keys,
                           const GradientRows& d_values, BackwardScratch& s) {
    const int64_t stride = scores_stride(num);
    const Gathered &keys = gathered.keys, &values = gathered.values;
    if (int64_t(s.weights.size()) < GROUP * stride) {
        s.weights.resize(GROUP * stride);
        s.d_scores.resize(GROUP * stride);
    }
    float *weights = s.weights.data(), *d_scores = s.d_scores.data();
    const int64_t value_block = shape.value_dim * LANES;
    scores_of<HEADS>(s.q.data(), keys.stride, keys.blocked.data(), shape.dim * LANES, shape.dim, num, weights, stride);
    scores_of<HEADS>(s.d_out.data(), values.stride, values.blocked.data(), value_block, shape.value_dim, num, d_scores,
                     stride);
    SoftmaxStats scale[HEADS];
    for (int h = 0; h < HEADS; h++) {
        float *w = weights + h * stride, *d = d_scores + h * stride;
        Vec dot{};
        for (int64_t j = num; j < round_up(num, LANES); j++) w[j] = -INFINITY, d[j] = 0.0f;
        for (int64_t j = 0; j < num; j += LANES) {
            const Vec weight = exp(load(w + j) - stats[h].max) * stats[h].factor;
            store(w + j, weight);
            dot = multiply_add(weight, load(d + j), dot);
        }
        const float mean = sum_lanes(dot);
        for (int64_t j = 0; j < num; j += LANES) store(d + j, load(w + j) * (load(d + j) - mean));
        scale[h] = {0.0f, shape.scale};
    }
    float* dq = s.d_query.data();
    auto keys_from = [&](int64_t d) { return Values{keys.rows.data() + d, keys.stride, one_page(num), 0}; };
    int64_t d = 0;
    for (; d + 2 * LANES <= keys.stride; d += 2 * LANES)
        weighted_values<HEADS, 2>(d_scores, stride, scale, keys_from(d), num, dq + d, keys.stride, LANES);
    for (; d < keys.stride; d += LANES)
        weighted_values<HEADS, 1>(d_scores, stride, scale, keys_from(d), num, dq + d, keys.stride, LANES);
    for (int h = 0; h < HEADS; h++)
        std::memcpy(d_query + h * shape.dim, dq + h * keys.stride, sizeof(float) * shape.dim);
    add_outer<HEADS>(d_scores, stride, s.q.data(), keys.stride, num, d_keys);
    const int64_t value_width = round_up(shape.value_dim, LANES);
    for (int h = 0; h < HEADS; h++)
        std::memmove(s.d_out.data() + h * value_width, s.d_out.data() + h * values.stride, sizeof(float) * value_width);
    add_outer<HEADS>(weights, stride, s.d_out.data(), value_width, num, d_values);
}

inline void query_backward(const AttentionShape& shape, const AttentionInputs& in, const GatheredHead& gathered,
                           int64_t head, int64_t num, const float* d_out, const SoftmaxStats* stats, float* d_query,
                           const GradientRows& d_keys, const GradientRows& d_values, BackwardScratch& s) {
    const int64_t q_stride = gathered.keys.stride, v_stride = gathered.values.stride;
    for (int64_t h = 0; h < shape.group(); h += GROUP) {
        const int64_t heads = std::min<int64_t>(GROUP, shape.group() - h), at = head + h;
        s.q.assign(GROUP * q_stride, 0.0f);
        s.d_out.assign(GROUP * v_stride, 0.0f);
        s.d_query.resize(GROUP * q_stride);
        for (int64_t i = 0; i < heads; i++) {
            for (int64_t d = 0; d < shape.dim; d++)
                s.q[i * q_stride + d] = in.query[(at + i) * shape.dim + d] * shape.scale;
            std::memcpy(&s.d_out[i * v_stride], d_out + (at + i) * shape.value_dim, sizeof(float) * shape.value_dim);
        }
        float* dq = d_query + at * shape.dim;
        switch (heads) {
            case 1: heads_backward<1>(shape, gathered, num, stats + at, dq, d_keys, d_values, s); break;
            case 2: heads_backward<2>(shape, gathered, num, stats + at, dq, d_keys, d_values, s); break;
            case 3: heads_backward<3>(shape, gathered, num, stats + at, dq, d_keys, d_values, s); break;
            default: heads_backward<4>(shape, gathered, num, stats + at, dq, d_keys, d_values, s);
        }
    }
}

// Sets d_query; adds to d_key and d_value, [row][head][padded width].
inline void attention_backward_run(const AttentionShape& shape, const AttentionInputs& in, const Runs& runs,
                                   const Run& run, const float* d_out, const SoftmaxStats* stats, float* d_query,
                                   float* d_key, float* d_value) {
    thread_local GatheredHead gathered;
    thread_local BackwardScratch s;
    const int64_t key_width = round_up(shape.dim, LANES), value_width = round_up(shape.value_dim, LANES);
    const int64_t* rows = runs.key_rows + run.first_key;
    for (int64_t g = 0; g < shape.num_key_heads; g++) {
        gathered.gather(shape, in, g, rows, run.num_keys());
        const GradientRows d_keys{d_key + g * key_width, shape.num_key_heads * key_width, rows};
        const GradientRows d_values{d_value + g * value_width, shape.num_key_heads * value_width, rows};
        for (int64_t i = 0; i < run.num_queries; i++) {
            const int64_t query = run.first_query + i, head = query * shape.num_heads + g * shape.group();
            query_backward(shape, in, gathered, head, run.first_position + i + 1, d_out, stats, d_query, d_keys,
                           d_values, s);
        }
    }
}

}  // namespace longarc
