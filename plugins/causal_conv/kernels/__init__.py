"""The causal convolution in the Triton language, over ragged rows."""
