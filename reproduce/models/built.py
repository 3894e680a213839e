"""Build the papers' three models and other models as flat `nn.Sequential`s.

Each entry of such a sequence counts as one layer of a balance.

- `amoebanetd(num_layers, num_filters)`: a classifier of 224 x 224 images, whose cells pass two
  tensors
- `unet(depth, num_convs, base_channels)`: segmentation of 192 x 192 images, with long skips
- `resnet101()`: torchvision's classifier of 224 x 224 images, with a skip over every bottleneck
- `torchvision:NAME`: ten more models of torchvision

The function that builds a model may return any module. If the module is not an `nn.Sequential`,
`torchgpipe.sequential` cuts it into layers.

A sample is a random input and its random target, without a batch dimension. An input is a tensor,
or a tuple of tensors that is passed as one argument. If the module is not an `nn.Sequential`, an
input may also be a dictionary of keyword arguments. All samples of a model have the same shapes. A
tensor that is the same for all samples, such as a mask, is a buffer of the model.

Under `with torch.device("meta"):`, a model can be built without memory, to count its parameters or
to infer shapes. No layer changes its input in place, because checkpointing needs the input of a
partition again.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import Module, Sequential

import torchgpipe
from reproduce.models.amoebanet import amoebanetd
from reproduce.models.resnet import RESNET101, resnet, resnet101, torchvision_model
from reproduce.models.sizes import ZOO
from reproduce.models.unet import unet
from torchgpipe.tensors.microbatch import mapped
from torchgpipe.trace.parts import tensors_in

__all__ = ["MODELS", "Model", "SizedModel", "amoebanetd", "resnet101", "unet"]


Shape = tuple[int, ...]
Sample = Callable[[Shape, int, Generator], tuple[Any, Any]]

# A cache of the last model that was traced, because tracing takes seconds. One model is enough,
# because rows with the same model are built one after another.
_TRACED: dict[Any, Sequential] = {}


def image(shape: Shape, classes: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Draw a random image with values between 0 and 1 and, as its target, a random class."""
    pixels = torch.rand(shape, generator=generator)
    target = torch.randint(classes, (), generator=generator)
    return pixels, target


def masked_image(shape: Shape, classes: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Draw a random image and, as its target, a random mask of zeros and ones.

    The image has the shape `shape`, and the mask has the shape (1, *shape[1:]). `classes` is not
    used, but all functions that draw samples take it.
    """
    mask_shape = (1, *shape[1:])
    mask = torch.randint(2, mask_shape, generator=generator).float()
    return torch.rand(shape, generator=generator), mask


def changed(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a copy of an input or of a target, with `function` applied to each of its tensors."""
    if isinstance(value, dict):
        return {name: function(x) for name, x in value.items()}
    return mapped(function, value)


class Model(NamedTuple):
    """A model: how to build it, and how to draw samples for it.

    Attributes:
        build: The function that builds the model, given its sizes.
        sizes: The names of the model's sizes in tables, such as `("L", "D")`.
        input_shape: The shape of the input of one sample.
        sample: The function that draws a sample: an input and its target.
    """

    build: Callable[..., Module]
    sizes: tuple[str, ...]
    input_shape: Shape
    sample: Sample = image


class SizedModel(NamedTuple):
    """A model's name, its sizes, and the shape of a sample, from which the model can be built.

    If `classes` is None, the model has the default number of classes of its builder.
    """

    name: str
    sizes: tuple[int, ...]
    input_shape: Shape
    classes: int | None = None

    def batch(
        self, samples: int, seed: int = 0, device: str | torch.device = "cpu"
    ) -> tuple[Any, Any]:
        """Draw a mini-batch: an input and its target.

        With the same seed, a larger mini-batch begins with the samples of a smaller mini-batch.
        """
        draw = partial(MODELS[self.name].sample, self.input_shape, self.classes or 1)

        def empty(x: Tensor) -> Tensor:
            return x.new_empty(samples, *x.shape, device=device)

        with torch.device("cpu"):
            like_input, like_target = draw(Generator())
            batch = (changed(empty, like_input), changed(empty, like_target))
            generator = Generator().manual_seed(seed)
            for k in range(samples):
                sample = draw(generator)
                for whole, x in zip(tensors_in(batch), tensors_in(sample), strict=True):
                    whole[k] = x
        return batch

    def layers(self) -> Sequential:
        """Build the model on PyTorch's default device. PyTorch's seed determines the weights."""
        device = torch.get_default_device()
        key = (self, device, torch.initial_seed())
        if key not in _TRACED:
            classes = {} if self.classes is None else {"num_classes": self.classes}
            module = MODELS[self.name].build(*self.sizes, **classes)
            if isinstance(module, Sequential):
                return module
            _TRACED.clear()
            x, _ = self.batch(2, device=device)
            _TRACED[key] = torchgpipe.sequential(module, x)
        return copy.deepcopy(_TRACED[key])


def titled(name: str, sizes: tuple[int, ...]) -> str:
    """Return the title of a model with its sizes, such as `AmoebaNet-D (18, 256)`."""
    if not sizes:
        return name
    numbers = ", ".join(map(str, sizes))
    return f"{name} ({numbers})"


def equal_stages(blocks: int, *sizes: int, **classes: int) -> Sequential:
    """Build a ResNet whose four stages have `blocks` bottlenecks each."""
    return resnet((blocks,) * 4, *sizes, **classes)


IMAGE = (3, 224, 224)
TORCHVISION = {
    f"torchvision:{name}": Model(partial(torchvision_model, name), ("pixels",), IMAGE)
    for name in ZOO
}
MODELS = {
    "AmoebaNet-D": Model(amoebanetd, ("L", "D"), IMAGE),
    "U-Net": Model(partial(unet, 5), ("B", "C"), (3, 192, 192), masked_image),
    "ResNet-101": Model(resnet101, (), IMAGE),
    "thin ResNet-101": Model(partial(resnet, RESNET101), ("width", "expansion"), IMAGE),
    "ResNet": Model(equal_stages, ("blocks", "width", "expansion"), (3, 64, 64)),
    **TORCHVISION,
}
"""Every model that an experiment may name.

`thin ResNet-101` has fewer channels than `ResNet-101`.
"""
