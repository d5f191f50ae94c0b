"""What an engine takes from its checkpoint, and what it does not."""

import shutil
from pathlib import Path

import pytest
import torch

from engines import DEMO, build_demo, tiny_config, write_target
from random_target import random_target
from trtree.build import builder
from trtree.build.checkpoint import CheckpointError
from trtree.build.engine_dir import EngineDir
from trtree.build.options import BuildOptions
from trtree.runtime.chat_template import ChatTemplate


def test_the_chat_template_comes_along(tmp_path: Path) -> None:
    """Pitfall 28: the template of the drafter's training is the one that is served."""
    target = Path(shutil.copytree(DEMO / "target_nvfp4", tmp_path / "target"))
    (target / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    engine = EngineDir.open(build_demo(tmp_path / "engine", checkpoint=target))
    assert "tokenizer/chat_template.jinja" in engine.manifest["files"]
    template = ChatTemplate(engine.tokenizer_path)
    assert template.render([{"role": "user", "content": "hi"}]) == "<hi>"


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_its_own_is_left_over_only_where_the_embedding_serves(
    tmp_path: Path, tied: bool
) -> None:
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_target(config, dtype=torch.bfloat16)
    name = "lm_head.weight" if tied else "lm_tail.weight"
    tensors[name] = tensors["model.embed_tokens.weight"].clone()
    options = BuildOptions(checkpoint=write_target(tmp_path / "c", tensors, config))
    if tied:
        builder.describe(options)
    else:
        with pytest.raises(CheckpointError, match=name):
            builder.describe(options)


def test_requests_are_no_longer_than_the_pool(tmp_path: Path) -> None:
    engine = EngineDir.open(build_demo(tmp_path / "engine", kv_tokens=500, page_size=16))
    build = engine.manifest["build_config"]
    assert build["num_pages"] == 32
    assert build["max_seq_len"] == 512
