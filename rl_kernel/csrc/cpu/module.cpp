// Bindings of the CPU backend. Tensors arrive as addresses: rl_kernel/ops/<op>/cpu.py has checked shape, dtype and
// layout, and a capsule for each tensor would cost more than a decode step's small ops. What only the values can
// show (ids, positions, offsets) is checked here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "attention.h"
#include "gemm.h"
#include "pack.h"
#include "rows.h"
#include "vocab.h"

namespace nb = nanobind;
using namespace cpu;

namespace {

using Address = uintptr_t;
using Release = nb::call_guard<nb::gil_scoped_release>;

template <class T>
T* at(Address a) {
  return reinterpret_cast<T*>(a);
}

struct BadArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void require_range(const int64_t* values, int64_t n, int64_t end, const char* what) {
  for (int64_t i = 0; i < n; ++i)
    if (values[i] < 0 || values[i] >= end)
      throw BadArgument(std::string(what) + "[" + std::to_string(i) + "] is " + std::to_string(values[i]) +
                        "; it must lie in [0, " + std::to_string(end) + ")");
}

void require_offsets(const int32_t* cu, int64_t sequences, int64_t total, const char* what) {
  if (cu[0] != 0 || cu[sequences] != total)
    throw BadArgument(std::string(what) + " must run from 0 to " + std::to_string(total) + "; it runs from " +
                      std::to_string(cu[0]) + " to " + std::to_string(cu[sequences]));
  for (int64_t r = 0; r < sequences; ++r)
    if (cu[r + 1] < cu[r]) throw BadArgument(std::string(what) + " decreases at sequence " + std::to_string(r));
}

void require_lengths(int64_t r, int64_t queries, int64_t keys) {
  if (queries > keys)
    throw BadArgument("sequence " + std::to_string(r) + " has " + std::to_string(queries) + " queries but only " +
                      std::to_string(keys) + " keys");
}

void bind_gemm(nb::module_& m) {
  m.def("packed_words", &packed_words);
  m.def("pack", [](Address out, Address w, int64_t n, int64_t k, int64_t ldw, int threads) {
    pack_rows(at<uint32_t>(out), at<const bf16>(w), n, k, ldw, threads);
  }, Release());
  m.def("pack_columns", [](Address out, Address w, int64_t n, int64_t k, int64_t ldw, int threads) {
    pack_columns(at<uint32_t>(out), at<const bf16>(w), n, k, ldw, threads);
  }, Release());
  m.def("unpack", [](Address w, Address panels, int64_t n, int64_t k, int threads) {
    unpack_rows(at<bf16>(w), at<const uint32_t>(panels), n, k, threads);
  }, Release());
  m.def("multiply", [](Address out32, Address out16, Address a, int64_t lda, bool a_is_k_major, Address panels, int64_t rows,
                       int64_t n, int64_t k, int64_t segments, bool resume, int threads) {
    multiply({.m = rows, .n = n, .k = k, .segments = segments, .a = at<const bf16>(a), .lda = lda,
              .a_is_k_major = a_is_k_major, .panels = at<const uint32_t>(panels), .out32 = at<float>(out32),
              .out16 = at<bf16>(out16), .ldo = n, .resume = resume},
             threads);
  }, Release());
}

void bind_rows(nb::module_& m) {
  m.def("rms_norm", [](Address y, Address x, int64_t inner, int64_t stride, Address residual, Address sum, Address w,
                       int64_t rows, int64_t n, float eps, int threads) {
    rms_norm(at<bf16>(y), {at<const bf16>(x), inner, stride}, at<const bf16>(residual), at<bf16>(sum), at<const bf16>(w),
             rows, n, eps, threads);
  }, Release());
  m.def("rms_norm_backward", [](Address dx, Address dw, int64_t groups, Address dy, int64_t dy_inner, int64_t dy_stride,
                                Address x, int64_t x_inner, int64_t x_stride, Address w, int64_t rows, int64_t n, float eps,
                                int threads) {
    rms_norm_backward(at<bf16>(dx), at<float>(dw), groups, {at<const bf16>(dy), dy_inner, dy_stride},
                      {at<const bf16>(x), x_inner, x_stride}, at<const bf16>(w), rows, n, eps, threads);
  }, Release());
  m.def("rope", [](Address out, Address x, int64_t token, Address cos, Address sin, Address positions, int64_t table_rows,
                   int64_t tokens, int64_t heads, int64_t dim, float sign, int threads) {
    require_range(at<const int64_t>(positions), tokens, table_rows, "positions");
    rope(at<bf16>(out), at<const bf16>(x), token, at<const float>(cos), at<const float>(sin), at<const int64_t>(positions),
         tokens, heads, dim, sign, threads);
  }, Release());
  m.def("swiglu", [](Address y, Address x, int64_t rows, int64_t n, int threads) {
    swiglu(at<bf16>(y), at<const bf16>(x), rows, n, threads);
  }, Release());
  m.def("swiglu_backward", [](Address dx, Address dy, Address x, int64_t rows, int64_t n, int threads) {
    swiglu_backward(at<bf16>(dx), at<const bf16>(dy), at<const bf16>(x), rows, n, threads);
  }, Release());
  m.def("residual_add", [](Address y, Address a, Address b, int64_t n, int threads) {
    residual_add(at<bf16>(y), at<const bf16>(a), at<const bf16>(b), n, threads);
  }, Release());
  m.def("embedding", [](Address y, Address ids, Address w, int64_t vocab, int64_t tokens, int64_t k, int threads) {
    require_range(at<const int64_t>(ids), tokens, vocab, "ids");
    embedding(at<bf16>(y), at<const int64_t>(ids), at<const bf16>(w), tokens, k, threads);
  }, Release());
  m.def("embedding_dw", [](Address main_grad, Address dy, Address ids, int64_t vocab, int64_t tokens, int64_t k, int threads) {
    require_range(at<const int64_t>(ids), tokens, vocab, "ids");
    embedding_dw(at<float>(main_grad), at<const bf16>(dy), at<const int64_t>(ids), tokens, k, threads);
  }, Release());
  m.def("tree_sum", [](Address out32, Address out16, Address parts, int64_t ranks, int64_t n, int threads) {
    tree_sum(at<float>(out32), at<bf16>(out16), at<const float>(parts), ranks, n, threads);
  }, Release());
}

void bind_attention(nb::module_& m) {
  m.def("attention", [](Address out, Address row_max, Address row_sum, Address q, int64_t q_token, Address k, int64_t k_token,
                        Address v, int64_t v_token, Address cu_q, Address cu_k, int64_t sequences, int64_t tokens,
                        int64_t keys, int64_t heads, int64_t kv_heads, int64_t dim, float scale, int64_t kv_partial,
                        int threads) {
    const int32_t *starts = at<const int32_t>(cu_q), *key_starts = at<const int32_t>(cu_k);
    require_offsets(starts, sequences, tokens, "cu_q");
    require_offsets(key_starts, sequences, keys, "cu_k");
    for (int64_t r = 0; r < sequences; ++r) require_lengths(r, starts[r + 1] - starts[r], key_starts[r + 1] - key_starts[r]);
    attention({.heads = heads, .kv_heads = kv_heads, .dim = dim, .sequences = sequences, .q = at<const bf16>(q),
               .q_token = q_token, .k = {at<const bf16>(k), k_token}, .v = {at<const bf16>(v), v_token}, .cu_q = starts,
               .cu_k = key_starts, .seq_lens = nullptr, .scale = scale, .kv_partial = kv_partial, .out = at<bf16>(out),
               .m = at<float>(row_max), .l = at<float>(row_sum)},
              threads);
  }, Release());
  m.def("paged_attention", [](Address out, Address q, int64_t q_token, Address k, Address v, int64_t k_block, int64_t k_token,
                              int64_t v_block, int64_t v_token, int64_t cache_blocks, int64_t block_size, Address table,
                              int64_t table_row, int64_t table_width, Address cu_q, Address seq_lens, int64_t sequences,
                              int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim, float scale, int64_t kv_partial,
                              int threads) {
    const int32_t *starts = at<const int32_t>(cu_q), *lengths = at<const int32_t>(seq_lens), *blocks = at<const int32_t>(table);
    require_offsets(starts, sequences, tokens, "cu_q");
    for (int64_t r = 0; r < sequences; ++r) {
      require_lengths(r, starts[r + 1] - starts[r], lengths[r]);
      const int64_t used = (lengths[r] + block_size - 1) / block_size;
      if (used > table_width)
        throw BadArgument("seq_lens[" + std::to_string(r) + "] is " + std::to_string(lengths[r]) + "; block_table holds only " +
                          std::to_string(table_width * block_size));
      for (int64_t i = 0; i < used; ++i)
        if (const int32_t b = blocks[r * table_row + i]; b < 0 || b >= cache_blocks)
          throw BadArgument("block_table[" + std::to_string(r) + "][" + std::to_string(i) + "] is " + std::to_string(b) +
                            "; the cache has " + std::to_string(cache_blocks) + " blocks");
    }
    attention({.heads = heads, .kv_heads = kv_heads, .dim = dim, .sequences = sequences, .q = at<const bf16>(q),
               .q_token = q_token, .k = {at<const bf16>(k), k_token, blocks, block_size, k_block},
               .v = {at<const bf16>(v), v_token, blocks, block_size, v_block}, .table_row = table_row, .cu_q = starts,
               .cu_k = nullptr, .seq_lens = lengths, .scale = scale, .kv_partial = kv_partial, .out = at<bf16>(out)},
              threads);
  }, Release());
  m.def("attention_backward", [](Address dq, Address dk, Address dv, Address dout, int64_t dout_token, Address q, int64_t q_token,
                                 Address k, int64_t k_token, Address v, int64_t v_token, Address out, int64_t out_token,
                                 Address row_max, Address row_sum, Address cu, int64_t sequences, int64_t tokens,
                                 int64_t heads, int64_t kv_heads, int64_t dim, float score_scale, float scale, int threads) {
    require_offsets(at<const int32_t>(cu), sequences, tokens, "cu");
    attention_backward({heads, kv_heads, dim, sequences, at<const bf16>(dout), at<const bf16>(q), at<const bf16>(k),
                        at<const bf16>(v), at<const bf16>(out), dout_token, q_token, k_token, v_token, out_token,
                        at<const float>(row_max), at<const float>(row_sum), at<const int32_t>(cu), score_scale, scale,
                        at<bf16>(dq), at<bf16>(dk), at<bf16>(dv)},
                       threads);
  }, Release());
}

void bind_vocab(nb::module_& m) {
  m.def("vocab_stats", [](Address top, Address sum, Address logits, Address temperature, int64_t rows, int64_t width,
                          int64_t vocab_start, int64_t vocab, int threads) {
    vocab_stats(at<float>(top), at<float>(sum), tiles_of(width), at<const float>(logits), width, at<const float>(temperature),
                rows, width, vocab_start, vocab, threads);
  }, Release());
  m.def("merge_vocab_stats", [](Address lse, Address top, Address sum, int64_t rows, int64_t tiles, int threads) {
    merge_vocab_stats(at<float>(lse), at<const float>(top), at<const float>(sum), rows, tiles, threads);
  }, Release());
  m.def("logp_from_logits", [](Address logp, Address lse, Address logits, int64_t width, Address ids, int64_t ids_per_row,
                               Address temperature, int64_t rows, int64_t vocab, int threads) {
    require_range(at<const int64_t>(ids), rows * ids_per_row, std::min(vocab, width), "ids");
    logp_from_logits(at<float>(logp), at<float>(lse), at<const float>(logits), width, at<const int64_t>(ids), ids_per_row,
                     at<const float>(temperature), rows, vocab, threads);
  }, Release());
  m.def("linear_vocab_stats", [](Address top, Address sum, Address z, Address h, int64_t ldh, Address w, Address panels,
                                 Address target, float temperature, int64_t rows, int64_t k, int64_t width,
                                 int64_t vocab_start, int64_t vocab, int threads) {
    require_range(at<const int64_t>(target), rows, vocab, "target");
    linear_vocab_stats(at<float>(top), at<float>(sum), at<float>(z),
                       {at<const bf16>(h), ldh, rows, k, at<const bf16>(w), at<const uint32_t>(panels),
                        at<const int64_t>(target), temperature, width, vocab_start, vocab},
                       threads);
  }, Release());
  m.def("linear_logp_backward", [](Address dh16, Address dh32, Address main_grad, Address dlogp, Address h, int64_t ldh,
                                   Address w, Address target, Address lse, float temperature, int64_t rows, int64_t k,
                                   int64_t width, int64_t vocab_start, int64_t vocab, int64_t segments, int threads) {
    require_range(at<const int64_t>(target), rows, vocab, "target");
    linear_logp_backward(at<bf16>(dh16), at<float>(dh32), at<float>(main_grad),
                         {at<const bf16>(h), ldh, rows, k, at<const bf16>(w), nullptr, at<const int64_t>(target), temperature,
                          width, vocab_start, vocab},
                         at<const float>(dlogp), at<const float>(lse), segments, threads);
  }, Release());
}

}  // namespace

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
  m.def("force_isa", [](std::optional<std::string> name) { force_isa(name ? name->c_str() : nullptr); },
        nb::arg("name").none(), "Use this instruction set from now on; None chooses the widest. Changes no bit.");
}
