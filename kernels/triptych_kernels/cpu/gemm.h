// x W^T for packed weights: which tiles, in which order, and what becomes of a finished tile.
//
// Include avx512.h before.
#pragma once

#include <algorithm>
#include <optional>
#include <type_traits>

#include "amx.h"
#include "microkernel.h"
#include "packing.h"
#include "pool.h"

namespace triptych {
namespace {

constexpr int kMaxTileRows = 12;
// How far ahead of their use weights are asked for: what memory delivers while one request travels, and some
// more.
constexpr int64_t kPrefetchBytes = 8192;
constexpr int64_t kPrefetchBytesOneRow = 4096;
constexpr int64_t kRowsInCache = 512 << 10;  // bytes of packed rows that stay in the second-level cache

// Rows of a chunk in blocks of at most kMaxTileRows, as equal as can be. Block b's packed rows start at
// first_row(b).
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

// How many rows to take at once: all of a small batch, else what the cache keeps, in whole blocks.
inline int64_t chunk_rows(int64_t num_rows, const PackedWeight& weight) {
    const int64_t block = weight.form == RowForm::kTiles ? 2 * kTileRows : kMaxTileRows;
    const int64_t fitting = kRowsInCache / (4 * weight.num_units()) / block * block;
    return std::min(num_rows, std::max<int64_t>(fitting, 4 * block));
}

// How many panels a task of the pool takes: enough that taking it costs nothing, few enough that no thread
// waits long.
inline int64_t panels_a_task(const PackedWeight& weight, int64_t num_rows) {
    if (num_threads() == 1) {
        return std::max<int64_t>(weight.num_panels(), 1);
    }
    const int64_t worth = (64 << 10) / (weight.panel_bytes() * (1 + num_rows / 8)) / 4 * 4;
    const int64_t fair = weight.num_panels() / (4 * num_threads()) / 4 * 4;
    return std::max<int64_t>(4, std::max(worth, fair));
}

// Whether a product takes some tens of microseconds at most: less than giving the interpreter lock back may
// cost.
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
    const int64_t* row_of;  // where a row goes, or null: its own place

    // The lines a tile will write are asked for before it computes, since to wait for them afterwards costs
    // as much.
    template <int R, int P>
    TRIPTYCH_INLINE void prefetch(int64_t first_row, int64_t panel) const {
        const int64_t element_bytes = is_bf16 ? 2 : 4;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const int64_t row = row_of == nullptr ? first_row + r : row_of[first_row + r];
            const char* place = out + (row * out_stride + panel * kPanelColumns) * element_bytes;
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) {
                __builtin_prefetch(place + p * kPanelColumns * element_bytes, 1);
                if (!is_bf16) {
                    __builtin_prefetch(place + p * kPanelColumns * element_bytes + 64, 1);
                }
            }
        }
    }

    template <int R, int P>
    TRIPTYCH_INLINE void operator()(int64_t first_row, int64_t panel, const __m512 (&sums)[R][2 * P]) const {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            const int64_t column = (panel + p) * kPanelColumns, left = num_columns - column;
            if (left <= 0) {
                break;
            }
            const __mmask32 mask = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
            __m512 shift[2], scale[2];
            for (int half = 0; half < 2; ++half) {
                const int64_t place = column + 16 * half;
                shift[half] = bias == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(bias + place);
                scale[half] = scales == nullptr ? _mm512_set1_ps(1.0f) : _mm512_loadu_ps(scales + place);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const int64_t row = row_of == nullptr ? first_row + r : row_of[first_row + r];
                const __m512 low = _mm512_fmadd_ps(sums[r][2 * p], scale[0], shift[0]);
                const __m512 high = _mm512_fmadd_ps(sums[r][2 * p + 1], scale[1], shift[1]);
                if (is_bf16) {
                    uint16_t* place = reinterpret_cast<uint16_t*>(out) + row * out_stride + column;
                    _mm512_mask_storeu_epi16(place, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
                } else {
                    float* place = reinterpret_cast<float*>(out) + row * out_stride + column;
                    _mm512_mask_storeu_ps(place, static_cast<__mmask16>(mask), low);
                    _mm512_mask_storeu_ps(place + 16, static_cast<__mmask16>(mask >> 16), high);
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
    __m512 sums[R][2 * P];
    multiply<Weight, R, P, kStream>(weight, rows, panel, panel_bytes, num_units, prefetch, sums);
    store.template operator()<R, P>(first_row, panel_index, sums);
}

// How many panels a tile of so many rows takes at once: enough sums to hide the latency of a multiply-add.
constexpr int panels_at_once(int num_rows) { return num_rows == 1 ? 4 : num_rows <= 6 ? 2 : 1; }

// Panels [first, end) times one block of R rows: each panel is read once, from memory, and that is what
// limits.
template <class Weight, int R, class Store>
void stream_panels(const Weight& weight, const uint32_t* rows, const char* panels, int64_t panel_bytes,
                   int64_t num_units, int64_t first, int64_t end, const Store& store) {
    constexpr int P = panels_at_once(R);
    const int64_t ahead =
        std::min<int64_t>((R == 1 ? kPrefetchBytesOneRow : kPrefetchBytes) / Weight::kStep / P, num_units);
    const auto prefetch_for = [&](int64_t width) {
        const int64_t next_panels = width * panel_bytes - (num_units - ahead) * Weight::kStep;
        return Prefetch{num_units - ahead, ahead * Weight::kStep, next_panels, nullptr, 0};
    };
    const Prefetch wide = prefetch_for(P), narrow = prefetch_for(1);
    int64_t index = first;
    for (; index + P <= end; index += P) {
        tile<Weight, R, P, true>(weight, rows, panels + index * panel_bytes, panel_bytes, num_units, wide, 0,
                                 index, store);
    }
    for (; P > 1 && index < end; ++index) {
        tile<Weight, R, 1, true>(weight, rows, panels + index * panel_bytes, panel_bytes, num_units, narrow,
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
        TRIPTYCH_CASE(1)
        TRIPTYCH_CASE(2) TRIPTYCH_CASE(3) TRIPTYCH_CASE(4) TRIPTYCH_CASE(5) TRIPTYCH_CASE(6) TRIPTYCH_CASE(7)
            TRIPTYCH_CASE(8) TRIPTYCH_CASE(9) TRIPTYCH_CASE(10) TRIPTYCH_CASE(11) TRIPTYCH_CASE(12)
#undef TRIPTYCH_CASE
    }
}

// One panel times every block of rows, meanwhile bringing the next_bytes at `next_panel` nearer.
template <class Weight, class Store>
void reuse_panel(const Weight& weight, const RowBlocks& blocks, const uint32_t* rows, const char* panel,
                 const char* next_panel, int64_t next_bytes, int64_t num_units, int64_t index,
                 const Store& store) {
    for (int64_t block = 0; block < blocks.num_blocks; ++block) {
        const int64_t first_row = blocks.first_row(block);
        const uint32_t* block_rows = rows + first_row * num_units;
        // The first block or two bring a line a unit; later ones ask again for a line that is there.
        const int64_t brought = block * num_units * 64;
        const bool brings = brought < next_bytes;
        const Prefetch prefetch{0, 0, 0, brings ? next_panel + brought : panel, brings ? 64 : 0};
        switch (blocks.size(block)) {
#define TRIPTYCH_CASE(R)                                                                               \
    case R:                                                                                            \
        tile<Weight, R, 1, false>(weight, block_rows, panel, 0, num_units, prefetch, first_row, index, \
                                  store);                                                              \
        break;
            TRIPTYCH_CASE(1)
            TRIPTYCH_CASE(2) TRIPTYCH_CASE(3) TRIPTYCH_CASE(4) TRIPTYCH_CASE(5) TRIPTYCH_CASE(6)
                TRIPTYCH_CASE(7) TRIPTYCH_CASE(8) TRIPTYCH_CASE(9) TRIPTYCH_CASE(10) TRIPTYCH_CASE(11)
                    TRIPTYCH_CASE(12)
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

// fp32 rows times weights in pairs: each panel is widened once for all rows. False when there is no memory.
template <bool kSecondFirst, class Pairs, class Store>
bool multiply_widened(const Pairs& pairs, const PackedWeight& weight, const RowBlocks& blocks,
                      const uint32_t* rows, int64_t first, int64_t end, const Store& store) {
    const int64_t panel_bytes = weight.panel_bytes(), num_units = weight.num_units();
    char* wide = static_cast<char*>(scratch(kScratchGemmPanel, num_units * kUnitBytes));
    if (wide == nullptr) {
        return false;
    }
    for (int64_t index = first; index < end; ++index) {
        const char* panel = weight.panels + index * panel_bytes;
        widen_to_fp32<kSecondFirst>(pairs, panel, num_units / 2, wide);
        reuse_panel(Fp32Units{}, blocks, rows, wide, panel + panel_bytes, panel_bytes, num_units, index,
                    store);
    }
    return true;
}

// Products of bf16 pairs take numbers too small for fp32's full precision for 0; with this, those of fp32 do as well.
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

// Panels [first, end) of the weights times a chunk of packed rows. False when there is no memory.
template <class Store>
bool multiply_panels(const PackedWeight& weight, const RowBlocks& blocks, const uint32_t* rows, int64_t first,
                     int64_t end, const Store& store) {
    if (weight.form == RowForm::kTiles) {
        return multiply_by_tiles(weight, reinterpret_cast<const char*>(rows), blocks.num_rows, first, end, store);
    }
    std::optional<FlushDenormals> flush;
    if (!weight.rows_are_fp32) {
        flush.emplace();
    }
    const auto multiply_as = [&](const auto& kind) {
        if constexpr (!std::is_same_v<decltype(kind), const Fp32Units&>) {
            if (weight.form == RowForm::kWide) {
                return multiply_widened<true>(kind, weight, blocks, rows, first, end, store);
            }
        }
        multiply_by_blocks(kind, blocks, rows, weight.panels, weight.panel_bytes(), weight.num_units(), first,
                           end, store);
        return true;
    };
    switch (weight.kind) {
        case WeightKind::kBf16:
            return multiply_as(Bf16Pairs{});
        case WeightKind::kFp32:
            return multiply_as(Fp32Units{});
        case WeightKind::kInt8: {
            const Int8Pairs pairs(kBf16Tables.bytes);
            return weight.rows_are_fp32 ? multiply_widened<false>(pairs, weight, blocks, rows, first, end, store)
                                        : multiply_as(pairs);
        }
    }
    return false;
}

}  // namespace
}  // namespace triptych
