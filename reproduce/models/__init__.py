"""Build the papers' three models and others as flat `nn.Sequential`s. A balance counts their entries as layers.

- `amoebanetd(num_layers, num_filters)`: a classifier, 3 x 224 x 224, whose layers pass pairs of tensors;
- `unet(depth, num_convs, base_channels)`: segmentation, 3 x 192 x 192, with long skips;
- `resnet101()`: torchvision's classifier, 3 x 224 x 224, with a short skip over every bottleneck;
- `torchvision:NAME`, ten of torchvision's models, as `torchgpipe.sequential` cuts them.

Build under `with torch.device("meta"):` to count parameters or infer shapes without memory. No layer works in place
on its input, because checkpointing needs a partition's input again.

It may import `torchgpipe`, nothing else of `reproduce`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import nn

from reproduce.models.amoebanet import amoebanetd
from reproduce.models.resnet import RESNET101, ZOO, layers_of, resnet, resnet101
from reproduce.models.unet import unet

__all__ = ["MODELS", "Model", "amoebanetd", "resnet101", "unet"]


class Model(NamedTuple):
    """Hold what builds a model from its sizes, the names of the sizes in the published tables, and a sample's shape."""

    build: Callable[..., nn.Sequential]
    sizes: tuple[str, ...]
    input_shape: tuple[int, int, int]


def titled(name: str, sizes: tuple[int, ...]) -> str:
    """Return what a model of these sizes is called, such as `AmoebaNet-D (18, 256)`."""
    return f"{name} ({', '.join(map(str, sizes))})" if sizes else name


MODELS = {
    "AmoebaNet-D": Model(amoebanetd, ("L", "D"), (3, 224, 224)),
    "U-Net": Model(partial(unet, 5), ("B", "C"), (3, 192, 192)),
    "ResNet-101": Model(resnet101, (), (3, 224, 224)),
    "thin ResNet-101": Model(partial(resnet, RESNET101), ("width", "expansion"), (3, 224, 224)),
    "ResNet": Model(
        lambda blocks, *sizes, **classes: resnet((blocks,) * 4, *sizes, **classes),
        ("blocks", "width", "expansion"),
        (3, 64, 64),
    ),
    **{f"torchvision:{name}": Model(partial(layers_of, name), ("pixels",), (3, 224, 224)) for name in ZOO},
}
"""Every model that an experiment may name.

`thin ResNet-101` has fewer channels than `ResNet-101`; `ResNet` has `blocks` bottlenecks in each of its four stages.
"""
