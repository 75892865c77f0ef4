// Threads for one pass at a time. Between passes they sleep; inside one they wait for each other by spinning, since a
// pass has hundreds of short steps and a sleep costs more than a step.
#pragma once

#include <stdint.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

class Pool {
  public:
    static Pool &get();

    // Threads that work on a pass, the caller's own included.
    void resize(int count);
    int size() const { return size_; }

    // Runs job() on every thread and returns when all are through. One job at a time; others wait their turn.
    template <class Job> void run(const Job &job) {
        std::lock_guard<std::mutex> turn(turn_);
        start([](const void *context) { (*static_cast<const Job *>(context))(); }, &job);
    }

    // Inside a job, called by all its threads alike: item(0) to item(count - 1), each by one of them. Returns when all are
    // done. A thread goes through a stretch of its own, since neighbouring items read neighbouring memory; whoever is
    // through helps the others.
    template <class Item> void share(int count, const Item &item) {
        for (int turn = 0, whose = number_; turn < size_; turn++, whose = whose + 1 < size_ ? whose + 1 : 0) {
            const int first = int(int64_t(count) * whose / size_), last = int(int64_t(count) * (whose + 1) / size_);
            std::atomic<int> &next = stretches_[size_t(whose)].next;
            for (int at = first + next.fetch_add(1, std::memory_order_relaxed); at < last;
                 at = first + next.fetch_add(1, std::memory_order_relaxed))
                item(at);
        }
        meet();
    }

  private:
    using Call = void (*)(const void *);
    struct alignas(64) Stretch {
        std::atomic<int> next{0};  // items of it that were taken
    };

    void start(Call call, const void *context);
    void meet();
    void work(int number, unsigned seen);
    void launch();
    void stop();
    void leave_a_fork();

    std::mutex turn_, sleep_;
    std::condition_variable wake_;
    std::vector<std::thread> threads_;
    std::vector<Stretch> stretches_ = std::vector<Stretch>(1);
    static thread_local int number_;  // of this thread in the pool; the caller of `run` is 0
    int size_ = 1;
    int owner_ = 0;  // process id: threads do not follow into a fork
    Call call_ = nullptr;
    const void *context_ = nullptr;
    bool ends_ = false;
    alignas(64) std::atomic<unsigned> job_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> round_{0};
    alignas(64) std::atomic<int> finished_{0};
};
