"""Widening changes nothing: logits, drafts and tokens, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engines import ROOT
from steps import prefill, run_rows
from trtree import _core
from trtree.build.bench.widen import Shape
from trtree.build.bench.widened import build_widened
from trtree.build.options import OptionError, read_options
from trtree.runtime.engines import open_engine

SHAPE = Shape(hidden=1024, q_size=512, kv_size=256, ffn=1536, layers=10)
TREE = ([5, 6, 7, 8, 9], [-1, 0, 0, 1, 2])


@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
def test_a_widened_pair_computes_the_same_bits(
    demo_engine: Callable[..., Path], tmp_path: Path, activations: str
) -> None:
    options = read_options(ROOT / "configs" / "demo.yaml").with_changes(
        {"output": tmp_path / "wide", "activations": activations}
    )
    results = []
    for path in (demo_engine(activations=activations), build_widened(options, SHAPE)):
        _, engine = open_engine(path)
        pages = list(range(8))
        prompt = prefill(engine, _core.Sequence(1, 0, 0, pages), list(range(100, 150)))
        at = _core.Sequence(1, 0, 50, pages)
        (tree,) = run_rows(engine, [(at, *TREE)])
        engine.commit([_core.Commit(at, [0, 2, 4])])
        draft = engine.draft([_core.DraftRequest(_core.Sequence(1, 0, 53, pages), 11)], 16)
        results.append(
            (prompt.tobytes(), tree.tobytes(), draft.log_probs.tobytes(), draft.token_ids.tobytes())
        )
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 512}, "only powers of four are exact"),
        ({"ffn": 256}, "intermediate_size is 256"),
        ({"kv_size": 512}, "query heads share a KV head"),
    ],
)
def test_shapes_that_cannot_be_exact_are_refused(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    options = read_options(ROOT / "configs" / "demo.yaml")
    with pytest.raises(OptionError, match=message):
        build_widened(
            options.with_changes({"output": tmp_path / "wide"}), replace(SHAPE, **changes)
        )
    assert list(tmp_path.iterdir()) == []
