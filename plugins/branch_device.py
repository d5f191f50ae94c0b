"""The fields of a request in the tables of branch_tables.py, int32 each."""

import triton.language as tl

FIRST_ROW = tl.constexpr(0)
NUM_ROWS = tl.constexpr(1)  # 0: of nobody
SLOT = tl.constexpr(2)
FRESH = tl.constexpr(3)  # nothing is committed: the state is zero, whatever the slot holds
FIELDS = tl.constexpr(4)
