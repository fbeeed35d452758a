// Every operator of the library: name and schema, said once.
//
// Each backend file registers its kernels under these names, and exactly one
// file (token_stats_cpu.cpp) registers the schemas themselves.
#pragma once

namespace vllm_rollout {

struct Operator {
  const char* name;
  const char* schema;
};

// logits: float32, bfloat16 or float16 [num_rows, vocab_size], stride(1) == 1
// sampled: int64 [num_rows], a token id or -1
// returns: three float32 [num_rows]
inline constexpr Operator kTokenStats{
    "token_stats",
    "token_stats(Tensor logits, Tensor sampled) -> "
    "(Tensor logprob, Tensor entropy, Tensor confidence)"};

// slots: int64 [num_rows], distinct slots or -1
// values: float32 [num_rows]
// counts, means, m2s: float32 [capacity], contiguous
// returns: float32 [num_rows]
inline constexpr Operator kUpdateLengths{
    "update_lengths",
    "update_lengths(Tensor slots, Tensor values, Tensor(a!) counts, "
    "Tensor(b!) means, Tensor(c!) m2s) -> Tensor"};

// counts, groups, finished: float32, int64 and bool [capacity], contiguous
// returns: two float32 [num_groups, 3]
inline constexpr Operator kGroupMoments{
    "group_moments",
    "group_moments(Tensor counts, Tensor groups, Tensor finished, "
    "int num_groups) -> (Tensor live, Tensor finished_ones)"};

inline constexpr Operator kUpdateGroupLengths{
    "update_group_lengths",
    "update_group_lengths(Tensor slots, Tensor values, Tensor(a!) counts, "
    "Tensor(b!) means, Tensor(c!) m2s, Tensor groups, Tensor finished, "
    "int num_groups) -> (Tensor running_means, Tensor live, "
    "Tensor finished_ones)"};

inline constexpr Operator kOperators[] = {kTokenStats, kUpdateLengths,
                                          kGroupMoments, kUpdateGroupLengths};

}  // namespace vllm_rollout
