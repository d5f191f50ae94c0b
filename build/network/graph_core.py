"""What every part of the vocabulary builds on: names, weights, and one op at a time."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from trtree.build.network.network import (
    Dim,
    DType,
    Network,
    NetworkError,
    Op,
    Owner,
    State,
    Tensor,
    Weight,
)
from trtree.build.network.weight_source import KvScales, Parallel, WeightInfo, WeightSource


@dataclass(frozen=True)
class Rows:
    """The ragged batch as the network sees it; see runtime/cpp/row_batch.hpp."""

    token_ids: Tensor  # int32 [rows]
    positions: Tensor  # int32 [rows]: committed length + depth
    slots: Tensor  # int32 [rows]: where in its request's KV each row is written
    packed_mask: Tensor  # int32 [rows, mask_words]: visible rows of the same request
    output_rows: Tensor  # int32 [outputs]: rows whose logits are wanted


class GraphCore:
    """One network in the making: inputs, outputs, weights, and ops by their parts.

    Args:
        name: "target", "drafter_context" or "drafter_block".
        source: what the checkpoints hold.
        dtype: of float tensors between ops.
        owner: whose checkpoint module names refer to unless said otherwise.
        kv_scales: of a KV cache in FP8, the scales of its keys and values by the scope of
            its attention; None: KV is kept in ``dtype``.
    """

    def __init__(
        self,
        name: str,
        source: WeightSource,
        *,
        dtype: DType = "float32",
        owner: Owner = "target",
        kv_scales: KvScales | None = None,
    ) -> None:
        self.network = Network(name, dtype)
        self._source = source
        self._owner: Owner = owner
        self._kv_scales = kv_scales
        self._scopes: list[str] = []
        self._op_names: set[str] = set()

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix module, op and state names, as the checkpoint's module tree does."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    def rows(self) -> Rows:
        """Declare the inputs that every network over rows has."""
        return Rows(
            token_ids=self.input("token_ids", ("rows",), "int32"),
            positions=self.input("positions", ("rows",), "int32"),
            slots=self.input("slots", ("rows",), "int32"),
            packed_mask=self.input("packed_mask", ("rows", "mask_words"), "int32"),
            output_rows=self.input("output_rows", ("outputs",), "int32"),
        )

    def input(self, name: str, shape: tuple[Dim, ...], dtype: DType) -> Tensor:
        """Declare one input by name."""
        self.network.inputs.append(name)
        return self._tensor(name, shape, dtype)

    def output(self, role: str, tensor: Tensor) -> None:
        """Name a result; lowerings and engines find it by its role."""
        if role in self.network.outputs:
            raise NetworkError(f"{self.network.name}: output {role} is set twice")
        self.network.outputs[role] = tensor.name

    def _path(self, name: str) -> str:
        return ".".join([*self._scopes, name])

    def _weight(
        self,
        modules: Sequence[str],
        sizes: Sequence[int],
        in_features: int | None = None,
        owner: Owner | None = None,
        *,
        offset: float = 0.0,
        dtype: DType | None = None,
    ) -> Weight:
        """The weight of ``modules``, fused along their first axes ``sizes``; a vector
        without in_features. The same modules give the same weight. ``dtype`` is a vector's
        as stored, where it is not the checkpoint's; one with an ``offset`` is float32.

        Raises:
            NetworkError: the source holds other shapes.
        """
        owner = owner or self._owner
        paths = tuple(self._path(module) for module in modules)
        infos = self._checked_infos(modules, sizes, in_features, owner)
        shape = weight_shape(sum(sizes), in_features)
        stored = "float32" if offset else dtype
        info = replace(infos[0], dtype=stored) if stored else infos[0]
        return self._add_weight("+".join(paths), paths, shape, sizes, info, owner, offset)

    def _add_weight(
        self,
        name: str,
        paths: tuple[str, ...],
        shape: tuple[int, ...],
        sizes: Sequence[int],
        info: WeightInfo,
        owner: Owner,
        offset: float = 0.0,
        head_sizes: tuple[int, ...] = (),
    ) -> Weight:
        weight = Weight(
            name=f"{owner}:{name}",
            modules=paths,
            kind=info.kind,
            shape=shape,
            out_sizes=tuple(sizes),
            dtype=info.dtype,
            has_bias=info.has_bias,
            activations=info.activations,
            owner=owner,
            offset=offset,
            head_sizes=head_sizes,
        )
        return self.network.weights.setdefault(weight.name, weight)

    def _scale(
        self,
        module: str,
        x: Tensor,
        features: int,
        owner: Owner | None,
        parallel: Parallel | None,
    ) -> Tensor:
        """x * the module's pre_quant_scale [features]; ranks that share x share the vector."""
        path, owner = self._path(f"{module}.pre_quant_scale"), owner or self._owner
        info = WeightInfo("dense", (features,), "float32")
        weight = self._add_weight(path, (path,), (features,), [features], info, owner)
        attrs = {"parallel": "column"} if parallel == "row" else {}
        name = f"{module}.pre_quant_scale"
        return self._op("scale", name, [x], [x.shape], weights=[weight], attrs=attrs)[0]

    def _infos(
        self,
        modules: Sequence[str],
        sizes: Sequence[int],
        in_features: int | None,
        owner: Owner,
    ) -> list[WeightInfo]:
        return [
            self._source.describe(self._path(module), owner, weight_shape(size, in_features))
            for module, size in zip(modules, sizes, strict=True)
        ]

    def _checked_infos(
        self,
        modules: Sequence[str],
        sizes: Sequence[int],
        in_features: int | None,
        owner: Owner,
    ) -> list[WeightInfo]:
        infos = self._infos(modules, sizes, in_features, owner)
        for module, size, info in zip(modules, sizes, infos, strict=True):
            implied = weight_shape(size, in_features)
            if info.shape != implied:
                raise NetworkError(
                    f"{self._path(module)}: the checkpoint holds {list(info.shape)}, "
                    f"config.json implies {list(implied)}"
                )
        return infos

    def _constant(self, name: str, values: Sequence[float]) -> str:
        if self.network.constants.setdefault(name, list(values)) != list(values):
            raise NetworkError(f"constant {name} is declared twice with different values")
        return name

    def _tensor(self, name: str, shape: tuple[Dim, ...], dtype: DType) -> Tensor:
        if name in self.network.tensors:
            raise NetworkError(f"{self.network.name}: tensor {name} exists already")
        return self.network.tensors.setdefault(name, Tensor(name, shape, dtype))

    def _op(
        self,
        kind: str,
        name: str,
        inputs: Sequence[Tensor],
        shapes: Sequence[tuple[Dim, ...]],
        *,
        dtypes: Sequence[DType] | None = None,
        weights: Sequence[Weight] = (),
        state: State | None = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> list[Tensor]:
        path = self._path(name)
        if path in self._op_names:
            raise NetworkError(f"{self.network.name}: op {path} exists already")
        self._op_names.add(path)
        for tensor in inputs:
            if self.network.tensors.get(tensor.name) is not tensor:
                raise NetworkError(f"{path}: {tensor.name} is not of graph {self.network.name}")
        dtypes = dtypes or [self.network.dtype] * len(shapes)
        names = [path] if len(shapes) == 1 else [f"{path}.{i}" for i in range(len(shapes))]
        outputs = [self._tensor(*spec) for spec in zip(names, shapes, dtypes, strict=True)]
        self.network.ops.append(
            Op(
                kind,
                path,
                tuple(t.name for t in inputs),
                tuple(names),
                tuple(w.name for w in weights),
                state.name if state else None,
                dict(attrs or {}),
            )
        )
        return outputs


def weight_shape(size: int, in_features: int | None) -> tuple[int, ...]:
    return (size,) if in_features is None else (size, in_features)


def static(dim: Dim, what: str) -> int:
    if isinstance(dim, str):
        raise NetworkError(f"{what} must be a fixed size, not {dim}")
    return dim
