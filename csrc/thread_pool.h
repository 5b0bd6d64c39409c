// Persistent worker threads that run submissions one after the other (FIFO), off the Python threads and off OpenMP.
//
//   caller     submit A   submit B      ...linear stage...      wait(B)
//   worker 0        |--A: share 0--|-B: share 0-|       spin, then sleep
//   worker 1        |--A: share 1----|-B: share 1-|     (B starts when all of A is done)
//
// Submit and wait may be called from any thread; the usual case is one thread doing both. Nothing here knows Python.
#ifndef NEO_COMPILE_CSRC_THREAD_POOL_H_
#define NEO_COMPILE_CSRC_THREAD_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "aligned_buffer.h"
#include "work.h"

namespace neo {

class Submission {
 public:
  explicit Submission(std::unique_ptr<Work> work);

  bool is_done() const { return done_.load(std::memory_order_acquire); }
  bool has_failed() const { return failed_.load(std::memory_order_relaxed); }
  int64_t start_ns() const { return start_ns_.load(std::memory_order_relaxed); }  // first task began; 0 = not yet
  int64_t end_ns() const { return end_ns_; }                                      // last task ended; valid once done

 private:
  friend class ThreadPool;
  struct alignas(64) Cursor {
    std::atomic<int32_t> next{0};
    int32_t end = 0;
  };

  // Runs tasks until none is left to take, own share first. True if this call ran the very last task.
  bool run_tasks(int32_t worker, AlignedBuffer& scratch);

  const std::unique_ptr<Work> work_;
  const int32_t num_tasks_;
  std::vector<Cursor> cursors_;
  std::atomic<int32_t> remaining_;
  std::atomic<int64_t> start_ns_{0};
  int64_t end_ns_ = 0;
  std::atomic<bool> failed_{false};  // a task ran out of memory
  std::atomic<bool> done_{false};
};

class ThreadPool {
 public:
  // cpus empty: not pinned; otherwise worker i is pinned to cpus[i % size] where the system lets us (see pin_failures).
  // num_threads = 0: submit runs the work itself. participate: a waiting caller takes tasks too.
  ThreadPool(int32_t num_threads, std::vector<int> cpus, bool participate, int64_t spin_ns);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::shared_ptr<Submission> submit(std::unique_ptr<Work> work);  // throws std::runtime_error once closed or forked
  void wait(Submission& submission);
  void close();  // runs what is queued, then ends the threads; idempotent

  int32_t num_threads() const { return num_threads_; }
  int32_t parallelism() const { return num_threads_ == 0 ? 1 : num_threads_ + (participate_ ? 1 : 0); }
  const std::vector<int>& pin_failures() const { return pin_failures_; }
  bool is_closed() const { return closed_; }
  bool is_foreign() const;  // we are in a forked child: the threads live in the parent

 private:
  void work_loop(int32_t worker);
  std::shared_ptr<Submission> next_submission(uint64_t& seen);
  void finish(Submission& submission);
  void help_until_done(Submission& submission);
  template <typename Ready>
  bool spin(Ready is_ready) const;

  const int32_t num_threads_;
  const bool participate_;
  const int64_t spin_ns_;
  const int owner_pid_;
  std::vector<int> pin_failures_;
  std::vector<std::thread> threads_;

  std::mutex mutex_;
  std::condition_variable work_ready_, work_done_;
  std::deque<std::shared_ptr<Submission>> queue_;  // front = the one running
  std::atomic<uint64_t> epoch_{0};                 // counts submissions that came to the front
  std::atomic<bool> closed_{false}, stop_{false};

  std::mutex caller_mutex_;  // one helping caller at a time
  AlignedBuffer caller_scratch_;
};

}  // namespace neo

#endif  // NEO_COMPILE_CSRC_THREAD_POOL_H_
