"""Show a recorder what happens beside functions of PyTorch, which are all that it sees as a `TorchFunctionMode`.

That is calls of modules and of custom autograd functions, replaced buffers, and reads of the mode. For it, methods of
`nn.Module` and others are replaced while a module is recorded, and in the whole process. So what other threads do
meanwhile comes to the recorder, too. It passes that on, and records nothing of it (`Recorder.passes`).
"""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from torchgpipe.trace.recorder import Recorder


class _Function:
    """What calls a custom autograd function; the same for two recordings."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kind.apply(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Function) and self.kind is other.kind

    def __hash__(self) -> int:
        return hash(self.kind)


class _Training:
    """In place of a module's attribute `training`: tells the recorder that it is read."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __get__(self, module: Any, kind: Any = None) -> Any:
        if module is None:
            return self
        self._recorder.note_mode("training")
        return module.__dict__["training"]

    def __set__(self, module: Any, value: bool) -> None:
        module.__dict__["training"] = value


@contextmanager
def watched(recorder: Recorder) -> Iterator[None]:
    """Put the recorder's methods in the place of PyTorch's, and at the end PyTorch's back."""
    call: Any = nn.Module.__call__
    assign: Any = nn.Module.__setattr__
    apply: Any = inspect.getattr_static(torch.autograd.Function, "apply")
    enter_autocast: Any = torch.autocast.__enter__
    is_autocast_enabled: Any = torch.is_autocast_enabled

    def call_noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(module, call, args, kwargs)

    def assign_noted(module: nn.Module, name: str, value: Any) -> None:
        recorder.check_assigned(module, name, value)
        assign(module, name, value)

    def apply_noted(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = apply.__get__(None, cls)
        return run(*args, **kwargs) if recorder.passes() else recorder.call(run, _Function(cls), args, kwargs)

    def enter_autocast_noted(self: Any) -> Any:
        recorder.note_mode("autocast")
        return enter_autocast(self)

    def is_autocast_enabled_noted(*args: Any) -> Any:
        recorder.note_mode("autocast")
        return is_autocast_enabled(*args)

    replacements = [
        (nn.Module, "__call__", call_noted),
        (nn.Module, "__setattr__", assign_noted),
        (nn.Module, "training", _Training(recorder)),
        (torch.autograd.Function, "apply", classmethod(apply_noted)),
        (torch.autocast, "__enter__", enter_autocast_noted),
        (torch, "is_autocast_enabled", is_autocast_enabled_noted),
    ]
    with ExitStack() as stack:
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
    """At the end, put back all attributes of the modules, and what was in dictionaries and lists among them."""
    kept = [(m, dict(vars(m)), [(x, copy.copy(x)) for x in vars(m).values() if type(x) in (dict, OrderedDict, list)])
            for m in root.modules()]  # fmt: skip
    try:
        yield
    finally:
        for module, attributes, containers in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for container, before in containers:
                container.clear()
                container.update(before) if isinstance(container, dict) else container.extend(before)
