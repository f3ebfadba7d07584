// Matrix product of rows with a packed weight: y[m][n] = sum_k x[m][k] * w[n][k], summed over k in order.
//
// A step of the sum is one number (float) or two (Pair); strides and num_in count steps.
//
// Each output is one chain of multiply-adds, whatever the tile it falls into: a row's result does not
// depend on the number of rows, and a column's does not depend on which weights were packed beside it.
#pragma once

#include <algorithm>
#include <vector>

#include "vec.h"

namespace longarc {

constexpr int PANEL = 2 * LANES;  // columns of a panel
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12;
#elif defined(__AVX__)
constexpr int TILE_ROWS = 6;
#else
constexpr int TILE_ROWS = 4;
#endif

inline int64_t packed_size(int64_t num_out, int64_t num_in) { return round_up(num_out, PANEL) * num_in; }

// Packs out-by-in weights into panels of columns: panel p holds [k][column]; missing columns are zero.
inline void pack(const float* weight, int64_t out_stride, int64_t in_stride, int64_t num_out, int64_t num_in,
                 float* packed) {
    for (int64_t first = 0; first < num_out; first += PANEL) {
        float* panel = packed + first * num_in;
        const int64_t count = std::min<int64_t>(PANEL, num_out - first);
        const float* from = weight + first * out_stride;
        int64_t k = 0;
        if (count == PANEL && out_stride == 1) {
            for (; k < num_in; k++)
                for (int v = 0; v < PANEL; v += LANES) store(panel + k * PANEL + v, load(from + k * in_stride + v));
        } else if (count == PANEL && in_stride == 1) {
            for (; k + LANES <= num_in; k += LANES)
                for (int v = 0; v < PANEL; v += LANES) {
                    Vec square[LANES];
                    for (int c = 0; c < LANES; c++) square[c] = load(from + (v + c) * out_stride + k);
                    transpose(square);
                    for (int i = 0; i < LANES; i++) store(panel + (k + i) * PANEL + v, square[i]);
                }
        }
        for (; k < num_in; k++) {
            for (int64_t c = 0; c < count; c++) panel[k * PANEL + c] = from[c * out_stride + k * in_stride];
            for (int64_t c = count; c < PANEL; c++) panel[k * PANEL + c] = 0.0f;
        }
    }
}

enum class Store { SET, ADD };

// With ACROSS the summed index runs down the rows of x and a row of the product is a column of x.
// With FETCH it fetches LANES numbers of `ahead` for each k: weights come from far away, and travel meanwhile.
template <int ROWS, int VECS, Store MODE, bool ACROSS, bool FETCH, class Number>
inline void tile(const Number* x, int64_t x_stride, const Number* panel, const Number* ahead, int64_t num_in, float* y,
                 int64_t y_stride, int64_t num_columns) {
    Vec sums[ROWS][VECS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) sums[r][v] = Vec{};
    for (int64_t k = 0; k < num_in; k++) {
        decltype(load(panel)) w[VECS];
        if (FETCH) __builtin_prefetch(ahead + k * LANES);
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) w[v] = held(load(panel + k * PANEL + v * LANES));
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            const auto a = splat(ACROSS ? x[k * x_stride + r] : x[r * x_stride + k]);
#pragma GCC unroll 2
            for (int v = 0; v < VECS; v++) sums[r][v] = multiply_add(a, w[v], sums[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) {
            const int count = int(std::min<int64_t>(LANES, num_columns - v * LANES));
            float* to = y + r * y_stride + v * LANES;
            const Vec sum = MODE == Store::ADD ? load_upto(to, count) + sums[r][v] : sums[r][v];
            store_upto(to, sum, count);
        }
}

template <int VECS, Store MODE, bool ACROSS, class Number>
inline void tile_of(int rows, const Number* x, int64_t x_stride, const Number* panel, const Number* ahead,
                    int64_t num_in, float* y, int64_t y_stride, int64_t num_columns) {
#define LONGARC_TILE(N)                                                                                          \
    case N:                                                                                                      \
        if constexpr (3 * N > 2 * TILE_ROWS && !ACROSS)                                                          \
            if (ahead)                                                                                           \
                return tile<N, VECS, MODE, ACROSS, true>(x, x_stride, panel, ahead, num_in, y, y_stride,         \
                                                         num_columns);                                           \
        return tile<N, VECS, MODE, ACROSS, false>(x, x_stride, panel, ahead, num_in, y, y_stride, num_columns)
    switch (rows) {
        LONGARC_TILE(1);
        LONGARC_TILE(2);
        LONGARC_TILE(3);
        LONGARC_TILE(4);
#if defined(__AVX__)
        LONGARC_TILE(5);
        LONGARC_TILE(6);
#endif
#if defined(__AVX512F__)
        LONGARC_TILE(7);
        LONGARC_TILE(8);
        LONGARC_TILE(9);
        LONGARC_TILE(10);
        LONGARC_TILE(11);
        LONGARC_TILE(12);
#endif
    }
#undef LONGARC_TILE
}

// As tile, over several panels at once: with few rows a single one has too few sums to keep the multipliers busy.
template <int ROWS, int PANELS, Store MODE, class Number>
inline void wide_tile(const Number* x, int64_t x_stride, const Number* panels, int64_t num_in, float* y,
                      int64_t y_stride) {
    constexpr int VECS = PANEL / LANES;
    Vec sums[ROWS][PANELS][VECS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
            for (int v = 0; v < VECS; v++) sums[r][p][v] = Vec{};
    for (int64_t k = 0; k < num_in; k++) {
        decltype(splat(*x)) a[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) a[r] = splat(x[r * x_stride + k]);
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
            for (int v = 0; v < VECS; v++) {
                const auto w = held(load(panels + (p * num_in + k) * PANEL + v * LANES));
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++) sums[r][p][v] = multiply_add(a[r], w, sums[r][p][v]);
            }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
            for (int v = 0; v < VECS; v++) {
                float* to = y + r * y_stride + p * PANEL + v * LANES;
                store(to, MODE == Store::ADD ? load(to) + sums[r][p][v] : sums[r][p][v]);
            }
}

// The first columns of a product of three rows or fewer; returns how many were computed.
template <Store MODE, class Number>
inline int64_t wide_columns(int64_t num_rows, int64_t num_out, int64_t num_in, const Number* x, int64_t x_stride,
                            const Number* packed, float* y, int64_t y_stride) {
    int64_t column = 0;
    const auto compute = [&](auto tile, int64_t columns) {
        for (; column + columns <= num_out; column += columns)
            tile(x, x_stride, packed + column * num_in, num_in, y + column, y_stride);
    };
    if (num_rows == 1) compute(wide_tile<1, 4, MODE, Number>, 4 * PANEL);
    if (num_rows == 2) compute(wide_tile<2, 2, MODE, Number>, 2 * PANEL);
    if (num_rows == 3) compute(wide_tile<3, 2, MODE, Number>, 2 * PANEL);
    return column;
}

// y (+)= x w^T for packed w; with ACROSS y (+)= x^T w^T. Rows are split into tiles of nearly equal height.
template <Store MODE = Store::SET, bool ACROSS = false, class Number>
inline void gemm(int64_t num_rows, int64_t num_out, int64_t num_in, const Number* x, int64_t x_stride,
                 const Number* packed, float* y, int64_t y_stride) {
    if (num_rows == 0) return;
    const int64_t num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    // A block of rows stays in the first cache levels while all panels pass over it.
    const int64_t block_tiles = std::max<int64_t>(1, 32768 / (num_in * TILE_ROWS));
    for (int64_t first_tile = 0; first_tile < num_tiles; first_tile += block_tiles) {
        const int64_t last_tile = std::min(num_tiles, first_tile + block_tiles);
        int64_t column = 0;
        if constexpr (!ACROSS) column = wide_columns<MODE>(num_rows, num_out, num_in, x, x_stride, packed, y, y_stride);
        for (; column < num_out; column += PANEL) {
            const Number* panel = packed + column * num_in;
            for (int64_t t = first_tile; t < last_tile; t++) {
                const int64_t row = num_rows * t / num_tiles;
                const int rows = int(num_rows * (t + 1) / num_tiles - row);
                const Number* from = ACROSS ? x + row : x + row * x_stride;
                float* to = y + row * y_stride + column;
                // The last two of several tiles fetch the halves of the next panel, where a vector for each k is half.
                const int64_t half = t - (last_tile - 2);
                const Number* ahead = nullptr;
                if (half >= 0 && last_tile - first_tile > 2) ahead = panel + (PANEL + half * LANES) * num_in;
                if (num_out - column <= LANES)
                    tile_of<1, MODE, ACROSS>(rows, from, x_stride, panel, ahead, num_in, to, y_stride,
                                             num_out - column);
                else
                    tile_of<2, MODE, ACROSS>(rows, from, x_stride, panel, ahead, num_in, to, y_stride,
                                             num_out - column);
            }
        }
    }
}

// Calls each(first, count) for stretches of rows, one stretch per thread.
template <class Each>
void for_rows(int64_t num_rows, int64_t num_threads, Each each) {
    const int64_t num_parts = std::max<int64_t>(1, std::min(num_threads, num_rows / 16));
#pragma omp parallel for num_threads(num_parts) schedule(static, 1) if (num_parts > 1)
    for (int64_t part = 0; part < num_parts; part++) {
        const int64_t first = num_rows * part / num_parts;
        each(first, num_rows * (part + 1) / num_parts - first);
    }
}

// Memory that grows and is reused by the thread that owns it; contents are undefined at first.
class Scratch {
  public:
    float* floats(int64_t count) {
        if (int64_t(memory_.size()) < count) memory_.resize(count);
        return memory_.data();
    }

    template <class Number>
    Number* numbers(int64_t count) {
        static_assert(sizeof(Number) == sizeof(float));
        return reinterpret_cast<Number*>(floats(count));
    }

  private:
    Floats memory_;
};

}  // namespace longarc
