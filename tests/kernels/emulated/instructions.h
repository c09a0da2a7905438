// AVX-512, its BF16 and AMX in plain C++, so that kernels for them are tested on a CPU that has only AVX2.
//
// Each function has the name of the intrinsic that it stands for, and does lane by lane what Intel's manual says of the
// instruction; here are those that kernels use. They lie where kernels look first, in their own namespace, so sources
// stay as they are. isa.h includes this where TRIPTYCH_EMULATED is defined: `make test-emulated`. GCC alone compiles it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

// GCC has these as macros.
#undef _mm512_setr_epi64
#undef _mm512_i32gather_ps
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps

// The CPU passes for one of Intel's, where few rows of bf16 are multiplied in pairs and many are widened: tests see both.
#define __builtin_cpu_is(vendor) true

// Compiled once for all that call it, or a file of kernels takes minutes.
#define TRIPTYCH_CALLED [[gnu::noinline, maybe_unused]] static

namespace triptych {
namespace {

template <class T, class V>
struct Lanes {
    static constexpr int kCount = sizeof(V) / sizeof(T);
    T at[kCount];

    Lanes() = default;
    explicit Lanes(const V& vector) { std::memcpy(at, &vector, sizeof(V)); }
    V vector() const {
        V result;
        std::memcpy(&result, at, sizeof(V));
        return result;
    }
};
using FloatLanes = Lanes<float, __m512>;
template <class T>
using WordLanes = Lanes<T, __m512i>;

// Of each lane what value_of(lane) says.
template <class T, class V, class ValueOf>
V lanes_of(const ValueOf& value_of) {
    Lanes<T, V> result;
    for (int i = 0; i < Lanes<T, V>::kCount; ++i) result.at[i] = value_of(i);
    return result.vector();
}
template <class ValueOf>
__m512 floats_of(const ValueOf& value_of) {
    return lanes_of<float, __m512>(value_of);
}
template <class T, class ValueOf>
__m512i words_of(const ValueOf& value_of) {
    return lanes_of<T, __m512i>(value_of);
}
template <class Test>
uint64_t bits_of(int count, const Test& test) {
    uint64_t bits = 0;
    for (int i = 0; i < count; ++i) bits |= uint64_t{test(i)} << i;
    return bits;
}
inline bool has_bit(uint64_t mask, int lane) { return (mask >> lane & 1) != 0; }

// As instructions of BF16 and AMX take and give numbers: one that is too small for full precision is a zero.
inline float flushed(float x) {
    return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}
inline float flushed_fma(float a, float b, float c) {
    return flushed(__builtin_fmaf(flushed(a), flushed(b), flushed(c)));
}
inline float from_bf16(uint16_t half) {
    const uint32_t bits = uint32_t{half} << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline uint16_t to_bf16(float x) {
    x = flushed(x);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t quiet = bits >> 16 | 0x40, rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return static_cast<uint16_t>(std::isnan(x) ? quiet : rounded);
}

TRIPTYCH_CALLED __m512 _mm512_setzero_ps() { return __m512{}; }
TRIPTYCH_CALLED __m512i _mm512_setzero_si512() { return __m512i{}; }
TRIPTYCH_CALLED __m512 _mm512_set1_ps(float x) {
    return floats_of([&](int) { return x; });
}
TRIPTYCH_CALLED __m512i _mm512_set1_epi32(int x) {
    return words_of<int32_t>([&](int) { return x; });
}
TRIPTYCH_CALLED __m512i _mm512_set1_epi16(int x) {
    return words_of<int16_t>([&](int) { return static_cast<int16_t>(x); });
}
TRIPTYCH_CALLED __m512i _mm512_set1_epi8(int x) {
    return words_of<int8_t>([&](int) { return static_cast<int8_t>(x); });
}
template <class... Numbers>
__m512i _mm512_setr_epi64(Numbers... numbers) {
    return __m512i{static_cast<long long>(numbers)...};
}
TRIPTYCH_CALLED __m512 _mm512_castsi512_ps(__m512i x) { return (__m512)x; }
TRIPTYCH_CALLED __m512i _mm512_castps_si512(__m512 x) { return (__m512i)x; }
TRIPTYCH_CALLED __m512i _mm512_castsi128_si512(__m128i x) {
    __m512i result{};
    std::memcpy(&result, &x, 16);
    return result;
}

// An aligned access elsewhere ends the process, as the instruction does.
inline void demand(bool is_allowed) {
    if (!is_allowed) __builtin_trap();
}
template <class V>
V load_vector(const void* from) {
    V result;
    std::memcpy(&result, from, sizeof(V));
    return result;
}
TRIPTYCH_CALLED __m512 _mm512_loadu_ps(const void* from) { return load_vector<__m512>(from); }
TRIPTYCH_CALLED __m512i _mm512_loadu_si512(const void* from) { return load_vector<__m512i>(from); }
TRIPTYCH_CALLED __m512 _mm512_load_ps(const void* from) {
    demand(reinterpret_cast<uintptr_t>(from) % 64 == 0);
    return load_vector<__m512>(from);
}
TRIPTYCH_CALLED __m512i _mm512_load_si512(const void* from) {
    demand(reinterpret_cast<uintptr_t>(from) % 64 == 0);
    return load_vector<__m512i>(from);
}
TRIPTYCH_CALLED __m512 _mm512_i32gather_ps(__m512i places, const void* from, int scale) {
    const WordLanes<int32_t> places_of(places);
    return floats_of([&](int i) {
        float x;
        std::memcpy(&x, static_cast<const char*>(from) + int64_t{places_of.at[i]} * scale, 4);
        return x;
    });
}
TRIPTYCH_CALLED void _mm512_storeu_ps(void* to, __m512 x) { std::memcpy(to, &x, 64); }
TRIPTYCH_CALLED void _mm512_storeu_si512(void* to, __m512i x) { std::memcpy(to, &x, 64); }
TRIPTYCH_CALLED void _mm512_store_ps(void* to, __m512 x) {
    demand(reinterpret_cast<uintptr_t>(to) % 64 == 0);
    std::memcpy(to, &x, 64);
}
TRIPTYCH_CALLED void _mm512_store_si512(void* to, __m512i x) {
    demand(reinterpret_cast<uintptr_t>(to) % 64 == 0);
    std::memcpy(to, &x, 64);
}

// Memory without a bit is neither read nor written.
template <class T, class V>
V load_lanes(uint64_t mask, const void* from) {
    return lanes_of<T, V>([&](int i) {
        T value{};
        if (has_bit(mask, i)) std::memcpy(&value, static_cast<const char*>(from) + i * sizeof(T), sizeof(T));
        return value;
    });
}
template <class T, class V>
void store_lanes(void* to, uint64_t mask, const V& x) {
    const Lanes<T, V> lanes(x);
    for (int i = 0; i < Lanes<T, V>::kCount; ++i)
        if (has_bit(mask, i)) std::memcpy(static_cast<char*>(to) + i * sizeof(T), &lanes.at[i], sizeof(T));
}
TRIPTYCH_CALLED __m512 _mm512_maskz_loadu_ps(uint64_t mask, const void* from) {
    return load_lanes<float, __m512>(mask, from);
}
TRIPTYCH_CALLED __m512i _mm512_maskz_loadu_epi32(uint64_t mask, const void* from) {
    return load_lanes<int32_t, __m512i>(mask, from);
}
TRIPTYCH_CALLED __m512i _mm512_maskz_loadu_epi16(uint64_t mask, const void* from) {
    return load_lanes<int16_t, __m512i>(mask, from);
}
TRIPTYCH_CALLED __m512i _mm512_maskz_loadu_epi8(uint64_t mask, const void* from) {
    return load_lanes<int8_t, __m512i>(mask, from);
}
TRIPTYCH_CALLED __m256i _mm256_maskz_loadu_epi16(uint64_t mask, const void* from) {
    return load_lanes<int16_t, __m256i>(mask, from);
}
TRIPTYCH_CALLED void _mm512_mask_storeu_ps(void* to, uint64_t mask, __m512 x) { store_lanes<float>(to, mask, x); }
TRIPTYCH_CALLED void _mm512_mask_storeu_epi32(void* to, uint64_t mask, __m512i x) {
    store_lanes<int32_t>(to, mask, x);
}
TRIPTYCH_CALLED void _mm512_mask_storeu_epi16(void* to, uint64_t mask, __m512i x) {
    store_lanes<int16_t>(to, mask, x);
}
TRIPTYCH_CALLED void _mm256_mask_storeu_epi16(void* to, uint64_t mask, __m256i x) {
    store_lanes<int16_t>(to, mask, x);
}

TRIPTYCH_CALLED __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
TRIPTYCH_CALLED __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
TRIPTYCH_CALLED __m512 _mm512_div_ps(__m512 a, __m512 b) { return a / b; }
TRIPTYCH_CALLED __m512 _mm512_mul_round_ps(__m512 a, __m512 b, int) { return a * b; }
TRIPTYCH_CALLED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    const FloatLanes x(a), y(b), z(c);
    return floats_of([&](int i) { return __builtin_fmaf(x.at[i], y.at[i], z.at[i]); });
}
TRIPTYCH_CALLED __m512 _mm512_fnmadd_ps(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(-a, b, c); }
TRIPTYCH_CALLED __m512 _mm512_max_ps(__m512 a, __m512 b) {
    const FloatLanes x(a), y(b);
    return floats_of([&](int i) { return x.at[i] > y.at[i] ? x.at[i] : y.at[i]; });
}
TRIPTYCH_CALLED __m512 _mm512_min_ps(__m512 a, __m512 b) {
    const FloatLanes x(a), y(b);
    return floats_of([&](int i) { return x.at[i] < y.at[i] ? x.at[i] : y.at[i]; });
}
TRIPTYCH_CALLED __m512 _mm512_mask_mov_ps(__m512 otherwise, uint64_t mask, __m512 a) {
    const FloatLanes x(a), y(otherwise);
    return floats_of([&](int i) { return has_bit(mask, i) ? x.at[i] : y.at[i]; });
}
TRIPTYCH_CALLED __m512 _mm512_mask_blend_ps(uint64_t mask, __m512 a, __m512 b) {
    return _mm512_mask_mov_ps(a, mask, b);
}
TRIPTYCH_CALLED __m512 _mm512_mask_max_ps(__m512 otherwise, uint64_t mask, __m512 a, __m512 b) {
    return _mm512_mask_mov_ps(otherwise, mask, _mm512_max_ps(a, b));
}
TRIPTYCH_CALLED __m512 _mm512_abs_ps(__m512 a) {
    const FloatLanes x(a);
    return floats_of([&](int i) { return std::fabs(x.at[i]); });
}
TRIPTYCH_CALLED __m512 _mm512_roundscale_ps(__m512 a, int how) {
    demand(how == 8);  // to the nearest, in silence
    const FloatLanes x(a);
    return floats_of([&](int i) { return std::nearbyintf(x.at[i]); });
}
TRIPTYCH_CALLED __m512 _mm512_maskz_scalef_ps(uint64_t mask, __m512 a, __m512 b) {
    const FloatLanes x(a), y(b);
    return floats_of([&](int i) {
        if (!has_bit(mask, i)) return 0.0f;
        if (std::isnan(x.at[i]) || std::isnan(y.at[i])) return x.at[i] + y.at[i];
        return std::ldexp(x.at[i], static_cast<int>(std::fmax(-1e4f, std::fmin(1e4f, std::floor(y.at[i])))));
    });
}
TRIPTYCH_CALLED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
    const FloatLanes x(a), y(b);
    demand(how == _CMP_NLE_UQ || how == _CMP_EQ_OQ || how == _CMP_UNORD_Q || how == _CMP_GE_OQ);
    return static_cast<__mmask16>(bits_of(16, [&](int i) {
        return how == _CMP_NLE_UQ   ? !(x.at[i] <= y.at[i])
               : how == _CMP_EQ_OQ  ? x.at[i] == y.at[i]
               : how == _CMP_GE_OQ  ? x.at[i] >= y.at[i]
                                    : std::isnan(x.at[i]) || std::isnan(y.at[i]);
    }));
}
TRIPTYCH_CALLED __mmask16 _mm512_mask_cmp_ps_mask(__mmask16 mask, __m512 a, __m512 b, int how) {
    return mask & _mm512_cmp_ps_mask(a, b, how);
}
TRIPTYCH_CALLED float _mm512_cvtss_f32(__m512 x) { return x[0]; }
// In the order in which GCC does it: halves upon each other.
TRIPTYCH_CALLED float _mm512_reduce_add_ps(__m512 a) {
    FloatLanes x(a);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) x.at[i] += x.at[i + width];
    return x.at[0];
}
TRIPTYCH_CALLED float _mm512_reduce_max_ps(__m512 a) {
    const FloatLanes x(a);
    float highest = x.at[0];
    for (const float value : x.at) highest = value > highest ? value : highest;
    return highest;
}
TRIPTYCH_CALLED float _mm512_mask_reduce_max_ps(uint64_t mask, __m512 a) {
    return _mm512_reduce_max_ps(_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), mask, a));
}

TRIPTYCH_CALLED __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
TRIPTYCH_CALLED __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
TRIPTYCH_CALLED __m512 _mm512_or_ps(__m512 a, __m512 b) { return (__m512)((__m512i)a | (__m512i)b); }
TRIPTYCH_CALLED __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
    const WordLanes<uint32_t> x(a), y(b), z(c);
    return words_of<uint32_t>([&](int i) {
        uint32_t result = 0;
        for (int bit = 0; bit < 32; ++bit) {
            const int entry = (x.at[i] >> bit & 1) * 4 + (y.at[i] >> bit & 1) * 2 + (z.at[i] >> bit & 1);
            result |= static_cast<uint32_t>(table >> entry & 1) << bit;
        }
        return result;
    });
}
TRIPTYCH_CALLED __m512i _mm512_slli_epi32(__m512i a, int count) {
    const WordLanes<uint32_t> x(a);
    return words_of<uint32_t>([&](int i) { return x.at[i] << count; });
}
TRIPTYCH_CALLED __m512i _mm512_add_epi32(__m512i a, __m512i b) {
    const WordLanes<uint32_t> x(a), y(b);
    return words_of<uint32_t>([&](int i) { return x.at[i] + y.at[i]; });
}
TRIPTYCH_CALLED __m512i _mm512_srli_epi32(__m512i a, int count) {
    const WordLanes<uint32_t> x(a);
    return words_of<uint32_t>([&](int i) { return x.at[i] >> count; });
}
TRIPTYCH_CALLED __m512i _mm512_srli_epi16(__m512i a, int count) {
    const WordLanes<uint16_t> x(a);
    return words_of<uint16_t>([&](int i) { return static_cast<uint16_t>(x.at[i] >> count); });
}
TRIPTYCH_CALLED __m512i _mm512_cvtepu16_epi32(__m256i a) {
    const Lanes<uint16_t, __m256i> x(a);
    return words_of<uint32_t>([&](int i) { return uint32_t{x.at[i]}; });
}
TRIPTYCH_CALLED __mmask16 _mm512_movepi32_mask(__m512i a) {
    const WordLanes<int32_t> x(a);
    return static_cast<__mmask16>(bits_of(16, [&](int i) { return x.at[i] < 0; }));
}
TRIPTYCH_CALLED __mmask32 _mm512_cmpeq_epi16_mask(__m512i a, __m512i b) {
    const WordLanes<int16_t> x(a), y(b);
    return static_cast<__mmask32>(bits_of(32, [&](int i) { return x.at[i] == y.at[i]; }));
}

// Of each 128 bits the lower or the upper halves of a and b, their lanes in turn.
template <class T, bool kUpper>
__m512i unpacked(__m512i a, __m512i b) {
    const WordLanes<T> x(a), y(b);
    constexpr int kCount = 16 / sizeof(T);
    return words_of<T>([&](int i) {
        const int from = i / kCount * kCount + (kUpper ? kCount / 2 : 0) + i % kCount / 2;
        return i % 2 == 0 ? x.at[from] : y.at[from];
    });
}
TRIPTYCH_CALLED __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) { return unpacked<uint8_t, false>(a, b); }
TRIPTYCH_CALLED __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) { return unpacked<uint8_t, true>(a, b); }
TRIPTYCH_CALLED __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) { return unpacked<uint16_t, false>(a, b); }
TRIPTYCH_CALLED __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) { return unpacked<uint16_t, true>(a, b); }
TRIPTYCH_CALLED __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) { return unpacked<uint32_t, false>(a, b); }
TRIPTYCH_CALLED __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) { return unpacked<uint32_t, true>(a, b); }
TRIPTYCH_CALLED __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) { return unpacked<uint64_t, false>(a, b); }
TRIPTYCH_CALLED __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) { return unpacked<uint64_t, true>(a, b); }
TRIPTYCH_CALLED __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int which) {
    const WordLanes<uint32_t> x(a), y(b);
    return words_of<uint32_t>([&](int i) {
        const int from = (which >> i / 4 * 2 & 3) * 4 + i % 4;
        return i < 8 ? x.at[from] : y.at[from];
    });
}
TRIPTYCH_CALLED __m512i _mm512_mask_broadcast_i32x4(__m512i otherwise, uint64_t mask, __m128i a) {
    const Lanes<uint32_t, __m128i> x(a);
    const WordLanes<uint32_t> y(otherwise);
    return words_of<uint32_t>([&](int i) { return has_bit(mask, i) ? x.at[i % 4] : y.at[i]; });
}
TRIPTYCH_CALLED __m512i _mm512_broadcast_i64x4(__m256i a) {
    const Lanes<uint64_t, __m256i> x(a);
    return words_of<uint64_t>([&](int i) { return x.at[i % 4]; });
}
TRIPTYCH_CALLED __m512i _mm512_broadcast_i32x4(__m128i a) {
    const Lanes<uint32_t, __m128i> x(a);
    return words_of<uint32_t>([&](int i) { return x.at[i % 4]; });
}
TRIPTYCH_CALLED __m512i _mm512_permutexvar_epi8(__m512i places, __m512i a) {
    const WordLanes<uint8_t> from(places), x(a);
    return words_of<uint8_t>([&](int i) { return x.at[from.at[i] % 64]; });
}
TRIPTYCH_CALLED __m512i _mm512_permutexvar_epi16(__m512i places, __m512i a) {
    const WordLanes<uint16_t> from(places), x(a);
    return words_of<uint16_t>([&](int i) { return x.at[from.at[i] % 32]; });
}
TRIPTYCH_CALLED __m512 _mm512_permutexvar_ps(__m512i places, __m512 a) {
    const WordLanes<uint32_t> from(places);
    const FloatLanes x(a);
    return floats_of([&](int i) { return x.at[from.at[i] % 16]; });
}
TRIPTYCH_CALLED __m512i _mm512_permutexvar_epi64(__m512i places, __m512i a) {
    const WordLanes<uint64_t> from(places), x(a);
    return words_of<uint64_t>([&](int i) { return x.at[from.at[i] % 8]; });
}
TRIPTYCH_CALLED __m512i _mm512_permutex2var_epi8(__m512i a, __m512i places, __m512i b) {
    const WordLanes<uint8_t> x(a), from(places), y(b);
    return words_of<uint8_t>([&](int i) {
        const int place = from.at[i] % 128;
        return place < 64 ? x.at[place] : y.at[place - 64];
    });
}

TRIPTYCH_CALLED __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
    const WordLanes<int32_t> sum(sums);
    const WordLanes<uint8_t> x(a);
    const WordLanes<int8_t> y(b);
    return words_of<int32_t>([&](int i) {
        int32_t total = sum.at[i];
        for (int byte = 4 * i; byte < 4 * i + 4; ++byte) total += x.at[byte] * y.at[byte];
        return total;
    });
}
TRIPTYCH_CALLED __m512 _mm512_cvtepi32_ps(__m512i a) {
    const WordLanes<int32_t> x(a);
    return floats_of([&](int i) { return static_cast<float>(x.at[i]); });
}
TRIPTYCH_CALLED __m512i _mm512_cvtps_epi32(__m512 a) {
    const FloatLanes x(a);
    return words_of<int32_t>([&](int i) { return static_cast<int32_t>(std::nearbyintf(x.at[i])); });
}
TRIPTYCH_CALLED __m128i _mm512_cvtepi32_epi8(__m512i a) {
    const WordLanes<int32_t> x(a);
    return lanes_of<int8_t, __m128i>([&](int i) { return static_cast<int8_t>(x.at[i]); });
}
TRIPTYCH_CALLED __m512 _mm512_cvtph_ps(__m256i a) {
    const Lanes<__m128i, __m256i> halves(a);
    const __m256 low = _mm256_cvtph_ps(halves.at[0]), high = _mm256_cvtph_ps(halves.at[1]);
    return floats_of([&](int i) { return i < 8 ? low[i] : high[i - 8]; });
}
TRIPTYCH_CALLED __m256bh _mm512_cvtneps_pbh(__m512 a) {
    const FloatLanes x(a);
    return lanes_of<uint16_t, __m256bh>([&](int i) { return to_bf16(x.at[i]); });
}
TRIPTYCH_CALLED __m512bh _mm512_cvtne2ps_pbh(__m512 a, __m512 b) {
    const FloatLanes x(a), y(b);
    return lanes_of<uint16_t, __m512bh>([&](int i) { return to_bf16(i < 16 ? y.at[i] : x.at[i - 16]); });
}
TRIPTYCH_CALLED __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
    const FloatLanes sum(sums);
    const Lanes<uint16_t, __m512bh> x(a), y(b);
    return floats_of([&](int i) {
        const float upper = flushed_fma(from_bf16(x.at[2 * i + 1]), from_bf16(y.at[2 * i + 1]), sum.at[i]);
        return flushed_fma(from_bf16(x.at[2 * i]), from_bf16(y.at[2 * i]), upper);
    });
}

}  // namespace
}  // namespace triptych

#include "tiles.h"
