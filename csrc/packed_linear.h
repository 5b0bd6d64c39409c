// Linears of a few tokens, y[t] = W x[t] + bias, on weights as oneDNN packs them for AVX-512. oneDNN's own kernels read
// packed weights at half of the bandwidth when the tokens are few; with more than kMaxLinearTokens they are as fast.
//
//   block   64 outputs
//   step    of a block: the weights of one input (bf16: of two neighbouring inputs) for its 64 outputs, 256 bytes
//   W       block 0: step 0, step 1, ... | block 1: ...     the last block, and the steps to a multiple of 16, padded
#ifndef NEO_COMPILE_CSRC_PACKED_LINEAR_H_
#define NEO_COMPILE_CSRC_PACKED_LINEAR_H_

#include <cstdint>

#include "kernel.h"

namespace neo {

constexpr int kMaxLinearTokens = 32;
constexpr int kBlockOutputs = 64;
constexpr int kStepBytes = 256;

struct PackedLinear {
  const char* weight;
  int64_t num_outputs;
  int64_t num_inputs;  // even in bf16
  int dtype;           // NEO_F32 or NEO_BF16
  int64_t num_blocks;
  int64_t num_steps;
  int64_t block_bytes;
};

PackedLinear make_packed_linear(const void* weight, int64_t num_outputs, int64_t num_inputs, int dtype);

// Contiguous rows of the weight's dtype.
struct LinearCall {
  const void* x;     // [num_tokens, num_inputs]
  const void* bias;  // [num_outputs] or null
  void* y;           // [num_tokens, num_outputs]
  int num_tokens;    // 1 to kMaxLinearTokens
};

// Whether this build has the kernel for `dtype` and this CPU runs it.
bool has_packed_linear(int dtype);

// Runs on num_threads of OpenMP, the threads that torch uses.
void run_packed_linear(const PackedLinear& linear, const LinearCall& call, int num_threads);

// packed_linear_block.cpp: one block, all tokens.
using LinearBlockFn = void (*)(const PackedLinear& linear, const LinearCall& call, int64_t block);
void linear_block_f32(const PackedLinear& linear, const LinearCall& call, int64_t block);   // AVX-512
void linear_block_bf16(const PackedLinear& linear, const LinearCall& call, int64_t block);  // AVX-512 with BF16

}  // namespace neo

#endif  // NEO_COMPILE_CSRC_PACKED_LINEAR_H_
