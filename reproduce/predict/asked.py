"""Find the model for `python -m reproduce plan`.

The user names a model: one of the papers' models, one of torchvision's models, or a function that
returns a model.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torchgpipe
from reproduce.models import built as models
from reproduce.models.counted import ALIKE, counted
from reproduce.models.resnet import torchvision_model
from reproduce.predict.largest import Family, Sizes
from torchgpipe.plan.count.count import Counts, count
from torchgpipe.plan.count.loss import loss_of
from torchgpipe.step.targets import with_tensors
from torchgpipe.tensors.microbatch import mapped
from torchgpipe.trace.layer import Layers
from torchgpipe.trace.sequential import flat

# The largest value that is tried for an argument of the user's function.
MOST = 2**20
# To count the operations of more layers, and to balance them, takes minutes.
MOST_LAYERS = 4096
# The default shape of a sample for torchvision's models.
IMAGE = (3, 224, 224)


class Paper(NamedTuple):
    """A model of the papers, with the defaults of its training.

    Attributes:
        sizes: The default sizes, such as (L, D). Empty if the model always has the same size.
        steps: For each size, a number of which the size must be a multiple.
        most: For each size, the largest value that is tried.
    """

    name: str
    batch_size: int
    optimizer: str
    sizes: Sizes = ()
    steps: Sizes = ()
    most: Sizes = ()

    @property
    def family(self) -> Family:
        """The model in all its sizes."""
        model = models.MODELS[self.name]

        def build(sizes: Sizes) -> nn.Module:
            return _of_paper(self, sizes).on_meta()[0]

        def counts(sizes: Sizes) -> Counts:
            return counted(models.SizedModel(self.name, sizes, model.input_shape))

        return Family(self.name, model.sizes, self.sizes, self.steps, self.most, build, counts)


PAPERS = {  # by the name on the command line
    "amoebanet": Paper("AmoebaNet-D", 128, "rmsprop", (18, 256), (3, 16), (384, 8192)),
    "unet": Paper("U-Net", 32, "sgd", (5, 64), (1, 8), (384, 4096)),
    "resnet101": Paper("ResNet-101", 128, "sgd"),
}


class Built(NamedTuple):
    """A model, with what is needed to predict its training.

    Attributes:
        module: The model.
        sample: An example input: a tensor, a tuple of tensors, or a dictionary of keyword
            arguments.
        criterion: The criterion, or `None` to predict the training without a loss.
        target: The target of the example input.
    """

    module: nn.Module
    sample: Any
    criterion: Any = None
    target: Any = None


@dataclass(frozen=True)
class Given:
    """A model that the user named, with the default batch size and optimizer of its training."""

    title: str
    build: Callable[[], Built]
    batch_size: int = 128
    optimizer: str = "sgd"

    def on_meta(self) -> Built:
        """Return the model on `meta`, without data for its parameters."""
        with torch.device("meta"):
            return self.build()

    def built(self, samples: int, device: torch.device) -> tuple[nn.Sequential, Built]:
        """Return the model as a sequence of layers, and what it is trained on: `samples` samples.

        The model is on the device `meta`, without data for its parameters. The input and the
        target are on `device`. Raise `ValueError` if the model cannot be split into layers.
        """
        given = self.on_meta()
        module, sample = given.module, given.sample
        with torch.device("meta"):
            if not isinstance(module, nn.Sequential):
                module = torchgpipe.sequential(module, sample)

        def placed(x: Tensor) -> Tensor:
            if x.is_meta:
                x = torch.rand(x.shape).to(x.dtype)
            return x.to(device)

        def batched(x: Tensor) -> Tensor:
            repeated = torch.arange(samples, device=device) % len(x)
            return placed(x)[repeated]

        given = given._replace(target=with_tensors(batched, given.target))
        signature = module.signature if isinstance(module, Layers) else None
        if not isinstance(sample, dict) or signature is None:
            return module, given._replace(sample=mapped(batched, sample))
        has_batch = dict(zip(signature.names, signature.batched, strict=True))
        arguments = {}
        for name, x in sample.items():
            if name in has_batch:  # else it is no tensor
                x = batched(x) if has_batch[name] else placed(x)
            arguments[name] = x
        return module, given._replace(sample=arguments)


def find_given(name: str, sizes: Sizes, shape: tuple[int, ...]) -> Given:
    """Return the model with a given name, or raise `ValueError`.

    Args:
        name: The name, such as "unet", "torchvision:resnet50" or "package.module:function".
        sizes: The sizes of a model of the papers. If it is empty, the model has its default sizes.
        shape: The shape of a sample, unless the model is one of the papers. If it is empty,
            torchvision's models have a default shape, and a function must return an example input.
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
        image = shape or IMAGE
        size = image[-1]
        return Given(name, lambda: Built(torchvision_model(what, size), torch.empty(1, *image)))
    function = _function(where, what)
    return Given(name, lambda: _returned(name, function(), shape))


def find_family(name: str, grows: str, shape: tuple[int, ...]) -> Family:
    """Return all models that a user's function can build, to search for the largest that fits.

    Raise `ValueError` if there is no such function, or if the function has no such argument.

    Args:
        name: The function, such as "package.module:function".
        grows: The name of an argument of the function. The model grows with this argument, such as
            a number of layers. The search starts with the argument's default.
        shape: The shape of a sample. If it is empty, the function returns an example input.
    """
    where, _, what = name.partition(":")
    function = _function(where, what)
    parameters = inspect.signature(function).parameters
    given = parameters.get(grows)
    start = None if given is None else given.default
    if not isinstance(start, int) or isinstance(start, bool) or start < 1:
        numbers = [
            name for name, each in parameters.items() if type(each.default) is int and each.default
        ]
        known = " or ".join(numbers) or "it has none"
        raise ValueError(
            f"--largest {grows}: {name} needs an argument {grows} with a whole number as its "
            f"default, such as def {what}({grows}=2); arguments with such a default: {known}"
        )

    def given_size(sizes: Sizes) -> Given:
        return Given(name, lambda: _returned(name, function(**{grows: sizes[0]}), shape))

    def build(sizes: Sizes) -> nn.Module:
        return given_size(sizes).on_meta()[0]

    @functools.cache
    def counts(sizes: Sizes) -> Counts:
        module, given = given_size(sizes).built(1, torch.device("meta"))
        sample = flat(module, given.sample)
        loss = loss_of(given.criterion, given.target, module, sample)
        return count(module, sample, alike=ALIKE, loss=loss)

    return Family(name, (grows,), (start,), (1,), (MOST,), build, counts, MOST_LAYERS)


def _of_paper(paper: Paper, sizes: Sizes) -> Given:
    model = models.MODELS[paper.name]
    sizes = sizes or paper.sizes

    def build() -> Built:
        return Built(model.build(*sizes), torch.empty(1, *model.input_shape))

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
        raise ValueError(
            f"{where}:{what} has to be a function that returns a model, but it is of type {kind}"
        )
    function: Callable[[], Any] = found
    return function


def _returned(name: str, found: Any, shape: tuple[int, ...]) -> Built:
    """Return a `Built` from what the user's function returned (`found`): a model and other objects.

    The function can also return an example input, a criterion and a target. If `shape` is given,
    the `Built` has an example input of this shape instead of the function's own.
    """
    built = Built(found, None)
    if isinstance(found, tuple) and len(found) in (2, 4):
        built = Built(*found)
    if not isinstance(built.module, nn.Module):
        kind = type(built.module).__name__
        raise ValueError(
            f"{name} has to return a model; a model and an example input; or a model, an example "
            f"input, a criterion and a target. It returned {kind}"
        )
    if shape:
        built = built._replace(sample=torch.empty(1, *shape))
    if built.sample is None:
        raise ValueError(
            f"{name} returns a model but no example input: let it return both, "
            "or give the shape of an input, such as --input 3x224x224"
        )
    return built
