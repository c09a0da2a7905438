// Low-rank additions to a projection: scale * B A x, with the matrices of each row's slot.
//
// Rows with the same slot are computed together, so matrices are read once for several rows. Every number is its own
// chain of multiply-adds, whatever rows are computed beside it: this makes results independent of the batch. A has its
// ranks in lanes, B its outputs, sixteen at a time. With matrices in bf16, scale * A x is rounded to bf16. Include isa.h
// before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "microkernel.h"
#include "pool.h"
#include "vector_math.h"

namespace triptych {
namespace {

constexpr int64_t kLanes = 16;
constexpr int kChains = 4;  // of a number of A x, for units in turn: one alone would wait for each multiply-add
constexpr int kShrunkRows = kVectors > 1 ? 4 : 1;
constexpr int kExpandedRows = 4;
// Units of A, 64 bytes each, that one thread reads in the time that other threads need to begin.
constexpr int64_t kUnitsAlone = 512;
// Prefetch distance: what memory delivers during the latency of one request. B follows A.
constexpr int64_t kMatricesAhead = 4096;
constexpr int64_t kUpUnitBytes = 4 * kLanes;

// The matrices of a slot for one part of a projection; low_rank.py lays them out.
struct LowRankMatrices {
    const char* down;  // A: for each sixteen ranks [units][16] 32-bit numbers, pairs of bf16 or fp32; see last_lanes
    const char* up;    // B: for each sixteen outputs, padded with zeros, [units of ranks][16] such numbers
    int64_t rank;      // 0: there are none
    double scale;

    int64_t num_groups() const { return (rank + kLanes - 1) / kLanes; }
    // Lanes that a unit of the last group has in memory.
    int64_t last_lanes() const { return (rank - 1) % kLanes / 4 * 4 + 4; }
};

// The additions of all slots: a table of numbers that low_rank.py writes.
class LowRankTable {
public:
    explicit LowRankTable(int64_t address) : numbers_(reinterpret_cast<const int64_t*>(address)) {}

    int64_t in_features() const { return numbers_[0]; }
    int64_t out_features() const { return numbers_[1]; }
    int64_t num_slots() const { return numbers_[2]; }
    int64_t num_parts() const { return numbers_[3]; }
    bool is_fp32() const { return numbers_[4] != 0; }
    int64_t total_rank() const { return numbers_[5]; }  // of all parts, at most
    int64_t part_end(int64_t part) const { return numbers_[kNumNumbers + part]; }
    const LowRankMatrices* parts_of(int64_t slot) const {
        const int64_t* entries = numbers_ + kNumNumbers + num_parts();
        return reinterpret_cast<const LowRankMatrices*>(entries) + slot * num_parts();
    }
    bool has_any(int64_t slot) const {
        const LowRankMatrices* parts = parts_of(slot);
        return std::any_of(parts, parts + num_parts(), [](const LowRankMatrices& part) { return part.rank > 0; });
    }

private:
    static constexpr int64_t kNumNumbers = 6;
    const int64_t* numbers_;
};
static_assert(sizeof(LowRankMatrices) == 4 * sizeof(int64_t), "an entry is four numbers");

// A masked store is slow to read back.
TRIPTYCH_INLINE void store_lanes(float* to, Mask lanes, Floats x) {
    lanes == 0xFFFF ? store(to, x) : store_part(to, lanes, x);
}
TRIPTYCH_INLINE void store_lanes(uint16_t* to, Mask lanes, Halves x) {
    lanes == 0xFFFF ? store_halves(to, x) : store_halves_part(to, lanes, x);
}

// Units of sixteen outputs of B.
inline int64_t up_units(int64_t rank, bool is_fp32) { return is_fp32 ? rank : (rank + 1) / 2; }

inline void prefetch_start(const char* matrices) {
    for (int64_t line = 0; line < kMatricesAhead; line += 64) __builtin_prefetch(matrices + line);
}

// A x for R rows and sixteen ranks, in the numbers of the matrices.
template <bool kIsFp32, int R>
void shrink_tile(const char* down, int64_t unit_bytes, int64_t in_features, const char* const* rows, float scale,
                 Mask ranks, char* const* out) {
    Floats sums[R][kChains];
    for (int r = 0; r < R; ++r) {
        for (int c = 0; c < kChains; ++c) sums[r][c] = zeros();
    }
    const auto add_unit = [&](const Words& weights, uint32_t x, Floats& sum) {
        const Words lanes = splat_word(static_cast<int32_t>(x));
        sum = kIsFp32 ? fmadd(as_floats(lanes), as_floats(weights), sum) : add_pair_products(sum, lanes, weights);
    };
    const int64_t num_units = kIsFp32 ? in_features : in_features / 2;
    int64_t unit = 0;
    for (; unit + kChains <= num_units; unit += kChains) {
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c, down += unit_bytes) {
            __builtin_prefetch(down + kMatricesAhead);
            const Words weights = load_words(down);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                uint32_t x;
                std::memcpy(&x, rows[r] + 4 * (unit + c), 4);
                add_unit(weights, x, sums[r][c]);
            }
        }
    }
    const int64_t row_bytes = in_features * (kIsFp32 ? 4 : 2);
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c, ++unit, down += unit_bytes) {
        if (4 * unit >= row_bytes) break;
        const Words weights = load_words(down);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            uint32_t x = 0;  // the last pair may have one number
            std::memcpy(&x, rows[r] + 4 * unit, static_cast<size_t>(std::min<int64_t>(4, row_bytes - 4 * unit)));
            add_unit(weights, x, sums[r][c]);
        }
    }
    for (int r = 0; r < R; ++r) {
        const Floats sum = add(add(sums[r][0], sums[r][1]), add(sums[r][2], sums[r][3]));
        const Floats shrunk = mul(sum, splat(scale));
        if constexpr (kIsFp32) {
            store_lanes(reinterpret_cast<float*>(out[r]), ranks, shrunk);
        } else {
            store_lanes(reinterpret_cast<uint16_t*>(out[r]), ranks, narrow_floats(shrunk));
        }
    }
}

// B times the shrunk x of R rows, for V times sixteen outputs. out: of the first of these, where lanes have a bit.
template <bool kIsFp32, int R, int V>
void expand_tile(const char* up, int64_t num_units, const char* const* shrunk, const Mask* lanes, float* const* out) {
    Floats sums[R][V];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) sums[r][v] = zeros();
    }
    for (int64_t unit = 0; unit < num_units; ++unit, up += kUpUnitBytes) {
        Words weights[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const char* from = up + v * num_units * kUpUnitBytes;
            __builtin_prefetch(from + kMatricesAhead);
            weights[v] = load_words(from);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            int32_t word;
            std::memcpy(&word, shrunk[r] + 4 * unit, 4);
            const Words x = splat_word(word);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                sums[r][v] = kIsFp32 ? fmadd(as_floats(x), as_floats(weights[v]), sums[r][v])
                                     : add_pair_products(sums[r][v], x, weights[v]);
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) store_lanes(out[r] + v * kLanes, lanes[v], sums[r][v]);
    }
}

// The rows of a chunk with additions, ordered by slot.
class LowRankRows {
public:
    // slots: of each row; -1 and those without matrices add nothing. Precondition: they are below the table's number.
    LowRankRows(LowRankTable table, const int64_t* slots, int64_t num_rows) : table_(table), memory_(memory()) {
        rows_.clear();
        others_.clear();
        runs_.clear();
        int64_t known = -1;  // a slot with matrices
        bool is_ordered = true;
        for (int64_t row = 0; row < num_rows; ++row) {
            const int64_t slot = slots[row];
            if (slot < 0 || (slot != known && !table.has_any(slot))) {
                others_.push_back(row);
                continue;
            }
            is_ordered = is_ordered && (known < 0 || known <= slot);
            known = slot;
            rows_.push_back(row);
        }
        if (!is_ordered) {
            std::stable_sort(rows_.begin(), rows_.end(), [&](int64_t a, int64_t b) { return slots[a] < slots[b]; });
        }
        for (int64_t i = 0; i < num_active(); ++i) {
            const int64_t slot = slots[rows_[i]];
            if (i == 0 || slots[rows_[i - 1]] != slot) runs_.push_back({table.parts_of(slot), i, 0});
            ++runs_.back().count;
        }
    }

    int64_t num_active() const { return static_cast<int64_t>(rows_.size()); }
    int64_t num_shrunk() const { return num_active() * table_.total_rank(); }

    // scale * A x of all parts. shrunk: num_shrunk() numbers, for `expand`.
    void shrink(const char* x, int64_t x_stride_bytes, float* shrunk) {
        shrunk_ = shrunk;
        std::vector<ShrunkTile>& tiles = memory_.tiles;
        tiles.clear();
        for (const Run& run : runs_) {
            int64_t column = 0;
            for (int64_t part = 0; part < table_.num_parts(); column += run.parts[part].rank, ++part) {
                const LowRankMatrices& matrices = run.parts[part];
                for (int64_t group = 0; group < matrices.num_groups(); ++group) {
                    for (int64_t done = 0; done < run.count; done += kShrunkRows) {
                        const int64_t count = std::min<int64_t>(kShrunkRows, run.count - done);
                        tiles.push_back({&matrices, group, run.first + done, count, column});
                    }
                }
            }
        }
        const auto num_tiles = static_cast<int64_t>(tiles.size());
        const auto run_tile = [&](int64_t index) {
            const ShrunkTile& next = tiles[std::min(index + 1, num_tiles - 1)];
            if (next.matrices != tiles[index].matrices) prefetch_start(next.matrices->down);
            shrink_rows(tiles[index], x, x_stride_bytes);
        };
        if (num_threads() == 1 || num_tiles * num_units() <= kUnitsAlone) {
            for (int64_t index = 0; index < num_tiles; ++index) run_tile(index);
            return;
        }
        const int64_t num_tasks = std::min<int64_t>(num_tiles, 4 * num_threads());
        parallel_for(num_tasks, [&](int64_t task) {
            const int64_t end = (task + 1) * num_tiles / num_tasks;
            for (int64_t index = task * num_tiles / num_tasks; index < end; ++index) run_tile(index);
        });
    }

    // The additions to columns [begin, end) of all rows. out: the first of these, of the first row.
    void expand(int64_t begin, int64_t end, float* out, int64_t out_stride) const {
        // A negative zero, which changes no number that it is added to.
        const auto fill = [&](int64_t row, int64_t first, int64_t last) {
            std::fill(out + row * out_stride + first - begin, out + row * out_stride + last - begin, -0.0f);
        };
        for (const int64_t row : others_) fill(row, begin, end);
        for (const Run& run : runs_) {
            int64_t column = 0, start = 0;
            for (int64_t part = 0; part < table_.num_parts(); ++part) {
                const LowRankMatrices& matrices = run.parts[part];
                const int64_t first = std::max(begin, start), last = std::min(end, table_.part_end(part));
                if (first < last && matrices.rank == 0) {
                    for (int64_t i = 0; i < run.count; ++i) fill(rows_[run.first + i], first, last);
                } else if (first < last) {
                    const Columns columns{column, first - start, last - start};
                    float* to = out + (start - begin);
                    table_.is_fp32() ? expand_part<true>(run, matrices, columns, to, out_stride)
                                     : expand_part<false>(run, matrices, columns, to, out_stride);
                }
                column += matrices.rank;
                start = table_.part_end(part);
            }
        }
    }

private:
    // Rows with one slot.
    struct Run {
        const LowRankMatrices* parts;
        int64_t first, count;
    };
    struct ShrunkTile {
        const LowRankMatrices* matrices;
        int64_t group, first, count, column;
    };
    // Kept by a thread, so that a call allocates nothing. It belongs to one object at a time.
    struct Memory {
        std::vector<int64_t> rows, others;
        std::vector<Run> runs;
        std::vector<ShrunkTile> tiles;
    };
    static Memory& memory() {
        static thread_local Memory of_thread;
        return of_thread;
    }
    // Of the shrunk rows, the first of a part; of the part, a range.
    struct Columns {
        int64_t shrunk, first, last;
    };

    // The shrunk x of a part. Bf16 takes half of its room.
    char* shrunk_of(int64_t row, int64_t column) const {
        return reinterpret_cast<char*>(shrunk_ + row * table_.total_rank() + column);
    }

    int64_t num_units() const { return table_.is_fp32() ? table_.in_features() : (table_.in_features() + 1) / 2; }

    void shrink_rows(const ShrunkTile& tile, const char* x, int64_t x_stride_bytes) const {
        const LowRankMatrices& matrices = *tile.matrices;
        const bool is_last = tile.group + 1 == matrices.num_groups();
        const int64_t unit_bytes = 4 * (is_last ? matrices.last_lanes() : kLanes);
        const char* down = matrices.down + tile.group * num_units() * 4 * kLanes;
        // Pairs are whole: the number beside the last of an odd rank is zero, as its lane of A is.
        const int64_t num_stored = table_.is_fp32() ? matrices.rank : matrices.rank + matrices.rank % 2;
        const Mask ranks = first_lanes(num_stored - tile.group * kLanes);
        const char* rows[kShrunkRows];
        char* out[kShrunkRows];
        for (int64_t r = 0; r < tile.count; ++r) {
            rows[r] = x + rows_[tile.first + r] * x_stride_bytes;
            out[r] = shrunk_of(tile.first + r, tile.column) + tile.group * kLanes * (table_.is_fp32() ? 4 : 2);
        }
        const auto run = [&](auto is_fp32, auto num_rows) {
            shrink_tile<is_fp32.value, num_rows.value>(down, unit_bytes, table_.in_features(), rows,
                                                       static_cast<float>(matrices.scale), ranks, out);
        };
        with_rows<kShrunkRows>(tile.count, [&](auto num_rows) {
            table_.is_fp32() ? run(std::true_type(), num_rows) : run(std::false_type(), num_rows);
        });
    }

    template <bool kIsFp32>
    void expand_part(const Run& run, const LowRankMatrices& matrices, const Columns& columns, float* out,
                     int64_t out_stride) const {
        int64_t group = columns.first / kLanes;
        const int64_t end = (columns.last + kLanes - 1) / kLanes;
        const auto expand_groups = [&](auto num_vectors) {
            constexpr int V = num_vectors.value;
            for (; group + V <= end; group += V) {
                expand_run<kIsFp32, V>(run, matrices, columns, group, out, out_stride);
            }
        };
        // For several rows the registers of AVX2 hold the sums of no more than one vector.
        if (kVectors > 1 || run.count == 1) {
            expand_groups(std::integral_constant<int, 4>());
            expand_groups(std::integral_constant<int, 2>());
        }
        expand_groups(std::integral_constant<int, 1>());
    }

    template <bool kIsFp32, int V>
    void expand_run(const Run& run, const LowRankMatrices& matrices, const Columns& columns, int64_t group, float* out,
                    int64_t out_stride) const {
        Mask lanes[V];
        for (int v = 0; v < V; ++v) {
            const int64_t column = (group + v) * kLanes;
            lanes[v] = static_cast<Mask>(first_lanes(columns.last - column) & ~first_lanes(columns.first - column));
        }
        const int64_t num_units = up_units(matrices.rank, kIsFp32);
        const char* up = matrices.up + group * num_units * kUpUnitBytes;
        for (int64_t done = 0; done < run.count; done += kExpandedRows) {
            with_rows<kExpandedRows>(std::min<int64_t>(kExpandedRows, run.count - done), [&](auto num_rows) {
                constexpr int R = num_rows.value;
                const char* shrunk[R];
                float* to[R];
                for (int r = 0; r < R; ++r) {
                    shrunk[r] = shrunk_of(run.first + done + r, columns.shrunk);
                    to[r] = out + rows_[run.first + done + r] * out_stride + group * kLanes;
                }
                expand_tile<kIsFp32, R, V>(up, num_units, shrunk, lanes, to);
            });
        }
    }

    // body(a constant), for 1 to `Most` rows.
    template <int Most, class Body>
    static void with_rows(int64_t num_rows, const Body& body) {
        if constexpr (Most > 1) {
            if (num_rows < Most) return with_rows<Most - 1>(num_rows, body);
        }
        body(std::integral_constant<int, Most>());
    }

    const LowRankTable table_;
    Memory& memory_;
    std::vector<int64_t>& rows_ = memory_.rows;
    std::vector<int64_t>& others_ = memory_.others;
    std::vector<Run>& runs_ = memory_.runs;
    float* shrunk_ = nullptr;
};

}  // namespace
}  // namespace triptych
