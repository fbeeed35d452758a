// Places of tokens: how they follow one another, and what they are counted as.
#pragma once

#include "memory.h"

namespace vllm_rollout {

// What is counted; the specification has the same numbers. A block and its
// entry in the list of blocks, as the allocator rounds it:
inline constexpr int64_t kBlockBytes = 560;
inline constexpr int64_t kSequenceBytes = 320;
inline constexpr int64_t kPromptBytes = 768;
static_assert(sizeof(Block) + 24 <= kBlockBytes);
static_assert(sizeof(Source) + 160 <= kSequenceBytes);
static_assert(sizeof(Prompt) + sizeof(Source) + 240 <= kPromptBytes);

inline int64_t capacity_for(int64_t num_ngrams) {
  if (num_ngrams == 0) return 0;
  int64_t capacity = 16;
  while (4 * num_ngrams > 3 * capacity) capacity *= 2;
  return capacity;
}

inline int64_t table_bytes(int64_t num_ngrams) {
  return capacity_for(num_ngrams) * static_cast<int64_t>(sizeof(Place));
}

inline int64_t blocks_for(int64_t length) {
  return (length + kBlockTokens - 1) / kBlockTokens;
}

inline int32_t token_at(const Prompt& prompt, Place place) {
  return prompt.blocks[place / kBlockTokens]->tokens[place % kBlockTokens];
}

inline Place link_at(const Prompt& prompt, Place place) {
  return prompt.blocks[place / kBlockTokens]->links[place % kBlockTokens];
}

inline Place before(const Prompt& prompt, Place place) {
  if (place % kBlockTokens != 0) return place - 1;
  return prompt.blocks[place / kBlockTokens]->before;
}

inline Place after(const Prompt& prompt, Place place) {
  const Block& block = *prompt.blocks[place / kBlockTokens];
  const int64_t offset = place % kBlockTokens + 1;
  return offset < block.count ? place + 1 : block.next;
}

// The place of a source's token; its blocks are full but for the last.
inline Place place_in(const Source& source, int64_t position) {
  return static_cast<Place>(source.blocks[position / kBlockTokens] *
                                kBlockTokens +
                            position % kBlockTokens);
}

}  // namespace vllm_rollout
