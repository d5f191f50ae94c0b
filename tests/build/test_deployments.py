"""What fits where: the documented table is the command's, and its figures are the plan's."""

from dataclasses import replace
from pathlib import Path

import pytest

from engines import ROOT
from trtree.build import builder
from trtree.build.checkpoint.dflash_config import parse
from trtree.build.checkpoint.json_file import read_json
from trtree.build.deployments import main, table
from trtree.build.hardware import Hardware
from trtree.build.options import BuildOptions, OptionError, read_options
from trtree.build.plan import kv_tokens_that_fit, least_tp, memory_plan, requests_that_fit

MODELS = ROOT / "configs" / "models"
HARDWARE = ROOT / "configs" / "hardware" / "rtx_pro_6000.yaml"
DEPLOYMENTS = sorted((ROOT / "configs" / "deployments").glob("*.yaml"))
MACHINE = Hardware.read(HARDWARE)


def deployed(model: str, tp: int) -> BuildOptions:
    """The options of a deployment on so many ranks, without a drafter."""
    options = read_options(ROOT / "configs" / "deployments" / "1x_rtx_pro_6000.yaml")
    return options.with_changes({"checkpoint": MODELS / f"{model}_nvfp4", "tp": tp})


@pytest.mark.parametrize("model", ["glm_4.5_air", "qwen3_30b_a3b", "qwen3.6_35b_a3b"])
def test_the_documented_table_is_the_commands(tmp_path: Path, model: str) -> None:
    for path in MODELS.glob(f"{model}_*"):
        (tmp_path / path.name).symlink_to(path)
    documented = (ROOT / "docs" / "checkpoints.md").read_text().splitlines()
    lines = list(table(tmp_path, DEPLOYMENTS, MACHINE))
    assert len(lines) == 3
    assert set(lines) <= set(documented)


def test_every_model_is_documented() -> None:
    documented = (ROOT / "docs" / "checkpoints.md").read_text()
    for path in MODELS.glob("*_nvfp4"):
        assert f"| {path.name.removesuffix('_nvfp4')} " in documented


def test_drafters_are_of_their_targets() -> None:
    drafters = sorted(MODELS.glob("*_dflash"))
    assert drafters
    for folder in drafters:
        drafter = parse(read_json(folder / "config.json"), folder)
        target = MODELS / f"{folder.name.removesuffix('_dflash')}_nvfp4"
        if target.exists():
            drafter.check_target(read_json(target / "config.json"))
        assert f"`{folder.name.removesuffix('_dflash')}` |" in (MODELS / "README.md").read_text()


def test_as_many_tokens_fit_as_are_said_to() -> None:
    options = BuildOptions(checkpoint=MODELS / "qwen3_8b_nvfp4", page_size=16)
    fit = kv_tokens_that_fit(builder.plan(options), MACHINE) // 16 * 16

    def left(tokens: int) -> str:
        described = builder.plan(options.with_changes({"kv_tokens": tokens}))
        return dict(memory_plan(described, MACHINE))["left"]

    assert not left(fit).startswith("none")
    assert left(fit + 16).startswith("none")


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("model", ["qwen3_32b", "qwen3.6_27b"])
def test_as_many_requests_fit_as_are_said_to(model: str, paged: bool) -> None:
    """Activations, masks and recurrent states are those of as many, not of the build's 8."""
    lengths = {"kv_tokens": 8 * 16384, "max_seq_len": 16384}
    options = deployed(model, 1).with_changes({"backend": "cpu"} | lengths if paged else lengths)
    fit = requests_that_fit(builder.plan(options), MACHINE)
    assert fit > 2

    def left(requests: int) -> str:
        tokens = requests * (16384 + 80)  # and the rows of a verify step, in pages of 16
        changes = {"max_batch_size": requests, "kv_tokens": tokens}
        return dict(memory_plan(builder.plan(options.with_changes(changes)), MACHINE))["left"]

    assert not left(fit).startswith("none")
    assert left(fit + 1).startswith("none")


def test_what_does_not_fit_is_said_with_what_would() -> None:
    """Qwen3-32B's 20.7e9 bytes of weights on GPUs of 20e9; or more requests than there is room."""
    small, plan = replace(MACHINE, memory_gb=20), builder.plan(deployed("qwen3_32b", 1))
    rows = dict(memory_plan(plan, small))
    assert rows["fits"] == "no, not even one request of 8,192 tokens"
    least = least_tp(plan, small)
    assert least is not None and rows["least --tp that fits"] == str(least)
    for tp, fits in ((least // 2, "no"), (least, "yes")):
        on_more = dict(memory_plan(builder.plan(deployed("qwen3_32b", tp)), small))
        assert on_more["fits"].startswith(fits)
    few = replace(small, gpus=least - 1)
    assert dict(memory_plan(plan, few))["least --tp that fits"] == f"none up to {least - 1}"

    crowd = deployed("qwen3_32b", 1).with_changes({"max_batch_size": 40, "max_seq_len": 16384})
    said = dict(memory_plan(builder.plan(crowd), MACHINE))["fits"]
    most = requests_that_fit(builder.plan(crowd), MACHINE)
    assert said == f"no; {most} requests of 16,384 tokens at once would: --max-batch-size {most}"
    # Without a length of their own, requests share kv_tokens: the advice has to name both.
    shared = crowd.with_changes({"max_seq_len": None, "kv_tokens": 40 * 16384})
    advice = dict(memory_plan(builder.plan(shared), MACHINE))["fits"]
    assert advice.endswith(f"would: --max-batch-size {most} --max-seq-len 16384")
    pool = crowd.with_changes({"backend": "cpu", "kv_tokens": 10**6})
    lower = dict(memory_plan(builder.plan(pool), MACHINE))["fits"]
    tokens = int(lower.removeprefix("no; with --kv-tokens ").split()[0])
    smaller = builder.plan(pool.with_changes({"kv_tokens": tokens // 16 * 16}))
    assert "tokens of KV for 40 requests" in dict(memory_plan(smaller, MACHINE))["fits"]


def test_an_assumed_drafter_is_of_the_usual_shape() -> None:
    """Qwen3-8B's own but for its feed-forward is just that: 12288 is three times 4096. By hand:
    5 layers of 193.0e6 weights and fc's 83.9e6 in bf16, their keys and values once more, and
    the target's embedding and head."""
    options = deployed("qwen3_8b", 1)
    own = builder.plan(options.with_changes({"drafter": MODELS / "qwen3_8b_dflash"}))
    assumed = builder.plan(options, assume_drafter=True)
    assert memory_plan(assumed, MACHINE) == memory_plan(own, MACHINE)
    rows = dict(memory_plan(assumed, MACHINE))
    weights = 2 * (5 * 193.0e6 + 83.9e6 + 5 * 8.4e6 + 2 * 151936 * 4096)
    assert float(rows["drafter weights"].split()[0]) == pytest.approx(weights / 2**30, abs=0.01)
    assert rows["  of it copied from the target"] == "2.32 GiB"
    assert rows["  of it for the drafter"] == "1.27 GiB"  # 5 of 41 layers' keys and values
    quantized = builder.plan(
        options.with_changes({"quantize_drafter": "nvfp4"}), assume_drafter=True
    )
    assert quantized.weight_bytes("drafter") < 0.75 * assumed.weight_bytes("drafter")
    with pytest.raises(OptionError, match=r"the drafter is \S+qwen3_8b_dflash; leave one out"):
        builder.plan(own.options, assume_drafter=True)


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hardware", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
