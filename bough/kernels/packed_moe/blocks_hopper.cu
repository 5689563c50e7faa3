// Products of many tokens with experts in blocks of e4m3, on Hopper (sm_90a), by the tensor cores' 8-bit floats: tokens are e4m3
// as well, with a scale per 128 columns of a token, and weights have a scale per 128 columns of some multiple of 64 rows.
//
// As moe/grouped_hopper.cu, whose tiles, ring, pairs of blocks and list of stretches it has. A step along the depth is 128
// columns, which have one scale on either side: what the tensor cores have of a step is multiplied by both and added up in
// float32, by one warpgroup of a block while they multiply for the other. A tile has 64 weight rows of each half, so that a half
// has one scale a step.
//
// Set by the door: STAGES, LAG (see linear/gated_hopper.cu), GATED.

#define FEATURES 64
#define PARTS 1
#define TURNS 1
#define STREAMED 0
#define FP8 1
#include "hopper.cuh"
#include "hopper_tiles.cuh"

constexpr int COLUMNS = GATED ? FEATURES : 2 * FEATURES;  // of the result, that a tile has
// Registers of a thread, by role. A block has no more than it was started with, 168 a thread: a warp that asks for more waits forever.
constexpr int MULTIPLYING = 232, FETCHING = 3 * 168 - 2 * MULTIPLYING;

// Scales of tokens, [rows, pitch], and of weights, [steps, width], of `weight_rows` rows each.
struct BlockScales {
    const float *tokens, *weights;
    int pitch, width, weight_rows;
};

// What a thread's results of a step are multiplied by: of its two tokens, and of the two halves of its weight rows.
struct Factors {
    float token[2], half[2];
};

// Results of 64 tokens, as they are stored: a part of COLUMNS that begins at FEATURES * half.
INLINE void lay_out_part(const float (&sums)[RESULTS], int half, u32 to, u32 warp, u32 lane) {
    lay_out(
        [&](int i, u32, u32) {
            if (GATED) return gated_pair(sums[i], sums[i + 1], sums[RESULTS / 2 + i], sums[RESULTS / 2 + i + 1]);
            const int at = half * (RESULTS / 2) + i;
            return rounded_pair(sums[at], sums[at + 1]);
        },
        to, warp, lane);
}

// A tile's 64 tokens of a warpgroup, multiplied with all its weight rows if LIVE. `turn` moves on by `steps`.
template <bool LIVE, typename FactorsOf, typename After>
INLINE void multiply_tile(float (&sums)[RESULTS], Turn& turn, int steps, u32 ring, u32 rows_at, u32 full, u32 empty, u32 lane,
                          FactorsOf factors_of, After after_step) {
    float d[RESULTS];
    Factors next = {};
    if (LIVE) {
        next = factors_of(0);
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) sums[i] = 0.0f;
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step, turn.next()) {
        const u32 base = ring + turn.stage * STAGE_BYTES;
        const Factors now = next;
        if (LIVE && step + 1 < steps) next = factors_of(step + 1);
        barrier_wait_whole(full + turn.stage * 8, turn.phase);
        if (LIVE) {
            const u64 x = operand(base + rows_at), weight = operand(base + X_BYTES);
            products_begin();
#pragma unroll
            for (int k = 0; k < 4; ++k) multiply(d, x + 2 * k, weight + 2 * k, k);
            products_commit();
            all_products(d);
        }
        if (lane < 2) barrier_arrive_at(empty + turn.stage * 8, lane);
        after_step(step);
        if (LIVE) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float by[2] = {now.token[0] * now.half[half], now.token[1] * now.half[half]};
#pragma unroll
                for (int i = 0; i < RESULTS / 2; ++i) {
                    const int at = half * (RESULTS / 2) + i;
                    sums[at] += d[at] * by[i / 2 % 2];
                }
            }
        }
    }
}

// f_tiles: of a pair, along the result's columns. weight_rows: of an expert. apart: rows between the 64 weight rows of a tile's
// first half and those of its second.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    blocks_hopper(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
                  const __grid_constant__ TensorMap out_map, const int4* tiles, const int* num_tiles,
                  const __grid_constant__ BlockScales scales, int f_tiles, int steps, int weight_rows, int apart, int columns) {
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
            const u32 half = rank * (BLOCK_T / 2);  // of the rows, that this block fetches for both
            Turn turn;
            int4 next = __ldcg(tiles + pair / f_tiles);
            for (int item = pair; item < work_items; item += pairs) {
                const int row = next.x, weight_row = next.z * weight_rows + column_of(item);
                if (item + pairs < work_items) next = __ldcg(tiles + (item + pairs) / f_tiles);
#pragma unroll 1
                for (int step = 0; step < steps; ++step, turn.next()) {
                    const u32 x = ring + turn.stage * STAGE_BYTES, one = x + X_BYTES, other = one + HALF_BYTES;
                    const u32 arrived = full + turn.stage * 8;
                    const int k = step * BLOCK_K;
                    barrier_wait_whole(empty + turn.stage * 8, turn.phase ^ 1);
                    barrier_expect(arrived, STAGE_BYTES);
                    fetch_alone(one, weight_map, k, weight_row, arrived, 0);
                    fetch_alone(other, weight_map, k, weight_row + apart, arrived, 0);
                    fetch_for_both(x + half * ROW, x_map, k, row + half, arrived, 0);
                }
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING));
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        const bool storing = threadIdx.x % 128 == 0;
        const u32 mine = staging + group * STAGED_BYTES;
        const int own = group * 64;  // its first token in a tile
        Turn turn;
        float sums[RESULTS];
        for (int item = pair; item < work_items; item += pairs) {
            if (LAG && group > 0) named_sync(CONSUMERS + 1 + group, 256);
            const int4 tile = __ldcg(tiles + item / f_tiles);
            const auto after_step = [&](int step) {
                if (LAG && group == 0 && step == LAG) named_arrive(CONSUMERS + 2, 256);
            };
            const int column = column_of(item), weight_row = tile.z * weight_rows + column;
            // Rows beyond an expert's are multiplied and not stored, those beyond the last expert's are not there.
            const float* const tokens = scales.tokens + (i64)(tile.x + own + warp * 16 + lane / 4) * scales.pitch;
            const float* const one = scales.weights + min(weight_row / scales.weight_rows, scales.width - 1);
            const float* const other = scales.weights + min((weight_row + apart) / scales.weight_rows, scales.width - 1);
            const auto factors_of = [&](int step) {
                const i64 at = (i64)step * scales.width;
                return Factors{{tokens[step], tokens[8 * scales.pitch + step]}, {__ldg(one + at), __ldg(other + at)}};
            };
            if (tile.x + own < tile.y)
                multiply_tile<true>(sums, turn, steps, ring, own * ROW, full, empty, lane, factors_of, after_step);
            else
                multiply_tile<false>(sums, turn, steps, ring, own * ROW, full, empty, lane, factors_of, after_step);
            const int row = tile.x + own;
            if (row >= tile.y) continue;
#pragma unroll
            for (int half = 0; half < (GATED ? 1 : 2); ++half) {
                const int to_column = column + half * FEATURES;
                if (to_column >= columns) break;
                if (storing) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                named_sync(1 + group, 128);
                lay_out_part(sums, half, mine, warp, lane);
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                named_sync(1 + group, 128);
                if (storing) store(out_map, mine, to_column, row);
            }
        }
        if (storing) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    pair_sync();  // neither block may end while the other still fetches for it or arrives at its barriers
}
