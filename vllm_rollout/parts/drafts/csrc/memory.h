// What prompts have been answered with, as a source of drafts.
//
// The specification is DraftMemoryReference in
// vllm_rollout/parts/drafts/worker/memory_reference.py, which this equals call
// for call. A token costs its four bytes, four for the link to the place before
// it that follows the same tokens, and its share of a table of n-grams.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace vllm_rollout {

// A token within a prompt: number of its block times kBlockTokens, plus offset.
using Place = uint32_t;

inline constexpr int64_t kBlockTokens = 64;
inline constexpr Place kNoPlace = UINT32_MAX;

struct Source;
struct Prompt;

struct Block {
  int32_t tokens[kBlockTokens];
  Place links[kBlockTokens];  // the place before that follows the same tokens
  Place before;               // of the first token: the token it follows
  Place next;                 // the first token of the next block
  int64_t count;
  Source* source;
};

// Tokens that follow one another: a sequence's own, or those of the stem.
struct Source {
  Prompt* prompt = nullptr;
  int64_t number = -1;
  int64_t branch = 0;   // tokens of the stem that come before the first own one
  int64_t version = 0;  // weights that it ended under
  int64_t length = 0;
  bool is_running = true;
  bool is_cut = false;  // there was no room: nothing more is stored
  bool is_dead = false;
  std::vector<uint32_t> blocks;
  std::vector<int32_t> recent;  // the last tokens, at least max_match of them
};

// All that is known of one key. The stem is the context it first began with;
// a sequence stores only what differs from it.
struct Prompt {
  std::string key;
  int64_t used = 0;
  std::unique_ptr<Source> stem;
  std::vector<std::unique_ptr<Source>> ended;  // the first to end comes first
  std::vector<std::unique_ptr<Source>> running;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<uint32_t> free_blocks;
  std::vector<Place> table;  // most recent place of each n-gram
  int64_t num_ngrams = 0;
};

struct KeptSequence {
  int64_t branch;
  int64_t versions_old;
  std::vector<int32_t> tokens;
};

struct KeptPrompt {
  std::string key;
  std::vector<int32_t> stem;
  std::vector<KeptSequence> sequences;
};

class DraftMemory {
 public:
  DraftMemory(int64_t max_bytes, int64_t min_match, int64_t max_match,
              int64_t max_places);

  int64_t begin(std::string_view key, const int32_t* context, int64_t length);
  // tokens: [num_rows, width]; drafts, probabilities: [num_rows, num_columns]
  void step(int64_t num_rows, const int64_t* sequences, int64_t width,
            const int32_t* tokens, const int32_t* longest, int64_t num_columns,
            int32_t* drafts, float* probabilities);
  void end(int64_t count, const int64_t* sequences, bool keep);
  void age() { ++version_; }
  std::vector<KeptPrompt> kept() const;
  void restore(const KeptPrompt& kept);

  int64_t num_bytes() const { return num_bytes_; }
  int64_t num_prompts() const { return static_cast<int64_t>(prompts_.size()); }

 private:
  struct Matches {
    std::vector<Place> places;  // the most recent first
    int64_t length = 0;
  };

  Prompt& prompt_of(std::string_view key);
  void touch(Prompt& prompt) { prompt.used = ++clock_; }
  Source& add_source(Prompt& prompt, int64_t number);
  void make_stem(Prompt& prompt, const int32_t* context, int64_t length);
  // Tokens that the stem begins with, too.
  int64_t common(const Prompt& prompt, const int32_t* tokens,
                 int64_t length) const;
  void follow(Source& source, const int32_t* stem, int64_t branch,
              const int32_t* own, int64_t length);
  std::unique_ptr<Source> take_running(Source& source);
  void drop_if_empty(Prompt& prompt);

  void append(Source& source, int32_t token);
  void remember(Source& source, int32_t token) const;
  int64_t bytes_needed(const Source& source) const;
  void store(Source& source, int32_t token);
  bool evict(int64_t bytes);
  void remove(Prompt& prompt, std::vector<std::unique_ptr<Source>> dead);

  uint64_t hash(const int32_t* ngram) const;
  bool follows(const Prompt& prompt, Place place, const int32_t* ngram) const;
  size_t slot_of(const Prompt& prompt, const int32_t* ngram) const;
  void resize_table(Prompt& prompt, int64_t num_ngrams);

  void find(const Prompt& prompt);
  int64_t draft(const Source& source, int64_t longest, int32_t* drafts,
                float* probabilities);
  double vote(const Prompt& prompt, int32_t* token);
  double weight(const Source& source) const;
  void check_running(int64_t count, const int64_t* sequences) const;

  const int64_t max_bytes_;
  const int64_t min_match_;
  const int64_t max_match_;
  const int64_t max_places_;
  const uint64_t seed_;
  int64_t num_bytes_ = 0;
  int64_t num_ended_ = 0;
  int64_t clock_ = 0;
  int64_t version_ = 0;
  int64_t next_number_ = 0;
  std::unordered_map<std::string, std::unique_ptr<Prompt>> prompts_;
  std::unordered_map<int64_t, Source*> running_;

  // Of the draft being made, kept so that a row allocates nothing.
  std::vector<int32_t> context_;
  Matches matches_;
  std::vector<std::pair<int32_t, double>> votes_;
};

}  // namespace vllm_rollout
