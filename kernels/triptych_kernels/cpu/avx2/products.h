// x W^T for packed weights by vector instructions of AVX2.
//
// Include isa.h before.
#pragma once

#include <optional>

#include "../gemm.h"

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
    }
    return true;
}

}  // namespace
}  // namespace triptych
