// Threads that share the work of one kernel call, and memory a thread keeps between calls.
//
// With one thread (the default) nothing here starts a thread or takes a lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace triptych {

// How many threads, the caller included, a call may use. At least 1.
void set_num_threads(int num_threads);
int num_threads();

// Runs body(context, task) for every task from 0 to num_tasks - 1, on the calling thread and the pool's, and returns
// when all are done. Tasks are taken one by one, so a thread that is not running delays at most the task it holds. A
// call from within a task, or while another thread's call uses the pool, runs on the calling thread alone.
void run_tasks(int64_t num_tasks, void (*body)(void*, int64_t), void* context);

// run_tasks for a callable: parallel_for(n, [&](int64_t task) { ... }). The callable must not throw.
template <class Body>
inline void parallel_for(int64_t num_tasks, Body&& body) {
    using Callable = typename std::remove_reference<Body>::type;
    if (num_tasks == 1 || num_threads() == 1) {
        for (int64_t task = 0; task < num_tasks; ++task) {
            body(task);
        }
        return;
    }
    run_tasks(
        num_tasks, [](void* context, int64_t task) { (*static_cast<Callable*>(context))(task); },
        const_cast<void*>(static_cast<const void*>(&body)));
}

// Memory of the calling thread: at least num_bytes, 64-byte aligned, uninitialised, kept until the thread asks the same
// slot for more. Slots are independent; a function that calls another must not use a slot that the other uses. Returns
// nullptr if memory cannot be allocated.
void* scratch(int slot, size_t num_bytes);

enum ScratchSlot : int {
    kScratchGemmRows = 0,      // rows packed for the microkernel; read by all threads of a call
    kScratchGemmPanel = 1,     // weights widened; gates and ups of experts, whose weights are never widened
    kScratchExperts = 2,       // between the two projections of experts
    kScratchExpertsIndex = 3,  // routing of tokens to experts
    kScratchAttention = 4,     // for attention.cpp
    kScratchElementwise = 5,   // for elementwise.cpp
    kScratchLowRank = 6,       // between the two products of low-rank additions; read by all threads of a call
    kScratchAddend = 7,        // their result for a task's columns
    kScratchOrderedRows = 8,   // rows, their inputs in the order of a weight's groups; read by all threads of a call
    kScratchSums = 9,          // a task's sums, to which its additions are added
    kScratchStates = 10,       // for states.cpp
    kNumScratchSlots = 11,
};

}  // namespace triptych
