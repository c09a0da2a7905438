// The inner loops of attention: tiles of 16 positions transposed to lanes, scores, and weighted sums of values.
//
// A position is a token's index in its row; a tile is 16 positions, the first a multiple of 16. A unit is 32 bits: one
// fp32 number, stored as such or widened from bf16, or two neighbours in bf16. Keys are multiplied unit by unit along
// the head, values step by step along the positions; a step is the positions of one unit. Every sum runs over these in
// order, whatever the number of queries or tiles that share a loop: a query's result has the same bits in every batch.
// Knows no rows, blocks or masks but those in its arguments.
#pragma once

#include <array>
#include <cstring>
#include <utility>

#include "vector_math.h"

#include TRIPTYCH_OF_ISA(attention_kinds.h)

namespace triptych {
namespace {

constexpr int kTile = 16;
constexpr int kTilesTogether = 4;  // tiles of keys, or of values, that are transposed in the first-level cache

// The differences between dtypes: how a unit is multiplied, the number of units in 16 bytes of keys, the number of
// positions in a step, and how the rows of a step form vectors of values. For bf16 see attention_kinds.h of each
// instruction set.
struct Fp32Attention : Fp32 {
    static constexpr int kPositionsPerStep = 1;
    static constexpr int kUnitsPerChunk = 4;
    static void lay_query(const float* from, int64_t num_bytes, int32_t* out) { std::memcpy(out, from, num_bytes); }
    static Floats weights(Floats scores) { return exp16(scores); }
    template <int VECTORS>
    static void interleave(const float* row, int64_t, Words (&values)[VECTORS]) {
        for (int v = 0; v < VECTORS; ++v) values[v] = load_words(row + v * 16);
    }
    static Floats dot(Floats sum, Words a, Words b) {
        return fmadd(as_floats(a), as_floats(b), sum);
    }
};

// Not the intrinsic: GCC assumes that a function with only prefetches has no effect, and drops it.
inline void prefetch_bytes(const char* from, int64_t num_bytes) {
    for (int64_t line = 0; line < num_bytes; line += 64) asm volatile("prefetcht1 %0" : : "m"(from[line]));
}

// out[row][tile] = scale * q . k for the 16 positions of a tile. queries: [ROWS][num_units];
// keys: [TILES][num_units][16]. highest: [ROWS][16], the highest score of each lane so far, updated; nullptr leaves
// it to the caller.
template <class Kind, int ROWS, int TILES>
void dot_tiles(
    const int32_t* queries, const int32_t* keys, int64_t num_units, float scale, float* out, int64_t out_stride,
    float* highest) {
    Floats sums[ROWS][TILES];
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < TILES; ++t) sums[r][t] = zeros();
    for (int64_t unit = 0; unit < num_units; ++unit) {
        Words key[TILES];
        for (int t = 0; t < TILES; ++t) key[t] = load_words(keys + (t * num_units + unit) * 16);
        for (int r = 0; r < ROWS; ++r) {
            const Words query = splat_word(queries[r * num_units + unit]);
            for (int t = 0; t < TILES; ++t) sums[r][t] = Kind::dot(sums[r][t], key[t], query);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < TILES; ++t) {
            sums[r][t] = mul(sums[r][t], splat(scale));
            store(out + r * out_stride + t * kTile, sums[r][t]);
        }
    if (highest == nullptr) return;
    for (int r = 0; r < ROWS; ++r) {
        Floats lanes = load(highest + r * 16);
        // A NaN is not a highest score: the second operand stays. It becomes a NaN weight.
        for (int t = 0; t < TILES; ++t) lanes = max(sums[r][t], lanes);
        store(highest + r * 16, lanes);
    }
}

// sums[row][v] += weight * value over steps first to end - 1, in order. weights: units, weights_stride per row.
// values: [step][values_stride] units, of which `kept` remain. sums: [ROWS][sums_stride].
template <class Kind, int ROWS, int VECTORS, bool MASKED>
void add_values(
    const int32_t* weights, int64_t weights_stride, const int32_t* values, int64_t values_stride, int64_t first,
    int64_t end, int32_t kept, float* sums, int64_t sums_stride) {
    Floats sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) sum[r][v] = load(sums + r * sums_stride + v * 16);
    for (int64_t step = first; step < end; ++step) {
        Words value[VECTORS];
        for (int v = 0; v < VECTORS; ++v) {
            value[v] = load_words(values + step * values_stride + v * 16);
            if (MASKED) value[v] = both(value[v], splat_word(kept));
        }
        for (int r = 0; r < ROWS; ++r) {
            const Words weight = splat_word(weights[r * weights_stride + step]);
            for (int v = 0; v < VECTORS; ++v) sum[r][v] = Kind::dot(sum[r][v], value[v], weight);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) store(sums + r * sums_stride + v * 16, sum[r][v]);
}

// Whole tiles of values in the cache, and where as many bytes are that will be needed soon.
struct CachedTiles {
    const char *values[kTilesTogether], *ahead[kTilesTogether];
    int64_t count;
};

// add_values over whole tiles in the cache, for too few rows to transpose values for.
// column: the first of VECTORS times 16 to add; row_size: elements from one position to the next.
template <class Kind, int ROWS, int VECTORS>
void add_tiles(
    const int32_t* weights, int64_t weights_stride, const CachedTiles& tiles, int64_t column, int64_t row_size,
    float* sums, int64_t sums_stride) {
    using Element = typename Kind::Element;
    Floats sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) sum[r][v] = load(sums + r * sums_stride + v * 16);
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
        const auto* rows = reinterpret_cast<const Element*>(tiles.values[tile]) + column;
        prefetch_bytes(tiles.ahead[tile] + column * kTile * sizeof(Element), VECTORS * 16 * kTile * sizeof(Element));
        for (int step = 0; step < kTile / Kind::kPositionsPerStep; ++step, ++weights) {
            Words value[VECTORS];
            Kind::interleave(rows, row_size, value);
            rows += Kind::kPositionsPerStep * row_size;
            for (int r = 0; r < ROWS; ++r) {
                const Words weight = splat_word(weights[r * weights_stride]);
                for (int v = 0; v < VECTORS; ++v) sum[r][v] = Kind::dot(sum[r][v], value[v], weight);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) store(sums + r * sums_stride + v * 16, sum[r][v]);
}

using DotTiles = void (*)(const int32_t*, const int32_t*, int64_t, float, float*, int64_t, float*);
using AddValues = void (*)(
    const int32_t*, int64_t, const int32_t*, int64_t, int64_t, int64_t, int32_t, float*, int64_t);

using AddTiles = void (*)(const int32_t*, int64_t, const CachedTiles&, int64_t, int64_t, float*, int64_t);

template <int... N>
using Each = std::integer_sequence<int, N...>;
template <class Loop>
using LoopsOfRows = std::array<Loop, kVectorsTogether>;  // by [tiles - 1] or [vectors - 1]

// The loops by [rows - 1][tiles - 1] and by [rows - 1][vectors - 1]; add_tiles by [rows - 1][are all vectors].
template <class Kind>
class Loops {
    template <int R, int... N>
    static constexpr LoopsOfRows<DotTiles> dots(Each<N...>) {
        return {dot_tiles<Kind, R, N + 1>...};
    }
    template <int R, bool MASKED, int... N>
    static constexpr LoopsOfRows<AddValues> sums(Each<N...>) {
        return {add_values<Kind, R, N + 1, MASKED>...};
    }
    template <int... R>
    static constexpr std::array<LoopsOfRows<DotTiles>, kRowsTogether> all_dots(Each<R...>) {
        return {dots<R + 1>(kVectors)...};
    }
    template <int... R>
    static constexpr std::array<LoopsOfRows<AddValues>, kRowsTogether> all_sums(Each<R...>) {
        return {sums<R + 1, false>(kVectors)...};
    }
    template <int... R>
    static constexpr std::array<std::array<AddTiles, 2>, kRowsTogether> all_tiles(Each<R...>) {
        return {std::array<AddTiles, 2>{add_tiles<Kind, R + 1, kVectorsTogether / 2>,
                                        add_tiles<Kind, R + 1, kVectorsTogether>}...};
    }
    static constexpr std::make_integer_sequence<int, kVectorsTogether> kVectors{};
    static constexpr std::make_integer_sequence<int, kRowsTogether> kRows{};

public:
    static constexpr auto kDotTiles = all_dots(kRows);
    static constexpr auto kAddValues = all_sums(kRows);
    static constexpr auto kAddTiles = all_tiles(kRows);
    static constexpr auto kAddMasked = sums<1, true>(kVectors);
};

// One step of values as units. A row is nullptr for a position that must count as zero. out: columns rounded up to 16.
template <class Kind>
void lay_step(Kind, const typename Kind::Element* const* rows, int64_t num_columns, int32_t* out) {
    for_vectors(num_columns, [&](int64_t column, auto lanes) {
        const Floats a = rows[0] == nullptr ? zeros() : Kind::load(rows[0] + column, lanes);
        store(reinterpret_cast<float*>(out + column), a);
    });
}

// lay_step for a whole tile of contiguous rows that are all visible.
template <class Kind>
void lay_tile(Kind, const typename Kind::Element* from, int64_t num_columns, int32_t* out, int64_t out_stride) {
    for (int step = 0; step < kTile; ++step) {
        const typename Kind::Element* row = from + step * num_columns;
        lay_step(Kind(), &row, num_columns, out + step * out_stride);
    }
}

// out = sums / total, rounded, in the columns' own order.
template <class Kind>
void store_result(Kind, const float* sums, float total, int64_t num_columns, typename Kind::Element* out) {
    const Floats divisor = splat(total);
    for_vectors(num_columns, [&](int64_t column, auto lanes) {
        Kind::store(out + column, lanes, div(load(sums + column), divisor));
    });
}

// The weights of one tile: scores become e^(score - highest), stored as units; returns what to add to their sum.
template <class Kind>
Floats weigh_tile(Kind, const float* scores, Floats highest, int32_t* units) {
    const Floats weights = Kind::weights(sub(load(scores), highest));
    store(reinterpret_cast<float*>(units), weights);
    return weights;
}

}  // namespace
}  // namespace triptych
