"""How close a lowered op's results must come to the reference's."""

import torch

from trtree.build.network.network import Op


def steps_apart(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """How many values of their type, bf16 or FP8, lie between, element by element."""
    integer, magnitude = (torch.int16, 0x7FFF) if got.itemsize == 2 else (torch.int8, 0x7F)

    def order(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(integer).long()
        return torch.where(bits < 0, -(bits & magnitude), bits)

    return (order(got) - order(want)).abs()


def relative(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Relative L2 distance of each row."""
    difference = (got.double() - want.double()).flatten(1).norm(dim=1)
    return difference / want.double().flatten(1).norm(dim=1).clamp(min=1e-30)


def check_op(op: Op, rounds_twice: bool, got: torch.Tensor, want: torch.Tensor) -> None:
    """``got`` is ``want``, but for roundings in between that the op is known to have."""
    assert got.dtype == want.dtype, op.name
    if not got.is_floating_point() or op.kind in ("embedding", "reshape", "split", "concat", "add"):
        assert torch.equal(got, want), op.name
    elif got.dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6, msg=op.name)
    elif op.kind in ("linear", "experts_up", "experts_down", "experts_linear") and rounds_twice:
        assert relative(got, want).max() < 8e-3, op.name
    else:
        apart = steps_apart(got, want)
        # Where a sum cancels, steps around zero are tiny beside what was summed.
        scale = want.double().flatten(1).abs().amax(dim=1).reshape(-1, *[1] * (want.ndim - 1))
        apart = torch.where((got.double() - want.double()).abs() < 1e-6 * scale, 0, apart)
        assert apart.max() <= 1, (op.name, apart.max())
        assert (apart > 0).double().mean() < 0.02, op.name
