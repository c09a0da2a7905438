// Sixteen numbers of 32 bits at a time, in two registers; see avx512/vectors.h for the same in one.
//
// Include isa.h for it.
#pragma once

#include <cstdint>
#include <cstring>

namespace triptych {
namespace {

struct Floats {
    __m256 low, high;
};
struct Words {
    __m256i low, high;
};
using Halves = __m256i;  // sixteen numbers of 16 bits
using Mask = uint16_t;   // one bit a lane, the first lane's the lowest

TRIPTYCH_INLINE Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
TRIPTYCH_INLINE Floats splat(float x) {
    const __m256 lanes = _mm256_set1_ps(x);
    return {lanes, lanes};
}
TRIPTYCH_INLINE Words splat_word(int32_t x) {
    const __m256i lanes = _mm256_set1_epi32(x);
    return {lanes, lanes};
}
TRIPTYCH_INLINE Floats as_floats(Words x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
TRIPTYCH_INLINE Words as_words(Floats x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }

// All bits of the lanes that have one in the mask.
TRIPTYCH_INLINE Words lanes_of(Mask mask) {
    const __m256i bits = _mm256_set1_epi32(mask);
    const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), high = _mm256_slli_epi32(low, 8);
    return {_mm256_cmpeq_epi32(_mm256_and_si256(bits, low), low),
            _mm256_cmpeq_epi32(_mm256_and_si256(bits, high), high)};
}
TRIPTYCH_INLINE Mask mask_of(__m256 low, __m256 high) {
    return static_cast<Mask>(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8);
}

// Lanes without a bit are zero, or keep their value in memory.
TRIPTYCH_INLINE Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
TRIPTYCH_INLINE Floats load_part(Mask mask, const float* from) {
    const Words lanes = lanes_of(mask);
    return {_mm256_maskload_ps(from, lanes.low), _mm256_maskload_ps(from + 8, lanes.high)};
}
TRIPTYCH_INLINE void store(float* to, Floats x) {
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps(to + 8, x.high);
}
TRIPTYCH_INLINE void store_part(float* to, Mask mask, Floats x) {
    const Words lanes = lanes_of(mask);
    _mm256_maskstore_ps(to, lanes.low, x.low);
    _mm256_maskstore_ps(to + 8, lanes.high, x.high);
}
TRIPTYCH_INLINE Words load_words(const void* from) {
    const auto* vectors = static_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(vectors), _mm256_loadu_si256(vectors + 1)};
}
TRIPTYCH_INLINE void store_words(void* to, Words x) {
    auto* vectors = static_cast<__m256i*>(to);
    _mm256_storeu_si256(vectors, x.low);
    _mm256_storeu_si256(vectors + 1, x.high);
}
TRIPTYCH_INLINE Halves load_halves(const uint16_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
TRIPTYCH_INLINE void store_halves(uint16_t* to, Halves x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
}
// There are no masks for 16-bit lanes: memory beyond the last lane that has a bit is not accessed.
TRIPTYCH_INLINE Halves load_halves_part(Mask mask, const uint16_t* from) {
    alignas(32) uint16_t lanes[16] = {};
    std::memcpy(lanes, from, 2 * static_cast<size_t>(__builtin_popcount(mask)));
    return load_halves(lanes);
}
TRIPTYCH_INLINE void store_halves_part(uint16_t* to, Mask mask, Halves x) {
    alignas(32) uint16_t lanes[16];
    store_halves(lanes, x);
    std::memcpy(to, lanes, 2 * static_cast<size_t>(__builtin_popcount(mask)));
}

TRIPTYCH_INLINE Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
TRIPTYCH_INLINE Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
TRIPTYCH_INLINE Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
// A product that no compiler fuses with an addition.
TRIPTYCH_INLINE Floats mul(Floats a, Floats b) {
    Floats product{_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
    asm("" : "+x"(product.low), "+x"(product.high));
    return product;
}
TRIPTYCH_INLINE Floats fmadd(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
TRIPTYCH_INLINE Floats fnmadd(Floats a, Floats b, Floats c) {
    return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
// The second operand if one is NaN.
TRIPTYCH_INLINE Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
TRIPTYCH_INLINE Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
TRIPTYCH_INLINE Words both(Words a, Words b) {
    return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
TRIPTYCH_INLINE Words either(Words a, Words b) {
    return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
TRIPTYCH_INLINE Floats either(Floats a, Floats b) { return as_floats(either(as_words(a), as_words(b))); }
TRIPTYCH_INLINE Floats absolute(Floats x) { return as_floats(both(as_words(x), splat_word(INT32_MAX))); }
TRIPTYCH_INLINE Floats to_nearest(Floats x) {
    return {_mm256_round_ps(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
TRIPTYCH_INLINE __m256 scale_eight(__m256 limit, __m256 x, __m256 y, __m256 n) {
    // In two steps, because neither 2^-150 nor 2^130 is representable; the first is exact.
    const __m256i exponent = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(exponent, 1);
    const __m256i rest = _mm256_sub_epi32(exponent, half), bias = _mm256_set1_epi32(127);
    const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23);
    // Zeroed before, not after: denormal results take some CPUs 25 times as long.
    y = _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLE_UQ), y);
    return _mm256_mul_ps(_mm256_mul_ps(y, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second));
}
// y 2^n where x is above limit, or NaN; exactly 0 elsewhere. n: whole, within -200 and 200.
TRIPTYCH_INLINE Floats scale_from(Floats limit, Floats x, Floats y, Floats n) {
    return {scale_eight(limit.low, x.low, y.low, n.low), scale_eight(limit.high, x.high, y.high, n.high)};
}

TRIPTYCH_INLINE Mask is_above_or_nan(Mask mask, Floats a, Floats b) {
    return mask & mask_of(_mm256_cmp_ps(a.low, b.low, _CMP_NLE_UQ), _mm256_cmp_ps(a.high, b.high, _CMP_NLE_UQ));
}
TRIPTYCH_INLINE Mask is_equal(Mask mask, Floats a, Floats b) {
    return mask & mask_of(_mm256_cmp_ps(a.low, b.low, _CMP_EQ_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_EQ_OQ));
}
TRIPTYCH_INLINE Mask is_nan(Floats x) {
    return mask_of(_mm256_cmp_ps(x.low, x.low, _CMP_UNORD_Q), _mm256_cmp_ps(x.high, x.high, _CMP_UNORD_Q));
}
TRIPTYCH_INLINE Mask is_nan(Mask mask, Floats x) { return mask & is_nan(x); }
// Where a is b at least, x; else y.
TRIPTYCH_INLINE Floats where_at_least(Floats a, Floats b, Floats x, Floats y) {
    return {_mm256_blendv_ps(y.low, x.low, _mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ)),
            _mm256_blendv_ps(y.high, x.high, _mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ))};
}
// Where x has a minus sign, y; else z.
TRIPTYCH_INLINE Floats where_signed(Floats x, Floats y, Floats z) {
    return {_mm256_blendv_ps(z.low, y.low, x.low), _mm256_blendv_ps(z.high, y.high, x.high)};
}
TRIPTYCH_INLINE Floats where(Mask mask, Floats x, Floats y) { return where_signed(as_floats(lanes_of(mask)), x, y); }
// The maximum of two, the second where the mask has no bit.
TRIPTYCH_INLINE Floats max_part(Mask mask, Floats a, Floats b) { return where(mask, max(a, b), b); }

TRIPTYCH_INLINE float first_lane(Floats x) { return _mm256_cvtss_f32(x.low); }
// Adds halves until one lane remains: in the order of AVX-512's reduction.
TRIPTYCH_INLINE float sum_of_lanes(Floats x) {
    const __m256 eight = _mm256_add_ps(x.low, x.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
TRIPTYCH_INLINE float highest_lane(Floats x) {
    const __m256 eight = _mm256_max_ps(x.low, x.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
TRIPTYCH_INLINE float highest_lane(Mask mask, Floats x) {
    return highest_lane(where(mask, x, splat(-__builtin_inff())));
}

TRIPTYCH_INLINE Floats widen_halves(Halves x) {
    const __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(x));
    const __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1));
    return as_floats({_mm256_slli_epi32(low, 16), _mm256_slli_epi32(high, 16)});
}
// Of pairs of bf16, the first and the second.
TRIPTYCH_INLINE Floats lower_halves(Words x) {
    return as_floats({_mm256_slli_epi32(x.low, 16), _mm256_slli_epi32(x.high, 16)});
}
TRIPTYCH_INLINE Floats upper_halves(Words x) { return as_floats(both(x, splat_word(static_cast<int>(0xFFFF0000u)))); }
// To the nearest, ties to even; a NaN stays one. In the lower halves of lanes whose upper halves are zero.
TRIPTYCH_INLINE __m256i narrow_eight(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
}
using WordSums = Words;
TRIPTYCH_INLINE Words as_words(WordSums x) { return x; }
TRIPTYCH_INLINE Words add(Words a, Words b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
TRIPTYCH_INLINE Floats to_floats(Words x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
// Whole numbers from -128 to 127.
TRIPTYCH_INLINE void store_int8(int8_t* to, Floats x) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
    // Packed within each 128 bits, then in order.
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}
// Of fp16.
TRIPTYCH_INLINE Floats widen_fp16(Halves x) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
TRIPTYCH_INLINE Halves narrow_floats(Floats x) {
    // Packed within each 128 bits, then in order.
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow_eight(x.low), narrow_eight(x.high)), 0xD8);
}

}  // namespace
}  // namespace triptych
