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
constexpr int64_t kGroupBytes = 512 << 10;                  // of panels that stay near for all blocks of rows

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

// What is brought nearer meanwhile: weights that will be wanted soon, so many lines a step.
struct LineStream {
    const char* next;
    int64_t lines_per_step;

    LineStream(const char* first, int64_t num_lines, int64_t num_steps)
        : next(first), lines_per_step((num_lines + num_steps - 1) / num_steps) {}

    void bring() {
        for (int64_t line = 0; line < lines_per_step; ++line, next += 64) {
            _mm_prefetch(next, _MM_HINT_T1);
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
                           int64_t num_steps, float* sums) {
    zero_sums();
    for (int64_t step = 0; step < num_steps; ++step, rows += kTileRowBytes, panel += kStepBytes) {
        _tile_loadd(4, rows, row_bytes);
        _tile_loadd(5, panel, kUnitBytes);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, panel + kTileRowBytes, kUnitBytes);
        _tile_dpbf16ps(1, 4, 6);
        if (P == 2) {
            _tile_loadd(5, panel + panel_bytes, kUnitBytes);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(6, panel + panel_bytes + kTileRowBytes, kUnitBytes);
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

// A block of 17 to 32 rows times one panel. sums: [32][32 P], of which it writes 32 columns.
template <int P>
inline void multiply_large(const char* rows, int64_t row_bytes, const char* panel, int64_t num_steps,
                           LineStream& stream, float* sums) {
    zero_sums();
    const char* others = rows + kTileRows * row_bytes;
    for (int64_t step = 0; step < num_steps; ++step, panel += kStepBytes) {
        stream.bring();
        // Rows leave the first-level cache to the panel, which all blocks use.
        _tile_stream_loadd(4, rows + step * kTileRowBytes, row_bytes);
        _tile_loadd(5, panel, kUnitBytes);
        _tile_dpbf16ps(0, 4, 5);
        _tile_stream_loadd(7, others + step * kTileRowBytes, row_bytes);
        _tile_dpbf16ps(2, 7, 5);
        _tile_loadd(6, panel + kTileRowBytes, kUnitBytes);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(3, 7, 6);
    }
    constexpr int64_t kStride = 4 * kPanelColumns * P;
    float* other_sums = sums + kTileRows * kPanelColumns * P;
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

// One block of rows times P panels, for which the registers are configured.
template <int P, class Store>
[[gnu::noinline]] void tile_block(const char* rows, int64_t num_rows, int64_t row_bytes, const char* panel,
                                  int64_t panel_bytes, LineStream stream, int64_t first_row, int64_t index,
                                  const Store& store) {
    alignas(64) float sums[2 * kTileRows * kPanelColumns * P];
    // The compiler does not know what tiles are read from.
    asm volatile("" ::: "memory");
    const int64_t num_steps = row_bytes / kTileRowBytes;
    if (num_rows > kTileRows) {
        for (int p = 0; p < P; ++p) {
            multiply_large<P>(rows, row_bytes, panel + p * panel_bytes, num_steps, stream, sums + kPanelColumns * p);
        }
    } else {
        multiply_small<P>(rows, row_bytes, panel, panel_bytes, num_steps, sums);
    }
    const int64_t count = std::min(num_rows, 2 * kTileRows);  // which compilers cannot know
    const int64_t done = store_sums<4, P>(sums, count, 0, first_row, index, store);
    store_sums<1, P>(sums, count, done, first_row, index, store);
}

// Rows as they lie, [num_rows][row_bytes], times neighbouring panels that stay in a cache, `first_panel` of all being
// the first. Blocks have 32 rows, the last one what remains.
template <class Store>
struct TileGroup {
    const char* rows;
    int64_t num_rows, row_bytes;
    const char* panels;
    int64_t panel_bytes, num_panels, first_panel;
    bool is_followed;  // by more panels, where these lie
    const Store& store;

    void multiply() const {
        constexpr int64_t kBlock = 2 * kTileRows;
        const int64_t rest = num_rows % kBlock, start = num_rows - rest;
        multiply(0, start, kBlock);
        multiply(start, num_rows, rest);
    }

private:
    // Rows first to end in blocks of block_rows.
    void multiply(int64_t first, int64_t end, int64_t block_rows) const {
        if (first >= end) {
            return;
        }
        configure_tiles(block_rows);
        int64_t p = 0;
        for (; p + 2 <= num_panels; p += 2) {
            multiply<2>(p, first, end, block_rows);
        }
        if (p < num_panels) {
            multiply<1>(p, first, end, block_rows);
        }
    }

    template <int P>
    void multiply(int64_t p, int64_t first, int64_t end, int64_t block_rows) const {
        const char* panel = panels + p * panel_bytes;
        const int64_t num_blocks = (end - first) / block_rows, num_lines = P * panel_bytes / 64;
        // With several blocks for each panel, the next panels come meanwhile. With one, the CPU sees by itself what is
        // read next.
        const bool brings = is_followed && num_blocks > 1;
        const int64_t share = brings ? (num_lines + num_blocks - 1) / num_blocks : 0;
        const int64_t num_steps = P * row_bytes / kTileRowBytes;
        for (int64_t block = 0; block < num_blocks; ++block) {
            const int64_t row = first + block * block_rows;
            const char* next = panel + P * panel_bytes + block * share * 64;
            tile_block<P>(rows + row * row_bytes, block_rows, row_bytes, panel, panel_bytes,
                          LineStream(next, share, num_steps), row, first_panel + p, store);
        }
    }
};

// Panels [first, end) of the weights times a chunk of rows. False when there is no memory.
template <class Store>
bool multiply_by_tiles(const PackedWeight& weight, const char* rows, int64_t num_rows, int64_t first, int64_t end,
                       const Store& store) {
    const int64_t row_bytes = weight.num_units() * 4, wide_bytes = weight.num_units() * kUnitBytes;
    const bool is_int8 = weight.kind == WeightKind::kInt8;
    const int64_t group = is_int8 ? 2 : std::max<int64_t>(2, kGroupBytes / wide_bytes / 2 * 2);
    char* wide = nullptr;
    if (is_int8) {
        wide = static_cast<char*>(scratch(kScratchGemmPanel, group * wide_bytes));
        if (wide == nullptr) {
            return false;
        }
    }
    for (int64_t index = first; index < end; index += group) {
        const int64_t count = std::min(group, end - index);
        const char* panels = weight.panels + index * weight.panel_bytes();
        if (is_int8) {
            widen_to_bf16(Int8Pairs(), panels, count * weight.num_units(), wide);
            panels = wide;
        }
        TileGroup<Store>{rows, num_rows, row_bytes, panels, wide_bytes, count, index, !is_int8, store}.multiply();
    }
    _tile_release();
    return true;
}

}  // namespace
}  // namespace triptych
