// One query token: its heads against its keys, 64 at a time.

#include <algorithm>

#include "attention.h"
#include "parallel.h"

namespace bough {
namespace {

thread_local Scratch scratch;

// Rows of keys or values that lie in pages: where each of 64 positions begins. Instead of those beyond lowest .. last - 1, the
// nearest of these.
template <typename E>
struct Rows {
  const E* at[kKvTile];

  void find(const Step& s, int32_t slot, int32_t first, int32_t lowest, int32_t last, const E* cache, int64_t step) {
    for (int i = 0; i < kKvTile; i++) at[i] = cache + location(s, slot, std::max(lowest, std::min(first + i, last - 1))) * step;
  }
};

// Sixteens of keys side by side. Scores that don't wait for one another: an addition takes several cycles.
template <int G>
constexpr int kSideBySide = !kWide || G > 3 ? 1 : G == 1 ? 4 : 2;

// Scores of a tile's keys against G queries: every score is a chain of its own, keys being transposed on their way. Asks for the
// keys of the next tile meanwhile, a line now and then.
template <Dtype D, int G>
void score_tile(const typename Element<D>::type* const* keys, const typename Element<D>::type* const* next, int count, int64_t offset,
                const float* q, int dim, float* out) {
  constexpr int columns = kColumns<D>, side = kSideBySide<G>, line = 64 / int(sizeof(typename Element<D>::type));
  constexpr int steps = std::max(1, line / columns), asked = 16 / steps;
  for (int b = 0; b < count; b += 16 * side) {
    F32 sum[side][G] = {};
    for (int d = 0; d < dim; d += columns) {
      const int turn = d / columns % steps;
#pragma GCC unroll 4
      for (int n = 0; n < side; n++) {
        F32 column[columns];
        load_columns<D>(keys + b + 16 * n, offset + d, column);
        for (int i = 0; i < asked; i++) __builtin_prefetch(next[b + 16 * n + asked * turn + i] + offset + d / line * line);
#pragma GCC unroll 16
        for (int c = 0; c < columns; c++)
#pragma GCC unroll 8
          for (int g = 0; g < G; g++) sum[n][g] += column[c] * q[g * dim + d + c];
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < side; n++)
      for (int g = 0; g < G; g++) store(out + g * kKvTile + b + 16 * n, sum[n][g]);
  }
}

template <Dtype D>
using ScoreTile = decltype(&score_tile<D, 1>);

template <Dtype D>
constexpr ScoreTile<D> kScoreTile[8] = {score_tile<D, 1>, score_tile<D, 2>, score_tile<D, 3>, score_tile<D, 4>,
                                        score_tile<D, 5>, score_tile<D, 6>, score_tile<D, 7>, score_tile<D, 8>};

// Values from .. count - 1 by their weights, folded into what was summed so far. HV: vectors of a value (0: known at run time
// only). Asks for those of the next tile meanwhile: pages lie anywhere, and the heads of a token side by side, so that the
// processor does not see what comes next.
template <Dtype D, int HV, bool Asks>
BOUGH_INLINE void add_values(const typename Element<D>::type* const* values, const typename Element<D>::type* const* next, int64_t offset,
                             const float* weights, int from, int count, int vectors, float shrink, float shrink_more, float* out) {
  constexpr int line = 64 / int(sizeof(typename Element<D>::type));
  auto ask = [&](int i, int width) {
    if constexpr (Asks)
      for (int c = 0; c < width; c += line) __builtin_prefetch(next[i] + offset + c);
  };
  if constexpr (HV != 0) {
    F32 acc[HV] = {};
    for (int i = from; i < count; i++) {
      ask(i, 16 * HV);
#pragma GCC unroll 8
      for (int c = 0; c < HV; c++) acc[c] += load_as<D>(values[i] + offset + 16 * c) * weights[i];
    }
#pragma GCC unroll 8
    for (int c = 0; c < HV; c++) store(out + 16 * c, fold(load(out + 16 * c), shrink, acc[c], shrink_more));
  } else {
    for (int i = from; i < count; i++) ask(i, 16 * vectors);
    for (int c = 0; c < vectors; c++) {
      F32 acc{};
      for (int i = from; i < count; i++) acc += load_as<D>(values[i] + offset + 16 * c) * weights[i];
      store(out + 16 * c, fold(load(out + 16 * c), shrink, acc, shrink_more));
    }
  }
}

// What the query heads of the row have gathered so far.
struct Gathered {
  float *q, *out;       // [heads][dim], [heads][v_dim]
  float *total, *top;   // [heads][16], [heads]
};

// Takes one tile of keys and values, whose first is at position `first`, without those before `from`, into the `group` heads
// from `head` on.
template <Dtype D, int HV>
BOUGH_INLINE void take_tile(const Layer& l, const Rows<typename Element<D>::type>& keys, const Rows<typename Element<D>::type>& values,
                            const Rows<typename Element<D>::type>* next, int32_t first, int from, int count, int group, int head,
                            int64_t k_offset, int64_t v_offset, const Gathered& state, float* scores) {
  const int v_vectors = l.v_dim / 16, sixteens = (count + 15) / 16;
  kScoreTile<D>[group - 1](keys.at, next[0].at, count, k_offset, state.q, l.dim, scores);
  for (int g = 0; g < group; g++) {
    float* score = scores + g * kKvTile;
    if (l.softcap > 0)
      for (int b = 0; b < sixteens; b++)
        store(score + 16 * b, l.softcap * hyperbolic_tangent(load(score + 16 * b) / l.softcap));
    if (l.slopes)
      for (int b = 0; b < sixteens; b++) store(score + 16 * b, load(score + 16 * b) + l.slopes[head + g] * positions_from(first + 16 * b));
    for (int i = 0; i < from; i++) score[i] = -__builtin_inff();
    for (int i = count; i < 16 * sixteens; i++) score[i] = -__builtin_inff();
    F32 high = load(score);
    for (int b = 1; b < sixteens; b++) high = maximum(high, load(score + 16 * b));
    const float own = std::max(-1e30f, max_lanes(high)), now = std::max(state.top[g], own);
    const F32 shrinks = exponential(F32{state.top[g] - now, own - now});
    F32 sum{};
    for (int b = 0; b < sixteens; b++) {
      const F32 weight = exponential(load(score + 16 * b) - own);
      store(score + 16 * b, weight);
      sum += weight;
    }
    store(state.total + 16 * g, fold(load(state.total + 16 * g), shrinks[0], sum, shrinks[1]));
    state.top[g] = now;
    auto add = [&]<int N, bool Asks>() {
      add_values<D, N, Asks>(values.at, next[1].at, v_offset, score, from, count, v_vectors, shrinks[0], shrinks[1],
                             state.out + g * l.v_dim);
    };
    const bool wide = HV && l.v_dim == l.dim;
    if (wide && g == 0) add.template operator()<HV, true>();
    else if (wide) add.template operator()<HV, false>();
    else if (g == 0) add.template operator()<0, true>();
    else add.template operator()<0, false>();
  }
}

void clear_sums(const Layer& l, int heads, const Gathered& all) {
  std::memset(all.out, 0, sizeof(float) * heads * l.v_dim);
  std::memset(all.total, 0, sizeof(float) * heads * kLanes);
  std::fill(all.top, all.top + heads, -1e30f);
}

void finish(const Layer& l, int32_t token, int first_head, int heads, const Gathered& all, const Target& target, int64_t number) {
  for (int h = 0; h < heads; h++) {
    const float* out = all.out + h * l.v_dim;
    const F32 totals = load(all.total + 16 * h);
    if (!target.part) write_output(l, token, first_head + h, out, totals, all.top[h]);
    else write_part(l, target.part + h * target.row_step + number * target.tile_step, out, totals, all.top[h]);
  }
}

// Keys and values of a tile that lie in codes, opened for one kv head.
struct Opened {
  Rows<float> rows[2];

  void open(const Step& s, const Layer& l, int32_t slot, int32_t kv_head, int32_t first, int32_t lowest, int32_t last, float* keys) {
    float* values = keys + kKvTile * l.dim;
    for (int i = 0; i < kKvTile; i++) {
      const int32_t position = std::max(lowest, std::min(first + i, last - 1));
      const bool is_new = position == first + i;  // others repeat the first or the last
      const int32_t at = position - first;
      rows[0].at[i] = keys + at * l.dim, rows[1].at[i] = values + at * l.v_dim;
      if (!is_new) continue;
      const int64_t place = location(s, slot, position) * l.kv_heads + kv_head;
      open_codes(l, static_cast<const uint8_t*>(l.k_cache) + place * code_bytes(l, l.dim), l.k_ranges[place], l.dim, keys + at * l.dim);
      open_codes(l, static_cast<const uint8_t*>(l.v_cache) + place * code_bytes(l, l.v_dim), l.v_ranges[place], l.v_dim,
                 values + at * l.v_dim);
    }
  }
};

// Tile by tile, and all the heads for each: the heads of a token lie side by side in memory.
template <Dtype D, int HV>
void attend(const Step& s, const Layer& l, const DecodePiece& piece, const Target& target) {
  typedef typename Element<D>::type E;
  const int group = l.heads / l.kv_heads, kv_heads = piece.kv_last - piece.kv_first, heads = kv_heads * group;
  const int first_head = piece.kv_first * group;
  const int32_t token = s.query_start[piece.row], slot = s.slots[piece.row], begin = tile_start(piece.first);
  const bool coded = is_coded(l);
  const int64_t opened_floats = coded ? kKvTile * (l.dim + l.v_dim) : 0;
  float* q = scratch.get<float>(heads * (l.dim + l.v_dim + kLanes + 1) + group * kKvTile + 64 + opened_floats);
  float* total = q + heads * (l.dim + l.v_dim);
  const Gathered all{q, q + heads * l.dim, total, total + heads * kLanes};
  float *scores = all.top + (heads + 15) / 16 * 16, *opened_at = scores + group * kKvTile;
  for (int h = 0; h < heads; h++) {
    const int64_t at = token * l.q_token + (first_head + h) * l.q_head;
    for (int c = 0; c < l.dim; c += 16) store(q + h * l.dim + c, read_vector(l.q, at + c, l.dtype) * l.scale);
  }
  clear_sums(l, heads, all);
  const E *k_cache = static_cast<const E*>(l.k_cache), *v_cache = static_cast<const E*>(l.v_cache);
  Rows<E> rows[2][2];  // keys and values, of this tile and of the next
  auto find = [&](Rows<E>* found, int32_t p) {
    found[0].find(s, slot, p, piece.first, piece.last, k_cache, int64_t(l.kv_heads) * l.dim);
    found[1].find(s, slot, p, piece.first, piece.last, v_cache, int64_t(l.kv_heads) * l.v_dim);
  };
  if (!coded) find(rows[0], begin);
  Opened opened;
  int at = 0;
  for (int32_t p = begin; p < piece.last; p += kKvTile, at ^= 1) {
    const int count = std::min<int32_t>(kKvTile, piece.last - p), from = std::max(0, piece.first - p);
    const bool more = p + kKvTile < piece.last;
    if (more && !coded) find(rows[at ^ 1], p + kKvTile);
    const Rows<E>* next = rows[more ? at ^ 1 : at];
    for (int kv = 0; kv < kv_heads; kv++) {
      const int h = kv * group;
      const Gathered state{q + h * l.dim, all.out + h * l.v_dim, all.total + h * kLanes, all.top + h};
      if constexpr (D == kF32)
        if (coded) {
          opened.open(s, l, slot, piece.kv_first + kv, p, piece.first, piece.last, opened_at);
          take_tile<D, HV>(l, opened.rows[0], opened.rows[1], opened.rows, p, from, count, group, first_head + h, 0, 0, state, scores);
          continue;
        }
      take_tile<D, HV>(l, rows[at][0], rows[at][1], next, p, from, count, group, first_head + h,
                       int64_t(piece.kv_first + kv) * l.dim, int64_t(piece.kv_first + kv) * l.v_dim, state, scores);
    }
    if (target.tile_step) {
      finish(l, token, first_head, heads, all, target, (p - begin) / kKvTile);
      clear_sums(l, heads, all);
    }
  }
  if (!target.tile_step) finish(l, token, first_head, heads, all, target, 0);
}

template <Dtype D>
void by_width(const Step& s, const Layer& l, const DecodePiece& piece, const Target& target) {
  if (l.dim == 64) attend<D, 4>(s, l, piece, target);
  else if (l.dim == 128) attend<D, 8>(s, l, piece, target);
  else attend<D, 0>(s, l, piece, target);
}

}  // namespace

void attend_decode(const Step& s, const Layer& l, const DecodePiece& piece, const Target& target) {
  if (l.cache_dtype == kF32 || is_coded(l)) by_width<kF32>(s, l, piece, target);
  else if (l.cache_dtype == kBF16) by_width<kBF16>(s, l, piece, target);
  else by_width<kF16>(s, l, piece, target);
}

}  // namespace bough
