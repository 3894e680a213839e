"""`Draw`, a layer that records the random numbers that it draws.

With these numbers, the same layers without a pipeline can compute results to compare with.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchgpipe import is_recomputing


def dropout(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    numbers = torch.rand(x.shape, generator=generator, device="cpu")
    return numbers.to(x).round()


class Draw(nn.Module):
    """A layer that multiplies its input by random numbers in training, and records these numbers.

    Args:
        draw: A function that takes the input and returns random numbers.
        inplace: Whether to multiply in place.
        use_reentrant: The argument of this name of `torch.utils.checkpoint`, within which the layer
            draws. If it is `None`, the layer draws without `checkpoint`.

    Attributes:
        first: The numbers that were drawn in forwards, in order.
        second: The numbers that were drawn in recomputations, in order.
        recorded: An iterator over recorded numbers, which the layer uses instead of new ones. If it
            is `None`, the layer draws new numbers.
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
                same = torch.equal(drawn[0], drawn[-1])
                assert same, "PyTorch's checkpointing drew something else"
            return x.mul_(drawn[0]) if self.inplace else x * drawn[0]

        if self.use_reentrant is None:
            y = run(x)
        else:
            y = checkpoint(run, x, use_reentrant=self.use_reentrant)
        record = self.second if is_recomputing() else self.first
        record.append(drawn[0].detach())
        return y


def drawing(model: nn.Module) -> list[Draw]:
    return [layer for layer in model.modules() if isinstance(layer, Draw)]


def reuse_draws(model: nn.Module, plain: nn.Module) -> None:
    """Let the plain layers use the random numbers that the pipeline has drawn.

    Args:
        model: The pipeline. Its `Draw` layers have recorded their numbers.
        plain: The same layers without a pipeline. Their `Draw` layers draw no numbers afterwards.
    """
    for layer, twin in zip(drawing(model), drawing(plain), strict=True):
        twin.recorded = iter(layer.first)


def assert_drawn_again(model: nn.Module) -> None:
    """Assert that `Draw` layers drew the same random numbers in recomputations as in forwards.

    Afterwards, this clears the recorded numbers.
    """
    for layer in drawing(model):
        for numbers in layer.second:
            assert any(map(numbers.equal, layer.first)), "a recomputation drew anew"
        layer.first, layer.second = [], []
