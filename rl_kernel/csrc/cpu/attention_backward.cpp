#include <algorithm>
#include <memory>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "pack.h"
#include "threads.h"

namespace cpu {
namespace {

// A matrix of one head, [n][dim], in the forms that the products want it in.
struct Matrix {
  const bf16* data;
  int64_t token;
  const bf16* row(int64_t i) const { return data + i * token; }
};

// One sequence and one kv head: its query heads one after another. Scores exist for one 64 x 64 tile at a time.
class Head {
 public:
  Head(const AttentionBackward& args, int64_t sequence, int64_t kv_head)
      : args_(args),
        t0_(args.cu[sequence]),
        n_(args.cu[sequence + 1] - t0_),
        kv_head_(kv_head),
        group_(args.heads / args.kv_heads),
        dim_(args.dim),
        wide_((dim_ + kLanes - 1) / kLanes * kLanes),
        blocks_((n_ + kBlock - 1) / kBlock),
        size_(n_ * wide_) {}

  void run() {
    const int64_t buffers = TreeStack::buffers(group_);
    // Sized by the sequence, so not kept by the thread: q, dout (fp32), their packed rows, dq, and the two trees.
    std::unique_ptr<float[]> memory(new float[size_ * (3 + 2 * buffers) + 2 * blocks_ * kBlock / 2 * wide_ + 2 * n_]);
    q_ = memory.get(), dout_ = q_ + size_, dq_ = dout_ + size_;
    float *dk = dq_ + size_, *dv = dk + size_ * buffers;
    q_words_ = reinterpret_cast<uint32_t*>(dv + size_ * buffers);
    dout_words_ = q_words_ + blocks_ * kBlock / 2 * wide_;
    r_ = reinterpret_cast<float*>(dout_words_ + blocks_ * kBlock / 2 * wide_), delta_ = r_ + n_;
    allocate_tile();
    TreeStack dk_tree, dv_tree;
    for (int64_t h = kv_head_ * group_; h < (kv_head_ + 1) * group_; ++h) {
      dk_ = dk_tree.leaf(dk, size_), dv_ = dv_tree.leaf(dv, size_);
      query_head(h);
      dk_tree.push(dk, size_), dv_tree.push(dv, size_);
    }
    dk_tree.finish(dk, size_), dv_tree.finish(dv, size_);
    store(args_.dk, dk, args_.kv_heads, kv_head_, args_.scale);
    store(args_.dv, dv, args_.kv_heads, kv_head_, 1.0f);
  }

 private:
  Matrix of(const bf16* x, int64_t token, int64_t head) const { return {x + t0_ * token + head * dim_, token}; }

  void allocate_tile() {
    s_ = scratch_of<float>(0, kBlock * kBlock);
    dp_ = scratch_of<float>(1, kBlock * kBlock);
    k_rows_ = scratch_of<uint32_t>(2, pairs_of(dim_) * kBlock);
    v_rows_ = scratch_of<uint32_t>(3, pairs_of(dim_) * kBlock);
    k_columns_ = scratch_of<uint32_t>(4, kBlock / 2 * wide_);
  }

  void query_head(int64_t h) {
    load(h);
    const Matrix k = of(args_.k, args_.k_token, kv_head_), v = of(args_.v, args_.v_token, kv_head_);
    for (int64_t j = 0; j < blocks_; ++j) {
      const int64_t k0 = j * kBlock, keys = std::min<int64_t>(kBlock, n_ - k0);
      const bf16 *k_at[kBlock], *v_at[kBlock];
      for (int64_t i = 0; i < keys; ++i) k_at[i] = k.row(k0 + i), v_at[i] = v.row(k0 + i);
      kernels().pack_rows(k_rows_, kBlock, k_at, keys, kBlock, dim_);
      kernels().pack_rows(v_rows_, kBlock, v_at, keys, kBlock, dim_);
      kernels().pack_columns(k_columns_, wide_, k_at, dim_, wide_, keys);
      nonfinite_ =
          nonfinite_head_ || std::any_of(k_at, k_at + keys, [&](const bf16* x) { return any_nonfinite(x, dim_); });
      for (int64_t i = j; i < blocks_; ++i) tile(h, i, j, keys);
    }
    store(args_.dq, dq_, args_.heads, h, args_.scale);
  }

  void load(int64_t h) {
    const Matrix q = of(args_.q, args_.q_token, h), dout = of(args_.dout, args_.dout_token, h);
    const Matrix out = of(args_.out, args_.out_token, h);
    nonfinite_head_ = false;
    for (int64_t i = 0; i < n_; ++i) {
      kernels().widen(q_ + i * dim_, q.row(i), dim_);
      kernels().widen(dout_ + i * dim_, dout.row(i), dim_);
      delta_[i] = kernels().lane_dot(dout.row(i), out.row(i), dim_);
      r_[i] = 1.0f / args_.l[(t0_ + i) * args_.heads + h];
      nonfinite_head_ |= any_nonfinite(q.row(i), dim_) || any_nonfinite(dout.row(i), dim_);
    }
    for (int64_t b = 0; b < blocks_; ++b) {
      const bf16 *q_at[kBlock], *dout_at[kBlock];
      const int64_t i0 = b * kBlock, rows = std::min<int64_t>(kBlock, n_ - i0);
      for (int64_t i = 0; i < rows; ++i) q_at[i] = q.row(i0 + i), dout_at[i] = dout.row(i0 + i);
      kernels().pack_columns(q_words_ + b * kBlock / 2 * wide_, wide_, q_at, dim_, wide_, rows);
      kernels().pack_columns(dout_words_ + b * kBlock / 2 * wide_, wide_, dout_at, dim_, wide_, rows);
    }
  }

  // Queries of block i against keys of block j <= i.
  void tile(int64_t h, int64_t i, int64_t j, int64_t keys) {
    const int64_t i0 = i * kBlock, rows = std::min<int64_t>(kBlock, n_ - i0);
    kernels().tile(rows, kBlock / kLanes, {0, dim_, q_ + i0 * dim_, dim_, 1, k_rows_, kBlock, s_, kBlock, false});
    kernels().tile(rows, kBlock / kLanes, {0, dim_, dout_ + i0 * dim_, dim_, 1, v_rows_, kBlock, dp_, kBlock, false});
    for (int64_t r = 0; r < rows; ++r)
      kernels().attention_gradient(s_ + r * kBlock, dp_ + r * kBlock, int(i == j ? r + 1 : keys), args_.score_scale,
                                   args_.m[(t0_ + i0 + r) * args_.heads + h], r_[i0 + r], delta_[i0 + r]);
    const uint32_t *q = q_words_ + i * kBlock / 2 * wide_, *dout = dout_words_ + i * kBlock / 2 * wide_;
    float *dq = dq_ + i0 * wide_, *dk = dk_ + j * kBlock * wide_, *dv = dv_ + j * kBlock * wide_;
    const int vectors = int(wide_ / kLanes);
    if (i == j && nonfinite_) return masked_products(rows, keys, q, dout, dq, dk, dv);
    kernels().tile(rows, vectors, {0, keys, dp_, kBlock, 1, k_columns_, wide_, dq, wide_, j > 0});
    kernels().tile(keys, vectors, {0, rows, s_, 1, kBlock, dout, wide_, dv, wide_, i > j});
    kernels().tile(keys, vectors, {0, rows, dp_, 1, kBlock, q, wide_, dk, wide_, i > j});
  }

  // The diagonal tile where a masked +0 would meet an infinity or a NaN: each row keeps to its own range.
  void masked_products(int64_t rows, int64_t keys, const uint32_t* q, const uint32_t* dout, float* dq, float* dk,
                       float* dv) {
    const int vectors = int(wide_ / kLanes);
    const bool resume = dq != dq_;
    for (int64_t r = 0; r < rows; ++r)
      kernels().tile(1, vectors,
                     {0, r + 1, dp_ + r * kBlock, kBlock, 1, k_columns_, wide_, dq + r * wide_, wide_, resume});
    for (int64_t c = 0; c < keys; ++c) {
      const int64_t at = c * kBlock + c;
      kernels().tile(1, vectors, {c, rows, s_ + at, 1, kBlock, dout, wide_, dv + c * wide_, wide_, false});
      kernels().tile(1, vectors, {c, rows, dp_ + at, 1, kBlock, q, wide_, dk + c * wide_, wide_, false});
    }
  }

  void store(bf16* out, const float* sums, int64_t heads, int64_t head, float scale) const {
    for (int64_t i = 0; i < n_; ++i)
      kernels().add_zero_scale(out + ((t0_ + i) * heads + head) * dim_, sums + i * wide_, scale, dim_);
  }

  const AttentionBackward& args_;
  const int64_t t0_, n_, kv_head_, group_, dim_, wide_, blocks_, size_;
  float *q_, *dout_, *dq_, *dk_, *dv_, *r_, *delta_, *s_, *dp_;
  uint32_t *q_words_, *dout_words_, *k_rows_, *v_rows_, *k_columns_;
  bool nonfinite_head_ = false, nonfinite_ = false;
};

}  // namespace

void attention_backward(const AttentionBackward& args, int threads) {
  parallel_for(args.sequences * args.kv_heads, threads,
               [&](int64_t i) { Head(args, i / args.kv_heads, i % args.kv_heads).run(); });
}

}  // namespace cpu
