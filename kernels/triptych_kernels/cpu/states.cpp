// Ops that keep a state per row: a convolution over the last tokens, and recurrences over a matrix per head.
//
// A token is computed from the state before it, by sums in one order. So results and states have the same bits for any
// chunking of a row, any other rows in the step, any slots and any number of threads.

#include "arguments.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "pool.h"

#include "isa.h"

extern PyMethodDef TRIPTYCH_METHODS(states)[];
extern const triptych::Kernel* const TRIPTYCH_KERNELS_OF(states)[];

#ifdef TRIPTYCH_KERNELS

#include "vector_math.h"

namespace triptych {
namespace {

// Rows of a step and the slots of their states: see state_batch.py.
struct Rows {
    const int32_t *starts, *read_slots, *write_slots;
    int64_t num_rows, num_slots, num_tokens;

    Rows(const int64_t* numbers, int64_t count)
        : starts(reinterpret_cast<const int32_t*>(numbers[0])), read_slots(reinterpret_cast<const int32_t*>(numbers[1])),
          write_slots(reinterpret_cast<const int32_t*>(numbers[2])), num_rows(numbers[3]), num_slots(numbers[4]),
          num_tokens(count) {}

    // An error's text or nullptr.
    const char* check() const {
        std::vector<int64_t> writers(num_slots, -1);  // tokens
        for (int64_t row = 0; row < num_rows; ++row) {
            const int64_t start = starts[row], end = starts[row + 1];
            if (start < 0 || end < start || end > num_tokens) return "query_starts do not fit the tokens";
            for (int64_t token = start; token < end; ++token) {
                const int64_t slot = write_slots[token];
                if (slot < 0) continue;
                if (slot >= num_slots) return "a slot to write does not exist";
                if (writers[slot] >= 0) return "a slot is written twice";
                writers[slot] = token;
            }
        }
        for (int64_t row = 0; row < num_rows; ++row) {
            const int64_t slot = read_slots[row], end = starts[row + 1];
            if (slot < 0 || starts[row] == end) continue;
            if (slot >= num_slots) return "a slot to read does not exist";
            if (writers[slot] >= 0 && (writers[slot] < starts[row] || writers[slot] >= end))
                return "a row reads a slot that another writes";
        }
        return nullptr;
    }
};

// Tokens after the last row pad the step; their results are not used, but must be finite.
void clear_padding(const Rows& rows, int64_t out, int64_t token_bytes) {
    const int64_t num_used = rows.num_rows == 0 ? 0 : rows.starts[rows.num_rows];
    std::memset(reinterpret_cast<char*>(out) + num_used * token_bytes, 0, (rows.num_tokens - num_used) * token_bytes);
}

// run(task) for all tasks; each returns whether it had memory.
template <class Run>
Outcome run_all(int64_t num_tasks, const Run& run) {
    std::atomic<bool> has_memory{true};
    parallel_for(num_tasks, [&](int64_t task) {
        if (!run(task)) has_memory.store(false, std::memory_order_relaxed);
    });
    return done_if(has_memory.load());
}

constexpr int64_t kChannelsOfTask = 256;

struct Conv {
    int64_t x;
    const float *weight, *bias;
    float* states;
    int64_t out, stride, num_channels, width;
    bool has_silu;
    Rows rows;
};

// Channels first to first + count - 1 of one row.
template <class Kind>
bool convolve(const Conv& call, int64_t row, int64_t first, int64_t count) {
    using Element = typename Kind::Element;
    const int64_t num_kept = call.width - 1, channels = call.num_channels;
    const int64_t start = call.rows.starts[row], end = call.rows.starts[row + 1];
    if (start == end) return true;
    const auto* x = reinterpret_cast<const Element*>(call.x) + first;
    auto* out = reinterpret_cast<Element*>(call.out) + first;
    // A copy: the slot may be the one that gets the last state.
    auto* old = static_cast<float*>(scratch(kScratchStates, num_kept * kChannelsOfTask * sizeof(float)));
    if (old == nullptr && num_kept > 0) return false;
    const auto state_row = [&](int64_t slot, int64_t index) {
        return call.states + (slot * num_kept + index) * channels + first;
    };
    const int64_t read_slot = call.rows.read_slots[row];
    for (int64_t i = 0; i < num_kept; ++i) {
        float* to = old + i * kChannelsOfTask;
        if (read_slot < 0) {
            std::memset(to, 0, count * sizeof(float));
        } else {
            std::memcpy(to, state_row(read_slot, i), count * sizeof(float));
        }
    }
    // Of an index of the step; before the row's first token, of the state.
    const auto input = [&](int64_t token, int64_t i, auto lanes) {
        return token < start ? Fp32::load(old + (num_kept + token - start) * kChannelsOfTask + i, lanes)
                             : Kind::load(x + token * call.stride + i, lanes);
    };
    for (int64_t token = start; token < end; ++token) {
        for_vectors(count, [&](int64_t i, auto lanes) {
            Floats sum = call.bias == nullptr ? zeros() : Fp32::load(call.bias + first + i, lanes);
            for (int64_t k = 0; k < call.width; ++k) {
                const Floats weight = Fp32::load(call.weight + k * channels + first + i, lanes);
                sum = fmadd(input(token - num_kept + k, i, lanes), weight, sum);
            }
            Kind::store(out + token * channels + i, lanes, call.has_silu ? activated<Kind>(Gate::kSilu, sum) : sum);
        });
        const int64_t slot = call.rows.write_slots[token];
        if (slot < 0) continue;
        for (int64_t i = 0; i < num_kept; ++i) {
            float* to = state_row(slot, i);
            for_vectors(count, [&](int64_t channel, auto lanes) {
                Fp32::store(to + channel, lanes, input(token - num_kept + 1 + i, channel, lanes));
            });
        }
    }
    return true;
}

Outcome run_conv(const int64_t* n) {
    const Conv call{n[0], reinterpret_cast<const float*>(n[1]), reinterpret_cast<const float*>(n[2]),
                    reinterpret_cast<float*>(n[3]), n[4], n[5], n[7], n[8], n[9] != 0, Rows(n + 11, n[6])};
    const bool is_bf16 = n[10] != 0;
    const char* fault = call.rows.check();
    if (fault != nullptr) return failed(PyExc_ValueError, "%s", fault);
    clear_padding(call.rows, call.out, call.num_channels * (is_bf16 ? 2 : 4));
    const int64_t num_parts = (call.num_channels + kChannelsOfTask - 1) / kChannelsOfTask;
    return run_all(call.rows.num_rows * num_parts, [&](int64_t task) {
        const int64_t first = task % num_parts * kChannelsOfTask;
        const int64_t count = std::min(kChannelsOfTask, call.num_channels - first);
        return (is_bf16 ? convolve<Bf16> : convolve<Fp32>)(call, task / num_parts, first, count);
    });
}

// Vectors of a state's columns that are computed together, while its rows are read: of whole rows for one token, which
// reads them from memory; of few columns for chunks, whose state stays in the first-level cache.
#ifdef TRIPTYCH_AVX2
constexpr int kVectorsOfToken = 2, kVectorsOfChunk = 2;
#else
constexpr int kVectorsOfToken = 8, kVectorsOfChunk = 4;
#endif
constexpr int kStepsTogether = 16;

// A vector for each token and head: in elements from one token, and from one head, to the next.
struct Vectors {
    int64_t at, token_stride, head_stride;

    template <class Kind>
    const typename Kind::Element* of(int64_t token, int64_t head) const {
        return reinterpret_cast<const typename Kind::Element*>(at) + token * token_stride + head * head_stride;
    }
};

// A state is a matrix of key_dim rows and value_dim columns per head. The scan adds key x (step value) to it, the delta
// rule key x (beta (value - what the key finds)); the result is what the query finds.
struct Recurrence {
    Vectors query, key, value, step, beta;  // step and beta: of one number
    const float *rates, *biases, *skips;    // of each head; skips may be null
    float* states;
    int64_t out;
    int64_t num_heads, share, key_dim, value_dim;  // share: heads that share a query and a key
    float least_step, most_step;
    Rows rows;

    float* state(int64_t slot, int64_t head) const {
        return states + (slot * num_heads + head) * key_dim * value_dim;
    }
};

// ln(1 + e^x).
Floats softplus(Floats x) {
    const Floats shrunk = exp16(either(x, splat(-0.0f)));
    return add(max(zeros(), x), log1p16(shrunk));
}

// The numbers of kStepsTogether tokens of a head, the first at `token`; after the last they are those of zeros.
struct Steps {
    alignas(64) float steps[kStepsTogether], decays[kStepsTogether], betas[kStepsTogether];

    template <class Kind>
    void compute(const Recurrence& call, int64_t head, int64_t token, int64_t end) {
        const Floats raw = add(gather<Kind>(call.step, head, token, end), splat(call.biases[head]));
        // A NaN stays one: min and max return their second operand then.
        const Floats step = min(splat(call.most_step), max(splat(call.least_step), softplus(raw)));
        store(steps, step);
        store(decays, exp16(mul(step, splat(call.rates[head]))));
        if (call.beta.at == 0) return;
        const Floats one = splat(1.0f), grown = exp16(sub(zeros(), gather<Kind>(call.beta, head, token, end)));
        store(betas, div(one, add(one, grown)));
    }

private:
    template <class Kind>
    static Floats gather(const Vectors& numbers, int64_t head, int64_t token, int64_t end) {
        typename Kind::Element lanes[kStepsTogether] = {};
        for (int64_t i = 0; i < std::min<int64_t>(kStepsTogether, end - token); ++i)
            lanes[i] = *numbers.of<Kind>(token + i, head);
        return Kind::load(lanes);
    }
};

// to: `count` numbers as fp32, and zeros up to a multiple of 16.
template <class Kind>
void widen(const typename Kind::Element* from, int64_t count, float* to) {
    for_vectors(count, [&](int64_t i, auto lanes) { store(to + i, Kind::load(from + i, lanes)); });
}

float dot(const float* a, const float* b, int64_t count) {
    Floats sum = zeros();
    for (int64_t i = 0; i < count; i += 16) sum = fmadd(load(a + i), load(b + i), sum);
    return sum_of_lanes(sum);
}

// x *= scale / |x|.
void normalise(float* x, int64_t count, float scale) {
    constexpr float kEps = 1e-6f;
    const float length = std::sqrt(dot(x, x, count) + kEps);
    const Floats factor = splat(scale / length);
    for (int64_t i = 0; i < count; i += 16) store(x + i, mul(load(x + i), factor));
}

// Columns of a head's state: VECTORS times 16, or one vector of which there are `lanes`.
struct Tile {
    float* at;
    int64_t stride;
};

// With UPDATE, to = decay from + key x change. sums[r] += read[r] . to for each of READS, or . from without UPDATE.
template <int VECTORS, bool UPDATE, int READS, class Lanes>
void pass(
    Tile from, Tile to, int64_t num_rows, Lanes lanes, float decay, const float* key, const Floats (&change)[VECTORS],
    const float* const (&read)[2], Floats (&sums)[2][VECTORS]) {
    Floats added[VECTORS], own[2][VECTORS];
    for (int v = 0; v < VECTORS; ++v) added[v] = change[v], own[0][v] = sums[0][v], own[1][v] = sums[1][v];
    const Floats kept = splat(decay);
    for (int64_t row = 0; row < num_rows; ++row) {
        const Floats factor = UPDATE ? splat(key[row]) : zeros();
        const Floats first = READS > 0 ? splat(read[0][row]) : zeros();
        const Floats second = READS > 1 ? splat(read[1][row]) : zeros();
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
            Floats state = Fp32::load(from.at + row * from.stride + v * 16, lanes);
            if (UPDATE) {
                state = fmadd(factor, added[v], mul(kept, state));
                Fp32::store(to.at + row * to.stride + v * 16, lanes, state);
            }
            if (READS > 0) own[0][v] = fmadd(first, state, own[0][v]);
            if (READS > 1) own[1][v] = fmadd(second, state, own[1][v]);
        }
    }
    for (int v = 0; v < VECTORS; ++v) sums[0][v] = own[0][v], sums[1][v] = own[1][v];
}

// VECTORS of columns, the first at `column`, of one head's state through all tokens of a row.
template <class Kind, bool IS_DELTA, int VECTORS, class Lanes>
void run_columns(
    const Recurrence& call, int64_t row, int64_t head, int64_t column, Lanes lanes, float* memory) {
    const int64_t start = call.rows.starts[row], end = call.rows.starts[row + 1];
    const int64_t dim = call.key_dim, padded = (dim + 15) / 16 * 16, group = head / call.share;
    const int32_t* write_slots = call.rows.write_slots;
    const Tile own{memory, VECTORS * 16};
    float* const keys[2] = {memory + dim * own.stride, memory + dim * own.stride + padded};
    float* const query = keys[1] + padded;
    const auto tile_of = [&](int64_t slot) {
        return slot < 0 ? own : Tile{call.state(slot, head) + column, call.value_dim};
    };
    const int64_t read_slot = call.rows.read_slots[row];
    if (read_slot < 0) std::memset(own.at, 0, dim * own.stride * sizeof(float));
    Tile state = tile_of(read_slot);
    Steps steps;
    Floats change[VECTORS], value[VECTORS], sums[2][VECTORS];
    for (int v = 0; v < VECTORS; ++v) change[v] = zeros();
    float decay = 0.0f;
    for (int64_t token = start; token < end; ++token) {
        const int64_t index = (token - start) % kStepsTogether;
        if (index == 0) steps.compute<Kind>(call, head, token, end);
        float *key = keys[(token - start) % 2], *key_before = keys[(token - start + 1) % 2];
        widen<Kind>(call.key.of<Kind>(token, group), dim, key);
        widen<Kind>(call.query.of<Kind>(token, group), dim, query);
        const auto* values = call.value.of<Kind>(token, head) + column;
        auto* out = reinterpret_cast<typename Kind::Element*>(call.out) +
                    (token * call.num_heads + head) * call.value_dim + column;
        for (int v = 0; v < VECTORS; ++v)
            value[v] = Kind::load(values + v * 16, lanes), sums[0][v] = sums[1][v] = zeros();
        if (!IS_DELTA) {
            for (int v = 0; v < VECTORS; ++v) change[v] = mul(splat(steps.steps[index]), value[v]);
            const Tile to = tile_of(write_slots[token]);
            pass<VECTORS, true, 1>(state, to, dim, lanes, steps.decays[index], key, change, {query, nullptr}, sums);
            state = to;
            for (int v = 0; v < VECTORS; ++v) {
                const Floats sum = call.skips == nullptr ? sums[0][v] : fmadd(splat(call.skips[head]), value[v], sums[0][v]);
                Kind::store(out + v * 16, lanes, sum);
            }
            continue;
        }
        normalise(key, padded, 1.0f);
        normalise(query, padded, 1.0f / std::sqrt(static_cast<float>(dim)));
        const Floats product = splat(dot(key, query, padded));
        // A token's change is known once the state before it is read, so it is added while that is read for the next.
        if (token == start) {
            pass<VECTORS, false, 2>(state, state, dim, lanes, decay, key, change, {key, query}, sums);
        } else {
            const Tile to = tile_of(write_slots[token - 1]);
            pass<VECTORS, true, 2>(state, to, dim, lanes, decay, key_before, change, {key, query}, sums);
            state = to;
        }
        decay = steps.decays[index];
        for (int v = 0; v < VECTORS; ++v) {
            change[v] = mul(splat(steps.betas[index]), fnmadd(splat(decay), sums[0][v], value[v]));
            Kind::store(out + v * 16, lanes, fmadd(product, change[v], mul(splat(decay), sums[1][v])));
        }
    }
    if (IS_DELTA && write_slots[end - 1] >= 0) {
        const float* key = keys[(end - 1 - start) % 2];
        pass<VECTORS, true, 0>(
            state, tile_of(write_slots[end - 1]), dim, lanes, decay, key, change, {nullptr, nullptr}, sums);
    }
}

// Whole vectors of columns from `column` on, at most `most` together; returns the first column that is left.
template <class Kind, bool IS_DELTA, int VECTORS>
int64_t run_vectors(const Recurrence& call, int64_t row, int64_t head, int64_t column, int most, float* memory) {
    if constexpr (VECTORS > 0) {
        if (VECTORS <= most)
            for (; column + VECTORS * 16 <= call.value_dim; column += VECTORS * 16)
                run_columns<Kind, IS_DELTA, VECTORS>(call, row, head, column, AllLanes(), memory);
        return run_vectors<Kind, IS_DELTA, VECTORS / 2>(call, row, head, column, most, memory);
    }
    return column;
}

template <class Kind, bool IS_DELTA>
bool run_head(const Recurrence& call, int64_t row, int64_t head) {
    const int64_t num_tokens = call.rows.starts[row + 1] - call.rows.starts[row];
    if (num_tokens == 0) return true;
    constexpr int kMost = std::max(kVectorsOfToken, kVectorsOfChunk);
    const int64_t padded = (call.key_dim + 15) / 16 * 16;
    const int64_t num_floats = call.key_dim * kMost * 16 + 3 * padded;
    auto* memory = static_cast<float*>(scratch(kScratchStates, num_floats * sizeof(float)));
    if (memory == nullptr) return false;
    const int most = num_tokens == 1 ? kVectorsOfToken : kVectorsOfChunk;
    const int64_t column = run_vectors<Kind, IS_DELTA, kMost>(call, row, head, 0, most, memory);
    if (column < call.value_dim)
        run_columns<Kind, IS_DELTA, 1>(call, row, head, column, first_lanes(call.value_dim - column), memory);
    return true;
}

template <bool IS_DELTA>
Outcome recur(const Recurrence& call, bool is_bf16) {
    const char* fault = call.rows.check();
    if (fault != nullptr) return failed(PyExc_ValueError, "%s", fault);
    clear_padding(call.rows, call.out, call.num_heads * call.value_dim * (is_bf16 ? 2 : 4));
    return run_all(call.rows.num_rows * call.num_heads, [&](int64_t task) {
        const int64_t row = task / call.num_heads, head = task % call.num_heads;
        return is_bf16 ? run_head<Bf16, IS_DELTA>(call, row, head) : run_head<Fp32, IS_DELTA>(call, row, head);
    });
}

const float* floats_at(int64_t address) { return reinterpret_cast<const float*>(address); }

Outcome run_scan(const int64_t* n) {
    const Recurrence call{{n[3], n[14], n[15]}, {n[2], n[12], n[13]}, {n[0], n[9], n[10]}, {n[1], n[11], 1}, {0, 0, 0},
                          floats_at(n[6]), floats_at(n[8]), floats_at(n[7]), reinterpret_cast<float*>(n[4]), n[5],
                          n[17], n[17] / n[18], n[19], n[20], static_cast<float>(fraction(n[27])),
                          static_cast<float>(fraction(n[28])), Rows(n + 22, n[16])};
    return recur<false>(call, n[21] != 0);
}

Outcome run_delta(const int64_t* n) {
    const Recurrence call{{n[0], n[9], n[10]}, {n[1], n[11], n[12]}, {n[2], n[13], n[14]}, {n[3], n[15], 1},
                          {n[4], n[16], 1}, floats_at(n[7]), floats_at(n[8]), nullptr, reinterpret_cast<float*>(n[5]),
                          n[6], n[18], n[18] / n[19], n[20], n[21], 0.0f, __builtin_inff(), Rows(n + 23, n[17])};
    return recur<true>(call, n[22] != 0);
}

constexpr Kernel kCausalConv{
    "causal_conv", nullptr, 16, 0, run_conv, nullptr, "causal_conv(addresses, stride, sizes, rows): see states.py."};
constexpr Kernel kSsdScan{
    "ssd_scan", nullptr, 27, 2, run_scan, nullptr, "ssd_scan(addresses, strides, sizes, rows, limits): see states.py."};
constexpr Kernel kGatedDeltaRule{
    "gated_delta_rule", nullptr, 28, 0, run_delta, nullptr,
    "gated_delta_rule(addresses, strides, sizes, rows): see states.py."};

}  // namespace
}  // namespace triptych

PyMethodDef TRIPTYCH_METHODS(states)[] = {
    TRIPTYCH_KERNEL_METHOD(kCausalConv),
    TRIPTYCH_KERNEL_METHOD(kSsdScan),
    TRIPTYCH_KERNEL_METHOD(kGatedDeltaRule),
    {nullptr, nullptr, 0, nullptr}};
const triptych::Kernel* const TRIPTYCH_KERNELS_OF(states)[] = {
    &triptych::kCausalConv, &triptych::kSsdScan, &triptych::kGatedDeltaRule, nullptr};

#else

PyMethodDef TRIPTYCH_METHODS(states)[] = {{nullptr, nullptr, 0, nullptr}};
const triptych::Kernel* const TRIPTYCH_KERNELS_OF(states)[] = {nullptr};

#endif

#ifdef TRIPTYCH_KERNELS_END
TRIPTYCH_KERNELS_END
#endif
