// Which states of a request are worth a snapshot.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace trtree {

struct WantedSnapshot {
  int32_t at = 0;      // tokens committed, whole pages
  bool moves = false;  // only until the request's next one
};

// One stays at the end of the prompt's last full page, for prompts that begin with it; one
// where a beginning that others have had too parts from theirs; one follows the request's
// progress, for what continues its text or is pre-empted. Each is `interval` tokens or more
// behind the last.
struct SnapshotPlan {
  int32_t fork = 0;    // tokens that others have had too
  int32_t kept = 0;    // where the last one is that stays, or the request began
  int32_t latest = 0;  // where the last one is

  // Those to take when the tokens from `begin` to `end` are committed, in order.
  std::vector<WantedSnapshot> next(int32_t begin, int32_t end, int32_t prompt, int32_t page_size,
                                   int32_t interval) {
    std::vector<WantedSnapshot> wanted;
    // An equal prompt has its last token to run.
    const int32_t prompt_end = (prompt - 1) / page_size * page_size;
    for (const int32_t at : {std::min(fork, prompt_end), std::max(fork, prompt_end)}) {
      if (at <= begin || at > end || at - kept < interval) continue;
      wanted.push_back({at, false});
      kept = latest = at;
    }
    const int32_t last = end / page_size * page_size;
    if (last > begin && last - latest >= interval) {
      wanted.push_back({last, true});
      latest = last;
    }
    return wanted;
  }
};

}  // namespace trtree
