// Rows and weights rounded to bfloat16, two numbers to a step of the sum, for the products of gemm.h.
//
// A row of an odd width ends with a zero. Rounding is to nearest, ties to even, as torch does it.
#pragma once

#include <type_traits>

#include "gemm.h"

namespace longarc {

inline int64_t num_pairs(int64_t num_in) { return (num_in + 1) / 2; }

template <class Number>
int64_t steps_of(int64_t num_in) { return std::is_same_v<Number, Pair> ? num_pairs(num_in) : num_in; }

// The rounded numbers as bits of floats: bfloat16 in the high half, zeros in the low one.
inline PairVec rounded_bits(Vec value) {
    PairVec bits;
    std::memcpy(&bits, &value, sizeof bits);
    const PairVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    // Rounding would carry a NaN over into another number.
    return (bits & 0x7fffffffu) > 0x7f800000u ? (bits & 0xffff0000u) | 0x00400000u : rounded;
}

// LANES pairs of 2 * LANES consecutive numbers, given in two halves.
inline PairVec pairs_of(Vec first, Vec second) {
#if defined(__AVX512BF16__)
    PairVec pairs;
    const auto both = _mm512_cvtne2ps_pbh(__m512(second), __m512(first));
    std::memcpy(&pairs, &both, sizeof pairs);
    return pairs;
#else
    const PairVec low = rounded_bits(first), high = rounded_bits(second);
    uint32_t bits[2 * LANES];
    store(reinterpret_cast<Pair*>(bits), low);
    store(reinterpret_cast<Pair*>(bits + LANES), high);
    PairVec pairs;
    for (int i = 0; i < LANES; i++) pairs[i] = bits[2 * i] >> 16 | bits[2 * i + 1];
    return pairs;
#endif
}

// One row of num_in numbers as pairs.
inline void round_row(const float* x, int64_t num_in, Pair* to) {
    int64_t i = 0;
    for (; i + 2 * LANES <= num_in; i += 2 * LANES) store(to + i / 2, pairs_of(load(x + i), load(x + i + LANES)));
    if (i == num_in) return;
    float rest[2 * LANES] = {};
    Pair pairs[LANES];
    std::memcpy(rest, x + i, sizeof(float) * (num_in - i));
    store(pairs, pairs_of(load(rest), load(rest + LANES)));
    std::memcpy(to + i / 2, pairs, sizeof(Pair) * num_pairs(num_in - i));
}

inline void round_rows(const float* x, int64_t x_stride, int64_t num_rows, int64_t num_in, Pair* to) {
    for (int64_t r = 0; r < num_rows; r++) round_row(x + r * x_stride, num_in, to + r * num_pairs(num_in));
}

// Rows as a product takes them.
template <class Number>
struct Operand {
    const Number* rows;
    int64_t stride, steps;
};

// The rows themselves, or the rounded ones in `scratch`.
template <class Number>
Operand<Number> operand(const float* x, int64_t x_stride, int64_t num_rows, int64_t num_in, Scratch& scratch) {
    if constexpr (std::is_same_v<Number, float>) {
        return {x, x_stride, num_in};
    } else {
        const int64_t steps = num_pairs(num_in);
        Pair* rounded = scratch.numbers<Pair>(num_rows * steps);
        round_rows(x, x_stride, num_rows, num_in, rounded);
        return {rounded, steps, steps};
    }
}

// Rows as a product takes them that sums down the rows: a row for each step of the sum.
template <class Number>
Operand<Number> operand_down(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, Scratch& scratch) {
    const int64_t steps = steps_of<Number>(num_rows);
    if constexpr (std::is_same_v<Number, float>) {
        return {x, x_stride, steps};
    } else {
        Pair* rounded = scratch.numbers<Pair>(steps * width);
        for (int64_t k = 0; k < num_rows; k += 2)
            over_vectors(width, [&](int64_t i, int count) {
                const float* even = x + k * x_stride + i;
                const Vec odd = k + 1 < num_rows ? load_upto(even + x_stride, count) : Vec{};
                const PairVec pairs = rounded_bits(load_upto(even, count)) >> 16 | rounded_bits(odd);
                Pair* to = rounded + k / 2 * width + i;
                if (count == LANES) return store(to, pairs);
                Pair rest[LANES];
                store(rest, pairs);
                std::memcpy(to, rest, sizeof(Pair) * count);
            });
        return {rounded, width, steps};
    }
}

// Packs LANES columns of a panel whose weights follow each other along the sum; returns how many were packed.
inline int64_t pack_along(const float* from, int64_t out_stride, int64_t num_in, Pair* panel) {
    int64_t k = 0;
    for (; k + 2 * LANES <= num_in; k += 2 * LANES) {
        Vec square[LANES];
        for (int c = 0; c < LANES; c++) {
            const float* weights = from + c * out_stride + k;
            const PairVec pairs = pairs_of(load(weights), load(weights + LANES));
            std::memcpy(&square[c], &pairs, sizeof pairs);
        }
        transpose(square);
        for (int i = 0; i < LANES; i++) std::memcpy(panel + (k / 2 + i) * PANEL, &square[i], sizeof square[i]);
    }
    return k;
}

// Packs LANES columns of a panel whose weights stand side by side; returns how many were packed.
inline int64_t pack_across(const float* from, int64_t in_stride, int64_t num_in, Pair* panel) {
    int64_t k = 0;
    for (; k + 2 <= num_in; k += 2) {
        const PairVec even = rounded_bits(load(from + k * in_stride));
        store(panel + k / 2 * PANEL, even >> 16 | rounded_bits(load(from + (k + 1) * in_stride)));
    }
    return k;
}

// As pack() of floats: panel p holds [step][column]; the size is packed_size(num_out, num_pairs(num_in)) pairs.
inline void pack(const float* weight, int64_t out_stride, int64_t in_stride, int64_t num_out, int64_t num_in,
                 Pair* packed) {
    const int64_t steps = num_pairs(num_in);
    for (int64_t first = 0; first < num_out; first += PANEL) {
        Pair* panel = packed + first * steps;
        const int64_t count = std::min<int64_t>(PANEL, num_out - first);
        const float* from = weight + first * out_stride;
        int64_t k = 0;
        for (int v = 0; v < PANEL && count == PANEL; v += LANES) {
            if (in_stride == 1)
                k = pack_along(from + v * out_stride, out_stride, num_in, panel + v);
            else if (out_stride == 1)
                k = pack_across(from + v, in_stride, num_in, panel + v);
        }
        for (; k < num_in; k += 2)
            for (int64_t c = 0; c < PANEL; c++) {
                float both[2 * LANES] = {};
                for (int64_t i = 0; i < 2 && c < count && k + i < num_in; i++)
                    both[i] = from[c * out_stride + (k + i) * in_stride];
                panel[k / 2 * PANEL + c] = Pair(pairs_of(load(both), Vec{})[0]);
            }
    }
}

// dw = dy^T x (or += with ADD), the weight gradient of y = x w^T; in blocks of rows and columns that stay in the cache.
template <class Number, Store MODE>
void weight_gradient(int64_t num_rows, int64_t num_out, int64_t num_in, const float* dy, int64_t dy_stride,
                         const float* x, int64_t x_stride, float* dw) {
    constexpr int64_t BLOCK = 512, SLICE = 1024;
    thread_local Scratch scratch, rounded;
    Number* panels = scratch.numbers<Number>(packed_size(num_in, BLOCK));
    if (MODE == Store::SET && num_rows == 0) std::fill(dw, dw + num_out * num_in, 0.0f);
    for (int64_t first = 0; first < num_rows; first += BLOCK) {
        const int64_t count = std::min(BLOCK, num_rows - first);
        pack(x + first * x_stride, 1, x_stride, num_in, count, panels);
        for (int64_t column = 0; column < num_out; column += SLICE) {
            const int64_t columns = std::min(SLICE, num_out - column);
            const Operand<Number> down =
                operand_down<Number>(dy + first * dy_stride + column, dy_stride, count, columns, rounded);
            const auto multiply = first == 0 ? gemm<MODE, true, Number> : gemm<Store::ADD, true, Number>;
            multiply(columns, num_in, down.steps, down.rows, down.stride, panels, dw + column * num_in, num_in);
        }
    }
}

}  // namespace longarc
