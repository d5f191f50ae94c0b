"""A network with plugin layers where TensorRT 11 is not: ordinary layers are a real TensorRT-RTX
network's, plugin layers stand beside it.

They go through the Python files of ``tensorrt.plugin`` (see tensorrt_stub.py) for their output
types, shapes and aliases. In the real network their outputs are inputs, so that it infers the
shapes of everything behind them. This shows the network that would be built, not that it builds.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import tensorrt_stub

# Stands for the sizes that vary, by axis; no fixed size is as large.
VARYING = 10**9


@dataclass
class PluginCall:
    """What ``tensorrt.plugin.op.trtree.NAME(...)`` gives, and the tensors it was given."""

    plugin: str
    attribute: str
    tensors: tuple[Any, ...]
    made: Any
    trt: Any


@functools.cache
def plugins() -> "Plugins":
    return Plugins()


class Plugins:
    """``tensorrt.plugin`` with this project's plugins, for tensors of a PluginNetwork."""

    def __init__(self) -> None:
        from trtree.plugins.registry import PLUGINS, register_plugins

        saved = {name: sys.modules.pop(name, None) for name in ("tensorrt", "tensorrt.plugin")}
        try:
            self._trt, self._plugins = tensorrt_stub.load()
        finally:
            for name, module in saved.items():
                sys.modules.pop(name, None)
                if module is not None:
                    sys.modules[name] = module
        register_plugins(self._trt, self._plugins)
        self._names = {plugin.name for plugin in PLUGINS}
        self.op = SimpleNamespace(trtree=self)

    def __getattr__(self, name: str) -> Callable[..., PluginCall]:
        if name.startswith("_") or name not in self._names:
            raise AttributeError(name)

        def call(*tensors: Any, layer: str) -> PluginCall:
            made = getattr(self._plugins.op.trtree, name)(*map(self._stub, tensors), layer=layer)
            return PluginCall(name, layer, tensors, made, self._trt)

        return call

    def _stub(self, tensor: Any) -> tensorrt_stub.ITensor:
        shape = [VARYING + axis if size < 0 else size for axis, size in enumerate(tensor.shape)]
        dtype = tensorrt_stub.DataType[str(tensor.dtype).split(".")[1]]
        return tensorrt_stub.ITensor(dtype, tuple(shape))


@dataclass
class RecordedLayer:
    """A plugin layer, with as much of ILayer as the lowering and the evaluator read."""

    name: str
    plugin: str
    attribute: str
    inputs: list[Any]
    outputs: list[Any]
    aliases: list[Any]
    type: Any = field(default_factory=lambda: SimpleNamespace(name="PLUGIN_V3"))

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    def get_input(self, index: int) -> Any:
        return self.inputs[index]

    def get_output(self, index: int) -> Any:
        return self.outputs[index]


class PluginNetwork:
    """An INetworkDefinition that also has ``add_plugin``."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self.plugin_layers: list[RecordedLayer] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def add_input(self, name: str, dtype: Any, shape: Any) -> Any:
        self._inputs.append(self._network.add_input(name, dtype, shape))
        return self._inputs[-1]

    def mark_output(self, tensor: Any) -> None:
        self._outputs.append(tensor)
        if not any(tensor is output for layer in self.plugin_layers for output in layer.outputs):
            self._network.mark_output(tensor)

    def add_plugin(self, call: PluginCall, aot: bool) -> RecordedLayer:
        assert aot
        _, inputs, described = tensorrt_stub.describe(call.trt, call.made)
        number = len(self.plugin_layers)
        outputs, aliases = [], []
        for index, output in enumerate(described):
            shape = [-1 if size >= VARYING else size for size in output.shape]
            dtype = getattr(type(call.tensors[0].dtype), output.dtype.name)
            outputs.append(self._network.add_input(f"plugin{number}.{index}", dtype, shape))
            source = [i for i, given in enumerate(inputs) if given is output.aliases]
            aliases.append(call.tensors[source[0]] if source else None)
        name = f"plugin{number}"
        made = RecordedLayer(
            name, call.plugin, call.attribute, list(call.tensors), outputs, aliases
        )
        self.plugin_layers.append(made)
        return made

    @property
    def num_layers(self) -> int:
        return int(self._network.num_layers) + len(self.plugin_layers)

    def get_layer(self, index: int) -> Any:
        ordinary = self._network.num_layers
        if index < ordinary:
            return self._network.get_layer(index)
        return self.plugin_layers[index - ordinary]

    @property
    def num_inputs(self) -> int:
        return len(self._inputs)

    def get_input(self, index: int) -> Any:
        return self._inputs[index]

    @property
    def num_outputs(self) -> int:
        return len(self._outputs)

    def get_output(self, index: int) -> Any:
        return self._outputs[index]


class PluginBuilder:
    """A builder of PluginNetworks, which it can describe to the end but not compile: what it
    would have to is kept in ``builds``, and PLAN stands for the result."""

    PLAN = b"no engine: TensorRT 11 is not here"

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.builds: list[tuple[PluginNetwork, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.builder, name)

    def create_network(self, flags: int) -> PluginNetwork:
        return PluginNetwork(self.builder.create_network(flags))

    def build_serialized_network_to_stream(
        self, definition: PluginNetwork, config: Any, writer: Any
    ) -> bool:
        self.builds.append((definition, config))
        return bool(writer.write(self.PLAN))
