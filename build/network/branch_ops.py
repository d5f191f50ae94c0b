"""The vocabulary: state that every row continues from its parent's."""

from typing import Literal

from trtree.build.network.graph_core import GraphCore, static
from trtree.build.network.network import NetworkError, State, Tensor
from trtree.build.network.weight_source import KeyHeads


class BranchOps(GraphCore):
    """Causal convolution and the gated delta rule."""

    def parents(self) -> Tensor:
        """int32 [rows]: the row of its segment that each continues, -1 the committed state."""
        if "parents" not in self.network.inputs:
            self.input("parents", ("rows",), "int32")
        return self.network.tensors["parents"]

    def causal_conv(self, module: str, x: Tensor, kernel: int, heads: KeyHeads) -> Tensor:
        """x [rows, channels] -> silu of each channel's convolution over a row and its last
        kernel - 1 ancestors; see ``plugins/causal_conv/README.md``. Ranks divide the
        channels by ``heads``."""
        channels = static(x.shape[-1], f"{module}: channels")
        weight = self._weight([module], [channels * kernel], dtype="float32")
        state = self._state("conv", "conv", (kernel - 1, channels))
        attrs = {"kernel": kernel, **heads.attrs()}
        inputs = [x, self.parents()]
        return self._op(
            "causal_conv", module, inputs, [x.shape], weights=[weight], state=state, attrs=attrs
        )[0]

    def gated_delta_net(
        self, name: str, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor
    ) -> Tensor:
        """q, k [rows, key heads, key_dim], v [rows, value heads, value_dim], a and b [rows,
        value heads] -> v's shape; parameters ``A_log`` and ``dt_bias`` at the current scope.
        Ranks divide the heads. See ``plugins/gated_delta_net/README.md``.
        """
        (_, heads, value_dim), (_, key_heads, key_dim) = v.shape, k.shape
        heads, key_heads = static(heads, name), static(key_heads, name)
        fits = q.shape == k.shape and a.shape == b.shape == v.shape[:2] and heads % key_heads == 0
        if not fits:
            raise NetworkError(
                f"{self._path(name)}: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, "
                f"a {list(a.shape)}, b {list(b.shape)}"
            )
        weight = self._weight(["A_log", "dt_bias"], [heads, heads], dtype="float32")
        sizes = (heads, static(key_dim, name), static(value_dim, name))
        state = self._state("recurrent", "recurrent", sizes)
        inputs = [q, k, v, a, b, self.parents()]
        attrs = KeyHeads(key_heads).attrs()
        return self._op(
            "gated_delta_net", name, inputs, [v.shape], weights=[weight], state=state, attrs=attrs
        )[0]

    def _state(
        self, name: str, kind: Literal["conv", "recurrent"], shape: tuple[int, ...]
    ) -> State:
        """State of one request at the current scope; a recurrence's is float32."""
        dtype = "float32" if kind == "recurrent" else self.network.dtype
        state = State(self._path(name), kind, shape[0], shape[1], dtype, *shape[2:])
        return self.network.states.setdefault(state.name, state)
