"""The vocabulary: ops on rows, without weights."""

from collections.abc import Sequence

from trtree.build.network.graph_core import GraphCore, static
from trtree.build.network.network import Dim, NetworkError, Tensor


class RowOps(GraphCore):
    """Arithmetic, shapes and choices."""

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
        features = static(x.shape[-1], f"{name}: features")
        if features % heads:
            raise NetworkError(f"{self._path(name)}: {features} features for {heads} heads")
        return self._reshape(name, x, (x.shape[0], heads, features // heads))

    def merge_heads(self, name: str, x: Tensor) -> Tensor:
        """[rows, heads, head_dim] -> [rows, heads * head_dim]."""
        features = static(x.shape[1], name) * static(x.shape[2], name)
        return self._reshape(name, x, (x.shape[0], features))

    def regroup(self, name: str, x: Tensor, heads: int) -> Tensor:
        """[rows, h, d] -> [rows, heads, h * d / heads]: the same numbers, other heads."""
        features = static(x.shape[1], name) * static(x.shape[2], name)
        return self._reshape(name, x, (x.shape[0], heads, features // heads))

    def concat(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate along the last axis."""
        width = sum(static(part.shape[-1], name) for part in parts)
        return self._op("concat", name, parts, [(*parts[0].shape[:-1], width)])[0]

    def gather_rows(self, name: str, x: Tensor, rows: Tensor) -> Tensor:
        """x [rows, ...], rows int32 [outputs] -> [outputs, ...]."""
        return self._op("gather_rows", name, [x, rows], [(*rows.shape, *x.shape[1:])])[0]

    def argmax(self, name: str, logits: Tensor) -> Tensor:
        """[outputs, vocab] -> int32 [outputs]; ties to the lower id. NaN is an error."""
        return self._op("argmax", name, [logits], [logits.shape[:-1]], dtypes=["int32"])[0]

    def top_k_log_probs(
        self, name: str, logits: Tensor, k: int, *, id_offsets: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """[outputs, vocab] -> log-probs float32 and ids int32 [outputs, k], decreasing.

        log-prob = float32(logit) - float32(log-sum-exp); ties rank by lower id. The
        log-probs are float32 whatever the network's dtype. NaN is an error.
        ``id_offsets`` names a vector [vocab] of what is added to each id, where the logits
        are those of a part of the vocabulary.
        """
        vocab = static(logits.shape[-1], name)
        if not 1 <= k <= vocab:
            raise NetworkError(f"{self._path(name)}: top_k {k} for a vocabulary of {vocab}")
        # Whole numbers below 2^24: exact.
        offsets = [self._weight([id_offsets], [vocab], dtype="float32")] if id_offsets else []
        shape = (*logits.shape[:-1], k)
        log_probs, ids = self._op(
            "top_k_log_probs",
            name,
            [logits],
            [shape, shape],
            dtypes=["float32", "int32"],
            weights=offsets,
            attrs={"k": k},
        )
        return log_probs, ids

    def _reshape(self, name: str, x: Tensor, shape: tuple[Dim, ...]) -> Tensor:
        return self._op("reshape", name, [x], [shape], dtypes=[x.dtype])[0]

    def _same_shape(self, name: str, a: Tensor, b: Tensor) -> None:
        if a.shape != b.shape:
            raise NetworkError(f"{self._path(name)}: shapes {list(a.shape)} and {list(b.shape)}")
