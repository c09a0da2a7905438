// x W^T for packed weights by vector instructions of AVX-512 or, if the rows are laid out for it, by tiles.
//
// Include isa.h before.
#pragma once

#include <optional>
#include <type_traits>

#include "../gemm.h"
#include "../groups.h"
#include "amx.h"

namespace triptych {
namespace {

// fp32 rows times weights in pairs: each panel is widened once for all rows. False if memory cannot be allocated.
template <bool kSecondFirst, class Pairs, class Store>
bool multiply_widened(const Pairs& pairs, const PackedWeight& weight, const RowBlocks& blocks,
                      const uint32_t* rows, int64_t first, int64_t end, const Store& store) {
    const int64_t panel_bytes = weight.panel_bytes(), num_units = weight.num_units();
    char* wide = static_cast<char*>(scratch(kScratchGemmPanel, num_units * kUnitBytes));
    if (wide == nullptr) {
        return false;
    }
    for (int64_t index = first; index < end; ++index) {
        const char* panel = weight.panels + index * panel_bytes;
        widen_to_fp32<kSecondFirst>(pairs, panel, num_units / 2, wide);
        reuse_panel(Fp32Units{}, blocks, rows, wide, panel + panel_bytes, panel_bytes, num_units, index,
                    store);
    }
    return true;
}

// Panels [first, end) of the weights times a chunk of packed rows. False if memory cannot be allocated.
template <class Store>
bool multiply_panels(const PackedWeight& weight, const RowBlocks& blocks, const uint32_t* rows, int64_t first,
                     int64_t end, const Store& store) {
    if (weight.form == RowForm::kTiles) {
        return multiply_by_tiles(weight, reinterpret_cast<const char*>(rows), blocks.num_rows, first, end, store);
    }
    std::optional<FlushDenormals> flush;
    if (!weight.rows_are_fp32) {
        flush.emplace();
    }
    if (weight.has_groups()) {
        multiply_codes(weight, blocks, rows, first, end, store);
        return true;
    }
    const auto multiply_as = [&](const auto& kind) {
        if constexpr (!std::is_same_v<decltype(kind), const Fp32Units&>) {
            if (weight.form == RowForm::kWide) {
                return multiply_widened<true>(kind, weight, blocks, rows, first, end, store);
            }
        }
        multiply_by_blocks(kind, blocks, rows, weight.panels, weight.panel_bytes(), weight.num_units(), first,
                           end, store);
        return true;
    };
    switch (weight.kind) {
        case WeightKind::kBf16:
            return multiply_as(Bf16Pairs{});
        case WeightKind::kFp32:
            return multiply_as(Fp32Units{});
        case WeightKind::kInt8: {
            const Int8Pairs pairs;
            return weight.rows_are_fp32 ? multiply_widened<false>(pairs, weight, blocks, rows, first, end, store)
                                        : multiply_as(pairs);
        }
        case WeightKind::kCodes4:
        case WeightKind::kCodes8:
        case WeightKind::kCodes4ForInt8:
        case WeightKind::kCodes6ForInt8:
        case WeightKind::kCodes8ForInt8:
            break;  // see above
    }
    return false;
}

}  // namespace
}  // namespace triptych
