// Engine, and the batch it is given, seen from Python: engines can be written there.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <nanobind/trampoline.h>

#include "runtime/cpp/engine.hpp"
#include "runtime/cpp/engine_checks.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace trtree {

namespace {

class PyEngine : public Engine {
 public:
  NB_TRAMPOLINE(Engine, 5);
  Capabilities capabilities() const override { NB_OVERRIDE_PURE(capabilities); }
  StepResult step(const RowBatch& batch) override { NB_OVERRIDE_PURE(step, batch); }
  void commit(const std::vector<Commit>& commits) override { NB_OVERRIDE_PURE(commit, commits); }
  DraftResult draft(const std::vector<DraftRequest>& requests, int32_t top_k) override {
    NB_OVERRIDE_PURE(draft, requests, top_k);
  }
  void load_state(int32_t snapshot, int32_t slot) override {
    NB_OVERRIDE(load_state, snapshot, slot);
  }
};

template <typename T>
using Array1 = nb::ndarray<nb::numpy, const T, nb::ndim<1>, nb::c_contig>;

template <typename T>
using Array3 = nb::ndarray<nb::numpy, const T, nb::ndim<3>, nb::c_contig>;

// A read-only view that keeps its owner alive.
template <typename T>
Array1<T> view(const std::vector<T>& values, nb::handle owner) {
  return Array1<T>(values.data(), {values.size()}, owner);
}

template <typename T, typename Member>
void def_view(nb::class_<T>& cls, const char* name, Member member) {
  cls.def_prop_ro(name, [member](nb::handle_t<T> self) {
    return view(nb::cast<const T&>(self).*member, self);
  });
}

void bind_capabilities(nb::module_& m) {
  nb::enum_<KvLayout>(m, "KvLayout")
      .value("PAGED", KvLayout::kPaged)
      .value("CONTIGUOUS", KvLayout::kContiguous);
  nb::enum_<TreeState>(m, "TreeState")
      .value("EXACT", TreeState::kExact)
      .value("INEXACT", TreeState::kInexact);

  nb::class_<Capabilities>(m, "Capabilities",
                           "What an engine can do; the executor refuses the rest.")
      .def(nb::init<>())
      .def_rw("backend", &Capabilities::backend)
      .def_rw("activations", &Capabilities::activations)
      .def_rw("sm", &Capabilities::sm)
      .def_rw("kv_layout", &Capabilities::kv_layout)
      .def_rw("page_size", &Capabilities::page_size)
      .def_rw("num_pages", &Capabilities::num_pages)
      .def_rw("max_batch_size", &Capabilities::max_batch_size)
      .def_rw("max_num_rows", &Capabilities::max_num_rows)
      .def_rw("max_seq_len", &Capabilities::max_seq_len)
      .def_rw("verify_width", &Capabilities::verify_width)
      .def_rw("block_size", &Capabilities::block_size)
      .def_rw("max_top_k", &Capabilities::max_top_k)
      .def_rw("vocab_size", &Capabilities::vocab_size)
      .def_rw("tree_state", &Capabilities::tree_state)
      .def_rw("recurrent_state", &Capabilities::recurrent_state)
      .def_rw("state_snapshots", &Capabilities::state_snapshots);
}

void bind_step(nb::module_& m) {
  nb::class_<Sequence> sequence(m, "Sequence", "Where one request lives in an engine.");
  sequence
      .def(
          "__init__",
          [](Sequence* self, int64_t request_id, int32_t slot, int32_t committed_length,
             std::vector<int32_t> pages) {
            new (self) Sequence{request_id, slot, committed_length, std::move(pages)};
          },
          "request_id"_a, "slot"_a, "committed_length"_a, "pages"_a)
      .def_ro("request_id", &Sequence::request_id)
      .def_ro("slot", &Sequence::slot)
      .def_ro("committed_length", &Sequence::committed_length);
  def_view(sequence, "pages", &Sequence::pages);

  nb::class_<Segment>(m, "Segment", "The rows of one request within a step.")
      .def_ro("sequence", &Segment::sequence)
      .def_ro("first_row", &Segment::first_row)
      .def_ro("num_rows", &Segment::num_rows);

  nb::class_<SegmentRequest>(m, "SegmentRequest", "Rows that one request asks to be run.")
      .def(
          "__init__",
          [](SegmentRequest* self, Sequence at, std::vector<int32_t> token_ids,
             std::vector<int32_t> parents, std::vector<int32_t> output_rows, bool needs_logits) {
            new (self) SegmentRequest{std::move(at), std::move(token_ids), std::move(parents),
                                      std::move(output_rows), needs_logits};
          },
          "sequence"_a, "token_ids"_a, "parents"_a, "output_rows"_a, "needs_logits"_a = false);

  nb::class_<RowBatch> batch(m, "RowBatch",
                             "A ragged batch of rows; see runtime/cpp/row_batch.hpp.");
  batch.def(nb::init<std::vector<SegmentRequest>>(), "requests"_a)
      .def_prop_ro("num_rows", &RowBatch::num_rows)
      .def_ro("mask_words", &RowBatch::mask_words)
      .def_ro("segments", &RowBatch::segments);
  def_view(batch, "token_ids", &RowBatch::token_ids);
  def_view(batch, "positions", &RowBatch::positions);
  def_view(batch, "parents", &RowBatch::parents);
  def_view(batch, "packed_mask", &RowBatch::packed_mask);
  def_view(batch, "output_rows", &RowBatch::output_rows);
  def_view(batch, "needs_logits", &RowBatch::needs_logits);

  nb::class_<StepResult> step_result(m, "StepResult", "argmax [outputs]; logits flat [n * vocab].");
  step_result.def(
      "__init__",
      [](StepResult* self, Array1<int32_t> argmax, Array1<float> logits) {
        new (self) StepResult{{argmax.data(), argmax.data() + argmax.size()},
                              {logits.data(), logits.data() + logits.size()}};
      },
      "argmax"_a, "logits"_a);
  def_view(step_result, "argmax", &StepResult::argmax);
  def_view(step_result, "logits", &StepResult::logits);
}

void bind_commit(nb::module_& m) {
  nb::class_<StateSave>(m, "StateSave", "A state to keep, after so many of a commit's rows.")
      .def(
          "__init__",
          [](StateSave* self, int32_t rows, int32_t snapshot) {
            new (self) StateSave{rows, snapshot};
          },
          "rows"_a, "snapshot"_a)
      .def_ro("rows", &StateSave::rows)
      .def_ro("snapshot", &StateSave::snapshot);

  nb::class_<Commit> commit(m, "Commit", "Rows of the last step that become the committed prefix.");
  commit
      .def(
          "__init__",
          [](Commit* self, Sequence at, std::vector<int32_t> rows, bool extend_drafter,
             std::vector<StateSave> saves) {
            new (self) Commit{std::move(at), std::move(rows), extend_drafter, std::move(saves)};
          },
          "sequence"_a, "rows"_a, "extend_drafter"_a = true, "saves"_a = std::vector<StateSave>{})
      .def_ro("sequence", &Commit::sequence)
      .def_ro("saves", &Commit::saves)
      .def_ro("extend_drafter", &Commit::extend_drafter);
  def_view(commit, "rows", &Commit::rows);
}

// A result's numbers as [requests, depth, top_k].
template <typename T>
Array3<T> blocks(std::vector<T> DraftResult::*numbers, nb::handle_t<DraftResult> self) {
  const auto& r = nb::cast<const DraftResult&>(self);
  const auto depth = static_cast<size_t>(r.depth), top_k = static_cast<size_t>(r.top_k);
  const size_t requests = depth * top_k > 0 ? (r.*numbers).size() / (depth * top_k) : 0;
  return Array3<T>((r.*numbers).data(), {requests, depth, top_k}, self);
}

void bind_draft(nb::module_& m) {
  nb::class_<DraftRequest>(m, "DraftRequest", "One drafter block after the committed prefix.")
      .def(
          "__init__",
          [](DraftRequest* self, Sequence at, int32_t bonus_token) {
            new (self) DraftRequest{std::move(at), bonus_token};
          },
          "sequence"_a, "bonus_token"_a)
      .def_ro("sequence", &DraftRequest::sequence)
      .def_ro("bonus_token", &DraftRequest::bonus_token);

  nb::class_<DraftResult>(m, "DraftResult", "log_probs and token_ids [requests, depth, top_k].")
      .def(
          "__init__",
          [](DraftResult* self, Array3<float> log_probs, Array3<int32_t> token_ids) {
            for (size_t axis = 0; axis < 3; ++axis) {
              if (log_probs.shape(axis) != token_ids.shape(axis)) {
                throw std::invalid_argument("log_probs and token_ids differ in shape");
              }
            }
            new (self) DraftResult{static_cast<int32_t>(log_probs.shape(1)),
                                   static_cast<int32_t>(log_probs.shape(2)),
                                   {log_probs.data(), log_probs.data() + log_probs.size()},
                                   {token_ids.data(), token_ids.data() + token_ids.size()}};
          },
          "log_probs"_a, "token_ids"_a)
      .def_ro("depth", &DraftResult::depth)
      .def_ro("top_k", &DraftResult::top_k)
      .def_prop_ro(
          "log_probs",
          [](nb::handle_t<DraftResult> self) { return blocks(&DraftResult::log_probs, self); })
      .def_prop_ro("token_ids", [](nb::handle_t<DraftResult> self) {
        return blocks(&DraftResult::token_ids, self);
      });
}

void bind_checks(nb::module_& m) {
  m.def("check_batch", &check_batch, "batch"_a, "capabilities"_a,
        "Raise ValueError unless the step is within the capabilities.");
  m.def("check_draft_requests", &check_draft_requests, "requests"_a, "top_k"_a, "capabilities"_a,
        "Raise ValueError unless the drafter pass is within the capabilities.");
  m.def("check_commits", &check_commits, "commits"_a, "batch"_a,
        "Raise ValueError unless every commit is a path of its request in the step.");
  m.def("check_saves", &check_saves, "commits"_a, "capabilities"_a,
        "Raise ValueError unless the states to save are of committed rows, each in a snapshot of "
        "its own.");
  m.def("check_load", &check_load, "snapshot"_a, "slot"_a, "capabilities"_a,
        "Raise ValueError unless the engine has that snapshot and that slot.");
}

}  // namespace

void bind_engine(nb::module_& m) {
  bind_capabilities(m);
  bind_step(m);
  bind_commit(m);
  bind_draft(m);
  bind_checks(m);
  nb::class_<Engine, PyEngine>(m, "Engine", "Runs the network; see runtime/cpp/engine.hpp.")
      .def(nb::init<>())
      .def("capabilities", &Engine::capabilities)
      .def("step", &Engine::step, "batch"_a)
      .def("commit", &Engine::commit, "commits"_a)
      .def("draft", &Engine::draft, "requests"_a, "top_k"_a)
      .def("load_state", &Engine::load_state, "snapshot"_a, "slot"_a);
}

}  // namespace trtree
