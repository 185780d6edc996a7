// Which instruction set serves: chosen once from what the CPU has, or forced by name.
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace cpu {
namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
const Kernels* widest() { return has_avx512() ? &kAvx512 : has_avx2() ? &kAvx2 : &kPlain; }
const Kernels* named(const std::string& name) {
  if (name == "avx512" && has_avx512()) return &kAvx512;
  if (name == "avx2" && has_avx2()) return &kAvx2;
  return name == "plain" ? &kPlain : nullptr;
}
#else
const Kernels* widest() { return &kPlain; }
const Kernels* named(const std::string& name) { return name == "plain" ? &kPlain : nullptr; }
#endif

std::atomic<const Kernels*> active{widest()};

}  // namespace

const Kernels& kernels() { return *active.load(std::memory_order_relaxed); }

void force_isa(const char* name) {
  const Kernels* chosen = name ? named(name) : widest();
  if (!chosen)
    throw std::invalid_argument(std::string("instruction set '") + name +
                                "' is unknown or this CPU lacks it; choose avx512, avx2 or plain");
  active = chosen;
}

}  // namespace cpu
