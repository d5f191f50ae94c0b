"""Repositories, read by Triton's own schema: what they say, and where they may lie."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from engines import ROOT, build_demo
from trtree.build.engine_dir import EngineDir
from trtree.runtime.triton_repo.__main__ import main
from trtree.runtime.triton_repo.model_config import (
    ModelConfig,
    ModelConfigError,
    Step,
    Tensor,
    check,
)
from trtree.runtime.triton_repo.repository import RepositoryError, write_repository
from trtree.runtime.triton_repo.settings import EngineSettings, SettingsError

Build = Callable[..., Path]
BATCHER = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")
MODELS = {"llmapi": ("trtree",), "inflight_batcher": BATCHER, "both": ("trtree", *BATCHER)}
ENGINES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "tp 2": {"tp": 2},
    "tensorrt-rtx": {
        "backend": "tensorrt-rtx",
        "max_seq_len": 64,
        "max_num_rows": 64,
        "max_batch_size": 2,
        "max_tree_budget": 16,
    },
}


def read(folder: Path) -> Any:
    """A model's config.pbtxt, by Triton's schema."""
    return text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def parameters(folder: Path) -> dict[str, str]:
    return {name: value.string_value for name, value in read(folder).parameters.items()}


@pytest.mark.parametrize("engine", ENGINES)
def test_repositories_by_tritons_schema(demo_engine: Build, tmp_path: Path, engine: str) -> None:
    """No placeholder is left, streams are declared, and paths lead to the engine."""
    path = demo_engine(**ENGINES[engine])
    for layout, names in MODELS.items():
        repository = tmp_path / layout
        assert write_repository(path, repository, layout=layout) == list(names)  # type: ignore[arg-type]
        assert sorted(p.name for p in repository.iterdir()) == sorted(names)
        for name in names:
            text = (repository / name / "config.pbtxt").read_text()
            assert "${" not in text
            config = read(repository / name)
            assert config.name == name
            streams = name in ("trtree", "tensorrt_llm", "tensorrt_llm_bls")
            assert config.model_transaction_policy.decoupled == streams
            assert (repository / name / "1").is_dir()
            if name == "ensemble":
                continue
            engine_dir = parameters(repository / name)["engine_dir"]
            assert not Path(engine_dir).is_absolute()
            assert (repository / name / engine_dir).resolve() == path.resolve()
            compile((repository / name / "1" / "model.py").read_text(), "model.py", "exec")


def test_tree_parameters_are_passed_on(demo_engine: Build, command: Any, tmp_path: Path) -> None:
    """Pitfall: a server that never hears of the engine's tree."""
    repository = tmp_path / "dynamic"
    write_repository(demo_engine(), repository, layout="both")
    for model in ("trtree", "tensorrt_llm"):
        found = parameters(repository / model)
        assert found["speculative_mode"] == "tree"
        assert found["speculative_tree"] == "dynamic"
        assert found["speculative_tree_budget"] == "16"
        assert "medusa_choices" not in found
    static = tmp_path / "engine"
    prompts = ROOT / "configs" / "demo" / "prompts.txt"
    flags = ["--tree", "static", "--calibration-prompts", prompts, "--calibration-tokens", "8"]
    arguments = ["--output", static, "--backend", "cpu", "--tree-budget", "9", *flags]
    assert command.main([str(argument) for argument in arguments]) == 0
    found = parameters(static / "triton" / "trtree")
    tables = EngineDir.open(static).tree_tables()
    assert tables is not None
    assert json.loads(found["medusa_choices"]) == tables["medusa_choices"]
    assert len(tables["medusa_choices"]) == 9
    assert found["speculative_tree"] == "static"
    plain = tmp_path / "plain"
    write_repository(build_demo(tmp_path / "no_drafter", drafter=None), plain)
    assert parameters(plain / "trtree")["speculative_mode"] == "plain"


def test_the_build_writes_one_and_the_manifest_lists_it(command: Any, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    assert command.main(["--output", str(engine), "--backend", "cpu"]) == 0
    listed = [name for name in EngineDir.open(engine).manifest["files"] if "triton" in name]
    assert listed == ["triton/trtree/1/model.py", "triton/trtree/config.pbtxt"]
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    shutil.move(engine, moved)
    engine_dir = parameters(moved / "triton" / "trtree")["engine_dir"]
    assert (moved / "triton" / "trtree" / engine_dir).resolve() == moved.resolve()


def test_what_is_there_is_replaced_only_when_told(demo_engine: Build, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    write_repository(demo_engine(), repository)
    with pytest.raises(RepositoryError, match="pass --force"):
        write_repository(demo_engine(), repository)
    write_repository(demo_engine(), repository, layout="inflight_batcher", force=True)
    assert not (repository / "trtree").exists()
    other = tmp_path / "other"
    (other / "documents").mkdir(parents=True)
    with pytest.raises(RepositoryError, match="is no model repository; not replacing it"):
        write_repository(demo_engine(), other, force=True)
    assert (other / "documents").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["models", "other"]


def test_the_command(
    demo_engine: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--engine", str(demo_engine()), "--output", str(tmp_path / "models")]
    options = ["--layout", "both", "--no-decoupled", "--mode", "plain", "--threads", "2"]
    assert main([*arguments, *options]) == 0
    assert "trtree, preprocessing, tensorrt_llm" in capsys.readouterr().out
    found = parameters(tmp_path / "models" / "tensorrt_llm")
    assert (found["speculative_mode"], found["threads"]) == ("plain", "2")
    assert not read(tmp_path / "models" / "trtree").model_transaction_policy.decoupled
    assert main(arguments) == 2
    assert "pass --force" in capsys.readouterr().err
    assert main(["--engine", str(tmp_path), "--output", str(tmp_path / "new")]) == 2
    assert "no engine here" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.replace('"model"', '"${model}"'), "a placeholder is left"),
        (lambda t: t.replace("TYPE_INT32", "TYPE_INT33"), "does not parse"),
        (lambda t: t.replace("[ -1 ]", "[ 1 ]"), "outputs is read as"),
        (lambda t: t.replace("optional: true", ""), "inputs is read as"),
        (lambda t: t.replace("decoupled: true", "decoupled: false"), "decoupled is read as"),
        (lambda t: t.replace("parameters", "# parameters"), "parameters is read as"),
    ],
)
def test_a_text_that_says_something_else_is_refused(
    change: Callable[[str], str], named: str
) -> None:
    config = ModelConfig(
        "model",
        (Tensor("count", "TYPE_INT32", optional=True),),
        (Tensor("text", "TYPE_STRING", (-1,)),),
        decoupled=True,
        parameters={"path": 'a "quoted" \\ path, ü'},
    )
    check(config, config.to_text())
    changed = change(config.to_text())
    assert changed != config.to_text()
    with pytest.raises(ModelConfigError, match=named.replace("$", r"\$")):
        check(config, changed)


def test_tensors_that_lead_nowhere_are_refused() -> None:
    text = Tensor("text", "TYPE_STRING")
    twice = ModelConfig("model", (text, text), (text,))
    with pytest.raises(ModelConfigError, match="is there twice"):
        check(twice, twice.to_text())
    ensemble = ModelConfig(
        "ensemble", (text,), (text,), steps=(Step("one", {"in": "text"}, {"out": "text"}),)
    )
    check(ensemble, ensemble.to_text())
    for step, named in (
        (Step("one", {"in": "texts"}, {"out": "text"}), "which nothing gives"),
        (Step("one", {"in": "text"}, {"out": "other"}), "no step gives"),
    ):
        outputs = (Tensor("answer", "TYPE_STRING"),)
        broken = replace(ensemble, outputs=outputs, steps=(step,))
        with pytest.raises(ModelConfigError, match=named):
            check(broken, broken.to_text())


def test_settings_survive_the_text() -> None:
    settings = EngineSettings("../x", 3, False, 9, [[0], [0, 1]], "tree", "static", 2, "mpiexec")
    assert EngineSettings.from_parameters(settings.to_parameters()) == settings
    assert EngineSettings.from_json(json.dumps(settings.to_json_dict())) == settings
    for name, value in (("threads", "many"), ("prefix_cache", "1"), ("medusa_choices", "{}")):
        with pytest.raises(SettingsError, match=f"parameter {name}"):
            EngineSettings.from_parameters({name: value})


def test_writing_needs_no_protobuf(demo_engine: Build, tmp_path: Path) -> None:
    """Without the triton extra the same files are written, and the log says what was left out."""
    code = (
        "import sys; sys.modules['tritonclient'] = None\n"
        "from importlib import util; find = util.find_spec\n"
        "util.find_spec = lambda name, *_: None if name == 'tritonclient' else find(name)\n"
        "from trtree.runtime.triton_repo.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["--engine", str(demo_engine()), "--output", str(tmp_path / "unchecked")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert "is not checked against Triton's schema" in done.stderr
    write_repository(demo_engine(), tmp_path / "checked")
    for file in (tmp_path / "checked").rglob("*.*"):
        relative = file.relative_to(tmp_path / "checked")
        assert (tmp_path / "unchecked" / relative).read_bytes() == file.read_bytes()


@pytest.fixture
def command() -> Any:
    spec = importlib.util.spec_from_file_location("build_engine", ROOT / "build_engine.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
