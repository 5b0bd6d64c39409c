// Which kernels this build contains, best first, and which of them this CPU runs.
#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "kernel.h"

namespace {

int always() { return 1; }

#ifdef NEO_TWIN_X86
int has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

int has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
}

#ifdef NEO_AVX512_BF16
int has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif
#endif

#define NEO_TWIN_SET(name, isa, check)                                        \
  {name,                                                                      \
   {neo_cpp_span_f32_##isa, neo_cpp_span_f16_##isa, neo_cpp_span_bf16_##isa}, \
   neo_cpp_load_row_##isa,                                                    \
   neo_cpp_store_row_##isa,                                                   \
   check}
#define NEO_ISPC_SET(name, suffix, isa, check)                                         \
  {name,                                                                               \
   {neo_ispc_span_f32##suffix, neo_ispc_span_f16##suffix, neo_ispc_span_bf16##suffix}, \
   neo_cpp_load_row_##isa,                                                             \
   neo_cpp_store_row_##isa,                                                            \
   check}
#define NEO_AVX512_SET(name, family, bf16, check)                          \
  {name,                                                                   \
   {neo_wide_span_f32_##family, neo_wide_span_f16_##family, bf16##family}, \
   neo_cpp_load_row_avx512,                                                \
   neo_cpp_store_row_avx512,                                               \
   check}

const NeoKernelSet kSets[] = {
#if defined(NEO_ISPC_AVX512) && defined(NEO_AVX512_BF16)
    NEO_AVX512_SET("ispc-avx512-bf16", ispc, neo_bf16_span_, has_avx512_bf16),
#endif
#ifdef NEO_ISPC_AVX512
    NEO_AVX512_SET("ispc-avx512", ispc, neo_wide_span_bf16_, has_avx512),
#endif
#ifdef NEO_ISPC_AVX2
    NEO_ISPC_SET("ispc-avx2", _avx2, avx2, has_avx2),
#endif
#ifdef NEO_ISPC_NEON
    NEO_ISPC_SET("ispc-neon", , generic, always),
#endif
#ifdef NEO_AVX512_BF16
    NEO_AVX512_SET("cpp-avx512-bf16", cpp, neo_bf16_span_, has_avx512_bf16),
#endif
#ifdef NEO_TWIN_X86
    NEO_AVX512_SET("cpp-avx512", cpp, neo_wide_span_bf16_, has_avx512),
    NEO_TWIN_SET("cpp-avx2", avx2, has_avx2),
#endif
    NEO_TWIN_SET("scalar", generic, always),
};

constexpr size_t kNumSets = sizeof(kSets) / sizeof(kSets[0]);

// Each set with BF16 arithmetic stands before the same without. On Intel's cores (Sapphire Rapids) vdpbf16ps runs at
// half the rate of an fp32 FMA, and gained nothing: there it comes after.
std::array<NeoKernelSet, kNumSets> in_order_of_speed() {
  std::array<NeoKernelSet, kNumSets> sets;
  std::copy(std::begin(kSets), std::end(kSets), sets.begin());
#ifdef NEO_AVX512_BF16
  if (!__builtin_cpu_is("amd"))
    for (size_t i = 0; i + 1 < sets.size(); ++i)
      if (sets[i].is_supported == has_avx512_bf16) std::swap(sets[i], sets[i + 1]), ++i;
#endif
  return sets;
}

}  // namespace

extern "C" const NeoKernelSet* neo_kernels(int* count) {
  static const auto sets = in_order_of_speed();
  *count = static_cast<int>(sets.size());
  return sets.data();
}
