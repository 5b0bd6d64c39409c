// The one clock of the native side: the base of Python's time.perf_counter_ns on Linux (CLOCK_MONOTONIC).
#ifndef NEO_COMPILE_CSRC_CLOCK_H_
#define NEO_COMPILE_CSRC_CLOCK_H_

#include <chrono>
#include <cstdint>

namespace neo {

inline int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace neo

#endif  // NEO_COMPILE_CSRC_CLOCK_H_
