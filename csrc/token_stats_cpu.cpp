// token_stats on the CPU: checks, rows in parallel, choice of instruction set.
//
// The specification is token_stats_reference in
// vllm_rollout/tracker/reference.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>

#include "ops.h"
#include "registration.h"
#include "token_stats_row.h"

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

void check_indices(const char* name, const Tensor& tensor, int64_t size) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Long, name,
                  " must be int64, got ",
                  torch::headeronly::toString(tensor.scalar_type()));
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == size, name,
                  " must be [num_seen] with num_seen == ", size, ", got ",
                  tensor.dim(), " dimensions and ", tensor.numel(), " entries");
  STD_TORCH_CHECK(tensor.is_contiguous(), name,
                  " must be contiguous, got stride ", tensor.stride(0));
}

void check_shapes(const Tensor& logits, const Tensor& rows,
                  const Tensor& sampled) {
  STD_TORCH_CHECK(logits.dim() == 2,
                  "logits must be [num_rows, vocab_size], got ", logits.dim(),
                  " dimensions");
  STD_TORCH_CHECK(logits.size(1) >= 1,
                  "logits must have a vocab_size of at least 1, got 0");
  STD_TORCH_CHECK(logits.size(1) == 1 || logits.stride(1) == 1,
                  "logits must have stride(1) == 1, got ", logits.stride(1));
  check_indices("rows", rows, rows.numel());
  check_indices("sampled", sampled, rows.numel());
}

float entry(const void* row, int64_t index, LogitsType type) {
  switch (type) {
    case LogitsType::kFloat32:
      return static_cast<const float*>(row)[index];
    case LogitsType::kBFloat16:
      return static_cast<const torch::headeronly::BFloat16*>(row)[index];
    case LogitsType::kFloat16:
      return static_cast<const torch::headeronly::Half*>(row)[index];
  }
  __builtin_unreachable();
}

std::tuple<Tensor, Tensor, Tensor> token_stats(const Tensor& logits,
                                               const Tensor& rows,
                                               const Tensor& sampled) {
  static const RowSumsFunction row_sums = choose_row_sums();

  const LogitsType type = logits_type(logits);
  check_shapes(logits, rows, sampled);
  const int64_t num_seen = rows.size(0);
  const int64_t num_rows = logits.size(0);
  const int64_t vocab_size = logits.size(1);
  const int64_t row_bytes =
      logits.stride(0) * (type == LogitsType::kFloat32 ? 4 : 2);
  const char* first_row = static_cast<const char*>(logits.const_data_ptr());
  const int64_t* row_of = static_cast<const int64_t*>(rows.const_data_ptr());
  const int64_t* token_of =
      static_cast<const int64_t*>(sampled.const_data_ptr());

  // Before the parallel part: an exception may not leave a worker thread.
  for (int64_t i = 0; i < num_seen; ++i) {
    STD_TORCH_CHECK(0 <= row_of[i] && row_of[i] < num_rows, "rows[", i,
                    "] must be in [0, ", num_rows, "), got ", row_of[i]);
    STD_TORCH_CHECK(-1 <= token_of[i] && token_of[i] < vocab_size, "sampled[",
                    i, "] must be -1 or in [0, ", vocab_size, "), got ",
                    token_of[i]);
  }

  Tensor logprob = torch::stable::empty({num_seen}, ScalarType::Float);
  Tensor entropy = torch::stable::empty({num_seen}, ScalarType::Float);
  Tensor confidence = torch::stable::empty({num_seen}, ScalarType::Float);
  float* logprob_out = static_cast<float*>(logprob.mutable_data_ptr());
  float* entropy_out = static_cast<float*>(entropy.mutable_data_ptr());
  float* confidence_out = static_cast<float*>(confidence.mutable_data_ptr());

  const auto finish_rows = [&](int64_t begin, int64_t end) {
    constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
    for (int64_t i = begin; i < end; ++i) {
      const void* row = first_row + row_of[i] * row_bytes;
      const RowSums sums = row_sums(row, vocab_size, type);
      if (sums.num_unmasked == 0 || std::isnan(sums.sum_exp_shifted)) {
        logprob_out[i] = entropy_out[i] = confidence_out[i] = kNaN;
        continue;
      }
      // Everything is relative to the row's largest logit, so that logits of
      // 1e4 cost no digits.
      const double log_sum_exp = std::log(sums.sum_exp);
      const double max = sums.max;
      const int64_t token = token_of[i];
      logprob_out[i] =
          token < 0
              ? kNaN
              : static_cast<float>(entry(row, token, type) - max - log_sum_exp);
      entropy_out[i] =
          static_cast<float>(log_sum_exp - sums.sum_exp_shifted / sums.sum_exp);
      confidence_out[i] = static_cast<float>(
          log_sum_exp +
          (max - sums.sum / static_cast<double>(sums.num_unmasked)));
    }
  };
  const int64_t grain_size =
      std::max<int64_t>(1, kEntriesPerThread / vocab_size);
  if (num_seen <= grain_size) {
    finish_rows(0, num_seen);
  } else {
    torch::stable::parallel_for(0, num_seen, grain_size, finish_rows);
  }
  return {logprob, entropy, confidence};
}

}  // namespace
}  // namespace vllm_rollout

STABLE_TORCH_LIBRARY(vllm_rollout, library) {
  for (const auto& op : vllm_rollout::kOperators) library.def(op.schema);
}

STABLE_TORCH_LIBRARY_IMPL(vllm_rollout, CPU, library) {
  library.impl(vllm_rollout::kTokenStats.name,
               TORCH_BOX(&vllm_rollout::token_stats));
}

VLLM_ROLLOUT_PYTHON_MODULE(TORCH_EXTENSION_NAME)
