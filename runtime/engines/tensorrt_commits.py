"""What a commit moves, outside the engine, where attention is plugins'."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch

from trtree.build.engine_dir import EngineDirError
from trtree.plugins.branch_tables import BranchTables
from trtree.plugins.gated_delta_net.contract import RowUpdates
from trtree.plugins.tree_attention.plan import RowTables

# Moves accepted rows of all layers behind their prefixes: the step's tables, accepted int32
# [requests, n] and num_accepted int32 [requests]; see plugins/tree_attention/launch.py.
PagesCommit: TypeAlias = Callable[[RowTables, torch.Tensor, torch.Tensor], None]


class Commits(Protocol):
    """The kernels of a commit. accepted int32 [requests, n]: a path's rows, of which num_accepted
    int32 [requests] count."""

    def pages(self, caches: Sequence[torch.Tensor]) -> PagesCommit:
        """Of these caches [pages, page_size, ...], of any shapes."""

    def window(
        self,
        window: torch.Tensor,
        x: torch.Tensor,
        tables: BranchTables,
        accepted: torch.Tensor,
        num_accepted: torch.Tensor,
    ) -> None:
        """Of one convolution: [slots, kernel - 1, channels] moves along x [rows, channels]."""

    def state(
        self,
        state: torch.Tensor,
        rows: RowUpdates,
        tables: BranchTables,
        accepted: torch.Tensor,
        num_accepted: torch.Tensor,
    ) -> None:
        """Of one recurrence: float32 [slots, heads, key_dim, value_dim]."""


class DeviceCommits:
    """The Triton-language kernels.

    Raises:
        EngineDirError: there is no Triton.
    """

    def __init__(self) -> None:
        try:
            from trtree.plugins.causal_conv import launch as conv
            from trtree.plugins.gated_delta_net import launch as delta
            from trtree.plugins.tree_attention import launch as attention
        except ImportError as error:
            raise EngineDirError(
                f"attention plugin commits with Triton kernels ({error}); pip install 'trtree[gpu]'"
            ) from None
        self._attention = attention
        self.window = conv.commit
        self.state = delta.commit

    def pages(self, caches: Sequence[torch.Tensor]) -> PagesCommit:
        """One launch for all caches of one shape."""
        alike: dict[torch.Size, list[torch.Tensor]] = {}
        for cache in caches:
            alike.setdefault(cache.shape, []).append(cache)
        stores = [self._attention.KvStores.of_tensors(group) for group in alike.values()]

        def commit(tables: RowTables, accepted: torch.Tensor, num_accepted: torch.Tensor) -> None:
            for group in stores:
                self._attention.commit(group, tables, accepted, num_accepted)

        return commit
