// What the sources for Hopper have in common: the order of launches, barriers in shared memory, tiles through the copy engine.

#define INLINE __device__ __forceinline__

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(64) TensorMap { u64 opaque[16]; };

INLINE void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
INLINE void let_kernel_after_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

INLINE void barrier_init(u32 at, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

INLINE void barrier_expect(u32 at, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

INLINE void barrier_arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }

// At the barrier that stands at the same place in another block of the cluster.
INLINE void barrier_arrive_at(u32 at, u32 rank) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(at),
      "r"(rank) : "memory");
}

INLINE void barrier_wait(u32 at, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(at), "r"(parity) : "memory");
  } while (!done);
}

// The same in one piece that the compiler doesn't look into: the form in which the large products were measured.
INLINE void barrier_wait_whole(u32 at, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(at),
      "r"(parity) : "memory");
}

// How long L2 holds what is fetched or stored with them.
INLINE u64 held_shorter() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
INLINE u64 held_longer() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// A tile of the matrix that the map describes, counted by the barrier.
INLINE void fetch(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

INLINE void fetch_held(u32 to, const TensorMap& map, int column, int row, u32 barrier, u64 held) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(held) : "memory");
}

// An operand of the tensor cores: rows of 128 bytes, swizzled, eight of them 1024 bytes apart from the next eight, the
// dimension that is summed over innermost.
INLINE u64 operand(u32 at) { return u64((at & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); }

INLINE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> INLINE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

INLINE float exp2_(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
