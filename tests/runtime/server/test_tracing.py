"""A server's trace says what its answers say."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engines import DEMO_PROMPTS
from server import ServerProcess
from trtree.runtime import trace


def test_a_servers_trace(demo_engine: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    process = ServerProcess(demo_engine(), "--trace", file)
    try:
        usage = process.complete(prompt=list(DEMO_PROMPTS[:2]), max_tokens=30)["usage"]
        assert process.stop() == 0
    finally:
        process.close()
    header, lines = trace.read_trace(file)
    assert header["engine"] == str(demo_engine())
    warm_up = min(entry["request"] for entry in lines)
    lines = [entry for entry in lines if entry["request"] != warm_up]
    summary = trace.summarize(lines)
    figures = usage["speculative"]
    assert summary.requests == 2
    assert summary.emitted_tokens == usage["completion_tokens"]
    assert summary.verify_passes == figures["verify_forwards"]
    assert summary.drafted_tokens == figures["drafted_tokens"]
    assert summary.accepted_tokens == figures["accepted_tokens"]
    assert summary.acceptance_length == pytest.approx(figures["acceptance_length"])
    assert trace.main([str(file), "--json"]) == 0
    page = file.with_suffix(".html").read_text()
    assert json.loads(page.split('id="data">')[1].split("</script>")[0])["texts"]
