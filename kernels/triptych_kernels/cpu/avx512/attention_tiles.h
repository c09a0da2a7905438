// The products of attention in bf16 on the matrix unit of a CPU with AMX; the rest of a task is in attention_task.h.
//
// A register holds 32 numbers of up to 16 rows: of queries, or weights of 32 positions; or else 16 units of 16
// positions' keys, or of 16 columns of values. Scores are chains along the head, which zeros pad to steps of 32
// numbers. Sums of values are chains along the positions in steps of 32, the first a multiple of 32. A position that a
// row does not see has weight zero there, and a step of such positions changes no sum. So a row has the same bits in
// every batch. They differ from those of attention_vectors.h, since the unit sums even and odd numbers of a step
// separately.
//
// Include pool.h and isa.h before.
#pragma once

#include "../attention_task.h"

#include "amx.h"

namespace triptych {
namespace {

constexpr int64_t kTilesOfStep = 2;    // tiles of positions that are one step of weights
constexpr int64_t kStepsTogether = 4;  // of values that are interleaved, for many rows: see TileTask
constexpr int64_t kUnitsOfStep = 16;

// Rows times units of neighbouring registers, at most four. Strides are in bytes.
struct TileProduct {
    const char* rows;    // 64 bytes a step, one step after the other
    int64_t row_stride;  // 0 uses one row for all of them
    const char* units;
    int64_t unit_stride, step_stride, register_stride;
    int64_t num_steps;
    float* sums;  // 16 per register
    int64_t sums_stride;
};

// sums = rows times N registers of units for each step, or sums += that.
template <int N, bool ADDS>
[[gnu::noinline]] void multiply_tiles(const TileProduct& product) {
    // The compiler does not know what tiles are read from.
    asm volatile("" ::: "memory");
    float* sums = product.sums;
    const int64_t sums_stride = product.sums_stride, unit_stride = product.unit_stride;
    if (ADDS) {
        _tile_loadd(0, sums, sums_stride);
        if (N > 1) _tile_loadd(1, sums + 16, sums_stride);
        if (N > 2) _tile_loadd(2, sums + 32, sums_stride);
        if (N > 3) _tile_loadd(3, sums + 48, sums_stride);
    } else {
        zero_sums();
    }
    const char *rows = product.rows, *units = product.units;
    for (int64_t step = 0; step < product.num_steps; ++step, rows += kTileRowBytes, units += product.step_stride) {
        _tile_loadd(4, rows, product.row_stride);
        _tile_loadd(5, units, unit_stride);
        _tile_dpbf16ps(0, 4, 5);
        if (N > 1) {
            _tile_loadd(6, units + product.register_stride, unit_stride);
            _tile_dpbf16ps(1, 4, 6);
        }
        if (N > 2) {
            _tile_loadd(5, units + 2 * product.register_stride, unit_stride);
            _tile_dpbf16ps(2, 4, 5);
        }
        if (N > 3) {
            _tile_loadd(6, units + 3 * product.register_stride, unit_stride);
            _tile_dpbf16ps(3, 4, 6);
        }
    }
    _tile_stored(0, sums, sums_stride);
    if (N > 1) _tile_stored(1, sums + 16, sums_stride);
    if (N > 2) _tile_stored(2, sums + 32, sums_stride);
    if (N > 3) _tile_stored(3, sums + 48, sums_stride);
}

// By [registers - 1].
template <bool ADDS>
constexpr void (*kMultiplyTiles[4])(const TileProduct&) = {
    multiply_tiles<1, ADDS>, multiply_tiles<2, ADDS>, multiply_tiles<3, ADDS>, multiply_tiles<4, ADDS>};

constexpr int64_t kFewRows = 8;
constexpr int64_t kKeyTiles = 3;  // that are in the cache at a time
alignas(64) constexpr int32_t kPositionStarts[kTile] = {0,   16,  32,  48,  64,  80,  96,  112,
                                                  128, 144, 160, 176, 192, 208, 224, 240};

// Tiles of keys to multiply, and those that are read later.
struct KeyTiles {
    std::array<const char*, kKeyTiles> now, later;
};

// out[tile][position][row] = keys . queries, for N tiles of keys in their stored layout: only queries are transposed,
// and every product is the same as the other way round. queries: [unit][16 rows]. For registers of few rows. Prefetches
// as much as a product reads: all lines of a tile at once would occupy the line fill buffers, and keys that are in the
// cache would wait for one of them.
template <int N>
[[gnu::noinline]] void multiply_keys(
    const KeyTiles& keys, int64_t key_bytes, const char* queries, int64_t num_steps, float* out) {
    asm volatile("" ::: "memory");
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(7);
    for (int64_t step = 0; step < num_steps; ++step) {
        _tile_loadd(6, queries + step * kUnitsOfStep * 64, 64);
        _tile_loadd(5, keys.now[0] + step * kTileRowBytes, key_bytes);
        _tile_dpbf16ps(2, 5, 6);
        prefetch_bytes(keys.later[0] + step * kTileBytes, kTileBytes);
        if (N > 1) {
            _tile_loadd(5, keys.now[1] + step * kTileRowBytes, key_bytes);
            _tile_dpbf16ps(3, 5, 6);
            prefetch_bytes(keys.later[1] + step * kTileBytes, kTileBytes);
        }
        if (N > 2) {
            _tile_loadd(5, keys.now[2] + step * kTileRowBytes, key_bytes);
            _tile_dpbf16ps(7, 5, 6);
            prefetch_bytes(keys.later[2] + step * kTileBytes, kTileBytes);
        }
    }
    _tile_stored(2, out, 64);
    if (N > 1) _tile_stored(3, out + kTile * 16, 64);
    if (N > 2) _tile_stored(7, out + 2 * kTile * 16, 64);
    asm volatile("" ::: "memory");
}

constexpr void (*kMultiplyKeys[kKeyTiles])(const KeyTiles&, int64_t, const char*, int64_t, float*) = {
    multiply_keys<1>, multiply_keys<2>, multiply_keys<3>};

// The registers of this thread, for tasks one after the other. Configuring them takes as long as a few products. Tasks
// with few rows have three registers for scores of 16 positions each.
class TileRegisters {
public:
    TileRegisters() = default;
    TileRegisters(const TileRegisters&) = delete;
    ~TileRegisters() {
        if (num_rows_ > 0) _tile_release();
    }

    void hold(int64_t num_rows) {
        if (num_rows == num_rows_) return;
        if (num_rows <= kFewRows) {
            const int64_t all = kTileRows;
            configure_tiles({num_rows, num_rows, all, all, num_rows, all, all, all});
        } else {
            configure_tiles(num_rows);
        }
        num_rows_ = num_rows;
    }

private:
    int64_t num_rows_ = 0;  // of sums and of the products for them
};

class TileTask : TaskParts<Bf16Attention> {
public:
    using Registers = TileRegisters;

    TileTask(const Call& call, const QueryBlock& block, int64_t kv_head, const Stream& next)
        : TaskParts(
              call, block, kv_head, next,
              // One more step, for a row's own copy of values.
              Shape{kUnitsOfStep, rows_of_group(block.num_tokens * call.share),
                    (steps_together(block.num_tokens * call.share) + 1) * kTilesOfStep,
                    call.first_visible(block.position) / kTile % kTilesOfStep}) {}

    // False if memory cannot be allocated.
    bool run(Registers& registers) {
        if (!find_memory()) return false;
        lay_queries();
        for_passes([&](const Pass& pass) {
            registers.hold(rows_of_group(pass.num_rows()));
            score(pass);
        });
        weigh();
        for_passes([&](const Pass& pass) {
            registers.hold(rows_of_group(pass.num_rows()));
            clear_unseen_weights(pass);
            add(pass);
        });
        store_results();
        return true;
    }

private:
    // Groups of equal size, as few as hold all rows.
    static int64_t rows_of_group(int64_t num_rows) {
        const int64_t num_groups = (num_rows + kTileRows - 1) / kTileRows;
        return (num_rows + num_groups - 1) / num_groups;
    }

    // With few rows, the laid-out values are used once and should leave the first-level cache soon; many rows use them
    // for group after group, best several steps at a time.
    static int64_t steps_together(int64_t num_rows) { return rows_of_group(num_rows) <= kFewRows ? 1 : kStepsTogether; }

    // Steps, counted from the task's first, that have any position of the tiles.
    Range steps_of(Range tiles) const {
        return {(tiles.first + shape_.first_weight) / kTilesOfStep,
                (tiles.end + shape_.first_weight + kTilesOfStep - 1) / kTilesOfStep};
    }

    int64_t first_position(int64_t step) const {
        return (first_tile_ - shape_.first_weight + step * kTilesOfStep) * kTile;
    }

    char* weights(int64_t r) const { return reinterpret_cast<char*>(scores_ + r * stride_); }

    // body(first row, rows) for each group.
    template <class Body>
    static void for_groups(const Pass& pass, const Body& body) {
        const int64_t together = rows_of_group(pass.num_rows());
        for (int64_t r = pass.rows.first; r < pass.rows.end; r += together)
            body(r, std::min(together, pass.rows.end - r));
    }

    static bool has_few_rows(const Pass& pass) { return rows_of_group(pass.num_rows()) <= kFewRows; }
    // Registers that hold sums of all rows.
    static int64_t sums_together(const Pass& pass) { return has_few_rows(pass) ? 2 : 4; }

    void score(const Pass& pass) {
        if (has_few_rows(pass) && call_.block_size % kTile == 0 && call_.key_bytes % kTileRowBytes == 0) {
            return score_in_place(pass);
        }
        const int64_t padding = num_units_ - num_chunks_ * 4;
        const int64_t together = steps_together(pass.num_rows()) * kTilesOfStep;
        for (int64_t t = 0; t < together && padding > 0; ++t)
            std::memset(keys_ + ((t + 1) * num_units_ - padding) * 16, 0, padding * 64);
        for (int64_t tile = pass.tiles.first; tile < pass.tiles.end; tile += together) {
            const int64_t end_tile = std::min(tile + together, pass.tiles.end);
            for (int64_t t = tile; t < end_tile; ++t) lay_keys(pass, t, keys_ + (t - tile) * num_units_ * 16);
            for_groups(pass, [&](int64_t r, int64_t count) {
                const Range tiles = tiles_of(pass, r, count);
                const int64_t end = std::min(end_tile, tiles.end);
                for (int64_t t = std::max(tile, tiles.first); t < end; t += sums_together(pass))
                    score_tiles(
                        r, count, keys_ + (t - tile) * num_units_ * 16, t, std::min(t + sums_together(pass), end));
            });
        }
    }

    // Scores of few rows, from keys in the cache.
    void score_in_place(const Pass& pass) {
        const int64_t first_row = pass.rows.first, num_rows = pass.num_rows();
        std::array<const char*, kTile> queries{};  // as many as are transposed together
        for (int64_t r = 0; r < num_rows; ++r)
            queries[r] = reinterpret_cast<const char*>(queries_ + (first_row + r) * num_units_);
        // The products of the other columns are in no row's score.
        auto* turned = reinterpret_cast<uint32_t*>(keys_);
        pack_rows(queries.data(), static_cast<int>(num_rows), num_units_ * 4, num_units_, turned, kTile);
        alignas(64) float scores[kKeyTiles * kTile * 16];
        const __m512i position_starts = _mm512_load_si512(kPositionStarts);
        for (int64_t tile = pass.tiles.first; tile < pass.tiles.end; tile += kKeyTiles) {
            const int64_t count = std::min(kKeyTiles, pass.tiles.end - tile);
            KeyTiles keys{};
            for (int64_t t = 0; t < count; ++t) {
                keys.now[t] = pass.stream.key((first_tile_ + tile + t) * kTile);
                keys.later[t] = after(pass, tile + t, false, keys.now[t]);
            }
            kMultiplyKeys[count - 1](
                keys, call_.key_bytes, reinterpret_cast<const char*>(turned), num_units_ / kUnitsOfStep, scores);
            for (int64_t r = 0; r < num_rows; ++r)
                for (int64_t t = 0; t < count; ++t)
                    _mm512_store_ps(
                        scores_ + (first_row + r) * stride_ + (tile + t) * kTile,
                        _mm512_i32gather_ps(position_starts, scores + t * kTile * 16 + r, 4));
            scale_scores(first_row, num_rows, tile, tile + count);
        }
    }

    // Scores of a group for as many tiles as there are registers.
    void score_tiles(int64_t r, int64_t count, const int32_t* keys, int64_t from, int64_t to) {
        kMultiplyTiles<false>[to - from - 1](TileProduct{
            reinterpret_cast<const char*>(queries_ + r * num_units_), num_units_ * 4,
            reinterpret_cast<const char*>(keys), 64, kUnitsOfStep * 64, num_units_ * 64, num_units_ / kUnitsOfStep,
            scores_ + r * stride_ + from * kTile, stride_ * 4});
        scale_scores(r, count, from, to);
    }

    void scale_scores(int64_t r, int64_t count, int64_t from, int64_t to) {
        const bool is_plain = call_.soft_cap == 0.0f && seen_[r + count - 1].first <= (first_tile_ + from) * kTile &&
                              seen_[r].end >= (first_tile_ + to) * kTile;
        const __m512 scale = _mm512_set1_ps(call_.scale);
        for (int64_t i = r; i < r + count; ++i) {
            __m512 highest = _mm512_load_ps(highest_ + i * 16);
            for (int64_t t = from; t < to; ++t) {
                float* scores = scores_ + i * stride_ + t * kTile;
                const __m512 score = mul(_mm512_load_ps(scores), scale);
                _mm512_store_ps(scores, score);
                highest = _mm512_max_ps(score, highest);
            }
            if (is_plain) {
                _mm512_store_ps(highest_ + i * 16, highest);
            } else {
                finish_scores(i, from, to);
            }
        }
    }

    // Zeroes the weights of a group's steps that are in none of a row's own tiles.
    void clear_unseen_weights(const Pass& pass) {
        constexpr int64_t kBytesOfTile = kTileRowBytes / kTilesOfStep;
        for_groups(pass, [&](int64_t r, int64_t count) {
            const Range steps = steps_of(tiles_of(pass, r, count));
            const int64_t first = steps.first * kTileRowBytes, end = steps.end * kTileRowBytes;
            for (int64_t i = r; i < r + count; ++i) {
                const Range tiles = tiles_of(pass, i, 1);
                const int64_t own = (tiles.first + shape_.first_weight) * kBytesOfTile;
                const int64_t own_end = (tiles.end + shape_.first_weight) * kBytesOfTile;
                std::memset(weights(i) + first, 0, own - first);
                std::memset(weights(i) + own_end, 0, end - own_end);
            }
        });
    }

    void add(const Pass& pass) {
        const int64_t together = rows_of_group(pass.num_rows()), most_steps = steps_together(pass.num_rows());
        const int64_t last_step = steps_of(pass.tiles).end;
        for (int64_t step = steps_of(pass.tiles).first; step < last_step; step += most_steps) {
            const int64_t end_step = std::min(step + most_steps, last_step);
            bool is_harmless[kStepsTogether];  // even for rows that do not see all of it
            for (int64_t s = step; s < end_step; ++s) is_harmless[s - step] = lay_step(pass, s, values_of(s - step));
            for_groups(pass, [&](int64_t r, int64_t count) {
                const Range steps = steps_of(tiles_of(pass, r, count));
                const int64_t end = std::min(end_step, steps.end);
                for (int64_t s = std::max(step, steps.first), next; s < end; s = next) {
                    next = s;
                    while (next < end && (is_harmless[next - step] || all_see(r, count, next))) ++next;
                    if (next > s) {
                        add_steps(r, together, sums_together(pass), s, next - s, values_of(s - step));
                        continue;
                    }
                    for (int64_t i = r; i < r + count; ++i)
                        add_seen(i, sums_together(pass), s, values_of(s - step), values_of(most_steps));
                    ++next;
                }
            });
        }
    }

    int32_t* values_of(int64_t step) const { return values_ + step * kUnitsOfStep * num_columns_; }

    // Whether rows r to r + count - 1 see every position of a step.
    bool all_see(int64_t r, int64_t count, int64_t step) const {
        return seen_[r + count - 1].first <= first_position(step) &&
               seen_[r].end >= first_position(step) + kTilesOfStep * kTile;
    }

    // Lays out the values of a step, with zeros for positions that no row sees. False if a row does not see all of them
    // and one is not finite: its product with a weight of zero is not zero.
    bool lay_step(const Pass& pass, int64_t step, int32_t* out) const {
        for (int64_t i = 0; i < kTilesOfStep; ++i) {
            const int64_t tile = step * kTilesOfStep + i - shape_.first_weight;
            int32_t* tile_out = out + i * kSteps * num_columns_;
            if (tile < 0 || tile >= pass.tiles.end) {
                std::memset(tile_out, 0, kSteps * num_columns_ * 4);
                continue;
            }
            // In two parts, as for keys.
            const int64_t part = kTile / 2 * call_.value_bytes;
            const char* later = after(pass, tile, true, nullptr);
            if (later != nullptr) prefetch_bytes(later, part);
            lay_values(pass, tile, tile_out);
            if (later != nullptr) prefetch_bytes(later + part, part);
        }
        if (pass.is_alike || all_see(0, num_rows_, step)) return true;
        const __m512i exponent = _mm512_set1_epi16(0x7f80);
        __mmask32 found = 0;
        for (int64_t i = 0; i < kUnitsOfStep * num_columns_; i += 16)
            found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_load_si512(out + i), exponent), exponent);
        return found == 0;
    }

    // Adds neighbouring steps to num_rows rows, or to one. most_sums: registers that hold sums of all rows.
    void add_steps(
        int64_t r, int64_t num_rows, int64_t most_sums, int64_t step, int64_t num_steps, const int32_t* values) {
        const bool is_one = num_rows == 1;
        for (int64_t column = 0; column < num_columns_; column += 16 * most_sums)
            kMultiplyTiles<true>[std::min(most_sums, (num_columns_ - column) / 16) - 1](TileProduct{
                weights(r) + step * kTileRowBytes, is_one ? 0 : stride_ * 4,
                reinterpret_cast<const char*>(values + column), num_columns_ * 4, kUnitsOfStep * num_columns_ * 4, 64,
                num_steps, sums_ + r * num_columns_ + column, is_one ? 0 : num_columns_ * 4});
    }

    // Adds one step to one row, with zeros for values that it does not see. cleared: room for the values of a step.
    void add_seen(int64_t r, int64_t most_sums, int64_t step, const int32_t* values, int32_t* cleared) {
        for (int64_t unit = 0; unit < kUnitsOfStep; ++unit) {
            const int64_t position = first_position(step) + 2 * unit;
            const auto sees = [&](int64_t p) { return p >= seen_[r].first && p < seen_[r].end; };
            const __m512i kept =
                _mm512_set1_epi32((sees(position) ? 0x0000ffff : 0) | (sees(position + 1) ? 0xffff0000 : 0));
            for (int64_t column = unit * num_columns_; column < (unit + 1) * num_columns_; column += 16)
                _mm512_store_si512(cleared + column, _mm512_and_si512(_mm512_load_si512(values + column), kept));
        }
        add_steps(r, 1, most_sums, step, 1, cleared);
    }
};

}  // namespace
}  // namespace triptych
