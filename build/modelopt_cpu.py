"""ModelOpt's calibrations that look at rounded outputs (AWQ, SVDQuant), on a CPU.

Its kernel that rounds to NVFP4 and back needs CUDA; but a quantizer may name another backend,
and this one rounds by the format's definition. Search, smoothing, factors and export stay
ModelOpt's own.
"""

import copy
from typing import Any

import torch

from trtree.plugins.nvfp4_linear import format as nvfp4

_NAME = "trtree_cpu"


def on_cpu(
    config: dict[str, Any], *, rank: int | None = None, inputs: bool = True
) -> dict[str, Any]:
    """One of ModelOpt's NVFP4 configurations. rank: of SVDQuant's factors, if not its default.
    inputs: whether those are NVFP4 as well."""
    from modelopt.torch.quantization.nn.modules import tensor_quantizer

    if not tensor_quantizer.is_registered_quant_backend(_NAME):
        tensor_quantizer.register_quant_backend(_NAME, rounded)
    config = copy.deepcopy(config)
    for entry in config["quant_cfg"]:
        if isinstance(entry.get("cfg"), dict) and (
            inputs or "input" not in entry["quantizer_name"]
        ):
            entry["cfg"]["backend"] = _NAME
    if rank is not None:
        config["algorithm"] |= {"lowrank": rank}
    return config


def rounded(x: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """x rounded to NVFP4 and back, by the quantizer's largest magnitude."""
    amax = x.abs().amax() if quantizer.amax is None else quantizer.amax.amax()
    if amax == 0:
        return torch.zeros_like(x)
    scale = amax.float() / (nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)
    rows = nvfp4.quantize_rows(x.reshape(-1, x.shape[-1]).float(), scale)
    step = (rows.block_scale * scale).repeat_interleave(nvfp4.BLOCK, dim=-1)
    return (rows.values * step).reshape(x.shape).to(x.dtype)
