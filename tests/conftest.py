"""Before anything imports Triton: its kernels are interpreted on the CPU in tests."""

import os

os.environ["TRITON_INTERPRET"] = "1"
