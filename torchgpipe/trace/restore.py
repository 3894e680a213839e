"""Restore a module and all random states to what they were before the module ran."""

import copy
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import Module

from torchgpipe.tensors import accelerator
from torchgpipe.trace.parts import tensors_in


@contextmanager
def as_it_was(root: Module) -> Iterator[None]:
    """Restore a module and all random states at the end of this context.

    The attributes of all submodules are restored, and also the contents of these attributes, such
    as buffers. Only the contents of parameters are not restored.
    """
    with _same_attributes(root), _same_contents(root), _same_random_states(root):
        yield


def set_mode(root: Module, training: bool) -> None:
    """Set the mode (training or evaluation) of all submodules, without a call of `train`.

    A class may override `train` so that it changes parameters: for example, it may merge adapters
    into weights.
    """
    for module in root.modules():
        module.training = training


@contextmanager
def _same_attributes(root: Module) -> Iterator[None]:
    """Restore the attributes of all submodules at the end of this context.

    The items of attributes that are dictionaries or lists are restored, too.
    """
    modules: list[tuple[Module, dict[str, Any]]] = []
    containers: list[tuple[Any, Any]] = []
    for module in root.modules():
        attributes = dict(vars(module))
        modules.append((module, attributes))
        held = [x for x in attributes.values() if type(x) in (dict, OrderedDict, list)]
        containers += zip(held, map(copy.copy, held), strict=True)
    try:
        yield
    finally:
        for module, attributes in modules:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for container, before in containers:
            container.clear()
            if isinstance(container, dict):
                container.update(before)
            else:
                container.extend(before)


@contextmanager
def _same_contents(root: Module) -> Iterator[None]:
    """Restore the contents of a module's tensors at the end of this context.

    The states of the module's random generators are restored, too. The contents of parameters are
    not restored.
    """
    buffers = set(map(id, root.buffers()))
    tensors: list[tuple[Tensor, int | None, Tensor]] = []
    generators: list[tuple[torch.Generator, Tensor]] = []
    for module in root.modules():
        for held in vars(module).values():
            if isinstance(held, torch.Generator):
                generators.append((held, held.get_state()))
            for x in tensors_in(held):
                if x.is_leaf and not isinstance(x, nn.Parameter):
                    # Kernels can change a buffer without increasing its version.
                    version = None if id(x) in buffers else x._version
                    tensors.append((x, version, x.detach().clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for x, version, contents in tensors:
                if x._version != version:
                    x.copy_(contents)
        for generator, state in generators:
            generator.set_state(state)


@contextmanager
def _same_random_states(root: Module) -> Iterator[None]:
    """Restore the random states of Python, NumPy and PyTorch at the end of this context.

    For PyTorch, these are the states of the CPU and of the GPUs that the module is on.
    """
    held = [x.device for x in (*root.parameters(), *root.buffers())]
    numpy = sys.modules.get("numpy")
    array = numpy.random.get_state() if numpy else None
    python = random.getstate()
    try:
        with torch.random.fork_rng(accelerator.with_generators(held)):
            yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(array)


def random_states() -> tuple[Any, ...]:
    """Return the states of the default generators of PyTorch (CPU), Python and NumPy."""
    numpy = sys.modules.get("numpy")
    _, keys, *others = numpy.random.get_state() if numpy else ("", b"")
    with unset_fake_temporarily():
        state = torch.default_generator.get_state()
        return (state.numpy().tobytes(), random.getstate(), bytes(keys), others)
