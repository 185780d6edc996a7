// From logits to log-probabilities: statistics of fixed vocabulary tiles, merged in ascending order.
#include <limits>

#include "arrays.h"

namespace ref {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// What to subtract in an exponent: a sampler may have set a whole tile to -inf, and -inf - -inf is NaN.
float shift(float top) { return top == kNone ? 0.0f : top; }

// logits[T, Vshard] hold the ids vocab_start ..; ids >= vocab never count. m, s: [T, tiles of this shard].
void vocab_stats(Out<float, 2> m, Out<float, 2> s, In<float, 2> logits, In<float, 1> temperature, int64_t vocab_start,
                 int64_t vocab, int64_t tile, const std::string& exp2_name) {
  Exp2 model = exp2_model(exp2_name);
  int64_t rows = logits.shape(0), width = logits.shape(1), tiles = m.shape(1);
  require(vocab_start % tile == 0, "vocab_stats: a shard must start on a tile boundary");
  require(tiles == (width + tile - 1) / tile, "vocab_stats: m and s must have one column a tile");
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t i = 0; i < tiles; ++i) {
      int64_t present = std::min({tile, width - i * tile, vocab - vocab_start - i * tile});
      std::vector<float> z, terms(tile, 0.0f);
      for (int64_t j = 0; j < present; ++j) z.push_back(logits.data()[t * width + i * tile + j] / temperature.data()[t]);
      float top = kNone;
      for (float v : z) top = max_num(top, v);
      for (size_t j = 0; j < z.size(); ++j) terms[j] = exp2(model, (z[j] - shift(top)) * kLog2e);
      m.data()[t * tiles + i] = canonical(top);
      s.data()[t * tiles + i] = canonical(tree_sum(terms));
    }
}

void merge_vocab_stats(Out<float, 1> lse, In<float, 2> m, In<float, 2> s, const std::string& exp2_name) {
  Exp2 model = exp2_model(exp2_name);
  int64_t rows = m.shape(0), tiles = m.shape(1);
  require(tiles > 0, "merge_vocab_stats: no tile to merge");
  for (int64_t t = 0; t < rows; ++t) {
    float top = m.data()[t * tiles], sum = s.data()[t * tiles];
    for (int64_t i = 1; i < tiles; ++i) {
      float m2 = m.data()[t * tiles + i], s2 = s.data()[t * tiles + i], next = max_num(top, m2);
      float a = exp2(model, (top - shift(next)) * kLog2e), b = exp2(model, (m2 - shift(next)) * kLog2e);
      sum = sum * a + s2 * b;
      top = next;
    }
    lse.data()[t] = canonical(top + ln(sum));
  }
}

// dlogits[T, Vshard] <- bf16((onehot - p) * dlogp / temperature), +0 at ids that never count.
void logit_gradient(Out<bf16, 2> dlogits, In<float, 2> logits, In<int64_t, 1> target, In<float, 1> lse,
                    In<float, 1> dlogp, In<float, 1> temperature, int64_t vocab_start, int64_t vocab,
                    const std::string& exp2_name) {
  Exp2 model = exp2_model(exp2_name);
  int64_t rows = logits.shape(0), width = logits.shape(1);
  for (int64_t t = 0; t < rows; ++t) {
    float c = dlogp.data()[t] / temperature.data()[t];
    for (int64_t j = 0; j < width; ++j) {
      int64_t id = vocab_start + j;
      float z = logits.data()[t * width + j] / temperature.data()[t];
      float p = exp2(model, (z - lse.data()[t]) * kLog2e);
      float d = ((id == target.data()[t] ? 1.0f : 0.0f) - p) * c;
      dlogits.data()[t * width + j] = id < vocab ? narrow(d) : 0;
    }
  }
}

}  // namespace

void bind_logp(nb::module_& module) {
  module.def("vocab_stats", &vocab_stats);
  module.def("merge_vocab_stats", &merge_vocab_stats);
  module.def("logit_gradient", &logit_gradient);
}

}  // namespace ref
