// One task of attention: a KV head of a few neighbouring tokens of a row, with all query heads that read it.
//
// It iterates over the positions that the tokens see three times: scores, weights, values. This file has everything but
// the products, which are in attention_vectors.h and avx512/attention_tiles.h. Knows no Python and no threads.
#pragma once

#include <algorithm>
#include <limits>

#include "pool.h"

#include "attention_kernels.h"

namespace triptych {
namespace {

// Prefetch distance of tiles in bytes: blocks are anywhere in memory, and no hardware predicts the next one.
constexpr int64_t kBytesAhead = 10 << 10;

// The arguments of a call; strides in elements.
struct Call {
    const char *query, *keys, *values;
    char* output;
    const int32_t *tables, *starts, *totals;
    const float* sinks;
    int64_t token_stride, head_stride, table_stride, num_table_columns;
    int64_t num_rows, num_tokens, num_heads, num_kv_heads, num_blocks, block_size, key_dim, value_dim, window;
    int64_t num_common_blocks;  // leading blocks that the tables of all rows share
    bool is_bf16, with_amx;
    float scale, soft_cap;
    // Derived.
    int64_t share, key_bytes, value_bytes, tiles_ahead;
    int block_shift;  // the logarithm of block_size, -1 if it is no power of two

    void derive() {
        share = num_heads / num_kv_heads;
        key_bytes = key_dim * (is_bf16 ? 2 : 4), value_bytes = value_dim * (is_bf16 ? 2 : 4);
        tiles_ahead = std::max<int64_t>(2, kBytesAhead / (16 * std::max(key_bytes, value_bytes)));
        block_shift = (block_size & (block_size - 1)) == 0 ? __builtin_ctzll(block_size) : -1;
    }

    int64_t first_visible(int64_t position) const { return std::max<int64_t>(0, position - window + 1); }

    // The slot of a row's position, relative to its KV head's first slot in block 0.
    int64_t slot(const int32_t* table, int64_t position) const {
        if (block_shift >= 0)
            return (table[position >> block_shift] * num_kv_heads << block_shift) + (position & (block_size - 1));
        return table[position / block_size] * num_kv_heads * block_size + position % block_size;
    }
};

// Tokens of one row, or the only tokens of neighbouring rows that begin with the same blocks: `row` and `token` are the
// first's, the latter an index in the step, `position` its position in the row.
struct QueryBlock {
    int64_t row, token, position, num_tokens;
    int64_t num_common_tiles = 0;  // that all rows read, from position 0; 0 for tokens of one row

    bool has_rows() const { return num_common_tiles > 0; }  // not one row
    int64_t row_of(int64_t i) const { return has_rows() ? row + i : row; }
    int64_t position_of(const Call& call, int64_t i) const {
        return has_rows() ? call.totals[row + i] - 1 : position + i;
    }
};

// Positions first to end - 1.
struct Range {
    int64_t first, end;
};

// What a task reads of one row: tiles of keys, then of values.
class Stream {
public:
    Stream(const Call& call, const QueryBlock& block, int64_t kv_head)
        : Stream(call, block.row, kv_head, {call.first_visible(block.position), block.position + block.num_tokens}) {}

    // visible: positions that any token of the task sees.
    Stream(const Call& call, int64_t row, int64_t kv_head, Range visible)
        : call_(call), table_(call.tables + row * call.table_stride),
          keys_(call.keys + kv_head * call.block_size * call.key_bytes),
          values_(call.values + kv_head * call.block_size * call.value_bytes), visible_(visible),
          first_tile_(visible_.first / kTile), num_tiles_((visible_.end + kTile - 1) / kTile - first_tile_) {}

    Range visible() const { return visible_; }
    int64_t first_tile() const { return first_tile_; }
    int64_t num_tiles() const { return num_tiles_; }

    const char* key(int64_t position) const { return keys_ + call_.slot(table_, position) * call_.key_bytes; }
    const char* value(int64_t position) const { return values_ + call_.slot(table_, position) * call_.value_bytes; }

    // The address that will be read some tiles after `tile`, counted over keys, then values, then the `next` task's;
    // `otherwise` if that is not known.
    const char* after(int64_t tile, const Stream& next, const char* otherwise) const {
        if (call_.block_size % kTile != 0) return otherwise;
        // At most as far as the next task, which prefetches what is beyond it.
        tile += std::min(call_.tiles_ahead, 2 * num_tiles_);
        const char* found = tile < 2 * num_tiles_ ? at(tile) : next.at(tile - 2 * num_tiles_);
        return found == nullptr ? otherwise : found;
    }

private:
    const char* at(int64_t tile) const {
        if (tile < num_tiles_) return key((first_tile_ + tile) * kTile);
        return tile < 2 * num_tiles_ ? value((first_tile_ + tile - num_tiles_) * kTile) : nullptr;
    }

    const Call& call_;
    const int32_t* const table_;
    const char *const keys_, *const values_;
    const Range visible_;
    const int64_t first_tile_, num_tiles_;
};

// Rows first to end - 1 of a task over tiles of one stream, both counted from the task's first.
struct Pass {
    int64_t index;
    Stream stream;
    Range rows, tiles;
    bool is_alike;  // whether all rows see the same of these tiles

    int64_t num_rows() const { return rows.end - rows.first; }
};

// The memory layout that a task's inner loops need.
struct Shape {
    int64_t units_together;  // of queries and keys, which are padded to a multiple of it with zeros
    int64_t rows_together;   // of queries; there is memory for a multiple of it
    int64_t tiles_together;  // of keys, or of values, that are transposed together
    int64_t first_weight;    // weights of the first tile are that many tiles after the row's start
};

// The parts of a task that do not depend on the product: layout of its inputs, masking of scores, weights, results.
template <class Kind>
class TaskParts {
    using Element = typename Kind::Element;

protected:
    static constexpr int64_t kPositions = Kind::kPositionsPerStep;
    static constexpr int64_t kSteps = kTile / kPositions;  // of a tile

    // next: what this thread will probably read after this task.
    TaskParts(const Call& call, const QueryBlock& block, int64_t kv_head, const Stream& next, const Shape& shape)
        : call_(call), block_(block), kv_head_(kv_head), next_(next), shape_(shape),
          num_rows_(block.num_tokens * call.share), num_tiles_(most_tiles(call, block)),
          first_tile_(call.first_visible(block.position) / kTile),
          num_chunks_((call.key_bytes + 15) / 16),
          num_units_(rounded_up(num_chunks_ * Kind::kUnitsPerChunk, shape.units_together)),
          num_columns_(rounded_up(call.value_dim, 32)),
          // An odd number of cache lines keeps the rows of a group in different sets of the cache.
          stride_((num_tiles_ | 1) * kTile) {}

    static int64_t rounded_up(int64_t number, int64_t unit) { return (number + unit - 1) / unit * unit; }

    // From the first tile to the last that any token of a block sees.
    static int64_t most_tiles(const Call& call, const QueryBlock& block) {
        if (!block.has_rows()) return Stream(call, block, 0).num_tiles();
        int64_t most = 0;
        for (int64_t i = 0; i < block.num_tokens; ++i) most = std::max(most, block.position_of(call, i) / kTile + 1);
        return most;
    }

    // The parts in which the positions are read: those that all rows share, then each row's own. A score has the same
    // bits in any of them, and sums go on from part to part.
    template <class Body>
    void for_passes(const Body& body) const {
        for (int64_t index = 0; index < num_passes(); ++index) body(pass(index));
    }
    int64_t num_passes() const { return block_.has_rows() ? 1 + block_.num_tokens : 1; }
    Pass pass(int64_t index) const {
        if (!block_.has_rows()) {
            const Stream stream(call_, block_, kv_head_);
            return {0, stream, {0, num_rows_}, {0, num_tiles_}, block_.num_tokens == 1};
        }
        const int64_t common = block_.num_common_tiles;
        if (index == 0)
            return {0, Stream(call_, block_.row, kv_head_, {0, common * kTile}), {0, num_rows_}, {0, common}, true};
        const Stream stream(call_, block_.row + index - 1, kv_head_, {0, block_.position_of(call_, index - 1) + 1});
        return {index, stream, {(index - 1) * call_.share, index * call_.share}, {common, stream.num_tiles()}, true};
    }

    // The address of what will be read some tiles after a tile's keys or values; `otherwise` if that is not known.
    const char* after(const Pass& at, int64_t tile, bool of_values, const char* otherwise) const {
        if (!block_.has_rows()) return at.stream.after(of_values ? num_tiles_ + tile : tile, next_, otherwise);
        if (call_.block_size % kTile != 0) return otherwise;
        tile += call_.tiles_ahead;
        int64_t index = at.index, end = at.tiles.end;
        while (tile >= end) {
            tile += block_.num_common_tiles - end;
            // The values of the common tiles are in a cache: they were read not long ago, or will be by all rows.
            if (++index == num_passes()) return otherwise;
            end = block_.position_of(call_, index - 1) / kTile + 1;
        }
        const Stream& stream = index == at.index ? at.stream : pass(index).stream;
        return of_values ? stream.value(tile * kTile) : stream.key(tile * kTile);
    }

    // False if memory cannot be allocated.
    bool find_memory() {
        const int64_t num_rows = rounded_up(num_rows_, shape_.rows_together), num_tiles = shape_.tiles_together;
        int64_t size = 0;
        const auto reserve = [&](int64_t num_bytes) {
            const int64_t at = size;
            size += rounded_up(num_bytes, 64);
            return at;
        };
        const int64_t queries = reserve(num_rows * num_units_ * 4), keys = reserve(num_tiles * num_units_ * 64);
        const int64_t padded = reserve(kTile * num_chunks_ * 16);
        const int64_t values = reserve(num_tiles * kSteps * num_columns_ * 4);
        const int64_t sums = reserve(num_rows * num_columns_ * 4), highest = reserve(num_rows_ * 64);
        const int64_t totals = reserve(num_rows_ * 4), seen = reserve(num_rows_ * sizeof(Range));
        const int64_t scores = reserve(num_rows * stride_ * 4);
        char* memory = static_cast<char*>(scratch(kScratchAttention, size));
        if (memory == nullptr) return false;
        queries_ = reinterpret_cast<int32_t*>(memory + queries);
        keys_ = reinterpret_cast<int32_t*>(memory + keys);
        padded_ = memory + padded;
        values_ = reinterpret_cast<int32_t*>(memory + values);
        sums_ = reinterpret_cast<float*>(memory + sums);
        highest_ = reinterpret_cast<float*>(memory + highest);
        totals_ = reinterpret_cast<float*>(memory + totals);
        seen_ = reinterpret_cast<Range*>(memory + seen);
        scores_ = reinterpret_cast<float*>(memory + scores);
        return true;
    }

    void lay_queries() {
        const Floats lowest = splat(-std::numeric_limits<float>::infinity());
        for (int64_t r = 0, token = 0; token < block_.num_tokens; ++token) {
            const int64_t position = block_.position_of(call_, token);
            const Range seen{call_.first_visible(position), position + 1};
            const Element* from = reinterpret_cast<const Element*>(call_.query) +
                                  (block_.token + token) * call_.token_stride +
                                  kv_head_ * call_.share * call_.head_stride;
            for (int64_t head = 0; head < call_.share; ++head, ++r) {
                int32_t* query = queries_ + r * num_units_;
                std::memset(query, 0, num_units_ * 4);
                Kind::lay_query(from + head * call_.head_stride, call_.key_bytes, query);
                seen_[r] = seen;
                store(highest_ + r * 16, lowest);
            }
        }
        std::memset(sums_, 0, num_rows_ * num_columns_ * 4);
    }

    // tile: counted from the task's first.
    void lay_keys(const Pass& pass, int64_t tile, int32_t* out) const {
        const int64_t position = (first_tile_ + tile) * kTile, num_bytes = call_.key_bytes;
        if (call_.block_size % kTile == 0 && num_bytes % 16 == 0) {
            const char* keys = pass.stream.key(position);
            prefetch_bytes(after(pass, tile, false, keys), kTile * num_bytes);
            turn_tile<Kind>(keys, num_bytes, num_chunks_, out);
            return;
        }
        // Scores of positions that no row sees are replaced: any of the row's keys will do there.
        const Range visible = pass.stream.visible();
        const int64_t padded_bytes = num_chunks_ * 16;
        std::memset(padded_, 0, kTile * padded_bytes);
        for (int64_t i = 0; i < kTile; ++i)
            std::memcpy(
                padded_ + i * padded_bytes,
                pass.stream.key(std::min(std::max(position + i, visible.first), visible.end - 1)), num_bytes);
        turn_tile<Kind>(padded_, padded_bytes, num_chunks_, out);
    }

    void lay_values(const Pass& pass, int64_t tile, int32_t* out) const {
        const int64_t position = (first_tile_ + tile) * kTile;
        const Range visible = pass.stream.visible();
        if (call_.block_size % kTile == 0 && position >= visible.first && position + kTile <= visible.end) {
            const auto* first = reinterpret_cast<const Element*>(pass.stream.value(position));
            lay_tile(Kind(), first, call_.value_dim, out, num_columns_);
            return;
        }
        for (int64_t p = position; p < position + kTile; p += kPositions, out += num_columns_) {
            const Element* rows[kPositions];
            for (int64_t i = 0; i < kPositions; ++i) {
                const bool is_seen = p + i >= visible.first && p + i < visible.end;
                rows[i] = is_seen ? reinterpret_cast<const Element*>(pass.stream.value(p + i)) : nullptr;
            }
            lay_step(Kind(), rows, call_.value_dim, out);
        }
    }

    // Tiles of a pass that have a position visible to rows r to r + count - 1.
    Range tiles_of(const Pass& pass, int64_t r, int64_t count) const {
        return pass.is_alike ? pass.tiles : Range{seen_[r].first / kTile - first_tile_, end_tile(r + count - 1)};
    }

    // Behind the last tile that row r sees.
    int64_t end_tile(int64_t r) const { return (seen_[r].end + kTile - 1) / kTile - first_tile_; }

    // Caps and masks the scores of tiles from to to - 1, and keeps the highest of each lane.
    void finish_scores(int64_t r, int64_t from, int64_t to) {
        const Floats hidden = splat(-std::numeric_limits<float>::infinity());
        const Floats cap = splat(call_.soft_cap);
        Floats highest = load(highest_ + r * 16);
        for (int64_t t = from; t < to; ++t) {
            float* scores = scores_ + r * stride_ + t * kTile;
            Floats score = load(scores);
            if (call_.soft_cap > 0.0f) score = mul(tanh16(div(score, cap)), cap);
            const int64_t position = (first_tile_ + t) * kTile;
            const Mask seen = first_lanes(seen_[r].end - position) & ~first_lanes(seen_[r].first - position);
            score = where(seen, score, hidden);
            highest = max(score, highest);
            store(scores, score);
        }
        store(highest_ + r * 16, highest);
    }

    // Turns scores into weights, in place: the weights of a tile do not overlap scores of the next.
    void weigh() {
        for (int64_t r = 0; r < num_rows_; ++r) {
            float highest = highest_lane(load(highest_ + r * 16));
            const int64_t head = kv_head_ * call_.share + r % call_.share;
            const float* sink = call_.sinks == nullptr ? nullptr : call_.sinks + head;
            if (sink != nullptr) highest = std::max(highest, *sink);
            const Floats subtracted = splat(highest);
            float* scores = scores_ + r * stride_;
            int32_t* units = reinterpret_cast<int32_t*>(scores);
            Floats total = zeros();
            const int64_t last_tile = end_tile(r);
            for (int64_t t = seen_[r].first / kTile - first_tile_; t < last_tile; ++t)
                total = add(
                    total, weigh_tile(
                               Kind(), scores + t * kTile, subtracted, units + (t + shape_.first_weight) * kSteps));
            totals_[r] = sum_of_lanes(total);
            if (sink != nullptr)
                totals_[r] += first_lane(exp16(sub(splat(*sink), subtracted)));
        }
    }

    void store_results() const {
        Element* out = reinterpret_cast<Element*>(call_.output) +
                       (block_.token * call_.num_heads + kv_head_ * call_.share) * call_.value_dim;
        for (int64_t r = 0, token = 0; token < block_.num_tokens; ++token) {
            for (int64_t head = 0; head < call_.share; ++head, ++r)
                store_result(
                    Kind(), sums_ + r * num_columns_, totals_[r], call_.value_dim, out + head * call_.value_dim);
            out += call_.num_heads * call_.value_dim;
        }
    }

    const Call& call_;
    const QueryBlock& block_;
    const int64_t kv_head_;
    const Stream& next_;
    const Shape shape_;
    // Rows are tokens times heads, heads within a token.
    const int64_t num_rows_, num_tiles_, first_tile_, num_chunks_, num_units_, num_columns_, stride_;
    int32_t *queries_, *keys_, *values_;
    char* padded_;
    float *sums_, *highest_, *totals_, *scores_;
    Range* seen_;  // visible positions, by row
};

}  // namespace
}  // namespace triptych
