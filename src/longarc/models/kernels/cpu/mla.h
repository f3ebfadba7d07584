// One pass of new tokens over cached sequences through a decoder of the GLM-5 family.
//
//   rows (token, slot, position) --> embedding --> [ norm, attention, norm, feed-forward ] x layers --> norm
//
// Rows go through all layers in chunks whose activations stay in the processor's own cache. Threads take chunks in
// order. A chunk that goes on with a sequence follows the chunk before it, layer by layer, so that a prompt's later
// rows find the earlier ones in the cache.
#pragma once

#include <atomic>
#include <thread>

#include "experts.h"
#include "new_rows.h"
#include "routed.h"
#include "row_attention.h"

namespace longarc {

constexpr int64_t CHUNK_ROWS = 64;

// A feed-forward of one layer, weights packed. Experts where num_experts > 0, else dense of `width`.
struct FeedForward {
    const float *gate_up, *down;
    const float *router, *router_bias;
    const float *shared_gate_up, *shared_down;
    int64_t num_experts, num_chosen, width, shared_width;
    int64_t normalise;
    float scale;
};

// A layer that reuses the selection of one before it has no indexer: no index_keys, and no rows of one in its weights.
struct MlaLayer {
    const float *input_norm;
    const float *input;         // packed rows of q_a, kv_a, indexer keys, indexer weights
    const float *q_norm, *kv_norm;
    const float *query;         // packed rows of q_b, indexer queries
    const float *key_absorb;    // per head, latent by nope
    const float *value_absorb;  // per head, value by latent
    const float *output;
    const float *index_norm_weight, *index_norm_bias;
    const float *post_norm;
    FeedForward feed_forward;
    float *latents, *index_keys;  // [page][position][dim] and [page][position blocks][dim][LANES]
    uint8_t *routed, *selected;   // out, [page][position][choice]: experts, selected positions; null where nobody asks
};

struct MlaShape {
    int64_t num_layers, hidden, num_heads, q_rank, latent, nope, rope, value;
    int64_t index_heads, index_dim, index_topk, is_sparse;
    int64_t routed_bytes, selected_bytes;  // of a number in `routed`, in `selected`
    float eps, latent_eps, index_eps, scale, index_scale;
};

// Where the latents lie that one row attends to, by ascending position.
struct SeenKeys {
    std::vector<const float*> latents;
    int64_t num;
};

struct ChunkScratch {
    Scratch x, normed, projected, q_latent, query, attended, merged, gate_up, activated, logits, weights, slots, index;
    std::vector<int32_t> chosen;
    std::vector<int32_t> selected;  // positions by row of the chunk, from a layer with an indexer to those without
    Floats scores;
    SeenKeys seen[2];
    RowScratch attend_rows;
};

inline void rms_norm_rows(const float* x, const float* w, float* y, int64_t num, int64_t width, float eps) {
    for (int64_t r = 0; r < num; r++) rms_norm_row(x + r * width, w, y + r * width, width, eps);
}

// x += swiglu feed-forward of `normed`
template <Store MODE>
inline void dense_rows(const float* gate_up, const float* down, int64_t hidden, int64_t width, int64_t num,
                       const float* normed, float* x, ChunkScratch& s) {
    float *gates = s.gate_up.floats(num * 2 * width), *activated = s.activated.floats(num * width);
    gemm(num, 2 * width, hidden, normed, hidden, gate_up, gates, 2 * width);
    swiglu_rows(gates, activated, num, width);
    gemm<MODE>(num, hidden, width, activated, width, down, x, hidden);
}

inline void feed_forward_rows(const FeedForward& ff, int64_t hidden, int64_t num, const float* normed, float* x,
                              ChunkScratch& s) {
    if (ff.num_experts == 0) {
        dense_rows<Store::ADD>(ff.gate_up, ff.down, hidden, ff.width, num, normed, x, s);
        return;
    }
    const ExpertShape shape{ff.num_experts, ff.num_chosen, hidden, ff.width};
    float* logits = s.logits.floats(num * ff.num_experts);
    float* weights = s.weights.floats(num * ff.num_chosen);
    float* mixed = s.merged.floats(num * hidden);
    s.chosen.resize(num * ff.num_chosen);
    gemm(num, ff.num_experts, hidden, normed, hidden, ff.router, logits, ff.num_experts);
    for (int64_t r = 0; r < num; r++)
        route_row(logits + r * ff.num_experts, ff.router_bias, ff.num_experts, ff.num_chosen, ff.normalise, ff.scale,
                  &s.chosen[r * ff.num_chosen], weights + r * ff.num_chosen);
    experts_forward(shape, num, normed, s.chosen.data(), weights, ff.gate_up, ff.down, mixed,
                    s.gate_up.floats(num * ff.num_chosen * 2 * ff.width),
                    s.slots.floats(num * ff.num_chosen * hidden), 1);
    if (ff.shared_width)
        dense_rows<Store::ADD>(ff.shared_gate_up, ff.shared_down, hidden, ff.shared_width, num, normed, mixed, s);
    for (int64_t i = 0; i < num * hidden; i++) x[i] += mixed[i];
}

// Keeps what feed_forward_rows chose for rows [first, first + num).
inline void keep_experts(const MlaShape& shape, const MlaLayer& layer, const Rows& rows, int64_t first, int64_t num,
                         const ChunkScratch& s) {
    const int64_t count = layer.feed_forward.num_chosen;
    for (int64_t r = 0; r < num; r++)
        keep_choice(layer.routed, shape.routed_bytes, rows, first + r, &s.chosen[r * count], count);
}

// The sizes of what a row of MLA is projected to.
struct MlaWidths {
    int64_t dim, head, index_dim, index_heads, inputs, queries, heads;

    MlaWidths(const MlaShape& shape, const MlaLayer& layer)
        : dim(shape.latent + shape.rope), head(shape.nope + shape.rope),
          index_dim(layer.index_keys ? shape.index_dim : 0), index_heads(layer.index_keys ? shape.index_heads : 0),
          inputs(shape.q_rank + dim + index_dim + index_heads), queries(shape.num_heads * head),
          heads(queries + index_heads * index_dim) {}
};

// Attention of a chunk is in two parts, of which others wait for the first. This one makes, of rows
// [first, first + num), latent rows and indexer keys, which go to the cache, latent queries and indexer weights.
inline void mla_keys(const MlaShape& shape, const MlaLayer& layer, const Rows& rows, int64_t first, int64_t num,
                     ChunkScratch& s) {
    const MlaWidths width(shape, layer);
    float* input = s.projected.floats(num * width.inputs);
    float* q_latent = s.q_latent.floats(num * shape.q_rank);
    gemm(num, width.inputs, shape.hidden, s.normed.floats(0), shape.hidden, layer.input, input, width.inputs);
    for (int64_t r = 0; r < num; r++) {
        const int64_t position = rows.positions[first + r], half = shape.rope / 2;
        const int64_t page = page_of(rows, first + r), place = place_in_page(rows, first + r);
        const float *cos = rows.cos + position * half, *sin = rows.sin + position * half;
        float* row = input + r * width.inputs;
        rms_norm_row(row, layer.q_norm, q_latent + r * shape.q_rank, shape.q_rank, shape.latent_eps);
        float* latent = layer.latents + (page * page_keys(rows) + place) * width.dim;
        rms_norm_row(row + shape.q_rank, layer.kv_norm, latent, shape.latent, shape.latent_eps);
        if (rows.fp8_rows) round_to_fp8(latent, shape.latent, FP8_BLOCK);
        std::memcpy(latent + shape.latent, row + shape.q_rank + shape.latent, sizeof(float) * shape.rope);
        rotate_row(latent + shape.latent, cos, sin, shape.rope, true, 1.0f);
        if (!layer.index_keys) continue;
        float* key = row + shape.q_rank + width.dim;
        layer_norm_row(key, layer.index_norm_weight, layer.index_norm_bias, key, shape.index_dim, shape.index_eps);
        rotate_row(key, cos, sin, shape.rope, true, 1.0f);
        if (rows.fp8_rows) round_to_fp8(key, shape.index_dim, FP8_BLOCK);
        write_blocked(layer.index_keys + page * page_keys(rows) * shape.index_dim, place, key, shape.index_dim);
        float* weights = key + shape.index_dim;
        for (int64_t h = 0; h < shape.index_heads; h++) weights[h] *= shape.index_scale;
    }
}

// Absorbed queries and indexer queries of rows [begin, end) of the chunk, into s.query and s.index from 0 on.
inline void mla_project_queries(const MlaShape& shape, const MlaLayer& layer, const Rows& rows, int64_t first,
                                int64_t begin, int64_t end, ChunkScratch& s) {
    const MlaWidths width(shape, layer);
    const int64_t num = end - begin;
    const float* q_latent = s.q_latent.floats(0) + begin * shape.q_rank;
    float* heads = s.index.floats(num * width.heads);
    float* query = s.query.floats(num * shape.num_heads * width.dim);
    gemm(num, width.heads, shape.q_rank, q_latent, shape.q_rank, layer.query, heads, width.heads);
    for (int64_t h = 0; h < shape.num_heads; h++)
        gemm(num, shape.latent, shape.nope, heads + h * width.head, width.heads,
             layer.key_absorb + h * packed_size(shape.latent, shape.nope), query + h * width.dim,
             shape.num_heads * width.dim);
    for (int64_t r = 0; r < num; r++) {
        const int64_t half = shape.rope / 2, position = rows.positions[first + begin + r];
        const float *cos = rows.cos + position * half, *sin = rows.sin + position * half;
        float* row = heads + r * width.heads;
        for (int64_t h = 0; h < shape.num_heads; h++) {
            float* to = query + (r * shape.num_heads + h) * width.dim + shape.latent;
            std::memcpy(to, row + h * width.head + shape.nope, sizeof(float) * shape.rope);
            rotate_row(to, cos, sin, shape.rope, true, 1.0f);
        }
        for (int64_t h = 0; h < width.index_heads; h++)
            rotate_row(row + width.queries + h * width.index_dim, cos, sin, shape.rope, true, 1.0f);
    }
}

// Finds what a row attends to. Where that is a selection, `selected` holds it or, in a layer with an indexer, gets it;
// it has room for LANES more. Scores that are NaN select nothing, which `selected` says by a -1 in front.
inline void mla_see(const MlaShape& shape, const MlaLayer& layer, const Rows& rows, int64_t row,
                    const float* index_query, const float* index_weights, int32_t* selected, SeenKeys& seen,
                    Floats& scores) {
    const int64_t dim = shape.latent + shape.rope, num_keys = rows.positions[row] + 1, size = page_keys(rows);
    const int64_t* pages = pages_of(rows, row);
    const bool selects = shape.is_sparse && num_keys > shape.index_topk;
    seen.num = selects ? shape.index_topk : num_keys;
    if (int64_t(seen.latents.size()) < seen.num + LANES) seen.latents.resize(seen.num + LANES);
    if (selects && layer.index_keys) {
        if (int64_t(scores.size()) < num_keys + LANES) scores.resize(num_keys + LANES);
        auto index_keys = [&](int64_t at) {
            return layer.index_keys + pages[at >> rows.page_shift] * size * shape.index_dim;
        };
        for (int64_t at = 0; at < num_keys; at += size) {
            // The processor looks ahead by itself within a page, but not to the next one.
            if (at + size < num_keys) prefetch(index_keys(at + size), std::min(size, num_keys - at - size) * shape.index_dim);
            index_scores(index_query, index_weights, shape.index_heads, shape.index_dim, index_keys(at),
                         std::min(size, num_keys - at), scores.data() + at);
        }
        if (!choose_best(scores.data(), num_keys, seen.num, selected)) selected[0] = -1;
        // Who sees no more than that sees everything, which nobody has to be told.
        if (layer.selected) keep_choice(layer.selected, shape.selected_bytes, rows, row, selected, seen.num);
    }
    if (selects && selected[0] < 0) seen.num = 0;
    if (selects) {
        for (int64_t j = 0; j < seen.num; j++) {
            const int64_t page = pages[selected[j] >> rows.page_shift], place = selected[j] & (size - 1);
            seen.latents[j] = layer.latents + (page * size + place) * dim;
        }
        return;
    }
    for (int64_t at = 0; at < seen.num; at += size) {
        const float* page = layer.latents + pages[at >> rows.page_shift] * size * dim;
        for (int64_t j = at; j < std::min(seen.num, at + size); j++, page += dim) seen.latents[j] = page;
    }
}

// Numbers that a row's selection has room for.
inline int64_t selected_room(const MlaShape& shape, const Rows& rows) {
    return std::min(shape.index_topk, rows.slot_pages * page_keys(rows)) + LANES;
}

// Adds to x what rows [first, first + num) attend to, whose queries are in s.query from 0 on; see(r) leaves the keys of
// row first + r in s.seen[r % 2].
template <class See>
inline void mla_attend(const MlaShape& shape, const MlaLayer& layer, const Rows& rows, int64_t first, int64_t num,
                       float* x, ChunkScratch& s, See see) {
    constexpr int64_t NEAR_KEYS = 512;  // of a sequence, which stay in the processor's cache from row to row
    const int64_t dim = shape.latent + shape.rope;
    const float* query = s.query.floats(0);
    float* attended = s.attended.floats(num * shape.num_heads * shape.latent);
    see(0);
    for (int64_t r = 0; r < num; r++) {
        // The next row's keys travel while this row's are worked on.
        if (r + 1 < num) see(r + 1);
        const SeenKeys &seen = s.seen[r % 2], &next = s.seen[(r + 1) % 2];
        const bool is_near = r + 1 == num || (rows.slots[first + r + 1] == rows.slots[first + r] &&
                                              rows.positions[first + r + 1] < NEAR_KEYS);
        attend_rows(query + r * shape.num_heads * dim, shape.scale, shape.num_heads,
                    {seen.latents.data(), dim, shape.latent, seen.num},
                    attended + r * shape.num_heads * shape.latent, s.attend_rows, nullptr,
                    {next.latents.data(), is_near ? 0 : next.num, dim});
    }
    float* values = s.merged.floats(num * shape.num_heads * shape.value);
    for (int64_t h = 0; h < shape.num_heads; h++)
        gemm(num, shape.value, shape.latent, attended + h * shape.latent, shape.num_heads * shape.latent,
             layer.value_absorb + h * packed_size(shape.value, shape.latent), values + h * shape.value,
             shape.num_heads * shape.value);
    gemm<Store::ADD>(num, shape.hidden, shape.num_heads * shape.value, values, shape.num_heads * shape.value,
                     layer.output, x, shape.hidden);
}

// The second part: adds to the residual stream what rows [begin, end) of the chunk attend to.
inline void mla_queries(const MlaShape& shape, const MlaLayer& layer, const Rows& rows, int64_t first, int64_t begin,
                        int64_t end, ChunkScratch& s) {
    mla_project_queries(shape, layer, rows, first, begin, end, s);
    const MlaWidths width(shape, layer);
    const int64_t num = end - begin, room = selected_room(shape, rows);
    const float *input = s.projected.floats(0) + begin * width.inputs, *heads = s.index.floats(0);
    if (int64_t(s.selected.size()) < CHUNK_ROWS * room) s.selected.resize(CHUNK_ROWS * room);
    mla_attend(shape, layer, rows, first + begin, num, s.x.floats(0) + begin * shape.hidden, s, [&](int64_t r) {
        mla_see(shape, layer, rows, first + begin + r, heads + r * width.heads + width.queries,
                input + r * width.inputs + shape.q_rank + width.dim + width.index_dim,
                &s.selected[(begin + r) * room], s.seen[r % 2], s.scores);
    });
}

// Calls each(begin, end) for the stretches of a chunk whose rows are wanted.
template <class Each>
inline void wanted_rows(const Rows& rows, int64_t first, int64_t num, bool ends_only, Each each) {
    if (!ends_only) return each(0, num);
    for (int64_t begin = 0, end; begin < num; begin = end) {
        end = begin + 1;
        if (!is_end(rows, first + begin)) continue;
        while (end < num && is_end(rows, first + end)) end++;
        each(begin, end);
    }
}

// Runs rows [first, first + num) through all layers. written(layer) returns when the keys of all earlier rows of the
// layer are in the cache, and tells others that those of this chunk are.
template <class Written>
inline void run_chunk(const MlaShape& shape, const MlaLayer* layers, const Rows& rows, int64_t first, int64_t num,
                      ChunkScratch& s, Written written) {
    const int64_t hidden = shape.hidden;
    float *x = s.x.floats(num * hidden), *normed = s.normed.floats(num * hidden);
    for (int64_t r = 0; r < num; r++)
        std::memcpy(x + r * hidden, rows.embedding + rows.tokens[first + r] * hidden, sizeof(float) * hidden);
    for (int64_t l = 0; l < shape.num_layers; l++) {
        rms_norm_rows(x, layers[l].input_norm, normed, num, hidden, shape.eps);
        mla_keys(shape, layers[l], rows, first, num, s);
        written(l);
        // What the last layer makes of a row nobody reads but that row itself.
        wanted_rows(rows, first, num, rows.ends_only && l + 1 == shape.num_layers, [&](int64_t begin, int64_t end) {
            float *x_b = x + begin * hidden, *normed_b = normed + begin * hidden;
            mla_queries(shape, layers[l], rows, first, begin, end, s);
            rms_norm_rows(x_b, layers[l].post_norm, normed_b, end - begin, hidden, shape.eps);
            feed_forward_rows(layers[l].feed_forward, hidden, end - begin, normed_b, x_b, s);
            if (layers[l].routed) keep_experts(shape, layers[l], rows, first + begin, end - begin, s);
        });
    }
    wanted_rows(rows, first, num, rows.ends_only, [&](int64_t begin, int64_t end) {
        rms_norm_rows(x + begin * hidden, rows.final_norm, rows.hidden + (first + begin) * hidden, end - begin, hidden,
                      shape.eps);
    });
}

// Chunks of nearly equal size, as many for each thread.
inline int64_t count_chunks(int64_t num_rows, int64_t num_threads) {
    return std::min(num_rows, round_up((num_rows + CHUNK_ROWS - 1) / CHUNK_ROWS, num_threads));
}

// One pass of rows that several threads make together; each of them calls `work` once.
class MlaPass {
  public:
    MlaPass(const MlaShape& shape, const MlaLayer* layers, const Rows& rows, int64_t num_threads)
        : shape_(shape), layers_(layers), rows_(rows), num_chunks_(count_chunks(rows.num, num_threads)),
          num_written_(num_chunks_) {}

    void work() {
        thread_local ChunkScratch scratch;
        // Taken in order: whom a chunk waits for is at work or done, however many threads there really are.
        for (int64_t c; (c = next_++) < num_chunks_;) {
            const int64_t first = rows_.num * c / num_chunks_, num = rows_.num * (c + 1) / num_chunks_ - first;
            const bool follows = first > 0 && rows_.slots[first] == rows_.slots[first - 1];
            run_chunk(shape_, layers_, rows_, first, num, scratch, [&](int64_t layer) {
                for (int64_t tries = 0; follows && num_written_[c - 1].load(std::memory_order_acquire) <= layer;)
                    if (++tries > 1000) std::this_thread::yield();
                num_written_[c].store(layer + 1, std::memory_order_release);
            });
        }
    }

  private:
    const MlaShape& shape_;
    const MlaLayer* layers_;
    const Rows rows_;
    const int64_t num_chunks_;
    std::vector<std::atomic<int64_t>> num_written_;  // layers of a chunk whose keys are in the cache
    std::atomic<int64_t> next_{0};
};

inline void run_mla(const MlaShape& shape, const MlaLayer* layers, const Rows& rows, int64_t num_threads) {
    MlaPass pass(shape, layers, rows, num_threads);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    pass.work();
}

}  // namespace longarc
