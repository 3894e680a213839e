"""Show a recorder what happens beside functions of PyTorch, which are all that it sees as a `TorchFunctionMode`.

That is calls of modules and of custom autograd functions, replaced buffers, and reads of the mode. For it, methods of
`nn.Module` and others are replaced while a module is recorded, and in the whole process. So what other threads do
meanwhile comes to the recorder, too. It passes that on, and records nothing of it (`Recorder.passes`).
"""

import copy
import inspect
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchgpipe.trace.parts import tensors_in
from torchgpipe.trace.recorder import Recorder

_one_at_a_time = threading.RLock()


@dataclass(frozen=True)
class _Function:
    """What calls a custom autograd function; the same for two recordings."""

    kind: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kind.apply(*args, **kwargs)


@contextmanager
def watched(recorder: Recorder) -> Iterator[None]:
    """Put the recorder's methods in the place of PyTorch's, and at the end PyTorch's back."""
    call: Any = nn.Module.__call__
    assign: Any = nn.Module.__setattr__
    apply: Any = inspect.getattr_static(torch.autograd.Function, "apply")

    def call_noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(module, call, args, kwargs)

    def assign_noted(module: nn.Module, name: str, value: Any) -> None:
        if vars(module).get("_buffers", {}).get(name, value) is not value:
            recorder.note(f"another buffer {name!r} (change it in place: self.{name}.copy_(…))")
        assign(module, name, value)

    def apply_noted(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = apply.__get__(None, cls)
        return run(*args, **kwargs) if recorder.passes() else recorder.call(run, _Function(cls), args, kwargs)

    def read_training(module: nn.Module) -> Any:
        recorder.note("training")
        return vars(module)["training"]

    def noted(owner: Any, name: str, what: str) -> tuple[Any, str, Any]:
        run = getattr(owner, name)

        def run_noted(*args: Any, **kwargs: Any) -> Any:
            # Not where `torch.no_grad`, fake tensors and the recorder ask.
            if not sys._getframe(1).f_code.co_filename.endswith(("grad_mode.py", "fake_tensor.py", "recorder.py")):
                recorder.note(what)
            return run(*args, **kwargs)

        return owner, name, run_noted

    replacements = [
        (nn.Module, "__call__", call_noted),
        (nn.Module, "__setattr__", assign_noted),
        (nn.Module, "training", property(read_training, lambda module, value: vars(module).update(training=value))),
        (torch.autograd.Function, "apply", classmethod(apply_noted)),
        *(noted(owner, name, "a random state") for owner in (torch, torch.random, torch.cuda)
          for name in dir(owner) if name[0] != "_" and ("seed" in name or "rng_state" in name)),
        *(noted(owner, name, "random numbers beside PyTorch's") for owner in (random, sys.modules.get("numpy.random"))
          for name in dir(owner) if name[0].islower() and callable(getattr(owner, name))),
        noted(torch.autocast, "__enter__", "autocast"),
        noted(torch, "is_autocast_enabled", "autocast"),
        *(noted(torch, name, "the mode of gradients") for name in ("is_grad_enabled", "is_inference_mode_enabled")),
        noted(torch, "from_numpy", "an array of NumPy"),
    ]  # fmt: skip
    with _one_at_a_time, ExitStack() as stack:
        for owner, name, value in replacements:
            before = vars(owner).get(name)
            if before is None:
                stack.callback(delattr, owner, name)
            else:
                stack.callback(setattr, owner, name, before)
            setattr(owner, name, value)
        yield


@contextmanager
def as_it_was(root: nn.Module) -> Iterator[None]:
    """At the end, put back all attributes of the modules, and what was in them, but not in parameters."""
    kept = [(m, dict(vars(m)), [(x, copy.copy(x)) for x in vars(m).values() if type(x) in (dict, OrderedDict, list)])
            for m in root.modules()]  # fmt: skip
    held = [x for _, attributes, _ in kept for x in attributes.values()]
    buffers = {*map(id, root.buffers())}  # which kernels may change without a new version
    tensors = [(x, None if id(x) in buffers else x._version, x.detach().clone())
               for x in tensors_in(held) if not isinstance(x, nn.Parameter) and x.is_leaf]  # fmt: skip
    states = [(x, x.get_state()) for x in held if isinstance(x, torch.Generator)]
    try:
        yield
    finally:
        for module, attributes, containers in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for container, before in containers:
                container.clear()
                container.update(before) if isinstance(container, dict) else container.extend(before)
        with torch.no_grad():
            for x, version, y in tensors:
                if x._version != version:
                    x.copy_(y)
        for generator, state in states:
            generator.set_state(state)
