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
#include <optional>

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
    double least_probability;                   // of a chain: a draft that would make it less likely is not made
    const float* output;                        // packed output projection
    const Pair* draft_output;                   // the same for drafts, in bfloat16
    const float* temperatures;                  // [row]
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
    int64_t position, token;     // the newest token and its place, not in the cache yet
    int64_t num_drafts = 0;      // of this round
    int64_t num_kept = 0;        // tokens of this round that were drawn
    double probability = 1.0;    // that the MTP layer drafts this chain
    bool is_cut = false;         // a draft was drawn that is not made, so its place has a refusal's distribution
    bool has_ended = false;
};

// Drafts of all rows in one round. A row of weights is proportional to the probabilities that a draft was drawn from.
struct Drafts {
    int64_t depths, stride;
    std::vector<int64_t> tokens;   // [row][depth]
    std::vector<double> totals;    // [row][depth], of the weights
    std::vector<float> floors;     // [row][depth]: a token of less weight is never drafted
    Floats weights;                // [row][depth][stride]

    Drafts(int64_t num_rows, int64_t depths, int64_t vocab)
        : depths(depths), stride(round_up(vocab, DRAW_BLOCK)), tokens(num_rows * depths), totals(num_rows * depths),
          floors(num_rows * depths), weights(num_rows * depths * stride) {}

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
    thread_local Scratch rounded;
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
        if (rounds.num_drafts > 0) {
            const Operand<Pair> in = operand<Pair>(now.hidden.data(), shape.hidden, count, shape.hidden, rounded);
            gemm(count, rounds.vocab, in.steps, in.rows, in.stride, rounds.draft_output, now.logits.data(), drafts.stride);
        }
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
            // Tokens that would make the chain too unlikely have no probability as drafts. One of them was drawn: no
            // draft is made, and the token at this place comes from what is left of the main model's distribution.
            const double least = rounds.least_probability / chains[r].probability;
            drafts.floors[at] = float(least * drafts.totals[at]);
            chains[r].is_cut = probability > 0.0 && weights[drafts.tokens[at]] < drafts.floors[at];
            chains[r].probability *= probability;
            if (probability == 0.0 || chains[r].is_cut)
                chains[r].num_drafts = d - 1;
            else if (is_stop(rounds, r, drafts.tokens[at]))
                chains[r].num_drafts = d;
            else
                stays[i] = d < most;
        }
        now.keep(stays, shape.hidden, room);
    }
}

// What is left to draw from after a refusal: max(p - q, 0); p itself where rounding leaves nothing.
inline int64_t draw_residual(const float* logits, int64_t vocab, float log_sum, const float* weights, double total,
                             float floor, double uniform) {
    thread_local Floats probability, left;
    probability_row(logits, vocab, log_sum, probability);
    left.resize(probability.size());
    const Vec factor = splat(float(1.0 / total));
    Vec most{};
    for (int64_t i = 0; i < int64_t(left.size()); i += LANES) {
        const Vec weight = load(weights + i), drafted = weight < floor ? Vec{} : weight;
        const Vec rest = max(load(&probability[i]) - drafted * factor, Vec{});
        store(&left[i], rest);
        most = max(most, rest);
    }
    return draw_weighted(max_lanes(most) > 0.0f ? left.data() : probability.data(), vocab, uniform);
}

// What row `r` does with draft `d` (from 1 on), or behind its last one: draws a token, and tells whether it goes on.
inline bool verify_row(const Rounds& rounds, int64_t r, const Chain& chain, int64_t d, int64_t position, float* logits,
                       Drafts& drafts, longarc::Drawn* drawn) {
    const bool has_draft = d <= chain.num_drafts, is_cut = chain.is_cut && d == chain.num_drafts + 1;
    const float temperature = rounds.temperatures[r];
    const double uniform = uniform_of(rounds.seeds[r], position, Stream::TOKEN);
    if ((!has_draft && !is_cut) || temperature == 0.0f || !is_finite_row(logits, rounds.vocab)) {
        *drawn = sample_row(logits, rounds.vocab, temperature, uniform);
        return has_draft && drawn->is_finite && drawn->token == drafts.tokens[r * drafts.depths + d - 1];
    }
    const int64_t at = r * drafts.depths + d - 1, token = drafts.tokens[at];
    const LogSum sum = log_sum_row(logits, rounds.vocab, temperature);
    const float* weights = drafts.row(r, d);
    const double p = std::exp(double(logits[token] - sum.value)), q = weights[token] / drafts.totals[at];
    const bool stays = has_draft && uniform_of(rounds.seeds[r], position, Stream::ACCEPT) * q < p;
    const int64_t next = stays ? token
                               : draw_residual(logits, rounds.vocab, sum.value, weights, drafts.totals[at],
                                               drafts.floors[at], uniform);
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

// Tokens that stay behind the newest one, whose rows of depth 1 are still to be left.
struct KeptRows {
    std::vector<int64_t> tokens, slots, positions;

    // Keeps the states of what stays of a verification.
    void fill(const MlaShape& shape, const Draft& draft, const Rows& all, const std::vector<int64_t>& first,
              const std::vector<Chain>& chains) {
        tokens.clear(), slots.clear(), positions.clear();
        for (int64_t r = 0; r < int64_t(chains.size()); r++)
            for (int64_t i = 0; i < chains[r].num_kept; i++) {
                const int64_t row = first[r] + i, slot = all.slots[row], position = all.positions[row];
                std::memcpy(state_of(draft, all, slot, position, shape.hidden), all.hidden + row * shape.hidden,
                            sizeof(float) * shape.hidden);
                if (i == 0) continue;  // drafting left the row of the newest token
                tokens.push_back(all.tokens[row]), slots.push_back(slot), positions.push_back(position);
            }
    }

    Rows rows(const Rows& like) const {
        Rows kept = like;
        kept.tokens = tokens.data(), kept.slots = slots.data(), kept.positions = positions.data();
        kept.num = int64_t(tokens.size());
        return kept;
    }
};

// Calls each(first, count, scratch) for blocks of a member's part of some rows.
template <class Each>
inline void for_own_blocks(int64_t num_rows, const Member& me, Each each) {
    thread_local ChunkScratch scratch;
    const Stretch own = me.part(num_rows);
    for (int64_t first = own.begin; first < own.end; first += CHUNK_ROWS)
        each(first, std::min(CHUNK_ROWS, own.end - first), scratch);
}

// Rounds of some sequences, made by a team.
class RoundsPass {
  public:
    RoundsPass(const MlaShape& shape, const MlaLayer* layers, const Rows& start, const Draft& draft,
               const Rounds& rounds)
        : shape_(shape), layers_(layers), start_(start), draft_(draft), rounds_(rounds), num_rows_(start.num),
          tokens_(num_rows_), positions_(num_rows_), num_drawn_(num_rows_), num_accepted_(num_rows_),
          chains_(num_rows_), drafts_(num_rows_, rounds.num_drafts, rounds.vocab), newest_(start) {
        newest_.tokens = tokens_.data(), newest_.positions = positions_.data();
        for (int64_t r = 0; r < num_rows_; r++) {
            chains_[r] = {start.positions[r], start.tokens[r]};
            rounds.counts[r] = 0;
        }
        std::fill(rounds.drafted, rounds.drafted + rounds.num_drafts, 0);
        std::fill(rounds.accepted, rounds.accepted + rounds.num_drafts, 0);
    }

    // Makes rounds until one in which a row came to its end or a piece of it is due, or someone else wants a turn.
    void run(const Member& me) {
        const MlaLayer& layer = layers_[shape_.num_layers];
        for (int64_t round = 0; round < rounds_.max_rounds && !is_over_; round++) {
            if (me.index == 0) begin_round();
            me.wait();
            for_own_blocks(num_rows_, me, [&](int64_t first, int64_t num, ChunkScratch& s) {
                draft_block(shape_, layer, draft_, newest_, rounds_, chains_.data(), num_drawn_, first, num, drafts_, s);
            });
            me.wait();
            if (me.index == 0) {
                verification_.fill(newest_, chains_.data(), drafts_, shape_.hidden);
                all_ = verification_.rows(start_);
                main_.emplace(shape_, layers_, all_, me.team.size);
            }
            me.wait();
            main_->work();
            me.wait();
            verify(me);
            if (me.index == 0) {
                kept_.fill(shape_, draft_, all_, verification_.first, chains_);
                end_round();
            }
            me.wait();
            const Rows kept = kept_.rows(all_);
            for_own_blocks(kept.num, me, [&](int64_t first, int64_t num, ChunkScratch& s) {
                draft_keys(shape_, layer, draft_, kept, first, num, s);
            });
            me.wait();
        }
    }

  private:
    void begin_round() {
        for (int64_t r = 0; r < num_rows_; r++) {
            tokens_[r] = chains_[r].token, positions_[r] = chains_[r].position;
            num_drawn_[r] = rounds_.num_drawn[r] + rounds_.counts[r];
            chains_[r].num_drafts = std::min(rounds_.num_drafts, rounds_.budgets[r] - rounds_.counts[r] - 1);
            chains_[r].probability = 1.0, chains_[r].is_cut = false;
        }
    }

    // Verifies all chains, a block of them at a time whose logits stay in the cache.
    void verify(const Member& me) {
        const std::vector<int64_t>& first = verification_.first;
        const int64_t block = std::max<int64_t>(1, DRAWN_ROWS / (rounds_.num_drafts + 1));
        const Stretch columns = me.part(rounds_.vocab, PANEL);
        if (me.index == 0) logits_.resize(std::min(num_rows_, block) * (rounds_.num_drafts + 1) * rounds_.vocab);
        me.wait();
        for (int64_t begin = 0; begin < num_rows_; begin += block) {
            const int64_t end = std::min(begin + block, num_rows_);
            gemm(first[end] - first[begin], columns.size(), shape_.hidden, all_.hidden + first[begin] * shape_.hidden,
                 shape_.hidden, rounds_.output + columns.begin * shape_.hidden, logits_.data() + columns.begin,
                 rounds_.vocab);
            me.wait();
            const Stretch own = me.part(end - begin);
            for (int64_t c = begin + own.begin; c < begin + own.end; c++)
                num_accepted_[c] = verify_chain(rounds_, c, chains_[c], num_drawn_[c],
                                                logits_.data() + (first[c] - first[begin]) * rounds_.vocab, drafts_);
            me.wait();
        }
    }

    void end_round() {
        is_over_ = *rounds_.interrupt;
        for (int64_t r = 0; r < num_rows_; r++) {
            Chain& chain = chains_[r];
            chain.position += chain.num_kept;
            is_over_ |= chain.has_ended || rounds_.counts[r] >= std::min(rounds_.budgets[r], rounds_.due[r]);
            for (int64_t d = 0; d < chain.num_drafts; d++) {
                rounds_.drafted[d]++;
                rounds_.accepted[d] += d < num_accepted_[r];
            }
        }
    }

    const MlaShape& shape_;
    const MlaLayer* layers_;
    const Rows& start_;
    const Draft& draft_;
    const Rounds& rounds_;
    const int64_t num_rows_;
    std::vector<int64_t> tokens_, positions_, num_drawn_, num_accepted_;
    std::vector<Chain> chains_;
    Drafts drafts_;
    Rows newest_, all_;
    Verification verification_;
    KeptRows kept_;
    std::optional<MlaPass> main_;
    Floats logits_;
    bool is_over_ = false;
};

inline void run_rounds(const MlaShape& shape, const MlaLayer* layers, const Rows& start, const Draft& draft,
                       const Rounds& rounds, int64_t num_threads) {
    RoundsPass pass(shape, layers, start, draft, rounds);
    with_team(num_threads, [&](const Member& me) { pass.run(me); });
}

}  // namespace longarc
