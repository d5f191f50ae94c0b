"""A network as plain data: tensors, ops, weights and per-request state.

``build/network/graph.py`` writes it, each lowering and engine reads it, and
``network.json`` in the engine directory is its stored form. ``Network.ops`` is in
execution order.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Dim = int | str  # a size, or the name of one that varies from step to step
# float8_e4m3fn: of KV caches alone.
DType = Literal["float32", "bfloat16", "int32", "float8_e4m3fn"]
ITEM_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2, "int32": 4, "float8_e4m3fn": 1}
# What NVFP4 linears round their inputs to: E2M1 blocks of 16, bf16, or nothing.
Activations = Literal["nvfp4", "bf16", "float32"]
WeightKind = Literal["dense", "nvfp4"]
Owner = Literal["target", "drafter"]


class NetworkError(ValueError):
    """A network that cannot be; the message names the op or module and both values."""


@dataclass(frozen=True)
class Tensor:
    """An edge. Row-major; the first axis counts rows unless the op says otherwise."""

    name: str
    shape: tuple[Dim, ...]
    dtype: DType


@dataclass(frozen=True)
class Weight:
    """One module of a checkpoint, or several fused along out_features.

    shape is [out_features, in_features], [features] for a vector such as a norm's, or
    [experts, out_features, in_features] for the equal linears of a layer's experts, and
    out_sizes is each module's part of out_features; dtype is that of the stored
    elements ("bfloat16", "float16", "float32", "nvfp4"). ``activations`` is what an
    NVFP4 linear rounds its input to; None for dense weights. ``owner`` says which
    checkpoint: a drafter borrows the target's embedding and head. ``offset`` is added to
    a vector as it is read: some norms are stored around zero. ``head_sizes``: where heads are
    used one by one, the rows of each head's parts; such a weight is dense whatever the
    checkpoint holds.
    """

    name: str
    modules: tuple[str, ...]
    kind: WeightKind
    shape: tuple[int, ...]
    out_sizes: tuple[int, ...]
    dtype: str
    has_bias: bool
    activations: Activations | None
    owner: Owner
    offset: float = 0.0
    head_sizes: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """out_features of all its modules together."""
        return sum(self.out_sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Out_features of each module; of stacked experts, of one expert's."""
        return self.out_sizes[: len(self.out_sizes) // (self.experts or 1)]

    @property
    def experts(self) -> int:
        """How many experts the weight stacks; 0 where it is a single one."""
        return self.shape[0] if len(self.shape) == 3 else 0

    def modules_of(self, expert: int) -> tuple[str, ...]:
        """The modules of one expert."""
        count = len(self.modules) // self.experts
        return self.modules[expert * count : (expert + 1) * count]


_WEIGHT_TUPLES = ("modules", "shape", "out_sizes", "head_sizes")

# Parameters that are tensors by themselves, not the ``weight`` of a module.
_PARAMETERS = (
    *("A_log", ".bias", "dt_bias", "e_score_correction_bias", "d2t", "pre_quant_scale"),
    *("svdquant_lora_a", "svdquant_lora_b"),
)


def tensor_name(module: str) -> str:
    """The checkpoint's tensor that holds a module's weight."""
    return module if module.endswith(_PARAMETERS) else f"{module}.weight"


@dataclass(frozen=True)
class State:
    """Memory a request keeps between steps; ``Engine.commit`` moves it by its kind.

    "kv": keys and values [heads, head_dim] per token. Commit gathers the accepted
    rows' slots to the front of the step's slots. Of float8_e4m3fn it keeps key / k_scale and
    value / v_scale, one scale for all heads (``plugins/tree_attention/contract.py``).
    "latent": likewise, but one vector [1, head_dim] per token (``plugins/latent_cache.py``).
    "conv": a convolution's window [heads (tokens), head_dim (channels)] per request.
    "recurrent": [heads, head_dim, value_dim] per request. Of these two every row of a
    step has its own, continued from its parent's; commit keeps the last accepted row's
    (``plugins/branch_state.py``).
    """

    name: str
    kind: Literal["kv", "latent", "conv", "recurrent"]
    heads: int
    head_dim: int
    dtype: DType
    value_dim: int = 0
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def paged(self) -> bool:
        """Whether it grows by a token per row, in pages."""
        return self.kind in ("kv", "latent")

    @property
    def token_bytes(self) -> int:
        """Of one token, where it is paged: a latent is one vector, KV two per head."""
        vectors = self.heads * (2 if self.kind == "kv" else 1)
        return vectors * self.head_dim * ITEM_BYTES[self.dtype] if self.paged else 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one token's keys, values or latent, or of one request's state."""
        parts = (self.heads, self.head_dim, self.value_dim)
        return parts if self.kind == "recurrent" else parts[:2]


@dataclass(frozen=True)
class Op:
    """One coarse operation. ``kind`` selects the implementation in every lowering."""

    kind: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...] = ()
    state: str | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Network:
    """What runs in one call of an engine: "target", "drafter_context" or "drafter_block".

    dtype is that of the float tensors between ops: every op computes wider and rounds
    its result once to it. ``outputs`` maps a role ("argmax", "logits", "captured", ...)
    to a tensor; ``constants`` holds shared tables of numbers, such as RoPE frequencies.
    """

    name: str
    dtype: DType
    inputs: list[str] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    constants: dict[str, list[float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; tables keyed by name become lists."""
        return {
            **asdict(self),
            "tensors": [asdict(t) for t in self.tensors.values()],
            "weights": [asdict(w) for w in self.weights.values()],
            "states": [asdict(s) for s in self.states.values()],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Network":
        """The inverse of to_dict.

        Raises:
            NetworkError: a field is missing or unknown.
        """
        try:
            tensors = [Tensor(**{**t, "shape": tuple(t["shape"])}) for t in data["tensors"]]
            weights = [
                Weight(**{**w, **{key: tuple(w[key]) for key in _WEIGHT_TUPLES if key in w}})
                for w in data["weights"]
            ]
            ops = [
                Op(**{**op, **{key: tuple(op[key]) for key in ("inputs", "outputs", "weights")}})
                for op in data["ops"]
            ]
            return cls(
                **{
                    **data,
                    "tensors": {t.name: t for t in tensors},
                    "weights": {w.name: w for w in weights},
                    "states": {s["name"]: State(**s) for s in data["states"]},
                    "ops": ops,
                }
            )
        except (KeyError, TypeError) as error:
            raise NetworkError(f"network.json: not a network of this version ({error})") from None
