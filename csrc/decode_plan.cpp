#include "decode_plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernel.h"

namespace neo {
namespace {

std::string text(int64_t value) { return std::to_string(value); }

}  // namespace

DecodePlan::DecodePlan(const int32_t* block_tables, int64_t table_stride, int32_t max_blocks,
                       const int32_t* context_lens, int32_t num_requests, const AttentionShape& shape,
                       int32_t max_shares, int64_t min_share_bytes)
    : shape_(shape),
      max_blocks_(max_blocks),
      max_shares_(max_shares),
      context_lens_(context_lens, context_lens + num_requests),
      finished_(new std::atomic<int32_t>[static_cast<size_t>(num_requests)]()) {
  const int64_t capacity = static_cast<int64_t>(max_blocks) * shape.block_size;
  for (int32_t r = 0; r < num_requests; ++r) {
    const int32_t length = context_lens_[r];
    if (length < 0) throw std::invalid_argument("context_lens[" + text(r) + "] = " + text(length) + " is negative");
    if (length > capacity)
      throw std::invalid_argument("context_lens[" + text(r) + "] = " + text(length) + " exceeds its block table: " +
                                  text(max_blocks) + " blocks of " + text(shape.block_size) + " tokens");
  }
  // The table as given may be wider than any request needs; entries past a request's length are copied, never used.
  tables_.resize(static_cast<size_t>(num_requests) * static_cast<size_t>(max_blocks));
  for (int32_t r = 0; r < num_requests; ++r)
    std::copy_n(block_tables + r * table_stride, max_blocks, tables_.data() + static_cast<int64_t>(r) * max_blocks);
  // Halves assumed: a threshold, not an accounting.
  const int64_t block_bytes =
      2LL * shape.num_kv_heads * shape.block_size * (static_cast<int64_t>(shape.head_dim_k) + shape.head_dim_v);
  min_share_blocks_ = std::max<int64_t>(1, min_share_bytes / block_bytes);
}

const WindowPlan& DecodePlan::window_plan(int64_t window) {
  const auto found = windows_.find(window);
  if (found != windows_.end()) return found->second;
  WindowPlan plan;
  plan.partition = make_partition(context_lens_, shape_.block_size, window, max_shares_, min_share_blocks_);
  int32_t low = std::numeric_limits<int32_t>::max();
  int32_t high = std::numeric_limits<int32_t>::min();
  for (const Task& task : plan.partition.tasks) {
    if (task.token_begin == task.token_end) continue;
    const int32_t* table = block_table(task.request);
    const auto range = std::minmax_element(table + task.token_begin / shape_.block_size,
                                           table + (task.token_end - 1) / shape_.block_size + 1);
    low = std::min(low, *range.first);
    high = std::max(high, *range.second);
  }
  if (low <= high) {
    plan.min_block = low;
    plan.max_block = high;
  }
  // Partials of another window may be in flight: the buffer is sized once for all windows, by the bound of the
  // partition.
  workspace_.reserve(2LL * max_shares_ * partial_floats());
  return windows_.emplace(window, std::move(plan)).first->second;
}

void DecodePlan::check_blocks(const WindowPlan& plan, int64_t window, int64_t num_blocks) const {
  if (plan.min_block >= 0 && plan.max_block < num_blocks) return;
  for (const Task& task : plan.partition.tasks) {
    for (int32_t i = task.token_begin / shape_.block_size; i * static_cast<int64_t>(shape_.block_size) < task.token_end;
         ++i) {
      const int32_t block = block_table(task.request)[i];
      if (block < 0 || block >= num_blocks)
        throw std::invalid_argument("block_tables[" + text(task.request) + ", " + text(i) + "] = " + text(block) +
                                    " is not a block of this layer: it has " + text(num_blocks) + " blocks" +
                                    (window > 0 ? " (window " + text(window) + ")" : ""));
    }
  }
}

void DecodePlan::check_append() {
  if (append_checked_) return;
  std::vector<std::pair<int64_t, int32_t>> slots;
  for (int32_t r = 0; r < num_requests(); ++r) {
    if (context_lens_[r] == 0) continue;
    const int32_t last = context_lens_[r] - 1;
    slots.emplace_back(
        static_cast<int64_t>(block_table(r)[last / shape_.block_size]) * shape_.block_size + last % shape_.block_size,
        r);
  }
  std::sort(slots.begin(), slots.end());
  for (size_t i = 1; i < slots.size(); ++i)
    if (slots[i].first == slots[i - 1].first)
      throw std::invalid_argument("requests " + text(slots[i - 1].second) + " and " + text(slots[i].second) +
                                  " would both append to slot " + text(slots[i].first));
  append_checked_ = true;
}

int64_t DecodePlan::partial_floats() const {
  const int64_t heads = shape_.num_q_heads;
  return (heads * neo_padded(shape_.head_dim_v) + 2 * heads + 15) / 16 * 16;
}

bool DecodePlan::bind(const void* pool) {
  if (pool_ == nullptr) pool_ = pool;
  return pool_ == pool;
}

void DecodePlan::poison_workspace() {
  std::fill_n(workspace_.data(), workspace_.size(), std::numeric_limits<float>::quiet_NaN());
}

}  // namespace neo
