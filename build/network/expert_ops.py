"""The vocabulary: experts."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from trtree.build.network.graph_core import GraphCore, static
from trtree.build.network.network import NetworkError, Tensor, Weight
from trtree.build.network.weight_source import LowRank, Parallel, WeightInfo
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
        Where experts scale x each in its own way, the op reads a row per slot; what low-rank
        factors give [rows, slots, 2 * intermediate] is its third operand.
        """
        in_features = static(x.shape[-1], f"{modules[0]}: in_features")
        sizes = [intermediate] * 2
        stack = self._stack(modules, sizes, in_features, weights)
        x = self._scaled_input("experts.up", stack, x, weights, slots, None)
        inputs = [x, weights]
        if low_rank := stack.infos[0].low_rank:
            middle = self._first_factor("experts.up", stack, x, weights, slots, low_rank, None)
            b = self._stack(stack.factors("b"), sizes, low_rank.rank, weights).weight
            name = "experts.up.svdquant_lora_b"
            inputs.append(self._experts_linear(name, middle, weights, slots, b, "column"))
        shape = (x.shape[0], slots, intermediate)
        attrs = {"slots": slots, "parallel": "column"}
        return self._op(
            "experts_up", "experts.up", inputs, [shape], weights=[stack.weight], attrs=attrs
        )[0]

    def experts_down(
        self, modules: Sequence[str], h: Tensor, weights: Tensor, hidden: int
    ) -> Tensor:
        """h [rows, slots, intermediate] from ``experts_up`` -> [rows, hidden]: the sum of
        down(h) of each row's experts, times their ``weights`` [rows, experts]."""
        in_features = static(h.shape[-1], f"{modules[0]}: in_features")
        stack = self._stack(modules, [hidden], in_features, weights)
        slots = static(h.shape[1], f"{modules[0]}: slots")
        h = self._scaled_input("experts.down", stack, h, weights, slots, "row")
        shape = (h.shape[0], hidden)
        (y,) = self._op(
            "experts_down",
            "experts.down",
            [h, weights],
            [shape],
            weights=[stack.weight],
            attrs={"parallel": "row"},
        )
        low_rank = stack.infos[0].low_rank
        if low_rank is None:
            return y
        middle = self._first_factor("experts.down", stack, h, weights, slots, low_rank, "row")
        b = self._stack(stack.factors("b"), [hidden], low_rank.rank, weights).weight
        name = "experts.down.svdquant_lora_b"
        (added,) = self._op("experts_down", name, [middle, weights], [shape], weights=[b])
        return self._op("add", "experts.down.low_rank", [y, added], [shape])[0]

    def _scaled_input(
        self,
        name: str,
        stack: "_Stack",
        x: Tensor,
        weights: Tensor,
        slots: int,
        parallel: Parallel | None,
    ) -> Tensor:
        """x [rows, features] or [rows, slots, features] as the linears take it: times the vector
        that all experts of the layer share, or times each slot's expert's [rows, slots, features].
        """
        features = static(x.shape[-1], name)
        vectors = {info.pre_quant_scale for info in stack.infos}
        if None in vectors:
            return x
        if len(vectors) == 1:
            return self._scale(stack.modules[0], x, features, self._owner, parallel)
        firsts = stack.modules[:: stack.each]
        paths = tuple(self._path(f"{module}.pre_quant_scale") for module in firsts)
        info = WeightInfo("dense", (features,), "float32")
        shape, sizes = (len(paths) * features,), [features] * len(paths)
        name = f"{name}.pre_quant_scale"
        weight = self._add_weight(self._path(name), paths, shape, sizes, info, self._owner)
        attrs: dict[str, Any] = {"slots": slots}
        attrs |= {"parallel": "column"} if parallel == "row" else {}
        scaled = (x.shape[0], slots, features)
        return self._op(
            "experts_scale", name, [x, weights], [scaled], weights=[weight], attrs=attrs
        )[0]

    def _first_factor(
        self,
        name: str,
        stack: "_Stack",
        x: Tensor,
        weights: Tensor,
        slots: int,
        low_rank: LowRank,
        parallel: Parallel | None,
    ) -> Tensor:
        """A x [rows, slots, rank] of each slot's expert."""
        features = static(x.shape[-1], name)
        a = self._stack(stack.factors("a")[:: stack.each], [low_rank.rank], features, weights)
        return self._experts_linear(
            f"{name}.svdquant_lora_a", x, weights, slots, a.weight, parallel
        )

    def _experts_linear(
        self,
        name: str,
        x: Tensor,
        weights: Tensor,
        slots: int,
        weight: Weight,
        parallel: Parallel | None,
    ) -> Tensor:
        """x [rows, K] or [rows, slots, K] -> [rows, slots, O] by each slot's expert's linear."""
        attrs: dict[str, Any] = {"slots": slots}
        attrs |= {"parallel": parallel} if parallel else {}
        shape = (x.shape[0], slots, weight.shape[1])
        return self._op(
            "experts_linear", name, [x, weights], [shape], weights=[weight], attrs=attrs
        )[0]

    def _stack(
        self, modules: Sequence[str], sizes: Sequence[int], in_features: int, weights: Tensor
    ) -> "_Stack":
        """The linears of all experts, each of modules of ``sizes``, as one weight.

        Raises:
            NetworkError: they are not of one kind, not as many as the router knows, or those
                of one expert take different inputs.
        """
        experts, each = len(modules) // len(sizes), len(sizes)
        if weights.shape[1:] != (experts,):
            raise NetworkError(
                f"{self._path(modules[0])}: {experts} experts, routed {list(weights.shape)}"
            )
        every = list(sizes) * experts
        infos = self._checked_infos(modules, every, in_features, self._owner)
        first = infos[0]
        paths = tuple(self._path(module) for module in modules)
        for index, (path, info) in enumerate(zip(paths, infos, strict=True)):
            _check_alike(paths[0], first, path, info)
            _check_one_input(paths[index // each * each], infos[index // each * each], path, info)
        if first.has_bias:
            raise NetworkError(f"{paths[0]}: biases of experts are not supported")
        experts_at = self._path("experts")
        inside = [path.removeprefix(f"{experts_at}.").partition(".")[2] for path in paths]
        name = f"{experts_at}.{'+'.join(dict.fromkeys(inside))}"
        shape = (experts, sum(sizes), in_features)
        weight = self._add_weight(name, paths, shape, every, first, self._owner)
        return _Stack(weight, tuple(modules), tuple(infos), each)


class _Stack(NamedTuple):
    """The equal linears of a layer's experts: ``each`` of them are one expert's."""

    weight: Weight
    modules: tuple[str, ...]
    infos: tuple[WeightInfo, ...]
    each: int

    def factors(self, which: str) -> list[str]:
        return [f"{module}.svdquant_lora_{which}" for module in self.modules]


def _check_alike(first: str, expected: WeightInfo, path: str, info: WeightInfo) -> None:
    """Raises NetworkError unless two experts' linears are of one kind."""
    for field, what in (("pre_quant_scale", "scales its input"), ("low_rank", "has factors")):
        ours, theirs = getattr(info, field), getattr(expected, field)
        if (ours is None) != (theirs is None):
            names = (path, first) if theirs is None else (first, path)
            raise NetworkError(
                f"{names[0]} {what}, {names[1]} does not: either all experts of a layer do, or "
                "none; export again"
            )
    if info.low_rank and expected.low_rank and info.low_rank.rank != expected.low_rank.rank:
        raise NetworkError(
            f"{path}: its factors are of rank {info.low_rank.rank}, those of {first} of "
            f"{expected.low_rank.rank}; the experts of a layer must have one rank"
        )
    if not info.is_like(expected):
        raise NetworkError(
            f"{path}: the experts of a layer must be of one kind, but this is "
            f"{info.dtype} and {first} is {expected.dtype}"
        )


def _check_one_input(first: str, expected: WeightInfo, path: str, info: WeightInfo) -> None:
    """Raises NetworkError unless two linears of one expert can be one product."""
    if info.pre_quant_scale != expected.pre_quant_scale:
        what = "scales its input by another vector"
    elif info.low_rank != expected.low_rank:
        what = "has another svdquant_lora_a"
    else:
        return
    raise NetworkError(
        f"{path} {what} than {first}: linears of one expert that read the same must have it in "
        "common; export again"
    )
