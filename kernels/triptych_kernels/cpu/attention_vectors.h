// The products of attention by vector instructions; the rest of a task is in attention_task.h.
#pragma once

#include "attention_task.h"

namespace triptych {
namespace {

template <class Kind>
class VectorTask : TaskParts<Kind> {
    using Parts = TaskParts<Kind>;
    using Parts::kPositions, Parts::kSteps;
    using Parts::call_, Parts::first_tile_, Parts::num_columns_, Parts::num_units_, Parts::stride_;
    using Parts::highest_, Parts::keys_, Parts::queries_, Parts::scores_, Parts::seen_, Parts::sums_, Parts::values_;

public:
    struct Registers {};  // which the compiler allocates

    VectorTask(const Call& call, const QueryBlock& block, int64_t kv_head, const Stream& next)
        : Parts(call, block, kv_head, next, Shape{4, 1, kTilesTogether, 0}),
          num_vectors_(kPositions == 2 ? num_columns_ / 16 : (call.value_dim + 15) / 16) {}

    // False if memory cannot be allocated.
    bool run(Registers&) {
        if (!this->find_memory()) return false;
        this->lay_queries();
        this->for_passes([&](const Pass& pass) { score(pass); });
        this->weigh();
        const bool is_laid_out = call_.block_size % kTile == 0 && call_.value_dim % 32 == 0;
        this->for_passes([&](const Pass& pass) {
            if (is_laid_out && pass.is_alike && pass.num_rows() <= call_.share) {
                add_from_cache(pass);
            } else {
                add(pass);
            }
        });
        this->store_results();
        return true;
    }

private:
    void score(const Pass& pass) {
        for (int64_t tile = pass.tiles.first; tile < pass.tiles.end; tile += kTilesTogether) {
            const int64_t end_tile = std::min(tile + kTilesTogether, pass.tiles.end);
            for (int64_t t = tile; t < end_tile; ++t) this->lay_keys(pass, t, keys_ + (t - tile) * num_units_ * 16);
            for (int64_t r = pass.rows.first; r < pass.rows.end; r += kRowsTogether) {
                const int64_t count = std::min<int64_t>(kRowsTogether, pass.rows.end - r);
                const Range tiles = this->tiles_of(pass, r, count);
                const int64_t from = std::max(tile, tiles.first), to = std::min(end_tile, tiles.end);
                if (from >= to) continue;
                const bool is_plain = call_.soft_cap == 0.0f &&
                                      seen_[r + count - 1].first <= (first_tile_ + from) * kTile &&
                                      seen_[r].end >= (first_tile_ + to) * kTile;
                for (int64_t t = from; t < to; t += kVectorsTogether)
                    Loops<Kind>::kDotTiles[count - 1][std::min<int64_t>(kVectorsTogether, to - t) - 1](
                        queries_ + r * num_units_, keys_ + (t - tile) * num_units_ * 16, num_units_, call_.scale,
                        scores_ + r * stride_ + t * kTile, stride_, is_plain ? highest_ + r * 16 : nullptr);
                for (int64_t i = r; i < r + count && !is_plain; ++i) this->finish_scores(i, from, to);
            }
        }
    }

    void add(const Pass& pass) {
        for (int64_t tile = pass.tiles.first; tile < pass.tiles.end; tile += kTilesTogether) {
            const int64_t end_tile = std::min(tile + kTilesTogether, pass.tiles.end);
            for (int64_t t = tile; t < end_tile; ++t) {
                const char* later = this->after(pass, t, true, nullptr);
                if (later != nullptr) prefetch_bytes(later, kTile * call_.value_bytes);
                this->lay_values(pass, t, values_ + (t - tile) * kSteps * num_columns_);
            }
            for (int64_t r = pass.rows.first; r < pass.rows.end; r += kRowsTogether)
                add_to_group(pass, r, std::min<int64_t>(kRowsTogether, pass.rows.end - r), tile, end_tile);
        }
    }

    // add() for a single token: tiles that are wholly visible are read from the cache without another layout.
    void add_from_cache(const Pass& pass) {
        const Range seen = pass.stream.visible();
        for (int64_t tile = pass.tiles.first; tile < pass.tiles.end;) {
            CachedTiles tiles{{}, {}, 0};
            for (int64_t t = tile; t < pass.tiles.end && tiles.count < kTilesTogether; ++t, ++tiles.count) {
                const int64_t position = (first_tile_ + t) * kTile;
                if (position < seen.first || position + kTile > seen.end) break;
                tiles.values[tiles.count] = pass.stream.value(position);
                tiles.ahead[tiles.count] = this->after(pass, t, true, tiles.values[tiles.count]);
            }
            const int64_t end_tile = tile + std::max<int64_t>(tiles.count, 1);
            if (tiles.count == 0) this->lay_values(pass, tile, values_);
            for (int64_t r = pass.rows.first; r < pass.rows.end; r += kRowsTogether) {
                const int64_t count = std::min<int64_t>(kRowsTogether, pass.rows.end - r);
                if (tiles.count == 0) {
                    add_to_group(pass, r, count, tile, end_tile);
                    continue;
                }
                const int32_t* weights = reinterpret_cast<const int32_t*>(scores_ + r * stride_) + tile * kSteps;
                constexpr int64_t kColumns = 16 * kVectorsTogether;
                for (int64_t column = 0; column < call_.value_dim; column += kColumns)
                    Loops<Kind>::kAddTiles[count - 1][column + kColumns <= call_.value_dim](
                        weights, stride_, tiles, column, call_.value_dim, sums_ + r * num_columns_ + column,
                        num_columns_);
            }
            tile = end_tile;
        }
    }

    // Adds the values of some tiles to neighbouring rows: steps that all see wholly together, the others by row.
    void add_to_group(const Pass& pass, int64_t r, int64_t count, int64_t tile, int64_t end_tile) {
        const int64_t base = (first_tile_ + tile) * kTile, size = (end_tile - tile) * kTile;
        const auto clip = [&](int64_t position) { return std::min(std::max<int64_t>(position - base, 0), size); };
        if (pass.is_alike) {
            // All rows see the same positions, and values that they do not see are stored as zeros.
            const int64_t first = clip(seen_[r].first) / kPositions, end = (clip(seen_[r].end) + kPositions - 1) / kPositions;
            add_steps(Loops<Kind>::kAddValues[count - 1], r, tile, first, end, -1);
            return;
        }
        // Later rows see later positions.
        const int64_t first = (clip(seen_[r + count - 1].first) + kPositions - 1) / kPositions;
        const int64_t end = clip(seen_[r].end) / kPositions;
        if (first >= end) {
            for (int64_t i = r; i < r + count; ++i) add_to_row(i, tile, clip(seen_[i].first), clip(seen_[i].end));
            return;
        }
        for (int64_t i = r; i < r + count; ++i) add_to_row(i, tile, clip(seen_[i].first), first * kPositions);
        add_steps(Loops<Kind>::kAddValues[count - 1], r, tile, first, end, -1);
        for (int64_t i = r; i < r + count; ++i) add_to_row(i, tile, end * kPositions, clip(seen_[i].end));
    }

    // Adds positions from to to - 1 of a tile and of those after it to one row. Half of a step of two may be masked.
    void add_to_row(int64_t r, int64_t tile, int64_t from, int64_t to) {
        if (from >= to) return;
        int64_t step = from / kPositions;
        if (from % kPositions != 0) {
            add_steps(Loops<Kind>::kAddMasked, r, tile, step, step + 1, static_cast<int32_t>(0xffff0000));
            ++step;
        }
        if (step < to / kPositions) add_steps(Loops<Kind>::kAddValues[0], r, tile, step, to / kPositions, -1);
        if (to % kPositions != 0 && to / kPositions >= step)
            add_steps(Loops<Kind>::kAddMasked, r, tile, to / kPositions, to / kPositions + 1, 0x0000ffff);
    }

    void add_steps(
        const LoopsOfRows<AddValues>& loops, int64_t r, int64_t tile, int64_t first, int64_t end, int32_t kept) {
        const int32_t* weights = reinterpret_cast<const int32_t*>(scores_ + r * stride_) + tile * kSteps;
        for (int64_t v = 0; v < num_vectors_; v += kVectorsTogether)
            loops[std::min<int64_t>(kVectorsTogether, num_vectors_ - v) - 1](
                weights, stride_, values_ + v * 16, num_columns_, first, end, kept,
                sums_ + r * num_columns_ + v * 16, num_columns_);
    }

    const int64_t num_vectors_;  // of a row of sums
};

}  // namespace
}  // namespace triptych
