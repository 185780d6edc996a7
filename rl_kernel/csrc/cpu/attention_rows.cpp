#include "attention_rows.h"

#include <limits>

#include "attention.h"

namespace cpu {

// Up to here the values are used where they lie: packing them would cost more than widening them anew.
constexpr int64_t kFewRows = 12;

HeadRows::HeadRows(const Shape& shape, float* floats, uint32_t* words)
    : shape_(shape), rows_(shape.rows()), wide_(shape.wide()) {
  auto take = [&](int64_t n) { return floats += n, floats - n; };
  q_ = take(rows_ * shape.dim), s_ = take(rows_ * kBlock), alpha_ = take(rows_);
  for (Sums* sums : {&total_, &part_}) *sums = {take(rows_), take(rows_), take(rows_ * wide_)};
  k_words_ = words, v_words_ = words + pairs_of(shape.dim) * kBlock;
}

int HeadRows::visible(int64_t row, int64_t k0) const {
  return int(std::min<int64_t>(kBlock, shape_.position + row / shape_.group + 1 - k0));
}

int64_t HeadRows::first_row(int64_t key) const {
  return std::clamp<int64_t>(key - shape_.position, 0, shape_.queries) * shape_.group;
}

void HeadRows::start_partial(int64_t first_key) {
  now_ = first_key == 0 ? total_ : part_;
  const int64_t from = first_row(first_key);
  std::fill(now_.m + from, now_.m + rows_, -std::numeric_limits<float>::infinity());
  std::fill(now_.l + from, now_.l + rows_, 0.0f);
  resume_ = false;
}

void HeadRows::block(const bf16* const* k_rows, const bf16* const* v_rows, int64_t k0, int64_t n, Expected& next) {
  const Kernels& f = kernels();
  const int64_t from = first_row(k0), rows = rows_ - from;
  float* s = s_ + from * kBlock;
  for (int64_t j = 0; j < kBlock; j += kLanes) {
    f.pack_rows(k_words_ + j, kBlock, k_rows + j, std::clamp<int64_t>(n - j, 0, kLanes), kLanes, shape_.dim);
    next.pull();
  }
  f.tile(rows, kBlock / kLanes,
         {0, shape_.dim, q_ + from * shape_.dim, shape_.dim, 1, k_words_, kBlock, s, kBlock, false});
  next.pull();
  for (int64_t r = from; r < rows_; ++r) {
    alpha_[r] = f.softmax_block(s_ + r * kBlock, visible(r, k0), shape_.scale, now_.m + r);
    if (r < from + 3) next.pull();
  }
  f.row_sums(now_.l + from, alpha_ + from, s, rows);
  if (resume_)
    for (int64_t r = from; r < rows_; ++r)
      if (alpha_[r] != 1.0f) f.scale(now_.acc + r * wide_, alpha_[r], wide_);
  next.pull();
  product_with_v(v_rows, from, k0, n, next);
  resume_ = true;
}

void HeadRows::product_with_v(const bf16* const* v_rows, int64_t from, int64_t k0, int64_t n, Expected& next) {
  const int64_t rows = rows_ - from;
  const int vectors = int(wide_ / kLanes);
  // A masked key is worth p = +0 and v = +0; multiplying +0 by what stands in v is the same unless that is infinite
  // or NaN, and then each row must stop at its own last key.
  const bool masked = visible(from, k0) < n;
  if (rows <= kFewRows && !masked && shape_.dim == wide_) {
    for (int64_t j = 0; j < n; j += kLanes) {
      kernels().tile_unpacked(rows, vectors, std::min<int64_t>(kLanes, n - j), s_ + from * kBlock + j, kBlock,
                              v_rows + j, now_.acc + from * wide_, wide_, resume_ || j > 0);
      next.pull();
    }
    return;
  }
  kernels().pack_columns(v_words_, wide_, v_rows, shape_.dim, wide_, n);
  auto tile = [&](int64_t row, int64_t count, int64_t keys) {
    kernels().tile(count, vectors,
                   {0, keys, s_ + row * kBlock, kBlock, 1, v_words_, wide_, now_.acc + row * wide_, wide_, resume_});
  };
  if (masked && std::any_of(v_rows, v_rows + n, [&](const bf16* v) { return any_nonfinite(v, shape_.dim); }))
    for (int64_t r = from; r < rows_; ++r) tile(r, 1, visible(r, k0));
  else
    tile(from, rows, n);
}

void HeadRows::end_partial(int64_t first_key) {
  if (first_key == 0) return;
  for (int64_t r = first_row(first_key); r < rows_; ++r) {
    const float m1 = total_.m[r], m2 = part_.m[r], m = m2 > m1 ? m2 : m1;
    const float a = kernels().exp2(m1 - m), b = kernels().exp2(m2 - m);
    total_.l[r] = total_.l[r] * a + part_.l[r] * b;
    kernels().merge(total_.acc + r * wide_, part_.acc + r * wide_, a, b, wide_);
    total_.m[r] = m;
  }
}

void HeadRows::store(int64_t r, bf16* out, float* m, float* l) const {
  kernels().divide(out, total_.acc + r * wide_, total_.l[r], shape_.dim);
  if (m) kernels().canonical(m, total_.m + r, 1), kernels().canonical(l, total_.l + r, 1);
}

bool any_nonfinite(const bf16* x, int64_t n) {
  bool found = false;
  for (int64_t i = 0; i < n; ++i) found |= (x[i] & 0x7f80) == 0x7f80;
  return found;
}

}  // namespace cpu
