// Paged attention for large groups in fp32 FMAs of AVX-512, for KV of any dtype: the chunks and the ABI of
// paged_attention.ispc (kernel.h). Eight heads and more of a KV head are bound by FMAs, so that little else may take
// part: four query heads share a vector, so that logits need few folds and a softmax has no loop over heads, and two
// such sets share what is loaded and converted of a row. Larger groups (tiles of a prompt's chunk) run in slices of
// eight, the last one padded; smaller ones are left to NEO_WIDE_FALLBACK.
//
//   QK    lane = (head, element)  q: four elements of four heads;  K: the same four of a row, once per head
//         fold                    four rows' sums -> a vector of four heads x four tokens
//   softmax                       on those vectors
//   PV    lane = element          V: a row;  p: the weight of a head, in every lane
#include <string.h>

#include "kernel.h"
#include "paged_attention_avx512.h"

#ifndef NEO_WIDE_FALLBACK_F32
#error "NEO_WIDE_NAME_{F32,F16,BF16} (these functions) and NEO_WIDE_FALLBACK_* (for small groups) are set by the build"
#endif

extern "C" {
void NEO_WIDE_FALLBACK_F32(const NeoSpan* span);
void NEO_WIDE_FALLBACK_F16(const NeoSpan* span);
void NEO_WIDE_FALLBACK_BF16(const NeoSpan* span);
}

namespace {

constexpr int kHeads = 2 * kSet;  // of a slice: the query heads of a KV head that are computed together
constexpr int kMinGroup = 6;      // below, the other kernels lose less than a slice's padding
constexpr int kLanes = 16;
constexpr int kSteps = 4;  // elements of a row that are multiplied at once

enum class Half : uint16_t {};    // bits of an fp16
enum class Bfloat : uint16_t {};  // bits of a bf16

inline __mmask16 lanes_below(int n) { return n >= kLanes ? __mmask16{0xffff} : static_cast<__mmask16>(first_lanes(n)); }

// Sixteen elements of a row where the mask says so, zeros elsewhere.
inline __m512 load_elements(const float* row, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, row); }
inline __m512 load_elements(const Half* row, __mmask16 mask) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, row));
}
inline __m512 load_elements(const Bfloat* row, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row)), 16));
}

// Four elements of a row, four times.
inline __m512 load_step(const float* row) { return _mm512_broadcast_f32x4(_mm_loadu_ps(row)); }
inline __m256i four_times(const void* halves) {
  return _mm256_broadcastq_epi64(_mm_loadl_epi64(static_cast<const __m128i*>(halves)));
}
inline __m512 load_step(const Half* row) { return _mm512_cvtph_ps(four_times(row)); }
inline __m512 load_step(const Bfloat* row) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(four_times(row)), 16));
}

// q . k of kRows rows for eight heads. q: [head_dim / 4, 2, (head, element)]; out: two sets of [kChunk * 4], already at
// the first of the rows.
template <typename T>
inline void score_tile(const T* k, const int64_t* offsets, const float* q, int head_dim, float* out, Ahead<T>& ahead) {
  const T* rows[kRows];
#pragma GCC unroll 4
  for (int t = 0; t < kRows; ++t) rows[t] = k + offsets[t];
  __m512 sum[2][kRows];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
#pragma GCC unroll 4
    for (int t = 0; t < kRows; ++t) sum[i][t] = _mm512_setzero_ps();
  const auto add = [&](int d) __attribute__((always_inline)) {
    const __m512 first = _mm512_load_ps(q + d * kHeads), second = _mm512_load_ps(q + d * kHeads + kLanes);
#pragma GCC unroll 4
    for (int t = 0; t < kRows; ++t) {
      const __m512 step = load_step(rows[t] + d);
      sum[0][t] = _mm512_fmadd_ps(step, first, sum[0][t]);
      sum[1][t] = _mm512_fmadd_ps(step, second, sum[1][t]);
    }
  };
  int d = 0;
  for (; d + 2 * kSteps <= head_dim; d += 2 * kSteps) {  // of four rows: 32 elements
    add(d);
    add(d + kSteps);
#pragma GCC unroll 2
    for (size_t i = 0; i < sizeof(T) / 2; ++i) ahead.step();
  }
  if (d < head_dim) add(d);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    _mm512_store_ps(out + i * kChunk * kSet, fold_quad(sum[i][0], sum[i][1], sum[i][2], sum[i][3]));
}

// acc = acc * decay + p V for E vectors of elements, the last one with `mask`.
template <int E, typename T>
inline void accumulate_elements(const T* v, const int64_t* offsets, int num_tokens, const float* weights,
                                const float* decay, float* acc, int acc_stride, int d, __mmask16 mask,
                                Ahead<T>& ahead) {
  __m512 sum[kHeads][E];
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
    const __m512 shrink = _mm512_set1_ps(decay[h / kSet * kLanes + h % kSet * 4]);
#pragma GCC unroll 2
    for (int i = 0; i < E; ++i)
      sum[h][i] = _mm512_mul_ps(shrink, _mm512_load_ps(acc + h * acc_stride + d + kLanes * i));
  }
  for (int t = 0; t < num_tokens; ++t) {
    const T* row = v + offsets[t] + d;
    const float* p = weights + t / 4 * kLanes + t % 4;
    __m512 element[E];
#pragma GCC unroll 2
    for (int i = 0; i < E; ++i) element[i] = load_elements(row + kLanes * i, i + 1 == E ? mask : lanes_below(kLanes));
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      const __m512 weight = _mm512_set1_ps(p[h / kSet * kChunk * kSet + h % kSet * 4]);
#pragma GCC unroll 2
      for (int i = 0; i < E; ++i) sum[h][i] = _mm512_fmadd_ps(element[i], weight, sum[h][i]);
    }
#pragma GCC unroll 2
    for (size_t i = 0; i < (E * sizeof(T) + 2) / 4; ++i) ahead.step();
  }
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 2
    for (int i = 0; i < E; ++i) _mm512_store_ps(acc + h * acc_stride + d + kLanes * i, sum[h][i]);
}

template <typename T>
inline void accumulate_chunk(const T* v, const int64_t* offsets, int num_tokens, const float* weights,
                             const float* decay, float* acc, int acc_stride, int head_dim, Ahead<T>& ahead) {
  int d = 0;
  for (; d + kLanes < head_dim; d += 2 * kLanes)
    accumulate_elements<2>(v, offsets, num_tokens, weights, decay, acc, acc_stride, d,
                           lanes_below(head_dim - d - kLanes), ahead);
  if (d < head_dim)
    accumulate_elements<1>(v, offsets, num_tokens, weights, decay, acc, acc_stride, d, lanes_below(head_dim - d),
                           ahead);
}

// q of one slice of heads: [head_dim / 4, 2, (head, element)].
inline void pack_q(const float* q, int q_stride, int num_heads, int head_dim, float* out) {
  memset(out, 0, static_cast<size_t>(head_dim) * kHeads * sizeof(float));
  for (int h = 0; h < num_heads; ++h)
    for (int d = 0; d < head_dim; d += kSteps)
      _mm_store_ps(out + d * kHeads + h / kSet * kLanes + h % kSet * kSteps,
                   _mm_load_ps(q + static_cast<int64_t>(h) * q_stride + d));
}

// See attend_span.
template <typename T>
struct FloatArithmetic {
  using Element = T;
  using Query = float;
  static constexpr int kSets = 2;

  static int padded(int head_dim) { return neo_padded(head_dim); }
  static int tokens_per_turn(int) { return kChunk; }
  static void pack_q(const float* q, int q_stride, int num_heads, int head_dim, Query* out) {
    ::pack_q(q, q_stride, num_heads, head_dim, out);
  }
  static void score_tile(const T* k, const int64_t* offsets, const Query* q, int head_dim, float* out,
                         Ahead<T>& ahead) {
    ::score_tile(k, offsets, q, head_dim, out, ahead);
  }
  static __m512 keep(float* out, __m512 weight) {
    _mm512_store_ps(out, weight);
    return weight;
  }
  static void accumulate_chunk(const T* v, const int64_t* offsets, int num_tokens, const float* weights,
                               const float* decay, float* acc, int acc_stride, int head_dim, Ahead<T>& ahead) {
    ::accumulate_chunk(v, offsets, num_tokens, weights, decay, acc, acc_stride, head_dim, ahead);
  }
  static void store_acc(const float* acc, int, float* out, int out_stride) {
    memcpy(out, acc, static_cast<size_t>(out_stride) * sizeof(float));
  }
};

// Small groups, and rows of K that do not divide into steps.
bool is_for_others(const NeoSpan& span) {
  return span.num_q_heads < kMinGroup * span.num_kv_heads || span.head_dim_k % kSteps != 0;
}

}  // namespace

extern "C" void NEO_WIDE_NAME_F32(const NeoSpan* span) {
  is_for_others(*span) ? NEO_WIDE_FALLBACK_F32(span) : attend_span<FloatArithmetic<float>>(*span);
}

extern "C" void NEO_WIDE_NAME_F16(const NeoSpan* span) {
  is_for_others(*span) ? NEO_WIDE_FALLBACK_F16(span) : attend_span<FloatArithmetic<Half>>(*span);
}

extern "C" void NEO_WIDE_NAME_BF16(const NeoSpan* span) {
  is_for_others(*span) ? NEO_WIDE_FALLBACK_BF16(span) : attend_span<FloatArithmetic<Bfloat>>(*span);
}
