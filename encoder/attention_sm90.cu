// Variable-length attention for Hopper after FlashAttention-3 (Shah et al. 2024): a producer warp feeds K and V tiles
// through the tensor memory accelerator, consumer warpgroups of 64 query rows each run QK^T of the next tile and PV of
// the last while they take the softmax. The head dimension is used as it is: 72 is 72 columns of PV and 80 of QK^T.
//
// Set by the host: D (head dimension, a multiple of 8 from 64 to 80), BM (queries of a block), BN (keys in a tile), WGS
// (consumer warpgroups of 64 queries), THREADS (of a block), STAGES, and the functions mma_qk and mma_pv.

#define NEG_INF __int_as_float(0xff800000)
#define TAIL (D > 64)
// Registers that the producer gives up go to the consumers; a block has no more than it started with.
#define PRODUCER_REGISTERS (WGS == 3 ? 32 : 24)
#define CONSUMER_REGISTERS (WGS == 3 ? 160 : 240)
#define K_BYTES (BN * 128)
#define KT_BYTES (TAIL ? BN * 32 : 0)
#define V_BYTES (BN * 128 * (TAIL ? 2 : 1))
#define STAGE_BYTES (K_BYTES + KT_BYTES + V_BYTES)
#define Q_BYTES (BM * 128)
#define QT_BYTES (TAIL ? BM * 32 : 0)

// S = Q K^T for 64 query rows; issued, not awaited.
__device__ __forceinline__ void issue_qk(float (&s)[BN / 2], u32 q, u32 qt, u32 k, u32 kt) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    mma_qk(s, descriptor(q + 32 * i, 16, 1024, 1), descriptor(k + 32 * i, 16, 1024, 1), i > 0);
  if (TAIL) mma_qk(s, descriptor(qt, 16, 256, 3), descriptor(kt, 16, 256, 3), 1);
  wgmma_commit();
}

// O += P V; issued, not awaited.
__device__ __forceinline__ void issue_pv(float (&o)[D / 2], u32 (&p)[BN / 4], u32 v) {
#pragma unroll
  for (int i = 0; i < BN / 16; ++i)
    mma_pv(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], descriptor(v + 2048 * i, BN * 128, 1024, 1));
  wgmma_commit();
}

// Turns scores into probabilities in place; returns by reference the running maximum (in units of log2) and sum of the
// two rows that a thread holds, and the factors by which earlier results shrink.
__device__ __forceinline__ void softmax_step(float (&s)[BN / 2], float (&row_max)[2], float (&row_sum)[2],
                                             float (&alpha)[2], float scale) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float high = s[2 * r];
#pragma unroll
    for (int i = 0; i < BN / 8; ++i) high = fmaxf(high, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
    high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, 1));
    high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, 2));
    float now = fmaxf(row_max[r], high * scale);
    alpha[r] = exp2_approx(row_max[r] - now);
    row_max[r] = now;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < BN / 8; ++i) {
      float a = exp2_approx(fmaf(s[4 * i + 2 * r], scale, -now));
      float b = exp2_approx(fmaf(s[4 * i + 2 * r + 1], scale, -now));
      s[4 * i + 2 * r] = a;
      s[4 * i + 2 * r + 1] = b;
      sum += a + b;
    }
    row_sum[r] = row_sum[r] * alpha[r] + sum;
  }
}

__device__ __forceinline__ void to_operand(u32 (&p)[BN / 4], const float (&s)[BN / 2]) {
#pragma unroll
  for (int i = 0; i < BN / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

extern "C" __global__ void __launch_bounds__(THREADS, WGS > 1 || BN > 128 ? 1 : 3)
    varlen_attention(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_qt,
                     const __grid_constant__ TensorMap map_kv, const __grid_constant__ TensorMap map_kt,
                     u16* __restrict__ out, const int* __restrict__ tiles, int heads, float scale) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(8) u64 barriers[1 + 4 * STAGES];
  const u32 base = (smem_address(smem) + 1023) & ~1023u;
  const u32 q = base, qt = q + Q_BYTES, stages = qt + QT_BYTES;
  const u32 full_q = smem_address(barriers);
  const u32 full_k = full_q + 8, full_v = full_k + 8 * STAGES, empty_k = full_v + 8 * STAGES,
            empty_v = empty_k + 8 * STAGES;
  const int group = threadIdx.x / 128, head = blockIdx.y;
  if (threadIdx.x == 0) {
    barrier_init(full_q, 1);
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full_k + 8 * i, 1);
      barrier_init(full_v + 8 * i, 1);
      barrier_init(empty_k + 8 * i, 4 * WGS);
      barrier_init(empty_v + 8 * i, 4 * WGS);
    }
    barriers_ready();
  }
  __syncthreads();
  let_successor_start();
  predecessor_done();
  const int q0 = tiles[3 * blockIdx.x], start = tiles[3 * blockIdx.x + 1], end = tiles[3 * blockIdx.x + 2];
  if (q0 >= end) return;
  const int count = (end - start + BN - 1) / BN;
  // Tiles go from the last, which may be partial, to the first.
  const int last = start + (count - 1) * BN;

  if (group == WGS) {
    if (WGS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (threadIdx.x == 128 * WGS) {
      barrier_expect(full_q, Q_BYTES + QT_BYTES);
      load_tile_3d(q, &map_q, full_q, 0, head, q0);
      if (TAIL) load_tile_3d(qt, &map_qt, full_q, 64, head, q0);
      for (int j = 0; j < count; ++j) {
        const int stage = j % STAGES, row = last - j * BN;
        const u32 free = ((j / STAGES) & 1) ^ 1;
        const u32 k = stages + stage * STAGE_BYTES, kt = k + K_BYTES, v = kt + KT_BYTES;
        barrier_wait(empty_k + 8 * stage, free);
        barrier_expect(full_k + 8 * stage, K_BYTES + KT_BYTES);
        load_tile_3d(k, &map_kv, full_k + 8 * stage, 0, heads + head, row);
        if (TAIL) load_tile_3d(kt, &map_kt, full_k + 8 * stage, 64, heads + head, row);
        barrier_wait(empty_v + 8 * stage, free);
        barrier_expect(full_v + 8 * stage, V_BYTES);
        load_tile_3d(v, &map_kv, full_v + 8 * stage, 0, 2 * heads + head, row);
        if (TAIL) load_tile_3d(v + BN * 128, &map_kv, full_v + 8 * stage, 64, 2 * heads + head, row);
      }
    }
    return;
  }
  if (WGS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool signals = lane == 0;
  if (q0 + 64 * group >= end) {
    // No query row of this warpgroup is inside the segment: it only lets the tiles pass.
    for (int j = 0; j < count; ++j) {
      const int stage = j % STAGES;
      barrier_wait(full_k + 8 * stage, (j / STAGES) & 1);
      if (signals) barrier_arrive(empty_k + 8 * stage);
      barrier_wait(full_v + 8 * stage, (j / STAGES) & 1);
      if (signals) barrier_arrive(empty_v + 8 * stage);
    }
    return;
  }
  const u32 my_q = q + group * 8192, my_qt = qt + group * 2048;
  float s[BN / 2], o[D / 2];
  u32 p[BN / 4];
  float row_max[2] = {NEG_INF, NEG_INF}, row_sum[2] = {0.f, 0.f}, alpha[2];
#pragma unroll
  for (int i = 0; i < D / 2; ++i) o[i] = 0.f;

  const int valid = end - last;
  barrier_wait(full_q, 0);
  barrier_wait(full_k, 0);
  pin(s);
  wgmma_fence();
  issue_qk(s, my_q, my_qt, stages, stages + K_BYTES);
  wgmma_wait<0>();
  pin(s);
  if (signals) barrier_arrive(empty_k);
  if (valid < BN) {
#pragma unroll
    for (int i = 0; i < BN / 2; ++i)
      if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= valid) s[i] = NEG_INF;
  }
  softmax_step(s, row_max, row_sum, alpha, scale);
  to_operand(p, s);
  barrier_wait(full_v, 0);
  if (valid < BN) {
    // Rows past the segment may hold NaN, and 0 * NaN is NaN. Every warpgroup clears them: all write the same zeros.
    const u32 v = stages + K_BYTES + KT_BYTES;
    for (int i = threadIdx.x % 128; i < (BN - valid) * 8; i += 128) {
      const u32 at = v + valid * 128 + i * 16;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
      if (TAIL) asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at + BN * 128), "r"(0) : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
  }
  for (int j = 1; j < count; ++j) {
    const int stage = j % STAGES, before = (j - 1) % STAGES;
    const u32 k = stages + stage * STAGE_BYTES;
    barrier_wait(full_k + 8 * stage, (j / STAGES) & 1);
    if (j > 1) barrier_wait(full_v + 8 * before, ((j - 1) / STAGES) & 1);
    pin(s);
    pin(p);
    pin(o);
    wgmma_fence();
    issue_qk(s, my_q, my_qt, k, k + K_BYTES);
    issue_pv(o, p, stages + before * STAGE_BYTES + K_BYTES + KT_BYTES);
    wgmma_wait<1>();
    pin(s);
    if (signals) barrier_arrive(empty_k + 8 * stage);
    softmax_step(s, row_max, row_sum, alpha, scale);
    wgmma_wait<0>();
    pin(o);
    pin(p);
    if (signals) barrier_arrive(empty_v + 8 * before);
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] *= alpha[i / 2 % 2];
    to_operand(p, s);
  }
  const int final_stage = (count - 1) % STAGES;
  if (count > 1) barrier_wait(full_v + 8 * final_stage, ((count - 1) / STAGES) & 1);
  pin(p);
  pin(o);
  wgmma_fence();
  issue_pv(o, p, stages + final_stage * STAGE_BYTES + K_BYTES + KT_BYTES);
  wgmma_wait<0>();
  pin(o);

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = row_sum[r];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    const float inverse = 1.f / sum;
    const int row = q0 + 64 * group + 16 * warp + lane / 4 + 8 * r;
    if (row < end) {
      u32* to = (u32*)(out + ((long long)row * heads + head) * D + lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < D / 8; ++i) to[4 * i] = pack(o[4 * i + 2 * r] * inverse, o[4 * i + 2 * r + 1] * inverse);
    }
  }
}
