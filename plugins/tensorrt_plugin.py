"""A kernel as a TensorRT plugin, and layers of it.

For ``tensorrt`` 11.x: Quickly Deployable Plugins with ahead-of-time implementations, so that
the engine carries each kernel's PTX and needs no Python at run time. A plugin is one kernel and
has no workspace: what one kernel leaves to the next are outputs. What a kernel writes in place
is an input and an output that aliases it; who reads the output comes behind it.

NOT YET RUN. Written from the signatures and validation rules in the Python files of
`tensorrt.plugin` and tested against those files alone: TensorRT needs a GPU to build. No
machine tried so far had both an SM120 GPU and these plugins. `tensorrt_rtx` has no plugin
layers in its Python network, so that backend refuses ``--attention plugin``.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import GenericAlias
from typing import Any, Generic, TypeVar

import torch

from trtree.plugins.tree_attention.aot import KernelSpec, compile_kernel

_TRT_TYPES = {
    "*bf16": "bfloat16",
    "*fp16": "float16",
    "*fp8e4nv": "fp8",
    "*fp32": "float32",
    "*i32": "int32",
}

# Tensors, or TensorRT's descriptions of them, by the kernels' argument names.
Tensors = Mapping[str, Any]

# Names a layer just added, and refuses None, TensorRT's way to say no.
Named = Callable[[str, Any], Any]

Config = TypeVar("Config")


@dataclass(frozen=True)
class PluginLayer(Generic[Config]):
    """A layer's kernel on an SM: the one attribute of each plugin, as JSON. config: a
    dataclass of what the kernel is specialized to."""

    config: Config
    sm: int

    def to_json(self) -> str:
        values = asdict(self.config)  # type: ignore[call-overload]
        plain = {
            name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
            for name, value in values.items()
        }
        return json.dumps({"config": plain, "sm": self.sm})


@dataclass(frozen=True)
class Plugin(Generic[Config]):
    """What TensorRT is told about one kernel.

    outputs: (tensorrt, tensorrt.plugin, inputs, layer) -> descriptions, in the kernel's order.
    grid: CTAs in x and, where there are more, in y and z; symbolic expressions or numbers.
    scalars: the kernel's integers, symbolic too.
    example: any configuration; the arguments' names and order are alike for all.
    """

    name: str
    output_names: tuple[str, ...]
    spec: Callable[[Config, int], KernelSpec]
    outputs: Callable[[Any, Any, Tensors, PluginLayer[Config]], tuple[Any, ...]]
    grid: Callable[[Any, Tensors, PluginLayer[Config]], tuple[Any, ...]]
    scalars: Callable[[Tensors, Config], tuple[Any, ...]]
    example: Config

    @property
    def plugin_id(self) -> str:
        return f"trtree::{self.name}"

    @property
    def input_names(self) -> list[str]:
        """As TensorRT passes them: before the integers, which stand before the outputs."""
        types = self.spec(self.example, 120).types
        pointers = [name for name, kind in types.items() if kind.startswith("*")]
        return [name for name in pointers if name not in self.output_names]

    def layer(self, text: str) -> PluginLayer[Config]:
        """A layer's attribute, read."""
        value = json.loads(text)
        kind = type(self.example)
        types = {
            field.name: getattr(torch, value["config"][field.name])
            for field in fields(kind)  # type: ignore[arg-type]
            if field.type is torch.dtype
        }
        return PluginLayer(kind(**(value["config"] | types)), value["sm"])

    def register(self, trt: Any, trtp: Any, cache: Path | None) -> None:
        """With the modules ``tensorrt`` and ``tensorrt.plugin``; cache: of compiled kernels."""
        trtp.register(self.plugin_id)(_describe(self, trt, trtp))
        trtp.aot_impl(self.plugin_id)(_implement(self, trtp, cache))

    def add(
        self,
        network: Any,
        trtp: Any,
        layer: PluginLayer[Config],
        tensors: Tensors,
        named: Named | None = None,
    ) -> dict[str, Any]:
        """One layer on the network's tensors, which may be more than its own; returns its
        outputs by name. The builder's ALIASED_PLUGIN_IO_10_03 preview feature is to be set."""
        arguments = [tensors[name] for name in self.input_names]
        call = getattr(trtp.op.trtree, self.name)(*arguments, layer=layer.to_json())
        added = network.add_plugin(call, aot=True)
        if named:
            added = named(self.name, added)
        return {name: added.get_output(index) for index, name in enumerate(self.output_names)}


def in_place(spec: KernelSpec, kernel: Any, inputs: Mapping[str, str]) -> KernelSpec:
    """``spec`` for a kernel that also takes what it writes in place as inputs: output by input.

    The kernel's arguments are in TensorRT's order.
    """
    types = dict(spec.types) | {name: spec.types[output] for name, output in inputs.items()}
    order = list(inspect.signature(kernel.fn).parameters)
    arguments = {name: types[name] for name in order if name in types}
    return replace(spec, kernel=kernel, types=arguments)


def _describe(plugin: Plugin[Any], trt: Any, trtp: Any) -> Callable[..., tuple[Any, ...]]:
    names = plugin.input_names

    def describe(*inputs: Any, layer: str) -> tuple[Any, ...]:
        chosen = plugin.layer(layer)
        tensors = dict(zip(names, inputs, strict=True))
        _check_types(plugin, chosen, trt, tensors)
        return plugin.outputs(trt, trtp, tensors, chosen)

    outputs = GenericAlias(tuple, (trtp.TensorDesc,) * len(plugin.output_names))
    parameters = dict.fromkeys(names, trtp.TensorDesc) | {"layer": str}
    return _with_signature(describe, parameters, outputs)


def _implement(plugin: Plugin[Any], trtp: Any, cache: Path | None) -> Callable[..., Any]:
    names = plugin.input_names

    def implement(*args: Any) -> tuple[str, str, Any, Any]:
        *inputs, layer, _outputs, _tactic = args
        chosen = plugin.layer(layer)
        tensors = dict(zip(names, inputs, strict=True))
        compiled = compile_kernel(plugin.spec(chosen.config, chosen.sm), chosen.sm, cache)
        launch = trtp.KernelLaunchParams()
        for axis, size in zip("xyz", plugin.grid(trtp, tensors, chosen), strict=False):
            setattr(launch, f"grid_{axis}", size)
        launch.block_x = 32 * compiled.resources.num_warps
        launch.shared_mem = compiled.resources.shared_bytes
        scalars = plugin.scalars(tensors, chosen.config)
        arguments = trtp.SymIntExprs(len(scalars))
        for index, scalar in enumerate(scalars):
            arguments[index] = trtp.SymInt32(scalar)
        return compiled.entry, compiled.ptx, launch, arguments

    parameters = {
        **dict.fromkeys(names, trtp.TensorDesc),
        "layer": str,
        "outputs": tuple[trtp.TensorDesc],
        "tactic": int,
    }
    returns = tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymIntExprs]
    return _with_signature(implement, parameters, returns)


def _check_types(plugin: Plugin[Any], layer: PluginLayer[Any], trt: Any, tensors: Tensors) -> None:
    for name, kind in plugin.spec(layer.config, layer.sm).types.items():
        if name in tensors:
            expected = getattr(trt, _TRT_TYPES[kind])
            if tensors[name].dtype != expected:
                raise ValueError(
                    f"{plugin.plugin_id}: input {name} is {tensors[name].dtype}, "
                    f"the layer's kernels take {expected}"
                )


def _with_signature(
    function: Callable[..., Any], parameters: Mapping[str, Any], returns: Any
) -> Callable[..., Any]:
    """TensorRT reads names, order and types from the signature; here a table holds them."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    listed = [inspect.Parameter(name, kind, annotation=a) for name, a in parameters.items()]
    function.__signature__ = inspect.Signature(listed, return_annotation=returns)  # type: ignore[attr-defined]
    return function
