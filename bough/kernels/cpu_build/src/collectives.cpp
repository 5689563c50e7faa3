// Ranks on one machine that meet in shared memory. Every rank has a word that counts its arrivals; a rank that waits
// polls it for a while, then sleeps on it (a futex) until the next arrival wakes it.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#include "simd.h"

namespace bough {
namespace {

struct alignas(64) Place {  // one a rank, at the segment's beginning; mirrored in Python
  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> sleepers;
};
static_assert(sizeof(Place) == 64);

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline bool is_there(const Place& place, uint32_t count) {
  return static_cast<int32_t>(place.arrived.load(std::memory_order_acquire) - count) >= 0;
}

void arrive(Place& place, uint32_t count) {
  place.arrived.store(count);  // sequentially consistent, as is the look at who sleeps: one of both sides sees the other
  if (place.sleepers.load()) syscall(SYS_futex, &place.arrived, FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0);
}

// Whether the place's count was reached before `until_ns`. A signal to this process ends the wait as well.
bool wait_for(Place& place, uint32_t count, int64_t spin_ns, int64_t until_ns) {
  if (is_there(place, count)) return true;
  for (int64_t begin = spin_ns > 0 ? now_ns() : 0, now = begin; now - begin < spin_ns; now = now_ns())
    for (int i = 0; i < 64; i++) {
      if (is_there(place, count)) return true;
      relax();
    }
  for (;;) {
    const int64_t left = until_ns - now_ns();
    place.sleepers.fetch_add(1);
    const uint32_t seen = place.arrived.load();
    bool interrupted = false;
    if (static_cast<int32_t>(seen - count) < 0 && left > 0) {
      const timespec limit{left / 1000000000LL, left % 1000000000LL};
      interrupted = syscall(SYS_futex, &place.arrived, FUTEX_WAIT, seen, &limit, nullptr, 0) != 0 && errno == EINTR;
    }
    place.sleepers.fetch_sub(1);
    if (is_there(place, count)) return true;
    if (left <= 0 || interrupted) return false;
  }
}

struct F32 {
  using type = float;
  static float read(float x) { return x; }
  static float write(float x) { return x; }
};
struct BF16 {
  using type = uint16_t;
  static float read(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
  }
  static uint16_t write(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return x != x ? 0x7fc0 : static_cast<uint16_t>(rounded);
  }
};
struct F16 {
  using type = _Float16;
  static float read(_Float16 x) { return x; }
  static _Float16 write(float x) { return static_cast<_Float16>(x); }
};
struct I64 {
  using type = int64_t;
  static int64_t read(int64_t x) { return x; }
  static int64_t write(int64_t x) { return x; }
};
struct I32 {
  using type = int32_t;
  static int32_t read(int32_t x) { return x; }
  static int32_t write(int32_t x) { return x; }
};

constexpr int64_t kPiece = 512;

// The sum of `size` arrays that lie `stride` bytes apart, in their order. `out` may be one of them.
template <typename D>
void sum(const char* parts, int64_t stride, int size, char* out, int64_t count) {
  using T = typename D::type;
  using A = decltype(D::read(T()));
  A total[kPiece];
  for (int64_t begin = 0; begin < count; begin += kPiece) {
    const int64_t n = count - begin < kPiece ? count - begin : kPiece;
    const T* first = reinterpret_cast<const T*>(parts) + begin;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) total[i] = D::read(first[i]);
    for (int part = 1; part < size; part++) {
      const T* next = reinterpret_cast<const T*>(parts + part * stride) + begin;
#pragma omp simd
      for (int64_t i = 0; i < n; i++) total[i] += D::read(next[i]);
    }
    T* to = reinterpret_cast<T*>(out) + begin;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) to[i] = D::write(total[i]);
  }
}

void sum_of(int32_t dtype, const char* parts, int64_t stride, int size, char* out, int64_t count) {
  switch (dtype) {
    case 0: return sum<F32>(parts, stride, size, out, count);
    case 1: return sum<BF16>(parts, stride, size, out, count);
    case 2: return sum<F16>(parts, stride, size, out, count);
    case 3: return sum<I64>(parts, stride, size, out, count);
    default: return sum<I32>(parts, stride, size, out, count);
  }
}

}  // namespace
}  // namespace bough

using namespace bough;

// Tells that `place` has come to `count`.
BOUGH_EXPORT void bough_arrive(void* place, uint32_t count) { arrive(*static_cast<Place*>(place), count); }

// Waits until each of `number` places, which begin at `first`, has come to `count`. Returns 1, or 0 after `wait_ns` or a signal.
BOUGH_EXPORT int32_t bough_await(void* first, int32_t number, uint32_t count, int64_t spin_ns, int64_t wait_ns) {
  Place* places = static_cast<Place*>(first);
  const int64_t until_ns = now_ns() + wait_ns;
  for (int32_t i = 0; i < number; i++)
    if (!wait_for(places[i], count, spin_ns, until_ns)) return 0;
  return 1;
}

// The sum of `size` arrays of `count` items in their order.
BOUGH_EXPORT void bough_ordered_sum(int32_t dtype, const void* parts, int64_t stride, int32_t size, void* out, int64_t count) {
  sum_of(dtype, static_cast<const char*>(parts), stride, size, static_cast<char*>(out), count);
}
