"""The kernels as TensorRT plugins: `trtree::tree_kv_append`, `trtree::tree_attention` and
`trtree::tree_attention_combine`.

For `tensorrt` 11.x: Quickly Deployable Plugins with ahead-of-time implementations, so that
the engine carries each kernel's PTX and needs no Python at run time. The KV caches are
inputs whose outputs alias them; attention reads append's outputs, which orders the two.

NOT YET RUN. Written from the signatures and validation rules in the Python files of
`tensorrt.plugin` and tested against those files alone: TensorRT needs a GPU to build. No
machine tried so far had both an SM120 GPU and these plugins. `tensorrt_rtx` has no plugin
layers in its Python network, so that backend refuses ``--attention plugin``.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import GenericAlias
from typing import Any

import torch

from trtree.plugins.tree_attention.aot import KernelSpec, compile_kernel
from trtree.plugins.tree_attention.kernels.plugin_append import tree_kv_append_plugin_kernel
from trtree.plugins.tree_attention.specs import (
    LayerConfig,
    append_spec,
    attention_spec,
    combine_spec,
)
from trtree.plugins.tree_attention.tiles import APPEND_ROWS, attention_tile

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


@dataclass(frozen=True)
class PluginLayer:
    """A layer's kernels on an SM: the one attribute of each plugin, as JSON."""

    config: LayerConfig
    sm: int

    def to_json(self) -> str:
        fields = asdict(self.config) | {
            "dtype": str(self.config.dtype).removeprefix("torch."),
            "kv_dtype": str(self.config.kv_dtype).removeprefix("torch."),
        }
        return json.dumps({"config": fields, "sm": self.sm})

    @classmethod
    def from_json(cls, text: str) -> "PluginLayer":
        value = json.loads(text)
        types = {name: getattr(torch, value["config"][name]) for name in ("dtype", "kv_dtype")}
        return cls(LayerConfig(**(value["config"] | types)), value["sm"])


@dataclass(frozen=True)
class Plugin:
    """What TensorRT is told about one kernel.

    outputs: (tensorrt, tensorrt.plugin, inputs, layer) -> descriptions, in the kernel's order.
    grid: CTAs in x, a symbolic expression; y is the layer's KV heads.
    scalars: the kernel's integers, symbolic too.
    """

    name: str
    output_names: tuple[str, ...]
    spec: Callable[[LayerConfig, int], KernelSpec]
    outputs: Callable[[Any, Any, Tensors, PluginLayer], tuple[Any, ...]]
    grid: Callable[[Any, Tensors], Any]
    scalars: Callable[[Tensors], tuple[Any, ...]]

    @property
    def plugin_id(self) -> str:
        return f"trtree::{self.name}"

    @property
    def input_names(self) -> list[str]:
        """As TensorRT passes them: before the integers, which stand before the outputs."""
        pointers = [name for name, kind in self._types.items() if kind.startswith("*")]
        return [name for name in pointers if name not in self.output_names]

    @property
    def _types(self) -> Mapping[str, str]:
        # Names and order are alike for all layers.
        return self.spec(LayerConfig(128, 1, 1, 16, 1, 1.0, 128), 120).types


def _append_spec(layer: LayerConfig, sm: int) -> KernelSpec:
    plain = append_spec(layer, sm)
    types = dict(plain.types)
    order = list(inspect.signature(tree_kv_append_plugin_kernel.fn).parameters)
    types |= {"k_cache_in": types["k_cache"], "v_cache_in": types["v_cache"]}
    return replace(
        plain,
        kernel=tree_kv_append_plugin_kernel,
        types={name: types[name] for name in order if name in types},
    )


def _append_outputs(trt: Any, trtp: Any, x: Tensors, layer: PluginLayer) -> tuple[Any, ...]:
    return x["q"].like(), x["k_cache_in"].aliased(), x["v_cache_in"].aliased()


def _partial_shape(layer: PluginLayer) -> tuple[int, int, int]:
    config = layer.config
    tile = attention_tile(layer.sm, config.head_dim, config.rows, config.group)
    return config.kv_heads, tile.block_m, config.head_dim


def _attention_outputs(trt: Any, trtp: Any, x: Tensors, layer: PluginLayer) -> tuple[Any, ...]:
    # A plugin has no workspace: the partial results are outputs.
    items = x["work"].shape_expr[0]
    kv_heads, block_m, head_dim = _partial_shape(layer)
    return (
        trtp.from_shape_expr((items, kv_heads, block_m, head_dim), trt.float32),
        trtp.from_shape_expr((items, kv_heads, block_m), trt.float32),
    )


def _combine_outputs(trt: Any, trtp: Any, x: Tensors, layer: PluginLayer) -> tuple[Any, ...]:
    rows = x["row_splits"].shape_expr[0]
    heads = layer.config.kv_heads * layer.config.group
    dtype = getattr(trt, str(layer.config.dtype).removeprefix("torch."))
    return (
        trtp.from_shape_expr((rows, heads, layer.config.head_dim), dtype),
        trtp.from_shape_expr((rows, heads), trt.float32),
    )


PLUGINS = (
    Plugin(
        "tree_kv_append",
        ("q_out", "k_cache", "v_cache"),
        _append_spec,
        _append_outputs,
        grid=lambda trtp, x: trtp.cdiv(x["q"].shape_expr[0], APPEND_ROWS),
        scalars=lambda x: (x["page_table"].shape_expr[1], x["q"].shape_expr[0]),
    ),
    Plugin(
        "tree_attention",
        ("partial_out", "partial_lse"),
        attention_spec,
        _attention_outputs,
        grid=lambda trtp, x: x["work"].shape_expr[0],
        scalars=lambda x: (x["page_table"].shape_expr[1], x["packed_mask"].shape_expr[1]),
    ),
    Plugin(
        "tree_attention_combine",
        ("out", "lse"),
        combine_spec,
        _combine_outputs,
        grid=lambda trtp, x: x["row_splits"].shape_expr[0],
        scalars=lambda x: (),
    ),
)


def register_plugins(trt: Any, trtp: Any, cache: Path | None = None) -> None:
    """Register all plugins with TensorRT, once per process.

    Args:
        trt, trtp: the modules ``tensorrt`` and ``tensorrt.plugin``.
        cache: folder of compiled kernels; default: the user's.
    """
    for plugin in PLUGINS:
        trtp.register(plugin.plugin_id)(_describe(plugin, trt, trtp))
        trtp.aot_impl(plugin.plugin_id)(_implement(plugin, trtp, cache))


def add_append(
    network: Any, trtp: Any, layer: PluginLayer, tensors: Tensors, named: Named | None = None
) -> dict[str, Any]:
    """Append alone, as a drafter's context wants it; returns its outputs by name.

    A layer with a ``group`` of 0 has no queries: ``q`` is then any tensor of as many rows, and
    ``q_out`` is not written.
    """
    return _add(network, trtp, PLUGINS[0], layer, tensors, named)


def add_attention(
    network: Any, trtp: Any, layer: PluginLayer, tensors: Tensors, named: Named | None = None
) -> dict[str, Any]:
    """The three layers on the network's tensors, named as the kernels' arguments.

    Returns those and the outputs, of which ``q`` is turned, ``out`` [rows, heads, head_dim] the
    result, and ``k_cache`` and ``v_cache`` are to be marked as network outputs. The builder's
    ALIASED_PLUGIN_IO_10_03 preview feature is to be set.
    """
    known = dict(tensors)
    for plugin in PLUGINS:
        known |= _add(network, trtp, plugin, layer, known, named)
        if layer.config.rotary_dim:  # else append leaves q alone, and q_out unwritten
            known["q"] = known["q_out"]
    return known


def _add(
    network: Any,
    trtp: Any,
    plugin: Plugin,
    layer: PluginLayer,
    tensors: Tensors,
    named: Named | None,
) -> dict[str, Any]:
    arguments = [tensors[name] for name in plugin.input_names]
    call = getattr(trtp.op.trtree, plugin.name)(*arguments, layer=layer.to_json())
    added = network.add_plugin(call, aot=True)
    if named:
        added = named(plugin.name, added)
    return {name: added.get_output(index) for index, name in enumerate(plugin.output_names)}


def _describe(plugin: Plugin, trt: Any, trtp: Any) -> Callable[..., tuple[Any, ...]]:
    names = plugin.input_names

    def describe(*inputs: Any, layer: str) -> tuple[Any, ...]:
        chosen = PluginLayer.from_json(layer)
        tensors = dict(zip(names, inputs, strict=True))
        _check_types(plugin, chosen, trt, tensors)
        return plugin.outputs(trt, trtp, tensors, chosen)

    outputs = GenericAlias(tuple, (trtp.TensorDesc,) * len(plugin.output_names))
    parameters = dict.fromkeys(names, trtp.TensorDesc) | {"layer": str}
    return _with_signature(describe, parameters, outputs)


def _implement(plugin: Plugin, trtp: Any, cache: Path | None) -> Callable[..., Any]:
    names = plugin.input_names

    def implement(*args: Any) -> tuple[str, str, Any, Any]:
        *inputs, layer, _outputs, _tactic = args
        chosen = PluginLayer.from_json(layer)
        tensors = dict(zip(names, inputs, strict=True))
        spec = plugin.spec(chosen.config, chosen.sm)
        compiled = compile_kernel(spec, chosen.sm, cache)
        launch = trtp.KernelLaunchParams()
        launch.grid_x = plugin.grid(trtp, tensors)
        launch.grid_y = chosen.config.kv_heads
        launch.block_x = 32 * compiled.resources.num_warps
        launch.shared_mem = compiled.resources.shared_bytes
        scalars = plugin.scalars(tensors)
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


def _check_types(plugin: Plugin, layer: PluginLayer, trt: Any, tensors: Tensors) -> None:
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
