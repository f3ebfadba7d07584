// The C interface. Tensors are pointers to fp32 (indices: int64) in the layouts named in the headers; sizes and
// strides count numbers. Nothing here allocates what it returns: the caller owns every buffer.

#include "llama.h"
#include "mla.h"
#include "rounds.h"
#include "steps.h"
#include "training.h"

using namespace longarc;

namespace {

template <class Number>
void packed_product(int64_t num_rows, int64_t num_out, int64_t num_in, const float* x, int64_t x_stride,
                    const void* packed, float* y, int64_t num_threads) {
    for_rows(num_rows, num_threads, [&](int64_t first, int64_t count) {
        thread_local Scratch rounded;
        const Operand<Number> in = operand<Number>(x + first * x_stride, x_stride, count, num_in, rounded);
        gemm(count, num_out, in.steps, in.rows, in.stride, static_cast<const Number*>(packed), y + first * num_out,
             num_out);
    });
}

// One matrix for each of several heads, strides free.
struct Heads {
    const float* numbers;
    int64_t head, row, column;
};

template <class Number>
void product(int64_t num_heads, int64_t num_rows, int64_t num_out, int64_t num_in, const Heads& x, const Heads& w,
             float* y, int64_t y_head, int64_t y_row, int64_t num_threads) {
    thread_local Scratch scratch;
    const int64_t size = packed_size(num_out, steps_of<Number>(num_in));
    Number* packed = scratch.numbers<Number>(size * num_heads);
    for (int64_t h = 0; h < num_heads; h++)
        pack(w.numbers + h * w.head, w.row, w.column, num_out, num_in, packed + h * size);
    for_rows(num_rows, num_threads, [&](int64_t first, int64_t count) {
        thread_local Scratch rounded;
        for (int64_t h = 0; h < num_heads; h++) {
            const Operand<Number> in =
                operand<Number>(x.numbers + h * x.head + first * x.row, x.row, count, num_in, rounded);
            gemm(count, num_out, in.steps, in.rows, in.stride, packed + h * size, y + h * y_head + first * y_row,
                 y_row);
        }
    });
}

// Log-probabilities of targets under softmax(hidden w^T / temperature); entropy may be null. `packed` packs w, and is
// null where that would be a second copy of a large matrix.
template <class Number>
void logprobs_of(int64_t num_rows, int64_t vocab, int64_t hidden, const float* x, const float* w, const void* packed,
                 const int64_t* targets, float temperature, float* logprobs, float* log_sums, float* entropy,
                 int64_t num_threads) {
    const auto reduce = [&](float* row, int64_t r) {
        const LogSum sum = log_sum_row(row, vocab, temperature);
        log_sums[r] = sum.value;
        logprobs[r] = row[targets[r]] - sum.value;
        if (entropy) entropy[r] = sum.value - expected_logit_row(row, vocab, sum.value);
    };
    if (packed) {
        constexpr int64_t BLOCK = 60;
        for_rows(num_rows, num_threads, [&](int64_t begin, int64_t total) {
            thread_local Scratch scratch;
            float* logits = scratch.floats(BLOCK * vocab);
            for (int64_t first = begin; first < begin + total; first += BLOCK) {
                const int64_t count = std::min(BLOCK, begin + total - first);
                packed_product<Number>(count, vocab, hidden, x + first * hidden, hidden, packed, logits, 1);
                for (int64_t r = 0; r < count; r++) reduce(logits + r * vocab, first + r);
            }
        });
        return;
    }
    const LogitBlock block(vocab);
    for (int64_t first = 0; first < num_rows; first += block.rows) {
        const int64_t count = std::min(block.rows, num_rows - first);
        block.product<Number>(count, hidden, x + first * hidden, w, num_threads);
        for_rows(count, num_threads, [&](int64_t begin, int64_t rows) {
            for (int64_t r = begin; r < begin + rows; r++) reduce(block.logits + r * block.stride, first + r);
        });
    }
}

// Gradients of the log-probabilities: dx and dw are set; either may be null. `packed` packs w, or is null as above.
// They reach the numbers that were rounded as if they had not been.
template <class Number>
void logprobs_backward(int64_t num_rows, int64_t vocab, int64_t hidden, const float* x, const float* w,
                       const void* packed, const int64_t* targets, float temperature, const float* log_sums,
                       const float* d_logprobs, float* dx, float* dw, int64_t num_threads) {
    const LogitBlock block(vocab);
    const int64_t stride = block.stride;
    thread_local Scratch back_scratch;
    Number* back = nullptr;
    if (dx && packed) {
        back = back_scratch.numbers<Number>(packed_size(hidden, steps_of<Number>(vocab)));
        pack(w, 1, hidden, hidden, vocab, back);
    }
    if (dw && num_rows == 0) std::fill(dw, dw + vocab * hidden, 0.0f);
    for (int64_t first = 0; first < num_rows; first += block.rows) {
        const int64_t count = std::min(block.rows, num_rows - first);
        if (!packed) block.product<Number>(count, hidden, x + first * hidden, w, num_threads);
        for_rows(count, num_threads, [&](int64_t begin, int64_t rows) {
            float* part = block.logits + begin * stride;
            if (packed) {
                thread_local Scratch rounded;
                const Operand<Number> in =
                    operand<Number>(x + (first + begin) * hidden, hidden, rows, hidden, rounded);
                gemm(rows, vocab, in.steps, in.rows, in.stride, static_cast<const Number*>(packed), part, stride);
            }
            for (int64_t r = 0; r < rows; r++) {
                const int64_t row = first + begin + r;
                const float gradient = d_logprobs[row] / temperature, log_sum = log_sums[row];
                float* z = part + r * stride;
                over_vectors(vocab, [&](int64_t i, int n) {
                    store_upto(z + i, exp(load_upto(z + i, n) / splat(temperature) - log_sum) * -gradient, n);
                });
                z[targets[row]] += gradient;
            }
            if (back) packed_product<Number>(rows, hidden, vocab, part, stride, back, dx + (first + begin) * hidden, 1);
        });
        if (dx && !packed) block.product_back<Number>(count, hidden, w, dx + first * hidden, num_threads);
        if (dw)
            for_rows(vocab, num_threads, [&](int64_t begin, int64_t rows) {
                const auto multiply =
                    first == 0 ? weight_gradient<Number, Store::SET> : weight_gradient<Number, Store::ADD>;
                multiply(count, rows, hidden, block.logits + begin, stride, x + first * hidden, hidden,
                         dw + begin * hidden);
            });
    }
}

template <class Number>
void llama_rows(const LlamaShape& shape, const LlamaLayer* layers, const Rows& rows, int64_t num_threads) {
    LlamaPass<Number> pass(shape, layers, rows);
    with_team(num_threads, [&](const Member& me) { pass.run(me); });
}

template <class Number>
void llama_steps(const LlamaShape& shape, const LlamaLayer* layers, const Rows& rows, Steps& steps,
                 int64_t num_threads) {
    thread_local Scratch scratch;
    float* logits = scratch.floats(DRAWN_ROWS * logits_stride(steps.vocab));
    StepRows now(rows);
    steps.num_steps = 0;
    bool goes_on = true;
    std::optional<LlamaPass<Number>> common;
    if (!fits_caches<Number>(shape)) common.emplace(shape, layers, now.rows);
    with_team(num_threads, [&](const Member& me) {
        Rows own = part_of(now.rows, me, shape.hidden);
        std::optional<LlamaPass<Number>> alone;
        if (!common) alone.emplace(shape, layers, own);
        Team nobody;
        while (goes_on) {
            if (common) {
                common->run(me);
            } else {
                own.tokens = now.rows.tokens + me.part(rows.num).begin;
                alone->run({nobody, 0});
                me.wait();
            }
            draw_rows<Number>(now.rows, shape.hidden, steps, logits, me);
            if (me.index == 0) goes_on = now.advance(steps);
            me.wait();
        }
    });
}

}  // namespace

extern "C" {

int64_t longarc_lanes() { return LANES; }
int64_t longarc_packed_size(int64_t num_out, int64_t num_in) { return packed_size(num_out, num_in); }

void longarc_pack(const float* weight, int64_t out_stride, int64_t in_stride, int64_t num_out, int64_t num_in,
                  float* packed) {
    pack(weight, out_stride, in_stride, num_out, num_in, packed);
}

void longarc_pack_bf16(const float* weight, int64_t out_stride, int64_t in_stride, int64_t num_out, int64_t num_in,
                       Pair* packed) {
    pack(weight, out_stride, in_stride, num_out, num_in, packed);
}

// y = x w^T for packed weights; in bfloat16, x is rounded here.
void longarc_packed_product(int64_t num_rows, int64_t num_out, int64_t num_in, const float* x, const void* packed,
                            int64_t is_bf16, float* y, int64_t num_threads) {
    (is_bf16 ? packed_product<Pair> : packed_product<float>)(num_rows, num_out, num_in, x, num_in, packed, y,
                                                             num_threads);
}

// y[b] = x[b] w[b]^T for each of a batch of plain weights (heads), all strides free; in bfloat16, x and w are rounded.
void longarc_product(int64_t num_batches, int64_t num_rows, int64_t num_out, int64_t num_in, const float* x,
                     int64_t x_batch, int64_t x_row, const float* w, int64_t w_batch, int64_t w_out, int64_t w_in,
                     float* y, int64_t y_batch, int64_t y_row, int64_t is_bf16, int64_t num_threads) {
    (is_bf16 ? product<Pair> : product<float>)(num_batches, num_rows, num_out, num_in, {x, x_batch, x_row, 1},
                                               {w, w_batch, w_out, w_in}, y, y_batch, y_row, num_threads);
}

// dw[b] = dy[b]^T x[b]; dw[b] is [out][in] without gaps.
void longarc_product_weight(int64_t num_batches, int64_t num_rows, int64_t num_out, int64_t num_in, const float* dy,
                            int64_t dy_batch, int64_t dy_row, const float* x, int64_t x_batch, int64_t x_row,
                            float* dw, int64_t dw_batch, int64_t is_bf16, int64_t num_threads) {
    const auto set = is_bf16 ? weight_gradient<Pair, Store::SET> : weight_gradient<float, Store::SET>;
    for (int64_t b = 0; b < num_batches; b++)
        for_rows(num_out, num_threads, [&](int64_t first, int64_t count) {
            set(num_rows, count, num_in, dy + b * dy_batch + first, dy_row, x + b * x_batch, x_row,
                dw + b * dw_batch + first * num_in);
        });
}

void longarc_rms_norm(int64_t num_rows, int64_t width, const float* x, int64_t x_row, const float* w, float eps,
                      float* y, int64_t y_row, float* factors, int64_t num_threads) {
    for_rows(num_rows, num_threads, [&](int64_t first, int64_t count) {
        for (int64_t r = first; r < first + count; r++)
            factors[r] = rms_norm_row(x + r * x_row, w, y + r * y_row, width, eps);
    });
}

// dx is set; dw is [parts][width], zeros at first: each thread adds to a part of its own.
void longarc_rms_norm_backward(int64_t num_rows, int64_t width, const float* x, int64_t x_row, const float* w,
                               const float* dy, int64_t dy_row, const float* factors, float* dx, float* dw,
                               int64_t num_parts) {
#pragma omp parallel for num_threads(num_parts) schedule(static, 1) if (num_parts > 1)
    for (int64_t part = 0; part < num_parts; part++)
        for (int64_t r = num_rows * part / num_parts; r < num_rows * (part + 1) / num_parts; r++)
            rms_norm_backward_row(x + r * x_row, w, dy + r * dy_row, factors[r], dx + r * width, dw + part * width,
                                  width);
}

void longarc_layer_norm(int64_t num_rows, int64_t width, const float* x, int64_t x_row, const float* w,
                        const float* b, float eps, float* y, int64_t y_row) {
    for (int64_t r = 0; r < num_rows; r++) layer_norm_row(x + r * x_row, w, b, y + r * y_row, width, eps);
}

// y[r][h] = rotated x[r][h]; cos and sin are [row][width / 2]. `sign` -1 turns back.
void longarc_rotate(int64_t num_rows, int64_t num_heads, int64_t width, const float* x, int64_t x_row, int64_t x_head,
                    const float* cos, const float* sin, int64_t interleaved, float sign, float* y, int64_t y_row,
                    int64_t y_head) {
    for (int64_t r = 0; r < num_rows; r++)
        for (int64_t h = 0; h < num_heads; h++) {
            float* to = y + r * y_row + h * y_head;
            std::memcpy(to, x + r * x_row + h * x_head, sizeof(float) * width);
            rotate_row(to, cos + r * (width / 2), sin + r * (width / 2), width, interleaved, sign);
        }
}

// y = silu(gate) * up for rows of [gate, up].
void longarc_swiglu(int64_t num_rows, int64_t width, const float* gate_up, float* y, int64_t num_threads) {
    for_rows(num_rows, num_threads, [&](int64_t first, int64_t count) {
        swiglu_rows(gate_up + first * 2 * width, y + first * width, count, width);
    });
}

// d_gate_up of silu(gate) * up; `y` gets the activation again, for the gradient of what follows.
void longarc_swiglu_backward(int64_t num_rows, int64_t width, const float* gate_up, const float* dy, float* d_gate_up,
                             float* y, int64_t num_threads) {
    for_rows(num_rows, num_threads, [&](int64_t first, int64_t count) {
        swiglu_rows(gate_up + first * 2 * width, y + first * width, count, width);
        for (int64_t r = first; r < first + count; r++) {
            const int64_t at = r * 2 * width;
            swiglu_backward_row(gate_up + at, gate_up + at + width, dy + r * width, d_gate_up + at,
                                d_gate_up + at + width, width);
        }
    });
}

// Logits become scores. chosen and weights are [row][num_chosen].
void longarc_route(int64_t num_rows, int64_t num_experts, int64_t num_chosen, float* logits, const float* bias,
                   int64_t normalise, float scale, int32_t* chosen, float* weights) {
    for (int64_t r = 0; r < num_rows; r++)
        route_row(logits + r * num_experts, bias, num_experts, num_chosen, normalise, scale, chosen + r * num_chosen,
                  weights + r * num_chosen);
}

void longarc_experts(int64_t num_experts, int64_t num_chosen, int64_t hidden, int64_t width, int64_t num_rows,
                     const float* x, const int32_t* chosen, const float* weights, const float* gate_up,
                     const float* down, float* y, float* sorted_gate_up, float* slot_out, int64_t num_threads) {
    thread_local Scratch packed;
    const int64_t up_size = packed_size(2 * width, hidden), down_size = packed_size(hidden, width);
    float* up = packed.floats(num_experts * (up_size + down_size));
    float* back = up + num_experts * up_size;
    for (int64_t e = 0; e < num_experts; e++) {
        pack(gate_up + e * 2 * width * hidden, hidden, 1, 2 * width, hidden, up + e * up_size);
        pack(down + e * hidden * width, width, 1, hidden, width, back + e * down_size);
    }
    experts_forward({num_experts, num_chosen, hidden, width}, num_rows, x, chosen, weights, up, back, y,
                    sorted_gate_up, slot_out, num_threads);
}

void longarc_experts_backward(int64_t num_experts, int64_t num_chosen, int64_t hidden, int64_t width,
                              int64_t num_rows, const float* x, const int32_t* chosen, const float* weights,
                              const float* gate_up, const float* down, const float* sorted_gate_up,
                              const float* slot_out, const float* dy, float* dx, float* d_weights, float* d_gate_up,
                              float* d_down, int64_t num_threads) {
    experts_backward({num_experts, num_chosen, hidden, width}, num_rows, x, chosen, weights, gate_up, down,
                     sorted_gate_up, slot_out, dy, dx, d_weights, d_gate_up, d_down, num_threads);
}

// runs is [run][4]: first query, queries, first position, start of its list in key_rows.
void longarc_select(const int64_t* runs, int64_t num_runs, const int64_t* key_rows, int64_t num_heads, int64_t dim,
                    int64_t topk, const float* queries, const float* weights, const float* keys, int64_t* selected,
                    int64_t num_threads) {
    const Runs all{reinterpret_cast<const Run*>(runs), num_runs, key_rows};
    const SelectShape shape{num_heads, dim, topk};
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1) if (num_threads > 1)
    for (int64_t i = 0; i < num_runs; i++) select_run(shape, all, all.run[i], queries, weights, keys, selected);
}

void longarc_attention(const int64_t* runs, int64_t num_runs, const int64_t* key_rows, int64_t num_heads,
                       int64_t num_key_heads, int64_t dim, int64_t value_dim, int64_t topk, float scale,
                       const float* query, const float* key, const float* value, const int64_t* selected, float* out,
                       float* stats, float* mass, int64_t num_threads) {
    const Runs all{reinterpret_cast<const Run*>(runs), num_runs, key_rows};
    const AttentionShape shape{num_heads, num_key_heads, dim, value_dim, topk, scale};
    const AttentionInputs in{query, key, value, selected};
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1) if (num_threads > 1)
    for (int64_t i = 0; i < num_runs; i++) {
        SoftmaxStats* all_stats = reinterpret_cast<SoftmaxStats*>(stats);
        if (value)
            attention_run(shape, in, all, all.run[i], out, all_stats);
        else
            row_attention_run(shape, in, all, all.run[i], out, all_stats, mass);
    }
}

void longarc_attention_backward(const int64_t* runs, int64_t num_runs, const int64_t* key_rows, int64_t num_heads,
                                int64_t num_key_heads, int64_t dim, int64_t value_dim, int64_t topk, float scale,
                                const float* query, const float* key, const float* value, const int64_t* selected,
                                const float* d_out, const float* stats, float* d_query, float* d_key, float* d_value,
                                int64_t num_threads) {
    const Runs all{reinterpret_cast<const Run*>(runs), num_runs, key_rows};
    const AttentionShape shape{num_heads, num_key_heads, dim, value_dim, topk, scale};
    const AttentionInputs in{query, key, value, selected};
    const auto trees = trees_of(all);
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1) if (num_threads > 1)
    for (int64_t t = 0; t < int64_t(trees.size()); t++)
        for (int64_t i : trees[t]) {
            const SoftmaxStats* all_stats = reinterpret_cast<const SoftmaxStats*>(stats);
            if (value)
                attention_backward_run(shape, in, all, all.run[i], d_out, all_stats, d_query, d_key, d_value);
            else
                row_attention_backward_run(shape, in, all, all.run[i], d_out, all_stats, d_query, d_key);
        }
}

void longarc_logprobs(int64_t num_rows, int64_t vocab, int64_t hidden, const float* x, const float* w,
                      const void* packed, const int64_t* targets, float temperature, float* logprobs,
                      float* log_sums, float* entropy, int64_t is_bf16, int64_t num_threads) {
    (is_bf16 ? logprobs_of<Pair> : logprobs_of<float>)(num_rows, vocab, hidden, x, w, packed, targets, temperature,
                                                       logprobs, log_sums, entropy, num_threads);
}

void longarc_logprobs_backward(int64_t num_rows, int64_t vocab, int64_t hidden, const float* x, const float* w,
                               const void* packed, const int64_t* targets, float temperature, const float* log_sums,
                               const float* d_logprobs, float* dx, float* dw, int64_t is_bf16, int64_t num_threads) {
    (is_bf16 ? logprobs_backward<Pair> : logprobs_backward<float>)(num_rows, vocab, hidden, x, w, packed, targets,
                                                                   temperature, log_sums, d_logprobs, dx, dw,
                                                                   num_threads);
}

// Draws a token per row of logits (which are divided by the temperatures in place).
void longarc_sample(int64_t num_rows, int64_t vocab, float* logits, const float* temperatures, const double* uniforms,
                    int64_t* tokens, float* logprobs, int64_t* is_finite, int64_t num_threads) {
    for_rows(num_rows, num_threads, [&](int64_t first, int64_t count) {
        for (int64_t r = first; r < first + count; r++) {
            const Drawn drawn = sample_row(logits + r * vocab, vocab, temperatures[r], uniforms[r]);
            tokens[r] = drawn.token, logprobs[r] = drawn.logprob, is_finite[r] = drawn.is_finite;
        }
    });
}

void longarc_llama_rows(const LlamaShape* shape, const LlamaLayer* layers, const Rows* rows, int64_t num_threads) {
    (shape->is_bf16 ? llama_rows<Pair> : llama_rows<float>)(*shape, layers, *rows, num_threads);
}

void longarc_mla_rows(const MlaShape* shape, const MlaLayer* layers, const Rows* rows, int64_t num_threads) {
    run_mla(*shape, layers, *rows, num_threads);
}

void longarc_llama_steps(const LlamaShape* shape, const LlamaLayer* layers, const Rows* rows, Steps* steps,
                         int64_t num_threads) {
    (shape->is_bf16 ? llama_steps<Pair> : llama_steps<float>)(*shape, layers, *rows, *steps, num_threads);
}

void longarc_mla_steps(const MlaShape* shape, const MlaLayer* layers, const Rows* rows, Steps* steps,
                       int64_t num_threads) {
    thread_local Scratch scratch;
    float* logits = scratch.floats(DRAWN_ROWS * logits_stride(steps->vocab));
    StepRows now(*rows);
    steps->num_steps = 0;
    std::optional<MlaPass> pass;
    bool goes_on = true;
    with_team(num_threads, [&](const Member& me) {
        while (goes_on) {
            if (me.index == 0) pass.emplace(*shape, layers, now.rows, me.team.size);
            me.wait();
            pass->work();
            me.wait();
            draw_rows<float>(now.rows, shape->hidden, *steps, logits, me);
            if (me.index == 0) goes_on = now.advance(*steps);
            me.wait();
        }
    });
}

// The MTP layer is the one behind the last of `layers`.
void longarc_mla_take(const MlaShape* shape, const MlaLayer* layers, const Rows* rows, const Draft* draft,
                      int64_t num_threads) {
    take_rows(*shape, layers[shape->num_layers], *draft, *rows, num_threads);
}

void longarc_mla_draft(const MlaShape* shape, const MlaLayer* layers, const Rows* rows, const Draft* draft,
                       const Depth* depth, int64_t num_threads) {
    draft_rows(*shape, layers[shape->num_layers], *draft, *rows, *depth, num_threads);
}

void longarc_mla_rounds(const MlaShape* shape, const MlaLayer* layers, const Rows* rows, const Draft* draft,
                        const Rounds* rounds, int64_t num_threads) {
    run_rounds(*shape, layers, *rows, *draft, *rounds, num_threads);
}

}  // extern "C"
