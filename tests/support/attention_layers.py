"""What the plugin layers of attention over paged KV compute, see plugin_layers.py."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trtree.plugins.tree_attention import reference
from trtree.plugins.tree_attention.contract import E4M3_MAX, Rope

Tensors = Mapping[str, torch.Tensor]


def own_slots(x: Tensors, page_size: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Which rows are somebody's, and where those are written: (page, offset)."""
    live = x["requests"] >= 0
    slots = x["slots"][live].long()
    pages = x["page_table"][x["requests"][live].long(), slots // page_size].long()
    return live, (pages, slots % page_size)


def visible(x: Tensors, rows: slice, slots: torch.Tensor, prefix: int) -> torch.Tensor:
    """bool [rows, slots]: the committed prefix, and behind it what the packed mask shows."""
    tree = (slots - prefix).clamp(min=0)
    words = x["packed_mask"][rows][:, tree // 32].long()
    return (slots < prefix) | ((words >> (tree % 32)) & 1 == 1)


def _append(layer: Any, x: Tensors) -> list[torch.Tensor]:
    config = layer.config
    live, where = own_slots(x, config.page_size)

    def turned(name: str) -> torch.Tensor:
        if not config.rotary_dim:
            return x[name][live]
        rope = Rope(x["cos_sin"], config.interleaved)
        return reference.rotate(x[name][live], x["positions"][live], rope)

    for part, new in (("k", turned("k")), ("v", x["v"][live])):
        cache = x[f"{part}_cache_in"]
        if cache.dtype == torch.float8_e4m3fn:
            new = (new.float() / x[f"{part}_scale"][:, None]).clamp(-E4M3_MAX, E4M3_MAX)
        cache[where] = new.to(cache.dtype)
    q_out = torch.full_like(x["q"], torch.nan)
    if config.rotary_dim and config.group:
        q_out[live] = turned("q")
    return [q_out, x["k_cache_in"], x["v_cache_in"]]


def _attention(layer: Any, x: Tensors) -> list[torch.Tensor]:
    """Per work item its part of the keys: a normalized result and a log-sum-exp, base 2."""
    from trtree.plugins.tree_attention.tiles import attention_tile

    config = layer.config
    tile = attention_tile(layer.sm, config.head_dim, config.rows, config.group)
    partial = (len(x["work"]), config.kv_heads, tile.block_m)
    out = torch.full((*partial, config.head_dim), torch.nan, dtype=torch.float64)
    lse = torch.full(partial, torch.nan, dtype=torch.float64)
    for item, fields in enumerate(x["work"].tolist()):
        request, tile_row, tile_rows, segment_row, prefix, begin, end = fields
        if tile_rows == 0:
            continue
        rows, slots = slice(tile_row, tile_row + tile_rows), torch.arange(begin, end)
        pages = x["page_table"][request, slots // config.page_size].long()
        k, v = (
            x[name][pages, slots % config.page_size].double() for name in ("k_cache", "v_cache")
        )
        if config.kv_dtype == torch.float8_e4m3fn:
            k, v = k * x["k_scale"].double()[:, None], v * x["v_scale"].double()[:, None]
        seen = visible(x, rows, slots, prefix)
        if config.window:
            tree = (slots - prefix).clamp(min=0)
            own = x["positions"][segment_row + tree].long()
            key_positions = torch.where(slots < prefix, slots, own)
            edge = x["positions"][rows].long()[:, None] - config.window
            seen &= key_positions[None, :] > edge
        q = x["q"][rows].double().unflatten(1, (config.kv_heads, config.group))
        scores = torch.einsum("rhgd,shd->hrgs", q, k) * config.scale
        scores = scores.masked_fill(~seen[:, None, :], -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        lanes = slice(tile_rows * config.group)
        out[item, :, lanes] = torch.einsum("hrgs,shd->hrgd", weights, v).flatten(1, 2)
        lse[item, :, lanes] = scores.logsumexp(-1).flatten(1, 2) / torch.tensor(2.0).double().log()
    return [out, lse]


def _combine(layer: Any, x: Tensors) -> list[torch.Tensor]:
    return combine(x, layer.config.kv_heads, layer.config.group)


def combine(x: Tensors, blocks: int, group: int) -> list[torch.Tensor]:
    """The results of each row's work items, weighed by their log-sum-exps."""
    first, count, row = x["row_splits"].long().unbind(1)
    splits = torch.arange(max(1, int(count.max())))
    given = splits < count[:, None]  # [rows, splits]
    items = torch.where(given, first[:, None] + splits, 0)[:, :, None, None]
    lanes = (row[:, None] * group + torch.arange(group))[:, None, None, :]
    heads = torch.arange(blocks)[:, None]
    part_lse = x["partial_lse"][items, heads, lanes].double()  # [rows, splits, blocks, group]
    part_lse = part_lse.masked_fill(~given[:, :, None, None], -torch.inf)
    top = part_lse.amax(1, keepdim=True)
    weights = torch.exp2(part_lse - top.clamp(min=-1e30))
    part = x["partial_out"][items, heads, lanes].double()
    part = torch.where(weights[..., None] > 0, part, 0.0)
    total = weights.sum(1)
    out = (part * weights[..., None]).sum(1) / total[..., None].clamp(min=1.0)
    lse = (top[:, 0] + total.log2()) * torch.tensor(2.0).double().log()
    return [out.flatten(1, 2), lse.flatten(1, 2)]


LAYERS: dict[str, Callable[[Any, Tensors], list[torch.Tensor]]] = {
    "tree_kv_append": _append,
    "tree_attention": _attention,
    "tree_attention_combine": _combine,
}
