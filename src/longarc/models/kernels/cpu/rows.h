// What is done to single rows: norms, rotation, gated activation. Never inlined or cloned, so that every caller runs
// the very same instructions and gets the very same bits.
#pragma once

#include "vec.h"

#if defined(__GNUC__) && !defined(__clang__)
#define LONGARC_ONE_COPY __attribute__((noinline, noclone))
#else
#define LONGARC_ONE_COPY __attribute__((noinline))
#endif

namespace longarc {

// y = w * x / sqrt(mean(x^2) + eps); returns the factor 1 / sqrt(...).
LONGARC_ONE_COPY inline float rms_norm_row(const float* x, const float* w, float* y, int64_t width, float eps) {
    Vec squares{};
    over_vectors(width, [&](int64_t i, int count) {
        const Vec v = load_upto(x + i, count);
        squares = multiply_add(v, v, squares);
    });
    const float factor = 1.0f / std::sqrt(sum_lanes(squares) / float(width) + eps);
    over_vectors(width, [&](int64_t i, int count) {
        store_upto(y + i, load_upto(x + i, count) * factor * load_upto(w + i, count), count);
    });
    return factor;
}

// Gradient of rms_norm_row: dx, and dw accumulated over calls. x_hat = x * factor; g = dy * w;
// dx = factor * (g - x_hat * mean(g * x_hat)).
LONGARC_ONE_COPY inline void rms_norm_backward_row(const float* x, const float* w, const float* dy, float factor,
                                                   float* dx, float* dw, int64_t width) {
    Vec products{};
    over_vectors(width, [&](int64_t i, int count) {
        const Vec x_hat = load_upto(x + i, count) * factor, d = load_upto(dy + i, count);
        products = multiply_add(x_hat, d * load_upto(w + i, count), products);
        store_upto(dw + i, multiply_add(d, x_hat, load_upto(dw + i, count)), count);
    });
    const float mean = sum_lanes(products) / float(width);
    over_vectors(width, [&](int64_t i, int count) {
        const Vec x_hat = load_upto(x + i, count) * factor;
        const Vec g = load_upto(dy + i, count) * load_upto(w + i, count);
        store_upto(dx + i, (g - x_hat * mean) * factor, count);
    });
}

constexpr int64_t FP8_BLOCK = 128;  // numbers of a row that share a scale, where its heads do not say otherwise

// What e4m3 and one scale for each `block` numbers leave of a row, in place: the arithmetic of algos/fp8.py, bit for bit.
LONGARC_ONE_COPY inline void round_to_fp8(float* row, int64_t width, int64_t block) {
    for (int64_t at = 0; at < width; at += block) {
        float *numbers = row + at, largest = 0.0f;
        const int64_t count = std::min(block, width - at);
        for (int64_t i = 0; i < count; i++) largest = std::max(largest, std::fabs(numbers[i]));
        const float scale = largest > 0.0f ? largest / 448.0f : 1.0f;
        for (int64_t i = 0; i < count; i++) {
            const float code = numbers[i] / scale;
            uint32_t bits;
            std::memcpy(&bits, &code, sizeof(bits));
            // The distance of e4m3's numbers where this one lies: three bits of mantissa, exponents from -6 on.
            const uint32_t exponent = std::max<uint32_t>(bits >> 23 & 255, 127 - 6) - 3;
            const uint32_t step_bits = exponent << 23;
            float step;
            std::memcpy(&step, &step_bits, sizeof(step));
            numbers[i] = std::nearbyint(code / step) * step * scale;
        }
    }
}

LONGARC_ONE_COPY inline void layer_norm_row(const float* x, const float* w, const float* b, float* y, int64_t width,
                                            float eps) {
    Vec total{};
    over_vectors(width, [&](int64_t i, int count) { total += load_upto(x + i, count); });
    const float mean = sum_lanes(total) / float(width);
    float squares = 0.0f;
    for (int64_t i = 0; i < width; i++) squares += (x[i] - mean) * (x[i] - mean);
    const float factor = 1.0f / std::sqrt(squares / float(width) + eps);
    for (int64_t i = 0; i < width; i++) y[i] = (x[i] - mean) * factor * w[i] + b[i];
}

// Rotates one head in place; cos and sin hold width / 2 angles of the row's position.
// Neighbouring pairs (GLM-5) when interleaved, else pairs (i, i + width / 2) (Llama). sign -1 turns back.
LONGARC_ONE_COPY inline void rotate_row(float* __restrict__ x, const float* __restrict__ cos,
                                        const float* __restrict__ sin, int64_t width, bool interleaved,
                                        float sign) {
    const int64_t half = width / 2, step = interleaved ? 2 : 1, far = interleaved ? 1 : half;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i * step], b = x[i * step + far], s = sign * sin[i];
        x[i * step] = a * cos[i] - b * s;
        x[i * step + far] = b * cos[i] + a * s;
    }
}

// y = silu(gate) * up
LONGARC_ONE_COPY inline void swiglu_row(const float* gate, const float* up, float* y, int64_t width) {
    over_vectors(width, [&](int64_t i, int count) {
        const Vec g = load_upto(gate + i, count);
        store_upto(y + i, g * sigmoid(g) * load_upto(up + i, count), count);
    });
}

LONGARC_ONE_COPY inline void swiglu_backward_row(const float* gate, const float* up, const float* dy, float* dgate,
                                                 float* dup, int64_t width) {
    over_vectors(width, [&](int64_t i, int count) {
        const Vec g = load_upto(gate + i, count), u = load_upto(up + i, count), d = load_upto(dy + i, count);
        const Vec s = sigmoid(g);
        store_upto(dup + i, d * (g * s), count);
        store_upto(dgate + i, d * u * (s * (1.0f + g * (1.0f - s))), count);
    });
}

}  // namespace longarc
