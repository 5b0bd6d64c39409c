// The only file that knows Python. It takes addresses, sizes, strides (in elements) and dtype codes (kernel.h), never
// tensors: no libtorch link, so one wheel serves every torch. Checks of what tensors look like are in
// host_attention.py; checks against the plan are here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "append_work.h"
#include "attention_call.h"
#include "attention_plan.h"
#include "attention_work.h"
#include "clock.h"
#include "contents_hash.h"
#include "copy_work.h"
#include "kernel.h"
#include "packed_linear.h"
#include "slowed_work.h"
#include "thread_pool.h"

namespace py = pybind11;

namespace {

using neo::ThreadPool;

template <typename T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

const NeoKernelSet& kernel_set(const std::string& name) {
  int count = 0;
  const NeoKernelSet* sets = neo_kernels(&count);
  for (int i = 0; i < count; ++i)
    if (name == sets[i].name && sets[i].is_supported()) return sets[i];
  throw std::invalid_argument("no kernels called '" + name + "' in this build that this CPU runs");
}

std::vector<std::pair<std::string, bool>> list_kernel_sets() {
  int count = 0;
  const NeoKernelSet* sets = neo_kernels(&count);
  std::vector<std::pair<std::string, bool>> names;
  for (int i = 0; i < count; ++i) names.emplace_back(sets[i].name, sets[i].is_supported() != 0);
  return names;
}

// A submission in flight and the Python objects whose memory it uses. Dropping one waits: memory is never freed under a
// worker.
class Ticket {
 public:
  // before: a submission that this one builds on, queued just ahead of it.
  Ticket(std::shared_ptr<ThreadPool> pool, std::shared_ptr<neo::Submission> submission, py::object refs,
         std::unique_ptr<Ticket> before = nullptr)
      : before_(std::move(before)),
        pool_(std::move(pool)),
        submission_(std::move(submission)),
        refs_(std::move(refs)) {}
  Ticket(const Ticket&) = delete;
  ~Ticket() { finish(); }

  void wait() {
    finish();
    refs_ = py::none();
    if (before_) before_->wait();
    if (submission_->has_failed()) throw std::bad_alloc();
  }
  bool is_done() const { return submission_->is_done(); }
  std::int64_t start_ns() const { return before_ ? before_->start_ns() : done().start_ns(); }
  std::int64_t end_ns() const { return done().end_ns(); }

 private:
  void finish() {
    if (submission_->is_done()) return;
    const py::gil_scoped_release release;
    pool_->wait(*submission_);
  }
  const neo::Submission& done() const {
    if (!submission_->is_done()) throw std::runtime_error("the ticket's times are known once it is done: wait() first");
    return *submission_;
  }

  std::unique_ptr<Ticket> before_;
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<neo::Submission> submission_;
  py::object refs_;
};

// In a forked child the threads do not exist: joining them, or destroying what they sleep on, would hang.
void delete_pool(ThreadPool* pool) {
  if (!pool->is_foreign()) delete pool;
}

class Pool {
 public:
  Pool(int num_threads, std::vector<int> cpus, bool participate, std::int64_t spin_ns, const std::string& kernels)
      : kernels_(kernel_set(kernels)),
        pool_(new ThreadPool(num_threads, std::move(cpus), participate, spin_ns), delete_pool) {}

  // The plan's rows are those of `rows` from first_row on.
  std::unique_ptr<Ticket> submit_attention(const std::shared_ptr<neo::AttentionPlan>& plan,
                                           const neo::LayerCache& layer, const neo::TokenRows& rows, int first_row,
                                           float scale, std::int64_t window, float softcap, std::uintptr_t sinks,
                                           py::object refs) {
    if (!plan->bind(pool_.get()))
      throw std::invalid_argument("the plan is in use on another WorkerPool: plan once per pool");
    check_shape(plan->shape(), layer.shape);
    check_rows(*plan, rows, first_row);
    const neo::WindowPlan& window_plan = plan->window_plan(window);
    plan->check_blocks(window_plan, layer.num_blocks);
    neo::AttentionCall call{
        layer, rows.q.from(first_row), rows.out.from(first_row), {}, {}, pointer<const float>(sinks), scale, softcap};
    std::unique_ptr<Ticket> append;
    if (rows.k_new.data != nullptr) {
      call.k_new = rows.k_new.from(first_row);
      call.v_new = rows.v_new.from(first_row);
      plan->check_append();
      if (plan->has_chunks())
        append = submit(std::make_unique<neo::AppendWork>(plan, call, kernels_, pool_->parallelism()), refs);
    }
    std::unique_ptr<neo::Work> work = std::make_unique<neo::AttentionWork>(plan, window_plan, call, kernels_);
    if (slowdown_ > 1.0) work = std::make_unique<neo::SlowedWork>(std::move(work), slowdown_);
    return submit(std::move(work), std::move(refs), std::move(append));
  }

  std::unique_ptr<Ticket> submit_copy(std::uintptr_t src, std::uintptr_t dst, std::int64_t block_bytes,
                                      const std::shared_ptr<neo::BlockPairs>& pairs, double max_gbps, py::object refs) {
    return submit(std::make_unique<neo::CopyWork>(pointer<const char>(src), pointer<char>(dst), block_bytes, pairs,
                                                  max_gbps, pool_->parallelism()),
                  std::move(refs));
  }

  std::unique_ptr<Ticket> submit_first_touch(std::uintptr_t data, std::int64_t bytes, py::object refs) {
    return submit(std::make_unique<neo::FirstTouchWork>(pointer<char>(data), bytes, pool_->parallelism()),
                  std::move(refs));
  }

  std::unique_ptr<Ticket> submit_read(std::uintptr_t data, std::int64_t bytes, int streams, py::object refs) {
    return submit(std::make_unique<neo::ReadWork>(pointer<const char>(data), bytes, streams, pool_->parallelism()),
                  std::move(refs));
  }

  void slow_attention(double factor) { slowdown_ = factor; }

  void close() {
    const py::gil_scoped_release release;
    pool_->close();
  }

  int num_threads() const { return pool_->num_threads(); }
  int parallelism() const { return pool_->parallelism(); }
  bool is_closed() const { return pool_->is_closed(); }
  std::string isa() const { return kernels_.name; }
  std::vector<int> pin_failures() const { return pool_->pin_failures(); }

 private:
  std::unique_ptr<Ticket> submit(std::unique_ptr<neo::Work> work, py::object refs,
                                 std::unique_ptr<Ticket> before = nullptr) {
    std::shared_ptr<neo::Submission> submission;
    if (pool_->num_threads() == 0) {  // runs here and now
      const py::gil_scoped_release release;
      submission = pool_->submit(std::move(work));
    } else {
      submission = pool_->submit(std::move(work));
    }
    return std::make_unique<Ticket>(pool_, std::move(submission), std::move(refs), std::move(before));
  }

  static void check_size(const char* what, int planned, const char* whose, int given) {
    if (planned != given)
      throw std::invalid_argument(std::string("the plan was made for ") + what + " " + std::to_string(planned) + ", " +
                                  whose + " " + std::to_string(given));
  }

  static void check_shape(const neo::AttentionShape& plan, const neo::AttentionShape& layer) {
    const char* const whose = "this layer's cache has";
    check_size("num_kv_heads", plan.num_kv_heads, whose, layer.num_kv_heads);
    check_size("head_dim", plan.head_dim_k, whose, layer.head_dim_k);
    check_size("v_head_dim", plan.head_dim_v, whose, layer.head_dim_v);
    check_size("block_size", plan.block_size, whose, layer.block_size);
  }

  static void check_rows(const neo::AttentionPlan& plan, const neo::TokenRows& rows, int first_row) {
    const neo::AttentionShape &planned = plan.shape(), &given = rows.shape;
    check_size("num_q_heads", planned.num_q_heads, "the rows have", given.num_q_heads);
    check_size("head_dim", planned.head_dim_k, "the rows have", given.head_dim_k);
    check_size("v_head_dim", planned.head_dim_v, "the rows have", given.head_dim_v);
    if (rows.k_new.data != nullptr)
      check_size("num_kv_heads", planned.num_kv_heads, "the rows have", given.num_kv_heads);
    if (first_row < 0 || plan.num_tokens() > rows.num_tokens - first_row)
      throw std::invalid_argument("the plan's " + std::to_string(plan.num_tokens()) + " tokens from row " +
                                  std::to_string(first_row) + " on are not within " + std::to_string(rows.num_tokens) +
                                  " rows");
  }

  const NeoKernelSet& kernels_;
  std::shared_ptr<ThreadPool> pool_;
  double slowdown_ = 1.0;
};

neo::RowsView make_rows(std::uintptr_t data, std::int64_t token_stride, std::int64_t head_stride, int dtype) {
  return {pointer<void>(data), token_stride, head_stride, dtype};
}

// heads and dims: {num_q_heads, num_kv_heads}, {head_dim_k, head_dim_v}
neo::TokenRows make_token_rows(const neo::RowsView& q, const neo::RowsView& out, const neo::RowsView& k_new,
                               const neo::RowsView& v_new, int num_tokens, std::pair<int, int> heads,
                               std::pair<int, int> dims) {
  return {q, out, k_new, v_new, num_tokens, {heads.first, heads.second, dims.first, dims.second, 0}};
}

// Contiguous tensors of one dtype; k_new and v_new may be 0.
neo::TokenRows make_contiguous_token_rows(std::uintptr_t q, std::uintptr_t out, std::uintptr_t k_new,
                                          std::uintptr_t v_new, int dtype, int num_tokens, int num_q_heads,
                                          int num_kv_heads, int head_dim_k, int head_dim_v) {
  const auto view = [&](std::uintptr_t data, std::int64_t heads, std::int64_t dim) {
    return neo::RowsView{pointer<void>(data), heads * dim, dim, dtype};
  };
  return {view(q, num_q_heads, head_dim_k),
          view(out, num_q_heads, head_dim_v),
          view(k_new, num_kv_heads, head_dim_k),
          view(v_new, num_kv_heads, head_dim_v),
          num_tokens,
          {num_q_heads, num_kv_heads, head_dim_k, head_dim_v, 0}};
}

std::shared_ptr<neo::BlockPairs> make_block_pairs(std::uintptr_t pairs, std::int64_t count) {
  const auto* first = pointer<const std::int64_t>(pairs);
  auto list = std::make_shared<neo::BlockPairs>();
  list->reserve(static_cast<size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) list->emplace_back(first[2 * i], first[2 * i + 1]);
  return list;
}

neo::LayerCache make_layer(std::uintptr_t k, std::vector<std::int64_t> k_strides, std::uintptr_t v,
                           std::vector<std::int64_t> v_strides, std::int64_t num_blocks, int dtype, int num_kv_heads,
                           int block_size, int head_dim_k, int head_dim_v) {
  if (k_strides.size() != 3 || v_strides.size() != 3) throw std::invalid_argument("three strides expected");
  neo::LayerCache layer;
  layer.k = {pointer<void>(k), k_strides[0], k_strides[1], k_strides[2]};
  layer.v = {pointer<void>(v), v_strides[0], v_strides[1], v_strides[2]};
  layer.num_blocks = num_blocks;
  layer.dtype = dtype;
  layer.shape = {0, num_kv_heads, head_dim_k, head_dim_v, block_size};
  return layer;
}

std::shared_ptr<neo::AttentionPlan> make_plan(std::uintptr_t tables, std::int64_t table_stride, int max_blocks,
                                              std::uintptr_t lens, std::uintptr_t cu_seqlens, int num_requests,
                                              int num_q_heads, int num_kv_heads, int head_dim_k, int head_dim_v,
                                              int block_size, int max_shares, std::int64_t min_share_bytes) {
  const neo::AttentionShape shape{num_q_heads, num_kv_heads, head_dim_k, head_dim_v, block_size};
  return std::make_shared<neo::AttentionPlan>(
      pointer<const std::int32_t>(tables), table_stride, max_blocks, pointer<const std::int32_t>(lens),
      pointer<const std::int32_t>(cu_seqlens), num_requests, shape, max_shares, min_share_bytes);
}

std::vector<std::vector<int>> list_tasks(neo::AttentionPlan& plan, std::int64_t window) {
  std::vector<std::vector<int>> rows;
  for (const neo::Task& task : plan.window_plan(window).partition.tasks)
    rows.push_back({task.tile, task.token_begin, task.token_end, task.partial});
  return rows;
}

std::vector<std::vector<int>> list_tiles(const neo::AttentionPlan& plan) {
  std::vector<std::vector<int>> rows;
  for (const neo::Tile& tile : plan.tiles())
    rows.push_back({tile.request, tile.first_row, tile.num_tokens, tile.length});
  return rows;
}

void convert_row(const std::string& kernels, std::uintptr_t src, int src_dtype, std::uintptr_t dst, int dst_dtype,
                 int n) {
  std::vector<float> row(static_cast<size_t>(neo_padded(n)));
  kernel_set(kernels).load_row(pointer<const void>(src), src_dtype, 1.0f, row.data(), n);
  kernel_set(kernels).store_row(row.data(), 1.0f, pointer<void>(dst), dst_dtype, n);
}

neo::PackedLinear make_packed_linear(std::uintptr_t weight, std::int64_t num_outputs, std::int64_t num_inputs,
                                     int dtype) {
  if (!neo::has_packed_linear(dtype)) throw std::invalid_argument("no packed linears of this dtype here");
  if (dtype == NEO_BF16 && num_inputs % 2 != 0) throw std::invalid_argument("bf16 inputs come in pairs");
  return neo::make_packed_linear(pointer<const void>(weight), num_outputs, num_inputs, dtype);
}

void run_packed_linear(const neo::PackedLinear& linear, std::uintptr_t x, std::uintptr_t bias, std::uintptr_t y,
                       int num_tokens, int num_threads) {
  if (num_tokens < 1 || num_tokens > neo::kMaxLinearTokens)
    throw std::invalid_argument("num_tokens is " + std::to_string(num_tokens) + ", must be 1 to " +
                                std::to_string(neo::kMaxLinearTokens));
  const py::gil_scoped_release release;
  neo::run_packed_linear(linear, {pointer<const void>(x), pointer<const void>(bias), pointer<void>(y), num_tokens},
                         num_threads);
}

}  // namespace

PYBIND11_MAKE_OPAQUE(neo::BlockPairs)

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native host attention: worker pool, plans, block copies. Use it through neo_compile.host_attention.";
  m.def("kernel_sets", list_kernel_sets, "(name, runs on this CPU) of every kernel set in this build, best first");
  m.def("convert_row", convert_row, "For tests: one row between dtypes through the given kernels' conversions");
  m.def(
      "hash_words",
      [](std::uintptr_t addresses, std::int64_t count) {
        return neo::hash_words(pointer<const std::int64_t>(addresses), count);
      },
      "A hash of the aligned 8 bytes around each of `count` int64 addresses");
  m.def(
      "checksum",
      [](std::uintptr_t data, std::int64_t num_bytes, int num_threads) {
        const py::gil_scoped_release release;
        return neo::checksum(pointer<const void>(data), num_bytes, num_threads);
      },
      "A hash of all bytes");
  m.def("steady_ns", &neo::steady_ns, "The clock of tickets, in ns");

  m.attr("max_linear_tokens") = neo::kMaxLinearTokens;
  m.def("has_packed_linear", &neo::has_packed_linear,
        "Whether PackedLinear works for a dtype, in this build on this CPU");
  py::class_<neo::PackedLinear>(m, "PackedLinear")
      .def(py::init(&make_packed_linear))
      .def("run", run_packed_linear, "y [tokens, outputs] of x [tokens, inputs] and bias [outputs] (0: none)");

  py::class_<neo::RowsView>(m, "Rows").def(py::init<>()).def(py::init(&make_rows));
  py::class_<neo::TokenRows>(m, "TokenRows")
      .def(py::init(&make_token_rows))
      .def_static("contiguous", &make_contiguous_token_rows);
  py::class_<neo::LayerCache>(m, "LayerCache").def(py::init(&make_layer));
  py::class_<neo::AttentionPlan, std::shared_ptr<neo::AttentionPlan>>(m, "AttentionPlan")
      .def(py::init(&make_plan))
      .def("tasks", list_tasks, "[tile, token_begin, token_end, partial or -1] of each task for a window (0: none)")
      .def("tiles", list_tiles, "[request, first row, query tokens, length that the first one sees] of each tile")
      .def("poison_workspace", &neo::AttentionPlan::poison_workspace);

  py::class_<neo::BlockPairs, std::shared_ptr<neo::BlockPairs>>(m, "BlockPairs").def(py::init(&make_block_pairs));

  py::class_<Ticket>(m, "Ticket")
      .def("wait", &Ticket::wait, "Returns when the work is done; the GIL is free meanwhile")
      .def("done", &Ticket::is_done)
      .def_property_readonly("start_ns", &Ticket::start_ns, "When the first task began, on perf_counter_ns' clock")
      .def_property_readonly("end_ns", &Ticket::end_ns, "When the last task ended");

  py::class_<Pool>(m, "Pool")
      .def(py::init<int, std::vector<int>, bool, std::int64_t, const std::string&>())
      .def("submit_attention", &Pool::submit_attention)
      .def("submit_copy", &Pool::submit_copy)
      .def("submit_first_touch", &Pool::submit_first_touch)
      .def("submit_read", &Pool::submit_read)
      .def("slow_attention", &Pool::slow_attention)
      .def("close", &Pool::close)
      .def_property_readonly("num_threads", &Pool::num_threads)
      .def_property_readonly("parallelism", &Pool::parallelism)
      .def_property_readonly("is_closed", &Pool::is_closed)
      .def_property_readonly("isa", &Pool::isa)
      .def_property_readonly("pin_failures", &Pool::pin_failures);
}
