// Sums that blocks of a cluster share: each block has a part of every sum, in the registers of the threads that multiplied,
// and each block adds up and keeps a slice of the tokens. Parts are added in the order of the blocks, so results don't vary.
//
// As the tensor cores leave them, four values of a thread belong to eight tokens. A slice is a number of such eights. Every
// STRIDE-th block of the cluster takes part: BLOCKS of them, from the one with the rank `rank % STRIDE` on.

INLINE u32 rank_in_cluster() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
INLINE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
INLINE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

template <int EIGHTS, int THREADS, int BLOCKS, int STRIDE = 1> struct ClusterSums {
  static constexpr int MINE = (EIGHTS + BLOCKS - 1) / BLOCKS;  // eights of a block, at most
  static constexpr int BYTES = BLOCKS * MINE * THREADS * 16;   // that they take of each block's shared memory

  // By the first THREADS threads of all blocks of the cluster, others being gone. `room`: BYTES of shared memory at the same
  // place in every block, which a block that has come here has no other use for.
  static INLINE void exchange(u32 room, const float (&value)[4 * EIGHTS]) {
    const u32 own = rank_in_cluster(), to = room + (own / STRIDE * (MINE * THREADS) + threadIdx.x) * 16;
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int each = 0; each < EIGHTS; each++)
      asm volatile(
          "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5}; }" ::
              "r"(to + each % MINE * (THREADS * 16)),
          "r"(each / MINE * STRIDE + own % STRIDE), "f"(value[4 * each]), "f"(value[4 * each + 1]), "f"(value[4 * each + 2]),
          "f"(value[4 * each + 3]) : "memory");
    cluster_arrive();
    cluster_wait();
  }

  // The sums of this block's eight tokens number `mine`.
  static INLINE float4 sum(u32 room, int mine) {
    float4 out = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
      float4 part;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w)
                   : "r"(room + ((block * MINE + mine) * THREADS + threadIdx.x) * 16));
      out.x += part.x, out.y += part.y, out.z += part.z, out.w += part.w;
    }
    return out;
  }
};
