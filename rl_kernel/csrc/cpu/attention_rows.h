// The running sums of attention for all query heads of one kv head and a span of queries, a key block at a time.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "pack.h"

namespace cpu {

// The next keys and values that a task will read, asked for a few cache lines at a time between other work: a token's
// row is short and then comes a gap, so the hardware does not see what is next, and all lines at once would stall.
class Expected {
 public:
  void expect(const bf16* const* k, const bf16* const* v, int64_t rows, int64_t row_bytes, int64_t pulls) {
    std::copy_n(k, rows, rows_), std::copy_n(v, rows, rows_ + rows);
    count_ = 2 * rows, bytes_ = row_bytes, row_ = at_ = 0;
    per_pull_ = (count_ * ((bytes_ + 63) / 64) + pulls - 1) / pulls;
  }
  void pull() {
    for (int64_t line = 0; line < per_pull_ && row_ < count_; ++line) {
      __builtin_prefetch(reinterpret_cast<const char*>(rows_[row_]) + at_);
      if ((at_ += 64) >= bytes_) at_ = 0, ++row_;
    }
  }
  // Calls of pull() in HeadRows::block where rows are few. Four calls of 64 lines each took a third longer.
  static constexpr int64_t kPulls = 12;

 private:
  const bf16* rows_[2 * kBlock];
  int64_t count_ = 0, bytes_ = 0, row_ = 0, at_ = 0, per_pull_ = 0;
};

// Rows are (query, head), ordered by position, so that the rows that see a key block are the last ones.
class HeadRows {
 public:
  struct Shape {
    int64_t group, dim, queries, position;  // position: of the first query
    float scale;
    int64_t wide() const { return (dim + kLanes - 1) / kLanes * kLanes; }
    int64_t rows() const { return queries * group; }
    // fp32 values of one HeadRows, and words of the packed blocks that all of a task share.
    int64_t floats() const { return rows() * (dim + kBlock + 2 * wide() + 5); }
    int64_t words() const { return pairs_of(dim) * kBlock + kBlock / 2 * wide(); }
  };

  HeadRows(const Shape& shape, float* floats, uint32_t* words);

  float* query(int64_t i) { return q_ + i * shape_.group * shape_.dim; }  // [group][dim], to be filled
  void start_partial(int64_t first_key);
  // Keys [k0, k0 + n) of the block at absolute position k0.
  void block(const bf16* const* k_rows, const bf16* const* v_rows, int64_t k0, int64_t n, Expected& next);
  void end_partial(int64_t first_key);
  // Row r: bf16(acc / l) into out, and where wanted its maximum and sum.
  void store(int64_t r, bf16* out, float* m, float* l) const;

 private:
  struct Sums {
    float *m, *l, *acc;
  };

  int visible(int64_t row, int64_t k0) const;
  int64_t first_row(int64_t key) const;  // the first row that sees key `key`
  void product_with_v(const bf16* const* v_rows, int64_t from, int64_t k0, int64_t n, Expected& next);

  const Shape shape_;
  const int64_t rows_, wide_;
  float *q_, *s_, *alpha_;
  Sums total_, part_, now_;
  uint32_t *k_words_, *v_words_;
  bool resume_ = false;  // whether the partial has seen a block
};

}  // namespace cpu
