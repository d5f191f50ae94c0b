"""What every implementation of tree attention is given.

Rows of several requests stand one after another in one ragged batch. Each request
has a committed prefix in paged KV; the rows of the step are written behind it, row i
of a request into slot ``prefix_length + i``. A row attends the whole prefix and those
rows of its own request whose bits are set in its packed mask.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionSegment:
    """One request's part of a batch.

    pages: int64 [n], the request's page table; slot s lies in page ``pages[s // page_size]``
    at offset ``s % page_size``.
    """

    first_row: int
    num_rows: int
    prefix_length: int
    pages: torch.Tensor

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_rows)


@dataclass(frozen=True)
class PagedKv:
    """One layer's cache: k and v [num_pages, page_size, kv_heads, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    def locate(self, pages: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """slots int64 [n] -> (page, offset), each [n].

        Raises:
            IndexError: a slot lies behind the request's page table.
        """
        if len(slots) and int(slots.max()) >= len(pages) * self.page_size:
            raise IndexError(
                f"KV slot {int(slots.max())} is outside the request's {len(pages)} pages "
                f"of {self.page_size}"
            )
        return pages[slots // self.page_size], slots % self.page_size
