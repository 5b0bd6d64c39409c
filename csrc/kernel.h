// The C ABI between the partition / thread pool (callers) and the paged-attention kernels (C++ twin, ISPC).
//
//  1. One call = one span [token_begin, token_end) of consecutive tokens of ONE request, all KV heads. It may begin and
//     end inside a block, and be empty. Several query tokens that see the same span come as one larger head group.
//  2. Token t lives in block block_table[t / block_size], row t % block_size. Its K row for KV head h is
//     k + (block * k_block_stride + h * k_head_stride + row * k_token_stride) elements; head_dim is contiguous; V
//     likewise. Nothing outside the span's tokens may be read (free blocks are NaN-poisoned in tests); block products
//     need 64-bit integers.
//  3. Query head h reads KV head h / (num_q_heads / num_kv_heads). q is fp32, not scaled: x = q_scale * dot(q, k) is
//  the
//     base-2 logit, or with softcap > 0 it is softcap * tanh(x). q_is_bf16 says that every value of q is a bf16, so
//     that a kernel may multiply in bf16 and loses nothing.
//  4. The kernel always writes a partial: m[h] = max logit (-inf if none), l[h] = sum 2^(s - m), acc[h] = sum 2^(s - m)
//  v,
//     fp32, not normalised; m = -inf means l = 0 and acc = 0 (never NaN). Sinks, merging, division and conversion to
//     the output dtype are the caller's (attention_work.cpp). acc, m and l arrive uninitialised; write all asked for.
//  5. q and acc rows are q_stride / acc_stride floats apart (head_dim rounded up to 16); q's padding is zero, acc's may
//     be written. q, acc and scratch are 64-byte aligned; K and V have only element alignment. scratch holds
//     neo_scratch_floats() floats.
//  6. Kernels hold no state, allocate nothing, throw nothing, take shapes at run time. Halves are uint16 bit patterns.
#ifndef NEO_COMPILE_CSRC_KERNEL_H_
#define NEO_COMPILE_CSRC_KERNEL_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum NeoDtype { NEO_F32 = 0, NEO_F16 = 1, NEO_BF16 = 2, NEO_NUM_DTYPES = 3 };

struct NeoSpan {
  const float* q;              // [num_q_heads, q_stride], see 3 and 5
  const void* k;               // layer's K view, element type = the kernel's dtype
  const void* v;               // layer's V view, same element type
  const int32_t* block_table;  // this request's row, entry i = block of tokens [i * block_size, (i + 1) * block_size)
  float* acc;                  // out [num_q_heads, acc_stride]
  float* m;                    // out [num_q_heads]
  float* l;                    // out [num_q_heads]
  float* scratch;              // per-thread, neo_scratch_floats() floats
  int64_t k_block_stride, k_head_stride, k_token_stride;  // elements
  int64_t v_block_stride, v_head_stride, v_token_stride;  // elements
  int32_t num_q_heads, num_kv_heads;
  int32_t head_dim_k, head_dim_v;
  int32_t q_stride, acc_stride;
  int32_t block_size;
  int32_t token_begin, token_end;
  float q_scale;
  float softcap;  // log2 units, 0 = none
  int32_t q_is_bf16;
};

typedef void (*NeoSpanFn)(const struct NeoSpan* span);
// dst[i] = scale * src[i]: one row from / to any NeoDtype (round to nearest even), fp32 on the other side.
typedef void (*NeoLoadRowFn)(const void* src, int32_t dtype, float scale, float* dst, int32_t n);
typedef void (*NeoStoreRowFn)(const float* src, float scale, void* dst, int32_t dtype, int32_t n);

// Kernels of one instruction set, by KV dtype.
struct NeoKernelSet {
  const char* name;   // "ispc-avx512-bf16", "ispc-avx512", "ispc-avx2", "ispc-neon", "cpp-...", "scalar"
  NeoSpanFn span[3];  // by NeoDtype
  NeoLoadRowFn load_row;
  NeoStoreRowFn store_row;
  int (*is_supported)(void);  // does this CPU run it?
};

// Every set compiled into this build, best first, supported by this CPU or not; "scalar" is last and always there.
const struct NeoKernelSet* neo_kernels(int* count);

static inline int32_t neo_padded(int32_t head_dim) { return (head_dim + 15) / 16 * 16; }

// Scratch a kernel may use, in floats: bounded chunks of at most 64 tokens at a time, whatever block_size is.
static inline int64_t neo_scratch_floats(int32_t num_q_heads, int32_t head_dim_k, int32_t head_dim_v) {
  const int64_t row = (int64_t)neo_padded(head_dim_k) + neo_padded(head_dim_v);
  return 256 * (int64_t)num_q_heads + 128 * row + 4 * (int64_t)num_q_heads * row + 1024;
}

// The C++ twin (paged_attention_scalar.cpp), compiled once per instruction set.
#define NEO_DECLARE_TWIN(isa)                                                                      \
  void neo_cpp_span_f32_##isa(const struct NeoSpan* span);                                         \
  void neo_cpp_span_f16_##isa(const struct NeoSpan* span);                                         \
  void neo_cpp_span_bf16_##isa(const struct NeoSpan* span);                                        \
  void neo_cpp_load_row_##isa(const void* src, int32_t dtype, float scale, float* dst, int32_t n); \
  void neo_cpp_store_row_##isa(const float* src, float scale, void* dst, int32_t dtype, int32_t n);
NEO_DECLARE_TWIN(generic)
NEO_DECLARE_TWIN(avx2)
NEO_DECLARE_TWIN(avx512)
#undef NEO_DECLARE_TWIN

// ISPC (paged_attention.ispc): exports neo_ispc_span_{f32,f16,bf16}(const uniform NeoSpan*). A multi-target build adds
// the suffixes; the build defines NEO_ISPC_AVX2 / NEO_ISPC_AVX512 (suffixes _avx2, _avx512skx) or NEO_ISPC_NEON (one
// target, no suffix).
#define NEO_DECLARE_ISPC(suffix)                              \
  void neo_ispc_span_f32##suffix(const struct NeoSpan* span); \
  void neo_ispc_span_f16##suffix(const struct NeoSpan* span); \
  void neo_ispc_span_bf16##suffix(const struct NeoSpan* span);
NEO_DECLARE_ISPC()
NEO_DECLARE_ISPC(_avx2)
NEO_DECLARE_ISPC(_avx512skx)
#undef NEO_DECLARE_ISPC

// AVX-512 for large groups (paged_attention_wide.cpp), beside the ISPC kernels and beside the twin.
#define NEO_DECLARE_WIDE(family)                               \
  void neo_wide_span_f32_##family(const struct NeoSpan* span); \
  void neo_wide_span_f16_##family(const struct NeoSpan* span); \
  void neo_wide_span_bf16_##family(const struct NeoSpan* span);
NEO_DECLARE_WIDE(ispc)
NEO_DECLARE_WIDE(cpp)
#undef NEO_DECLARE_WIDE

// AVX512-BF16 (paged_attention_bf16.cpp), beside the ISPC kernels and beside the twin (build: NEO_AVX512_BF16).
void neo_bf16_span_ispc(const struct NeoSpan* span);
void neo_bf16_span_cpp(const struct NeoSpan* span);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // NEO_COMPILE_CSRC_KERNEL_H_
