"""Generated models, balances, batches, chunks and modes: pipelined equals plain for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from torchgpipe.skip import pop, skippable, stash

WIDTH = 4

# Layers from (N, WIDTH) to (N, WIDTH), each with what it computes.
KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "bilinear": lambda: Squares(),
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "identity": nn.Identity,
    "detach": lambda: Detach(),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "batch norm in evaluation": lambda: nn.BatchNorm1d(WIDTH).eval(),
}


class Squares(nn.Module):
    """Use the input twice, and a parameter directly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * x * self.weight + x


class Detach(nn.Module):
    """Let half of the gradient through."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x + 0.5 * x.detach()


@dataclass(frozen=True)
class Model:
    """Kinds of layers, and skips as pairs (layer that stashes, later layer that pops)."""

    kinds: tuple[str, ...]
    skips: tuple[tuple[int, int], ...]

    def build(self) -> nn.Sequential:
        return nn.Sequential(*(self._layer(k) for k in range(len(self.kinds))))

    def _layer(self, k: int) -> nn.Module:
        layer = KINDS[self.kinds[k]]()
        stashes = [f"skip {s}" for s, (source, _) in enumerate(self.skips) if source == k]
        pops = [f"skip {s}" for s, (_, target) in enumerate(self.skips) if target == k]
        return with_skips(layer, stashes, pops) if stashes or pops else layer

    @property
    def fans_out(self) -> bool:
        """Whether one tensor is used three times: its gradients may be added in another order."""
        sources = [source for source, _ in self.skips]
        return len(set(sources)) < len(sources) or "bilinear" in self.kinds or "detach" in self.kinds


def with_skips(layer: nn.Module, stashes: list[str], pops: list[str]) -> nn.Module:
    @skippable(stash=stashes, pop=pops)
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Any:
            for scale, name in enumerate(stashes, 1):
                yield stash(name, x * scale)
            y = self.layer(x)
            for name in pops:
                skip = yield pop(name)
                y = y + skip.sin()
            return y

    return Skipping()


@st.composite
def models(draw: Callable[..., Any]) -> Model:
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=8))
    pairs = [(a, b) for b in range(len(kinds)) for a in range(b)]
    skips = draw(st.lists(st.sampled_from(pairs), max_size=4)) if pairs else []
    return Model(tuple(kinds), tuple(skips))


def balances(layers: int) -> st.SearchStrategy[list[int]]:
    cuts = st.sets(st.integers(1, layers - 1), max_size=3) if layers > 1 else st.just(set())
    return cuts.map(lambda cuts: [b - a for a, b in pairwise([0, *sorted(cuts), layers])])


# Where gradients are added in another order. float64 has 53 bits, and no model multiplies by more than some thousand.
REORDERED = {"rtol": 1e-9, "atol": 1e-9}


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(data=st.data(), model=models(), seed=st.integers(0, 99))
def test_generated(equals_plain: Callable[..., Any], data: st.DataObject, model: Model, seed: int) -> None:
    balance = data.draw(balances(len(model.kinds)), label="balance")
    options = {
        name: data.draw(st.sampled_from(choices), label=name)
        for name, choices in {
            "engine": ["graph", "inline", "workers"],
            "checkpoint": ["always", "except_last", "never"],
            "chunks": range(1, 10),
            "portals": [True, False],
            "dependency": [True, False],
        }.items()
    }
    batch = data.draw(st.integers(1, 9), label="batch")
    grad = data.draw(st.booleans(), label="input takes a gradient")
    torch.manual_seed(seed)
    x = torch.randn(batch, WIDTH, dtype=torch.float64).requires_grad_(grad)
    trainable = grad or any(p.requires_grad for p in model.build().parameters())
    equals_plain(
        lambda: model.build().double(),
        x,
        balance,
        tolerance=REORDERED if model.fans_out else None,
        **({} if trainable else {"backward": None}),
        **options,
    )
