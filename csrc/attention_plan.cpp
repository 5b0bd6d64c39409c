#include "attention_plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernel.h"

namespace neo {
namespace {

// A tile reads its context once for all its tokens, so long tiles save reads; but q and acc of all its heads pass
// through the cache with every chunk of context, and its edges are computed token by token.
constexpr int32_t kMaxTileTokens = 16;
constexpr int64_t kTileFloats = 64 * 1024;

int32_t tile_tokens(const AttentionShape& shape) {
  const int64_t per_token =
      static_cast<int64_t>(shape.num_q_heads) * (neo_padded(shape.head_dim_k) + neo_padded(shape.head_dim_v));
  return static_cast<int32_t>(std::clamp<int64_t>(kTileFloats / per_token, 1, kMaxTileTokens));
}

std::string text(int64_t value) { return std::to_string(value); }

std::string entry(const char* name, int32_t index, int64_t value) {
  return std::string(name) + "[" + text(index) + "] = " + text(value);
}

void check_length(int32_t request, int32_t length, int32_t max_blocks, int32_t block_size) {
  if (length < 0) throw std::invalid_argument(entry("context_lens", request, length) + " is negative");
  if (length > static_cast<int64_t>(max_blocks) * block_size)
    throw std::invalid_argument(entry("context_lens", request, length) + " exceeds its block table: " +
                                text(max_blocks) + " blocks of " + text(block_size) + " tokens");
}

void check_rows(const int32_t* cu_seqlens, int32_t request, int32_t length) {
  const int32_t begin = cu_seqlens[request], end = cu_seqlens[request + 1];
  if (end < begin)
    throw std::invalid_argument(entry("cu_seqlens", request + 1, end) + " is below " +
                                entry("cu_seqlens", request, begin));
  if (end - begin > length)
    throw std::invalid_argument("request " + text(request) + " has " + text(end - begin) + " query tokens, but " +
                                entry("context_lens", request, length) + ", which counts them");
}

}  // namespace

AttentionPlan::AttentionPlan(const int32_t* block_tables, int64_t table_stride, int32_t max_blocks,
                             const int32_t* context_lens, const int32_t* cu_seqlens, int32_t num_requests,
                             const AttentionShape& shape, int32_t max_shares, int64_t min_share_bytes)
    : shape_(shape), max_blocks_(max_blocks), max_shares_(max_shares) {
  if (cu_seqlens != nullptr && cu_seqlens[0] != 0)
    throw std::invalid_argument(entry("cu_seqlens", 0, cu_seqlens[0]) + " must be 0");
  for (int32_t r = 0; r < num_requests; ++r) {
    check_length(r, context_lens[r], max_blocks, shape.block_size);
    if (cu_seqlens != nullptr) check_rows(cu_seqlens, r, context_lens[r]);
  }
  num_tokens_ = cu_seqlens == nullptr ? num_requests : cu_seqlens[num_requests];
  tiles_.reserve(static_cast<size_t>(num_requests));
  for (int32_t r = 0; r < num_requests; ++r) {
    if (cu_seqlens == nullptr) {
      tiles_.push_back({r, r, 1, context_lens[r]});
    } else {
      add_tiles(r, cu_seqlens[r], cu_seqlens[r + 1] - cu_seqlens[r], context_lens[r]);
    }
  }
  // The table as given may be wider than any request needs; entries past a request's length are copied, never used.
  tables_.resize(static_cast<size_t>(num_requests) * static_cast<size_t>(max_blocks));
  for (int32_t r = 0; r < num_requests; ++r)
    std::copy_n(block_tables + r * table_stride, max_blocks, tables_.data() + static_cast<int64_t>(r) * max_blocks);
  // Halves assumed: a threshold, not an accounting.
  const int64_t block_bytes =
      2LL * shape.num_kv_heads * shape.block_size * (static_cast<int64_t>(shape.head_dim_k) + shape.head_dim_v);
  min_share_work_ = std::max<int64_t>(1, min_share_bytes / block_bytes);
  finished_.reset(new std::atomic<int32_t>[tiles_.size()]());
}

void AttentionPlan::add_tiles(int32_t request, int32_t first_row, int32_t num_tokens, int32_t context_len) {
  if (num_tokens == 0) return;
  const int32_t count = (num_tokens - 1) / tile_tokens(shape_) + 1;
  for (int32_t i = 0; i < count; ++i) {  // tiles of even size
    const auto begin = static_cast<int32_t>(static_cast<int64_t>(num_tokens) * i / count);
    const auto end = static_cast<int32_t>(static_cast<int64_t>(num_tokens) * (i + 1) / count);
    tiles_.push_back({request, first_row + begin, end - begin, context_len - num_tokens + begin + 1});
    max_tile_tokens_ = std::max(max_tile_tokens_, end - begin);
  }
  has_chunks_ = has_chunks_ || num_tokens > 1;
}

const WindowPlan& AttentionPlan::window_plan(int64_t window) {
  const auto found = windows_.find(window);
  if (found != windows_.end()) return found->second;
  WindowPlan plan;
  plan.window = window;
  plan.partition = make_partition(tiles_, shape_.block_size, window, max_shares_, min_share_work_);
  int32_t low = std::numeric_limits<int32_t>::max();
  int32_t high = std::numeric_limits<int32_t>::min();
  for (const Tile& tile : tiles_) {
    if (tile.end() == 0) continue;
    const int32_t* table = block_table(tile.request);
    const auto range = std::minmax_element(table + tile.visible(0, window).begin / shape_.block_size,
                                           table + (tile.end() - 1) / shape_.block_size + 1);
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

void AttentionPlan::check_blocks(const WindowPlan& plan, int64_t num_blocks) const {
  if (plan.min_block >= 0 && plan.max_block < num_blocks) return;
  for (const Tile& tile : tiles_) {
    const int64_t block_size = shape_.block_size;
    for (int32_t i = tile.visible(0, plan.window).begin / shape_.block_size; i * block_size < tile.end(); ++i) {
      const int32_t block = block_table(tile.request)[i];
      if (block < 0 || block >= num_blocks)
        throw std::invalid_argument("block_tables[" + text(tile.request) + ", " + text(i) + "] = " + text(block) +
                                    " is not a block of this layer: it has " + text(num_blocks) + " blocks" +
                                    (plan.window > 0 ? " (window " + text(plan.window) + ")" : ""));
    }
  }
}

void AttentionPlan::check_append() {
  if (append_checked_) return;
  std::vector<std::pair<int64_t, int32_t>> slots;
  for (const Tile& tile : tiles_) {
    for (int32_t token = std::max(0, tile.length - 1); token < tile.end(); ++token) {
      const int64_t block = block_table(tile.request)[token / shape_.block_size];
      slots.emplace_back(block * shape_.block_size + token % shape_.block_size, tile.request);
    }
  }
  std::sort(slots.begin(), slots.end());
  for (size_t i = 1; i < slots.size(); ++i)
    if (slots[i].first == slots[i - 1].first)
      throw std::invalid_argument("requests " + text(slots[i - 1].second) + " and " + text(slots[i].second) +
                                  " would both append to slot " + text(slots[i].first));
  append_checked_ = true;
}

int64_t AttentionPlan::partial_floats() const {
  const int64_t heads = static_cast<int64_t>(max_tile_tokens_) * shape_.num_q_heads;
  return (heads * neo_padded(shape_.head_dim_v) + 2 * heads + 15) / 16 * 16;
}

bool AttentionPlan::bind(const void* pool) {
  if (pool_ == nullptr) pool_ = pool;
  return pool_ == pool;
}

void AttentionPlan::poison_workspace() {
  std::fill_n(workspace_.data(), workspace_.size(), std::numeric_limits<float>::quiet_NaN());
}

}  // namespace neo
