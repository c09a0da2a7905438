// x W^T for packed weights by vector instructions of AVX2.
//
// Include isa.h before.
#pragma once

#include <optional>

#include "../gemm.h"
#include "../groups.h"

namespace triptych {
namespace {

// Panels [first, end) of the weights times a chunk of packed rows.
template <class Store>
bool multiply_panels(const PackedWeight& weight, const RowBlocks& blocks, const uint32_t* rows, int64_t first,
                     int64_t end, const Store& store) {
    std::optional<FlushDenormals> flush;
    if (!weight.rows_are_fp32) {
        flush.emplace();
    }
    if (weight.has_groups()) {
        multiply_codes(weight, blocks, rows, first, end, store);
        return true;
    }
    const auto multiply_as = [&](const auto& kind) {
        multiply_by_blocks(kind, blocks, rows, weight.panels, weight.panel_bytes(), weight.num_units(), first, end,
                           store);
    };
    switch (weight.kind) {
        case WeightKind::kBf16:
            multiply_as(Bf16Pairs{});
            break;
        case WeightKind::kFp32:
            multiply_as(Fp32Units{});
            break;
        case WeightKind::kInt8:
            weight.rows_are_fp32 ? multiply_as(Int8Pairs<false>{}) : multiply_as(Int8Pairs<true>{});
            break;
        case WeightKind::kCodes4:
        case WeightKind::kCodes8:
        case WeightKind::kCodes4ForInt8:
        case WeightKind::kCodes6ForInt8:
        case WeightKind::kCodes8ForInt8:
            break;  // see above
    }
    return true;
}

}  // namespace
}  // namespace triptych
