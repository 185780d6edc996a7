#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>

#include "bindings.h"

using namespace cpu;

NB_MODULE(_cpu, m) {
  m.doc() = "Inner loops of the CPU backend. Addresses and sizes in, nothing out; see rl_kernel/ops.";
  static nb::object shape_error = nb::module_::import_("rl_kernel.errors").attr("ShapeError");
  shape_error.inc_ref();  // the interpreter may be gone when this library's statics are destroyed
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const BadArgument& e) {
      PyErr_SetString(shape_error.ptr(), e.what());
    }
  });
  bind_gemm(m);
  bind_rows(m);
  bind_attention(m);
  bind_vocab(m);
  m.def("isa", [] { return std::string(kernels().name); }, "The instruction set in use: avx512, avx2 or plain.");
  m.def(
      "force_isa", [](std::optional<std::string> name) { force_isa(name ? name->c_str() : nullptr); },
      nb::arg("name").none(), "Use this instruction set from now on; None chooses the widest. Changes no bit.");
}
