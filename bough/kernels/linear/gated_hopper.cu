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
#include "hopper_tiles.cuh"

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
                const auto& of = d[part];
                lay_out(
                    [&](int i, u32, u32) {
                        return gated_pair(of[i], of[i + 1], of[RESULTS / 2 + i], of[RESULTS / 2 + i + 1]);
                    },
                    mine, warp, lane);
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                named_sync(1 + group, 128);
                if (storing) store(out_map, mine, place.column, place.row + own + part * 64);
            }
        }
        if (storing) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    pair_sync();  // neither block may end while the other still fetches for it or arrives at its barriers
}
