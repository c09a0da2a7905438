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
#include "low_rank.h"

namespace triptych {
namespace {

constexpr const char* kPlanName = "triptych.linear";
constexpr int64_t kAddendInCache = 128 << 10;  // bytes of the additions of a task

// Some rows of a weight, all of one kind.
struct LinearPart {
    PackedWeight weight;
    const float* bias;
    const float* scales;
    int64_t first_column;  // of the product
};

struct LinearPlan {
    std::vector<LinearPart> parts;  // at least one, and no more if the plan is gated
    bool out_is_bf16;
    int64_t num_gated;  // columns of gate(gates) * ups if panels of gates and ups alternate; else 0
    Gate gate;

    // Whose rows are laid out as those of any part, but for groups.
    const PackedWeight& first() const { return parts.front().weight; }
    // Columns of the product.
    int64_t width() const { return parts.back().first_column + parts.back().weight.out_features; }
    int64_t out_width() const { return num_gated == 0 ? width() : num_gated; }
    // The number of rows to process at once.
    int64_t rows_at_once(int64_t num_rows) const {
        int64_t fewest = num_rows;
        for (const LinearPart& part : parts) {
            fewest = std::min(fewest, chunk_rows(num_rows, part.weight.for_rows(num_rows)));
        }
        return fewest;
    }
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

// Codes to lay out: [N, K] bytes of a checkpoint, which `stored` maps, to no more bits than they are stored in; [N, G]
// scales and minima.
struct Codes {
    const uint8_t* codes;
    int64_t row_stride;
    const uint8_t* stored;
    const char *scales, *minima;
};

void pack_codes(const Codes& source, const PackedWeight& packed, char* out) {
    std::memset(out, 0, packed.num_panels() * packed.panel_bytes());
    const int64_t size = packed.groups.size, num_groups = packed.num_groups(), scale_bytes = packed.scale_bytes();
    const int64_t element_bytes = packed.groups.are_fp32 ? 4 : 2, at_once = numbers_of_step(packed.kind);
    const int64_t step_bytes = packed.code_bytes() * at_once / size;
    const bool has_upper = bits_of(packed.kind) == 6;
    for (int64_t n = 0; n < packed.out_features; ++n) {
        const int column = static_cast<int>(n % kPanelColumns);
        CodeAt places[kMostNumbers];
        for (int64_t k = 0; k < at_once; ++k) {
            places[k] = code_at(packed.kind, column, k);
        }
        const uint8_t* codes = source.codes + n * source.row_stride;
        char* group = out + n / kPanelColumns * packed.panel_bytes();
        for (int64_t g = 0; g < num_groups; ++g, codes += size, group += packed.group_bytes()) {
            const int64_t count = std::min(size, packed.in_features - g * size);
            for (int64_t k = 0; k < count; ++k) {
                places[k % at_once].put(group + k / at_once * step_bytes, source.stored[codes[k]], has_upper);
            }
            const auto put = [&](const char* numbers, char* to) {
                std::memcpy(to + column * element_bytes, numbers + (n * num_groups + g) * element_bytes, element_bytes);
            };
            put(source.scales, group + packed.code_bytes());
            if (packed.groups.has_minima) {
                put(source.minima, group + packed.code_bytes() + scale_bytes);
            }
        }
    }
}

// Rows with their inputs in the order of the weight's groups. nullptr if memory cannot be allocated.
const char* ordered_rows(const PackedWeight& weight, const char* x, int64_t x_stride_bytes, int64_t num_rows) {
    const int64_t row_bytes = weight.row_bytes();
    char* out = static_cast<char*>(scratch(kScratchOrderedRows, num_rows * row_bytes));
    if (out == nullptr) {
        return nullptr;
    }
    const auto order_row = [&](int64_t row, auto element) {
        using Element = decltype(element);
        const char* from = x + row * x_stride_bytes;
        char* to = out + row * row_bytes;
        for (int64_t k = 0; k < weight.in_features; ++k) {
            std::memcpy(to + k * sizeof(Element), from + weight.groups.order[k] * sizeof(Element), sizeof(Element));
        }
    };
    for (int64_t row = 0; row < num_rows; ++row) {
        weight.rows_are_fp32 ? order_row(row, uint32_t{}) : order_row(row, uint16_t{});
    }
    return out;
}

// A chunk of rows in the layout of the product, in memory of the calling thread. nullptr if it cannot be allocated.
const uint32_t* packed_chunk(const PackedWeight& weight, const char* x, int64_t x_stride_bytes,
                             const RowBlocks& blocks) {
    const int64_t num_rows = blocks.num_rows, num_units = weight.num_units(), row_bytes = weight.row_bytes();
    if (weight.groups.order != nullptr) {
        x = ordered_rows(weight, x, x_stride_bytes, num_rows);
        x_stride_bytes = row_bytes;
        if (x == nullptr) {
            return nullptr;
        }
    }
    const bool in_tiles = lies_in_tiles(weight, num_rows);
    const bool is_laid =
        num_rows == 1 || (weight.form == RowForm::kTiles && !in_tiles && x_stride_bytes == row_bytes);
    if (is_laid && weight.form != RowForm::kInt8 && row_bytes == 4 * num_units) {
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

// One chunk of rows times the whole weight. run_task(multiply, task, first, end) computes the panels [first, end) of a
// task by multiply(store): whole pairs of gates and ups, as a task has a multiple of four or all.
template <class RunTask>
bool multiply_chunk(const PackedWeight& any_form, const char* x, int64_t x_stride_bytes, int64_t num_rows,
                    int64_t task_panels, const RunTask& run_task) {
    const PackedWeight weight = any_form.for_rows(num_rows);
    const RowBlocks blocks(num_rows);
    const uint32_t* rows = packed_chunk(weight, x, x_stride_bytes, blocks);
    if (rows == nullptr) {
        return false;
    }
    const int64_t num_panels = weight.num_panels();
    std::atomic<bool> is_done{true};
    parallel_for((num_panels + task_panels - 1) / task_panels, [&](int64_t task) {
        const int64_t first = task * task_panels, end = std::min(first + task_panels, num_panels);
        const auto multiply = [&](const auto& store) {
            return multiply_panels(weight, blocks, rows, first, end, store);
        };
        if (!run_task(multiply, task, first, end)) {
            is_done = false;
        }
    });
    return is_done;
}

// Rows of a projection. addend: [rows, columns before an activation] that are added, or null.
struct LinearCall {
    const char* x;
    int64_t x_stride_bytes;
    char* out;
    int64_t num_rows;
    const float* addend;
};

// Columns before an activation.
int64_t num_columns(const LinearPlan& plan) { return plan.num_gated == 0 ? plan.width() : 2 * plan.num_gated; }

int64_t panels_a_task(const LinearPart& part, int64_t num_rows) {
    return panels_a_task(part.weight.for_rows(num_rows), num_rows);
}

// Without additions, and with silu if it is gated: tiles store what is final.
bool run_chunk_at_once(const LinearPlan& plan, const LinearCall& call) {
    const auto run_part = [&](const LinearPart& part, const auto& store) {
        return multiply_chunk(part.weight, call.x, call.x_stride_bytes, call.num_rows,
                              panels_a_task(part, call.num_rows),
                              [&](const auto& multiply, int64_t, int64_t, int64_t) { return multiply(store); });
    };
    if (plan.num_gated != 0) {
        const LinearPart& part = plan.parts.front();
        const auto gated = [&](auto dtype) {
            using Element = typename decltype(dtype)::Element;
            auto* out = reinterpret_cast<Element*>(call.out);
            return run_part(part, StoreGated<decltype(dtype)>{part.bias, part.scales, out, plan.num_gated});
        };
        return plan.out_is_bf16 ? gated(Bf16()) : gated(Fp32());
    }
    return std::all_of(plan.parts.begin(), plan.parts.end(), [&](const LinearPart& part) {
        char* out = call.out + part.first_column * (plan.out_is_bf16 ? 2 : 4);
        return run_part(part, StoreRows{part.bias, part.scales, out, plan.width(), part.weight.out_features,
                                        plan.out_is_bf16, nullptr});
    });
}

// Numbers that are added to a projection before it is rounded, for all of its columns or some.
struct Addend {
    const float* numbers;  // null: nothing is added
    int64_t row_stride;
    int64_t first_column;  // of `numbers`
    int64_t ups;           // of a gated projection: their distance from the gates of the same columns
};

// The sums of a task: [rows, columns of its panels] of a part.
struct TaskSums {
    const LinearPart& part;
    const float* numbers;
    int64_t first, end;
};

// Adds to the sums of a task, rounds them, and activates those of gates.
template <class Dtype>
void store_added(const LinearPlan& plan, const LinearCall& call, const TaskSums& sums, const Addend& addend) {
    const int64_t width = (sums.end - sums.first) * kPanelColumns;
    for (int64_t row = 0; row < call.num_rows; ++row) {
        const float* added = addend.numbers + row * addend.row_stride - addend.first_column;
        const auto total = [&](const float* sum, int64_t column, auto lanes) {
            return addend.numbers == nullptr ? load(sum) : add(load(sum), Fp32::load(added + column, lanes));
        };
        const float* from = sums.numbers + row * width;
        auto* out = reinterpret_cast<typename Dtype::Element*>(call.out) + row * plan.out_width();
        if (plan.num_gated == 0) {
            const int64_t begin = sums.first * kPanelColumns;
            out += sums.part.first_column + begin;
            for_vectors(std::min(width, sums.part.weight.out_features - begin), [&](int64_t i, auto lanes) {
                Dtype::store(out + i, lanes, total(from + i, begin + i, lanes));
            });
            continue;
        }
        for (int64_t panel = sums.first; panel < sums.end; panel += 2, from += 2 * kPanelColumns) {
            const int64_t begin = panel / 2 * kPanelColumns;
            for_vectors(std::min<int64_t>(kPanelColumns, plan.num_gated - begin), [&](int64_t i, auto lanes) {
                const Floats gate = Dtype::rounded(total(from + i, begin + i, lanes));
                const Floats up = Dtype::rounded(total(from + kPanelColumns + i, addend.ups + begin + i, lanes));
                Dtype::store(out + begin + i, lanes, mul(activated<Dtype>(plan.gate, gate), up));
            });
        }
    }
}

// With any additions and gate: tiles store their sums, and a pass over a task's columns does the rest, since a branch
// in the store of a tile would cost all projections up to 5 %. addend_of(part, first, end) is that of a task with these
// panels; none if memory cannot be allocated.
template <class AddendOf>
bool run_chunk_by_sums(const LinearPlan& plan, const LinearCall& call, const AddendOf& addend_of) {
    const int64_t cached = kAddendInCache / (4 * kPanelColumns * call.num_rows) / 4 * 4;
    return std::all_of(plan.parts.begin(), plan.parts.end(), [&](const LinearPart& part) {
        const int64_t task_panels = std::min(panels_a_task(part, call.num_rows), std::max<int64_t>(4, cached));
        const auto run_task = [&](const auto& multiply, int64_t, int64_t first, int64_t end) {
            const int64_t width = (end - first) * kPanelColumns;
            auto* numbers = static_cast<char*>(scratch(kScratchSums, 4 * call.num_rows * width));
            if (numbers == nullptr) {
                return false;
            }
            // Tiles store a panel at its column of the part. Bias and scales are padded to whole panels.
            const StoreRows store{part.bias, part.scales, numbers - 4 * first * kPanelColumns, width,
                                  part.weight.num_panels() * kPanelColumns, false, nullptr};
            const std::optional<Addend> addend = addend_of(part, first, end);
            if (!addend || !multiply(store)) {
                return false;
            }
            std::optional<FlushDenormals> flush;
            if (!part.weight.rows_are_fp32 && part.weight.form != RowForm::kTiles) {
                flush.emplace();
            }
            const TaskSums sums{part, reinterpret_cast<const float*>(numbers), first, end};
            plan.out_is_bf16 ? store_added<Bf16>(plan, call, sums, *addend)
                             : store_added<Fp32>(plan, call, sums, *addend);
            return true;
        };
        return multiply_chunk(part.weight, call.x, call.x_stride_bytes, call.num_rows, task_panels, run_task);
    });
}

// Without additions.
bool run_chunk(const LinearPlan& plan, const LinearCall& call) {
    if (plan.num_gated == 0 || plan.gate == Gate::kSilu) {
        return run_chunk_at_once(plan, call);
    }
    return run_chunk_by_sums(
        plan, call, [](const LinearPart&, int64_t, int64_t) { return std::optional<Addend>(Addend{}); });
}

// body(chunk, its first row) for chunks of the rows, until one is false.
template <class Body>
bool for_chunks(const LinearPlan& plan, const LinearCall& call, const Body& body) {
    const int64_t step = plan.rows_at_once(call.num_rows), width = plan.out_width();
    for (int64_t first = 0; first < call.num_rows; first += step) {
        const float* addend = call.addend == nullptr ? nullptr : call.addend + first * num_columns(plan);
        const LinearCall chunk{call.x + first * call.x_stride_bytes, call.x_stride_bytes,
                               call.out + first * width * (plan.out_is_bf16 ? 2 : 4),
                               std::min(step, call.num_rows - first), addend};
        if (!body(chunk, first)) {
            return false;
        }
    }
    return true;
}

bool run_linear(const LinearPlan& plan, const LinearCall& call) {
    return for_chunks(plan, call, [&](const LinearCall& chunk, int64_t) {
        if (chunk.addend == nullptr) {
            return run_chunk(plan, chunk);
        }
        return run_chunk_by_sums(plan, chunk, [&](const LinearPart& part, int64_t, int64_t) {
            return std::optional<Addend>(
                Addend{chunk.addend + part.first_column, num_columns(plan), 0, plan.num_gated});
        });
    });
}

// Precondition: the chunk has no addend.
bool run_low_rank_chunk(const LinearPlan& plan, const LinearCall& chunk, const LowRankTable& table,
                        const int64_t* slots) {
    LowRankRows rows(table, slots, chunk.num_rows);
    if (rows.num_active() == 0) {
        return run_chunk(plan, chunk);
    }
    auto* shrunk = static_cast<float*>(scratch(kScratchLowRank, 4 * rows.num_shrunk()));
    if (shrunk == nullptr) {
        return false;
    }
    rows.shrink(chunk.x, chunk.x_stride_bytes, shrunk);
    // A thread expands to the columns of its own task.
    const auto addend_of = [&](const LinearPart& part, int64_t first, int64_t end) -> std::optional<Addend> {
        const int64_t num_outputs = (end - first) * kPanelColumns;
        auto* room = static_cast<float*>(scratch(kScratchAddend, 4 * chunk.num_rows * num_outputs));
        if (room == nullptr) {
            return std::nullopt;
        }
        if (plan.num_gated == 0) {
            const int64_t begin = first * kPanelColumns, start = part.first_column + begin;
            const int64_t stop = std::min(start + num_outputs, part.first_column + part.weight.out_features);
            rows.expand(start, stop, room, num_outputs);
            return Addend{room, num_outputs, begin, 0};
        }
        const int64_t begin = first * kPanelColumns / 2, half = num_outputs / 2;
        const int64_t stop = std::min(begin + half, plan.num_gated);
        rows.expand(begin, stop, room, num_outputs);
        rows.expand(plan.num_gated + begin, plan.num_gated + stop, room + half, num_outputs);
        return Addend{room, num_outputs, begin, half};
    };
    return run_chunk_by_sums(plan, chunk, addend_of);
}

// The additions alone.
bool run_low_rank(const LowRankTable& table, const char* x, int64_t x_stride_bytes, const int64_t* slots, float* out,
                  int64_t num_rows) {
    constexpr int64_t kTaskColumns = 256;
    const int64_t width = table.out_features();
    LowRankRows rows(table, slots, num_rows);
    auto* shrunk = static_cast<float*>(scratch(kScratchLowRank, 4 * rows.num_shrunk()));
    if (shrunk == nullptr && rows.num_shrunk() > 0) {
        return false;
    }
    rows.shrink(x, x_stride_bytes, shrunk);
    parallel_for((width + kTaskColumns - 1) / kTaskColumns, [&](int64_t task) {
        const int64_t begin = task * kTaskColumns;
        rows.expand(begin, std::min(width, begin + kTaskColumns), out + begin, width);
    });
    return true;
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
    const LinearPart& part = plan.parts.front();
    const PackedWeight& weight = part.weight;
    const int64_t step = plan.rows_at_once(call.num_rows);
    for (int64_t first = 0; first < call.num_rows; first += step) {
        const int64_t num_rows = std::min(step, call.num_rows - first);
        const int64_t task_panels = panels_a_task(weight, num_rows);
        const int64_t num_tasks = (weight.num_panels() + task_panels - 1) / task_panels;
        // Each task sees some columns of all rows.
        std::vector<Largest> largest(num_tasks * num_rows);
        const auto run_task = [&](const auto& multiply, int64_t task, int64_t, int64_t) {
            return multiply(KeepLargest{part.bias,
                                        part.scales,
                                        call.kept,
                                        weight.out_features,
                                        call.out_row_of == nullptr ? nullptr : call.out_row_of + first,
                                        largest.data() + task * num_rows});
        };
        if (!multiply_chunk(weight, call.x + first * call.x_stride_bytes, call.x_stride_bytes, num_rows, task_panels,
                            run_task)) {
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

// Rows of the weight of a plan with one part, which has codes. out: in the dtype of the plan's inputs.
Outcome take_weight_rows(const LinearPlan& plan, const int64_t* rows, int64_t num_rows, char* out) {
    const LinearPart& part = plan.parts.front();
    const PackedWeight& weight = part.weight;
    if (!std::all_of(rows, rows + num_rows, [&](int64_t row) { return row >= 0 && row < weight.out_features; })) {
        return failed(PyExc_IndexError, "a row is not below %lld", static_cast<long long>(weight.out_features));
    }
    std::atomic<bool> has_memory{true};
    constexpr int64_t kRowsOfTask = 4;
    parallel_for((num_rows + kRowsOfTask - 1) / kRowsOfTask, [&](int64_t task) {
        for (int64_t i = task * kRowsOfTask; i < std::min(num_rows, (task + 1) * kRowsOfTask); ++i) {
            const float scale = part.scales == nullptr ? 1.0f : part.scales[rows[i]];
            char* to = out + i * weight.row_bytes();
            if (weight.rows_are_fp32) {
                take_weight_row(weight, rows[i], scale, reinterpret_cast<float*>(to));
                continue;
            }
            auto* wide = static_cast<float*>(scratch(kScratchGemmPanel, 4 * weight.in_features));
            if (wide == nullptr) {
                has_memory = false;
                return;
            }
            take_weight_row(weight, rows[i], scale, wide);
            for_vectors(weight.in_features, [&](int64_t k, auto lanes) {
                Bf16::store(reinterpret_cast<uint16_t*>(to) + k, lanes, Fp32::load(wide + k, lanes));
            });
        }
    });
    return done_if(has_memory);
}

void delete_plan(PyObject* capsule) {
    delete static_cast<LinearPlan*>(PyCapsule_GetPointer(capsule, kPlanName));
}

PyObject* packed_bytes(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    int64_t numbers[kLayoutNumbers];
    if (!read_numbers("packed_bytes", arguments, count, numbers, kLayoutNumbers)) {
        return nullptr;
    }
    const PackedWeight packed = layout_of(numbers);
    return PyLong_FromLongLong(packed.num_panels() * packed.panel_bytes());
}

PyObject* pack_weight(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    int64_t numbers[kLayoutNumbers + 6];
    if (!read_numbers("pack_weight", arguments, count, numbers, kLayoutNumbers + 6)) {
        return nullptr;
    }
    const PackedWeight packed = layout_of(numbers);
    const int64_t* own = numbers + kLayoutNumbers;
    char* out = reinterpret_cast<char*>(own[0]);
    Py_BEGIN_ALLOW_THREADS
    if (packed.has_groups()) {
        pack_codes({reinterpret_cast<const uint8_t*>(own[1]), own[2], reinterpret_cast<const uint8_t*>(own[3]),
                    reinterpret_cast<const char*>(own[4]), reinterpret_cast<const char*>(own[5])},
                   packed, out);
    } else if (packed.kind == WeightKind::kInt8) {
        pack_int8(reinterpret_cast<const int8_t*>(own[1]), own[2], packed, out);
    } else {
        const int64_t element_bytes = packed.kind == WeightKind::kFp32 ? 4 : 2;
        pack_wide(reinterpret_cast<const char*>(own[1]), own[2] * element_bytes, packed, out);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject* make_linear(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    constexpr int kPlanNumbers = 5, kPartNumbers = kLayoutNumbers + 6;
    const Py_ssize_t num_parts = (count - kPlanNumbers) / kPartNumbers;
    std::vector<int64_t> numbers(kPlanNumbers + std::max<Py_ssize_t>(num_parts, 1) * kPartNumbers);
    if (!read_numbers("make_linear", arguments, count, numbers.data(), static_cast<Py_ssize_t>(numbers.size()))) {
        return nullptr;
    }
    const bool rows_are_fp32 = numbers[0] != 0, with_amx = numbers[3] != 0;
    auto* plan = new LinearPlan{{}, numbers[1] != 0, numbers[2], static_cast<Gate>(numbers[4])};
    int64_t first_column = 0;
    for (const int64_t* n = numbers.data() + kPlanNumbers; n < numbers.data() + numbers.size(); n += kPartNumbers) {
        const int64_t* own = n + kLayoutNumbers;
        PackedWeight weight = layout_of(n);
        weight.panels = reinterpret_cast<const char*>(own[0]);
        weight.set_rows(rows_are_fp32, with_amx);
        weight.groups.table = reinterpret_cast<const uint8_t*>(own[3]);
        weight.groups.base = static_cast<int32_t>(own[4]);
        weight.groups.order = reinterpret_cast<const int32_t*>(own[5]);
        plan->parts.push_back({weight, reinterpret_cast<const float*>(own[1]), reinterpret_cast<const float*>(own[2]),
                               first_column});
        first_column += weight.out_features;
    }
    return PyCapsule_New(plan, kPlanName, delete_plan);
}

PyObject* rows_at_once(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 1) return PyErr_Format(PyExc_TypeError, "rows_at_once takes a plan");
    const auto* plan = static_cast<const LinearPlan*>(PyCapsule_GetPointer(arguments[0], kPlanName));
    if (plan == nullptr) return nullptr;
    constexpr int64_t kMany = int64_t{1} << 30;
    return PyLong_FromLongLong(plan->rows_at_once(kMany));
}

const LinearPlan& plan_of(const int64_t* n) { return *reinterpret_cast<const LinearPlan*>(n[0]); }

LinearCall call_of(const int64_t* n) {
    return {reinterpret_cast<const char*>(n[1]), n[2] * (plan_of(n).first().rows_are_fp32 ? 4 : 2),
            reinterpret_cast<char*>(n[3]), n[4], nullptr};
}

Outcome run_linear_of(const int64_t* n) {
    LinearCall call = call_of(n);
    call.addend = reinterpret_cast<const float*>(n[5]);
    return done_if(run_linear(plan_of(n), call));
}

// IndexError unless each row's slot is in the table, or below 0.
Outcome check_slots(const LowRankTable& table, const int64_t* slots, int64_t num_rows) {
    if (std::all_of(slots, slots + num_rows, [&](int64_t slot) { return slot < table.num_slots(); })) return {};
    return failed(PyExc_IndexError, "a low-rank slot is not below %lld", static_cast<long long>(table.num_slots()));
}

Outcome run_linear_low_rank_of(const int64_t* n) {
    const LinearPlan& plan = plan_of(n);
    const LowRankTable table(n[5]);
    const auto* slots = reinterpret_cast<const int64_t*>(n[6]);
    const LinearCall call = call_of(n);
    const Outcome checked = check_slots(table, slots, call.num_rows);
    if (checked.exception != nullptr) return checked;
    return done_if(for_chunks(plan, call, [&](const LinearCall& chunk, int64_t first) {
        return run_low_rank_chunk(plan, chunk, table, slots + first);
    }));
}

Outcome run_low_rank_of(const int64_t* n) {
    const LowRankTable table(n[0]);
    const auto* slots = reinterpret_cast<const int64_t*>(n[3]);
    const Outcome checked = check_slots(table, slots, n[5]);
    if (checked.exception != nullptr) return checked;
    return done_if(run_low_rank(table, reinterpret_cast<const char*>(n[1]), n[2] * (table.is_fp32() ? 4 : 2), slots,
                                reinterpret_cast<float*>(n[4]), n[5]));
}

// Not with helpers: if one lost its core, the call would wait for it with the interpreter's lock held.
bool linear_keeps_lock(const int64_t* n) {
    const std::vector<LinearPart>& parts = plan_of(n).parts;
    return triptych::num_threads() == 1 && parts.size() == 1 && is_short(parts.front().weight, n[4]);
}

Outcome run_greedy_of(const int64_t* n) {
    const LinearPlan& plan = plan_of(n);
    const GreedyCall call{reinterpret_cast<const char*>(n[1]),
                          n[2] * (plan.first().rows_are_fp32 ? 4 : 2),
                          n[3],
                          reinterpret_cast<float*>(n[4]),
                          reinterpret_cast<const int32_t*>(n[5]),
                          reinterpret_cast<float*>(n[6]),
                          reinterpret_cast<int64_t*>(n[7])};
    return done_if(run_greedy(plan, call));
}

Outcome run_weight_rows_of(const int64_t* n) {
    return take_weight_rows(plan_of(n), reinterpret_cast<const int64_t*>(n[1]), n[2], reinterpret_cast<char*>(n[3]));
}

constexpr Kernel kLinear{"linear", kPlanName, 5, 0, run_linear_of, linear_keeps_lock,
                         "linear(plan, x, x_row_stride, out, M, addend): out = x W^T * scales + bias + addend."};
constexpr Kernel kLinearLowRank{
    "linear_low_rank", kPlanName, 6, 0, run_linear_low_rank_of, nullptr,
    "linear_low_rank(plan, x, x_row_stride, out, M, table, slots): linear with the addend of low_rank."};
constexpr Kernel kLowRank{"low_rank", nullptr, 6, 0, run_low_rank_of, nullptr,
                          "low_rank(table, x, x_row_stride, slots, out, M): see low_rank.py."};
constexpr Kernel kGreedyLinear{
    "greedy_linear", kPlanName, 7, 0, run_greedy_of, nullptr,
    "greedy_linear(plan, x, x_row_stride, M, kept, row_of, highest, tokens): see linear.py."};

constexpr Kernel kWeightRows{"weight_rows", kPlanName, 3, 0, run_weight_rows_of, nullptr,
                             "weight_rows(plan, rows, count, out): rows of the weight of a plan with one part of "
                             "codes."};

}  // namespace
}  // namespace triptych

PyMethodDef TRIPTYCH_METHODS(linear)[] = {
    TRIPTYCH_METHOD(packed_bytes,
                    "packed_bytes(*layout) -> bytes of a packed weight. layout: kind (0 bf16, 1 fp32, 2 int8, 3 codes "
                    "of 4 bits, 4 of 8; for rows of int8 5, 6, 7 of 4, 6, 8 bits), N, K; of codes group_size, "
                    "has_minima, scales_are_fp32, else zeros."),
    TRIPTYCH_METHOD(pack_weight,
                    "pack_weight(*layout, out, weight, row_stride, stored, scales, minima): lay a weight out as "
                    "panels; the last three of codes: stored maps a byte of the weight to what panels have."),
    TRIPTYCH_METHOD(make_linear,
                    "make_linear(rows_are_fp32, out_is_bf16, num_gated, with_amx, gate, *parts) -> plan. Of each part, "
                    "whose outputs follow the last one's: *layout, panels, bias, scales, table, base, order."),
    TRIPTYCH_METHOD(rows_at_once, "rows_at_once(plan) -> the most rows that are packed, and multiplied, together."),
    TRIPTYCH_KERNEL_METHOD(kLinear),
    TRIPTYCH_KERNEL_METHOD(kLowRank),
    TRIPTYCH_KERNEL_METHOD(kGreedyLinear),
    TRIPTYCH_KERNEL_METHOD(kWeightRows),
    {nullptr, nullptr, 0, nullptr}};
const triptych::Kernel* const TRIPTYCH_KERNELS_OF(linear)[] = {
    &triptych::kLinear, &triptych::kLinearLowRank, &triptych::kLowRank, &triptych::kGreedyLinear, nullptr};

#else

PyMethodDef TRIPTYCH_METHODS(linear)[] = {{nullptr, nullptr, 0, nullptr}};
const triptych::Kernel* const TRIPTYCH_KERNELS_OF(linear)[] = {nullptr};

#endif

#ifdef TRIPTYCH_KERNELS_END
TRIPTYCH_KERNELS_END
#endif
