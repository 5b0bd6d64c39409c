// New K and V go into the cache before anything attends to them. A decoding request appends within its own task (only
// that task reads the new token); with several query tokens a request, one tile reads what another one brings, so all
// tokens are written by a submission of its own, which the pool runs to the end before the attention begins.
#ifndef NEO_COMPILE_CSRC_APPEND_WORK_H_
#define NEO_COMPILE_CSRC_APPEND_WORK_H_

#include <cstdint>
#include <memory>

#include "attention_call.h"
#include "attention_plan.h"
#include "kernel.h"
#include "work.h"

namespace neo {

// Writes the K and V rows of a tile's query tokens to their positions. Allocates nothing.
void append_tile(const AttentionPlan& plan, const Tile& tile, const AttentionCall& call, const NeoKernelSet& kernels);

class AppendWork : public Work {
 public:
  AppendWork(std::shared_ptr<const AttentionPlan> plan, const AttentionCall& call, const NeoKernelSet& kernels,
             int32_t num_shares);

  int32_t num_shares() const override { return num_shares_; }
  int32_t share_begin(int32_t share) const override;
  void run(int32_t task, AlignedBuffer& scratch) override;

 private:
  const std::shared_ptr<const AttentionPlan> plan_;
  const AttentionCall call_;
  const NeoKernelSet& kernels_;
  const int32_t num_shares_;
};

}  // namespace neo

#endif  // NEO_COMPILE_CSRC_APPEND_WORK_H_
