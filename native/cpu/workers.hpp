// A pool of threads for kernels: the caller works too, idle threads spin for a moment and then sleep.
//
// Where the process has an OpenMP runtime set to as many threads (torch's), its threads do the work: they spin after
// every operation of torch, and threads of our own would wait for the cores they spin on.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/scratch.hpp"

namespace kvpool {

// Invariants: at most one `run` is active (others wait); `run` returns after every item is done; which worker
// does an item never changes a result, so an answer depends on the number of workers only through the schedule.
class Workers {
 public:
  using Body = void (*)(void* context, int64_t item, Scratch& scratch);

  explicit Workers(int num_threads);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls body(context, i, scratch of the worker) for i in [0, num_items), in any order, on all workers.
  void run(Body body, void* context, int64_t num_items);

  // `body(i, scratch)` for every item.
  template <class F>
  void each(int64_t num_items, F&& body) {
    run([](void* f, int64_t i, Scratch& s) { (*static_cast<std::remove_reference_t<F>*>(f))(i, s); }, &body, num_items);
  }

  // Buffer shared by the workers of one call (partial results). Valid until the next call of it.
  uint8_t* shared(size_t bytes) { return shared_.reserve(bytes); }

  // Held from before `shared` until its last use.
  std::mutex& call_mutex() { return call_mutex_; }

 private:
  void loop(int worker);
  void drain(Scratch& scratch);
  void start();
  bool run_on_openmp();

  const int num_threads_;
  std::vector<std::thread> threads_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
  Scratch shared_;
  std::mutex call_mutex_, run_mutex_;
  const long made_by_;  // process
  long owner_pid_;      // of the threads
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> busy_{0};
  std::atomic<bool> stop_{false};
  Body body_ = nullptr;
  void* context_ = nullptr;
  int64_t num_items_ = 0;
};

}  // namespace kvpool
