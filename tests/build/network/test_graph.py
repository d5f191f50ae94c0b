"""The vocabulary: shape rules, names, fusion, and the stored form."""

import json
from dataclasses import replace

import pytest

from trtree.build.lowering.reference import _OPS
from trtree.build.lowering.weights import View, plan_weights
from trtree.build.network.graph import OP_KINDS, Graph, LowRank, WeightInfo
from trtree.build.network.network import Network, NetworkError, Owner, Tensor
from trtree.build.network.rope import RopeTable, rope_table
from trtree.plugins.moe.contract import Routing


class Source:
    """Weights as implied, but for those named."""

    def __init__(self, **special: WeightInfo) -> None:
        self.special = special

    def describe(self, module: str, owner: Owner, implied: tuple[int, ...]) -> WeightInfo:
        return self.special.get(module, WeightInfo("dense", implied, "bfloat16"))


def graph(**special: WeightInfo) -> Graph:
    return Graph("target", Source(**special))


def test_every_op_has_a_reference() -> None:
    assert set(_OPS) == OP_KINDS


def test_names_follow_the_scopes() -> None:
    g = graph()
    x = g.input("x", ("rows", 32), "float32")
    with g.scope("model"), g.scope("layers.0"):
        y = g.linear("proj", x, 48)
    assert y.name == "model.layers.0.proj"
    assert y.shape == ("rows", 48)
    assert g.network.weights["target:model.layers.0.proj"].shape == (48, 32)


def test_a_shape_that_differs_from_the_checkpoint_is_an_error() -> None:
    g = graph(proj=WeightInfo("dense", (40, 32), "bfloat16"))
    x = g.input("x", ("rows", 32), "float32")
    with pytest.raises(NetworkError, match=r"proj: the checkpoint holds \[40, 32\].*\[48, 32\]"):
        g.linear("proj", x, 48)


def test_linears_of_one_kind_become_one_product() -> None:
    g = graph()
    x = g.input("x", ("rows", 32), "float32")
    a, b = g.linears(["a", "b"], x, [16, 48])
    assert [op.kind for op in g.network.ops] == ["linear", "split"]
    assert (a.shape, b.shape) == (("rows", 16), ("rows", 48))
    assert g.network.weights["target:a+b"].out_sizes == (16, 48)


@pytest.mark.parametrize(
    "other",
    [
        WeightInfo("nvfp4", (48, 32), "nvfp4", activations="nvfp4"),
        WeightInfo("dense", (48, 32), "float32"),
        WeightInfo("dense", (48, 32), "bfloat16", has_bias=True),
    ],
)
def test_linears_of_different_kinds_stay_apart(other: WeightInfo) -> None:
    g = graph(b=other)
    x = g.input("x", ("rows", 32), "float32")
    g.linears(["a", "b"], x, [16, 48])
    assert [op.kind for op in g.network.ops] == ["linear", "linear"]


def test_attention_operands_are_checked() -> None:
    g = graph()
    rows = g.rows()
    kv = g.kv_state(2, 16)
    odd = g.input("odd", ("rows", 3, 16), "float32")
    with pytest.raises(NetworkError, match="3 query heads of 16 over 2 KV heads of 16"):
        g.tree_attention(odd, rows, kv)
    with pytest.raises(NetworkError, match=r"holds \[2, 16\] per token, given \[3, 16\]"):
        g.kv_append(odd, odd, rows.slots, kv)
    with pytest.raises(NetworkError, match="40 rotary dimensions, but head_dim is 16"):
        g.rotary_embedding("r", odd, rows.positions, RopeTable("rope", (1.0,) * 20))


def test_tensors_of_another_graph_are_refused() -> None:
    foreign = graph().input("x", ("rows", 4), "float32")
    with pytest.raises(NetworkError, match="x is not of graph target"):
        graph().silu_mul("y", foreign, foreign)


def test_a_network_survives_its_stored_form() -> None:
    g = graph()
    rows = g.rows()
    x = g.embedding("embed", rows.token_ids, vocab=50, hidden=32)
    q, k, v = g.linears(["q", "k", "v"], x, [32, 16, 16])
    kv = g.kv_state(1, 16)
    table = RopeTable("rope", (1.0, 0.1, 1 / 3), 1.2)
    k = g.rotary_embedding("kr", g.split_heads("kh", k, 1), rows.positions, table)
    g.kv_append(k, g.split_heads("vh", v, 1), rows.slots, kv)
    y = g.merge_heads("m", g.tree_attention(g.split_heads("qh", q, 2), rows, kv, window=7))
    log_probs, ids = g.top_k_log_probs("top", g.gather_rows("o", y, rows.output_rows), 3)
    g.output("log_probs", log_probs)
    g.output("ids", ids)
    stored = json.loads(json.dumps(g.network.to_dict()))
    assert Network.from_dict(stored) == g.network
    del stored["states"][0]["heads"]
    with pytest.raises(NetworkError, match="not a network of this version"):
        Network.from_dict(stored)


def experts(g: Graph, slots: int = 2, count: int = 4) -> Tensor:
    x = g.input("x", ("rows", 32), "float32")
    logits = g.linear("gate", x, count, dtype="float32")
    weights = g.route("route", logits, Routing(count, slots), correction_bias="gate.bias")
    pairs = [f"experts.{i}.{which}" for i in range(count) for which in ("gate", "up")]
    h = g.experts_up(pairs, x, weights, 48, slots)
    return g.experts_down([f"experts.{i}.down" for i in range(count)], h, weights, 32)


def test_experts_are_stacked() -> None:
    g = graph()
    with g.scope("mlp"):
        y = experts(g)
    assert y.shape == ("rows", 32)
    assert g.network.tensors["mlp.experts.up"].shape == ("rows", 2, 48)
    up, down = (g.network.weights[f"target:mlp.experts.{leaf}"] for leaf in ("gate+up", "down"))
    assert (up.shape, down.shape) == ((4, 96, 32), (4, 32, 48))
    assert (up.experts, down.experts) == (4, 4)
    assert up.modules_of(1) == ("mlp.experts.1.gate", "mlp.experts.1.up")
    assert up.out_sizes == (48,) * 8
    ops = {op.name: op for op in g.network.ops}
    assert ops["mlp.experts.up"].attrs["parallel"] == "column"
    assert ops["mlp.experts.down"].attrs["parallel"] == "row"
    assert Network.from_dict(json.loads(json.dumps(g.network.to_dict()))) == g.network


def test_router_logits_stay_in_float32() -> None:
    g = Graph("target", Source(), dtype="bfloat16")
    x = g.input("x", ("rows", 32), "bfloat16")
    assert g.linear("gate", x, 4, dtype="float32").dtype == "float32"
    with pytest.raises(NetworkError, match="float32 logits of 4 experts, given bfloat16"):
        g.route("route", g.linear("other", x, 4), Routing(4, 2))


@pytest.mark.parametrize(
    ("module", "info", "message"),
    [
        (
            "experts.2.up",
            WeightInfo("dense", (48, 32), "float32"),
            r"experts\.2\.up: the experts of a layer must be of one kind, but this is float32",
        ),
        (
            "experts.1.gate",
            WeightInfo("dense", (48, 32), "float32", pre_quant_scale="s"),
            r"experts\.1\.gate scales its input, experts\.0\.gate does not",
        ),
        (
            "experts.1.up",
            WeightInfo("dense", (48, 32), "bfloat16", low_rank=LowRank(8, "a")),
            r"experts\.1\.up has factors, experts\.0\.gate does not",
        ),
        (
            "experts.3.down",
            WeightInfo("nvfp4", (32, 48), "nvfp4", activations="bf16"),
            r"experts\.3\.down: .* this is nvfp4 and experts\.0\.down is bfloat16",
        ),
        (
            "experts.1.down",
            WeightInfo("dense", (32, 64), "bfloat16"),
            r"experts\.1\.down: the checkpoint holds \[32, 64\], .* \[32, 48\]",
        ),
        ("gate.bias", WeightInfo("dense", (5,), "float32"), r"gate\.bias: the checkpoint holds"),
    ],
)
def test_experts_that_do_not_fit(module: str, info: WeightInfo, message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        experts(graph(**{module: info}))


SCALED = WeightInfo("nvfp4", (48, 32), "nvfp4", activations="nvfp4", pre_quant_scale="s")


def gates_and_ups(info: WeightInfo) -> dict[str, WeightInfo]:
    return {f"experts.{i}.{which}": info for i in range(4) for which in ("gate", "up")}


def test_experts_share_a_vector_or_have_one_each() -> None:
    every = gates_and_ups(SCALED)
    shared, own = (
        graph(**every),
        graph(
            **every
            | {
                f"experts.2.{which}": replace(SCALED, pre_quant_scale="t")
                for which in ("gate", "up")
            }
        ),
    )
    for g, kind, shape, size in (
        (shared, "scale", ("rows", 32), 32),
        (own, "experts_scale", ("rows", 2, 32), 128),
    ):
        experts(g)
        (op,) = (op for op in g.network.ops if "scale" in op.kind)
        assert op.kind == kind
        assert g.network.tensors[op.outputs[0]].shape == shape
        assert g.network.weights[op.weights[0]].shape == (size,)
    torn = every | {"experts.2.up": replace(SCALED, pre_quant_scale="t")}
    with pytest.raises(NetworkError, match=r"2\.up scales its input by another vector than .*gate"):
        experts(graph(**torn))


def test_factors_of_experts_are_stacked_apart() -> None:
    factors = {
        f"experts.{i}.{which}": replace(info, low_rank=LowRank(8, f"{i}"))
        for i in range(4)
        for which, info in (
            ("gate", SCALED),
            ("up", SCALED),
            ("down", replace(SCALED, shape=(32, 48))),
        )
    }
    g = graph(**factors)
    experts(g)
    shapes = {name: w.shape for name, w in g.network.weights.items() if "lora" in name}
    assert shapes == {
        "target:experts.gate.svdquant_lora_a": (4, 8, 32),
        "target:experts.gate.svdquant_lora_b+up.svdquant_lora_b": (4, 96, 8),
        "target:experts.down.svdquant_lora_a": (4, 8, 48),
        "target:experts.down.svdquant_lora_b": (4, 32, 8),
    }
    other = {"experts.2.up": replace(SCALED, low_rank=LowRank(8, "other"))}
    with pytest.raises(NetworkError, match=r"2\.up has another svdquant_lora_a than .*2\.gate"):
        experts(graph(**factors | other))
    larger = {f"experts.2.{w}": replace(SCALED, low_rank=LowRank(9, "2")) for w in ("gate", "up")}
    with pytest.raises(NetworkError, match=r"2\.gate: its factors are of rank 9, .*0\.gate of 8"):
        experts(graph(**factors | larger))


def test_linears_that_scale_their_input_alike_are_one_product() -> None:
    same = {n: replace(SCALED, low_rank=LowRank(8, "a")) for n in ("q", "k")}
    for infos, products in (
        (same, 3),  # of the fused weight, and of two factors
        (same | {"k": replace(same["k"], low_rank=LowRank(8, "b"))}, 6),
        (same | {"k": replace(same["k"], pre_quant_scale="t")}, 6),
    ):
        g = graph(**infos)
        q, k = g.linears(["q", "k"], g.input("x", ("rows", 32), "float32"), [48, 48])
        assert (q.shape, k.shape) == (("rows", 48),) * 2
        kinds = [op.kind for op in g.network.ops]
        assert kinds.count("linear") == products
        assert kinds.count("scale") == kinds.count("add") == products / 3


def test_experts_have_no_biases_and_are_as_many_as_routed() -> None:
    biased = {
        f"experts.{i}.{which}": WeightInfo("dense", (48, 32), "bfloat16", has_bias=True)
        for i in range(4)
        for which in ("gate", "up")
    }
    with pytest.raises(NetworkError, match="biases of experts are not supported"):
        experts(graph(**biased))
    g = graph()
    x, weights = (g.input(n, ("rows", s), "float32") for n, s in (("x", 32), ("w", 5)))
    with pytest.raises(NetworkError, match=r"experts\.0\.down: 4 experts, routed"):
        g.experts_down([f"experts.{i}.down" for i in range(4)], x, weights, 32)


def test_nested_fusions_are_stored_once() -> None:
    outer, inner = graph(), graph()
    x = outer.input("x", ("rows", 8), "float32")
    outer.linears(["k0", "v0", "k1", "v1"], x, [16, 32, 16, 32])
    y = inner.input("x", ("rows", 8), "float32")
    inner.linears(["k1", "v1"], y, [16, 32])
    inner.linear("v0", y, 32)
    plan = plan_weights([inner.network, outer.network])
    whole = "target:k0+v0+k1+v1"
    assert list(plan.stored) == [whole]
    assert plan.views["target:k1+v1"] == View(whole, 48, 48)
    assert plan.views["target:v0"] == View(whole, 16, 32)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a positive number, not None"),
        ({"rope_theta": -1}, "rope_theta must be a positive number, not -1"),
    ],
)
def test_bad_rope_parameters_are_named(config: dict[str, object], message: str) -> None:
    with pytest.raises(NetworkError, match=message):
        rope_table("rope", config, 16)


def test_latent_operands_are_checked() -> None:
    g = graph()
    rows = g.rows()
    latent, keys = g.latent_state("latent", 48), g.latent_state("keys", 32)
    q = g.input("q", ("rows", 4, 48), "float32")
    index_q = g.input("index_q", ("rows", 8, 32), "float32")
    weights = g.input("weights", ("rows", 8), "float32")
    rounded = g.input("rounded", ("rows", 8), "bfloat16")
    with pytest.raises(NetworkError, match=r"latent: holds \[48\] per token, given \[4, 48\]"):
        g.latent_append("append", q, rows.slots, latent)
    with pytest.raises(NetworkError, match=r"over keys of 48, top_k 4"):
        g.index_select("select", index_q, weights, rows, latent, 4)
    with pytest.raises(NetworkError, match="weights must be float32, not bfloat16"):
        g.index_select("select", index_q, rounded, rows, keys, 4)
    selection = g.index_select("select", index_q, weights, rows, keys, 4)
    assert (selection.shape, selection.dtype) == (("rows", 4), "int32")
    with pytest.raises(NetworkError, match="values of 49 over latents of 48"):
        g.latent_attention("attend", q, rows, latent, selection, value_dim=49, scale=1.0)
    with pytest.raises(NetworkError, match=r"a selection is int32 \[rows, top_k\], not float32"):
        g.latent_attention("attend", q, rows, latent, weights, value_dim=32, scale=1.0)
    out = g.latent_attention("attend", q, rows, latent, selection, value_dim=32, scale=1.0)
    assert out.shape == ("rows", 4, 32)


def test_head_linear_stores_one_dense_weight_for_both_parts() -> None:
    quantized = WeightInfo("nvfp4", (160, 32), "nvfp4", activations="nvfp4")
    g = graph(kv_b_proj=quantized)
    q = g.input("q", ("rows", 4, 16), "float32")
    sizes = {"key_dim": 16, "value_dim": 24, "latent": 32}
    latent = g.head_linear("kv_b_proj", q, "key", **sizes)
    values = g.head_linear("kv_b_proj", latent, "value", **sizes)
    assert (latent.shape, values.shape) == (("rows", 4, 32), ("rows", 4, 24))
    (weight,) = g.network.weights.values()
    assert (weight.kind, weight.dtype, weight.shape) == ("dense", "float32", (160, 32))
    with pytest.raises(NetworkError, match="heads of 16, its value part takes 32"):
        g.head_linear("kv_b_proj", q, "value", **sizes)
    # What scales its input becomes part of it.
    scaled = graph(kv_b_proj=replace(quantized, pre_quant_scale="s", low_rank=LowRank(8, "a")))
    x = scaled.input("q", ("rows", 4, 16), "float32")
    scaled.head_linear("kv_b_proj", x, "key", **sizes)
    assert scaled.network.weights == g.network.weights
