#include "packed_linear.h"

#include <algorithm>

namespace neo {

namespace {

#ifdef NEO_PACKED_LINEAR
bool has_avx512() {  // all that NEO_AVX512 in CMakeLists.txt allows the compiler
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

LinearBlockFn block_function(int dtype) {
  if (!has_avx512()) return nullptr;
  if (dtype == NEO_F32) return linear_block_f32;
#ifdef NEO_AVX512_BF16
  if (dtype == NEO_BF16 && __builtin_cpu_supports("avx512bf16")) return linear_block_bf16;
#endif
  return nullptr;
}
#else
LinearBlockFn block_function(int) { return nullptr; }
#endif

// Less than this is read faster by one thread than another one starts.
constexpr int64_t kMinThreadBytes = 64 << 10;

}  // namespace

PackedLinear make_packed_linear(const void* weight, int64_t num_outputs, int64_t num_inputs, int dtype) {
  const int64_t num_steps = dtype == NEO_BF16 ? num_inputs / 2 : num_inputs;
  const int64_t num_blocks = (num_outputs + kBlockOutputs - 1) / kBlockOutputs;
  const int64_t block_bytes = (num_steps + 15) / 16 * 16 * kStepBytes;
  return {static_cast<const char*>(weight), num_outputs, num_inputs, dtype, num_blocks, num_steps, block_bytes};
}

bool has_packed_linear(int dtype) { return block_function(dtype) != nullptr; }

void run_packed_linear(const PackedLinear& linear, const LinearCall& call, int num_threads) {
  const LinearBlockFn run_block = block_function(linear.dtype);
  const int64_t num_blocks = linear.num_blocks;
  const int64_t worthwhile = num_blocks * linear.block_bytes / kMinThreadBytes;
  const int threads = static_cast<int>(std::min({static_cast<int64_t>(num_threads), num_blocks, worthwhile}));
  if (threads <= 1) {
    for (int64_t block = 0; block < num_blocks; ++block) run_block(linear, call, block);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t block = 0; block < num_blocks; ++block) run_block(linear, call, block);
}

}  // namespace neo
