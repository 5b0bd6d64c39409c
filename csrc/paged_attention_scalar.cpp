// The plain C++ paged decode attention: the fallback where there is no ISPC, and the oracle of the ISPC kernel (same
// ABI, kernel.h).
//
// Compiled once per instruction set (NEO_TWIN_ISA = generic | avx2 | avx512); kernel_table.cpp picks one at run time.
// So nothing here may come from a header with inline functions shared with baseline code: only half.h's unnamed
// namespace.
//
//   for each chunk of 64 tokens               online softmax over chunks
//     for each KV head                        K and V rows are converted to fp32 once for the whole group
//       scores [group, 64] = q . K            4 rows at a time
//       m, l, p = softmax update
//       acc [group, Dv] += p V                4 rows at a time
#include "half.h"
#include "kernel.h"

#ifndef NEO_TWIN_ISA
#define NEO_TWIN_ISA generic
#endif

namespace {

constexpr int kChunk = 64;  // tokens per softmax update
constexpr int kRows = 4;    // K / V rows per pass over the head dimension
constexpr float kInf = __builtin_inff();
constexpr float kLog2e = 1.44269504088896341f;

typedef float Quad __attribute__((vector_size(16)));

#if defined(__clang__)
#define NEO_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t IQuad __attribute__((vector_size(16)));
#define NEO_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, IQuad{i, j, k, l})
#endif

// Sum by quarters: lane i of the result = lanes i, i + 4, i + 8, ... of x.
inline Quad fold(Vec x) {
#if defined(__AVX512F__)
  // maskz: GCC 12 warns about the undefined pass-through of the plain forms
  const __m256 half = _mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xff, x, 0), _mm512_maskz_extractf32x8_ps(0xff, x, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
  return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
#else
  return x;
#endif
}

inline float sum_lanes(Vec x) {
  const Quad quad = fold(x);
  return (quad[0] + quad[1]) + (quad[2] + quad[3]);
}

// The sums of four vectors side by side: a transpose costs less than four reductions.
inline Quad sum_lanes(const Vec* x) {
  const Quad a = fold(x[0]), b = fold(x[1]), c = fold(x[2]), d = fold(x[3]);
  const Quad ab = NEO_SHUFFLE(a, b, 0, 4, 1, 5) + NEO_SHUFFLE(a, b, 2, 6, 3, 7);
  const Quad cd = NEO_SHUFFLE(c, d, 0, 4, 1, 5) + NEO_SHUFFLE(c, d, 2, 6, 3, 7);
  return NEO_SHUFFLE(ab, cd, 0, 1, 4, 5) + NEO_SHUFFLE(ab, cd, 2, 3, 6, 7);
}

// 2^x, about 2e-7 relative (Cephes' polynomial); 0 below -126, NaN stays NaN. x <= 127.
inline Vec exp2_lanes(Vec x) {
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which lands in the low bits
  const Vec shifted = x + magic;
  const Vec f = x - (shifted - magic);
  Vec y = splat(1.535336188319500e-4f);
  y = y * f + 1.339887440266574e-3f;
  y = y * f + 9.618437357674640e-3f;
  y = y * f + 5.550332471162809e-2f;
  y = y * f + 2.402264791363012e-1f;
  y = y * f + 6.931472028550421e-1f;
  y = y * f + 1.0f;
  const UVec scaled = bit_cast<UVec>(y) + (bit_cast<UVec>(shifted) << 23);
  const Vec result = blend(x < splat(-126.0f), Vec{}, bit_cast<Vec>(scaled));
  return blend(x != x, x, result);
}

// Relative error about 3e-7, whatever x: a large soft cap multiplies small ones.
inline Vec tanh_lanes(Vec x) {
  const Vec y = x * x;  // below 0.1, where the quotient cancels: the series up to x^7, off by 2e-10
  const Vec small = x * (1.0f + y * (-0.33333333f + y * (0.13333333f - y * 0.053968254f)));
  Vec t = x * (2 * kLog2e);
  t = blend(t > splat(100.0f), splat(100.0f), t);
  const Vec large = 1.0f - 2.0f / (exp2_lanes(t) + 1.0f);
  return blend(y < splat(0.01f), small, large);
}

inline void prefetch_row(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(row) + i);
}

// One of the two caches of a layer, seen as rows.
template <typename T>
struct Rows {
  const T* base;
  int64_t block_stride, head_stride, token_stride;
  const int32_t* table;
  int32_t block_size, dim;

  const T* row(int32_t head, int32_t token) const {
    const int64_t block = table[token / block_size];
    return base + block * block_stride + head * head_stride + (token % block_size) * token_stride;
  }

  // kRows rows from `token` as fp32, padded with zeros; rows at or past `end` repeat the last one (their results are
  // not used).
  void load_tile(int32_t head, int32_t token, int32_t end, float* buffer, int32_t stride, const float** rows) const {
    for (int i = 0; i < kRows; ++i) {
      const int32_t t = token + i < end ? token + i : end - 1;
      rows[i] = as_floats(row(head, t), buffer + i * stride);
    }
  }

  void prefetch(int32_t head, int32_t token, int32_t end) const {
    for (int32_t t = token; t < end; ++t) prefetch_row(row(head, t), dim * static_cast<int64_t>(sizeof(T)));
  }

 private:
  const float* as_floats(const float* src, float* buffer) const {
    if (dim % kLanes == 0) return src;
    load_padded_row(src, 1.0f, buffer, dim);
    return buffer;
  }
  template <typename Half>
  const float* as_floats(const Half* src, float* buffer) const {
    load_padded_row(src, 1.0f, buffer, dim);
    return buffer;
  }
};

// kHeads query heads (q rows q_stride apart) against kRows K rows; scores of a head are kChunk apart from the next
// one's.
template <int kHeads>
inline void dot_tile(const float* q, int32_t q_stride, const float* const* k, int32_t padded_dim, float* scores) {
  Vec sum[kHeads][kRows] = {};
  for (int32_t d = 0; d < padded_dim; d += kLanes) {
    Vec row[kRows];
    for (int i = 0; i < kRows; ++i) row[i] = load(k[i] + d);
    for (int g = 0; g < kHeads; ++g) {
      const Vec x = load(q + g * q_stride + d);
      for (int i = 0; i < kRows; ++i) sum[g][i] += x * row[i];
    }
  }
  for (int g = 0; g < kHeads; ++g) {
    const Quad dots = sum_lanes(sum[g]);
    memcpy(scores + g * kChunk, &dots, sizeof(dots));
  }
}

template <int kHeads>
inline void accumulate_tile(const float* p, const float* const* v, int32_t padded_dim, float* acc, int32_t acc_stride) {
  for (int32_t d = 0; d < padded_dim; d += kLanes) {
    Vec row[kRows];
    for (int i = 0; i < kRows; ++i) row[i] = load(v[i] + d);
    for (int g = 0; g < kHeads; ++g) {
      Vec sum = load(acc + g * acc_stride + d);
      for (int i = 0; i < kRows; ++i) sum += p[g * kChunk + i] * row[i];
      store(sum, acc + g * acc_stride + d);
    }
  }
}

// scores [kChunk], the first n of them dot products -> probabilities in place (0 from n on); updates m, l and rescales
// acc.
inline void softmax_update(float* scores, int32_t n, float scale, float softcap, float* m, float* l, float* acc,
                           int32_t padded_dim) {
  for (int32_t i = 0; i < n; i += kLanes) {
    const Vec x = scale * load(scores + i);
    store(softcap > 0 ? softcap * tanh_lanes(x) : x, scores + i);
  }
  for (int32_t i = n; i < kChunk; ++i) scores[i] = -kInf;
  Vec top = splat(-kInf);
  for (int32_t i = 0; i < kChunk; i += kLanes) {
    const Vec s = load(scores + i);
    top = blend(s > top, s, top);
  }
  float m_new = *m;
  for (int i = 0; i < kLanes; ++i) m_new = top[i] > m_new ? top[i] : m_new;
  const float base = m_new == -kInf ? 0.0f : m_new;  // all -inf so far: 2^(-inf - 0) = 0, not NaN
  Vec sum = {};
  for (int32_t i = 0; i < kChunk; i += kLanes) {
    const Vec p = exp2_lanes(load(scores + i) - base);
    store(p, scores + i);
    sum += p;
  }
  const Vec rescale = exp2_lanes(splat(*m - base));
  *l = *l * rescale[0] + sum_lanes(sum);
  if (m_new > *m)
    for (int32_t d = 0; d < padded_dim; d += kLanes) store(load(acc + d) * rescale, acc + d);
  *m = m_new;
}

template <typename T>
inline void attend_chunk(const NeoSpan& s, const Rows<T>& k, const Rows<T>& v, int32_t begin, int32_t end) {
  const int32_t group = s.num_q_heads / s.num_kv_heads;
  const int32_t k_dim = (s.head_dim_k + kLanes - 1) / kLanes * kLanes;
  const int32_t v_dim = (s.head_dim_v + kLanes - 1) / kLanes * kLanes;
  float* scores = s.scratch;                                      // [group, kChunk]
  float* buffer = scores + static_cast<int64_t>(group) * kChunk;  // [kRows, stride]
  const float* rows[kRows];
  for (int32_t h = 0; h < s.num_kv_heads; ++h) {
    const int32_t first = h * group;
    const float* q = s.q + static_cast<int64_t>(first) * s.q_stride;
    float* acc = s.acc + static_cast<int64_t>(first) * s.acc_stride;
    for (int32_t t = begin; t < end; t += kRows) {
      k.load_tile(h, t, end, buffer, s.q_stride, rows);
      v.prefetch(h, t, t + kRows < end ? t + kRows : end);
      float* out = scores + (t - begin);
      int32_t g = 0;
      for (; g + 2 <= group; g += 2) dot_tile<2>(q + g * s.q_stride, s.q_stride, rows, k_dim, out + g * kChunk);
      if (g < group) dot_tile<1>(q + g * s.q_stride, s.q_stride, rows, k_dim, out + g * kChunk);
    }
    for (int32_t g = 0; g < group; ++g)
      softmax_update(scores + g * kChunk, end - begin, s.q_scale, s.softcap, s.m + first + g, s.l + first + g,
                     acc + g * s.acc_stride, v_dim);
    for (int32_t t = begin; t < end; t += kRows) {
      v.load_tile(h, t, end, buffer, s.acc_stride, rows);
      if (h + 1 < s.num_kv_heads) k.prefetch(h + 1, t, t + kRows < end ? t + kRows : end);
      const float* p = scores + (t - begin);
      int32_t g = 0;
      for (; g + 2 <= group; g += 2)
        accumulate_tile<2>(p + g * kChunk, rows, v_dim, acc + g * s.acc_stride, s.acc_stride);
      if (g < group) accumulate_tile<1>(p + g * kChunk, rows, v_dim, acc + g * s.acc_stride, s.acc_stride);
    }
  }
}

template <typename T>
inline void attend_span(const NeoSpan& s) {
  const Rows<T> k{static_cast<const T*>(s.k),
                  s.k_block_stride,
                  s.k_head_stride,
                  s.k_token_stride,
                  s.block_table,
                  s.block_size,
                  s.head_dim_k};
  const Rows<T> v{static_cast<const T*>(s.v),
                  s.v_block_stride,
                  s.v_head_stride,
                  s.v_token_stride,
                  s.block_table,
                  s.block_size,
                  s.head_dim_v};
  for (int32_t h = 0; h < s.num_q_heads; ++h) {
    s.m[h] = -kInf;
    s.l[h] = 0.0f;
    memset(s.acc + static_cast<int64_t>(h) * s.acc_stride, 0, static_cast<size_t>(s.acc_stride) * sizeof(float));
  }
  for (int32_t t = s.token_begin; t < s.token_end; t += kChunk)
    attend_chunk(s, k, v, t, t + kChunk < s.token_end ? t + kChunk : s.token_end);
}

}  // namespace

#define NEO_CONCAT_(name, isa) neo_cpp_##name##_##isa
#define NEO_CONCAT(name, isa) NEO_CONCAT_(name, isa)
#define NEO_TWIN(name) NEO_CONCAT(name, NEO_TWIN_ISA)

extern "C" {

void NEO_TWIN(span_f32)(const NeoSpan* span) { attend_span<float>(*span); }
void NEO_TWIN(span_f16)(const NeoSpan* span) { attend_span<F16>(*span); }
void NEO_TWIN(span_bf16)(const NeoSpan* span) { attend_span<BF16>(*span); }

void NEO_TWIN(load_row)(const void* src, int32_t dtype, float scale, float* dst, int32_t n) {
  if (dtype == NEO_F32) load_padded_row(static_cast<const float*>(src), scale, dst, n);
  if (dtype == NEO_F16) load_padded_row(static_cast<const F16*>(src), scale, dst, n);
  if (dtype == NEO_BF16) load_padded_row(static_cast<const BF16*>(src), scale, dst, n);
}

void NEO_TWIN(store_row)(const float* src, float scale, void* dst, int32_t dtype, int32_t n) {
  if (dtype == NEO_F32) store_row(src, scale, static_cast<float*>(dst), n);
  if (dtype == NEO_F16) store_row(src, scale, static_cast<F16*>(dst), n);
  if (dtype == NEO_BF16) store_row(src, scale, static_cast<BF16*>(dst), n);
}

}  // extern "C"
