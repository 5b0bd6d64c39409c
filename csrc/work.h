// What a thread pool runs: numbered tasks, grouped in shares (a thread starts with its own share, then helps with
// others').
#ifndef NEO_COMPILE_CSRC_WORK_H_
#define NEO_COMPILE_CSRC_WORK_H_

#include <cstdint>

#include "aligned_buffer.h"

namespace neo {

class Work {
 public:
  virtual ~Work() = default;
  virtual int32_t num_shares() const = 0;
  virtual int32_t share_begin(int32_t share) const = 0;  // share_begin(num_shares()) = number of tasks
  virtual void run(int32_t task, AlignedBuffer& scratch) = 0;
};

}  // namespace neo

#endif  // NEO_COMPILE_CSRC_WORK_H_
