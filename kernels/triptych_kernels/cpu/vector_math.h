// Sixteen floats at a time: exp, tanh, and loads and stores of bf16 and fp32 rows.
//
// Products and sums that must round apart go through `mul`, which no compiler fuses with an addition: a
// result must not depend on which of two inlined copies of a loop was contracted. Include it last, as avx512.h, which
// it includes. Knows no tensors.
#pragma once

#include <cstdint>

#include "avx512.h"

#ifdef TRIPTYCH_AVX512

namespace triptych {

static inline __m512 mul(__m512 a, __m512 b) { return _mm512_mul_round_ps(a, b, _MM_FROUND_CUR_DIRECTION); }

static inline __mmask16 first_lanes(int64_t count) {
    return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

// y 2^n, exactly 0 in the lanes that are not kept. A result that is too small takes the CPU 25 times as long, and
// hidden places have nothing else.
static inline __m512 scaled(__mmask16 kept, __m512 y, __m512 n) { return _mm512_maskz_scalef_ps(kept, y, n); }

// e^x to about one unit in the last place; NaN stays NaN, below -104 it is exactly 0, above 89 infinity.
// Source: Cephes expf (Moshier), degree 5 after reduction by ln 2 in two parts.
static inline __m512 exp16(__m512 x) {
    // min and max return their second operand when one is NaN.
    x = _mm512_max_ps(_mm512_set1_ps(-110.0f), x);
    x = _mm512_min_ps(_mm512_set1_ps(90.0f), x);
    const __m512 n = _mm512_roundscale_ps(mul(x, _mm512_set1_ps(1.44269504088896341f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 y = _mm512_fmadd_ps(r, _mm512_set1_ps(1.9875691500e-4f), _mm512_set1_ps(1.3981999507e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(8.3334519073e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(4.1665795894e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.6666665459e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.0000001201e-1f));
    y = _mm512_fmadd_ps(y, mul(r, r), r);
    const __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-104.0f), _CMP_NLE_UQ);
    return scaled(kept, _mm512_add_ps(y, _mm512_set1_ps(1.0f)), n);
}

// e^x for x up to 0, to 1e-5 of it: enough for what is then rounded to bf16, and half the work. As exp16 in all else.
// Source: 2^f as a polynomial of least relative error over [-1/2, 1/2] that is 1 at 0.
static inline __m512 coarse_exp16(__m512 x) {
    const __m512 t = _mm512_max_ps(_mm512_set1_ps(-160.0f), mul(x, _mm512_set1_ps(1.44269504088896341f)));
    const __m512 n = _mm512_roundscale_ps(t, 8);
    const __m512 f = _mm512_sub_ps(t, n);
    __m512 y = _mm512_fmadd_ps(f, _mm512_set1_ps(9.582852457e-3f), _mm512_set1_ps(5.590642641e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.402409864e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.931241932e-1f));
    const __mmask16 kept = _mm512_cmp_ps_mask(t, _mm512_set1_ps(-150.0f), _CMP_NLE_UQ);
    return scaled(kept, _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f)), n);
}

// tanh(x). Source: Cephes tanhf (Moshier): a polynomial below 0.625, 1 - 2 / (e^2|x| + 1) above.
static inline __m512 tanh16(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f), z = mul(x, x);
    __m512 y = _mm512_fmadd_ps(z, _mm512_set1_ps(-5.70498872745e-3f), _mm512_set1_ps(2.06390887954e-2f));
    y = _mm512_fmadd_ps(y, z, _mm512_set1_ps(-5.37397155531e-2f));
    y = _mm512_fmadd_ps(y, z, _mm512_set1_ps(1.33314422036e-1f));
    y = _mm512_fmadd_ps(y, z, _mm512_set1_ps(-3.33332819422e-1f));
    y = _mm512_fmadd_ps(mul(y, z), x, x);
    const __m512 size = _mm512_abs_ps(x);
    const __m512 grown = _mm512_add_ps(exp16(_mm512_add_ps(size, size)), one);
    const __m512 far = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), grown));
    const __m512i sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MIN));
    const __m512 signed_far = _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(far), sign));
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(size, _mm512_set1_ps(0.625f), _CMP_GE_OQ), y, signed_far);
}

// In place of a mask: all sixteen. A masked store is slow to read back, a loop of whole vectors does without.
struct AllLanes {};

// body(i, lanes) for vectors at 0, 16, ... of a row.
template <class Body>
static inline void for_vectors(int64_t width, const Body& body) {
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) body(i, AllLanes());
    if (i < width) body(i, first_lanes(width - i));
}

// What differs between the two dtypes in loops over rows.
struct Fp32 {
    using Element = float;
    static __m512 load(const float* from, AllLanes = {}) { return _mm512_loadu_ps(from); }
    static __m512 load(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }
    static void store(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
    static void store(float* to, AllLanes, __m512 x) { store(to, x); }
    static void store(float* to, __mmask16 mask, __m512 x) { _mm512_mask_storeu_ps(to, mask, x); }
    static __m512 rounded(__m512 x) { return x; }
    // gate / (1 + e^-gate).
    static __m512 silu(__m512 gate) {
        const __m512 decay = exp16(_mm512_sub_ps(_mm512_setzero_ps(), gate));
        return _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), decay));
    }
};

struct Bf16 {
    using Element = uint16_t;
    static __m512 widen(__m256i x) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
    }
    static __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
    static __m512 load(const uint16_t* from, AllLanes = {}) {
        return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
    static __m512 load(const uint16_t* from, __mmask16 mask) {
        return widen(_mm256_maskz_loadu_epi16(mask, from));
    }
    static void store(uint16_t* to, __m512 x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(x));
    }
    static void store(uint16_t* to, AllLanes, __m512 x) { store(to, x); }
    static void store(uint16_t* to, __mmask16 mask, __m512 x) { _mm256_mask_storeu_epi16(to, mask, narrow(x)); }
    static __m512 rounded(__m512 x) { return widen(narrow(x)); }
    // gate / (1 + e^-gate) to 1e-5 of it, by e^-|gate|, which cannot overflow: times it above and below the line where
    // the gate is negative.
    static __m512 silu(__m512 gate) {
        const __m512 one = _mm512_set1_ps(1.0f);
        const __m512 decay = coarse_exp16(_mm512_or_ps(gate, _mm512_set1_ps(-0.0f)));
        const __mmask16 is_negative = _mm512_movepi32_mask(_mm512_castps_si512(gate));
        const __m512 share = _mm512_mask_mov_ps(one, is_negative, decay);
        return _mm512_div_ps(mul(gate, share), _mm512_add_ps(decay, one));
    }
};

}  // namespace triptych

#endif
