// token_confidence on the CPU: checks, rows in parallel, choice of instruction
// set.
//
// The specification is token_confidence_reference in
// vllm_rollout/parts/observing/tracker/reference.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "ops.h"
#include "registration.h"
#include "token_confidence_row.h"

namespace vllm_rollout {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Below this a second thread costs more to wake than it saves (about 10 us).
constexpr int64_t kEntriesPerThread = 64 * 1024;

RowSumsFunction choose_row_sums() {
#ifdef VLLM_ROLLOUT_X86_VARIANTS
  __builtin_cpu_init();
  const bool v3 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") &&
                  __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") &&
                  __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4) return x86_64_v4::row_sums;
  if (v3) return x86_64_v3::row_sums;
#endif
  return baseline::row_sums;
}

LogitsType logits_type(const Tensor& logits) {
  switch (logits.scalar_type()) {
    case ScalarType::Float:
      return LogitsType::kFloat32;
    case ScalarType::BFloat16:
      return LogitsType::kBFloat16;
    case ScalarType::Half:
      return LogitsType::kFloat16;
    default:
      STD_TORCH_CHECK(false,
                      "logits must be float32, bfloat16 or float16, got ",
                      torch::headeronly::toString(logits.scalar_type()));
  }
  return LogitsType::kFloat32;
}

void check_shapes(const Tensor& logits, const Tensor& rows) {
  STD_TORCH_CHECK(logits.dim() == 2,
                  "logits must be [num_rows, vocab_size], got ", logits.dim(),
                  " dimensions");
  STD_TORCH_CHECK(logits.size(1) >= 1,
                  "logits must have a vocab_size of at least 1, got 0");
  STD_TORCH_CHECK(logits.size(1) == 1 || logits.stride(1) == 1,
                  "logits must have stride(1) == 1, got ", logits.stride(1));
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::Long,
                  "rows must be int64, got ",
                  torch::headeronly::toString(rows.scalar_type()));
  STD_TORCH_CHECK(rows.dim() == 1, "rows must be [num_seen], got ", rows.dim(),
                  " dimensions");
  STD_TORCH_CHECK(rows.is_contiguous(), "rows must be contiguous, got stride ",
                  rows.stride(0));
}

Tensor token_confidence(const Tensor& logits, const Tensor& rows) {
  static const RowSumsFunction row_sums = choose_row_sums();

  const LogitsType type = logits_type(logits);
  check_shapes(logits, rows);
  const int64_t num_seen = rows.size(0);
  const int64_t num_rows = logits.size(0);
  const int64_t vocab_size = logits.size(1);
  const int64_t row_bytes =
      logits.stride(0) * (type == LogitsType::kFloat32 ? 4 : 2);
  const char* first_row = static_cast<const char*>(logits.const_data_ptr());
  const int64_t* row_of = static_cast<const int64_t*>(rows.const_data_ptr());

  // Before the parallel part: an exception may not leave a worker thread.
  for (int64_t i = 0; i < num_seen; ++i) {
    STD_TORCH_CHECK(0 <= row_of[i] && row_of[i] < num_rows, "rows[", i,
                    "] must be in [0, ", num_rows, "), got ", row_of[i]);
  }

  Tensor confidence = torch::stable::empty({num_seen}, ScalarType::Float);
  float* confidence_out = static_cast<float*>(confidence.mutable_data_ptr());

  const auto finish_rows = [&](int64_t begin, int64_t end) {
    constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
    for (int64_t i = begin; i < end; ++i) {
      const void* row = first_row + row_of[i] * row_bytes;
      const RowSums sums = row_sums(row, vocab_size, type);
      if (sums.num_unmasked == 0) {
        confidence_out[i] = kNaN;
        continue;
      }
      // Relative to the row's largest logit, so that logits of 1e4 cost no
      // digits. A NaN or +inf in the row makes the difference NaN.
      const double mean = sums.sum / static_cast<double>(sums.num_unmasked);
      confidence_out[i] =
          static_cast<float>(std::log(sums.sum_exp) + (sums.max - mean));
    }
  };
  const int64_t grain_size =
      std::max<int64_t>(1, kEntriesPerThread / vocab_size);
  if (num_seen <= grain_size) {
    finish_rows(0, num_seen);
  } else {
    torch::stable::parallel_for(0, num_seen, grain_size, finish_rows);
  }
  return confidence;
}

}  // namespace
}  // namespace vllm_rollout

STABLE_TORCH_LIBRARY(vllm_rollout, library) {
  for (const auto& op : vllm_rollout::kOperators) library.def(op.schema);
}

STABLE_TORCH_LIBRARY_IMPL(vllm_rollout, CPU, library) {
  library.impl(vllm_rollout::kTokenConfidence.name,
               TORCH_BOX(&vllm_rollout::token_confidence));
}

VLLM_ROLLOUT_PYTHON_MODULE(TORCH_EXTENSION_NAME)
