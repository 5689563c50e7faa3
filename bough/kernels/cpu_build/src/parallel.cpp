#include "parallel.h"

#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

namespace bough {
namespace {

// The gate of the current job: its number (high half), whether it may still be entered, and how many helpers are inside.
constexpr uint64_t kOpen = 1ull << 31, kInside = kOpen - 1;
constexpr uint64_t kNumber = ~0ull << 32;

constexpr auto kSpin = std::chrono::microseconds(200);  // before an idle helper sleeps

struct alignas(64) Pool {
  std::atomic<uint64_t> gate{0};
  alignas(64) void (*body)(const void*, int) = nullptr;
  const void* context = nullptr;
  std::atomic<int> places{0};  // helpers that may still enter
  alignas(64) std::atomic<uint32_t> asleep{0};
  std::atomic<uint32_t> bell{0};
  alignas(64) std::atomic<const char*> soon{nullptr};  // memory that will be read, its size, and in how many spans
  std::atomic<int64_t> soon_bytes{0};
  std::atomic<int> soon_spans{1};
  std::mutex owner;
  int helpers = 0;
};

constexpr int64_t kAhead = 256 << 10;  // bytes that an idle helper asks for: what fits a second-level cache, with room to spare

// An idle helper's view of what comes: asks for a little at a time, so that a job is noticed at once.
struct Foresight {
  const char *seen = nullptr, *at = nullptr, *end = nullptr;

  void look(Pool& p, int who) {
    const char* soon = p.soon.load(std::memory_order_relaxed);
    if (soon != seen) {
      seen = soon;
      const int64_t bytes = p.soon_bytes.load(std::memory_order_relaxed);
      const int spans = p.soon_spans.load(std::memory_order_relaxed), span = who % spans;
      at = soon ? soon + bytes * span / spans : nullptr;
      end = soon ? std::min(at + kAhead, soon + bytes * (span + 1) / spans) : nullptr;
    }
    for (int line = 0; line < 8 && at < end; line++, at += 64) __builtin_prefetch(at);
  }
};

Pool& pool() {
  static Pool* made = new Pool;  // never destroyed: helpers outlive everything
  return *made;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool enter(Pool& p, uint64_t number) {
  uint64_t now = p.gate.load(std::memory_order_acquire);
  while ((now & kNumber) == number && (now & kOpen))
    if (p.gate.compare_exchange_weak(now, now + 1, std::memory_order_acquire)) return true;
  return false;
}

uint64_t wait_for_job(Pool& p, uint64_t last, int who, Foresight& foresight) {
  auto changed = [&](uint64_t& now) {
    now = p.gate.load(std::memory_order_acquire);
    return (now & kNumber) != last && (now & kOpen);
  };
  uint64_t now;
  for (;;) {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < 64; i++) {
        if (changed(now)) return now & kNumber;
        foresight.look(p, who);
        relax();
      }
    } while (std::chrono::steady_clock::now() < until);
    const uint32_t rung = p.bell.load();
    p.asleep.fetch_add(1);
    if (!changed(now)) p.bell.wait(rung);
    p.asleep.fetch_sub(1);
  }
}

void help(Pool& p, int who) {
  Foresight foresight;
  for (uint64_t number = 0;;) {
    number = wait_for_job(p, number, who, foresight);
    if (!enter(p, number)) continue;
    if (p.places.fetch_sub(1, std::memory_order_relaxed) > 0) p.body(p.context, who);
    p.gate.fetch_sub(1, std::memory_order_release);
  }
}

void start_helper(Pool& p) {
  sigset_t all, before;  // signals are for the threads that know of them
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int who = ++p.helpers;
  std::thread([&p, who] { help(p, who); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void expect_spans(int threads, const void* memory, int64_t bytes) {
  Pool& p = pool();
  p.soon_bytes.store(bytes, std::memory_order_relaxed);
  p.soon_spans.store(threads, std::memory_order_relaxed);
  p.soon.store(static_cast<const char*>(memory), std::memory_order_relaxed);
}

void with_helpers(int helpers, void (*body)(const void*, int), const void* context) {
  Pool& p = pool();
  std::unique_lock<std::mutex> owner(p.owner, std::try_to_lock);
  if (!owner.owns_lock()) {  // another thread's job is running
    body(context, 0);
    return;
  }
  while (p.helpers < helpers) start_helper(p);
  p.body = body;
  p.context = context;
  p.places.store(helpers, std::memory_order_relaxed);
  const uint64_t number = (p.gate.load(std::memory_order_relaxed) & kNumber) + (1ull << 32);
  p.gate.store(number | kOpen);
  if (p.asleep.load()) {
    p.bell.fetch_add(1);
    p.bell.notify_all();
  }
  body(context, 0);
  p.gate.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int spins = 0; p.gate.load(std::memory_order_acquire) & kInside; spins++) {
    if (spins < 2000) relax();
    else sched_yield();
  }
}

}  // namespace bough
