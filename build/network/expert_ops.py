"""The vocabulary: experts."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trtree.build.network.graph_core import GraphCore, static
from trtree.build.network.network import NetworkError, Tensor, Weight
from trtree.build.network.weight_source import Parallel, WeightInfo
from trtree.plugins.moe.contract import Routing


class ExpertOps(GraphCore):
    """Routing, and linears of a layer's experts."""

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
        Where experts scale x each in its own way, the op reads a row per slot.
        """
        in_features = static(x.shape[-1], f"{modules[0]}: in_features")
        weight = self._stack(modules, [intermediate] * 2, in_features, weights)
        x = self._scaled_input("experts.up", modules, x, weights, slots, None)
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
        in_features = static(h.shape[-1], f"{modules[0]}: in_features")
        weight = self._stack(modules, [hidden], in_features, weights)
        slots = static(h.shape[1], f"{modules[0]}: slots")
        h = self._scaled_input("experts.down", modules, h, weights, slots, "row")
        shape = (h.shape[0], hidden)
        attrs = {"parallel": "row"}
        return self._op(
            "experts_down", "experts.down", [h, weights], [shape], weights=[weight], attrs=attrs
        )[0]

    def _scaled_input(
        self,
        name: str,
        modules: Sequence[str],
        x: Tensor,
        weights: Tensor,
        slots: int,
        parallel: Parallel | None,
    ) -> Tensor:
        """x [rows, features] or [rows, slots, features] as the linears take it: times the vector
        that all experts of the layer share, or times each slot's expert's [rows, slots, features].

        Raises:
            NetworkError: the linears of one expert scale it by different vectors.
        """
        experts = static(weights.shape[1], f"{name}: experts")
        features, each = static(x.shape[-1], name), len(modules) // experts
        infos = self._infos(modules, [1] * len(modules), features, self._owner)
        vectors = [info.pre_quant_scale for info in infos]
        for index, vector in enumerate(vectors):
            if vector != vectors[index // each * each]:
                raise NetworkError(
                    f"{self._path(modules[index])} scales its input by another vector than "
                    f"{self._path(modules[index // each * each])}: the linears of one expert that "
                    "read the same must scale it alike; export again"
                )
        if vectors[0] is None:
            return x
        if len(set(vectors)) == 1:
            return self._scale(modules[0], x, features, self._owner, parallel)
        paths = tuple(self._path(f"{module}.pre_quant_scale") for module in modules[::each])
        info = WeightInfo("dense", (features,), "float32")
        shape, sizes = (experts * features,), [features] * experts
        stacked = f"{self._path(name)}.pre_quant_scale"
        weight = self._add_weight(stacked, paths, shape, sizes, info, self._owner)
        attrs: dict[str, Any] = {"slots": slots}
        attrs |= {"parallel": "column"} if parallel == "row" else {}
        scaled = (x.shape[0], slots, features)
        return self._op(
            "experts_scale",
            f"{name}.pre_quant_scale",
            [x, weights],
            [scaled],
            weights=[weight],
            attrs=attrs,
        )[0]

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
            if (info.pre_quant_scale is None) != (first.pre_quant_scale is None):
                raise NetworkError(
                    f"{path if info.pre_quant_scale else paths[0]} scales its input, "
                    f"{paths[0] if info.pre_quant_scale else path} does not: either all experts "
                    "of a layer do, or none; export again"
                )
            if info.low_rank is not None:
                raise NetworkError(
                    f"{path}: experts with low-rank factors (NVFP4_SVD) are not supported; leave "
                    "experts out of SVDQuant (skip_layers), or export them as NVFP4_AWQ"
                )
            if not info.is_like(first):
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
