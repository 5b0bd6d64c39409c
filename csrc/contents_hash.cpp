#include "contents_hash.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace neo {

namespace {

constexpr int kLanes = 8;                // words that are summed side by side
constexpr int64_t kPartBytes = 4 << 20;  // hashed by one thread
constexpr int64_t kLineBytes = 8 * kLanes;

uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 32);
}

// Two running sums, as Fletcher's: the second one depends on the order.
uint64_t checksum_part(const char* data, int64_t num_bytes) {
  uint64_t sum[kLanes] = {}, sum_of_sums[kLanes] = {}, words[kLanes];
  const auto add = [&] {
    for (int lane = 0; lane < kLanes; ++lane) {
      sum[lane] += words[lane];
      sum_of_sums[lane] += sum[lane];
    }
  };
  int64_t offset = 0;
  for (; offset + kLineBytes <= num_bytes; offset += kLineBytes) {
    std::memcpy(words, data + offset, kLineBytes);
    add();
  }
  std::memset(words, 0, sizeof words);
  std::memcpy(words, data + offset, static_cast<size_t>(num_bytes - offset));
  add();
  uint64_t hash = static_cast<uint64_t>(num_bytes);
  for (int lane = 0; lane < kLanes; ++lane) hash = mix(mix(hash, sum[lane]), sum_of_sums[lane]);
  return hash;
}

}  // namespace

[[gnu::no_sanitize_address]] uint64_t hash_words(const int64_t* addresses, int64_t count) {
  uint64_t hash = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t word;
    std::memcpy(&word, reinterpret_cast<const void*>(static_cast<uintptr_t>(addresses[i]) & ~uintptr_t{7}),
                sizeof word);
    hash = mix(hash, word);
  }
  return hash;
}

uint64_t checksum(const void* data, int64_t num_bytes, [[maybe_unused]] int num_threads) {
  const int64_t num_parts = (num_bytes + kPartBytes - 1) / kPartBytes;
  std::vector<uint64_t> parts(static_cast<size_t>(num_parts));
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_parts > 1)
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t begin = part * kPartBytes;
    parts[static_cast<size_t>(part)] =
        checksum_part(static_cast<const char*>(data) + begin, std::min(kPartBytes, num_bytes - begin));
  }
  uint64_t hash = 0;
  for (const uint64_t part : parts) hash = mix(hash, part);
  return hash;
}

}  // namespace neo
