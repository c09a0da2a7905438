// The pool of pool.h.
//
// A call publishes a job: what to run, how many tasks, and one word that holds the job's number and the next task.
// Threads take tasks by compare-and-swap on that word, so a thread that is late by a whole job cannot take a task of
// the next one by mistake. Between calls a thread spins for a moment, since the next call usually is microseconds away,
// and then sleeps.

#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace triptych {
namespace {

using Body = void (*)(void*, int64_t);

constexpr int kTaskBits = 32;
constexpr uint64_t kTaskMask = (uint64_t{1} << kTaskBits) - 1;
constexpr auto kSpinTime = std::chrono::microseconds(40);
constexpr int kSpinTurns = 4096;

inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#endif
}

class Pool {
public:
    void run(int64_t num_tasks, Body body, void* context, int num_threads) {
        start_threads(num_threads - 1);
        // Closed first: a thread that still reads the last job's ticket must not find it open again by this job's
        // number of tasks. A thread that reads a field of this job sees the closed ticket, so its exchange fails.
        ticket_.store((uint64_t{job_} << kTaskBits) | kTaskMask, std::memory_order_release);
        body_.store(body, std::memory_order_release);
        context_.store(context, std::memory_order_release);
        num_tasks_.store(num_tasks, std::memory_order_release);
        num_helpers_.store(num_threads - 1, std::memory_order_relaxed);
        num_done_.store(0, std::memory_order_relaxed);
        ++job_;
        // Sequentially consistent against the count of sleepers: either this sees a sleeper, or the sleeper
        // sees the job.
        ticket_.store(uint64_t{job_} << kTaskBits, std::memory_order_seq_cst);
        if (num_sleeping_.load(std::memory_order_seq_cst) > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        take_tasks(job_);
        for (int turn = 0; num_done_.load(std::memory_order_acquire) != num_tasks; ++turn) {
            // Yields to a helper that lost its core.
            turn < kSpinTurns ? relax() : std::this_thread::yield();
        }
    }

    std::mutex& owner() { return owner_; }

private:
    void start_threads(int num_wanted) {
        try {
            for (; num_started_ < num_wanted; ++num_started_) {
                std::thread([this, index = num_started_] { serve(index); }).detach();
            }
        } catch (const std::system_error&) {
            // The system allows no more threads: the existing ones, at least the caller, do the work.
        }
    }

    void take_tasks(uint32_t job) {
        for (;;) {
            uint64_t ticket = ticket_.load(std::memory_order_acquire);
            const Body body = body_.load(std::memory_order_acquire);
            void* const context = context_.load(std::memory_order_acquire);
            const int64_t num_tasks = num_tasks_.load(std::memory_order_acquire);
            const int64_t task = static_cast<int64_t>(ticket & kTaskMask);
            if ((ticket >> kTaskBits) != job || task >= num_tasks) {
                return;
            }
            // Success implies that the job is still open, so the fields read above belong to it.
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
                continue;
            }
            body(context, task);
            num_done_.fetch_add(1, std::memory_order_acq_rel);
        }
    }

    void serve(int index) {
        inside_task() = true;
        uint32_t last_job = 0;
        for (;;) {
            const uint32_t job = wait_for_job_after(last_job);
            if (index < num_helpers_.load(std::memory_order_relaxed)) {
                take_tasks(job);
            }
            last_job = job;
        }
    }

    uint32_t current_job() const {
        return static_cast<uint32_t>(ticket_.load(std::memory_order_seq_cst) >> kTaskBits);
    }

    uint32_t wait_for_job_after(uint32_t last_job) {
        const auto give_up_at = std::chrono::steady_clock::now() + kSpinTime;
        do {
            for (int turn = 0; turn < 64; ++turn) {
                const uint32_t job = current_job();
                if (job != last_job) {
                    return job;
                }
                relax();
            }
        } while (std::chrono::steady_clock::now() < give_up_at);
        std::unique_lock<std::mutex> lock(mutex_);
        num_sleeping_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return current_job() != last_job; });
        num_sleeping_.fetch_sub(1, std::memory_order_relaxed);
        return current_job();
    }

public:
    static bool& inside_task() {
        static thread_local bool inside = false;
        return inside;
    }

private:
    std::mutex owner_;  // held by the call that uses the pool
    std::mutex mutex_;  // of wake_
    std::condition_variable wake_;
    std::atomic<int> num_sleeping_{0};
    int num_started_ = 0;
    uint32_t job_ = 0;
    std::atomic<int> num_helpers_{0};
    std::atomic<Body> body_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<int64_t> num_tasks_{0};
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> num_done_{0};
};

std::atomic<int> wanted_threads{1};

// Never deleted: its threads may outlive everything at exit. A forked child has none of its threads, so it gets a new
// one.
Pool* the_pool = nullptr;

void make_pool() { the_pool = new Pool; }

void forget_pool_in_child() {
    make_pool();
    Pool::inside_task() = false;
}

Pool& pool() {
    static const bool is_made = [] {
        make_pool();
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(nullptr, nullptr, forget_pool_in_child);
#endif
        return true;
    }();
    (void)is_made;
    return *the_pool;
}

struct Buffer {
    void* data = nullptr;
    size_t num_bytes = 0;
    ~Buffer() { std::free(data); }
};

}  // namespace

void set_num_threads(int num_threads) { wanted_threads.store(num_threads < 1 ? 1 : num_threads); }

int num_threads() { return wanted_threads.load(std::memory_order_relaxed); }

void run_tasks(int64_t num_tasks, Body body, void* context) {
    const int threads = num_threads();
    if (num_tasks > 1 && threads > 1 && !Pool::inside_task() && num_tasks < static_cast<int64_t>(kTaskMask)) {
        Pool& shared = pool();
        std::unique_lock<std::mutex> lock(shared.owner(), std::try_to_lock);
        if (lock.owns_lock()) {
            Pool::inside_task() = true;
            shared.run(num_tasks, body, context, threads);
            Pool::inside_task() = false;
            return;
        }
    }
    for (int64_t task = 0; task < num_tasks; ++task) {
        body(context, task);
    }
}

void* scratch(int slot, size_t num_bytes) {
    static thread_local Buffer buffers[kNumScratchSlots];
    Buffer& buffer = buffers[slot];
    if (buffer.num_bytes < num_bytes) {
        std::free(buffer.data);
        const size_t rounded = (num_bytes + num_bytes / 4 + 4095) & ~size_t{4095};
        buffer.data = std::aligned_alloc(64, rounded);
        buffer.num_bytes = buffer.data == nullptr ? 0 : rounded;
    }
    return buffer.data;
}

}  // namespace triptych
