// Causal attention of fresh rows on compute capability 9.0: q, k and v lie in the step, ragged, no pages.
//
// A block computes tiles of 128 query tokens of one head against KV blocks of 128 tokens, from the diagonal down to the
// first. One warp feeds: it takes tiles off a list (the longest first, by a counter in device memory) and keeps a ring of
// K and V blocks full with the copy engine. Two warpgroups own 64 query rows each. A warpgroup queues the scores of its
// next block together with the product of the weights and V of the present one, and computes the softmax of the former
// while the tensor cores do the latter; named barriers make the warpgroups take turns at queueing, so that the tensor
// cores work for one while the other computes exponentials. The stream of blocks does not stop between tiles: the first
// scores of the next tile are computed beside the last product of the present one.
//
// With CTAS 2, two blocks work on two heads that share K and V: each fetches one half of every KV block for both.
//
// Queries that are not rotated yet are rotated in registers, as a tile of them is taken: a pass of its own would read and
// write all of them once more.
//
// With WINDOWED a query sees the last `window` tokens up to its own, and blocks before those of all queries of a tile are left
// out. With SINKS a row's sum begins with a logit of its head that has no value.
//
// Defined by the compiler's flags: D (64 or 128), FP16 (0: bf16), CTAS (1 or 2), STAGES of the ring, PLACES in the list of
// a launch, STREAMS that may launch at once, SINKS and WINDOWED (0 or 1).

#include "hopper.cuh"

struct Tile { int first, number, tokens, head; };  // as in Place; no tokens: there are no more tiles

constexpr int WGS = 2;  // that compute
constexpr int M = 64 * WGS, N = M, CONSUMERS = 128 * WGS, THREADS = CONSUMERS + 128;
// Registers of a thread. What the feeding warpgroup gives back is all that the others can get, and one that asks for more
// than is left waits for ever; a thread starts with its part of 64 K, in steps of 8.
constexpr int AT_START = 65536 / THREADS / 8 * 8, FEEDING = 24, COMPUTING = 240;
static_assert(CONSUMERS * COMPUTING + 128 * FEEDING <= THREADS * AT_START, "registers");
constexpr float SLACK = 8;  // powers of two by which a maximum may rise before the result is rescaled
constexpr int PANELS = D / 64;  // tiles lie in panels of 64 elements (128 bytes, swizzled) a row
constexpr u32 Q_BYTES = M * D * 2, KV_BYTES = N * D * 2;
constexpr u32 Q_PANEL = M * 128, KV_PANEL = N * 128;
constexpr u32 RING_AT = 2 * Q_BYTES, BARRIERS_AT = RING_AT + STAGES * KV_BYTES;
constexpr u32 FULL = BARRIERS_AT, EMPTY = FULL + 8 * STAGES, Q_FULL = EMPTY + 8 * STAGES, Q_EMPTY = Q_FULL + 16;
constexpr u32 TICKET_FULL = Q_EMPTY + 16, TICKETS_AT = TICKET_FULL + 32, TILES_AT = TICKETS_AT + 16;
constexpr u32 SHARE = N / CTAS;  // tokens of a KV block that one block fetches
constexpr int TURN_BARRIER = 1, GROUP_BARRIER = 1 + WGS;

#define INFINITE __int_as_float(0x7f800000)
#if FP16
#define T "f16"
#else
#define T "bf16"
#endif

// Barriers --------------------------------------------------------------------------------------------------------------

INLINE u32 rank_in_cluster() {
    u32 rank = 0;
    if (CTAS > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

INLINE void sync_all() {
    if (CTAS > 1) asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
    else __syncthreads();
}

INLINE void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
INLINE void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
INLINE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

struct Ring {
    u32 stage = 0, phase = 0;
    INLINE void next() { if (++stage == STAGES) stage = 0, phase ^= 1; }
};

// Tensor cores ----------------------------------------------------------------------------------------------------------

#define NAMES32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES64 NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49," \
    "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define F4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define F16(x, i) F4(x, i), F4(x, i + 4), F4(x, i + 8), F4(x, i + 12)
#define F32(x) F16(x, 0), F16(x, 16)
#define F64(x) F32(x), F16(x, 32), F16(x, 48)

template <int COUNT> INLINE void pin(float (&x)[COUNT]) {  // nothing that reads x moves above this
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(x[i])::"memory");
}

// A matrix in shared memory whose rows are 128 swizzled bytes, groups of 8 rows one after the other. `panel`: bytes from
// one panel to the next, where the instruction spans several (the contiguous dimension is not the one summed over).
INLINE u64 matrix(u32 at, u32 panel) {
    return u64((at & 0x3FFFF) >> 4) | u64(panel >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

template <int MN_MAJOR> INLINE void mma(float (&d)[64], const u32 *a, u64 b, int add) {  // 64x128 += 64x16 * 16x128
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." T "." T
                 " {" NAMES64 "}, {%64,%65,%66,%67}, %68, add, 1, 1, %70;\n}\n"
                 : F64(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(MN_MAJOR));
}

template <int MN_MAJOR> INLINE void mma(float (&d)[32], const u32 *a, u64 b, int add) {  // 64x64 += 64x16 * 16x64
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." T "." T
                 " {" NAMES32 "}, {%32,%33,%34,%35}, %36, add, 1, 1, %38;\n}\n"
                 : F32(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(MN_MAJOR));
}

INLINE u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn." T "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

INLINE float2 unpack(u32 both) {
    float2 x;
#if FP16
    asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(x.x), "=f"(x.y) : "r"(both));
#else
    x.x = __uint_as_float(both << 16), x.y = __uint_as_float(both & 0xffff0000u);
#endif
    return x;
}

// The feeding warp ------------------------------------------------------------------------------------------------------

struct Place { int first; unsigned short number, tokens; };  // the row's first token; of the tile: number in the row, tokens

struct Args {
    void *out;           // [T, heads, D]
    const float *table;  // [positions, D]: cosines, then sines, by which queries are rotated; null: they are already
    const float *sinks;  // [heads]
    const Place *listed;    // tiles of tokens that the device has found; null: those of `places`
    const int *num_listed;  // how many they are
    int stream;     // which counter is this launch's
    int num_places, heads, heads_per_kv, section;  // `section`: heads that are worked off together
    int out_token;  // elements from one token to the next
    int window;
    float scale;    // of the scores, times log2(e)
    Place places[PLACES];
};

__device__ int counters[STREAMS];  // tiles taken so far; a launch leaves zero to the next one of its stream

#define COPY "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
#define COPY_SOLE COPY " [%0], [%1, {%2,%3}], [%4];"
#if CTAS > 1
#define COPY_SHARE COPY ".multicast::cluster [%0], [%1, {%2,%3}], [%4], %5;"
#else
#define COPY_SHARE COPY_SOLE
#endif

INLINE void copy_queries(u32 to, const TensorMap &from, int token, int head, u32 barrier) {
#pragma unroll
    for (int i = 0; i < PANELS; i++)
        asm volatile(COPY_SOLE ::"r"(to + i * Q_PANEL), "l"(&from), "r"(head * D + 64 * i), "r"(token), "r"(barrier) : "memory");
}
INLINE void copy_share(u32 to, const TensorMap &from, int token, int head, u32 barrier) {  // of a KV block, to all blocks
    u32 at = rank_in_cluster() * SHARE;
#pragma unroll
    for (int i = 0; i < PANELS; i++)
        asm volatile(COPY_SHARE ::"r"(to + i * KV_PANEL + at * 128), "l"(&from), "r"(head * D + 64 * i), "r"(token + at),
                     "r"(barrier), "h"((unsigned short)3) : "memory");
}

// The lowest block that a query of the tile sees.
INLINE int last_block(const Args &args, const Tile &tile) {
    return WINDOWED ? max(tile.number * M - args.window + 1, 0) / N : 0;
}

INLINE int num_places(const Args &args) { return args.listed ? __ldcg(args.num_listed) : args.num_places; }

INLINE int num_tiles(const Args &args) { return num_places(args) * (args.heads / CTAS); }

INLINE Place place_at(const Args &args, int index) {
    if (!args.listed) return args.places[index];
    const uint2 both = __ldcg((const uint2 *)args.listed + index);
    return {(int)both.x, (unsigned short)(both.y & 0xffff), (unsigned short)(both.y >> 16)};
}

INLINE Tile tile_at(const Args &args, int index) {
    if (index >= num_tiles(args)) return {0, 0, 0, 0};
    int width = args.section / CTAS, per_section = num_places(args) * width;
    int section = index / per_section, rest = index % per_section;
    const Place place = place_at(args, rest / width);
    return {place.first, place.number, place.tokens, (section * width + rest % width) * CTAS + int(rank_in_cluster())};
}

INLINE int take_tile(const Args &args) {  // called once for every tile that is worked on
    int taken = atomicAdd(&counters[args.stream], 1);
    if (taken == num_tiles(args) - 1) counters[args.stream] = 0;
    return taken + gridDim.x / CTAS;
}

// The first block of a cluster takes the tiles and tells the second. When it writes a ticket, the one that was there four
// tiles ago has been read: the tile in between is done in both blocks.
INLINE int next_ticket(u32 smem, const Args &args, u32 turn) {
    if (CTAS == 1) return take_tile(args);
    u32 at = smem + TICKETS_AT + 4 * (turn & 3), full = smem + TICKET_FULL + 8 * (turn & 3);
    int index;
    if (rank_in_cluster() == 0) {
        index = take_tile(args);
        asm volatile("{\n.reg .u32 there, told;\nmapa.shared::cluster.u32 there, %0, 1;\nmapa.shared::cluster.u32 told, %1, 1;\n"
                     "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [there], %2, [told];\n}\n"
                     ::"r"(at), "r"(full), "r"(index) : "memory");
    } else {
        barrier_expect(full, 4);
        barrier_wait_whole(full, turn >> 2 & 1);
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(index) : "r"(at) : "memory");
    }
    return index;
}

INLINE void feed(u32 smem, Tile *tiles, const TensorMap &q, const TensorMap &k, const TensorMap &v, const Args &args) {
    Ring ring;
    int v_token = -1, v_head = 0;  // V of a block is asked for after K of the next
    auto load = [&](const TensorMap &map, int token, int head) {
        u32 full = smem + FULL + 8 * ring.stage;
        barrier_wait_whole(smem + EMPTY + 8 * ring.stage, ring.phase ^ 1);
        barrier_expect(full, KV_BYTES);
        copy_share(smem + RING_AT + ring.stage * KV_BYTES, map, token, head, full);
        ring.next();
    };
    int index = blockIdx.x / CTAS;
    for (u32 turn = 0;; turn++) {
        u32 slot = turn & 1, ready = smem + Q_FULL + 8 * slot;
        Tile tile = tile_at(args, index);
        barrier_wait_whole(smem + Q_EMPTY + 8 * slot, (turn >> 1 & 1) ^ 1);
        tiles[slot] = tile;
        if (tile.tokens == 0) {
            barrier_arrive(ready);
            break;
        }
        barrier_expect(ready, Q_BYTES);
        copy_queries(smem + slot * Q_BYTES, q, tile.first + tile.number * M, tile.head, ready);
        index = next_ticket(smem, args, turn);
        int head = tile.head / args.heads_per_kv, last = last_block(args, tile);
#pragma unroll 1
        for (int block = tile.number; block >= last; block--) {
            int token = tile.first + block * N;
            load(k, token, head);
            if (v_token >= 0) load(v, v_token, v_head);
            v_token = token, v_head = head;
        }
    }
    if (v_token >= 0) load(v, v_token, v_head);
}

// The computing warpgroups ----------------------------------------------------------------------------------------------

struct Worker {
    const Args &args;
    u32 smem;
    Tile *tiles;
    int group, warp, lane;
    Ring ring;
    bool began = false;

    float s[64], o[D / 2];   // scores, then weights; result
    u32 p[32];               // the weights as operand
    u32 q[D / 4];            // the queries
    float high[2], sum[2];   // of the two rows this thread has a part of: anchor of the exponentials, own part of the sum
    float shrink[2];

    INLINE Worker(const Args &a, u32 at, Tile *t)
        : args(a), smem(at), tiles(t), group(threadIdx.x / 128), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {}

    INLINE u32 stage() const { return smem + RING_AT + ring.stage * KV_BYTES; }
    INLINE void wait_stage() const { barrier_wait_whole(smem + FULL + 8 * ring.stage, ring.phase); }
    INLINE void release(u32 stage) const {
        if (CTAS > 1 && lane < CTAS) barrier_arrive_at(smem + EMPTY + 8 * stage, lane);
        if (CTAS == 1 && lane == 0) barrier_arrive(smem + EMPTY + 8 * stage);
    }
    INLINE Tile wait_tile(u32 turn) const {
        barrier_wait_whole(smem + Q_FULL + 8 * (turn & 1), turn >> 1 & 1);
        return tiles[turn & 1];
    }

    INLINE void sync_group() const { named_sync(GROUP_BARRIER + group, 128); }
    INLINE void take_turn() {
        if (began || group > 0) named_sync(TURN_BARRIER + group, 256);
        began = true;
    }
    INLINE void pass_turn(bool ends) const {
        if (!ends || group < WGS - 1) named_arrive(TURN_BARRIER + (group + 1) % WGS, 256);
    }

    // Where this thread's part of a warp's 16 rows lies, for ldmatrix and stmatrix: chunks of 16 bytes, swizzled.
    INLINE u32 fragment(u32 slot, int i) const {
        u32 chunk = 2 * i + lane / 16, row = 64 * group + 16 * warp + lane % 16;
        return smem + slot * Q_BYTES + chunk / 8 * Q_PANEL + row * 128 + ((chunk % 8 ^ lane % 8) * 16);
    }

    INLINE void take_queries(u32 slot, const Tile &tile) {
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(q[4 * i]), "=r"(q[4 * i + 1]), "=r"(q[4 * i + 2]), "=r"(q[4 * i + 3])
                         : "r"(fragment(slot, i)) : "memory");
        if (args.table) rotate(tile);
    }

    // Elements i and i + D / 2 of a head turn together: this thread has both. A row's tokens are at positions 0, 1, ...
    INLINE void rotate(const Tile &tile) {
        const float *lines[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = min(64 * group + 16 * warp + lane / 4 + 8 * r, tile.tokens - 1);
            lines[r] = args.table + (tile.number * M + row) * D + lane % 4 * 2;
        }
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            const float2 *at = (const float2 *)(lines[i % 2] + i / 4 * 16 + i / 2 % 2 * 8);
            float2 cosine = __ldg(at), sine = __ldg(at + D / 4), a = unpack(q[i]), b = unpack(q[i + D / 8]);
            q[i] = pack(fmaf(a.x, cosine.x, -(b.x * sine.x)), fmaf(a.y, cosine.y, -(b.y * sine.y)));
            q[i + D / 8] = pack(fmaf(b.x, cosine.x, a.x * sine.x), fmaf(b.y, cosine.y, a.y * sine.y));
        }
    }

    INLINE void queue_scores() {
        u64 keys = matrix(stage(), 0);
#pragma unroll
        for (int i = 0; i < D / 16; i++) mma<0>(s, q + 4 * i, keys + ((i / 4 * KV_PANEL + i % 4 * 32) >> 4), i > 0);
        products_commit();
    }

    INLINE void queue_values(bool add) {
        u64 v = matrix(stage(), KV_PANEL);
#pragma unroll
        for (int i = 0; i < N / 16; i++) mma<1>(o, p + 4 * i, v + ((i * 16 * 128) >> 4), i > 0 || add);
        products_commit();
    }

    // What follows the row's last token belongs to others: whatever it is, zero times it must be zero.
    INLINE void clear_tail(const Tile &tile) const {
        if (tile.tokens == N) return;
        for (int i = threadIdx.x % 128; i < (N - tile.tokens) * D / 8; i += 128) {
            u32 at = stage() + (i % PANELS) * KV_PANEL + tile.tokens * 128 + i / PANELS * 16;
            asm volatile("st.shared.v4.b32 [%0], {%1,%1,%1,%1};" ::"r"(at), "r"(0) : "memory");
        }
        fence_async();
        sync_group();
    }

    INLINE void mask(const Tile &tile, int block) {
        int ahead = tile.number * M + 64 * group - block * N;  // of the block's first token to this warpgroup's first
        if (ahead >= N - 1 && !(WINDOWED && ahead + 63 >= args.window)) return;
        int most = ahead + 16 * warp + lane / 4 - lane % 4 * 2, least = most - (WINDOWED ? args.window : 0);
#pragma unroll
        for (int i = 0; i < 64; i++) {
            int column = i / 4 * 8 + i % 2, row = i / 2 % 2 * 8;
            if (column > most + row || (WINDOWED && column <= least + row)) s[i] = -INFINITE;
        }
    }

    INLINE void begin_rows() { high[0] = high[1] = -INFINITE, sum[0] = sum[1] = 0; }

    // Scores to weights. The anchor follows the maximum only where it would fall behind by more than SLACK powers of two.
    INLINE void softmax() {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float most[2] = {s[2 * r], s[2 * r + 1]};
#pragma unroll
            for (int i = 1; i < 16; i++) {
                most[0] = fmaxf(most[0], s[4 * i + 2 * r]);
                most[1] = fmaxf(most[1], s[4 * i + 2 * r + 1]);
            }
            most[0] = fmaxf(most[0], most[1]);
            most[0] = fmaxf(most[0], __shfl_xor_sync(~0u, most[0], 1));
            most[0] = fmaxf(most[0], __shfl_xor_sync(~0u, most[0], 2)) * args.scale;
            float anchor = most[0] > high[r] + SLACK ? most[0] : high[r];
            shrink[r] = exp2_(high[r] - anchor);
            high[r] = anchor;
            float part[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < 16; i++) {
                float &a = s[4 * i + 2 * r], &b = s[4 * i + 2 * r + 1];
                part[0] += a = exp2_(fmaf(a, args.scale, -anchor));
                part[1] += b = exp2_(fmaf(b, args.scale, -anchor));
            }
            sum[r] = fmaf(sum[r], shrink[r], part[0] + part[1]);
        }
    }

    // Whether `rescale` has anything to do. No sum is negative, but the compiler has to compute all exponentials to know,
    // and so can't put them off until the tensor cores are done.
    INLINE bool settle() const {
        bool shrinks = __any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f || sum[0] + sum[1] < 0.f);
        if (shrinks && sum[0] < 0.f) __trap();
        return shrinks;
    }

    INLINE void rescale() {
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] *= shrink[i / 2 % 2];
    }

    INLINE void pack_weights() {
#pragma unroll
        for (int i = 0; i < 32; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
    }

    // Through the tile's place in shared memory, which its queries no longer need, to whole lines of device memory.
    INLINE void store(const Tile &tile, u32 slot, const float (&part)[2], const float (&anchor)[2]) {
        float inverse[2];
        float sink = SINKS ? __ldg(args.sinks + tile.head) * 1.4426950408889634f : 0;
        int row = 64 * group + 16 * warp, token = tile.first + tile.number * M + row;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float total = part[r] + __shfl_xor_sync(~0u, part[r], 1);
            total += __shfl_xor_sync(~0u, total, 2);
            if (SINKS) total += exp2_(sink - anchor[r]);
            inverse[r] = 1.f / total;
        }
        sync_group();  // all of the warpgroup have read their queries
        u32 base = smem + slot * Q_BYTES + row * 128;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(fragment(slot, i)),
                         "r"(pack(o[8 * i] * inverse[0], o[8 * i + 1] * inverse[0])),
                         "r"(pack(o[8 * i + 2] * inverse[1], o[8 * i + 3] * inverse[1])),
                         "r"(pack(o[8 * i + 4] * inverse[0], o[8 * i + 5] * inverse[0])),
                         "r"(pack(o[8 * i + 6] * inverse[1], o[8 * i + 7] * inverse[1])) : "memory");
        }
        __syncwarp();
        constexpr int CHUNKS = D / 8;  // of 16 bytes in a row
#pragma unroll
        for (int i = 0; i < CHUNKS / 2; i++) {
            u32 chunk = lane % CHUNKS, inner = i * (32 / CHUNKS) + lane / CHUNKS, a, b, c, d;
            u32 at = base + chunk / 8 * Q_PANEL + inner * 128 + ((chunk % 8 ^ inner % 8) * 16);
            asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at) : "memory");
            if (row + int(inner) < tile.tokens) {
                long long place = (long long)(token + int(inner)) * args.out_token + tile.head * D + chunk * 8;
                asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"((unsigned short *)args.out + place), "r"(a), "r"(b),
                             "r"(c), "r"(d) : "memory");
            }
        }
        fence_async();
        __syncwarp();
        if (lane == 0) barrier_arrive(smem + Q_EMPTY + 8 * slot);
    }

    // All blocks of all tiles in one stream: scores of the next block beside the product of the present one.
    INLINE void run() {
        u32 turn = 0;
        Tile tile = wait_tile(turn);
        if (tile.tokens == 0) return;
        int block = tile.number, last = last_block(args, tile);
        take_queries(0, tile);
        take_turn();
        wait_stage();
        products_begin();
        queue_scores();
        pass_turn(false);
        products_wait<0>();
        pin(s);
        release(ring.stage);
        ring.next();
        begin_rows();
        mask(tile, block);
        softmax();
        pack_weights();
        bool adds = false;
        while (true) {
            bool ends = block == last;
            Tile next = tile;
            if (ends) {
                next = wait_tile(turn + 1);
                if (next.tokens == 0) break;
                take_queries(turn + 1 & 1, next);
            }
            int next_block = ends ? next.number : block - 1;
            take_turn();
            wait_stage();
            products_begin();
            queue_scores();
            u32 k_stage = ring.stage;
            ring.next();
            wait_stage();
            if (!adds) clear_tail(tile);
            products_begin();
            queue_values(adds);
            pass_turn(false);
            products_wait<1>();
            pin(s);
            release(k_stage);
            float last_sum[2] = {sum[0], sum[1]}, last_high[2] = {high[0], high[1]};
            if (ends) begin_rows();
            mask(next, next_block);
            softmax();
            bool shrinks = settle();
            products_wait<0>();
            pin(o);
            release(ring.stage);
            ring.next();
            if (ends) {
                store(tile, turn & 1, last_sum, last_high);
                turn++;
            } else if (shrinks) {
                rescale();
            }
            pack_weights();
            tile = next, block = next_block, adds = !ends;
            if (ends) last = last_block(args, tile);
        }
        take_turn();
        wait_stage();
        if (!adds) clear_tail(tile);
        products_begin();
        queue_values(adds);
        pass_turn(true);
        products_wait<0>();
        pin(o);
        store(tile, turn & 1, sum, high);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CTAS > 1
__cluster_dims__(CTAS, 1, 1)
#endif
fresh_attention(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
                const __grid_constant__ Args args) {
    extern __shared__ char dynamic[];
    u32 raw = (u32)__cvta_generic_to_shared(dynamic), smem = (raw + 1023) & ~1023u;
    Tile *tiles = (Tile *)(dynamic + (smem - raw) + TILES_AT);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(smem + FULL + 8 * i, 1);
            barrier_init(smem + EMPTY + 8 * i, 4 * WGS * CTAS);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(smem + Q_FULL + 8 * i, 1);
            barrier_init(smem + Q_EMPTY + 8 * i, 4 * WGS);
        }
        for (int i = 0; i < 4; i++) barrier_init(smem + TICKET_FULL + 8 * i, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_async();
    }
    sync_all();
    wait_for_kernel_before();  // for q, k, v, the counter, and all who still read `out`
    let_kernel_after_start();
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEEDING));
        if (threadIdx.x == CONSUMERS) feed(smem, tiles, q, k, v, args);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTING));
        Worker(args, smem, tiles).run();
    }
    if (CTAS > 1) sync_all();  // a block must stay for what the other sends to it
}
