// What a plan computes, cut evenly over threads (flash-decoding).
//
// A tile is a few consecutive query tokens of one request; a decoding request is one tile of one token. All tokens of a
// tile see its common span, which is read once for all of them. What only some of them see are its edges:
//
//   position       ..............#######################......      (causal: the last token of the tile sees most)
//   query 0        |--left edge--|----- common span ----|
//   query 1           |----------|----------------------|-|         left edges: a sliding window
//   query 2              |-------|----------------------|--|        right edges: fewer than the tile has tokens
//
// The common spans of all tiles, laid end to end, are cut into equal shares at block boundaries:
//
//   tile      0            1        2               3
//   blocks    |----------|------|--------------|---------|
//   shares    |       0       |       1       |      2    |      one share per participating thread
//   tasks     |----0-----|-1--|2-|-----3------|-4|---5----|      cut at both; at most tiles + shares of them
//
// A tile that lies in one task is written by that task; one that is cut leaves partials, and whoever finishes its
// last one merges them by log-sum-exp. Edges belong to a tile's last task.
#ifndef NEO_COMPILE_CSRC_PARTITION_H_
#define NEO_COMPILE_CSRC_PARTITION_H_

#include <cstdint>
#include <vector>

namespace neo {

struct Span {  // of positions in a request's context
  int32_t begin, end;

  bool is_empty() const { return begin >= end; }
};

struct Tile {
  int32_t request;
  int32_t first_row;   // of its first query token in q and out
  int32_t num_tokens;  // at least 1
  int32_t length;      // positions up to and including the first query token's; 0 = an empty request

  int32_t end() const { return length + num_tokens - 1; }
  // What query token i sees; window = 0: everything up to itself, otherwise the last `window` positions of that.
  Span visible(int32_t i, int64_t window) const;
  // What all tokens see. Empty: [length, length).
  Span common(int64_t window) const;
};

struct Task {
  int32_t tile;
  int32_t token_begin, token_end;  // part of the tile's common span; its last task ends at `length`
  int32_t partial;                 // index of its workspace partial, or -1: the whole tile
};

struct Partition {
  std::vector<Task> tasks;
  std::vector<int32_t> share_begin;    // [shares + 1] into tasks
  std::vector<int32_t> first_partial;  // [tiles], -1 for a tile in one task
  std::vector<int32_t> num_partials;   // [tiles], 0 for a tile in one task
  int32_t total_partials = 0;

  int32_t num_shares() const { return static_cast<int32_t>(share_begin.size()) - 1; }
};

// Cuts the tiles' common spans into at most max_shares shares of equal work: blocks times query tokens, edges included.
// A tile without a common span gets one task with an empty span (somebody must do its edges, or write zeros). No share
// gets less than min_share_work, so small work wakes few threads.
Partition make_partition(const std::vector<Tile>& tiles, int32_t block_size, int64_t window, int32_t max_shares,
                         int64_t min_share_work);

}  // namespace neo

#endif  // NEO_COMPILE_CSRC_PARTITION_H_
