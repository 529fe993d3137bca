// Working memory of one thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpool {

// Memory of one worker, kept between calls. Grows; never shrinks.
struct Scratch {
  // At least `bytes` bytes, aligned to 64. What it held before is lost.
  uint8_t* reserve(size_t bytes);
  ~Scratch();
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

 private:
  uint8_t* memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace kvpool
