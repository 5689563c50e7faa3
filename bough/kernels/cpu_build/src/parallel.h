// Threads: the OpenMP runtime that torch has loaded, so that there is one pool of threads.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace bough {

struct alignas(64) Counter {
  std::atomic<int64_t> next{0};
  // The first of `step` items that nobody else takes.
  int64_t take(int64_t step = 1) { return next.fetch_add(step, std::memory_order_relaxed); }
};

inline int usable_threads() { return omp_in_parallel() ? 1 : omp_get_max_threads(); }

// body(thread, threads) on each thread.
template <typename Body>
inline void on_threads(int threads, const Body& body) {
  if (threads <= 1) {
    body(0, 1);
    return;
  }
#pragma omp parallel num_threads(threads)
  body(omp_get_thread_num(), omp_get_num_threads());
}

// body(item) for every item below `count`, handed out in order to whichever thread is free.
template <typename Body>
inline void for_each(int threads, int64_t count, int64_t step, const Body& body) {
  if (threads <= 1 || count <= step) {
    for (int64_t i = 0; i < count; i++) body(i);
    return;
  }
  Counter counter;
  on_threads(threads, [&](int, int) {
    for (int64_t first; (first = counter.take(step)) < count;)
      for (int64_t i = first; i < first + step && i < count; i++) body(i);
  });
}

// Memory that a thread keeps between calls. Grows, never shrinks.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  template <typename T>
  T* get(size_t count) {
    size_t bytes = (count * sizeof(T) + 4095) / 4096 * 4096;
    if (bytes > bytes_) {
      std::free(data_);
      data_ = std::aligned_alloc(4096, bytes);
      if (!data_) {
        bytes_ = 0;
        throw std::bad_alloc();
      }
      bytes_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace bough
