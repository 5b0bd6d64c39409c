// fp16 / bf16 <-> fp32 by the lane. Vector extensions of GCC and Clang, with F16C where the translation unit is
// compiled for it (GCC's own auto-vectorised fp16 conversion is 30 times slower).
//
// Everything is in an unnamed namespace on purpose: the including file is compiled once per instruction set, and the
// linker must not merge an AVX-512 copy of an inline function into the baseline code.
#ifndef NEO_COMPILE_CSRC_HALF_H_
#define NEO_COMPILE_CSRC_HALF_H_

#include <stdint.h>
#include <string.h>
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HVec __attribute__((vector_size(2 * kLanes)));

struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast between different sizes");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

inline Vec splat(float x) { return x - Vec{}; }
inline UVec splat_bits(uint32_t x) { return x - UVec{}; }
inline UVec blend(IVec mask, UVec yes, UVec no) {
  const UVec bits = bit_cast<UVec>(mask);
  return (bits & yes) | (~bits & no);
}
inline Vec blend(IVec mask, Vec yes, Vec no) {
  return bit_cast<Vec>(blend(mask, bit_cast<UVec>(yes), bit_cast<UVec>(no)));
}

// ---- load: kLanes elements to fp32 ----

inline Vec load(const float* p) {
  Vec x;
  memcpy(&x, p, sizeof(x));
  return x;
}

inline Vec load(const BF16* p) {
  HVec h;
  memcpy(&h, p, sizeof(h));
  return bit_cast<Vec>(__builtin_convertvector(h, UVec) << 16);
}

inline Vec load(const F16* p) {
  HVec h;
  memcpy(&h, p, sizeof(h));
#if defined(__AVX512F__)  // maskz: GCC 12 warns about the undefined pass-through of the plain form
  return bit_cast<Vec>(_mm512_maskz_cvtph_ps(0xffff, bit_cast<__m256i>(h)));
#elif defined(__F16C__) && defined(__AVX2__)
  return bit_cast<Vec>(_mm256_cvtph_ps(bit_cast<__m128i>(h)));
#elif defined(__aarch64__)
  typedef __fp16 NativeHalf __attribute__((vector_size(2 * kLanes)));
  return __builtin_convertvector(bit_cast<NativeHalf>(h), Vec);
#else
  // Shift exponent and mantissa into place, then fix the two special exponents (inf / NaN, subnormal).
  const UVec wide = __builtin_convertvector(h, UVec);
  const UVec magnitude = (wide & 0x7fffu) << 13;
  const UVec exponent = magnitude & 0x0f800000u;
  const UVec normal = magnitude + ((127u - 15u) << 23);
  const UVec special = normal + ((128u - 16u) << 23);
  const Vec subnormal = bit_cast<Vec>(normal + (1u << 23)) - bit_cast<Vec>(splat_bits(113u << 23));
  UVec bits = blend(exponent == splat_bits(0x0f800000u), special, normal);
  bits = blend(exponent == UVec{}, bit_cast<UVec>(subnormal), bits);
  return bit_cast<Vec>(bits | (wide & 0x8000u) << 16);
#endif
}

// ---- store: fp32 to kLanes elements, round to nearest even ----

inline void store(Vec x, float* p) { memcpy(p, &x, sizeof(x)); }

inline void store(Vec x, BF16* p) {
  const UVec bits = bit_cast<UVec>(x);
  const UVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const HVec h = __builtin_convertvector(blend(x != x, (bits >> 16) | 0x40u, rounded), HVec);
  memcpy(p, &h, sizeof(h));
}

inline void store(Vec x, F16* p) {
#if defined(__AVX512F__)
  const __m256i h = _mm512_maskz_cvtps_ph(0xffff, bit_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  memcpy(p, &h, sizeof(h));
#elif defined(__F16C__) && defined(__AVX2__)
  const __m128i h = _mm256_cvtps_ph(bit_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  memcpy(p, &h, sizeof(h));
#elif defined(__aarch64__)
  typedef __fp16 NativeHalf __attribute__((vector_size(2 * kLanes)));
  const NativeHalf h = __builtin_convertvector(x, NativeHalf);
  memcpy(p, &h, sizeof(h));
#else
  const UVec sign = bit_cast<UVec>(x) & 0x80000000u;
  const UVec magnitude = bit_cast<UVec>(x) ^ sign;
  // Subnormal result: adding 0.5 lines the mantissa up with fp16's and rounds; its bits are then the answer.
  const UVec half = splat_bits(126u << 23);
  const UVec small = bit_cast<UVec>(bit_cast<Vec>(magnitude) + bit_cast<Vec>(half)) - half;
  const UVec odd = (magnitude >> 13) & 1u;
  const UVec normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + odd) >> 13;
  const IVec is_nan = magnitude > splat_bits(0x7f800000u);
  UVec bits = blend(magnitude < splat_bits(113u << 23), small, normal);
  bits =
      blend(magnitude >= splat_bits((127u + 16u) << 23), blend(is_nan, splat_bits(0x7e00u), splat_bits(0x7c00u)), bits);
  const HVec h = __builtin_convertvector(bits | (sign >> 16), HVec);
  memcpy(p, &h, sizeof(h));
#endif
}

// ---- rows ----

// dst[0, n) = scale * src, n rounded up to kLanes with zeros: dst is a padded buffer of ours, src may end at the edge
// of a pool.
template <typename T>
inline void load_padded_row(const T* src, float scale, float* dst, int32_t n) {
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(scale * load(src + i), dst + i);
  if (i < n) {
    T tail[kLanes] = {};
    memcpy(tail, src + i, static_cast<size_t>(n - i) * sizeof(T));
    store(scale * load(tail), dst + i);
  }
}

// dst[0, n) = scale * src; not one element more is written.
template <typename T>
inline void store_row(const float* src, float scale, T* dst, int32_t n) {
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(scale * load(src + i), dst + i);
  if (i < n) {
    float tail_in[kLanes] = {};
    T tail_out[kLanes];
    memcpy(tail_in, src + i, static_cast<size_t>(n - i) * sizeof(float));
    store(scale * load(tail_in), tail_out);
    memcpy(dst + i, tail_out, static_cast<size_t>(n - i) * sizeof(T));
  }
}

}  // namespace

#endif  // NEO_COMPILE_CSRC_HALF_H_
