// The inner loop of every product with packed weights: R rows times P panels, in registers.
//
// Weights are packed in panels of kPanelColumns columns. A unit is what one 32-bit lane holds of the inner dimension: a
// pair of bf16, one fp32, or a pair of int8 in half the space. Rows are packed as [units][R], 32 bits each; where a
// pair is multiplied number by number, as two units of fp32. Every output is one chain of multiply-adds over the units
// in order, whatever R and P are: this makes results independent of the batch.
//
// Include isa.h before.
#pragma once

#include <cstddef>
#include <cstdint>

#include TRIPTYCH_OF_ISA(weights.h)

namespace triptych {
namespace {

// The prefetches of a call.
struct Prefetch {
    // kStream: of each panel itself, the bytes `distance` ahead; from unit `turn` on, those `distance_after` ahead (the
    // start of the next panels).
    int64_t turn, distance, distance_after;
    // Otherwise: one line per unit starting at `next`, `step` bytes apart.
    const char* next;
    int64_t step;
};

template <class Weight, int R, int P, bool kStream>
TRIPTYCH_INLINE void accumulate_units(const Weight& weight, const uint32_t*& rows, const char*& panel,
                                      int64_t panel_bytes, int64_t num_units, const char*& next, int64_t step,
                                      int64_t distance, Floats (&sums)[R][kVectors * P]) {
#pragma GCC unroll kUnroll
    for (int64_t unit = 0; unit < num_units; ++unit) {
#pragma GCC unroll 2
        for (int part = 0; part < Weight::kRowUnits; ++part) {
            if (!kStream && part == 0) {
                _mm_prefetch(next, _MM_HINT_T1);
                next += step;
            }
            // The weights of as many panels at a time as there are registers for.
#pragma GCC unroll 8
            for (int first = 0; first < P; first += kPanelsLoaded) {
                constexpr int kLoaded = P < kPanelsLoaded ? P : kPanelsLoaded;
                Words lanes[kLoaded][kVectors];
#pragma GCC unroll 8
                for (int p = 0; p < kLoaded; ++p) {
                    const char* from = panel + (first + p) * panel_bytes;
                    weight.load(from, part, lanes[p]);
                    if (kStream && part == 0) {
#pragma GCC unroll 2
                        for (int64_t line = 0; line < Weight::kStep; line += 64) {
                            _mm_prefetch(from + distance + line, _MM_HINT_T0);
                        }
                    }
                }
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    const Words x = splat_word(static_cast<int>(rows[r]));
#pragma GCC unroll 8
                    for (int p = 0; p < kLoaded; ++p) {
#pragma GCC unroll 2
                        for (int v = 0; v < kVectors; ++v) {
                            Floats& sum = sums[r][kVectors * (first + p) + v];
                            sum = weight.add_product(sum, x, lanes[p][v]);
                        }
                    }
                }
            }
            rows += R;
        }
        panel += Weight::kStep;
    }
}

// sums[r][kVectors p + v]: of row r, columns 16 v to 16 v + 15 of panel p. num_units: of a panel.
template <class Weight, int R, int P, bool kStream>
TRIPTYCH_INLINE void multiply(const Weight& weight, const uint32_t* rows, const char* panel,
                              int64_t panel_bytes, int64_t num_units, const Prefetch& prefetch,
                              Floats (&sums)[R][kVectors * P]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j < kVectors * P; ++j) {
            sums[r][j] = zeros();
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
