// Flash-decoding partition: the blocks of all requests, laid end to end, are cut into equal shares at block boundaries.
//
//   request   0            1        2               3
//   blocks    |----------|------|--------------|---------|
//   shares    |       0       |       1       |      2    |      one share per participating thread
//   tasks     |----0-----|-1--|2-|-----3------|-4|---5----|      cut at both; at most requests + shares of them
//
// A request that lies in one task is written by that task; one that is cut leaves partials, and whoever finishes its
// last one merges them by log-sum-exp.
#ifndef NEO_COMPILE_CSRC_PARTITION_H_
#define NEO_COMPILE_CSRC_PARTITION_H_

#include <cstdint>
#include <vector>

namespace neo {

struct Task {
  int32_t request;
  int32_t token_begin, token_end;  // the last task of a request ends at its context length
  int32_t partial;                 // index of its workspace partial, or -1: the whole request
};

struct Partition {
  std::vector<Task> tasks;
  std::vector<int32_t> share_begin;    // [shares + 1] into tasks
  std::vector<int32_t> first_partial;  // [requests], -1 for a request in one task
  std::vector<int32_t> num_partials;   // [requests], 0 for a request in one task
  int32_t total_partials = 0;

  int32_t num_shares() const { return static_cast<int32_t>(share_begin.size()) - 1; }
};

// window <= 0: none; otherwise only the last `window` tokens of each request. A request of length 0 gets one empty task
// (somebody must write its zeros). No share gets fewer than min_share_blocks, so small work wakes few threads.
Partition make_partition(const std::vector<int32_t>& context_lens, int32_t block_size, int64_t window,
                         int32_t max_shares, int64_t min_share_blocks);

}  // namespace neo

#endif  // NEO_COMPILE_CSRC_PARTITION_H_
