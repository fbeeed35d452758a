// What a draft memory looks tokens up by: links between places, the table of
// n-grams, and the vote of the places that match longest.
#include "places.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

namespace vllm_rollout {
namespace {

constexpr int64_t kMaxVersionsOld = 30;
constexpr double kVoteKept = 0.98;
constexpr double kDoubt = 2.6;

// Of a place whose source ended so many versions ago.
const std::array<double, kMaxVersionsOld + 1> kVotes = [] {
  std::array<double, kMaxVersionsOld + 1> votes{};
  for (size_t n = 0; n < votes.size(); ++n)
    votes[n] = std::pow(kVoteKept, static_cast<double>(n));
  return votes;
}();

}  // namespace

void DraftMemory::store(Source& source, int32_t token) {
  Prompt& prompt = *source.prompt;
  if (source.length % kBlockTokens == 0) {
    auto block = std::make_unique<Block>();
    block->count = 0;
    block->next = kNoPlace;
    block->source = &source;
    block->before = kNoPlace;
    if (source.length > 0)
      block->before = place_in(source, source.length - 1);
    else if (source.branch > 0)
      block->before = place_in(*prompt.stem, source.branch - 1);
    uint32_t number = static_cast<uint32_t>(prompt.blocks.size());
    if (prompt.free_blocks.empty()) {
      prompt.blocks.push_back(std::move(block));
    } else {
      number = prompt.free_blocks.back();
      prompt.free_blocks.pop_back();
      prompt.blocks[number] = std::move(block);
    }
    if (!source.blocks.empty())
      prompt.blocks[source.blocks.back()]->next =
          static_cast<Place>(number * kBlockTokens);
    source.blocks.push_back(number);
    num_bytes_ += kBlockBytes;
  }
  Block& block = *prompt.blocks[source.blocks.back()];
  const int64_t offset = block.count++;
  const Place place =
      static_cast<Place>(source.blocks.back() * kBlockTokens + offset);
  block.tokens[offset] = token;
  block.links[offset] = kNoPlace;
  const bool has_ngram = source.branch + source.length >= min_match_;
  ++source.length;
  if (!has_ngram) return;

  const int32_t* ngram =
      source.recent.data() + source.recent.size() - min_match_;
  size_t slot = prompt.table.empty() ? 0 : slot_of(prompt, ngram);
  if (prompt.table.empty() || prompt.table[slot] == kNoPlace) {
    if (capacity_for(prompt.num_ngrams + 1) >
        static_cast<int64_t>(prompt.table.size())) {
      num_bytes_ +=
          table_bytes(prompt.num_ngrams + 1) - table_bytes(prompt.num_ngrams);
      resize_table(prompt, prompt.num_ngrams + 1);
      slot = slot_of(prompt, ngram);
    }
    ++prompt.num_ngrams;
  }
  block.links[offset] = prompt.table[slot];
  prompt.table[slot] = place;
}

uint64_t DraftMemory::hash(const int32_t* ngram) const {
  uint64_t value = seed_;
  for (int64_t i = 0; i < min_match_; ++i) {
    value = (value ^ static_cast<uint32_t>(ngram[i])) * 0x9E3779B97F4A7C15;
    value ^= value >> 32;
  }
  return value;
}

bool DraftMemory::follows(const Prompt& prompt, Place place,
                          const int32_t* ngram) const {
  for (int64_t i = min_match_ - 1; i >= 0; --i) {
    place = before(prompt, place);
    if (token_at(prompt, place) != ngram[i]) return false;
  }
  return true;
}

size_t DraftMemory::slot_of(const Prompt& prompt, const int32_t* ngram) const {
  const size_t mask = prompt.table.size() - 1;
  size_t slot = hash(ngram) & mask;
  while (prompt.table[slot] != kNoPlace &&
         !follows(prompt, prompt.table[slot], ngram))
    slot = (slot + 1) & mask;
  return slot;
}

void DraftMemory::resize_table(Prompt& prompt, int64_t num_ngrams) {
  std::vector<Place> heads = std::exchange(
      prompt.table, std::vector<Place>(capacity_for(num_ngrams), kNoPlace));
  const size_t mask = prompt.table.size() - 1;
  std::vector<int32_t> ngram(min_match_);
  for (Place head : heads) {
    if (head == kNoPlace) continue;
    Place place = head;
    for (int64_t i = min_match_ - 1; i >= 0; --i) {
      place = before(prompt, place);
      ngram[i] = token_at(prompt, place);
    }
    size_t slot = hash(ngram.data()) & mask;
    while (prompt.table[slot] != kNoPlace) slot = (slot + 1) & mask;
    prompt.table[slot] = head;
  }
}

void DraftMemory::find(const Prompt& prompt) {
  matches_.places.clear();
  matches_.length = 0;
  const int64_t length = static_cast<int64_t>(context_.size());
  if (length < min_match_ || prompt.table.empty()) return;
  const int32_t* end = context_.data() + length;
  const int64_t most = std::min(length, max_match_);
  Place place = prompt.table[slot_of(prompt, end - min_match_)];
  for (int64_t seen = 0; seen < max_places_ && place != kNoPlace; ++seen) {
    int64_t match = 0;
    for (Place each = before(prompt, place);
         match < most && each != kNoPlace &&
         token_at(prompt, each) == end[-1 - match];
         each = before(prompt, each))
      ++match;
    if (match > matches_.length) {
      matches_.length = match;
      matches_.places.clear();
    }
    if (match == matches_.length) matches_.places.push_back(place);
    place = link_at(prompt, place);
  }
}

double DraftMemory::weight(const Source& source) const {
  if (source.is_running) return 1.0;
  return kVotes[static_cast<size_t>(
      std::min(version_ - source.version, kMaxVersionsOld))];
}

// The token with most votes, of equals the one voted for most recently, and
// the probability that it is accepted.
double DraftMemory::vote(const Prompt& prompt, int32_t* token) {
  votes_.clear();
  double total = 0.0;
  for (Place place : matches_.places) {
    const double vote = weight(*prompt.blocks[place / kBlockTokens]->source);
    const int32_t voted = token_at(prompt, place);
    total += vote;
    const auto found =
        std::find_if(votes_.begin(), votes_.end(),
                     [&](const auto& each) { return each.first == voted; });
    if (found == votes_.end())
      votes_.emplace_back(voted, vote);
    else
      found->second += vote;
  }
  const auto best = std::max_element(
      votes_.begin(), votes_.end(),
      [](const auto& a, const auto& b) { return a.second < b.second; });
  *token = best->first;
  const double share = best->second / total;
  const double support =
      std::sqrt(total) * (static_cast<double>(matches_.length) + 0.5);
  return share * std::sqrt(share) * (support / (support + kDoubt));
}

int64_t DraftMemory::draft(const Source& source, int64_t longest,
                           int32_t* drafts, float* probabilities) {
  const Prompt& prompt = *source.prompt;
  const int64_t num_recent =
      std::min(static_cast<int64_t>(source.recent.size()), max_match_);
  context_.assign(source.recent.end() - num_recent, source.recent.end());
  matches_.places.clear();
  double probability = 1.0;
  for (int64_t i = 0; i < longest; ++i) {
    if (matches_.places.empty()) find(prompt);
    if (matches_.places.empty()) return i;
    probability *= vote(prompt, &drafts[i]);
    probabilities[i] = static_cast<float>(probability);
    context_.push_back(drafts[i]);
    matches_.length = std::min(matches_.length + 1, max_match_);
    size_t num_left = 0;
    for (Place place : matches_.places) {
      if (token_at(prompt, place) != drafts[i]) continue;
      const Place next = after(prompt, place);
      if (next != kNoPlace) matches_.places[num_left++] = next;
    }
    matches_.places.resize(num_left);
  }
  return longest;
}

}  // namespace vllm_rollout
