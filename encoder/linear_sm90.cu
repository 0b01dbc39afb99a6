// out = f(A W^T + bias) for Hopper: a producer warp feeds tiles of A and W through the tensor memory accelerator into a
// ring of stages, consumer warpgroups multiply them with wgmma and write the tiles out. Blocks are persistent: cluster
// i takes the groups of tiles i, i + clusters, ... of those that hold live rows.
//
// Two consumers either share a tile (each takes half of its rows) or take turns (PINGPONG: one writes its tile out while
// the other multiplies). Blocks of a cluster work on row tiles below each other and share the columns' tile of W, of
// which each loads a part for all. With `splits` above 1 a tile's contraction is cut in parts, which add up in the reader.
//
// Set by the host: MI (row tiles of 64 that a consumer holds), BM and BN (rows and columns of a tile, BN a multiple of
// 16), BK (columns of the contraction in a stage, 128 bytes), CONSUMERS, PINGPONG, CLUSTER, STAGES, THREADS, OUT_PITCH
// (bytes between rows on their way out), EPILOGUE and its possible values, the functions mma, pack (two floats as a pair
// of elements), low and high (a pair's elements); for ROTARY also D (the head dimension, a multiple of 8, of which BN is
// a multiple).

#define SHARING (PINGPONG ? 1 : CONSUMERS)
#define A_BYTES (BM * 128)
#define W_BYTES (BN * 128)
#define STAGE_BYTES (A_BYTES + W_BYTES)
#define W_PART (BN / CLUSTER)
// One warp's 16 rows of 64 columns on their way out.
#define OUT_BYTES (16 * OUT_PITCH)

__device__ __forceinline__ float activate(float x) {
#if EPILOGUE == GELU_TANH
  // x * sigmoid(2 u) is 0.5 x (1 + tanh u), and keeps its relative accuracy where tanh u nears -1.
  const float u = x * fmaf(0.044715f * x, x, 1.f);
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.f + exp2_approx(-2.302208198f * u)));
  return x * r;
#elif EPILOGUE == GELU_ERF
  return 0.5f * x * (1.f + erff(x * 0.70710678f));
#else
  return x;
#endif
}

__device__ __forceinline__ u32 load_pair(const u16* from) {
  // As volatile assembly, so that the loads of later columns do not all move to the front and take registers.
  u32 pair;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(pair) : "l"(from));
  return pair;
}

#if EPILOGUE == ROTARY
#define GROUPS (D / 8)
#define HALF (D / 2)

// Where the cosine and sine of a thread's columns of group `g` (8 columns, two of them a thread) stand in their row.
__device__ __forceinline__ int angle_of(int g, int q) {
  const int d = 8 * g + 2 * q;
  return d < HALF ? d : d - HALF;
}

// Rotates a head that the accumulators of one row hold. The partner of a column lies half a head away, which is in
// another thread of the four where half a head is no multiple of 8.
__device__ __forceinline__ void rotate_row(float* v, const float2 (&cosine)[GROUPS], const float2 (&sine)[GROUPS], int q) {
  constexpr int SHIFT = HALF / 8, CROSS = HALF % 8 != 0;
  float other[2 * GROUPS];
#pragma unroll
  for (int g = 0; g < GROUPS; ++g)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (CROSS) {
        // What the thread across needs for its own group g; the left threads have one group more in the first half.
        const float a = v[4 * (g < SHIFT ? g + SHIFT + 1 : g - SHIFT) + e];
        const float b = v[4 * (g <= SHIFT ? g + SHIFT : g - SHIFT - 1) + e];
        other[2 * g + e] = __shfl_xor_sync(0xffffffff, q < 2 ? a : b, 2);
      } else {
        other[2 * g + e] = v[4 * (g < SHIFT ? g + SHIFT : g - SHIFT) + e];
      }
    }
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    const bool first = 8 * g + 2 * q < HALF;
    v[4 * g] = fmaf(v[4 * g], cosine[g].x, other[2 * g] * (first ? -sine[g].x : sine[g].x));
    v[4 * g + 1] = fmaf(v[4 * g + 1], cosine[g].y, other[2 * g + 1] * (first ? -sine[g].y : sine[g].y));
  }
}
#endif

struct Stage {
  int index;
  u32 parity;
  __device__ __forceinline__ void seek(int step) {
    index = step % STAGES;
    parity = step / STAGES & 1;
  }
  __device__ __forceinline__ void next() {
    if (++index == STAGES) {
      index = 0;
      parity ^= 1;
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    linear(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_w, void* __restrict__ out,
           const u16* __restrict__ bias, const float* __restrict__ cosine, const float* __restrict__ sine,
           int rotated_cols, const int* __restrict__ live, int rows, int cols, int pitch, int k_steps, int splits) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const u32 stages = (smem_address(smem) + 1023) & ~1023u;
  const u32 full = smem_address(barriers), empty = full + 8 * STAGES;
  const int group = threadIdx.x / 128;
  u32 rank = 0;
  if (CLUSTER > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4 * SHARING * CLUSTER);
    }
    barriers_ready();
  }
  if (CLUSTER > 1)
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  else
    __syncthreads();
  let_successor_start();

  // Read before the kernel in front is done, as the first weights are: nothing that may still run writes them.
  const int live_rows = min(rows, live[0]);
  const int row_groups = (live_rows + BM * CLUSTER - 1) / (BM * CLUSTER), col_tiles = (cols + BN - 1) / BN;
  const int tiles = row_groups * col_tiles * splits, first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
  // Splits differ by at most one step.
#define TILE_OF(tile)                                                                                \
  const int split = (tile) % splits, col = (tile) / splits % col_tiles * BN;                         \
  const int row = ((tile) / splits / col_tiles * CLUSTER + (int)rank) * BM;                          \
  const int from = k_steps * split / splits, steps = k_steps * (split + 1) / splits - from;

  if (group == CONSUMERS) {
    if (CONSUMERS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 128 * CONSUMERS) {
      Stage stage;
      stage.seek(0);
      auto load_w = [&](int index, int k, int col) {
        const u32 to = stages + index * STAGE_BYTES + A_BYTES + rank * W_PART * 128;
        if (CLUSTER > 1)
          load_tile_2d_to_all(to, &map_w, full + 8 * index, k * BK, col + rank * W_PART, (1 << CLUSTER) - 1);
        else
          load_tile_2d(to, &map_w, full + 8 * index, k * BK, col);
      };
      bool waited = false;
      for (int tile = first; tile < tiles; tile += stride) {
        TILE_OF(tile)
        int k = 0;
        if (!waited) {
          // The first weights are on their way while the kernel in front ends.
          const int early = min(steps, STAGES);
          for (int i = 0; i < early; ++i) {
            barrier_expect(full + 8 * i, STAGE_BYTES);
            load_w(i, from + i, col);
          }
          predecessor_done();
          waited = true;
          for (; k < early; ++k) {
            load_tile_2d(stages + k * STAGE_BYTES, &map_a, full + 8 * k, (from + k) * BK, row);
            stage.next();
          }
        }
        for (; k < steps; ++k) {
          barrier_wait(empty + 8 * stage.index, stage.parity ^ 1);
          barrier_expect(full + 8 * stage.index, STAGE_BYTES);
          load_w(stage.index, from + k, col);
          load_tile_2d(stages + stage.index * STAGE_BYTES, &map_a, full + 8 * stage.index, (from + k) * BK, row);
          stage.next();
        }
      }
      if (!waited) predecessor_done();
    }
  } else {
    if (CONSUMERS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    predecessor_done();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const u32 my_rows = PINGPONG ? 0 : group * MI * 64;
    const u32 my_out = stages + STAGES * STAGE_BYTES + (threadIdx.x / 32) * OUT_BYTES;
    auto release = [&](int index) {
      if (CLUSTER > 1) {
        if (lane < CLUSTER) barrier_arrive_at(empty + 8 * index, lane);
      } else if (lane == 0) {
        barrier_arrive(empty + 8 * index);
      }
    };
    float acc[MI][BN / 2];
    int done = 0, turn = 0;
    Stage stage;
    for (int tile = first; tile < tiles; tile += stride, ++turn) {
      TILE_OF(tile)
      if (PINGPONG && turn % CONSUMERS != group) {
        done += steps;
        continue;
      }
      stage.seek(done);
      done += steps;
      int before = 0;
      // A barrier tells only the parity of its phase: a consumer starts to wait for a stage once the other one, whose
      // tile comes first, has seen all of its own.
      if (PINGPONG && turn > 0) asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
      for (int k = 0; k < steps; ++k) {
        barrier_wait(full + 8 * stage.index, stage.parity);
        const u32 a = stages + stage.index * STAGE_BYTES + my_rows * 128, w = stages + stage.index * STAGE_BYTES + A_BYTES;
#pragma unroll
        for (int i = 0; i < MI; ++i) pin(acc[i]);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BK / 16; ++step)
#pragma unroll
          for (int i = 0; i < MI; ++i)
            mma(acc[i], descriptor(a + i * 8192 + 32 * step, 16, 1024, 1), descriptor(w + 32 * step, 16, 1024, 1),
                k + step > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (k > 0) release(before);
        before = stage.index;
        stage.next();
      }
      if (PINGPONG && tile + stride < tiles) asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < MI; ++i) pin(acc[i]);
      release(before);

#if EPILOGUE == ROTARY
#pragma unroll
      for (int g = 0; g < BN / 8; ++g) {
        const int at = col + 8 * g + lane % 4 * 2;
        const u32 pair = at < cols ? load_pair(bias + at) : 0;
#pragma unroll
        for (int i = 0; i < MI; ++i)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            acc[i][4 * g + 2 * r] += low(pair);
            acc[i][4 * g + 2 * r + 1] += high(pair);
          }
      }
      if (col < rotated_cols) {
#pragma unroll
        for (int i = 0; i < MI; ++i)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int y = min(row + (int)my_rows + 64 * i + 16 * warp + lane / 4 + 8 * r, rows - 1);
            float2 c[GROUPS], s[GROUPS];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
              c[g] = *(const float2*)(cosine + y * HALF + angle_of(g, lane % 4));
              s[g] = *(const float2*)(sine + y * HALF + angle_of(g, lane % 4));
            }
#pragma unroll
            for (int h = 0; h < BN / D; ++h)
              if (col + h * D < rotated_cols) rotate_row(&acc[i][h * HALF + 2 * r], c, s, lane % 4);
          }
      }
#endif
#pragma unroll
      for (int c = 0; c < BN / 2; c += 32) {
        // 64 columns, or what is left of the tile: 8 of them are 4 registers.
        const int width = BN / 2 - c < 32 ? (BN / 2 - c) / 4 : 8;
        float b[16];
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (j < width) {
            const int at = col + 2 * c + 8 * j + lane % 4 * 2;
            const u32 pair = EPILOGUE != ROTARY && at < cols && split == 0 ? load_pair(bias + at) : 0;
            b[2 * j] = low(pair);
            b[2 * j + 1] = high(pair);
          }
#pragma unroll
        for (int i = 0; i < MI; ++i) {
          const int top = row + my_rows + 64 * i + 16 * warp;
#if EPILOGUE == PARTIAL
#pragma unroll
          for (int j = 0; j < 8; ++j)
            if (j < width)
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                const int y = top + lane / 4 + 8 * r, x = col + 2 * c + 8 * j + lane % 4 * 2;
                const float* v = &acc[i][c + 4 * j + 2 * r];
                if (y < live_rows && x < cols)
                  *(float2*)((float*)out + ((long long)split * rows + y) * pitch + x) =
                      make_float2(v[0] + b[2 * j], v[1] + b[2 * j + 1]);
              }
#else
          __syncwarp();
#pragma unroll
          for (int j = 0; j < 8; j += 2)
            if (j < width) {
              u32 m[4];
#pragma unroll
              for (int q = 0; q < 4; ++q) {
                const float* v = &acc[i][c + 4 * (j + q / 2) + 2 * (q % 2)];
                m[q] = pack(activate(v[0] + b[2 * (j + q / 2)]), activate(v[1] + b[2 * (j + q / 2) + 1]));
              }
              const u32 at = my_out + (lane % 16) * OUT_PITCH + (j + lane / 16) * 16;
              asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(m[0]),
                           "r"(m[1]), "r"(m[2]), "r"(m[3])
                           : "memory");
            }
          __syncwarp();
#pragma unroll
          for (int n = 0; n < 4; ++n)
            if (n * 2 < width) {
              const int at = n * 32 + lane, y = at / width, x = at % width;
              const int to_row = top + y, to_col = col + 2 * c + 8 * x;
              uint4 v;
              asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                           : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                           : "r"(my_out + y * OUT_PITCH + x * 16));
              if (to_row < live_rows && to_col < cols)
                *(uint4*)((u16*)out + (long long)to_row * pitch + to_col) = v;
            }
#endif
        }
      }
    }
  }
  // No block leaves while another one of its cluster still writes to it or arrives at its barriers.
  __syncwarp();
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
