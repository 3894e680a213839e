"""Watch a module's forward: its calls of submodules and of custom autograd functions, and whether it heeds the mode."""

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
    """A custom autograd function, as something to call."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kind.apply(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Function) and self.kind is other.kind

    def __hash__(self) -> int:
        return hash(self.kind)


class _Training:
    """In place of a module's attribute `training`: lets the recorder know that it is read."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __get__(self, module: Any, kind: Any = None) -> Any:
        if module is None:
            return self
        self._recorder.heed("training")
        return module.__dict__["training"]

    def __set__(self, module: Any, value: bool) -> None:
        module.__dict__["training"] = value


@contextmanager
def watched(recorder: Recorder) -> Iterator[None]:
    """Let the recorder see calls of modules and of custom autograd functions, and who looks at the mode."""
    run: Any = nn.Module.__call__
    apply: Any = inspect.getattr_static(torch.autograd.Function, "apply")
    assign: Any = nn.Module.__setattr__
    enter: Any = torch.autocast.__enter__
    asked: Any = torch.is_autocast_enabled

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.enter(self, run, args, kwargs)

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        ran = apply.__get__(None, cls)
        return ran(*args, **kwargs) if recorder.within() else recorder.call(ran, _Function(cls), args, kwargs)

    def assigned(self: nn.Module, name: str, value: Any) -> None:
        recorder.assign(self, name, value)
        assign(self, name, value)

    def entered(self: Any) -> Any:
        recorder.heed("autocast")
        return enter(self)

    def is_enabled(*args: Any) -> Any:
        recorder.heed("autocast")
        return asked(*args)

    new = [
        (nn.Module, "__call__", call),
        (nn.Module, "__setattr__", assigned),
        (nn.Module, "training", _Training(recorder)),
        (torch.autograd.Function, "apply", classmethod(applied)),
        (torch.autocast, "__enter__", entered),
        (torch, "is_autocast_enabled", is_enabled),
    ]
    with ExitStack() as stack:
        for owner, name, value in new:
            before = vars(owner).get(name)
            if before is None:
                stack.callback(delattr, owner, name)
            else:
                stack.callback(setattr, owner, name, before)
            setattr(owner, name, value)
        yield


@contextmanager
def as_it_was(root: nn.Module) -> Iterator[None]:
    """Put back all attributes of the modules, and what is in those that are dictionaries or lists."""
    kept = [(m, dict(vars(m)), [(x, copy.copy(x)) for x in vars(m).values() if type(x) in (dict, OrderedDict, list)])
            for m in root.modules()]  # fmt: skip
    try:
        yield
    finally:
        for module, attributes, contents in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for holder, before in contents:
                holder.clear()
                holder.update(before) if isinstance(holder, dict) else holder.extend(before)
