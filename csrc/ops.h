// Every operator of the library: name and schema, said once.
//
// Each backend file registers its kernels under these names, and exactly one
// file (token_confidence_cpu.cpp) registers the schemas themselves.
#pragma once

namespace vllm_rollout {

struct Operator {
  const char* name;
  const char* schema;
};

// logits: float32, bfloat16 or float16 [num_rows, vocab_size], stride(1) == 1
// rows: int64 [num_seen], contiguous: the rows to look at
// returns: float32 [num_seen]
inline constexpr Operator kTokenConfidence{
    "token_confidence",
    "token_confidence(Tensor logits, Tensor rows) -> Tensor"};

// slots, positions: int64 [num_rows], contiguous
// values: float32 [num_rows], contiguous
// means, m2s: float32 [capacity, num_kept], contiguous
// trace: float32 [capacity, trace_length], contiguous
// returns: float32 [num_rows, 2], mean and standard deviation
inline constexpr Operator kUpdateConfidence{
    "update_confidence",
    "update_confidence(Tensor slots, Tensor positions, Tensor values, "
    "Tensor(a!) means, Tensor(b!) m2s, Tensor(c!) trace) -> Tensor"};

inline constexpr Operator kOperators[] = {kTokenConfidence, kUpdateConfidence};

}  // namespace vllm_rollout
