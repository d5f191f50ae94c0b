"""The gated delta rule in the Triton language, over ragged rows in one masked pass."""
