"""The vocabulary: latent attention over a paged cache, and the indexer that chooses its keys."""

from dataclasses import replace
from typing import Literal

from trtree.build.network.graph_core import GraphCore, Rows, static
from trtree.build.network.network import NetworkError, State, Tensor, Weight


class LatentOps(GraphCore):
    """Multi-head latent attention in absorbed form, with DeepSeek sparse attention."""

    def latent_state(self, name: str, dim: int) -> State:
        """One vector [1, dim] per token, paged like KV."""
        state = State(self._path(name), "latent", 1, dim, self.network.dtype)
        return self.network.states.setdefault(state.name, state)

    def latent_append(self, name: str, x: Tensor, slots: Tensor, state: State) -> None:
        """Write x [rows, dim] into each row's slot of its request's cache."""
        if x.shape[1:] != (state.head_dim,):
            raise NetworkError(
                f"{state.name}: holds [{state.head_dim}] per token, given {list(x.shape[1:])}"
            )
        self._op("latent_append", name, [x, slots], [], state=state)

    def index_select(
        self, name: str, q: Tensor, weights: Tensor, rows: Rows, state: State, top_k: int
    ) -> Tensor:
        """q [rows, index_heads, dim], weights float32 [rows, index_heads] -> int32 [rows, top_k].

        The slots of the visible keys of largest score, rising, then -1; see
        ``plugins/sparse_indexer/README.md``. NaN is an error.
        """
        if q.shape[2:] != (state.head_dim,) or weights.shape != q.shape[:2] or top_k < 1:
            raise NetworkError(
                f"{self._path(name)}: q {list(q.shape)}, weights {list(weights.shape)} over keys "
                f"of {state.head_dim}, top_k {top_k}"
            )
        if weights.dtype != "float32":
            raise NetworkError(f"{self._path(name)}: weights must be float32, not {weights.dtype}")
        return self._op(
            "index_select",
            name,
            [q, weights, rows.packed_mask],
            [(q.shape[0], top_k)],
            dtypes=["int32"],
            state=state,
            attrs={"top_k": top_k},
        )[0]

    def latent_attention(
        self,
        name: str,
        q: Tensor,
        rows: Rows,
        state: State,
        selection: Tensor | None,
        *,
        value_dim: int,
        scale: float,
    ) -> Tensor:
        """q [rows, heads, dim] -> [rows, heads, value_dim], the first numbers of each latent.

        Over the ``selection`` of ``index_select``, or over every visible key; see
        ``plugins/mla_attention/README.md``.
        """
        if q.shape[2:] != (state.head_dim,) or not 1 <= value_dim <= state.head_dim:
            raise NetworkError(
                f"{self._path(name)}: q {list(q.shape)} and values of {value_dim} over latents of "
                f"{state.head_dim}"
            )
        if selection is not None and (selection.dtype != "int32" or len(selection.shape) != 2):
            raise NetworkError(
                f"{self._path(name)}: a selection is int32 [rows, top_k], not {selection.dtype} "
                f"{list(selection.shape)}"
            )
        chosen = [] if selection is None else [selection]
        return self._op(
            "latent_attention",
            name,
            [q, rows.packed_mask, *chosen],
            [(*q.shape[:2], value_dim)],
            state=state,
            attrs={"value_dim": value_dim, "scale": scale},
        )[0]

    def head_linear(
        self,
        module: str,
        x: Tensor,
        part: Literal["key", "value"],
        *,
        key_dim: int,
        value_dim: int,
        latent: int,
    ) -> Tensor:
        """x [rows, heads, in] -> [rows, heads, out]: one matrix per head, of ``kv_b_proj``.

        The weight is [heads * (key_dim + value_dim), latent], dense: a quantized module is
        dequantized as it is stored. "key" goes from key_dim to latent, "value" from latent to
        value_dim; see ``plugins/mla_attention/README.md``. Ranks share it by heads.
        """
        heads = static(x.shape[1], f"{module}: heads")
        sizes = {"key": (key_dim, latent), "value": (latent, value_dim)}[part]
        if x.shape[2] != sizes[0]:
            raise NetworkError(
                f"{self._path(module)}: heads of {x.shape[2]}, its {part} part takes {sizes[0]}"
            )
        weight = self._head_weight(module, heads, (key_dim, value_dim), latent)
        return self._op(
            "head_linear",
            f"{module}.{part}",
            [x],
            [(x.shape[0], heads, sizes[1])],
            weights=[weight],
            attrs={
                "part": part,
                "key_dim": key_dim,
                "value_dim": value_dim,
                "parallel": "column",
            },
        )[0]

    def layer_norm(self, module: str, x: Tensor, eps: float) -> Tensor:
        """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis.

        Its weight is one vector [2 * features]: the module's weight, then its bias.
        """
        features = static(x.shape[-1], f"{module}: features")
        weight = self._weight([module, f"{module}.bias"], [features, features])
        attrs = {"eps": eps}
        return self._op("layer_norm", module, [x], [x.shape], weights=[weight], attrs=attrs)[0]

    def _head_weight(
        self, module: str, heads: int, head_sizes: tuple[int, int], latent: int
    ) -> Weight:
        """Raises:
        NetworkError: other shapes, or a bias.
        """
        size = heads * sum(head_sizes)
        (info,) = self._checked_infos([module], [size], latent, self._owner)
        path = self._path(module)
        if info.has_bias:
            raise NetworkError(f"{path}: a bias is not supported in a linear of heads")
        if info.kind == "nvfp4":
            dtype = self.network.dtype
            info = replace(
                info,
                kind="dense",
                dtype=dtype,
                activations=None,
                pre_quant_scale=None,
                low_rank=None,
            )
        shape = (size, latent)
        return self._add_weight(
            path, (path,), shape, [size], info, self._owner, head_sizes=head_sizes
        )
