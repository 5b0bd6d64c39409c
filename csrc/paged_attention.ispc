// Paged decode attention over one span of one request, all KV heads: the SIMD form of paged_attention_scalar.cpp (see kernel.h).
//
//   for each chunk of up to 64 tokens                    (the offsets of the next chunk's rows are already known)
//     for each KV head
//       score_chunk        q . K        while V of this head is prefetched
//       soften_chunk       online softmax
//       accumulate_chunk   p . V        while K of the next head, or of the next chunk, is prefetched
//
// One source serves every target; shapes are run-time values, and only the number of query heads handled at once is a template
// parameter, because it decides how many registers hold accumulators.
#include "paged_attention_tile.isph"

#ifndef NEO_SUFFIX
#define NEO_SUFFIX
#endif
#define NEO_CONCAT2(a, b) a##b
#define NEO_CONCAT(a, b) NEO_CONCAT2(a, b)

// How many tokens' (TB) and pairs' (C) accumulators fit in the registers beside GH heads of q.
#if defined(ISPC_TARGET_AVX2)  // 16 registers: three heads run as two and one
#define TB1 8
#define TB2 4
#define TB4 2
#define C1 4
#define C2 2
#define C4 1
#elif defined(ISPC_TARGET_NEON)
#define TB1 4
#define TB2 4
#define TB3 4
#define TB4 4
#define C1 4
#define C2 4
#define C3 2
#define C4 2
#else  // reading more rows side by side costs bandwidth when they come from memory
#define TB1 1
#define TB2 2
#define TB3 2
#define TB4 2
#define C1 4
#define C2 4
#define C3 2
#define C4 2
#endif

struct NeoSpan {  // as in kernel.h
  const float *q;
  const void *k;
  const void *v;
  const int32 *block_table;
  float *acc;
  float *m;
  float *l;
  float *scratch;
  int64 k_block_stride, k_head_stride, k_token_stride;
  int64 v_block_stride, v_head_stride, v_token_stride;
  int32 num_q_heads, num_kv_heads;
  int32 head_dim_k, head_dim_v;
  int32 q_stride, acc_stride;
  int32 block_size;
  int32 token_begin, token_end;
  float q_scale;
  float softcap;
  int32 q_is_bf16;
};

// Rows of a chunk relative to KV head 0. Entries past the last token repeat it, so that whole tiles can be read.
struct ChunkRows {
  int64 k[CHUNK];
  int64 v[CHUNK];
  int32 num_tokens;
};

// Tokens per turn. Small groups are bound by memory, and read quicker if a turn is a page of K and a page of V of one head; the
// larger a group, the more it is bound by arithmetic, of which a short turn has more.
static uniform int tokens_per_turn(uniform int group, uniform int row_bytes) {
  if (group > 4) return CHUNK;
  const uniform int tokens = (group > 2 ? 8192 : 4096) / row_bytes / 16 * 16;
  return min(CHUNK, max(16, tokens));
}

static unmasked void locate_chunk(const uniform NeoSpan *uniform span, uniform int begin, uniform int chunk,
                                  uniform ChunkRows *uniform rows) {
  const uniform int num_tokens = min(chunk, span->token_end - begin);
  uniform int block = begin / span->block_size, row = begin % span->block_size;
  for (uniform int t = 0; t < num_tokens; row = 0, block++) {
    const uniform int end = min(num_tokens, t + span->block_size - row);
    uniform int64 k = span->block_table[block] * span->k_block_stride + row * span->k_token_stride;
    uniform int64 v = span->block_table[block] * span->v_block_stride + row * span->v_token_stride;
    for (; t < end; t++, k += span->k_token_stride, v += span->v_token_stride) {
      rows->k[t] = k;
      rows->v[t] = v;
    }
  }
  for (uniform int t = num_tokens; t < chunk; t++) {
    rows->k[t] = rows->k[num_tokens - 1];
    rows->v[t] = rows->v[num_tokens - 1];
  }
  rows->num_tokens = num_tokens;
}

// Turns the logits of `num_heads` heads into weights 2^(s - m) in place, updates m and the lane-wise sums l, and says in
// decay[g] by how much what was accumulated so far has to shrink.
static unmasked void soften_chunk(uniform float *uniform s, uniform int num_heads, uniform int num_tokens,
                                  uniform float softcap, uniform float *uniform m, uniform float *uniform l,
                                  uniform float *uniform decay) {
  for (uniform int g = 0; g < num_heads; g++, s += CHUNK, l += PC) {
    float top = NEG_INF;
    for (uniform int t = 0; t < num_tokens; t += PC) {
      float x = s[t + programIndex];
      if (softcap > 0) x = softcap * tanh_accurate(x);
      x = t + programIndex < num_tokens ? x : NEG_INF;
      s[t + programIndex] = x;
      top = max(top, x);
    }
    const uniform float before = m[g];
    const uniform float now = max(before, reduce_max(top));
    const uniform float base = now == NEG_INF ? 0 : now;  // nothing but -inf so far: every weight is 0, not NaN
    const float difference = before - base;
    const float shrink = exp2_nonpositive(difference);
    float sum = 0;
    for (uniform int t = 0; t < num_tokens; t += PC) {
      const float p = exp2_nonpositive(s[t + programIndex] - base);
      s[t + programIndex] = p;
      sum += p;
    }
    l[programIndex] = l[programIndex] * shrink + sum;
    m[g] = now;
    decay[g] = extract(shrink, 0);
  }
}

template <typename T>
static unmasked void score_heads(uniform int num_heads, const uniform T *uniform k, const uniform ChunkRows *uniform rows,
                                 const uniform float *uniform q, uniform int q_stride, uniform int head_dim,
                                 uniform float *uniform s, const uniform T *uniform ahead,
                                 const uniform int64 *uniform ahead_offsets) {
  for (uniform int g = 0; g < num_heads;) {
    const uniform int left = num_heads - g, n = rows->num_tokens;
    const uniform float *uniform qg = q + g * q_stride;
    uniform float *uniform sg = s + g * CHUNK;
    if (left >= 4) {
      score_chunk<T, 4, TB4>(k, rows->k, n, qg, q_stride, head_dim, sg, ahead, ahead_offsets);
      g += 4;
#ifdef TB3
    } else if (left == 3) {
      score_chunk<T, 3, TB3>(k, rows->k, n, qg, q_stride, head_dim, sg, ahead, ahead_offsets);
      g += 3;
#endif
    } else if (left >= 2) {
      score_chunk<T, 2, TB2>(k, rows->k, n, qg, q_stride, head_dim, sg, ahead, ahead_offsets);
      g += 2;
    } else {
      score_chunk<T, 1, TB1>(k, rows->k, n, qg, q_stride, head_dim, sg, ahead, ahead_offsets);
      g += 1;
    }
  }
}

template <typename T>
static unmasked void accumulate_heads(uniform int num_heads, const uniform T *uniform v, const uniform ChunkRows *uniform rows,
                                      const uniform float *uniform p, const uniform float *uniform decay,
                                      uniform float *uniform acc, uniform int acc_stride, uniform int head_dim,
                                      const uniform T *uniform ahead, const uniform int64 *uniform ahead_offsets) {
  for (uniform int g = 0; g < num_heads;) {
    const uniform int left = num_heads - g, n = rows->num_tokens;
    const uniform float *uniform pg = p + g * CHUNK, *uniform dg = decay + g;
    uniform float *uniform ag = acc + g * acc_stride;
    if (left >= 4) {
      accumulate_chunk<T, 4, C4>(v, rows->v, n, pg, dg, ag, acc_stride, head_dim, ahead, ahead_offsets);
      g += 4;
#ifdef C3
    } else if (left == 3) {
      accumulate_chunk<T, 3, C3>(v, rows->v, n, pg, dg, ag, acc_stride, head_dim, ahead, ahead_offsets);
      g += 3;
#endif
    } else if (left >= 2) {
      accumulate_chunk<T, 2, C2>(v, rows->v, n, pg, dg, ag, acc_stride, head_dim, ahead, ahead_offsets);
      g += 2;
    } else {
      accumulate_chunk<T, 1, C1>(v, rows->v, n, pg, dg, ag, acc_stride, head_dim, ahead, ahead_offsets);
      g += 1;
    }
  }
}

template <typename T> static unmasked void attend_span(const uniform NeoSpan *uniform span) {
  const uniform T *uniform k = (const uniform T *uniform)span->k;
  const uniform T *uniform v = (const uniform T *uniform)span->v;
  const uniform int num_heads = span->num_q_heads;
  const uniform int group = num_heads / span->num_kv_heads;
  const uniform int q_stride = pad_to_pair(span->head_dim_k), acc_stride = pad_to_pair(span->head_dim_v);
  // scratch: q and acc in pair order, l per lane, one group's weights and decays (see neo_scratch_floats in kernel.h)
  uniform float *uniform q = span->scratch;
  uniform float *uniform acc = q + (uniform int64)num_heads * q_stride;
  uniform float *uniform l = acc + (uniform int64)num_heads * acc_stride;
  uniform float *uniform p = l + num_heads * PC;
  uniform float *uniform decay = p + group * CHUNK;

  for (uniform int h = 0; h < num_heads; h++) {
    const uniform float *uniform from = span->q + (uniform int64)h * span->q_stride;
    uniform float *uniform to = q + (uniform int64)h * q_stride;
    for (uniform int i = 0; i < q_stride; i += PAIR) {
      float a = 0, b = 0;
      if (i < span->q_stride) a = from[i + programIndex];  // q's rows are padded to 16, these to a pair
      if (i + PC < span->q_stride) b = from[i + PC + programIndex];
      to_pair_order(k, a, b);
      to[i + programIndex] = a * span->q_scale;
      to[i + PC + programIndex] = b * span->q_scale;
    }
    for (uniform int i = 0; i < acc_stride; i += PC) acc[(uniform int64)h * acc_stride + i + programIndex] = 0;
    l[h * PC + programIndex] = 0;
    span->m[h] = NEG_INF;
  }

  const uniform int chunk = tokens_per_turn(group, span->head_dim_k * sizeof(uniform T));
  uniform ChunkRows chunks[2];
  if (span->token_begin < span->token_end) locate_chunk(span, span->token_begin, chunk, &chunks[0]);
  uniform int turn = 0;
  for (uniform int begin = span->token_begin; begin < span->token_end; begin += chunk, turn ^= 1) {
    const uniform ChunkRows *uniform rows = &chunks[turn];
    const uniform ChunkRows *uniform next = rows;
    if (begin + chunk < span->token_end) {
      locate_chunk(span, begin + chunk, chunk, &chunks[turn ^ 1]);
      next = &chunks[turn ^ 1];
    }
    for (uniform int h = 0; h < span->num_kv_heads; h++) {
      const uniform int first = h * group;
      const uniform T *uniform kh = k + h * span->k_head_stride;
      const uniform T *uniform vh = v + h * span->v_head_stride;
      const uniform bool is_last = h + 1 == span->num_kv_heads;
      const uniform T *uniform k_ahead = is_last ? k : kh + span->k_head_stride;
      const uniform T *uniform v_ahead = is_last ? v : vh + span->v_head_stride;
      score_heads(group, kh, rows, q + (uniform int64)first * q_stride, q_stride, span->head_dim_k, p, k_ahead,
                  is_last ? next->k : rows->k);
      soften_chunk(p, group, rows->num_tokens, span->softcap, span->m + first, l + first * PC, decay);
      accumulate_heads(group, vh, rows, p, decay, acc + (uniform int64)first * acc_stride, acc_stride, span->head_dim_v,
                       v_ahead, is_last ? next->v : rows->v);
    }
  }

  for (uniform int h = 0; h < num_heads; h++) {
    const uniform float *uniform from = acc + (uniform int64)h * acc_stride;
    uniform float *uniform to = span->acc + (uniform int64)h * span->acc_stride;
    for (uniform int i = 0; i < acc_stride; i += PAIR) {
      float a = from[i + programIndex], b = from[i + PC + programIndex];
      from_pair_order(v, a, b);
      if (i < span->acc_stride) to[i + programIndex] = a;
      if (i + PC < span->acc_stride) to[i + PC + programIndex] = b;
    }
    span->l[h] = reduce_add(l[h * PC + programIndex]);
  }
}

export void NEO_CONCAT(neo_ispc_span_f32, NEO_SUFFIX)(const uniform NeoSpan *uniform span) {
  unmasked { attend_span<float>(span); }
}

export void NEO_CONCAT(neo_ispc_span_f16, NEO_SUFFIX)(const uniform NeoSpan *uniform span) {
  unmasked { attend_span<float16>(span); }
}

export void NEO_CONCAT(neo_ispc_span_bf16, NEO_SUFFIX)(const uniform NeoSpan *uniform span) {
  unmasked { attend_span<uint16>(span); }
}
