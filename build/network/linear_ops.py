"""The vocabulary: embeddings, linears and norms."""

from collections.abc import Mapping, Sequence
from typing import Any

from trtree.build.network.graph_core import GraphCore, static
from trtree.build.network.network import DType, NetworkError, Owner, Tensor, Weight
from trtree.build.network.weight_source import KeyHeads, LowRank, Parallel


class LinearOps(GraphCore):
    """Ops whose weights are a module's."""

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
        key_heads: KeyHeads | None = None,
        dtype: DType | None = None,
    ) -> Tensor:
        """x [rows, in_features] -> [rows, out_features]: x @ weight.T (+ bias).

        ``name`` is the op's, where it is not the module's. ``parallel`` says how ranks
        share it; the shapes here are those of all ranks together. ``key_heads``: where
        out_features are divided by those. ``dtype`` is the result's, where it is not the
        network's.
        """
        return self._linear(
            [module], name or module, x, [out_features], owner, parallel, dtype, key_heads
        )

    def linears(
        self,
        modules: Sequence[str],
        x: Tensor,
        sizes: Sequence[int],
        *,
        parallel: Parallel | None = None,
    ) -> list[Tensor]:
        """Several linears of one input, fused into one where their weights are of one kind."""
        in_features = static(x.shape[-1], f"{modules[0]}: in_features")
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
        features = static(x.shape[-1], f"{module}: features")
        weight = self._weight([module], [features], offset=offset)
        return self._op("rms_norm", module, [x], [x.shape], weights=[weight], attrs={"eps": eps})[0]

    def _linear(
        self,
        modules: Sequence[str],
        name: str,
        x: Tensor,
        sizes: Sequence[int],
        owner: Owner | None,
        parallel: Parallel | None,
        dtype: DType | None = None,
        key_heads: KeyHeads | None = None,
    ) -> Tensor:
        in_features = static(x.shape[-1], f"{name}: in_features")
        info, *_ = self._infos(modules, sizes, in_features, owner or self._owner)
        if info.pre_quant_scale:
            x = self._scale(modules[0], x, in_features, owner, parallel)
        weight = self._weight(modules, sizes, in_features, owner)
        attrs = key_heads.attrs() if key_heads else {}
        attrs |= {"parallel": parallel} if parallel else {}
        y = self._product(name, x, weight, attrs, dtype)
        if info.low_rank is None:
            return y
        if dtype is not None:
            raise NetworkError(f"{self._path(name)}: low-rank factors beside {dtype} results")
        return self._with_low_rank(name, y, x, modules, sizes, owner, attrs, info.low_rank)

    def _with_low_rank(
        self,
        name: str,
        y: Tensor,
        x: Tensor,
        modules: Sequence[str],
        sizes: Sequence[int],
        owner: Owner | None,
        attrs: Mapping[str, Any],
        low_rank: LowRank,
    ) -> Tensor:
        """y + B (A x). Ranks divide what they divide of y's linear: where that has their rows,
        so has B; where it has their columns, so has A, whose few results they sum."""
        in_features = static(x.shape[-1], f"{name}: in_features")
        down, up = (f"{name}.svdquant_lora_{factor}" for factor in "ab")
        a = self._weight([f"{modules[0]}.svdquant_lora_a"], [low_rank.rank], in_features, owner)
        b = self._weight([f"{m}.svdquant_lora_b" for m in modules], sizes, low_rank.rank, owner)
        by_rows = attrs.get("parallel") == "row"
        middle = self._product(down, x, a, attrs if by_rows else {})
        added = self._product(up, middle, b, {} if by_rows else attrs)
        return self._op("add", f"{name}.low_rank", [y, added], [y.shape])[0]

    def _product(
        self,
        name: str,
        x: Tensor,
        weight: Weight,
        attrs: Mapping[str, Any],
        dtype: DType | None = None,
    ) -> Tensor:
        shape = (*x.shape[:-1], weight.shape[0])
        dtypes = [dtype or self.network.dtype]
        attrs = {**attrs, "dtype": dtype} if dtype else attrs
        return self._op("linear", name, [x], [shape], dtypes=dtypes, weights=[weight], attrs=attrs)[
            0
        ]
