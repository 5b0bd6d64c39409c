#include "attention_work.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace neo {
namespace {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

int64_t round_up(int64_t floats) { return (floats + 15) / 16 * 16; }

// Weight of a partial whose maximum is m in a sum whose maximum is top; (-inf) - (-inf) means "nothing", not NaN.
float weight(float m, float top) { return m == kMinusInf ? 0.0f : std::exp2(m - top); }

}  // namespace

AttentionWork::AttentionWork(std::shared_ptr<DecodePlan> plan, const WindowPlan& window, const AttentionCall& call,
                             const NeoKernelSet& kernels)
    : plan_(std::move(plan)),
      partition_(window.partition),
      call_(call),
      kernels_(kernels),
      shape_(plan_->shape()),
      q_stride_(neo_padded(shape_.head_dim_k)),
      acc_stride_(neo_padded(shape_.head_dim_v)) {}

void AttentionWork::run(int32_t index, AlignedBuffer& scratch) {
  const Task& task = partition_.tasks[index];
  const int64_t q_floats = static_cast<int64_t>(shape_.num_q_heads) * q_stride_;
  const int64_t own_floats = round_up(plan_->partial_floats());
  scratch.reserve(q_floats + own_floats + neo_scratch_floats(shape_.num_q_heads, shape_.head_dim_k, shape_.head_dim_v));
  float* q = scratch.data();
  float* partial = task.partial >= 0 ? plan_->partial(task.partial) : q + q_floats;
  float* kernel_scratch = q + q_floats + own_floats;

  const bool is_last = task.token_end == plan_->context_len(task.request);
  if (call_.k_new.data != nullptr && is_last && task.token_end > 0) append(task.request, kernel_scratch);
  load_q(task.request, q);

  const CacheView &k = call_.cache.k, &v = call_.cache.v;
  NeoSpan span{};
  span.q = q;
  span.k = k.data;
  span.v = v.data;
  span.block_table = plan_->block_table(task.request);
  span.acc = partial;
  span.m = partial + static_cast<int64_t>(shape_.num_q_heads) * acc_stride_;
  span.l = span.m + shape_.num_q_heads;
  span.scratch = kernel_scratch;
  span.k_block_stride = k.block_stride;
  span.k_head_stride = k.head_stride;
  span.k_token_stride = k.token_stride;
  span.v_block_stride = v.block_stride;
  span.v_head_stride = v.head_stride;
  span.v_token_stride = v.token_stride;
  span.num_q_heads = shape_.num_q_heads;
  span.num_kv_heads = shape_.num_kv_heads;
  span.head_dim_k = shape_.head_dim_k;
  span.head_dim_v = shape_.head_dim_v;
  span.q_stride = q_stride_;
  span.acc_stride = acc_stride_;
  span.block_size = shape_.block_size;
  span.token_begin = task.token_begin;
  span.token_end = task.token_end;
  span.q_scale = call_.softcap > 0 ? call_.scale / call_.softcap : call_.scale * kLog2e;
  span.softcap = call_.softcap * kLog2e;
  span.q_is_bf16 = call_.q.dtype == NEO_BF16;
  kernels_.span[call_.cache.dtype](&span);

  if (task.partial < 0) return finish(task.request, partial, 1);
  const int32_t count = partition_.num_partials[task.request];
  std::atomic<int32_t>& finished = plan_->finished_partials(task.request);
  if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
  finished.store(0, std::memory_order_relaxed);  // for the next layer, which starts after this submission ends
  finish(task.request, plan_->partial(partition_.first_partial[task.request]), count);
}

void AttentionWork::append(int32_t request, float* row) const {
  const int32_t token = plan_->context_len(request) - 1;
  const int64_t block = plan_->block_table(request)[token / shape_.block_size];
  const int64_t element_bytes = call_.cache.dtype == NEO_F32 ? 4 : 2;
  const auto write = [&](const CacheView& cache, const RowsView& fresh, int32_t dim) {
    for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
      const int64_t offset =
          block * cache.block_stride + h * cache.head_stride + (token % shape_.block_size) * cache.token_stride;
      void* dst = static_cast<char*>(cache.data) + offset * element_bytes;
      if (fresh.dtype == call_.cache.dtype) {  // the bits as they are
        std::copy_n(static_cast<const char*>(fresh.row(request, h)), dim * element_bytes, static_cast<char*>(dst));
      } else {
        kernels_.load_row(fresh.row(request, h), fresh.dtype, 1.0f, row, dim);
        kernels_.store_row(row, 1.0f, dst, call_.cache.dtype, dim);
      }
    }
  };
  write(call_.cache.k, call_.k_new, shape_.head_dim_k);
  write(call_.cache.v, call_.v_new, shape_.head_dim_v);
}

void AttentionWork::load_q(int32_t request, float* q) const {
  for (int32_t h = 0; h < shape_.num_q_heads; ++h) {
    float* row = q + static_cast<int64_t>(h) * q_stride_;
    std::fill(row + q_stride_ - 16, row + q_stride_, 0.0f);
    kernels_.load_row(call_.q.row(request, h), call_.q.dtype, 1.0f, row, shape_.head_dim_k);
  }
}

void AttentionWork::finish(int32_t request, float* partial, int32_t count) const {
  const int64_t stride = plan_->partial_floats();
  const int64_t m_offset = static_cast<int64_t>(shape_.num_q_heads) * acc_stride_;
  for (int32_t h = 0; h < shape_.num_q_heads; ++h) {
    float* acc = partial + static_cast<int64_t>(h) * acc_stride_;
    const float* m = partial + m_offset + h;
    const float* l = m + shape_.num_q_heads;
    const float sink = call_.sinks != nullptr ? call_.sinks[h] * kLog2e : kMinusInf;
    float top = sink;
    for (int32_t i = 0; i < count; ++i) top = std::max(top, m[i * stride]);
    float total = weight(sink, top);
    for (int32_t i = 0; i < count; ++i) {
      const float w = weight(m[i * stride], top);
      // w * l alone would drop a NaN-only partial (m = -inf, l = NaN): 0 * NaN is NaN, as it should be.
      total += w * l[i * stride];
      const float* other = acc + i * stride;
      if (i == 0) {
        for (int32_t d = 0; d < shape_.head_dim_v; ++d) acc[d] *= w;
      } else {
        for (int32_t d = 0; d < shape_.head_dim_v; ++d) acc[d] += w * other[d];
      }
    }
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    kernels_.store_row(acc, inverse, call_.out.row(request, h), call_.out.dtype, shape_.head_dim_v);
  }
}

}  // namespace neo
