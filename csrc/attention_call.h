// The tensors of one layer's attention, as addresses and strides (in elements).
#ifndef NEO_COMPILE_CSRC_ATTENTION_CALL_H_
#define NEO_COMPILE_CSRC_ATTENTION_CALL_H_

#include <cstdint>

#include "attention_plan.h"
#include "kernel.h"

namespace neo {

inline int64_t element_bytes(int32_t dtype) { return dtype == NEO_F32 ? 4 : 2; }

// A view of one of a layer's two caches, [num_blocks, num_kv_heads, block_size, head_dim].
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

// [query tokens, heads, dim], innermost contiguous.
struct RowsView {
  void* data = nullptr;
  int64_t token_stride = 0, head_stride = 0;
  int32_t dtype = NEO_F32;

  RowsView from(int32_t token) const { return {row(token, 0), token_stride, head_stride, dtype}; }

  void* row(int32_t token, int32_t head) const {
    return static_cast<char*>(data) + (token * token_stride + head * head_stride) * element_bytes(dtype);
  }
};

// What a linear stage hands over for one layer: rows of all tokens of a sub-batch, of which a plan takes a range.
struct TokenRows {
  RowsView q, out;
  RowsView k_new, v_new;  // data = nullptr: nothing to append
  int32_t num_tokens = 0;
  AttentionShape shape{};  // block_size unused
};

struct AttentionCall {
  LayerCache cache;
  RowsView q, out;
  RowsView k_new, v_new;         // data = nullptr: nothing to append
  const float* sinks = nullptr;  // [num_q_heads] or none
  float scale = 1.0f;
  float softcap = 0.0f;  // 0 = none
};

}  // namespace neo

#endif  // NEO_COMPILE_CSRC_ATTENTION_CALL_H_
