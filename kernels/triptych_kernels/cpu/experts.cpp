// Mixtures of experts: each chosen expert's two projections over the tokens that chose it, summed token by
// token. Knows Python and addresses; experts.py checks what they mean.

#include "arguments.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#include "pool.h"
#include "isa.h"

extern PyMethodDef TRIPTYCH_METHODS(experts)[];
extern const triptych::Kernel* const TRIPTYCH_KERNELS_OF(experts)[];

#ifdef TRIPTYCH_KERNELS

#include TRIPTYCH_OF_ISA(products.h)

#include "vector_math.h"

namespace triptych {
namespace {

constexpr const char* kPlanName = "triptych.experts";
constexpr int64_t kGroupPanels = 4;               // of one task: two of gates, two of the same columns' ups
constexpr int64_t kChunkRows = 8 * kMaxTileRows;  // whose gates and ups stay in the first caches
constexpr int64_t kMaxAssignments = 4096;              // tokens times experts per token that are processed at once

// A projection of an expert.
struct ExpertWeight {
    PackedWeight packed;
    const float* scales;  // of its columns, in whole panels; null: all are 1
    const float* bias;    // the same; null: all are 0
};

// gate_up: panels that alternate, gates and the same columns' ups; F padded with zeros to whole panels.
struct ExpertsPlan {
    std::vector<ExpertWeight> gate_up, down;  // of each expert, in the same shapes
    int64_t first_expert;
    int64_t x_units, activated_units;  // of a packed row: enough for each expert
    Gate gate;

    int64_t num_experts() const { return static_cast<int64_t>(down.size()); }
    int64_t hidden() const { return gate_up.front().packed.in_features; }
    bool is_fp32() const { return gate_up.front().packed.rows_are_fp32; }
    int64_t padded_ffn() const { return gate_up.front().packed.out_features / 2; }
};

struct Call {
    const char* x;
    int64_t x_stride_bytes;
    const char* ids;
    bool ids_are_int64;
    const float* weights;
    char* out;
    int64_t num_tokens, experts_a_token;

    int64_t id(int64_t assignment) const {
        return ids_are_int64 ? reinterpret_cast<const int64_t*>(ids)[assignment]
                             : reinterpret_cast<const int32_t*>(ids)[assignment];
    }
};

// The assignment (token times k plus the index of its expert) of each row; the rows of an expert are contiguous.
struct Routing {
    int64_t* first_row;  // [E + 1]
    int64_t* assignment_of;   // [rows]
    int64_t* chosen;     // [num_chosen] experts that have rows
    int64_t num_chosen, num_rows;

    int64_t rows_of(int64_t expert) const { return first_row[expert + 1] - first_row[expert]; }
};

bool route(const ExpertsPlan& plan, const Call& call, Routing& routing) {
    const int64_t num_assignments = call.num_tokens * call.experts_a_token, num_experts = plan.num_experts();
    auto* memory =
        static_cast<int64_t*>(scratch(kScratchExpertsIndex, 8 * (2 * num_experts + 2 + num_assignments)));
    if (memory == nullptr) {
        return false;
    }
    routing.first_row = memory;
    routing.chosen = memory + num_experts + 1;
    routing.assignment_of = routing.chosen + num_experts + 1;
    std::memset(routing.first_row, 0, 8 * (num_experts + 1));
    for (int64_t assignment = 0; assignment < num_assignments; ++assignment) {
        const int64_t expert = call.id(assignment) - plan.first_expert;
        if (expert >= 0 && expert < num_experts) {
            ++routing.first_row[expert];
        }
    }
    routing.num_chosen = routing.num_rows = 0;
    for (int64_t expert = 0; expert < num_experts; ++expert) {
        const int64_t rows = routing.first_row[expert];
        if (rows > 0) {
            routing.chosen[routing.num_chosen++] = expert;
        }
        routing.first_row[expert] = routing.num_rows;
        routing.num_rows += rows;
    }
    for (int64_t assignment = 0; assignment < num_assignments; ++assignment) {
        const int64_t expert = call.id(assignment) - plan.first_expert;
        if (expert >= 0 && expert < num_experts) {
            routing.assignment_of[routing.first_row[expert]++] = assignment;
        }
    }
    // Filling moved each start to its end, which is the next expert's start.
    for (int64_t expert = num_experts; expert > 0; --expert) {
        routing.first_row[expert] = routing.first_row[expert - 1];
    }
    routing.first_row[0] = 0;
    return true;
}

// Rows first to first + count - 1, each at the address of row_at, in the layout of the product.
template <class RowAt>
void pack_chunk(const PackedWeight& weight, int64_t first, int64_t count, uint32_t* out,
                const RowAt& row_at) {
    if (lies_in_tiles(weight, count)) {
        for (int64_t group = 0; group * kTileRows < count; ++group) {
            lay_tiles(weight, count, group, [&](int64_t row) { return row_at(first + row); }, out);
        }
        return;
    }
    const RowBlocks blocks(count);
    for (int64_t block = 0; block < blocks.num_blocks; ++block) {
        const char* rows[kMaxTileRows];
        const int64_t start = blocks.first_row(block);
        for (int r = 0; r < blocks.size(block); ++r) {
            rows[r] = row_at(first + start + r);
        }
        lay_rows(weight, rows, blocks.size(block), out + start * weight.num_units());
    }
}

template <class Dtype, Gate GATE>
void gate_times_up(const float* gate, const float* up, typename Dtype::Element* out) {
    for (int64_t column = 0; column < kPanelColumns; column += 16) {
        if constexpr (GATE == Gate::kClampedSwiglu) {
            Dtype::store(out + column, clamped_swiglu<Dtype>(load(gate + column), load(up + column)));
        } else {
            const Floats activated_gate = activated<Dtype>(GATE, load(gate + column));
            Dtype::store(out + column, mul(activated_gate, load(up + column)));
        }
    }
}

// Memory of one call, by rows in the routing's order.
struct Workspace {
    uint32_t* x;       // [rows] packed
    char* activated;   // [rows, padded F] in x's dtype
    uint32_t* packed;  // [rows] activated, packed
    float* parts;      // [assignments, hidden]
};

bool allocate(const ExpertsPlan& plan, const Routing& routing, int64_t num_assignments, Workspace& space) {
    const int64_t element_bytes = plan.is_fp32() ? 4 : 2;
    const int64_t sizes[4] = {
        routing.num_rows * plan.x_units * 4,
        routing.num_rows * plan.padded_ffn() * element_bytes,
        routing.num_rows * plan.activated_units * 4,
        num_assignments * plan.hidden() * 4,
    };
    int64_t starts[5] = {0};
    for (int i = 0; i < 4; ++i) {
        starts[i + 1] = starts[i] + (sizes[i] + 63) / 64 * 64;
    }
    char* memory = static_cast<char*>(scratch(kScratchExperts, starts[4] + kTileBytes));
    if (memory == nullptr) {
        return false;
    }
    space.x = reinterpret_cast<uint32_t*>(memory);
    space.activated = memory + starts[1];
    space.packed = reinterpret_cast<uint32_t*>(memory + starts[2]);
    space.parts = reinterpret_cast<float*>(memory + starts[3]);
    return true;
}

// What is made of gates and ups of a group of panels, for all rows of an expert.
template <class Dtype, Gate GATE>
bool activate_group(const ExpertsPlan& plan, const Routing& routing, const Workspace& space, int64_t expert,
                    int64_t first_panel) {
    const auto& [weight, scales, bias] = plan.gate_up[expert];
    const int64_t end_panel = std::min(first_panel + kGroupPanels, weight.num_panels());
    constexpr int64_t kWidth = kGroupPanels * kPanelColumns;
    float* tile = static_cast<float*>(scratch(kScratchGemmPanel, kChunkRows * kWidth * 4));
    if (tile == nullptr) {
        return false;
    }
    auto* activated = reinterpret_cast<typename Dtype::Element*>(space.activated);
    for (int64_t first = routing.first_row[expert]; first < routing.first_row[expert + 1];
         first += kChunkRows) {
        const int64_t count = std::min(kChunkRows, routing.first_row[expert + 1] - first);
        char* out = reinterpret_cast<char*>(tile) - first_panel * kPanelColumns * 4;
        const StoreRows store{bias, scales, out, kWidth, weight.out_features, false, nullptr};
        multiply_panels(weight, RowBlocks(count), space.x + first * plan.x_units, first_panel, end_panel, store);
        for (int64_t row = 0; row < count; ++row) {
            for (int64_t pair = 0; pair < (end_panel - first_panel) / 2; ++pair) {
                const float* gate = tile + row * kWidth + pair * 2 * kPanelColumns;
                const int64_t column = (first_panel / 2 + pair) * kPanelColumns;
                gate_times_up<Dtype, GATE>(gate, gate + kPanelColumns,
                                           activated + (first + row) * plan.padded_ffn() + column);
            }
        }
    }
    return true;
}

void project_down(const ExpertsPlan& plan, const Routing& routing, const Workspace& space, int64_t expert,
                  int64_t first_panel) {
    const auto& [weight, scales, bias] = plan.down[expert];
    const int64_t end_panel = std::min(first_panel + kGroupPanels, weight.num_panels());
    for (int64_t first = routing.first_row[expert]; first < routing.first_row[expert + 1];
         first += kChunkRows) {
        const int64_t count = std::min(kChunkRows, routing.first_row[expert + 1] - first);
        const StoreRows store{bias,
                              scales,
                              reinterpret_cast<char*>(space.parts),
                              plan.hidden(),
                              plan.hidden(),
                              false,
                              routing.assignment_of + first};
        multiply_panels(weight, RowBlocks(count), space.packed + first * plan.activated_units, first_panel,
                        end_panel, store);
    }
}

template <class Dtype>
void sum_parts(const ExpertsPlan& plan, const Call& call, const Workspace& space, int64_t token) {
    auto* out = reinterpret_cast<typename Dtype::Element*>(call.out) + token * plan.hidden();
    for (int64_t column = 0; column < plan.hidden(); column += 16) {
        const Mask mask = first_lanes(plan.hidden() - column);
        Floats sum = zeros();
        for (int64_t assignment = token * call.experts_a_token; assignment < (token + 1) * call.experts_a_token;
             ++assignment) {
            const int64_t expert = call.id(assignment) - plan.first_expert;
            if (expert < 0 || expert >= plan.num_experts()) {
                continue;
            }
            const Floats part = load_part(mask, space.parts + assignment * plan.hidden() + column);
            sum = fmadd(splat(call.weights[assignment]), part, sum);
        }
        Dtype::store(out + column, mask, sum);
    }
}

// Runs body(expert, first panel of a group) for every group of every chosen expert.
template <class Body>
void for_each_group(const Routing& routing, const PackedWeight& weight, const Body& body) {
    const int64_t groups = (weight.num_panels() + kGroupPanels - 1) / kGroupPanels;
    parallel_for(routing.num_chosen * groups,
                 [&](int64_t task) { body(routing.chosen[task / groups], task % groups * kGroupPanels); });
}

template <class Dtype>
bool run_tokens(const ExpertsPlan& plan, const Call& call) {
    Routing routing;
    Workspace space;
    if (!route(plan, call, routing)) {
        return false;
    }
    if (!allocate(plan, routing, call.num_tokens * call.experts_a_token, space)) {
        return false;
    }
    const auto pack_experts = [&](const std::vector<ExpertWeight>& weights, int64_t row_units, uint32_t* out,
                                  const auto& row_at) {
        parallel_for(routing.num_chosen, [&](int64_t task) {
            const int64_t expert = routing.chosen[task], end = routing.first_row[expert + 1];
            for (int64_t first = routing.first_row[expert]; first < end; first += kChunkRows) {
                const int64_t count = std::min(kChunkRows, end - first);
                pack_chunk(weights[expert].packed, first, count, out + first * row_units, row_at);
            }
        });
    };
    pack_experts(plan.gate_up, plan.x_units, space.x, [&](int64_t row) {
        return call.x + routing.assignment_of[row] / call.experts_a_token * call.x_stride_bytes;
    });
    std::atomic<bool> is_done{true};
    for_each_group(routing, plan.gate_up.front().packed, [&](int64_t expert, int64_t panel) {
        const bool is_clamped = plan.gate == Gate::kClampedSwiglu;
        if (!(is_clamped ? activate_group<Dtype, Gate::kClampedSwiglu>(plan, routing, space, expert, panel)
                         : activate_group<Dtype, Gate::kSilu>(plan, routing, space, expert, panel))) {
            is_done = false;
        }
    });
    if (!is_done) {
        return false;
    }
    const int64_t activated_bytes = plan.padded_ffn() * static_cast<int64_t>(sizeof(typename Dtype::Element));
    pack_experts(plan.down, plan.activated_units, space.packed,
                 [&](int64_t row) { return space.activated + row * activated_bytes; });
    for_each_group(routing, plan.down.front().packed,
                   [&](int64_t expert, int64_t panel) { project_down(plan, routing, space, expert, panel); });
    for (int64_t token = 0; token < call.num_tokens; ++token) {
        sum_parts<Dtype>(plan, call, space, token);
    }
    return true;
}

bool run_experts(const ExpertsPlan& plan, Call call) {
    const int64_t step = std::max<int64_t>(1, kMaxAssignments / std::max<int64_t>(1, call.experts_a_token));
    const int64_t num_tokens = call.num_tokens, id_bytes = call.ids_are_int64 ? 8 : 4;
    for (int64_t first = 0; first < num_tokens; first += step) {
        call.num_tokens = std::min(step, num_tokens - first);
        if (!(plan.is_fp32() ? run_tokens<Fp32>(plan, call) : run_tokens<Bf16>(plan, call))) {
            return false;
        }
        call.x += step * call.x_stride_bytes;
        call.ids += step * call.experts_a_token * id_bytes;
        call.weights += step * call.experts_a_token;
        call.out += step * plan.hidden() * (plan.is_fp32() ? 4 : 2);
    }
    return true;
}

void delete_plan(PyObject* capsule) {
    delete static_cast<ExpertsPlan*>(PyCapsule_GetPointer(capsule, kPlanName));
}

PyObject* make_experts(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    constexpr int kPlanNumbers = 4, kWeightNumbers = kLayoutNumbers + 5;
    const Py_ssize_t num_weights = std::max<Py_ssize_t>(2, (count - kPlanNumbers) / kWeightNumbers / 2 * 2);
    std::vector<int64_t> numbers(kPlanNumbers + num_weights * kWeightNumbers);
    if (!read_numbers("make_experts", arguments, count, numbers.data(), static_cast<Py_ssize_t>(numbers.size()))) {
        return nullptr;
    }
    auto* plan = new ExpertsPlan{{}, {}, numbers[1], 0, 0, static_cast<Gate>(numbers[3])};
    for (Py_ssize_t i = 0; i < num_weights; ++i) {
        const int64_t* n = numbers.data() + kPlanNumbers + i * kWeightNumbers;
        const int64_t* own = n + kLayoutNumbers;
        PackedWeight weight = layout_of(n);
        weight.set_rows(numbers[0] != 0, numbers[2] != 0);
        weight.panels = reinterpret_cast<const char*>(own[0]);
        weight.groups.table = reinterpret_cast<const uint8_t*>(own[3]);
        weight.groups.base = static_cast<int32_t>(own[4]);
        int64_t& most_units = i % 2 == 0 ? plan->x_units : plan->activated_units;
        most_units = std::max(most_units, weight.num_units());
        (i % 2 == 0 ? plan->gate_up : plan->down)
            .push_back({weight, reinterpret_cast<const float*>(own[2]), reinterpret_cast<const float*>(own[1])});
    }
    return PyCapsule_New(plan, kPlanName, delete_plan);
}

Outcome run_experts_of(const int64_t* n) {
    const auto* plan = reinterpret_cast<const ExpertsPlan*>(n[0]);
    const Call call{reinterpret_cast<const char*>(n[1]),
                    n[2] * (plan->is_fp32() ? 4 : 2),
                    reinterpret_cast<const char*>(n[3]),
                    n[4] != 0,
                    reinterpret_cast<const float*>(n[5]),
                    reinterpret_cast<char*>(n[6]),
                    n[7],
                    n[8]};
    return done_if(run_experts(*plan, call));
}

constexpr Kernel kExperts{"experts", kPlanName, 8, 0, run_experts_of, nullptr,
                          "experts(plan, x, x_row_stride, ids, ids_are_int64, weights, out, T, k)."};

}  // namespace
}  // namespace triptych

PyMethodDef TRIPTYCH_METHODS(experts)[] = {
    TRIPTYCH_METHOD(make_experts,
                    "make_experts(is_fp32, first_expert, with_amx, gate, *weights) -> plan. Of each expert gate_up, "
                    "whose panels alternate, then down, both as: *layout (see packed_bytes), panels, bias, scales, "
                    "table, base."),
    TRIPTYCH_KERNEL_METHOD(kExperts),
    {nullptr, nullptr, 0, nullptr}};
const triptych::Kernel* const TRIPTYCH_KERNELS_OF(experts)[] = {&triptych::kExperts, nullptr};

#else

PyMethodDef TRIPTYCH_METHODS(experts)[] = {{nullptr, nullptr, 0, nullptr}};
const triptych::Kernel* const TRIPTYCH_KERNELS_OF(experts)[] = {nullptr};

#endif

#ifdef TRIPTYCH_KERNELS_END
TRIPTYCH_KERNELS_END
#endif
