// Arithmetic of paged_attention_bf16.cpp (AVX-512 with BF16, which every includer is compiled for). Only in an unnamed
// namespace: code for one instruction set must not be merged with another's.
#ifndef NEO_COMPILE_CSRC_PAGED_ATTENTION_BF16_MATH_H_
#define NEO_COMPILE_CSRC_PAGED_ATTENTION_BF16_MATH_H_

#include <immintrin.h>
#include <stdint.h>

#include "paged_attention_avx512.h"

namespace {

constexpr int kLine = 32;  // bf16 values of a vector, and of a cache line

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

}  // namespace

#endif  // NEO_COMPILE_CSRC_PAGED_ATTENTION_BF16_MATH_H_
