"""Define small language models that take texts of any length, for tests of `sequential`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import scaled_dot_product_attention

WORDS, WIDTH, HEADS, LONGEST = 11, 8, 2, 32
SHAPES: dict[str, Any] = {"tokens": {1: Dim("length", max=LONGEST)}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        heads = self.heads(self.norm(x)).view(n, length, 3, HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(mixed.transpose(1, 2).reshape(n * length, WIDTH)).view(n, length, WIDTH)
        return x + y.tanh()


class GPT(nn.Module):
    """A language model with learnt position embeddings, so texts have at most `LONGEST` tokens."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(places)
        if mask is not None:
            x = x * mask.unsqueeze(2)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Long(GPT):
    """A language model that applies another function to texts of more than nine tokens."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(tokens, mask)
        return y.tanh() if tokens.shape[1] > 9 else y


def text(n: int, length: int) -> Tensor:
    return torch.randint(WORDS, (n, length))


def generated(model: Any, tokens: Tensor, count: int) -> Tensor:
    """Append `count` tokens to each row of `tokens`, each time the token with the highest score."""
    for _ in range(count):
        likeliest = model(tokens)[:, -1].argmax(1, keepdim=True)
        tokens = torch.cat([tokens, likeliest], 1)
    return tokens
