// Vectors of floats through the compiler's own vector types: one source for AVX-512, AVX, SSE and NEON.
//
// A function here fixes the order of its operations, so that a result depends on the operands only and
// never on how many rows stand beside them. That includes where a product is rounded before it is added: compilers
// choose that by the shape of a loop, so the choice is taken from them (-ffp-contract=off) and made by multiply_add.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace longarc {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef float UnalignedVec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));

// Gives memory at the beginning of a cache line: a vector across two lines takes twice as long to load.
template <class T>
struct LineAllocator {
    using value_type = T;
    static constexpr std::align_val_t LINE{64};

    LineAllocator() = default;
    template <class U>
    LineAllocator(const LineAllocator<U>&) {}

    T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), LINE)); }
    void deallocate(T* memory, size_t) { ::operator delete(memory, LINE); }
    template <class U>
    bool operator==(const LineAllocator<U>&) const { return true; }
    template <class U>
    bool operator!=(const LineAllocator<U>&) const { return false; }
};

using Floats = std::vector<float, LineAllocator<float>>;

inline Vec load(const float* from) { return *reinterpret_cast<const UnalignedVec*>(from); }
inline void store(float* to, Vec value) { *reinterpret_cast<UnalignedVec*>(to) = value; }
inline Vec splat(float value) { return value - Vec{}; }

// A value that stays in a register. A load that is used several times may otherwise be repeated in each instruction that
// uses it, and a processor that multiplies one vector a cycle loads no more than one.
template <class Value>
inline Value held(Value value) {
#if defined(__AVX512F__) && defined(__GNUC__)
    asm("" : "+v"(value));
#elif defined(__AVX__) && defined(__GNUC__)
    asm("" : "+x"(value));
#endif
    return value;
}

// a * b + c, rounded once where the processor can, in every instance of the code alike.
inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return Vec(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif defined(__FMA__)
    return Vec(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#elif defined(__aarch64__)
    return Vec(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b)));
#else
    return a * b + c;
#endif
}

#if defined(__AVX512F__)
// Intrinsics only where they pay: here, for rows whose width is no multiple of LANES.
inline Vec load_first(const float* from, int count) {
    return _mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from);
}

inline void store_first(float* to, Vec value, int count) {
    _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), value);
}
#else
inline Vec load_first(const float* from, int count) {
    float whole[LANES] = {};
    std::memcpy(whole, from, sizeof(float) * count);
    return load(whole);
}

inline void store_first(float* to, Vec value, int count) {
    float whole[LANES];
    store(whole, value);
    std::memcpy(to, whole, sizeof(float) * count);
}
#endif

// Two numbers in bfloat16, the one of even index in the low half: what a product in bfloat16 takes at a time.
enum class Pair : uint32_t {};
typedef uint32_t PairVec __attribute__((vector_size(LANES * 4)));
typedef uint32_t UnalignedPairVec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

inline PairVec load(const Pair* from) { return *reinterpret_cast<const UnalignedPairVec*>(from); }
inline void store(Pair* to, PairVec value) { *reinterpret_cast<UnalignedPairVec*>(to) = value; }
inline PairVec splat(Pair value) { return uint32_t(value) - PairVec{}; }

// a0 * b0 + (a1 * b1 + c), rounded to fp32 after each addition. A product of two bfloat16 is a float without rounding.
inline Vec multiply_add(PairVec a, PairVec b, Vec c) {
#if defined(__AVX512BF16__)
    return Vec(_mm512_dpbf16_ps(__m512(c), (__m512bh)a, (__m512bh)b));
#else
    const auto as_floats = [](PairVec bits) {
        Vec value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    };
    c = multiply_add(as_floats(a & 0xffff0000u), as_floats(b & 0xffff0000u), c);
    return multiply_add(as_floats(a << 16), as_floats(b << 16), c);
#endif
}

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

inline bool any_lane(IntVec mask) {
#if defined(__AVX__) && !defined(__AVX512F__)
    return _mm256_movemask_ps(__m256(mask));
#else
    int32_t lane[LANES], any = 0;
    std::memcpy(lane, &mask, sizeof lane);
    for (int i = 0; i < LANES; i++) any |= lane[i];
    return any;
#endif
}

inline float sum_lanes(Vec value) {
    float lane[LANES];
    store(lane, value);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

inline float max_lanes(Vec value) {
    float lane[LANES];
    store(lane, value);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
    return lane[0];
}

// e^x to about one unit in the last place: x = n ln 2 + r, with the polynomial of Cephes (S. Moshier) for e^r.
inline Vec exp(Vec x) {
    // Written so that NaN stays NaN: a fault must reach the logits, where it is noticed.
    x = x > 88.0f ? splat(88.0f) : x;
    x = x < -87.3f ? splat(-87.3f) : x;
    const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec n = multiply_add(x, splat(1.44269504088896341f), shift) - shift;
    Vec r = multiply_add(n, splat(-0.693359375f), x);
    r = multiply_add(n, splat(2.12194440e-4f), r);
    Vec p = splat(1.9875691500e-4f);
    p = multiply_add(p, r, splat(1.3981999507e-3f));
    p = multiply_add(p, r, splat(8.3334519073e-3f));
    p = multiply_add(p, r, splat(4.1665795894e-2f));
    p = multiply_add(p, r, splat(1.6666665459e-1f));
    p = multiply_add(p, r, splat(5.0000001201e-1f));
    p = multiply_add(p, r * r, r + 1.0f);
    const IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
    Vec scale;
    std::memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

inline float exp(float x) {
    return exp(splat(x))[0];
}

inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define LONGARC_HAS_SHUFFLE 1
#endif
#endif

#if defined(LONGARC_HAS_SHUFFLE)
template <int STEP, int... I>
inline void exchange(Vec& a, Vec& b, std::integer_sequence<int, I...>) {
    const Vec low = __builtin_shufflevector(a, b, ((I / STEP) % 2 ? LANES + I - STEP : I)...);
    const Vec high = __builtin_shufflevector(a, b, ((I / STEP) % 2 ? LANES + I : I + STEP)...);
    a = low;
    b = high;
}

template <int STEP>
inline void exchange_all(Vec* rows) {
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++)
        if ((r / STEP) % 2 == 0) exchange<STEP>(rows[r], rows[r + STEP], std::make_integer_sequence<int, LANES>{});
    if constexpr (STEP > 1) exchange_all<STEP / 2>(rows);
}
#endif

// Turns LANES rows of LANES numbers into columns, in place.
inline void transpose(Vec* rows) {
#if defined(LONGARC_HAS_SHUFFLE)
    exchange_all<LANES / 2>(rows);
#else
    float copy[LANES][LANES];
    for (int r = 0; r < LANES; r++) store(copy[r], rows[r]);
    for (int r = 0; r < LANES; r++)
        for (int c = 0; c < LANES; c++) rows[r][c] = copy[c][r];
#endif
}

// Calls each(offset, load_count) over a row, whole vectors first; the tail is a zero-padded vector.
template <class Each>
inline void over_vectors(int64_t width, Each each) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) each(i, LANES);
    if (i < width) each(i, int(width - i));
}

inline Vec load_upto(const float* from, int count) { return count == LANES ? load(from) : load_first(from, count); }
inline void store_upto(float* to, Vec value, int count) {
    if (count == LANES)
        store(to, value);
    else
        store_first(to, value, count);
}

}  // namespace longarc
