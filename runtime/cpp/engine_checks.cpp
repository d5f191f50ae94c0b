#include "runtime/cpp/engine_checks.hpp"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>

namespace trtree {

namespace {

using std::to_string;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

std::string request_name(const Sequence& sequence) {
  return "request " + to_string(sequence.request_id) + ": ";
}

void check_token(int32_t token, const Capabilities& capabilities) {
  if (token < 0 || token >= capabilities.vocab_size) {
    refuse("token id " + to_string(token) + " is outside the vocabulary of " +
           to_string(capabilities.vocab_size));
  }
}

void check_slot(const std::string& whose, int32_t slot, const Capabilities& capabilities) {
  if (slot < 0 || slot >= capabilities.max_batch_size) {
    refuse(whose + "slot " + to_string(slot) + " of " + to_string(capabilities.max_batch_size));
  }
}

// Slots that are not in the request's own pages would be somebody else's.
void check_sequence(const Sequence& sequence, int64_t num_rows, const Capabilities& capabilities) {
  check_slot(request_name(sequence), sequence.slot, capabilities);
  if (sequence.committed_length < 0) {
    refuse(request_name(sequence) + "committed length " + to_string(sequence.committed_length));
  }
  if (capabilities.kv_layout != KvLayout::kPaged) return;
  const int64_t needed = int64_t{sequence.committed_length} + num_rows;
  const auto pages = static_cast<int64_t>(sequence.pages.size());
  if (needed > pages * capabilities.page_size) {
    refuse(request_name(sequence) + to_string(needed) + " KV slots in " + to_string(pages) +
           " pages of " + to_string(capabilities.page_size));
  }
  for (const int32_t page : sequence.pages) {
    if (page < 0 || page >= capabilities.num_pages) {
      refuse(request_name(sequence) + "page " + to_string(page) + " of " +
             to_string(capabilities.num_pages));
    }
  }
}

void check_count(const char* what, int64_t count, int64_t limit) {
  if (count > limit) {
    refuse(to_string(count) + " " + what + "; the engine takes at most " + to_string(limit));
  }
}

// Each request, and each slot, once.
class Once {
 public:
  void add(const Sequence& sequence) {
    if (!requests_.insert(sequence.request_id).second) {
      refuse(request_name(sequence) + "given twice");
    }
    if (!slots_.insert(sequence.slot).second) {
      refuse(request_name(sequence) + "slot " + to_string(sequence.slot) + " is another request's");
    }
  }

 private:
  std::set<int64_t> requests_;
  std::set<int32_t> slots_;
};

bool same(const Sequence& a, const Sequence& b) {
  return a.request_id == b.request_id && a.slot == b.slot &&
         a.committed_length == b.committed_length && a.pages == b.pages;
}

void check_path(const Commit& commit, const Segment& segment, const RowBatch& batch) {
  int32_t previous = -1;
  for (const int32_t row : commit.rows) {
    if (row < 0 || row >= segment.num_rows || batch.parents[segment.first_row + row] != previous) {
      refuse(request_name(commit.sequence) + "commit of row " + to_string(row) + " after row " +
             to_string(previous) + " is no path of the step's " + to_string(segment.num_rows) +
             " rows");
    }
    previous = row;
  }
}

void check_snapshot(int32_t snapshot, const Capabilities& capabilities) {
  if (snapshot < 0 || snapshot >= capabilities.state_snapshots) {
    refuse("snapshot " + to_string(snapshot) + " of " + to_string(capabilities.state_snapshots));
  }
}

}  // namespace

void check_batch(const RowBatch& batch, const Capabilities& capabilities) {
  check_count("requests in a step", static_cast<int64_t>(batch.segments.size()),
              capabilities.max_batch_size);
  check_count("rows in a step", batch.num_rows(), capabilities.max_num_rows);
  Once once;
  for (const Segment& segment : batch.segments) {
    once.add(segment.sequence);
    check_sequence(segment.sequence, segment.num_rows, capabilities);
  }
  for (const int32_t token : batch.token_ids) check_token(token, capabilities);
}

void check_draft_requests(const std::vector<DraftRequest>& requests, int32_t top_k,
                          const Capabilities& capabilities) {
  if (capabilities.block_size < 2) refuse("this engine has no drafter");
  if (top_k < 1 || top_k > capabilities.max_top_k) {
    refuse("top_k " + to_string(top_k) + "; the engine offers 1 to " +
           to_string(capabilities.max_top_k));
  }
  check_count("requests in a drafter pass", static_cast<int64_t>(requests.size()),
              capabilities.max_batch_size);
  Once once;
  for (const DraftRequest& request : requests) {
    once.add(request.sequence);
    check_sequence(request.sequence, capabilities.block_size, capabilities);
    check_token(request.bonus_token, capabilities);
  }
}

void check_commits(const std::vector<Commit>& commits, const RowBatch& batch) {
  Once once;
  for (const Commit& commit : commits) {
    once.add(commit.sequence);
    const auto segment =
        std::find_if(batch.segments.begin(), batch.segments.end(), [&](const Segment& candidate) {
          return candidate.sequence.request_id == commit.sequence.request_id;
        });
    if (segment == batch.segments.end()) {
      refuse(request_name(commit.sequence) + "commit without rows in the last step");
    }
    if (!same(commit.sequence, segment->sequence)) {
      refuse(request_name(commit.sequence) + "commit of another sequence than the step's");
    }
    check_path(commit, *segment, batch);
  }
}

void check_saves(const std::vector<Commit>& commits, const Capabilities& capabilities) {
  std::set<int32_t> snapshots;
  for (const Commit& commit : commits) {
    const auto rows = static_cast<int32_t>(commit.rows.size());
    int32_t before = 0;
    for (const StateSave& save : commit.saves) {
      if (save.rows <= before || save.rows > rows) {
        refuse(request_name(commit.sequence) + "a state saved after " + to_string(save.rows) +
               " of " + to_string(rows) + " committed rows, the one before it after " +
               to_string(before));
      }
      before = save.rows;
      check_snapshot(save.snapshot, capabilities);
      if (!snapshots.insert(save.snapshot).second) {
        refuse(request_name(commit.sequence) + "snapshot " + to_string(save.snapshot) +
               " is saved twice");
      }
    }
  }
}

void check_load(int32_t snapshot, int32_t slot, const Capabilities& capabilities) {
  check_snapshot(snapshot, capabilities);
  check_slot("", slot, capabilities);
}

}  // namespace trtree
