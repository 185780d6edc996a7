#include "bindings.h"
#include "attention.h"

namespace cpu {

namespace {

void bind_contiguous(nb::module_& m) {
  m.def(
      "attention",
      [](Address out, Address row_max, Address row_sum, Address q, int64_t q_token, Address k, int64_t k_token,
         Address v, int64_t v_token, Address cu_q, Address cu_k, int64_t sequences, int64_t tokens, int64_t keys,
         int64_t heads, int64_t kv_heads, int64_t dim, float scale, int64_t kv_partial, int threads) {
        const int32_t *starts = at<const int32_t>(cu_q), *key_starts = at<const int32_t>(cu_k);
        require_offsets(starts, sequences, tokens, "cu_q");
        require_offsets(key_starts, sequences, keys, "cu_k");
        for (int64_t r = 0; r < sequences; ++r)
          require_lengths(r, starts[r + 1] - starts[r], key_starts[r + 1] - key_starts[r]);
        attention({.heads = heads,
                   .kv_heads = kv_heads,
                   .dim = dim,
                   .sequences = sequences,
                   .q = at<const bf16>(q),
                   .q_token = q_token,
                   .k = {at<const bf16>(k), k_token},
                   .v = {at<const bf16>(v), v_token},
                   .cu_q = starts,
                   .cu_k = key_starts,
                   .seq_lens = nullptr,
                   .scale = scale,
                   .kv_partial = kv_partial,
                   .out = at<bf16>(out),
                   .m = at<float>(row_max),
                   .l = at<float>(row_sum)},
                  threads);
      },
      Release());
}

void bind_paged(nb::module_& m) {
  m.def(
      "paged_attention",
      [](Address out, Address q, int64_t q_token, Address k, Address v, int64_t k_block, int64_t k_token,
         int64_t v_block, int64_t v_token, int64_t cache_blocks, int64_t block_size, Address table, int64_t table_row,
         int64_t table_width, Address cu_q, Address seq_lens, int64_t sequences, int64_t tokens, int64_t heads,
         int64_t kv_heads, int64_t dim, float scale, int64_t kv_partial, int threads) {
        const int32_t *starts = at<const int32_t>(cu_q), *lengths = at<const int32_t>(seq_lens),
                      *blocks = at<const int32_t>(table);
        require_offsets(starts, sequences, tokens, "cu_q");
        for (int64_t r = 0; r < sequences; ++r) {
          require_lengths(r, starts[r + 1] - starts[r], lengths[r]);
          const int64_t used = (lengths[r] + block_size - 1) / block_size;
          if (used > table_width)
            throw BadArgument("seq_lens[" + std::to_string(r) + "] is " + std::to_string(lengths[r]) +
                              "; block_table holds only " + std::to_string(table_width * block_size));
          for (int64_t i = 0; i < used; ++i)
            if (const int32_t b = blocks[r * table_row + i]; b < 0 || b >= cache_blocks)
              throw BadArgument("block_table[" + std::to_string(r) + "][" + std::to_string(i) + "] is " +
                                std::to_string(b) + "; the cache has " + std::to_string(cache_blocks) + " blocks");
        }
        attention({.heads = heads,
                   .kv_heads = kv_heads,
                   .dim = dim,
                   .sequences = sequences,
                   .q = at<const bf16>(q),
                   .q_token = q_token,
                   .k = {at<const bf16>(k), k_token, blocks, block_size, k_block},
                   .v = {at<const bf16>(v), v_token, blocks, block_size, v_block},
                   .table_row = table_row,
                   .cu_q = starts,
                   .cu_k = nullptr,
                   .seq_lens = lengths,
                   .scale = scale,
                   .kv_partial = kv_partial,
                   .out = at<bf16>(out)},
                  threads);
      },
      Release());
}

void bind_backward(nb::module_& m) {
  m.def(
      "attention_backward",
      [](Address dq, Address dk, Address dv, Address dout, int64_t dout_token, Address q, int64_t q_token, Address k,
         int64_t k_token, Address v, int64_t v_token, Address out, int64_t out_token, Address row_max, Address row_sum,
         Address cu, int64_t sequences, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim, float score_scale,
         float scale, int threads) {
        require_offsets(at<const int32_t>(cu), sequences, tokens, "cu");
        attention_backward({heads,
                            kv_heads,
                            dim,
                            sequences,
                            at<const bf16>(dout),
                            at<const bf16>(q),
                            at<const bf16>(k),
                            at<const bf16>(v),
                            at<const bf16>(out),
                            dout_token,
                            q_token,
                            k_token,
                            v_token,
                            out_token,
                            at<const float>(row_max),
                            at<const float>(row_sum),
                            at<const int32_t>(cu),
                            score_scale,
                            scale,
                            at<bf16>(dq),
                            at<bf16>(dk),
                            at<bf16>(dv)},
                           threads);
      },
      Release());
}

}  // namespace

void bind_attention(nb::module_& m) {
  bind_contiguous(m);
  bind_paged(m);
  bind_backward(m);
}

}  // namespace cpu
