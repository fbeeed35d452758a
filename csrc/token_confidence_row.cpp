// Compiled once per instruction set, in namespace VLLM_ROLLOUT_ISA.
//
// Only headers without inline functions may be included here: the linker keeps
// one copy of each inline function, and it could keep the AVX-512 one for all.
#include "token_confidence_row.h"

#ifndef VLLM_ROLLOUT_ISA
#define VLLM_ROLLOUT_ISA baseline
#endif

namespace vllm_rollout::VLLM_ROLLOUT_ISA {
namespace {

// Two reads of a block: the second comes from the L1 cache (4 KiB of float32).
constexpr int64_t kBlock = 1024;

constexpr float kInfinity = __builtin_inff();
constexpr float kLowest = -3.4028234663852886e38f;

template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

struct Float32 {
  using Storage = float;
  static inline float load(float value) { return value; }
};

struct BFloat16 {
  using Storage = uint16_t;
  static inline float load(uint16_t bits) {
    return bits_as<float>(static_cast<uint32_t>(bits) << 16);
  }
};

struct Float16 {
  using Storage = uint16_t;
  // The multiplication moves the exponent bias from 15 to 127 and normalises
  // subnormal numbers; infinities and NaN need their exponent filled up.
  static inline float load(uint16_t bits) {
    const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fff) << 13;
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
    const uint32_t scaled =
        bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112f);
    return bits_as<float>(scaled | special | sign);
  }
};

// exp(x) for x in [kMinExponent, 0]; NaN gives an unspecified value. Relative
// error below 4e-7 for x >= -5, where the sums are made, and 4e-6 at the far
// end (1.4e-6 with fused multiply-add).
//
// x * log2(e) = k + f with k an integer and f in [-1/2, 1/2]; 2^f is a minimax
// polynomial that is exact at 0, 2^k goes into the exponent bits.
constexpr float kMinExponent = -87.0f;  // exp() of it is still a normal number

inline float exp_of_nonpositive(float x) {
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds
  const float rounded = x * kLog2e + kRound;
  const float fraction = x * kLog2e - (rounded - kRound);
  float p = 0.00132647273f;
  p = p * fraction + 0.00967151299f;
  p = p * fraction + 0.0555073358f;
  p = p * fraction + 0.240222424f;
  p = p * fraction + 0.693147004f;
  p = p * fraction + 1.0f;
  return bits_as<float>(bits_as<uint32_t>(p) +
                        (bits_as<uint32_t>(rounded) << 23));
}

template <typename Type>
RowSums row_sums_of(const typename Type::Storage* row, int64_t vocab_size) {
  // A finite start keeps z - max away from -inf - (-inf).
  RowSums total{kLowest, 0.0, 0.0, 0};
  for (int64_t begin = 0; begin < vocab_size; begin += kBlock) {
    const typename Type::Storage* block = row + begin;
    const int64_t left = vocab_size - begin;
    const int32_t size = static_cast<int32_t>(left < kBlock ? left : kBlock);

    float max = total.max;
    float sum = 0.0f;
    int32_t num_unmasked = 0;
#pragma omp simd reduction(max : max) reduction(+ : sum, num_unmasked)
    for (int32_t i = 0; i < size; ++i) {
      const float z = Type::load(block[i]);
      const bool unmasked = z != -kInfinity;
      max = z > max ? z : max;
      sum += unmasked ? z : 0.0f;
      num_unmasked += unmasked ? 1 : 0;
    }
    total.sum += sum;
    total.num_unmasked += num_unmasked;

    if (max > total.max) {
      total.sum_exp *= __builtin_exp(static_cast<double>(total.max) - max);
      total.max = max;
    }

    float sum_exp = 0.0f;
#pragma omp simd reduction(+ : sum_exp)
    for (int32_t i = 0; i < size; ++i) {
      const float shifted = Type::load(block[i]) - max;
      // Masked entries are clamped too, instead of branched around: each moves
      // the sum by less than 2e-38.
      sum_exp +=
          exp_of_nonpositive(shifted < kMinExponent ? kMinExponent : shifted);
    }
    total.sum_exp += sum_exp;
  }
  return total;
}

}  // namespace

RowSums row_sums(const void* row, int64_t vocab_size, LogitsType type) {
  switch (type) {
    case LogitsType::kFloat32:
      return row_sums_of<Float32>(static_cast<const float*>(row), vocab_size);
    case LogitsType::kBFloat16:
      return row_sums_of<BFloat16>(static_cast<const uint16_t*>(row),
                                   vocab_size);
    case LogitsType::kFloat16:
      return row_sums_of<Float16>(static_cast<const uint16_t*>(row),
                                  vocab_size);
  }
  __builtin_unreachable();
}

}  // namespace vllm_rollout::VLLM_ROLLOUT_ISA
