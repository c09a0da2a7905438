// The largest of each row of x W^T, found while a tile's sums are still in registers: for most rows of a step nothing
// else is needed, and then their products are never written.
//
// Include isa.h before.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "microkernel.h"

namespace triptych {
namespace {

// Of one row, over the columns seen so far. NaN, with an arbitrary token, once a column had NaN.
struct Largest {
    float value = -std::numeric_limits<float>::infinity();
    int32_t column = 0;

    // Columns [first, first + 16) where mask is set; they follow those seen before.
    void see(int64_t first, Floats values, Mask mask) {
        const Mask raising = is_above_or_nan(mask, values, splat(value));
        // Nothing is above NaN.
        if (raising == 0 || std::isnan(value)) {
            return;
        }
        const bool has_nan = is_nan(mask, values) != 0;
        const float highest =
            has_nan ? std::numeric_limits<float>::quiet_NaN() : highest_lane(mask, values);
        const Mask equal = is_equal(mask, values, splat(highest));
        column = static_cast<int32_t>(first + (equal == 0 ? 0 : __builtin_ctz(equal)));
        value = highest;
    }
    // The result of another thread for columns that follow these.
    void see(const Largest& later) {
        if (!std::isnan(value) && !(later.value <= value)) {
            *this = later;
        }
    }
};

// For the sums of a tile that raise some row's largest: few do, once a row has seen some columns.
[[gnu::noinline]] void see_tile(Largest* largest, int num_rows, int64_t first_column, int64_t num_columns,
                                const float* values, int64_t width) {
    for (int r = 0; r < num_rows; ++r) {
        for (int64_t i = 0; i < width && first_column + i < num_columns; i += 16) {
            const int64_t left = num_columns - first_column - i;
            const Mask mask = left >= 16 ? 0xFFFF : static_cast<Mask>((1u << left) - 1);
            largest[r].see(first_column + i, load(values + r * width + i), mask);
        }
    }
}

// The store of a finished tile (see gemm.h) that finds the largest of each row, and writes the rows that are kept.
struct KeepLargest {
    const float* bias;    // padded to whole panels, or null
    const float* scales;  // the same, of int8 weights
    float* out;           // [kept rows, num_columns]
    int64_t num_columns;
    const int32_t* out_row_of;  // the row's index in `out`, below 0: not kept; null: no row is kept
    Largest* largest;         // of the task's rows

    template <int R, int P>
    TRIPTYCH_INLINE void prefetch(int64_t first_row, int64_t panel) const {
        if (out_row_of == nullptr) {
            return;
        }
        for (int r = 0; r < R; ++r) {
            if (out_row_of[first_row + r] >= 0) {
                const float* to = out + out_row_of[first_row + r] * num_columns + panel * kPanelColumns;
                for (int p = 0; p < kVectors * P; ++p) {
                    __builtin_prefetch(to + 16 * p, 1);
                }
            }
        }
    }

    template <int R, int P>
    TRIPTYCH_INLINE void operator()(int64_t first_row, int64_t panel, const Floats (&sums)[R][kVectors * P]) const {
        Floats values[R][kVectors * P];
        unsigned raising = 0;
        const int64_t first_column = panel * kPanelColumns;
#pragma GCC unroll 8
        for (int j = 0; j < kVectors * P; ++j) {
            const int64_t column = first_column + 16 * j;
            const int64_t left = num_columns - column;
            const Mask mask =
                left >= 16 ? 0xFFFF : left <= 0 ? 0 : static_cast<Mask>((1u << left) - 1);
            const Floats shift = bias == nullptr ? zeros() : load(bias + column);
            const Floats scale = scales == nullptr ? splat(1.0f) : load(scales + column);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                values[r][j] = fmadd(sums[r][j], scale, shift);
                const Floats highest = splat(largest[first_row + r].value);
                raising |= is_above_or_nan(mask, values[r][j], highest);
                if (out_row_of != nullptr && out_row_of[first_row + r] >= 0) {
                    store_part(out + out_row_of[first_row + r] * num_columns + column, mask, values[r][j]);
                }
            }
        }
        if (raising != 0) {
            // Stored first, so that nothing has to stay in a register across the call.
            alignas(64) float stored[R * kPanelColumns * P];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
                for (int j = 0; j < kVectors * P; ++j) {
                    store(stored + kPanelColumns * P * r + 16 * j, values[r][j]);
                }
            }
            see_tile(largest + first_row, R, first_column, num_columns, stored, kPanelColumns * P);
        }
    }
};

}  // namespace
}  // namespace triptych
