// Work shared with helper threads, which are waited for only if they have begun: a helper that the operating system keeps from
// running delays nothing, since the caller takes the items itself.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace bough {

struct alignas(64) Counter {
  std::atomic<int64_t> next{0};
  // The first of the next `step` items, which no other thread takes.
  int64_t take(int64_t step = 1) { return next.fetch_add(step, std::memory_order_relaxed); }
};

// Threads that torch is set to use (torch.set_num_threads): the OpenMP runtime is torch's own.
inline int usable_threads() { return omp_in_parallel() ? 1 : omp_get_max_threads(); }

// Calls body(context, who) on this thread (who = 0) and, at the same time, on up to helpers others, which are always the same
// threads in a row of calls. Returns when every call has ended. The calls must divide the work among themselves, whatever
// their number.
void with_helpers(int helpers, void (*body)(const void*, int who), const void* context);

// What for_spans will read soon: helpers with nothing else to do bring the beginning of their share into their caches.
void expect_spans(int threads, const void* memory, int64_t bytes);

// body(item) for every item below `count`, handed out in order, `step` at a time, to whichever thread is free.
template <typename Body>
inline void for_each(int threads, int64_t count, int64_t step, const Body& body) {
  if (threads <= 1 || count <= step) {
    for (int64_t i = 0; i < count; i++) body(i);
    return;
  }
  struct Work {
    const Body* body;
    int64_t count, step;
    mutable Counter counter;
  } work{&body, count, step, {}};
  with_helpers(
      threads - 1,
      [](const void* context, int) {
        const Work& w = *static_cast<const Work*>(context);
        for (int64_t first; (first = w.counter.take(w.step)) < w.count;)
          for (int64_t i = first; i < first + w.step && i < w.count; i++) (*w.body)(i);
      },
      &work);
}

constexpr int kMostSpans = 16;

// The same for items that lie in a row in memory: every thread has a span of its own, which it reads from its beginning, and
// helps with the others' when that is done.
template <typename Body>
inline void for_spans(int threads, int64_t count, int64_t step, const Body& body) {
  if (threads <= 1 || count <= step || threads > kMostSpans) {
    for_each(threads, count, step, body);
    return;
  }
  struct Work {
    const Body* body;
    int64_t count, step;
    int threads;
    mutable Counter taken[kMostSpans];
  } work{&body, count, step, threads, {}};
  with_helpers(
      threads - 1,
      [](const void* context, int who) {
        const Work& w = *static_cast<const Work*>(context);
        for (int turn = 0; turn < w.threads; turn++) {
          const int span = (who + turn) % w.threads;
          const int64_t begin = w.count * span / w.threads, end = w.count * (span + 1) / w.threads;
          for (int64_t first; (first = begin + w.taken[span].take(w.step)) < end;)
            for (int64_t i = first; i < first + w.step && i < end; i++) (*w.body)(i);
        }
      },
      &work);
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
