// x W^T for packed weights on the matrix unit of a CPU with AMX: the tiles and their order.
//
// A tile register holds 16 rows of 64 bytes: 16 units of half a panel, i.e. 32 by 16 weights, in their stored layout,
// or 32 numbers of 16 rows. Every output is one chain of such products along the inner dimension in order, whatever the
// number of rows: this makes results independent of the batch. They differ from the microkernel's, since the unit sums
// even and odd elements of a tile separately.
//
// Include isa.h before.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "../microkernel.h"
#include "../packing.h"
#include "../pool.h"

namespace triptych {
namespace {

constexpr int64_t kTileRowBytes = 64;
constexpr int64_t kStepBytes = kUnitsPerStep * kUnitBytes;  // of a panel, held by two registers
constexpr int64_t kBlockRows = 2 * kTileRows;
constexpr int64_t kWeightsAhead = 1 << 10;  // prefetch distance in bytes: no more than hides the latency
// The maximum number of steps of a panel that the first-level cache keeps besides the data that is streamed.
constexpr int64_t kSliceSteps = 18;
constexpr int64_t kBlocksTogether = 8;  // whose sums wait for the next slice in the second-level cache
constexpr int64_t kPanelsTogether = 2;

// The number of rows of each of a thread's registers, until the next configuration.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

inline void configure_tiles(const std::array<int64_t, 8>& num_rows) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
        config.row_bytes[i] = kTileRowBytes;
        config.rows[i] = static_cast<uint8_t>(num_rows[i]);
    }
    // The compiler does not know everything that the instruction reads.
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
}

// Registers for blocks of `num_rows` rows: 0 to 3 hold sums, 4 and 7 rows, 5 and 6 weights. A block of at most 16 rows
// uses 4 and has sums of two panels. For a larger block, 0 and 1 are the sums of its first 16 rows, 2 and 3 those of
// the others, which are in 7.
inline void configure_tiles(int64_t num_rows) {
    const int64_t first = std::min(num_rows, kTileRows), second = num_rows > kTileRows ? num_rows - kTileRows : first;
    configure_tiles({first, first, second, second, first, kTileRows, kTileRows, second});
}

// Prefetches weights into the second-level cache.
TRIPTYCH_INLINE void bring_weights(const char* from, int64_t num_bytes) {
#pragma GCC unroll 4
    for (int64_t line = 0; line < num_bytes; line += 64) {
        _mm_prefetch(from + line, _MM_HINT_T2);
    }
}

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
    for (int64_t step = 0; step < num_steps; ++step) {
        const char* first = panel + step * kStepBytes;
        bring_weights(first + kWeightsAhead, kStepBytes);
        _tile_loadd(4, rows + step * kTileRowBytes, row_bytes);
        _tile_loadd(5, first, kUnitBytes);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, first + kTileRowBytes, kUnitBytes);
        _tile_dpbf16ps(1, 4, 6);
        if (P == 2) {
            const char* second = first + panel_bytes;
            bring_weights(second + kWeightsAhead, kStepBytes);
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

// Processes the sums of a block a few rows at a time, while the matrix unit computes the next block.
template <class Store>
class Finisher {
public:
    explicit Finisher(const Store& store) : store_(store) {}

    // sums: [32][32], of `count` rows starting at `row`, and of a panel. Precondition: everything taken before is
    // finished.
    void take(const float* sums, int64_t row, int64_t count, int64_t panel) {
        sums_ = sums, row_ = row, left_ = count, panel_ = panel;
    }
    TRIPTYCH_INLINE void finish_rows(int64_t most) {
        for (int64_t end = std::max<int64_t>(left_ - most, 0); left_ > end; --left_, ++row_, sums_ += kPanelColumns) {
            const Floats values[1][kVectors] = {{_mm512_load_ps(sums_), _mm512_load_ps(sums_ + 16)}};
            store_.template operator()<1, 1>(row_, panel_, values);
        }
    }

private:
    Store store_;
    const float* sums_ = nullptr;
    int64_t row_ = 0, left_ = 0, panel_ = 0;
};

// The part of the weights that a block prefetches per step: number of bytes, and distance.
struct Share {
    int64_t ahead, num_bytes;
};

// Addresses of a block's rows: its first 16 and the others, 64 bytes of each at a time.
struct BlockRows {
    const char *first, *second;
    int64_t first_step, second_step, row_stride;
};

// A block of up to 32 rows times one panel, for a range of steps. sums: [32][32], overwritten at the first step, else
// added to. kStreamed: rows bypass the first-level cache, which keeps the panel. Finishes other sums meanwhile.
template <bool kStreamed, class Store>
[[gnu::noinline]] void multiply_large(const BlockRows& block, const char* panel, int64_t start, int64_t end,
                                      const Share& share, float* sums, Finisher<Store>& finisher) {
    // A copy, which no store can alias, so its members stay in registers.
    Finisher<Store> others = finisher;
    constexpr int64_t kStride = 4 * kPanelColumns;
    const int64_t rows_a_step = (kBlockRows + end - start - 1) / (end - start);
    // The compiler does not know what tiles are read from.
    asm volatile("" ::: "memory");
    float* second_sums = sums + kTileRows * kPanelColumns;
    if (start == 0) {
        zero_sums();
    } else {
        _tile_loadd(0, sums, kStride);
        _tile_loadd(1, sums + 16, kStride);
        _tile_loadd(2, second_sums, kStride);
        _tile_loadd(3, second_sums + 16, kStride);
    }
    const char *first = block.first + start * block.first_step, *second = block.second + start * block.second_step;
    for (int64_t step = start; step < end; ++step, first += block.first_step, second += block.second_step) {
        const char* weights = panel + step * kStepBytes;
        bring_weights(weights + share.ahead, share.num_bytes);
        if (kStreamed) {
            _tile_stream_loadd(4, first, block.row_stride);
        } else {
            _tile_loadd(4, first, block.row_stride);
        }
        _tile_loadd(5, weights, kUnitBytes);
        _tile_dpbf16ps(0, 4, 5);
        if (kStreamed) {
            _tile_stream_loadd(7, second, block.row_stride);
        } else {
            _tile_loadd(7, second, block.row_stride);
        }
        _tile_dpbf16ps(2, 7, 5);
        _tile_loadd(6, weights + kTileRowBytes, kUnitBytes);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(3, 7, 6);
        others.finish_rows(rows_a_step);
    }
    _tile_stored(0, sums, kStride);
    _tile_stored(1, sums + 16, kStride);
    _tile_stored(2, second_sums, kStride);
    _tile_stored(3, second_sums + 16, kStride);
    finisher = others;
}

// Passes sums on to the store, R rows at a time.
template <int R, int P, class Store>
TRIPTYCH_INLINE int64_t store_sums(const float* sums, int64_t num_rows, int64_t done, int64_t panel,
                                   const Store& store) {
    for (; done + R <= num_rows; done += R) {
        Floats values[R][kVectors * P];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int j = 0; j < 2 * P; ++j) {
                values[r][j] = _mm512_load_ps(sums + (done + r) * kPanelColumns * P + 16 * j);
            }
        }
        store.template operator()<R, P>(done, panel, values);
    }
    return done;
}

// A chunk of rows times panels of a weight, one after the other.
template <class Store>
class PanelProduct {
public:
    PanelProduct(const PackedWeight& weight, const char* rows, int64_t num_rows, const Store& store)
        : in_tiles_(lies_in_tiles(weight, num_rows)), brings_(weight.kind != WeightKind::kInt8), rows_(rows),
          num_rows_(num_rows), row_bytes_(weight.num_units() * 4), store_(store), finisher_(store) {}

    int64_t num_steps() const { return row_bytes_ / kTileRowBytes; }
    int64_t num_blocks() const { return (num_rows_ + kBlockRows - 1) / kBlockRows; }

    // At most 16 rows times P panels, `index` being the first one's index in the weight.
    template <int P>
    [[gnu::noinline]] void multiply_few(const char* panel, int64_t panel_bytes, int64_t index) const {
        alignas(64) float sums[kTileRows * kPanelColumns * P];
        asm volatile("" ::: "memory");
        multiply_small<P>(rows_, row_bytes_, panel, panel_bytes, num_steps(), sums);
        asm volatile("" ::: "memory");
        const int64_t done = store_sums<4, P>(sums, num_rows_, 0, index, store_);
        store_sums<1, P>(sums, num_rows_, done, index, store_);
    }

    // 17 to 32 rows times a panel.
    void multiply_block(const char* panel, int64_t index) {
        float* sums = next_sums();
        const BlockRows block{rows_, rows_ + kTileRows * row_bytes_, kTileRowBytes, kTileRowBytes, row_bytes_};
        multiply_large<false>(block, panel, 0, num_steps(), Share{kWeightsAhead, brings_ ? kStepBytes : 0}, sums,
                              finisher_);
        finisher_.take(sums, 0, num_rows_, index);
    }

    // More than 32 rows times a panel. For many rows, the panel is processed in slices that stay in the first-level
    // cache while the rows are streamed.
    void multiply_blocks(const char* panel, int64_t index) {
        const int64_t num_slices = in_tiles_ ? (num_steps() + kSliceSteps - 1) / kSliceSteps : 1;
        for (int64_t first = 0; first < num_blocks(); first += kBlocksTogether) {
            const int64_t end = std::min(first + kBlocksTogether, num_blocks());
            float* sums[kBlocksTogether];
            for (int64_t slice = 0; slice < num_slices; ++slice) {
                const int64_t start = slice * num_steps() / num_slices, stop = (slice + 1) * num_steps() / num_slices;
                for (int64_t block = first; block < end; ++block) {
                    float*& own = sums[block - first];
                    if (slice == 0) own = next_sums();
                    multiply_large<true>(rows_of(block), panel, start, stop, share_of(block), own, finisher_);
                    if (slice + 1 == num_slices) {
                        // No row is finished twice: a gate is overwritten when its up is finished.
                        const int64_t row = block * kBlockRows, skipped = row - first_row(block);
                        const int64_t count = std::min(kBlockRows, num_rows_ - row);
                        finisher_.take(own + skipped * kPanelColumns, row, count, index);
                    }
                }
            }
        }
    }

    // Finishes the last block.
    void finish() { finisher_.finish_rows(kBlockRows); }

private:
    // Each block prefetches its share of the next panel: many lines at once would occupy the line fill buffers that
    // other loads need.
    Share share_of(int64_t block) const {
        if (!brings_) return {0, 0};
        const int64_t num_bytes = (kStepBytes / 64 + num_blocks() - 1) / num_blocks() * 64;
        return {num_steps() * kStepBytes + block * num_bytes, num_bytes};
    }

    // The last of two blocks begins early enough to have 32 rows, the first of which are computed again.
    int64_t first_row(int64_t block) const {
        return in_tiles_ ? block * kBlockRows : std::min(block * kBlockRows, num_rows_ - kBlockRows);
    }

    // In tiles, a register with more rows than there are reads the memory after them; if the second register has no
    // rows, it reads the first one's.
    BlockRows rows_of(int64_t block) const {
        const int64_t row = first_row(block), count = std::min(kTileRows, num_rows_ - row);
        const char *first = rows_ + row * row_bytes_, *second = first + count * row_bytes_;
        if (!in_tiles_) return {first, second, kTileRowBytes, kTileRowBytes, row_bytes_};
        const int64_t others = std::min(kTileRows, num_rows_ - row - count);
        if (others == 0) return {first, first, count * kTileRowBytes, count * kTileRowBytes, kTileRowBytes};
        return {first, second, count * kTileRowBytes, others * kTileRowBytes, kTileRowBytes};
    }

    float* next_sums() {
        next_ = next_ == kBlocksTogether ? 0 : next_ + 1;
        return sums_[next_];
    }

    // One more than are multiplied together: the finisher's block is not overwritten.
    alignas(64) float sums_[kBlocksTogether + 1][kBlockRows * kPanelColumns];
    int64_t next_ = 0;
    const bool in_tiles_, brings_;  // brings_: not if weights were just widened, as the cache has them
    const char* const rows_;
    const int64_t num_rows_, row_bytes_;
    const Store& store_;
    Finisher<Store> finisher_;
};

// Panels [first, end) of the weights times a chunk of rows. False if memory cannot be allocated.
template <class Store>
bool multiply_by_tiles(const PackedWeight& weight, const char* rows, int64_t num_rows, int64_t first, int64_t end,
                       const Store& store) {
    const int64_t wide_bytes = weight.num_units() * kUnitBytes;
    const bool is_int8 = weight.kind == WeightKind::kInt8;
    char* wide = nullptr;
    if (is_int8) {
        wide = static_cast<char*>(scratch(kScratchGemmPanel, kPanelsTogether * wide_bytes));
        if (wide == nullptr) {
            return false;
        }
    }
    // Chunks of more rows have full registers: see PanelProduct.
    configure_tiles(std::min(num_rows, kBlockRows));
    PanelProduct<Store> product(weight, rows, num_rows, store);
    for (int64_t index = first; index < end; index += kPanelsTogether) {
        const int64_t count = std::min(kPanelsTogether, end - index);
        const char* panels = weight.panels + index * weight.panel_bytes();
        if (is_int8) {
            widen_to_bf16(Int8Pairs(), panels, count * weight.num_units(), wide);
            panels = wide;
        }
        if (num_rows <= kTileRows && count == kPanelsTogether) {
            product.template multiply_few<kPanelsTogether>(panels, wide_bytes, index);
            continue;
        }
        for (int64_t i = 0; i < count; ++i) {
            const char* panel = panels + i * wide_bytes;
            if (num_rows <= kTileRows) {
                product.template multiply_few<1>(panel, wide_bytes, index + i);
            } else if (num_rows <= kBlockRows) {
                product.multiply_block(panel, index + i);
            } else {
                product.multiply_blocks(panel, index + i);
            }
        }
    }
    product.finish();
    _tile_release();
    return true;
}

}  // namespace
}  // namespace triptych
