"""Build AmoebaNet-D (L, D), an image classifier found by evolution, as a flat sequence of L + 6 layers.

`L` normal cells form three equal groups; reduction cells, each of which halves the image and doubles the
channels, come before and between them. The two genotypes below define what a cell computes. Cells
pass a pair of states, because each reads the outputs of the two cells before it.

Sources: Real et al., "Regularized Evolution for Image Classifier Architecture Search" (arXiv:1802.01548), for
the cells; Huang et al., "GPipe" (arXiv:1811.06965), for the sizes (L, D).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduce.models.sizes import check_size

Step = tuple[int, str]  # (index of the state to read, name of the operation to apply to it)


class Genotype(NamedTuple):
    """Describe a cell. States 0 and 1 are its inputs; the sum of pair `p`'s two results is state `p + 2`."""

    pairs: tuple[tuple[Step, Step], ...]
    output: tuple[int, ...]  # the states to concatenate
    stride: int  # of the operations that read states 0 and 1; all others have stride 1


NORMAL = Genotype(
    pairs=(
        ((1, "conv 1x1"), (1, "pool 3x3")),
        ((1, "none"), (0, "conv 1x7-7x1")),
        ((0, "conv 1x1"), (0, "conv 1x7-7x1")),
        ((2, "pool 3x3"), (2, "none")),
        ((1, "avg pool 3x3"), (5, "conv 1x1")),
    ),
    output=(0, 3, 4, 6),
    stride=1,
)

REDUCTION = Genotype(
    pairs=(
        ((0, "max pool 2x2"), (0, "pool 3x3")),
        ((2, "none"), (1, "conv 3x3")),
        ((2, "conv 1x7-7x1"), (2, "pool 3x3")),
        ((3, "none"), (1, "max pool 2x2")),
        ((2, "avg pool 3x3"), (3, "conv 1x1")),
    ),
    output=(4, 5, 6),
    stride=2,
)


def relu_conv_bn(
    inputs: int, outputs: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> nn.Sequential:
    """Build a ReLU, a convolution padded to keep the size at stride 1, and a batch normalization."""
    height, width = kernel
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(inputs, outputs, kernel, stride, padding=(height // 2, width // 2), bias=False),
        nn.BatchNorm2d(outputs),
    )


class FactorizedReduction(nn.Module):
    """Halve the image by two convolutions, one over its even pixels and one over its odd pixels.

    Shapes: (N, inputs, H, W) to (N, outputs, H / 2, W / 2), rounded up.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, image: Tensor) -> Tensor:
        image = self.relu(image)
        shifted = F.pad(
            image, (-1, 1, -1, 1)
        )  # drop the first row and column, append zeros after the last
        output: Tensor = self.bn(torch.cat([self.even(image), self.odd(shifted)], dim=1))
        return output


def narrow_convs(channels: int, *convs: tuple[tuple[int, int], tuple[int, int]]) -> nn.Module:
    """Build a bottleneck: 1 x 1 to a fourth of the channels, `convs` of a kernel and stride each, and 1 x 1 back."""
    narrow = channels // 4
    return nn.Sequential(
        relu_conv_bn(channels, narrow),
        *(relu_conv_bn(narrow, narrow, kernel, stride) for kernel, stride in convs),
        relu_conv_bn(narrow, channels),
    )


def avg_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "none": lambda channels, stride: (
        nn.Identity() if stride == 1 else FactorizedReduction(channels, channels)
    ),
    "conv 1x1": lambda channels, stride: relu_conv_bn(channels, channels, (1, 1), (stride, stride)),
    "conv 3x3": lambda channels, stride: narrow_convs(channels, ((3, 3), (stride, stride))),
    "conv 1x7-7x1": lambda channels, stride: narrow_convs(
        channels, ((1, 7), (1, stride)), ((7, 1), (stride, 1))
    ),
    "avg pool 3x3": avg_pool_3x3,
    # A max pool by its name in the cell search, but the published numbers were measured with an average pool.
    "pool 3x3": avg_pool_3x3,
    "max pool 2x2": lambda channels, stride: nn.MaxPool2d(2, stride),
}


class PairSum(nn.Module):
    """Add the results of two operations, each on the state that its step names."""

    def __init__(self, pair: tuple[Step, Step], channels: int, stride: int) -> None:
        super().__init__()
        (self.left_state, left), (self.right_state, right) = pair
        self.left = OPERATIONS[left](channels, stride if self.left_state < 2 else 1)
        self.right = OPERATIONS[right](channels, stride if self.right_state < 2 else 1)

    def forward(self, states: list[Tensor]) -> Tensor:
        total: Tensor = self.left(states[self.left_state]) + self.right(states[self.right_state])
        return total


class Cell(nn.Module):
    """Map the last two states `(s1, s2)` to `(output, s1)`, the last two states for the next cell.

    A single tensor is used as both states.
    Shapes: `s1` is (N, inputs[0], H, W) and `s2` is (N, inputs[1], H, W), or (N, inputs[1], 2H, 2W) after a
    reduction cell; the output is (N, out_channels, H / stride, W / stride).
    """

    def __init__(
        self, genotype: Genotype, inputs: tuple[int, int], channels: int, *, after_reduction: bool
    ) -> None:
        super().__init__()
        self.output = genotype.output
        self.out_channels = channels * len(genotype.output)
        self.fit1 = relu_conv_bn(inputs[0], channels)
        self.fit2: nn.Module = (
            nn.Identity()
        )  # gives the cell before the last the image size and channels of the last
        if after_reduction:
            self.fit2 = FactorizedReduction(inputs[1], channels)
        elif inputs[1] != channels:
            self.fit2 = relu_conv_bn(inputs[1], channels)
        self.sums = nn.ModuleList(
            PairSum(pair, channels, genotype.stride) for pair in genotype.pairs
        )

    def forward(self, last: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        s1, s2 = last if isinstance(last, tuple) else (last, last)
        states = [self.fit1(s1), self.fit2(s2)]
        for pair_sum in self.sums:
            states.append(pair_sum(states))
        return torch.cat([states[i] for i in self.output], dim=1), s1


class Classifier(nn.Module):
    """Map the newer of the two states, (N, channels, 7, 7), to class scores, (N, num_classes)."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(7)
        self.linear = nn.Linear(channels, num_classes)

    def forward(self, last: tuple[Tensor, Tensor]) -> Tensor:
        scores: Tensor = self.linear(self.pool(last[0]).flatten(1))
        return scores


def cells(num_layers: int) -> Iterator[tuple[str, Genotype]]:
    """Yield every cell's name and genotype, in order."""
    yield "stem_reduction1", REDUCTION
    yield "stem_reduction2", REDUCTION
    for group in (1, 2, 3):
        if group > 1:
            yield f"reduction{group - 1}", REDUCTION
        for i in range(1, num_layers // 3 + 1):
            yield f"group{group}_normal{i}", NORMAL


def amoebanetd(num_layers: int, num_filters: int, num_classes: int = 1000) -> nn.Sequential:
    """Build AmoebaNet-D (`num_layers`, `num_filters`), known as (L, D), for 224 x 224 images.

    Shapes: (N, 3, 224, 224) to (N, num_classes). Between cells runs a pair of tensors, otherwise one tensor.
    L has to be a positive multiple of 3, and D one of 8, or `check_size` raises an error.
    """
    check_size(
        "num_layers", num_layers, multiple_of=3, why="the normal cells stand in three equal groups"
    )
    check_size(
        "num_filters",
        num_filters,
        multiple_of=8,
        why="the narrowest convolutions have D/8 channels",
    )
    check_size("num_classes", num_classes)

    channels = num_filters // 4
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["stem"] = relu_conv_bn(3, channels, (3, 3), (2, 2))

    s1 = s2 = channels
    after_reduction = False
    for name, genotype in cells(num_layers):
        channels *= genotype.stride  # half the height and width, twice the channels
        cell = Cell(genotype, (s1, s2), channels, after_reduction=after_reduction)
        layers[name] = cell
        s1, s2 = cell.out_channels, s1
        after_reduction = genotype is REDUCTION

    layers["classifier"] = Classifier(s1, num_classes)
    return nn.Sequential(layers)
