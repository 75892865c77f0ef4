// Threads for one pass at a time. Between passes they sleep; inside one they wait for each other by spinning, since a
// pass has hundreds of short steps and a sleep costs more than a step.
#pragma once

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

    // Inside a job, called by all its threads alike: item(0) to item(count - 1), whoever is free takes the next. Returns
    // when all are done.
    template <class Item> void share(int count, const Item &item) {
        for (int at = next_.fetch_add(1, std::memory_order_relaxed); at < count;
             at = next_.fetch_add(1, std::memory_order_relaxed))
            item(at);
        meet();
    }

  private:
    using Call = void (*)(const void *);

    void start(Call call, const void *context);
    void meet();
    void work(unsigned seen);
    void stop();
    void leave_a_fork();

    std::mutex turn_, sleep_;
    std::condition_variable wake_;
    std::vector<std::thread> threads_;
    int size_ = 1;
    int owner_ = 0;  // process id: threads do not follow into a fork
    Call call_ = nullptr;
    const void *context_ = nullptr;
    bool ends_ = false;
    alignas(64) std::atomic<unsigned> job_{0};
    alignas(64) std::atomic<int> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> round_{0};
    alignas(64) std::atomic<int> finished_{0};
};
