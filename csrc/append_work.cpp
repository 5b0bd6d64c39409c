#include "append_work.h"

#include <algorithm>
#include <utility>

namespace neo {
namespace {

constexpr int32_t kConvertFloats = 256;  // converted at a time, on the stack

void write_row(const char* src, int32_t src_dtype, char* dst, int32_t dst_dtype, int32_t dim,
               const NeoKernelSet& kernels) {
  if (src_dtype == dst_dtype) {  // the bits as they are
    std::copy_n(src, dim * element_bytes(src_dtype), dst);
    return;
  }
  alignas(64) float floats[kConvertFloats];
  for (int32_t d = 0; d < dim; d += kConvertFloats) {
    const int32_t count = std::min(kConvertFloats, dim - d);
    kernels.load_row(src + d * element_bytes(src_dtype), src_dtype, 1.0f, floats, count);
    kernels.store_row(floats, 1.0f, dst + d * element_bytes(dst_dtype), dst_dtype, count);
  }
}

}  // namespace

void append_tile(const AttentionPlan& plan, const Tile& tile, const AttentionCall& call, const NeoKernelSet& kernels) {
  const AttentionShape& shape = plan.shape();
  for (int32_t i = 0; i < tile.num_tokens; ++i) {
    const int32_t token = tile.length - 1 + i;
    if (token < 0) continue;  // an empty request
    const int64_t block = plan.block_table(tile.request)[token / shape.block_size];
    const auto write = [&](const CacheView& cache, const RowsView& fresh, int32_t dim) {
      for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
        const int64_t offset =
            block * cache.block_stride + h * cache.head_stride + (token % shape.block_size) * cache.token_stride;
        write_row(static_cast<const char*>(fresh.row(tile.first_row + i, h)), fresh.dtype,
                  static_cast<char*>(cache.data) + offset * element_bytes(call.cache.dtype), call.cache.dtype, dim,
                  kernels);
      }
    };
    write(call.cache.k, call.k_new, shape.head_dim_k);
    write(call.cache.v, call.v_new, shape.head_dim_v);
  }
}

AppendWork::AppendWork(std::shared_ptr<const AttentionPlan> plan, const AttentionCall& call,
                       const NeoKernelSet& kernels, int32_t num_shares)
    : plan_(std::move(plan)), call_(call), kernels_(kernels), num_shares_(std::max(1, num_shares)) {}

int32_t AppendWork::share_begin(int32_t share) const {
  return static_cast<int32_t>(static_cast<int64_t>(plan_->tiles().size()) * share / num_shares_);
}

void AppendWork::run(int32_t task, AlignedBuffer&) { append_tile(*plan_, plan_->tiles()[task], call_, kernels_); }

}  // namespace neo
