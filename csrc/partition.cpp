#include "partition.h"

#include <algorithm>

namespace neo {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t num_blocks(const Span& span, int32_t block_size) {
  return span.is_empty() ? 0 : ceil_div(span.end, block_size) - span.begin / block_size;
}

// Work of a tile's edges, in blocks.
int64_t edge_work(const Tile& tile, const Span& common, int64_t window, int32_t block_size) {
  int64_t positions = 0;
  for (int32_t i = 0; i < tile.num_tokens; ++i) {
    const Span visible = tile.visible(i, window);
    positions += (visible.end - visible.begin) - (common.end - common.begin);
  }
  return ceil_div(positions, block_size);
}

// Marks which tiles were cut and numbers their partials.
void number_partials(Partition& partition, size_t num_tiles) {
  partition.first_partial.assign(num_tiles, -1);
  partition.num_partials.assign(num_tiles, 0);
  std::vector<Task>& tasks = partition.tasks;
  for (size_t begin = 0; begin < tasks.size();) {
    const int32_t tile = tasks[begin].tile;
    size_t end = begin + 1;
    while (end < tasks.size() && tasks[end].tile == tile) ++end;
    if (end - begin > 1) {
      partition.first_partial[tile] = partition.total_partials;
      partition.num_partials[tile] = static_cast<int32_t>(end - begin);
      for (size_t i = begin; i < end; ++i) tasks[i].partial = partition.total_partials++;
    }
    begin = end;
  }
}

}  // namespace

Span Tile::visible(int32_t i, int64_t window) const {
  const int32_t end = length + i;
  return {window > 0 && window < end ? static_cast<int32_t>(end - window) : 0, end};
}

Span Tile::common(int64_t window) const { return {std::min(visible(num_tokens - 1, window).begin, length), length}; }

Partition make_partition(const std::vector<Tile>& tiles, int32_t block_size, int64_t window, int32_t max_shares,
                         int64_t min_share_work) {
  std::vector<int64_t> edges(tiles.size());
  int64_t total = 0;
  for (size_t i = 0; i < tiles.size(); ++i) {
    const Span common = tiles[i].common(window);
    edges[i] = edge_work(tiles[i], common, window, block_size);
    total += num_blocks(common, block_size) * tiles[i].num_tokens + edges[i];
  }
  const int64_t useful = std::max<int64_t>(1, total / std::max<int64_t>(1, min_share_work));
  const int64_t shares = std::min<int64_t>(std::max(1, max_shares), useful);

  Partition partition;
  partition.tasks.reserve(tiles.size() + static_cast<size_t>(shares));
  partition.share_begin.push_back(0);
  int64_t done = 0;  // work handed out so far
  const auto share_end = [&] { return static_cast<int64_t>(partition.share_begin.size()) * total / shares; };
  const auto open_share = [&] {
    while (done >= share_end()) partition.share_begin.push_back(static_cast<int32_t>(partition.tasks.size()));
  };
  for (size_t i = 0; i < tiles.size(); ++i) {
    const Span common = tiles[i].common(window);
    const int32_t num_tokens = tiles[i].num_tokens;
    int32_t token = common.begin;
    int64_t left = num_blocks(common, block_size);
    if (left == 0) {
      if (edges[i] > 0) open_share();
      partition.tasks.push_back({static_cast<int32_t>(i), common.end, common.end, -1});
    }
    while (left > 0) {
      open_share();
      const int64_t take = std::min(left, ceil_div(share_end() - done, num_tokens));
      const int64_t end = (token / block_size + take) * block_size;
      const int32_t token_end = static_cast<int32_t>(std::min<int64_t>(end, common.end));
      partition.tasks.push_back({static_cast<int32_t>(i), token, token_end, -1});
      token = token_end;
      left -= take;
      done += take * num_tokens;
    }
    done += edges[i];
  }
  partition.share_begin.push_back(static_cast<int32_t>(partition.tasks.size()));
  number_partials(partition, tiles.size());
  return partition;
}

}  // namespace neo
