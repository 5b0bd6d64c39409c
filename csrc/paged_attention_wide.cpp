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
constexpr int kRows = 4;          // K rows side by side
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

inline __m512 keep_exact(float* out, __m512 weight) {
  _mm512_store_ps(out, weight);
  return weight;
}

template <typename T>
inline void attend_span(const NeoSpan& span) {
  const T* k = static_cast<const T*>(span.k);
  const T* v = static_cast<const T*>(span.v);
  const int group = span.num_q_heads / span.num_kv_heads;
  const int slices = (group + kHeads - 1) / kHeads;  // per KV head
  const int k_dim = neo_padded(span.head_dim_k), v_dim = neo_padded(span.head_dim_v);
  const int64_t num_slices = static_cast<int64_t>(span.num_kv_heads) * slices;
  float* acc = span.scratch;  // [num_slices, kHeads, v_dim]
  float* q = acc + num_slices * kHeads * v_dim;
  float* m = q + num_slices * kHeads * k_dim;
  float* l = m + num_slices * 2 * kLanes;
  float* s = l + num_slices * 2 * kLanes;  // [2, kChunk * 4]
  float* decay = s + kChunk * kHeads;
  const auto first_head = [&](int64_t slice) { return slice / slices * group + slice % slices * kHeads; };
  const auto heads_of = [&](int64_t slice) {
    const int left = group - static_cast<int>(slice % slices) * kHeads;
    return left < kHeads ? left : kHeads;
  };

  memset(acc, 0, static_cast<size_t>(num_slices) * kHeads * v_dim * sizeof(float));
  for (int64_t i = 0; i < num_slices; ++i) {
    for (int64_t lane = 2 * i * kLanes; lane < 2 * (i + 1) * kLanes; lane += kLanes) {
      _mm512_store_ps(m + lane, _mm512_set1_ps(-kInf));
      _mm512_store_ps(l + lane, _mm512_setzero_ps());
    }
    pack_q(span.q + first_head(i) * span.q_stride, span.q_stride, heads_of(i), span.head_dim_k, q + i * kHeads * k_dim);
  }

  ChunkRows chunks[2];
  if (span.token_begin < span.token_end) locate_chunk(span, span.token_begin, kChunk, &chunks[0]);
  int turn = 0;
  for (int begin = span.token_begin; begin < span.token_end; begin += kChunk, turn ^= 1) {
    const ChunkRows& rows = chunks[turn];
    const ChunkRows* next = &rows;
    if (begin + kChunk < span.token_end) {
      locate_chunk(span, begin + kChunk, kChunk, &chunks[turn ^ 1]);
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
          score_tile(kh, rows.k + t, q + slice * kHeads * k_dim, span.head_dim_k, s + t * kSet, k_ahead);
        for (int i = 0; i < 2; ++i)
          soften_chunk(s + i * kChunk * kSet, rows.num_tokens, span, m + kLanes * (2 * slice + i),
                       l + kLanes * (2 * slice + i), decay + kLanes * i, keep_exact);
        accumulate_chunk(vh, rows.v, rows.num_tokens, s, decay, acc + slice * kHeads * v_dim, v_dim, span.head_dim_v,
                         v_ahead);
      }
    }
  }

  for (int64_t slice = 0; slice < num_slices; ++slice)
    for (int h = 0; h < heads_of(slice); ++h) {
      const int64_t head = first_head(slice) + h, lane = (2 * slice + h / kSet) * kLanes + h % kSet * 4;
      memcpy(span.acc + head * span.acc_stride, acc + (slice * kHeads + h) * v_dim,
             static_cast<size_t>(v_dim) * sizeof(float));
      span.m[head] = m[lane];
      span.l[head] = (l[lane] + l[lane + 1]) + (l[lane + 2] + l[lane + 3]);
    }
}

// Small groups, and rows of K that do not divide into steps.
bool is_for_others(const NeoSpan& span) {
  return span.num_q_heads < kMinGroup * span.num_kv_heads || span.head_dim_k % kSteps != 0;
}

}  // namespace

extern "C" void NEO_WIDE_NAME_F32(const NeoSpan* span) {
  is_for_others(*span) ? NEO_WIDE_FALLBACK_F32(span) : attend_span<float>(*span);
}

extern "C" void NEO_WIDE_NAME_F16(const NeoSpan* span) {
  is_for_others(*span) ? NEO_WIDE_FALLBACK_F16(span) : attend_span<Half>(*span);
}

extern "C" void NEO_WIDE_NAME_BF16(const NeoSpan* span) {
  is_for_others(*span) ? NEO_WIDE_FALLBACK_BF16(span) : attend_span<Bfloat>(*span);
}
