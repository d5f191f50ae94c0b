#include "runtime/cpp/distributed/engine_calls.hpp"

#include <stdexcept>
#include <string>
#include <utility>

namespace trtree::distributed {

namespace {

enum Call : int32_t { kStep = 1, kCommit = 2, kDraft = 3, kLoadState = 4 };

class Writer {
 public:
  explicit Writer(Call call) : words_{call} {}

  void word(int32_t value) { words_.push_back(value); }
  void words(std::span<const int32_t> values) {
    word(static_cast<int32_t>(values.size()));
    words_.insert(words_.end(), values.begin(), values.end());
  }
  void sequence(const Sequence& sequence) {
    word(static_cast<int32_t>(sequence.request_id));
    word(static_cast<int32_t>(sequence.request_id >> 32));
    word(sequence.slot);
    word(sequence.committed_length);
    words(sequence.pages);
  }
  Message take() { return std::move(words_); }

 private:
  Message words_;
};

class Reader {
 public:
  explicit Reader(std::span<const int32_t> words) : words_(words) {}

  int32_t word() { return take(1)[0]; }
  // Of things that take at least one word each.
  int32_t count() {
    const int32_t value = word();
    take(value, 0);
    return value;
  }
  std::vector<int32_t> words() {
    const auto values = take(word());
    return {values.begin(), values.end()};
  }
  Sequence sequence() {
    const auto low = static_cast<uint32_t>(word());
    const auto high = static_cast<int64_t>(word());
    Sequence result;
    result.request_id = high << 32 | low;
    result.slot = word();
    result.committed_length = word();
    result.pages = words();
    return result;
  }
  void end() const {
    if (!words_.empty()) refuse(std::to_string(words_.size()) + " words too many");
  }
  [[noreturn]] static void refuse(const std::string& what) {
    throw std::invalid_argument("message to a worker rank: " + what);
  }

 private:
  std::span<const int32_t> take(int32_t count) { return take(count, count); }
  // The next `used` words, of `count` that must be there.
  std::span<const int32_t> take(int32_t count, int32_t used) {
    if (count < 0 || static_cast<size_t>(count) > words_.size()) {
      refuse(std::to_string(count) + " words wanted, " + std::to_string(words_.size()) + " left");
    }
    const auto result = words_.first(used);
    words_ = words_.subspan(used);
    return result;
  }

  std::span<const int32_t> words_;
};

std::vector<SegmentRequest> read_segments(Reader& reader) {
  std::vector<SegmentRequest> requests(reader.count());
  for (SegmentRequest& request : requests) {
    request.sequence = reader.sequence();
    request.token_ids = reader.words();
    request.parents = reader.words();
    request.output_rows = reader.words();
  }
  return requests;
}

}  // namespace

Message encode_step(const RowBatch& batch) {
  Writer writer(kStep);
  writer.word(static_cast<int32_t>(batch.segments.size()));
  size_t output = 0;
  for (const Segment& segment : batch.segments) {
    writer.sequence(segment.sequence);
    writer.words({batch.token_ids.data() + segment.first_row, size_t(segment.num_rows)});
    writer.words({batch.parents.data() + segment.first_row, size_t(segment.num_rows)});
    std::vector<int32_t> rows;
    const int32_t end = segment.first_row + segment.num_rows;
    for (; output < batch.output_rows.size() && batch.output_rows[output] < end; ++output) {
      rows.push_back(batch.output_rows[output] - segment.first_row);
    }
    writer.words(rows);
  }
  return writer.take();
}

Message encode_commit(const std::vector<Commit>& commits) {
  Writer writer(kCommit);
  writer.word(static_cast<int32_t>(commits.size()));
  for (const Commit& commit : commits) {
    writer.sequence(commit.sequence);
    writer.words(commit.rows);
    writer.word(commit.extend_drafter ? 1 : 0);
    writer.word(static_cast<int32_t>(commit.saves.size()));
    for (const StateSave& save : commit.saves) {
      writer.word(save.rows);
      writer.word(save.snapshot);
    }
  }
  return writer.take();
}

Message encode_draft(const std::vector<DraftRequest>& requests, int32_t top_k) {
  Writer writer(kDraft);
  writer.word(top_k);
  writer.word(static_cast<int32_t>(requests.size()));
  for (const DraftRequest& request : requests) {
    writer.sequence(request.sequence);
    writer.word(request.bonus_token);
  }
  return writer.take();
}

Message encode_load_state(int32_t snapshot, int32_t slot) {
  Writer writer(kLoadState);
  writer.word(snapshot);
  writer.word(slot);
  return writer.take();
}

void make_call(Engine& engine, std::span<const int32_t> message) {
  Reader reader(message);
  switch (const int32_t call = reader.word()) {
    case kStep: {
      const RowBatch batch(read_segments(reader));
      reader.end();
      engine.step(batch);
      return;
    }
    case kCommit: {
      std::vector<Commit> commits(reader.count());
      for (Commit& commit : commits) {
        commit.sequence = reader.sequence();
        commit.rows = reader.words();
        commit.extend_drafter = reader.word() != 0;
        commit.saves.resize(reader.count());
        for (StateSave& save : commit.saves) {
          save.rows = reader.word();
          save.snapshot = reader.word();
        }
      }
      reader.end();
      engine.commit(commits);
      return;
    }
    case kDraft: {
      const int32_t top_k = reader.word();
      std::vector<DraftRequest> requests(reader.count());
      for (DraftRequest& request : requests) {
        request.sequence = reader.sequence();
        request.bonus_token = reader.word();
      }
      reader.end();
      engine.draft(requests, top_k);
      return;
    }
    case kLoadState: {
      const int32_t snapshot = reader.word(), slot = reader.word();
      reader.end();
      engine.load_state(snapshot, slot);
      return;
    }
    default:
      Reader::refuse("call " + std::to_string(call) + " is not known");
  }
}

}  // namespace trtree::distributed
