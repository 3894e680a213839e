"""Answer the questions of `python -m reproduce plan`: find the model by its name, and the largest model that fits.

A model is one of the papers' or of torchvision's, or a function of the user returns it. The papers report the largest
model, too: for naive model parallelism and for a pipeline.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchgpipe
from reproduce import models
from reproduce.models.counted import counted
from reproduce.models.resnet import torchvision_model
from torchgpipe.plan import Hardware, Impossible
from torchgpipe.plan.count.count import Counts
from torchgpipe.plan.count.optimizer import optimizer_named
from torchgpipe.plan.predict import Predictor
from torchgpipe.plan.search.search import search
from torchgpipe.tensors.microbatch import mapped
from torchgpipe.trace.layer import Layers

Sizes = tuple[int, ...]

# name on the command line -> name of the model, the papers' batch size, optimizer
MODELS = {
    "amoebanet": ("AmoebaNet-D", 128, "rmsprop"),
    "unet": ("U-Net", 32, "sgd"),
    "resnet101": ("ResNet-101", 128, "sgd"),
}
STEPS = {"amoebanet": (3, 16), "unet": (1, 8)}
"""The steps by which sizes grow."""
MOST = {"amoebanet": (384, 8192), "unet": (384, 4096)}
"""The largest sizes that the search tries."""
PAPERS_SIZES: dict[str, tuple[int, ...]] = {"amoebanet": (18, 256), "unet": (5, 64)}
IMAGE = (3, 224, 224)
"""The shape of a sample for torchvision's models, unless told otherwise."""


@dataclass(frozen=True)
class Given:
    """A model that the user named, with its default batch size and optimizer."""

    title: str
    build: Callable[[], tuple[nn.Module, Any]]
    """Return the model and an example input: a tensor, a tuple of tensors, or a dictionary of keyword arguments."""
    batch_size: int = 128
    optimizer: str = "sgd"

    def built(self, samples: int, device: torch.device) -> tuple[nn.Sequential, Any]:
        """Return the model on `meta` as an `nn.Sequential`, and an input of so many samples on `device`.

        Raises:
            ValueError: the model is no `nn.Sequential` and cannot be split into one.
        """
        with torch.device("meta"):
            module, sample = self.build()
            if not isinstance(module, nn.Sequential):
                module = torchgpipe.sequential(module, sample)

        def take(x: Tensor, grows: bool = True) -> Tensor:
            if x.is_meta:
                x = torch.rand(x.shape).to(x.dtype)
            return x.to(device)[torch.arange(samples, device=device) % len(x) if grows else ...]

        if isinstance(sample, dict) and isinstance(module, Layers) and (signature := module.signature) is not None:
            grows = dict(zip(signature.names, signature.batched, strict=True))
            return module, {name: take(x, grows[name]) if name in grows else x for name, x in sample.items()}
        return module, mapped(take, sample)


def find_given(name: str, sizes: tuple[int, ...], shape: tuple[int, ...]) -> Given:
    """Find a model by its name. `sizes` are for the papers' models, `shape` (of a sample) for the others.

    Raises:
        ValueError: there is no such model.
    """
    if name in MODELS:
        paper, batch_size, optimizer = MODELS[name]
        family, sizes = models.MODELS[paper], sizes or PAPERS_SIZES.get(name, ())
        title = models.titled(paper, sizes)
        return Given(title, lambda: (family.build(*sizes), torch.empty(1, *family.input_shape)), batch_size, optimizer)
    where, _, what = name.partition(":")
    if not where or not what:
        raise ValueError(
            f"no model is called {name!r}; there are {', '.join(MODELS)}, torchvision's, such as torchvision:resnet50, "
            "and yours: package.module:function, which returns the model"
        )
    if where == "torchvision":
        shape = shape or IMAGE
        return Given(name, lambda: (torchvision_model(what, shape[-1]), torch.empty(1, *shape)))
    function = _function(where, what)
    return Given(name, lambda: _returned(name, function(), shape))


def _function(where: str, what: str) -> Callable[[], Any]:
    """Import a function from a module, which may be in the current folder."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(where), what)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{where}:{what} cannot be imported: {error}") from error
    finally:
        del sys.path[0]
    if not callable(found):
        raise ValueError(f"{where}:{what} has to be a function that returns a model, got {type(found).__name__}")
    function: Callable[[], Any] = found
    return function


def _returned(name: str, found: Any, shape: tuple[int, ...]) -> tuple[nn.Module, Any]:
    """Return the model and its example input from what the user's function returned."""
    module, sample = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(module, nn.Module):
        raise ValueError(f"{name} has to return a model, or a model and a sample; got {type(module).__name__}")
    if shape:
        sample = torch.empty(1, *shape)
    if sample is None:
        raise ValueError(f"{name} returns no sample beside its model: let it return both, or say --input 3x224x224")
    return module, sample


@dataclass(frozen=True)
class Asked:
    """The question which model fits: its name, sizes and training, and the devices that it must fit on."""

    model: str
    sizes: Sizes
    batch_size: int
    devices: int
    memory: float
    """The bytes that tensors may take on each device."""
    optimizer: str
    hardware: Hardware


def largest(asked: Asked, how: str, axis: int, notice: Callable[[Sizes], None]) -> tuple[Sizes | None, Sizes | None]:
    """Return the largest sizes that fit, or None, and the next larger ones, which do not fit, or None.

    The size of `axis` is doubled until the model does not fit, then bisected. `notice` is called with the sizes tried.
    """
    step, most = STEPS[asked.model][axis], MOST[asked.model][axis]

    def sizes(steps: int) -> Sizes:
        return tuple(steps * step if i == axis else size for i, size in enumerate(asked.sizes))

    def fits(steps: int) -> bool:
        notice(sizes(steps))
        return _fits(asked, how, sizes(steps))

    low, high = 0, max(1, asked.sizes[axis] // step)  # low fits, high does not
    while fits(high):
        low, high = high, 2 * high
        if high * step > most:
            return sizes(low), None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return sizes(low) if low else None, sizes(high)


def _fits(asked: Asked, how: str, sizes: Sizes) -> bool:
    predictor = Predictor(_counts(asked.model, sizes), asked.hardware)
    try:
        search(
            predictor, batch_size=asked.batch_size, memory=asked.memory, close=inf,
            optimizer=optimizer_named(asked.optimizer, foreach=not asked.hardware.cpu),
            chunks=[1] if how == "naive" else [asked.batch_size],
            checkpoint=["never" if how == "naive" else "except_last"],
            partitions=[min(asked.devices, len(predictor.counts))],
        )  # fmt: skip
    except Impossible:
        return False
    return True


def parameters(model: str, sizes: Sizes) -> int:
    """Count the parameters of a model of these sizes."""
    return sum(layer.parameters for layer in _counts(model, sizes).low) // 4


def _counts(model: str, sizes: Sizes) -> Counts:
    name, *_ = MODELS[model]
    return counted(name, sizes, models.MODELS[name].input_shape)
