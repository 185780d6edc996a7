// y[m,n] = tree over segments of a[m,s] b[n,s] on Hopper. SPLIT programs of one cluster share a tile where tiles are
// too few for the device: each sums SEGMENTS neighbouring segments; the upper levels of the tree join the programs
// through each other's shared memory, and at each level a program goes on with half of its columns. Where a tile has
// one program (SPLIT 1) programs stay and walk the tiles, and a cluster is no more than neighbours that read the same
// operands.
//
// Compiled at run time for BM, BN (rows and columns of a tile), SEGMENTS, SPLIT, STAGES (copies under way), ROWS_OF_B
// (b is [n,s]; otherwise [s,n]) and FP32 (y is fp32; otherwise bf16). No operation here is contracted: --fmad=false.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
struct alignas(64) Map { u64 words[16]; };  // a tensor map, as the driver encodes it

constexpr int BK = 64, HALVES = BM / 64, WIDTH = BN / 2;  // summed indices of a step; warpgroups; registers of a sum
constexpr int LEVELS = SPLIT == 1 ? 0 : SPLIT == 2 ? 1 : SPLIT == 4 ? 2 : 3;
constexpr int GROUP = 8;            // rows of tiles that share the columns that the L2 holds
constexpr int COLUMNS = BN / SPLIT;  // those that a program stores
// Eight segments have four sums to keep at once. Four of 64 registers are too many: that of the first half waits in
// shared memory.
constexpr bool PARKED = SEGMENTS == 8 && BN > 96;
constexpr int SUMS = SEGMENTS == 8 && !PARKED ? 4 : 3;
// Floats that a warpgroup receives, or parks; else lines of y.
constexpr int ROOM = SPLIT > 1 ? 64 * BN - 64 * BN / SPLIT : PARKED ? 64 * BN : 64 * (BN / 2 + 4);
constexpr int CONSUMERS = 128 * HALVES;

struct Shared {
  alignas(1024) unsigned char a[STAGES][BM * BK * 2], b[STAGES][BN * BK * 2];
  alignas(128) float received[HALVES][ROOM];
  u64 full[STAGES], empty[STAGES], arrived[HALVES][LEVELS ? LEVELS : 1];
};

__device__ __forceinline__ u32 place(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ u32 place_in(u32 rank, const void* at) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place(at)), "r"(rank));
  return there;
}

__device__ __forceinline__ void init(u64* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(place(barrier)), "r"(count));
}

__device__ __forceinline__ void expect(u64* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(place(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(place(barrier)) : "memory");
}

__device__ __forceinline__ void await(u64* barrier, int parity) {
  asm volatile(
      "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }" ::"r"(
          place(barrier)), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy(void* to, const Map& from, int x, int y, u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          place(to)), "l"(&from), "r"(x), "r"(y), "r"(place(barrier)) : "memory");
}

// Four floats into another program's shared memory, counted by its barrier.
__device__ __forceinline__ void send(u32 to, const float* v, u32 barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier) : "memory");
}

// A tile in shared memory as wgmma reads it: swizzled by 128 bytes, eight rows of it every 1024; `next`: bytes to the
// next 64 columns where rows are summed indices. at: bytes, below 2^18.
__device__ __forceinline__ u64 matrix(u32 at, u32 next) {
  return (u64)(64 | 1 << 30) << 32 | ((at >> 4) + (next >> 4 << 16));
}

// The compiler must not move what reads or writes an accumulator over the wait before it.
template <int N> __device__ __forceinline__ void pin(float (&sum)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(sum[i])::"memory");
}

template <int N> __device__ __forceinline__ void add(float (&left)[N], const float (&right)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) left[i] = left[i] + right[i];
}

// d[64,BN] (+)= 64 rows of a by 16 summed indices of b, which is left running.
#define D8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                 "+f"(d[i + 6]), "+f"(d[i + 7])
__device__ __forceinline__ void multiply(float (&d)[32], u64 a, u64 b, int onto) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
      "%30,%31}, %32, %33, p, 1, 1, 0, %35; }"
      : D8(d, 0), D8(d, 8), D8(d, 16), D8(d, 24) : "l"(a), "l"(b), "r"(onto), "n"(!ROWS_OF_B));
}
__device__ __forceinline__ void multiply(float (&d)[64], u64 a, u64 b, int onto) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
      "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"
      "%57,%58,%59,%60,%61,%62,%63}, %64, %65, p, 1, 1, 0, %67; }"
      : D8(d, 0), D8(d, 8), D8(d, 16), D8(d, 24), D8(d, 32), D8(d, 40), D8(d, 48), D8(d, 56)
      : "l"(a), "l"(b), "r"(onto), "n"(!ROWS_OF_B));
}
__device__ __forceinline__ void multiply(float (&d)[48], u64 a, u64 b, int onto) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %50, 0; wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28"
      ",%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}, %48, %49, p, 1, 1, 0, %51; }"
      : D8(d, 0), D8(d, 8), D8(d, 16), D8(d, 24), D8(d, 32), D8(d, 40)
      : "l"(a), "l"(b), "r"(onto), "n"(!ROWS_OF_B));
}

// Where a warpgroup is in the ring of copies.
struct Ring {
  int slot = 0, turn = 0, last = 0;
  __device__ __forceinline__ void next() {
    last = slot;
    if (++slot == STAGES) slot = 0, turn ^= 1;
  }
};

// The next step of a chain, which is left running; FIRST: the chain begins with it. a, b: the rings' first tiles.
__device__ __forceinline__ void step(float (&sum)[WIDTH], bool first, Shared& s, u32 a, u32 b, const Ring& ring) {
  constexpr u32 deeper = ROWS_OF_B ? 32 : 2048;  // bytes from 16 summed indices of b to the next
  const u32 a_tile = a + ring.slot * (BM * BK * 2), b_tile = b + ring.slot * (BN * BK * 2);
  await(&s.full[ring.slot], ring.turn);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < BK / 16; k++) {
    const u64 left = matrix(a_tile + k * 32, 16), right = matrix(b_tile + k * deeper, ROWS_OF_B ? 16 : 64 * BK * 2);
    multiply(sum, left, right, !first || k > 0);
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// The step before the one that runs is done with its tiles.
__device__ __forceinline__ void release(Shared& s, bool one, const Ring& ring) {
  asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
  if (one) arrive(&s.empty[ring.last]);
}

// All chains have ended, and the last step's tiles are free.
__device__ __forceinline__ void settle(float (&x)[SUMS][WIDTH], Shared& s, bool one, const Ring& ring) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  if (one) arrive(&s.empty[ring.last]);
#pragma unroll
  for (int i = 0; i < (SEGMENTS < SUMS ? SEGMENTS : SUMS); i++) pin(x[i]);
}

// A thread's sum to where it waits, and from there to the left of another.
__device__ __forceinline__ void park(float* room, const float (&sum)[WIDTH]) {
#pragma unroll
  for (int i = 0; i < WIDTH; i += 4) *(float4*)(room + i * 128) = {sum[i], sum[i + 1], sum[i + 2], sum[i + 3]};
}
__device__ __forceinline__ void add_parked(const float* room, float (&sum)[WIDTH]) {
#pragma unroll
  for (int i = 0; i < WIDTH; i += 4) {
    const float4 v = *(const float4*)(room + i * 128);
    sum[i] = v.x + sum[i], sum[i + 1] = v.y + sum[i + 1], sum[i + 2] = v.z + sum[i + 2], sum[i + 3] = v.w + sum[i + 3];
  }
}

// This program's segments of a tile, chain after chain, into x[0]. A chain ends while the next one begins in other
// registers, but for the one before a sum is parked.
__device__ __forceinline__ void chains(float (&x)[SUMS][WIDTH], Shared& s, Ring& ring, int half, int steps) {
  constexpr int AT[8] = {0, 1, 2, 1, PARKED ? 2 : SUMS - 1, 1, PARKED ? 0 : 2, 1};
  // Without the bits above, which in a cluster say whose shared memory it is.
  const u32 a = (place(s.a[0]) & 0x3FFFF) + half * 64 * BK * 2, b = place(s.b[0]) & 0x3FFFF;
  const bool one = threadIdx.x % 128 == 0;
  float* room = s.received[half] + threadIdx.x % 128 * 4;
#pragma unroll
  for (int i = 0; i < WIDTH; i++) x[0][i] = 0.f;
#pragma unroll
  for (int segment = 0; segment < SEGMENTS; segment++) {
    float(&sum)[WIDTH] = x[AT[segment]];
    const bool after = segment > 0 && !(PARKED && segment == 4);  // the chain before still runs
    if (PARKED && segment == 4) {
      settle(x, s, one, ring);
      add(x[2], x[1]), add(x[0], x[2]);
      park(room, x[0]);
      pin(x[0]);
    }
    step(sum, true, s, a, b, ring);
    if (after) {
      release(s, one, ring);
      pin(x[AT[segment - 1]]);
      if (segment == 2) add(x[0], x[1]), pin(x[0]);
      if (segment == 4) add(x[2], x[1]), add(x[0], x[2]), pin(x[0]);
      if (segment == 6) add(x[AT[4]], x[1]), pin(x[AT[4]]);
    }
    ring.next();
#pragma unroll 1
    for (int i = 1; i < steps / SEGMENTS; i++) {
      step(sum, false, s, a, b, ring);
      release(s, one, ring);
      ring.next();
    }
  }
  settle(x, s, one, ring);
  if (SEGMENTS == 2) add(x[0], x[1]);
  if (SEGMENTS == 4) add(x[2], x[1]), add(x[0], x[2]);
  if (SEGMENTS == 8 && !PARKED) add(x[2], x[1]), add(x[SUMS - 1], x[2]), add(x[0], x[SUMS - 1]);
  if (PARKED) add(x[0], x[1]), add(x[0], x[2]), add_parked(room, x[0]);
}

// One level of the tree over programs: the columns' upper half for odd ones (of this level), the lower for the others.
template <int LEVEL, int N>
__device__ __forceinline__ void meet(float (&kept)[N / 2], const float (&sum)[N], Shared& s, int half, u32 rank) {
  const int t = threadIdx.x % 128;
  const bool upper = rank >> LEVEL & 1;
  float* room = s.received[half] + (64 * BN - (64 * BN >> LEVEL)) + t * 4;
  const u32 to = place_in(rank ^ 1 << LEVEL, room), barrier = place_in(rank ^ 1 << LEVEL, &s.arrived[half][LEVEL]);
  float handed[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    kept[i] = upper ? sum[N / 2 + i] : sum[i];
    handed[i] = upper ? sum[i] : sum[N / 2 + i];
  }
#pragma unroll
  for (int i = 0; i < N / 8; i++) send(to + i * 128 * 16, handed + 4 * i, barrier);
  await(&s.arrived[half][LEVEL], 0);
#pragma unroll
  for (int i = 0; i < N / 8; i++) {
    const float4 v = *(const float4*)(room + i * 128 * 4);
    kept[4 * i] += v.x, kept[4 * i + 1] += v.y, kept[4 * i + 2] += v.z, kept[4 * i + 3] += v.w;
  }
}

// To nearest even; a NaN is 0x7fc0, which of the instruction's results only the NaN's, 0x7fff, is above.
__device__ __forceinline__ u32 narrow(float low, float high) {
  u32 two;
  asm("{ .reg .b32 p, most; cvt.rn.bf16x2.f32 p, %2, %1; mov.b32 most, 0x7fc07fc0; min.s16x2 %0, p, most; }"
      : "=r"(two) : "f"(low), "f"(high));
  return two;
}

__device__ __forceinline__ float canonical(float v) { return v == v ? v : __int_as_float(0x7fc00000); }

// 64 rows by COLUMNS, as wgmma has them: a thread's two rows, and of every eight columns two.
template <int N>
__device__ __forceinline__ void store(void* y, const float (&sum)[N], Shared& s, int half, int row, int column, int m,
                                      int n) {
  int t = threadIdx.x % 128;
  asm volatile("" : "+r"(t));  // else what follows from it is kept from tile to tile, in registers that are needed
  const int r = t / 32 * 16 + t % 32 / 4, c = t % 4 * 2;
  if constexpr (FP32) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i++) {
      const int at = row + r + i % 2 * 8, here = column + i / 2 * 8 + c;
      if (at < m && here < n)
        *(float2*)((float*)y + (long long)at * n + here) = {canonical(sum[2 * i]), canonical(sum[2 * i + 1])};
    }
  } else {  // through shared memory, so that whole lines leave
    constexpr int LINE = COLUMNS * 2 + 16, CHUNKS = COLUMNS / 8;
    unsigned char* line = (unsigned char*)s.received[half];
    asm volatile("bar.sync %0, 128;" ::"r"(half + 1) : "memory");
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i++)
      *(u32*)(line + (r + i % 2 * 8) * LINE + (i / 2 * 8 + c) * 2) = narrow(sum[2 * i], sum[2 * i + 1]);
    asm volatile("bar.sync %0, 128;" ::"r"(half + 1) : "memory");
#pragma unroll
    for (int chunk = t; chunk < 64 * CHUNKS; chunk += 128) {
      const int i = chunk / CHUNKS, at = row + i, here = column + chunk % CHUNKS * 8;
      if (at < m && here < n)
        *(uint4*)((u16*)y + (long long)at * n + here) = *(const uint4*)(line + i * LINE + chunk % CHUNKS * 16);
    }
  }
}

// The tree over programs from LEVEL on, and its result into y.
template <int LEVEL, int N>
__device__ __forceinline__ void finish(void* y, const float (&sum)[N], Shared& s, int half, u32 rank, int row,
                                       int column, int m, int n) {
  if constexpr (LEVEL == LEVELS) {
    store(y, sum, s, half, row, column, m, n);
  } else {
    float kept[N / 2];
    meet<LEVEL>(kept, sum, s, half, rank);
    finish<LEVEL + 1>(y, kept, s, half, rank, row, column + (rank >> LEVEL & 1) * N, m, n);
  }
}

// The copying thread: `steps` steps of a tile.
__device__ __forceinline__ void copies(Shared& s, Ring& ring, const Map& a, const Map& b, int row, int column,
                                       int begin, int steps) {
  for (int i = begin; i < begin + steps; i++) {
    u64* full = &s.full[ring.slot];
    await(&s.empty[ring.slot], ring.turn ^ 1);
    expect(full, (BM + BN) * BK * 2);
    if (ROWS_OF_B) {
      copy(s.b[ring.slot], b, i * BK, column, full);
    } else {
#pragma unroll
      for (int c = 0; c < BN; c += 64) copy(s.b[ring.slot] + c * BK * 2, b, column + c, i * BK, full);
    }
    copy(s.a[ring.slot], a, i * BK, row, full);
    ring.next();
  }
}

// The tiles of this program, a group of rows after the other: first row and column of each.
struct Tiles {
  const int tiles_m, tiles_n;
  int tile = blockIdx.x / SPLIT, row, column;
  __device__ __forceinline__ Tiles(int m, int n) : tiles_m((m + BM - 1) / BM), tiles_n((n + BN - 1) / BN) { find(); }
  __device__ __forceinline__ void find() {
    const int band = GROUP * tiles_n, first = tile / band * GROUP, height = min(tiles_m - first, GROUP);
    if (!more()) return;
    row = (first + tile % band % height) * BM, column = tile % band / height * BN;
  }
  __device__ __forceinline__ bool more() const { return tile < tiles_m * tiles_n; }
  __device__ __forceinline__ void next() { tile += gridDim.x / SPLIT, find(); }
};

// y[m,n]; steps: of BK summed indices, in one of the SPLIT pieces of a tile.
extern "C" __global__ void __launch_bounds__(HALVES == 2 ? 384 : 160, 1)
    gemm_cluster_kernel(const __grid_constant__ Map a, const __grid_constant__ Map b, void* y, int m, int n,
                        int steps) {
  extern __shared__ unsigned char raw[];
  Shared& s = *(Shared*)((u64)raw + 1023 & ~1023ull);
  u32 rank = 0;
  if (SPLIT > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("griddepcontrol.launch_dependents;");
  if (threadIdx.x == CONSUMERS) {
    for (int i = 0; i < STAGES; i++) init(&s.full[i], 1), init(&s.empty[i], HALVES);
    for (int half = 0; half < HALVES; half++)
      for (int level = 0; level < LEVELS; level++) {
        init(&s.arrived[half][level], 1);
        expect(&s.arrived[half][level], 64 * BN * 4 >> level + 1);
      }
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (SPLIT > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  Ring ring;
  if (threadIdx.x >= CONSUMERS) {
    if (HALVES == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == CONSUMERS)
      for (Tiles at(m, n); at.more(); at.next()) copies(s, ring, a, b, at.row, at.column, rank * steps, steps);
    __syncwarp();
    if (SPLIT > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  } else {
    if (HALVES == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int half = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the same for all lanes, and the compiler sees it
    for (Tiles at(m, n); at.more(); at.next()) {
      float x[SUMS][WIDTH];
      chains(x, s, ring, half, steps);
      // All have begun, and their barriers are there.
      if (SPLIT > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
      finish<0>(y, x[0], s, half, rank, at.row + half * 64, at.column, m, n);
    }
  }
}
