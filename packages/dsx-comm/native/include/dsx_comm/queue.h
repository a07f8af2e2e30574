// Calls of one group in order of issue. A synchronous call runs in its caller's thread; an asynchronous one in a thread
// that is started on first use, or in the thread that waits for it, whichever comes first.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

namespace dsx {

struct Item {
    std::function<void()> run;
    bool done = false;  // guarded by the queue's lock
    std::exception_ptr error;
};
using ItemPtr = std::shared_ptr<Item>;

class Queue {
  public:
    ItemPtr submit(std::function<void()> run) {
        auto item = std::make_shared<Item>();
        item->run = std::move(run);
        {
            std::lock_guard<std::mutex> hold(lock_);
            items_.push_back(item);
        }
        changed_.notify_all();
        return item;
    }

    void run_now(const std::function<void()>& run) {
        {
            std::unique_lock<std::mutex> hold(lock_);
            if (!items_.empty() || busy_) {
                hold.unlock();
                return wait(submit(run));
            }
            busy_ = true;
        }
        Release release{*this};
        run();
    }

    // `look` is called now and then; what it throws ends the wait, not the item.
    void wait(const ItemPtr& item, const std::function<void()>& look = [] {}) {
        std::unique_lock<std::mutex> hold(lock_);
        while (!item->done) {
            if (!busy_ && !items_.empty()) {
                run_first(hold);
            } else if (changed_.wait_for(hold, std::chrono::milliseconds(100)) == std::cv_status::timeout) {
                hold.unlock();
                look();
                hold.lock();
            }
        }
        if (item->error) std::rethrow_exception(item->error);
    }

    bool finished(const ItemPtr& item) {
        std::unique_lock<std::mutex> hold(lock_);
        if (item->done && item->error) std::rethrow_exception(item->error);
        return item->done;
    }

    void serve() {  // body of the thread
        std::unique_lock<std::mutex> hold(lock_);
        for (;;) {
            changed_.wait(hold, [&] { return stop_ || (!busy_ && !items_.empty()); });
            if (stop_) return;
            run_first(hold);
        }
    }

    bool wants_thread() {
        std::lock_guard<std::mutex> hold(lock_);
        return thread_ ? false : (thread_ = true);
    }

    void thread_is_missing() {  // it could not be started: the next call tries again
        std::lock_guard<std::mutex> hold(lock_);
        thread_ = false;
    }

    void stop() {
        {
            std::lock_guard<std::mutex> hold(lock_);
            stop_ = true;
        }
        changed_.notify_all();
    }

  private:
    struct Release {
        Queue& q;
        ~Release() {
            bool others;
            {
                std::lock_guard<std::mutex> hold(q.lock_);
                q.busy_ = false;
                others = !q.items_.empty();
            }
            if (others) q.changed_.notify_all();
        }
    };

    void run_first(std::unique_lock<std::mutex>& hold) {
        ItemPtr item = items_.front();
        items_.pop_front();
        busy_ = true;
        hold.unlock();
        std::exception_ptr error;
        try {
            item->run();
        } catch (...) { error = std::current_exception(); }
        item->run = nullptr;
        hold.lock();
        item->error = error;
        item->done = true;
        busy_ = false;
        changed_.notify_all();
    }

    std::mutex lock_;
    std::condition_variable changed_;
    std::deque<ItemPtr> items_;
    bool busy_ = false, thread_ = false, stop_ = false;
};

}  // namespace dsx
