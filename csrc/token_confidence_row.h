// One row of token_confidence: the sums that a single pass over the vocabulary
// gives.
#pragma once

#include <cstdint>

namespace vllm_rollout {

enum class LogitsType { kFloat32, kBFloat16, kFloat16 };

// Over the entries z of a row that are not -inf, with `max` the largest z.
// An entry that is NaN or +inf makes max - sum NaN.
struct RowSums {
  float max;
  double sum_exp;  // sum of exp(z - max)
  double sum;      // sum of z
  int64_t num_unmasked;
};

using RowSumsFunction = RowSums (*)(const void* row, int64_t vocab_size,
                                    LogitsType type);

// The same source compiled for each instruction set: token_confidence_row.cpp.
namespace baseline {
RowSums row_sums(const void* row, int64_t vocab_size, LogitsType type);
}
#ifdef VLLM_ROLLOUT_X86_VARIANTS
namespace x86_64_v3 {
RowSums row_sums(const void* row, int64_t vocab_size, LogitsType type);
}
namespace x86_64_v4 {
RowSums row_sums(const void* row, int64_t vocab_size, LogitsType type);
}
#endif

}  // namespace vllm_rollout
