// One sub-batch's attention, planned once per iteration and run once per layer: its own copy of the block tables, the
// query tokens in tiles, a partition per sliding window met (layers may differ), and the workspace for partials.
#ifndef NEO_COMPILE_CSRC_ATTENTION_PLAN_H_
#define NEO_COMPILE_CSRC_ATTENTION_PLAN_H_

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
  int64_t window = 0;
  Partition partition;
  int32_t min_block = 0, max_block = -1;
};

class AttentionPlan {
 public:
  // block_tables: [num_requests, max_blocks], rows table_stride apart; context_lens: [num_requests], the query tokens
  // included; cu_seqlens: [num_requests + 1], request r has query rows cu_seqlens[r] to cu_seqlens[r + 1], or null: one
  // each. All are copied. Throws std::invalid_argument naming the request for a length that is negative or exceeds the
  // table, rows that do not ascend, and more query tokens than context.
  AttentionPlan(const int32_t* block_tables, int64_t table_stride, int32_t max_blocks, const int32_t* context_lens,
                const int32_t* cu_seqlens, int32_t num_requests, const AttentionShape& shape, int32_t max_shares,
                int64_t min_share_bytes);

  const AttentionShape& shape() const { return shape_; }
  const std::vector<Tile>& tiles() const { return tiles_; }
  int32_t num_tokens() const { return num_tokens_; }  // rows of q
  int32_t max_tile_tokens() const { return max_tile_tokens_; }
  // Whether some request has several query tokens, so that one task may read what another one would append.
  bool has_chunks() const { return has_chunks_; }
  const int32_t* block_table(int32_t request) const {
    return tables_.data() + static_cast<int64_t>(request) * max_blocks_;
  }

  // Built at the first call for this window. Call from the submitting thread, before the work is queued.
  const WindowPlan& window_plan(int64_t window);
  // Throws std::invalid_argument unless the window's block ids lie in [0, num_blocks), naming the offender.
  void check_blocks(const WindowPlan& plan, int64_t num_blocks) const;
  // Throws std::invalid_argument if two requests would append to the same slot.
  void check_append();

  // Workspace of one partial: acc [heads, acc_stride], then m and l, for the heads of the largest tile.
  float* partial(int32_t index) { return workspace_.data() + index * partial_floats(); }
  int64_t partial_floats() const;
  std::atomic<int32_t>& finished_partials(int32_t tile) { return finished_[tile]; }

  // The workspace serves one submission at a time, so one pool (whose submissions run one by one) at a time.
  bool bind(const void* pool);

  void poison_workspace();  // tests: fills it with NaN

 private:
  void add_tiles(int32_t request, int32_t first_row, int32_t num_tokens, int32_t context_len);

  AttentionShape shape_;
  int32_t max_blocks_;
  int32_t max_shares_;
  int64_t min_share_work_;
  int32_t num_tokens_ = 0;
  int32_t max_tile_tokens_ = 1;
  bool has_chunks_ = false;
  std::vector<int32_t> tables_;
  std::vector<Tile> tiles_;
  std::map<int64_t, WindowPlan> windows_;
  AlignedBuffer workspace_;
  std::unique_ptr<std::atomic<int32_t>[]> finished_;
  const void* pool_ = nullptr;
  bool append_checked_ = false;
};

}  // namespace neo

#endif  // NEO_COMPILE_CSRC_ATTENTION_PLAN_H_
