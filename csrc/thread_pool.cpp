#include "thread_pool.h"

#include <signal.h>
#include <unistd.h>

#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

#include "clock.h"

namespace neo {
namespace {

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool pin([[maybe_unused]] std::thread& thread, [[maybe_unused]] int cpu) {
#ifdef __linux__
  if (cpu < 0 || cpu >= CPU_SETSIZE) return false;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set) == 0;
#else
  return false;
#endif
}

// Workers never take the process's signals: Python's handlers belong to the main thread.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &old_, nullptr); }

 private:
  sigset_t old_;
};

}  // namespace

Submission::Submission(std::unique_ptr<Work> work)
    : work_(std::move(work)),
      num_tasks_(work_->share_begin(work_->num_shares())),
      cursors_(num_tasks_ == 0 ? 1 : static_cast<size_t>(work_->num_shares())),
      remaining_(num_tasks_ == 0 ? 1 : num_tasks_) {
  if (num_tasks_ == 0) {  // one task that does nothing, so that it too ends in its turn
    cursors_[0].end = 1;
    return;
  }
  for (int32_t i = 0; i < work_->num_shares(); ++i) {
    cursors_[i].next.store(work_->share_begin(i), std::memory_order_relaxed);
    cursors_[i].end = work_->share_begin(i + 1);
  }
}

bool Submission::run_tasks(int32_t worker, AlignedBuffer& scratch) {
  const int32_t shares = static_cast<int32_t>(cursors_.size());
  int64_t unset = 0;
  start_ns_.compare_exchange_strong(unset, steady_ns(), std::memory_order_relaxed);
  bool ran_last = false;
  for (int32_t i = 0; i < shares; ++i) {
    Cursor& cursor = cursors_[(worker + i) % shares];
    while (cursor.next.load(std::memory_order_relaxed) < cursor.end) {
      const int32_t task = cursor.next.fetch_add(1, std::memory_order_relaxed);
      if (task >= cursor.end) break;
      try {
        if (task < num_tasks_) work_->run(task, scratch);
      } catch (const std::bad_alloc&) {
        failed_.store(true, std::memory_order_relaxed);
      }
      ran_last = remaining_.fetch_sub(1, std::memory_order_acq_rel) == 1;
    }
  }
  return ran_last;
}

ThreadPool::ThreadPool(int32_t num_threads, std::vector<int> cpus, bool participate, int64_t spin_ns)
    : num_threads_(num_threads), participate_(participate), spin_ns_(spin_ns), owner_pid_(getpid()) {
  const BlockSignals guard;
  try {
    for (int32_t i = 0; i < num_threads; ++i) {
      threads_.emplace_back([this, i] { work_loop(i); });
#ifdef __linux__
      pthread_setname_np(threads_.back().native_handle(), ("neo-worker-" + std::to_string(i)).substr(0, 15).c_str());
#endif
      if (cpus.empty()) continue;
      const int cpu = cpus[static_cast<size_t>(i) % cpus.size()];
      if (!pin(threads_.back(), cpu)) pin_failures_.push_back(cpu);
    }
  } catch (...) {  // the system gave fewer threads than asked for
    close();
    throw;
  }
}

ThreadPool::~ThreadPool() { close(); }

bool ThreadPool::is_foreign() const { return getpid() != owner_pid_; }

std::shared_ptr<Submission> ThreadPool::submit(std::unique_ptr<Work> work) {
  if (is_foreign()) throw std::runtime_error("this WorkerPool was created before a fork: create one in this process");
  auto submission = std::make_shared<Submission>(std::move(work));
  if (num_threads_ == 0) {
    const std::lock_guard<std::mutex> lock(caller_mutex_);
    if (closed_) throw std::runtime_error("submit on a closed WorkerPool");
    submission->run_tasks(0, caller_scratch_);
    submission->end_ns_ = steady_ns();
    submission->done_.store(true, std::memory_order_release);
    return submission;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) throw std::runtime_error("submit on a closed WorkerPool");
    if (submission->num_tasks_ == 0 && queue_.empty()) {  // nothing to do, and its turn is now: wake nobody
      submission->end_ns_ = steady_ns();
      submission->start_ns_.store(submission->end_ns_, std::memory_order_relaxed);
      submission->done_.store(true, std::memory_order_release);
      return submission;
    }
    queue_.push_back(submission);
    if (queue_.size() > 1) return submission;
    epoch_.fetch_add(1, std::memory_order_release);
  }
  work_ready_.notify_all();
  return submission;
}

template <typename Ready>
bool ThreadPool::spin(Ready is_ready) const {
  const int64_t deadline = steady_ns() + spin_ns_;
  do {
    for (int i = 0; i < 16; ++i) {
      if (is_ready()) return true;
      relax();
    }
  } while (steady_ns() < deadline);
  return is_ready();
}

// The submission at the front if this thread has not been on it yet; sleeps for one; null = the pool is ending.
std::shared_ptr<Submission> ThreadPool::next_submission(uint64_t& seen) {
  const auto is_ready = [&] { return epoch_.load(std::memory_order_acquire) != seen || stop_.load(); };
  spin(is_ready);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    work_ready_.wait(lock, is_ready);
    seen = epoch_.load(std::memory_order_relaxed);
    if (!queue_.empty()) return queue_.front();
    if (stop_) return nullptr;
  }
}

void ThreadPool::work_loop(int32_t worker) {
  AlignedBuffer scratch;
  uint64_t seen = 0;
  while (const std::shared_ptr<Submission> submission = next_submission(seen)) {
    if (submission->run_tasks(worker, scratch)) finish(*submission);
  }
}

void ThreadPool::finish(Submission& submission) {
  submission.end_ns_ = steady_ns();
  bool has_more;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.pop_front();
    has_more = !queue_.empty();
    if (has_more) epoch_.fetch_add(1, std::memory_order_release);
    submission.done_.store(true, std::memory_order_release);
  }
  if (has_more) work_ready_.notify_all();
  work_done_.notify_all();
}

void ThreadPool::wait(Submission& submission) {
  if (submission.is_done() || is_foreign()) return;
  if (participate_) {
    const std::unique_lock<std::mutex> helper(caller_mutex_, std::try_to_lock);
    if (helper.owns_lock()) return help_until_done(submission);
  }
  if (spin([&] { return submission.is_done(); })) return;
  std::unique_lock<std::mutex> lock(mutex_);
  work_done_.wait(lock, [&] { return submission.is_done(); });
}

void ThreadPool::help_until_done(Submission& submission) {
  uint64_t seen = 0;
  while (!submission.is_done()) {
    std::shared_ptr<Submission> current;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      seen = epoch_.load(std::memory_order_relaxed);
      if (!queue_.empty()) current = queue_.front();
    }
    if (current && current->run_tasks(num_threads_, caller_scratch_)) finish(*current);
    const auto is_ready = [&] { return submission.is_done() || epoch_.load(std::memory_order_acquire) != seen; };
    if (spin(is_ready)) continue;
    std::unique_lock<std::mutex> lock(mutex_);
    work_done_.wait(lock, is_ready);  // every change of the front but the first is announced here too
  }
}

void ThreadPool::close() {
  if (is_foreign()) return;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    closed_ = true;
    if (threads_.empty()) return;
    work_done_.wait(lock, [&] { return queue_.empty(); });
    stop_ = true;
  }
  work_ready_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace neo
