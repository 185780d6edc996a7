// The exp2 models, for arguments that are never positive.
#pragma once
#include <cstdint>
#include <string>

#include "scalar.h"

namespace ref {

enum class Exp2 { poly, sm90_ex2 };
Exp2 exp2_model(const std::string& name);  // throws std::invalid_argument

float exp2_sm90(float x);

inline float exp2(Exp2 model, float x) { return model == Exp2::poly ? exp2_poly(x) : exp2_sm90(x); }

}  // namespace ref
