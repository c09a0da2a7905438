// Sixteen floats at a time: exp, log, tanh, functions of gates, and loads and stores of bf16 and fp32 rows.
//
// Products and sums that must round separately use `mul`, which no compiler fuses with an addition: a result must not
// depend on which of two inlined copies of a loop was contracted. Include isa.h before. Knows no tensors.
#pragma once

#include <cstdint>

namespace triptych {
namespace {

inline Mask first_lanes(int64_t count) {
    return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<Mask>((1u << count) - 1);
}

// e^x to about one unit in the last place; NaN stays NaN, below -104 it is exactly 0, above 89 infinity.
// Source: Cephes expf (Moshier), degree 5 after reduction by ln 2 in two parts.
inline Floats exp16(Floats x) {
    // min and max return their second operand when one is NaN.
    x = max(splat(-110.0f), x);
    x = min(splat(90.0f), x);
    const Floats n = to_nearest(mul(x, splat(1.44269504088896341f)));
    Floats r = fnmadd(n, splat(0.693359375f), x);
    r = fnmadd(n, splat(-2.12194440e-4f), r);
    Floats y = fmadd(r, splat(1.9875691500e-4f), splat(1.3981999507e-3f));
    y = fmadd(y, r, splat(8.3334519073e-3f));
    y = fmadd(y, r, splat(4.1665795894e-2f));
    y = fmadd(y, r, splat(1.6666665459e-1f));
    y = fmadd(y, r, splat(5.0000001201e-1f));
    y = fmadd(y, mul(r, r), r);
    return scale_from(splat(-104.0f), x, add(y, splat(1.0f)), n);
}

// e^x for x up to 0, with relative error 1e-5: enough for results that are rounded to bf16, and half the work.
// Otherwise as exp16.
// Source: 2^f as a polynomial of least relative error over [-1/2, 1/2] that is 1 at 0.
inline Floats coarse_exp16(Floats x) {
    const Floats t = max(splat(-160.0f), mul(x, splat(1.44269504088896341f)));
    const Floats n = to_nearest(t);
    const Floats f = sub(t, n);
    Floats y = fmadd(f, splat(9.582852457e-3f), splat(5.590642641e-2f));
    y = fmadd(y, f, splat(2.402409864e-1f));
    y = fmadd(y, f, splat(6.931241932e-1f));
    return scale_from(splat(-150.0f), t, fmadd(y, f, splat(1.0f)), n);
}

// ln(1 + x) for x from 0 to 1, to about one unit in the last place; NaN stays NaN.
// Source: Cephes logf (Moshier), with the logarithm of (1 + x) / 2 where 1 + x is above the root of 2.
inline Floats log1p16(Floats x) {
    const Floats border = splat(0.41421356f), half = mul(sub(x, splat(1.0f)), splat(0.5f));
    const Floats r = where_at_least(x, border, half, x), z = mul(r, r);
    Floats y = fmadd(r, splat(7.0376836292e-2f), splat(-1.1514610310e-1f));
    y = fmadd(y, r, splat(1.1676998740e-1f));
    y = fmadd(y, r, splat(-1.2420140846e-1f));
    y = fmadd(y, r, splat(1.4249322787e-1f));
    y = fmadd(y, r, splat(-1.6668057665e-1f));
    y = fmadd(y, r, splat(2.0000714765e-1f));
    y = fmadd(y, r, splat(-2.4999993993e-1f));
    y = fmadd(y, r, splat(3.3333331174e-1f));
    y = mul(mul(y, r), z);
    const Floats scale = where_at_least(x, border, splat(1.0f), zeros());
    y = fmadd(scale, splat(-2.12194440e-4f), y);
    y = fnmadd(splat(0.5f), z, y);
    return fmadd(scale, splat(0.693359375f), add(r, y));
}

// tanh(x). Source: Cephes tanhf (Moshier): a polynomial below 0.625, 1 - 2 / (e^2|x| + 1) above.
inline Floats tanh16(Floats x) {
    const Floats one = splat(1.0f), z = mul(x, x);
    Floats y = fmadd(z, splat(-5.70498872745e-3f), splat(2.06390887954e-2f));
    y = fmadd(y, z, splat(-5.37397155531e-2f));
    y = fmadd(y, z, splat(1.33314422036e-1f));
    y = fmadd(y, z, splat(-3.33332819422e-1f));
    y = fmadd(mul(y, z), x, x);
    const Floats size = absolute(x);
    const Floats grown = add(exp16(add(size, size)), one);
    const Floats far = sub(one, div(splat(2.0f), grown));
    const Words sign = both(as_words(x), splat_word(INT32_MIN));
    const Floats signed_far = as_floats(either(as_words(far), sign));
    return where_at_least(size, splat(0.625f), signed_far, y);
}

// The t with which gelu(x), in its approximation by tanh, is x / (1 + e^-t).
// Source: Hendrycks and Gimpel 2016, section 2, with 1 + tanh(t / 2) = 2 / (1 + e^-t).
TRIPTYCH_INLINE Floats gelu_exponent(Floats x) {
    const Floats t = mul(x, fmadd(mul(x, x), splat(7.13548163e-2f), splat(1.59576912f)));
    // Below, gelu(x) is less than 1e-24: 0 instead of a denormal, which products of bf16 would take for 0.
    return where_at_least(t, splat(-60.0f), t, splat(-200.0f));
}

// x times the standard normal distribution up to x, with an error of at most 3e-7, relative above 1; NaN stays NaN.
// Source: Abramowitz and Stegun 1964, 7.1.26, for the part beyond |x|.
TRIPTYCH_INLINE Floats gelu16(Floats x) {
    const Floats one = splat(1.0f), size = mul(absolute(x), splat(0.70710678f));
    const Floats t = div(one, fmadd(size, splat(0.3275911f), one));
    Floats y = fmadd(t, splat(1.061405429f), splat(-1.453152027f));
    y = fmadd(y, t, splat(1.421413741f));
    y = fmadd(y, t, splat(-0.284496736f));
    y = fmadd(y, t, splat(0.254829592f));
    const Floats beyond = mul(mul(mul(y, t), splat(0.5f)), exp16(sub(zeros(), mul(size, size))));
    // Infinity times nothing would not be a number.
    const Floats part = mul(min(splat(100.0f), x), beyond);
    return where_at_least(x, zeros(), sub(x, part), part);
}

// Instead of a mask: all sixteen lanes. A masked store is slow to read back; a loop over whole vectors needs none.
struct AllLanes {};

// body(i, lanes) for vectors at 0, 16, ... of a row.
template <class Body>
inline void for_vectors(int64_t width, const Body& body) {
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) body(i, AllLanes());
    if (i < width) body(i, first_lanes(width - i));
}

// The differences between the two dtypes in loops over rows.
struct Fp32 {
    using Element = float;
    static Floats load(const float* from, AllLanes = {}) { return triptych::load(from); }
    static Floats load(const float* from, Mask mask) { return triptych::load_part(mask, from); }
    static void store(float* to, Floats x) { triptych::store(to, x); }
    static void store(float* to, AllLanes, Floats x) { triptych::store(to, x); }
    static void store(float* to, Mask mask, Floats x) { store_part(to, mask, x); }
    static Floats rounded(Floats x) { return x; }
    // x / (1 + e^-t).
    TRIPTYCH_INLINE static Floats times_sigmoid(Floats x, Floats t) {
        const Floats decay = exp16(sub(zeros(), t));
        return div(x, add(splat(1.0f), decay));
    }
};

struct Bf16 {
    using Element = uint16_t;
    static Floats widen(Halves x) { return widen_halves(x); }
    static Halves narrow(Floats x) { return narrow_floats(x); }
    static Floats load(const uint16_t* from, AllLanes = {}) { return widen(load_halves(from)); }
    static Floats load(const uint16_t* from, Mask mask) { return widen(load_halves_part(mask, from)); }
    static void store(uint16_t* to, Floats x) { store_halves(to, narrow(x)); }
    static void store(uint16_t* to, AllLanes, Floats x) { store(to, x); }
    static void store(uint16_t* to, Mask mask, Floats x) { store_halves_part(to, mask, narrow(x)); }
    static Floats rounded(Floats x) { return widen(narrow(x)); }
    // x / (1 + e^-t) with relative error 1e-5, by e^-|t|, which cannot overflow: for negative t numerator and
    // denominator are multiplied by it.
    TRIPTYCH_INLINE static Floats times_sigmoid(Floats x, Floats t) {
        const Floats one = splat(1.0f);
        const Floats decay = coarse_exp16(either(t, splat(-0.0f)));
        const Floats share = where_signed(t, decay, one);
        return div(mul(x, share), add(decay, one));
    }
};

// What is made of a gate and its up. The numbers are those of elementwise.py and experts.py.
enum class Gate : int { kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2, kSigmoid = 3 };

// The function of a gate by which its up is multiplied, of silu and gelu.
template <class Kind>
TRIPTYCH_INLINE Floats activated(Gate kind, Floats gate) {
    return Kind::times_sigmoid(gate, kind == Gate::kSilu ? gate : gelu_exponent(gate));
}

// gate * sigmoid(1.702 gate) * (up + 1), gates up to 7, ups from -7 to 7; NaN stays NaN.
// Source: OpenAI 2025, gpt-oss, torch/model.py: swiglu.
template <class Kind>
TRIPTYCH_INLINE Floats clamped_swiglu(Floats gate, Floats up) {
    const Floats limit = splat(7.0f);
    gate = min(limit, gate);
    up = min(limit, max(splat(-7.0f), up));
    return mul(Kind::times_sigmoid(gate, mul(gate, splat(1.702f))), add(up, splat(1.0f)));
}

}  // namespace
}  // namespace triptych
