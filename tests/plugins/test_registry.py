"""What holds for every TensorRT plugin, before TensorRT looks at it."""

from typing import Any

import pytest

from trtree.plugins.registry import PLUGINS
from trtree.plugins.tensorrt_plugin import Plugin, PluginLayer


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_kernels_take_inputs_then_integers_then_outputs(plugin: Plugin[Any]) -> None:
    spec = plugin.spec(plugin.example, 120)
    names = list(spec.types)
    assert spec.kernel.arg_names[: len(names)] == names
    integers = [name for name in names if spec.types[name] == "i32"]
    assert names == [*plugin.input_names, *integers, *plugin.output_names]


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_a_layer_survives_its_attribute(plugin: Plugin[Any]) -> None:
    layer = PluginLayer(plugin.example, 89)
    assert plugin.layer(layer.to_json()) == layer
