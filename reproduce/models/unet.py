"""Build U-Net (B, C), for segmentation, as a flat sequence of layers with a long skip at every level.

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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduce.models.sizes import check_size
from torchgpipe.skip import Namespace, pop, skippable, stash

Layers = Iterator[tuple[str, nn.Module]]


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Pass the input on, and keep it for a later layer: in a U-Net, for the decoder of the same level."""

    isolate: Callable[[Namespace], nn.Module]  # set by @skippable

    def forward(self, image: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("skip", image)
        return image


@skippable(pop=["skip"])
class PopConcat(nn.Module):
    """Pad the input to the skip's height and width, and append the skip's channels.

    Sizes differ by a row or a column where pooling had to round an odd size down.
    """

    isolate: Callable[[Namespace], nn.Module]  # set by @skippable

    def forward(self, image: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        rows = skip.shape[2] - image.shape[2]
        columns = skip.shape[3] - image.shape[3]
        if rows or columns:
            image = F.pad(image, (0, columns, 0, rows))
        return torch.cat([image, skip], dim=1)


def conv_blocks(name: str, inputs: int, middle: int, outputs: int, num_convs: int) -> Layers:
    """Yield a cell of `num_convs` blocks, four layers each: `inputs` to `middle` to `outputs` channels."""
    widths = [inputs, *[middle] * (num_convs - 1), outputs]
    for i in range(num_convs):
        block = f"{name}_{i}"
        yield f"{block}_conv", nn.Conv2d(widths[i], widths[i + 1], 3, padding=1, bias=False)
        yield f"{block}_dropout", nn.Dropout2d(0.1)
        yield f"{block}_norm", nn.InstanceNorm2d(widths[i + 1])
        yield f"{block}_relu", nn.LeakyReLU(0.01)


def layers(depth: int, num_convs: int, base: int, inputs: int, outputs: int) -> Layers:
    """Yield every layer with its name, in order. Level `i` has 2**i times the base channels."""
    skips = [Namespace() for _ in range(depth)]
    widths = [base * 2**i for i in range(depth)]

    for i, width in enumerate(widths):
        above = widths[i - 1] if i else inputs
        yield from conv_blocks(f"encode{i}", above, width, width, num_convs)
        yield f"encode{i}_stash", Stash().isolate(skips[i])
        yield f"encode{i}_pool", nn.MaxPool2d(2)

    deepest = widths[-1]
    yield from conv_blocks("bottleneck", deepest, 2 * deepest, deepest, num_convs)

    for i, width in reversed(list(enumerate(widths))):
        yield f"decode{i}_upsample", nn.Upsample(scale_factor=2, mode="nearest")
        yield f"decode{i}_concat", PopConcat().isolate(skips[i])
        yield from conv_blocks(f"decode{i}", 2 * width, width // 2, width // 2, num_convs)

    yield "last_conv", nn.Conv2d(base // 2, outputs, 1, bias=False)


def unet(
    depth: int = 5,
    num_convs: int = 5,
    base_channels: int = 64,
    input_channels: int = 3,
    output_channels: int = 1,
) -> nn.Sequential:
    """Build U-Net (`num_convs`, `base_channels`), known as (B, C), of `depth` levels.

    Shapes: (N, input_channels, H, W) to (N, output_channels, H, W), for H and W of at least 2**depth,
    one of them at least twice that, since a lone pixel cannot be normalized.
    Other sizes than whole numbers from 1, or from 2 for `base_channels`, raise as `check_size` does.
    """
    check_size("depth", depth)
    check_size("num_convs", num_convs)
    check_size("base_channels", base_channels, least=2, why="the last cell has half of them")
    check_size("input_channels", input_channels)
    check_size("output_channels", output_channels)
    named = layers(depth, num_convs, base_channels, input_channels, output_channels)
    return nn.Sequential(OrderedDict(named))
