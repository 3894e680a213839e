"""Find the model for `python -m reproduce plan`, and the largest model that fits in memory.

The user names a model: one of the papers' models, one of torchvision's models, or a function that
returns a model. The largest model is found both for naive model parallelism and for a pipeline, as
in the papers.
"""

import bisect
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
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
from torchgpipe.plan.count.count import Counts
from torchgpipe.plan.count.optimizer import optimizer_named
from torchgpipe.plan.hardware.amount import amount
from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.search.search import search
from torchgpipe.plan.search.trial import Choices
from torchgpipe.tensors.microbatch import mapped
from torchgpipe.trace.layer import Layers

Sizes = tuple[int, ...]

IMAGE = (3, 224, 224)  # the default shape of a sample for torchvision's models


class Paper(NamedTuple):
    """A model of the papers, with the defaults of its training.

    Attributes:
        sizes: The default sizes, such as (L, D). Empty if the model always has the same size.
        steps: For each size, the number that must divide it.
        most: The largest value of each size to try.
    """

    name: str
    batch_size: int
    optimizer: str
    sizes: Sizes = ()
    steps: Sizes = ()
    most: Sizes = ()

    def counts(self, sizes: Sizes) -> Counts:
        """Count the operations and bytes of the layers of the model in these sizes."""
        model = models.MODELS[self.name]
        return counted(models.SizedModel(self.name, sizes, model.input_shape))


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
    """Return the model and an example input.

    The input is a tensor, a tuple of tensors, or a dictionary of keyword arguments.
    """
    batch_size: int = 128
    optimizer: str = "sgd"

    def built(self, samples: int, device: torch.device) -> tuple[nn.Sequential, Any]:
        """Return the model as a sequence of layers, and an input with `samples` samples.

        The model is on `meta`, and the input is on `device`. Raise `ValueError` if the model cannot
        be split into layers.
        """
        with torch.device("meta"):
            module, sample = self.build()
            if not isinstance(module, nn.Sequential):
                module = torchgpipe.sequential(module, sample)

        def placed(x: Tensor) -> Tensor:
            if x.is_meta:
                x = torch.rand(x.shape).to(x.dtype)
            return x.to(device)

        def batched(x: Tensor) -> Tensor:
            repeated = torch.arange(samples, device=device) % len(x)
            return placed(x)[repeated]

        signature = module.signature if isinstance(module, Layers) else None
        if not isinstance(sample, dict) or signature is None:
            return module, mapped(batched, sample)
        has_batch = dict(zip(signature.names, signature.batched, strict=True))
        arguments = {}
        for name, x in sample.items():
            if name in has_batch:  # else it is no tensor
                x = batched(x) if has_batch[name] else placed(x)
            arguments[name] = x
        return module, arguments


def find_given(name: str, sizes: Sizes, shape: tuple[int, ...]) -> Given:
    """Find a model by its name, or raise `ValueError`.

    Args:
        name: The name, such as "unet", "torchvision:resnet50" or "package.module:function".
        sizes: The sizes of a model of the papers. If it is empty, the model has its default sizes.
        shape: The shape of a sample for other models. If it is empty, torchvision's models have a
            default shape, and a function must return an example input.
    """
    if name in PAPERS:
        return _of_paper(PAPERS[name], sizes)
    where, _, what = name.partition(":")
    if not where or not what:
        raise ValueError(
            f"no model is called {name!r}; choose {', '.join(PAPERS)}, a model of torchvision "
            "(such as torchvision:resnet50), or your own function that returns a model "
            "(package.module:function)"
        )
    if where == "torchvision":
        shape = shape or IMAGE
        return Given(name, lambda: (torchvision_model(what, shape[-1]), torch.empty(1, *shape)))
    function = _function(where, what)
    return Given(name, lambda: _returned(name, function(), shape))


def _of_paper(paper: Paper, sizes: Sizes) -> Given:
    model = models.MODELS[paper.name]
    sizes = sizes or paper.sizes

    def build() -> tuple[nn.Module, Any]:
        return model.build(*sizes), torch.empty(1, *model.input_shape)

    return Given(models.titled(paper.name, sizes), build, paper.batch_size, paper.optimizer)


def _function(where: str, what: str) -> Callable[[], Any]:
    """Import a function from a module. The module can be in the current folder."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(where), what)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{where}:{what} cannot be imported: {error}") from error
    finally:
        del sys.path[0]
    if not callable(found):
        kind = type(found).__name__
        raise ValueError(f"{where}:{what} has to be a function that returns a model, got {kind}")
    function: Callable[[], Any] = found
    return function


def _returned(name: str, found: Any, shape: tuple[int, ...]) -> tuple[nn.Module, Any]:
    """Return the model and the example input that the user's function returned as `found`.

    If `shape` is given, an example input of this shape is used instead.
    """
    module = found
    sample: Any = None
    if isinstance(found, tuple) and len(found) == 2:
        module, sample = found
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise ValueError(f"{name} has to return a model, or a model and an input; got {kind}")
    if shape:
        sample = torch.empty(1, *shape)
    if sample is None:
        raise ValueError(
            f"{name} returns a model but no example input: let it return both, "
            "or give the shape of an input, such as --input 3x224x224"
        )
    return module, sample


@dataclass(frozen=True)
class Asked:
    """The model, training options and devices for which the largest sizes are searched."""

    paper: Paper
    sizes: Sizes
    batch_size: int
    devices: int
    memory: float  # the bytes that each device has for tensors
    optimizer: str
    hardware: Hardware


def largest(
    asked: Asked, axis: int, fit: Callable[[Sizes], bool]
) -> tuple[Sizes | None, Sizes | None]:
    """Search for the largest model that fits, by changing the size with index `axis`.

    1. Double this size until the model does not fit.
    2. Bisect between the largest size that fits and the smallest size that does not.

    Returns:
        The largest sizes that fit, or None if no size fits; and the next larger sizes, or None if
        even the largest size to try fits.
    """
    step = asked.paper.steps[axis]
    most = asked.paper.most[axis]

    def sizes(steps: int) -> Sizes:
        changed = list(asked.sizes)
        changed[axis] = steps * step
        return tuple(changed)

    def fails(steps: int) -> bool:
        return not fit(sizes(steps))

    low = 0
    high = max(1, asked.sizes[axis] // step)
    while fit(sizes(high)):
        low, high = high, 2 * high
        if high * step > most:
            return sizes(low), None
    between = range(low + 1, high)  # `low` fits, and `high` does not
    low += bisect.bisect_left(between, True, key=fails)
    return sizes(low) if low else None, sizes(low + 1)


class Largest(NamedTuple):
    """The largest model that fits.

    Attributes:
        how: How it is trained: "naive" or "pipelined".
        sizes: The largest sizes that fit, or None if no size fits.
        beyond: The next larger sizes, or None if even the largest size to try fits.
        parameters: The number of the model's parameters; 0 if no size fits.
    """

    how: str
    sizes: Sizes | None
    beyond: Sizes | None
    parameters: int = 0


def find_largest(asked: Asked, axis: int, tell: Callable[[str], object]) -> list[Largest]:
    """Find the largest model that fits, for naive model parallelism and for a pipeline.

    Only one of the model's sizes is changed: the size with index `axis`. `tell` is called with a
    text about each size that is tried.
    """
    made = []
    for how in ("naive", "pipelined"):
        fit = partial(_fit, asked, how, tell)
        sizes, beyond = largest(asked, axis, fit)
        parameters = 0
        if sizes is not None:
            counts = asked.paper.counts(sizes)
            parameter_bytes = sum(layer.parameters for layer in counts.low)
            parameters = round(parameter_bytes / 4)
        made.append(Largest(how, sizes, beyond, parameters))
    return made


def title_of(asked: Asked) -> str:
    """Return a line that says for what the largest model was searched."""
    return (
        f"largest {asked.paper.name} on {asked.devices} device(s) with {amount(asked.memory)} for "
        f"tensors, batch size {asked.batch_size}, {asked.optimizer}"
    )


def lines_of(asked: Asked, axis: int, found: Sequence[Largest]) -> Iterator[str]:
    """Yield lines that say how large the largest models are, and what grew."""
    name = asked.paper.name
    for each in found:
        if each.sizes is None:
            yield f"{each.how}: none: not even {models.titled(name, each.beyond or ())} fits"
            continue
        least = "at least " if each.beyond is None else ""
        title = models.titled(name, each.sizes)
        yield f"{each.how}: {least}{title}: {each.parameters / 1e6:,.1f} M parameters"
    yield (
        f"only {models.MODELS[name].sizes[axis]} grows. naive: one micro-batch, nothing "
        "recomputed; pipelined: micro-batches of one, all but the last recomputed"
    )
    yield "predicted bytes allocated to tensors, not measured"


def _fit(asked: Asked, how: str, tell: Callable[[str], object], sizes: Sizes) -> bool:
    """Return whether the model fits in these sizes. `how` is "naive" or "pipelined"."""
    tell(f"  trying {models.titled(asked.paper.name, sizes)}")
    counts = asked.paper.counts(sizes)
    predictor = Predictor(counts, asked.hardware)
    optimizer = optimizer_named(asked.optimizer, foreach=not asked.hardware.cpu)
    choices = Choices(asked.batch_size, optimizer, [asked.batch_size], ["except_last"])
    if how == "naive":
        choices = Choices(asked.batch_size, optimizer, [1], ["never"])
    partitions = [min(asked.devices, len(counts))]
    try:
        search(predictor, choices, memory=asked.memory, partitions=partitions, close=inf)
    except Impossible:
        return False
    return True
