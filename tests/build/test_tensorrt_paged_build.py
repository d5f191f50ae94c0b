"""The whole build of an engine directory with attention plugins, but for TensorRT 11 itself: its
place is taken by TensorRT-RTX with plugin layers beside it, and its plans by a line of text."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engines import ROOT, random_checkpoint
from evaluated_engine import ReferenceCommits, evaluated_engine
from plugin_network import PluginBuilder, plugins
from random_glm5 import glm5_config
from random_hybrid import hybrid_config
from request_mixes import PLAIN
from runner_checks import MAX_TOKENS, TREE, decode, prompts
from trtree import _core
from trtree.build import builder
from trtree.build.engine_dir import EngineDir
from trtree.build.lowering.tensorrt import backend
from trtree.build.lowering.tensorrt.library import Library, load_library
from trtree.build.options import BuildOptions, OptionError, read_options
from trtree.runtime.engines.tensorrt_paged import PagedTensorRTEngine

SIZES = {
    "backend": "tensorrt",
    "attention": "plugin",
    "activations": "bf16",
    "max_batch_size": 2,
    "max_seq_len": 96,
    "max_tree_budget": 16,
    "max_num_rows": 80,
    "kv_tokens": 256,
    "page_size": 8,
}


class PluginLibrary:
    """TensorRT-RTX's module, whose networks also take plugins."""

    def __init__(self) -> None:
        self._module = load_library("tensorrt-rtx").module
        self.builders: list[PluginBuilder] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def Builder(self, logger: Any) -> PluginBuilder:
        self.builders.append(PluginBuilder(self._module.Builder(logger)))
        return self.builders[-1]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> PluginLibrary:
    module = PluginLibrary()
    monkeypatch.setattr(backend, "load_library", lambda name: Library(name, module, None))
    monkeypatch.setattr(backend, "load_plugins", lambda library: plugins())
    monkeypatch.setattr(backend, "present_sm", lambda: 120)
    return module


def test_an_engine_directory_that_the_runner_reads(library: PluginLibrary, tmp_path: Path) -> None:
    options = read_options(ROOT / "configs" / "demo.yaml")
    described = builder.describe(options.with_changes({"output": tmp_path / "engine", **SIZES}))
    engine = EngineDir.open(builder.write(described))
    built = engine.manifest["tensorrt"]
    assert built["attention"] == "plugin"
    assert built["cache_length"] == 96 + 17
    assert {entry["network"]: len(entry["plans"]) for entry in built["engines"].values()} == {
        "target": 1,
        "drafter_context": 0,
        "drafter_block": 1,
    }
    for made in library.builders:
        ((definition, config),) = made.builds
        assert config.get_preview_feature(library.PreviewFeature.ALIASED_PLUGIN_IO_10_03)
        assert config.num_optimization_profiles == 1
        assert len(definition.plugin_layers) > 0

    _, executables = evaluated_engine(options, **SIZES)
    cpu = torch.device("cpu")
    runner = PagedTensorRTEngine(engine, executables, cpu, ReferenceCommits(), target_ctas=64)
    capabilities = runner.capabilities()
    assert capabilities.kv_layout == _core.KvLayout.PAGED
    assert (capabilities.page_size, capabilities.num_pages) == (8, 32)
    assert capabilities.sm == "120"
    given = prompts(2)
    tree, plain = (decode(runner, [(p, mode) for p in given]) for mode in (TREE, PLAIN))
    assert tree == plain


@pytest.mark.parametrize(
    ("config", "plugins_used", "branches"),
    [
        (glm5_config(), {"latent_append", "index_top_k", "latent_tree_attention"}, 0),
        (
            hybrid_config(
                "Qwen3_5ForCausalLM",
                head_dim=64,
                linear_key_head_dim=64,
                linear_value_head_dim=64,
            ),
            {"tree_attention", "causal_conv", "gated_delta_net"},
            2,
        ),
    ],
    ids=["glm5", "hybrid"],
)
def test_other_families_are_built_and_loaded_alike(
    library: PluginLibrary,
    tmp_path: Path,
    config: dict[str, Any],
    plugins_used: set[str],
    branches: int,
) -> None:
    checkpoint = random_checkpoint(tmp_path / "checkpoint", config)
    options = BuildOptions(checkpoint=checkpoint, sm=(120,), output=tmp_path / "engine")
    engine = EngineDir.open(builder.write(builder.describe(options.with_changes(SIZES))))
    (entry,) = engine.manifest["tensorrt"]["engines"].values()
    assert len(entry["branches"]) == branches
    ((definition, _),) = library.builders[0].builds
    assert {layer.plugin for layer in definition.plugin_layers} >= plugins_used
    _, executables = evaluated_engine(options, **SIZES)
    cpu = torch.device("cpu")
    runner = PagedTensorRTEngine(engine, executables, cpu, ReferenceCommits(), target_ctas=64)
    assert len(decode(runner, [([3, 4, 5], PLAIN)])[0]) == MAX_TOKENS


def test_every_size_of_a_step_is_in_the_profile(library: PluginLibrary, tmp_path: Path) -> None:
    """Least, usual and largest, from one row to the largest step; all else is fixed."""
    options = read_options(ROOT / "configs" / "demo.yaml")
    described = builder.describe(
        options.with_changes({"output": tmp_path / "engine", "drafter": None, **SIZES})
    )
    engine = EngineDir.open(builder.write(described))
    (entry,) = engine.manifest["tensorrt"]["engines"].values()
    (profile,) = entry["profiles"]
    assert profile == {
        "name": "step",
        "sizes": {
            "batch": [1, 1, 1],
            "rows": [1, 1, 80],
            "outputs": [1, 1, 80],
            "items.0": [1, 512, 512],
        },
    }
    dims = {binding["name"]: binding["dims"] for binding in entry["inputs"]}
    assert dims["token_ids"] == [1, "rows"]
    assert dims["packed_mask"] == ["rows", 3]
    assert dims["page_table"] == [2, 13]
    assert dims["output_rows"] == [1, "outputs"]
    assert dims["work.0"] == ["items.0", 7]
    assert dims["model.layers.0.self_attn.kv.k"] == [32, 8, 2, 64]


def test_a_gpu_of_another_sm_is_refused(library: PluginLibrary, tmp_path: Path) -> None:
    options = read_options(ROOT / "configs" / "demo.yaml")
    changes = {"output": tmp_path / "engine", "sm": (90,), "drafter": None, **SIZES}
    with pytest.raises(OptionError, match=r"sm 90: tensorrt .* it builds for 120"):
        builder.write(builder.describe(options.with_changes(changes)))
    assert not list(tmp_path.iterdir())
