"""The vocabulary: attention over a KV cache."""

from dataclasses import replace

from trtree.build.network.graph_core import GraphCore, Rows, static
from trtree.build.network.network import NetworkError, State, Tensor
from trtree.build.network.rope import RopeTable


class AttentionOps(GraphCore):
    """Rotary positions, KV, and attention of tree rows."""

    def rotary_embedding(self, name: str, x: Tensor, positions: Tensor, rope: RopeTable) -> Tensor:
        """Rotate x [rows, heads, head_dim] by its rows' positions.

        The first 2 * len(frequencies) elements of each head turn; the rest pass.
        """
        head_dim = static(x.shape[-1], f"{name}: head_dim")
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
        """The KV cache at the current scope, in FP8 where the graph has scales for it."""
        state = State(self._path("kv"), "kv", heads, head_dim, self.network.dtype)
        if self._kv_scales is not None:
            k_scale, v_scale = self._kv_scales(".".join(self._scopes))
            state = replace(state, dtype="float8_e4m3fn", k_scale=k_scale, v_scale=v_scale)
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
        heads = static(q.shape[1], "tree_attention: heads")
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
