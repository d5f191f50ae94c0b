"""config.json's values: what is refused, in one line that names the field."""

import math
from typing import Any

import pytest

from engines import tiny_config
from random_glm5 import glm5_config
from random_hybrid import hybrid_config
from trtree.build.models import family_of
from trtree.build.models.qwen3 import Qwen3Config
from trtree.build.network.network import NetworkError

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"rms_norm_eps": math.inf}, "rms_norm_eps must be a positive number, not inf"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be at most 10000, not 10000"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_theta": math.inf}}, "rope_theta"),
        ({"rope_parameters": None, "rope_theta": math.nan}, "rope_theta"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_scaling": "x"}, "rope_scaling must be an object"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type ['yarn'] is not supported"),
        ({"rope_parameters": {**YARN, "rope_theta": 1.0}}, "rope_theta above 1"),
        ({"rope_parameters": {**YARN, "beta_fast": "x"}}, "beta_fast"),
        ({"rope_parameters": {**YARN, "mscale": "x", "mscale_all_dim": 1}}, "mscale"),
        (
            {"rope_parameters": {**YARN, "original_max_position_embeddings": "x"}},
            "original_max_position_embeddings",
        ),
        (
            {"rope_parameters": {**YARN, "beta_fast": 1e308}},
            "give no finite frequencies",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "high_freq_factor 4.0 must be above low_freq_factor 4.0",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            "partial_rotary_factor 0.25 is not supported",
        ),
        ({"layer_types": 5}, "layer_types must list"),
        ({"layer_types": "full_attention"}, "layer_types must list"),
        ({"layer_types": []}, "layer_types must list"),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        ({"use_sliding_window": "yes"}, "use_sliding_window must be true or false"),
    ],
)
def test_refused(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(NetworkError) as caught:
        Qwen3Config.from_dict(tiny_config(**changes))
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 7}, (None, None)),
        ({"use_sliding_window": True, "sliding_window": 7}, (None, None)),
        ({"use_sliding_window": True, "max_window_layers": 1}, (None, 4096)),
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}, (7, 7)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None,) * 2),
    ],
)
def test_windows_without_layer_types(
    changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert Qwen3Config.from_dict(tiny_config(**changes)).windows == windows


@pytest.mark.parametrize(
    "config",
    [
        glm5_config(num_hidden_layers=10**12),
        hybrid_config("Qwen3NextForCausalLM", num_hidden_layers=10**12),
    ],
    ids=["glm5", "hybrid"],
)
def test_layers_are_not_listed_before_they_are_counted(config: dict[str, Any]) -> None:
    with pytest.raises(NetworkError, match="num_hidden_layers must be at most"):
        family_of(config).parse(config)


def test_architectures_must_be_a_list() -> None:
    with pytest.raises(NetworkError, match=r"architectures must be a list of names"):
        family_of(tiny_config(architectures="Qwen3ForCausalLM"))
