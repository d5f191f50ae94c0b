"""The latent reference against torch's attention with expanded heads; commit; operands."""

import pytest
import torch

from trtree.plugins import latent_cache
from trtree.plugins.mla_attention.cases import LatentCase, make_inputs
from trtree.plugins.mla_attention.reference import (
    head_linear,
    latent_attention,
    latent_attention_with_lse,
)
from trtree.plugins.sparse_indexer.reference import index_select


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_absorbed_form_is_the_expanded_one(page_size: int, sparse: bool) -> None:
    """Row by row on the keys it attends: keys and values from kv_b_proj, as torch has them."""
    case = LatentCase(page_size=page_size, dtype=torch.float64)
    x = make_inputs(case)
    key_dim, value_dim, lora = 24, 20, case.value_dim
    weight = torch.randn(case.heads * (key_dim + value_dim), lora, dtype=torch.float64)
    of_head = weight.reshape(case.heads, key_dim + value_dim, lora)
    q_nope = torch.randn(len(x.q), case.heads, key_dim, dtype=torch.float64)
    q_rope = x.q[..., lora:]

    latent_cache.append(x.cache, x.latents, x.slots, x.segments)
    latent_cache.append(x.index_cache, x.index_keys, x.slots, x.segments)
    selection = index_select(
        x.index_cache, x.index_q, x.index_weights, x.packed_mask, x.segments, top_k=case.top_k
    )
    sizes = {"key_dim": key_dim, "value_dim": value_dim}
    absorbed = torch.cat([head_linear(q_nope, weight, "key", **sizes), q_rope], dim=-1)
    attended = latent_attention(
        x.cache,
        absorbed,
        x.packed_mask,
        x.segments,
        selection if sparse else None,
        value_dim=lora,
        scale=0.2,
    )
    got = head_linear(attended, weight, "value", **sizes)

    for segment in x.segments:
        latents = x.cache.read(segment)
        seen = latent_cache.visible(x.packed_mask, segment)
        for row in range(segment.num_rows):
            at = segment.first_row + row
            slots = seen[row].nonzero().flatten()
            if sparse:
                slots = selection[at][selection[at] >= 0].long()
            up = torch.einsum("hol,sl->hso", of_head, latents[slots, :lora])
            rope = latents[slots, lora:].expand(case.heads, -1, -1)
            k = torch.cat([up[..., :key_dim], rope], dim=-1)
            q = torch.cat([q_nope[at], q_rope[at]], dim=-1)[:, None]
            expected = torch.nn.functional.scaled_dot_product_attention(
                q, k, up[..., key_dim:], scale=0.2
            )
            assert torch.allclose(got[at], expected[:, 0], atol=1e-12)


def test_a_row_that_attends_nothing_gives_zero() -> None:
    x = make_inputs(LatentCase(rows=3, requests=1, context=2))
    nothing = torch.full((3, 4), -1, dtype=torch.int32)
    out, lse = latent_attention_with_lse(
        x.cache, x.q, x.packed_mask, x.segments, nothing, value_dim=32, scale=1.0
    )
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("page_size", [1, 16])
def test_commit_moves_the_accepted_rows(page_size: int) -> None:
    x = make_inputs(LatentCase(page_size=page_size))
    latent_cache.append(x.cache, x.latents, x.slots, x.segments)
    segment = x.segments[0]
    before = x.cache.read(segment)
    rows = torch.tensor([0, 1, 4, 9, 16])
    latent_cache.commit(x.cache, segment, rows)
    after = x.cache.read(segment)
    prefix = segment.prefix_length
    assert torch.equal(after[:prefix], before[:prefix])
    assert torch.equal(after[prefix : prefix + 5], before[prefix + rows])


def test_operands_are_checked() -> None:
    x = make_inputs(LatentCase())
    call = (x.cache, x.q, x.packed_mask, x.segments)
    with pytest.raises(ValueError, match=r"latents of 48, values of 49"):
        latent_attention(*call, None, value_dim=49, scale=1.0)
    with pytest.raises(ValueError, match=r"a selection \[2, 3\] for"):
        latent_attention(*call, torch.zeros(2, 3, dtype=torch.int32), value_dim=32, scale=1.0)
    beyond = torch.full((len(x.q), 1), 1000, dtype=torch.int32)
    with pytest.raises(IndexError, match="slot 1000"):
        latent_attention(*call, beyond, value_dim=32, scale=1.0)
    with pytest.raises(IndexError, match="outside the request's"):
        latent_cache.append(x.cache, x.latents, x.slots + 100, x.segments)
