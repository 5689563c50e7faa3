// What products in large tiles have in common on Hopper: pairs of blocks, fetches for both, products of 64 tokens with
// 2 * FEATURES weight rows, and the way of their results to memory.
//
// Set by the door: FEATURES (64, 80, 88, 96, 104, 112 or 128), STAGES, PARTS, TURNS, STREAMED; FP8 where operands are e4m3.

#ifndef FP8
#define FP8 0
#endif

constexpr int CONSUMERS = 2;
constexpr int RESULTS = FEATURES;  // of a thread for 64 tokens: half of them of the first features, half of the second
constexpr int BLOCK_T = 64 * PARTS * CONSUMERS / TURNS;
constexpr int BLOCK_K = FP8 ? 128 : 64;  // 128 bytes: one row of the copy engine's swizzle
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr u32 ROW = 128;
constexpr u32 X_BYTES = BLOCK_T * ROW;
constexpr u32 HALF_BYTES = FEATURES * ROW;
constexpr u32 STAGE_BYTES = X_BYTES + 2 * HALF_BYTES;
// A warpgroup stores 64 tokens at a time. An odd number of eights makes rows that fall onto different banks as they are; others
// are swizzled, as their first 64 features and their last 64, which overlap if there are fewer than 128.
constexpr u32 STAGED_BYTES = 64 * 128 * 2;
constexpr bool PLAIN_ROWS = FEATURES / 8 % 2;
constexpr u32 OUT_BYTES = STAGED_BYTES / 2;
constexpr int LAST = FEATURES - 64;
constexpr u32 EMPTY_ARRIVALS = 2 * CONSUMERS / TURNS * 4;  // each warp of both blocks that multiplies the stage

INLINE u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

INLINE u32 rank_in_pair() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

INLINE void pair_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

INLINE void announce(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// `held`: how long L2 shall hold it, where STREAMED.
INLINE void fetch_alone(u32 to, const TensorMap& map, int column, int row, u32 barrier, u64 held) {
    if (STREAMED)
        fetch_held(to, map, column, row, barrier, held);
    else
        fetch(to, map, column, row, barrier);
}

// Into both blocks of the pair, at the same place, counted by the barrier of each.
INLINE void fetch_for_both(u32 to, const TensorMap& map, int column, int row, u32 barrier, u64 held) {
#define INTO_BOTH "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    const unsigned short both = 3;
    if (STREAMED)
        asm volatile(INTO_BOTH ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to), "l"(&map), "r"(column),
                     "r"(row), "r"(barrier), "h"(both), "l"(held)
                     : "memory");
    else
        asm volatile(INTO_BOTH " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier),
                     "h"(both)
                     : "memory");
}

INLINE void store_tile(const TensorMap& map, u32 from, int column, int row) {
#define STORED "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
    if (STREAMED)
        asm volatile(STORED ".L2::cache_hint [%0, {%1, %2}], [%3], %4;" ::"l"(&map), "r"(column), "r"(row), "r"(from),
                     "l"(held_shorter())
                     : "memory");
    else
        asm volatile(STORED " [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column), "r"(row), "r"(from) : "memory");
}

#if FP8
#define KIND "k32.f32.e4m3.e4m3"
#define ORIENTED ""
#else
#define KIND "k16.f32.bf16.bf16"
#define ORIENTED ", 0, 0"
#endif

#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define SIXTEEN(i) EIGHT(i), EIGHT(i + 8)
#define ACCUMULATORS_80 SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), SIXTEEN(64)
#define NAMES_64                                                                                                      \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"    \
    ", %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45"  \
    ", %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_80 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_88 NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_96 NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_104 NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define NAMES_112 NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_128 NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#if FEATURES == 64
#define ACCUMULATORS SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
#define PRODUCT "m64n128" KIND " {" NAMES_64 "}, %64, %65, add"
#define ADD "%66"
#elif FEATURES == 80
#define ACCUMULATORS ACCUMULATORS_80
#define PRODUCT "m64n160" KIND " {" NAMES_80 "}, %80, %81, add"
#define ADD "%82"
#elif FEATURES == 88
#define ACCUMULATORS ACCUMULATORS_80, EIGHT(80)
#define PRODUCT "m64n176" KIND " {" NAMES_88 "}, %88, %89, add"
#define ADD "%90"
#elif FEATURES == 96
#define ACCUMULATORS ACCUMULATORS_80, SIXTEEN(80)
#define PRODUCT "m64n192" KIND " {" NAMES_96 "}, %96, %97, add"
#define ADD "%98"
#elif FEATURES == 104
#define ACCUMULATORS ACCUMULATORS_80, SIXTEEN(80), EIGHT(96)
#define PRODUCT "m64n208" KIND " {" NAMES_104 "}, %104, %105, add"
#define ADD "%106"
#elif FEATURES == 112
#define ACCUMULATORS ACCUMULATORS_80, SIXTEEN(80), SIXTEEN(96)
#define PRODUCT "m64n224" KIND " {" NAMES_112 "}, %112, %113, add"
#define ADD "%114"
#elif FEATURES == 128
#define ACCUMULATORS ACCUMULATORS_80, SIXTEEN(80), SIXTEEN(96), SIXTEEN(112)
#define PRODUCT "m64n256" KIND " {" NAMES_128 "}, %128, %129, add"
#define ADD "%130"
#else
#error "FEATURES must be 64, 80, 88, 96, 104, 112 or 128"
#endif

// d = (add ? d : 0) + 64 tokens x 2 * FEATURES weight rows over 32 bytes of D.
INLINE void multiply(float (&d)[RESULTS], u64 x, u64 weight, u32 add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"
        "wgmma.mma_async.sync.aligned." PRODUCT ", 1, 1" ORIENTED ";\n}"
        : ACCUMULATORS
        : "l"(x), "l"(weight), "r"(add));
}

INLINE void all_products(float (&d)[RESULTS]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : ACCUMULATORS::"memory");
}

// Hardware barriers of one block: 1 .. CONSUMERS within a warpgroup, the next ones where it waits for the other.
INLINE void named_sync(int name, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
INLINE void named_arrive(int name, int threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

INLINE u32 rounded_pair(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// 1 + exp(-gate), at most 2^62, so that the product of two of them has a reciprocal.
INLINE float one_plus_exp(float gate) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(fminf(gate * -1.4426950408889634f, 62.0f)));
    return 1.0f + power;
}

// silu(gate) * up of two neighbours, the halves rounded to bf16 as if they had been stored. One reciprocal serves both.
INLINE u32 gated_pair(float gate0, float gate1, float up0, float up1) {
    const u32 gates = rounded_pair(gate0, gate1), ups = rounded_pair(up0, up1);
    const float g0 = __uint_as_float(gates << 16), g1 = __uint_as_float(gates & 0xFFFF0000u);
    const float u0 = __uint_as_float(ups << 16), u1 = __uint_as_float(ups & 0xFFFF0000u);
    const float a0 = one_plus_exp(g0), a1 = one_plus_exp(g1);
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(a0 * a1));
    return rounded_pair(g0 * (inverse * a1) * u0, g1 * (inverse * a0) * u1);
}

INLINE void store_matrices(u32 to, const u32 (&four)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(four[0]), "r"(four[1]),
                 "r"(four[2]), "r"(four[3])
                 : "memory");
}

// A warp's 16 tokens and FEATURES results each, to where they are stored from. pair_at(i, column, second): two neighbours as
// bf16, of which the first product has index i among a thread's, for a column of the tile; second: eight tokens further down.
template <typename PairAt> INLINE void lay_out(PairAt pair_at, u32 to, u32 warp, u32 lane) {
    const u32 token = warp * 16 + lane % 16;  // whose address this lane gives
#pragma unroll
    for (int j = 0; j < FEATURES / 8; j += 2) {
        u32 four[4];  // 8 x 8 each: two of tokens, then two of features
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int i = (j + q / 2) * 4 + q % 2 * 2;
            four[q] = j + q / 2 < FEATURES / 8 ? pair_at(i, (j + q / 2) * 8 + lane % 4 * 2, q % 2) : 0;
        }
        if (PLAIN_ROWS) {
            const u32 at = to + token * FEATURES * 2 + j * 16;
            if (j + 1 < FEATURES / 8)
                store_matrices(at + lane / 16 * 16, four);
            else
                asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(four[0]),
                             "r"(four[1])
                             : "memory");
        } else {
            const u32 row = to + token * ROW;
            if (j < 8) store_matrices(row + (((j + lane / 16) ^ (lane % 8)) << 4), four);
            if (LAST > 0 && j >= LAST / 8) store_matrices(row + OUT_BYTES + (((j - LAST / 8 + lane / 16) ^ (lane % 8)) << 4), four);
        }
    }
}

INLINE void store(const TensorMap& map, u32 from, int column, int row) {
    store_tile(map, from, column, row);
    if (!PLAIN_ROWS && LAST > 0) store_tile(map, from + OUT_BYTES, column + LAST, row);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// The turn of a ring: which stage is next, and which of its phases.
struct Turn {
    u32 stage = 0, phase = 0;
    INLINE void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    INLINE void skip(u32 steps) {
        stage += steps;
        phase ^= stage / STAGES & 1;
        stage %= STAGES;
    }
};

