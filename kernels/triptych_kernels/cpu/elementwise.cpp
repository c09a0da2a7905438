// Ops that read each token's numbers once: norms, rotary positions, stores of KV, activations, greedy choice.
//
// Sums have one order, by a number's index in its row, so a row's result has the same bits in every batch.

#include "arguments.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "pool.h"

#include "isa.h"

extern PyMethodDef TRIPTYCH_METHODS(elementwise)[];
extern const triptych::Kernel* const TRIPTYCH_KERNELS_OF(elementwise)[];

#ifdef TRIPTYCH_KERNELS

#include "vector_math.h"

namespace triptych {
namespace {

constexpr int64_t kNumbersOfTask = 1 << 15;  // the size of a thread's task: a few microseconds of work

// body(row) for all rows, in tasks that are large enough for a thread.
template <class Body>
void for_rows(int64_t num_rows, int64_t width, const Body& body) {
    const int64_t step = std::max<int64_t>(1, kNumbersOfTask / std::max<int64_t>(1, width));
    parallel_for((num_rows + step - 1) / step, [&](int64_t task) {
        for (int64_t row = task * step; row < std::min(num_rows, (task + 1) * step); ++row) body(row);
    });
}

// body(kind of the rows, kind of the weights of norms), which may be fp32 for rows of bf16.
template <class Body>
void for_kinds(bool rows_are_bf16, bool weights_are_fp32, const Body& body) {
    if (!rows_are_bf16) {
        body(Fp32(), Fp32());
    } else if (weights_are_fp32) {
        body(Bf16(), Fp32());
    } else {
        body(Bf16(), Bf16());
    }
}

// The sum of a row: add_to(i, lanes, sum) adds the vector at i.
template <class AddTo>
float sum_of_row(int64_t width, const AddTo& add_to) {
    Floats sums[4] = {zeros(), zeros(), zeros(), zeros()};
    int64_t start = 0;
    for (; start + 64 <= width; start += 64)
        for (int k = 0; k < 4; ++k) add_to(start + 16 * k, AllLanes(), sums[k]);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
        const int64_t i = start + 16 * k;
        if (i < width) add_to(i, first_lanes(width - i), sums[k]);
    }
    return sum_of_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

// out = x / sqrt(mean(x^2) + eps) * weight; with ADD, x + residual replaces x and is stored in residual first. out may
// be x.
template <class Kind, class Weights, bool ADD>
void norm_row(
    const typename Kind::Element* x, typename Kind::Element* residual, const typename Weights::Element* weight,
    int64_t width, float eps, typename Kind::Element* out) {
    const auto add_square = [&](int64_t i, auto lanes, Floats& sum) {
        Floats value = Kind::load(x + i, lanes);
        if (ADD) {
            value = Kind::rounded(add(Kind::load(residual + i, lanes), value));
            Kind::store(residual + i, lanes, value);
        }
        sum = fmadd(value, value, sum);
    };
    const float mean = sum_of_row(width, add_square) / static_cast<float>(width);
    const Floats scale = splat(1.0f / std::sqrt(mean + eps));
    for_vectors(width, [&](int64_t i, auto lanes) {
        const Floats value = Kind::load((ADD ? residual : x) + i, lanes);
        Kind::store(out + i, lanes, mul(mul(value, scale), Weights::load(weight + i, lanes)));
    });
}

struct Norm {
    int64_t x, residual, weight, out, num_outer, num_inner, outer_stride, inner_stride, residual_stride, width;
    float eps;
};

template <class Kind, class Weights>
void norm_rows(const Norm& call) {
    using Element = typename Kind::Element;
    const auto* x = reinterpret_cast<const Element*>(call.x);
    auto* residual = reinterpret_cast<Element*>(call.residual);
    const auto* weight = reinterpret_cast<const typename Weights::Element*>(call.weight);
    auto* out = reinterpret_cast<Element*>(call.out);
    for_rows(call.num_outer * call.num_inner, call.width, [&](int64_t row) {
        const Element* from =
            x + row / call.num_inner * call.outer_stride + row % call.num_inner * call.inner_stride;
        if (residual == nullptr) {
            norm_row<Kind, Weights, false>(from, nullptr, weight, call.width, call.eps, out + row * call.width);
        } else {
            norm_row<Kind, Weights, true>(
                from, residual + row * call.residual_stride, weight, call.width, call.eps, out + row * call.width);
        }
    });
}

Outcome run_norm(const int64_t* n) {
    const Norm call{n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], static_cast<float>(fraction(n[12]))};
    for_kinds(n[10] != 0, n[11] != 0, [&](auto kind, auto weights) {
        norm_rows<decltype(kind), decltype(weights)>(call);
    });
    return {};
}

// Norms columns `first` to `first` + count - 1 of [T, width], in place, each row by itself.
template <class Kind, class Weights>
void norm_columns(const int64_t* n) {
    const int64_t num_rows = n[1], width = n[2], first = n[3], count = n[4];
    const auto* weight = reinterpret_cast<const typename Weights::Element*>(n[5]);
    const auto eps = static_cast<float>(fraction(n[8]));
    for_rows(num_rows, count, [&](int64_t row) {
        auto* x = reinterpret_cast<typename Kind::Element*>(n[0]) + row * width + first;
        norm_row<Kind, Weights, false>(x, nullptr, weight, count, eps, x);
    });
}

Outcome run_norm_columns(const int64_t* n) {
    for_kinds(n[6] != 0, n[7] != 0, [&](auto kind, auto weights) {
        norm_columns<decltype(kind), decltype(weights)>(n);
    });
    return {};
}

// residual = (sum - mean(sum)) / sqrt(variance(sum) + eps) * weight + bias, where sum is x + residual. width: whole
// vectors.
template <class Kind, class Weights>
void add_layer_norm(const int64_t* n) {
    using Element = typename Kind::Element;
    using Weight = typename Weights::Element;
    const int64_t num_rows = n[4], width = n[5];
    const auto eps = static_cast<float>(fraction(n[8]));
    const auto *weight = reinterpret_cast<const Weight*>(n[2]), *bias = reinterpret_cast<const Weight*>(n[3]);
    for_rows(num_rows, width, [&](int64_t row) {
        const Element* x = reinterpret_cast<const Element*>(n[0]) + row * width;
        Element* out = reinterpret_cast<Element*>(n[1]) + row * width;
        const float mean = sum_of_row(width, [&](int64_t i, auto, Floats& sum) {
            const Floats value = Kind::rounded(add(Kind::load(out + i), Kind::load(x + i)));
            Kind::store(out + i, value);
            sum = add(sum, value);
        }) / static_cast<float>(width);
        const Floats center = splat(mean);
        const float variance = sum_of_row(width, [&](int64_t i, auto, Floats& sum) {
            const Floats distance = sub(Kind::load(out + i), center);
            sum = fmadd(distance, distance, sum);
        }) / static_cast<float>(width);
        const Floats scale = splat(1.0f / std::sqrt(variance + eps));
        for (int64_t i = 0; i < width; i += 16) {
            const Floats normed = mul(sub(Kind::load(out + i), center), scale);
            Kind::store(out + i, fmadd(normed, Weights::load(weight + i), Weights::load(bias + i)));
        }
    });
}

Outcome run_add_layer_norm(const int64_t* n) {
    for_kinds(n[6] != 0, n[7] != 0, [&](auto kind, auto weights) {
        add_layer_norm<decltype(kind), decltype(weights)>(n);
    });
    return {};
}

// x = gelu(x).
template <class Kind>
void gelu_rows(const int64_t* n) {
    const int64_t num_rows = n[1], width = n[2];
    for_rows(num_rows, width, [&](int64_t row) {
        auto* x = reinterpret_cast<typename Kind::Element*>(n[0]) + row * width;
        for_vectors(width, [&](int64_t i, auto lanes) {
            Kind::store(x + i, lanes, gelu16(Kind::load(x + i, lanes)));
        });
    });
}

Outcome run_gelu_rows(const int64_t* n) {
    n[3] ? gelu_rows<Bf16>(n) : gelu_rows<Fp32>(n);
    return {};
}

// out = silu(gate) * up, or gelu(gate) * up, or sigmoid(gate) * up.  x: [T, 2 F], gates first.
template <class Kind>
void gate_rows(const int64_t* n) {
    using Element = typename Kind::Element;
    const int64_t num_rows = n[2], width = n[3], stride = n[4];
    const auto kind = static_cast<Gate>(n[6]);
    for_rows(num_rows, width, [&](int64_t row) {
        const Element* gates = reinterpret_cast<const Element*>(n[0]) + row * stride;
        Element* out = reinterpret_cast<Element*>(n[1]) + row * width;
        for_vectors(width, [&](int64_t i, auto lanes) {
            const Floats gate = Kind::load(gates + i, lanes), up = Kind::load(gates + width + i, lanes);
            Kind::store(out + i, lanes,
                        kind == Gate::kSigmoid ? Kind::times_sigmoid(up, gate) : mul(activated<Kind>(kind, gate), up));
        });
    });
}

Outcome run_gate_and_mul(const int64_t* n) {
    n[5] ? gate_rows<Bf16>(n) : gate_rows<Fp32>(n);
    return {};
}

// x *= scale.
template <class Kind>
void scale_rows(const int64_t* n) {
    const int64_t num_rows = n[1], width = n[2];
    const Floats scale = splat(static_cast<float>(fraction(n[4])));
    for_rows(num_rows, width, [&](int64_t row) {
        auto* x = reinterpret_cast<typename Kind::Element*>(n[0]) + row * width;
        for_vectors(width, [&](int64_t i, auto lanes) {
            Kind::store(x + i, lanes, mul(Kind::load(x + i, lanes), scale));
        });
    });
}

Outcome run_scale_rows(const int64_t* n) {
    n[3] ? scale_rows<Bf16>(n) : scale_rows<Fp32>(n);
    return {};
}

// x += summand.
template <class Kind>
void add_rows(const int64_t* n) {
    using Element = typename Kind::Element;
    const int64_t num_rows = n[2], width = n[3];
    for_rows(num_rows, width, [&](int64_t row) {
        auto* x = reinterpret_cast<Element*>(n[0]) + row * width;
        const auto* summand = reinterpret_cast<const Element*>(n[1]) + row * width;
        for_vectors(width, [&](int64_t i, auto lanes) {
            Kind::store(x + i, lanes, add(Kind::load(x + i, lanes), Kind::load(summand + i, lanes)));
        });
    });
}

Outcome run_add_rows(const int64_t* n) {
    n[4] ? add_rows<Bf16>(n) : add_rows<Fp32>(n);
    return {};
}

// A cache: blocks, in each the heads, and of each head block_size slots one after the other.
struct Slots {
    const int64_t* slots;  // of tokens; below 0: none
    int64_t num_slots, block_size, num_heads;

    // The slot of a token's first head, counted in slots of a head; the other heads are block_size slots apart.
    int64_t offset(int64_t token) const {
        const int64_t slot = slots[token];
        return slot / block_size * num_heads * block_size + slot % block_size;
    }
};

// Copies a token's heads to their slot: heads of num_bytes each, from strided rows. All in bytes but the slots.
void store_heads(
    int64_t from, int64_t token_stride, int64_t head_stride, int64_t cache, int64_t num_bytes, const Slots& slots,
    int64_t token) {
    if (slots.slots[token] < 0) return;
    const int64_t offset = slots.offset(token);
    for (int64_t head = 0; head < slots.num_heads; ++head) {
        std::memcpy(
            reinterpret_cast<char*>(cache) + (offset + head * slots.block_size) * num_bytes,
            reinterpret_cast<const char*>(from) + token * token_stride + head * head_stride, num_bytes);
    }
}

bool fit(const Slots& slots, int64_t num_tokens) {
    return std::all_of(slots.slots, slots.slots + num_tokens, [&](int64_t slot) { return slot < slots.num_slots; });
}

Outcome run_kv_write(const int64_t* n) {
    const Slots slots{reinterpret_cast<const int64_t*>(n[10]), n[13], n[14], n[12]};
    const int64_t num_tokens = n[11];
    if (!fit(slots, num_tokens)) {
        return failed(PyExc_IndexError, "a slot is not below %lld", static_cast<long long>(slots.num_slots));
    }
    for_rows(num_tokens, slots.num_heads * (n[4] + n[9]) / 2, [&](int64_t token) {
        store_heads(n[0], n[1], n[2], n[3], n[4], slots, token);
        store_heads(n[5], n[6], n[7], n[8], n[9], slots, token);
    });
    return {};
}

struct Rotary {
    int64_t qkv, positions, cos_sin, slots, keys, values, query_norm, key_norm, row_stride, num_tokens;
    int64_t num_heads, num_kv_heads, head_dim, rotary_dim, num_slots, block_size, max_positions;
    float eps;

    Slots cache_slots() const { return {reinterpret_cast<const int64_t*>(slots), num_slots, block_size, num_kv_heads}; }
};

constexpr int64_t kMaxHeadDim = 1024;

// (a, b) -> (a cos - b sin, b cos + a sin) of the vectors at i of both halves; `to` may be `from`.
template <class Kind, class Lanes>
void turn(
    const typename Kind::Element* from, int64_t half, Floats cosine, Floats sine, Lanes lanes,
    typename Kind::Element* to) {
    const Floats a = Kind::load(from, lanes), b = Kind::load(from + half, lanes);
    Kind::store(to, lanes, sub(mul(a, cosine), mul(b, sine)));
    Kind::store(to + half, lanes, add(mul(b, cosine), mul(a, sine)));
}

void copy_bytes(const void* from, int64_t num_bytes, void* to) {
    const char* source = static_cast<const char*>(from);
    char* target = static_cast<char*>(to);
    int64_t i = 0;
    for (; i + 64 <= num_bytes; i += 64) store_words(target + i, load_words(source + i));
    if (i < num_bytes) std::memcpy(target + i, source + i, num_bytes - i);
}

// Norms a head if weight is given, rotates its first values, and stores it; `to` may be `from`.
template <class Kind, class Weights>
void turn_head(
    const Rotary& call, const typename Kind::Element* from, int64_t norm, const float* cosines,
    typename Kind::Element* to) {
    using Element = typename Kind::Element;
    Element normed[kMaxHeadDim];
    if (norm != 0) {
        const auto* weight = reinterpret_cast<const typename Weights::Element*>(norm);
        norm_row<Kind, Weights, false>(from, nullptr, weight, call.head_dim, call.eps, normed);
        from = normed;
    }
    const int64_t half = call.rotary_dim / 2;
    for_vectors(half, [&](int64_t i, auto lanes) {
        const Floats cosine = Fp32::load(cosines + i, lanes), sine = Fp32::load(cosines + half + i, lanes);
        turn<Kind>(from + i, half, cosine, sine, lanes, to + i);
    });
    if (to != from && call.rotary_dim < call.head_dim)
        copy_bytes(
            from + call.rotary_dim, (call.head_dim - call.rotary_dim) * sizeof(Element), to + call.rotary_dim);
}

template <class Kind, class Weights>
void turn_rows(const Rotary& call) {
    using Element = typename Kind::Element;
    const Slots slots = call.cache_slots();
    const auto* positions = reinterpret_cast<const int64_t*>(call.positions);
    for_rows(call.num_tokens, (call.num_heads + 2 * call.num_kv_heads) * call.head_dim, [&](int64_t token) {
        Element* row = reinterpret_cast<Element*>(call.qkv) + token * call.row_stride;
        const float* cosines = reinterpret_cast<const float*>(call.cos_sin) + positions[token] * call.rotary_dim;
        for (int64_t head = 0; head < call.num_heads; ++head)
            turn_head<Kind, Weights>(
                call, row + head * call.head_dim, call.query_norm, cosines, row + head * call.head_dim);
        if (slots.slots[token] < 0) return;
        const int64_t first_offset = slots.offset(token);
        const Element* keys = row + call.num_heads * call.head_dim;
        const Element* values = keys + call.num_kv_heads * call.head_dim;
        for (int64_t head = 0; head < call.num_kv_heads; ++head) {
            const int64_t offset = (first_offset + head * call.block_size) * call.head_dim;
            Element* to = reinterpret_cast<Element*>(call.keys) + offset;
            turn_head<Kind, Weights>(call, keys + head * call.head_dim, call.key_norm, cosines, to);
            copy_bytes(
                values + head * call.head_dim, call.head_dim * sizeof(Element),
                reinterpret_cast<Element*>(call.values) + offset);
        }
    });
}

Outcome run_rotary(const int64_t* n) {
    const Rotary call{n[0], n[1],  n[2],  n[3],  n[4],  n[5],  n[6],  n[7],
                      n[8], n[9], n[10], n[11], n[12], n[13], n[14], n[15], n[16], static_cast<float>(fraction(n[19]))};
    const auto* positions = reinterpret_cast<const int64_t*>(call.positions);
    const auto is_known = [&](int64_t position) { return position >= 0 && position < call.max_positions; };
    if (call.head_dim > kMaxHeadDim || !std::all_of(positions, positions + call.num_tokens, is_known) ||
        !fit(call.cache_slots(), call.num_tokens)) {
        return failed(
            PyExc_IndexError, "a position is not below %lld, a slot not below %lld, or the head above %lld",
            static_cast<long long>(call.max_positions), static_cast<long long>(call.num_slots),
            static_cast<long long>(kMaxHeadDim));
    }
    for_kinds(n[17] != 0, n[18] != 0, [&](auto kind, auto weights) {
        turn_rows<decltype(kind), decltype(weights)>(call);
    });
    return {};
}

// The largest of a row, by chunks: only the chunk that raised it last is searched for its index.
template <class Kind>
void choose_row(const typename Kind::Element* logits, int64_t width, float* highest, int64_t* token) {
    constexpr int64_t kChunk = 1024;
    const float lowest = -std::numeric_limits<float>::infinity();
    float best = lowest;
    int64_t best_chunk = 0;
    for (int64_t start = 0; start < width; start += kChunk) {
        const int64_t end = std::min(width, start + kChunk);
        Floats largest[4];
        for (Floats& lanes : largest) lanes = splat(lowest);
        Mask nans[4] = {0, 0, 0, 0};
        int64_t i = start;
        for (; i + 64 <= end; i += 64) {
            for (int k = 0; k < 4; ++k) {
                const Floats x = Kind::load(logits + i + 16 * k);
                largest[k] = max(x, largest[k]);
                nans[k] |= is_nan(x);
            }
        }
        for (; i < end; i += 16) {
            const Mask mask = first_lanes(end - i);
            const Floats x = Kind::load(logits + i, mask);
            largest[0] = max_part(mask, x, largest[0]);
            nans[0] |= is_nan(x);
        }
        if (nans[0] | nans[1] | nans[2] | nans[3]) {
            *highest = std::numeric_limits<float>::quiet_NaN();
            *token = start;
            return;
        }
        const Floats lanes =
            max(max(largest[0], largest[1]), max(largest[2], largest[3]));
        const float chunk_highest = highest_lane(lanes);
        if (chunk_highest > best) best = chunk_highest, best_chunk = start;
    }
    *highest = best;
    for (int64_t i = best_chunk; i < width; i += 16) {
        const Mask mask = first_lanes(width - i);
        const Mask equal =
            is_equal(mask, Kind::load(logits + i, mask), splat(best));
        if (equal != 0) {
            *token = i + __builtin_ctz(equal);
            return;
        }
    }
}

template <class Kind>
void choose_rows(const int64_t* n) {
    for_rows(n[3], n[4], [&](int64_t row) {
        choose_row<Kind>(
            reinterpret_cast<const typename Kind::Element*>(n[0]) + row * n[5], n[4],
            reinterpret_cast<float*>(n[1]) + row, reinterpret_cast<int64_t*>(n[2]) + row);
    });
}

Outcome run_greedy(const int64_t* n) {
    n[6] ? choose_rows<Bf16>(n) : choose_rows<Fp32>(n);
    return {};
}

// Copies rows of num_bytes each, which are contiguous, by their indices.
Outcome run_take_rows(const int64_t* n) {
    const char* from = reinterpret_cast<const char*>(n[0]);
    const int64_t num_rows = n[1], num_bytes = n[2], num_taken = n[4];
    const auto* taken = reinterpret_cast<const int64_t*>(n[3]);
    char* to = reinterpret_cast<char*>(n[5]);
    if (!std::all_of(taken, taken + num_taken, [&](int64_t row) { return row >= 0 && row < num_rows; })) {
        return failed(PyExc_IndexError, "a row to take is not below %lld", static_cast<long long>(num_rows));
    }
    for (int64_t i = 0; i < num_taken; ++i) std::memcpy(to + i * num_bytes, from + taken[i] * num_bytes, num_bytes);
    return {};
}

constexpr Kernel kRmsNorm{
    "rms_norm", nullptr, 12, 1, run_norm, nullptr, "rms_norm(addresses, sizes, strides, eps): see elementwise.py."};
constexpr Kernel kGateAndMul{
    "gate_and_mul", nullptr, 7, 0, run_gate_and_mul, nullptr,
    "gate_and_mul(addresses, sizes, stride, is_bf16, gate): see elementwise.py."};
constexpr Kernel kScaleRows{
    "scale_rows", nullptr, 4, 1, run_scale_rows, nullptr, "scale_rows(x, T, width, is_bf16, scale): x *= scale."};
constexpr Kernel kAddRows{
    "add_rows", nullptr, 5, 0, run_add_rows, nullptr, "add_rows(x, summand, T, width, is_bf16): x += summand."};
constexpr Kernel kNormColumns{
    "norm_columns", nullptr, 8, 1, run_norm_columns, nullptr,
    "norm_columns(x, T, width, first, count, weight, is_bf16, weight_is_fp32, eps): norms some columns, in place."};
constexpr Kernel kAddLayerNorm{
    "add_layer_norm", nullptr, 8, 1, run_add_layer_norm, nullptr,
    "add_layer_norm(x, residual, weight, bias, T, width, is_bf16, weight_is_fp32, eps): residual = norm(x + residual)."};
constexpr Kernel kGeluRows{
    "gelu_rows", nullptr, 4, 0, run_gelu_rows, nullptr, "gelu_rows(x, T, width, is_bf16): x = gelu(x)."};
constexpr Kernel kKvWrite{
    "kv_write", nullptr, 15, 0, run_kv_write, nullptr,
    "kv_write(addresses, strides and sizes in bytes): see elementwise.py."};
constexpr Kernel kRotaryKvWrite{
    "rotary_kv_write", nullptr, 19, 1, run_rotary, nullptr,
    "rotary_kv_write(addresses, sizes, eps): see elementwise.py."};
constexpr Kernel kGreedy{
    "greedy", nullptr, 7, 0, run_greedy, nullptr, "greedy(addresses, sizes, stride): see elementwise.py."};
constexpr Kernel kTakeRows{
    "take_rows", nullptr, 6, 0, run_take_rows, nullptr, "take_rows(from, T, bytes of a row, rows, N, to)."};

}  // namespace
}  // namespace triptych

PyMethodDef TRIPTYCH_METHODS(elementwise)[] = {
    TRIPTYCH_KERNEL_METHOD(kRmsNorm),
    TRIPTYCH_KERNEL_METHOD(kGateAndMul),
    TRIPTYCH_KERNEL_METHOD(kScaleRows),
    TRIPTYCH_KERNEL_METHOD(kAddRows),
    TRIPTYCH_KERNEL_METHOD(kNormColumns),
    TRIPTYCH_KERNEL_METHOD(kAddLayerNorm),
    TRIPTYCH_KERNEL_METHOD(kGeluRows),
    TRIPTYCH_KERNEL_METHOD(kKvWrite),
    TRIPTYCH_KERNEL_METHOD(kRotaryKvWrite),
    TRIPTYCH_KERNEL_METHOD(kGreedy),
    TRIPTYCH_KERNEL_METHOD(kTakeRows),
    {nullptr, nullptr, 0, nullptr}};
const triptych::Kernel* const TRIPTYCH_KERNELS_OF(elementwise)[] = {
    &triptych::kRmsNorm,     &triptych::kGateAndMul,   &triptych::kScaleRows, &triptych::kAddRows,
    &triptych::kNormColumns, &triptych::kAddLayerNorm, &triptych::kGeluRows,  &triptych::kKvWrite,
    &triptych::kRotaryKvWrite, &triptych::kGreedy,     &triptych::kTakeRows,  nullptr};

#else

PyMethodDef TRIPTYCH_METHODS(elementwise)[] = {{nullptr, nullptr, 0, nullptr}};
const triptych::Kernel* const TRIPTYCH_KERNELS_OF(elementwise)[] = {nullptr};

#endif

#ifdef TRIPTYCH_KERNELS_END
TRIPTYCH_KERNELS_END
#endif
