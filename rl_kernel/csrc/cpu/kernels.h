// The table of inner loops that every instruction set fills in. Drivers (gemm.cpp, attention.cpp, …) block, pack and
// hand out work; these loops do the arithmetic. Every set computes the same bits; only the speed differs.
#pragma once
#include <cstdint>

namespace cpu {

using bf16 = uint16_t;  // bit pattern

// Lanes of one vector as the kernels see it, whatever the hardware's register width.
constexpr int kLanes = 16;
// Columns of one packed weight panel: three vectors, so that 8 rows x 3 vectors fill the AVX-512 registers.
constexpr int kPanel = 48;
// Keys of an attention block and ids of a vocabulary tile; both are numbers of the contract.
constexpr int kBlock = 64;

struct RopeRow {
  const bf16* x;
  bf16* out;
  const float* cos;
  const float* sin;
  int64_t heads, dim;
};

// The operands of one block of a product. b holds two k in each 32-bit word, low half the even one; its row k/2 starts
// at b + (k/2)*ldb. The chain starts from c if `resume`, from +0 otherwise.
struct Tile {
  int64_t k0, k1;
  const float* a;  // a(r, k) at a[r*row + (k-k0)*step]
  int64_t row, step;
  const uint32_t* b;
  int64_t ldb;
  float* c;
  int64_t ldc;
  bool resume;
  const uint32_t* next = nullptr;  // where the words of the next tile begin, if the caller knows
};

struct Kernels {
  const char* name;

  // c[r][0..16*vectors) <- fma chain over k in [k0, k1), ascending, of a(r, k)*b(k, column), for `rows` rows.
  void (*tile)(int64_t rows, int vectors, const Tile& tile);
  // The same for a few rows and all of a block's keys, with b(k, column) = b_rows[k][column] where it lies: packing
  // would cost more than it saves. The chain runs over k in [0, depth).
  void (*tile_unpacked)(int64_t rows, int vectors, int64_t depth, const float* a, int64_t row,
                        const bf16* const* b_rows, float* c, int64_t ldc, bool resume);
  // See pack.h: a block of `width` columns, n of them present, whose rows of words lie ld apart.
  void (*pack_rows)(uint32_t* out, int64_t ld, const bf16* const* rows, int64_t n, int64_t width, int64_t k);
  void (*pack_columns)(uint32_t* out, int64_t ld, const bf16* const* rows, int64_t n, int64_t width, int64_t k);

  void (*widen)(float* out, const bf16* x, int64_t n);
  void (*narrow)(bf16* out, const float* x, int64_t n);      // rounds to nearest even, NaN -> 0x7fc0
  void (*canonical)(float* out, const float* x, int64_t n);  // copies, NaN -> 0x7fc00000
  void (*add)(float* out, const float* a, const float* b, int64_t n);
  void (*add_bf16)(bf16* out, const bf16* a, const bf16* b, int64_t n);
  void (*accumulate_bf16)(float* sum, const bf16* x, int64_t n);              // sum <- canonical(sum + x)
  void (*add_zero_scale)(bf16* out, const float* x, float scale, int64_t n);  // bf16((x + 0) * scale)

  // y = norm(x)*w; with a residual, x+residual is rounded into `sum` first and normalised instead of x.
  void (*rms_norm)(bf16* y, const bf16* x, const bf16* residual, bf16* sum, const bf16* w, int64_t n, float eps);
  // dx of one row; returns 1/rms.
  float (*rms_norm_dx)(bf16* dx, const bf16* dy, const bf16* x, const bf16* w, int64_t n, float eps);
  void (*rms_norm_dw)(float* dw, const bf16* dy, const bf16* x, float r, int64_t n);

  void (*rope)(const RopeRow& row, float sign);
  void (*swiglu)(bf16* y, const bf16* gate, const bf16* up, int64_t n);
  void (*swiglu_backward)(bf16* dgate, bf16* dup, const bf16* dy, const bf16* gate, const bf16* up, int64_t n);

  // One query row against one key block: s[64] raw products become bf16 probabilities (as fp32), +0 from `visible` on.
  // Updates *m and returns alpha.
  float (*softmax_block)(float* s, int visible, float scale, float* m);
  // l[r] <- chain from l[r]*alpha[r] over j < 64 of p[r*64 + j].
  void (*row_sums)(float* l, const float* alpha, const float* p, int64_t rows);
  void (*scale)(float* x, float by, int64_t n);
  // acc1*a + acc2*b, not fused.
  void (*merge)(float* acc1, const float* acc2, float a, float b, int64_t n);
  void (*divide)(bf16* out, const float* acc, float l, int64_t n);  // bf16((acc + 0) / l)
  float (*exp2)(float x);
  float (*ln)(float x);
  float (*lane_dot)(const bf16* a, const bf16* b, int64_t n);
  // One row of s and dp (64 keys): p and ds as bf16-rounded fp32; +0 from `visible` on.
  void (*attention_gradient)(float* s, float* dp, int visible, float scale, float m, float r, float delta);

  // m[i], s[i] of tile i of `tiles`; `present` ids count, from the first tile's first.
  void (*vocab_tiles)(float* m, float* s, const float* logits, int64_t tiles, int64_t present, float temperature);
  // Merges `count` tiles in order into the running maximum and sum.
  void (*merge_tiles)(const float* m, const float* s, int64_t count, float* top, float* sum);
  void (*add_zero)(bf16* out, const bf16* x, int64_t n);  // bf16(x + 0)
  // d[j] = bf16((onehot - p) * c) for n ids that all count; `target` is an index into them or out of range.
  void (*logit_gradient)(bf16* d, const float* logits, int64_t n, int64_t target, float temperature, float lse,
                         float c);
};

extern const Kernels kPlain;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

// The set in use: the widest one that this CPU has, or the one forced by name.
const Kernels& kernels();
void force_isa(const char* name);  // throws std::invalid_argument; nullptr chooses again

}  // namespace cpu
