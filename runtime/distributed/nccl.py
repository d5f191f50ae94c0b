"""TensorRT ranks: one GPU each, joined by NCCL, driven by the same calls as CPU ranks.

Has not run on GPUs. What CI runs is the exchange of the unique id between MPI ranks.
"""

from typing import Any

import torch

from trtree import _core
from trtree.build.engine_dir import EngineDir
from trtree.runtime.distributed.worker import Replica


def load_tensorrt_part(engine: EngineDir, replica: Replica) -> _core.Engine:
    """This rank's TensorRT engines on the GPU that its place on the node gives it."""
    from trtree.runtime.engines.tensorrt_cuda import load_tensorrt_engine

    if torch.cuda.is_available():
        torch.cuda.set_device(replica.rank_on_node() % torch.cuda.device_count())
        communicator = nccl_communicator(replica, torch.cuda.nccl)
    else:
        communicator = None  # load_tensorrt_engine says what is missing
    return load_tensorrt_engine(
        engine, rank=replica.rank, world_size=replica.size, communicator=communicator
    )


def nccl_communicator(replica: Replica, nccl: Any) -> Any:
    """This rank's communicator: NCCL's unique id, made by the leader, reaches all by MPI.

    Args:
        nccl: ``torch.cuda.nccl``, or what has its ``unique_id`` and ``init_rank``.
    """
    unique_id = nccl.unique_id() if replica.rank == 0 else None
    return nccl.init_rank(replica.size, replica.sums.bcast(unique_id, 0), replica.rank)
