"""What fits where: the documented table is the command's, and its figures are the plan's."""

from pathlib import Path

import pytest

from engines import ROOT
from trtree.build import builder
from trtree.build.checkpoint.dflash_config import parse
from trtree.build.checkpoint.json_file import read_json
from trtree.build.deployments import main, table
from trtree.build.hardware import Hardware
from trtree.build.options import BuildOptions
from trtree.build.plan import kv_tokens_that_fit, memory_plan

MODELS = ROOT / "configs" / "models"
HARDWARE = ROOT / "configs" / "hardware" / "rtx_pro_6000.yaml"
DEPLOYMENTS = sorted((ROOT / "configs" / "deployments").glob("*.yaml"))


@pytest.mark.parametrize("model", ["glm_4.5_air", "qwen3_30b_a3b", "qwen3.6_35b_a3b"])
def test_the_documented_table_is_the_commands(tmp_path: Path, model: str) -> None:
    for path in MODELS.glob(f"{model}_*"):
        (tmp_path / path.name).symlink_to(path)
    documented = (ROOT / "docs" / "checkpoints.md").read_text().splitlines()
    lines = list(table(tmp_path, DEPLOYMENTS, Hardware.read(HARDWARE)))
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
    hardware = Hardware.read(HARDWARE)
    fit = kv_tokens_that_fit(builder.plan(options), hardware) // 16 * 16

    def left(tokens: int) -> str:
        described = builder.plan(options.with_changes({"kv_tokens": tokens}))
        return dict(memory_plan(described, hardware))["left"]

    assert not left(fit).startswith("none")
    assert left(fit + 16).startswith("none")


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hardware", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
