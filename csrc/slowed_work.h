// Work whose tasks take a multiple of their time: real work, then idleness. Plays a host with less bandwidth.
#ifndef NEO_COMPILE_CSRC_SLOWED_WORK_H_
#define NEO_COMPILE_CSRC_SLOWED_WORK_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "clock.h"
#include "work.h"

namespace neo {

// Each task is followed by (factor - 1) times its own duration in which its thread does nothing. The waiting is the
// thread's, not the submission's, so the tasks of every thread are slowed alike and the factor holds for any number of
// threads. The end of a wait is spun for: the system's sleep overshoots by more than a short task takes.
class SlowedWork : public Work {
 public:
  SlowedWork(std::unique_ptr<Work> work, double factor) : work_(std::move(work)), factor_(factor) {}

  int32_t num_shares() const override { return work_->num_shares(); }
  int32_t share_begin(int32_t share) const override { return work_->share_begin(share); }

  void run(int32_t task, AlignedBuffer& scratch) override {
    const int64_t start_ns = steady_ns();
    work_->run(task, scratch);
    const int64_t took_ns = steady_ns() - start_ns;
    const int64_t until_ns = start_ns + static_cast<int64_t>(static_cast<double>(took_ns) * factor_);
    const int64_t sleep_ns = until_ns - steady_ns() - kSleepOvershootNs;
    if (sleep_ns > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(sleep_ns));
    while (steady_ns() < until_ns) {
    }
  }

 private:
  static constexpr int64_t kSleepOvershootNs = 100'000;

  const std::unique_ptr<Work> work_;
  const double factor_;
};

}  // namespace neo

#endif  // NEO_COMPILE_CSRC_SLOWED_WORK_H_
