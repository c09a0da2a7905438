// Attention over the paged cache, for rows that compute one token and for chunks alike.
//
// Sums run in the order of positions. A position that a token must not see is skipped, or adds zero. So a token's
// result has the same bits for any chunking of its row, any other rows in the step, any location of its blocks and any
// number of threads.

#include "arguments.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "pool.h"

#include "isa.h"

extern PyMethodDef TRIPTYCH_METHODS(attention)[];
extern const triptych::Kernel* const TRIPTYCH_KERNELS_OF(attention)[];

#ifdef TRIPTYCH_KERNELS

#include "attention_vectors.h"
#ifndef TRIPTYCH_AVX2
#include "avx512/attention_tiles.h"
#endif

namespace triptych {
namespace {

constexpr int64_t kRowsOfTask = 128;           // queries times heads that share a transposed tile
constexpr int64_t kScoreBytesOfTask = 2 << 20;  // of scores: more would not fit in the caches
constexpr int64_t kLeastRowsOfTask = 32;        // that repay a transposed tile
constexpr int64_t kTasksOfThread = 8;           // at least, so that all threads end at about the same time

// How many rows of one token share a task at most, if all begin with the same tiles.
int64_t rows_together(const Call& call, int64_t num_rows, int64_t longest) {
    const int64_t most = std::min(kRowsOfTask, kScoreBytesOfTask / (4 * (longest + 2 * kTile))) / call.share;
    const int64_t least = (kLeastRowsOfTask + call.share - 1) / call.share;
    const int64_t wanted = num_rows * call.num_kv_heads / (kTasksOfThread * triptych::num_threads());
    const int64_t size = std::min(std::max(wanted, least), most);
    if (size < 2) return 1;
    const int64_t num_tasks = (num_rows + size - 1) / size;
    return (num_rows + num_tasks - 1) / num_tasks;
}

// Puts neighbouring rows of one token together that begin with the same tiles; returns an error's text or nullptr.
const char* join_rows(const Call& call, std::vector<QueryBlock>& blocks) {
    // An even number, since the sums of attention_tiles.h take two tiles a step, and whole blocks of each row.
    const int64_t num_tiles = call.num_common_blocks * call.block_size / (2 * kTile) * 2;
    if (num_tiles == 0 || call.share > kTile) return nullptr;
    const int64_t num_columns = (num_tiles * kTile + call.block_size - 1) / call.block_size;
    const auto can_join = [&](const QueryBlock& block) {
        return block.num_tokens == 1 && block.position == call.totals[block.row] - 1 &&
               block.position >= num_tiles * kTile;
    };
    int64_t num_rows = 0, longest = 0;
    for (const QueryBlock& block : blocks) {
        if (!can_join(block)) continue;
        num_rows += 1, longest = std::max(longest, block.position + 1);
    }
    if (num_rows < 2) return nullptr;
    const int64_t most = rows_together(call, num_rows, longest);
    size_t num_kept = 0;
    for (size_t i = 0; i < blocks.size(); ++i) {
        const QueryBlock block = blocks[i];
        QueryBlock* last = num_kept == 0 ? nullptr : &blocks[num_kept - 1];
        const bool joins = last != nullptr && can_join(block) && last->row + last->num_tokens == block.row &&
                           (last->has_rows() || can_join(*last)) && last->num_tokens < most;
        if (!joins) {
            blocks[num_kept++] = block;
            continue;
        }
        const int32_t* first = call.tables + last->row * call.table_stride;
        if (std::memcmp(first, call.tables + block.row * call.table_stride, num_columns * sizeof *first) != 0)
            return "rows do not begin with the same blocks";
        last->num_common_tiles = num_tiles, last->num_tokens += 1;
    }
    blocks.resize(num_kept);
    return nullptr;
}

// Groups the tokens of each row that share tiles; returns an error's text or nullptr.
const char* cut_rows(const Call& call, std::vector<QueryBlock>& blocks) {
    const int64_t size = call.block_size;
    for (int64_t row = 0; row < call.num_rows; ++row) {
        const int64_t start = call.starts[row], end = call.starts[row + 1], total = call.totals[row];
        if (start < 0 || end < start || end > call.num_tokens) return "query_starts do not fit the query";
        if (start == end) continue;
        if (end - start > total) return "a row computes more tokens than it has";
        const int64_t first_position = total - (end - start), last_column = (total - 1) / size;
        if (last_column >= call.num_table_columns) return "a row is longer than its block table";
        for (int64_t column = call.first_visible(first_position) / size; column <= last_column; ++column) {
            const int32_t id = call.tables[row * call.table_stride + column];
            if (id < 0 || id >= call.num_blocks) return "a block table names a block that does not exist";
        }
        const int64_t most_seen = std::min(total, call.window + kRowsOfTask) + 2 * kTile;
        const int64_t most = std::min(kRowsOfTask, kScoreBytesOfTask / (4 * most_seen)) / call.share;
        const int64_t step = std::max<int64_t>(1, most);
        for (int64_t token = start; token < end; token += step)
            blocks.push_back({row, token, first_position + token - start, std::min(step, end - token)});
    }
    return call.num_common_blocks > 0 ? join_rows(call, blocks) : nullptr;
}

// KV heads of a block of tokens, or of neighbouring blocks: tasks first to end - 1. `following` is the task that this
// thread will probably get next.
template <class Task>
bool run_tasks_of(
    const Call& call, const std::vector<QueryBlock>& blocks, int64_t first, int64_t end, int64_t following) {
    const int64_t size = call.num_kv_heads, last = static_cast<int64_t>(blocks.size()) * size - 1;
    bool has_memory = true;
    typename Task::Registers registers;
    for (int64_t index = first; index < end; ++index) {
        const int64_t next_index = std::min(index + 1 < end ? index + 1 : following, last);
        const QueryBlock& block = blocks[index / size];
        const Stream next(call, blocks[next_index / size], next_index % size);
        has_memory &= Task(call, block, index % size, next).run(registers);
    }
    return has_memory;
}

// Computes every task; an error's text or nullptr.
const char* attend(const Call& call) {
    std::vector<QueryBlock> blocks;
    blocks.reserve(call.num_rows);
    const char* fault = cut_rows(call, blocks);
    if (fault != nullptr) return fault;
    // Tokens after the last row pad the step; their results are not used, but must be finite.
    const int64_t num_used = call.num_rows == 0 ? 0 : call.starts[call.num_rows];
    const int64_t token_bytes = call.num_heads * call.value_dim * (call.is_bf16 ? 2 : 4);
    std::memset(call.output + num_used * token_bytes, 0, (call.num_tokens - num_used) * token_bytes);
    std::atomic<bool> has_memory{true};
    const int64_t num_blocks = blocks.size(), num_threads = triptych::num_threads();
    // Whole blocks of tokens if there are enough for every thread: then the next reads are known.
    const int64_t run = num_blocks >= 4 * num_threads ? call.num_kv_heads : 1;
    auto run_tasks = call.is_bf16 ? run_tasks_of<VectorTask<Bf16Attention>> : run_tasks_of<VectorTask<Fp32Attention>>;
#ifndef TRIPTYCH_AVX2
    if (call.is_bf16 && call.with_amx) run_tasks = run_tasks_of<TileTask>;
#endif
    parallel_for(num_blocks * call.num_kv_heads / run, [&](int64_t task) {
        const int64_t first = task * run, end = first + run, following = first + num_threads * run;
        const bool is_done = run_tasks(call, blocks, first, end, following);
        if (!is_done) has_memory.store(false, std::memory_order_relaxed);
    });
    return has_memory.load() ? nullptr : "out of memory";
}

Outcome run_attention(const int64_t* n) {
    Call call;
    call.query = reinterpret_cast<const char*>(n[0]);
    call.keys = reinterpret_cast<const char*>(n[1]);
    call.values = reinterpret_cast<const char*>(n[2]);
    call.output = reinterpret_cast<char*>(n[3]);
    call.sinks = reinterpret_cast<const float*>(n[4]);
    call.token_stride = n[5], call.head_stride = n[6], call.num_tokens = n[7], call.num_heads = n[8];
    call.num_kv_heads = n[9], call.num_blocks = n[10], call.block_size = n[11];
    call.key_dim = n[12], call.value_dim = n[13], call.is_bf16 = n[14] != 0, call.with_amx = n[15] != 0;
    // 0 is no window: use one larger than any row that can be added to without overflow.
    call.window = n[16] > 0 ? n[16] : int64_t{1} << 40;
    call.tables = reinterpret_cast<const int32_t*>(n[17]);
    call.starts = reinterpret_cast<const int32_t*>(n[18]);
    call.totals = reinterpret_cast<const int32_t*>(n[19]);
    call.num_rows = n[20], call.num_table_columns = n[21], call.table_stride = n[22];
    // Positions before a window are read by no row.
    call.num_common_blocks = n[16] > 0 ? 0 : n[23];
    call.scale = static_cast<float>(fraction(n[24]));
    call.soft_cap = static_cast<float>(fraction(n[25]));
    call.derive();
    const char* fault = attend(call);
    return fault == nullptr ? Outcome{} : failed(PyExc_ValueError, "%s", fault);
}

constexpr Kernel kPagedAttention{
    "paged_attention", nullptr, 24, 2, run_attention, nullptr,
    "paged_attention(addresses, strides, sizes, scale, soft_cap): see attention.py."};

}  // namespace
}  // namespace triptych

PyMethodDef TRIPTYCH_METHODS(attention)[] = {
    TRIPTYCH_KERNEL_METHOD(kPagedAttention), {nullptr, nullptr, 0, nullptr}};
const triptych::Kernel* const TRIPTYCH_KERNELS_OF(attention)[] = {&triptych::kPagedAttention, nullptr};

#else

PyMethodDef TRIPTYCH_METHODS(attention)[] = {{nullptr, nullptr, 0, nullptr}};
const triptych::Kernel* const TRIPTYCH_KERNELS_OF(attention)[] = {nullptr};

#endif

#ifdef TRIPTYCH_KERNELS_END
TRIPTYCH_KERNELS_END
#endif
