"""Tell a recorder of module calls about events that it cannot see, such as calls of submodules."""

import inspect
import logging
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn import Module
from torch.utils import checkpoint

from torchgpipe.tensors import accelerator
from torchgpipe.trace import restore
from torchgpipe.trace.recorder import Recorder
from torchgpipe.trace.whole import CHECKPOINT, OTHER_RANDOM, TRAINING

Replacement = tuple[Any, str, Any]
"""A module or class, the name of one of its attributes, and the new value of the attribute."""

_one_at_a_time = threading.RLock()

# PyTorch's log of calls that fail on fake tensors. It is turned off, because such failures are
# normal: `sequential` guesses which arguments have a batch dimension, until a guess works.
_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def watched(recorder: Recorder) -> Iterator[None]:
    """Within this context, tell a recorder about events that it cannot see itself.

    The recorder is a `TorchFunctionMode`, to which PyTorch shows only calls of functions. The other
    events are:

    - calls of modules and of custom autograd functions
    - assignments to buffers, and reads of `training`
    - uses of autocast, grad mode, random states and random numbers

    To see these events, the context replaces functions of PyTorch, such as methods of `nn.Module`,
    in the whole process. So the recorder is also told about events in other threads, which it
    ignores (`Recorder.passes`).
    """
    replacements = [
        *_module_calls(recorder),
        *_module_attributes(recorder),
        *_noted_functions(recorder),
        (_LOG, "disabled", True),
        # In evaluation, the fast path of `nn.TransformerEncoder` makes other calls.
        (torch.backends.mha, "get_fastpath_enabled", lambda: False),
    ]
    # In this context, functions that are compiled by torch.compile run uncompiled, because the
    # compiler cannot handle the recorder: it would crash the process.
    with _one_at_a_time, torch.compiler.set_stance("force_eager"), ExitStack() as stack:
        for replacement in replacements:
            stack.enter_context(mock.patch.object(*replacement, create=True))
        yield


def _module_calls(recorder: Recorder) -> list[Replacement]:
    """Return replacements of PyTorch's functions that tell a recorder about calls of modules.

    They also tell the recorder about calls of custom autograd functions.
    """
    call: Any = Module.__call__
    apply: Any = inspect.getattr_static(torch.autograd.Function, "apply")

    def call_noted(module: Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(module, call, args, kwargs)

    def apply_noted(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = apply.__get__(None, cls)
        if recorder.passes():
            return run(*args, **kwargs)
        return recorder.call(run, run, args, kwargs)

    return [
        (Module, "__call__", call_noted),
        (torch.autograd.Function, "apply", classmethod(apply_noted)),
    ]


def _module_attributes(recorder: Recorder) -> list[Replacement]:
    """Return replacements of PyTorch's functions that tell a recorder about uses of attributes.

    These uses are assignments to a module's buffers, and reads of a module's `training`.
    """
    assign: Any = Module.__setattr__

    def assign_noted(module: Module, name: str, value: Any) -> None:
        buffers = vars(module).get("_buffers", {})
        if buffers.get(name, value) is not value:
            recorder.note(f"another buffer {name!r} (change it in place: self.{name}.copy_(…))")
        assign(module, name, value)

    def read_training(module: Module) -> Any:
        recorder.note(TRAINING)
        return vars(module)["training"]

    def write_training(module: Module, value: Any) -> None:
        vars(module)["training"] = value

    return [
        (Module, "__setattr__", assign_noted),
        (Module, "training", property(read_training, write_training)),
    ]


def _noted_functions(recorder: Recorder) -> list[Replacement]:
    """Return replacements of functions; each replacement tells a recorder when it is called.

    The replaced functions are those for autocast, gradient modes, random states and random numbers.
    Calls by PyTorch's `no_grad` and fake tensors, and by this library's recording, are not noted.
    """
    own_modules = {
        torch.no_grad.__module__,
        type(recorder.fake).__module__,
        Recorder.__module__,
        restore.__name__,
    }

    def noted(owner: Any, name: str, what: str) -> Replacement:
        run = getattr(owner, name)

        def run_noted(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__")
            if caller not in own_modules:
                recorder.note(CHECKPOINT if caller == checkpoint.__name__ else what)
            return run(*args, **kwargs)

        return owner, name, run_noted

    replacements = [
        noted(torch.autocast, "__enter__", "autocast"),
        noted(torch, "is_autocast_enabled", "autocast"),
        noted(torch, "is_grad_enabled", "the mode of gradients"),
        noted(torch, "is_inference_mode_enabled", "the mode of gradients"),
        noted(torch, "from_numpy", "an array of NumPy"),
        noted(checkpoint.CheckpointFunction, "apply", CHECKPOINT),
    ]
    for owner in (torch, torch.random, accelerator.RANDOM):
        for name in dir(owner):
            state = "seed" in name or "rng_state" in name
            if state and not name.startswith("_"):
                replacements.append(noted(owner, name, "a random state"))
    for library in (random, sys.modules.get("numpy.random")):
        for name in dir(library):
            function = callable(getattr(library, name))
            if function and name[0].islower():
                replacements.append(noted(library, name, OTHER_RANDOM))
    return replacements
