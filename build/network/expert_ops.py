"""The vocabulary: experts."""

from collections.abc import Sequence
from dataclasses import asdict

from trtree.build.network.graph_core import GraphCore, static
from trtree.build.network.network import NetworkError, Tensor, Weight
from trtree.build.network.weight_source import Parallel
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
        """
        in_features = static(x.shape[-1], f"{modules[0]}: in_features")
        weight = self._stack(modules, [intermediate] * 2, in_features, weights)
        x = self._scaled_input(modules, x, in_features, None)
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
        h = self._scaled_input(modules, h, in_features, "row")
        shape = (h.shape[0], hidden)
        attrs = {"parallel": "row"}
        return self._op(
            "experts_down", "experts.down", [h, weights], [shape], weights=[weight], attrs=attrs
        )[0]

    def _scaled_input(
        self, modules: Sequence[str], x: Tensor, features: int, parallel: Parallel | None
    ) -> Tensor:
        """x as its linears take it: all experts of a layer share their vector, if they have
        one (``checkpoint.expert_scales`` sees to that)."""
        (info,) = self._infos(modules[:1], [1], features, self._owner)
        if not info.pre_quant_scale:
            return x
        return self._scale(modules[0], x, features, self._owner, parallel)

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
            if info.pre_quant_scale != first.pre_quant_scale:
                raise NetworkError(
                    f"{path if info.pre_quant_scale else paths[0]} scales its input, "
                    f"{paths[0] if info.pre_quant_scale else path} does not: the experts of a "
                    "layer must do so alike; export again"
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
