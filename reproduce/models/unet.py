"""Build U-Net (B, C), for segmentation, as a flat sequence of layers.

Each cell (encode, decode or bottleneck) has B blocks. The first cell has C channels. There is a
long skip at every level:

      encode 0 ─────────────── skip 0 ───────────────► decode 0 ─ last convolution
         └ pool                                         ▲ upsample
           encode 1 ────────── skip 1 ──────────► decode 1
              └ pool                               ▲ upsample
                 ...                              ...
                  └──────────► bottleneck ─────────┘

Sources: Ronneberger et al., "U-Net" (arXiv:1505.04597), for the shape; Kim et al., "torchgpipe"
(arXiv:2004.09910), for the sizes (B, C) and for skips under a pipeline.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import (
    Conv2d,
    Dropout2d,
    InstanceNorm2d,
    LeakyReLU,
    MaxPool2d,
    Module,
    Sequential,
    Upsample,
)
from torch.nn.functional import pad

from reproduce.models.sizes import check_size
from torchgpipe.skip import Namespace, pop, skippable, stash

Layers = Iterator[tuple[str, Module]]


@skippable(stash=["skip"])
class Stash(Module):
    """A layer that returns its input, and also passes the input to a later layer as a skip.

    In a U-Net, the later layer is in the decoder of the same level.
    """

    isolate: Callable[[Namespace], Module]  # set by @skippable

    def forward(self, image: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("skip", image)
        return image


@skippable(pop=["skip"])
class PopConcat(Module):
    """A layer that concatenates its input and a skip along the channels.

    If the height or the width of the input is smaller than that of the skip, the input is padded
    first. This happens if pooling rounded an odd height or width down.
    """

    isolate: Callable[[Namespace], Module]  # set by @skippable

    def forward(self, image: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        _, _, skip_height, skip_width = skip.shape
        _, _, height, width = image.shape
        rows = skip_height - height
        columns = skip_width - width
        if rows or columns:
            image = pad(image, (0, columns, 0, rows))
        return torch.cat([image, skip], dim=1)


def conv_blocks(name: str, inputs: int, middle: int, outputs: int, num_convs: int) -> Layers:
    """Yield the layers of a cell: `num_convs` blocks, each with four layers.

    The first block takes `inputs` channels, and the last block returns `outputs` channels. All
    tensors between blocks have `middle` channels.
    """
    inner = [middle] * (num_convs - 1)
    channels = pairwise([inputs, *inner, outputs])
    for i, (before, after) in enumerate(channels):
        block = f"{name}_{i}"
        yield f"{block}_conv", Conv2d(before, after, 3, padding=1, bias=False)
        yield f"{block}_dropout", Dropout2d(0.1)
        yield f"{block}_norm", InstanceNorm2d(after)
        yield f"{block}_relu", LeakyReLU(0.01)


def layers(depth: int, num_convs: int, base: int, inputs: int, outputs: int) -> Layers:
    """Yield the names and layers of a U-Net, in order.

    The layers at level `i` have `base * 2**i` channels.
    """
    skips = [Namespace() for _ in range(depth)]
    widths = [base * 2**i for i in range(depth)]

    for i, width in enumerate(widths):
        above = inputs if i == 0 else widths[i - 1]
        yield from conv_blocks(f"encode{i}", above, width, width, num_convs)
        yield f"encode{i}_stash", Stash().isolate(skips[i])
        yield f"encode{i}_pool", MaxPool2d(2)

    deepest = widths[-1]
    yield from conv_blocks("bottleneck", deepest, 2 * deepest, deepest, num_convs)

    for i in reversed(range(depth)):
        width = widths[i]
        half = width // 2
        yield f"decode{i}_upsample", Upsample(scale_factor=2, mode="nearest")
        yield f"decode{i}_concat", PopConcat().isolate(skips[i])
        yield from conv_blocks(f"decode{i}", 2 * width, half, half, num_convs)

    yield "last_conv", Conv2d(base // 2, outputs, 1, bias=False)


def unet(
    depth: int = 5,
    num_convs: int = 5,
    base_channels: int = 64,
    input_channels: int = 3,
    output_channels: int = 1,
) -> Sequential:
    """Build U-Net (B, C).

    Shapes: (N, input_channels, H, W) to (N, output_channels, H, W). H and W must be at least
    2**depth, and H or W must be at least 2 * 2**depth. Otherwise the bottleneck would have a single
    pixel, which cannot be normalized.

    Args:
        depth: The number of levels.
        num_convs: B, the number of blocks in each cell.
        base_channels: C, the number of channels of the first cell, at least 2.
        input_channels: The number of channels of the image.
        output_channels: The number of channels of the result.
    """
    check_size("depth", depth)
    check_size("num_convs", num_convs)
    check_size("base_channels", base_channels, least=2, why="the last cell has half of them")
    check_size("input_channels", input_channels)
    check_size("output_channels", output_channels)
    named = layers(depth, num_convs, base_channels, input_channels, output_channels)
    return Sequential(OrderedDict(named))
