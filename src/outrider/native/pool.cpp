#include "pool.h"

#include <pthread.h>

#include <chrono>
#include <system_error>

namespace {

using Clock = std::chrono::steady_clock;
// Before the core is offered to others: the thread that is waited for may need it. About ten microseconds: x86 pauses for
// 140 cycles at a time, others hardly at all.
#if defined(__x86_64__) || defined(__i386__)
constexpr int SPINS_IN_A_PASS = 200;
#else
constexpr int SPINS_IN_A_PASS = 4000;
#endif
// Before a thread sleeps: the next pass follows in less, and waking takes longer than many a step of it. Whoever else needs
// the core gets it meanwhile.
constexpr std::chrono::microseconds AFTER_A_PASS(1000);
constexpr int SPINS_AFTER_A_PASS = 50;

inline void relax() {
#if defined(__aarch64__)
    __asm__ __volatile__("yield");
#elif defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

template <class Done> inline void wait_for(const Done &done) {
    for (int spins = 0; !done();) {
        if (++spins < SPINS_IN_A_PASS) relax();
        else std::this_thread::yield();
    }
}

}  // namespace

thread_local int Pool::number_ = 0;

// Never destroyed: threads may still wait in it when the process ends. A forked process has none of its threads, and locks
// may have been held at that moment, so it gets a pool of its own.
static Pool *pool = nullptr;

Pool &Pool::get() {
    static const bool once = [] {
        pool = new Pool;
        pthread_atfork(nullptr, nullptr, [] {
            const int size = pool->size();
            pool = new Pool;
            pool->size_ = size;
        });
        return true;
    }();
    (void)once;
    return *pool;
}

void Pool::resize(int count) {
    std::lock_guard<std::mutex> turn(turn_);
    if (count == size_) return;
    stop();
    size_ = count;
}

// Threads are started by the first job that needs them. Where the system allows fewer, fewer have to do.
void Pool::launch() {
    stretches_ = std::vector<Stretch>(size_t(size_));
    try {
        while (int(threads_.size()) < size_ - 1)
            threads_.emplace_back(&Pool::work, this, int(threads_.size()) + 1, job_.load());
    } catch (const std::system_error &) {
        size_ = int(threads_.size()) + 1;
    }
}

void Pool::stop() {
    {
        std::lock_guard<std::mutex> lock(sleep_);
        ends_ = true;
    }
    wake_.notify_all();
    for (std::thread &thread : threads_) thread.join();
    threads_.clear();
    ends_ = false;
}

void Pool::start(Call call, const void *context) {
    if (int(threads_.size()) != size_ - 1 || int(stretches_.size()) != size_) launch();
    number_ = 0;
    call_ = call;
    context_ = context;
    finished_.store(0, std::memory_order_relaxed);
    if (size_ > 1) {
        {
            std::lock_guard<std::mutex> lock(sleep_);
            job_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
    }
    call(context);
    wait_for([this] { return finished_.load(std::memory_order_acquire) == size_ - 1; });
}

void Pool::meet() {
    const unsigned round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        for (Stretch &stretch : stretches_) stretch.next.store(0, std::memory_order_relaxed);
        round_.store(round + 1, std::memory_order_release);
        return;
    }
    wait_for([this, round] { return round_.load(std::memory_order_acquire) != round; });
}

void Pool::work(int number, unsigned seen) {
    number_ = number;
    for (;;) {
        const auto until = Clock::now() + AFTER_A_PASS;
        for (int spins = 1; job_.load(std::memory_order_acquire) == seen; spins++) {
            if (spins % SPINS_AFTER_A_PASS) {
                relax();
                continue;
            }
            if (Clock::now() >= until) break;
            std::this_thread::yield();
        }
        if (job_.load(std::memory_order_acquire) == seen) {
            std::unique_lock<std::mutex> lock(sleep_);
            wake_.wait(lock, [&] { return ends_ || job_.load(std::memory_order_acquire) != seen; });
            if (ends_) return;
        }
        seen = job_.load(std::memory_order_acquire);
        call_(context_);
        finished_.fetch_add(1, std::memory_order_release);
    }
}
