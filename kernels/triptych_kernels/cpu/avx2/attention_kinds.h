// Attention for 16 registers of eight numbers: bf16 is widened to fp32 when it is laid out, and multiplied number by
// number, the second of each pair along the head first.
//
// attention_kernels.h includes it.
#pragma once

#include <cstring>

#include "../vector_math.h"

namespace triptych {
namespace {

constexpr int kRowsTogether = 3;     // queries times heads in registers: 3 rows by 2 vectors leave 4 registers
constexpr int kVectorsTogether = 2;  // tiles of positions, or vectors of values, in registers

struct Bf16Attention : Bf16 {
    static constexpr int kPositionsPerStep = 1;
    static constexpr int kUnitsPerChunk = 8;

    static void lay_query(const uint16_t* from, int64_t num_bytes, int32_t* out) {
        for (int64_t i = 0; i < num_bytes / 2; ++i) out[i ^ 1] = static_cast<int32_t>(uint32_t{from[i]} << 16);
    }
    static Floats weights(Floats scores) { return rounded(coarse_exp16(scores)); }
    template <int VECTORS>
    static void interleave(const uint16_t* row, int64_t, Words (&values)[VECTORS]) {
        for (int v = 0; v < VECTORS; ++v) values[v] = as_words(load(row + v * 16));
    }
    static Floats dot(Floats sum, Words a, Words b) { return fmadd(as_floats(a), as_floats(b), sum); }
};

// Four units of eight positions, transposed: 128-bit lane n of z[i] holds those of position 4 n + i.
inline void turn_four(const __m256i (&z)[4], __m256i (&turned)[4]) {
    const __m256i a = _mm256_unpacklo_epi32(z[0], z[1]), b = _mm256_unpackhi_epi32(z[0], z[1]);
    const __m256i c = _mm256_unpacklo_epi32(z[2], z[3]), d = _mm256_unpackhi_epi32(z[2], z[3]);
    turned[0] = _mm256_unpacklo_epi64(a, c), turned[1] = _mm256_unpackhi_epi64(a, c);
    turned[2] = _mm256_unpacklo_epi64(b, d), turned[3] = _mm256_unpackhi_epi64(b, d);
}

// 16 rows of num_chunks chunks of 16 bytes as out[unit][position]; a chunk is four fp32 numbers or eight of bf16.
template <class Kind>
void turn_tile(const char* rows, int64_t row_bytes, int64_t num_chunks, int32_t* out) {
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk, rows += 16, out += Kind::kUnitsPerChunk * 16) {
        for (int half = 0; half < 2; ++half) {
            const auto part = [&](int part_index) {
                return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + (8 * half + part_index) * row_bytes));
            };
            __m256i z[4], turned[4];
            for (int i = 0; i < 4; ++i) z[i] = _mm256_set_m128i(part(4 + i), part(i));
            turn_four(z, turned);
            for (int i = 0; i < 4; ++i) {
                auto* to = reinterpret_cast<__m256i*>(out + Kind::kUnitsPerChunk / 4 * i * 16 + 8 * half);
                if (Kind::kUnitsPerChunk == 4) {
                    _mm256_storeu_si256(to, turned[i]);
                } else {
                    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
                    _mm256_storeu_si256(to, _mm256_and_si256(turned[i], upper));
                    _mm256_storeu_si256(to + 2, _mm256_slli_epi32(turned[i], 16));
                }
            }
        }
    }
}

}  // namespace
}  // namespace triptych
