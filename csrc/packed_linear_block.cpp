// One block of a packed linear in AVX-512: 64 outputs are four vectors of sums. Compiled once for fp32 and once, with
// NEO_LINEAR_BF16, for bf16.
//
// The steps are worked through in chunks: small enough for the L2 cache, where the weights are found again when there
// are more than a few tokens, and the sum of the chunks' sums is more accurate in fp32 than one long sum. A step costs
// four loads of weights, and a broadcast and four FMAs for each token.
#include <immintrin.h>

#include <cstring>

#include "packed_linear.h"

namespace neo {

namespace {

constexpr int kVectors = 4;       // of 16 outputs
constexpr int kMaxGroup = 6;      // tokens at a time: 24 of the 32 registers hold sums
constexpr int kChunkSteps = 512;  // 128 KiB

#ifdef NEO_LINEAR_BF16
using Element = uint16_t;
constexpr int kStepInputs = 2;

inline __m512i load_weights(const char* weights) { return _mm512_loadu_si512(weights); }

inline __m512i load_inputs(const Element* x) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof pair);
  return _mm512_set1_epi32(pair);
}

inline __m512 multiply_add(__m512 sum, __m512i w, __m512i x) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
}

inline __m512 load_bias(const Element* bias, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, bias)), 16));
}

inline void store(Element* y, __m512 sums, __mmask16 mask) {
  _mm256_mask_storeu_epi16(y, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sums)));
}
#else
using Element = float;
constexpr int kStepInputs = 1;

inline __m512 load_weights(const char* weights) { return _mm512_loadu_ps(weights); }
inline __m512 load_inputs(const Element* x) { return _mm512_set1_ps(*x); }
inline __m512 multiply_add(__m512 sum, __m512 w, __m512 x) { return _mm512_fmadd_ps(w, x, sum); }
inline __m512 load_bias(const Element* bias, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, bias); }
inline void store(Element* y, __m512 sums, __mmask16 mask) { _mm512_mask_storeu_ps(y, mask, sums); }
#endif

// sums [tokens, 64] += W x over num_steps steps. kUnroll sums of each output side by side: few tokens alone would wait
// for the latency of their own FMAs.
template <int kTokens, int kUnroll>
void add_products(const char* weights, const Element* x, int64_t x_stride, int64_t num_steps, float* sums) {
  __m512 sum[kUnroll][kTokens][kVectors];
#pragma GCC unroll 4
  for (int u = 0; u < kUnroll; ++u)
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[u][t][v] = _mm512_setzero_ps();

  const auto add_step = [&](int64_t step, int u) __attribute__((always_inline)) {
    const char* line = weights + step * kStepBytes;
    decltype(load_weights(line)) w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) w[v] = load_weights(line + v * 64);
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      const auto inputs = load_inputs(x + t * x_stride + step * kStepInputs);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[u][t][v] = multiply_add(sum[u][t][v], w[v], inputs);
    }
  };
  int64_t step = 0;
  for (; step + kUnroll <= num_steps; step += kUnroll)
#pragma GCC unroll 4
    for (int u = 0; u < kUnroll; ++u) add_step(step + u, u);
  for (; step < num_steps; ++step) add_step(step, 0);

#pragma GCC unroll 6
  for (int t = 0; t < kTokens; ++t)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      __m512 total = sum[0][t][v];
#pragma GCC unroll 4
      for (int u = 1; u < kUnroll; ++u) total = _mm512_add_ps(total, sum[u][t][v]);
      float* sum_of_chunks = sums + t * kBlockOutputs + v * 16;
      _mm512_store_ps(sum_of_chunks, _mm512_add_ps(_mm512_load_ps(sum_of_chunks), total));
    }
}

inline __mmask16 first_lanes(int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1);
}

using AddFn = void (*)(const char*, const Element*, int64_t, int64_t, float*);
constexpr AddFn kAdd[kMaxGroup] = {add_products<1, 2>, add_products<2, 2>, add_products<3, 2>,
                                   add_products<4, 1>, add_products<5, 1>, add_products<6, 1>};

void run_block(const PackedLinear& linear, const LinearCall& call, int64_t block) {
  alignas(64) float sums[kMaxLinearTokens * kBlockOutputs];
  const int num_tokens = call.num_tokens;
  const int num_groups = (num_tokens + kMaxGroup - 1) / kMaxGroup;
  const int64_t num_steps = linear.num_steps, first_output = block * kBlockOutputs;
  const char* weights = linear.weight + block * linear.block_bytes;
  const auto* x = static_cast<const Element*>(call.x);
  const auto* bias = static_cast<const Element*>(call.bias);
  auto* y = static_cast<Element*>(call.y);
  const auto mask_of = [&](int v) { return first_lanes(linear.num_outputs - first_output - v * 16); };

  for (int v = 0; v < kVectors; ++v) {
    const __m512 start = bias ? load_bias(bias + first_output + v * 16, mask_of(v)) : _mm512_setzero_ps();
    for (int t = 0; t < num_tokens; ++t) _mm512_store_ps(sums + t * kBlockOutputs + v * 16, start);
  }
  for (int64_t step = 0; step < num_steps; step += kChunkSteps)
    for (int group = 0; group < num_groups; ++group) {
      const int64_t steps = num_steps - step < kChunkSteps ? num_steps - step : kChunkSteps;
      const int begin = num_tokens * group / num_groups, end = num_tokens * (group + 1) / num_groups;
      kAdd[end - begin - 1](weights + step * kStepBytes, x + begin * linear.num_inputs + step * kStepInputs,
                            linear.num_inputs, steps, sums + begin * kBlockOutputs);
    }
  for (int t = 0; t < num_tokens; ++t)
    for (int v = 0; v < kVectors; ++v)
      store(y + t * linear.num_outputs + first_output + v * 16, _mm512_load_ps(sums + t * kBlockOutputs + v * 16),
            mask_of(v));
}

}  // namespace

#ifdef NEO_LINEAR_BF16
void linear_block_bf16(const PackedLinear& linear, const LinearCall& call, int64_t block) {
  run_block(linear, call, block);
}
#else
void linear_block_f32(const PackedLinear& linear, const LinearCall& call, int64_t block) {
  run_block(linear, call, block);
}
#endif

}  // namespace neo
