// Attention of one layer over a planned sub-batch. A task folds the query tokens of its tile into the head group, so
// that the kernel reads the tile's common span once for all of them (a decoding request is the case of one token):
//
//   query heads of KV head h:   token 0: g0 g1 g2 | token 1: g0 g1 g2 | ...      one group of tokens x group heads
//
// The edges, which the tokens see differently, are one small kernel call per token, merged by log-sum-exp.
#ifndef NEO_COMPILE_CSRC_ATTENTION_WORK_H_
#define NEO_COMPILE_CSRC_ATTENTION_WORK_H_

#include <cstdint>
#include <memory>

#include "attention_call.h"
#include "attention_plan.h"
#include "kernel.h"
#include "work.h"

namespace neo {

class AttentionWork : public Work {
 public:
  // Appends k_new and v_new only where every request has at most one query token; otherwise they are in the cache by
  // now (AppendWork).
  AttentionWork(std::shared_ptr<AttentionPlan> plan, const WindowPlan& window, const AttentionCall& call,
                const NeoKernelSet& kernels);

  int32_t num_shares() const override { return partition_.num_shares(); }
  int32_t share_begin(int32_t share) const override { return partition_.share_begin[share]; }
  void run(int32_t task, AlignedBuffer& scratch) override;

 private:
  // Unnormalised results of some heads, as a kernel writes them.
  struct Partial {
    float* acc;  // [heads, acc_stride_]
    float* m;
    float* l;
  };

  Partial partial_at(float* memory, int32_t num_tokens) const;
  // Row of a partial, or of folded q, that belongs to query head h of token i.
  int32_t folded(int32_t num_tokens, int32_t i, int32_t head) const {
    const int32_t kv_head = head / group_;
    return (kv_head * num_tokens + i) * group_ + head % group_;
  }
  void load_q(int32_t first_row, int32_t num_tokens, float* q) const;
  void run_kernel(const Tile& tile, int32_t num_tokens, const Span& positions, const float* q, const Partial& partial,
                  float* scratch) const;
  void add_edges(const Tile& tile, const Partial& partial, float* scratch) const;
  void merge_head(const Partial& into, int32_t row, const Partial& from, int32_t from_row) const;
  // Merges `count` partials, first one at `partial`, applies the sinks and writes the tile's output.
  void finish(const Tile& tile, float* partial, int32_t count) const;

  std::shared_ptr<AttentionPlan> plan_;
  const Partition& partition_;
  const int64_t window_;
  const AttentionCall call_;
  const NeoKernelSet& kernels_;
  const AttentionShape shape_;
  const int32_t group_;  // query heads of a KV head
  const int32_t q_stride_, acc_stride_;
};

}  // namespace neo

#endif  // NEO_COMPILE_CSRC_ATTENTION_WORK_H_
