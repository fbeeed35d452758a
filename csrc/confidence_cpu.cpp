// update_confidence on the CPU.
//
// The specification is update_confidence_reference in
// vllm_rollout/parts/observing/tracker/reference.py. One thread and a plain
// loop: a step has some hundred rows, which takes less time than waking a
// second thread.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cmath>
#include <cstdint>

#include "ops.h"

namespace vllm_rollout {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kEndOfPositions = int64_t{1} << 53;

void check_rows(const char* name, const Tensor& tensor, ScalarType type,
                int64_t num_rows) {
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, " must be ",
                  torch::headeronly::toString(type), ", got ",
                  torch::headeronly::toString(tensor.scalar_type()));
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == num_rows, name,
                  " must be [", num_rows, "], got ", tensor.dim(),
                  " dimensions and ", tensor.numel(), " entries");
  STD_TORCH_CHECK(tensor.is_contiguous(), name,
                  " must be contiguous, got stride ", tensor.stride(0));
}

void check_state(const char* name, const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float, name,
                  " must be float32, got ",
                  torch::headeronly::toString(tensor.scalar_type()));
  STD_TORCH_CHECK(tensor.dim() == 2 && tensor.is_contiguous(), name,
                  " must be contiguous and of two dimensions, got ",
                  tensor.dim(), " dimensions");
}

void check_entries(const char* name, const Tensor& tensor, int64_t end) {
  const int64_t* entries = static_cast<const int64_t*>(tensor.const_data_ptr());
  for (int64_t i = 0; i < tensor.size(0); ++i) {
    STD_TORCH_CHECK(0 <= entries[i] && entries[i] < end, name, "[", i,
                    "] must be in [0, ", end, "), got ", entries[i]);
  }
}

void check(const Tensor& slots, const Tensor& positions, const Tensor& values,
           const Tensor& means, const Tensor& m2s, const Tensor& trace) {
  STD_TORCH_CHECK(slots.dim() == 1, "slots must be [num_rows], got ",
                  slots.dim(), " dimensions");
  const int64_t num_rows = slots.size(0);
  check_rows("slots", slots, ScalarType::Long, num_rows);
  check_rows("positions", positions, ScalarType::Long, num_rows);
  check_rows("values", values, ScalarType::Float, num_rows);
  check_state("means", means);
  check_state("m2s", m2s);
  check_state("trace", trace);
  STD_TORCH_CHECK(means.size(1) >= 2,
                  "means must be [capacity, num_kept] with num_kept >= 2, got ",
                  means.size(1));
  STD_TORCH_CHECK(m2s.size(0) == means.size(0) && m2s.size(1) == means.size(1),
                  "m2s must be [", means.size(0), ", ", means.size(1),
                  "], got [", m2s.size(0), ", ", m2s.size(1), "]");
  STD_TORCH_CHECK(trace.size(0) == means.size(0), "trace must be [",
                  means.size(0), ", trace_length], got ", trace.size(0),
                  " rows");
  check_entries("slots", slots, means.size(0));
  check_entries("positions", positions, kEndOfPositions);
}

Tensor update_confidence(const Tensor& slots, const Tensor& positions,
                         const Tensor& values, Tensor means, Tensor m2s,
                         Tensor trace) {
  check(slots, positions, values, means, m2s, trace);
  const int64_t num_rows = slots.size(0);
  const int64_t num_kept = means.size(1);
  const int64_t trace_length = trace.size(1);
  Tensor moments = torch::stable::empty({num_rows, 2}, ScalarType::Float);
  float* out = static_cast<float*>(moments.mutable_data_ptr());
  const int64_t* slot_of = static_cast<const int64_t*>(slots.const_data_ptr());
  const int64_t* position_of =
      static_cast<const int64_t*>(positions.const_data_ptr());
  const float* value_of = static_cast<const float*>(values.const_data_ptr());
  float* mean_of = static_cast<float*>(means.mutable_data_ptr());
  float* m2_of = static_cast<float*>(m2s.mutable_data_ptr());
  float* trace_of = static_cast<float*>(trace.mutable_data_ptr());

  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t slot = slot_of[row];
    const int64_t position = position_of[row];
    const float value = value_of[row];
    const int64_t before = slot * num_kept + position % num_kept;
    const int64_t after = slot * num_kept + (position + 1) % num_kept;
    const float count = static_cast<float>(position + 1);
    const float old_mean = position == 0 ? 0.0f : mean_of[before];
    const float old_m2 = position == 0 ? 0.0f : m2_of[before];
    const float delta = value - old_mean;
    const float mean = old_mean + delta / count;
    const float m2 = old_m2 + delta * (value - mean);
    mean_of[after] = mean;
    m2_of[after] = m2;
    if (position < trace_length)
      trace_of[slot * trace_length + position] = value;
    out[2 * row] = mean;
    out[2 * row + 1] = std::sqrt(m2 / count);
  }
  return moments;
}

}  // namespace
}  // namespace vllm_rollout

STABLE_TORCH_LIBRARY_IMPL(vllm_rollout, CPU, library) {
  library.impl(vllm_rollout::kUpdateConfidence.name,
               TORCH_BOX(&vllm_rollout::update_confidence));
}
