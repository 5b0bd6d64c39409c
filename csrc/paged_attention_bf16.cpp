// Paged decode attention for q, K and V in bf16 with AVX512-BF16: the chunks and the ABI of paged_attention.ispc
// (kernel.h), with vdpbf16ps, which multiplies the stored bf16 in pairs and does twice the work of an fp32 FMA.
//
// Four query heads of a KV head share a vector, so that logits need few folds and a softmax has no loop over heads.
// Eight run as two sets of four, which share what is loaded of a row; larger groups run in slices of eight, the last
// one padded.
//
//   QK    lane = (head, pair)    q: four pairs of elements of four heads;  K: the same pairs of a row, once per head
//         fold                   four rows' sums -> a vector of four heads x four tokens
//   softmax                      on those vectors; the weights are rounded to bf16, two tokens in 32 bits
//   PV    lane = element         V: two rows interleaved;  p: the weights of the two tokens, in every lane
//
// q is exact, since it was bf16 to begin with; products are exact and sums are fp32. Only the weights are rounded, to 8
// bits, and their sum l is that of the rounded ones: an output is off by at most 2^-8 of the largest |v|. Where q is
// not bf16, or fewer than four heads share a KV head (bound by memory anyway), NEO_BF16_FALLBACK does the span.
#include <string.h>

#include "kernel.h"
#include "paged_attention_bf16_math.h"

#ifndef NEO_BF16_NAME
#error "NEO_BF16_NAME (this function) and NEO_BF16_FALLBACK (for the other spans) are set by the build"
#endif

extern "C" void NEO_BF16_FALLBACK(const NeoSpan* span);

namespace {

constexpr __mmask32 kAll = ~__mmask32{0};

// Four heads are bound by memory, and read quicker if a turn is a page of K and a page of V of one KV head; eight are
// bound by arithmetic, of which a short turn has more.
inline int tokens_per_turn(int sets, int head_dim) {
  const int page = 4096 / (head_dim * 2) / 16 * 16;
  return sets > 1 || page > kChunk ? kChunk : page < 16 ? 16 : page;
}

// q . k of kRows rows for S sets of heads. q: [head_dim / 32 rounded up, S, 4, 32], zero beyond head_dim; out:
// [S, kChunk * 4], already at the first of the rows.
template <int S>
inline void score_tile(const uint16_t* k, const int64_t* offsets, const uint16_t* q, int head_dim, float* out,
                       Ahead<uint16_t>& ahead) {
  __m512 sum[S][kRows];
#pragma GCC unroll 2
  for (int i = 0; i < S; ++i)
#pragma GCC unroll 4
    for (int t = 0; t < kRows; ++t) sum[i][t] = _mm512_setzero_ps();
  int d = 0;
  for (; d + kLine <= head_dim; d += kLine, q += S * kSet * kLine) {
    __m512i part[S][kSet];
#pragma GCC unroll 2
    for (int i = 0; i < S; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kSet; ++j) part[i][j] = _mm512_load_si512(q + (i * kSet + j) * kLine);
#pragma GCC unroll 4
    for (int t = 0; t < kRows; t += 2) {
      const uint16_t *row = k + offsets[t] + d, *other = k + offsets[t + 1] + d;
#pragma GCC unroll 4
      for (int j = 0; j < kSet; ++j) {
        const __m512i a = load_step(row + j * 8), b = load_step(other + j * 8);
#pragma GCC unroll 2
        for (int i = 0; i < S; ++i) {
          sum[i][t] = dot_pairs(sum[i][t], a, part[i][j]);
          sum[i][t + 1] = dot_pairs(sum[i][t + 1], b, part[i][j]);
        }
      }
      ahead.step();
      ahead.step();
    }
  }
  for (int j = 0; d < head_dim; ++j, d += 8) {
#pragma GCC unroll 4
    for (int t = 0; t < kRows; ++t) {
      const __m512i step = load_step(k + offsets[t] + d, head_dim - d);
#pragma GCC unroll 2
      for (int i = 0; i < S; ++i) sum[i][t] = dot_pairs(sum[i][t], step, _mm512_load_si512(q + (i * kSet + j) * kLine));
      if (j == 0) ahead.step();
    }
  }
#pragma GCC unroll 2
  for (int i = 0; i < S; ++i)
    _mm512_store_ps(out + i * kChunk * kSet, fold_quad(sum[i][0], sum[i][1], sum[i][2], sum[i][3]));
}

// A weight in bf16 in both halves of its lane's 32 bits: of its own token and of the next one. What it was rounded to.
inline __m512 keep_rounded(float* out, __m512 weight) {
  const __m512i p = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(weight)));
  const __m512i next = _mm512_shuffle_epi32(p, _MM_PERM_CDAB);
  _mm512_store_si512(out, _mm512_or_epi32(p, _mm512_slli_epi32(next, 16)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(p, 16));
}

// acc = acc * decay + p V for E lines of 32 elements, the last one with `mask`. A line of acc is two vectors, in the
// order that interleaving two rows gives (see store_acc).
template <int S, int E>
inline void accumulate_lines(const uint16_t* v, const int64_t* offsets, int num_tokens, const float* weights,
                             const float* decay, float* acc, int acc_stride, int d, __mmask32 mask,
                             Ahead<uint16_t>& ahead) {
  constexpr int kHeads = kSet * S;
  __m512 sum[kHeads][2 * E];
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
    const __m512 shrink = _mm512_set1_ps(decay[h / kSet * 16 + h % kSet * 4]);
#pragma GCC unroll 8
    for (int i = 0; i < 2 * E; ++i)
      sum[h][i] = _mm512_mul_ps(shrink, _mm512_load_ps(acc + h * acc_stride + d + 16 * i));
  }
  const auto add = [&](int t, const uint16_t* first, const uint16_t* second,
                       __mmask32 second_mask) __attribute__((always_inline)) {
    const float* pair = weights + t / 4 * 16 + t % 4;
    __m512i low[E], high[E];
#pragma GCC unroll 4
    for (int i = 0; i < E; ++i) {
      const __mmask32 line_mask = i + 1 == E ? mask : kAll;
      const __m512i a = _mm512_maskz_loadu_epi16(line_mask, first + i * kLine);
      const __m512i b = _mm512_maskz_loadu_epi16(line_mask & second_mask, second + i * kLine);
      low[i] = _mm512_unpacklo_epi16(a, b);
      high[i] = _mm512_unpackhi_epi16(a, b);
    }
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      const __m512i p = _mm512_castps_si512(_mm512_set1_ps(pair[h / kSet * kSet * kChunk + h % kSet * 4]));
#pragma GCC unroll 4
      for (int i = 0; i < E; ++i) {
        sum[h][2 * i] = dot_pairs(sum[h][2 * i], low[i], p);
        sum[h][2 * i + 1] = dot_pairs(sum[h][2 * i + 1], high[i], p);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2 * E; ++i) ahead.step();
  };
  int t = 0;
  for (; t + 2 <= num_tokens; t += 2) add(t, v + offsets[t] + d, v + offsets[t + 1] + d, kAll);
  if (t < num_tokens) add(t, v + offsets[t] + d, v + offsets[t] + d, 0);  // a zero, as 0 * v can be NaN
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 8
    for (int i = 0; i < 2 * E; ++i) _mm512_store_ps(acc + h * acc_stride + d + 16 * i, sum[h][i]);
}

template <int S>
inline void accumulate_chunk(const uint16_t* v, const int64_t* offsets, int num_tokens, const float* weights,
                             const float* decay, float* acc, int acc_stride, int head_dim, Ahead<uint16_t>& ahead) {
  constexpr int kWide = 2 / S;  // lines at once: sums for most of the registers
  int d = 0;
  for (; d + kWide * kLine <= head_dim; d += kWide * kLine)
    accumulate_lines<S, kWide>(v, offsets, num_tokens, weights, decay, acc, acc_stride, d, kAll, ahead);
  for (; d < head_dim; d += kLine)
    accumulate_lines<S, 1>(v, offsets, num_tokens, weights, decay, acc, acc_stride, d,
                           head_dim - d < kLine ? first_lanes(head_dim - d) : kAll, ahead);
}

// q of one slice of heads, [lines, S, 4, 32]: lane (head, pair) of a step.
template <int S>
inline void pack_q(const float* q, int q_stride, int num_heads, int head_dim, uint16_t* out) {
  memset(out, 0, static_cast<size_t>(round_up(head_dim, kLine)) * S * kSet * sizeof(uint16_t));
  for (int h = 0; h < num_heads; ++h)
    for (int d = 0; d < head_dim; d += 8) {  // q's rows are padded to 16 with zeros
      const float* row = q + static_cast<int64_t>(h) * q_stride + d;
      const int part = (d / kLine * S + h / kSet) * kSet + d % kLine / 8;
      _mm_store_si128(reinterpret_cast<__m128i*>(out + part * kLine + h % kSet * 8),
                      _mm256_cvtepi32_epi16(_mm256_srli_epi32(_mm256_castps_si256(_mm256_load_ps(row)), 16)));
    }
}

// A head's accumulators from interleaved order into plain order.
inline void store_acc(const float* acc, int head_dim, float* out, int out_stride) {
  const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  for (int d = 0; d < head_dim; d += kLine) {
    const __m512d a = _mm512_load_pd(acc + d), b = _mm512_load_pd(acc + d + 16);
    _mm512_store_pd(out + d, _mm512_permutex2var_pd(a, low, b));
    if (d + 16 < out_stride) _mm512_store_pd(out + d + 16, _mm512_permutex2var_pd(a, high, b));
  }
}

// See attend_span. S sets of four heads.
template <int S>
struct BfloatArithmetic {
  using Element = uint16_t;
  using Query = uint16_t;
  static constexpr int kSets = S;

  static int padded(int head_dim) { return round_up(head_dim, kLine); }
  static int tokens_per_turn(int head_dim) { return ::tokens_per_turn(S, head_dim); }
  static void pack_q(const float* q, int q_stride, int num_heads, int head_dim, Query* out) {
    ::pack_q<S>(q, q_stride, num_heads, head_dim, out);
  }
  static void score_tile(const Element* k, const int64_t* offsets, const Query* q, int head_dim, float* out,
                         Ahead<Element>& ahead) {
    ::score_tile<S>(k, offsets, q, head_dim, out, ahead);
  }
  static __m512 keep(float* out, __m512 weight) { return keep_rounded(out, weight); }
  static void accumulate_chunk(const Element* v, const int64_t* offsets, int num_tokens, const float* weights,
                               const float* decay, float* acc, int acc_stride, int head_dim, Ahead<Element>& ahead) {
    ::accumulate_chunk<S>(v, offsets, num_tokens, weights, decay, acc, acc_stride, head_dim, ahead);
  }
  static void store_acc(const float* acc, int head_dim, float* out, int out_stride) {
    ::store_acc(acc, head_dim, out, out_stride);
  }
};

}  // namespace

extern "C" void NEO_BF16_NAME(const NeoSpan* span) {
  const int group = span->num_q_heads / span->num_kv_heads;
  if (!span->q_is_bf16 || group < kSet) return NEO_BF16_FALLBACK(span);
  if (group == kSet) return attend_span<BfloatArithmetic<1>>(*span);
  return attend_span<BfloatArithmetic<2>>(*span);
}
