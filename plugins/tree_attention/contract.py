"""What every implementation of tree attention is given.

Rows of several requests stand one after another in one ragged batch. Each request
has a committed prefix in paged KV; the rows of the step are written behind it, row i
of a request into slot ``prefix_length + i``. A row attends the whole prefix and those
rows of its own request whose bits are set in its packed mask. A row that sees nothing
gives zeros, with a log-sum-exp of -inf.
"""

from dataclasses import dataclass

import torch

E4M3_MAX = 448.0


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
    """One layer's cache: k and v [num_pages, page_size, kv_heads, head_dim].

    An FP8 cache holds e4m3 codes (Micikevicius et al., "FP8 Formats for Deep Learning", arXiv
    2209.05433, section 3) and has scales, float32 [kv_heads]. Written is x / scale, divided in
    float32, rounded to nearest even, at most 448 in size, NaN as NaN; keys after RoPE. Read is
    code * scale. A step's own rows are written first and read back as all others are, so that a
    row sees the same keys while it is verified as after it is committed. ModelOpt calibrates a
    scale as amax / 448, one for all heads of a layer.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.is_fp8 != (self.k_scale is not None and self.v_scale is not None):
            raise ValueError(
                f"a KV cache of {self.k.dtype} {'needs' if self.is_fp8 else 'has no'} "
                "k_scale and v_scale"
            )

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def is_fp8(self) -> bool:
        return self.k.dtype == torch.float8_e4m3fn

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


@dataclass(frozen=True)
class Rope:
    """How append turns q and k. Dimensions past ``rotary_dim`` are left alone.

    cos_sin: float32 [positions, rotary_dim], the cosines of a position's angles, then the
    sines, both times the checkpoint's attention scaling. Pairs are (x[i], x[i + n]) with
    n = rotary_dim / 2, or (x[2i], x[2i + 1]) if interleaved.
    """

    cos_sin: torch.Tensor
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        return self.cos_sin.shape[1]
