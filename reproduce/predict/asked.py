"""Answer the questions of `python -m reproduce plan`: find the model by its name, and the largest model that fits.

A model is one of the papers' or of torchvision's, or a function of the user returns it. The papers report the largest
model, too: for naive model parallelism and for a pipeline.
"""

import bisect
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torchgpipe
from reproduce.models import built as models
from reproduce.models.counted import counted
from reproduce.models.resnet import torchvision_model
from torchgpipe.plan import Hardware, Impossible
from torchgpipe.plan.amount import amount
from torchgpipe.plan.count.count import Counts
from torchgpipe.plan.count.optimizer import optimizer_named
from torchgpipe.plan.predict import Predictor
from torchgpipe.plan.search.search import search
from torchgpipe.tensors.microbatch import mapped
from torchgpipe.trace.layer import Layers

Sizes = tuple[int, ...]

IMAGE = (3, 224, 224)  # a sample's shape for torchvision's models, unless told otherwise


class Paper(NamedTuple):
    """Hold a model of the papers and, where its sizes can be chosen, theirs, the steps to try and the largest."""

    name: str
    batch_size: int
    optimizer: str
    sizes: Sizes = ()
    steps: Sizes = ()
    most: Sizes = ()

    def counts(self, sizes: Sizes) -> Counts:
        """Count the layers of the model in these sizes."""
        return counted(models.SizedModel(self.name, sizes, models.MODELS[self.name].input_shape))


PAPERS = {  # by the name on the command line
    "amoebanet": Paper("AmoebaNet-D", 128, "rmsprop", (18, 256), (3, 16), (384, 8192)),
    "unet": Paper("U-Net", 32, "sgd", (5, 64), (1, 8), (384, 4096)),
    "resnet101": Paper("ResNet-101", 128, "sgd"),
}


@dataclass(frozen=True)
class Given:
    """A model that the user named, with its default batch size and optimizer."""

    title: str
    build: Callable[[], tuple[nn.Module, Any]]
    """Return the model and an example input: a tensor, a tuple of tensors, or a dictionary of keyword arguments."""
    batch_size: int = 128
    optimizer: str = "sgd"

    def built(self, samples: int, device: torch.device) -> tuple[nn.Sequential, Any]:
        """Return the model on `meta` as a sequence, and so many samples; raise `ValueError` if it cannot be split."""
        with torch.device("meta"):
            module, sample = self.build()
            if not isinstance(module, nn.Sequential):
                module = torchgpipe.sequential(module, sample)

        def take(x: Tensor, grows: bool = True) -> Tensor:
            if x.is_meta:
                x = torch.rand(x.shape).to(x.dtype)
            return x.to(device)[torch.arange(samples, device=device) % len(x) if grows else ...]

        if (
            isinstance(sample, dict)
            and isinstance(module, Layers)
            and (signature := module.signature) is not None
        ):
            grows = dict(zip(signature.names, signature.batched, strict=True))
            return module, {
                name: take(x, grows[name]) if name in grows else x for name, x in sample.items()
            }
        return module, mapped(take, sample)


def find_given(name: str, sizes: tuple[int, ...], shape: tuple[int, ...]) -> Given:
    """Find a model, or raise `ValueError`. `sizes` are for the papers' models, `shape` (of a sample) for the others."""
    if paper := PAPERS.get(name):
        model, sizes = models.MODELS[paper.name], sizes or paper.sizes
        title = models.titled(paper.name, sizes)
        return Given(
            title, lambda: (model.build(*sizes), torch.empty(1, *model.input_shape)), *paper[1:3]
        )
    where, _, what = name.partition(":")
    if not where or not what:
        raise ValueError(
            f"no model is called {name!r}; there are {', '.join(PAPERS)}, torchvision's, such as torchvision:resnet50, "
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
        raise ValueError(
            f"{where}:{what} has to be a function that returns a model, got {type(found).__name__}"
        )
    function: Callable[[], Any] = found
    return function


def _returned(name: str, found: Any, shape: tuple[int, ...]) -> tuple[nn.Module, Any]:
    """Return the model and its example input from what the user's function returned."""
    module, sample = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"{name} has to return a model, or a model and a sample; got {type(module).__name__}"
        )
    if shape:
        sample = torch.empty(1, *shape)
    if sample is None:
        raise ValueError(
            f"{name} returns no sample beside its model: let it return both, or say --input 3x224x224"
        )
    return module, sample


@dataclass(frozen=True)
class Asked:
    """The question which model fits: its sizes and training, and devices that have `memory` bytes for tensors each."""

    paper: Paper
    sizes: Sizes
    batch_size: int
    devices: int
    memory: float
    optimizer: str
    hardware: Hardware


def largest(
    asked: Asked, axis: int, fit: Callable[[Sizes], bool]
) -> tuple[Sizes | None, Sizes | None]:
    """Return the largest sizes that fit, or None, and the next larger ones, which do not fit, or None.

    The size of `axis` is doubled until the model does not fit, then bisected.
    """
    step, most = asked.paper.steps[axis], asked.paper.most[axis]

    def sizes(steps: int) -> Sizes:
        return tuple(steps * step if i == axis else size for i, size in enumerate(asked.sizes))

    low, high = 0, max(1, asked.sizes[axis] // step)  # low fits, high does not
    while fit(sizes(high)):
        low, high = high, 2 * high
        if high * step > most:
            return sizes(low), None
    low += bisect.bisect_left(range(low + 1, high), True, key=lambda steps: not fit(sizes(steps)))
    return sizes(low) if low else None, sizes(low + 1)


def tell_largest(asked: Asked, axis: int, tell: Callable[..., None]) -> None:
    """Answer the question for both papers' ways, where size `axis` grows. `tell` is `click.echo`."""
    name = asked.paper.name
    tell(
        f"largest {name} on {asked.devices} device(s) with {amount(asked.memory)} for tensors, batch size "
        f"{asked.batch_size}, {asked.optimizer}:"
    )
    for how in ("naive", "pipelined"):
        found, beyond = largest(asked, axis, partial(_fit, asked, how, tell))
        if found is None:
            tell(f"  {how:10} none: not even {models.titled(name, beyond or ())} fits")
            continue
        millions = sum(layer.parameters for layer in asked.paper.counts(found).low) / 4 / 1e6
        least = "at least " if beyond is None else ""
        tell(f"  {how:10} {least}{models.titled(name, found)}: {millions:,.1f} M parameters")
    tell(
        f"Only {models.MODELS[name].sizes[axis]} grows. naive: one micro-batch, nothing recomputed;\n"
        "pipelined: micro-batches of one, all but the last recomputed.\n"
        "Predicted bytes allocated to tensors, not measured."
    )


def _fit(asked: Asked, how: str, tell: Callable[..., None], sizes: Sizes) -> bool:
    tell(f"  trying {models.titled(asked.paper.name, sizes)}", err=True)
    predictor = Predictor(asked.paper.counts(sizes), asked.hardware)
    try:
        search(
            predictor,
            batch_size=asked.batch_size,
            memory=asked.memory,
            close=inf,
            optimizer=optimizer_named(asked.optimizer, foreach=not asked.hardware.cpu),
            chunks=[1] if how == "naive" else [asked.batch_size],
            checkpoint=["never" if how == "naive" else "except_last"],
            partitions=[min(asked.devices, len(predictor.counts))],
        )
    except Impossible:
        return False
    return True
