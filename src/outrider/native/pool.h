// Threads for one pass at a time. Between passes they sleep; inside one they wait for each other by spinning, since a
// pass has hundreds of short steps and a sleep costs more than a step.
#pragma once

#include <limits.h>
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
    int size() const { return size_.load(std::memory_order_relaxed); }
    static int number() { return number_; }  // of this thread in the pool; the caller of `run` is 0

    // Runs job() on every thread and returns when all are through. One job at a time; others wait their turn. False: the
    // pool has grown beyond the threads that the job was prepared for, and nothing was done.
    template <class Job> bool run(const Job &job, int prepared_for = INT_MAX) {
        std::lock_guard<std::mutex> turn(turn_);
        if (size() > prepared_for) return false;
        start([](const void *context) { (*static_cast<const Job *>(context))(); }, &job);
        return true;
    }

    // Inside a job, called by all its threads alike: item(0) to item(count - 1), each by one of them. Returns when all are
    // done. A thread goes through a stretch of its own, since neighbouring items read neighbouring memory; whoever is
    // through helps the others.
    template <class Item> void share(int count, const Item &item) {
        const int size = this->size();
        for (int turn = 0, whose = number_; turn < size; turn++, whose = whose + 1 < size ? whose + 1 : 0) {
            const int first = int(int64_t(count) * whose / size), last = int(int64_t(count) * (whose + 1) / size);
            std::atomic<int> &next = stretches_[size_t(whose)].next;
            if (next.load(std::memory_order_relaxed) >= last - first) continue;  // writing would cost the others more
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

    std::mutex turn_, sleep_;
    std::condition_variable wake_;
    std::vector<std::thread> threads_;
    std::vector<Stretch> stretches_ = std::vector<Stretch>(1);
    static thread_local int number_;
    std::atomic<int> size_{1};
    Call call_ = nullptr;
    const void *context_ = nullptr;
    bool ends_ = false;
    alignas(64) std::atomic<unsigned> job_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> round_{0};
    alignas(64) std::atomic<int> finished_{0};
};
