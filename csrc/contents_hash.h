// Hashes by which a change of a tensor's contents is noticed.
#ifndef NEO_COMPILE_CSRC_CONTENTS_HASH_H_
#define NEO_COMPILE_CSRC_CONTENTS_HASH_H_

#include <cstdint>

namespace neo {

// Of the aligned 8 bytes around each address: cheap enough to be taken of some words of every weight in every run. Such
// a word never crosses a page, so it can be read where its byte can, and AddressSanitizer need not know of the few
// bytes behind the end of a tensor.
uint64_t hash_words(const int64_t* addresses, int64_t count);

// Of all `num_bytes` at `data`, at the speed of reading them; it depends on their order.
uint64_t checksum(const void* data, int64_t num_bytes, int num_threads);

}  // namespace neo

#endif  // NEO_COMPILE_CSRC_CONTENTS_HASH_H_
