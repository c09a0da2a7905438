// How weights and rows lie for the microkernel.
//
// Include avx512.h before.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "microkernel.h"

namespace triptych {

enum class WeightKind : int { kBf16 = 0, kFp32 = 1, kInt8 = 2 };

// How rows are laid for a product: as units of the microkernel; bf16 widened to fp32, of each pair the second first;
// or, for AMX, as they are.
enum class RowForm { kUnits, kWide, kTiles };

// On Intel's CPUs a product of bf16 pairs takes twice as long as two of fp32, and is the same as these, the
// second of a pair first: many rows are worth widening.
inline bool has_slow_pairs() {
    static const bool is_intel = __builtin_cpu_is("intel") != 0;
    return is_intel;
}
constexpr int64_t kWideRows = 32;

// A weight [out_features, in_features] as panels, 64-byte aligned; padding is zero.
struct PackedWeight {
    const char* panels;
    int64_t in_features, out_features;
    WeightKind kind;
    bool rows_are_fp32;  // what it multiplies; bf16 otherwise
    RowForm form;        // kWide and kTiles of bf16 rows alone

    int64_t num_panels() const { return (out_features + 31) / 32; }
    int64_t panel_bytes() const {
        return kind == WeightKind::kFp32 ? in_features * kUnitBytes
                                         : padded_pairs() * (kind == WeightKind::kBf16 ? kUnitBytes : kInt8UnitBytes);
    }
    // Units of a packed row.
    int64_t num_units() const {
        const int64_t pairs = (in_features + 1) / 2;
        if (!rows_are_fp32) {
            return form == RowForm::kTiles ? padded_pairs() : form == RowForm::kWide ? 2 * pairs : pairs;
        }
        return kind == WeightKind::kInt8 ? 2 * pairs : in_features;
    }
    int64_t padded_pairs() const { return ((in_features + 1) / 2 + kUnitsPerStep - 1) / kUnitsPerStep * kUnitsPerStep; }
    // With the form that so many rows are multiplied in; results have the same bits.
    PackedWeight for_rows(int64_t num_rows) const {
        PackedWeight weight = *this;
        if (form == RowForm::kUnits && !rows_are_fp32 && num_rows >= kWideRows && has_slow_pairs()) {
            weight.form = RowForm::kWide;
        }
        return weight;
    }
    int64_t row_bytes() const { return in_features * (rows_are_fp32 ? 4 : 2); }
};

namespace {

// bf16(0) to bf16(127): the low bytes, then the high ones.
struct Bf16ByteTables {
    uint8_t bytes[2][128];

    constexpr Bf16ByteTables() : bytes{} {
        for (int value = 1; value < 128; ++value) {
            int exponent = 0;
            while ((value >> (exponent + 1)) != 0) {
                ++exponent;
            }
            const int bits = ((127 + exponent) << 7) | ((value << (7 - exponent)) & 0x7F);
            bytes[0][value] = static_cast<uint8_t>(bits & 0xFF);
            bytes[1][value] = static_cast<uint8_t>(bits >> 8);
        }
    }
};
constexpr Bf16ByteTables kBf16Tables;

// 16 x 16 lanes of 32 bits, rows to columns.
TRIPTYCH_INLINE void transpose(__m512i (&lanes)[16]) {
    __m512i half[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 4) {
        const __m512i low = _mm512_unpacklo_epi32(lanes[i], lanes[i + 1]);
        const __m512i high = _mm512_unpackhi_epi32(lanes[i], lanes[i + 1]);
        const __m512i next_low = _mm512_unpacklo_epi32(lanes[i + 2], lanes[i + 3]);
        const __m512i next_high = _mm512_unpackhi_epi32(lanes[i + 2], lanes[i + 3]);
        half[i] = _mm512_unpacklo_epi64(low, next_low);
        half[i + 1] = _mm512_unpackhi_epi64(low, next_low);
        half[i + 2] = _mm512_unpacklo_epi64(high, next_high);
        half[i + 3] = _mm512_unpackhi_epi64(high, next_high);
    }
    // half[4 g + c]: in 128-bit lane q, column 4 q + c of rows 4 g to 4 g + 3.
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const __m512i first = _mm512_shuffle_i32x4(half[c], half[4 + c], 0x88);
        const __m512i second = _mm512_shuffle_i32x4(half[c], half[4 + c], 0xDD);
        const __m512i third = _mm512_shuffle_i32x4(half[8 + c], half[12 + c], 0x88);
        const __m512i fourth = _mm512_shuffle_i32x4(half[8 + c], half[12 + c], 0xDD);
        lanes[c] = _mm512_shuffle_i32x4(first, third, 0x88);
        lanes[4 + c] = _mm512_shuffle_i32x4(second, fourth, 0x88);
        lanes[8 + c] = _mm512_shuffle_i32x4(first, third, 0xDD);
        lanes[12 + c] = _mm512_shuffle_i32x4(second, fourth, 0xDD);
    }
}

// Unit u of row r goes to out[u * out_stride + r], for at most 16 rows of row_bytes bytes each; units beyond
// are zero.
inline void pack_rows(const char* const* rows, int num_rows, int64_t row_bytes, int64_t num_units,
                      uint32_t* out, int64_t out_stride) {
    const __mmask16 stored = static_cast<__mmask16>((1u << num_rows) - 1);
    for (int64_t first = 0; first < num_units; first += 16) {
        const int64_t units = num_units - first < 16 ? num_units - first : 16;
        const int64_t bytes = row_bytes - 4 * first < 64 ? row_bytes - 4 * first : 64;
        const __mmask64 loaded = bytes >= 64 ? ~__mmask64{0} : (__mmask64{1} << (bytes < 0 ? 0 : bytes)) - 1;
        __m512i lanes[16];
        for (int r = 0; r < 16; ++r) {
            lanes[r] =
                r < num_rows ? _mm512_maskz_loadu_epi8(loaded, rows[r] + 4 * first) : _mm512_setzero_si512();
        }
        transpose(lanes);
        for (int64_t unit = 0; unit < units; ++unit) {
            _mm512_mask_storeu_epi32(out + (first + unit) * out_stride, stored, lanes[unit]);
        }
    }
}

// Pairs [num_pairs][num_rows] of bf16 as twice as many units of fp32; at most 16 rows.
inline void widen_rows(const uint32_t* pairs, int64_t num_pairs, int num_rows, uint32_t* out) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    const __mmask16 mask = static_cast<__mmask16>((1u << num_rows) - 1);
    for (int64_t pair = 0; pair < num_pairs; ++pair, pairs += num_rows, out += 2 * num_rows) {
        const __m512i both = _mm512_maskz_loadu_epi32(mask, pairs);
        _mm512_mask_storeu_epi32(out, mask, _mm512_and_si512(both, upper));
        _mm512_mask_storeu_epi32(out + num_rows, mask, _mm512_slli_epi32(both, 16));
    }
}

// At most 16 rows of a chunk as the weight is multiplied with them, at `out`.
inline void lay_rows(const PackedWeight& weight, const char* const* rows, int num_rows, uint32_t* out) {
    if (weight.form == RowForm::kUnits) {
        return pack_rows(rows, num_rows, weight.row_bytes(), weight.num_units(), out, num_rows);
    }
    if (weight.form == RowForm::kWide) {
        const int64_t num_pairs = weight.num_units() / 2;
        uint32_t* pairs = out + num_pairs * num_rows;  // read before they are written over
        pack_rows(rows, num_rows, weight.row_bytes(), num_pairs, pairs, num_rows);
        return widen_rows(pairs, num_pairs, num_rows, out);
    }
    const int64_t used = weight.row_bytes(), padded = weight.num_units() * 4;
    for (int r = 0; r < num_rows; ++r) {
        char* row = reinterpret_cast<char*>(out) + r * padded;
        std::memcpy(row, rows[r], used);
        std::memset(row + used, 0, padded - used);
    }
}

// Units of int8 pairs as units of bf16 pairs.
inline void widen_to_bf16(const Int8Pairs& pairs, const char* units, int64_t num_units, char* wide) {
    for (int64_t unit = 0; unit < num_units; ++unit) {
        __m512i lanes[2];
        pairs.load(units + unit * kInt8UnitBytes, lanes);
        _mm_prefetch(units + unit * kInt8UnitBytes + 4096, _MM_HINT_T0);
        _mm512_store_si512(wide + unit * kUnitBytes, lanes[0]);
        _mm512_store_si512(wide + unit * kUnitBytes + 64, lanes[1]);
    }
}

// A panel of pairs as a panel of fp32, two units a pair, with kSecondFirst the second in front.
template <bool kSecondFirst, class Pairs>
inline void widen_to_fp32(const Pairs& pairs, const char* panel, int64_t num_pairs, char* wide) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        __m512i lanes[2];
        pairs.load(panel + pair * Pairs::kStep, lanes);
        _mm_prefetch(panel + pair * Pairs::kStep + 2048, _MM_HINT_T0);
        char* first = wide + (2 * pair + (kSecondFirst ? 1 : 0)) * kUnitBytes;
        char* second = wide + (2 * pair + (kSecondFirst ? 0 : 1)) * kUnitBytes;
        for (int half = 0; half < 2; ++half) {
            _mm512_store_si512(first + 64 * half, _mm512_slli_epi32(lanes[half], 16));
            _mm512_store_si512(second + 64 * half, _mm512_and_si512(lanes[half], upper));
        }
    }
}

}  // namespace
}  // namespace triptych
