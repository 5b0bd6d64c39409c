// Which kernels this build contains, best first, and which of them this CPU runs.
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

const NeoKernelSet kSets[] = {
#ifdef NEO_ISPC_AVX512
    NEO_ISPC_SET("ispc-avx512", _avx512skx, avx512, has_avx512),
#endif
#ifdef NEO_ISPC_AVX2
    NEO_ISPC_SET("ispc-avx2", _avx2, avx2, has_avx2),
#endif
#ifdef NEO_ISPC_NEON
    NEO_ISPC_SET("ispc-neon", , generic, always),
#endif
#ifdef NEO_TWIN_X86
    NEO_TWIN_SET("cpp-avx512", avx512, has_avx512),
    NEO_TWIN_SET("cpp-avx2", avx2, has_avx2),
#endif
    NEO_TWIN_SET("scalar", generic, always),
};

}  // namespace

extern "C" const NeoKernelSet* neo_kernels(int* count) {
  *count = static_cast<int>(sizeof(kSets) / sizeof(kSets[0]));
  return kSets;
}
