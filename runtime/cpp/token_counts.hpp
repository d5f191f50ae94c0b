// What the penalties look at: the tokens of a sequence, counted.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace trtree {

// Which tokens are in the prompt, and how often each is in the output. The walk along a
// draft path adds each token before it samples the next, and can take them back.
class TokenCounts {
 public:
  struct Entry {
    int32_t token_id;
    bool in_prompt;
    int32_t in_output;  // times
  };

  TokenCounts() = default;
  explicit TokenCounts(std::span<const int32_t> prompt) {
    for (const int32_t token : prompt) entry(token).in_prompt = true;
  }

  // The output grows by one token.
  void add(int32_t token) { ++entry(token).in_output; }
  // Undo one add() of this token; the caller made one.
  void take_back(int32_t token) { --entry(token).in_output; }

  // One for each distinct token; one taken back may stay, with nothing counted.
  std::span<const Entry> entries() const { return entries_; }

 private:
  Entry& entry(int32_t token) {
    const auto [found, is_new] = index_.try_emplace(token, entries_.size());
    if (is_new) entries_.push_back({token, false, 0});
    return entries_[found->second];
  }

  std::vector<Entry> entries_;
  std::unordered_map<int32_t, size_t> index_;  // of a token, in entries_
};

}  // namespace trtree
