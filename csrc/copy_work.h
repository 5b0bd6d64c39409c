// Memory work besides attention: block copies between pools (swaps), and reads that measure bandwidth.
#ifndef NEO_COMPILE_CSRC_COPY_WORK_H_
#define NEO_COMPILE_CSRC_COPY_WORK_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "work.h"

namespace neo {

// (source block, target block) of each copy; the same in every layer.
using BlockPairs = std::vector<std::pair<int64_t, int64_t>>;

// Copies src block -> dst block for each pair. With max_gbps > 0 a task starts to wait once the whole copy runs ahead
// of that rate: the emulation of a link.
class CopyWork : public Work {
 public:
  CopyWork(const char* src, char* dst, int64_t block_bytes, std::shared_ptr<const BlockPairs> pairs, double max_gbps,
           int32_t num_shares);

  int32_t num_shares() const override { return num_shares_; }
  int32_t share_begin(int32_t share) const override;
  void run(int32_t task, AlignedBuffer& scratch) override;

 private:
  const char* src_;
  char* dst_;
  const int64_t block_bytes_;
  const std::shared_ptr<const BlockPairs> pairs_;
  const double max_gbps_;
  const int32_t num_shares_;
  int64_t pairs_per_task_;
  int32_t num_tasks_;
  std::atomic<int64_t> start_ns_{0};
  std::atomic<int64_t> copied_bytes_{0};
};

// Reads a buffer once: end_ns - start_ns gives the read bandwidth that attention competes with. The buffer is cut into
// `streams` equal parts, which every thread walks side by side (one after the other would leave most of a core's
// outstanding misses unused, as the hardware prefetches each stream by itself):
//
//   part    |------ 0 ------|------ 1 ------|        2 streams
//   thread  | A A A | B B B | A A A | B B B |        each reads 128 bytes of part 0, then of part 1, ...
//
// What does not fill whole steps of 128 bytes in every part is left out at the end.
class ReadWork : public Work {
 public:
  ReadWork(const char* data, int64_t bytes, int32_t streams, int32_t num_shares);

  int32_t num_shares() const override { return num_shares_; }
  int32_t share_begin(int32_t share) const override;
  void run(int32_t task, AlignedBuffer& scratch) override;

 private:
  const char* data_;
  const int32_t streams_;
  const int64_t stream_bytes_;
  const int32_t num_shares_;
  int32_t num_tasks_;
  std::atomic<uint64_t> sum_{0};  // keeps the reads alive
};

// Writes one zero byte to every page of fresh memory, huge page by huge page in turn: Linux gives a page to the node of
// the thread that writes it first, so the buffer lies on the workers' nodes, in proportion to their numbers.
class FirstTouchWork : public Work {
 public:
  FirstTouchWork(char* data, int64_t bytes, int32_t num_shares);

  int32_t num_shares() const override { return num_shares_; }
  int32_t share_begin(int32_t share) const override;
  void run(int32_t task, AlignedBuffer& scratch) override;

 private:
  char* data_;
  const int64_t bytes_;
  const int32_t num_shares_;
  const int32_t num_chunks_;
};

}  // namespace neo

#endif  // NEO_COMPILE_CSRC_COPY_WORK_H_
