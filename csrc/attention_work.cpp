#include "attention_work.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "append_work.h"

namespace neo {
namespace {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

int64_t round_up(int64_t floats) { return (floats + 15) / 16 * 16; }

// Weight of a partial whose maximum is m in a sum whose maximum is top; (-inf) - (-inf) means "nothing", not NaN.
float weight(float m, float top) { return m == kMinusInf ? 0.0f : std::exp2(m - top); }

}  // namespace

AttentionWork::AttentionWork(std::shared_ptr<AttentionPlan> plan, const WindowPlan& window, const AttentionCall& call,
                             const NeoKernelSet& kernels)
    : plan_(std::move(plan)),
      partition_(window.partition),
      window_(window.window),
      call_(call),
      kernels_(kernels),
      shape_(plan_->shape()),
      group_(shape_.num_q_heads / shape_.num_kv_heads),
      q_stride_(neo_padded(shape_.head_dim_k)),
      acc_stride_(neo_padded(shape_.head_dim_v)) {}

void AttentionWork::run(int32_t index, AlignedBuffer& scratch) {
  const Task& task = partition_.tasks[index];
  const Tile& tile = plan_->tiles()[task.tile];
  const int32_t max_heads = plan_->max_tile_tokens() * shape_.num_q_heads;
  const int64_t q_floats = static_cast<int64_t>(max_heads) * q_stride_;
  const int64_t own_floats = round_up(plan_->partial_floats());
  // Twice: an edge has q and a partial of its own, of one token at most.
  scratch.reserve(2 * (q_floats + own_floats) + neo_scratch_floats(max_heads, shape_.head_dim_k, shape_.head_dim_v));
  float* q = scratch.data();
  float* memory = task.partial >= 0 ? plan_->partial(task.partial) : q + q_floats;
  float* rest = q + q_floats + own_floats;

  const bool is_last = task.token_end == tile.length;
  if (is_last && call_.k_new.data != nullptr && !plan_->has_chunks()) append_tile(*plan_, tile, call_, kernels_);
  const Partial partial = partial_at(memory, tile.num_tokens);
  load_q(tile.first_row, tile.num_tokens, q);
  run_kernel(tile, tile.num_tokens, {task.token_begin, task.token_end}, q, partial, rest);
  if (is_last && tile.num_tokens > 1) add_edges(tile, partial, rest);

  if (task.partial < 0) return finish(tile, memory, 1);
  const int32_t count = partition_.num_partials[task.tile];
  std::atomic<int32_t>& finished = plan_->finished_partials(task.tile);
  if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
  finished.store(0, std::memory_order_relaxed);  // for the next layer, which starts after this submission ends
  finish(tile, plan_->partial(partition_.first_partial[task.tile]), count);
}

AttentionWork::Partial AttentionWork::partial_at(float* memory, int32_t num_tokens) const {
  const int64_t heads = static_cast<int64_t>(num_tokens) * shape_.num_q_heads;
  return {memory, memory + heads * acc_stride_, memory + heads * acc_stride_ + heads};
}

void AttentionWork::load_q(int32_t first_row, int32_t num_tokens, float* q) const {
  for (int32_t i = 0; i < num_tokens; ++i) {
    for (int32_t h = 0; h < shape_.num_q_heads; ++h) {
      float* row = q + static_cast<int64_t>(folded(num_tokens, i, h)) * q_stride_;
      std::fill(row + q_stride_ - 16, row + q_stride_, 0.0f);
      kernels_.load_row(call_.q.row(first_row + i, h), call_.q.dtype, 1.0f, row, shape_.head_dim_k);
    }
  }
}

void AttentionWork::run_kernel(const Tile& tile, int32_t num_tokens, const Span& positions, const float* q,
                               const Partial& partial, float* scratch) const {
  const CacheView &k = call_.cache.k, &v = call_.cache.v;
  NeoSpan span{};
  span.q = q;
  span.k = k.data;
  span.v = v.data;
  span.block_table = plan_->block_table(tile.request);
  span.acc = partial.acc;
  span.m = partial.m;
  span.l = partial.l;
  span.scratch = scratch;
  span.k_block_stride = k.block_stride;
  span.k_head_stride = k.head_stride;
  span.k_token_stride = k.token_stride;
  span.v_block_stride = v.block_stride;
  span.v_head_stride = v.head_stride;
  span.v_token_stride = v.token_stride;
  span.num_q_heads = num_tokens * shape_.num_q_heads;
  span.num_kv_heads = shape_.num_kv_heads;
  span.head_dim_k = shape_.head_dim_k;
  span.head_dim_v = shape_.head_dim_v;
  span.q_stride = q_stride_;
  span.acc_stride = acc_stride_;
  span.block_size = shape_.block_size;
  span.token_begin = positions.begin;
  span.token_end = positions.end;
  span.q_scale = call_.softcap > 0 ? call_.scale / call_.softcap : call_.scale * kLog2e;
  span.softcap = call_.softcap * kLog2e;
  span.q_is_bf16 = call_.q.dtype == NEO_BF16;
  kernels_.span[call_.cache.dtype](&span);
}

void AttentionWork::add_edges(const Tile& tile, const Partial& partial, float* scratch) const {
  float* q = scratch;
  float* memory = q + static_cast<int64_t>(shape_.num_q_heads) * q_stride_;
  const Partial edge = partial_at(memory, 1);
  float* rest = memory + round_up(edge.l + shape_.num_q_heads - memory);
  const Span common = tile.common(window_);
  for (int32_t i = 0; i < tile.num_tokens; ++i) {
    const Span visible = tile.visible(i, window_);
    const Span left{visible.begin, std::min(common.begin, visible.end)};
    const Span right{std::max(common.end, visible.begin), visible.end};
    if (left.is_empty() && right.is_empty()) continue;
    load_q(tile.first_row + i, 1, q);
    for (const Span& span : {left, right}) {
      if (span.is_empty()) continue;
      run_kernel(tile, 1, span, q, edge, rest);
      for (int32_t h = 0; h < shape_.num_q_heads; ++h) merge_head(partial, folded(tile.num_tokens, i, h), edge, h);
    }
  }
}

void AttentionWork::merge_head(const Partial& into, int32_t row, const Partial& from, int32_t from_row) const {
  const float top = std::max(into.m[row], from.m[from_row]);
  const float keep = weight(into.m[row], top), add = weight(from.m[from_row], top);
  float* acc = into.acc + static_cast<int64_t>(row) * acc_stride_;
  const float* other = from.acc + static_cast<int64_t>(from_row) * acc_stride_;
  for (int32_t d = 0; d < shape_.head_dim_v; ++d) acc[d] = acc[d] * keep + other[d] * add;
  // A weight of 0 must not drop a NaN-only partial (m = -inf, l = NaN): 0 * NaN is NaN, as it should be.
  into.l[row] = into.l[row] * keep + from.l[from_row] * add;
  into.m[row] = top;
}

void AttentionWork::finish(const Tile& tile, float* memory, int32_t count) const {
  const Partial partial = partial_at(memory, tile.num_tokens);
  for (int32_t i = 0; i < tile.num_tokens; ++i) {
    for (int32_t h = 0; h < shape_.num_q_heads; ++h) {
      const int32_t row = folded(tile.num_tokens, i, h);
      for (int32_t other = 1; other < count; ++other)
        merge_head(partial, row, partial_at(memory + other * plan_->partial_floats(), tile.num_tokens), row);
      const float sink = call_.sinks != nullptr ? call_.sinks[h] * kLog2e : kMinusInf;
      const float top = std::max(sink, partial.m[row]);
      const float total = weight(sink, top) + weight(partial.m[row], top) * partial.l[row];
      const float scale = total == 0.0f ? 0.0f : weight(partial.m[row], top) / total;
      kernels_.store_row(partial.acc + static_cast<int64_t>(row) * acc_stride_, scale,
                         call_.out.row(tile.first_row + i, h), call_.out.dtype, shape_.head_dim_v);
    }
  }
}

}  // namespace neo
