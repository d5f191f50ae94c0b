"""What the plugin layers of latent attention and its indexer compute, see plugin_layers.py."""

from collections.abc import Callable
from typing import Any

import torch

import attention_layers
from attention_layers import Tensors
from trtree.plugins.mla_attention.tiles import LatentTile, latent_tile
from trtree.plugins.tree_attention import reference
from trtree.plugins.tree_attention.contract import Rope


def _append(layer: Any, x: Tensors) -> list[torch.Tensor]:
    config = layer.config
    live, where = attention_layers.own_slots(x, config.page_size)
    begin, end = config.rotary_start, config.rotary_start + config.rotary_dim

    def turned(name: str) -> torch.Tensor:
        whole = x[name][live].double()
        if not config.rotary_dim:
            return whole
        part = whole[..., begin:end]
        by_head = part if part.ndim == 3 else part[:, None]
        rope = Rope(x["cos_sin"], config.interleaved)
        done = reference.rotate(by_head, x["positions"][live], rope).reshape(part.shape)
        return torch.cat([whole[..., :begin], done, whole[..., end:]], dim=-1)

    x["cache_in"][where] = turned("x").to(x["cache_in"].dtype)
    q_out = torch.full(x["q"].shape, torch.nan, dtype=torch.float64)
    if config.turned_heads:
        q_out[live] = turned("q")
    return [q_out, x["cache_in"]]


def _tile(layer: Any) -> LatentTile:
    config = layer.config
    return latent_tile(layer.sm, config.rows, config.heads, selected=config.selected)


def _attention(layer: Any, x: Tensors) -> list[torch.Tensor]:
    """Per work item its part of the keys: slots, or places in a row's list of slots."""
    config, tile = layer.config, _tile(layer)
    partial = (len(x["work"]), config.heads // tile.group, tile.block_m)
    out = torch.full((*partial, config.value_dim), torch.nan, dtype=torch.float64)
    lse = torch.full(partial, torch.nan, dtype=torch.float64)
    for item, fields in enumerate(x["work"].tolist()):
        request, tile_row, tile_rows, _, prefix, begin, end = fields
        if tile_rows == 0:
            continue
        rows, slots = slice(tile_row, tile_row + tile_rows), torch.arange(begin, end)
        if config.selected:
            assert tile_rows == 1
            slots = x["selection"][tile_row, begin:end].long()
            seen = (slots >= 0)[None]
            slots = slots.clamp(min=0)
        else:
            seen = attention_layers.visible(x, rows, slots, prefix)
        pages = x["page_table"][request, slots // config.page_size].long()
        latents = x["cache"][pages, slots % config.page_size].double()
        latents[~seen.any(0)] = 0.0  # not read by any row
        q = x["q"][rows].double().unflatten(1, (-1, tile.group))
        scores = torch.einsum("rbgd,sd->brgs", q, latents) * config.scale
        scores = scores.masked_fill(~seen[:, None, :], -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        lanes = slice(tile_rows * tile.group)
        values = latents[:, : config.value_dim]
        out[item, :, lanes] = torch.einsum("brgs,sd->brgd", weights, values).flatten(1, 2)
        lse[item, :, lanes] = scores.logsumexp(-1).flatten(1, 2) / torch.tensor(2.0).double().log()
    return [out, lse]


def _combine(layer: Any, x: Tensors) -> list[torch.Tensor]:
    tile = _tile(layer)
    return attention_layers.combine(x, layer.config.heads // tile.group, tile.group)


def _scores(layer: Any, x: Tensors) -> list[torch.Tensor]:
    """By slot; hidden keys -inf, and what nobody computes NaN."""
    config = layer.config
    width = x["page_table"].shape[1] * config.page_size
    scores = torch.full((len(x["q"]), width), torch.nan, dtype=torch.float64)
    for request, tile_row, tile_rows, _, prefix, begin, end in x["work"].tolist():
        if tile_rows == 0:
            continue
        rows, slots = slice(tile_row, tile_row + tile_rows), torch.arange(begin, end)
        pages = x["page_table"][request, slots // config.page_size].long()
        keys = x["cache"][pages, slots % config.page_size].double()
        products = torch.einsum("rhd,sd->rhs", x["q"][rows].double(), keys).relu()
        computed = torch.einsum("rh,rhs->rs", x["weights"][rows].double(), products)
        hidden = ~attention_layers.visible(x, rows, slots, prefix)
        scores[rows, begin:end] = computed.masked_fill(hidden, -torch.inf)
    return [scores]


def _top_k(layer: Any, x: Tensors) -> list[torch.Tensor]:
    """The largest seen scores' slots, rising; of equal scores the lower slots."""
    top_k = layer.config.top_k
    selection = torch.full((len(x["lengths"]), top_k), -1)
    nan_counts = torch.zeros(len(x["lengths"]), dtype=torch.int64)
    for row, length in enumerate(x["lengths"].tolist()):
        of_row = x["scores"][row, :length]
        nan_counts[row] = of_row.isnan().sum()
        slots = (of_row > -torch.inf).nonzero().flatten()
        order = torch.sort(of_row[slots], descending=True, stable=True).indices[:top_k]
        selection[row, : len(order)] = slots[order].sort().values
    return [selection, nan_counts]


LAYERS: dict[str, Callable[[Any, Tensors], list[torch.Tensor]]] = {
    "latent_append": _append,
    "latent_tree_attention": _attention,
    "latent_combine": _combine,
    "index_scores": _scores,
    "index_top_k": _top_k,
}
