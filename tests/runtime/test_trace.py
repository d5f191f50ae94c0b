"""Traces: the summary by hand, the page from a file, what is no trace."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from trtree.runtime import trace
from trtree.runtime.session import Session


def line(
    round_: int, request: int, *, prefill: bool = False, rows: int = 4, **more: Any
) -> dict[str, Any]:
    stages = {"draft_seconds": 0.0 if prefill else 0.25, "step_seconds": 0.5, "accept_seconds": 0.1}
    own: dict[str, Any] = {
        "executor": 0,
        "round": round_,
        "request": request,
        "prefill": prefill,
        "committed_length": 7,
        "rows": rows,
        "emitted_tokens": 1,
        "queue_seconds": 0.001 * request,
        "step_rows": 9,
        "step_requests": 2,
        **stages,
    }
    return own | more


def verify(
    round_: int, request: int, parents: list[int], accepted: list[int], **more: Any
) -> dict[str, Any]:
    tree = {
        "rows": len(parents),
        "parents": parents,
        "token_ids": [10 + i for i in range(len(parents))],
        "accepted": accepted,
        "emitted_tokens": len(accepted),
        "tree_budget": 4,
    }
    return line(round_, request, **(tree | more))


LINES = [
    line(0, 1, prefill=True, rows=6, emitted_tokens=1),
    line(0, 2, prefill=True, rows=3, emitted_tokens=1),
    # A root with two children; under the second, two more: the second of each is accepted.
    verify(1, 1, [-1, 0, 0, 2, 2], [0, 2, 4]),
    verify(1, 2, [-1, 0, 1, 0], [0, 1]),
    verify(2, 2, [-1], [0], tree_budget=0),
]
HEADER = {"trtree_trace": 1, "engine": "/nowhere/engine"}


def write(file: Path, lines: Sequence[object], header: object = HEADER) -> Path:
    file.write_text("".join(json.dumps(entry) + "\n" for entry in (header, *lines)))
    return file


def test_summary() -> None:
    summary = trace.summarize(LINES)
    assert (summary.requests, summary.rounds, summary.verify_passes) == (2, 3, 3)
    assert summary.prefill_rows == 9
    assert summary.emitted_tokens == 2 + 3 + 2 + 1
    assert (summary.drafted_tokens, summary.accepted_tokens) == (4 + 3, 2 + 1)
    assert summary.acceptance_length == pytest.approx(6 / 3)
    assert summary.mean_budget == pytest.approx(8 / 3)
    assert summary.mean_queue_seconds == pytest.approx(0.0015)
    # Two requests share rounds 0 and 1.
    assert summary.seconds == pytest.approx({"draft": 0.5, "step": 1.5, "accept": 0.3})
    assert summary.depths == [
        trace.Depth(drafted=2, accepted=2, first=1),
        trace.Depth(drafted=2, accepted=1, first=0),
    ]


def test_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], demo_session: Callable[..., Session]
) -> None:
    session = demo_session()
    file = write(tmp_path / "t.jsonl", LINES)
    with file.open("a") as stream:
        stream.write('{"round": 3, "requ')  # the server was killed here
    engine = str(session.engine_dir.path)
    assert trace.main([str(file), "--engine", engine, "--rounds", "2"]) == 0
    out = capsys.readouterr().out
    assert "50.0% of 2, 1 not the first choice" in out
    page = (tmp_path / "t.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["rounds"] == LINES[3:], "the last two verify passes"
    assert data["texts"]["11"] == session.tokenizer.token_text(11)
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    assert trace.main([str(file), "--json", "--html", str(tmp_path / "other.html")]) == 0
    assert json.loads(capsys.readouterr().out)["verify_passes"] == 3


def test_a_page_cannot_be_broken_out_of() -> None:
    header = HEADER | {"engine": "</script><script>alert(1)</script>"}
    assert "</script><script>" not in trace.page(header, LINES, None, 10)


def test_nothing_happened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace.main([str(write(tmp_path / "t.jsonl", [])), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["acceptance_length"] is None


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        ([[]], "line 2: not a JSON object"),
        ([{}], "line 2: prefill is None"),
        ([*LINES, verify(3, 1, [-1, 1], [0])], "line 7: parents do not describe a tree"),
        ([verify(3, 1, [-1, -1], [0])], "parents do not describe a tree"),
        ([verify(3, 1, [], [])], "parents do not describe a tree"),
        ([verify(3, 1, [-1], [1])], "accepted names a row"),
        ([verify(True, 1, [-1], [0])], "round is True, not a count"),
        ([verify(3, 1, [-1], [0], step_seconds="1")], "step_seconds is '1', not seconds"),
        ([verify(3, 1, [-1], [0], token_ids=[None])], "token_ids is [None], not a list"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[object], part: str
) -> None:
    assert trace.main([str(write(tmp_path / "t.jsonl", lines))]) == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "t.html").exists()


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "other.json").write_text('{"a": 1}\n')
    (tmp_path / "empty").write_text("")
    write(tmp_path / "t.html", LINES)
    for name, part in (
        ("nowhere", "No such file"),
        ("binary", "not a trace"),
        ("other.json", "not a trace of format 1"),
        ("empty", "not a trace of format 1"),
        ("t.html", "would replace the trace"),
    ):
        assert trace.main([str(tmp_path / name)]) == 2
        assert part in capsys.readouterr().err
    with pytest.raises(trace.TraceError, match="No such file"):
        trace.TraceWriter(tmp_path / "none" / "t.jsonl", tmp_path)
