// x W^T for packed weights: the tiles, their order, and the store of a finished tile.
//
// Include isa.h before.
#pragma once

#include <algorithm>

#include "microkernel.h"
#include "packing.h"
#include "pool.h"

namespace triptych {
namespace {

// Prefetch distance of weights: what memory delivers during the latency of one request, and some more.
constexpr int64_t kPrefetchBytes = 8192;
constexpr int64_t kPrefetchBytesOneRow = 4096;
// Bytes of packed rows that stay in the second-level cache, which is larger on CPUs with tiles.
constexpr int64_t kRowsInCache = 512 << 10;
constexpr int64_t kTiledRowsInCache = 1 << 20;

// Rows of a chunk in blocks of at most kMaxTileRows, as equal as possible. Block b's packed rows start at first_row(b).
struct RowBlocks {
    int64_t num_rows, num_blocks, small, num_large;

    explicit RowBlocks(int64_t rows, int max_rows = kMaxTileRows)
        : num_rows(rows),
          num_blocks((rows + max_rows - 1) / max_rows),
          small(num_blocks == 0 ? 0 : rows / num_blocks),
          num_large(num_blocks == 0 ? 0 : rows % num_blocks) {}
    int64_t first_row(int64_t block) const { return block * small + std::min(block, num_large); }
    int size(int64_t block) const { return static_cast<int>(small + (block < num_large ? 1 : 0)); }
};

// The number of rows to process at once: all of a small batch, else what the cache keeps, in whole blocks.
inline int64_t chunk_rows(int64_t num_rows, const PackedWeight& weight) {
    const bool on_tiles = weight.form == RowForm::kTiles;
    const int64_t block = on_tiles ? 2 * kTileRows : kMaxTileRows;
    const int64_t fitting = (on_tiles ? kTiledRowsInCache : kRowsInCache) / (4 * weight.num_units()) / block * block;
    return std::min(num_rows, std::max<int64_t>(fitting, 4 * block));
}

// Panels per task of the pool: large enough that taking a task costs nothing, small enough that no thread waits long.
inline int64_t panels_a_task(const PackedWeight& weight, int64_t num_rows) {
    if (num_threads() == 1) {
        return std::max<int64_t>(weight.num_panels(), 1);
    }
    const int64_t worth = (64 << 10) / (weight.panel_bytes() * (1 + num_rows / 8)) / 4 * 4;
    const int64_t fair = weight.num_panels() / (4 * num_threads()) / 4 * 4;
    return std::max<int64_t>(4, std::max(worth, fair));
}

// Whether a product takes at most some tens of microseconds: less than releasing the interpreter's lock may cost.
inline bool is_short(const PackedWeight& weight, int64_t num_rows) {
    return weight.num_panels() * weight.panel_bytes() * (1 + num_rows / 8) < (2 << 20);
}

// Writes finished sums, with bias and scales, as fp32 or bf16.
struct StoreRows {
    const float* bias;    // padded to whole panels, or null
    const float* scales;  // the same, of int8 weights
    char* out;
    int64_t out_stride;  // elements
    int64_t num_columns;
    bool is_bf16;
    const int64_t* row_of;  // the row's index in the output, or null: its own

    // The cache lines that a tile will write are prefetched before it computes, since waiting for them afterwards costs
    // as much.
    template <int R, int P>
    TRIPTYCH_INLINE void prefetch(int64_t first_row, int64_t panel) const {
        const int64_t element_bytes = is_bf16 ? 2 : 4;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const int64_t row = row_of == nullptr ? first_row + r : row_of[first_row + r];
            const char* to = out + (row * out_stride + panel * kPanelColumns) * element_bytes;
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) {
                __builtin_prefetch(to + p * kPanelColumns * element_bytes, 1);
                if (!is_bf16 && kVectors > 1) {
                    __builtin_prefetch(to + p * kPanelColumns * element_bytes + 64, 1);
                }
            }
        }
    }

    template <int R, int P>
    TRIPTYCH_INLINE void operator()(int64_t first_row, int64_t panel, const Floats (&sums)[R][kVectors * P]) const {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            const int64_t column = (panel + p) * kPanelColumns, left = num_columns - column;
            if (left <= 0) {
                break;
            }
            const PanelMask mask = panel_mask(left);
            Floats shift[kVectors], scale[kVectors];
            for (int v = 0; v < kVectors; ++v) {
                const int64_t to = column + 16 * v;
                shift[v] = bias == nullptr ? zeros() : load(bias + to);
                scale[v] = scales == nullptr ? splat(1.0f) : load(scales + to);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const int64_t row = row_of == nullptr ? first_row + r : row_of[first_row + r];
                Floats values[kVectors];
#pragma GCC unroll 2
                for (int v = 0; v < kVectors; ++v) {
                    values[v] = fmadd(sums[r][kVectors * p + v], scale[v], shift[v]);
                }
                if (is_bf16) {
                    store_panel(reinterpret_cast<uint16_t*>(out) + row * out_stride + column, mask, values);
                } else {
                    store_panel(reinterpret_cast<float*>(out) + row * out_stride + column, mask, values);
                }
            }
        }
    }
};

template <class Weight, int R, int P, bool kStream, class Store>
[[gnu::noinline]] void tile(const Weight& weight, const uint32_t* rows, const char* panel,
                            int64_t panel_bytes, int64_t num_units, const Prefetch& prefetch,
                            int64_t first_row, int64_t panel_index, const Store& store) {
    store.template prefetch<R, P>(first_row, panel_index);
    Floats sums[R][kVectors * P];
    multiply<Weight, R, P, kStream>(weight, rows, panel, panel_bytes, num_units, prefetch, sums);
    store.template operator()<R, P>(first_row, panel_index, sums);
}

// Panels [first, end) times one block of R rows: each panel is read once, and memory bandwidth is the limit.
template <class Weight, int R, class Store>
void stream_panels(const Weight& weight, const uint32_t* rows, const char* panels, int64_t panel_bytes,
                   int64_t num_units, int64_t first, int64_t end, const Store& store) {
    constexpr int P = panels_at_once(R);
    const int64_t panel_units = num_units / Weight::kRowUnits;
    const int64_t ahead =
        std::min<int64_t>((R == 1 ? kPrefetchBytesOneRow : kPrefetchBytes) / Weight::kStep / P, panel_units);
    const auto prefetch_for = [&](int64_t width) {
        const int64_t next_panels = width * panel_bytes - (panel_units - ahead) * Weight::kStep;
        return Prefetch{panel_units - ahead, ahead * Weight::kStep, next_panels, nullptr, 0};
    };
    const Prefetch wide = prefetch_for(P), narrow = prefetch_for(1);
    int64_t index = first;
    for (; index + P <= end; index += P) {
        tile<Weight, R, P, true>(weight, rows, panels + index * panel_bytes, panel_bytes, panel_units, wide, 0,
                                 index, store);
    }
    for (; P > 1 && index < end; ++index) {
        tile<Weight, R, 1, true>(weight, rows, panels + index * panel_bytes, panel_bytes, panel_units, narrow,
                                 0, index, store);
    }
}

template <class Weight, class Store>
void stream_panels(const Weight& weight, int num_rows, const uint32_t* rows, const char* panels,
                   int64_t panel_bytes, int64_t num_units, int64_t first, int64_t end, const Store& store) {
    switch (num_rows) {
#define TRIPTYCH_CASE(R) \
    case R:              \
        return stream_panels<Weight, R>(weight, rows, panels, panel_bytes, num_units, first, end, store);
        TRIPTYCH_EACH_TILE_ROWS(TRIPTYCH_CASE)
#undef TRIPTYCH_CASE
    }
}

// One panel times every block of rows, prefetching the next_bytes at `next_panel` meanwhile.
template <class Weight, class Store>
void reuse_panel(const Weight& weight, const RowBlocks& blocks, const uint32_t* rows, const char* panel,
                 const char* next_panel, int64_t next_bytes, int64_t num_units, int64_t index,
                 const Store& store) {
    const int64_t panel_units = num_units / Weight::kRowUnits;
    constexpr int64_t kLine = Weight::kStep < 64 ? Weight::kStep : 64;
    for (int64_t block = 0; block < blocks.num_blocks; ++block) {
        const int64_t first_row = blocks.first_row(block);
        const uint32_t* block_rows = rows + first_row * num_units;
        // The first block or two prefetch one line per unit; later ones prefetch lines that are already in the cache.
        const int64_t brought = block * panel_units * kLine;
        const bool brings = brought < next_bytes;
        const Prefetch prefetch{0, 0, 0, brings ? next_panel + brought : panel, brings ? kLine : 0};
        switch (blocks.size(block)) {
#define TRIPTYCH_CASE(R)                                                                                 \
    case R:                                                                                              \
        tile<Weight, R, 1, false>(weight, block_rows, panel, 0, panel_units, prefetch, first_row, index, \
                                  store);                                                                \
        break;
            TRIPTYCH_EACH_TILE_ROWS(TRIPTYCH_CASE)
#undef TRIPTYCH_CASE
        }
    }
}

// Panels [first, end) of the weights times a chunk of packed rows.
template <class Weight, class Store>
void multiply_by_blocks(const Weight& weight, const RowBlocks& blocks, const uint32_t* rows,
                        const char* panels, int64_t panel_bytes, int64_t num_units, int64_t first,
                        int64_t end, const Store& store) {
    if (blocks.num_blocks == 1) {
        return stream_panels(weight, blocks.size(0), rows, panels, panel_bytes, num_units, first, end, store);
    }
    for (int64_t index = first; index < end; ++index) {
        const char* panel = panels + index * panel_bytes;
        reuse_panel(weight, blocks, rows, panel, panel + panel_bytes, panel_bytes, num_units, index, store);
    }
}

// Products of bf16 pairs treat denormals of fp32 as 0; with this class in scope, products of fp32 do as well.
class FlushDenormals {
public:
    FlushDenormals() { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | kDenormalsAreZero); }
    ~FlushDenormals() { _mm_setcsr(before_); }
    FlushDenormals(const FlushDenormals&) = delete;
    FlushDenormals& operator=(const FlushDenormals&) = delete;

private:
    static constexpr unsigned kDenormalsAreZero = 0x0040;
    const unsigned before_ = _mm_getcsr();
};

}  // namespace
}  // namespace triptych
