"""Graph: the vocabulary in which a family describes its network.

Each method of a part is one op (or a short, fixed composition), checks its operands and
states its result's shape and dtype. Module names are relative to the current scope,
so that they read as in the checkpoint.
"""

from trtree.build.network.attention_ops import AttentionOps
from trtree.build.network.branch_ops import BranchOps
from trtree.build.network.expert_ops import ExpertOps
from trtree.build.network.graph_core import Rows
from trtree.build.network.latent_ops import LatentOps
from trtree.build.network.linear_ops import LinearOps
from trtree.build.network.row_ops import RowOps
from trtree.build.network.weight_source import (
    KvScales,
    LowRank,
    Parallel,
    WeightInfo,
    WeightSource,
)

__all__ = [
    "OP_KINDS",
    "Graph",
    "KvScales",
    "LowRank",
    "Parallel",
    "Rows",
    "WeightInfo",
    "WeightSource",
]

# Every op a lowering has to implement.
OP_KINDS = frozenset(
    {
        "add",
        "argmax",
        "causal_conv",
        "concat",
        "embedding",
        "experts_down",
        "experts_linear",
        "experts_scale",
        "experts_up",
        "gated_delta_net",
        "gather_rows",
        "head_linear",
        "index_select",
        "kv_append",
        "latent_append",
        "latent_attention",
        "layer_norm",
        "linear",
        "reshape",
        "rms_norm",
        "rotary_embedding",
        "route",
        "scale",
        "sigmoid_mul",
        "silu_mul",
        "split",
        "top_k_log_probs",
        "tree_attention",
    }
)


class Graph(LinearOps, ExpertOps, AttentionOps, LatentOps, BranchOps, RowOps):
    """Builds one Network; see ``GraphCore`` for its arguments."""
