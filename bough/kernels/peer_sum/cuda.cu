// Sums over the ranks of one machine, each of which reads the others' memory: small messages, where NCCL's steps cost more than
// the bytes. Compiled with RANKS, THREADS, BLOCKS, DTYPE (0: float32, 1: bfloat16, 2: float16), HALF_BYTES.
//
// A rank's memory: flags [2][BLOCKS][8], counters [BLOCKS], then two halves for what it brings, and two for sums of its own slice.
// Calls alternate between the halves. A rank overwrites a half in call n + 2 only once its call n + 1 is over, in which every
// other rank has taken part, so that their call n, the last to read that half, is over, too: no barrier at the end is needed.
// All blocks count all calls, so that they agree on the half; those without work do nothing else.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

struct Peers { u8* at[8]; };
struct Norm { float eps, offset; };

#define FLAGS (2 * BLOCKS * 8 * 4)
#define DATA ((FLAGS + BLOCKS * 4 + 127) / 128 * 128)
#define INLINE __device__ __forceinline__

#if DTYPE == 0
#define LANES 4
#else
#define LANES 8
#endif

INLINE u32* flag(u8* base, int stage, int block, int rank) { return (u32*)base + (stage * BLOCKS + block) * 8 + rank; }
INLINE u32* counter(u8* base) { return (u32*)(base + FLAGS) + blockIdx.x; }
INLINE uint4* brought(u8* base, u32 call) { return (uint4*)(base + DATA + (u64)(call & 1) * HALF_BYTES); }
INLINE uint4* summed(u8* base, u32 call) { return (uint4*)(base + DATA + (u64)(2 + (call & 1)) * HALF_BYTES); }

#ifndef ON_HOST  // tests/kernels/test_peer_sum.py has these for threads of a CPU
INLINE void raise_flag(u32* at, u32 value) {
  __threadfence_system();
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

INLINE u32 read_flag(u32* at) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

INLINE float from_half(u32 bits) {
  float value;
#if DTYPE == 1
  value = __uint_as_float(bits << 16);
#else
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(bits));
#endif
  return value;
}

INLINE u32 to_half(float value) {
  u32 bits;
#if DTYPE == 1
  asm("{ .reg .b16 h; cvt.rn.bf16.f32 h, %1; cvt.u32.u16 %0, h; }" : "=r"(bits) : "f"(value));
#else
  asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h; }" : "=r"(bits) : "f"(value));
#endif
  return bits;
}

INLINE float over_block(float value) {
  __shared__ float by_warp[THREADS / 32];
#pragma unroll
  for (int step = 16; step; step /= 2) value += __shfl_xor_sync(0xffffffff, value, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; ++warp) total += by_warp[warp];
  return total;
}
#endif

// Until the same block of every rank is here. What its threads wrote before is seen by the others' afterwards.
INLINE void meet(const Peers& peers, int rank, int stage, u32 call) {
  __syncthreads();
  if (threadIdx.x < RANKS) {
    raise_flag(flag(peers.at[threadIdx.x], stage, blockIdx.x, rank), call);
    u32* mine = flag(peers.at[rank], stage, blockIdx.x, threadIdx.x);
    while ((int)(read_flag(mine) - call) < 0) {}
  }
  __syncthreads();
}

INLINE void unpack(const uint4& packed, float* values) {
  const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int at = 0; at < 4; ++at) {
#if DTYPE == 0
    values[at] = __uint_as_float(words[at]);
#else
    values[2 * at] = from_half(words[at] & 0xffff);
    values[2 * at + 1] = from_half(words[at] >> 16);
#endif
  }
}

INLINE uint4 pack(const float* values) {
  u32 words[4];
#pragma unroll
  for (int at = 0; at < 4; ++at) {
#if DTYPE == 0
    words[at] = __float_as_uint(values[at]);
#else
    words[at] = to_half(values[2 * at]) | to_half(values[2 * at + 1]) << 16;
#endif
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// In the order of ranks, so that all of them get the same bits; rounded once.
INLINE uint4 sum(const Peers& peers, u32 call, int at) {
  float total[LANES], part[LANES];
  uint4 read[RANKS];
#pragma unroll
  for (int rank = 0; rank < RANKS; ++rank) read[rank] = brought(peers.at[rank], call)[at];
  unpack(read[0], total);
#pragma unroll
  for (int rank = 1; rank < RANKS; ++rank) {
    unpack(read[rank], part);
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) total[lane] += part[lane];
  }
  return pack(total);
}

INLINE void count(u8* base, u32 call) {
  __syncthreads();
  if (threadIdx.x == 0) *counter(base) = call;
}

// Every rank sums everything. `out` may be `in`.
extern "C" __global__ void __launch_bounds__(THREADS) one_shot(Peers peers, const uint4* in, uint4* out, int rank, int vectors) {
  const u32 call = *counter(peers.at[rank]) + 1;
  const int first = blockIdx.x * THREADS + threadIdx.x;
  if (blockIdx.x * THREADS < vectors) {
    uint4* mine = brought(peers.at[rank], call);
    for (int at = first; at < vectors; at += BLOCKS * THREADS) mine[at] = in[at];
    meet(peers, rank, 0, call);
    for (int at = first; at < vectors; at += BLOCKS * THREADS) out[at] = sum(peers, call, at);
  }
  count(peers.at[rank], call);
}

// Every rank sums a slice, and reads the others' sums. `out` may be `in`.
extern "C" __global__ void __launch_bounds__(THREADS) two_shot(Peers peers, const uint4* in, uint4* out, int rank, int vectors) {
  const u32 call = *counter(peers.at[rank]) + 1;
  const int slice = (vectors + RANKS - 1) / RANKS;
  const int first = blockIdx.x * THREADS + threadIdx.x;
  if (blockIdx.x * THREADS < slice) {
    uint4* mine = brought(peers.at[rank], call);
    for (int owner = 0; owner < RANKS; ++owner) {
      const int end = min(slice, vectors - owner * slice);
      for (int at = first; at < end; at += BLOCKS * THREADS) mine[owner * slice + at] = in[owner * slice + at];
    }
    meet(peers, rank, 0, call);
    uint4* sums = summed(peers.at[rank], call);
    const int end = min(slice, vectors - rank * slice);
    for (int at = first; at < end; at += BLOCKS * THREADS) sums[at] = sum(peers, call, rank * slice + at);
    meet(peers, rank, 1, call);
    for (int owner = 0; owner < RANKS; ++owner) {
      const int stop = min(slice, vectors - owner * slice);
      const uint4* theirs = summed(peers.at[owner], call);
      for (int at = first; at < stop; at += BLOCKS * THREADS) out[owner * slice + at] = theirs[at];
    }
  }
  count(peers.at[rank], call);
}

#define ROW_VECTORS 4

// One shot, then the residual is added and the sum is normed, a row by one block. `normed` may be `in`, `total` the residual.
extern "C" __global__ void __launch_bounds__(THREADS)
    one_shot_norm(Peers peers, const uint4* in, const uint4* residual, const uint4* weight, uint4* normed, uint4* total, int rank,
                  int rows, int width, Norm norm) {
  const u32 call = *counter(peers.at[rank]) + 1;
  if (blockIdx.x < rows) {
    uint4* mine = brought(peers.at[rank], call);
    for (int row = blockIdx.x; row < rows; row += BLOCKS)
      for (int at = threadIdx.x; at < width; at += THREADS) mine[row * width + at] = in[row * width + at];
    meet(peers, rank, 0, call);
    for (int row = blockIdx.x; row < rows; row += BLOCKS) {
      uint4 kept[ROW_VECTORS];
      float values[LANES], more[LANES];
      float squares = 0;
#pragma unroll
      for (int turn = 0; turn < ROW_VECTORS; ++turn) {
        const int at = turn * THREADS + threadIdx.x;
        if (at < width) {
          unpack(sum(peers, call, row * width + at), values);
          unpack(residual[row * width + at], more);
#pragma unroll
          for (int lane = 0; lane < LANES; ++lane) values[lane] += more[lane];
          kept[turn] = pack(values);
          total[row * width + at] = kept[turn];
          unpack(kept[turn], values);
#pragma unroll
          for (int lane = 0; lane < LANES; ++lane) squares += values[lane] * values[lane];
        }
      }
      const float scale = rsqrtf(over_block(squares) / (width * LANES) + norm.eps);
#pragma unroll
      for (int turn = 0; turn < ROW_VECTORS; ++turn) {
        const int at = turn * THREADS + threadIdx.x;
        if (at < width) {
          unpack(kept[turn], values);
          unpack(weight[at], more);
#pragma unroll
          for (int lane = 0; lane < LANES; ++lane) values[lane] = values[lane] * scale * (more[lane] + norm.offset);
          normed[row * width + at] = pack(values);
        }
      }
    }
  }
  count(peers.at[rank], call);
}
