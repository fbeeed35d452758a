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

inline constexpr Operator kOperators[] = {kTokenStats};

}  // namespace vllm_rollout
