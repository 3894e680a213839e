"""Transformers as tables describe them, with what their training steps compute beside: the loss."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgpipe.plan.count import Counts, count

__all__ = ["Sizes", "counted"]


@dataclass(frozen=True)
class Sizes:
    """What a table says of a transformer."""

    layers: int
    width: int
    heads: int
    tokens: int
    vocabulary: int
    causal: bool
    fused: bool
    """Whether attention is one fused kernel."""
    kind: Literal["gpt", "llama"] = "gpt"
    """`llama`: root mean squares for norms, rotated positions, a gated feed-forward part, and no biases."""
    hidden: int = 0
    """Channels of the feed-forward part; by default four times the width."""
    dropout: float = 0.0
    head: bool = True
    """Whether there are logits of the vocabulary at the end; otherwise two for each token."""


@functools.cache
def counted(sizes: Sizes, dtype: str) -> Counts:
    """Count a transformer whose parameters are of that type; "tf32" is float32, with products in TF32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
    try:
        with torch.device("meta"):
            model, sample = transformer(sizes), torch.empty(1, sizes.tokens, dtype=torch.long)
        return count(model.to(torch.float32 if dtype == "tf32" else getattr(torch, dtype)), sample)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def transformer(sizes: Sizes) -> nn.Sequential:
    """Return the embedding, the blocks, and the head with the loss, each a layer."""
    return nn.Sequential(_Embedding(sizes), *(_Block(sizes) for _ in range(sizes.layers)), _Head(sizes))


def _norm(sizes: Sizes) -> nn.Module:
    return nn.RMSNorm(sizes.width) if sizes.kind == "llama" else nn.LayerNorm(sizes.width)


class _Embedding(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(torch.empty(sizes.tokens, sizes.width)) if sizes.kind == "gpt" else None
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        words = self.words(x)
        found: Tensor = self.dropout(words if self.positions is None else words + self.positions)
        return found


class _Head(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = _norm(sizes)
        self.logits = nn.Linear(sizes.width, sizes.vocabulary if sizes.head else 2, bias=not sizes.head)

    def forward(self, x: Tensor) -> Tensor:
        """Return each sample's cross-entropy, in float32."""
        logits = self.logits(self.norm(x)).float()
        targets = torch.zeros(logits.shape[:-1], dtype=torch.long, device=x.device)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(1)


class _Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, width, bias = sizes, sizes.width, sizes.kind == "gpt"
        hidden = sizes.hidden or 4 * width
        self.before, self.between = _norm(sizes), _norm(sizes)
        self.projections = nn.Linear(width, 3 * width, bias=bias)
        self.joined = nn.Linear(width, width, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.gate = nn.Linear(width, hidden, bias=False) if sizes.kind == "llama" else None
        self.down = nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.before(x)))
        y = self.between(x)
        inner = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        found: Tensor = x + self.dropout(self.down(inner))
        return found

    def attend(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        parts = self.projections(x).view(samples, tokens, 3, self.sizes.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        if self.sizes.kind == "llama":
            query, key = _rotated(query), _rotated(key)
        if self.sizes.fused:
            dropout = self.sizes.dropout
            found = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.sizes.causal)
        else:  # the mask is part of the kernel of softmax
            scores = torch.softmax(query @ key.transpose(-2, -1), -1)
            found = self.dropout(scores) @ value
        joined: Tensor = self.joined(found.transpose(1, 2).reshape(samples, tokens, width))
        return joined


def _rotated(x: Tensor) -> Tensor:
    """Turn pairs of channels by an angle for each token, in float32."""
    angles = torch.ones(x.shape[-2], x.shape[-1] // 2, device=x.device)
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angles - b * angles, a * angles + b * angles], -1).to(x.dtype)
