// Speculative decoding: rounds of drafting some tokens, computing all of them at once, and keeping those that the main
// model might have drawn itself.
//
//   token n --> drafts d_1 .. d_k ~ q_1 .. q_k        the MTP layer, one depth after another
//   [n, d_1 .. d_k] --> p_1 .. p_(k+1)                the main model, all rows in one pass
//   d_i stays with probability min(1, p_i / q_i); behind the last that stays one more: ~ max(p - q, 0), or ~ p_(k+1)
//
// Source: Leviathan, Kalman and Matias, arXiv:2211.17192, algorithm 1. The twin in torch is algos/speculative.py.
// Rows behind the last token that stays are left in the cache and overwritten by what follows it.
#pragma once

#include <numeric>

#include "draft.h"
#include "steps.h"

namespace longarc {

// Streams of a request's random numbers; engine/sampler.py has the same.
enum class Stream : uint64_t { TOKEN = 0, DRAFT = 1, ACCEPT = 2 };

// A number in [0, 1) by hash (SplitMix64's finaliser), so that no draw depends on another request.
inline double uniform_of(int64_t seed, int64_t position, Stream stream) {
    uint64_t mixed = uint64_t(seed);
    for (uint64_t word : {uint64_t(stream), uint64_t(position)}) {
        mixed += (word + 1) * 0x9E3779B97F4A7C15u;
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
        mixed ^= mixed >> 31;
    }
    return double(mixed >> 11) * 0x1p-53;
}

struct Rounds {
    int64_t max_rounds, num_drafts, vocab;
    double least_probability;                   // a chain ends behind a draft that had less
    const float *output, *temperatures;         // packed output projection; [row]
    const int64_t *seeds, *num_drawn;           // [row]: the seed and how many of its draws were made
    const int64_t *budgets, *due;               // [row] tokens that may be drawn, and after which the call ends
    const int64_t *stop_ids, *stop_ends;        // as in Steps
    const volatile int64_t* interrupt;          // set by another thread: no further round
    int64_t* tokens;                            // out, [row][max_rounds * (num_drafts + 1)]
    float* logprobs;                            // out, likewise
    int64_t *counts, *is_finite;                // out, [row]: tokens drawn; whether the last one's logits were
    int64_t *drafted, *accepted;                // out, [depth]: drafts that were verified, and those that stayed
};

// One row of a call, from round to round.
struct Chain {
    int64_t position, token;   // the newest token and its place, not in the cache yet
    int64_t num_drafts;        // of this round
    int64_t num_kept;          // tokens of this round that were drawn
    bool has_ended;
};

// Drafts of all rows in one round. A row of weights is proportional to the probabilities that a draft was drawn from.
struct Drafts {
    int64_t depths, stride;
    std::vector<int64_t> tokens;   // [row][depth]
    std::vector<double> totals;    // [row][depth], of the weights
    Floats weights;                // [row][depth][stride]

    Drafts(int64_t num_rows, int64_t depths, int64_t vocab)
        : depths(depths), stride(round_up(vocab, DRAW_BLOCK)), tokens(num_rows * depths), totals(num_rows * depths),
          weights(num_rows * depths * stride) {}

    float* row(int64_t r, int64_t depth) { return weights.data() + (r * depths + depth - 1) * stride; }
};

// Logits become weights in place, and one is drawn. Returns its probability, 0 where there is nothing to draw from.
inline double draw_draft(float* logits, int64_t vocab, int64_t stride, float temperature, double uniform,
                         int64_t* token, double* total) {
    if (!is_finite_row(logits, vocab)) return 0.0;
    if (temperature == 0.0f) *token = std::max_element(logits, logits + vocab) - logits;
    Vec highest = splat(-INFINITY);
    for (int64_t i = vocab; i < stride; i++) logits[i] = -INFINITY;
    for (int64_t i = 0; i < stride; i += LANES) highest = max(highest, load(logits + i));
    // Greedily nothing is drawn, but how sure the layer is tells how far to go.
    const Vec most = splat(max_lanes(highest)), factor = splat(temperature == 0.0f ? 1.0f : 1.0f / temperature);
    for (int64_t i = 0; i < stride; i += LANES) {
        const Vec z = (load(logits + i) - most) * factor;
        store(logits + i, z < -87.0f ? Vec{} : exp(z));
    }
    const int64_t drawn = draw_weighted(logits, vocab, uniform, total);
    if (temperature != 0.0f) *token = drawn;
    return logits[*token] / *total;
}

inline bool is_stop(const Rounds& rounds, int64_t r, int64_t token) {
    const int64_t begin = r ? rounds.stop_ends[r - 1] : 0;
    for (int64_t i = begin; i < rounds.stop_ends[r]; i++)
        if (rounds.stop_ids[i] == token) return true;
    return false;
}

// The rows of a block that still draft, one behind another.
struct Drafting {
    std::vector<int64_t> rows, tokens, slots, positions, turned;
    std::vector<int32_t> selected;
    Floats fed, hidden, logits;

    // Keeps what `stays` says of each, in order.
    void keep(const std::vector<char>& stays, int64_t width, int64_t room) {
        int64_t to = 0;
        for (int64_t i = 0; i < int64_t(rows.size()); i++) {
            if (!stays[i]) continue;
            rows[to] = rows[i], tokens[to] = tokens[i], slots[to] = slots[i], positions[to] = positions[i];
            std::memmove(&fed[to * width], &fed[i * width], sizeof(float) * width);
            std::memmove(&selected[to * room], &selected[i * room], sizeof(int32_t) * room);
            to++;
        }
        rows.resize(to), tokens.resize(to), slots.resize(to), positions.resize(to);
    }
};

// All drafts of rows [first, first + num) of `newest`, which holds the newest tokens.
inline void draft_block(const MlaShape& shape, const MlaLayer& layer, const Draft& draft, const Rows& newest,
                        const Rounds& rounds, Chain* chains, const std::vector<int64_t>& num_drawn, int64_t first,
                        int64_t num, Drafts& drafts, ChunkScratch& s) {
    thread_local Drafting own;
    Drafting& now = own;
    const int64_t room = selected_room(shape, newest);
    now.rows.resize(num), now.turned.resize(num), now.selected.resize(num * room);
    now.fed.resize(num * shape.hidden), now.hidden.resize(num * shape.hidden), now.logits.resize(num * drafts.stride);
    std::iota(now.rows.begin(), now.rows.end(), first);
    now.tokens.assign(newest.tokens + first, newest.tokens + first + num);
    now.slots.assign(newest.slots + first, newest.slots + first + num);
    now.positions.assign(newest.positions + first, newest.positions + first + num);
    std::vector<char> stays(num);
    // Depth 1 is computed in any case: it leaves the newest tokens' rows.
    for (int64_t d = 1; !now.rows.empty(); d++) {
        const int64_t count = int64_t(now.rows.size());
        for (int64_t i = 0; i < count; i++) now.turned[i] = now.positions[i] - 1 + draft.advances * (d - 1);
        Rows rows = newest;
        rows.tokens = now.tokens.data(), rows.slots = now.slots.data(), rows.positions = now.positions.data();
        rows.num = count;
        draft_depth(shape, layer, draft, rows, 0, count,
                    {d, now.turned.data(), now.fed.data(), now.hidden.data(), now.selected.data()}, s);
        if (rounds.num_drafts > 0)
            few_rows_gemm(count, rounds.vocab, shape.hidden, now.hidden.data(), shape.hidden, rounds.output,
                          now.logits.data(), drafts.stride);
        for (int64_t i = 0; i < count; i++) {
            const int64_t r = now.rows[i], most = chains[r].num_drafts;
            stays[i] = false;
            if (most < d) continue;
            float* weights = drafts.row(r, d);
            std::memcpy(weights, &now.logits[i * drafts.stride], sizeof(float) * rounds.vocab);
            const int64_t at = r * drafts.depths + d - 1;
            const double uniform = uniform_of(rounds.seeds[r], num_drawn[r] + d - 1, Stream::DRAFT);
            const double probability = draw_draft(weights, rounds.vocab, drafts.stride, rounds.temperatures[r],
                                                  uniform, &drafts.tokens[at], &drafts.totals[at]);
            now.tokens[i] = drafts.tokens[at];
            if (probability == 0.0)
                chains[r].num_drafts = d - 1;
            else if (probability < rounds.least_probability || is_stop(rounds, r, drafts.tokens[at]))
                chains[r].num_drafts = d;
            else
                stays[i] = d < most;
        }
        now.keep(stays, shape.hidden, room);
    }
}

// What is left to draw from after a refusal: max(p - q, 0); p itself where rounding leaves nothing.
inline int64_t draw_residual(const float* logits, int64_t vocab, float log_sum, const float* weights, double total,
                             double uniform) {
    thread_local Floats probability, left;
    probability_row(logits, vocab, log_sum, probability);
    left.resize(probability.size());
    const Vec factor = splat(float(1.0 / total));
    Vec most{};
    for (int64_t i = 0; i < int64_t(left.size()); i += LANES) {
        const Vec rest = max(load(&probability[i]) - load(weights + i) * factor, Vec{});
        store(&left[i], rest);
        most = max(most, rest);
    }
    return draw_weighted(max_lanes(most) > 0.0f ? left.data() : probability.data(), vocab, uniform);
}

// What row `r` does with draft `d` (from 1 on), or behind its last one: draws a token, and tells whether it goes on.
inline bool verify_row(const Rounds& rounds, int64_t r, const Chain& chain, int64_t d, int64_t position, float* logits,
                       Drafts& drafts, longarc::Drawn* drawn) {
    const bool has_draft = d <= chain.num_drafts;
    const float temperature = rounds.temperatures[r];
    const double uniform = uniform_of(rounds.seeds[r], position, Stream::TOKEN);
    if (!has_draft || temperature == 0.0f || !is_finite_row(logits, rounds.vocab)) {
        *drawn = sample_row(logits, rounds.vocab, temperature, uniform);
        return has_draft && drawn->is_finite && drawn->token == drafts.tokens[r * drafts.depths + d - 1];
    }
    const int64_t at = r * drafts.depths + d - 1, token = drafts.tokens[at];
    const LogSum sum = log_sum_row(logits, rounds.vocab, temperature);
    const float* weights = drafts.row(r, d);
    const double p = std::exp(double(logits[token] - sum.value)), q = weights[token] / drafts.totals[at];
    const bool stays = uniform_of(rounds.seeds[r], position, Stream::ACCEPT) * q < p;
    const int64_t next = stays ? token
                               : draw_residual(logits, rounds.vocab, sum.value, weights, drafts.totals[at], uniform);
    *drawn = {next, logits[next] - sum.value, true};
    return stays;
}

// Verifies the chain of row `r`, whose logits are [num_drafts + 1][vocab]. Returns how many drafts stayed.
inline int64_t verify_chain(const Rounds& rounds, int64_t r, Chain& chain, int64_t num_drawn, float* logits,
                            Drafts& drafts) {
    const int64_t room = rounds.max_rounds * (rounds.num_drafts + 1);
    int64_t num_accepted = 0;
    for (int64_t d = 1; d <= chain.num_drafts + 1; d++) {
        longarc::Drawn drawn;
        const bool stays = verify_row(rounds, r, chain, d, num_drawn + d - 1, logits + (d - 1) * rounds.vocab, drafts,
                                      &drawn);
        const int64_t at = r * room + rounds.counts[r]++;
        rounds.tokens[at] = drawn.token, rounds.logprobs[at] = drawn.logprob, rounds.is_finite[r] = drawn.is_finite;
        chain.num_kept = d, chain.token = drawn.token;
        chain.has_ended = !drawn.is_finite || is_stop(rounds, r, drawn.token);
        num_accepted += stays;
        if (!stays || chain.has_ended) break;
    }
    return num_accepted;
}

// All rows of the main model in one pass: of each chain its newest token, and its drafts.
struct Verification {
    std::vector<int64_t> tokens, slots, positions, first;  // `first` [chain]
    Floats hidden;

    void fill(const Rows& chains_rows, const Chain* chains, const Drafts& drafts, int64_t width) {
        tokens.clear(), slots.clear(), positions.clear(), first.clear();
        for (int64_t r = 0; r < chains_rows.num; r++) {
            first.push_back(int64_t(tokens.size()));
            for (int64_t d = 0; d <= chains[r].num_drafts; d++) {
                tokens.push_back(d ? drafts.tokens[r * drafts.depths + d - 1] : chains[r].token);
                slots.push_back(chains_rows.slots[r]);
                positions.push_back(chains[r].position + d);
            }
        }
        first.push_back(int64_t(tokens.size()));
        hidden.resize(tokens.size() * width);
    }

    Rows rows(const Rows& like) {
        Rows all = like;
        all.tokens = tokens.data(), all.slots = slots.data(), all.positions = positions.data();
        all.num = int64_t(tokens.size()), all.hidden = hidden.data(), all.ends_only = 0;
        return all;
    }
};

// Keeps what of a verification stays: states, and the rows of depth 1 of accepted drafts.
inline void keep_chains(const MlaShape& shape, const MlaLayer& layer, const Draft& draft, const Rows& all,
                        const std::vector<int64_t>& first, const std::vector<Chain>& chains, int64_t num_threads) {
    std::vector<int64_t> tokens, slots, positions;
    for (int64_t r = 0; r < int64_t(chains.size()); r++)
        for (int64_t i = 0; i < chains[r].num_kept; i++) {
            const int64_t row = first[r] + i, slot = all.slots[row], position = all.positions[row];
            std::memcpy(state_of(draft, all, slot, position, shape.hidden), all.hidden + row * shape.hidden,
                        sizeof(float) * shape.hidden);
            if (i == 0) continue;  // drafting left the row of the newest token
            tokens.push_back(all.tokens[row]), slots.push_back(slot), positions.push_back(position);
        }
    Rows kept = all;
    kept.tokens = tokens.data(), kept.slots = slots.data(), kept.positions = positions.data();
    kept.num = int64_t(tokens.size());
    for_blocks(kept.num, num_threads, [&](int64_t begin, int64_t num, ChunkScratch& s) {
        draft_keys(shape, layer, draft, kept, begin, num, s);
    });
}

// Verifies all chains, a block of them at a time whose logits stay in the cache.
inline void verify_chains(const MlaShape& shape, const Rounds& rounds, const Rows& all,
                          const std::vector<int64_t>& first, std::vector<Chain>& chains,
                          const std::vector<int64_t>& num_drawn, Drafts& drafts, std::vector<int64_t>& num_accepted,
                          int64_t num_threads) {
    const int64_t block = std::max<int64_t>(1, 60 / (rounds.num_drafts + 1));
    for_rows(int64_t(chains.size()), num_threads, [&](int64_t begin, int64_t total) {
        thread_local Scratch scratch;
        for (int64_t r = begin; r < begin + total; r += block) {
            const int64_t end = std::min(r + block, begin + total), num = first[end] - first[r];
            float* logits = scratch.floats(num * rounds.vocab);
            gemm(num, rounds.vocab, shape.hidden, all.hidden + first[r] * shape.hidden, shape.hidden, rounds.output,
                 logits, rounds.vocab);
            for (int64_t c = r; c < end; c++)
                num_accepted[c] = verify_chain(rounds, c, chains[c], num_drawn[c],
                                               logits + (first[c] - first[r]) * rounds.vocab, drafts);
        }
    });
}

// Makes rounds until one in which a row came to its end or a piece of it is due, or someone else wants a turn.
inline void run_rounds(const MlaShape& shape, const MlaLayer* layers, const Rows& start, const Draft& draft,
                       const Rounds& rounds, int64_t num_threads) {
    const int64_t num_rows = start.num;
    const MlaLayer& layer = layers[shape.num_layers];
    std::vector<int64_t> tokens(num_rows), positions(num_rows), num_drawn(num_rows), num_accepted(num_rows);
    std::vector<Chain> chains(num_rows);
    Drafts drafts(num_rows, rounds.num_drafts, rounds.vocab);
    Verification verification;
    Rows newest = start;
    newest.tokens = tokens.data(), newest.positions = positions.data();
    for (int64_t r = 0; r < num_rows; r++) {
        chains[r] = {start.positions[r], start.tokens[r], 0, 0, false};
        rounds.counts[r] = 0;
    }
    for (int64_t round = 0; round < rounds.max_rounds; round++) {
        for (int64_t r = 0; r < num_rows; r++) {
            tokens[r] = chains[r].token, positions[r] = chains[r].position;
            num_drawn[r] = rounds.num_drawn[r] + rounds.counts[r];
            chains[r].num_drafts = std::min(rounds.num_drafts, rounds.budgets[r] - rounds.counts[r] - 1);
        }
        for_blocks(num_rows, num_threads, [&](int64_t first, int64_t num, ChunkScratch& s) {
            draft_block(shape, layer, draft, newest, rounds, chains.data(), num_drawn, first, num, drafts, s);
        });
        verification.fill(newest, chains.data(), drafts, shape.hidden);
        const Rows all = verification.rows(start);
        run_mla(shape, layers, all, num_threads);
        verify_chains(shape, rounds, all, verification.first, chains, num_drawn, drafts, num_accepted, num_threads);
        keep_chains(shape, layer, draft, all, verification.first, chains, num_threads);
        bool is_over = *rounds.interrupt;
        for (int64_t r = 0; r < num_rows; r++) {
            Chain& chain = chains[r];
            chain.position += chain.num_kept;
            is_over |= chain.has_ended || rounds.counts[r] >= std::min(rounds.budgets[r], rounds.due[r]);
            for (int64_t d = 0; d < chain.num_drafts; d++) {
                rounds.drafted[d]++;
                rounds.accepted[d] += d < num_accepted[r];
            }
        }
        if (is_over) return;
    }
}

}  // namespace longarc
