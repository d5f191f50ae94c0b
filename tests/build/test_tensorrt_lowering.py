"""The finished TensorRT networks, evaluated on the CPU, against the reference lowering.

Op by op: each op is given the reference's own inputs. Whole: only the first inputs are
equal. Prefill is a chain, verification a tree; padding, lengths and slots differ by request.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import DEMO_VOCAB, random_checkpoint, sliding_drafter, tiny_config
from lowered import (
    Batch,
    by_expert,
    by_key,
    by_slot,
    describe,
    evaluators,
    forced_values,
    lower_networks,
    make_batch,
    ragged,
    recorded,
    references,
    routed_tensors,
)
from network_evaluator import NetworkEvaluator, evaluate_together
from op_checks import check_op, relative
from random_glm5 import glm5_config
from random_hybrid import hybrid_config
from random_moe import glm4_moe_config, qwen3_moe_config
from speculators_format import reduced, write_speculators
from trtree.build.builder import EngineDescription
from trtree.build.lowering.division import Shard
from trtree.build.lowering.reference import ReferenceNetwork
from trtree.build.lowering.tensorrt import backend
from trtree.build.lowering.tensorrt.lower import LoweredNetwork
from trtree.build.network.network import Op
from trtree.build.options import BuildOptions, read_options
from trtree.plugins.nvfp4_linear import format as nvfp4

ROOT = Path(__file__).resolve().parents[2]
TINY = {"vocab_size": 96}
CASES = {
    "untied-w4a4": (tiny_config(**TINY), "NVFP4"),
    "tied-w4a16": (tiny_config(**TINY, tie_word_embeddings=True), "W4A16_NVFP4"),
    "awq-w4a4": (tiny_config(**TINY), "NVFP4_AWQ"),
    "svd-w4a4": (tiny_config(**TINY), "NVFP4_SVD"),
    "bf16-one-kv-head": (tiny_config(**TINY, num_key_value_heads=1), None),
    "bf16-bias": (tiny_config(**TINY, attention_bias=True), None),
    "moe-qwen3-w4a4": (qwen3_moe_config(**TINY), "NVFP4"),
    "moe-qwen3-awq": (qwen3_moe_config(**TINY), "NVFP4_AWQ"),
    "moe-qwen3-bf16": (
        qwen3_moe_config(**TINY, norm_topk_prob=False, decoder_sparse_step=1),
        None,
    ),
    "moe-glm-w4a4": (
        glm4_moe_config(**TINY, moe_intermediate_size=64, attention_bias=False),
        "NVFP4",
    ),
    "moe-glm-awq": (
        glm4_moe_config(**TINY, moe_intermediate_size=64, attention_bias=False),
        "NVFP4_AWQ",
    ),
    "moe-glm-svd": (
        glm4_moe_config(**TINY, moe_intermediate_size=64, attention_bias=False),
        "NVFP4_SVD",
    ),
    "moe-glm-w4a16": (glm4_moe_config(**TINY, moe_intermediate_size=64), "W4A16_NVFP4"),
    "moe-glm-bf16": (
        glm4_moe_config(**TINY, n_group=1, topk_group=1, attention_bias=False, use_qk_norm=False),
        None,
    ),
    "hybrid-next": (hybrid_config("Qwen3NextForCausalLM", **TINY), None),
    "hybrid-3.5-w4a4": (hybrid_config("Qwen3_5ForCausalLM", **TINY), "NVFP4"),
    "hybrid-3.5-moe": (hybrid_config("Qwen3_5MoeForCausalLM", **TINY), None),
    "bf16-window": (
        tiny_config(
            **TINY,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=5,
            use_sliding_window=True,
        ),
        None,
    ),
}
_ODD = TINY | {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 208,
    "moe_intermediate_size": 144,
}
UNEVEN = {
    "uneven-qwen3-bf16": (qwen3_moe_config(**_ODD), None),
    "uneven-glm-w4a16": (glm4_moe_config(**_ODD), "W4A16_NVFP4"),
}
FACTORS = {
    "svd-qwen3": (qwen3_moe_config(**_ODD), "NVFP4_SVD"),
    "svd-glm": (glm4_moe_config(**_ODD), "NVFP4_SVD"),
}
# As in GLM-5, a query times its scale is exact.
_GLM5 = TINY | {"qk_nope_head_dim": 48}
CASES |= {
    # Rows that see fewer keys than index_topk and rows that see more.
    "glm5-bf16": (glm5_config(**_GLM5), None),
    "glm5-w4a4": (glm5_config(**_GLM5, moe_intermediate_size=64), "NVFP4"),
    # No more slots than index_topk.
    "glm5-dense": (glm5_config(**_GLM5, index_topk=128), None),
}
TREE = [-1, 0, 0, 1, 1, 2, -1, 6]


@dataclasses.dataclass
class Pair:
    """One network twice."""

    lowered: LoweredNetwork
    evaluator: NetworkEvaluator
    reference: ReferenceNetwork

    def batch(self, kind: str) -> Batch:
        parents = [[-1, 0, 1, 2, 3, 4]] if kind == "prefill" else [TREE, [-1], TREE[:3]]
        generator = torch.Generator().manual_seed(len(kind))
        head = self.reference.network.tensors.get("lm_head")
        vocab = int(head.shape[-1]) if head else 1
        ids = [torch.randint(0, vocab, (len(p),), generator=generator).tolist() for p in parents]
        lengths = [9] if kind == "prefill" else [7, 0, 23]
        return make_batch(self.lowered, lengths, ids, parents)


class Pairs:
    """Describes, lowers and loads each case once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[tuple[str, bool], dict[str, Pair]] = {}

    def __call__(self, case: str, *, fp4: bool = True) -> dict[str, Pair]:
        if (case, fp4) not in self._made:
            description = self.describe(case)
            where = self._directory / f"{case}.{fp4}.reference"
            where.mkdir()
            lowered = lower_networks(description, fp4=fp4)
            evaluated = evaluators(lowered)
            loaded = references(description, where)
            self._made[case, fp4] = {
                name: Pair(lowered[name], evaluated[name], loaded[name]) for name in lowered
            }
        return self._made[case, fp4]

    def describe(self, case: str) -> EngineDescription:
        if case.startswith("demo"):
            options = read_options(ROOT / "configs" / "demo.yaml")
            if case == "demo-sliding":
                drafter = sliding_drafter(self._directory / "sliding")
                options = options.with_changes({"drafter": drafter})
            if case == "demo-reduced":
                ids = torch.arange(2, DEMO_VOCAB, 3)[:340]
                path = self._directory / "reduced"
                if not path.exists():
                    write_speculators(path, reduced(ids), draft_vocab_size=len(ids))
                options = options.with_changes({"drafter": path})
            if case == "demo-quantized":
                options = options.with_changes({"quantize_drafter": "nvfp4"})
            activations = "nvfp4" if case == "demo-nvfp4" else "bf16"
            return describe(
                options, activations=activations, max_seq_len=40, max_tree_budget=16, top_k=5
            )
        checkpoint = self._directory / case
        if not checkpoint.exists():
            config, algorithm = (CASES | UNEVEN | FACTORS)[case]
            random_checkpoint(checkpoint, config, algorithm=algorithm)
        activations = "bf16" if case in FACTORS else None
        options = BuildOptions(
            checkpoint=checkpoint, max_seq_len=40, max_num_rows=128, activations=activations
        )
        return describe(options)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("lowered"))


def w4a4_ops(pair: Pair) -> list[Op]:
    weights = pair.reference.network.weights
    ops = pair.reference.network.ops
    return [op for op in ops if op.weights and weights[op.weights[0]].activations == "nvfp4"]


def codes(pair: Pair, op: Op, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's E2M1 values and e4m3 block scales of an op's input [rows, K]."""
    scale = pair.lowered.constants[f"{op.weights[0]}.input_scale"]
    values, block_scale = nvfp4.quantize_rows(x.float(), scale)
    return values, block_scale.to(torch.float8_e4m3fn)


def forced(pair: Pair, batch: Batch, want: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reference's tensors, and its codes of what W4A4 products read."""
    values = forced_values(pair.lowered, pair.reference.network, batch, want)
    for op in w4a4_ops(pair):
        x = want[op.inputs[0]]
        for index, part in enumerate(codes(pair, op, x.reshape(-1, x.shape[-1]))):
            wide = part.float().reshape(*x.shape[:-1], -1)
            if op.inputs[0] in routed_tensors(pair.reference.network):
                laid_out = by_expert(batch, wide, want[op.inputs[1]])
            elif op.kind == "experts_up":
                laid_out = batch.padded(wide).flatten(0, 1)[None]
            else:
                laid_out = batch.padded(wide)
            values[f"{op.name}/quantized:{index}"] = laid_out.to(part.dtype)
    return values


def check_ops(pair: Pair, batch: Batch, inputs: dict[str, torch.Tensor], given: Any) -> set[str]:
    """Every op on the reference's inputs; returns the kinds that were compared."""
    want = recorded(pair.reference, given, batch.context())
    got = pair.evaluator.run(inputs, forced(pair, batch, want))
    network, checked = pair.reference.network, set()
    routed = routed_tensors(network)
    for op in network.ops:
        weights = [network.weights[name] for name in op.weights]
        # The lowering rounds a widened weight, a sum before its bias, and bf16 products of
        # experts before they are summed; the reference does not.
        rounds_twice = any(w.activations == "bf16" or w.has_bias for w in weights) or (
            op.kind == "experts_down" and weights[0].kind == "dense"
        )
        for name in op.outputs:
            computed, expected = got[pair.lowered.tensors[name]], want[name]
            if name in routed:
                computed = by_slot(batch, computed, want[routed[name]], expected.shape[1])
            elif op.kind == "index_select":
                computed, expected = batch.rows(computed), by_key(batch, expected)
            else:
                computed = ragged(batch, computed)
            check_op(op, rounds_twice, computed, expected)
            checked.add(op.kind)
    return checked


@pytest.mark.parametrize("kind", ["prefill", "tree"])
@pytest.mark.parametrize("case", [*CASES, "demo-nvfp4"])
def test_every_op_of_a_target(pairs: Pairs, case: str, kind: str) -> None:
    pair = pairs(case)["target"]
    batch = pair.batch(kind)
    checked = check_ops(pair, batch, batch.network_inputs(), batch.reference_inputs())
    assert checked >= {"embedding", "linear", "rms_norm", "rotary_embedding"}
    latent = {"head_linear", "index_select", "latent_attention", "layer_norm"}
    assert checked >= (latent if case.startswith("glm5") else {"tree_attention"})


@pytest.mark.parametrize(
    "case",
    [
        *("awq-w4a4", "svd-w4a4", "moe-qwen3-awq", "untied-w4a4", "moe-glm-w4a4", "moe-glm-awq"),
        *("moe-glm-svd", "demo-nvfp4"),
    ],
)
def test_w4a4_codes_and_products(pairs: Pairs, case: str) -> None:
    """Activations get the reference's codes and block scales, but where float32 and float64
    fall on different sides of a tie; of equal codes, products are within 1e-6 in float32."""
    pair = pairs(case)["target"]
    batch = pair.batch("tree")
    want = recorded(pair.reference, batch.reference_inputs(), batch.context())
    got = pair.evaluator.run(batch.network_inputs(), forced(pair, batch, want))
    assert len(w4a4_ops(pair)) >= 8
    for op in w4a4_ops(pair):
        x = want[op.inputs[0]].float().flatten(0, -2)
        below, above = (codes(pair, op, x * (1 + e)) for e in (-1e-6, 1e-6))
        scale_decided = below[1].float() == above[1].float()
        decided = (below[0] == above[0]) & scale_decided.repeat_interleave(16, dim=1)
        assert decided.double().mean() > 0.9
        for index, (expected, sure) in enumerate(
            zip(codes(pair, op, x), (decided, scale_decided), strict=True)
        ):
            ours = got[f"{op.name}/quantized:{index}"].float()
            if op.inputs[0] in routed_tensors(pair.reference.network):
                slots = int(want[op.inputs[0]].shape[1])
                ours = by_slot(batch, ours, want[op.inputs[1]], slots).flatten(0, 1)
            else:
                ours = ragged(batch, ours.reshape(*batch.real().shape, -1))
            assert torch.equal(ours[sure], expected.float()[sure]), op.name
        if op.kind != "linear":
            continue  # of experts that rows did not choose, too
        product = ragged(batch, got[f"{op.name}/product"])
        assert relative(product, pair.reference.linear(op)(x)).max() < 1e-6, op.name


@pytest.mark.parametrize("kind", ["prefill", "tree"])
@pytest.mark.parametrize("case", ["demo-bf16", "demo-sliding", "demo-quantized", "demo-reduced"])
def test_every_op_of_the_drafter(pairs: Pairs, case: str, kind: str) -> None:
    pair = pairs(case)
    context = pair["drafter_context"]
    batch = context.batch(kind)
    width = int(context.reference.network.tensors["captured"].shape[1])
    rows = int(batch.real().sum())
    captured = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    given = batch.reference_inputs() | {"captured": captured}
    inputs = batch.network_inputs(captured=batch.padded(captured))
    wanted = {name: inputs[name] for name in context.evaluator.inputs}
    check_ops(context, batch, wanted, given)

    block = pair["drafter_block"]
    batch = block.batch(kind)
    ones = torch.ones_like(batch.masks()) & batch.real()[:, None, :]
    inputs = batch.network_inputs(tree_mask=ones | torch.eye(batch.width, dtype=torch.bool))
    given = batch.reference_inputs()
    if "causal_mask" in block.evaluator.inputs:
        inputs["causal_mask"] = batch.masks()
        given["causal_mask"] = given["packed_mask"].clone()
    assert ("causal_mask" in inputs) == (case == "demo-sliding")
    given["packed_mask"] = torch.full_like(given["packed_mask"], -1)
    checked = check_ops(block, batch, inputs, given)
    assert "top_k_log_probs" in checked


@pytest.mark.parametrize("kind", ["prefill", "tree"])
@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        ("bf16-one-kv-head", 1e-3),
        ("moe-qwen3-bf16", 1e-2),
        ("moe-glm-bf16", 1e-2),
        ("hybrid-next", 1e-2),
        ("hybrid-3.5-moe", 1e-2),
        ("bf16-window", 1e-3),
        ("glm5-bf16", 2e-2),
        ("glm5-dense", 2e-2),
        ("bf16-bias", 2e-2),
        ("tied-w4a16", 2e-2),
        ("demo-bf16", 2e-2),
    ],
)
def test_a_whole_target(pairs: Pairs, case: str, tolerance: float, kind: str) -> None:
    got, want = whole(pairs(case)["target"], kind)
    assert relative(got, want).median() < tolerance


def whole(
    pair: Pair, kind: str, change: Callable[[dict[str, torch.Tensor]], None] = lambda _: None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of both; ``change`` spoils the lowered network's inputs."""
    batch = pair.batch(kind)
    inputs = batch.network_inputs()
    change(inputs)
    got = pair.evaluator.run(inputs)["output.logits"]
    want = pair.reference.run(batch.reference_inputs(), batch.context())["logits"]
    return ragged(batch, got), want


def test_a_whole_drafter(pairs: Pairs) -> None:
    """Context of a prompt, then a block behind it: the same candidates."""
    pair = pairs("demo-bf16")
    context, block = pair["drafter_context"], pair["drafter_block"]
    batch = context.batch("prefill")
    width = int(context.reference.network.tensors["captured"].shape[1])
    captured = torch.randn(batch.width, width, generator=torch.Generator().manual_seed(1))
    inputs = batch.network_inputs(captured=batch.padded(captured.bfloat16()))
    values = context.evaluator.run({name: inputs[name] for name in context.evaluator.inputs})
    step = batch.context()
    context.reference.run(batch.reference_inputs() | {"captured": captured.bfloat16()}, step)

    length = batch.lengths[0] + batch.width
    rows = [[77, 1, 1, 1, 1, 1, 1, 1]]
    caches = {name: values[f"output.{name}"] for name in batch.caches}
    behind = Batch([length], rows, [list(range(-1, 7))], caches)
    got = block.evaluator.run(behind.network_inputs(tree_mask=torch.ones(1, 8, 8).bool()))
    given = behind.reference_inputs()
    given["packed_mask"] = torch.full_like(given["packed_mask"], -1)
    want = block.reference.run(given, behind.context())
    assert torch.equal(got["output.token_ids"][0, :, 0], want["token_ids"][:, 0])
    torch.testing.assert_close(got["output.log_probs"][0], want["log_probs"], rtol=0, atol=0.1)


def _wrong_mask(inputs: dict[str, torch.Tensor]) -> None:
    inputs["tree_mask"][0, 4, 0] ^= True


def _wrong_position(inputs: dict[str, torch.Tensor]) -> None:
    inputs["positions"][0, 5] += 1


def _wrong_slot(inputs: dict[str, torch.Tensor]) -> None:
    inputs["committed_lengths"][0] -= 1


@pytest.mark.parametrize("spoil", [_wrong_mask, _wrong_position, _wrong_slot])
def test_a_wrong_mask_position_or_slot_shows(pairs: Pairs, spoil: Any) -> None:
    pair = pairs("bf16-one-kv-head")["target"]
    got, want = whole(pair, "tree", spoil)
    assert relative(got, want).max() > 2e-2


def test_int8_weights_are_the_same_numbers(pairs: Pairs) -> None:
    """For SMs without FP4: twice the value, half the scale, the same products."""
    fp4, int8 = (pairs("tied-w4a16", fp4=fp4)["target"] for fp4 in (True, False))
    results = [whole(pair, "tree")[0] for pair in (fp4, int8)]
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "case",
    [
        *("bf16-window", "tied-w4a16", "untied-w4a4", "awq-w4a4", "demo-bf16", "demo-reduced"),
        *("moe-qwen3-bf16", "moe-qwen3-awq", "moe-glm-w4a4", "moe-glm-awq"),
    ],
)
def test_two_ranks_are_one(pairs: Pairs, case: str) -> None:
    """Both ranks' networks, evaluated together, against one rank's: partial sums are rounded
    to bf16 before they are added, where one rank rounds the sum."""
    run_ranks(pairs(case), pairs.describe(case), 2, tolerance=2e-2)


@pytest.mark.parametrize("case", ["bf16-window", "moe-glm-bf16"])
def test_two_ranks_are_one_in_float32(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rounding does not hide a mistake: the same networks with float32 between ops."""
    monkeypatch.setattr(backend, "DTYPE", "float32")
    wide = Pairs(tmp_path)
    run_ranks(wide(case), wide.describe(case), 2, tolerance=1e-6)


@pytest.mark.parametrize("case", ["svd-qwen3", "svd-glm"])
def test_low_rank_factors_of_several_ranks(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More ranks than KV heads; inputs rounded to bf16, as four bits would hide mistakes."""
    monkeypatch.setattr(backend, "DTYPE", "float32")
    wide = Pairs(tmp_path)
    for ranks in (2, 4):
        run_ranks(wide(case), wide.describe(case), ranks, tolerance=2e-2)


@pytest.mark.parametrize("case", UNEVEN)
def test_what_does_not_divide_evenly(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More ranks than KV heads, widths of odd numbers of blocks; in float32, but for W4A16's
    inputs."""
    monkeypatch.setattr(backend, "DTYPE", "float32")
    wide = Pairs(tmp_path)
    bf16 = case.endswith("bf16")
    run_ranks(wide(case), wide.describe(case), 4, tolerance=1e-6 if bf16 else 2e-2)


def run_ranks(pair_of: dict[str, Pair], description: Any, size: int, *, tolerance: float) -> None:
    shards = [Shard(rank, size) for rank in range(size)]
    ranks = [lower_networks(description, rank=rank, ranks=size) for rank in range(size)]
    for name, pair in pair_of.items():
        batch = pair.batch("tree")
        inputs = {k: v for k, v in batch.network_inputs().items() if k in pair.evaluator.inputs}
        if "captured" in pair.evaluator.inputs:
            width = int(pair.reference.network.tensors["captured"].shape[1])
            generator = torch.Generator().manual_seed(4)
            inputs["captured"] = torch.randn(3, batch.width, width, generator=generator).bfloat16()
        parts = [
            {
                n: _heads(v, shard) if n.endswith((".k", ".v")) else v.clone()
                for n, v in inputs.items()
            }
            for shard in shards
        ]
        evaluated = [evaluators({name: lowered[name]})[name] for lowered in ranks]
        one = pair.evaluator.run(inputs)
        every = evaluate_together(evaluated, parts)
        compare_ranks(pair, batch, one, every, tolerance)


def _heads(cache: torch.Tensor, shard: Shard) -> torch.Tensor:
    own = shard.kv_heads(cache.shape[1], "heads")
    return cache[:, own.start : own.stop].clone()


def compare_ranks(
    pair: Pair,
    batch: Batch,
    one: dict[str, torch.Tensor],
    every: list[dict[str, torch.Tensor]],
    tolerance: float,
) -> None:
    for binding in pair.lowered.outputs:
        whole_result, parts = one[binding.name], [values[binding.name] for values in every]
        if binding.name == "output.logits":
            joined = torch.cat(parts, dim=-1)
        elif binding.alias:
            # KV heads fewer than ranks are several ranks' alike.
            holders = max(1, len(parts) // whole_result.shape[1])
            for rank, part in enumerate(parts):
                assert torch.equal(part, parts[rank // holders * holders]), binding.name
            joined = torch.cat(parts[::holders], dim=1)
        else:
            joined = parts[0]
            assert all(torch.equal(part, joined) for part in parts), binding.name
        if joined.is_floating_point():
            caches = binding.alias is not None
            got, want = (x if caches else ragged(batch, x) for x in (joined, whole_result))
            assert relative(got, want).median() < tolerance, binding.name
        else:
            # Near-ties may come in another order, or fall behind the last place; where a
            # rank's ids are missing, it is half of them.
            ours, theirs = (
                ragged(batch, x).reshape(-1, x[0, 0].numel()) for x in (joined, whole_result)
            )
            found = (ours[:, :, None] == theirs[:, None, :]).any(1).double().mean()
            assert found >= (1.0 if tolerance < 1e-5 else 0.9), (binding.name, found)
