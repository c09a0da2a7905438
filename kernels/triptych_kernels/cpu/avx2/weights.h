// Layout of weights for 16 registers of eight numbers, and the product of a unit: bf16 and int8 numbers are widened to
// fp32 when they are read, rows in advance.
//
// Include isa.h before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace triptych {
namespace {

constexpr int kPanelColumns = 16;
constexpr int kVectors = 1;             // of a panel's columns
constexpr int64_t kUnitBytes = 64;      // of a panel, 16 columns of 32 bits
constexpr int64_t kInt8UnitBytes = 32;  // the same pair of rows in int8
constexpr int64_t kUnitsPerStep = 1;    // panels of pairs are not padded
constexpr bool kHasTiles = false;       // of AMX
constexpr int kUnroll = 1;              // of loops over units
constexpr int kPanelsLoaded = 1;        // neighbouring panels at a time

constexpr int kMaxTileRows = 6;  // twelve registers of sums
#define TRIPTYCH_EACH_TILE_ROWS(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
// Panels per tile for a number of rows: enough sums to hide the latency of a multiply-add.
constexpr int panels_at_once(int num_rows) { return num_rows == 1 ? 4 : num_rows <= 3 ? 2 : 1; }

inline bool widens_rows(int64_t) { return true; }

// Compilers reorder the operations of a tile's sums so that more registers are needed than exist. These cannot be
// reordered. The upper or the lower of each pair of bf16 numbers, as fp32:
TRIPTYCH_INLINE __m256i upper_of(const __m256i* pairs) {
    alignas(32) static constexpr uint32_t kUpper[8] = {0xFFFF0000, 0xFFFF0000, 0xFFFF0000, 0xFFFF0000,
                                                       0xFFFF0000, 0xFFFF0000, 0xFFFF0000, 0xFFFF0000};
    __m256i upper;
    asm volatile("vmovdqu %1, %0\n\tvpand %2, %0, %0" : "=x"(upper) : "m"(*pairs), "m"(kUpper));
    return upper;
}
TRIPTYCH_INLINE __m256i lower_of(const __m256i* pairs) {
    __m256i lower;
    asm volatile("vmovdqu %1, %0\n\tvpslld $16, %0, %0" : "=x"(lower) : "m"(*pairs));
    return lower;
}
TRIPTYCH_INLINE Floats add_in_place(Floats sum, Words x, Words w) {
    asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum.low) : "x"(x.low), "x"(w.low));
    asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum.high) : "x"(x.high), "x"(w.high));
    return sum;
}

// Pairs of bf16, the second first, as AVX-512 multiplies them.
struct Bf16Pairs {
    static constexpr int64_t kStep = kUnitBytes;
    static constexpr int kRowUnits = 2;

    TRIPTYCH_INLINE void load(const char* unit, int part, Words (&lanes)[kVectors]) const {
        const auto* pairs = reinterpret_cast<const __m256i*>(unit);
        lanes[0] = part == 0 ? Words{upper_of(pairs), upper_of(pairs + 1)}
                             : Words{lower_of(pairs), lower_of(pairs + 1)};
    }
    TRIPTYCH_INLINE Floats add_product(Floats sum, Words x, Words w) const { return add_in_place(sum, x, w); }
};

// Sixteen sums plus the products of pairs of bf16, the second first.
TRIPTYCH_INLINE Floats add_pair_products(Floats sum, Words x, Words w) {
    const Words upper = splat_word(static_cast<int32_t>(0xFFFF0000u));
    const auto lower = [](Words pairs) {
        return as_floats(Words{_mm256_slli_epi32(pairs.low, 16), _mm256_slli_epi32(pairs.high, 16)});
    };
    return fmadd(lower(x), lower(w), fmadd(as_floats(both(x, upper)), as_floats(both(w, upper)), sum));
}

struct Fp32Units {
    static constexpr int64_t kStep = kUnitBytes;
    static constexpr int kRowUnits = 1;

    TRIPTYCH_INLINE void load(const char* unit, int, Words (&lanes)[kVectors]) const { lanes[0] = load_words(unit); }
    TRIPTYCH_INLINE Floats add_product(Floats sum, Words x, Words w) const { return add_in_place(sum, x, w); }
};

// Pairs of int8: sixteen columns' first numbers, then their second. The second is multiplied first if rows are bf16.
template <bool kSecondFirst>
struct Int8Pairs {
    static constexpr int64_t kStep = kInt8UnitBytes;
    static constexpr int kRowUnits = 2;

    TRIPTYCH_INLINE void load(const char* unit, int part, Words (&lanes)[kVectors]) const {
        const char* from = unit + 16 * ((part == 0) == kSecondFirst ? 1 : 0);
        lanes[0] = as_words(Floats{widened(from), widened(from + 8)});
    }
    TRIPTYCH_INLINE Floats add_product(Floats sum, Words x, Words w) const { return add_in_place(sum, x, w); }

private:
    TRIPTYCH_INLINE static __m256 widened(const char* from) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
    }
};

// Unit u of row r is stored to out[u * out_stride + r], for rows of row_bytes bytes each; units beyond are zero.
inline void pack_rows(const char* const* rows, int num_rows, int64_t row_bytes, int64_t num_units, uint32_t* out,
                      int64_t out_stride) {
    const int64_t whole = row_bytes / 4;
    for (int r = 0; r < num_rows; ++r) {
        for (int64_t unit = 0; unit < whole; ++unit) {
            std::memcpy(out + unit * out_stride + r, rows[r] + 4 * unit, 4);
        }
        if (whole < num_units) {
            uint32_t last = 0;
            std::memcpy(&last, rows[r] + 4 * whole, row_bytes - 4 * whole);
            out[whole * out_stride + r] = last;
        }
        for (int64_t unit = whole + 1; unit < num_units; ++unit) {
            out[unit * out_stride + r] = 0;
        }
    }
}

// Rows of bf16 as 2 num_pairs units of fp32 each, the second of each pair first.
inline void pack_wide_rows(const char* const* rows, int num_rows, int64_t row_bytes, int64_t num_pairs, uint32_t* out) {
    const int64_t whole = row_bytes / 4;
    for (int r = 0; r < num_rows; ++r) {
        uint32_t* to = out + r;
        for (int64_t pair = 0; pair < num_pairs; ++pair, to += 2 * num_rows) {
            uint32_t units = 0;
            std::memcpy(&units, rows[r] + 4 * pair, pair < whole ? 4 : row_bytes - 4 * whole);
            to[0] = units & 0xFFFF0000u;
            to[num_rows] = units << 16;
        }
    }
}

// The first `count` columns of a panel, at least one.
using PanelMask = Mask;
TRIPTYCH_INLINE PanelMask panel_mask(int64_t count) {
    return count >= kPanelColumns ? Mask{0xFFFF} : static_cast<Mask>((1u << count) - 1);
}
TRIPTYCH_INLINE void store_panel(uint16_t* to, PanelMask mask, const Floats (&values)[kVectors]) {
    mask == 0xFFFF ? store_halves(to, narrow_floats(values[0])) : store_halves_part(to, mask, narrow_floats(values[0]));
}
TRIPTYCH_INLINE void store_panel(float* to, PanelMask mask, const Floats (&values)[kVectors]) {
    mask == 0xFFFF ? store(to, values[0]) : store_part(to, mask, values[0]);
}

// Where a panel of pairs of bytes has byte k of a column.
inline int64_t byte_of_pairs(int column, int64_t k) { return k / 2 * kInt8UnitBytes + k % 2 * 16 + column; }
// Stores number k of a column into a panel of int8 pairs.
inline void put_int8(char* panel, int column, int64_t k, int value) {
    panel[byte_of_pairs(column, k)] = static_cast<char>(value);
}

}  // namespace
}  // namespace triptych
