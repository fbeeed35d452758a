// What a draft memory stores of prompts and their sequences, and for how long.
#include "memory.h"

#include <algorithm>
#include <random>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include "places.h"

namespace vllm_rollout {
namespace {

constexpr int64_t kMaxBlocks = int64_t{1} << 26;

std::vector<int32_t> tokens_of(const Source& source) {
  std::vector<int32_t> tokens;
  tokens.reserve(source.length);
  for (uint32_t number : source.blocks) {
    const Block& block = *source.prompt->blocks[number];
    tokens.insert(tokens.end(), block.tokens, block.tokens + block.count);
  }
  return tokens;
}

}  // namespace

DraftMemory::DraftMemory(int64_t max_bytes, int64_t min_match,
                         int64_t max_match, int64_t max_places)
    : max_bytes_(max_bytes),
      min_match_(min_match),
      max_match_(max_match),
      max_places_(max_places),
      // Unknown to whoever writes prompts, so that none makes slots collide.
      seed_((uint64_t{std::random_device{}()} << 32) ^ std::random_device{}()) {
}

int64_t DraftMemory::begin(std::string_view key, const int32_t* context,
                           int64_t length) {
  Prompt& prompt = prompt_of(key);
  touch(prompt);
  const int64_t number = next_number_++;
  Source& source = add_source(prompt, number);
  running_[number] = &source;
  make_stem(prompt, context, length);
  const int64_t branch = common(prompt, context, length);
  follow(source, context, branch, context + branch, length - branch);
  return number;
}

void DraftMemory::step(int64_t num_rows, const int64_t* sequences,
                       int64_t width, const int32_t* tokens,
                       const int32_t* longest, int64_t num_columns,
                       int32_t* drafts, float* probabilities) {
  check_running(num_rows, sequences);
  for (int64_t row = 0; row < num_rows; ++row) {
    bool is_padding = false;
    for (int64_t column = 0; column < width; ++column) {
      const int32_t token = tokens[row * width + column];
      if (token < -1 || (is_padding && token != -1))
        throw std::invalid_argument(
            "tokens[" + std::to_string(row) +
            "] must be tokens, which are not negative, and then -1, got " +
            std::to_string(token) + " at " + std::to_string(column));
      is_padding = token == -1;
    }
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    Source& source = *running_.at(sequences[row]);
    touch(*source.prompt);
    for (int64_t column = 0; column < width; ++column) {
      const int32_t token = tokens[row * width + column];
      if (token == -1) break;
      append(source, token);
    }
  }
  std::fill_n(drafts, num_rows * num_columns, -1);
  std::fill_n(probabilities, num_rows * num_columns, 0.0f);
  for (int64_t row = 0; row < num_rows; ++row) {
    draft(*running_.at(sequences[row]), longest[row],
          drafts + row * num_columns, probabilities + row * num_columns);
  }
}

void DraftMemory::end(int64_t count, const int64_t* sequences, bool keep) {
  check_running(count, sequences);
  std::vector<Prompt*> prompts;
  std::unordered_map<Prompt*, std::vector<std::unique_ptr<Source>>> dead;
  for (int64_t i = 0; i < count; ++i) {
    Source& source = *running_.at(sequences[i]);
    Prompt& prompt = *source.prompt;
    touch(prompt);
    prompts.push_back(&prompt);
    running_.erase(source.number);
    std::unique_ptr<Source> ended = take_running(source);
    ended->is_running = false;
    ended->version = version_;
    ended->recent = {};
    if (keep && ended->length > 0) {
      prompt.ended.push_back(std::move(ended));
      ++num_ended_;
    } else {
      dead[&prompt].push_back(std::move(ended));
    }
  }
  for (auto& [prompt, sources] : dead) remove(*prompt, std::move(sources));
  std::sort(prompts.begin(), prompts.end());
  prompts.erase(std::unique(prompts.begin(), prompts.end()), prompts.end());
  for (Prompt* prompt : prompts) drop_if_empty(*prompt);
}

std::vector<KeptPrompt> DraftMemory::kept() const {
  std::vector<const Prompt*> prompts;
  for (const auto& [key, prompt] : prompts_) prompts.push_back(prompt.get());
  std::sort(prompts.begin(), prompts.end(),
            [](auto* a, auto* b) { return a->used < b->used; });
  std::vector<KeptPrompt> result;
  for (const Prompt* prompt : prompts) {
    KeptPrompt kept{prompt->key, tokens_of(*prompt->stem), {}};
    for (const auto* sources : {&prompt->ended, &prompt->running}) {
      for (const auto& source : *sources) {
        if (source->length == 0) continue;
        const int64_t versions_old =
            source->is_running ? 0 : version_ - source->version;
        kept.sequences.push_back(
            {source->branch, versions_old, tokens_of(*source)});
      }
    }
    if (!kept.sequences.empty()) result.push_back(std::move(kept));
  }
  return result;
}

void DraftMemory::restore(const KeptPrompt& kept) {
  Prompt& prompt = prompt_of(kept.key);
  touch(prompt);
  make_stem(prompt, kept.stem.data(), kept.stem.size());
  const int64_t shared = common(prompt, kept.stem.data(), kept.stem.size());
  for (const KeptSequence& sequence : kept.sequences) {
    if (sequence.branch > shared) continue;
    Source& source = add_source(prompt, -1);
    follow(source, kept.stem.data(), sequence.branch, sequence.tokens.data(),
           sequence.tokens.size());
    std::unique_ptr<Source> ended = take_running(source);
    ended->is_running = false;
    ended->version = version_ - sequence.versions_old;
    ended->recent = {};
    if (ended->length > 0) {
      prompt.ended.push_back(std::move(ended));
      ++num_ended_;
    } else {
      std::vector<std::unique_ptr<Source>> dead;
      dead.push_back(std::move(ended));
      remove(prompt, std::move(dead));
    }
  }
  drop_if_empty(prompt);
}

Prompt& DraftMemory::prompt_of(std::string_view key) {
  std::unique_ptr<Prompt>& prompt = prompts_[std::string(key)];
  if (!prompt) {
    prompt = std::make_unique<Prompt>();
    prompt->key = key;
    num_bytes_ += kPromptBytes + 2 * static_cast<int64_t>(key.size());
  }
  return *prompt;
}

Source& DraftMemory::add_source(Prompt& prompt, int64_t number) {
  auto source = std::make_unique<Source>();
  source->prompt = &prompt;
  source->number = number;
  prompt.running.push_back(std::move(source));
  num_bytes_ += kSequenceBytes + 16 * max_match_;
  if (num_bytes_ > max_bytes_) evict(0);
  return *prompt.running.back();
}

void DraftMemory::make_stem(Prompt& prompt, const int32_t* context,
                            int64_t length) {
  if (prompt.stem) return;
  prompt.stem = std::make_unique<Source>();
  prompt.stem->prompt = &prompt;
  for (int64_t i = 0; i < length && !prompt.stem->is_cut; ++i)
    append(*prompt.stem, context[i]);
  prompt.stem->recent = {};
}

int64_t DraftMemory::common(const Prompt& prompt, const int32_t* tokens,
                            int64_t length) const {
  const int64_t most = std::min(length, prompt.stem->length);
  int64_t equal = 0;
  while (equal < most &&
         token_at(prompt, place_in(*prompt.stem, equal)) == tokens[equal])
    ++equal;
  return equal;
}

void DraftMemory::follow(Source& source, const int32_t* stem, int64_t branch,
                         const int32_t* own, int64_t length) {
  source.branch = branch;
  for (int64_t i = std::max<int64_t>(0, branch - max_match_); i < branch; ++i)
    remember(source, stem[i]);
  for (int64_t i = 0; i < length; ++i) append(source, own[i]);
}

std::unique_ptr<Source> DraftMemory::take_running(Source& source) {
  auto& running = source.prompt->running;
  const auto found =
      std::find_if(running.begin(), running.end(),
                   [&](const auto& each) { return each.get() == &source; });
  std::unique_ptr<Source> taken = std::move(*found);
  running.erase(found);
  return taken;
}

void DraftMemory::drop_if_empty(Prompt& prompt) {
  if (!prompt.running.empty() || !prompt.ended.empty()) return;
  num_bytes_ -= kPromptBytes + 2 * static_cast<int64_t>(prompt.key.size()) +
                table_bytes(prompt.num_ngrams);
  if (prompt.stem) num_bytes_ -= blocks_for(prompt.stem->length) * kBlockBytes;
  prompts_.erase(std::string(prompt.key));
}

void DraftMemory::append(Source& source, int32_t token) {
  while (!source.is_cut) {
    const int64_t bytes = bytes_needed(source);
    if (num_bytes_ + bytes <= max_bytes_) break;
    source.is_cut = !evict(bytes);
  }
  if (!source.is_cut) store(source, token);
  remember(source, token);
}

void DraftMemory::remember(Source& source, int32_t token) const {
  std::vector<int32_t>& recent = source.recent;
  recent.reserve(4 * max_match_);
  if (static_cast<int64_t>(recent.size()) == 4 * max_match_)
    recent.erase(recent.begin(), recent.end() - max_match_);
  recent.push_back(token);
}

int64_t DraftMemory::bytes_needed(const Source& source) const {
  const Prompt& prompt = *source.prompt;
  int64_t bytes = 0;
  if (source.length % kBlockTokens == 0) {
    if (prompt.free_blocks.empty() &&
        static_cast<int64_t>(prompt.blocks.size()) >= kMaxBlocks - 1)
      return max_bytes_ + 1;
    bytes += kBlockBytes;
  }
  const int64_t full = capacity_for(prompt.num_ngrams) * 3 / 4;
  if (prompt.num_ngrams == full &&
      source.branch + source.length >= min_match_) {
    const int32_t* ngram =
        source.recent.data() + source.recent.size() - min_match_;
    if (prompt.table.empty() ||
        prompt.table[slot_of(prompt, ngram)] == kNoPlace)
      bytes +=
          table_bytes(prompt.num_ngrams + 1) - table_bytes(prompt.num_ngrams);
  }
  return bytes;
}

bool DraftMemory::evict(int64_t bytes) {
  if (num_ended_ == 0) return false;
  const int64_t target = max_bytes_ - std::max(max_bytes_ / 8, bytes);
  std::vector<Prompt*> prompts;
  for (const auto& [key, prompt] : prompts_)
    if (!prompt->ended.empty()) prompts.push_back(prompt.get());
  std::sort(prompts.begin(), prompts.end(),
            [](auto* a, auto* b) { return a->used < b->used; });
  for (Prompt* prompt : prompts) {
    int64_t freed = 0;
    size_t count = 0;
    while (count < prompt->ended.size() && num_bytes_ - freed > target) {
      freed += kSequenceBytes + 16 * max_match_ +
               blocks_for(prompt->ended[count]->length) * kBlockBytes;
      ++count;
    }
    if (count == 0) break;
    std::vector<std::unique_ptr<Source>> dead(
        std::make_move_iterator(prompt->ended.begin()),
        std::make_move_iterator(prompt->ended.begin() + count));
    prompt->ended.erase(prompt->ended.begin(), prompt->ended.begin() + count);
    num_ended_ -= static_cast<int64_t>(count);
    remove(*prompt, std::move(dead));
    drop_if_empty(*prompt);
  }
  return true;
}

// Takes sources, which stand in no list any more, out of the prompt's chains,
// whose order stays, and frees their blocks. Of a chain the max_places_ most
// recent places stay, because drafts look at no others. So dead places cost
// time, and not all tokens of the prompt. A prompt without another source is
// left as it is: drop_if_empty follows.
void DraftMemory::remove(Prompt& prompt,
                         std::vector<std::unique_ptr<Source>> dead) {
  bool has_blocks = false;
  for (const auto& source : dead) {
    source->is_dead = true;
    num_bytes_ -= kSequenceBytes + 16 * max_match_ +
                  static_cast<int64_t>(source->blocks.size()) * kBlockBytes;
    has_blocks = has_blocks || !source->blocks.empty();
  }
  if (!has_blocks || (prompt.running.empty() && prompt.ended.empty())) return;
  int64_t num_ngrams = 0;
  for (Place& head : prompt.table) {
    Place* link = &head;
    for (int64_t num_kept = 0; *link != kNoPlace;) {
      Block& block = *prompt.blocks[*link / kBlockTokens];
      Place& next = block.links[*link % kBlockTokens];
      if (num_kept == max_places_) {
        *link = kNoPlace;
      } else if (block.source->is_dead) {
        *link = next;
      } else {
        link = &next;
        ++num_kept;
      }
    }
    num_ngrams += head != kNoPlace;
  }
  num_bytes_ += table_bytes(num_ngrams) - table_bytes(prompt.num_ngrams);
  prompt.num_ngrams = num_ngrams;
  resize_table(prompt, num_ngrams);
  for (const auto& source : dead) {
    for (uint32_t number : source->blocks) {
      prompt.blocks[number].reset();
      prompt.free_blocks.push_back(number);
    }
  }
}

void DraftMemory::check_running(int64_t count, const int64_t* sequences) const {
  std::unordered_set<int64_t> seen;
  for (int64_t i = 0; i < count; ++i) {
    if (running_.find(sequences[i]) == running_.end())
      throw std::invalid_argument("sequences[" + std::to_string(i) +
                                  "] must be one that runs, got " +
                                  std::to_string(sequences[i]));
    if (!seen.insert(sequences[i]).second)
      throw std::invalid_argument("sequences must differ, got " +
                                  std::to_string(sequences[i]) + " twice");
  }
}

}  // namespace vllm_rollout
