// Causal attention with GQA over sequences of any length; the queries are the last positions of their sequence.
#include <limits>

#include "arrays.h"

namespace ref {
namespace {

constexpr int64_t kBlock = 64;

struct Partial {
  float m = -std::numeric_limits<float>::infinity();
  float l = 0.0f;
  std::vector<float> acc;
};

// One query against keys [first, last) of one partial; `keys` is K transposed by blocks, see below.
struct Head {
  Mma mma;
  Exp2 model;
  int64_t dim;
  float scale;
  std::vector<float> k_t;  // [block][dim][64], absent keys 0
  std::vector<float> v;    // [block][64][dim + 1], absent keys 0; the last column is the ones of l

  void block(Partial& part, const float* q, int64_t index, int64_t visible) const {
    std::vector<float> s(kBlock, 0.0f);
    accumulate(mma, s.data(), kBlock, q, dim, k_t.data() + index * dim * kBlock, kBlock, 1, kBlock, dim);
    float m = part.m;
    for (int64_t j = 0; j < visible; ++j) m = max_num(m, s[j] = s[j] * scale);
    float alpha = exp2(model, part.m - m);
    std::vector<float> p(kBlock, 0.0f), sums(dim + 1);
    for (int64_t j = 0; j < visible; ++j) p[j] = round_bf16(exp2(model, s[j] - m));
    for (int64_t d = 0; d < dim; ++d) sums[d] = part.acc[d] * alpha;
    sums[dim] = part.l * alpha;
    // A masked key is worth p = +0 and v = +0, whatever the cache holds there.
    std::vector<float> seen(v.begin() + index * kBlock * (dim + 1), v.begin() + (index + 1) * kBlock * (dim + 1));
    std::fill(seen.begin() + visible * (dim + 1), seen.end(), 0.0f);
    accumulate(mma, sums.data(), dim + 1, p.data(), kBlock, seen.data(), dim + 1, 1, dim + 1, kBlock);
    part.m = m;
    part.l = sums[dim];
    part.acc.assign(sums.begin(), sums.begin() + dim);
  }

  void merge(Partial& total, const Partial& next) const {
    float m = max_num(total.m, next.m);
    float a = exp2(model, total.m - m), b = exp2(model, next.m - m);
    total.l = total.l * a + next.l * b;
    for (int64_t d = 0; d < dim; ++d) total.acc[d] = total.acc[d] * a + next.acc[d] * b;
    total.m = m;
  }

  Partial query(const float* q, int64_t keys, int64_t kv_partial) const {
    Partial total;
    for (int64_t first = 0; first < keys; first += kv_partial) {
      Partial part;
      part.acc.assign(dim, 0.0f);
      for (int64_t k0 = first; k0 < std::min(keys, first + kv_partial); k0 += kBlock)
        block(part, q, k0 / kBlock, std::min(kBlock, keys - k0));
      if (first == 0)
        total = std::move(part);
      else
        merge(total, part);
    }
    return total;
  }
};

Head load_head(Mma mma, Exp2 model, const bf16* k, const bf16* v, int64_t keys, int64_t heads, int64_t dim,
               float scale) {
  int64_t blocks = (keys + kBlock - 1) / kBlock;
  Head head{mma, model, dim, scale, std::vector<float>(blocks * dim * kBlock), std::vector<float>(blocks * kBlock * (dim + 1))};
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t d = 0; d < dim; ++d) {
      head.k_t[((j / kBlock) * dim + d) * kBlock + j % kBlock] = widen(k[j * heads * dim + d]);
      head.v[j * (dim + 1) + d] = widen(v[j * heads * dim + d]);
    }
    head.v[j * (dim + 1) + dim] = 1.0f;
  }
  return head;
}

// out, q: [T, H, D]; k, v: [T', G, D]; m, l: [T, H]; cu_q, cu_k: [R + 1] offsets of the R sequences.
void attention(Out<bf16, 3> out, Out<float, 2> m, Out<float, 2> l, In<bf16, 3> q, In<bf16, 3> k, In<bf16, 3> v,
               In<int32_t, 1> cu_q, In<int32_t, 1> cu_k, float scale, int64_t kv_partial, const std::string& mma,
               const std::string& exp2_name) {
  int64_t heads = q.shape(1), kv_heads = k.shape(1), dim = q.shape(2);
  require(heads % kv_heads == 0, "attention: query heads must be a multiple of kv heads");
  require(kv_partial % kBlock == 0, "attention: kv_partial must be a multiple of 64");
  for (size_t r = 0; r + 1 < cu_q.shape(0); ++r) {
    int64_t q0 = cu_q.data()[r], queries = cu_q.data()[r + 1] - q0;
    int64_t k0 = cu_k.data()[r], keys = cu_k.data()[r + 1] - k0;
    require(queries <= keys, "attention: a sequence has more queries than keys");
    for (int64_t h = 0; h < heads; ++h) {
      int64_t offset = (k0 * kv_heads + h / (heads / kv_heads)) * dim;
      Head head = load_head(mma_model(mma), exp2_model(exp2_name), k.data() + offset, v.data() + offset, keys,
                            kv_heads, dim, scale);
      for (int64_t i = 0; i < queries; ++i) {
        int64_t row = (q0 + i) * heads + h;
        std::vector<float> wide = widened(q.data() + row * dim, dim);
        Partial total = head.query(wide.data(), keys - queries + i + 1, kv_partial);
        for (int64_t d = 0; d < dim; ++d) out.data()[row * dim + d] = narrow((total.acc[d] + 0.0f) / total.l);
        m.data()[row] = canonical(total.m);
        l.data()[row] = canonical(total.l);
      }
    }
  }
}

}  // namespace

void bind_attention(nb::module_& module) { module.def("attention", &attention); }

}  // namespace ref
