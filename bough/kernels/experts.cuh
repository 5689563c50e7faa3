// What products of experts in codes have in common: what they are given, and what becomes of their sums. Given before it is
// included, besides `hopper.cuh`: GATE (over two halves: 1 silu, 2 clamped; 0 none).

struct Work {
  const u16* x;
  const int *batch_expert, *pairs;
  const u16* bias;  // [experts, HALVES * rows]
  u16* out;         // [num_pairs, rows]
  i64 x_stride;
  int num_pairs, per_token, rows, depth, boxes, num_batches, experts;  // boxes: of 128 columns
  float alpha, limit;
};

INLINE u16 narrow(float value) {
  u16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
}
INLINE float rounded(float value) { return low(narrow(value)); }

INLINE float gated(float gate, float up, const Work& work) {
  if (GATE == 2) {
    gate = fminf(gate, work.limit);
    up = fminf(fmaxf(up, -work.limit), work.limit) + 1.0f;
    return up * gate / (1.0f + __expf(-work.alpha * gate));
  }
  return gate / (1.0f + __expf(-gate)) * up;
}
