// What becomes of a finished tile of gates and ups: silu(gate) * up, without the projection in between.
//
// Panels alternate: 32 gates, then the same columns' 32 ups. Include avx512.h before.
#pragma once

#include <algorithm>

#include "microkernel.h"
#include "vector_math.h"

namespace triptych {
namespace {

// Gates are rounded to the output's dtype before anything else, and ups too, as if they had been written.
template <class Dtype>
struct StoreGated {
    using Element = typename Dtype::Element;

    const float* bias;    // in the order of the panels, padded to whole ones, or null
    const float* scales;  // the same, of int8 weights
    Element* out;
    int64_t num_columns;  // of `out`, contiguous

    template <int R, int P>
    TRIPTYCH_INLINE void prefetch(int64_t first_row, int64_t panel) const {
        const Element* place = out + first_row * num_columns + panel / 2 * kPanelColumns;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int64_t column = 0; column < (P + 1) / 2 * kPanelColumns; column += 64 / sizeof(Element)) {
                __builtin_prefetch(place + r * num_columns + column, 1);
            }
        }
    }

    template <int R, int P>
    TRIPTYCH_INLINE void operator()(int64_t first_row, int64_t panel, const __m512 (&sums)[R][2 * P]) const {
        static_assert(P == 1 || P % 2 == 0, "a tile of more than one panel holds whole pairs");
#pragma GCC unroll 4
        for (int p = 0; p < P; p += 2) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const int64_t column = (panel + p) / 2 * kPanelColumns + 16 * half;
                if (column >= num_columns) {
                    break;
                }
                const __mmask16 mask = first_lanes(num_columns - column);
                Element* place = out + first_row * num_columns + column;
                if constexpr (P == 1) {
                    store_half<R>(place, mask, panel, half, sums);
                } else {
                    store_pair<R, P>(place, mask, panel + p, p, half, sums);
                }
            }
        }
    }

private:
    TRIPTYCH_INLINE __m512 finished(__m512 sum, int64_t panel, int half) const {
        const int64_t place = panel * kPanelColumns + 16 * half;
        const __m512 shift = bias == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(bias + place);
        const __m512 scale = scales == nullptr ? _mm512_set1_ps(1.0f) : _mm512_loadu_ps(scales + place);
        return Dtype::rounded(_mm512_fmadd_ps(sum, scale, shift));
    }

    // Of one panel: gates wait for their ups where the result will be.
    template <int R>
    TRIPTYCH_INLINE void store_half(Element* place, __mmask16 mask, int64_t panel, int half,
                                    const __m512 (&sums)[R][2]) const {
        const bool is_gate = panel % 2 == 0;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r, place += num_columns) {
            __m512 value = finished(sums[r][half], panel, half);
            if (!is_gate) {
                value = mul(Dtype::silu(Dtype::load(place, mask)), value);
            }
            Dtype::store(place, mask, value);
        }
    }

    // Of neighbouring panels, the gates in front.
    template <int R, int P>
    TRIPTYCH_INLINE void store_pair(Element* place, __mmask16 mask, int64_t panel, int p, int half,
                                    const __m512 (&sums)[R][2 * P]) const {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r, place += num_columns) {
            const __m512 gate = finished(sums[r][2 * p + half], panel, half);
            const __m512 up = finished(sums[r][2 * p + 2 + half], panel + 1, half);
            Dtype::store(place, mask, mul(Dtype::silu(gate), up));
        }
    }
};

}  // namespace
}  // namespace triptych
