"""A small GPT whose embedding and head share their weight, for `gpt.py` and `lora.py`."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

WIDTH, HEADS, BLOCKS = 32, 4, 4


class Block(nn.Module):
    """A causal self-attention layer, followed by two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_linear = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        wide, narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.linear = nn.Sequential(wide, nn.GELU(), narrow)

    def forward(self, x: Tensor) -> Tensor:
        together = self.query_key_value(self.before_attention(x))
        heads = together.unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = heads.transpose(1, 3).unbind(2)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.linear(self.before_linear(x))


class GPT(nn.Module):
    """Predict the next token after each token of a text.

    Args:
        words: The number of different tokens.
        length: The largest number of tokens in a text.
    """

    def __init__(self, words: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, WIDTH)
        self.positions = nn.Embedding(length, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.normal_(self.positions.weight, std=0.1)
        self.head.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        x = self.blocks(self.tokens(text) + self.positions(places))
        return self.head(self.norm(x))
