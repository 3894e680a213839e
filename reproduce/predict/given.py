"""Find the model that a user names: one of the papers', one of torchvision's, or what a function of theirs returns."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchgpipe
from reproduce import models
from reproduce.models.resnet import torchvision_model
from reproduce.predict.largest import MODELS
from torchgpipe.tensors.microbatch import mapped
from torchgpipe.trace.layer import Layers

PAPERS_SIZES: dict[str, tuple[int, ...]] = {"amoebanet": (18, 256), "unet": (5, 64)}
IMAGE = (3, 224, 224)
"""The shape of a sample for torchvision's models, unless told otherwise."""


@dataclass(frozen=True)
class Given:
    """A model that a user named: what it is called, and how it is trained unless told otherwise."""

    title: str
    build: Callable[[], tuple[nn.Module, Any]]
    """Return the model, and a sample for it: a tensor, a tuple of tensors, or a dictionary of them by argument."""
    batch_size: int = 128
    optimizer: str = "sgd"

    def built(self, rows: int, device: torch.device) -> tuple[nn.Sequential, Any]:
        """Return the model on `meta`, as an `nn.Sequential`, and a sample of so many rows on the device.

        Raises:
            ValueError: it is another module, and cannot become one.
        """
        with torch.device("meta"):
            module, sample = self.build()
            if not isinstance(module, nn.Sequential):
                module = torchgpipe.sequential(module, sample)

        def take(x: Tensor, grows: bool = True) -> Tensor:
            if x.is_meta:
                x = torch.rand(x.shape).to(x.dtype)
            return x.to(device)[torch.arange(rows, device=device) % len(x) if grows else ...]

        if isinstance(sample, dict) and isinstance(module, Layers) and (signature := module.signature) is not None:
            grows = dict(zip(signature.names, signature.batched, strict=True))
            return module, {name: take(x, grows[name]) if name in grows else x for name, x in sample.items()}
        return module, mapped(take, sample)


def find_given(name: str, sizes: tuple[int, ...], shape: tuple[int, ...]) -> Given:
    """Return the model of this name: the papers' in these `sizes`, others for samples of this `shape`.

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
    """Return a function of a module that can be imported, from the present folder too."""
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
    """Return the model and its sample, from what a function returned."""
    module, sample = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(module, nn.Module):
        raise ValueError(f"{name} has to return a model, or a model and a sample; got {type(module).__name__}")
    if shape:
        sample = torch.empty(1, *shape)
    if sample is None:
        raise ValueError(f"{name} returns no sample beside its model: let it return both, or say --input 3x224x224")
    return module, sample
