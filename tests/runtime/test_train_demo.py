"""The scripts that make the demo pair: their text, their rounding, and every stage once, tiny."""

import ast
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from trtree.plugins.nvfp4_linear import format as nvfp4
from trtree.runtime.bench.train_demo import data, pipeline
from trtree.runtime.bench.train_demo.drafter import DrafterRecipe, draw
from trtree.runtime.bench.train_demo.evaluate import COLUMNS, accepted, count_rounds
from trtree.runtime.bench.train_demo.model import Shape
from trtree.runtime.bench.train_demo.nvfp4 import fake_quantize, fake_quantize_weights
from trtree.runtime.bench.train_demo.target import TargetRecipe
from trtree.runtime.bench.train_demo.text import Conversation, conversations
from trtree.runtime.bench.train_demo.trace import Draft
from trtree.runtime.bench.train_demo.words import Draw, is_held_out


def some(family: str, count: int) -> list[Conversation]:
    found = (c for c in conversations(seed=5, held_out=False) if c.family == family)
    return list(itertools.islice(found, count))


def test_the_text_and_the_tokenizer_are_always_the_same() -> None:
    first, second = data.snapshot(280, 28), data.snapshot(280, 28)
    assert first == second
    assert first.digest() == "6b8ba0cf382fb72b014228aa2505783842f116854eaf63002eb8503877ed0860"
    tokenizers = [data.train_tokenizer(s.training).to_str() for s in (first, second)]
    assert tokenizers[0] == tokenizers[1]
    assert data.Snapshot(first.training, first.held_out[:-1]).digest() != first.digest()


def test_nothing_held_out_is_in_the_training_text() -> None:
    training, held_out = Draw(1, held_out=False), Draw(1, held_out=True)
    for draw_one in ("name", "town", "thing", "code"):
        assert not any(is_held_out(getattr(training, draw_one)()) for _ in range(200))
        assert all(is_held_out(getattr(held_out, draw_one)()) for _ in range(50))


def test_questions_stand_on_one_line() -> None:
    found = itertools.islice(conversations(seed=6, held_out=False), 280)
    assert not [c.family for c in found if "\n" in c.question]


def test_answers_are_right() -> None:
    for item in some("order", 20):
        order = json.loads(item.answer)
        assert order["code"] in item.question
        for thing in order["items"]:
            assert f"{thing['quantity']} {thing['name']}s at {thing['price']:.2f}" in item.question
    for item in some("class", 20):
        ast.parse(item.answer.removeprefix("```python\n").removesuffix("\n```"))
    for item in some("add", 20):
        a, b = map(int, re.findall(r"\d+", item.question))
        assert item.answer.endswith(f"So {a} + {b} = {a + b}.")
    for item in some("sort", 20):
        numbers = [int(n) for n in re.findall(r"with (\d+)", item.answer)]
        assert numbers == sorted(numbers, reverse="highest" in item.question)
        assert sorted(numbers) == sorted(int(n) for n in re.findall(r"\d+", item.question))
    for item in some("invoice", 20):
        products = [(int(n), int(p)) for n, p in re.findall(r"(\d+) x (\d+)", item.answer)]
        assert item.answer.endswith(f"= {sum(n * p for n, p in products)}")


def test_a_name_is_the_same_tokens_wherever_it_stands() -> None:
    tokenizer = data.train_tokenizer(data.snapshot(280, 0).training)
    name = tokenizer.encode("Marel").ids
    for text in ("Dear Marel,", '{"name": "Marel"}', "| Marel |", "\nMarel lives", "- Marel: 3"):
        ids = tokenizer.encode(text).ids
        assert any(ids[i : i + len(name)] == name for i in range(len(ids)))
        assert tokenizer.decode(ids) == text


def test_rounding_is_the_formats_own() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=generator) * torch.logspace(-6, 3, 64)[:, None]
    x[3] = 0
    scale = torch.tensor(0.01)
    rows = nvfp4.quantize_rows(x, scale)
    steps = (rows.block_scale * scale).repeat_interleave(nvfp4.BLOCK, dim=1)
    assert torch.equal(fake_quantize(x, scale), rows.values * steps)

    weight = torch.randn(32, 64, generator=generator)
    expected = nvfp4.dequantize(nvfp4.quantize_weight(weight))
    torch.testing.assert_close(fake_quantize_weights(weight)[0], expected, rtol=1e-6, atol=0)


def test_documents_and_packing_mark_the_answers() -> None:
    snapshot = data.snapshot(280, 0)
    tokenizer = data.train_tokenizer(snapshot.training)
    documents = data.encode(tokenizer, snapshot.training)
    chat = documents[1]
    assert tokenizer.decode(chat.ids[chat.answer :]) == snapshot.training[1].answer + "\n"
    assert chat.ids[-2] == data.IM_END
    assert documents[0].ids[-1] == data.END
    rows = data.pack(documents)
    expected = [i >= chat.answer for i in range(len(chat.ids))]
    start = len(documents[0].ids)
    assert rows.answers[0, start : start + len(chat.ids)].tolist() == expected
    assert rows.ids[0, start : start + len(chat.ids)].tolist() == chat.ids


def test_labels_end_with_the_answer() -> None:
    ids = np.arange(24, dtype=np.int16)[None]
    answers = np.zeros((1, 24), dtype=np.bool_)
    answers[0, 4:9] = answers[0, 15:] = True
    rounds = draw(data.Rows(ids, answers), 1, 64, torch.Generator().manual_seed(0))
    assert set(rounds.anchors[0].tolist()) == {4, 5, 6, 7, *range(15, 23)}
    for anchor, labels in zip(rounds.anchors[0].tolist(), rounds.labels[0].tolist(), strict=True):
        end = 9 if anchor < 9 else 24
        assert labels == [a if a < end else -1 for a in range(anchor + 1, anchor + 8)]


def test_rounds_are_counted_as_a_verifier_would() -> None:
    log_probs = np.log(np.array([[0.6, 0.4], [0.9, 0.1]], dtype=np.float32))
    draft = Draft(log_probs, np.array([[5, 6], [7, 8]], dtype=np.int32))
    assert accepted(draft, [5, 7, 9]).tolist() == [2] * len(COLUMNS)
    assert accepted(draft, [6, 7, 9]).tolist() == [0, 2, 2, 2, 2]
    assert accepted(draft, [6]).tolist() == [0, 1, 1, 1, 1]
    assert accepted(draft, [4, 7]).tolist() == [0] * len(COLUMNS)
    # Seeds 0, 3 and 4 of 6 tokens: 2 drafts and a bonus, a bonus, and the last token.
    lengths = [np.full(len(COLUMNS), n) for n in (2, 0, 0, 0, 5)]
    assert count_rounds(lengths, 6).tolist() == [[5] * len(COLUMNS), [3] * len(COLUMNS)]


def test_every_stage(tmp_path: Path) -> None:
    """Modelopt's export, roll-outs on the CPU engine, figures and the checks among them."""
    small = data.snapshot(280, 28)
    shapes = {"hidden": 64, "ffn": 64, "heads": 2, "kv_heads": 1, "head_dim": 32}
    plan = pipeline.Plan(
        training=280,
        held_out=28,
        digest=small.digest(),
        target=Shape(layers=5, **shapes),
        target_recipe=TargetRecipe(steps=3, float_steps=2, batch=2, workers=1),
        rollouts=4,
        drafter=Shape(layers=1, **shapes),
        drafter_recipe=DrafterRecipe(steps=2, batch=2, anchors=2, workers=1),
        more_rollouts=2,
        refinement=DrafterRecipe(steps=1, batch=2, anchors=2, workers=1),
        prompts=2,
        checked=1,
    )
    folders = pipeline.Folders(tmp_path / "work", tmp_path / "out")
    with torch.compiler.set_stance("force_eager"):
        pipeline.run(plan, folders, pipeline.STAGES)
    figures = json.loads((folders.out / "figures.json").read_text())
    for precision in ("w4a4", "w4a16"):
        rates = figures["precisions"][precision]["sampled"]["tokens_per_pass"]
        assert 1 <= rates["chain"]["mean"] <= 8
    assert small.digest() in (folders.out / "README.md").read_text()
    with pytest.raises(ValueError, match="SHA-256"):
        pipeline.corpus(pipeline.Plan(training=14, held_out=14))
