// Layout of weights and rows for the microkernel.
//
// Include isa.h before.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "microkernel.h"

namespace triptych {
namespace {

constexpr int64_t kTileRows = 16;                // of a register of AMX
constexpr int64_t kTileBytes = 64 * kTileRows;  // of one; the size of what may be read after a chunk in tiles

enum class WeightKind : int { kBf16 = 0, kFp32 = 1, kInt8 = 2 };

// Layout of rows for a product: units of the microkernel; bf16 widened to fp32, the second of each pair first; or, for
// AMX, unchanged, or tile by tile if there are many.
enum class RowForm { kUnits, kWide, kTiles };

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

    int64_t num_panels() const { return (out_features + kPanelColumns - 1) / kPanelColumns; }
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
    // With the form in which num_rows rows are multiplied; results have the same bits.
    PackedWeight for_rows(int64_t num_rows) const {
        PackedWeight weight = *this;
        if (form == RowForm::kUnits && !rows_are_fp32 && widens_rows(num_rows)) {
            weight.form = RowForm::kWide;
        }
        return weight;
    }
    int64_t row_bytes() const { return in_features * (rows_are_fp32 ? 4 : 2); }
};

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

// At most 16 rows of a chunk in the layout of the product, at `out`.
inline void lay_rows(const PackedWeight& weight, const char* const* rows, int num_rows, uint32_t* out) {
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
