// Sigmoid router and routed experts: rows are sorted by expert, and each row's experts are added in the
// order of its choice, so that no row's result depends on the others.
#pragma once

#include "bf16.h"
#include "rows.h"

namespace longarc {

// Chooses the experts of one row by score + bias, best first, ties to the lower index; turns logits into
// scores. Weights are the chosen scores, normalised if asked, times scale.
LONGARC_ONE_COPY inline void route_row(float* logits, const float* bias, int64_t num_experts, int64_t num_chosen,
                                       bool normalise, float scale, int32_t* chosen, float* weights) {
    over_vectors(num_experts, [&](int64_t i, int count) {
        store_upto(logits + i, sigmoid(load_upto(logits + i, count)), count);
    });
    float total = 0.0f;
    for (int64_t c = 0; c < num_chosen; c++) {
        int32_t best = -1;
        for (int32_t e = 0; e < num_experts; e++) {
            bool taken = false;
            for (int64_t i = 0; i < c; i++) taken |= chosen[i] == e;
            if (!taken && (best < 0 || logits[e] + bias[e] > logits[best] + bias[best])) best = e;
        }
        chosen[c] = best;
        weights[c] = logits[best];
        total += logits[best];
    }
    const float factor = normalise ? scale / (total + 1e-20f) : scale;
    for (int64_t c = 0; c < num_chosen; c++) weights[c] *= factor;
}

struct ExpertShape {
    int64_t num_experts, num_chosen, hidden, width;
};

// Which (row, slot) pairs go to which expert, in row order: pairs[offsets[e] .. offsets[e + 1]).
struct ExpertOrder {
    std::vector<int32_t> offsets, pairs;

    void sort(const int32_t* chosen, int64_t num_rows, const ExpertShape& shape) {
        const int64_t num_pairs = num_rows * shape.num_chosen;
        offsets.assign(shape.num_experts + 1, 0);
        pairs.resize(num_pairs);
        for (int64_t i = 0; i < num_pairs; i++) offsets[chosen[i] + 1]++;
        for (int64_t e = 0; e < shape.num_experts; e++) offsets[e + 1] += offsets[e];
        std::vector<int32_t> next(offsets.begin(), offsets.end() - 1);
        for (int64_t i = 0; i < num_pairs; i++) pairs[next[chosen[i]]++] = int32_t(i);
    }
};

struct ExpertScratch {
    Scratch gathered, activated, out, d_activated, d_gates, packed;
};

inline void gather_rows(const float* x, const int32_t* pairs, int64_t count, const ExpertShape& shape, float* to) {
    for (int64_t i = 0; i < count; i++)
        std::memcpy(to + i * shape.hidden, x + pairs[i] / shape.num_chosen * shape.hidden,
                    sizeof(float) * shape.hidden);
}

inline void swiglu_rows(const float* gate_up, float* y, int64_t num_rows, int64_t width) {
    for (int64_t r = 0; r < num_rows; r++)
        swiglu_row(gate_up + r * 2 * width, gate_up + r * 2 * width + width, y + r * width, width);
}

// y[row] = sum over slots of weight * expert(x[row]). Weights of expert e are packed at
// gate_up + e * packed_size(2 width, hidden) and down + e * packed_size(hidden, width).
// `sorted_gate_up` and `slot_out` keep what backward needs: [pairs, 2 width] in expert order and
// [pairs, hidden] in row order.
LONGARC_ONE_COPY inline void experts_forward(const ExpertShape& shape, int64_t num_rows, const float* x, const int32_t* chosen,
                            const float* weights, const float* gate_up, const float* down, float* y,
                            float* sorted_gate_up, float* slot_out, int64_t num_threads) {
    const int64_t hidden = shape.hidden, width = shape.width;
    thread_local ExpertOrder own_order;
    ExpertOrder& order = own_order;
    order.sort(chosen, num_rows, shape);
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1) if (num_threads > 1)
    for (int64_t e = 0; e < shape.num_experts; e++) {
        thread_local ExpertScratch scratch;
        const int64_t first = order.offsets[e], count = order.offsets[e + 1] - first;
        const int32_t* pairs = order.pairs.data() + first;
        float* gathered = scratch.gathered.floats(count * hidden);
        float* activated = scratch.activated.floats(count * width);
        float* sorted_out = scratch.out.floats(count * hidden);
        float* gates = sorted_gate_up + first * 2 * width;
        gather_rows(x, pairs, count, shape, gathered);
        gemm(count, 2 * width, hidden, gathered, hidden, gate_up + e * packed_size(2 * width, hidden), gates,
             2 * width);
        swiglu_rows(gates, activated, count, width);
        gemm(count, hidden, width, activated, width, down + e * packed_size(hidden, width), sorted_out, hidden);
        for (int64_t i = 0; i < count; i++)
            std::memcpy(slot_out + pairs[i] * hidden, sorted_out + i * hidden, sizeof(float) * hidden);
    }
    for (int64_t r = 0; r < num_rows; r++)
        over_vectors(hidden, [&](int64_t i, int n) {
            const float* slot = slot_out + r * shape.num_chosen * hidden + i;
            Vec total = load_upto(slot, n) * weights[r * shape.num_chosen];
            for (int64_t c = 1; c < shape.num_chosen; c++)
                total = multiply_add(load_upto(slot + c * hidden, n), splat(weights[r * shape.num_chosen + c]), total);
            store_upto(y + r * hidden + i, total, n);
        });
}

// Gradients of experts_forward. Here gate_up and down are plain: [E, 2 width, hidden] and [E, hidden, width].
// dx, d_weights are set; d_gate_up, d_down are added to.
LONGARC_ONE_COPY inline void experts_backward(const ExpertShape& shape, int64_t num_rows, const float* x, const int32_t* chosen,
                             const float* weights, const float* gate_up, const float* down,
                             const float* sorted_gate_up, const float* slot_out, const float* dy, float* dx,
                             float* d_weights, float* d_gate_up, float* d_down, int64_t num_threads) {
    const int64_t hidden = shape.hidden, width = shape.width, k = shape.num_chosen;
    thread_local ExpertOrder own_order;
    thread_local Scratch gradient;
    ExpertOrder& order = own_order;
    float* slot_dx = gradient.floats(num_rows * k * hidden);
    order.sort(chosen, num_rows, shape);
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1) if (num_threads > 1)
    for (int64_t e = 0; e < shape.num_experts; e++) {
        thread_local ExpertScratch scratch;
        const int64_t first = order.offsets[e], count = order.offsets[e + 1] - first;
        const int32_t* pairs = order.pairs.data() + first;
        float* gathered = scratch.gathered.floats(count * hidden);
        float* activated = scratch.activated.floats(count * width);
        float* d_out = scratch.out.floats(count * hidden);
        float* packed = scratch.packed.floats(packed_size(std::max(width, hidden), std::max(hidden, 2 * width)));
        const float* gates = sorted_gate_up + first * 2 * width;
        float* d_activated = scratch.d_activated.floats(count * width);
        float* d_gates = scratch.d_gates.floats(count * 2 * width);
        gather_rows(x, pairs, count, shape, gathered);
        for (int64_t i = 0; i < count; i++) {
            const float *from = dy + pairs[i] / k * hidden, *out = slot_out + pairs[i] * hidden;
            Vec dot{};
            over_vectors(hidden, [&](int64_t j, int n) {
                const Vec d = load_upto(from + j, n);
                dot = multiply_add(d, load_upto(out + j, n), dot);
                store_upto(d_out + i * hidden + j, d * weights[pairs[i]], n);
            });
            d_weights[pairs[i]] = sum_lanes(dot);
        }
        pack(down + e * hidden * width, 1, width, width, hidden, packed);
        gemm(count, width, hidden, d_out, hidden, packed, d_activated, width);
        swiglu_rows(gates, activated, count, width);
        for (int64_t i = 0; i < count; i++) {
            const int64_t at = i * 2 * width;
            swiglu_backward_row(gates + at, gates + at + width, d_activated + i * width, d_gates + at,
                                d_gates + at + width, width);
        }
        weight_gradient<float, Store::ADD>(count, hidden, width, d_out, hidden, activated, width,
                                           d_down + e * hidden * width);
        weight_gradient<float, Store::ADD>(count, 2 * width, hidden, d_gates, 2 * width, gathered, hidden,
                                           d_gate_up + e * 2 * width * hidden);
        pack(gate_up + e * 2 * width * hidden, 1, hidden, hidden, 2 * width, packed);
        gemm(count, hidden, 2 * width, d_gates, 2 * width, packed, gathered, hidden);
        for (int64_t i = 0; i < count; i++)
            std::memcpy(slot_dx + pairs[i] * hidden, gathered + i * hidden, sizeof(float) * hidden);
    }
    for (int64_t r = 0; r < num_rows; r++)
        over_vectors(hidden, [&](int64_t i, int n) {
            const float* slot = slot_dx + r * k * hidden + i;
            Vec total = load_upto(slot, n);
            for (int64_t c = 1; c < k; c++) total += load_upto(slot + c * hidden, n);
            store_upto(dx + r * hidden + i, total, n);
        });
}

}  // namespace longarc
