// A hash of single words of memory, far apart: cheap enough to be taken of some words of every weight in every run.
#ifndef NEO_COMPILE_CSRC_HASH_WORDS_H_
#define NEO_COMPILE_CSRC_HASH_WORDS_H_

#include <cstdint>
#include <cstring>

namespace neo {

// Of the aligned 8 bytes around each address: such a word never crosses a page, so it can be read where its byte can,
// and AddressSanitizer need not know of the few bytes behind the end of a tensor.
[[gnu::no_sanitize_address]] inline uint64_t hash_words(const int64_t* addresses, int64_t count) {
  uint64_t hash = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t word;
    std::memcpy(&word, reinterpret_cast<const void*>(static_cast<uintptr_t>(addresses[i]) & ~uintptr_t{7}),
                sizeof word);
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace neo

#endif  // NEO_COMPILE_CSRC_HASH_WORDS_H_
