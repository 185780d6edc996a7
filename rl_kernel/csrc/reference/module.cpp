#include "arrays.h"

NB_MODULE(_reference, module) {
  module.doc() = "The executable contract. Outputs come first and are written in place; bf16 is uint16 bit patterns.";
  ref::bind_gemm(module);
  ref::bind_norm(module);
  ref::bind_elementwise(module);
  ref::bind_attention(module);
  ref::bind_attention_backward(module);
  ref::bind_logp(module);
  ref::bind_mma(module);
  ref::bind_exp2(module);
  module.def("force_plain_mma", [](bool on) { ref::force_plain_mma = on; },
             "Use the plain loops instead of the vector ones; the bits are the same, and a test proves it.");
}
