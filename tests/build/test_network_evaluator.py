"""The network evaluator, layer type by layer type, on cases worked out by hand.

It is the judge of the lowering, so it must not be judged by it: the expected numbers below
follow from TensorRT's documentation of each layer.
"""

from collections.abc import Callable
from typing import Any

import pytest
import tensorrt_rtx as trt
import torch

from network_evaluator import NetworkEvaluator, UnknownLayerError, evaluate_together

KEEP: list[Any] = []
BF16 = torch.bfloat16


class Net:
    """A network of a few layers, with the memory of its constants."""

    def __init__(self) -> None:
        logger = trt.Logger(trt.Logger.ERROR)
        builder = trt.Builder(logger)
        KEEP.extend((logger, builder))
        self.network = builder.create_network(0)
        self.constants: dict[str, torch.Tensor] = {}

    def input(self, name: str, dtype: Any, shape: tuple[int, ...]) -> Any:
        return self.network.add_input(name, dtype, shape)

    def constant(self, values: Any, dtype: Any = None, shape: Any = None) -> Any:
        tensor = torch.as_tensor(values)
        known = {torch.float32: trt.float32, BF16: trt.bfloat16, torch.int32: trt.int32}
        known |= {torch.int64: trt.int64, torch.int8: trt.int8, torch.float8_e4m3fn: trt.fp8}
        shape = tuple(tensor.shape) if shape is None else shape
        count = torch.Size(shape).numel()
        weights = trt.Weights(dtype or known[tensor.dtype], tensor.data_ptr(), count)
        layer = self.network.add_constant(shape, weights)
        layer.name = f"constant{len(self.constants)}"
        self.constants[layer.name] = tensor
        return layer.get_output(0)

    def run(self, outputs: Any, **inputs: Any) -> Any:
        """One result, or a list where ``outputs`` is one."""
        several = isinstance(outputs, (list, tuple))
        for index, tensor in enumerate(outputs if several else [outputs]):
            tensor.name = f"out{index}"
            self.network.mark_output(tensor)
        evaluator = NetworkEvaluator(trt, self.network, self.constants)
        values = evaluator.run({k: torch.as_tensor(v) for k, v in inputs.items()})
        results = [values[f"out{i}"] for i in range(len(outputs) if several else 1)]
        return results if several else results[0]


@pytest.fixture
def net() -> Net:
    return Net()


def test_constants_and_their_fp4_nibbles(net: Net) -> None:
    """The low nibble is the even element; the high bit of a nibble its sign."""
    packed = torch.tensor([[0x21, 0xF7, 0x80, 0x53]], dtype=torch.uint8).repeat(1, 2)
    values = net.constant(packed, trt.fp4, (1, 16))
    scale = net.constant(torch.tensor([[2.0]]))
    wide = net.network.add_dequantize(values, scale, trt.float32).get_output(0)
    expected = [1.0, 2.0, 12.0, -12.0, 0.0, -0.0, 3.0, 6.0] * 2
    assert net.run(wide).tolist() == [expected]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("SUM", [5.0, 1.0]),
        ("SUB", [-1.0, -5.0]),
        ("PROD", [6.0, -6.0]),
        ("DIV", [2 / 3, -2 / 3]),
        ("MAX", [3.0, 3.0]),
        ("MIN", [2.0, -2.0]),
    ],
)
def test_elementwise(net: Net, op: str, expected: list[float]) -> None:
    x = net.input("x", trt.float32, (2,))
    three = net.constant(torch.tensor([3.0]))
    kind = getattr(trt.ElementWiseOperation, op)
    result = net.run(net.network.add_elementwise(x, three, kind).get_output(0), x=[2.0, -2.0])
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    ("op", "expected"), [("EQUAL", [0, 1, 0]), ("LESS", [1, 0, 0]), ("GREATER", [0, 0, 1])]
)
def test_comparisons_give_bool(net: Net, op: str, expected: list[int]) -> None:
    x = net.input("x", trt.int32, (3,))
    two = net.constant(torch.tensor([2], dtype=torch.int32))
    kind = getattr(trt.ElementWiseOperation, op)
    result = net.run(
        net.network.add_elementwise(x, two, kind).get_output(0),
        x=torch.tensor([1, 2, 3], dtype=torch.int32),
    )
    assert result.dtype == torch.bool
    assert result.int().tolist() == expected


def test_floor_division(net: Net) -> None:
    x = net.input("x", trt.int32, (4,))
    four = net.constant(torch.tensor([4], dtype=torch.int32))
    layer = net.network.add_elementwise(x, four, trt.ElementWiseOperation.FLOOR_DIV)
    given = torch.tensor([0, 3, 4, 11], dtype=torch.int32)
    assert net.run(layer.get_output(0), x=given).tolist() == [0, 0, 1, 2]


def test_products_of_many_heads_share_an_operand(net: Net) -> None:
    """[1, 1, 2, 2] @ [1, 2, 2, 1]: an axis of one goes with every entry of the other's; axes
    that an unsqueeze adds are counted in its result."""
    op = trt.MatrixOperation
    x, y = net.input("x", trt.float32, (2, 2)), net.input("y", trt.float32, (1, 2, 2, 1))
    axes = net.constant(torch.tensor([0, 1]))
    both = net.network.add_unsqueeze(x, axes).get_output(0)
    layer = net.network.add_matrix_multiply(both, op.NONE, y, op.NONE)
    left = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    right = torch.tensor([[[[1.0], [0.0]], [[0.0], [10.0]]]])
    got = net.run(layer.get_output(0), x=left, y=right)
    assert got.tolist() == [[[[1.0], [3.0]], [[20.0], [40.0]]]]


@pytest.mark.parametrize(("op", "expected"), [("AND", [1, 0, 0]), ("OR", [1, 1, 0])])
def test_logic(net: Net, op: str, expected: list[int]) -> None:
    a, b = (net.input(name, trt.bool, (3,)) for name in "ab")
    kind = getattr(trt.ElementWiseOperation, op)
    result = net.run(
        net.network.add_elementwise(a, b, kind).get_output(0),
        a=[True, True, False],
        b=[True, False, False],
    )
    assert result.int().tolist() == expected


def test_results_are_rounded_once_to_their_type(net: Net) -> None:
    """1 + 2**-9 lies between bf16's 1 and 1 + 2**-7 below the middle, 1 + 3 * 2**-9 above."""
    x = net.input("x", trt.bfloat16, (2,))
    y = net.input("y", trt.bfloat16, (2,))
    total = net.network.add_elementwise(x, y, trt.ElementWiseOperation.SUM).get_output(0)
    result = net.run(
        total,
        x=torch.tensor([1.0, 1.0], dtype=BF16),
        y=torch.tensor([2**-9, 3 * 2**-9], dtype=BF16),
    )
    assert result.dtype == BF16
    assert result.tolist() == [1.0, 1 + 2**-7]


def test_cast_and_unary_and_activation(net: Net) -> None:
    x = net.input("x", trt.bfloat16, (1,))
    wide = net.network.add_cast(x, trt.float32).get_output(0)
    unary, sigmoid = trt.UnaryOperation, trt.ActivationType.SIGMOID
    results = net.run(
        [
            net.network.add_unary(wide, unary.SQRT).get_output(0),
            net.network.add_unary(wide, unary.EXP).get_output(0),
            net.network.add_unary(wide, unary.LOG).get_output(0),
            net.network.add_activation(wide, sigmoid).get_output(0),
            net.network.add_unary(wide, unary.NEG).get_output(0),
            net.network.add_unary(
                net.network.add_unary(wide, unary.NEG).get_output(0), unary.ABS
            ).get_output(0),
        ],
        x=torch.tensor([4.0], dtype=BF16),
    )
    expected = [2.0, 54.598150033144236, 1.3862943611198906, 0.9820137900379085, -4.0, 4.0]
    torch.testing.assert_close(torch.cat(results), torch.tensor(expected), rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    ("op", "expected"), [("SUM", [6.0, 3.0]), ("AVG", [2.0, 1.0]), ("MAX", [3.0, 4.0])]
)
def test_reduce(net: Net, op: str, expected: list[float]) -> None:
    x = net.input("x", trt.float32, (2, 3))
    kind = getattr(trt.ReduceOperation, op)
    given = [[1.0, 2.0, 3.0], [-1.0, 4.0, 0.0]]
    kept = net.network.add_reduce(x, kind, 2, True).get_output(0)
    dropped = net.network.add_reduce(x, kind, 2, False).get_output(0)
    first, second = net.run([kept, dropped], x=given)
    assert first.tolist() == [[value] for value in expected]
    assert second.tolist() == expected


def test_shuffle_transposes_reshapes_transposes(net: Net) -> None:
    x = net.input("x", trt.int32, (2, 3))
    layer = net.network.add_shuffle(x)
    layer.first_transpose = (1, 0)
    layer.reshape_dims = (0, 1, -1)
    layer.second_transpose = (2, 1, 0)
    given = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
    assert net.run(layer.get_output(0), x=given).tolist() == [[[0, 1, 2]], [[3, 4, 5]]]


def test_reduce_along_the_first_axis_and_reshape_by_a_tensor(net: Net) -> None:
    x = net.input("x", trt.float32, (2, 1, 4))
    total = net.network.add_reduce(x, trt.ReduceOperation.SUM, 1, False).get_output(0)
    layer = net.network.add_shuffle(total)
    layer.set_input(1, net.constant(torch.tensor([2, 1, 2], dtype=torch.int32)))
    given = torch.arange(8.0).reshape(2, 1, 4)
    assert net.run(layer.get_output(0), x=given).tolist() == [[[4.0, 6.0]], [[8.0, 10.0]]]


def test_shape_slice_concatenation_unsqueeze_select(net: Net) -> None:
    x = net.input("x", trt.int32, (2, 4))
    part = net.network.add_slice(x, (0, 1), (2, 2), (1, 1)).get_output(0)
    joined = net.network.add_concatenation([part, part])
    joined.axis = 1
    axis = net.constant(torch.tensor([0]))
    deeper = net.network.add_unsqueeze(joined.get_output(0), axis).get_output(0)
    shape = net.network.add_shape(deeper).get_output(0)
    two = net.constant(torch.tensor([[2]], dtype=torch.int32))
    below = net.network.add_elementwise(part, two, trt.ElementWiseOperation.LESS).get_output(0)
    chosen = net.network.add_select(below, part, two).get_output(0)
    given = torch.arange(8, dtype=torch.int32).reshape(2, 4)
    results = net.run([deeper, shape, chosen], x=given)
    assert results[0].tolist() == [[[1, 2, 1, 2], [5, 6, 5, 6]]]
    assert results[1].tolist() == [1, 2, 4]
    assert results[2].tolist() == [[1, 2], [2, 2]]


def test_slice_by_tensors(net: Net) -> None:
    x = net.input("x", trt.int32, (2, 4))
    layer = net.network.add_slice(x, (0, 1), (1, 1), (1, 1))
    layer.set_input(2, net.constant(torch.tensor([2, 3], dtype=torch.int32)))
    given = torch.arange(8, dtype=torch.int32).reshape(2, 4)
    assert net.run(layer.get_output(0), x=given).tolist() == [[1, 2, 3], [5, 6, 7]]


@pytest.mark.parametrize(
    ("mode", "axis", "batch", "indices", "expected"),
    [
        ("DEFAULT", 0, 0, [[1, 0]], [[[3, 4, 5], [0, 1, 2]]]),
        ("DEFAULT", 1, 0, [2, 2], [[2, 2], [5, 5]]),
        ("DEFAULT", 1, 1, [[2, 0], [1, 1]], [[2, 0], [4, 4]]),
        ("ELEMENT", 1, 0, [[2, 0], [1, 1]], [[2, 0], [4, 4]]),
    ],
)
def test_gather(
    net: Net, mode: str, axis: int, batch: int, indices: list[Any], expected: list[Any]
) -> None:
    x = net.input("x", trt.int32, (2, 3))
    at = net.constant(torch.tensor(indices, dtype=torch.int32))
    layer = net.network.add_gather_v2(x, at, getattr(trt.GatherMode, mode))
    layer.axis = axis
    layer.num_elementwise_dims = batch
    given = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    assert net.run(layer.get_output(0), x=given).tolist() == expected


def test_matrix_multiply(net: Net) -> None:
    """[1, 2] x [[3, 4], [5, 6]] transposed; 2**24 + 1 - 2**24 survives, as in float64."""
    x = net.input("x", trt.float32, (1, 1, 3))
    weight = net.constant(torch.tensor([[[3.0, 4.0, 0.0], [2.0**24, 1.0, -(2.0**24)]]]))
    op = trt.MatrixOperation
    layer = net.network.add_matrix_multiply(x, op.NONE, weight, op.TRANSPOSE)
    assert net.run(layer.get_output(0), x=[[[1.0, 1.0, 1.0]]]).tolist() == [[[7.0, 1.0]]]


def test_one_input_times_several_matrices(net: Net) -> None:
    """[1, T, K] x [E, O, K] transposed -> [E, T, O]; a bool counts as 0 or 1."""
    x = net.input("x", trt.bool, (1, 1, 2))
    wide = net.network.add_cast(x, trt.float32).get_output(0)
    weights = net.constant(torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]]))
    op = trt.MatrixOperation
    layer = net.network.add_matrix_multiply(wide, op.NONE, weights, op.TRANSPOSE)
    result = net.run(layer.get_output(0), x=[[[False, True]]])
    assert result.tolist() == [[[2.0]], [[4.0]], [[6.0]]]


def test_a_select_broadcasts(net: Net) -> None:
    condition = net.input("x", trt.bool, (2, 1))
    a, b = net.constant(torch.tensor([[1.0, 2.0], [3.0, 4.0]])), net.constant([[-torch.inf]])
    chosen = net.network.add_select(condition, a, b).get_output(0)
    result = net.run(chosen, x=[[True], [False]])
    assert result.tolist() == [[1.0, 2.0], [-torch.inf, -torch.inf]]


def test_dequantize_by_block_and_by_scalar(net: Net) -> None:
    values = net.constant(torch.arange(32, dtype=torch.int8)[None])
    scale = net.constant(torch.tensor([[1.0, 0.5]]))
    blocks = net.network.add_dequantize(values, scale, trt.float32).get_output(0)
    scales = net.constant(torch.tensor([[1.0, 448.0]]).to(torch.float8_e4m3fn))
    scalar = net.constant(torch.tensor(0.25))
    whole = net.network.add_dequantize(scales, scalar, trt.float32).get_output(0)
    by_block, by_scalar = net.run([blocks, whole])
    assert by_block[0, [0, 1, 15, 16, 31]].tolist() == [0.0, 1.0, 15.0, 8.0, 15.5]
    assert by_scalar.tolist() == [[0.25, 112.0]]


def test_dynamic_quantize_to_nvfp4(net: Net) -> None:
    """amax 12, double scale 0.5: block scale e4m3(12 / 6 / 0.5) = 4, so a step of 2. Then 12
    is 6, 1 is 0.5, 2.5 is 1.25, which ties to 1 (even), 3.5 is 1.75, which ties to 2; a block
    of zeros has scale 0; one of 3000 has its scale saturated at 448 and its values at 6."""
    x = net.input("x", trt.float32, (1, 48))
    layer = net.network.add_dynamic_quantize(x, 1, 16, trt.fp4, trt.fp8)
    layer.set_input(1, net.constant(torch.tensor(0.5)))
    scale = layer.get_output(1)
    as_float = net.network.add_dequantize(
        scale, net.constant(torch.tensor(1.0)), trt.float32
    ).get_output(0)
    one = net.constant(torch.ones(1, 3))
    values = net.network.add_dequantize(layer.get_output(0), one, trt.float32).get_output(0)
    given = torch.zeros(1, 48)
    given[0, :5] = torch.tensor([12.0, 1.0, -2.5, 3.5, 0.4])
    given[0, 32:34] = torch.tensor([3000.0, 112.0])
    codes, scales = net.run([values, as_float], x=given)
    assert scales.tolist() == [[4.0, 0.0, 448.0]]
    assert codes[0, :6].tolist() == [6.0, 0.5, -1.0, 2.0, 0.0, 0.0]
    assert codes[0, 16:32].tolist() == [0.0] * 16
    assert codes[0, 32:34].tolist() == [6.0, 0.5]


@pytest.mark.parametrize(
    ("interleaved", "expected"), [(False, [-3.0, 2.0, 1.0, 4.0]), (True, [-2.0, 1.0, 3.0, 4.0])]
)
def test_rotary_embedding_by_position_ids(
    net: Net, interleaved: bool, expected: list[float]
) -> None:
    """At position 1 the first pair turns by 90 degrees, the second not; position 0 is still."""
    x = net.input("x", trt.float32, (1, 1, 2, 4))
    cos = net.constant(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    sin = net.constant(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    layer = net.network.add_rotary_embedding(x, cos, sin, interleaved, 4)
    layer.set_input(3, net.input("ids", trt.int32, (1, 2)))
    given = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]] * 2]])
    ids = torch.tensor([[1, 0]], dtype=torch.int32)
    result = net.run(layer.get_output(0), x=given, ids=ids)
    assert result[0, 0].tolist() == [expected, [1.0, 2.0, 3.0, 4.0]]


def _cache_update(net: Net, length: int) -> Any:
    cache = net.input("cache", trt.bfloat16, (2, 1, length, 1))
    update = net.input("update", trt.bfloat16, (2, 1, 2, 1))
    at = net.input("at", trt.int32, (2,))
    mode = trt.KVCacheMode.LINEAR
    return net.network.add_kv_cache_update(cache, update, at, mode).get_output(0)


def test_kv_cache_update_in_place(net: Net) -> None:
    cache = torch.zeros(2, 1, 4, 1, dtype=BF16)
    update = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=BF16).reshape(2, 1, 2, 1)
    at = torch.tensor([2, 0], dtype=torch.int32)
    result = net.run(_cache_update(net, 4), cache=cache, update=update, at=at)
    assert result.flatten().tolist() == [0, 0, 1, 2, 3, 4, 0, 0]
    assert result.data_ptr() == cache.data_ptr()


def test_kv_cache_update_outside_is_an_error(net: Net) -> None:
    cache = torch.zeros(2, 1, 4, 1, dtype=BF16)
    update = torch.zeros(2, 1, 2, 1, dtype=BF16)
    at = torch.tensor([3, 0], dtype=torch.int32)
    with pytest.raises(IndexError, match="rows 3 to 5 of 4"):
        net.run(_cache_update(net, 4), cache=cache, update=update, at=at)


def test_attention_with_a_mask_over_grouped_heads(net: Net) -> None:
    """Two query heads share one key head. Head 0 scores 0 and log 3 (weights 1/4 and 3/4),
    head 1 scores twice 0 (1/2 each); the second row sees only the first key."""
    q = net.input("q", trt.float32, (1, 2, 2, 1))
    k, v = (net.input(name, trt.float32, (1, 1, 3, 1)) for name in "kv")
    mask = net.input("mask", trt.bool, (1, 1, 2, 3))
    attention = net.network.add_attention(q, k, v, trt.AttentionNormalizationOp.SOFTMAX, False)
    attention.mask = mask
    result = net.run(
        attention.get_output(0),
        q=torch.tensor([1.0, 1.0, 0.0, 0.0]).reshape(1, 2, 2, 1),
        k=torch.tensor([0.0, 1.0986122886681098, 50.0]).reshape(1, 1, 3, 1),
        v=torch.tensor([4.0, 8.0, 1e6]).reshape(1, 1, 3, 1),
        mask=torch.tensor([[[[True, True, False], [True, False, False]]]]),
    )
    torch.testing.assert_close(result.flatten(), torch.tensor([7.0, 4.0, 6.0, 4.0]))


def test_top_k(net: Net) -> None:
    x = net.input("x", trt.float32, (1, 4))
    layer = net.network.add_topk(x, trt.TopKOperation.MAX, 2, 2)
    values, ids = net.run([layer.get_output(0), layer.get_output(1)], x=[[1.0, 5.0, -2.0, 3.0]])
    assert (values.tolist(), ids.tolist()) == ([[5.0, 3.0]], [[1, 3]])


@pytest.mark.parametrize(
    ("op", "reduce", "expected"),
    [
        ("ALL_REDUCE", "SUM", [4.0, 6.0]),
        ("ALL_REDUCE", "MAX", [3.0, 4.0]),
        ("ALL_REDUCE", "MIN", [1.0, 2.0]),
        ("ALL_GATHER", "NONE", [1.0, 2.0, 3.0, 4.0]),
    ],
)
def test_collectives_of_two_ranks(op: str, reduce: str, expected: list[float]) -> None:
    import numpy as np

    ranks = [Net(), Net()]
    evaluators = []
    for rank in ranks:
        x = rank.input("x", trt.float32, (2,))
        kind, how = getattr(trt.CollectiveOperation, op), getattr(trt.ReduceOperation, reduce)
        layer = rank.network.add_dist_collective(x, kind, how, -1, np.array([0, 1]))
        layer.num_ranks = 2
        layer.metadata = op if reduce == "NONE" else f"{op} {reduce}"
        layer.get_output(0).name = "out"
        rank.network.mark_output(layer.get_output(0))
        evaluators.append(NetworkEvaluator(trt, rank.network, {}))
    given = [{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([3.0, 4.0])}]
    for values in evaluate_together(evaluators, given):
        assert values["out"].tolist() == expected


def _softmax(net: Net) -> Any:
    return net.network.add_softmax(net.input("x", trt.float32, (1, 2))).get_output(0)


def _power(net: Net) -> Any:
    x = net.input("x", trt.float32, (1, 2))
    return net.network.add_elementwise(x, x, trt.ElementWiseOperation.POW).get_output(0)


def _relu(net: Net) -> Any:
    x = net.input("x", trt.float32, (1, 2))
    return net.network.add_activation(x, trt.ActivationType.RELU).get_output(0)


@pytest.mark.parametrize("make", [_softmax, _power, _relu])
def test_what_it_does_not_know_is_an_error(net: Net, make: Callable[[Net], Any]) -> None:
    with pytest.raises(UnknownLayerError, match="no semantics"):
        net.run(make(net), x=[[1.0, 2.0]])
