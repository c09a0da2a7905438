// Layout of weights for 32 registers of sixteen numbers, and the product of a unit.
//
// Include isa.h before.
#pragma once

#include <cstddef>
#include <cstdint>

namespace triptych {
namespace {

constexpr int kPanelColumns = 32;
constexpr int kVectors = 2;             // of a panel's columns
constexpr int64_t kUnitBytes = 128;     // of a panel, 32 columns of 32 bits
constexpr int64_t kInt8UnitBytes = 64;  // the same pair of rows in int8
constexpr int64_t kUnitsPerStep = 16;   // panels of pairs are padded to a multiple of it, for amx.h
constexpr bool kHasTiles = true;        // see amx.h
constexpr int kUnroll = 2;              // of loops over units
constexpr int kPanelsLoaded = 4;        // neighbouring panels at a time

constexpr int kMaxTileRows = 12;
#define TRIPTYCH_EACH_TILE_ROWS(CASE) \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
// Panels per tile for a number of rows: enough sums to hide the latency of a multiply-add.
constexpr int panels_at_once(int num_rows) { return num_rows == 1 ? 4 : num_rows <= 6 ? 2 : 1; }

// On Intel's CPUs a product of bf16 pairs takes twice as long as two of fp32, and has the same result as these, the
// second of a pair first: for many rows widening is faster.
inline bool has_slow_pairs() {
    static const bool is_intel = __builtin_cpu_is("intel") != 0;
    return is_intel;
}
constexpr int64_t kWideRows = 32;
inline bool widens_rows(int64_t num_rows) { return num_rows >= kWideRows && has_slow_pairs(); }

// Pairs of bf16, accumulated in fp32.
struct Bf16Pairs {
    static constexpr int64_t kStep = kUnitBytes;
    static constexpr int kRowUnits = 1;

    TRIPTYCH_INLINE void load(const char* unit, int, Words (&lanes)[kVectors]) const {
        lanes[0] = load_words(unit);
        lanes[1] = load_words(unit + 64);
    }
    TRIPTYCH_INLINE Floats add_product(Floats sum, Words x, Words w) const {
        return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
    }
};

struct Fp32Units {
    static constexpr int64_t kStep = kUnitBytes;
    static constexpr int kRowUnits = 1;

    TRIPTYCH_INLINE void load(const char* unit, int, Words (&lanes)[kVectors]) const {
        lanes[0] = load_words(unit);
        lanes[1] = load_words(unit + 64);
    }
    TRIPTYCH_INLINE Floats add_product(Floats sum, Words x, Words w) const {
        return fmadd(as_floats(x), as_floats(w), sum);
    }
};

// Sixteen sums plus the products of pairs of bf16.
TRIPTYCH_INLINE Floats add_pair_products(Floats sum, Words x, Words w) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
}

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

// Pairs of int8, stored as sign and magnitude, widened to the bf16 of the same value by two table look-ups.
struct Int8Pairs {
    static constexpr int64_t kStep = kInt8UnitBytes;
    static constexpr int kRowUnits = 1;
    Words low[2], high[2];

    // table: the low bytes of the bf16 of 128 magnitudes, then their high bytes; of 0 to 127.
    explicit Int8Pairs(const uint8_t* table = kBf16Tables.bytes[0]) {
        for (int half = 0; half < 2; ++half) {
            low[half] = load_words(table + 64 * half);
            high[half] = load_words(table + 128 + 64 * half);
        }
    }
    TRIPTYCH_INLINE void load(const char* unit, int, Words (&lanes)[kVectors]) const {
        const Words packed = load_words(unit);
        const Words low_bytes = _mm512_permutex2var_epi8(low[0], packed, low[1]);
        const Words magnitudes = _mm512_permutex2var_epi8(high[0], packed, high[1]);
        // 0xEA: magnitudes | (packed & sign).
        const Words high_bytes =
            _mm512_ternarylogic_epi32(packed, _mm512_set1_epi8(static_cast<char>(0x80)), magnitudes, 0xEA);
        lanes[0] = _mm512_unpacklo_epi8(low_bytes, high_bytes);
        lanes[1] = _mm512_unpackhi_epi8(low_bytes, high_bytes);
    }
    TRIPTYCH_INLINE Floats add_product(Floats sum, Words x, Words w) const {
        return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
    }
};

// 16 x 16 lanes of 32 bits, rows to columns.
TRIPTYCH_INLINE void transpose(Words (&lanes)[16]) {
    Words half[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 4) {
        const Words low = _mm512_unpacklo_epi32(lanes[i], lanes[i + 1]);
        const Words high = _mm512_unpackhi_epi32(lanes[i], lanes[i + 1]);
        const Words next_low = _mm512_unpacklo_epi32(lanes[i + 2], lanes[i + 3]);
        const Words next_high = _mm512_unpackhi_epi32(lanes[i + 2], lanes[i + 3]);
        half[i] = _mm512_unpacklo_epi64(low, next_low);
        half[i + 1] = _mm512_unpackhi_epi64(low, next_low);
        half[i + 2] = _mm512_unpacklo_epi64(high, next_high);
        half[i + 3] = _mm512_unpackhi_epi64(high, next_high);
    }
    // half[4 g + c]: in 128-bit lane q, column 4 q + c of rows 4 g to 4 g + 3.
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const Words first = _mm512_shuffle_i32x4(half[c], half[4 + c], 0x88);
        const Words second = _mm512_shuffle_i32x4(half[c], half[4 + c], 0xDD);
        const Words third = _mm512_shuffle_i32x4(half[8 + c], half[12 + c], 0x88);
        const Words fourth = _mm512_shuffle_i32x4(half[8 + c], half[12 + c], 0xDD);
        lanes[c] = _mm512_shuffle_i32x4(first, third, 0x88);
        lanes[4 + c] = _mm512_shuffle_i32x4(second, fourth, 0x88);
        lanes[8 + c] = _mm512_shuffle_i32x4(first, third, 0xDD);
        lanes[12 + c] = _mm512_shuffle_i32x4(second, fourth, 0xDD);
    }
}

// Unit u of row r is stored to out[u * out_stride + r], for at most 16 rows of row_bytes bytes each; units beyond are
// zero.
inline void pack_rows(const char* const* rows, int num_rows, int64_t row_bytes, int64_t num_units,
                      uint32_t* out, int64_t out_stride) {
    const Mask stored = static_cast<Mask>((1u << num_rows) - 1);
    for (int64_t first = 0; first < num_units; first += 16) {
        const int64_t units = num_units - first < 16 ? num_units - first : 16;
        const int64_t bytes = row_bytes - 4 * first < 64 ? row_bytes - 4 * first : 64;
        const __mmask64 loaded = bytes >= 64 ? ~__mmask64{0} : (__mmask64{1} << (bytes < 0 ? 0 : bytes)) - 1;
        Words lanes[16];
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
    const Words upper = splat_word(static_cast<int>(0xFFFF0000u));
    const Mask mask = static_cast<Mask>((1u << num_rows) - 1);
    for (int64_t pair = 0; pair < num_pairs; ++pair, pairs += num_rows, out += 2 * num_rows) {
        const Words pair_of = _mm512_maskz_loadu_epi32(mask, pairs);
        _mm512_mask_storeu_epi32(out, mask, both(pair_of, upper));
        _mm512_mask_storeu_epi32(out + num_rows, mask, _mm512_slli_epi32(pair_of, 16));
    }
}

// Rows of bf16 as 2 num_pairs units of fp32 each, the second of each pair first; at most 16.
inline void pack_wide_rows(const char* const* rows, int num_rows, int64_t row_bytes, int64_t num_pairs, uint32_t* out) {
    uint32_t* pairs = out + num_pairs * num_rows;  // read before they are overwritten
    pack_rows(rows, num_rows, row_bytes, num_pairs, pairs, num_rows);
    widen_rows(pairs, num_pairs, num_rows, out);
}

// The first `count` columns of a panel, at least one.
using PanelMask = __mmask32;
TRIPTYCH_INLINE PanelMask panel_mask(int64_t count) {
    return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
}
TRIPTYCH_INLINE void store_panel(uint16_t* to, PanelMask mask, const Floats (&values)[kVectors]) {
    _mm512_mask_storeu_epi16(to, mask, (__m512i)_mm512_cvtne2ps_pbh(values[1], values[0]));
}
TRIPTYCH_INLINE void store_panel(float* to, PanelMask mask, const Floats (&values)[kVectors]) {
    store_part(to, static_cast<Mask>(mask), values[0]);
    store_part(to + 16, static_cast<Mask>(mask >> 16), values[1]);
}

// Where a panel of pairs of bytes has byte k of a column, so that widening leaves columns in order.
inline int64_t byte_of_pairs(int column, int64_t k) {
    const int offset = 16 * (column % 16 / 4) + 8 * (column / 16) + 2 * (column % 4);
    return k / 2 * kInt8UnitBytes + offset + k % 2;
}
// Stores number k of a column into a panel of int8 pairs.
inline void put_int8(char* panel, int column, int64_t k, int value) {
    panel[byte_of_pairs(column, k)] = static_cast<char>(value < 0 ? 0x80 | -value : value);
}

// Units of int8 pairs as units of bf16 pairs.
inline void widen_to_bf16(const Int8Pairs& pairs, const char* units, int64_t num_units, char* wide) {
    for (int64_t unit = 0; unit < num_units; ++unit) {
        Words lanes[2];
        pairs.load(units + unit * kInt8UnitBytes, 0, lanes);
        _mm_prefetch(units + unit * kInt8UnitBytes + 4096, _MM_HINT_T0);
        store_words(wide + unit * kUnitBytes, lanes[0]);
        store_words(wide + unit * kUnitBytes + 64, lanes[1]);
    }
}

// A panel of pairs as a panel of fp32, two units per pair, the second first with kSecondFirst.
template <bool kSecondFirst, class Pairs>
inline void widen_to_fp32(const Pairs& pairs, const char* panel, int64_t num_pairs, char* wide) {
    const Words upper = splat_word(static_cast<int>(0xFFFF0000u));
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        Words lanes[2];
        pairs.load(panel + pair * Pairs::kStep, 0, lanes);
        _mm_prefetch(panel + pair * Pairs::kStep + 2048, _MM_HINT_T0);
        char* first = wide + (2 * pair + (kSecondFirst ? 1 : 0)) * kUnitBytes;
        char* second = wide + (2 * pair + (kSecondFirst ? 0 : 1)) * kUnitBytes;
        for (int half = 0; half < 2; ++half) {
            store_words(first + 64 * half, _mm512_slli_epi32(lanes[half], 16));
            store_words(second + 64 * half, both(lanes[half], upper));
        }
    }
}

}  // namespace
}  // namespace triptych
