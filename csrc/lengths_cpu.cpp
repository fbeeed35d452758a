// update_lengths and group_moments on the CPU, each alone and both in one call.
//
// The specification is the references of the same names in
// vllm_rollout/tracker/reference.py. One thread and plain loops: a step has
// some hundred rows and a thousand slots, which takes less time than waking a
// second thread or calling torch twice.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

#include "ops.h"

namespace vllm_rollout {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_vector(const char* name, const Tensor& tensor, ScalarType type,
                  int64_t size) {
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, " must be ",
                  torch::headeronly::toString(type), ", got ",
                  torch::headeronly::toString(tensor.scalar_type()));
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == size, name,
                  " must be [", size, "], got ", tensor.dim(),
                  " dimensions and ", tensor.numel(), " entries");
}

void check_state(const char* name, const Tensor& tensor, ScalarType type,
                 int64_t capacity) {
  check_vector(name, tensor, type, capacity);
  STD_TORCH_CHECK(tensor.is_contiguous(), name,
                  " must be contiguous, got stride ", tensor.stride(0));
}

int64_t capacity_of(const Tensor& counts) {
  STD_TORCH_CHECK(counts.dim() == 1 && counts.size(0) >= 1,
                  "counts must be float32 [capacity] with capacity >= 1, got ",
                  counts.dim(), " dimensions and ", counts.numel(), " entries");
  check_state("counts", counts, ScalarType::Float, counts.size(0));
  return counts.size(0);
}

void check_entries(const char* name, const Tensor& tensor, int64_t end) {
  const int64_t* entries = static_cast<const int64_t*>(tensor.const_data_ptr());
  const int64_t stride = tensor.stride(0);
  for (int64_t i = 0; i < tensor.size(0); ++i) {
    const int64_t entry = entries[i * stride];
    STD_TORCH_CHECK(-1 <= entry && entry < end, name, "[", i,
                    "] must be -1 or in [0, ", end, "), got ", entry);
  }
}

void check_update(const Tensor& slots, const Tensor& values,
                  const Tensor& counts, const Tensor& means,
                  const Tensor& m2s) {
  const int64_t capacity = capacity_of(counts);
  STD_TORCH_CHECK(slots.dim() == 1 && slots.scalar_type() == ScalarType::Long,
                  "slots must be int64 [num_rows], got ",
                  torch::headeronly::toString(slots.scalar_type()), " of ",
                  slots.dim(), " dimensions");
  check_vector("values", values, ScalarType::Float, slots.size(0));
  check_state("means", means, ScalarType::Float, capacity);
  check_state("m2s", m2s, ScalarType::Float, capacity);
  check_entries("slots", slots, capacity);
}

void check_moments(const Tensor& counts, const Tensor& groups,
                   const Tensor& finished, int64_t num_groups) {
  const int64_t capacity = capacity_of(counts);
  STD_TORCH_CHECK(num_groups >= 0, "num_groups must be at least 0, got ",
                  num_groups);
  check_state("groups", groups, ScalarType::Long, capacity);
  check_state("finished", finished, ScalarType::Bool, capacity);
  check_entries("groups", groups, num_groups);
}

Tensor updated(const Tensor& slots, const Tensor& values, Tensor& counts,
               Tensor& means, Tensor& m2s) {
  const int64_t num_rows = slots.size(0);
  Tensor running_means = torch::stable::empty({num_rows}, ScalarType::Float);
  float* out = static_cast<float*>(running_means.mutable_data_ptr());
  const int64_t* slot_of = static_cast<const int64_t*>(slots.const_data_ptr());
  const float* value_of = static_cast<const float*>(values.const_data_ptr());
  const int64_t slot_stride = slots.stride(0);
  const int64_t value_stride = values.stride(0);
  float* count_of = static_cast<float*>(counts.mutable_data_ptr());
  float* mean_of = static_cast<float*>(means.mutable_data_ptr());
  float* m2_of = static_cast<float*>(m2s.mutable_data_ptr());
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t slot = slot_of[row * slot_stride];
    if (slot < 0) {
      out[row] = std::numeric_limits<float>::quiet_NaN();
      continue;
    }
    const float value = value_of[row * value_stride];
    count_of[slot] += 1.0f;
    const float delta = value - mean_of[slot];
    mean_of[slot] += delta / count_of[slot];
    m2_of[slot] += delta * (value - mean_of[slot]);
    out[row] = mean_of[slot];
  }
  return running_means;
}

struct Moments {
  double number = 0.0;
  double mean = 0.0;  // the sum, until all lengths are in
  double m2 = 0.0;
};

std::tuple<Tensor, Tensor> moments(const Tensor& counts, const Tensor& groups,
                                   const Tensor& finished, int64_t num_groups) {
  const int64_t capacity = counts.size(0);
  const float* length_of = static_cast<const float*>(counts.const_data_ptr());
  const int64_t* group_of =
      static_cast<const int64_t*>(groups.const_data_ptr());
  const bool* is_finished = static_cast<const bool*>(finished.const_data_ptr());

  // Two passes, and in double: a sum of lengths is exact. The live ones of all
  // groups, then the finished ones.
  std::vector<Moments> all(2 * num_groups);
  const auto moments_of = [&](int64_t slot) -> Moments& {
    return all[group_of[slot] + (is_finished[slot] ? num_groups : 0)];
  };
  for (int64_t slot = 0; slot < capacity; ++slot) {
    if (group_of[slot] < 0) continue;
    Moments& own = moments_of(slot);
    own.number += 1.0;
    own.mean += length_of[slot];
  }
  for (Moments& own : all) {
    if (own.number > 0.0) own.mean /= own.number;
  }
  for (int64_t slot = 0; slot < capacity; ++slot) {
    if (group_of[slot] < 0) continue;
    Moments& own = moments_of(slot);
    const double difference = length_of[slot] - own.mean;
    own.m2 += difference * difference;
  }

  const auto as_tensor = [&](int64_t begin) {
    Tensor result = torch::stable::empty({num_groups, 3}, ScalarType::Float);
    float* out = static_cast<float*>(result.mutable_data_ptr());
    for (int64_t group = 0; group < num_groups; ++group) {
      const Moments& own = all[begin + group];
      *out++ = static_cast<float>(own.number);
      *out++ = static_cast<float>(own.mean);
      *out++ = static_cast<float>(own.m2);
    }
    return result;
  };
  return {as_tensor(0), as_tensor(num_groups)};
}

Tensor update_lengths(const Tensor& slots, const Tensor& values, Tensor counts,
                      Tensor means, Tensor m2s) {
  check_update(slots, values, counts, means, m2s);
  return updated(slots, values, counts, means, m2s);
}

std::tuple<Tensor, Tensor> group_moments(const Tensor& counts,
                                         const Tensor& groups,
                                         const Tensor& finished,
                                         int64_t num_groups) {
  check_moments(counts, groups, finished, num_groups);
  return moments(counts, groups, finished, num_groups);
}

std::tuple<Tensor, Tensor, Tensor> update_group_lengths(
    const Tensor& slots, const Tensor& values, Tensor counts, Tensor means,
    Tensor m2s, const Tensor& groups, const Tensor& finished,
    int64_t num_groups) {
  check_update(slots, values, counts, means, m2s);
  check_moments(counts, groups, finished, num_groups);
  Tensor running_means = updated(slots, values, counts, means, m2s);
  auto [live, finished_ones] = moments(counts, groups, finished, num_groups);
  return {running_means, live, finished_ones};
}

}  // namespace
}  // namespace vllm_rollout

STABLE_TORCH_LIBRARY_IMPL(vllm_rollout, CPU, library) {
  library.impl(vllm_rollout::kUpdateLengths.name,
               TORCH_BOX(&vllm_rollout::update_lengths));
  library.impl(vllm_rollout::kGroupMoments.name,
               TORCH_BOX(&vllm_rollout::group_moments));
  library.impl(vllm_rollout::kUpdateGroupLengths.name,
               TORCH_BOX(&vllm_rollout::update_group_lengths));
}
