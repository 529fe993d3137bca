#include "cpu/workers.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvpool {

namespace {

// Long enough to bridge the Python code between two layers, short enough not to steal a core from others.
constexpr int kSpins = 2000;

void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The OpenMP runtime the process has loaded already (torch brings one), by the entry points that compilers call.
struct OpenMp {
  void (*parallel)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
  int (*max_threads)();
  bool found() const { return parallel != nullptr && max_threads != nullptr; }
};

template <class F>
void find(F*& function, const char* name) {
  function = reinterpret_cast<F*>(dlsym(RTLD_DEFAULT, name));
}

OpenMp loaded_openmp() {
  OpenMp openmp;
  find(openmp.parallel, "GOMP_parallel");
  find(openmp.max_threads, "omp_get_max_threads");
  return openmp;
}

}  // namespace

uint8_t* Scratch::reserve(size_t bytes) {
  if (bytes > size_) {
    std::free(memory_);
    size_ = (bytes + 4095) / 4096 * 4096;
    memory_ = static_cast<uint8_t*>(std::aligned_alloc(4096, size_));
    if (memory_ == nullptr) {
      size_ = 0;
      throw std::bad_alloc();
    }
  }
  return memory_;
}

Scratch::~Scratch() { std::free(memory_); }

Workers::Workers(int num_threads) : num_threads_(num_threads), made_by_(getpid()), owner_pid_(getpid()) {
  for (int i = 0; i < num_threads_; ++i) scratch_.push_back(std::make_unique<Scratch>());
}

void Workers::start() {
  for (int i = 1; i < num_threads_; ++i) threads_.emplace_back([this, i] { loop(i); });
}

Workers::~Workers() {
  if (owner_pid_ != getpid()) {  // a forked child: the threads are not here
    for (auto& thread : threads_) thread.detach();
    return;
  }
  stop_.store(true);
  generation_.fetch_add(1);
  generation_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Workers::drain(Scratch& scratch) {
  for (int64_t i = next_.fetch_add(1); i < num_items_; i = next_.fetch_add(1)) body_(context_, i, scratch);
}

void Workers::loop(int worker) {
  uint32_t seen = 0;
  for (;;) {
    for (int spin = 0; spin < kSpins && generation_.load(std::memory_order_acquire) == seen; ++spin) pause_cpu();
    generation_.wait(seen, std::memory_order_acquire);
    seen = generation_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    drain(*scratch_[worker]);
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_one();
  }
}

bool Workers::run_on_openmp() {
  static const OpenMp openmp = loaded_openmp();
  // Another number would make the runtime end and start threads with every call; a forked child has none of them.
  if (!openmp.found() || made_by_ != getpid() || openmp.max_threads() != num_threads_) return false;
  busy_.store(0);
  openmp.parallel(
      [](void* workers) {
        auto& self = *static_cast<Workers*>(workers);
        self.drain(*self.scratch_[self.busy_.fetch_add(1)]);
      },
      this, static_cast<unsigned>(num_threads_), 0);
  return true;
}

void Workers::run(Body body, void* context, int64_t num_items) {
  std::lock_guard lock(run_mutex_);
  if (num_threads_ == 1 || num_items <= 1) {
    for (int64_t i = 0; i < num_items; ++i) body(context, i, *scratch_[0]);
    return;
  }
  body_ = body;
  context_ = context;
  num_items_ = num_items;
  next_.store(0);
  if (run_on_openmp()) return;
  if (owner_pid_ != getpid()) {  // after a fork the child starts threads of its own
    for (auto& thread : threads_) thread.detach();
    threads_.clear();
    generation_.store(0);
    owner_pid_ = getpid();
  }
  if (threads_.empty()) start();
  busy_.store(num_threads_ - 1);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  drain(*scratch_[0]);
  for (int spin = 0; spin < kSpins && busy_.load(std::memory_order_acquire) != 0; ++spin) pause_cpu();
  for (int left = busy_.load(std::memory_order_acquire); left != 0; left = busy_.load(std::memory_order_acquire))
    busy_.wait(left, std::memory_order_acquire);
}

}  // namespace kvpool
