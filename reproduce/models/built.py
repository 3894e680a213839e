"""Build the papers' three models and others as flat `nn.Sequential`s. A balance counts their entries as layers.

- `amoebanetd(num_layers, num_filters)`: a classifier, 3 x 224 x 224, whose layers pass pairs of tensors;
- `unet(depth, num_convs, base_channels)`: segmentation, 3 x 192 x 192, with long skips;
- `resnet101()`: torchvision's classifier, 3 x 224 x 224, with a short skip over every bottleneck;
- `torchvision:NAME`, ten of torchvision's models.

What builds a model may return any module: `torchgpipe.sequential` cuts what is no `nn.Sequential`.

A sample is an input and its target, drawn at random, without a batch dimension. An input is a tensor; or a tuple of
them, which is one argument; or a dictionary, arguments by name, of a module that is no `nn.Sequential`. Samples of a
model have the same shapes; what all of them share, such as a mask, is a buffer of the model.

Build under `with torch.device("meta"):` to count parameters or infer shapes without memory. No layer works in place
on its input, because checkpointing needs a partition's input again.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

import torchgpipe
from reproduce.models.amoebanet import amoebanetd
from reproduce.models.resnet import RESNET101, resnet, resnet101, torchvision_model
from reproduce.models.sizes import ZOO
from reproduce.models.unet import unet
from torchgpipe.tensors.microbatch import mapped
from torchgpipe.trace.parts import tensors_in

__all__ = ["MODELS", "Model", "SizedModel", "amoebanetd", "resnet101", "unet"]


Sample = Callable[[tuple[int, ...], int, Generator], tuple[Any, Any]]
_TRACED: dict[
    Any, nn.Sequential
] = {}  # the last: rows of one model are built in turn, and tracing takes seconds


def image(shape: tuple[int, ...], classes: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Draw an image, uniform in 0 to 1, and its class."""
    return torch.rand(shape, generator=generator), torch.randint(classes, (), generator=generator)


def masked_image(shape: tuple[int, ...], _: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Draw an image, and a mask (1, *shape[1:]) of 0 and 1."""
    mask = torch.randint(2, (1, *shape[1:]), generator=generator).float()
    return torch.rand(shape, generator=generator), mask


def changed(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return what `function` makes of each tensor of an input or target."""
    if isinstance(value, dict):
        return {name: function(x) for name, x in value.items()}
    return mapped(function, value)


class Model(NamedTuple):
    """Hold what builds a model from its sizes, their names in tables, a sample's shape, and what draws a sample."""

    build: Callable[..., nn.Module]
    sizes: tuple[str, ...]
    input_shape: tuple[int, ...]
    sample: Sample = image


class SizedModel(NamedTuple):
    """Name a model, its sizes and a sample's shape. Without `classes` it has as many as its builder gives it."""

    name: str
    sizes: tuple[int, ...]
    input_shape: tuple[int, ...]
    classes: int | None = None

    def batch(
        self, samples: int, seed: int = 0, device: str | torch.device = "cpu"
    ) -> tuple[Any, Any]:
        """Draw a mini-batch: an input and its target. The first samples are the same for any number."""
        draw = partial(MODELS[self.name].sample, self.input_shape, self.classes or 1)
        with torch.device("cpu"):
            first, generator = draw(Generator()), Generator().manual_seed(seed)
            made = tuple(
                changed(lambda x: x.new_empty(samples, *x.shape, device=device), part)
                for part in first
            )
            for k in range(samples):
                for whole, x in zip(tensors_in(made), tensors_in(draw(generator)), strict=True):
                    whole[k] = x
        return made[0], made[1]

    def layers(self) -> nn.Sequential:
        """Build the model on PyTorch's default device. The same seed gives the same weights."""
        key = (self, device := torch.get_default_device(), torch.initial_seed())
        if key not in _TRACED:
            classes = {} if self.classes is None else {"num_classes": self.classes}
            module = MODELS[self.name].build(*self.sizes, **classes)
            if isinstance(module, nn.Sequential):
                return module
            _TRACED.clear()
            _TRACED[key] = torchgpipe.sequential(module, self.batch(2, device=device)[0])
        return copy.deepcopy(_TRACED[key])


def titled(name: str, sizes: tuple[int, ...]) -> str:
    """Return what a model of these sizes is called, such as `AmoebaNet-D (18, 256)`."""
    return f"{name} ({', '.join(map(str, sizes))})" if sizes else name


MODELS = {
    "AmoebaNet-D": Model(amoebanetd, ("L", "D"), (3, 224, 224)),
    "U-Net": Model(partial(unet, 5), ("B", "C"), (3, 192, 192), masked_image),
    "ResNet-101": Model(resnet101, (), (3, 224, 224)),
    "thin ResNet-101": Model(partial(resnet, RESNET101), ("width", "expansion"), (3, 224, 224)),
    "ResNet": Model(
        lambda blocks, *sizes, **classes: resnet((blocks,) * 4, *sizes, **classes),
        ("blocks", "width", "expansion"),
        (3, 64, 64),
    ),
    **{
        f"torchvision:{name}": Model(partial(torchvision_model, name), ("pixels",), (3, 224, 224))
        for name in ZOO
    },
}
"""Every model that an experiment may name.

`thin ResNet-101` has fewer channels than `ResNet-101`; `ResNet` has `blocks` bottlenecks in each of its four stages.
"""
