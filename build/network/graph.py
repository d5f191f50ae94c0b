"""Graph: the vocabulary in which a family describes its network.

Each method below is one op (or a short, fixed composition), checks its operands and
states its result's shape and dtype. Module names are relative to the current scope,
so that they read as in the checkpoint.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

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
from trtree.build.network.rope import RopeTable
from trtree.build.network.weight_source import Parallel, WeightInfo, WeightSource
from trtree.plugins.moe.contract import Routing

__all__ = ["OP_KINDS", "Graph", "Parallel", "Rows", "WeightInfo", "WeightSource"]

# Every op a lowering has to implement.
OP_KINDS = frozenset(
    {
        "add",
        "argmax",
        "causal_conv",
        "concat",
        "embedding",
        "experts_down",
        "experts_up",
        "gated_delta_net",
        "gather_rows",
        "kv_append",
        "linear",
        "reshape",
        "rms_norm",
        "rotary_embedding",
        "route",
        "scale",
        "sigmoid_mul",
        "silu_mul",
        "split",
        "top_k_log_probs",
        "tree_attention",
    }
)


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
        dtype: DType | None = None,
    ) -> Tensor:
        """x [rows, in_features] -> [rows, out_features]: x @ weight.T (+ bias).

        ``name`` is the op's, where it is not the module's. ``parallel`` says how ranks
        share it; the shapes here are those of all ranks together. ``dtype`` is the
        result's, where it is not the network's.
        """
        return self._linear([module], name or module, x, [out_features], owner, parallel, dtype)

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

    def rms_norm(self, module: str, x: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last axis, whatever the
        others are."""
        features = _static(x.shape[-1], f"{module}: features")
        weight = self._weight([module], [features], offset=offset)
        return self._op("rms_norm", module, [x], [x.shape], weights=[weight], attrs={"eps": eps})[0]

    # Experts

    def route(
        self, name: str, logits: Tensor, routing: Routing, *, correction_bias: str | None = None
    ) -> Tensor:
        """logits float32 [rows, experts] -> weights float32 [rows, experts], 0 where not chosen.

        ``correction_bias`` names a vector [experts] that the choice takes into account,
        but not the weights. ``plugins/moe/README.md`` defines choice, ties and weights.
        """
        if logits.dtype != "float32" or logits.shape[1:] != (routing.experts,):
            raise NetworkError(
                f"{self._path(name)}: routes by float32 logits of {routing.experts} experts, "
                f"given {logits.dtype} {list(logits.shape)}"
            )
        biases = [self._weight([correction_bias], [routing.experts])] if correction_bias else []
        shape = logits.shape
        attrs = asdict(routing)
        return self._op(
            "route", name, [logits], [shape], dtypes=["float32"], weights=biases, attrs=attrs
        )[0]

    def experts_up(
        self, modules: Sequence[str], x: Tensor, weights: Tensor, intermediate: int, slots: int
    ) -> Tensor:
        """x [rows, hidden] -> silu(gate(x)) * up(x) [rows, slots, intermediate] of its experts.

        ``modules`` lists gate and up of each expert in turn. Slot j is that of the row's
        j-th expert by rising id, among those with a weight in ``weights`` [rows, experts].
        """
        in_features = _static(x.shape[-1], f"{modules[0]}: in_features")
        weight = self._stack(modules, [intermediate] * 2, in_features, weights)
        shape = (x.shape[0], slots, intermediate)
        attrs = {"slots": slots, "parallel": "column"}
        return self._op(
            "experts_up", "experts.up", [x, weights], [shape], weights=[weight], attrs=attrs
        )[0]

    def experts_down(
        self, modules: Sequence[str], h: Tensor, weights: Tensor, hidden: int
    ) -> Tensor:
        """h [rows, slots, intermediate] from ``experts_up`` -> [rows, hidden]: the sum of
        down(h) of each row's experts, times their ``weights`` [rows, experts]."""
        in_features = _static(h.shape[-1], f"{modules[0]}: in_features")
        weight = self._stack(modules, [hidden], in_features, weights)
        shape = (h.shape[0], hidden)
        attrs = {"parallel": "row"}
        return self._op(
            "experts_down", "experts.down", [h, weights], [shape], weights=[weight], attrs=attrs
        )[0]

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

    # State that branches

    def parents(self) -> Tensor:
        """int32 [rows]: the row of its segment that each continues, -1 the committed state."""
        if "parents" not in self.network.inputs:
            self.input("parents", ("rows",), "int32")
        return self.network.tensors["parents"]

    def causal_conv(self, module: str, x: Tensor, kernel: int) -> Tensor:
        """x [rows, channels] -> silu of each channel's convolution over a row and its last
        kernel - 1 ancestors; see ``plugins/causal_conv/README.md``."""
        channels = _static(x.shape[-1], f"{module}: channels")
        weight = self._weight([module], [channels * kernel], dtype="float32")
        state = self._state("conv", "conv", (kernel - 1, channels))
        attrs = {"kernel": kernel}
        inputs = [x, self.parents()]
        return self._op(
            "causal_conv", module, inputs, [x.shape], weights=[weight], state=state, attrs=attrs
        )[0]

    def gated_delta_net(
        self, name: str, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor
    ) -> Tensor:
        """q, k [rows, key heads, key_dim], v [rows, value heads, value_dim], a and b [rows,
        value heads] -> v's shape; parameters ``A_log`` and ``dt_bias`` at the current scope.
        See ``plugins/gated_delta_net/README.md``.
        """
        (_, heads, value_dim), (_, key_heads, key_dim) = v.shape, k.shape
        heads, key_heads = _static(heads, name), _static(key_heads, name)
        fits = q.shape == k.shape and a.shape == b.shape == v.shape[:2] and heads % key_heads == 0
        if not fits:
            raise NetworkError(
                f"{self._path(name)}: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, "
                f"a {list(a.shape)}, b {list(b.shape)}"
            )
        weight = self._weight(["A_log", "dt_bias"], [heads, heads], dtype="float32")
        sizes = (heads, _static(key_dim, name), _static(value_dim, name))
        state = self._state("recurrent", "recurrent", sizes)
        inputs = [q, k, v, a, b, self.parents()]
        return self._op("gated_delta_net", name, inputs, [v.shape], weights=[weight], state=state)[
            0
        ]

    # Ops without weights

    def add(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """a + b, of one shape."""
        self._same_shape(name, a, b)
        return self._op("add", name, [a, b], [a.shape])[0]

    def silu_mul(self, name: str, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, of one shape."""
        self._same_shape(name, gate, up)
        return self._op("silu_mul", name, [gate, up], [gate.shape])[0]

    def sigmoid_mul(self, name: str, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate); gate is of x's shape, or has one number per row."""
        if gate.shape != (*x.shape[:-1], 1):
            self._same_shape(name, x, gate)
        return self._op("sigmoid_mul", name, [x, gate], [x.shape])[0]

    def split(self, name: str, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Parts of the last axis."""
        if sum(sizes) != x.shape[-1]:
            raise NetworkError(f"{self._path(name)}: {list(sizes)} of {list(x.shape)}")
        shapes = [(*x.shape[:-1], size) for size in sizes]
        return self._op("split", name, [x], shapes, attrs={"sizes": list(sizes)})

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

    def regroup(self, name: str, x: Tensor, heads: int) -> Tensor:
        """[rows, h, d] -> [rows, heads, h * d / heads]: the same numbers, other heads."""
        features = _static(x.shape[1], name) * _static(x.shape[2], name)
        return self._reshape(name, x, (x.shape[0], heads, features // heads))

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
        dtype: DType | None = None,
    ) -> Tensor:
        in_features = _static(x.shape[-1], f"{name}: in_features")
        infos = self._infos(modules, sizes, in_features, owner or self._owner)
        if infos[0].pre_quant_scale:
            x = self._scale(modules[0], x, in_features, owner, parallel)
        weight = self._weight(modules, sizes, in_features, owner)
        shape = (*x.shape[:-1], sum(sizes))
        given = {"parallel": parallel, "dtype": dtype}
        attrs = {key: value for key, value in given.items() if value}
        dtypes = [dtype or self.network.dtype]
        (y,) = self._op("linear", name, [x], [shape], dtypes=dtypes, weights=[weight], attrs=attrs)
        return y

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

    def _state(
        self, name: str, kind: Literal["conv", "recurrent"], shape: tuple[int, ...]
    ) -> State:
        """State of one request at the current scope; a recurrence's is float32."""
        dtype = "float32" if kind == "recurrent" else self.network.dtype
        state = State(self._path(name), kind, shape[0], shape[1], dtype, *shape[2:])
        return self.network.states.setdefault(state.name, state)

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
        shape = _weight_shape(sum(sizes), in_features)
        stored = "float32" if offset else dtype
        info = replace(infos[0], dtype=stored) if stored else infos[0]
        return self._add_weight("+".join(paths), paths, shape, sizes, info, owner, offset)

    def _stack(
        self, modules: Sequence[str], sizes: Sequence[int], in_features: int, weights: Tensor
    ) -> Weight:
        """The linears of all experts, each of modules of ``sizes``, as one weight.

        Raises:
            NetworkError: they are not of one kind, or not as many as the router knows.
        """
        experts = len(modules) // len(sizes)
        if weights.shape[1:] != (experts,):
            raise NetworkError(
                f"{self._path(modules[0])}: {experts} experts, routed {list(weights.shape)}"
            )
        every = list(sizes) * experts
        infos = self._checked_infos(modules, every, in_features, self._owner)
        first = infos[0]
        paths = tuple(self._path(module) for module in modules)
        for path, info in zip(paths, infos, strict=True):
            if not info.fuses_with(first):
                raise NetworkError(
                    f"{path}: the experts of a layer must be of one kind, but this is "
                    f"{info.dtype} and {paths[0]} is {first.dtype}"
                )
        if first.has_bias:
            raise NetworkError(f"{paths[0]}: biases of experts are not supported")
        leaves = "+".join(dict.fromkeys(path.rpartition(".")[2] for path in paths))
        name = f"{self._path('experts')}.{leaves}"
        shape = (experts, sum(sizes), in_features)
        return self._add_weight(name, paths, shape, every, first, self._owner)

    def _add_weight(
        self,
        name: str,
        paths: tuple[str, ...],
        shape: tuple[int, ...],
        sizes: Sequence[int],
        info: WeightInfo,
        owner: Owner,
        offset: float = 0.0,
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
        )
        return self.network.weights.setdefault(weight.name, weight)

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

    def _checked_infos(
        self,
        modules: Sequence[str],
        sizes: Sequence[int],
        in_features: int | None,
        owner: Owner,
    ) -> list[WeightInfo]:
        infos = self._infos(modules, sizes, in_features, owner)
        for module, size, info in zip(modules, sizes, infos, strict=True):
            implied = _weight_shape(size, in_features)
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


def _weight_shape(size: int, in_features: int | None) -> tuple[int, ...]:
    return (size,) if in_features is None else (size, in_features)


def _static(dim: Dim, what: str) -> int:
    if isinstance(dim, str):
        raise NetworkError(f"{what} must be a fixed size, not {dim}")
    return dim
