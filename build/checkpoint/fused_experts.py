"""Expert weights stored as one tensor per layer, seen as one linear per expert.

``experts.gate_up_proj [experts, 2 * ffn, hidden]`` and ``experts.down_proj [experts,
hidden, ffn]``, plain or NVFP4 with ModelOpt's scales beside them: an expert's part is a
run of bytes, so renaming slices of the headers is all it takes.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from trtree.build.checkpoint.errors import CheckpointError
from trtree.build.checkpoint.shard import TensorInfo

_FUSED = re.compile(
    r"(?P<experts>.+\.experts)\.(?P<leaf>gate_up_proj|gate_proj|up_proj|down_proj)"
    r"(?:\.weight|_(?P<scale>weight_scale|weight_scale_2|input_scale))?"
)


def split(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Replace fused expert tensors by ``experts.{i}.{gate,up,down}_proj.weight`` and scales.

    Raises:
        CheckpointError: a layout other than [experts, out_features, in_features], or
            scales that do not fit.
    """
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        match = _FUSED.fullmatch(name)
        main = match and _main(tensors, match["experts"], match["leaf"])
        if not match or main is None:
            found[name] = info
            continue
        parts = ("gate_proj", "up_proj") if match["leaf"] == "gate_up_proj" else (match["leaf"],)
        if match["scale"] is None:
            _check_layout(name, info, match["leaf"], config)
        for module, part in _slices(name, info, main.shape[0], parts):
            leaf = match["scale"] or "weight"
            found[f"{match['experts']}.{module}.{leaf}"] = part
    return found


def _main(tensors: Mapping[str, TensorInfo], experts: str, leaf: str) -> TensorInfo | None:
    """The tensor that the scales beside it belong to, if it is fused."""
    stem = f"{experts}.{leaf}"
    info = tensors.get(stem) or tensors.get(f"{stem}.weight")
    return info if info is not None and len(info.shape) == 3 else None


def _slices(
    name: str, info: TensorInfo, experts: int, parts: tuple[str, ...]
) -> list[tuple[str, TensorInfo]]:
    """``(i.part, tensor)`` for every expert; one number may stand for all of them."""
    shape, size = info.shape, info.dtype.itemsize
    # Bytes from one expert to the next, and from one part of it to the next.
    inner: tuple[int, ...] = ()
    per_expert, per_part = 0, 0
    if len(shape) == 3 and shape[0] == experts and shape[1] % len(parts) == 0:
        inner = (shape[1] // len(parts), shape[2])
        per_part = size * inner[0] * inner[1]
        per_expert = per_part * len(parts)
    elif info.nbytes == size * experts:
        per_expert = size
    elif info.nbytes != size:
        raise CheckpointError(
            f"{info.file}: tensor {name} has shape {list(shape)}, expected one matrix or number "
            f"for each of {experts} experts, or one number for all"
        )
    return [
        (
            f"{i}.{part}",
            replace(info, shape=inner, offset=info.offset + i * per_expert + j * per_part),
        )
        for i in range(experts)
        for j, part in enumerate(parts)
    ]


def _check_layout(name: str, info: TensorInfo, leaf: str, config: Mapping[str, Any]) -> None:
    """[experts, out_features, in_features], as far as config.json tells the sizes."""
    text = config.get("text_config", config)
    hidden, ffn = text.get("hidden_size"), text.get("moe_intermediate_size")
    if type(hidden) is not int or type(ffn) is not int:
        return
    packing = 2 if info.dtype == torch.uint8 else 1
    rows = {"gate_up_proj": 2 * ffn, "down_proj": hidden}.get(leaf, ffn)
    columns = ffn if leaf == "down_proj" else hidden
    if info.shape[1:] == (rows, columns // packing):
        return
    hint = (
        "; [experts, in_features, out_features] is not supported: export again with the "
        "current transformers"
        if info.shape[1:] == (columns // packing, rows)
        or info.shape[1:] == (columns, rows // packing)
        else ""
    )
    raise CheckpointError(
        f"{info.file}: tensor {name} has shape {list(info.shape)}, config.json implies "
        f"[experts, {rows}, {columns // packing}]{hint}"
    )
