// What the AVX-512 kernels in intrinsics share: chunks of rows, prefetching, folds and the softmax of four heads that
// share a vector, lane = head * 4 + token. Only in an unnamed namespace: code for one instruction set must not be
// merged with another's.
#ifndef NEO_COMPILE_CSRC_PAGED_ATTENTION_AVX512_H_
#define NEO_COMPILE_CSRC_PAGED_ATTENTION_AVX512_H_

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernel.h"

namespace {

constexpr int kSet = 4;     // query heads that share a vector
constexpr int kRows = 4;    // K rows side by side: as many as fold into a vector; more cost bandwidth from memory
constexpr int kChunk = 64;  // tokens per softmax update, at most
constexpr float kInf = __builtin_inff();

inline int round_up(int n, int step) { return (n + step - 1) / step * step; }

inline __mmask32 first_lanes(int n) { return static_cast<__mmask32>((1ull << n) - 1); }

// Rows of a chunk, as offsets from KV head 0. Entries past the last token repeat it, so that whole tiles can be read,
// and Ahead may look one further.
struct ChunkRows {
  int64_t k[kChunk + 1], v[kChunk + 1];
  int32_t num_tokens;
};

inline void locate_chunk(const NeoSpan& span, int32_t begin, int32_t chunk, ChunkRows* rows) {
  const int32_t n = span.token_end - begin < chunk ? span.token_end - begin : chunk;
  int32_t block = begin / span.block_size, row = begin % span.block_size;
  for (int32_t t = 0; t < n; row = 0, ++block) {
    const int32_t end = n < t + span.block_size - row ? n : t + span.block_size - row;
    int64_t k = span.block_table[block] * span.k_block_stride + row * span.k_token_stride;
    int64_t v = span.block_table[block] * span.v_block_stride + row * span.v_token_stride;
    for (; t < end; ++t, k += span.k_token_stride, v += span.v_token_stride) rows->k[t] = k, rows->v[t] = v;
  }
  for (int32_t t = n; t <= kChunk; ++t) rows->k[t] = rows->k[n - 1], rows->v[t] = rows->v[n - 1];
  rows->num_tokens = n;
}

// Rows to prefetch while others are computed on: a line a step, in the order in which they lie in memory. (In the order
// of the computation, which goes by columns, half of the bandwidth is lost.)
template <typename T>
class Ahead {
 public:
  Ahead(const T* base, const int64_t* offsets, int head_dim)
      : base_(base),
        offsets_(offsets),
        lines_((head_dim + kElements - 1) / kElements),
        left_(lines_),
        next_(base + *offsets) {}

  void step() {
    _mm_prefetch(reinterpret_cast<const char*>(next_), _MM_HINT_T1);
    next_ += kElements;
    if (--left_ > 0) return;
    next_ = base_ + *++offsets_;
    left_ = lines_;
  }

 private:
  static constexpr int kElements = 64 / sizeof(T);  // of a cache line
  const T* base_;
  const int64_t* offsets_;
  int lines_, left_;
  const T* next_;
};

// Each lane of the result is the sum of four neighbouring lanes: of a, b, c, d in turn.
inline __m512 fold_quad(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

// The maximum over the tokens of each head, in all of its lanes.
inline __m512 max_over_tokens(__m512 x) {
  x = _mm512_max_ps(x, _mm512_shuffle_ps(x, x, 0x4e));
  return _mm512_max_ps(x, _mm512_shuffle_ps(x, x, 0xb1));
}

// x = 2^x for x <= 0, relative error about 2e-7; 0 below 2^-150, NaN stays NaN. N side by side: one is a long chain.
template <int N>
inline void exp2_nonpositive(__m512 (&x)[N]) {
  constexpr float kPolynomial[] = {1.3333558146428443e-3f, 9.6181291076284772e-3f, 5.5504108664821580e-2f,
                                   2.4022650695910072e-1f, 6.9314718055994531e-1f, 1.0f};
  __m512 n[N], f[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    x[i] = _mm512_max_ps(_mm512_set1_ps(-160.0f), x[i]);  // this way round a NaN is kept
    n[i] = _mm512_roundscale_ps(x[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    f[i] = _mm512_sub_ps(x[i], n[i]);
    x[i] = _mm512_set1_ps(1.5403530393381609e-4f);
  }
#pragma GCC unroll 6
  for (int j = 0; j < 6; ++j)
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) x[i] = _mm512_fmadd_ps(x[i], f[i], _mm512_set1_ps(kPolynomial[j]));
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) x[i] = _mm512_scalef_ps(x[i], n[i]);
}

inline __m512 exp2_nonpositive(__m512 x) {
  __m512 one[1] = {x};
  exp2_nonpositive(one);
  return one[0];
}

// tanh with a relative error of about 3e-7, whatever x: a large soft cap multiplies small ones.
inline __m512 tanh_accurate(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), size = _mm512_abs_ps(x), y = _mm512_mul_ps(x, x);
  // below 0.1, where 1 - e cancels: the series up to x^7, off by 2e-10
  __m512 small = _mm512_fnmadd_ps(y, _mm512_set1_ps(0.053968254f), _mm512_set1_ps(0.13333333f));
  small = _mm512_fmadd_ps(y, small, _mm512_set1_ps(-0.33333333f));
  small = _mm512_mul_ps(x, _mm512_fmadd_ps(y, small, one));
  const __m512 e = exp2_nonpositive(_mm512_mul_ps(size, _mm512_set1_ps(-2.8853900817779268f)));
  const __m512 large = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  const __m512i sign = _mm512_and_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MIN));
  const __m512 signed_large = _mm512_castsi512_ps(_mm512_or_epi32(_mm512_castps_si512(large), sign));
  return _mm512_mask_mov_ps(signed_large, _mm512_cmp_ps_mask(size, _mm512_set1_ps(0.1f), _CMP_LT_OQ), small);
}

// Dot products s [kChunk * 4] of one set -> weights 2^(x - m). By lanes: m, the sums l, and the factor by which what
// was accumulated so far shrinks. keep(out, weights) stores a vector of weights and returns what they were rounded to.
template <typename Keep>
inline void soften_chunk(float* s, int num_tokens, const NeoSpan& span, float* m, float* l, float* decay, Keep keep) {
  const __m512i lane_token = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 1, 2, 3));
  const __m512 scale = _mm512_set1_ps(span.q_scale), softcap = _mm512_set1_ps(span.softcap);
  const int vectors = (num_tokens + 15) / 16 * 4;  // those past the last token are masked
  const __m512 before = _mm512_load_ps(m);
  __m512 top = before;
  for (int i = 0; i < vectors; ++i) {
    __m512 x = _mm512_mul_ps(_mm512_load_ps(s + 16 * i), scale);
    if (span.softcap > 0) x = _mm512_mul_ps(softcap, tanh_accurate(x));
    const __mmask16 valid = _mm512_cmplt_epi32_mask(lane_token, _mm512_set1_epi32(num_tokens - 4 * i));
    x = _mm512_mask_mov_ps(_mm512_set1_ps(-kInf), valid, x);
    _mm512_store_ps(s + 16 * i, x);
    top = _mm512_max_ps(x, top);  // this way round a NaN is dropped
  }
  top = max_over_tokens(top);
  // nothing but -inf so far: every weight is 0, not NaN
  const __m512 base = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(top, _mm512_set1_ps(-kInf), _CMP_NEQ_OQ), top);
  const __m512 shrink = exp2_nonpositive(_mm512_sub_ps(before, base));
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < vectors; i += 4) {
    __m512 x[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) x[j] = _mm512_sub_ps(_mm512_load_ps(s + 16 * (i + j)), base);
    exp2_nonpositive(x);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sum = _mm512_add_ps(sum, keep(s + 16 * (i + j), x[j]));
  }
  _mm512_store_ps(l, _mm512_fmadd_ps(_mm512_load_ps(l), shrink, sum));
  _mm512_store_ps(m, top);
  _mm512_store_ps(decay, shrink);
}

// A span, in slices of A::kSets * 4 query heads of a KV head, the last one of a group padded. The arithmetic A has:
//   Element, Query         of the cache's rows, and of a slice's q as the tiles read it: padded(head_dim) for each head
//   tokens_per_turn        at most kChunk
//   pack_q                 a slice's heads into that order
//   score_tile             q . k of kRows rows, into the sets' [kChunk * 4]
//   keep                   see soften_chunk
//   accumulate_chunk       acc = acc * decay + weights V; rows of acc are padded(head_dim_v) apart, in an order of its
//   own store_acc              a row of acc into plain order
template <typename A>
inline void attend_span(const NeoSpan& span) {
  using T = typename A::Element;
  constexpr int S = A::kSets, kHeads = kSet * S;
  const T* k = static_cast<const T*>(span.k);
  const T* v = static_cast<const T*>(span.v);
  const int group = span.num_q_heads / span.num_kv_heads;
  const int slices = (group + kHeads - 1) / kHeads;  // per KV head
  const int k_dim = A::padded(span.head_dim_k), v_dim = A::padded(span.head_dim_v);
  const int64_t num_slices = static_cast<int64_t>(span.num_kv_heads) * slices;
  float* acc = span.scratch;  // [num_slices, kHeads, v_dim]
  float* m = acc + num_slices * kHeads * v_dim;
  float* l = m + num_slices * S * 16;
  float* s = l + num_slices * S * 16;  // [S, kChunk * 4]
  float* decay = s + kChunk * kHeads;
  auto* q = reinterpret_cast<typename A::Query*>(decay + 16 * S);  // [num_slices, k_dim * kHeads]
  const auto first_head = [&](int64_t slice) { return slice / slices * group + slice % slices * kHeads; };
  const auto heads_of = [&](int64_t slice) {
    const int left = group - static_cast<int>(slice % slices) * kHeads;
    return left < kHeads ? left : kHeads;
  };

  memset(acc, 0, static_cast<size_t>(num_slices) * kHeads * v_dim * sizeof(float));
  for (int64_t i = 0; i < num_slices * S; ++i) {
    _mm512_store_ps(m + 16 * i, _mm512_set1_ps(-kInf));
    _mm512_store_ps(l + 16 * i, _mm512_setzero_ps());
  }
  for (int64_t i = 0; i < num_slices; ++i)
    A::pack_q(span.q + first_head(i) * span.q_stride, span.q_stride, heads_of(i), span.head_dim_k,
              q + i * k_dim * kHeads);

  const int chunk = A::tokens_per_turn(span.head_dim_k);
  ChunkRows chunks[2];
  if (span.token_begin < span.token_end) locate_chunk(span, span.token_begin, chunk, &chunks[0]);
  int turn = 0;
  for (int begin = span.token_begin; begin < span.token_end; begin += chunk, turn ^= 1) {
    const ChunkRows& rows = chunks[turn];
    const ChunkRows* next = &rows;
    if (begin + chunk < span.token_end) {
      locate_chunk(span, begin + chunk, chunk, &chunks[turn ^ 1]);
      next = &chunks[turn ^ 1];
    }
    for (int h = 0; h < span.num_kv_heads; ++h) {
      const bool is_last = h + 1 == span.num_kv_heads;
      const T* kh = k + h * span.k_head_stride;
      const T* vh = v + h * span.v_head_stride;
      for (int64_t slice = int64_t{h} * slices; slice < (int64_t{h} + 1) * slices; ++slice) {
        Ahead<T> k_ahead(is_last ? k : kh + span.k_head_stride, is_last ? next->k : rows.k, span.head_dim_k);
        Ahead<T> v_ahead(is_last ? v : vh + span.v_head_stride, is_last ? next->v : rows.v, span.head_dim_v);
        for (int t = 0; t < rows.num_tokens; t += kRows)
          A::score_tile(kh, rows.k + t, q + slice * k_dim * kHeads, span.head_dim_k, s + t * kSet, k_ahead);
        for (int i = 0; i < S; ++i)
          soften_chunk(s + i * kChunk * kSet, rows.num_tokens, span, m + 16 * (slice * S + i), l + 16 * (slice * S + i),
                       decay + 16 * i, A::keep);
        A::accumulate_chunk(vh, rows.v, rows.num_tokens, s, decay, acc + slice * kHeads * v_dim, v_dim, span.head_dim_v,
                            v_ahead);
      }
    }
  }

  for (int64_t slice = 0; slice < num_slices; ++slice)
    for (int h = 0; h < heads_of(slice); ++h) {
      const int64_t head = first_head(slice) + h, set = (slice * S + h / kSet) * 16 + h % kSet * 4;
      A::store_acc(acc + (slice * kHeads + h) * v_dim, span.head_dim_v, span.acc + head * span.acc_stride,
                   span.acc_stride);
      span.m[head] = m[set];
      span.l[head] = (l[set] + l[set + 1]) + (l[set + 2] + l[set + 3]);
    }
}

}  // namespace

#endif  // NEO_COMPILE_CSRC_PAGED_ATTENTION_AVX512_H_
