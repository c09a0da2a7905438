// Stores a finished tile of gates and ups as silu(gate) * up, without writing the projection.
//
// Panels alternate: one of gates, then one of the same columns' ups. Include isa.h before.
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
        const Element* to = out + first_row * num_columns + panel / 2 * kPanelColumns;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int64_t column = 0; column < (P + 1) / 2 * kPanelColumns; column += 64 / sizeof(Element)) {
                __builtin_prefetch(to + r * num_columns + column, 1);
            }
        }
    }

    template <int R, int P>
    TRIPTYCH_INLINE void operator()(int64_t first_row, int64_t panel, const Floats (&sums)[R][kVectors * P]) const {
        static_assert(P == 1 || P % 2 == 0, "a tile of more than one panel holds whole pairs");
#pragma GCC unroll 4
        for (int p = 0; p < P; p += 2) {
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) {
                const int64_t column = (panel + p) / 2 * kPanelColumns + 16 * v;
                if (column >= num_columns) {
                    break;
                }
                const Mask mask = first_lanes(num_columns - column);
                Element* to = out + first_row * num_columns + column;
                if constexpr (P == 1) {
                    store_half<R>(to, mask, panel, v, sums);
                } else {
                    store_pair<R, P>(to, mask, panel + p, p, v, sums);
                }
            }
        }
    }

private:
    TRIPTYCH_INLINE Floats finished(Floats sum, int64_t panel, int v) const {
        const int64_t to = panel * kPanelColumns + 16 * v;
        const Floats shift = bias == nullptr ? zeros() : load(bias + to);
        const Floats scale = scales == nullptr ? splat(1.0f) : load(scales + to);
        return Dtype::rounded(fmadd(sum, scale, shift));
    }

    // Of one panel: gates are stored where the result will be until their ups are computed.
    template <int R>
    TRIPTYCH_INLINE void store_half(Element* to, Mask mask, int64_t panel, int v,
                                    const Floats (&sums)[R][kVectors]) const {
        const bool is_gate = panel % 2 == 0;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r, to += num_columns) {
            Floats value = finished(sums[r][v], panel, v);
            if (!is_gate) {
                value = mul(activated<Dtype>(Gate::kSilu, Dtype::load(to, mask)), value);
            }
            Dtype::store(to, mask, value);
        }
    }

    // Of neighbouring panels, gates first.
    template <int R, int P>
    TRIPTYCH_INLINE void store_pair(Element* to, Mask mask, int64_t panel, int p, int v,
                                    const Floats (&sums)[R][kVectors * P]) const {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r, to += num_columns) {
            const Floats gate = finished(sums[r][kVectors * p + v], panel, v);
            const Floats up = finished(sums[r][kVectors * (p + 1) + v], panel + 1, v);
            Dtype::store(to, mask, mul(activated<Dtype>(Gate::kSilu, gate), up));
        }
    }
};

}  // namespace
}  // namespace triptych
