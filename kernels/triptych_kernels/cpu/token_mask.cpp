// Masks of tokens that may be chosen: words of 32 allowed tokens are skipped, others are written as a whole.

#include "arguments.h"

#include <limits>

#include "pool.h"

extern PyMethodDef token_mask_methods[];

namespace triptych {
namespace {

constexpr int kWordsPerTask = 1024;

// For each four bits the bits of four logits that stay: the compiler makes one vector of them.
struct Kept {
    uint32_t bits[16][4];
    constexpr Kept() : bits() {
        for (int four = 0; four < 16; ++four) {
            for (int bit = 0; bit < 4; ++bit) bits[four][bit] = (four >> bit) & 1 ? ~uint32_t{0} : 0;
        }
    }
};
alignas(16) constexpr Kept kKept{};
constexpr uint32_t kForbiddenBits = 0xff800000;  // of -inf

void mask_word(float* logits, uint32_t word) {
    for (int four = 0; four < 8; ++four, word >>= 4, logits += 4) {
        uint32_t values[4];
        std::memcpy(values, logits, sizeof values);
        const uint32_t* kept = kKept.bits[word & 15];
        for (int bit = 0; bit < 4; ++bit) {
            values[bit] = (values[bit] & kept[bit]) | (kForbiddenBits & ~kept[bit]);
        }
        std::memcpy(logits, values, sizeof values);
    }
}

// Tokens of words first to end - 1 of one row.
void mask_row(float* logits, const uint32_t* words, int64_t first, int64_t end, int64_t vocab_size) {
    constexpr float kForbidden = -std::numeric_limits<float>::infinity();
    for (int64_t index = first; index < end; ++index) {
        const uint32_t word = words[index];
        if (word == ~uint32_t{0}) continue;
        float* out = logits + index * 32;
        const int64_t count = vocab_size - index * 32 < 32 ? vocab_size - index * 32 : 32;
        if (word == 0) {
            for (int64_t bit = 0; bit < count; ++bit) out[bit] = kForbidden;
        } else if (count == 32) {
            mask_word(out, word);
        } else {
            for (int64_t bit = 0; bit < count; ++bit) out[bit] = (word >> bit) & 1 ? out[bit] : kForbidden;
        }
    }
}

// Addresses of logits, mask and rows (0: all), rows of the mask, strides of logits and mask, V, rows of the logits.
Outcome run_apply_token_mask(const int64_t* n) {
    auto* logits = reinterpret_cast<float*>(n[0]);
    const auto* mask = reinterpret_cast<const uint32_t*>(n[1]);
    const auto* rows = reinterpret_cast<const int64_t*>(n[2]);
    const int64_t num_rows = n[3], logits_stride = n[4], mask_stride = n[5], vocab_size = n[6];
    for (int64_t i = 0; rows != nullptr && i < num_rows; ++i) {
        if (rows[i] < 0 || rows[i] >= n[7]) {
            return failed(
                PyExc_IndexError, "row %lld is not within the logits' %lld rows", static_cast<long long>(rows[i]),
                static_cast<long long>(n[7]));
        }
    }
    const int64_t num_words = (vocab_size + 31) / 32;
    const int64_t num_tasks = (num_words + kWordsPerTask - 1) / kWordsPerTask;
    parallel_for(num_rows * num_tasks, [&](int64_t task) {
        const int64_t index = task / num_tasks, first = task % num_tasks * kWordsPerTask;
        const int64_t end = first + kWordsPerTask < num_words ? first + kWordsPerTask : num_words;
        const int64_t row = rows == nullptr ? index : rows[index];
        mask_row(logits + row * logits_stride, mask + index * mask_stride, first, end, vocab_size);
    });
    return {};
}

constexpr Kernel kApplyTokenMask{
    "apply_token_mask", nullptr, 8, 0, run_apply_token_mask, nullptr,
    "apply_token_mask(addresses, sizes, strides): see token_mask.py."};

}  // namespace
}  // namespace triptych

PyMethodDef token_mask_methods[] = {TRIPTYCH_KERNEL_METHOD(kApplyTokenMask), {nullptr, nullptr, 0, nullptr}};
