// Layout of weights and rows for the microkernel.
//
// Include isa.h before.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>

#include "microkernel.h"
#include "vector_math.h"

namespace triptych {
namespace {

constexpr int64_t kTileRows = 16;                // of a register of AMX
constexpr int64_t kTileBytes = 64 * kTileRows;  // of one; the size of what may be read after a chunk in tiles

// Codes of some bits, laid out for rows as they are, or for rows that are rounded to int8.
enum class WeightKind : int {
    kBf16 = 0,
    kFp32 = 1,
    kInt8 = 2,
    kCodes4 = 3,
    kCodes8 = 4,
    kCodes4ForInt8 = 5,
    kCodes6ForInt8 = 6,
    kCodes8ForInt8 = 7
};
// Of a code.
constexpr int bits_of(WeightKind kind) {
    return kind == WeightKind::kCodes4 || kind == WeightKind::kCodes4ForInt8 ? 4
           : kind == WeightKind::kCodes6ForInt8                              ? 6
                                                                             : 8;
}

// The groups of a weight of codes, see groups.h: a number is what its code stands for, times the scale of its input's
// group, minus the minimum of the group.
struct Groups {
    int64_t size = 0;                // inputs of a group, a multiple of kGroupSizeStep; 0: the weight has no codes
    bool has_minima = false;
    bool are_fp32 = false;           // scales and minima; fp16 otherwise
    const uint8_t* table = nullptr;  // what codes stand for, where kernels look it up
    int32_t base = 0;                // for rows of int8: how much more that is than what kernels multiply
    const int32_t* order = nullptr;  // the inputs in the order of the groups; null: in their own
};
constexpr int64_t kGroupSizeStep = 8;

// Layout of rows for a product: units of the microkernel; bf16 widened to fp32, the second of each pair first; for AMX,
// unchanged, or tile by tile if there are many; or rounded to int8, each group by a scale of its own.
enum class RowForm { kUnits, kWide, kTiles, kInt8 };

// with_amx: for bf16 rows only, and if there are kernels for it.
inline RowForm form_of_few_rows(bool rows_are_fp32, bool with_amx) {
    if (kHasTiles && with_amx) {
        return RowForm::kTiles;
    }
    return !rows_are_fp32 && widens_rows(1) ? RowForm::kWide : RowForm::kUnits;
}

// A weight [out_features, in_features] as panels, 64-byte aligned; padding is zero.
struct PackedWeight {
    const char* panels;
    int64_t in_features, out_features;
    WeightKind kind;
    bool rows_are_fp32;  // what it multiplies; bf16 otherwise
    RowForm form;        // kWide and kTiles for bf16 rows only
    Groups groups = {};

    int64_t num_panels() const { return (out_features + kPanelColumns - 1) / kPanelColumns; }
    bool has_groups() const { return groups.size != 0; }
    int64_t num_groups() const { return (in_features + groups.size - 1) / groups.size; }
    int64_t code_bytes() const { return groups.size * kPanelColumns * bits_of(kind) / 8; }
    int64_t scale_bytes() const { return kPanelColumns * (groups.are_fp32 ? 4 : 2); }  // as of minima
    // Of a panel: its codes, their scales, and their minima.
    int64_t group_bytes() const { return code_bytes() + scale_bytes() * (groups.has_minima ? 2 : 1); }
    int64_t panel_bytes() const {
        if (has_groups()) {
            return num_groups() * group_bytes();
        }
        return kind == WeightKind::kFp32 ? in_features * kUnitBytes
                                         : padded_pairs() * (kind == WeightKind::kBf16 ? kUnitBytes : kInt8UnitBytes);
    }
    // Units of a packed row.
    int64_t num_units() const {
        if (has_groups()) {
            return num_groups() * (units_of_group() + (form == RowForm::kInt8 ? 2 : 0) + (groups.has_minima ? 1 : 0));
        }
        const int64_t pairs = (in_features + 1) / 2;
        if (!rows_are_fp32) {
            return form == RowForm::kTiles ? padded_pairs() : form == RowForm::kWide ? 2 * pairs : pairs;
        }
        return kind == WeightKind::kInt8 ? 2 * pairs : in_features;
    }
    // Units of a group in a packed row; groups.h has the others.
    int64_t units_of_group() const {
        return form == RowForm::kInt8 ? groups.size / 4
                                      : rows_are_fp32 || form == RowForm::kWide ? groups.size : groups.size / 2;
    }
    int64_t padded_pairs() const { return ((in_features + 1) / 2 + kUnitsPerStep - 1) / kUnitsPerStep * kUnitsPerStep; }
    // With the form in which num_rows rows are multiplied; results have the same bits.
    PackedWeight for_rows(int64_t num_rows) const {
        PackedWeight weight = *this;
        if (form == RowForm::kUnits && !rows_are_fp32 && !has_groups() && widens_rows(num_rows)) {
            weight.form = RowForm::kWide;
        }
        return weight;
    }
    int64_t row_bytes() const { return in_features * (rows_are_fp32 ? 4 : 2); }
    // with_amx: whether products of bf16 are the matrix unit's; never those with codes.
    void set_rows(bool are_fp32, bool with_amx) {
        rows_are_fp32 = are_fp32;
        form = kind >= WeightKind::kCodes4ForInt8 ? RowForm::kInt8
                                                  : form_of_few_rows(are_fp32, with_amx && !has_groups());
    }
};

// Numbers that pass a weight's layout: kind, N, K; group size, whether there are minima, whether scales are fp32.
constexpr int kLayoutNumbers = 6;
inline PackedWeight layout_of(const int64_t* n) {
    const auto kind = static_cast<WeightKind>(n[0]);
    const Groups groups{n[3], n[4] != 0, n[5] != 0};
    return {nullptr, n[2], n[1], kind, kind == WeightKind::kFp32, RowForm::kUnits, groups};
}

constexpr int64_t kRowsAsTheyLie = 64;  // with more rows, packing pays off

// Whether a chunk of num_rows rows is packed tile by tile instead of being read in place.
inline bool lies_in_tiles(const PackedWeight& weight, int64_t num_rows) {
    return weight.form == RowForm::kTiles && num_rows > kRowsAsTheyLie;
}

// The rows of one register, number `group` of a chunk in tiles: 64 bytes of each row, then the next 64.
template <class RowAt>
inline void lay_tiles(const PackedWeight& weight, int64_t num_rows, int64_t group, const RowAt& row_at,
                      uint32_t* chunk) {
    constexpr int64_t kBytes = 64;
    const int64_t first = group * kTileRows, count = num_rows - first < kTileRows ? num_rows - first : kTileRows;
    const int64_t used = weight.row_bytes(), padded = weight.num_units() * 4;
    char* tile = reinterpret_cast<char*>(chunk) + first * padded;
    const char* rows[kTileRows];
    for (int64_t r = 0; r < count; ++r) {
        rows[r] = row_at(first + r);
    }
    for (int64_t at = 0; at < padded; at += kBytes) {
        for (int64_t r = 0; r < count; ++r, tile += kBytes) {
            if (at + kBytes <= used) {
                std::memcpy(tile, rows[r] + at, kBytes);
            } else {
                std::memset(tile, 0, kBytes);
                std::memcpy(tile, rows[r] + at, used - at);
            }
        }
    }
}

// Of each row the sum of the numbers of a group, which lie as [num_units][num_rows].
inline void sum_units(const uint32_t* units, int64_t num_units, int num_rows, bool are_pairs, uint32_t* out) {
    constexpr int kChains = 4;  // units in turn: one chain would wait for each addition
    const Mask lanes = static_cast<Mask>((1u << num_rows) - 1);
    const Words ones = splat_word(0x3F803F80);
    Floats sums[kChains] = {zeros(), zeros(), zeros(), zeros()};
    for (int64_t unit = 0; unit < num_units; unit += kChains) {
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c, units += num_rows) {
            const Floats numbers = load_part(lanes, reinterpret_cast<const float*>(units));
            sums[c] = are_pairs ? add_pair_products(sums[c], ones, as_words(numbers)) : add(sums[c], numbers);
        }
    }
    const Floats sum = add(add(sums[0], sums[1]), add(sums[2], sums[3]));
    store_part(reinterpret_cast<float*>(out), lanes, sum);
}

// Units [num_units][num_rows] of at most 16 rows of num_bytes bytes; those behind them are zero.
inline void lay_units(const char* const* rows, int num_rows, int64_t num_bytes, int64_t num_units, uint32_t* out) {
    if (num_rows > 1) {
        return pack_rows(rows, num_rows, num_bytes, num_units, out, num_rows);
    }
    std::memcpy(out, rows[0], num_bytes);
    std::memset(reinterpret_cast<char*>(out) + num_bytes, 0, 4 * num_units - num_bytes);
}

constexpr int64_t kMaxInt8Group = 128;  // inputs of a group, if rows are rounded to int8

// The numbers of a group of a row are whole numbers times the scale, which makes the largest 127 or -127.
struct RoundedGroup {
    float scale;  // 0 if all are too small for one; NaN if one is not finite
    float sum;    // of the whole numbers
};
// out: `count` whole numbers; up to 15 zeros may follow.
template <class Dtype>
inline RoundedGroup round_to_int8(const typename Dtype::Element* numbers, int64_t count, int8_t* out) {
    constexpr float kSmallest = 1e-30f;
    Floats largest = zeros();
    Mask nan = 0;
    for_vectors(count, [&](int64_t i, auto lanes) {
        const Floats x = Dtype::load(numbers + i, lanes);
        nan |= is_nan(x);
        largest = max(absolute(x), largest);
    });
    const float size = highest_lane(largest);
    const bool are_finite = nan == 0 && size <= std::numeric_limits<float>::max();
    if (!are_finite || size < kSmallest) {
        std::memset(out, 0, count);
        return {are_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN(), 0.0f};
    }
    const Floats scale = splat(127.0f / size);
    Floats sum = zeros();
    for_vectors(count, [&](int64_t i, auto lanes) {
        const Floats whole = to_nearest(mul(Dtype::load(numbers + i, lanes), scale));
        sum = add(sum, whole);
        store_int8(out + i, whole);
    });
    return {size / 127.0f, sum_of_lanes(sum)};
}

// At most 16 rows, rounded to int8: of each group its units of four whole numbers, their sums times the weight's base,
// the scales, and if the weight has minima, the sums of what the whole numbers stand for.
template <class Dtype>
inline void lay_rounded_groups(const PackedWeight& weight, const char* const* rows, int num_rows, uint32_t* out) {
    const int64_t size = weight.groups.size, num_units = size / 4;
    int8_t rounded[kTileRows * kMaxInt8Group + 16];
    for (int64_t first = 0; first < weight.in_features; first += size) {
        const int64_t count = std::min(size, weight.in_features - first);
        const char* parts[kTileRows];
        RoundedGroup groups[kTileRows];
        for (int r = 0; r < num_rows; ++r) {
            int8_t* to = rounded + r * size;
            const auto* numbers = reinterpret_cast<const typename Dtype::Element*>(rows[r]);
            groups[r] = round_to_int8<Dtype>(numbers + first, count, to);
            parts[r] = reinterpret_cast<const char*>(to);
        }
        lay_units(parts, num_rows, count, num_units, out);
        out += num_units * num_rows;
        for (int r = 0; r < num_rows; ++r) {
            const auto addend = static_cast<int32_t>(groups[r].sum) * weight.groups.base;
            const float sum = groups[r].scale * groups[r].sum;
            std::memcpy(out + r, &addend, 4);
            std::memcpy(out + num_rows + r, &groups[r].scale, 4);
            if (weight.groups.has_minima) {
                std::memcpy(out + 2 * num_rows + r, &sum, 4);
            }
        }
        out += (weight.groups.has_minima ? 3 : 2) * num_rows;
    }
}

// At most 16 rows for a weight of codes: of each group its units, then their sums if the weight has minima.
inline void lay_groups(const PackedWeight& weight, const char* const* rows, int num_rows, uint32_t* out) {
    const int64_t row_bytes = weight.row_bytes(), num_units = weight.units_of_group();
    const int64_t group_bytes = weight.groups.size * (weight.rows_are_fp32 ? 4 : 2);
    for (int64_t first = 0; first < row_bytes; first += group_bytes) {
        const int64_t num_bytes = std::min(group_bytes, row_bytes - first);
        const char* parts[kTileRows];
        for (int r = 0; r < num_rows; ++r) {
            parts[r] = rows[r] + first;
        }
        if (weight.form == RowForm::kWide) {
            const int64_t num_pairs = (num_bytes + 3) / 4;
            pack_wide_rows(parts, num_rows, num_bytes, num_pairs, out);
            std::memset(out + 2 * num_pairs * num_rows, 0, 4 * (num_units - 2 * num_pairs) * num_rows);
        } else {
            lay_units(parts, num_rows, num_bytes, num_units, out);
        }
        const uint32_t* units = out;
        out += num_units * num_rows;
        if (weight.groups.has_minima) {
            sum_units(units, num_units, num_rows, !weight.rows_are_fp32 && weight.form == RowForm::kUnits, out);
            out += num_rows;
        }
    }
}

// At most 16 rows of a chunk in the layout of the product, at `out`.
inline void lay_rows(const PackedWeight& weight, const char* const* rows, int num_rows, uint32_t* out) {
    if (weight.form == RowForm::kInt8) {
        return weight.rows_are_fp32 ? lay_rounded_groups<Fp32>(weight, rows, num_rows, out)
                                    : lay_rounded_groups<Bf16>(weight, rows, num_rows, out);
    }
    if (weight.has_groups()) {
        return lay_groups(weight, rows, num_rows, out);
    }
    if (weight.form == RowForm::kUnits) {
        return pack_rows(rows, num_rows, weight.row_bytes(), weight.num_units(), out, num_rows);
    }
    if (weight.form == RowForm::kWide) {
        return pack_wide_rows(rows, num_rows, weight.row_bytes(), weight.num_units() / 2, out);
    }
    const int64_t used = weight.row_bytes(), padded = weight.num_units() * 4;
    for (int r = 0; r < num_rows; ++r) {
        char* row = reinterpret_cast<char*>(out) + r * padded;
        std::memcpy(row, rows[r], used);
        std::memset(row + used, 0, padded - used);
    }
}

}  // namespace
}  // namespace triptych
