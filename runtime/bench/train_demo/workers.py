"""Training in several processes of one thread each, which average their gradients every step.

On cores that others use too they get further than threads, which wait for each other in every
product.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn


def run_workers(work: Callable[..., None], workers: int, *arguments: Any) -> None:
    """Call ``work(rank, *arguments)`` in that many processes; one runs here."""
    if workers == 1:
        work(0, *arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        spawn(_one, (work, workers, str(meeting), arguments), nprocs=workers)  # type: ignore[no-untyped-call]


def _one(
    rank: int,
    work: Callable[..., None],
    workers: int,
    meeting: str,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=workers)
    try:
        work(rank, *arguments)
    finally:
        dist.destroy_process_group()


def average_gradients(module: nn.Module) -> None:
    """Replace every gradient by its mean over the workers."""
    if dist.is_initialized():
        found = [p.grad for p in module.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in found])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, part in zip(
            found, torch.split(flat, [g.numel() for g in found]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))
