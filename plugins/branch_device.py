"""The fields of a request in the tables of branch_tables.py, int32 each, as kernels take them."""

import triton.language as tl

from trtree.plugins import branch_tables

FIRST_ROW = tl.constexpr(branch_tables.FIRST_ROW)
NUM_ROWS = tl.constexpr(branch_tables.NUM_ROWS)
SLOT = tl.constexpr(branch_tables.SLOT)
FRESH = tl.constexpr(branch_tables.FRESH)
FIELDS = tl.constexpr(branch_tables.REQUEST_FIELDS)
