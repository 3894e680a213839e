"""Build AmoebaNet-D (L, D) as a flat sequence of L + 6 layers.

AmoebaNet-D is an image classifier whose architecture was found by evolution. It has L normal cells,
in three equal groups, and D filters, which set the number of channels. Reduction cells come before
the groups and between them. A reduction cell halves the image and doubles the channels. The
genotypes `NORMAL` and `REDUCTION` define what a cell computes. Cells pass pairs of tensors, because
each cell reads the outputs of the two cells before it.

Sources: Real et al., "Regularized Evolution for Image Classifier Architecture Search"
(arXiv:1802.01548), for the cells; Huang et al., "GPipe" (arXiv:1811.06965), for the sizes (L, D).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import (
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Identity,
    Linear,
    MaxPool2d,
    Module,
    ModuleList,
    ReLU,
    Sequential,
)
from torch.nn.functional import pad

from reproduce.models.sizes import check_size

Step = tuple[int, str]  # (index of the state to read, name of the operation to apply to it)
Pair = tuple[Step, Step]
Size = tuple[int, int]  # height and width


class Genotype(NamedTuple):
    """The architecture of a cell, which computes a list of tensors called states.

    States 0 and 1 are the inputs of the cell.

    Attributes:
        pairs: Pair number `p` has two operations on earlier states. State `p + 2` is the sum of
            their results.
        output: The numbers of the states that are concatenated to the output of the cell.
        stride: The stride of operations on states 0 and 1. Other operations have stride 1.
    """

    pairs: tuple[Pair, ...]
    output: tuple[int, ...]
    stride: int


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
    inputs: int, outputs: int, kernel: Size = (1, 1), stride: Size = (1, 1)
) -> Sequential:
    """Build a ReLU, a convolution and a batch normalization.

    The convolution is padded so that it keeps the image size at stride 1.
    """
    height, width = kernel
    padding = (height // 2, width // 2)
    conv = Conv2d(inputs, outputs, kernel, stride, padding=padding, bias=False)
    return Sequential(ReLU(), conv, BatchNorm2d(outputs))


class FactorizedReduction(Module):
    """A layer that halves the image by two convolutions, one on even pixels and one on odd pixels.

    Shapes: (N, inputs, H, W) to (N, outputs, H / 2, W / 2), rounded up.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.relu = ReLU()
        self.even = Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.bn = BatchNorm2d(outputs)

    def forward(self, image: Tensor) -> Tensor:
        image = self.relu(image)
        # Drop the first row and column, and append zeros after the last row and column.
        shifted = pad(image, (-1, 1, -1, 1))
        both = [self.even(image), self.odd(shifted)]
        output: Tensor = self.bn(torch.cat(both, dim=1))
        return output


def bottleneck(channels: int, *convs: tuple[Size, Size]) -> Module:
    """Build a sequence of convolutions that work on a fourth of the channels.

    1. A 1 x 1 convolution reduces the channels to a fourth.
    2. Then come the convolutions `convs`, each given as a pair (kernel, stride).
    3. A 1 x 1 convolution restores the number of channels.
    """
    narrow = channels // 4
    layers = [relu_conv_bn(channels, narrow)]
    for kernel, stride in convs:
        conv = relu_conv_bn(narrow, narrow, kernel, stride)
        layers.append(conv)
    layers.append(relu_conv_bn(narrow, channels))
    return Sequential(*layers)


def nothing(channels: int, stride: int) -> Module:
    if stride == 1:
        return Identity()
    return FactorizedReduction(channels, channels)


def conv_1x1(channels: int, stride: int) -> Module:
    return relu_conv_bn(channels, channels, (1, 1), (stride, stride))


def conv_3x3(channels: int, stride: int) -> Module:
    conv = ((3, 3), (stride, stride))
    return bottleneck(channels, conv)


def conv_1x7_7x1(channels: int, stride: int) -> Module:
    wide = ((1, 7), (1, stride))
    high = ((7, 1), (stride, 1))
    return bottleneck(channels, wide, high)


def avg_pool_3x3(channels: int, stride: int) -> Module:
    return AvgPool2d(3, stride, padding=1, count_include_pad=False)


def max_pool_2x2(channels: int, stride: int) -> Module:
    return MaxPool2d(2, stride)


OPERATIONS: dict[str, Callable[[int, int], Module]] = {
    "none": nothing,
    "conv 1x1": conv_1x1,
    "conv 3x3": conv_3x3,
    "conv 1x7-7x1": conv_1x7_7x1,
    "avg pool 3x3": avg_pool_3x3,
    # Where cells have "pool 3x3", the paper that describes the cells says max pool. But the
    # published speeds and sizes were measured with an average pool.
    "pool 3x3": avg_pool_3x3,
    "max pool 2x2": max_pool_2x2,
}


class PairSum(Module):
    """A layer that applies two operations to two of its input tensors, and adds the results."""

    def __init__(self, pair: Pair, channels: int, stride: int) -> None:
        super().__init__()
        (self.left_state, left), (self.right_state, right) = pair
        left_stride = stride if self.left_state < 2 else 1
        right_stride = stride if self.right_state < 2 else 1
        self.left = OPERATIONS[left](channels, left_stride)
        self.right = OPERATIONS[right](channels, right_stride)

    def forward(self, states: list[Tensor]) -> Tensor:
        left: Tensor = self.left(states[self.left_state])
        right: Tensor = self.right(states[self.right_state])
        return left + right


class Cell(Module):
    """A cell, which reads the outputs of the two cells before it.

    The input is a pair `(s1, s2)`: `s1` is the output of the previous cell, and `s2` is the output
    of the cell before the previous one. The result is the pair `(output, s1)`, which is the input
    of the next cell. The first cell gets a single tensor, which is used as both `s1` and `s2`.

    Shapes: `s1` is (N, inputs[0], H, W). `s2` is (N, inputs[1], H, W), or (N, inputs[1], 2H, 2W)
    if the previous cell is a reduction cell. `output` is (N, out_channels, H / stride, W / stride).
    """

    def __init__(
        self, genotype: Genotype, inputs: tuple[int, int], channels: int, *, after_reduction: bool
    ) -> None:
        super().__init__()
        self.output = genotype.output
        self.out_channels = channels * len(genotype.output)
        channels1, channels2 = inputs
        self.fit1 = relu_conv_bn(channels1, channels)
        # `fit2` gives `s2` the image size of `s1` and the channels that the cell works with.
        self.fit2: Module = Identity()
        if after_reduction:
            self.fit2 = FactorizedReduction(channels2, channels)
        elif channels2 != channels:
            self.fit2 = relu_conv_bn(channels2, channels)
        self.sums = ModuleList()
        for pair in genotype.pairs:
            pair_sum = PairSum(pair, channels, genotype.stride)
            self.sums.append(pair_sum)

    def forward(self, last: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        s1, s2 = last if isinstance(last, tuple) else (last, last)
        states = [self.fit1(s1), self.fit2(s2)]
        for pair_sum in self.sums:
            state = pair_sum(states)
            states.append(state)
        outputs = [states[i] for i in self.output]
        return torch.cat(outputs, dim=1), s1


class Classifier(Module):
    """A layer that maps the output of the last cell to class scores.

    Shapes: (N, channels, 7, 7) to (N, num_classes).
    """

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.pool = AvgPool2d(7)
        self.linear = Linear(channels, num_classes)

    def forward(self, last: tuple[Tensor, Tensor]) -> Tensor:
        newer, _ = last
        pooled = self.pool(newer).flatten(1)
        scores: Tensor = self.linear(pooled)
        return scores


def cells(num_layers: int) -> Iterator[tuple[str, Genotype]]:
    """Yield the name and the genotype (the architecture) of every cell, in order."""
    yield "stem_reduction1", REDUCTION
    yield "stem_reduction2", REDUCTION
    for group in (1, 2, 3):
        if group > 1:
            yield f"reduction{group - 1}", REDUCTION
        for i in range(num_layers // 3):
            yield f"group{group}_normal{i + 1}", NORMAL


def amoebanetd(num_layers: int, num_filters: int, num_classes: int = 1000) -> Sequential:
    """Build AmoebaNet-D (L, D) for 224 x 224 images.

    Cells pass pairs of tensors. Other layers pass one tensor. Wrong sizes raise an error.

    Shapes: (N, 3, 224, 224) to (N, num_classes).

    Args:
        num_layers: L, the number of normal cells, a positive multiple of 3.
        num_filters: D, four times the number of channels of the first layer, a positive multiple
            of 8.
        num_classes: The number of classes.
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
    layers: OrderedDict[str, Module] = OrderedDict()
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
    return Sequential(layers)
