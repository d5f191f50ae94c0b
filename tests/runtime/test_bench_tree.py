"""The tree benchmark through its command, at a small size."""

import json

import numpy as np
import pytest

from trtree.plugins.ddtree import top_k_log_probs
from trtree.runtime.bench import __main__ as bench
from trtree.runtime.bench import tree


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--vocab 3000 --depth 4 --budgets 0 8 --threads 1 2 --repeats 3"
    with pytest.raises(SystemExit):  # a budget of 0 has nothing to time
        bench.main(["tree", *options.split()])
    assert "budgets" in capsys.readouterr().err

    assert bench.main(["tree", *options.replace(" 0 8", " 2 8").split()]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [result["budget"] for result in report["results"]] == [2, 8]
    for result in report["results"]:
        assert [entry["threads"] for entry in result["from_logits"]] == [1, 2]
        for entry in [*result["from_logits"], result["from_top_k"]]:
            assert 0 < entry["p10"] <= entry["median"] <= entry["p90"]


def test_help_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    assert "tree" in capsys.readouterr().out


def test_a_wrong_result_is_not_timed() -> None:
    logits = tree.drafter_like_logits(3, 200, seed=1)
    log_probs, ids = top_k_log_probs(logits, 5)
    tree.check(logits, log_probs, ids, 5)
    with pytest.raises(RuntimeError, match="ids differ"):
        tree.check(logits, log_probs, np.roll(ids, 1, axis=1), 5)
    with pytest.raises(RuntimeError, match="log-probs differ"):
        tree.check(logits, log_probs - np.float32(1e-4), ids, 5)
