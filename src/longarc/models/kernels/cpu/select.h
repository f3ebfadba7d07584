// The lightning indexer's two inner loops: the score of every visible key, and the choice of the best.
#pragma once

#include <algorithm>

#include "rows.h"

namespace longarc {

// Keys lie in blocks of LANES: block b holds [dim][lane], so that lanes are keys.
inline void write_blocked(float* blocked, int64_t position, const float* key, int64_t dim) {
    float* to = blocked + position / LANES * dim * LANES + position % LANES;
    for (int64_t d = 0; d < dim; d++) to[d * LANES] = key[d];
}

// Scores of BLOCKS * LANES keys with four heads: enough sums at once to keep the multipliers busy. `max` with the sum
// on its right hands a NaN on.
template <int BLOCKS>
inline void add_head_scores(const float* q, const float* weights, int64_t dim, const float* blocked, Vec* totals) {
    Vec sums[4][BLOCKS];
#pragma GCC unroll 4
    for (int h = 0; h < 4; h++)
#pragma GCC unroll 2
        for (int b = 0; b < BLOCKS; b++) sums[h][b] = Vec{};
    for (int64_t d = 0; d < dim; d++) {
        Vec key[BLOCKS];
#pragma GCC unroll 2
        for (int b = 0; b < BLOCKS; b++) key[b] = held(load(blocked + (b * dim + d) * LANES));
#pragma GCC unroll 4
        for (int h = 0; h < 4; h++) {
            const Vec x = splat(q[h * dim + d]);
#pragma GCC unroll 2
            for (int b = 0; b < BLOCKS; b++) sums[h][b] = multiply_add(key[b], x, sums[h][b]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < 4; h++)
#pragma GCC unroll 2
        for (int b = 0; b < BLOCKS; b++)
            totals[b] = multiply_add(max(Vec{}, sums[h][b]), splat(weights[h]), totals[b]);
}

template <int BLOCKS>
inline void block_scores(const float* q, const float* weights, int64_t num_heads, int64_t dim, const float* blocked,
                         float* scores) {
    Vec totals[BLOCKS];
    for (int b = 0; b < BLOCKS; b++) totals[b] = Vec{};
    int64_t head = 0;
    for (; head + 4 <= num_heads; head += 4)
        add_head_scores<BLOCKS>(q + head * dim, weights + head, dim, blocked, totals);
    for (; head < num_heads; head++)
        for (int b = 0; b < BLOCKS; b++) {
            Vec sum{};
            for (int64_t d = 0; d < dim; d++)
                sum = multiply_add(load(blocked + (b * dim + d) * LANES), splat(q[head * dim + d]), sum);
            totals[b] = multiply_add(max(Vec{}, sum), splat(weights[head]), totals[b]);
        }
    for (int b = 0; b < BLOCKS; b++) store(scores + b * LANES, totals[b]);
}

// scores[s] = sum_j weights[j] * relu(q[j] . key[s]), heads in order. `scores` has room for whole blocks.
LONGARC_ONE_COPY inline void index_scores(const float* q, const float* weights, int64_t num_heads, int64_t dim,
                                          const float* blocked, int64_t num_keys, float* scores) {
    int64_t first = 0;
    for (; first + LANES < num_keys; first += 2 * LANES)
        block_scores<2>(q, weights, num_heads, dim, blocked + first * dim, scores + first);
    if (first < num_keys) block_scores<1>(q, weights, num_heads, dim, blocked + first * dim, scores + first);
}

// Writes the num_chosen best positions in ascending order: score descending, then smaller position.
// Turns `scores`, which has room for whole blocks, into integers of the same order. Needs num_chosen <= num_keys
// and room for LANES more in `chosen`. Returns false, and chooses nothing, where a score is NaN: there is no order.
LONGARC_ONE_COPY inline bool choose_best(float* scores, int64_t num_keys, int64_t num_chosen, int32_t* chosen) {
    int32_t* order = reinterpret_cast<int32_t*>(scores);
    const int64_t padded = round_up(num_keys, LANES);
    IntVec least = IntVec{} + INT32_MAX, most = IntVec{} + INT32_MIN;
    for (int64_t i = 0; i < padded; i += LANES) {
        const Vec score = load(scores + i) + 0.0f;  // -0 and 0 tie
        IntVec bits;
        std::memcpy(&bits, &score, sizeof bits);
        bits ^= (bits >> 31) & INT32_MAX;
        std::memcpy(order + i, &bits, sizeof bits);
        if (i + LANES > num_keys) continue;
        least = bits < least ? bits : least;
        most = bits > most ? bits : most;
    }
    // Below every score, and a NaN with its sign set is below -infinity: what is no key must never be chosen.
    for (int64_t i = num_keys; i < padded; i++) order[i] = INT32_MIN;
    int64_t low = INT32_MAX, high = INT32_MIN;
    for (int i = 0; i < LANES; i++) low = least[i] < low ? least[i] : low, high = most[i] > high ? most[i] : high;
    for (int64_t i = num_keys / LANES * LANES; i < num_keys; i++)
        low = order[i] < low ? order[i] : low, high = order[i] > high ? order[i] : high;
    constexpr int32_t INFINITE = 0x7f800000;  // beyond the infinities lie the NaNs of either sign
    if (high > INFINITE || low < -INFINITE - 1) return false;
    auto count_from = [&](int64_t bound) {
#if defined(__AVX512F__)
        int64_t count = 0;
        for (int64_t i = 0; i < padded; i += LANES)
            count += __builtin_popcount(_mm512_cmpge_epi32_mask(_mm512_loadu_si512(order + i), _mm512_set1_epi32(int32_t(bound))));
        return count;
#else
        const IntVec at_least = IntVec{} + int32_t(bound);
        IntVec counts{};
        for (int64_t i = 0; i < padded; i += LANES) {
            IntVec bits;
            std::memcpy(&bits, order + i, sizeof bits);
            counts -= bits >= at_least;
        }
        int32_t lane[LANES];
        std::memcpy(lane, &counts, sizeof lane);
        for (int width = LANES / 2; width > 0; width /= 2)
            for (int i = 0; i < width; i++) lane[i] += lane[i + width];
        return int64_t(lane[0]);
#endif
    };
    // The largest bound that at least num_chosen keys reach; every such bound between two scores is as good.
    // Guesses go where evenly spread scores would put it, every third one to the middle, which bounds the search.
    const int64_t highest = high++;
    int64_t reached = num_keys, beyond = 0;  // keys from `low` on, keys from `high` on
    for (int guess = 1; high - low > 1 && reached != num_chosen; guess++) {
        const double share = guess % 3 ? (reached - num_chosen + 0.5) / (reached - beyond) : 0.5;
        const int64_t bound = std::min(std::max(low + int64_t((high - low) * share), low + 1), high - 1);
        const int64_t count = count_from(bound);
        if (count >= num_chosen)
            low = bound, reached = count;
        else
            high = bound, beyond = count;
    }
    int64_t ties = reached == num_chosen ? num_chosen : num_chosen - (low < highest ? count_from(low + 1) : 0);
    const int32_t bound = int32_t(low);
    int64_t n = 0;
#if defined(__AVX512F__)
    __m512i position = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int64_t i = 0; n < num_chosen; i += LANES, position = _mm512_add_epi32(position, _mm512_set1_epi32(LANES))) {
        const __m512i keys = _mm512_loadu_si512(order + i);
        const __mmask16 better = _mm512_cmpgt_epi32_mask(keys, _mm512_set1_epi32(bound));
        unsigned tied = _mm512_cmpeq_epi32_mask(keys, _mm512_set1_epi32(bound));
        while (__builtin_popcount(tied) > ties) tied &= ~(1u << (31 - __builtin_clz(tied)));
        ties -= __builtin_popcount(tied);
        const __mmask16 taken = __mmask16(better | tied);
        _mm512_storeu_si512(chosen + n, _mm512_maskz_compress_epi32(taken, position));
        n += __builtin_popcount(taken);
    }
#else
    for (int64_t first = 0; n < num_chosen; first += LANES) {
        // Most vectors of a long context hold no winner, and which hold one is hard to predict: few branches.
        IntVec bits;
        std::memcpy(&bits, order + first, sizeof bits);
        if (!any_lane(bits >= bound)) continue;
        for (int64_t i = first; i < first + LANES; i++) {
            const int64_t tie = order[i] == bound, take = (order[i] > bound) | (tie & (ties > 0));
            ties -= tie;
            chosen[n] = int32_t(i);
            n += take;
        }
    }
#endif
    return true;
}

}  // namespace longarc
