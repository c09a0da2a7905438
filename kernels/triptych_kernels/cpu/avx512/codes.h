// Weights of codes for 32 registers of sixteen numbers: codes become bf16 pairs, or fp32, by look-ups in registers.
//
// Include isa.h before.
#pragma once

#include <cstdint>

#include "weights.h"

namespace triptych {
namespace {

// Eight codes of a column in 32 bits, see code4_shift. table: sixteen fp32, each a bf16 too.
template <bool kRowsAreFp32>
struct Codes4 : PlainRows {
    static constexpr int64_t kStep = kUnitBytes;
    static constexpr int kNumbers = 8;                     // of a column in a step
    static constexpr int kParts = kRowsAreFp32 ? 8 : 4;  // of a step: units of a row
    Words numbers;

    explicit Codes4(const uint8_t* table) {
        const Floats sixteen = load(reinterpret_cast<const float*>(table));
        // An index has five bits, so the table is there twice.
        numbers = kRowsAreFp32 ? as_words(sixteen) : _mm512_broadcast_i64x4(narrow_floats(sixteen));
    }
    template <int part>
    TRIPTYCH_INLINE void load_part(const char* step, Words (&lanes)[kVectors]) const {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
            const Words codes = load_words(step + 64 * v);
            if constexpr (kRowsAreFp32) {
                const Words shifted = _mm512_srli_epi32(codes, code4_shift(part));
                lanes[v] = as_words(_mm512_permutexvar_ps(shifted, as_floats(numbers)));
            } else {
                lanes[v] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * part), numbers);
            }
        }
    }
    TRIPTYCH_INLINE Floats add_product(Floats sum, Words x, Words w) const {
        return kRowsAreFp32 ? fmadd(as_floats(x), as_floats(w), sum) : add_pair_products(sum, x, w);
    }
};

// Pairs of codes of 8 bits, in the order of Int8Pairs: a sign, and the index of a magnitude. table: of 128 magnitudes
// in bf16 the low bytes, then the high bytes.
template <bool kRowsAreFp32>
struct Codes8 : PlainRows {
    static constexpr int64_t kStep = kInt8UnitBytes;
    static constexpr int kNumbers = 2;
    static constexpr int kParts = kRowsAreFp32 ? 2 : 1;
    Int8Pairs pairs;

    explicit Codes8(const uint8_t* table) : pairs(table) {}
    template <int part>
    TRIPTYCH_INLINE void load_part(const char* step, Words (&lanes)[kVectors]) const {
        pairs.load(step, 0, lanes);
        if constexpr (kRowsAreFp32) {
            const Words upper = splat_word(static_cast<int>(0xFFFF0000u));
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) {
                lanes[v] = part == 0 ? _mm512_slli_epi32(lanes[v], 16) : both(lanes[v], upper);
            }
        }
    }
    TRIPTYCH_INLINE Floats add_product(Floats sum, Words x, Words w) const {
        return kRowsAreFp32 ? fmadd(as_floats(x), as_floats(w), sum) : add_pair_products(sum, x, w);
    }
};

// What a code stands for; for rows of int8, the number that is multiplied.
inline float number_of_code4(const uint8_t* table, int code) { return reinterpret_cast<const float*>(table)[code]; }
inline float number_of_code8(const uint8_t* table, int code) {
    const int magnitude = code & 127;
    const auto bits = static_cast<uint32_t>(table[magnitude] | table[128 + magnitude] << 8 | (code & 128) << 8) << 16;
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
}
inline int whole_of_code4(const uint8_t* table, int code) { return table[code]; }
inline int whole_of_code8(int code) { return code; }

// Of rows of int8, bytes that are multiplied as unsigned numbers.
struct BytesForInt8 : Int8Rows {
    TRIPTYCH_INLINE WordSums add_product(WordSums sum, Words x, Words w) const {
        return (WordSums)_mm512_dpbusd_epi32((Words)sum, w, x);
    }
};

// Eight codes of a column in 32 bits. table: sixteen bytes.
struct Codes4ForInt8 : BytesForInt8 {
    static constexpr int64_t kStep = kUnitBytes;
    static constexpr int kNumbers = 8;
    static constexpr int kParts = 2;
    Words bytes;

    // An index has six bits, so the table is there four times.
    explicit Codes4ForInt8(const uint8_t* table)
        : bytes(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)))) {}
    template <int part>
    TRIPTYCH_INLINE void load_part(const char* step, Words (&lanes)[kVectors]) const {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
            lanes[v] = _mm512_permutexvar_epi8(_mm512_srli_epi32(load_words(step + 64 * v), 4 * part), bytes);
        }
    }
};

// Sixteen codes of a column: the lower 4 bits of eight and eight in 32 bits each, then the upper 2 of all.
struct Codes6ForInt8 : BytesForInt8 {
    static constexpr int64_t kStep = 3 * kUnitBytes;
    static constexpr int kNumbers = 16;
    static constexpr int kParts = 4;

    explicit Codes6ForInt8(const uint8_t*) {}
    template <int part>
    TRIPTYCH_INLINE void load_part(const char* step, Words (&lanes)[kVectors]) const {
        const Words lower = _mm512_set1_epi8(15), all = _mm512_set1_epi8(63);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
            const Words low = _mm512_srli_epi32(load_words(step + part / 2 * kUnitBytes + 64 * v), part % 2 * 4);
            const Words upper = load_words(step + 2 * kUnitBytes + 64 * v);
            const Words high = part < 3 ? _mm512_slli_epi32(upper, part < 3 ? 4 - 2 * part : 0)
                                        : _mm512_srli_epi32(upper, 2);
            // 0xCA: lower ? low : high.
            lanes[v] = both(_mm512_ternarylogic_epi32(lower, low, high, 0xCA), all);
        }
    }
};

// Four codes of a column, themselves the bytes.
struct Codes8ForInt8 : BytesForInt8 {
    static constexpr int64_t kStep = kUnitBytes;
    static constexpr int kNumbers = 4;
    static constexpr int kParts = 1;

    explicit Codes8ForInt8(const uint8_t*) {}
    template <int part>
    TRIPTYCH_INLINE void load_part(const char* step, Words (&lanes)[kVectors]) const {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
            lanes[v] = load_words(step + 64 * v);
        }
    }
};

}  // namespace
}  // namespace triptych
