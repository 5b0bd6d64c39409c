// Attention as the pool runs it (plan, partition, append, kernels, merge), on random problems, against double
// precision: a program of its own, so that it runs where there is no Python for the target. scripts/check_neon.sh
// builds it.
//
//   kernel_check [SEED]     exit status 1 and the problem's sizes if a result is off
//
// What no query token may see is NaN, as in the Python tests.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "append_work.h"
#include "attention_work.h"
#include "thread_pool.h"

namespace {

constexpr int kProblems = 60;
constexpr double kTolerance = 2e-5;
// The softmax's weights of these sets are rounded to bf16 where q, K and V are bf16 (docs of the kernel sets).
constexpr double kBf16Tolerance = 2e-2;

using Rng = std::mt19937;

int pick(Rng& rng, std::initializer_list<int> values) {
  return *(values.begin() + std::uniform_int_distribution<size_t>(0, values.size() - 1)(rng));
}

// Multiples of 1/64 with seven bits: exact in every dtype.
float value(Rng& rng) { return static_cast<float>(std::uniform_int_distribution<int>(-127, 127)(rng)) / 64.0f; }

struct Problem {
  neo::AttentionShape shape;
  int32_t dtype, window;
  float scale, softcap;
  bool appends;
  std::vector<int32_t> lens, cu_seqlens{0}, tables;
  int32_t max_blocks = 1, num_blocks = 0;
  std::vector<float> k, v, q, k_new, v_new, sinks;  // k, v: [num_blocks, kv_heads, block_size, dim]

  explicit Problem(Rng& rng);
  int32_t rows() const { return cu_seqlens.back(); }
  std::vector<double> expected() const;
  const float* token(const std::vector<float>& cache, int32_t dim, int32_t request, int32_t t, int32_t head) const {
    const int64_t block = tables[static_cast<size_t>(request) * max_blocks + t / shape.block_size];
    return &cache[((block * shape.num_kv_heads + head) * shape.block_size + t % shape.block_size) * dim];
  }
  float* token(std::vector<float>& cache, int32_t dim, int32_t request, int32_t t, int32_t head) const {
    return const_cast<float*>(token(static_cast<const std::vector<float>&>(cache), dim, request, t, head));
  }
};

Problem::Problem(Rng& rng) {
  const int32_t kv_heads = pick(rng, {1, 2, 3});
  shape = {kv_heads * pick(rng, {1, 2, 3, 4, 5, 8}), kv_heads, pick(rng, {8, 17, 32, 64, 80, 128}),
           pick(rng, {8, 24, 64, 128}), pick(rng, {1, 8, 16, 20})};
  dtype = pick(rng, {NEO_F32, NEO_F16, NEO_BF16});
  window = pick(rng, {0, 0, 1, 7, 40});
  softcap = pick(rng, {0, 0, 3}) * 1.0f;
  scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim_k));
  appends = pick(rng, {0, 1}) == 1;
  std::vector<int32_t> queries;
  for (int32_t r = pick(rng, {1, 2, 4}); r > 0; --r) {
    queries.push_back(pick(rng, {0, 1, 1, 3, 16, 33}));
    lens.push_back(queries.back() + pick(rng, {0, 1, 15, 16, 63, 64, 130}));
    cu_seqlens.push_back(cu_seqlens.back() + queries.back());
    max_blocks = std::max(max_blocks, (lens.back() + shape.block_size - 1) / shape.block_size);
  }
  num_blocks = max_blocks * static_cast<int32_t>(lens.size()) + 1;
  std::vector<int32_t> ids(static_cast<size_t>(num_blocks));
  for (int32_t i = 0; i < num_blocks; ++i) ids[i] = i;
  std::shuffle(ids.begin(), ids.end(), rng);
  tables.assign(ids.begin(), ids.end() - 1);

  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto cache_rows = static_cast<size_t>(num_blocks) * kv_heads * shape.block_size;
  k.assign(cache_rows * shape.head_dim_k, nan);
  v.assign(cache_rows * shape.head_dim_v, nan);
  const auto fill = [&](std::vector<float>& x, size_t size) {
    x.resize(size);
    for (float& f : x) f = value(rng);
  };
  const auto num_rows = static_cast<size_t>(rows());
  fill(q, num_rows * shape.num_q_heads * shape.head_dim_k);
  fill(k_new, num_rows * kv_heads * shape.head_dim_k);
  fill(v_new, num_rows * kv_heads * shape.head_dim_v);
  if (pick(rng, {0, 1}) == 1) fill(sinks, static_cast<size_t>(shape.num_q_heads));
  for (size_t r = 0; r < lens.size(); ++r) {
    const auto request = static_cast<int32_t>(r);
    const int32_t first_query = lens[r] - queries[r];
    const int32_t begin = queries[r] == 0 ? lens[r] : window == 0 ? 0 : std::max(0, first_query + 1 - window);
    for (int32_t t = begin; t < (appends ? first_query : lens[r]); ++t) {
      for (int32_t h = 0; h < kv_heads; ++h) {
        for (int32_t d = 0; d < shape.head_dim_k; ++d) token(k, shape.head_dim_k, request, t, h)[d] = value(rng);
        for (int32_t d = 0; d < shape.head_dim_v; ++d) token(v, shape.head_dim_v, request, t, h)[d] = value(rng);
      }
    }
  }
}

std::vector<double> Problem::expected() const {
  std::vector<double> out;
  const int32_t group = shape.num_q_heads / shape.num_kv_heads;
  for (size_t r = 0; r < lens.size(); ++r) {
    const auto request = static_cast<int32_t>(r);
    for (int32_t row = cu_seqlens[r]; row < cu_seqlens[r + 1]; ++row) {
      const int32_t end = lens[r] - (cu_seqlens[r + 1] - row) + 1;
      const int32_t begin = window > 0 ? std::max(0, end - window) : 0;
      for (int32_t h = 0; h < shape.num_q_heads; ++h) {
        std::vector<double> scores;
        for (int32_t t = begin; t < end; ++t) {
          double dot = 0;
          for (int32_t d = 0; d < shape.head_dim_k; ++d)
            dot += static_cast<double>(q[(static_cast<size_t>(row) * shape.num_q_heads + h) * shape.head_dim_k + d]) *
                   token(k, shape.head_dim_k, request, t, h / group)[d];
          dot *= scale;
          scores.push_back(softcap > 0 ? softcap * std::tanh(dot / softcap) : dot);
        }
        double top = sinks.empty() ? -std::numeric_limits<double>::infinity() : sinks[h];
        for (const double s : scores) top = std::max(top, s);
        double total = sinks.empty() ? 0.0 : std::exp(sinks[h] - top);
        for (double& s : scores) total += s = std::exp(s - top);
        for (int32_t d = 0; d < shape.head_dim_v; ++d) {
          double sum = 0;
          for (int32_t t = begin; t < end; ++t)
            sum += scores[t - begin] * token(v, shape.head_dim_v, request, t, h / group)[d];
          out.push_back(sum / total);
        }
      }
    }
  }
  return out;
}

// The values as the cache stores them.
std::vector<char> stored(const std::vector<float>& x, int32_t dtype, const NeoKernelSet& kernels) {
  std::vector<char> bytes(x.size() * neo::element_bytes(dtype) + 64);
  kernels.store_row(x.data(), 1.0f, bytes.data(), dtype, static_cast<int32_t>(x.size()));
  return bytes;
}

// The largest error over all query tokens; infinite for a NaN.
double run(Problem& problem, const NeoKernelSet& kernels, neo::ThreadPool& pool) {
  const neo::AttentionShape& shape = problem.shape;
  std::vector<char> k = stored(problem.k, problem.dtype, kernels), v = stored(problem.v, problem.dtype, kernels);
  std::vector<char> q = stored(problem.q, problem.dtype, kernels);
  std::vector<float> out(static_cast<size_t>(problem.rows()) * shape.num_q_heads * shape.head_dim_v + 1);
  const auto view = [&](std::vector<char>& bytes, int64_t dim) {
    return neo::CacheView{bytes.data(), shape.num_kv_heads * shape.block_size * dim, shape.block_size * dim, dim};
  };
  const auto rows = [](void* data, int64_t heads, int64_t dim, int32_t dtype) {
    return neo::RowsView{data, heads * dim, dim, dtype};
  };
  neo::AttentionCall call;
  call.cache = {view(k, shape.head_dim_k), view(v, shape.head_dim_v), problem.num_blocks, problem.dtype, shape};
  call.q = rows(q.data(), shape.num_q_heads, shape.head_dim_k, problem.dtype);
  call.out = rows(out.data(), shape.num_q_heads, shape.head_dim_v, NEO_F32);
  call.sinks = problem.sinks.empty() ? nullptr : problem.sinks.data();
  call.scale = problem.scale;
  call.softcap = problem.softcap;
  if (problem.appends) {
    call.k_new = rows(problem.k_new.data(), shape.num_kv_heads, shape.head_dim_k, NEO_F32);
    call.v_new = rows(problem.v_new.data(), shape.num_kv_heads, shape.head_dim_v, NEO_F32);
  }
  const auto plan = std::make_shared<neo::AttentionPlan>(problem.tables.data(), problem.max_blocks, problem.max_blocks,
                                                         problem.lens.data(), problem.cu_seqlens.data(),
                                                         static_cast<int32_t>(problem.lens.size()), shape, 3, 1);
  const neo::WindowPlan& window = plan->window_plan(problem.window);
  if (problem.appends && plan->has_chunks())
    pool.submit(std::make_unique<neo::AppendWork>(plan, call, kernels, pool.parallelism()));
  pool.wait(*pool.submit(std::make_unique<neo::AttentionWork>(plan, window, call, kernels)));

  if (problem.appends) {  // the reference reads them where they are now
    for (size_t r = 0; r < problem.lens.size(); ++r) {
      const auto request = static_cast<int32_t>(r);
      for (int32_t row = problem.cu_seqlens[r]; row < problem.cu_seqlens[r + 1]; ++row) {
        const int32_t t = problem.lens[r] - (problem.cu_seqlens[r + 1] - row);
        for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
          const size_t index = static_cast<size_t>(row) * shape.num_kv_heads + h;
          std::copy_n(&problem.k_new[index * shape.head_dim_k], shape.head_dim_k,
                      problem.token(problem.k, shape.head_dim_k, request, t, h));
          std::copy_n(&problem.v_new[index * shape.head_dim_v], shape.head_dim_v,
                      problem.token(problem.v, shape.head_dim_v, request, t, h));
        }
      }
    }
  }
  const std::vector<double> expected = problem.expected();
  double worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = std::fabs(out[i] - expected[i]);
    worst = error <= worst ? worst : std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
  }
  return worst;
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? static_cast<unsigned>(std::strtoul(argv[1], nullptr, 10)) : std::random_device{}();
  std::printf("seed %u\n", seed);
  int count = 0, failures = 0;
  const NeoKernelSet* sets = neo_kernels(&count);
  neo::ThreadPool pool(2, {}, false, 50'000);
  for (int s = 0; s < count; ++s) {
    const NeoKernelSet& kernels = sets[s];
    if (!kernels.is_supported()) continue;
    const bool rounds = std::string(kernels.name).find("bf16") != std::string::npos;
    double worst = 0;
    Rng rng(seed);
    for (int i = 0; i < kProblems; ++i) {
      Problem problem(rng);
      const double error = run(problem, kernels, pool);
      worst = std::max(worst, error);
      if (error <= (rounds && problem.dtype == NEO_BF16 ? kBf16Tolerance : kTolerance)) continue;
      ++failures;
      const neo::AttentionShape& shape = problem.shape;
      std::printf(
          "%s: problem %d is off by %g: heads %d/%d, dims %d/%d, block %d, dtype %d, window %d, softcap %g, %zu "
          "requests, %d rows, appends %d\n",
          kernels.name, i, error, shape.num_q_heads, shape.num_kv_heads, shape.head_dim_k, shape.head_dim_v,
          shape.block_size, problem.dtype, problem.window, problem.softcap, problem.lens.size(), problem.rows(),
          problem.appends);
    }
    std::printf("%s: %d problems, largest error %.2g\n", kernels.name, kProblems, worst);
  }
  return failures == 0 ? 0 : 1;
}
