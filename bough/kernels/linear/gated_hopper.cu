// out[T, F] = silu(x @ gate.T) * (x @ up.T) for many rows, on Hopper (sm_90a).
//
// A pair of blocks (a cluster) computes two neighbouring tiles of BLOCK_T tokens x FEATURES features. In each block one
// thread fetches tiles along D through the copy engine into a ring of STAGES; warpgroups multiply, 64 tokens at a time, against
// FEATURES gate rows and the FEATURES up rows that belong to them, side by side in shared memory: one product of
// 2 * FEATURES columns, after which a thread holds a gate and its up in its own registers. What the pair has in common (the
// weight where PAIR_ALONG_T, else x) is fetched once, half by each block, for both. Blocks stay and take tile after tile;
// while one is activated and stored the ring fills with the next one's.
//
// A block has two warpgroups that multiply, PARTS of 64 tokens each. Where TURNS is 1 they share a tile, LAG steps apart. Where it
// is 2 each has every other tile for itself, and one multiplies while the other activates: the tensor cores never wait, but
// tiles are half as high, so that more is fetched for a product.
//
// It may start before the kernel before it has ended (no kernel writes weights, so that the ring fills with them meanwhile),
// and lets the kernel after it do so at once: that one can't read what is written here before it has waited for its end.
//
// Set by the door: FEATURES (80, 88, 96, 104, 112 or 128), STAGES, PAIR_ALONG_T, GROUP (pairs' tiles along T before the next
// features), PARTS, TURNS, LAG, STREAMED (weights and results pass through L2 without displacing x, which is read again).

#include "hopper.cuh"

constexpr int CONSUMERS = 2;
constexpr int RESULTS = FEATURES;  // of a thread for 64 tokens: half of them gates, half ups
constexpr int BLOCK_T = 64 * PARTS * CONSUMERS / TURNS;
constexpr int BLOCK_K = 64;  // 128 bytes: one row of the copy engine's swizzle
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr u32 ROW = BLOCK_K * 2;
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

#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define SIXTEEN(i) EIGHT(i), EIGHT(i + 8)
#define ACCUMULATORS_80 SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), SIXTEEN(64)
#define NAMES_80                                                                                                      \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"    \
    ", %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45"  \
    ", %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67"  \
    ", %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_88 NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_96 NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_104 NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define NAMES_112 NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_128 NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#if FEATURES == 80
#define ACCUMULATORS ACCUMULATORS_80
#define PRODUCT "m64n160k16.f32.bf16.bf16 {" NAMES_80 "}, %80, %81, add"
#define ADD "%82"
#elif FEATURES == 88
#define ACCUMULATORS ACCUMULATORS_80, EIGHT(80)
#define PRODUCT "m64n176k16.f32.bf16.bf16 {" NAMES_88 "}, %88, %89, add"
#define ADD "%90"
#elif FEATURES == 96
#define ACCUMULATORS ACCUMULATORS_80, SIXTEEN(80)
#define PRODUCT "m64n192k16.f32.bf16.bf16 {" NAMES_96 "}, %96, %97, add"
#define ADD "%98"
#elif FEATURES == 104
#define ACCUMULATORS ACCUMULATORS_80, SIXTEEN(80), EIGHT(96)
#define PRODUCT "m64n208k16.f32.bf16.bf16 {" NAMES_104 "}, %104, %105, add"
#define ADD "%106"
#elif FEATURES == 112
#define ACCUMULATORS ACCUMULATORS_80, SIXTEEN(80), SIXTEEN(96)
#define PRODUCT "m64n224k16.f32.bf16.bf16 {" NAMES_112 "}, %112, %113, add"
#define ADD "%114"
#elif FEATURES == 128
#define ACCUMULATORS ACCUMULATORS_80, SIXTEEN(80), SIXTEEN(96), SIXTEEN(112)
#define PRODUCT "m64n256k16.f32.bf16.bf16 {" NAMES_128 "}, %128, %129, add"
#define ADD "%130"
#else
#error "FEATURES must be 80, 88, 96, 104, 112 or 128"
#endif

// d = (add ? d : 0) + 64 tokens x 2 * FEATURES weight rows over 16 of D.
INLINE void multiply(float (&d)[RESULTS], u64 x, u64 weight, u32 add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"
        "wgmma.mma_async.sync.aligned." PRODUCT ", 1, 1, 0, 0;\n}"
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

// A warp's 16 tokens, activated, to where they are stored from.
INLINE void lay_out(const float (&d)[RESULTS], u32 to, u32 warp, u32 lane) {
    const u32 token = warp * 16 + lane % 16;  // whose address this lane gives
#pragma unroll
    for (int j = 0; j < FEATURES / 8; j += 2) {
        u32 four[4];  // 8 x 8 each: two of tokens, then two of features
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int i = (j + q / 2) * 4 + q % 2 * 2;
            four[q] = j + q / 2 < FEATURES / 8 ? gated_pair(d[i], d[i + 1], d[RESULTS / 2 + i], d[RESULTS / 2 + i + 1]) : 0;
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
            if (j >= LAST / 8) store_matrices(row + OUT_BYTES + (((j - LAST / 8 + lane / 16) ^ (lane % 8)) << 4), four);
        }
    }
}

INLINE void store(const TensorMap& map, u32 from, int column, int row) {
    store_tile(map, from, column, row);
    if (!PLAIN_ROWS) store_tile(map, from + OUT_BYTES, column + LAST, row);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Which tile a pair takes: GROUP tiles along T for each step along F, back and forth, so that what is read again is in L2.
struct Place {
    int row, column;
};

INLINE Place place_of(int tile, int t_tiles, int f_tiles, u32 rank) {
    const int group = tile / (GROUP * f_tiles), first = group * GROUP, height = min(GROUP, t_tiles - first);
    const int within = tile - first * f_tiles;
    const int f_forth = within / height, t = first + within - f_forth * height;
    const int f = group & 1 ? f_tiles - 1 - f_forth : f_forth;
    if (PAIR_ALONG_T) return {(2 * t + static_cast<int>(rank)) * BLOCK_T, f * FEATURES};
    return {t * BLOCK_T, (2 * f + static_cast<int>(rank)) * FEATURES};
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

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    gated_hopper(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
                 const __grid_constant__ TensorMap out_map, int t_tiles, int f_tiles, int steps, int features) {
    let_kernel_after_start();
    extern __shared__ char memory[];
    const u32 ring = (shared_address(memory) + 1023) & ~1023u;
    const u32 staging = ring + STAGES * STAGE_BYTES;
    const u32 full = staging + CONSUMERS * STAGED_BYTES, empty = full + STAGES * 8;
    const u32 rank = rank_in_pair();
    const int pairs = gridDim.x / 2, pair = blockIdx.x / 2, tiles = t_tiles * f_tiles;

    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + stage * 8, 1);
            barrier_init(empty + stage * 8, EMPTY_ARRIVALS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (threadIdx.x == CONSUMERS * 128) {
        announce(weight_map);
        announce(x_map);
    }
    pair_sync();

    const int group = threadIdx.x / 128;
    if (group == CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == CONSUMERS * 128) {
            const u64 x_held = held_longer(), weight_held = held_shorter();
            const auto fetch_weight = [&](Place place, int step, u32 stage) {
                const u32 gate = ring + stage * STAGE_BYTES + X_BYTES, up = gate + HALF_BYTES, arrived = full + stage * 8;
                const int k = step * BLOCK_K;
                barrier_expect(arrived, STAGE_BYTES);
                if (PAIR_ALONG_T) {
                    const int column = place.column + (rank ? features : 0);
                    fetch_for_both(rank ? up : gate, weight_map, k, column, arrived, weight_held);
                } else {
                    fetch_alone(gate, weight_map, k, place.column, arrived, weight_held);
                    fetch_alone(up, weight_map, k, place.column + features, arrived, weight_held);
                }
            };
            const auto fetch_x = [&](Place place, int step, u32 stage) {
                const u32 x = ring + stage * STAGE_BYTES, arrived = full + stage * 8;
                const u32 half = rank * (BLOCK_T / 2);
                if (PAIR_ALONG_T)
                    fetch_alone(x, x_map, step * BLOCK_K, place.row, arrived, x_held);
                else
                    fetch_for_both(x + half * ROW, x_map, step * BLOCK_K, place.row + half, arrived, x_held);
            };
            Place place = place_of(pair, t_tiles, f_tiles, rank);
            for (u32 stage = 0; stage < STAGES; ++stage) fetch_weight(place, stage, stage);
            wait_for_kernel_before();
            for (u32 stage = 0; stage < STAGES; ++stage) fetch_x(place, stage, stage);
            Turn turn{0, 1};
            int step = STAGES;
            for (int tile = pair; tile < tiles; tile += pairs, step = 0) {
                place = place_of(tile, t_tiles, f_tiles, rank);
#pragma unroll 1
                for (; step < steps; ++step, turn.next()) {
                    barrier_wait_whole(empty + turn.stage * 8, turn.phase ^ 1);
                    fetch_weight(place, step, turn.stage);
                    fetch_x(place, step, turn.stage);
                }
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(240));
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        const bool storing = threadIdx.x % 128 == 0;
        const u32 mine = staging + group * STAGED_BYTES;
        const int own = TURNS == 2 ? 0 : group * 64 * PARTS;  // its first token in a tile
        Turn turn;
        if (TURNS == 2 && group) turn.skip(steps);
        float d[PARTS][RESULTS];
        for (int tile = pair + (TURNS == 2 ? group * pairs : 0); tile < tiles; tile += TURNS * pairs) {
            if (TURNS == 2 ? tile != pair : LAG && group > 0) named_sync(CONSUMERS + 1 + group, 256);
            u32 before = 0;
#pragma unroll 1
            for (int step = 0; step < steps; ++step, turn.next()) {
                const u32 base = ring + turn.stage * STAGE_BYTES;
                const u64 x = operand(base + own * ROW), weight = operand(base + X_BYTES);
                barrier_wait_whole(full + turn.stage * 8, turn.phase);
                products_begin();
#pragma unroll
                for (int k = 0; k < BLOCK_K / 16; ++k)
#pragma unroll
                    for (int part = 0; part < PARTS; ++part)
                        multiply(d[part], x + part * (64 * ROW / 16) + 2 * k, weight + 2 * k, step | k);
                products_commit();
                products_wait<1>();
                if (step > 0 && lane < 2) barrier_arrive_at(empty + before * 8, lane);
                before = turn.stage;
                if (TURNS == 1 && LAG && group == 0 && step == LAG) named_arrive(CONSUMERS + 2, 256);
            }
            if (TURNS == 2 && tile + pairs < tiles) named_arrive(CONSUMERS + 2 - group, 256);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) all_products(d[part]);
            if (lane < 2) barrier_arrive_at(empty + before * 8, lane);
            if (TURNS == 2) turn.skip(steps);

            const Place place = place_of(tile, t_tiles, f_tiles, rank);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                if (storing) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                named_sync(1 + group, 128);
                lay_out(d[part], mine, warp, lane);
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                named_sync(1 + group, 128);
                if (storing) store(out_map, mine, place.column, place.row + own + part * 64);
            }
        }
        if (storing) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    pair_sync();  // neither block may end while the other still fetches for it or arrives at its barriers
}
