// One pass of new tokens over cached sequences, through all layers in one call.
//
//   rows (token, slot, position) --> embedding --> [ norm, attention, norm, feed-forward ] x layers --> norm
//
// Rows go through all layers in chunks, in order, so that a prompt's later rows find the earlier ones in the
// cache; activations of a chunk stay in the processor's own cache. Rows of one sequence stay in one thread.
#pragma once

#include "experts.h"
#include "row_attention.h"

namespace longarc {

constexpr int64_t CHUNK_ROWS = 64;

// The new tokens. Tables of the cache have one stretch of `max_length` positions per slot.
struct Rows {
    const int64_t *tokens, *slots, *positions;
    int64_t num, max_length;
    const float *embedding, *cos, *sin;  // angles of all positions, [position][width / 2]
    const float* final_norm;
    float* hidden;  // out, [row][hidden]
};

// A feed-forward of one layer, weights packed. Experts where num_experts > 0, else dense of `width`.
struct FeedForward {
    const float *gate_up, *down;
    const float *router, *router_bias;
    const float *shared_gate_up, *shared_down;
    int64_t num_experts, num_chosen, width, shared_width;
    int64_t normalise;
    float scale;
};

struct LlamaLayer {
    const float *input_norm, *qkv, *output, *post_norm;
    FeedForward feed_forward;
    float *keys, *values;  // [slot][head][position blocks][dim][LANES] and [slot][head][position][dim]
};

struct LlamaShape {
    int64_t num_layers, hidden, num_heads, num_key_heads, dim;
    float eps, scale;
};

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
    float *latents, *index_keys;  // [slot][position][dim] and [slot][position blocks][dim][LANES]
};

struct MlaShape {
    int64_t num_layers, hidden, num_heads, q_rank, latent, nope, rope, value;
    int64_t index_heads, index_dim, index_topk, is_sparse;
    float eps, latent_eps, index_eps, scale, index_scale;
};

// The positions that one row attends to, ascending, and where their latents lie.
struct SeenKeys {
    std::vector<int32_t> positions;
    std::vector<const float*> latents;
    int64_t num;
};

struct ChunkScratch {
    Scratch x, normed, projected, query, attended, merged, gate_up, activated, logits, weights, slots, index;
    std::vector<int32_t> chosen;
    Floats scores;
    SeenKeys seen[2];
    AttendScratch attend;
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

// Decoding reads every key and value once and from far away: the next ones are fetched during this one's work.
inline void prefetch(const Keys& keys) {
    const int64_t count = round_up(keys.num, LANES) * keys.dim;
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(keys.blocked + i, 0, 2);
    for (int64_t i = 0; i < keys.num * keys.value_stride; i += 16) __builtin_prefetch(keys.values + i, 0, 2);
}

inline void llama_attention(const LlamaShape& shape, const LlamaLayer& layer, const Rows& rows, int64_t first,
                            int64_t num, ChunkScratch& s) {
    const int64_t dim = shape.dim, queries = shape.num_heads * dim, keys = shape.num_key_heads * dim;
    const int64_t width = queries + 2 * keys, group = shape.num_heads / shape.num_key_heads;
    float* projected = s.projected.floats(num * width);
    gemm(num, width, shape.hidden, s.normed.floats(0), shape.hidden, layer.qkv, projected, width);
    for (int64_t r = 0; r < num; r++) {
        const int64_t position = rows.positions[first + r], half = dim / 2;
        float* row = projected + r * width;
        for (int64_t h = 0; h < shape.num_heads + shape.num_key_heads; h++)
            rotate_row(row + h * dim, rows.cos + position * half, rows.sin + position * half, dim, false, 1.0f);
        for (int64_t g = 0; g < shape.num_key_heads; g++) {
            const int64_t table = (rows.slots[first + r] * shape.num_key_heads + g) * rows.max_length * dim;
            write_blocked(layer.keys + table, position, row + queries + g * dim, dim);
            std::memcpy(layer.values + table + position * dim, row + queries + keys + g * dim, sizeof(float) * dim);
        }
    }
    float* attended = s.attended.floats(num * queries);
    auto keys_of = [&](int64_t pair) {
        const int64_t row = first + pair / shape.num_key_heads;
        const int64_t table =
            (rows.slots[row] * shape.num_key_heads + pair % shape.num_key_heads) * rows.max_length * dim;
        return Keys{layer.keys + table, dim, layer.values + table, dim, dim, rows.positions[row] + 1};
    };
    for (int64_t r = 0; r < num; r++)
        for (int64_t g = 0; g < shape.num_key_heads; g++) {
            const int64_t pair = r * shape.num_key_heads + g;
            const Keys visible = keys_of(pair);
            if (pair + 1 < num * shape.num_key_heads) prefetch(keys_of(pair + 1));
            attend(projected + r * width + g * group * dim, shape.scale, group, visible,
                   attended + r * queries + g * group * dim, s.attend);
        }
    gemm<Store::ADD>(num, shape.hidden, queries, attended, queries, layer.output, s.x.floats(0), shape.hidden);
}

// Latent rows, indexer keys and absorbed queries of a chunk; latents and keys go to the cache.
inline void mla_project(const MlaShape& shape, const MlaLayer& layer, const Rows& rows, int64_t first, int64_t num,
                        ChunkScratch& s) {
    const int64_t dim = shape.latent + shape.rope, head = shape.nope + shape.rope;
    const int64_t inputs = shape.q_rank + dim + shape.index_dim + shape.index_heads;
    const int64_t queries = shape.num_heads * head, width = queries + shape.index_heads * shape.index_dim;
    float* input = s.projected.floats(num * inputs);
    float* q_latent = s.merged.floats(num * shape.q_rank);
    gemm(num, inputs, shape.hidden, s.normed.floats(0), shape.hidden, layer.input, input, inputs);
    for (int64_t r = 0; r < num; r++) {
        const int64_t position = rows.positions[first + r], slot = rows.slots[first + r], half = shape.rope / 2;
        const float *cos = rows.cos + position * half, *sin = rows.sin + position * half;
        float* row = input + r * inputs;
        rms_norm_row(row, layer.q_norm, q_latent + r * shape.q_rank, shape.q_rank, shape.latent_eps);
        float* latent = layer.latents + (slot * rows.max_length + position) * dim;
        rms_norm_row(row + shape.q_rank, layer.kv_norm, latent, shape.latent, shape.latent_eps);
        std::memcpy(latent + shape.latent, row + shape.q_rank + shape.latent, sizeof(float) * shape.rope);
        rotate_row(latent + shape.latent, cos, sin, shape.rope, true, 1.0f);
        float* key = row + shape.q_rank + dim;
        layer_norm_row(key, layer.index_norm_weight, layer.index_norm_bias, key, shape.index_dim, shape.index_eps);
        rotate_row(key, cos, sin, shape.rope, true, 1.0f);
        write_blocked(layer.index_keys + slot * rows.max_length * shape.index_dim, position, key, shape.index_dim);
        float* weights = key + shape.index_dim;
        for (int64_t h = 0; h < shape.index_heads; h++) weights[h] *= shape.index_scale;
    }
    float* heads = s.index.floats(num * width);
    float* query = s.query.floats(num * shape.num_heads * dim);
    gemm(num, width, shape.q_rank, q_latent, shape.q_rank, layer.query, heads, width);
    for (int64_t h = 0; h < shape.num_heads; h++)
        gemm(num, shape.latent, shape.nope, heads + h * head, width,
             layer.key_absorb + h * packed_size(shape.latent, shape.nope), query + h * dim, shape.num_heads * dim);
    for (int64_t r = 0; r < num; r++) {
        const int64_t half = shape.rope / 2, position = rows.positions[first + r];
        const float *cos = rows.cos + position * half, *sin = rows.sin + position * half;
        for (int64_t h = 0; h < shape.num_heads; h++) {
            float* to = query + (r * shape.num_heads + h) * dim + shape.latent;
            std::memcpy(to, heads + r * width + h * head + shape.nope, sizeof(float) * shape.rope);
            rotate_row(to, cos, sin, shape.rope, true, 1.0f);
        }
        for (int64_t h = 0; h < shape.index_heads; h++)
            rotate_row(heads + r * width + queries + h * shape.index_dim, cos, sin, shape.rope, true, 1.0f);
    }
}

// Finds what a row attends to.
inline void mla_see(const MlaShape& shape, const MlaLayer& layer, const Rows& rows, int64_t row,
                    const float* index_query, const float* index_weights, SeenKeys& seen,
                    Floats& scores) {
    const int64_t dim = shape.latent + shape.rope, start = rows.slots[row] * rows.max_length;
    const int64_t num_keys = rows.positions[row] + 1;
    const int64_t room = std::max(num_keys, shape.index_topk) + LANES;
    if (int64_t(seen.positions.size()) < room) {
        seen.positions.resize(room);
        seen.latents.resize(room);
    }
    if (shape.is_sparse && num_keys > shape.index_topk) {
        if (int64_t(scores.size()) < room) scores.resize(room);
        index_scores(index_query, index_weights, shape.index_heads, shape.index_dim,
                     layer.index_keys + start * shape.index_dim, num_keys, scores.data());
        seen.num = shape.index_topk;
        choose_best(scores.data(), num_keys, seen.num, seen.positions.data());
    } else {
        seen.num = num_keys;
        for (int64_t j = 0; j < num_keys; j++) seen.positions[j] = int32_t(j);
    }
    for (int64_t j = 0; j < seen.num; j++) seen.latents[j] = layer.latents + (start + seen.positions[j]) * dim;
}

inline void mla_attention(const MlaShape& shape, const MlaLayer& layer, const Rows& rows, int64_t first, int64_t num,
                          ChunkScratch& s) {
    mla_project(shape, layer, rows, first, num, s);
    const int64_t dim = shape.latent + shape.rope, queries = shape.num_heads * (shape.nope + shape.rope);
    const int64_t width = queries + shape.index_heads * shape.index_dim;
    const int64_t inputs = shape.q_rank + dim + shape.index_dim + shape.index_heads;
    const float *input = s.projected.floats(0), *heads = s.index.floats(0), *query = s.query.floats(0);
    float* attended = s.attended.floats(num * shape.num_heads * shape.latent);
    auto see = [&](int64_t r) {
        mla_see(shape, layer, rows, first + r, heads + r * width + queries,
                input + r * inputs + shape.q_rank + dim + shape.index_dim, s.seen[r % 2], s.scores);
    };
    see(0);
    for (int64_t r = 0; r < num; r++) {
        // The next row's keys travel while this row's are worked on.
        if (r + 1 < num) see(r + 1);
        const SeenKeys &seen = s.seen[r % 2], &next = s.seen[(r + 1) % 2];
        attend_rows(query + r * shape.num_heads * dim, shape.scale, shape.num_heads,
                    {seen.latents.data(), dim, shape.latent, seen.num}, attended + r * shape.num_heads * shape.latent,
                    s.attend_rows, nullptr, {next.latents.data(), r + 1 < num ? next.num : 0, dim});
    }
    float* values = s.merged.floats(num * shape.num_heads * shape.value);
    for (int64_t h = 0; h < shape.num_heads; h++)
        gemm(num, shape.value, shape.latent, attended + h * shape.latent, shape.num_heads * shape.latent,
             layer.value_absorb + h * packed_size(shape.value, shape.latent), values + h * shape.value,
             shape.num_heads * shape.value);
    gemm<Store::ADD>(num, shape.hidden, shape.num_heads * shape.value, values, shape.num_heads * shape.value,
                     layer.output, s.x.floats(0), shape.hidden);
}

// Runs rows [first, first + num) through all layers; attention(layer, first, num) adds to the residual stream.
template <class Shape, class Layer, class Attention>
inline void run_chunk(const Shape& shape, const Layer* layers, const Rows& rows, int64_t first, int64_t num,
                      ChunkScratch& s, Attention attention) {
    const int64_t hidden = shape.hidden;
    float *x = s.x.floats(num * hidden), *normed = s.normed.floats(num * hidden);
    for (int64_t r = 0; r < num; r++)
        std::memcpy(x + r * hidden, rows.embedding + rows.tokens[first + r] * hidden, sizeof(float) * hidden);
    for (int64_t l = 0; l < shape.num_layers; l++) {
        rms_norm_rows(x, layers[l].input_norm, normed, num, hidden, shape.eps);
        attention(shape, layers[l], rows, first, num, s);
        rms_norm_rows(x, layers[l].post_norm, normed, num, hidden, shape.eps);
        feed_forward_rows(layers[l].feed_forward, hidden, num, normed, x, s);
    }
    rms_norm_rows(x, rows.final_norm, rows.hidden + first * hidden, num, hidden, shape.eps);
}

// Splits rows into one stretch per thread, never inside a sequence, and each stretch into chunks.
template <class Shape, class Layer, class Attention>
inline void run_rows(const Shape& shape, const Layer* layers, const Rows& rows, int64_t num_threads,
                     Attention attention) {
    std::vector<int64_t> bounds(num_threads + 1, rows.num);
    bounds[0] = 0;
    for (int64_t t = 1; t < num_threads; t++) {
        int64_t at = std::max(bounds[t - 1], rows.num * t / num_threads);
        while (at < rows.num && at > 0 && rows.slots[at] == rows.slots[at - 1]) at++;
        bounds[t] = at;
    }
#pragma omp parallel for num_threads(num_threads) schedule(static, 1) if (num_threads > 1)
    for (int64_t t = 0; t < num_threads; t++) {
        thread_local ChunkScratch scratch;
        for (int64_t first = bounds[t]; first < bounds[t + 1]; first += CHUNK_ROWS)
            run_chunk(shape, layers, rows, first, std::min(CHUNK_ROWS, bounds[t + 1] - first), scratch, attention);
    }
}

}  // namespace longarc
