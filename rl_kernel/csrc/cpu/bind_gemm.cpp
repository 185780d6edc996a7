#include "bindings.h"
#include "gemm.h"
#include "pack.h"

namespace cpu {

void bind_gemm(nb::module_& m) {
  m.def("packed_words", &packed_words);
  m.def(
      "pack",
      [](Address out, Address w, int64_t n, int64_t k, int64_t ldw, int threads) {
        pack_rows(at<uint32_t>(out), at<const bf16>(w), n, k, ldw, threads);
      },
      Release());
  m.def(
      "pack_columns",
      [](Address out, Address w, int64_t n, int64_t k, int64_t ldw, int threads) {
        pack_columns(at<uint32_t>(out), at<const bf16>(w), n, k, ldw, threads);
      },
      Release());
  m.def(
      "unpack",
      [](Address w, Address panels, int64_t n, int64_t k, int threads) {
        unpack_rows(at<bf16>(w), at<const uint32_t>(panels), n, k, threads);
      },
      Release());
  m.def(
      "multiply",
      [](Address out32, Address out16, Address a, int64_t lda, bool a_is_k_major, Address panels, int64_t rows,
         int64_t n, int64_t k, int64_t segments, bool resume, int threads) {
        multiply({.m = rows,
                  .n = n,
                  .k = k,
                  .segments = segments,
                  .a = at<const bf16>(a),
                  .lda = lda,
                  .a_is_k_major = a_is_k_major,
                  .panels = at<const uint32_t>(panels),
                  .out32 = at<float>(out32),
                  .out16 = at<bf16>(out16),
                  .ldo = n,
                  .resume = resume},
                 threads);
      },
      Release());
}

}  // namespace cpu
