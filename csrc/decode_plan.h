// One sub-batch's decode attention, planned once per iteration and run once per layer: its own copies of block tables
// and lengths, a partition per sliding window met (layers may differ), and the workspace for partials.
#ifndef NEO_COMPILE_CSRC_DECODE_PLAN_H_
#define NEO_COMPILE_CSRC_DECODE_PLAN_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "aligned_buffer.h"
#include "partition.h"

namespace neo {

struct AttentionShape {
  int32_t num_q_heads, num_kv_heads;
  int32_t head_dim_k, head_dim_v;
  int32_t block_size;
};

// A partition and the block ids it will touch, so that a layer's num_blocks is checked in O(1).
struct WindowPlan {
  Partition partition;
  int32_t min_block = 0, max_block = -1;
};

class DecodePlan {
 public:
  // block_tables: [num_requests, max_blocks], rows table_stride apart; both arrays are copied. Throws
  // std::invalid_argument naming the request for a length that is negative or exceeds the table.
  DecodePlan(const int32_t* block_tables, int64_t table_stride, int32_t max_blocks, const int32_t* context_lens,
             int32_t num_requests, const AttentionShape& shape, int32_t max_shares, int64_t min_share_bytes);

  const AttentionShape& shape() const { return shape_; }
  int32_t num_requests() const { return static_cast<int32_t>(context_lens_.size()); }
  int32_t context_len(int32_t request) const { return context_lens_[request]; }
  const int32_t* block_table(int32_t request) const {
    return tables_.data() + static_cast<int64_t>(request) * max_blocks_;
  }

  // Built at the first call for this window. Call from the submitting thread, before the work is queued.
  const WindowPlan& window_plan(int64_t window);
  // Throws std::invalid_argument unless the window's block ids lie in [0, num_blocks), naming the offender.
  void check_blocks(const WindowPlan& plan, int64_t window, int64_t num_blocks) const;
  // Throws std::invalid_argument if two requests would append to the same slot.
  void check_append();

  // Workspace of one partial: acc [num_q_heads, acc_stride], then m and l.
  float* partial(int32_t index) { return workspace_.data() + index * partial_floats(); }
  int64_t partial_floats() const;
  std::atomic<int32_t>& finished_partials(int32_t request) { return finished_[request]; }

  // The workspace serves one submission at a time, so one pool (whose submissions run one by one) at a time.
  bool bind(const void* pool);

  void poison_workspace();  // tests: fills it with NaN

 private:
  AttentionShape shape_;
  int32_t max_blocks_;
  int32_t max_shares_;
  int64_t min_share_blocks_;
  std::vector<int32_t> tables_;
  std::vector<int32_t> context_lens_;
  std::map<int64_t, WindowPlan> windows_;
  AlignedBuffer workspace_;
  std::unique_ptr<std::atomic<int32_t>[]> finished_;
  const void* pool_ = nullptr;
  bool append_checked_ = false;
};

}  // namespace neo

#endif  // NEO_COMPILE_CSRC_DECODE_PLAN_H_
