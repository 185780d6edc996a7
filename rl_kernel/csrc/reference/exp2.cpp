// exp2 model `sm90_ex2`: ex2.approx.ftz.f32 of NVIDIA's sm_90, from a table of its deviations.
#include "exp2.h"

#include "arrays.h"

namespace ref {
namespace {

constexpr int64_t kFractions = 1 << 23;
constexpr double kOne = 8388608.0;  // 2^23

// For every f in [0, 2^23): 2 bits, the unit of the last place by which the instruction differs from the correctly
// rounded 2^(f/2^23 - 1), plus 2; four to a byte, low bits first. Set once by `register_sm90_ex2`.
std::vector<uint8_t> deviations;

// 2^(f/2^23 - 1) as the instruction has it. No f lies so near a tie that an error of 2^-52 in std::exp2 could turn
// the rounding to fp32 (a test shows it), so any libm gives the same bits.
float fraction_power(int32_t f) {
  float rounded = float(std::exp2((f - kOne) / kOne));
  int deviation = ((deviations[f >> 2] >> (2 * (f & 3))) & 3) - 2;
  return std::bit_cast<float>(std::bit_cast<int32_t>(rounded) + deviation);
}

}  // namespace

// x is cut to a multiple of 2^-23; results below 2^-126 are +0. For x > 0 the instruction's bits are not known: NaN.
float exp2_sm90(float x) {
  if (x != x || x > 0.0f) return NAN;
  if (x < -127.0f) return 0.0f;
  int32_t q = int32_t(x * float(kOne));
  float y = fraction_power(q & (kFractions - 1)) * std::bit_cast<float>(((q >> 23) + 1 + 127) << 23);
  return y < 0x1p-126f ? 0.0f : y;
}

Exp2 exp2_model(const std::string& name) {
  if (name == "poly") return Exp2::poly;
  if (name != "sm90_ex2")
    throw std::invalid_argument("the reference has no exp2 model '" + name + "'; it has: poly, sm90_ex2");
  require(!deviations.empty(), "exp2 model 'sm90_ex2' needs its table: call rl_kernel.reference.exp2_table.load()");
  return Exp2::sm90_ex2;
}

void bind_exp2(nb::module_& module) {
  module.def("exp2", [](Out<float, 1> y, In<float, 1> x, const std::string& name) {
    Exp2 model = exp2_model(name);
    for (size_t i = 0; i < x.shape(0); ++i) y.data()[i] = canonical(exp2(model, x.data()[i]));
  });
  module.def("register_sm90_ex2", [](In<uint8_t, 1> table) {
    require(table.shape(0) == kFractions / 4, "register_sm90_ex2: the table has 2^21 bytes");
    deviations.assign(table.data(), table.data() + table.shape(0));
  });
}

}  // namespace ref
