// Arithmetic of paged_attention_bf16.cpp (AVX-512 with BF16, which every includer is compiled for): steps of a row,
// folds, a base-2 exponential. Only in an unnamed namespace: code for one instruction set must not be merged with
// another's.
#ifndef NEO_COMPILE_CSRC_PAGED_ATTENTION_BF16_MATH_H_
#define NEO_COMPILE_CSRC_PAGED_ATTENTION_BF16_MATH_H_

#include <immintrin.h>
#include <stdint.h>

namespace {

constexpr int kLine = 32;  // bf16 values of a vector, and of a cache line

constexpr int kSet = 4;  // query heads that share a vector, with four tokens each: lane = head * 4 + token

inline __mmask32 first_lanes(int n) { return static_cast<__mmask32>((1ull << n) - 1); }

inline __m512 dot_pairs(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// Eight elements of a row, four times.
inline __m512i load_step(const uint16_t* row) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row)));
}

// The same where only n elements are left, zeros behind them.
inline __m512i load_step(const uint16_t* row, int n) {
  const __mmask8 mask = static_cast<__mmask8>(first_lanes(n < 8 ? n : 8));
  return _mm512_broadcast_i32x4(_mm_maskz_loadu_epi16(mask, row));
}

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

}  // namespace

#endif  // NEO_COMPILE_CSRC_PAGED_ATTENTION_BF16_MATH_H_
