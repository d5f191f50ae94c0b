"""The state of one lowering, and what describes its results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from trtree.build.lowering.division import Division
from trtree.build.lowering.tensorrt.emitter import Emitter
from trtree.build.lowering.tensorrt.weights import Encoding
from trtree.build.network.network import Network, Op

if TYPE_CHECKING:
    from trtree.build.lowering.tensorrt.branch import StepTables
    from trtree.build.lowering.tensorrt.paged import PagedLowering

# Symbolic sizes: requests, rows per request, output rows per request.
BATCH, ROWS, OUTPUTS = "batch", "rows", "outputs"
OUTPUT_PREFIX = "output."


@dataclass(frozen=True)
class Binding:
    """An input or output of an engine. dims: sizes, or the names of symbolic ones.

    An output with ``alias`` is written in place of that input.
    """

    name: str
    dtype: str
    dims: tuple[int | str, ...]
    alias: str | None = None


@dataclass(frozen=True)
class Profile:
    """One optimization profile: per symbolic size, its least, usual and largest value."""

    name: str
    sizes: Mapping[str, tuple[int, int, int]]


@dataclass
class Lowering:
    """The state of one lowering; op functions take it first.

    cache_length: positions that a request can have, and slots where they are contiguous.
    max_rows: most rows of a request in one step.
    committed: state that branches, by name. kept: what its rows leave to a commit, by
    "state.part". step_tables: how a step's rows are related (branch.StepTables).
    sharded: graph tensors of which a rank holds its part of the features (or heads).
    paged: with plugin attention; the batch is then of one entry, which holds all rows.
    """

    emit: Emitter
    network: Network
    encoding: Encoding
    weights: Mapping[str, torch.Tensor]
    cache_length: int
    max_rows: int
    values: dict[str, Any] = field(default_factory=dict)
    caches: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    masks: dict[tuple[str, int | None], Any] = field(default_factory=dict)
    committed: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    step_tables: "StepTables | None" = None
    shapes: dict[tuple[int | str, ...], Any] = field(default_factory=dict)
    sharded: set[str] = field(default_factory=set)
    paged: "PagedLowering | None" = None

    @property
    def batch(self) -> int | str:
        """The first axis of what is not attention's."""
        return 1 if self.paged else BATCH

    @property
    def ranks(self) -> int:
        return self.encoding.shard.size

    @cached_property
    def division(self) -> Division:
        return Division(self.network, self.encoding.shard)

    def extent(self, tensor: str) -> int:
        """The features, or heads, that this rank has of a graph tensor."""
        if tensor in self.sharded:
            return self.division.extent(tensor)
        return int(self.network.tensors[tensor].shape[1])

    def inherit(self, op: Op) -> None:
        """The results of ``op`` are divided among ranks as its operands are."""
        if op.inputs[0] in self.sharded:
            self.sharded.update(op.outputs)

    def row_shape(self, size: int, heads: int | None = None) -> Any:
        """int32: B, W, size, or B, heads, W, size. Shared by all that slice or make rows."""
        key = (size,) if heads is None else (0, heads, size)
        if key not in self.shapes:
            with self.emit.op("rows.shape"):
                rows = self.values["positions"]
                batch, width = self.emit.size("batch", rows, 0), self.emit.size("width", rows, 1)
                parts = [batch, width, size] if heads is None else [batch, heads, width, size]
                self.shapes[key] = self._joined(parts, "x".join(map(str, key)))
        return self.shapes[key]

    def last_axis_slice(self, name: str, x: Any, start: int, size: int) -> Any:
        """x[..., start : start + size] of a [B, W, F] or [B, heads, W, F] tensor."""
        emit, ones = self.emit, [1] * (len(x.shape) - 1)
        layer = emit.network.add_slice(x, (*(0 for _ in ones), start), (*ones, size), (*ones, 1))
        layer.set_input(2, self.row_shape(size, int(x.shape[1]) if len(ones) == 3 else None))
        return emit.layer(name, layer).get_output(0)

    def head_slice(self, name: str, x: Any, start: int, size: int) -> Any:
        """x[..., start : start + size] of ragged heads [rows, heads, D]."""
        emit, heads = self.emit, int(x.shape[1])
        if (heads, "ragged", size) not in self.shapes:
            with emit.op("rows.shape"):
                parts = [emit.size("width", self.values["positions"], 1), heads, size]
                self.shapes[heads, "ragged", size] = self._joined(parts, f"ragged{heads}x{size}")
        layer = emit.network.add_slice(x, (0, 0, start), (1, heads, size), (1, 1, 1))
        layer.set_input(2, self.shapes[heads, "ragged", size])
        return emit.layer(name, layer).get_output(0)

    def expert_shape(self, x: Any, size: int) -> Any:
        """int32 [3]: E, B * W, size, for x [E, B * W, F]."""
        experts = int(x.shape[0])
        if (experts, size) not in self.shapes:
            with self.emit.op("experts.shape"):
                parts = [experts, self.emit.size("rows", x, 1), size]
                self.shapes[experts, size] = self._joined(parts, f"{experts}x{size}")
        return self.shapes[experts, size]

    def _joined(self, parts: list[Any], name: str) -> Any:
        """int32 [n] of sizes known now and sizes known when it runs."""
        emit = self.emit
        known = [
            emit.constant(f"constant/size/{part}", torch.tensor([part]).int())
            if isinstance(part, int)
            else part
            for part in parts
        ]
        return emit.layer(name, emit.network.add_concatenation(known)).get_output(0)

    def constant(self, op: Op, part: str) -> Any:
        """A part of the op's weight; what it is made of, ``weights.Encoding`` says."""
        name = self._constant_name(op, part)
        return self.emit.constant(name, self.weights[name])

    def constant_data(self, op: Op, part: str) -> torch.Tensor:
        """What ``constant`` would hold."""
        return self.weights[self._constant_name(op, part)]

    @staticmethod
    def is_wide(op: Op) -> bool:
        """Whether the result stays in float32."""
        return bool(op.attrs.get("dtype") == "float32")

    def has_bias(self, op: Op) -> bool:
        return self._constant_name(op, "bias") in self.weights

    def _constant_name(self, op: Op, part: str) -> str:
        use = self.encoding.use(self.division, op, op.weights[0])
        return f"{use.prefix}.{part}"

    def rounded(self, x: Any) -> Any:
        """x in the network's dtype."""
        return self.emit.cast(x, getattr(self.emit.trt, self.network.dtype))


OpFunction = Callable[[Lowering, Op, list[Any]], list[Any]]
