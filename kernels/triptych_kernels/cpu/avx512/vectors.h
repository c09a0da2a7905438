// Sixteen numbers of 32 bits at a time, in one register; see avx2/vectors.h for the same in two.
//
// Include isa.h for it.
#pragma once

#include <cstdint>

namespace triptych {
namespace {

using Floats = __m512;
using Words = __m512i;
using Halves = __m256i;  // sixteen numbers of 16 bits
using Mask = __mmask16;  // one bit a lane, the first lane's the lowest

TRIPTYCH_INLINE Floats zeros() { return _mm512_setzero_ps(); }
TRIPTYCH_INLINE Floats splat(float x) { return _mm512_set1_ps(x); }
TRIPTYCH_INLINE Words splat_word(int32_t x) { return _mm512_set1_epi32(x); }
TRIPTYCH_INLINE Floats as_floats(Words x) { return _mm512_castsi512_ps(x); }
TRIPTYCH_INLINE Words as_words(Floats x) { return _mm512_castps_si512(x); }

// Lanes without a bit are zero, or keep their value in memory.
TRIPTYCH_INLINE Floats load(const float* from) { return _mm512_loadu_ps(from); }
TRIPTYCH_INLINE Floats load_part(Mask mask, const float* from) { return _mm512_maskz_loadu_ps(mask, from); }
TRIPTYCH_INLINE void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
TRIPTYCH_INLINE void store_part(float* to, Mask mask, Floats x) { _mm512_mask_storeu_ps(to, mask, x); }
TRIPTYCH_INLINE Words load_words(const void* from) { return _mm512_loadu_si512(from); }
TRIPTYCH_INLINE void store_words(void* to, Words x) { _mm512_storeu_si512(to, x); }
TRIPTYCH_INLINE Halves load_halves(const uint16_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
TRIPTYCH_INLINE Halves load_halves_part(Mask mask, const uint16_t* from) {
    return _mm256_maskz_loadu_epi16(mask, from);
}
TRIPTYCH_INLINE void store_halves(uint16_t* to, Halves x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
}
TRIPTYCH_INLINE void store_halves_part(uint16_t* to, Mask mask, Halves x) { _mm256_mask_storeu_epi16(to, mask, x); }

TRIPTYCH_INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
TRIPTYCH_INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
TRIPTYCH_INLINE Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
// A product that no compiler fuses with an addition.
TRIPTYCH_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_round_ps(a, b, _MM_FROUND_CUR_DIRECTION); }
TRIPTYCH_INLINE Floats fmadd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
TRIPTYCH_INLINE Floats fnmadd(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
// The second operand if one is NaN.
TRIPTYCH_INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
TRIPTYCH_INLINE Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
TRIPTYCH_INLINE Floats absolute(Floats x) { return _mm512_abs_ps(x); }
TRIPTYCH_INLINE Floats to_nearest(Floats x) { return _mm512_roundscale_ps(x, 8); }
TRIPTYCH_INLINE Floats either(Floats a, Floats b) { return _mm512_or_ps(a, b); }
TRIPTYCH_INLINE Words either(Words a, Words b) { return _mm512_or_si512(a, b); }
TRIPTYCH_INLINE Words both(Words a, Words b) { return _mm512_and_si512(a, b); }
// y 2^n where x is above limit, or NaN; exactly 0 elsewhere. Denormal results take the CPU 25 times as long.
TRIPTYCH_INLINE Floats scale_from(Floats limit, Floats x, Floats y, Floats n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLE_UQ), y, n);
}

TRIPTYCH_INLINE Mask is_above_or_nan(Mask mask, Floats a, Floats b) {
    return _mm512_mask_cmp_ps_mask(mask, a, b, _CMP_NLE_UQ);
}
TRIPTYCH_INLINE Mask is_equal(Mask mask, Floats a, Floats b) {
    return _mm512_mask_cmp_ps_mask(mask, a, b, _CMP_EQ_OQ);
}
TRIPTYCH_INLINE Mask is_nan(Mask mask, Floats x) { return _mm512_mask_cmp_ps_mask(mask, x, x, _CMP_UNORD_Q); }
TRIPTYCH_INLINE Mask is_nan(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
// Where a is b at least, x; else y.
TRIPTYCH_INLINE Floats where_at_least(Floats a, Floats b, Floats x, Floats y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), y, x);
}
// Where x has a minus sign, y; else z.
TRIPTYCH_INLINE Floats where_signed(Floats x, Floats y, Floats z) {
    return _mm512_mask_mov_ps(z, _mm512_movepi32_mask(as_words(x)), y);
}
TRIPTYCH_INLINE Floats where(Mask mask, Floats x, Floats y) { return _mm512_mask_mov_ps(y, mask, x); }
// The maximum of two, the second where the mask has no bit.
TRIPTYCH_INLINE Floats max_part(Mask mask, Floats a, Floats b) { return _mm512_mask_max_ps(b, mask, a, b); }

TRIPTYCH_INLINE float first_lane(Floats x) { return _mm512_cvtss_f32(x); }
TRIPTYCH_INLINE float sum_of_lanes(Floats x) { return _mm512_reduce_add_ps(x); }
TRIPTYCH_INLINE float highest_lane(Floats x) { return _mm512_reduce_max_ps(x); }
TRIPTYCH_INLINE float highest_lane(Mask mask, Floats x) { return _mm512_mask_reduce_max_ps(mask, x); }

TRIPTYCH_INLINE Floats widen_halves(Halves x) {
    return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
// Of pairs of bf16, the first and the second.
TRIPTYCH_INLINE Floats lower_halves(Words x) { return as_floats(_mm512_slli_epi32(x, 16)); }
TRIPTYCH_INLINE Floats upper_halves(Words x) { return as_floats(both(x, splat_word(static_cast<int>(0xFFFF0000u)))); }
// Whole numbers from -128 to 127.
TRIPTYCH_INLINE void store_int8(int8_t* to, Floats x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
// In the type of instructions that add to them: with another, compilers copy registers.
using WordSums = int32_t __attribute__((vector_size(64)));
TRIPTYCH_INLINE Words as_words(WordSums x) { return (Words)x; }
TRIPTYCH_INLINE Words add(Words a, Words b) { return _mm512_add_epi32(a, b); }
TRIPTYCH_INLINE Floats to_floats(Words x) { return _mm512_cvtepi32_ps(x); }
TRIPTYCH_INLINE Halves narrow_floats(Floats x) { return (__m256i)_mm512_cvtneps_pbh(x); }
// Of fp16.
TRIPTYCH_INLINE Floats widen_fp16(Halves x) { return _mm512_cvtph_ps(x); }

}  // namespace
}  // namespace triptych
