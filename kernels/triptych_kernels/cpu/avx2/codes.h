// Weights of codes for 16 registers of eight numbers: codes are whole numbers, and become fp32 when they are read.
//
// Include isa.h before.
#pragma once

#include <cstdint>

#include "weights.h"

namespace triptych {
namespace {

// Eight codes of a column in 32 bits, see code4_shift: numbers from -8 to 7. If rows are bf16, the second of each pair is
// multiplied first.
template <bool kRowsAreFp32>
struct Codes4 : PlainRows {
    static constexpr int64_t kStep = kUnitBytes;
    static constexpr int kNumbers = 8;  // of a column in a step
    static constexpr int kParts = 8;    // of a step: units of a row

    explicit Codes4(const uint8_t*) {}
    template <int part>
    TRIPTYCH_INLINE void load_part(const char* step, Words (&lanes)[kVectors]) const {
        constexpr int kLeft = 28 - code4_shift(kRowsAreFp32 ? part : part ^ 1);
        const auto* codes = reinterpret_cast<const __m256i*>(step);
        lanes[0] = {widened<kLeft>(codes), widened<kLeft>(codes + 1)};
    }
    TRIPTYCH_INLINE Floats add_product(Floats sum, Words x, Words w) const { return add_in_place(sum, x, w); }

private:
    // In one piece, as in weights.h.
    template <int kLeft>
    TRIPTYCH_INLINE static __m256i widened(const __m256i* codes) {
        __m256i numbers;
        asm volatile("vmovdqu %1, %0\n\tvpslld %2, %0, %0\n\tvpsrad $28, %0, %0\n\tvcvtdq2ps %0, %0"
                     : "=x"(numbers)
                     : "m"(*codes), "i"(kLeft));
        return numbers;
    }
};

// Pairs of codes of 8 bits: numbers from -128 to 127.
template <bool kRowsAreFp32>
struct Codes8 : PlainRows {
    static constexpr int64_t kStep = kInt8UnitBytes;
    static constexpr int kNumbers = 2;
    static constexpr int kParts = 2;
    Int8Pairs<!kRowsAreFp32> pairs;

    explicit Codes8(const uint8_t*) {}
    template <int part>
    TRIPTYCH_INLINE void load_part(const char* step, Words (&lanes)[kVectors]) const {
        pairs.load(step, part, lanes);
    }
    TRIPTYCH_INLINE Floats add_product(Floats sum, Words x, Words w) const { return add_in_place(sum, x, w); }
};

// What a code stands for; for rows of int8, the number that is multiplied.
inline float number_of_code4(const uint8_t*, int code) { return static_cast<float>(code < 8 ? code : code - 16); }
inline float number_of_code8(const uint8_t*, int code) { return static_cast<float>(static_cast<int8_t>(code)); }
inline int whole_of_code4(const uint8_t*, int code) { return code; }
inline int whole_of_code8(int code) { return static_cast<int8_t>(code); }

// sum + the four products of a lane's bytes, those of a without sign. Two of them must add up to at most 15 bits.
TRIPTYCH_INLINE __m256i add_byte_products(__m256i sum, __m256i a, __m256i b) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
}

// Of rows of int8, eight codes of a column in 32 bits: numbers from 0 to 15.
struct Codes4ForInt8 : Int8Rows {
    static constexpr int64_t kStep = kUnitBytes;
    static constexpr int kNumbers = 8;
    static constexpr int kParts = 2;

    explicit Codes4ForInt8(const uint8_t*) {}
    template <int part>
    TRIPTYCH_INLINE void load_part(const char* step, Words (&lanes)[kVectors]) const {
        const __m256i lower = _mm256_set1_epi8(15);
        const Words codes = load_words(step);
        lanes[0] = {_mm256_and_si256(_mm256_srli_epi32(codes.low, 4 * part), lower),
                    _mm256_and_si256(_mm256_srli_epi32(codes.high, 4 * part), lower)};
    }
    TRIPTYCH_INLINE Words add_product(Words sum, Words x, Words w) const {
        return {add_byte_products(sum.low, w.low, x.low), add_byte_products(sum.high, w.high, x.high)};
    }
};

// Of rows of int8, sixteen codes of a column: the lower 4 bits of eight and eight in 32 bits each, then the upper 2 of
// all: numbers from 0 to 63.
struct Codes6ForInt8 : Int8Rows {
    static constexpr int64_t kStep = 3 * kUnitBytes;
    static constexpr int kNumbers = 16;
    static constexpr int kParts = 4;

    explicit Codes6ForInt8(const uint8_t*) {}
    template <int part>
    TRIPTYCH_INLINE void load_part(const char* step, Words (&lanes)[kVectors]) const {
        const Words low = load_words(step + part / 2 * kUnitBytes), upper = load_words(step + 2 * kUnitBytes);
        lanes[0] = {joined<part>(low.low, upper.low), joined<part>(low.high, upper.high)};
    }
    TRIPTYCH_INLINE Words add_product(Words sum, Words x, Words w) const {
        return {add_byte_products(sum.low, w.low, x.low), add_byte_products(sum.high, w.high, x.high)};
    }

private:
    template <int part>
    TRIPTYCH_INLINE static __m256i joined(__m256i low, __m256i upper) {
        const __m256i high =
            part < 3 ? _mm256_slli_epi32(upper, part < 3 ? 4 - 2 * part : 0) : _mm256_srli_epi32(upper, 2);
        return _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(low, part % 2 * 4), _mm256_set1_epi8(0x0F)),
                               _mm256_and_si256(high, _mm256_set1_epi8(0x30)));
    }
};

// Of rows of int8, four codes of a column: numbers from -128 to 127. Only one factor may have a sign.
struct Codes8ForInt8 : Int8Rows {
    static constexpr int64_t kStep = kUnitBytes;
    static constexpr int kNumbers = 4;
    static constexpr int kParts = 1;

    explicit Codes8ForInt8(const uint8_t*) {}
    template <int part>
    TRIPTYCH_INLINE void load_part(const char* step, Words (&lanes)[kVectors]) const {
        lanes[0] = load_words(step);
    }
    TRIPTYCH_INLINE Words add_product(Words sum, Words x, Words w) const {
        return {add_signed_products(sum.low, w.low, x.low), add_signed_products(sum.high, w.high, x.high)};
    }

private:
    TRIPTYCH_INLINE static __m256i add_signed_products(__m256i sum, __m256i w, __m256i x) {
        return add_byte_products(sum, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    }
};

}  // namespace
}  // namespace triptych
