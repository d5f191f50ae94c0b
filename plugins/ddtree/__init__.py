"""Draft trees from per-depth marginals, and the lossless walk (DDTree, arXiv 2604.12989)."""

from trtree.plugins.ddtree.tree import (
    Tree,
    build_tree,
    build_tree_from_top_k,
    chain,
    static_tree,
    top_k_log_probs,
)

__all__ = [
    "Tree",
    "build_tree",
    "build_tree_from_top_k",
    "chain",
    "static_tree",
    "top_k_log_probs",
]
