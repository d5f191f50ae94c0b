"""The two networks: a Qwen3 target whose linears can be quantized, and a DFlash drafter.

Shapes: B sequences, T positions, H hidden size, h heads, d head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data import VOCAB
from .nvfp4 import fake_quantize_weights, straight_through, tensor_scale


class Precision(Enum):
    """How the target's linears compute."""

    FLOAT = "float"
    W4A16 = "w4a16"
    W4A4 = "w4a4"


@dataclass(frozen=True)
class Shape:
    """Sizes of a stack of Qwen3 layers."""

    layers: int
    hidden: int = 256
    ffn: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = VOCAB
    rope_theta: float = 10000.0
    eps: float = 1e-6


TARGET = Shape(layers=6, ffn=384)
DRAFTER = Shape(layers=2, ffn=384)
BLOCK_SIZE = 8
TAPS = (1, 2, 3, 4)


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight.float() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


Tables = tuple[Tensor, Tensor]


def rope_tables(positions: Tensor, shape: Shape) -> Tables:
    """Cosines and sines [..., T, d] of integer positions [..., T]."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = positions[..., None].float() * (1.0 / shape.rope_theta**exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """Apply rotary embedding to x [B, h, T, d]; tables broadcast to [B, 1, T, d]."""
    cos, sin = tables
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def heads(x: Tensor, count: int) -> Tensor:
    """[B, T, count * d] -> [B, count, T, d]."""
    return x.reshape(*x.shape[:2], count, -1).transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """q [B, h, n, d] over k, v [B, kv heads, T, d]; causal without a mask, which broadcasts to
    [B, h, n, T] and is true where a row sees a key."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(
        q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask, is_causal=mask is None
    )


class Linears(nn.Module):
    """Linears that read one input [.., in]: their activations are quantized once.

    `scale` [] is the input's per-tensor scale, max-calibrated while `observing`. Weights that
    are `frozen` hold quantized values already.
    """

    scale: Tensor

    def __init__(self, inputs: int, outputs: Sequence[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(n, inputs) * inputs**-0.5) for n in outputs]
        )
        self.register_buffer("scale", tensor_scale(torch.tensor(1.0)))
        self.precision = Precision.FLOAT
        self.observing = False
        self.frozen = False

    def forward(self, x: Tensor) -> list[Tensor]:
        weights = list(self.weights)
        if self.observing:
            self.scale.copy_(torch.maximum(self.scale, tensor_scale(x.detach().abs().amax())))
        if self.precision is not Precision.FLOAT and not self.frozen:
            weights = fake_quantize_weights(*weights)
        if self.precision is Precision.W4A4:
            x = straight_through(x.float(), self.scale)
        elif self.precision is Precision.W4A16:
            x = x.bfloat16().float()
        sizes = [w.shape[0] for w in weights]
        return list(torch.split(F.linear(x, torch.cat(weights)), sizes, dim=-1))


class TargetLayer(nn.Module):
    """Qwen3 decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.input_norm = RMSNorm(shape.hidden, shape.eps)
        self.qkv = Linears(shape.hidden, (q, kv, kv))
        self.q_norm = RMSNorm(shape.head_dim, shape.eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.eps)
        self.out = Linears(q, (shape.hidden,))
        self.post_norm = RMSNorm(shape.hidden, shape.eps)
        self.gate_up = Linears(shape.hidden, (shape.ffn, shape.ffn))
        self.down = Linears(shape.ffn, (shape.hidden,))

    def attend(self, x: Tensor, tables: Tables) -> Tensor:
        """Causal attention of x [B, T, H] over itself."""
        q, k, v = self.qkv(self.input_norm(x))
        q = rotate(self.q_norm(heads(q, self.shape.heads)), tables)
        k = rotate(self.k_norm(heads(k, self.shape.kv_heads)), tables)
        v = heads(v, self.shape.kv_heads)
        mixed = attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))[0]
        return out

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        """x [B, T, H] -> [B, T, H]."""
        x = x + self.attend(x, tables)
        gate, up = self.gate_up(self.post_norm(x))
        down: Tensor = self.down(F.silu(gate) * up)[0]
        return x + down


class Target(nn.Module):
    """Qwen3 with tied embeddings."""

    def __init__(self, shape: Shape = TARGET) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Parameter(torch.randn(shape.vocab, shape.hidden) * 0.02)
        self.layers = nn.ModuleList([TargetLayer(shape) for _ in range(shape.layers)])
        self.norm = RMSNorm(shape.hidden, shape.eps)

    def decoder_layers(self) -> list[TargetLayer]:
        """The layers in order."""
        return [m for m in self.layers if isinstance(m, TargetLayer)]

    def linears(self) -> list[Linears]:
        """Every group of quantized linears."""
        return [m for m in self.modules() if isinstance(m, Linears)]

    def set_precision(self, precision: Precision) -> None:
        """Choose how the linears compute."""
        for group in self.linears():
            group.precision = precision

    def forward(self, ids: Tensor, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Token ids [B, T] -> (normed last hidden [B, T, H], tapped residuals [B, T, n*H])."""
        tables = rope_tables(torch.arange(ids.shape[1]), self.shape)
        x = F.embedding(ids, self.embed).float()
        captured = []
        for index, layer in enumerate(self.layers):
            x = layer(x, tables)
            if index in taps:
                captured.append(x)
        return self.norm(x), torch.cat(captured, dim=-1) if captured else x[..., :0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., H] -> float32 [.., V] by the tied head."""
        return F.linear(hidden, self.embed).float()


class DrafterLayer(nn.Module):
    """DFlash layer: the block attends the context and, both ways, itself."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.q_proj = nn.Linear(shape.hidden, q, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(
        self,
        block: Tensor,
        context: Tensor,
        block_tables: Tables,
        all_tables: Tables,
        mask: Tensor,
    ) -> Tensor:
        x = self.input_layernorm(block)
        q = rotate(self.q_norm(heads(self.q_proj(x), self.shape.heads)), block_tables)
        both = torch.cat([context, x], dim=1)
        k = rotate(self.k_norm(heads(self.k_proj(both), self.shape.kv_heads)), all_tables)
        v = heads(self.v_proj(both), self.shape.kv_heads)
        mixed = attention(q, k, v, mask)
        block = block + self.o_proj(mixed.transpose(1, 2).flatten(-2))
        x = self.post_attention_layernorm(block)
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return block + down


class Drafter(nn.Module):
    """DFlash drafter over the tapped residuals of a target; it borrows the target's embedding."""

    def __init__(self, shape: Shape = DRAFTER, taps: Sequence[int] = TAPS) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(taps) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList([DrafterLayer(shape) for _ in range(shape.layers)])
        self.norm = RMSNorm(shape.hidden, shape.eps)

    def draft_layers(self) -> list[DrafterLayer]:
        """The layers in order."""
        return [m for m in self.layers if isinstance(m, DrafterLayer)]

    def forward(self, captured: Tensor, blocks: Tensor, anchors: Tensor) -> Tensor:
        """Draft from A anchors of each sequence at once.

        captured: tapped residuals [B, T, n*H]; blocks: embeddings [B, A, S, H] of
        `[seed, mask, ...]`; anchors: the seed's position [B, A], which sees rows before it.
        Returns the normed hidden states [B, A, S, H].
        """
        batch, count, size, _ = blocks.shape
        context = self.hidden_norm(self.fc(captured))
        length = context.shape[1]
        positions = (anchors[..., None] + torch.arange(size)).flatten(1)
        rows = torch.arange(length).expand(batch, length)
        sees_context = rows[:, None, :] < anchors.repeat_interleave(size, dim=1)[..., None]
        owner = torch.arange(count).repeat_interleave(size)
        sees_block = (owner[:, None] == owner).expand(batch, -1, -1)
        mask = torch.cat([sees_context, sees_block], dim=-1)[:, None]
        cos, sin = rope_tables(positions, self.shape)
        block_tables = (cos[:, None], sin[:, None])
        cos, sin = rope_tables(torch.cat([rows, positions], dim=1), self.shape)
        all_tables = (cos[:, None], sin[:, None])
        x = blocks.flatten(1, 2).float()
        for layer in self.layers:
            x = layer(x, context, block_tables, all_tables, mask)
        states: Tensor = self.norm(x)
        return states.reshape(batch, count, size, -1)
