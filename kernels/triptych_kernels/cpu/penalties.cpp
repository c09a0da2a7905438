// Penalties of tokens that a row has seen: only the logits of these tokens are read and written, each once.

#include "arguments.h"

#include <vector>

#include "pool.h"

extern PyMethodDef penalties_methods[];

namespace triptych {
namespace {

struct Penalised {
    float* logits;
    const int32_t* token_ids;
    const int64_t *logit_rows, *rows, *lengths, *num_prompt_tokens;
    const float* amounts;  // presence, frequency, repetition of all rows
    int64_t num_rows, logits_stride, token_stride, vocab_size;
};

// marks: [vocab_size] zeros on entry and on return.
void penalise_row(const Penalised& call, int64_t index, uint32_t* marks) {
    const int32_t* seen = call.token_ids + call.rows[index] * call.token_stride;
    float* logits = call.logits + call.logit_rows[index] * call.logits_stride;
    const float presence = call.amounts[index], frequency = call.amounts[call.num_rows + index];
    const float repetition = call.amounts[2 * call.num_rows + index];
    const auto vocab_size = static_cast<uint64_t>(call.vocab_size);
    // Twice the count in the output, and one for being seen at all.
    for (int64_t i = 0; i < call.lengths[index]; ++i) {
        const auto token = static_cast<uint32_t>(seen[i]);
        if (token >= vocab_size) continue;
        marks[token] = (marks[token] | 1) + (i >= call.num_prompt_tokens[index] ? 2 : 0);
        __builtin_prefetch(logits + token, 1);
    }
    for (int64_t i = 0; i < call.lengths[index]; ++i) {
        const auto token = static_cast<uint32_t>(seen[i]);
        if (token >= vocab_size || marks[token] == 0) continue;
        const uint32_t count = marks[token] / 2;
        marks[token] = 0;
        float value = logits[token];
        value = value > 0.0f ? value / repetition : value * repetition;
        // Separate statements, because nothing may be fused: rounded as the reference rounds.
        const float for_count = frequency * static_cast<float>(count);
        value -= for_count;
        logits[token] = count > 0 ? value - presence : value;
    }
}

bool is_below(int64_t number, int64_t limit) { return number >= 0 && number < limit; }

Outcome run_penalise(const int64_t* n) {
    const Penalised call{
        reinterpret_cast<float*>(n[0]),         reinterpret_cast<const int32_t*>(n[1]),
        reinterpret_cast<const int64_t*>(n[2]), reinterpret_cast<const int64_t*>(n[3]),
        reinterpret_cast<const int64_t*>(n[4]), reinterpret_cast<const int64_t*>(n[5]),
        reinterpret_cast<const float*>(n[6]),   n[7], n[8], n[9], n[10]};
    for (int64_t i = 0; i < call.num_rows; ++i) {
        if (!is_below(call.logit_rows[i], n[11]) || !is_below(call.rows[i], n[12]) ||
            !is_below(call.lengths[i], n[13] + 1)) {
            return failed(
                PyExc_IndexError, "row %lld is not within the logits, its tokens not within the token ids",
                static_cast<long long>(i));
        }
    }
    parallel_for(call.num_rows, [&](int64_t index) {
        // Kept between calls, because clearing the marked entries is cheaper than clearing all.
        thread_local std::vector<uint32_t> marks;
        if (marks.size() < static_cast<size_t>(call.vocab_size)) marks.resize(call.vocab_size);
        penalise_row(call, index, marks.data());
    });
    return {};
}

constexpr Kernel kPenalise{
    "penalise", nullptr, 14, 0, run_penalise, nullptr, "penalise(addresses, sizes, strides): see penalties.py."};

}  // namespace
}  // namespace triptych

PyMethodDef penalties_methods[] = {
    TRIPTYCH_KERNEL_METHOD(kPenalise), {nullptr, nullptr, 0, nullptr}};
