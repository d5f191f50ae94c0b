"""Mixtures of experts: routing, and experts over rows; see README.md."""
