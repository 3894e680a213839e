"""Define a transformer whose sizes a published table states, and whose last layer is the loss."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention, silu


@dataclass(frozen=True)
class Sizes:
    """The sizes of a transformer, as `config["model"]` of a record has them.

    Attributes:
        layers: The number of blocks.
        width: The number of channels.
        heads: The number of attention heads.
        tokens: The length of a sample.
        vocabulary: The number of different tokens.
        causal: Whether a token attends only to tokens before it.
        fused: Whether attention is one fused kernel.
        kind: "gpt" or "llama". A "llama" has RMS norms, rotary position embeddings, a gated
            feed-forward part, and no biases.
        hidden: The number of channels within the feed-forward part. If it is 0, the part has four
            times `width` channels.
        dropout: The probability of dropout.
        head: If true, the last layer predicts tokens. If false, it predicts which of two classes a
            sample has.
    """

    layers: int
    width: int
    heads: int
    tokens: int
    vocabulary: int
    causal: bool
    fused: bool
    kind: Literal["gpt", "llama"] = "gpt"
    hidden: int = 0
    dropout: float = 0.0
    head: bool = True


def transformer(sizes: Sizes) -> nn.Sequential:
    """Build a transformer as a sequence of layers: the embedding, each block, and the head."""
    blocks = [Block(sizes) for _ in range(sizes.layers)]
    return nn.Sequential(Embedding(sizes), *blocks, Head(sizes))


def norm(sizes: Sizes) -> nn.Module:
    return nn.RMSNorm(sizes.width) if sizes.kind == "llama" else nn.LayerNorm(sizes.width)


class Embedding(nn.Module):
    """The layer that embeds tokens and, for the kind "gpt", adds embeddings of their positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions: nn.Parameter | None = None
        if sizes.kind == "gpt":
            self.positions = nn.Parameter(torch.empty(sizes.tokens, sizes.width))
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.words(tokens)
        if self.positions is not None:
            x = x + self.positions
        dropped: Tensor = self.dropout(x)
        return dropped


class Block(nn.Module):
    """A block of a transformer: attention, and then a feed-forward part.

    Each of these two parts begins with a norm, and its input is added to its output.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.width
        bias = sizes.kind == "gpt"
        hidden = sizes.hidden or 4 * width
        self.before = norm(sizes)
        self.between = norm(sizes)
        self.projections = nn.Linear(width, 3 * width, bias=bias)
        self.joined = nn.Linear(width, width, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.gate = nn.Linear(width, hidden, bias=False) if sizes.kind == "llama" else None
        self.down = nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.attend(self.before(x))
        x = x + self.dropout(attended)
        y = self.between(x)
        inner = gelu(self.up(y)) if self.gate is None else silu(self.gate(y)) * self.up(y)
        fed: Tensor = x + self.dropout(self.down(inner))
        return fed

    def attend(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        projected = self.projections(x).view(samples, tokens, 3, self.sizes.heads, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind()
        if self.sizes.kind == "llama":
            query = rotated(query)
            key = rotated(key)
        if self.sizes.fused:
            attended = scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=self.sizes.dropout,
                is_causal=self.sizes.causal,
            )
        else:  # the program's kernel of softmax also applies the mask
            scores = torch.softmax(query @ key.transpose(-2, -1), -1)
            attended = self.dropout(scores) @ value
        joined: Tensor = self.joined(attended.transpose(1, 2).reshape(samples, tokens, width))
        return joined


class Head(nn.Module):
    """The last layer of a transformer, which returns the cross-entropy of each sample in float32.

    All targets are class 0. Their values do not matter, because only operations are counted.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = norm(sizes)
        classes = sizes.vocabulary if sizes.head else 2
        self.logits = nn.Linear(sizes.width, classes, bias=not sizes.head)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.logits(self.norm(x)).float()
        targets = torch.zeros(logits.shape[:-1], dtype=torch.long, device=x.device)
        losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(1)


def rotated(x: Tensor) -> Tensor:
    """Apply rotary position embeddings: rotate pairs of channels by an angle for each token."""
    angles = torch.ones(x.shape[-2], x.shape[-1] // 2, device=x.device)
    first, second = x.float().chunk(2, -1)
    turned = [first * angles - second * angles, first * angles + second * angles]
    return torch.cat(turned, -1).to(x.dtype)
