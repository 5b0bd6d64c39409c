// Decode attention of one layer over a planned sub-batch.
#ifndef NEO_COMPILE_CSRC_ATTENTION_WORK_H_
#define NEO_COMPILE_CSRC_ATTENTION_WORK_H_

#include <cstdint>
#include <memory>

#include "decode_plan.h"
#include "kernel.h"
#include "work.h"

namespace neo {

// A view of one of a layer's two caches, [num_blocks, num_kv_heads, block_size, head_dim]; strides in elements.
struct CacheView {
  void* data = nullptr;
  int64_t block_stride = 0, head_stride = 0, token_stride = 0;
};

struct LayerCache {
  CacheView k, v;
  int64_t num_blocks = 0;
  int32_t dtype = NEO_F32;
  AttentionShape shape{};  // num_q_heads unused
};

// [num_requests, heads, dim], innermost contiguous; strides in elements.
struct RowsView {
  void* data = nullptr;
  int64_t request_stride = 0, head_stride = 0;
  int32_t dtype = NEO_F32;

  void* row(int32_t request, int32_t head) const {
    const int64_t element_bytes = dtype == NEO_F32 ? 4 : 2;
    return static_cast<char*>(data) + (request * request_stride + head * head_stride) * element_bytes;
  }
};

struct AttentionCall {
  LayerCache cache;
  RowsView q, out;
  RowsView k_new, v_new;         // data = nullptr: nothing to append
  const float* sinks = nullptr;  // [num_q_heads] or none
  float scale = 1.0f;
  float softcap = 0.0f;  // 0 = none
};

class AttentionWork : public Work {
 public:
  AttentionWork(std::shared_ptr<DecodePlan> plan, const WindowPlan& window, const AttentionCall& call,
                const NeoKernelSet& kernels);

  int32_t num_shares() const override { return partition_.num_shares(); }
  int32_t share_begin(int32_t share) const override { return partition_.share_begin[share]; }
  void run(int32_t task, AlignedBuffer& scratch) override;

 private:
  void append(int32_t request, float* row) const;
  void load_q(int32_t request, float* q) const;
  // Merges `count` partials, first one at `partial`, applies the sinks and writes the request's output.
  void finish(int32_t request, float* partial, int32_t count) const;

  std::shared_ptr<DecodePlan> plan_;
  const Partition& partition_;
  const AttentionCall call_;
  const NeoKernelSet& kernels_;
  const AttentionShape shape_;
  const int32_t q_stride_, acc_stride_;
};

}  // namespace neo

#endif  // NEO_COMPILE_CSRC_ATTENTION_WORK_H_
