// Products of many tokens with the experts they were sent to, on Hopper (sm_90a): out = x @ weight[expert].T for stretches of
// rows that belong to one expert each, or silu(x @ gate.T) * (x @ up.T) where GATED.
//
// As gated_hopper.cu, whose tiles, ring and pairs of blocks it has: a block computes BLOCK_T rows x 2 * FEATURES weight rows, a
// pair has the same rows. What is different is where tiles lie: a list, made on the device by the kernels before, says of each
// tile's rows where they begin and end, and whose they are. Experts' rows begin at multiples of 64, and 64 are stored at a time,
// so that no expert writes into another's; what lies between an expert's last row and the next 64 is computed and never read.
// Of an expert's last tile only those parts of 64 rows are multiplied that it has.
//
// FP8: rows and weights are e4m3, with a scale per row of either.
//
// Set by the door: FEATURES, STAGES, PARTS, TURNS, LAG, STREAMED (see gated_hopper.cu), GATED, FP8.

#include "hopper.cuh"
#include "hopper_tiles.cuh"

constexpr int COLUMNS = GATED ? FEATURES : 2 * FEATURES;  // of the result, that a tile has
// Registers of a thread, by role. A block has no more than it was started with, 168 a thread: a warp that asks for more waits forever.
constexpr int MULTIPLYING = PARTS > 1 ? 240 : 232, FETCHING = 3 * 168 - 2 * MULTIPLYING;
static_assert(FETCHING >= 24 && MULTIPLYING % 8 == 0 && FETCHING % 8 == 0, "what setmaxnreg takes");

// A tile of the list: its first row, the end of its expert's rows (a multiple of 64), the expert.
INLINE int4 tile_at(const int4* tiles, int index) { return __ldcg(tiles + index); }

// Results of 64 tokens, as they are stored: a part of COLUMNS that begins at FEATURES * half, of which `columns` are real.
INLINE void lay_out_part(const float (&d)[RESULTS], int half, int columns, u32 to, u32 warp, u32 lane, const float* x_scale,
                         const float* first_scale, const float* second_scale) {
    float by_row[2] = {1.0f, 1.0f};
    if (FP8) {
        by_row[0] = __ldcg(x_scale + warp * 16 + lane / 4);
        by_row[1] = __ldcg(x_scale + warp * 16 + lane / 4 + 8);
    }
    const auto scaled = [&](float value, u32 second, float by) { return FP8 ? value * (by_row[second] * by) : value; };
    lay_out(
        [&](int i, u32 column, u32 second) {
            float2 one = {1.0f, 1.0f}, other = {1.0f, 1.0f};
            if (FP8 && static_cast<int>(column) < columns) {
                const float* of = GATED || !half ? first_scale : second_scale;
                one = __ldg(reinterpret_cast<const float2*>(of + column));
                if (GATED) other = __ldg(reinterpret_cast<const float2*>(second_scale + column));
            }
            if (GATED)
                return gated_pair(scaled(d[i], second, one.x), scaled(d[i + 1], second, one.y),
                                  scaled(d[RESULTS / 2 + i], second, other.x), scaled(d[RESULTS / 2 + i + 1], second, other.y));
            const int at = half * (RESULTS / 2) + i;
            return rounded_pair(scaled(d[at], second, one.x), scaled(d[at + 1], second, one.y));
        },
        to, warp, lane);
}

// A tile's first LIVE parts of a warpgroup, each of them multiplied with all weight rows. `turn` moves on by `steps`.
template <int LIVE, typename After>
INLINE void multiply_tile(float (&d)[PARTS][RESULTS], Turn& turn, int steps, u32 ring, u32 rows_at, u32 full, u32 empty, u32 lane,
                          After after_step) {
    u32 before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, turn.next()) {
        const u32 base = ring + turn.stage * STAGE_BYTES;
        const u64 x = operand(base + rows_at), weight = operand(base + X_BYTES);
        barrier_wait_whole(full + turn.stage * 8, turn.phase);
        if (LIVE) {
            products_begin();
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int part = 0; part < LIVE; ++part)
                    multiply(d[part], x + part * (64 * ROW / 16) + 2 * k, weight + 2 * k, step | k);
            products_commit();
            products_wait<1>();
            if (step > 0 && lane < 2) barrier_arrive_at(empty + before * 8, lane);
            before = turn.stage;
        } else if (lane < 2) {
            barrier_arrive_at(empty + turn.stage * 8, lane);
        }
        after_step(step);
    }
    if (LIVE) {
#pragma unroll
        for (int part = 0; part < LIVE; ++part) all_products(d[part]);
        if (lane < 2) barrier_arrive_at(empty + before * 8, lane);
    }
}

// f_tiles: of a pair, along the result's columns. weight_rows: of an expert. apart: rows between the FEATURES weight rows of a
// tile's first half and those of its second.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    grouped_hopper(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
                   const __grid_constant__ TensorMap out_map, const int4* tiles, const int* num_tiles, const float* x_scale,
                   const float* weight_scale, int f_tiles, int steps, int weight_rows, int apart, int columns) {
    let_kernel_after_start();
    extern __shared__ char memory[];
    const u32 ring = (shared_address(memory) + 1023) & ~1023u;
    const u32 staging = ring + STAGES * STAGE_BYTES;
    const u32 full = staging + CONSUMERS * STAGED_BYTES, empty = full + STAGES * 8;
    const u32 rank = rank_in_pair();
    const int pairs = gridDim.x / 2, pair = blockIdx.x / 2;

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
    wait_for_kernel_before();  // the list is its work
    const int work_items = __ldcg(num_tiles) * f_tiles;
    const auto column_of = [&](int item) { return (2 * (item % f_tiles) + static_cast<int>(rank)) * COLUMNS; };

    const int group = threadIdx.x / 128;
    if (group == CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FETCHING));
        if (threadIdx.x == CONSUMERS * 128 && pair < work_items) {
            const u64 x_held = held_longer(), weight_held = held_shorter();
            const u32 half = rank * (BLOCK_T / 2);  // of the rows, that this block fetches for both
            Turn turn;
            int4 next = tile_at(tiles, pair / f_tiles);
            for (int item = pair; item < work_items; item += pairs) {
                const int row = next.x, weight_row = next.z * weight_rows + column_of(item);
                if (item + pairs < work_items) next = tile_at(tiles, (item + pairs) / f_tiles);
#pragma unroll 1
                for (int step = 0; step < steps; ++step, turn.next()) {
                    const u32 x = ring + turn.stage * STAGE_BYTES, one = x + X_BYTES, other = one + HALF_BYTES;
                    const u32 arrived = full + turn.stage * 8;
                    const int k = step * BLOCK_K;
                    barrier_wait_whole(empty + turn.stage * 8, turn.phase ^ 1);
                    barrier_expect(arrived, STAGE_BYTES);
                    fetch_alone(one, weight_map, k, weight_row, arrived, weight_held);
                    fetch_alone(other, weight_map, k, weight_row + apart, arrived, weight_held);
                    fetch_for_both(x + half * ROW, x_map, k, row + half, arrived, x_held);
                }
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING));
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        const bool storing = threadIdx.x % 128 == 0;
        const u32 mine = staging + group * STAGED_BYTES;
        const int own = TURNS == 2 ? 0 : group * 64 * PARTS;  // its first token in a tile
        Turn turn;
        if (TURNS == 2 && group) turn.skip(steps);
        float d[PARTS][RESULTS];
        for (int item = pair + (TURNS == 2 ? group * pairs : 0); item < work_items; item += TURNS * pairs) {
            if (TURNS == 2 ? item != pair : LAG && group > 0) named_sync(CONSUMERS + 1 + group, 256);
            const int4 tile = tile_at(tiles, item / f_tiles);
            const auto after_step = [&](int step) {
                if (TURNS == 1 && LAG && group == 0 && step == LAG) named_arrive(CONSUMERS + 2, 256);
                if (TURNS == 2 && step == steps - 1 && item + pairs < work_items) named_arrive(CONSUMERS + 2 - group, 256);
            };
            const int live = (tile.y - tile.x - own) / 64;
            if (TURNS == 2 || live >= PARTS)
                multiply_tile<PARTS>(d, turn, steps, ring, own * ROW, full, empty, lane, after_step);
            else if (live > 0)  // one of two
                multiply_tile<1>(d, turn, steps, ring, own * ROW, full, empty, lane, after_step);
            else
                multiply_tile<0>(d, turn, steps, ring, own * ROW, full, empty, lane, after_step);
            if (TURNS == 2) turn.skip(steps);

            const int column = column_of(item), weight_row = tile.z * weight_rows + column;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const int row = tile.x + own + part * 64;
                if (row >= tile.y) break;
#pragma unroll
                for (int half = 0; half < (GATED ? 1 : 2); ++half) {
                    const int to_column = column + half * FEATURES;
                    if (to_column >= columns) break;
                    if (storing) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                    named_sync(1 + group, 128);
                    lay_out_part(d[part], half, columns - to_column, mine, warp, lane, x_scale + row,
                                 weight_scale + weight_row, weight_scale + weight_row + apart);
                    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                    named_sync(1 + group, 128);
                    if (storing) store(out_map, mine, to_column, row);
                }
            }
        }
        if (storing) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    pair_sync();  // neither block may end while the other still fetches for it or arrives at its barriers
}
