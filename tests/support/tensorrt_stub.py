"""Stands in for TensorRT's native part, so that the Python files of `tensorrt.plugin` (of the
tensorrt-cu13-bindings wheel, unchanged) can be run on plain objects without TensorRT.

``Network.add_plugin`` takes a plugin through what the builder does with it: output types,
output shapes, format combinations, launch parameters, kernel. Shapes are plain numbers, so
symbolic expressions evaluate at once. This shows that registration, shapes and launches
follow the wheel's rules; it cannot show that an engine runs.
"""

import enum
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

DataType = enum.Enum("DataType", "FLOAT HALF BF16 FP8 INT32 INT64")
OPERATIONS = {
    "SUM": lambda a, b: a + b,
    "SUB": lambda a, b: a - b,
    "PROD": lambda a, b: a * b,
    "FLOOR_DIV": lambda a, b: a // b,
    "CEIL_DIV": lambda a, b: -(-a // b),
    "MAX": max,
    "MIN": min,
    "EQUAL": lambda a, b: int(a == b),
    "LESS": lambda a, b: int(a < b),
}


@dataclass
class IDimensionExpr:
    value: int

    def is_constant(self) -> bool:
        return False

    def get_constant_value(self) -> int:
        return self.value


class ExprBuilder:
    def constant(self, value: int) -> IDimensionExpr:
        return IDimensionExpr(value)

    def operation(self, op: str, a: IDimensionExpr, b: IDimensionExpr) -> IDimensionExpr:
        return IDimensionExpr(OPERATIONS[op](a.value, b.value))


class _Base:
    def __init__(self, *args: Any) -> None: ...


class PluginField:
    def __init__(self, name: str, data: Any, kind: Any) -> None:
        self.name = name
        self.data = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data


class Registry:
    def __init__(self) -> None:
        self._creators: dict[tuple[str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> None:
        self._creators[namespace, creator.name] = creator

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        assert version == "1"
        return self._creators[namespace, name]


@dataclass
class ITensor:
    dtype: Any
    shape: tuple[int, ...]
    aliases: "ITensor | None" = None


@dataclass
class PluginTensorDesc:
    type: Any = None
    format: Any = None
    dims: Any = None
    scale: float = 1.0


@dataclass
class DynamicPluginTensorDesc:
    desc: PluginTensorDesc


@dataclass
class Launch:
    """What the builder keeps of one plugin layer."""

    name: str
    entry: str
    ptx: bytes
    grid: list[int]
    block: list[int]
    shared_bytes: int
    scalars: list[int]
    inputs: list[ITensor]
    outputs: list[ITensor]

    def get_output(self, index: int) -> ITensor:
        return self.outputs[index]


@dataclass
class Network:
    trt: Any
    layers: list[Launch] = field(default_factory=list)

    def add_plugin(self, call: Any, aot: bool) -> Launch:
        assert aot
        plugin, inputs, outputs = describe(self.trt, call)
        dims = [[IDimensionExpr(n) for n in t.shape] for t in inputs]
        tensors = [*inputs, *outputs]
        combination = plugin.get_supported_format_combinations(_descriptions(tensors), len(inputs))
        assert [c.type for c in combination] == [t.dtype for t in tensors]
        plugin.configure_plugin(_descriptions(inputs), _descriptions(outputs))
        plugin.set_tactic(0)
        params, setter = SimpleNamespace(), _Setter()
        described = _descriptions(tensors)
        plugin.get_launch_params(dims, described, len(inputs), params, setter, ExprBuilder())
        plain = [d.desc for d in described]
        entry, ptx = plugin.get_kernel(plain[: len(inputs)], plain[len(inputs) :])
        launch = Launch(
            plugin.plugin_name,
            entry,
            ptx,
            [getattr(params, f"grid_{axis}").expr.value for axis in "xyz"],
            [getattr(params, f"block_{axis}").expr.value for axis in "xyz"],
            params.shared_mem.expr.value,
            [setter[i].expr.value for i in range(setter.nbSymExprs)],
            inputs,
            outputs,
        )
        self.layers.append(launch)
        return launch


def describe(trt: Any, call: Any) -> tuple[Any, list[ITensor], list[ITensor]]:
    """The plugin that a call makes, its inputs and outputs; no kernel is compiled."""
    inputs, shape_inputs, plugin = call(trt.QuickPluginCreationRequest.STRICT_AOT)
    assert shape_inputs == []
    types = plugin.get_output_data_types([t.dtype for t in inputs], [len(t.shape) for t in inputs])
    dims = [[IDimensionExpr(n) for n in t.shape] for t in inputs]
    shapes = plugin.get_output_shapes(dims, [], ExprBuilder())
    outputs = []
    for index, (dtype, shape) in enumerate(zip(types, shapes, strict=True)):
        alias = plugin.get_aliased_input(index)
        source = inputs[alias] if alias >= 0 else None
        outputs.append(ITensor(dtype, tuple(expr.value for expr in shape), source))
    return plugin, inputs, outputs


class _Setter(dict[int, Any]):
    nbSymExprs = 0


def _descriptions(tensors: list[ITensor]) -> list[DynamicPluginTensorDesc]:
    linear = "LINEAR"
    return [DynamicPluginTensorDesc(PluginTensorDesc(t.dtype, linear, t.shape)) for t in tensors]


def load() -> tuple[ModuleType, ModuleType]:
    """(tensorrt, tensorrt.plugin): the stub, and the wheel's package on top of it."""
    distribution = importlib.metadata.distribution("tensorrt-cu13-bindings")
    folder = distribution.locate_file("tensorrt_bindings/plugin")
    trt = ModuleType("tensorrt")
    _fill(trt)
    sys.modules["tensorrt"] = trt
    spec = importlib.util.spec_from_file_location(
        "tensorrt.plugin", f"{folder}/__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    plugin = importlib.util.module_from_spec(spec)
    sys.modules["tensorrt.plugin"] = plugin
    trt.__path__ = []
    spec.loader.exec_module(plugin)
    return trt, plugin


def _fill(trt: Any) -> None:
    registry = Registry()
    names = "INT8 INT16 INT32 INT64 FLOAT16 FLOAT32 FLOAT64 CHAR UNKNOWN"
    trt.PluginFieldType = enum.Enum("PluginFieldType", names)
    trt.PluginArgType = enum.Enum("PluginArgType", "INT")
    trt.PluginArgDataType = enum.Enum("PluginArgDataType", "INT8 INT16 INT32")
    trt.DimensionOperation = SimpleNamespace(**{name: name for name in OPERATIONS})
    trt.TensorFormat = SimpleNamespace(LINEAR="LINEAR")
    trt.TensorRTPhase = SimpleNamespace(BUILD="build")
    trt.QuickPluginCreationRequest = enum.Enum(
        "QuickPluginCreationRequest", "STRICT_AOT STRICT_JIT PREFER_AOT PREFER_JIT"
    )
    trt.Dims = type("Dims", (tuple,), {"MAX_DIMS": 8})
    trt.DimsExprs = lambda length: [None] * length
    trt.PluginFieldCollection = list
    trt.PluginField = PluginField
    trt.DataType = DataType
    trt.float32, trt.float16, trt.bfloat16 = DataType.FLOAT, DataType.HALF, DataType.BF16
    trt.fp8, trt.int32, trt.int64 = DataType.FP8, DataType.INT32, DataType.INT64
    trt.get_plugin_registry = lambda: registry
    logger = type("Logger", (_Base,), {"WARNING": 2, "log": lambda self, level, text: None})
    trt.Logger = logger
    for value in (IDimensionExpr, ITensor, PluginTensorDesc, DynamicPluginTensorDesc):
        setattr(trt, value.__name__, value)
    for name in [
        "ISymExpr",
        "IExprBuilder",
        "IPluginV3",
        "IPluginV3QuickCore",
        "IPluginV3QuickBuild",
        "IPluginV3QuickRuntime",
        "IPluginV3QuickAOTBuild",
        "IPluginCreatorV3Quick",
    ]:
        setattr(trt, name, type(name, (_Base,), {}))
