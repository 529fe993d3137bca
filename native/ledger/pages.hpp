// Zeroed memory for arrays that are allocated once and never grow, in huge pages where granted. It is there before the
// first call, which would else wait for the system to find and clear pages, unless little of it may ever be used.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

namespace kvpool::ledger {

void* allocate_zeroed(size_t bytes, bool lazy);
void free_zeroed(void* address, size_t bytes);

// A fixed array of zeroed trivial elements.
template <class T>
class Array {
 public:
  static_assert(std::is_trivially_copyable_v<T>);
  Array() = default;
  explicit Array(size_t size, bool lazy = false)
      : data_(static_cast<T*>(allocate_zeroed(size * sizeof(T), lazy))), size_(size) {}
  Array(Array&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, size_t{0})) {}
  Array& operator=(Array&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { free_zeroed(data_, size_ * sizeof(T)); }

  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }
  size_t bytes() const { return size_ * sizeof(T); }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace kvpool::ledger
