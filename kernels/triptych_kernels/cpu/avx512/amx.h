// x W^T for packed weights on the matrix unit of a CPU with AMX: which tiles, in which order.
//
// A tile register holds 16 rows of 64 bytes. 16 units of half a panel, 32 by 16 weights, are one as they lie, and so
// are 32 numbers of 16 rows. Every output is one chain of such products along the inner dimension in order, whatever
// the number of rows: that is what makes results independent of the batch. They are others than the microkernel's,
// since the unit sums even and odd places of a tile apart.
//
// Include isa.h before.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../microkernel.h"
#include "../packing.h"
#include "../pool.h"

namespace triptych {
namespace {

constexpr int64_t kTileRowBytes = 64;
constexpr int64_t kStepBytes = kUnitsPerStep * kUnitBytes;  // of a panel that two registers hold
constexpr int64_t kBlockRows = 2 * kTileRows;
// Steps of the inner dimension at a time: two blocks' rows, two panels and the sums of all four stay in the first-level
// cache.
constexpr int64_t kSliceSteps = 3;
constexpr int64_t kStepsAhead = 8;
constexpr int64_t kPanelsTogether = 2;

// The registers: 0 to 3 hold sums, 4 and 7 rows, 5 and 6 weights. A block of at most 16 rows uses 4 and has sums of two
// panels; of a larger block, 0 and 1 are the sums of its first 16 rows, 2 and 3 those of the others, which 7 holds.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    explicit TileConfig(int64_t num_rows) {
        const auto first = static_cast<uint8_t>(std::min(num_rows, kTileRows));
        const auto second = static_cast<uint8_t>(num_rows > kTileRows ? num_rows - kTileRows : first);
        const uint8_t each[8] = {first, first, second, second, first, kTileRows, kTileRows, second};
        for (int i = 0; i < 8; ++i) {
            row_bytes[i] = kTileRowBytes;
            rows[i] = each[i];
        }
    }
};

// For blocks of so many rows, of this thread, until the next.
inline void configure_tiles(int64_t num_rows) {
    const TileConfig config(num_rows);
    // The compiler does not know all that the instruction reads.
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
}

// Weights are brought nearer before they are wanted: a few steps where one or two blocks go through a panel, those of
// the panels that come next where more do. Each block brings its share, since many lines at once would take the places
// in which others are waited for.
struct WeightsAhead {
    int64_t distance = 0, num_steps = 0;  // of a panel
    int64_t turn_bytes = 0;               // from the end of a panel to the one that comes in its place
    int64_t num_lines = 0;                // of a share

    TRIPTYCH_INLINE void bring(const char* panel, int64_t step, int64_t share) const {
        const int64_t ahead = step + distance;
        const char* place = panel + ahead * kStepBytes + (ahead < num_steps ? 0 : turn_bytes) + share * num_lines * 64;
        for (int64_t line = 0; line < num_lines; ++line, place += 64) {
            _mm_prefetch(place, _MM_HINT_T1);
        }
    }
};

TRIPTYCH_INLINE void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// A block of at most 16 rows times P panels. sums: [16][32 P].
template <int P>
inline void multiply_small(const char* rows, int64_t row_bytes, const char* panel, int64_t panel_bytes,
                           int64_t num_steps, const WeightsAhead& ahead, float* sums) {
    zero_sums();
    for (int64_t step = 0; step < num_steps; ++step) {
        const char* first = panel + step * kStepBytes;
        _tile_loadd(4, rows + step * kTileRowBytes, row_bytes);
        ahead.bring(panel, step, 0);
        _tile_loadd(5, first, kUnitBytes);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, first + kTileRowBytes, kUnitBytes);
        _tile_dpbf16ps(1, 4, 6);
        if (P == 2) {
            const char* second = first + panel_bytes;
            ahead.bring(panel + panel_bytes, step, 0);
            _tile_loadd(5, second, kUnitBytes);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(6, second + kTileRowBytes, kUnitBytes);
            _tile_dpbf16ps(3, 4, 6);
        }
    }
    constexpr int64_t kStride = 4 * kPanelColumns * P;
    _tile_stored(0, sums, kStride);
    _tile_stored(1, sums + 16, kStride);
    if (P == 2) {
        _tile_stored(2, sums + 32, kStride);
        _tile_stored(3, sums + 48, kStride);
    }
}

// A block of 17 to 32 rows times one panel, from one step to another. sums: [32][32 P], of which it adds to 32 columns,
// or, from the first step, writes them.
template <int P>
inline void multiply_large(const char* rows, int64_t row_bytes, const char* panel, int64_t start, int64_t end,
                           const WeightsAhead& ahead, int64_t share, float* sums) {
    constexpr int64_t kStride = 4 * kPanelColumns * P;
    float* other_sums = sums + kTileRows * kPanelColumns * P;
    if (start == 0) {
        zero_sums();
    } else {
        _tile_loadd(0, sums, kStride);
        _tile_loadd(1, sums + 16, kStride);
        _tile_loadd(2, other_sums, kStride);
        _tile_loadd(3, other_sums + 16, kStride);
    }
    const char* others = rows + kTileRows * row_bytes;
    for (int64_t step = start; step < end; ++step) {
        const char* weights = panel + step * kStepBytes;
        ahead.bring(panel, step, share);
        _tile_loadd(4, rows + step * kTileRowBytes, row_bytes);
        _tile_loadd(5, weights, kUnitBytes);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(7, others + step * kTileRowBytes, row_bytes);
        _tile_dpbf16ps(2, 7, 5);
        _tile_loadd(6, weights + kTileRowBytes, kUnitBytes);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(3, 7, 6);
    }
    _tile_stored(0, sums, kStride);
    _tile_stored(1, sums + 16, kStride);
    _tile_stored(2, other_sums, kStride);
    _tile_stored(3, other_sums + 16, kStride);
}

// Hands sums to what becomes of them, R rows at a time.
template <int R, int P, class Store>
TRIPTYCH_INLINE int64_t store_sums(const float* sums, int64_t num_rows, int64_t done, int64_t first_row,
                                   int64_t panel, const Store& store) {
    for (; done + R <= num_rows; done += R) {
        Floats values[R][kVectors * P];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int j = 0; j < 2 * P; ++j) {
                values[r][j] = _mm512_load_ps(sums + (done + r) * kPanelColumns * P + 16 * j);
            }
        }
        store.template operator()<R, P>(first_row + done, panel, values);
    }
    return done;
}

// Rows as they lie, [num_rows][row_bytes], times P neighbouring panels, `index` of all being the first. Blocks have 32
// rows; of more than that, the last block begins early enough to have as many, and its first rows are computed again.
template <int P, class Store>
struct PanelProduct {
    const char* rows;
    int64_t num_rows, row_bytes;
    const char* panel;
    int64_t panel_bytes, index;
    const Store& store;

    int64_t num_steps() const { return row_bytes / kTileRowBytes; }
    int64_t num_blocks() const { return (num_rows + kBlockRows - 1) / kBlockRows; }

    // brings: whether weights come nearer meanwhile. is_followed: by panels of the same weight.
    [[gnu::noinline]] void multiply(bool brings, bool is_followed) const {
        WeightsAhead ahead;
        if (brings) {
            ahead.num_steps = num_steps();
            ahead.distance = num_blocks() > 2 ? num_steps() : std::min(kStepsAhead, num_steps());
            ahead.turn_bytes = is_followed ? (P - 1) * panel_bytes : -panel_bytes;
            ahead.num_lines = (kStepBytes / 64 + num_blocks() - 1) / num_blocks();
        }
        if (num_rows <= kBlockRows) {
            return multiply_one(ahead);
        }
        for (int64_t block = 0; block < num_blocks(); block += 2) {
            multiply_two(block, ahead);
        }
    }

private:
    int64_t first_row(int64_t block) const { return std::min(block * kBlockRows, num_rows - kBlockRows); }

    // The only block, of at most 32 rows.
    void multiply_one(const WeightsAhead& ahead) const {
        alignas(64) float sums[kBlockRows * kPanelColumns * P];
        // The compiler does not know what tiles are read from.
        asm volatile("" ::: "memory");
        if (num_rows > kTileRows) {
            for (int p = 0; p < P; ++p) {
                multiply_large<P>(rows, row_bytes, panel + p * panel_bytes, 0, num_steps(), ahead, 0,
                                  sums + kPanelColumns * p);
            }
        } else {
            multiply_small<P>(rows, row_bytes, panel, panel_bytes, num_steps(), ahead, sums);
        }
        hand_over(sums, 0, std::min(num_rows, kBlockRows));
    }

    // A block and the next one, if there is one, slice by slice.
    void multiply_two(int64_t block, const WeightsAhead& ahead) const {
        alignas(64) float sums[2][kBlockRows * kPanelColumns * P];
        asm volatile("" ::: "memory");
        const int64_t end = std::min(block + 2, num_blocks());
        for (int64_t start = 0; start < num_steps(); start += kSliceSteps) {
            for (int64_t b = block; b < end; ++b) {
                for (int p = 0; p < P; ++p) {
                    multiply_large<P>(rows + first_row(b) * row_bytes, row_bytes, panel + p * panel_bytes, start,
                                      std::min(start + kSliceSteps, num_steps()), ahead, b,
                                      sums[b - block] + kPanelColumns * p);
                }
            }
        }
        for (int64_t b = block; b < end; ++b) {
            hand_over(sums[b - block], first_row(b), kBlockRows);
        }
    }

    void hand_over(const float* sums, int64_t first, int64_t count) const {
        asm volatile("" ::: "memory");
        const int64_t done = store_sums<4, P>(sums, count, 0, first, index, store);
        store_sums<1, P>(sums, count, done, first, index, store);
    }
};

// Panels [first, end) of the weights times a chunk of rows. False when there is no memory.
template <class Store>
bool multiply_by_tiles(const PackedWeight& weight, const char* rows, int64_t num_rows, int64_t first, int64_t end,
                       const Store& store) {
    const int64_t row_bytes = weight.num_units() * 4, wide_bytes = weight.num_units() * kUnitBytes;
    const bool is_int8 = weight.kind == WeightKind::kInt8;
    char* wide = nullptr;
    if (is_int8) {
        wide = static_cast<char*>(scratch(kScratchGemmPanel, kPanelsTogether * wide_bytes));
        if (wide == nullptr) {
            return false;
        }
    }
    configure_tiles(std::min(num_rows, kBlockRows));
    for (int64_t index = first; index < end; index += kPanelsTogether) {
        const int64_t count = std::min(kPanelsTogether, end - index);
        const char* panels = weight.panels + index * weight.panel_bytes();
        if (is_int8) {
            widen_to_bf16(Int8Pairs(), panels, count * weight.num_units(), wide);
            panels = wide;
        }
        const bool is_followed = index + count < end;
        if (count == kPanelsTogether) {
            PanelProduct<kPanelsTogether, Store>{rows, num_rows, row_bytes, panels, wide_bytes, index, store}.multiply(
                !is_int8, is_followed);
        } else {
            PanelProduct<1, Store>{rows, num_rows, row_bytes, panels, wide_bytes, index, store}.multiply(
                !is_int8, is_followed);
        }
    }
    _tile_release();
    return true;
}

}  // namespace
}  // namespace triptych
