// Attention for 32 registers of sixteen numbers: two positions of bf16 are multiplied at a time.
//
// attention_kernels.h includes it.
#pragma once

#include <cstring>

#include "../vector_math.h"

namespace triptych {
namespace {

constexpr int kRowsTogether = 6;     // queries times heads in registers: 6 rows by 4 vectors leave 8 registers
constexpr int kVectorsTogether = 4;  // tiles of positions, or vectors of values, in registers

struct Bf16Attention : Bf16 {
    static constexpr int kPositionsPerStep = 2;
    static constexpr int kUnitsPerChunk = 4;
    static void lay_query(const uint16_t* from, int64_t num_bytes, int32_t* out) { std::memcpy(out, from, num_bytes); }
    template <int VECTORS>
    static void interleave(const uint16_t* row, int64_t row_size, Words (&values)[VECTORS]) {
        for (int v = 0; v + 1 < VECTORS; v += 2) {
            const Words a = load_words(row + v * 16), b = load_words(row + row_size + v * 16);
            values[v] = _mm512_unpacklo_epi16(a, b), values[v + 1] = _mm512_unpackhi_epi16(a, b);
        }
    }
    static Floats dot(Floats sum, Words a, Words b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    }
};

// Four units of 16 positions, transposed: 128-bit lane n of z[i] holds those of position 4 n + i. out: [4][16].
inline void turn_chunk(const Words (&z)[4], int32_t* out) {
    const Words a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
    const Words c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    store_words(out, _mm512_unpacklo_epi64(a, c));
    store_words(out + 16, _mm512_unpackhi_epi64(a, c));
    store_words(out + 32, _mm512_unpacklo_epi64(b, d));
    store_words(out + 48, _mm512_unpackhi_epi64(b, d));
}

// 16 rows of num_chunks chunks of 4 units, 16 bytes, as out[unit][position].
template <class Kind>
inline void turn_tile(const char* rows, int64_t row_bytes, int64_t num_chunks, int32_t* out) {
    int64_t chunk = 0;
    for (; chunk + 4 <= num_chunks; chunk += 4) {
        Words z[4][4];
        for (int i = 0; i < 4; ++i) {
            const char* from = rows + i * row_bytes + chunk * 16;
            const Words a = load_words(from), b = load_words(from + 4 * row_bytes);
            const Words c = load_words(from + 8 * row_bytes), d = load_words(from + 12 * row_bytes);
            const Words low = _mm512_shuffle_i32x4(a, b, 0x44), high = _mm512_shuffle_i32x4(a, b, 0xee);
            const Words low2 = _mm512_shuffle_i32x4(c, d, 0x44), high2 = _mm512_shuffle_i32x4(c, d, 0xee);
            z[0][i] = _mm512_shuffle_i32x4(low, low2, 0x88), z[1][i] = _mm512_shuffle_i32x4(low, low2, 0xdd);
            z[2][i] = _mm512_shuffle_i32x4(high, high2, 0x88), z[3][i] = _mm512_shuffle_i32x4(high, high2, 0xdd);
        }
        for (int k = 0; k < 4; ++k) turn_chunk(z[k], out + (chunk + k) * 64);
    }
    for (; chunk < num_chunks; ++chunk) {
        Words z[4];
        for (int i = 0; i < 4; ++i) {
            const auto part = [&](int part_index) {
                return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + part_index * row_bytes + chunk * 16));
            };
            z[i] = _mm512_castsi128_si512(part(i));
            z[i] = _mm512_mask_broadcast_i32x4(z[i], 0x00f0, part(4 + i));
            z[i] = _mm512_mask_broadcast_i32x4(z[i], 0x0f00, part(8 + i));
            z[i] = _mm512_mask_broadcast_i32x4(z[i], 0xf000, part(12 + i));
        }
        turn_chunk(z, out + chunk * 64);
    }
}

// One step of values as units, in the order that `store_result` undoes: rows of two positions are interleaved.
// A row is nullptr for a position that must count as zero. out: columns rounded up to 32.
inline void lay_step(Bf16Attention, const uint16_t* const* rows, int64_t num_columns, int32_t* out) {
    for (int64_t column = 0; column < num_columns; column += 32) {
        const int64_t left = num_columns - column;
        const __mmask32 mask = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
        Words a = _mm512_setzero_si512(), b = a;
        if (rows[0] != nullptr) a = _mm512_maskz_loadu_epi16(mask, rows[0] + column);
        if (rows[1] != nullptr) b = _mm512_maskz_loadu_epi16(mask, rows[1] + column);
        store_words(out + column, _mm512_unpacklo_epi16(a, b));
        store_words(out + column + 16, _mm512_unpackhi_epi16(a, b));
    }
}

// lay_step for a whole tile of contiguous rows that are all visible.
inline void lay_tile(Bf16Attention, const uint16_t* from, int64_t num_columns, int32_t* out, int64_t out_stride) {
    if (num_columns % 32 != 0) {
        for (int step = 0; step < 8; ++step) {
            const uint16_t* rows[2] = {from + 2 * step * num_columns, from + (2 * step + 1) * num_columns};
            lay_step(Bf16Attention(), rows, num_columns, out + step * out_stride);
        }
        return;
    }
    for (int step = 0; step < 8; ++step) {
        for (int64_t column = 0; column < num_columns; column += 32) {
            const Words a = load_words(from + column), b = load_words(from + num_columns + column);
            store_words(out + column, _mm512_unpacklo_epi16(a, b));
            store_words(out + column + 16, _mm512_unpackhi_epi16(a, b));
        }
        from += 2 * num_columns, out += out_stride;
    }
}

// out = sums / total, rounded, in the columns' own order. A sum of zero loses its sign, which would depend on positions
// that were added as zero.
inline void store_result(Bf16Attention, const float* sums, float total, int64_t num_columns, uint16_t* out) {
    const Floats divisor = splat(total), zero = zeros();
    const Words order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t column = 0; column < num_columns; column += 32) {
        const int64_t left = num_columns - column;
        const __mmask32 mask = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
        const Floats low = div(add(load(sums + column), zero), divisor);
        const Floats high = div(add(load(sums + column + 16), zero), divisor);
        const Words pair = (Words)_mm512_cvtne2ps_pbh(high, low);
        _mm512_mask_storeu_epi16(out + column, mask, _mm512_permutexvar_epi64(order, pair));
    }
}

// The weights of one tile: scores become e^(score - highest), stored as units; returns what to add to their sum.
// bf16 weights are summed as rounded, so that they add up to 1 after the division.
inline Floats weigh_tile(Bf16Attention, const float* scores, Floats highest, int32_t* units) {
    const Halves rounded = Bf16::narrow(coarse_exp16(sub(load(scores), highest)));
    store_halves(reinterpret_cast<uint16_t*>(units), rounded);
    return Bf16::widen(rounded);
}

}  // namespace
}  // namespace triptych
