// Projections: packing a weight, and x W^T + b with it. Knows Python and addresses; linear.py checks what
// they mean.

#include "arguments.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "pool.h"
#include "isa.h"

extern PyMethodDef TRIPTYCH_METHODS(linear)[];
extern const triptych::Kernel* const TRIPTYCH_KERNELS_OF(linear)[];

#ifdef TRIPTYCH_KERNELS

#include TRIPTYCH_OF_ISA(products.h)

#include "gated.h"
#include "largest.h"

namespace triptych {
namespace {

constexpr const char* kPlanName = "triptych.linear";

struct LinearPlan {
    PackedWeight weight;
    const float* bias;
    const float* scales;
    bool out_is_bf16;
    int64_t num_gated;  // columns of silu(gate) * up if panels of gates and ups alternate; else 0
};

void pack_int8(const int8_t* weight, int64_t row_stride, const PackedWeight& packed, char* out) {
    std::memset(out, 0, packed.num_panels() * packed.panel_bytes());
    for (int64_t n = 0; n < packed.out_features; ++n) {
        char* panel = out + n / kPanelColumns * packed.panel_bytes();
        for (int64_t k = 0; k < packed.in_features; ++k) {
            put_int8(panel, static_cast<int>(n % kPanelColumns), k, weight[n * row_stride + k]);
        }
    }
}

void pack_wide(const char* weight, int64_t row_stride_bytes, const PackedWeight& packed, char* out) {
    const int64_t num_units = packed.panel_bytes() / kUnitBytes;
    for (int64_t first = 0; first < packed.num_panels() * kPanelColumns; first += 16) {
        const char* rows[16];
        const int64_t left = packed.out_features - first;
        const int num_rows = static_cast<int>(left < 0 ? 0 : left < 16 ? left : 16);
        for (int r = 0; r < num_rows; ++r) {
            rows[r] = weight + (first + r) * row_stride_bytes;
        }
        uint32_t* column =
            reinterpret_cast<uint32_t*>(out + first / kPanelColumns * packed.panel_bytes()) + first % kPanelColumns;
        if (num_rows < 16) {
            for (int64_t unit = 0; unit < num_units; ++unit) {
                std::memset(column + unit * kPanelColumns, 0, 64);
            }
        }
        pack_rows(rows, num_rows, packed.row_bytes(), num_units, column, kPanelColumns);
    }
}

// A chunk of rows in the layout of the product, in memory of the calling thread. nullptr if it cannot be allocated.
const uint32_t* packed_chunk(const PackedWeight& weight, const char* x, int64_t x_stride_bytes,
                             const RowBlocks& blocks) {
    const int64_t num_rows = blocks.num_rows, num_units = weight.num_units(), row_bytes = weight.row_bytes();
    const bool in_tiles = lies_in_tiles(weight, num_rows);
    const bool is_laid =
        num_rows == 1 || (weight.form == RowForm::kTiles && !in_tiles && x_stride_bytes == row_bytes);
    if (is_laid && row_bytes == 4 * num_units) {
        return reinterpret_cast<const uint32_t*>(x);
    }
    uint32_t* packed = static_cast<uint32_t*>(scratch(kScratchGemmRows, 4 * num_units * num_rows + kTileBytes));
    if (packed == nullptr) {
        return nullptr;
    }
    if (in_tiles) {
        parallel_for((num_rows + kTileRows - 1) / kTileRows, [&](int64_t group) {
            lay_tiles(weight, num_rows, group, [&](int64_t row) { return x + row * x_stride_bytes; }, packed);
        });
        return packed;
    }
    parallel_for(num_rows * row_bytes < (32 << 10) ? 1 : blocks.num_blocks, [&](int64_t task) {
        const bool alone = num_rows * row_bytes < (32 << 10);
        const int64_t end = alone ? blocks.num_blocks : task + 1;
        for (int64_t block = task; block < end; ++block) {
            const char* pointers[kMaxTileRows];
            const int64_t first = blocks.first_row(block);
            const int size = blocks.size(block);
            for (int r = 0; r < size; ++r) {
                pointers[r] = x + (first + r) * x_stride_bytes;
            }
            lay_rows(weight, pointers, size, packed + first * num_units);
        }
    });
    return packed;
}

// One chunk of rows times the whole weight; store_of(task) is the store of a task's tiles.
template <class StoreOf>
bool multiply_chunk(const PackedWeight& any_form, const char* x, int64_t x_stride_bytes, int64_t num_rows,
                    const StoreOf& store_of) {
    const PackedWeight weight = any_form.for_rows(num_rows);
    const RowBlocks blocks(num_rows);
    const uint32_t* rows = packed_chunk(weight, x, x_stride_bytes, blocks);
    if (rows == nullptr) {
        return false;
    }
    const int64_t num_panels = weight.num_panels();
    const int64_t task_panels = panels_a_task(weight, num_rows);
    std::atomic<bool> is_done{true};
    parallel_for((num_panels + task_panels - 1) / task_panels, [&](int64_t task) {
        const int64_t first = task * task_panels;
        if (!multiply_panels(weight, blocks, rows, first, std::min(first + task_panels, num_panels),
                             store_of(task))) {
            is_done = false;
        }
    });
    return is_done;
}

// store_of(first_row) is the store of the tiles of a chunk that begins there.
template <class StoreOf>
bool multiply_chunks(const PackedWeight& weight, const char* x, int64_t x_stride_bytes, int64_t num_rows,
                     const StoreOf& store_of) {
    const int64_t step = chunk_rows(num_rows, weight.for_rows(num_rows));
    for (int64_t first = 0; first < num_rows; first += step) {
        const auto store = store_of(first);
        if (!multiply_chunk(weight, x + first * x_stride_bytes, x_stride_bytes, std::min(step, num_rows - first),
                            [&](int64_t) { return store; })) {
            return false;
        }
    }
    return true;
}

template <class Dtype>
bool run_gated(const LinearPlan& plan, const char* x, int64_t x_stride_bytes, char* out, int64_t num_rows) {
    const int64_t width = plan.num_gated;
    return multiply_chunks(plan.weight, x, x_stride_bytes, num_rows, [&](int64_t first) {
        auto* to = reinterpret_cast<typename Dtype::Element*>(out) + first * width;
        return StoreGated<Dtype>{plan.bias, plan.scales, to, width};
    });
}

bool run_linear(const LinearPlan& plan, const char* x, int64_t x_stride_bytes, char* out, int64_t num_rows) {
    if (plan.num_gated != 0) {
        return plan.out_is_bf16 ? run_gated<Bf16>(plan, x, x_stride_bytes, out, num_rows)
                                : run_gated<Fp32>(plan, x, x_stride_bytes, out, num_rows);
    }
    const int64_t width = plan.weight.out_features, row_bytes = width * (plan.out_is_bf16 ? 2 : 4);
    return multiply_chunks(plan.weight, x, x_stride_bytes, num_rows, [&](int64_t first) {
        return StoreRows{plan.bias, plan.scales, out + first * row_bytes, width, width, plan.out_is_bf16, nullptr};
    });
}

// The arguments of greedy_linear: addresses and sizes.
struct GreedyCall {
    const char* x;
    int64_t x_stride_bytes, num_rows;
    float* kept;              // the products of the rows that are kept
    const int32_t* out_row_of;  // of each row in `kept`, below 0: not kept; null: no row is kept
    float* highest;
    int64_t* tokens;
};

bool run_greedy(const LinearPlan& plan, const GreedyCall& call) {
    const PackedWeight& weight = plan.weight;
    const int64_t step = chunk_rows(call.num_rows, weight.for_rows(call.num_rows));
    for (int64_t first = 0; first < call.num_rows; first += step) {
        const int64_t num_rows = std::min(step, call.num_rows - first);
        const int64_t task_panels = panels_a_task(weight, num_rows);
        const int64_t num_tasks = (weight.num_panels() + task_panels - 1) / task_panels;
        // Each task sees some columns of all rows.
        std::vector<Largest> largest(num_tasks * num_rows);
        const auto store_of = [&](int64_t task) {
            return KeepLargest{plan.bias,
                               plan.scales,
                               call.kept,
                               weight.out_features,
                               call.out_row_of == nullptr ? nullptr : call.out_row_of + first,
                               largest.data() + task * num_rows};
        };
        if (!multiply_chunk(weight, call.x + first * call.x_stride_bytes, call.x_stride_bytes, num_rows, store_of)) {
            return false;
        }
        for (int64_t row = 0; row < num_rows; ++row) {
            for (int64_t task = 1; task < num_tasks; ++task) {
                largest[row].see(largest[task * num_rows + row]);
            }
            call.highest[first + row] = largest[row].value;
            call.tokens[first + row] = largest[row].column;
        }
    }
    return true;
}

void delete_plan(PyObject* capsule) {
    delete static_cast<LinearPlan*>(PyCapsule_GetPointer(capsule, kPlanName));
}

PyObject* packed_bytes(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    int64_t numbers[3];
    if (!read_numbers("packed_bytes", arguments, count, numbers, 3)) {
        return nullptr;
    }
    const auto kind = static_cast<WeightKind>(numbers[0]);
    const PackedWeight packed{nullptr, numbers[2], numbers[1], kind, false, RowForm::kUnits};
    return PyLong_FromLongLong(packed.num_panels() * packed.panel_bytes());
}

PyObject* pack_weight(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    int64_t numbers[6];
    if (!read_numbers("pack_weight", arguments, count, numbers, 6)) {
        return nullptr;
    }
    const auto kind = static_cast<WeightKind>(numbers[0]);
    const PackedWeight packed{nullptr, numbers[2], numbers[1], kind, kind == WeightKind::kFp32, RowForm::kUnits};
    char* out = reinterpret_cast<char*>(numbers[5]);
    Py_BEGIN_ALLOW_THREADS
    if (kind == WeightKind::kInt8) {
        pack_int8(reinterpret_cast<const int8_t*>(numbers[3]), numbers[4], packed, out);
    } else {
        const int64_t element_bytes = kind == WeightKind::kFp32 ? 4 : 2;
        pack_wide(reinterpret_cast<const char*>(numbers[3]), numbers[4] * element_bytes, packed, out);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject* make_linear(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    int64_t numbers[10];
    if (!read_numbers("make_linear", arguments, count, numbers, 10)) {
        return nullptr;
    }
    const RowForm form = form_of_few_rows(numbers[1] != 0, numbers[9] != 0);
    auto* plan =
        new LinearPlan{PackedWeight{reinterpret_cast<const char*>(numbers[5]), numbers[4], numbers[3],
                                    static_cast<WeightKind>(numbers[0]), numbers[1] != 0, form},
                       reinterpret_cast<const float*>(numbers[6]), reinterpret_cast<const float*>(numbers[7]),
                       numbers[2] != 0, numbers[8]};
    return PyCapsule_New(plan, kPlanName, delete_plan);
}

PyObject* rows_at_once(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 1) return PyErr_Format(PyExc_TypeError, "rows_at_once takes a plan");
    const auto* plan = static_cast<const LinearPlan*>(PyCapsule_GetPointer(arguments[0], kPlanName));
    if (plan == nullptr) return nullptr;
    constexpr int64_t kMany = int64_t{1} << 30;
    return PyLong_FromLongLong(chunk_rows(kMany, plan->weight.for_rows(kMany)));
}

const LinearPlan& plan_of(const int64_t* n) { return *reinterpret_cast<const LinearPlan*>(n[0]); }

Outcome run_linear_of(const int64_t* n) {
    const LinearPlan& plan = plan_of(n);
    const int64_t x_stride_bytes = n[2] * (plan.weight.rows_are_fp32 ? 4 : 2);
    return done_if(
        run_linear(plan, reinterpret_cast<const char*>(n[1]), x_stride_bytes, reinterpret_cast<char*>(n[3]), n[4]));
}

// Not with helpers: if one lost its core, the call would wait for it with the interpreter's lock held.
bool linear_keeps_lock(const int64_t* n) {
    return triptych::num_threads() == 1 && is_short(plan_of(n).weight, n[4]);
}

Outcome run_greedy_of(const int64_t* n) {
    const LinearPlan& plan = plan_of(n);
    const GreedyCall call{reinterpret_cast<const char*>(n[1]),
                          n[2] * (plan.weight.rows_are_fp32 ? 4 : 2),
                          n[3],
                          reinterpret_cast<float*>(n[4]),
                          reinterpret_cast<const int32_t*>(n[5]),
                          reinterpret_cast<float*>(n[6]),
                          reinterpret_cast<int64_t*>(n[7])};
    return done_if(run_greedy(plan, call));
}

constexpr Kernel kLinear{"linear", kPlanName, 4, 0, run_linear_of, linear_keeps_lock,
                         "linear(plan, x, x_row_stride, out, M): out = x W^T * scales + bias."};
constexpr Kernel kGreedyLinear{
    "greedy_linear", kPlanName, 7, 0, run_greedy_of, nullptr,
    "greedy_linear(plan, x, x_row_stride, M, kept, row_of, highest, tokens): see linear.py."};

}  // namespace
}  // namespace triptych

PyMethodDef TRIPTYCH_METHODS(linear)[] = {
    TRIPTYCH_METHOD(packed_bytes,
                    "packed_bytes(kind, N, K) -> bytes of a packed weight; kind: 0 bf16, 1 fp32, 2 int8."),
    TRIPTYCH_METHOD(pack_weight,
                    "pack_weight(kind, N, K, weight, row_stride, out): lay a weight out as panels."),
    TRIPTYCH_METHOD(make_linear,
                    "make_linear(kind, rows_are_fp32, out_is_bf16, N, K, panels, bias, scales, num_gated, with_amx) "
                    "-> plan."),
    TRIPTYCH_METHOD(rows_at_once, "rows_at_once(plan) -> the most rows that are packed, and multiplied, together."),
    TRIPTYCH_KERNEL_METHOD(kLinear),
    TRIPTYCH_KERNEL_METHOD(kGreedyLinear),
    {nullptr, nullptr, 0, nullptr}};
const triptych::Kernel* const TRIPTYCH_KERNELS_OF(linear)[] = {&triptych::kLinear, &triptych::kGreedyLinear, nullptr};

#else

PyMethodDef TRIPTYCH_METHODS(linear)[] = {{nullptr, nullptr, 0, nullptr}};
const triptych::Kernel* const TRIPTYCH_KERNELS_OF(linear)[] = {nullptr};

#endif

#ifdef TRIPTYCH_KERNELS_END
TRIPTYCH_KERNELS_END
#endif
