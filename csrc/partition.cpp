#include "partition.h"

#include <algorithm>

namespace neo {
namespace {

int32_t window_begin(int32_t length, int64_t window) {
  return window > 0 && window < length ? static_cast<int32_t>(length - window) : 0;
}

// Marks which requests were cut and numbers their partials.
void number_partials(Partition& partition, size_t num_requests) {
  partition.first_partial.assign(num_requests, -1);
  partition.num_partials.assign(num_requests, 0);
  std::vector<Task>& tasks = partition.tasks;
  for (size_t begin = 0; begin < tasks.size();) {
    const int32_t request = tasks[begin].request;
    size_t end = begin + 1;
    while (end < tasks.size() && tasks[end].request == request) ++end;
    if (end - begin > 1) {
      partition.first_partial[request] = partition.total_partials;
      partition.num_partials[request] = static_cast<int32_t>(end - begin);
      for (size_t i = begin; i < end; ++i) tasks[i].partial = partition.total_partials++;
    }
    begin = end;
  }
}

}  // namespace

Partition make_partition(const std::vector<int32_t>& context_lens, int32_t block_size, int64_t window,
                         int32_t max_shares, int64_t min_share_blocks) {
  const auto num_blocks = [&](int32_t length) -> int64_t {
    if (length == 0) return 0;
    return (static_cast<int64_t>(length) + block_size - 1) / block_size - window_begin(length, window) / block_size;
  };
  int64_t total = 0;
  for (const int32_t length : context_lens) total += num_blocks(length);
  const int64_t useful = std::max<int64_t>(1, total / std::max<int64_t>(1, min_share_blocks));
  const int64_t shares = std::min<int64_t>(std::max(1, max_shares), useful);

  Partition partition;
  partition.tasks.reserve(context_lens.size() + static_cast<size_t>(shares));
  partition.share_begin.push_back(0);
  const auto share_end = [&] { return static_cast<int64_t>(partition.share_begin.size()) * total / shares; };
  int64_t done = 0;  // blocks handed out so far
  for (size_t r = 0; r < context_lens.size(); ++r) {
    const int32_t length = context_lens[r];
    int32_t token = window_begin(length, window);
    int64_t left = num_blocks(length);
    if (left == 0) partition.tasks.push_back({static_cast<int32_t>(r), 0, 0, -1});
    while (left > 0) {
      while (done == share_end()) partition.share_begin.push_back(static_cast<int32_t>(partition.tasks.size()));
      const int64_t take = std::min(left, share_end() - done);
      const int64_t end = (token / block_size + take) * block_size;
      const int32_t token_end = static_cast<int32_t>(std::min<int64_t>(end, length));
      partition.tasks.push_back({static_cast<int32_t>(r), token, token_end, -1});
      token = token_end;
      left -= take;
      done += take;
    }
  }
  partition.share_begin.push_back(static_cast<int32_t>(partition.tasks.size()));
  number_partials(partition, context_lens.size());
  return partition;
}

}  // namespace neo
