"""Graph: the vocabulary in which a family describes its network.

Each method below is one op (or a short, fixed composition), checks its operands and
states its result's shape and dtype. Module names are relative to the current scope,
so that they read as in the checkpoint.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from trtree.build.network.network import (
    Activations,
    Dim,
    DType,
    Network,
    NetworkError,
    Op,
    Owner,
    State,
    Tensor,
    Weight,
    WeightKind,
)
from trtree.build.network.rope import RopeTable

# Every op a lowering has to implement.
OP_KINDS = frozenset(
    {
        "add",
        "argmax",
        "concat",
        "embedding",
        "gather_rows",
        "kv_append",
        "linear",
        "reshape",
        "rms_norm",
        "rotary_embedding",
        "scale",
        "silu_mul",
        "split",
        "top_k_log_probs",
        "tree_attention",
    }
)


# How ranks share a linear: "column" splits each module's out_features, so that its result
# is split too; "row" splits in_features, and the ranks' partial results are summed.
Parallel = Literal["column", "row"]


@dataclass(frozen=True)
class WeightInfo:
    """What a weight source knows of a module from headers or configuration alone.

    shape is [out_features, in_features], or [features] for a vector.
    """

    kind: WeightKind
    shape: tuple[int, ...]
    dtype: str
    has_bias: bool = False
    activations: Activations | None = None  # None for dense weights
    pre_quant_scale: bool = False  # the input is multiplied by the module's own vector first

    def fuses_with(self, other: "WeightInfo") -> bool:
        """Whether both can be rows of one weight."""
        return replace(self, shape=other.shape) == other and not self.pre_quant_scale


class WeightSource(Protocol):
    """Where a family learns what kind of weight each module holds."""

    def describe(self, module: str, owner: Owner, implied: tuple[int, ...]) -> WeightInfo:
        """``implied`` is the shape that config.json implies, for sources that hold no weights."""


@dataclass(frozen=True)
class Rows:
    """The ragged batch as the network sees it; see runtime/cpp/row_batch.hpp."""

    token_ids: Tensor  # int32 [rows]
    positions: Tensor  # int32 [rows]: committed length + depth
    slots: Tensor  # int32 [rows]: where in its request's KV each row is written
    packed_mask: Tensor  # int32 [rows, mask_words]: visible rows of the same request
    output_rows: Tensor  # int32 [outputs]: rows whose logits are wanted


class Graph:
    """Builds one Network.

    Args:
        name: "target", "drafter_context" or "drafter_block".
        source: what the checkpoints hold.
        dtype: of float tensors between ops.
        owner: whose checkpoint module names refer to unless said otherwise.
    """

    def __init__(
        self,
        name: str,
        source: WeightSource,
        *,
        dtype: DType = "float32",
        owner: Owner = "target",
    ) -> None:
        self.network = Network(name, dtype)
        self._source = source
        self._owner: Owner = owner
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

    # Inputs and outputs

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

    # Ops with weights

    def embedding(
        self, module: str, token_ids: Tensor, *, vocab: int, hidden: int, owner: Owner | None = None
    ) -> Tensor:
        """token_ids int32 [rows] -> [rows, hidden]."""
        weight = self._weight([module], [vocab], hidden, owner)
        return self._op(
            "embedding", module, [token_ids], [(*token_ids.shape, hidden)], weights=[weight]
        )[0]

    def linear(
        self,
        module: str,
        x: Tensor,
        out_features: int,
        *,
        name: str | None = None,
        owner: Owner | None = None,
        parallel: Parallel | None = None,
    ) -> Tensor:
        """x [rows, in_features] -> [rows, out_features]: x @ weight.T (+ bias).

        ``name`` is the op's, where it is not the module's. ``parallel`` says how ranks
        share it; the shapes here are those of all ranks together.
        """
        return self._linear([module], name or module, x, [out_features], owner, parallel)

    def linears(
        self,
        modules: Sequence[str],
        x: Tensor,
        sizes: Sequence[int],
        *,
        parallel: Parallel | None = None,
    ) -> list[Tensor]:
        """Several linears of one input, fused into one where their weights are of one kind."""
        in_features = _static(x.shape[-1], f"{modules[0]}: in_features")
        infos = self._infos(modules, sizes, in_features, self._owner)
        if not all(info.fuses_with(infos[0]) for info in infos):
            return [
                self.linear(module, x, size, parallel=parallel)
                for module, size in zip(modules, sizes, strict=True)
            ]
        fused = self._linear(modules, "+".join(modules), x, sizes, None, parallel)
        return list(
            self._op(
                "split",
                f"{'+'.join(modules)}.split",
                [fused],
                [(*x.shape[:-1], size) for size in sizes],
                attrs={"sizes": list(sizes)},
            )
        )

    def rms_norm(self, module: str, x: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis, whatever the others are."""
        features = _static(x.shape[-1], f"{module}: features")
        weight = self._weight([module], [features])
        return self._op("rms_norm", module, [x], [x.shape], weights=[weight], attrs={"eps": eps})[0]

    # Attention

    def rotary_embedding(self, name: str, x: Tensor, positions: Tensor, rope: RopeTable) -> Tensor:
        """Rotate x [rows, heads, head_dim] by its rows' positions.

        The first 2 * len(frequencies) elements of each head turn; the rest pass.
        """
        head_dim = _static(x.shape[-1], f"{name}: head_dim")
        if 2 * len(rope.inv_freq) > head_dim:
            raise NetworkError(
                f"{self._path(name)}: {2 * len(rope.inv_freq)} rotary dimensions, "
                f"but head_dim is {head_dim}"
            )
        table = self._constant(rope.name, rope.inv_freq)
        return self._op(
            "rotary_embedding",
            name,
            [x, positions],
            [x.shape],
            attrs={"inv_freq": table, "scaling": rope.scaling, "interleaved": rope.interleaved},
        )[0]

    def kv_state(self, heads: int, head_dim: int) -> State:
        """The KV cache at the current scope."""
        state = State(self._path("kv"), "kv", heads, head_dim, self.network.dtype)
        return self.network.states.setdefault(state.name, state)

    def kv_append(self, k: Tensor, v: Tensor, slots: Tensor, state: State) -> None:
        """Write k, v [rows, kv_heads, head_dim] into each row's slot of its request's cache."""
        for operand in (k, v):
            if operand.shape[1:] != (state.heads, state.head_dim):
                raise NetworkError(
                    f"{state.name}: holds [{state.heads}, {state.head_dim}] per token, "
                    f"given {list(operand.shape[1:])}"
                )
        self._op("kv_append", "kv_append", [k, v, slots], [], state=state)

    def tree_attention(
        self, q: Tensor, rows: Rows, state: State, *, window: int | None = None
    ) -> Tensor:
        """q [rows, heads, head_dim] -> [rows, heads, head_dim].

        Each row attends its request's whole committed prefix and the rows of its own
        step that its packed mask names. Scores are scaled by head_dim ** -0.5. With
        ``window``, only tokens at positions above position(row) - window are seen.
        """
        heads = _static(q.shape[1], "tree_attention: heads")
        if q.shape[2] != state.head_dim or heads % state.heads:
            raise NetworkError(
                f"{self._path('attention')}: {heads} query heads of {q.shape[2]} over "
                f"{state.heads} KV heads of {state.head_dim}"
            )
        return self._op(
            "tree_attention",
            "attention",
            [q, rows.packed_mask, rows.positions],
            [q.shape],
            state=state,
            attrs={"scale": state.head_dim**-0.5, "window": window},
        )[0]

    # Ops without weights

    def add(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """a + b, of one shape."""
        self._same_shape(name, a, b)
        return self._op("add", name, [a, b], [a.shape])[0]

    def silu_mul(self, name: str, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, of one shape."""
        self._same_shape(name, gate, up)
        return self._op("silu_mul", name, [gate, up], [gate.shape])[0]

    def split_heads(self, name: str, x: Tensor, heads: int) -> Tensor:
        """[rows, heads * head_dim] -> [rows, heads, head_dim]."""
        features = _static(x.shape[-1], f"{name}: features")
        if features % heads:
            raise NetworkError(f"{self._path(name)}: {features} features for {heads} heads")
        return self._reshape(name, x, (x.shape[0], heads, features // heads))

    def merge_heads(self, name: str, x: Tensor) -> Tensor:
        """[rows, heads, head_dim] -> [rows, heads * head_dim]."""
        features = _static(x.shape[1], name) * _static(x.shape[2], name)
        return self._reshape(name, x, (x.shape[0], features))

    def concat(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate along the last axis."""
        width = sum(_static(part.shape[-1], name) for part in parts)
        return self._op("concat", name, parts, [(*parts[0].shape[:-1], width)])[0]

    def gather_rows(self, name: str, x: Tensor, rows: Tensor) -> Tensor:
        """x [rows, ...], rows int32 [outputs] -> [outputs, ...]."""
        return self._op("gather_rows", name, [x, rows], [(*rows.shape, *x.shape[1:])])[0]

    def argmax(self, name: str, logits: Tensor) -> Tensor:
        """[outputs, vocab] -> int32 [outputs]; ties to the lower id. NaN is an error."""
        return self._op("argmax", name, [logits], [logits.shape[:-1]], dtypes=["int32"])[0]

    def top_k_log_probs(self, name: str, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """[outputs, vocab] -> log-probs float32 and ids int32 [outputs, k], decreasing.

        log-prob = float32(logit) - float32(log-sum-exp); ties rank by lower id. The
        log-probs are float32 whatever the network's dtype. NaN is an error.
        """
        vocab = _static(logits.shape[-1], name)
        if not 1 <= k <= vocab:
            raise NetworkError(f"{self._path(name)}: top_k {k} for a vocabulary of {vocab}")
        shape = (*logits.shape[:-1], k)
        log_probs, ids = self._op(
            "top_k_log_probs",
            name,
            [logits],
            [shape, shape],
            dtypes=["float32", "int32"],
            attrs={"k": k},
        )
        return log_probs, ids

    # Plumbing

    def _linear(
        self,
        modules: Sequence[str],
        name: str,
        x: Tensor,
        sizes: Sequence[int],
        owner: Owner | None,
        parallel: Parallel | None,
    ) -> Tensor:
        in_features = _static(x.shape[-1], f"{name}: in_features")
        infos = self._infos(modules, sizes, in_features, owner or self._owner)
        if infos[0].pre_quant_scale:
            x = self._scale(modules[0], x, in_features, owner, parallel)
        weight = self._weight(modules, sizes, in_features, owner)
        shape = (*x.shape[:-1], sum(sizes))
        attrs = {"parallel": parallel} if parallel else {}
        return self._op("linear", name, [x], [shape], weights=[weight], attrs=attrs)[0]

    def _scale(
        self,
        module: str,
        x: Tensor,
        features: int,
        owner: Owner | None,
        parallel: Parallel | None,
    ) -> Tensor:
        """x * the module's pre_quant_scale [features]; ranks that share x share the vector."""
        part = "pre_quant_scale"
        path, owner = self._path(module), owner or self._owner
        weight = Weight(
            name=f"{owner}:{path}.{part}",
            modules=(path,),
            kind="dense",
            shape=(features,),
            out_sizes=(features,),
            dtype="float32",
            has_bias=False,
            activations=None,
            owner=owner,
            part=part,
        )
        self.network.weights.setdefault(weight.name, weight)
        attrs = {"parallel": "column"} if parallel == "row" else {}
        return self._op("scale", f"{module}.{part}", [x], [x.shape], weights=[weight], attrs=attrs)[
            0
        ]

    def _reshape(self, name: str, x: Tensor, shape: tuple[Dim, ...]) -> Tensor:
        return self._op("reshape", name, [x], [shape], dtypes=[x.dtype])[0]

    def _same_shape(self, name: str, a: Tensor, b: Tensor) -> None:
        if a.shape != b.shape:
            raise NetworkError(f"{self._path(name)}: shapes {list(a.shape)} and {list(b.shape)}")

    def _path(self, name: str) -> str:
        return ".".join([*self._scopes, name])

    def _weight(
        self,
        modules: Sequence[str],
        sizes: Sequence[int],
        in_features: int | None = None,
        owner: Owner | None = None,
    ) -> Weight:
        """The weight of ``modules``, fused along their first axes ``sizes``; a vector
        without in_features. The same modules give the same weight.

        Raises:
            NetworkError: the source holds other shapes.
        """
        owner = owner or self._owner
        paths = tuple(self._path(module) for module in modules)
        infos = self._infos(modules, sizes, in_features, owner)
        for path, size, info in zip(paths, sizes, infos, strict=True):
            implied = _weight_shape(size, in_features)
            if info.shape != implied:
                raise NetworkError(
                    f"{path}: the checkpoint holds {list(info.shape)}, "
                    f"config.json implies {list(implied)}"
                )
        name = f"{owner}:{'+'.join(paths)}"
        shape = _weight_shape(sum(sizes), in_features)
        first = infos[0]
        weight = Weight(
            name=name,
            modules=paths,
            kind=first.kind,
            shape=shape,
            out_sizes=tuple(sizes),
            dtype=first.dtype,
            has_bias=first.has_bias,
            activations=first.activations,
            owner=owner,
        )
        return self.network.weights.setdefault(name, weight)

    def _infos(
        self,
        modules: Sequence[str],
        sizes: Sequence[int],
        in_features: int | None,
        owner: Owner,
    ) -> list[WeightInfo]:
        return [
            self._source.describe(self._path(module), owner, _weight_shape(size, in_features))
            for module, size in zip(modules, sizes, strict=True)
        ]

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


def _weight_shape(size: int, in_features: int | None) -> tuple[int, ...]:
    return (size,) if in_features is None else (size, in_features)


def _static(dim: Dim, what: str) -> int:
    if isinstance(dim, str):
        raise NetworkError(f"{what} must be a fixed size, not {dim}")
    return dim
