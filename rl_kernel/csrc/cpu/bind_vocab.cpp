#include "bindings.h"
#include "vocab.h"

namespace cpu {

namespace {

void bind_statistics(nb::module_& m) {
  m.def(
      "vocab_stats",
      [](Address top, Address sum, Address logits, Address temperature, int64_t rows, int64_t width,
         int64_t vocab_start, int64_t vocab, int threads) {
        vocab_stats(at<float>(top), at<float>(sum), tiles_of(width), at<const float>(logits), width,
                    at<const float>(temperature), rows, width, vocab_start, vocab, threads);
      },
      Release());
  m.def(
      "merge_vocab_stats",
      [](Address lse, Address top, Address sum, int64_t rows, int64_t tiles, int threads) {
        merge_vocab_stats(at<float>(lse), at<const float>(top), at<const float>(sum), rows, tiles, threads);
      },
      Release());
  m.def(
      "logp_from_logits",
      [](Address logp, Address lse, Address logits, int64_t width, Address ids, int64_t ids_per_row,
         Address temperature, int64_t rows, int64_t vocab, int threads) {
        require_range(at<const int64_t>(ids), rows * ids_per_row, std::min(vocab, width), "ids");
        logp_from_logits(at<float>(logp), at<float>(lse), at<const float>(logits), width, at<const int64_t>(ids),
                         ids_per_row, at<const float>(temperature), rows, vocab, threads);
      },
      Release());
}

void bind_head(nb::module_& m) {
  m.def(
      "linear_vocab_stats",
      [](Address top, Address sum, Address z, Address h, int64_t ldh, Address w, Address panels, Address target,
         float temperature, int64_t rows, int64_t k, int64_t width, int64_t vocab_start, int64_t vocab, int threads) {
        require_range(at<const int64_t>(target), rows, vocab, "target");
        linear_vocab_stats(at<float>(top), at<float>(sum), at<float>(z),
                           {at<const bf16>(h), ldh, rows, k, at<const bf16>(w), at<const uint32_t>(panels),
                            at<const int64_t>(target), temperature, width, vocab_start, vocab},
                           threads);
      },
      Release());
  m.def(
      "linear_logp_backward",
      [](Address dh16, Address dh32, Address main_grad, Address dlogp, Address h, int64_t ldh, Address w,
         Address target, Address lse, float temperature, int64_t rows, int64_t k, int64_t width, int64_t vocab_start,
         int64_t vocab, int64_t segments, int threads) {
        require_range(at<const int64_t>(target), rows, vocab, "target");
        linear_logp_backward(at<bf16>(dh16), at<float>(dh32), at<float>(main_grad),
                             {at<const bf16>(h), ldh, rows, k, at<const bf16>(w), nullptr, at<const int64_t>(target),
                              temperature, width, vocab_start, vocab},
                             at<const float>(dlogp), at<const float>(lse), segments, threads);
      },
      Release());
}

}  // namespace

void bind_vocab(nb::module_& m) {
  bind_statistics(m);
  bind_head(m);
}

}  // namespace cpu
