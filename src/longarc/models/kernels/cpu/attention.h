// Attention of one query over keys in a fixed order: scores with keys in lanes, softmax, then values key by key.
//
// Dense decode, sparse decode, and both in training call the same function, so they give the same bits.
#pragma once

#include <algorithm>
#include <vector>

#include "select.h"

namespace longarc {

constexpr int GROUP = 4;  // query heads that share one pass over the keys

// Where consecutive keys lie: so many in each page, and the pages anywhere in a table.
struct Pages {
    const int64_t* numbers;
    int64_t keys;
};

constexpr int64_t FIRST_PAGE = 0;

// All keys in one page, which is the table.
inline Pages one_page(int64_t num_keys) { return {&FIRST_PAGE, num_keys}; }

struct Keys {
    const float* blocked;   // page 0, [keys / LANES][dim][LANES]
    int64_t dim;
    const float* values;    // page 0, row-major; may be the leading columns of the keys
    int64_t value_stride;
    int64_t value_dim;
    int64_t num;            // visible keys
    Pages pages;
    int64_t blocked_page, values_page;  // numbers from one page to the next
};

struct SoftmaxStats {
    float max, factor;  // weight of a key = exp(score - max) * factor
};

template <int HEADS>
inline void scores_of(const float* q, int64_t q_stride, const float* blocked, int64_t block_size, int64_t dim,
                      int64_t num_keys, float* scores, int64_t scores_stride) {
    int64_t first = 0;
    for (; first + LANES < num_keys; first += 2 * LANES, blocked += 2 * block_size) {
        Vec a[HEADS], b[HEADS];
        for (int h = 0; h < HEADS; h++) a[h] = b[h] = Vec{};
        for (int64_t d = 0; d < dim; d++) {
            const Vec left = held(load(blocked + d * LANES)), right = held(load(blocked + block_size + d * LANES));
#pragma GCC unroll 4
            for (int h = 0; h < HEADS; h++) {
                const Vec x = splat(q[h * q_stride + d]);
                a[h] = multiply_add(x, left, a[h]);
                b[h] = multiply_add(x, right, b[h]);
            }
        }
        for (int h = 0; h < HEADS; h++) {
            store(scores + h * scores_stride + first, a[h]);
            store(scores + h * scores_stride + first + LANES, b[h]);
        }
    }
    for (; first < num_keys; first += LANES, blocked += block_size) {
        Vec a[HEADS];
        for (int h = 0; h < HEADS; h++) a[h] = Vec{};
        for (int64_t d = 0; d < dim; d++) {
            const Vec key = held(load(blocked + d * LANES));
#pragma GCC unroll 4
            for (int h = 0; h < HEADS; h++) a[h] = multiply_add(splat(q[h * q_stride + d]), key, a[h]);
        }
        for (int h = 0; h < HEADS; h++) store(scores + h * scores_stride + first, a[h]);
    }
}

inline int64_t scores_stride(int64_t num_keys) { return round_up(num_keys, 2 * LANES); }

// Scores become exp(score - max), zero behind the end.
inline SoftmaxStats exponentials(float* scores, int64_t num_keys) {
    const int64_t padded = round_up(num_keys, LANES);
    for (int64_t i = num_keys; i < padded; i++) scores[i] = -INFINITY;
    Vec highest = load(scores);
    for (int64_t i = LANES; i < padded; i += LANES) highest = max(highest, load(scores + i));
    const float most = max_lanes(highest);
    Vec total{};
    for (int64_t i = 0; i < padded; i += LANES) {
        Vec weight = exp(load(scores + i) - most);
        if (i + LANES > num_keys) {
            store(scores + i, weight);
            for (int64_t j = num_keys; j < padded; j++) scores[j] = 0.0f;
            weight = load(scores + i);
        }
        store(scores + i, weight);
        total += weight;
    }
    return {most, 1.0f / sum_lanes(total)};
}

// Rows of values in pages; `stride` from row to row, `page` from page to page.
struct Values {
    const float* first;
    int64_t stride;
    Pages pages;
    int64_t page;
};

template <int HEADS, int VECS>
inline void weighted_values(const float* weights, int64_t weights_stride, const SoftmaxStats* stats,
                            const Values& values, int64_t num_keys, float* out, int64_t out_stride, int count) {
    Vec sums[HEADS][VECS];
    for (int h = 0; h < HEADS; h++)
        for (int v = 0; v < VECS; v++) sums[h][v] = Vec{};
    const int64_t* number = values.pages.numbers;
    for (int64_t first = 0; first < num_keys; first += values.pages.keys) {
        const float* row = values.first + *number++ * values.page;
        const int64_t end = std::min(num_keys, first + values.pages.keys);
        for (int64_t j = first; j < end; j++, row += values.stride) {
            Vec value[VECS];
#pragma GCC unroll 2
            for (int v = 0; v < VECS; v++)
                value[v] = held(VECS == 1 ? load_upto(row, count) : load(row + v * LANES));
#pragma GCC unroll 4
            for (int h = 0; h < HEADS; h++) {
                const Vec weight = splat(weights[h * weights_stride + j]);
#pragma GCC unroll 2
                for (int v = 0; v < VECS; v++) sums[h][v] = multiply_add(weight, value[v], sums[h][v]);
            }
        }
    }
    for (int h = 0; h < HEADS; h++)
        for (int v = 0; v < VECS; v++) {
            const Vec result = sums[h][v] * stats[h].factor;
            if (VECS == 1)
                store_upto(out + h * out_stride, result, count);
            else
                store(out + h * out_stride + v * LANES, result);
        }
}

// `q` is scaled already. `scratch` holds HEADS * scores_stride(num) floats.
template <int HEADS>
LONGARC_ONE_COPY void attend_heads(const float* q, int64_t q_stride, const Keys& keys, float* out,
                                   int64_t out_stride, SoftmaxStats* stats, float* scratch) {
    const int64_t stride = scores_stride(keys.num);
    const int64_t* number = keys.pages.numbers;
    for (int64_t first = 0; first < keys.num; first += keys.pages.keys)
        scores_of<HEADS>(q, q_stride, keys.blocked + *number++ * keys.blocked_page, keys.dim * LANES, keys.dim,
                         std::min(keys.pages.keys, keys.num - first), scratch + first, stride);
    for (int h = 0; h < HEADS; h++) stats[h] = exponentials(scratch + h * stride, keys.num);
    auto values_from = [&](int64_t d) {
        return Values{keys.values + d, keys.value_stride, keys.pages, keys.values_page};
    };
    int64_t d = 0;
    for (; d + 2 * LANES <= keys.value_dim; d += 2 * LANES)
        weighted_values<HEADS, 2>(scratch, stride, stats, values_from(d), keys.num, out + d, out_stride, LANES);
    for (; d < keys.value_dim; d += LANES)
        weighted_values<HEADS, 1>(scratch, stride, stats, values_from(d), keys.num, out + d, out_stride,
                                  int(keys.value_dim - d < LANES ? keys.value_dim - d : LANES));
}

struct AttendScratch {
    Floats q, scores;
    std::vector<SoftmaxStats> stats;
};

// All query heads [head][dim] of one query that share the keys, scaled here; out is [head][value_dim].
// Leaves softmax statistics in scratch.stats.
inline void attend(const float* q, float scale, int64_t num_heads, const Keys& keys, float* out,
                   AttendScratch& scratch) {
    const int64_t stride = scores_stride(keys.num), dim = keys.dim;
    if (int64_t(scratch.scores.size()) < GROUP * stride) scratch.scores.resize(GROUP * stride);
    scratch.q.resize(num_heads * dim);
    scratch.stats.resize(num_heads);
    for (int64_t i = 0; i < num_heads * dim; i++) scratch.q[i] = q[i] * scale;
    for (int64_t h = 0; h < num_heads; h += GROUP) {
        const float* q_h = scratch.q.data() + h * dim;
        float *out_h = out + h * keys.value_dim, *scores = scratch.scores.data();
        SoftmaxStats* stats = scratch.stats.data() + h;
        const int64_t heads = std::min<int64_t>(GROUP, num_heads - h);
        switch (heads) {
            case 1: attend_heads<1>(q_h, dim, keys, out_h, keys.value_dim, stats, scores); break;
            case 2: attend_heads<2>(q_h, dim, keys, out_h, keys.value_dim, stats, scores); break;
            case 3: attend_heads<3>(q_h, dim, keys, out_h, keys.value_dim, stats, scores); break;
            default: attend_heads<4>(q_h, dim, keys, out_h, keys.value_dim, stats, scores);
        }
    }
}

// Keys gathered for one query: rows of `dim` floats chosen by index, blocked for scoring and row-major for values.
struct Gathered {
    Floats blocked, rows;
    int64_t stride = 0;

    template <class Index>
    void gather(const float* table, int64_t table_stride, const Index* index, int64_t num, int64_t dim) {
        stride = round_up(dim, LANES);
        const int64_t padded = round_up(num, LANES);
        if (int64_t(blocked.size()) < padded * stride) {
            blocked.resize(padded * stride);
            rows.resize(padded * stride);
        }
        for (int64_t j = 0; j < num; j++) {
            const float* from = table + index[j] * table_stride;
            over_vectors(dim, [&](int64_t d, int count) { store(&rows[j * stride + d], load_upto(from + d, count)); });
        }
        block(num, dim);
    }

    // Fills `blocked` from `rows`; rows behind the end may hold anything finite.
    void block(int64_t num, int64_t dim) {
        for (int64_t first = 0; first < num; first += LANES)
            for (int64_t d = 0; d < dim; d += LANES) {
                Vec square[LANES];
                for (int r = 0; r < LANES; r++)
                    square[r] = first + r < num ? load(&rows[(first + r) * stride + d]) : Vec{};
                transpose(square);
                for (int r = 0; r < LANES && d + r < dim; r++) store(&blocked[first * dim + (d + r) * LANES], square[r]);
            }
    }
};

}  // namespace longarc
