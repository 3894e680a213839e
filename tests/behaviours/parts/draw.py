"""`Draw`, a layer that records its random numbers, so that plain layers can use the same ones."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchgpipe import is_recomputing


def dropout(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    return torch.rand(x.shape, generator=generator, device="cpu").to(x).round()


class Draw(nn.Module):
    """In training, multiply the input by `draw(input)`, or by the next of the numbers in `recorded`.

    The numbers drawn in first passes and in recomputations are kept in two lists. With `use_reentrant`, draw within
    `torch.utils.checkpoint` of that kind.
    """

    def __init__(
        self,
        draw: Callable[[Tensor], Tensor] = dropout,
        *,
        inplace: bool = False,
        use_reentrant: bool | None = None,
    ) -> None:
        super().__init__()
        self.draw, self.inplace, self.use_reentrant = draw, inplace, use_reentrant
        self.first: list[Tensor] = []
        self.second: list[Tensor] = []
        self.recorded: Iterator[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        drawn = [] if self.recorded is None else [next(self.recorded)]

        def run(x: Tensor) -> Tensor:
            if self.recorded is None:
                drawn.append(self.draw(x))
                assert torch.equal(drawn[0], drawn[-1]), (
                    "PyTorch's checkpointing drew something else"
                )
            return x.mul_(drawn[0]) if self.inplace else x * drawn[0]

        y = (
            run(x)
            if self.use_reentrant is None
            else checkpoint(run, x, use_reentrant=self.use_reentrant)
        )
        (self.second if is_recomputing() else self.first).append(drawn[0].detach())
        return y


def drawing(model: nn.Module) -> list[Draw]:
    return [layer for layer in model.modules() if isinstance(layer, Draw)]


def reuse_draws(model: nn.Module, plain: nn.Module) -> None:
    """Let the plain layers use the numbers that the pipeline drew in first passes."""
    for layer, twin in zip(drawing(model), drawing(plain), strict=True):
        twin.recorded = iter(layer.first)


def check_redraws(model: nn.Module) -> None:
    """Assert that recomputations drew the same numbers as first passes, and clear both lists."""
    for layer in drawing(model):
        assert all(any(map(mask.equal, layer.first)) for mask in layer.second), (
            "a recomputation drew anew"
        )
        layer.first, layer.second = [], []
