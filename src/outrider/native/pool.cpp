#include "pool.h"

#include <unistd.h>

namespace {

constexpr int SPINS_IN_A_PASS = 4000;   // before the core is offered to others: somebody else may need it to go on
constexpr int SPINS_AFTER_A_PASS = 20000;  // some 50 us: the next token's pass often follows at once

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

Pool &Pool::get() {
    static Pool *pool = new Pool;  // never destroyed: threads may still wait in it when the process ends
    return *pool;
}

void Pool::resize(int count) {
    std::lock_guard<std::mutex> turn(turn_);
    leave_a_fork();
    if (count == size_ && int(threads_.size()) == count - 1) return;
    stop();
    size_ = count;
    stretches_ = std::vector<Stretch>(size_t(count));
    launch();
}

void Pool::launch() {
    owner_ = getpid();
    for (int number = 1; number < size_; number++) threads_.emplace_back(&Pool::work, this, number, job_.load());
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

// In a child process the threads are gone, whatever the list says: start anew with as many.
void Pool::leave_a_fork() {
    if (owner_ == 0 || owner_ == getpid()) return;
    new std::vector<std::thread>(std::move(threads_));  // left alone: there is nothing to join or detach
    threads_.clear();
    arrived_ = finished_ = 0;
    for (Stretch &stretch : stretches_) stretch.next = 0;
    launch();
}

void Pool::start(Call call, const void *context) {
    leave_a_fork();
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
        for (int spins = 0; spins < SPINS_AFTER_A_PASS && job_.load(std::memory_order_acquire) == seen; spins++) relax();
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
