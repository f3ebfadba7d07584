// Drafts of the MTP layer for sequences that are being decoded: the arithmetic of models/mtp.py, over the cache.
//
//   position        0     1    ...    n-1        n         tokens 0 .. n-1 are in the cache, and token n has been drawn
//   main state      h_0   h_1  ...    h_(n-1)                   `states`
//   row of depth 1        r_1  ...    r_(n-1)    r_n            of token p and h_(p-1): it lies where its token does
//
// Depth 1 reads token n, leaves r_n and drafts token n + 1. A later depth reads that one and asks the same rows.
#pragma once

#include "mla.h"

namespace longarc {

// What the MTP layer has besides a layer's own weights.
struct Draft {
    const float *token_norm, *state_norm, *joint, *head_norm;  // `joint` is packed
    float* states;  // of the main model after its final norm, [page][position][hidden]
    int64_t feeds_normed, advances;
};

inline float* state_of(const Draft& draft, const Rows& rows, int64_t slot, int64_t position, int64_t hidden) {
    const int64_t page = rows.pages[slot * rows.slot_pages + (position >> rows.page_shift)];
    return draft.states + (page * page_keys(rows) + (position & (page_keys(rows) - 1))) * hidden;
}

// The residual stream of rows [first, first + num) into s.x, its norm into s.normed. `before(r)` is the state that row
// first + r goes on from. `is_first`: depth 1, for which the embedding of the second token counts as zero.
template <class Before>
inline void draft_input(const MlaShape& shape, const MlaLayer& layer, const Draft& draft, const Rows& rows,
                        int64_t first, int64_t num, bool is_first, Before before, ChunkScratch& s) {
    const int64_t hidden = shape.hidden;
    float* joined = s.gate_up.floats(num * 2 * hidden);
    float *x = s.x.floats(num * hidden), *normed = s.normed.floats(num * hidden);
    for (int64_t r = 0; r < num; r++) {
        float* to = joined + r * 2 * hidden;
        if (is_first && rows.positions[first + r] == 1)
            std::fill(to, to + hidden, 0.0f);
        else
            rms_norm_row(rows.embedding + rows.tokens[first + r] * hidden, draft.token_norm, to, hidden, shape.eps);
        rms_norm_row(before(r), draft.state_norm, to + hidden, hidden, shape.eps);
    }
    gemm(num, hidden, 2 * hidden, joined, 2 * hidden, draft.joint, x, hidden);
    rms_norm_rows(x, layer.input_norm, normed, num, hidden, shape.eps);
}

// The same rows, turned as their states are, which stand one position before their tokens.
inline Rows turned_as_states(const MlaShape& shape, const Rows& rows) {
    Rows turned = rows;
    turned.cos -= shape.rope / 2, turned.sin -= shape.rope / 2;
    return turned;
}

// Leaves the rows of depth 1 of tokens that have their place in the cache; none of them is the first of its sequence.
inline void draft_keys(const MlaShape& shape, const MlaLayer& layer, const Draft& draft, const Rows& rows,
                       int64_t first, int64_t num, ChunkScratch& s) {
    const auto before = [&](int64_t r) {
        return state_of(draft, rows, rows.slots[first + r], rows.positions[first + r] - 1, shape.hidden);
    };
    draft_input(shape, layer, draft, rows, first, num, true, before, s);
    mla_keys(shape, layer, turned_as_states(shape, rows), first, num, s);
}

// Finds the rows of depth 1 that a draft attends to: all up to position n, or those that `selected` holds, which
// depth 1 gets. As mla_see, but there is nothing at position 0.
inline void draft_see(const MlaShape& shape, const MlaLayer& layer, const Rows& rows, int64_t row,
                      const float* index_query, const float* index_weights, int32_t* selected, SeenKeys& seen,
                      Floats& scores) {
    const int64_t dim = shape.latent + shape.rope, num_keys = rows.positions[row], size = page_keys(rows);
    const int64_t* pages = pages_of(rows, row);
    const bool selects = shape.is_sparse && num_keys > shape.index_topk;
    seen.num = selects ? shape.index_topk : num_keys;
    if (int64_t(seen.latents.size()) < seen.num + LANES) seen.latents.resize(seen.num + LANES);
    const auto latent_at = [&](int64_t position) {
        return layer.latents + (pages[position >> rows.page_shift] * size + (position & (size - 1))) * dim;
    };
    if (!selects) {
        for (int64_t j = 0; j < num_keys; j++) seen.latents[j] = latent_at(j + 1);
        return;
    }
    if (index_query) {
        if (int64_t(scores.size()) < num_keys + 1 + LANES) scores.resize(num_keys + 1 + LANES);
        for (int64_t at = 0; at <= num_keys; at += size)
            index_scores(index_query, index_weights, shape.index_heads, shape.index_dim,
                         layer.index_keys + pages[at >> rows.page_shift] * size * shape.index_dim,
                         std::min(size, num_keys + 1 - at), scores.data() + at);
        scores[0] = -INFINITY;
        if (!choose_best(scores.data(), num_keys + 1, seen.num, selected)) selected[0] = -1;
    }
    if (selected[0] < 0) seen.num = 0;
    for (int64_t j = 0; j < seen.num; j++) seen.latents[j] = latent_at(selected[j]);
}

// One depth for rows [first, first + num), whose tokens it reads; their positions are n at every depth.
struct Depth {
    int64_t depth;           // from 1 on
    const int64_t* turned;   // [row], where the query of a later depth stands
    float* fed;              // in: what the depth before handed on, but for depth 1; out: what this one does
    float* hidden;           // out, what is projected to the vocabulary
    int32_t* selected;       // [row][selected_room], from depth 1 to those after it
};

inline void draft_depth(const MlaShape& shape, const MlaLayer& layer, const Draft& draft, const Rows& rows,
                        int64_t first, int64_t num, const Depth& depth, ChunkScratch& s) {
    const int64_t hidden = shape.hidden, room = selected_room(shape, rows);
    const bool is_first = depth.depth == 1;
    float* fed = depth.fed + first * hidden;
    MlaLayer asking = layer;
    Rows turned = turned_as_states(shape, rows);
    if (is_first) {
        draft_keys(shape, layer, draft, rows, first, num, s);
    } else {
        // Only the queries are new: the first rows of the input projection.
        draft_input(shape, layer, draft, rows, first, num, false, [&](int64_t r) { return fed + r * hidden; }, s);
        float* input = s.projected.floats(num * shape.q_rank);
        float* q_latent = s.q_latent.floats(num * shape.q_rank);
        gemm(num, shape.q_rank, hidden, s.normed.floats(0), hidden, layer.input, input, shape.q_rank);
        rms_norm_rows(input, layer.q_norm, q_latent, num, shape.q_rank, shape.latent_eps);
        asking.index_keys = nullptr;
        turned = rows;
        turned.positions = depth.turned;
    }
    mla_project_queries(shape, asking, turned, first, 0, num, s);
    const MlaWidths width(shape, asking);
    const float *input = s.projected.floats(0), *heads = s.index.floats(0);
    float *x = s.x.floats(0), *normed = s.normed.floats(0);
    mla_attend(shape, layer, rows, first, num, x, s, [&](int64_t r) {
        const float *index_query = nullptr, *index_weights = nullptr;
        if (asking.index_keys) {
            index_query = heads + r * width.heads + width.queries;
            index_weights = input + r * width.inputs + shape.q_rank + width.dim + width.index_dim;
        }
        draft_see(shape, layer, rows, first + r, index_query, index_weights, depth.selected + (first + r) * room,
                  s.seen[r % 2], s.scores);
    });
    rms_norm_rows(x, layer.post_norm, normed, num, hidden, shape.eps);
    feed_forward_rows(layer.feed_forward, hidden, num, normed, x, s);
    float* out = depth.hidden + first * hidden;
    rms_norm_rows(x, draft.head_norm, out, num, hidden, shape.eps);
    std::memcpy(fed, draft.feeds_normed ? out : x, sizeof(float) * num * hidden);
}

// Calls each(first, count, scratch) for blocks of rows that a thread takes through the layer at once.
template <class Each>
inline void for_blocks(int64_t num_rows, int64_t num_threads, Each each) {
    for_rows(num_rows, num_threads, [&](int64_t begin, int64_t total) {
        thread_local ChunkScratch scratch;
        for (int64_t first = begin; first < begin + total; first += CHUNK_ROWS)
            each(first, std::min(CHUNK_ROWS, begin + total - first), scratch);
    });
}

// Takes in new tokens that the main model has computed: keeps their states, and leaves their rows of depth 1.
inline void take_rows(const MlaShape& shape, const MlaLayer& layer, const Draft& draft, const Rows& rows,
                      int64_t num_threads) {
    std::vector<int64_t> tokens, slots, positions;
    for (int64_t r = 0; r < rows.num; r++) {
        const int64_t slot = rows.slots[r], position = rows.positions[r];
        std::memcpy(state_of(draft, rows, slot, position, shape.hidden), rows.hidden + r * shape.hidden,
                    sizeof(float) * shape.hidden);
        if (position == 0) continue;
        tokens.push_back(rows.tokens[r]), slots.push_back(slot), positions.push_back(position);
    }
    Rows behind = rows;
    behind.tokens = tokens.data(), behind.slots = slots.data(), behind.positions = positions.data();
    behind.num = int64_t(tokens.size());
    for_blocks(behind.num, num_threads, [&](int64_t first, int64_t num, ChunkScratch& s) {
        draft_keys(shape, layer, draft, behind, first, num, s);
    });
}

inline void draft_rows(const MlaShape& shape, const MlaLayer& layer, const Draft& draft, const Rows& rows,
                       const Depth& depth, int64_t num_threads) {
    for_blocks(rows.num, num_threads, [&](int64_t first, int64_t num, ChunkScratch& s) {
        draft_depth(shape, layer, draft, rows, first, num, depth, s);
    });
}

}  // namespace longarc
