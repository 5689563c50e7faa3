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

// Two bf16 values in a word.
INLINE float low(u32 two) { return __uint_as_float(two << 16); }
INLINE float high(u32 two) { return __uint_as_float(two & 0xffff0000); }
INLINE u32 both(float even, float odd) {
  u32 two;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(odd), "f"(even));
  return two;
}

INLINE float sum_over_warp(float value) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) value += __shfl_xor_sync(~0u, value, width);
  return value;
}

// Tokens before a norm, bf16: what is added to the residual stream, the stream, and where the sum goes.
struct Normed {
  const u16 *x, *residual, *norm;
  u16* total;
  i64 x_stride, residual_stride;
  float eps, offset;  // the scale is offset + norm
};

// By the first THREADS threads of every block, which then has all tokens, the stream added and normed: eight values from
// `column` on at place(token, column). Waits for the kernel before. `meet` lets these threads wait for each other.
template <int COLUMNS, int THREADS, typename Place, typename Meet>
INLINE void norm_tokens(const Normed& in, int tokens, float (*squares)[THREADS / 32], Place place, Meet meet) {
  constexpr int CHUNKS = (COLUMNS / 8 + THREADS - 1) / THREADS;  // of eight values, that a thread has of each token
  constexpr int AT_ONCE = CHUNKS < 4 ? 4 / CHUNKS : 1;           // tokens that are asked for before the first has come
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = threadIdx.x * 8;
  const bool keeps = blockIdx.x == gridDim.x - 1;  // one block
  uint4 scale[CHUNKS];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int at = first + c * (8 * THREADS);
    if (at < COLUMNS) scale[c] = *(const uint4*)(in.norm + at);
  }
  wait_for_kernel_before();
  for (int begin = 0; begin < tokens; begin += AT_ONCE) {
    uint4 added[AT_ONCE][CHUNKS], total[AT_ONCE][CHUNKS];
#pragma unroll
    for (int t = 0; t < AT_ONCE; t++)
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        const int token = begin + t, at = first + c * (8 * THREADS);
        if (token < tokens && at < COLUMNS) {
          added[t][c] = __ldcg((const uint4*)(in.x + token * in.x_stride + at));
          total[t][c] = __ldcg((const uint4*)(in.residual + token * in.residual_stride + at));
        }
      }
#pragma unroll
    for (int t = 0; t < AT_ONCE; t++) {
      const int token = begin + t;
      if (token >= tokens) break;
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        const int at = first + c * (8 * THREADS);
        if (at >= COLUMNS) break;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const u32 x = (&added[t][c].x)[i];
          u32& value = (&total[t][c].x)[i];
          value = both(low(x) + low(value), high(x) + high(value));
          sum += low(value) * low(value) + high(value) * high(value);
        }
        *place(token, at) = total[t][c];
        if (keeps) *(uint4*)(in.total + token * COLUMNS + at) = total[t][c];
      }
      sum = sum_over_warp(sum);
      if (lane == 0) squares[token][warp] = sum;
    }
  }
  meet();
  for (int token = 0; token < tokens; token++) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) sum += squares[token][w];
    const float inverse = rsqrtf(sum / COLUMNS + in.eps);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const int at = first + c * (8 * THREADS);
      if (at >= COLUMNS) break;
      uint4 normed = *place(token, at);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 by = (&scale[c].x)[i];
        u32& value = (&normed.x)[i];
        value = both(low(value) * inverse * (low(by) + in.offset), high(value) * inverse * (high(by) + in.offset));
      }
      *place(token, at) = normed;
    }
  }
}
