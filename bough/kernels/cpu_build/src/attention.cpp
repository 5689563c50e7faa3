// A whole step: new keys and values to their pages, then pieces of attention handed to the threads, then parts merged.

#include "attention.h"
#include "exports.h"

#include <algorithm>
#include <vector>

#include "parallel.h"

namespace bough {
namespace {

enum PieceKind { kDecode, kPrompt, kGroupSpan };

struct Piece {
  PieceKind kind;
  int32_t index;        // row, or group
  int32_t kv_head;      // the first one, for decodes
  int32_t kv_last;
  int32_t first, last;  // key positions; for prompts: query tokens of the row
  float* part;          // of the row's first head of this kv head (decode), of the group (span), or null
  int64_t tile_step;    // between a decode's parts of single tiles; 0: one part of all of them
  int64_t cost;
};

// A decode row whose result is merged from several parts: the tiles of its shared span or of its first stretch, folded, then
// every later tile by itself, since folding is done in order.
struct RowParts {
  int32_t row, count;
  float* first;  // [count][heads][part_floats]
};

struct Plan {
  std::vector<Piece> pieces;
  std::vector<RowParts> merges;
  std::vector<int32_t> group_of;     // by row: its group, or -1
  std::vector<int32_t> shared;       // by row: tokens of its shared span
  std::vector<int64_t> row_parts;    // by row: offset
};

thread_local Plan plan;
thread_local Scratch parts_scratch, rows_scratch;

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <Dtype From, Dtype To>
void write_tokens(const Layer& l, const void* from, int64_t token, int64_t token_step, int64_t head_step, void* cache, int64_t loc,
                  int width) {
  for (int h = 0; h < l.kv_heads; h++) {
    const auto* in = static_cast<const typename Element<From>::type*>(from) + token * token_step + h * head_step;
    auto* out = static_cast<typename Element<To>::type*>(cache) + (loc * l.kv_heads + h) * width;
    for (int c = 0; c < width; c += 16) store_as<To>(out + c, load_as<From>(in + c));
  }
}

// The nearest whole numbers, ties to even, from 0 to `most`. Bounded first: a product would be fused with the sum, and rounded
// otherwise than elsewhere.
BOUGH_INLINE I32 nearest(F32 v, float most) {
  const float shift = 12582912.0f;  // 1.5 * 2^23
  return __builtin_convertvector((minimum(maximum(v, F32{}), splat(most)) + shift) - shift, I32);
}

template <Dtype From>
void write_codes(const Layer& l, const void* from, int64_t token, int64_t token_step, int64_t head_step, void* cache, uint32_t* ranges,
                 int64_t loc, int width) {
  const bool half_bytes = l.cache_dtype == kCodes4;
  const float most = half_bytes ? 15.0f : 255.0f;
  for (int h = 0; h < l.kv_heads; h++) {
    const auto* in = static_cast<const typename Element<From>::type*>(from) + token * token_step + h * head_step;
    F32 high = load_as<From>(in), negative = -high;
    for (int c = 16; c < width; c += 16) {
      const F32 v = load_as<From>(in + c);
      high = maximum(high, v), negative = maximum(negative, -v);
    }
    const float lowest = 0.0f - max_lanes(negative);
    uint32_t low_bits, step_bits;
    std::memcpy(&low_bits, &lowest, 4);
    low_bits = (low_bits >> 31 ? low_bits + 0xffff : low_bits) & 0xffff0000u;
    const float low = upper_half(low_bits), exact = (max_lanes(high) - low) / most;
    std::memcpy(&step_bits, &exact, 4);
    step_bits = (step_bits + 0xffff) & 0xffff0000u;
    float step = upper_half(step_bits);
    if (step < 1e-30f) step_bits = 0, step = 0;
    const float inverse = step > 0 ? 1.0f / step : 0.0f;
    ranges[loc * l.kv_heads + h] = step_bits | low_bits >> 16;
    int8_t* out = static_cast<int8_t*>(cache) + (loc * l.kv_heads + h) * code_bytes(l, width);
    auto codes = [&](int c) { return nearest((load_as<From>(in + c) - low) * inverse, most); };
    if (half_bytes)
      for (int c = 0; c < width / 2; c += 16) store_i8(out + c, codes(c) | codes(width / 2 + c) << 4);
    else
      for (int c = 0; c < width; c += 16) store_i8(out + c, codes(c));
  }
}

template <Dtype From>
void write_token(const Step& s, const Layer& l, int64_t token) {
  const int64_t loc = s.loc[token];
  if (loc < 0) return;
  if (is_coded(l)) {
    write_codes<From>(l, l.k, token, l.k_token, l.k_head, l.k_cache, l.k_ranges, loc, l.dim);
    write_codes<From>(l, l.v, token, l.v_token, l.v_head, l.v_cache, l.v_ranges, loc, l.v_dim);
  } else if (l.cache_dtype == kF32) {
    write_tokens<From, kF32>(l, l.k, token, l.k_token, l.k_head, l.k_cache, loc, l.dim);
    write_tokens<From, kF32>(l, l.v, token, l.v_token, l.v_head, l.v_cache, loc, l.v_dim);
  } else if (l.cache_dtype == kBF16) {
    write_tokens<From, kBF16>(l, l.k, token, l.k_token, l.k_head, l.k_cache, loc, l.dim);
    write_tokens<From, kBF16>(l, l.v, token, l.v_token, l.v_head, l.v_cache, loc, l.v_dim);
  } else {
    write_tokens<From, kF16>(l, l.k, token, l.k_token, l.k_head, l.k_cache, loc, l.dim);
    write_tokens<From, kF16>(l, l.v, token, l.v_token, l.v_head, l.v_cache, loc, l.v_dim);
  }
}

void write_new(const Step& s, const Layer& l, int threads) {
  for_each(s.tokens >= 64 ? threads : 1, s.tokens, 16, [&](int64_t t) {
    if (l.dtype == kF32) write_token<kF32>(s, l, t);
    else if (l.dtype == kBF16) write_token<kBF16>(s, l, t);
    else write_token<kF16>(s, l, t);
  });
}

int32_t window_start(const Layer& l, int32_t position) {
  if (l.chunk > 0) return position / l.chunk * l.chunk;
  return l.window > 0 ? std::max(0, position - l.window + 1) : 0;
}

bool is_bounded(const Layer& l) { return l.window > 0 || l.chunk > 0; }

// One query token that sees all before it.
bool is_decode(const Step& s, int32_t row) {
  const int32_t token = s.query_start[row];
  return s.query_start[row + 1] - token == 1 && (!s.gaps || s.gaps[2 * token] >= s.gaps[2 * token + 1]);
}

bool by_vectors(const Layer& l) { return l.heads / l.kv_heads <= 8; }

// Tokens of a group's span that are shared: whole tiles, since what a tile gathers is not put together from pieces.
int32_t shared_tokens(const Step& s, int32_t group) {
  return s.group_start[group + 1] - s.group_start[group] < 2 ? 0 : tile_start(s.group_tokens[group]);
}

// Spans worth sharing, if the layer has no window (a window may end inside the span).
void plan_groups(const Step& s, const Layer& l) {
  plan.group_of.assign(s.rows, -1);
  plan.shared.assign(s.rows, 0);
  if (!s.group_rows || is_bounded(l)) return;
  for (int32_t g = 0; g < s.groups; g++) {
    const int32_t tokens = shared_tokens(s, g);
    if (tokens == 0) continue;
    for (int32_t i = s.group_start[g]; i < s.group_start[g + 1]; i++) {
      plan.group_of[s.group_rows[i]] = g;
      plan.shared[s.group_rows[i]] = tokens;
    }
  }
}

// How a decode row's keys are cut: stretches of positions, and heads where positions alone don't give every thread work.
struct Cut {
  int32_t begin;      // first position that is its own
  int32_t step;       // positions of a stretch: whole tiles
  int32_t stretches;
  int32_t heads;      // kv heads of a piece
  int32_t parts;      // to be merged; 0: none
};

Cut cut_row(const Step& s, const Layer& l, int32_t row, int64_t decodes, int threads) {
  const int32_t keys = s.kv_len[row], begin = std::max(plan.shared[row], window_start(l, keys - 1));
  const int32_t own = keys - tile_start(begin);
  const int64_t wanted = threads == 1 ? 1 : (4 * threads + decodes - 1) / decodes;
  const int32_t step = int32_t(std::max<int64_t>(kKvTile, round_up((own + wanted - 1) / wanted, kKvTile)));
  const int32_t stretches = (own + step - 1) / step;
  int32_t heads = l.kv_heads;
  if (!by_vectors(l)) heads = 1;
  else if (stretches > 0 && stretches * 2 < wanted) heads = int32_t(std::max<int64_t>(1, l.kv_heads * stretches * 2 / wanted));
  const int32_t tiles = (own + kKvTile - 1) / kKvTile;
  const int32_t parts = plan.shared[row] ? 1 + tiles : stretches > 1 ? 1 + tiles - step / kKvTile : 0;
  return {begin, step, stretches, heads, parts};
}

// The pieces of a decode row. mine: where its parts go, or null.
void plan_decode(const Layer& l, int32_t row, int32_t keys, const Cut& cut, float* mine) {
  const int group = l.heads / l.kv_heads;
  const int64_t floats = part_floats(l), slot = l.heads * floats;
  if (mine) plan.merges.push_back({row, cut.parts, mine});
  for (int32_t h = 0; h < l.kv_heads; h += cut.heads)
    for (int32_t i = 0; i < cut.stretches; i++) {
      const int32_t start = tile_start(cut.begin) + i * cut.step, last = std::min(keys, start + cut.step);
      const int32_t first = std::max(cut.begin, start), end = std::min(l.kv_heads, h + cut.heads);
      const bool folded = i == 0 && !plan.shared[row];  // the beginning of the row; others continue it
      const int32_t before = i - (plan.shared[row] ? 0 : 1);  // stretches of single tiles before this one
      float* part = !mine ? nullptr : mine + (folded ? 0 : 1 + before * (cut.step / kKvTile)) * slot + h * group * floats;
      plan.pieces.push_back({kDecode, row, h, end, first, last, part, folded ? 0 : slot,
                             int64_t(last - first) * (end - h) * group * 2});
    }
}

void plan_step(const Step& s, const Layer& l, int threads) {
  const int group = l.heads / l.kv_heads;
  const int64_t floats = part_floats(l);
  plan.pieces.clear();
  plan.merges.clear();
  plan.row_parts.assign(s.rows, -1);
  plan_groups(s, l);
  int64_t decodes = 0, used = 0;
  for (int32_t r = 0; r < s.rows; r++) decodes += is_decode(s, r);
  for (int32_t r = 0; r < s.rows; r++) {
    if (!is_decode(s, r) || s.kv_len[r] == 0) continue;
    const Cut cut = cut_row(s, l, r, decodes, threads);
    if (cut.parts == 0) continue;
    plan.row_parts[r] = used;
    used += cut.parts * l.heads * floats;
  }
  float* parts = parts_scratch.get<float>(used + 1);
  for (int32_t r = 0; r < s.rows; r++) {
    const int32_t queries = s.query_start[r + 1] - s.query_start[r], keys = s.kv_len[r];
    if (queries == 0 || keys == 0) continue;
    if (!is_decode(s, r)) {
      const int32_t tile = std::max<int32_t>(4, std::min<int32_t>(128, 192 / group));
      for (int32_t q = (queries - 1) / tile * tile; q >= 0; q -= tile)
        for (int32_t h = 0; h < l.kv_heads; h++) {
          const int32_t end = std::min(queries, q + tile), seen = l.causal ? keys - queries + end : keys;
          plan.pieces.push_back({kPrompt, r, h, h + 1, q, end, nullptr, 0, int64_t(end - q) * group * seen});
        }
      continue;
    }
    const Cut cut = cut_row(s, l, r, decodes, threads);
    plan_decode(l, r, keys, cut, plan.row_parts[r] < 0 ? nullptr : parts + plan.row_parts[r]);
  }
  if (s.group_rows && !is_bounded(l))
    for (int32_t g = 0; g < s.groups; g++) {
      const int32_t members = s.group_start[g + 1] - s.group_start[g], tokens = shared_tokens(s, g);
      if (tokens == 0) continue;
      for (int32_t h = 0; h < l.kv_heads; h++)
        plan.pieces.push_back({kGroupSpan, g, h, h + 1, 0, tokens, parts, 0, int64_t(tokens) * members * group});
    }
  std::stable_sort(plan.pieces.begin(), plan.pieces.end(), [](const Piece& a, const Piece& b) { return a.cost > b.cost; });
}

// Query rows of a prompt's tile: token by token, head by head.
int prompt_rows(const Step& s, const Layer& l, const Piece& p, QueryRow* out) {
  const int group = l.heads / l.kv_heads;
  const int32_t begin = s.query_start[p.index], queries = s.query_start[p.index + 1] - begin, keys = s.kv_len[p.index];
  int count = 0;
  for (int32_t q = p.first; q < p.last; q++) {
    const int32_t token = begin + q, place = keys - queries + q, position = s.seen ? int32_t(s.positions[token]) : place;
    QueryRow row = {token, 0, window_start(l, position), l.causal && !s.seen ? place + 1 : keys};
    if (s.seen) {
      row.tail = s.tail[token];
      row.seen = uint64_t(s.seen[token]);
      if (!row.seen) row.hi = row.tail;
    }
    if (s.gaps) {
      row.gap_lo = s.gaps[2 * token];
      row.gap_hi = s.gaps[2 * token + 1];
    }
    for (int g = 0; g < group; g++) {
      row.head = p.kv_head * group + g;
      out[count++] = row;
    }
  }
  return count;
}

void run_piece(const Step& s, const Layer& l, const Plan& whole, const Piece& p) {
  const int group = l.heads / l.kv_heads;
  if (p.kind == kDecode) {
    if (by_vectors(l)) {
      attend_decode(s, l, {p.index, p.kv_head, p.kv_last, p.first, p.last}, {p.part, part_floats(l), p.tile_step});
      return;
    }
    QueryRow* rows = rows_scratch.get<QueryRow>(group);
    for (int g = 0; g < group; g++) rows[g] = {s.query_start[p.index], p.kv_head * group + g, p.first, p.last};
    attend_tiles(s, l, rows, group, s.slots[p.index], p.kv_head, p.first, p.last, {p.part, part_floats(l), p.tile_step});
    return;
  }
  if (p.kind == kPrompt) {
    QueryRow* rows = rows_scratch.get<QueryRow>((p.last - p.first) * group);
    const int count = prompt_rows(s, l, p, rows);
    int32_t lo = rows[0].lo, hi = rows[0].hi;
    for (int i = 1; i < count; i++) lo = std::min(lo, rows[i].lo), hi = std::max(hi, rows[i].hi);
    attend_tiles(s, l, rows, count, s.slots[p.index], p.kv_head, lo, hi, {nullptr, 0, 0});
    return;
  }
  // A shared span: each row's first part. Rows lie anywhere, so results go through a buffer of their own.
  const int32_t begin = s.group_start[p.index], members = s.group_start[p.index + 1] - begin;
  const int64_t floats = part_floats(l);
  uint8_t* memory = rows_scratch.get<uint8_t>(members * group * (sizeof(QueryRow) + floats * sizeof(float)));
  QueryRow* rows = reinterpret_cast<QueryRow*>(memory);
  float* results = reinterpret_cast<float*>(memory + members * group * sizeof(QueryRow));
  for (int32_t i = 0; i < members; i++)
    for (int g = 0; g < group; g++)
      rows[i * group + g] = {s.query_start[s.group_rows[begin + i]], p.kv_head * group + g, p.first, p.last};
  attend_tiles(s, l, rows, members * group, s.slots[s.group_rows[begin]], p.kv_head, p.first, p.last, {results, floats, 0});
  for (int32_t i = 0; i < members; i++) {
    const int64_t at = whole.row_parts[s.group_rows[begin + i]];
    std::memcpy(p.part + at + p.kv_head * group * floats, results + i * group * floats, sizeof(float) * group * floats);
  }
}

void merge(const Step& s, const Layer& l, const RowParts& m, int64_t head) {
  const int64_t floats = part_floats(l);
  float *sums = m.first + head * floats, top = sums[l.v_dim + kLanes];
  for (int i = 1; i < m.count; i++) {
    const float *part = sums + i * l.heads * floats, own = part[l.v_dim + kLanes], now = std::max(top, own);
    const F32 shrinks = exponential(F32{top - now, own - now});
    for (int c = 0; c < l.v_dim + kLanes; c += 16)
      store(sums + c, fold(load(sums + c), shrinks[0], load(part + c), shrinks[1]));
    top = now;
  }
  write_output(l, s.query_start[m.row], head, sums, load(sums + l.v_dim), top);
}

void clear_rest(const Step& s, const Layer& l) {  // tokens of no row, and of rows without keys
  const int64_t bytes = int64_t(l.heads) * l.v_dim * (l.dtype == kF32 ? 4 : 2);
  char* out = static_cast<char*>(l.out);
  const int32_t real = s.rows ? s.query_start[s.rows] : 0;
  if (real < s.tokens) std::memset(out + real * bytes, 0, (s.tokens - real) * bytes);
  for (int32_t r = 0; r < s.rows; r++)
    if (s.kv_len[r] == 0)
      std::memset(out + s.query_start[r] * bytes, 0, (s.query_start[r + 1] - s.query_start[r]) * bytes);
}

}  // namespace
}  // namespace bough

using namespace bough;

BOUGH_EXPORT void bough_attention(const Step* step, const Layer* layer) {
  const Step s = *step;
  const Layer l = *layer;
  const int available = usable_threads();
  write_new(s, l, available);
  clear_rest(s, l);
  plan_step(s, l, available);
  int64_t cost = 0;
  for (const Piece& p : plan.pieces) cost += p.cost;
  const int threads = cost * l.dim < 60000 ? 1 : available;
  const Plan& mine = plan;
  for_each(threads, int64_t(mine.pieces.size()), 1, [&](int64_t i) { run_piece(s, l, mine, mine.pieces[i]); });
  int64_t merged = 0;
  for (const RowParts& m : plan.merges) merged += m.count * l.heads * part_floats(l);
  for_each(merged < 65536 ? 1 : available, int64_t(mine.merges.size()) * l.heads, 1,
           [&](int64_t i) { merge(s, l, mine.merges[i / l.heads], i % l.heads); });
}

thread_local Scratch rope_scratch;

// Norms and rotates queries and keys first; `rope` needs no outputs.
BOUGH_EXPORT void bough_attention_rope(const Step* step, const Layer* layer, const Rope* rope) {
  Layer l = *layer;
  Rope r = *rope;
  const int64_t bytes = l.dtype == kF32 ? 4 : 2, q_values = r.tokens * l.heads * l.dim;
  uint8_t* memory = rope_scratch.get<uint8_t>((q_values + r.tokens * l.kv_heads * l.dim) * bytes);
  r.q_out = memory;
  r.k_out = memory + q_values * bytes;
  bough_rope(&r);
  l.q = r.q_out;
  l.k = r.k_out;
  l.q_head = l.k_head = l.dim;
  l.q_token = int64_t(l.heads) * l.dim;
  l.k_token = int64_t(l.kv_heads) * l.dim;
  bough_attention(step, &l);
}
