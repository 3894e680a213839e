"""Build language models of published sizes, to plan their training.

The command `plan` takes the name of such a function, as in `python -m reproduce plan
benchmarks.models:gpt2_xl`. The models' parameters are in bfloat16.
"""

import torch
from torch import Tensor, nn

from benchmarks.league.transformer import Embedding, Head, Sizes, transformer

Example = tuple[nn.Module, Tensor]
"""A model, and a batch of one sample."""


def gpt2() -> Example:
    """Return GPT-2 with 124 million parameters, and a sample."""
    return tied(gpt(layers=12, width=768, heads=12))


def gpt2_long() -> Example:
    """Return a model of the size of GPT-2 medium, and a sample of 16,384 tokens."""
    return tied(gpt(layers=24, width=1024, heads=16, tokens=16_384))


def gpt2_xl() -> Example:
    """Return GPT-2 with 1.5 billion parameters."""
    return tied(gpt(layers=48, width=1600, heads=25))


def llama_7b() -> Example:
    """Return Llama with 7 billion parameters."""
    return example(
        Sizes(
            layers=32,
            width=4096,
            heads=32,
            tokens=2048,
            vocabulary=32_000,
            causal=True,
            fused=True,
            kind="llama",
            hidden=11_008,
        )
    )


def gpt(*, layers: int, width: int, heads: int, tokens: int = 1024) -> Example:
    return example(
        Sizes(
            layers=layers,
            width=width,
            heads=heads,
            tokens=tokens,
            vocabulary=50_257,
            causal=True,
            fused=True,
        )
    )


def example(sizes: Sizes) -> Example:
    """Return a transformer with parameters in bfloat16, and a batch of one sample (of tokens)."""
    sample = torch.zeros(1, sizes.tokens, dtype=torch.long)
    return transformer(sizes).to(torch.bfloat16), sample


def tied(given: Example) -> Example:
    """Let a transformer's last layer share the weight of its embedding, as in GPT-2."""
    model, sample = given
    assert isinstance(model, nn.Sequential)
    embedding, head = model[0], model[-1]
    assert isinstance(embedding, Embedding) and isinstance(head, Head)
    head.logits.weight = embedding.words.weight
    return model, sample
