// A float buffer at a cache line, grown on demand (old contents are lost).
#ifndef NEO_COMPILE_CSRC_ALIGNED_BUFFER_H_
#define NEO_COMPILE_CSRC_ALIGNED_BUFFER_H_

#include <cstdint>
#include <memory>
#include <new>

namespace neo {

class AlignedBuffer {
 public:
  float* data() const { return data_.get(); }
  int64_t size() const { return size_; }

  void reserve(int64_t floats) {
    if (floats <= size_) return;
    data_.reset();
    size_ = 0;
    data_.reset(static_cast<float*>(::operator new(static_cast<size_t>(floats) * sizeof(float), kAlignment)));
    size_ = floats;
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t size_ = 0;
};

}  // namespace neo

#endif  // NEO_COMPILE_CSRC_ALIGNED_BUFFER_H_
