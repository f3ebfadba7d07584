// One pass of new tokens over cached sequences through a Llama-type decoder.
//
//   rows (token, slot, position) --> embedding --> [ norm, attention, norm, feed-forward ] x layers --> norm
//
// A team takes a block of rows through all layers. In a product each member computes a part of the columns for
// all rows, so that a step reads every weight once, however many threads there are; elsewhere members share out rows.
// Steps of a model so small that its weights stay in the caches are taken apart: each member has rows of its own,
// and waits for nobody within a step.
// Number is what products take: float, or Pair for bfloat16. The residual stream and the cache are fp32.
#pragma once

#include <optional>

#include "attention.h"
#include "bf16.h"
#include "new_rows.h"
#include "team.h"

namespace longarc {

constexpr int64_t TEAM_ROWS = 256;      // rows of a block; its activations stay in the processor's last cache level
constexpr int64_t CACHED_NUMBERS = 6 << 20;  // of weights that every thread may read for itself, out of a cache
constexpr int64_t GATED_COLUMNS = 256;  // columns of the feed-forward between its two products

struct LlamaLayer {
    const float* input_norm;
    const void *qkv, *output;  // packed
    const float *post_norm, *qkv_bias, *output_bias, *q_norm, *k_norm;  // those but post_norm null where there is none
    const void *gate, *up, *down;  // packed
    float *keys, *values;  // [page][head][position blocks][dim][LANES] and [page][head][position][dim]
};

struct LlamaShape {
    int64_t num_layers, hidden, num_heads, num_key_heads, dim, width;
    int64_t is_bf16;
    float eps, scale;
};

inline int64_t query_width(const LlamaShape& shape) { return shape.num_heads * shape.dim; }
inline int64_t projected_width(const LlamaShape& shape) {
    return query_width(shape) + 2 * shape.num_key_heads * shape.dim;
}

// Whether the layers' weights stay in the processor's caches from one step to the next.
template <class Number>
bool fits_caches(const LlamaShape& shape) {
    const int64_t rows_in = projected_width(shape) + 2 * shape.width;
    return shape.num_layers * (steps_of<Number>(shape.hidden) * rows_in + steps_of<Number>(shape.width) * shape.hidden +
                               steps_of<Number>(query_width(shape)) * shape.hidden) <= CACHED_NUMBERS;
}

// A member's part of rows that are sequences of their own.
inline Rows part_of(const Rows& rows, const Member& me, int64_t hidden) {
    const Stretch own = me.part(rows.num);
    Rows part = rows;
    part.tokens += own.begin, part.slots += own.begin, part.positions += own.begin;
    part.hidden += own.begin * hidden, part.num = own.size();
    return part;
}

inline void write_numbers(const float* from, int64_t count, float* to) { std::memcpy(to, from, sizeof(float) * count); }
inline void write_numbers(const float* from, int64_t count, Pair* to) { round_row(from, count, to); }

// Decoding reads every key and value once and from far away: the next ones are fetched during this one's work.
inline void prefetch(const Keys& keys) {
    const int64_t* number = keys.pages.numbers;
    for (int64_t first = 0; first < keys.num; first += keys.pages.keys, number++) {
        const int64_t num = std::min(keys.pages.keys, keys.num - first);
        prefetch(keys.blocked + *number * keys.blocked_page, round_up(num, LANES) * keys.dim);
        prefetch(keys.values + *number * keys.values_page, num * keys.value_stride);
    }
}

// What the members of a team have in common while they take rows through the layers.
template <class Number>
class LlamaPass {
  public:
    LlamaPass(const LlamaShape& shape, const LlamaLayer* layers, const Rows& rows)
        : shape(shape), layers(layers), rows(rows), hidden_steps(steps_of<Number>(shape.hidden)),
          query_steps(steps_of<Number>(query_width(shape))), width_steps(steps_of<Number>(shape.width)),
          taken(shape.num_layers) {
        thread_local struct { Scratch x, normed, projected, attended, activated; } s;
        const int64_t most = std::min(TEAM_ROWS, rows.num);
        x = s.x.floats(most * shape.hidden);
        projected = s.projected.floats(most * std::max(shape.hidden, projected_width(shape)));
        normed = s.normed.template numbers<Number>(most * hidden_steps);
        attended = s.attended.template numbers<Number>(most * query_steps);
        activated = s.activated.template numbers<Number>(most * width_steps);
    }

    // Takes all rows through all layers, block after block: a later one finds the keys of those before it in the
    // cache. Every member of the team calls it.
    void run(const Member& me) {
        for (int64_t begin = 0; begin < rows.num; begin += TEAM_ROWS) {
            if (me.index == 0) start(begin);
            me.wait();
            run_block(me);
        }
    }

  private:
    void start(int64_t begin) {
        first = begin, num = std::min(TEAM_ROWS, rows.num - begin);
        wanted.resize(num);
        for (int64_t r = 0; r < num; r++) wanted[r] = r;
        for (auto& count : taken) count = 0;
    }

    void run_block(const Member& me) {
        const Stretch own = me.part(num);
        for (int64_t r = own.begin; r < own.end; r++)
            std::memcpy(x + r * shape.hidden, rows.embedding + rows.tokens[first + r] * shape.hidden,
                        sizeof(float) * shape.hidden);
        for (int64_t l = 0; l < shape.num_layers; l++) {
            const LlamaLayer& layer = layers[l];
            normalise(layer.input_norm, me);
            multiply<Store::SET>(normed, hidden_steps, layer.qkv, projected_width(shape), projected, me);
            leave_keys(layer, me);
            if (rows.ends_only && l + 1 == shape.num_layers) keep_ends(me);
            attend_all(layer, taken[l], me);
            add_attended(layer, me);
            normalise(layer.post_norm, me);
            feed_forward(layer, me);
        }
        const Stretch left = me.part(int64_t(wanted.size()));
        for (int64_t i = left.begin; i < left.end; i++)
            rms_norm_row(x + i * shape.hidden, rows.final_norm, rows.hidden + (first + wanted[i]) * shape.hidden,
                         shape.hidden, shape.eps);
        me.wait();
    }

    // Each member's own columns of rows times weight.
    template <Store MODE>
    void multiply(const Number* in, int64_t steps, const void* packed, int64_t num_out, float* out,
                  const Member& me) const {
        const Stretch own = me.part(num_out, PANEL);
        gemm<MODE>(int64_t(wanted.size()), own.size(), steps, in, steps,
                   static_cast<const Number*>(packed) + own.begin * steps, out + own.begin, num_out);
        me.wait();
    }

    void normalise(const float* weight, const Member& me) const {
        thread_local Scratch scratch;
        float* row = scratch.floats(shape.hidden);
        const Stretch own = me.part(int64_t(wanted.size()));
        for (int64_t r = own.begin; r < own.end; r++) {
            rms_norm_row(x + r * shape.hidden, weight, row, shape.hidden, shape.eps);
            write_numbers(row, shape.hidden, normed + r * hidden_steps);
        }
        me.wait();
    }

    // Finishes queries, keys and values of each row, and writes the latter two to the cache.
    void leave_keys(const LlamaLayer& layer, const Member& me) const {
        const int64_t dim = shape.dim, heads = shape.num_key_heads, half = dim / 2;
        const Stretch own = me.part(num);
        for (int64_t r = own.begin; r < own.end; r++) {
            float *row = projected + r * projected_width(shape), *keys = row + query_width(shape);
            // In the order of the sums that training makes: first the whole product, then the bias.
            for (int64_t i = 0; layer.qkv_bias && i < projected_width(shape); i++) row[i] += layer.qkv_bias[i];
            for (int64_t h = 0; layer.q_norm && h < shape.num_heads + heads; h++)
                rms_norm_row(row + h * dim, h < shape.num_heads ? layer.q_norm : layer.k_norm, row + h * dim, dim,
                             shape.eps);
            const int64_t angle = rows.positions[first + r] * half;
            for (int64_t h = 0; h < shape.num_heads + heads; h++)
                rotate_row(row + h * dim, rows.cos + angle, rows.sin + angle, dim, false, 1.0f);
            const int64_t page = page_of(rows, first + r), place = place_in_page(rows, first + r);
            for (int64_t g = 0; rows.fp8_rows && g < 2 * heads; g++) round_to_fp8(keys + g * dim, dim, dim);
            for (int64_t g = 0; g < heads; g++) {
                const int64_t table = (page * heads + g) * page_keys(rows) * dim;
                write_blocked(layer.keys + table, place, keys + g * dim, dim);
                std::memcpy(layer.values + table + place * dim, keys + (heads + g) * dim, sizeof(float) * dim);
            }
        }
        me.wait();
    }

    // Lets go of all rows but the last of each sequence: what the last layer makes of them nobody reads.
    void keep_ends(const Member& me) {
        if (me.index == 0) {
            wanted.clear();
            for (int64_t r = 0; r < num; r++)
                if (is_end(rows, first + r)) {
                    std::memmove(x + int64_t(wanted.size()) * shape.hidden, x + r * shape.hidden,
                                 sizeof(float) * shape.hidden);
                    wanted.push_back(r);
                }
        }
        me.wait();
    }

    Keys keys_of(const LlamaLayer& layer, int64_t pair) const {
        const int64_t row = first + wanted[pair / shape.num_key_heads];
        const int64_t head_size = page_keys(rows) * shape.dim, page_size = shape.num_key_heads * head_size;
        const int64_t table = pair % shape.num_key_heads * head_size;
        return Keys{layer.keys + table, shape.dim, layer.values + table, shape.dim, shape.dim,
                    rows.positions[row] + 1, Pages{pages_of(rows, row), page_keys(rows)}, page_size, page_size};
    }

    // Pairs of a row and a key head; members take some whenever they are free, for contexts differ in length.
    void attend_all(const LlamaLayer& layer, std::atomic<int64_t>& next, const Member& me) const {
        thread_local AttendScratch scratch;
        thread_local Scratch memory;
        const int64_t group = shape.num_heads / shape.num_key_heads, span = group * shape.dim;
        const int64_t num_pairs = int64_t(wanted.size()) * shape.num_key_heads;
        const int64_t share = std::max<int64_t>(1, num_pairs / (8 * me.team.size));
        float* out = memory.floats(span);
        for (int64_t begin; (begin = next.fetch_add(share)) < num_pairs;)
            for (int64_t pair = begin; pair < std::min(num_pairs, begin + share); pair++) {
                const int64_t i = pair / shape.num_key_heads, g = pair % shape.num_key_heads;
                if (pair + 1 < num_pairs) prefetch(keys_of(layer, pair + 1));
                attend(projected + wanted[i] * projected_width(shape) + g * span, shape.scale, group, keys_of(layer, pair),
                       out, scratch);
                write_numbers(out, span, attended + i * query_steps + steps_of<Number>(g * span));
            }
        me.wait();
    }

    void add_attended(const LlamaLayer& layer, const Member& me) const {
        if (!layer.output_bias) return multiply<Store::ADD>(attended, query_steps, layer.output, shape.hidden, x, me);
        multiply<Store::SET>(attended, query_steps, layer.output, shape.hidden, projected, me);
        const Stretch own = me.part(int64_t(wanted.size()));
        for (int64_t r = own.begin; r < own.end; r++)
            for (int64_t i = 0; i < shape.hidden; i++)
                x[r * shape.hidden + i] += projected[r * shape.hidden + i] + layer.output_bias[i];
    }

    void feed_forward(const LlamaLayer& layer, const Member& me) const {
        thread_local struct { Scratch gate, up, row; } s;
        const int64_t count = int64_t(wanted.size());
        float *gate = s.gate.floats(count * GATED_COLUMNS), *up = s.up.floats(count * GATED_COLUMNS);
        float* row = s.row.floats(GATED_COLUMNS);
        const Stretch own = me.part(shape.width, PANEL);
        for (int64_t at = own.begin; at < own.end; at += GATED_COLUMNS) {
            const int64_t columns = std::min(GATED_COLUMNS, own.end - at);
            gemm(count, columns, hidden_steps, normed, hidden_steps,
                 static_cast<const Number*>(layer.gate) + at * hidden_steps, gate, GATED_COLUMNS);
            gemm(count, columns, hidden_steps, normed, hidden_steps,
                 static_cast<const Number*>(layer.up) + at * hidden_steps, up, GATED_COLUMNS);
            for (int64_t r = 0; r < count; r++) {
                swiglu_row(gate + r * GATED_COLUMNS, up + r * GATED_COLUMNS, row, columns);
                write_numbers(row, columns, activated + r * width_steps + steps_of<Number>(at));
            }
        }
        me.wait();
        multiply<Store::ADD>(activated, width_steps, layer.down, shape.hidden, x, me);
    }

    const LlamaShape& shape;
    const LlamaLayer* layers;
    const Rows& rows;
    const int64_t hidden_steps, query_steps, width_steps;
    int64_t first = 0, num = 0;  // the block
    float *x, *projected;
    Number *normed, *attended, *activated;
    std::vector<int64_t> wanted;              // rows of the block that are still on their way
    std::vector<std::atomic<int64_t>> taken;  // pairs that members have taken, by layer
};

}  // namespace longarc
