"""The GPU kernels, in the Triton language: one file per kernel."""
