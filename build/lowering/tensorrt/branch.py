"""State that every row continues from its parent's: masked products in one pass, no scan.

Rows of a request are related by ``tree_mask`` alone (ancestors and oneself); a chain, such as
a prefill chunk, is the triangular case. Per value head, with S0 the committed state, g the log
decays, and i, j rows (a closed form of arXiv 2412.06464, equation 10, along every path):

    G_i = sum of g over i and its ancestors;  D_ij = exp(G_i - G_j) where i sees j, else 0
    A_ij = beta_i D_ij (k_i . k_j), strict ancestors j only
    U = (I + A)^-1 beta (V - exp(G) K S0);  O = exp(G) Q S0 + (D * Q K^T) U

A couples rows of different depths only. T_s, the inverse of I + A cut down to pairs of rows of
one block of s depths, doubles: T_2s = T_s - T_s A_2s T_s, with A_2s what 2s has and s has not.
T_1 = I, so n rows need ceil(log2(n)) doublings. The product of (I + A^(2^k)), which takes as
many, is the same number on paper only: where keys repeat, powers of A grow beyond float32's
digits in a chunk of 64 rows (tests/plugins/branch_state/test_branch_tables.py shows both).

The engine reads S0 and windows, never writes them: it returns per row what a commit needs.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from trtree.build.lowering.tensorrt.context import BATCH, ROWS, Binding, Lowering
from trtree.build.network.network import Network, NetworkError, Op
from trtree.plugins.gated_delta_net.reference import UNIT_EPS

# By graph input: per row, where the inputs of its convolution lie, oldest first: 0 to kernel - 2
# in the committed window, then the step's rows.
PARENTS = "parents"
# Masked before the exponential: a difference of rows that do not see each other may overflow.
_NOT_SEEN = -1e30


@dataclass(frozen=True)
class StepTables:
    """What a step's rows are to each other, float32 [B, 1, 1, W, W] unless it says otherwise.

    sees: bool. path: sees as numbers [B, W, W]. itself: the identity. levels: entry k is one
    where a row sees another within its block of 2^(k+1) depths but not of 2^k.
    """

    sees: Any
    path: Any
    itself: Any
    levels: tuple[Any, ...]


def parents_binding(network: Network) -> Binding:
    """The graph's parents, said as where each row's convolution reads."""
    kernels = {op.attrs["kernel"] for op in network.ops if op.kind == "causal_conv"}
    if len(kernels) > 1:
        raise NetworkError(f"{network.name}: convolutions of {sorted(kernels)} inputs, not of one")
    return Binding("conv_inputs", "int32", (BATCH, ROWS, max(kernels, default=1)))


def doublings(rows: int) -> int:
    """Levels for paths of at most ``rows`` rows."""
    return (rows - 1).bit_length()


def causal_conv(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """x [B, W, C]: a row's kernel inputs are gathered, from the window and the step's rows."""
    emit, kernel = low.emit, op.attrs["kernel"]
    low.inherit(op)
    rows, inputs = x
    channels = int(rows.shape[2])
    layer = emit.network.add_concatenation([low.committed[str(op.state)], rows])
    layer.axis = 1
    both = emit.layer("window_and_rows", layer).get_output(0)
    seen = emit.wide(emit.gather("inputs", both, inputs, 1, batch_dims=1))  # [B, W, kernel, C]
    taps = low.constant(op, "weight")
    taps = emit.shuffle("taps", taps, (1, 1, channels, kernel), after=(0, 1, 3, 2))
    total = emit.reduce(
        "sum", "SUM", emit.binary("weighed", "PROD", seen, taps), keep=False, axis=2
    )
    low.kept[f"{op.state}.x"] = rows
    gate = emit.sigmoid("sigmoid", total)
    return [low.rounded(emit.binary("silu", "PROD", total, gate))]


def gated_delta_net(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """q, k [B, key heads, W, K], v [B, heads, W, V], a and b [B, W, heads] -> like v.

    Value heads stand behind their key head: [B, key heads, heads per key head, W, ...].
    """
    emit = low.emit
    low.inherit(op)
    q, k, v, a, b, _ = x
    key_heads, key_dim, value_dim = int(k.shape[1]), int(k.shape[3]), int(v.shape[3])
    group = int(v.shape[1]) // key_heads
    step = step_tables(low)

    def grouped(name: str, tensor: Any, *sizes: int) -> Any:
        return emit.shuffle(name, tensor, (0, key_heads, group, *sizes))

    unit_k = _unit(low, "k", k)
    keys = emit.shuffle("keys", unit_k, (0, key_heads, 1, -1, key_dim))
    unit_q = emit.binary("q.scaled", "PROD", _unit(low, "q", q), emit.scalar(key_dim**-0.5, 4))
    queries = emit.shuffle("queries", unit_q, (0, key_heads, 1, -1, key_dim))
    values = grouped("values", emit.wide(v), -1, value_dim)
    state = low.committed[str(op.state)]
    state = grouped("state", state, key_dim, value_dim)

    beta = _by_head(low, "beta", emit.sigmoid("beta", emit.wide(b)))
    beta = grouped("beta.grouped", beta, -1, 1)
    decay = _product(low, "decay", step.path, _log_decay(low, op, a))  # G [B, W, heads]
    decay = _by_head(low, "decay", decay)
    column, row = (
        grouped(f"decay.{name}", decay, *sizes) for name, sizes in (("i", (-1, 1)), ("j", (1, -1)))
    )
    shrink = emit.unary("shrink", "EXP", column)

    hidden = emit.network.add_select(
        step.sees, emit.binary("between", "SUB", column, row), emit.scalar(_NOT_SEEN, 5)
    )
    between = emit.unary("D", "EXP", emit.layer("between.seen", hidden).get_output(0))
    alike = _product(low, "k_k", keys, keys, transpose=True)
    coupling = emit.binary("coupling", "PROD", emit.binary("D.k_k", "PROD", between, alike), beta)
    inverse = _inverse(low, coupling, step)

    read = emit.binary("read", "PROD", shrink, _product(low, "k_state", keys, state))
    target = emit.binary("target", "PROD", emit.binary("missing", "SUB", values, read), beta)
    update = _product(low, "update", inverse, target)
    of_rows = emit.binary(
        "D.q_k", "PROD", between, _product(low, "q_k", queries, keys, transpose=True)
    )
    of_state = emit.binary("of_state", "PROD", shrink, _product(low, "q_state", queries, state))
    out = emit.binary("out", "SUM", of_state, _product(low, "of_rows", of_rows, update))

    def by_value_head(name: str, tensor: Any) -> Any:
        return emit.shuffle(name, tensor, (0, key_heads * group, -1, value_dim))

    low.kept[f"{op.state}.k"] = unit_k
    low.kept[f"{op.state}.u"] = by_value_head("update.heads", update)
    low.kept[f"{op.state}.g"] = decay
    return [low.rounded(by_value_head("out.heads", out))]


def _inverse(low: Lowering, coupling: Any, step: StepTables) -> Any:
    """(I + A)^-1, by doubling blocks of depths."""
    emit = low.emit
    inverse = step.itself
    for level, mask in enumerate(step.levels):
        part = emit.binary(f"A{level}", "PROD", coupling, mask)
        if level > 0:
            part = _product(low, f"A{level}.T", part, inverse)
            part = _product(low, f"T.A{level}.T", inverse, part)
        inverse = emit.binary(f"T{level + 1}", "SUB", inverse, part)
    return inverse


def step_tables(low: Lowering) -> StepTables:
    """Made once per step, shared by all layers."""
    if low.step_tables is None:
        with low.emit.op("rows.related"):
            low.step_tables = _make_tables(low)
    return low.step_tables


def _make_tables(low: Lowering) -> StepTables:
    emit = low.emit
    sees = low.values["packed_mask"]
    lengths = emit.shuffle("lengths", low.values["slots"], (-1, 1))
    depth = emit.binary("depth", "SUB", low.values["positions"], lengths)
    blocks = [_see_in_block(low, level, depth, sees) for level in range(doublings(low.max_rows))]
    path = emit.wide(sees)
    blocks.append(path)  # no path is deeper

    def of_heads(name: str, x: Any) -> Any:
        axes = emit.constant("constant/int64/1,2/axes", torch.tensor([1, 2]))
        return emit.layer(name, emit.network.add_unsqueeze(x, axes)).get_output(0)

    levels = [
        of_heads(f"level{k}", emit.binary(f"only{k}", "SUB", larger, smaller))
        for k, (smaller, larger) in enumerate(pairwise(blocks))
    ]
    return StepTables(of_heads("sees", sees), path, of_heads("itself", blocks[0]), tuple(levels))


def _see_in_block(low: Lowering, level: int, depth: Any, sees: Any) -> Any:
    """float32 [B, W, W]: one where a row sees another of its block of 2^level depths."""
    emit = low.emit
    block = depth
    if level:
        size = emit.scalar(1 << level, 2, torch.int32)
        block = emit.binary(f"block{level}", "FLOOR_DIV", depth, size)
    i = emit.shuffle(f"block{level}.i", block, (0, -1, 1))
    j = emit.shuffle(f"block{level}.j", block, (0, 1, -1))
    together = emit.binary(f"together{level}", "EQUAL", i, j)
    return emit.wide(emit.binary(f"sees{level}", "AND", together, sees))


def _log_decay(low: Lowering, op: Op, a: Any) -> Any:
    """g = -exp(A_log) softplus(a + dt_bias), float32 [B, W, heads]; softplus(x) is taken as
    max(x, 0) + log(1 + exp(-|x|)), which cannot overflow."""
    emit, heads = low.emit, int(a.shape[2])
    gates = low.constant(op, "weight")
    a_log, dt_bias = (
        emit.shuffle(f"{name}.row", _part(low, name, gates, index * heads, heads), (1, 1, heads))
        for index, name in enumerate(("A_log", "dt_bias"))
    )
    x = emit.binary("biased", "SUM", emit.wide(a), dt_bias)
    zero, one = emit.scalar(0.0, 3), emit.scalar(1.0, 3)
    small = emit.unary("small", "EXP", emit.unary("minus", "NEG", emit.unary("size", "ABS", x)))
    rest = emit.unary("rest", "LOG", emit.binary("one_more", "SUM", small, one))
    softplus = emit.binary("softplus", "SUM", emit.binary("positive", "MAX", x, zero), rest)
    rate = emit.unary("rate", "NEG", emit.unary("exp_A", "EXP", a_log))
    return emit.binary("g", "PROD", rate, softplus)


def _part(low: Lowering, name: str, vector: Any, start: int, size: int) -> Any:
    layer = low.emit.network.add_slice(vector, (start,), (size,), (1,))
    return low.emit.layer(name, layer).get_output(0)


def _unit(low: Lowering, name: str, x: Any) -> Any:
    """x [B, heads, W, D] at unit length, float32."""
    emit = low.emit
    wide = emit.wide(x)
    square = emit.reduce(
        f"{name}.sum", "SUM", emit.binary(f"{name}.square", "PROD", wide, wide), keep=True
    )
    shifted = emit.binary(f"{name}.eps", "SUM", square, emit.scalar(UNIT_EPS, 4))
    return emit.binary(f"{name}.unit", "DIV", wide, emit.unary(f"{name}.root", "SQRT", shifted))


def _by_head(low: Lowering, name: str, x: Any) -> Any:
    """[B, W, heads] -> [B, heads, W]."""
    return low.emit.shuffle(f"{name}.by_head", x, before=(0, 2, 1))


def _product(low: Lowering, name: str, a: Any, b: Any, *, transpose: bool = False) -> Any:
    """a @ b, or a @ b^T; leading axes broadcast."""
    op = low.emit.trt.MatrixOperation
    second = op.TRANSPOSE if transpose else op.NONE
    layer = low.emit.network.add_matrix_multiply(a, op.NONE, b, second)
    return low.emit.layer(name, layer).get_output(0)
