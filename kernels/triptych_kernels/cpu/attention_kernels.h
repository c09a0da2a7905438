// The inner loops of attention: tiles of 16 places turned to lanes, scores, and weighted sums of values.
//
// A place is a token's position in its row; a tile is 16 places, the first a multiple of 16. A unit is 32 bits: one
// fp32 number or two neighbours in bf16. Keys are multiplied unit by unit along the head, values step by step along the
// places, a step being the places of one unit. Every sum runs over these in order, whatever the number of queries or
// tiles that share a loop: a query's result has the same bits in every company.
// Knows no rows, blocks or masks but those it is handed.
#pragma once

#include <cstring>

#include "vector_math.h"

#ifdef TRIPTYCH_AVX512

namespace triptych {

constexpr int kTile = 16;
constexpr int kTilesTogether = 4;  // tiles of keys, or of values, that lie turned in the first-level cache
constexpr int kRowsTogether = 6;   // queries times heads in registers: 6 rows by 4 vectors leave 8 registers

// What differs between the dtypes: how a unit is multiplied, how many places a step has, and how the rows of a step
// make vectors of values: in bf16 two of them interleaved, 32 columns at a time.
struct Fp32Attention : Fp32 {
    static constexpr int kPlacesPerStep = 1;
    template <int VECTORS>
    static void interleave(const float* row, int64_t, __m512i (&values)[VECTORS]) {
        for (int v = 0; v < VECTORS; ++v) values[v] = _mm512_loadu_si512(row + v * 16);
    }
    static __m512 dot(__m512 sum, __m512i a, __m512i b) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
    }
};

struct Bf16Attention : Bf16 {
    static constexpr int kPlacesPerStep = 2;
    template <int VECTORS>
    static void interleave(const uint16_t* row, int64_t row_size, __m512i (&values)[VECTORS]) {
        for (int v = 0; v + 1 < VECTORS; v += 2) {
            const __m512i a = _mm512_loadu_si512(row + v * 16), b = _mm512_loadu_si512(row + row_size + v * 16);
            values[v] = _mm512_unpacklo_epi16(a, b), values[v + 1] = _mm512_unpackhi_epi16(a, b);
        }
    }
    static __m512 dot(__m512 sum, __m512i a, __m512i b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    }
};

// Four units of 16 places, turned: 128-bit lane n of z[i] holds those of place 4 n + i. out: [4][16].
inline void turn_chunk(const __m512i (&z)[4], int32_t* out) {
    const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
    const __m512i c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    _mm512_store_si512(out, _mm512_unpacklo_epi64(a, c));
    _mm512_store_si512(out + 16, _mm512_unpackhi_epi64(a, c));
    _mm512_store_si512(out + 32, _mm512_unpacklo_epi64(b, d));
    _mm512_store_si512(out + 48, _mm512_unpackhi_epi64(b, d));
}

// Not the intrinsic: GCC takes a function that does nothing else for one without effect, and drops it.
inline void prefetch_bytes(const char* from, int64_t num_bytes) {
    for (int64_t line = 0; line < num_bytes; line += 64) asm volatile("prefetcht1 %0" : : "m"(from[line]));
}

// 16 rows of num_chunks chunks of 4 units, 16 bytes, as out[unit][place].
inline void turn_tile(const char* rows, int64_t row_bytes, int64_t num_chunks, int32_t* out) {
    int64_t chunk = 0;
    for (; chunk + 4 <= num_chunks; chunk += 4) {
        __m512i z[4][4];
        for (int i = 0; i < 4; ++i) {
            const char* from = rows + i * row_bytes + chunk * 16;
            const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 4 * row_bytes);
            const __m512i c = _mm512_loadu_si512(from + 8 * row_bytes), d = _mm512_loadu_si512(from + 12 * row_bytes);
            const __m512i low = _mm512_shuffle_i32x4(a, b, 0x44), high = _mm512_shuffle_i32x4(a, b, 0xee);
            const __m512i low2 = _mm512_shuffle_i32x4(c, d, 0x44), high2 = _mm512_shuffle_i32x4(c, d, 0xee);
            z[0][i] = _mm512_shuffle_i32x4(low, low2, 0x88), z[1][i] = _mm512_shuffle_i32x4(low, low2, 0xdd);
            z[2][i] = _mm512_shuffle_i32x4(high, high2, 0x88), z[3][i] = _mm512_shuffle_i32x4(high, high2, 0xdd);
        }
        for (int k = 0; k < 4; ++k) turn_chunk(z[k], out + (chunk + k) * 64);
    }
    for (; chunk < num_chunks; ++chunk) {
        __m512i z[4];
        for (int i = 0; i < 4; ++i) {
            const auto part = [&](int place) {
                return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + place * row_bytes + chunk * 16));
            };
            z[i] = _mm512_castsi128_si512(part(i));
            z[i] = _mm512_mask_broadcast_i32x4(z[i], 0x00f0, part(4 + i));
            z[i] = _mm512_mask_broadcast_i32x4(z[i], 0x0f00, part(8 + i));
            z[i] = _mm512_mask_broadcast_i32x4(z[i], 0xf000, part(12 + i));
        }
        turn_chunk(z, out + chunk * 64);
    }
}

// out[row][tile] = scale * q . k for 16 places a tile. queries: [ROWS][num_units]; keys: [TILES][num_units][16].
// highest: [ROWS][16], the highest score of each lane so far, brought up to date; nullptr leaves it to the caller.
template <class Kind, int ROWS, int TILES>
void dot_tiles(
    const int32_t* queries, const int32_t* keys, int64_t num_units, float scale, float* out, int64_t out_stride,
    float* highest) {
    __m512 sums[ROWS][TILES];
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < TILES; ++t) sums[r][t] = _mm512_setzero_ps();
    for (int64_t unit = 0; unit < num_units; ++unit) {
        __m512i key[TILES];
        for (int t = 0; t < TILES; ++t) key[t] = _mm512_load_si512(keys + (t * num_units + unit) * 16);
        for (int r = 0; r < ROWS; ++r) {
            const __m512i query = _mm512_set1_epi32(queries[r * num_units + unit]);
            for (int t = 0; t < TILES; ++t) sums[r][t] = Kind::dot(sums[r][t], key[t], query);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < TILES; ++t) {
            sums[r][t] = mul(sums[r][t], _mm512_set1_ps(scale));
            _mm512_store_ps(out + r * out_stride + t * kTile, sums[r][t]);
        }
    if (highest == nullptr) return;
    for (int r = 0; r < ROWS; ++r) {
        __m512 lanes = _mm512_load_ps(highest + r * 16);
        // A NaN is no highest score: the second operand stays. It becomes a NaN weight.
        for (int t = 0; t < TILES; ++t) lanes = _mm512_max_ps(sums[r][t], lanes);
        _mm512_store_ps(highest + r * 16, lanes);
    }
}

// sums[row][v] += weight * value over steps first to end - 1, in order. weights: units, weights_stride a row.
// values: [step][values_stride] units; `kept` is what remains of a unit of them. sums: [ROWS][sums_stride].
template <class Kind, int ROWS, int VECTORS, bool MASKED>
void add_values(
    const int32_t* weights, int64_t weights_stride, const int32_t* values, int64_t values_stride, int64_t first,
    int64_t end, int32_t kept, float* sums, int64_t sums_stride) {
    __m512 sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) sum[r][v] = _mm512_load_ps(sums + r * sums_stride + v * 16);
    for (int64_t step = first; step < end; ++step) {
        __m512i value[VECTORS];
        for (int v = 0; v < VECTORS; ++v) {
            value[v] = _mm512_load_si512(values + step * values_stride + v * 16);
            if (MASKED) value[v] = _mm512_and_si512(value[v], _mm512_set1_epi32(kept));
        }
        for (int r = 0; r < ROWS; ++r) {
            const __m512i weight = _mm512_set1_epi32(weights[r * weights_stride + step]);
            for (int v = 0; v < VECTORS; ++v) sum[r][v] = Kind::dot(sum[r][v], value[v], weight);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) _mm512_store_ps(sums + r * sums_stride + v * 16, sum[r][v]);
}

// Whole tiles of values as they lie in the cache, and where as many bytes lie that will be wanted soon.
struct CachedTiles {
    const char *values[kTilesTogether], *ahead[kTilesTogether];
    int64_t count;
};

// add_values over whole tiles in the cache, for rows too few to be worth laying values out for.
// column: the first of VECTORS times 16 to add; row_size: elements from place to place.
template <class Kind, int ROWS, int VECTORS>
void add_tiles(
    const int32_t* weights, int64_t weights_stride, const CachedTiles& tiles, int64_t column, int64_t row_size,
    float* sums, int64_t sums_stride) {
    using Element = typename Kind::Element;
    __m512 sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) sum[r][v] = _mm512_load_ps(sums + r * sums_stride + v * 16);
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
        const auto* rows = reinterpret_cast<const Element*>(tiles.values[tile]) + column;
        prefetch_bytes(tiles.ahead[tile] + column * kTile * sizeof(Element), VECTORS * 16 * kTile * sizeof(Element));
        for (int step = 0; step < kTile / Kind::kPlacesPerStep; ++step, ++weights) {
            __m512i value[VECTORS];
            Kind::interleave(rows, row_size, value);
            rows += Kind::kPlacesPerStep * row_size;
            for (int r = 0; r < ROWS; ++r) {
                const __m512i weight = _mm512_set1_epi32(weights[r * weights_stride]);
                for (int v = 0; v < VECTORS; ++v) sum[r][v] = Kind::dot(sum[r][v], value[v], weight);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) _mm512_store_ps(sums + r * sums_stride + v * 16, sum[r][v]);
}

using DotTiles = void (*)(const int32_t*, const int32_t*, int64_t, float, float*, int64_t, float*);
using AddValues = void (*)(
    const int32_t*, int64_t, const int32_t*, int64_t, int64_t, int64_t, int32_t, float*, int64_t);

using AddTiles = void (*)(const int32_t*, int64_t, const CachedTiles&, int64_t, int64_t, float*, int64_t);

// The loops by [rows - 1][tiles - 1] and by [rows - 1][vectors - 1]; add_tiles by [rows - 1][is 4 vectors].
template <class Kind>
struct Loops {
#define TRIPTYCH_ROW(name, r) {name<Kind, r, 1>, name<Kind, r, 2>, name<Kind, r, 3>, name<Kind, r, 4>}
#define TRIPTYCH_SUM(r) \
    {add_values<Kind, r, 1, false>, add_values<Kind, r, 2, false>, add_values<Kind, r, 3, false>, \
     add_values<Kind, r, 4, false>}
    static constexpr DotTiles kDotTiles[kRowsTogether][kTilesTogether] = {
        TRIPTYCH_ROW(dot_tiles, 1), TRIPTYCH_ROW(dot_tiles, 2), TRIPTYCH_ROW(dot_tiles, 3),
        TRIPTYCH_ROW(dot_tiles, 4), TRIPTYCH_ROW(dot_tiles, 5), TRIPTYCH_ROW(dot_tiles, 6)};
    static constexpr AddValues kAddValues[kRowsTogether][4] = {TRIPTYCH_SUM(1), TRIPTYCH_SUM(2), TRIPTYCH_SUM(3),
                                                               TRIPTYCH_SUM(4), TRIPTYCH_SUM(5), TRIPTYCH_SUM(6)};
    static constexpr AddTiles kAddTiles[kRowsTogether][2] = {
        {add_tiles<Kind, 1, 2>, add_tiles<Kind, 1, 4>}, {add_tiles<Kind, 2, 2>, add_tiles<Kind, 2, 4>},
        {add_tiles<Kind, 3, 2>, add_tiles<Kind, 3, 4>}, {add_tiles<Kind, 4, 2>, add_tiles<Kind, 4, 4>},
        {add_tiles<Kind, 5, 2>, add_tiles<Kind, 5, 4>}, {add_tiles<Kind, 6, 2>, add_tiles<Kind, 6, 4>}};
    static constexpr AddValues kAddMasked[4] = {
        add_values<Kind, 1, 1, true>, add_values<Kind, 1, 2, true>, add_values<Kind, 1, 3, true>,
        add_values<Kind, 1, 4, true>};
#undef TRIPTYCH_ROW
#undef TRIPTYCH_SUM
};

// One step of values as units, in the order that `store_result` undoes: bf16 rows of two places are interleaved.
// A row is nullptr for a place that must count as zero. out: columns rounded up to 32.
inline void lay_step(Bf16, const uint16_t* const* rows, int64_t num_columns, int32_t* out) {
    for (int64_t column = 0; column < num_columns; column += 32) {
        const int64_t left = num_columns - column;
        const __mmask32 mask = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
        __m512i a = _mm512_setzero_si512(), b = a;
        if (rows[0] != nullptr) a = _mm512_maskz_loadu_epi16(mask, rows[0] + column);
        if (rows[1] != nullptr) b = _mm512_maskz_loadu_epi16(mask, rows[1] + column);
        _mm512_store_si512(out + column, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(out + column + 16, _mm512_unpackhi_epi16(a, b));
    }
}

inline void lay_step(Fp32, const float* const* rows, int64_t num_columns, int32_t* out) {
    for (int64_t column = 0; column < num_columns; column += 16) {
        __m512 a = _mm512_setzero_ps();
        if (rows[0] != nullptr) a = _mm512_maskz_loadu_ps(first_lanes(num_columns - column), rows[0] + column);
        _mm512_store_ps(reinterpret_cast<float*>(out + column), a);
    }
}

// lay_step for a whole tile of contiguous rows that are all seen.
inline void lay_tile(Bf16, const uint16_t* from, int64_t num_columns, int32_t* out, int64_t out_stride) {
    if (num_columns % 32 != 0) {
        for (int step = 0; step < kTile / 2; ++step) {
            const uint16_t* rows[2] = {from + 2 * step * num_columns, from + (2 * step + 1) * num_columns};
            lay_step(Bf16(), rows, num_columns, out + step * out_stride);
        }
        return;
    }
    for (int step = 0; step < kTile / 2; ++step) {
        for (int64_t column = 0; column < num_columns; column += 32) {
            const __m512i a = _mm512_loadu_si512(from + column), b = _mm512_loadu_si512(from + num_columns + column);
            _mm512_store_si512(out + column, _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512(out + column + 16, _mm512_unpackhi_epi16(a, b));
        }
        from += 2 * num_columns, out += out_stride;
    }
}

inline void lay_tile(Fp32, const float* from, int64_t num_columns, int32_t* out, int64_t out_stride) {
    for (int step = 0; step < kTile; ++step) {
        const float* row = from + step * num_columns;
        lay_step(Fp32(), &row, num_columns, out + step * out_stride);
    }
}

// out = sums / total, rounded, in the columns' own order. A sum that is zero has no sign: what it would be depends on
// places that were added as zero.
inline void store_result(Bf16, const float* sums, float total, int64_t num_columns, uint16_t* out) {
    const __m512 divisor = _mm512_set1_ps(total), zero = _mm512_setzero_ps();
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t column = 0; column < num_columns; column += 32) {
        const int64_t left = num_columns - column;
        const __mmask32 mask = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
        const __m512 low = _mm512_div_ps(_mm512_add_ps(_mm512_load_ps(sums + column), zero), divisor);
        const __m512 high = _mm512_div_ps(_mm512_add_ps(_mm512_load_ps(sums + column + 16), zero), divisor);
        const __m512i pair = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        _mm512_mask_storeu_epi16(out + column, mask, _mm512_permutexvar_epi64(order, pair));
    }
}

inline void store_result(Fp32, const float* sums, float total, int64_t num_columns, float* out) {
    const __m512 divisor = _mm512_set1_ps(total);
    for (int64_t column = 0; column < num_columns; column += 16) {
        const __m512 result = _mm512_div_ps(_mm512_load_ps(sums + column), divisor);
        _mm512_mask_storeu_ps(out + column, first_lanes(num_columns - column), result);
    }
}

// The weights of one tile: scores become e^(score - highest), stored as units; returns what to add to their sum.
// bf16 weights are summed as rounded, so that they add up to 1 after the division.
inline __m512 weigh_tile(Bf16, const float* scores, __m512 highest, int32_t* units) {
    const __m256i rounded = Bf16::narrow(coarse_exp16(_mm512_sub_ps(_mm512_load_ps(scores), highest)));
    _mm256_store_si256(reinterpret_cast<__m256i*>(units), rounded);
    return Bf16::widen(rounded);
}

inline __m512 weigh_tile(Fp32, const float* scores, __m512 highest, int32_t* units) {
    const __m512 weights = exp16(_mm512_sub_ps(_mm512_load_ps(scores), highest));
    _mm512_store_ps(reinterpret_cast<float*>(units), weights);
    return weights;
}

}  // namespace triptych

#endif
