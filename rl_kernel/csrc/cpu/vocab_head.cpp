// The fused head: logits of all rows exist for one stretch of the vocabulary at a time.
#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "gemm.h"
#include "pack.h"
#include "threads.h"
#include "vocab.h"

namespace cpu {
namespace {

// A stretch is whole panels (48) and whole tiles (64).
constexpr int64_t kUnit = 192;
constexpr int64_t kStretchLogits = 1 << 20;  // fp32 values: 4 MiB

int64_t stretch_width(int64_t rows) {
  return std::clamp<int64_t>(kStretchLogits / std::max<int64_t>(1, rows) / kUnit, 4, 64) * kUnit;
}

class Logits {
 public:
  Logits(const Head& head, int64_t most)
      : head_(head),
        logits_(new float[head.rows * most]),
        packed_(head.panels ? nullptr : new uint32_t[packed_words(most, head.k)]) {}

  // logits of ids [first, first + width) of this shard, rows `width` apart.
  const float* compute(int64_t first, int64_t width, int threads) {
    const uint32_t* panels = packed_.get();
    if (head_.panels)
      panels = head_.panels + first / kPanel * pairs_of(head_.k) * kPanel;
    else
      pack_rows(packed_.get(), head_.w + first * head_.k, width, head_.k, head_.k, threads);
    multiply({.m = head_.rows,
              .n = width,
              .k = head_.k,
              .a = head_.h,
              .lda = head_.ldh,
              .panels = panels,
              .out32 = logits_.get(),
              .ldo = width},
             threads);
    return logits_.get();
  }

 private:
  const Head& head_;
  std::unique_ptr<float[]> logits_;
  std::unique_ptr<uint32_t[]> packed_;
};

}  // namespace

void linear_vocab_stats(float* m, float* s, float* z, const Head& head, int threads) {
  const int64_t most = stretch_width(head.rows), tiles = tiles_of(head.width);
  Logits logits(head, most);
  const std::vector<float> temperature(head.rows, head.temperature);
  std::fill(z, z + head.rows, -std::numeric_limits<float>::infinity());
  for (int64_t first = 0; first < head.width; first += most) {
    const int64_t width = std::min(most, head.width - first);
    const float* values = logits.compute(first, width, threads);
    vocab_stats(m + first / kBlock, s + first / kBlock, tiles, values, width, temperature.data(), head.rows, width,
                head.vocab_start + first, head.vocab, threads);
    for (int64_t r = 0; r < head.rows; ++r) {
      const int64_t at = head.target[r] - head.vocab_start - first;
      if (at >= 0 && at < width) z[r] = canonical(values[r * width + at] / head.temperature);
    }
  }
}

namespace {

// dlogits[rows][width] of ids [first, first + width) of the shard.
void gradients(bf16* dlogits, const float* logits, const Head& head, const float* dlogp, const float* lse,
               int64_t first, int64_t width, int threads) {
  const int64_t counted = std::clamp<int64_t>(head.vocab - head.vocab_start - first, 0, width);
  parallel_for(head.rows, threads, [&](int64_t r) {
    kernels().logit_gradient(dlogits + r * width, logits + r * width, counted,
                             head.target[r] - head.vocab_start - first, head.temperature, lse[r],
                             dlogp[r] / head.temperature);
    std::fill(dlogits + r * width + counted, dlogits + (r + 1) * width, bf16(0));
  });
}

}  // namespace

void linear_logp_backward(bf16* dh16, float* dh32, float* main_grad, const Head& head, const float* dlogp,
                          const float* lse, int64_t segments, int threads) {
  const int64_t length = head.width / segments, most = std::min(stretch_width(head.rows), length), k = head.k;
  Logits logits(head, most);
  std::unique_ptr<bf16[]> dlogits(new bf16[head.rows * most]);
  std::unique_ptr<uint32_t[]> w_panels(new uint32_t[packed_words(k, most)]),
      h_panels(new uint32_t[packed_words(k, head.rows)]);
  const int64_t size = head.rows * k;
  std::unique_ptr<float[]> sums(new float[size * TreeStack::buffers(segments)]);
  pack_columns(h_panels.get(), head.h, k, head.rows, head.ldh, threads);
  TreeStack tree;
  for (int64_t segment = 0; segment < segments; ++segment) {
    float* sum = tree.leaf(sums.get(), size);
    const int64_t begin = segment * length;
    for (int64_t first = begin; first < begin + length; first += most) {
      const int64_t width = std::min(most, begin + length - first);
      gradients(dlogits.get(), logits.compute(first, width, threads), head, dlogp, lse, first, width, threads);
      if (main_grad)
        multiply({.m = width,
                  .n = k,
                  .k = head.rows,
                  .a = dlogits.get(),
                  .lda = width,
                  .a_is_k_major = true,
                  .panels = h_panels.get(),
                  .out32 = main_grad + first * k,
                  .ldo = k,
                  .resume = true},
                 threads);
      pack_columns(w_panels.get(), head.w + first * k, k, width, k, threads);
      multiply({.m = head.rows,
                .n = k,
                .k = width,
                .a = dlogits.get(),
                .lda = width,
                .panels = w_panels.get(),
                .out32 = sum,
                .ldo = k,
                .resume = first > begin},
               threads);
    }
    tree.push(sums.get(), size);
  }
  tree.finish(sums.get(), size);
  parallel_for(head.rows, threads, [&](int64_t r) {
    if (dh16)
      kernels().narrow(dh16 + r * k, sums.get() + r * k, k);
    else
      kernels().canonical(dh32 + r * k, sums.get() + r * k, k);
  });
}

}  // namespace cpu
