"""The generate command: text, JSON, comparison, refusals."""

import json
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trtree.runtime import generate
from trtree.runtime.session import Session
from trtree.runtime.tokenizer import Tokenizer

PROMPT = "Tell a story: Choric the crow, Zun the driver, Drenburg, a little violin."


@pytest.fixture
def run(demo_engine: Callable[..., Path]) -> Callable[..., int]:
    def call(*arguments: object) -> int:
        return generate.main(["--engine", str(demo_engine()), *map(str, arguments)])

    return call


def test_text_then_figures(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    texts = set()
    for mode in ("plain", "chain", "tree"):
        assert run("--prompt", PROMPT, "--mode", mode, "--max-tokens", 40) == 0
        captured = capsys.readouterr()
        texts.add(captured.out)
        assert "40 tokens" in captured.err
        assert "acceptance length" in captured.err
    assert len(texts) == 1
    assert len(texts.pop()) > 40


def test_json(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--prompt", PROMPT, "--max-tokens", 24, "--tree-budget", 8, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] == 24
    assert result["finish_reason"] == "length"
    assert result["drafted_tokens"] <= 8 * (result["target_forwards"] - 1)
    assert result["acceptance_length"] == pytest.approx(23 / (result["target_forwards"] - 1))


def test_compare(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{PROMPT}\n\n  Add 371 and \n")
    assert generate.read_prompts(prompts) == [PROMPT, "  Add 371 and "]
    assert run("--compare", prompts, "--max-tokens", 16, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["mode"], row["tree_budget"]) for row in rows] == [
        ("plain", None), ("chain", None), ("tree", 8), ("tree", 16), ("tree", 32), ("tree", 64),
    ]  # fmt: skip
    assert all(row["identical"] for row in rows)
    plain, chain, *trees = rows
    assert plain["target_forwards"] == 2 * 16
    assert plain["acceptance_length"] == 1.0
    assert all(row["target_forwards"] < plain["target_forwards"] for row in (chain, *trees))
    assert set(plain) == {
        "mode", "tree_budget", "tokens_per_s", "target_forwards", "acceptance_length", "identical",
    }  # fmt: skip
    assert run("--compare", prompts, "--max-tokens", 8) == 0
    assert capsys.readouterr().out.count("yes") == 6


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--prompt", ""], "prompt_token_ids is empty"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--prompt", "a", "--max-tokens", "9999"], "max_seq_len 2048"),
        (["--prompt", "a", "--tree-budget", "-2"], "tree_budget -2 is negative"),
        (["--prompt", "a", "--tree-budget", "900"], "verify width of 901"),
        (["--prompt", "a", "--tree", "static"], "built without one"),
        (["--compare", "nowhere.txt"], "nowhere.txt"),
        (["--prompt", "a\udcff"], "is not valid UTF-8"),
        (["--prompt", "a\udcff", "--chat"], "is not valid UTF-8"),
    ],
)
def test_refusals(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("error: ")
    assert part in line


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "one of --prompt and --compare"),
        (["--prompt", "a", "--max-tokens", str(2**31)], "--max-tokens: 2147483648 is not between"),
        (["--prompt", "a", "--tree-budget", str(-(2**40))], "--tree-budget"),
        (["--prompt", "a", "--threads", "257"], "257 is not between 1 and 256"),
        (["--prompt", "a", "--threads", "0"], "0 is not between 1 and 256"),
        (["--prompt", "a", "--threads", "x"], "invalid integer value: 'x'"),
        (["--prompt", "a", "--baseline", "b"], "--baseline needs --compare"),
        (["--compare", "f", "--prompt", "a"], "leave out --prompt"),
    ],
)
def test_options_that_cannot_be(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(*arguments)
    assert exit_.value.code == 2
    assert part in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (["--mode", "plain", "--tree-budget", "4"], "--tree-budget has no effect in mode plain"),
        (["--mode", "chain", "--tree", "dynamic"], "--tree has no effect in mode chain"),
        (["--mode", "tree", "--tree-budget", "4"], None),
    ],
)
def test_options_without_effect_are_said_to_have_none(
    run: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    note: str | None,
) -> None:
    assert run("--prompt", PROMPT, "--max-tokens", 4, *arguments) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"note: {note}" if note else "note" not in lines[0]


def test_one_token_needs_no_verify_pass(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--prompt", PROMPT, "--max-tokens", 1) == 0
    assert capsys.readouterr().err.strip().endswith("acceptance length -")
    assert run("--prompt", PROMPT, "--max-tokens", 1, "--json") == 0
    assert json.loads(capsys.readouterr().out)["acceptance_length"] is None
    (tmp_path / "prompts.txt").write_text(PROMPT)
    assert run("--compare", tmp_path / "prompts.txt", "--max-tokens", 1) == 0
    assert "0.00" not in capsys.readouterr().out


def test_without_a_drafter_the_default_is_plain(
    demo_engine: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = demo_engine(drafter=None)
    arguments = ["--engine", str(engine), "--prompt", PROMPT, "--max-tokens", "4"]
    assert generate.main(arguments) == 0
    assert "4 tokens" in capsys.readouterr().err
    assert generate.main([*arguments, "--mode", "tree"]) == 2


def test_an_engine_too_large_for_this_machine(
    demo_engine: Callable[..., Path], tmp_path: Path
) -> None:
    """In a process of bounded memory, as a machine may promise what it does not have."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))

    engine = Path(shutil.copytree(demo_engine(), tmp_path / "engine"))
    manifest = json.loads((engine / "config.json").read_text())
    manifest["build_config"]["num_pages"] = 2**31 // 16 - 1  # terabytes of KV
    (engine / "config.json").write_text(json.dumps(manifest))
    done = subprocess.run(
        [sys.executable, "-m", generate.__name__, "--engine", str(engine), "--prompt", "a"],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "the engine cannot be loaded" in line


def test_help_names_exit_codes(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--help")
    assert "130 interrupted" in " ".join(capsys.readouterr().out.split())


def test_no_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--engine", str(tmp_path), "--prompt", "a"]) == 2
    assert "no engine here" in capsys.readouterr().err


@pytest.fixture
def tokenizer(demo_session: Callable[..., Session]) -> Tokenizer:
    return demo_session().tokenizer


@pytest.mark.parametrize(
    "text",
    ["plain words, and\n\n  white  space ", "naïve café — “quotes” … 日本語 🙂 end", "\t\tx"],
)
@pytest.mark.parametrize("step", [1, 2, 5])
def test_streamed_text_adds_up(tokenizer: Tokenizer, text: str, step: int) -> None:
    token_ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    pieces = [stream.push(token_ids[i : i + step]) for i in range(0, len(token_ids), step)] + [
        stream.finish()
    ]
    assert "".join(pieces) == tokenizer.decode(token_ids) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_streamed_bytes_that_are_no_text(tokenizer: Tokenizer) -> None:
    """A random model's output: nothing is lost, and no more than a character held back."""
    rng = random.Random(0)
    token_ids = [rng.randrange(256) for _ in range(600)] + tokenizer.encode("日本語 end")
    stream, text = tokenizer.stream(), ""
    for i, token_id in enumerate(token_ids):
        text += stream.push([token_id])
        whole = tokenizer.decode(token_ids[: i + 1])
        assert whole.startswith(text)
        assert len(whole) - len(text) <= 3
    assert text + stream.finish() == tokenizer.decode(token_ids)


def test_mask_and_zero_tokens_are_ordinary(demo_session: Callable[..., Session]) -> None:
    """Pitfalls 17 and 18: nothing filters or counts by token id."""
    from trtree.runtime.executor import Request

    session = demo_session()
    mask = session.engine_dir.manifest["speculative_config"]["mask_token_id"]
    prompt = [0, mask, 0, 5, mask]
    outputs = []
    for mode in ("plain", "tree"):
        config = session.speculative_config(mode, 16)
        request = Request(prompt, max_tokens=20, speculative=config)
        outputs.append(session.complete(request).token_ids)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 20
