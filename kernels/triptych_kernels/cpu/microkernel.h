// The inner loop of every product with packed weights: R rows times P panels of 32 columns, in registers.
//
// Weights lie in panels of 32 columns. A unit is what one 32-bit lane holds of the inner dimension: a pair of
// bf16, one fp32, or a pair of int8 in half the space. Rows are packed as [units][R], 32 bits each. Every
// output is one chain of multiply-adds over the units in order, whatever R and P are: that is what makes
// results independent of the batch.
//
// Include avx512.h before.
#pragma once

#include <cstddef>
#include <cstdint>

namespace triptych {
namespace {

constexpr int kPanelColumns = 32;
constexpr int64_t kUnitBytes = 128;     // of a panel, 32 columns of 32 bits
constexpr int64_t kInt8UnitBytes = 64;  // the same pair of rows in int8
constexpr int64_t kUnitsPerStep = 16;   // panels of pairs are padded to a multiple of it, for amx.h

#define TRIPTYCH_INLINE [[gnu::always_inline]] inline

// Pairs of bf16, accumulated in fp32.
struct Bf16Pairs {
    static constexpr int64_t kStep = kUnitBytes;

    TRIPTYCH_INLINE void load(const char* unit, __m512i (&lanes)[2]) const {
        lanes[0] = _mm512_load_si512(unit);
        lanes[1] = _mm512_load_si512(unit + 64);
    }
    TRIPTYCH_INLINE __m512 add_product(__m512 sum, __m512i x, __m512i w) const {
        return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
    }
};

struct Fp32Units {
    static constexpr int64_t kStep = kUnitBytes;

    TRIPTYCH_INLINE void load(const char* unit, __m512i (&lanes)[2]) const {
        lanes[0] = _mm512_load_si512(unit);
        lanes[1] = _mm512_load_si512(unit + 64);
    }
    TRIPTYCH_INLINE __m512 add_product(__m512 sum, __m512i x, __m512i w) const {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), sum);
    }
};

// Pairs of int8, stored as sign and magnitude, widened to the bf16 of the same value by two table look-ups.
struct Int8Pairs {
    static constexpr int64_t kStep = kInt8UnitBytes;
    __m512i low[2], high[2];  // the bytes of bf16(0) to bf16(127)

    explicit Int8Pairs(const uint8_t (&tables)[2][128]) {
        for (int half = 0; half < 2; ++half) {
            low[half] = _mm512_loadu_si512(tables[0] + 64 * half);
            high[half] = _mm512_loadu_si512(tables[1] + 64 * half);
        }
    }
    TRIPTYCH_INLINE void load(const char* unit, __m512i (&lanes)[2]) const {
        const __m512i packed = _mm512_load_si512(unit);
        const __m512i low_bytes = _mm512_permutex2var_epi8(low[0], packed, low[1]);
        const __m512i magnitudes = _mm512_permutex2var_epi8(high[0], packed, high[1]);
        // 0xEA: magnitudes | (packed & sign).
        const __m512i high_bytes =
            _mm512_ternarylogic_epi32(packed, _mm512_set1_epi8(static_cast<char>(0x80)), magnitudes, 0xEA);
        lanes[0] = _mm512_unpacklo_epi8(low_bytes, high_bytes);
        lanes[1] = _mm512_unpackhi_epi8(low_bytes, high_bytes);
    }
    TRIPTYCH_INLINE __m512 add_product(__m512 sum, __m512i x, __m512i w) const {
        return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
    }
};

// What a call asks the caches to bring meanwhile.
struct Prefetch {
    // kStream: of each panel itself, the bytes `distance` ahead; from unit `turn` on, those `distance_after`
    // ahead (the start of the panels that come next).
    int64_t turn, distance, distance_after;
    // Otherwise: one line a unit from `next` on, `step` bytes apart.
    const char* next;
    int64_t step;
};

template <class Weight, int R, int P, bool kStream>
TRIPTYCH_INLINE void accumulate_units(const Weight& weight, const uint32_t*& rows, const char*& panel,
                                      int64_t panel_bytes, int64_t num_units, const char*& next, int64_t step,
                                      int64_t distance, __m512 (&sums)[R][2 * P]) {
#pragma GCC unroll 2
    for (int64_t unit = 0; unit < num_units; ++unit) {
        __m512i lanes[P][2];
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) {
            weight.load(panel + p * panel_bytes, lanes[p]);
            if (kStream) {
#pragma GCC unroll 2
                for (int64_t line = 0; line < Weight::kStep; line += 64) {
                    _mm_prefetch(panel + p * panel_bytes + distance + line, _MM_HINT_T0);
                }
            }
        }
        if (!kStream) {
            _mm_prefetch(next, _MM_HINT_T1);
            next += step;
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const __m512i x = _mm512_set1_epi32(static_cast<int>(rows[r]));
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) {
                sums[r][2 * p] = weight.add_product(sums[r][2 * p], x, lanes[p][0]);
                sums[r][2 * p + 1] = weight.add_product(sums[r][2 * p + 1], x, lanes[p][1]);
            }
        }
        rows += R;
        panel += Weight::kStep;
    }
}

// sums[r][2 p + h]: of row r, columns 16 h to 16 h + 15 of panel p.
template <class Weight, int R, int P, bool kStream>
TRIPTYCH_INLINE void multiply(const Weight& weight, const uint32_t* rows, const char* panel,
                              int64_t panel_bytes, int64_t num_units, const Prefetch& prefetch,
                              __m512 (&sums)[R][2 * P]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j < 2 * P; ++j) {
            sums[r][j] = _mm512_setzero_ps();
        }
    }
    const char* next = prefetch.next;
    if (kStream) {
        accumulate_units<Weight, R, P, true>(weight, rows, panel, panel_bytes, prefetch.turn, next, 0,
                                             prefetch.distance, sums);
        accumulate_units<Weight, R, P, true>(weight, rows, panel, panel_bytes, num_units - prefetch.turn,
                                             next, 0, prefetch.distance_after, sums);
    } else {
        accumulate_units<Weight, R, P, false>(weight, rows, panel, panel_bytes, num_units, next,
                                              prefetch.step, 0, sums);
    }
}

}  // namespace
}  // namespace triptych
