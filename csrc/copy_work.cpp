#include "copy_work.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "clock.h"

namespace neo {
namespace {

constexpr int64_t kTaskBytes = 256 * 1024;       // big enough to stream, small enough to balance and throttle
constexpr int64_t kReadTaskBytes = 1024 * 1024;  // of all streams
constexpr int64_t kPageBytes = 4096;
constexpr int64_t kHugePageBytes = 2 * 1024 * 1024;
constexpr int64_t kStepBytes = 128;  // of one stream at a time

int32_t even_share(int32_t tasks, int32_t shares, int32_t share) {
  return static_cast<int32_t>(static_cast<int64_t>(tasks) * share / shares);
}

}  // namespace

CopyWork::CopyWork(const char* src, char* dst, int64_t block_bytes, std::shared_ptr<const BlockPairs> pairs,
                   double max_gbps, int32_t num_shares)
    : src_(src),
      dst_(dst),
      block_bytes_(block_bytes),
      pairs_(std::move(pairs)),
      max_gbps_(max_gbps),
      num_shares_(std::max(1, num_shares)),
      pairs_per_task_(std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, block_bytes))),
      num_tasks_(static_cast<int32_t>((static_cast<int64_t>(pairs_->size()) + pairs_per_task_ - 1) / pairs_per_task_)) {
}

int32_t CopyWork::share_begin(int32_t share) const { return even_share(num_tasks_, num_shares_, share); }

void CopyWork::run(int32_t task, AlignedBuffer&) {
  int64_t unset = 0;
  start_ns_.compare_exchange_strong(unset, steady_ns());
  const int64_t begin = task * pairs_per_task_;
  const int64_t end = std::min<int64_t>(begin + pairs_per_task_, static_cast<int64_t>(pairs_->size()));
  for (int64_t i = begin; i < end; ++i)
    std::memcpy(dst_ + (*pairs_)[i].second * block_bytes_, src_ + (*pairs_)[i].first * block_bytes_,
                static_cast<size_t>(block_bytes_));
  if (max_gbps_ <= 0) return;
  const int64_t copied = copied_bytes_.fetch_add((end - begin) * block_bytes_) + (end - begin) * block_bytes_;
  const int64_t due_ns = start_ns_.load() + static_cast<int64_t>(static_cast<double>(copied) / max_gbps_);
  const int64_t early_ns = due_ns - steady_ns();
  if (early_ns > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(early_ns));
}

ReadWork::ReadWork(const char* data, int64_t bytes, int32_t streams, int32_t num_shares)
    : data_(data),
      streams_(streams),
      stream_bytes_(bytes / streams / kStepBytes * kStepBytes),
      num_shares_(std::max(1, num_shares)),
      num_tasks_(static_cast<int32_t>((stream_bytes_ * streams + kReadTaskBytes - 1) / kReadTaskBytes)) {}

int32_t ReadWork::share_begin(int32_t share) const { return even_share(num_tasks_, num_shares_, share); }

void ReadWork::run(int32_t task, AlignedBuffer&) {
  constexpr int kLanes = kStepBytes / 8;
  uint64_t lane[kLanes] = {};
  const int64_t task_bytes = kReadTaskBytes / streams_ / kStepBytes * kStepBytes;
  const int64_t begin = task * task_bytes;
  const int64_t end = std::min(begin + task_bytes, stream_bytes_);
  for (int64_t i = begin; i < end; i += kStepBytes) {
    for (int32_t s = 0; s < streams_; ++s) {
      uint64_t words[kLanes];
      std::memcpy(words, data_ + s * stream_bytes_ + i, sizeof(words));
      for (int j = 0; j < kLanes; ++j) lane[j] += words[j];
    }
  }
  uint64_t sum = 0;
  for (const uint64_t part : lane) sum += part;
  sum_.fetch_add(sum, std::memory_order_relaxed);
}

FirstTouchWork::FirstTouchWork(char* data, int64_t bytes, int32_t num_shares)
    : data_(data),
      bytes_(bytes),
      num_shares_(std::max(1, num_shares)),
      num_chunks_(static_cast<int32_t>((bytes + kHugePageBytes - 1) / kHugePageBytes)) {}

int32_t FirstTouchWork::share_begin(int32_t share) const {
  return share * (num_chunks_ / num_shares_) + std::min(share, num_chunks_ % num_shares_);
}

void FirstTouchWork::run(int32_t task, AlignedBuffer&) {
  // A share's tasks are the chunks that come round to it: share 0 of 2 has the chunks 0, 2, 4, ...
  int32_t share = 0;
  while (share + 1 < num_shares_ && task >= share_begin(share + 1)) ++share;
  const int64_t chunk = share + static_cast<int64_t>(task - share_begin(share)) * num_shares_;
  const int64_t end = std::min((chunk + 1) * kHugePageBytes, bytes_);
  for (int64_t i = chunk * kHugePageBytes; i < end; i += kPageBytes) data_[i] = 0;
}

}  // namespace neo
