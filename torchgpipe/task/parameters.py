"""What tasks use in place of a partition's parameters.

If the graphs of tasks ended in the parameters, each task would add to `.grad` by itself: hooks would run for every
task, and `autograd.grad` would find nothing. So tasks run on stand-ins: detached parameters, put into the layers for as
long as a task runs. A node of the caller's graph that comes after all tasks in backward (`one_node`) returns what they
added up in the stand-ins.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.tensors._autograd import at_end, backward_id, sharded

BY_ANOTHER_WAY = (
    "a backward reached a partition's layers by another way than its outputs: a layer keeps a tensor that has a graph, "
    "such as an auxiliary loss, which it should return, or calls backward() in its forward (torch.autograd.grad works)"
)
_SCRIPTED = (
    "a scripted layer ({}) keeps its parameters to itself, so that a pipeline cannot hand on their gradients; use the "
    "layer that was scripted, or torch.compile it"
)
_LAZY = "{} has no shape for {!r} before its first input: run the layers once, then train"

_OF_A_LAYER = "_made_by_a_layer"

TOKEN = torch.empty(0, requires_grad=True)
"""A dummy input that requires grad. With it, autograd makes a node even if no other input requires grad."""


class StandInParameters:
    """Stand-ins for the parameters of `modules` that take gradients; one for a parameter that occurs twice.

    Buffers that take gradients (a hypernetwork's output) have stand-ins, too, and count as parameters.

    In a backward, calls come in this order. An error is raised where gradients are there that no task has added.

        begin             by the first task that the backward reaches
        with …            around layers that run again: they meet the gradients that the parameters had
        take              by that node, after all tasks; not if only gradients of inputs are asked for
        _end              by autograd, at the very end; not if the backward fails

    `parameters` are those that have stand-ins, with their `ids`; `needs` says of all which take a gradient.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        made: dict[Tensor, Tensor] = {}
        self._replaced: list[Change] = []  # the dictionaries of parameters
        self._all: list[tuple[str, Tensor]] = []
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []  # with their stand-ins
        self._frozen: list[tuple[dict[str, Tensor | None], str, Tensor]] = []  # parameters that have none
        self._modules = modules = list(modules)
        kept = sharded(modules)
        for module in modules:
            for name in module._buffers:
                x = module._buffers.get(name)  # not by items(), which a recomputation may refuse
                if x is not None and x.requires_grad and not hasattr(x, _OF_A_LAYER):
                    self._all.append((name, x))
                    self._buffers.append((module, name, x, made.setdefault(x, _stand_in(x))))
            if not module._parameters or module in kept:
                continue
            if isinstance(module, torch.jit.ScriptModule):
                raise RuntimeError(_SCRIPTED.format(module.original_name))
            replaced: dict[str, Tensor | None] = {**module._parameters}
            for name, p in module._parameters.items():
                if p is None:
                    continue
                if nn.parameter.is_lazy(p):
                    raise RuntimeError(_LAZY.format(type(module).__name__, name))
                self._all.append((name, p))
                if p.requires_grad:
                    replaced[name] = made.setdefault(p, _stand_in(p))
                else:
                    self._frozen.append((replaced, name, p))
            self._replaced.append((module.__dict__, "_parameters", replaced))
        self._versions = [p._version for _, p in self._all]
        own = [module._parameters for module in modules if module not in kept]
        self._watched = [*own, *(new for *_, new in self._replaced)]  # a layer must not change these in its forward
        self._ids = [id(x) for d in self._watched for x in d.values()]
        self.parameters, self.ids = list(made), {*map(id, made)}
        self._stand_ins = list(made.values())
        self.needs = [p.requires_grad for _, p in self._all]
        self._met: list[Any] = [*map(_noted, self.parameters)]
        self._outer: list[tuple[list[Any], list[Any]]] = []  # what was there before, and what is shown now
        self._idle = True  # no backward has begun, or `take` has come
        self._backward = -1  # the number of the latest backward
        # In a step, forwards come after backwards, too: then stand-ins hold sums, which layers must not meet.
        self.must_show = False
        self._thread: int | None = None  # where it began, until it has ended
        if any(met is not None for met in self._met):
            self.__enter__()  # until all forwards have ended, or a backward begins

    def in_place(self) -> AbstractContextManager[object]:
        """Put the stand-ins into the modules. The caller holds the lock of the modules."""
        if not self._buffers:
            return InPlace(self._replaced)
        # Not the whole dictionary: a layer may replace other buffers meanwhile, or these.
        buffers = [(m._buffers, name, new) for m, name, x, new in self._buffers if m._buffers.get(name) is x]
        return InPlace([*self._replaced, *buffers], for_good=True)

    def __enter__(self) -> None:
        """Let layers meet the gradients that parameters had at first; raise `RuntimeError` if one adds to these."""
        sums = self._grads()
        shown = [met and _shown(met, p) for met, p in zip(self._met, self.parameters, strict=True)]
        self._outer.append((sums, shown))
        self._set(sums, shown)

    def __exit__(self, *_: object) -> None:
        (sums, shown), after = self._outer.pop(), self._grads()
        self._set(after, sums)
        if [g for g, x in zip(after, shown, strict=True) if g is not x or (g is not None and g._version)]:
            raise RuntimeError(BY_ANOTHER_WAY)

    def _set(self, present: list[Tensor | None], grads: list[Tensor | None]) -> None:
        for stand_in, before, grad in zip(self._stand_ins, present, grads, strict=True):
            if before is not grad:
                stand_in.grad = grad

    def check_unchanged(self, partition: int, *, forward: bool = False) -> None:
        """Raise `RuntimeError` if a parameter was changed in place; ask with `forward` right after a first pass."""
        if [p._version for _, p in self._all] == self._versions:
            return
        changed = next(n for (n, p), v in zip(self._all, self._versions, strict=True) if p._version != v)
        raise RuntimeError(
            f"parameter {changed!r} of partition {partition} was changed in place "
            + ("by a layer in forward" if forward else "between forward and backward")
            + ", so the recomputation of a checkpointed task would use other values; "
            + ("do not change it there" if forward else "call backward() before the optimizer's step")
            + ", or use checkpoint='never'"
        )

    def check_kept(self, partition: int) -> None:
        """Raise `RuntimeError` if a layer has replaced, added, frozen or hooked a parameter in its forward."""
        if self._outer:
            self.__exit__()
        frozen = not all([x.requires_grad and not x._backward_hooks for x in self._stand_ins])
        moved = [_address(stand_in) for stand_in in self._stand_ins] != [_address(p) for p in self.parameters]
        if frozen or moved or [id(x) for d in self._watched for x in d.values()] != self._ids:
            raise RuntimeError(
                f"a layer of partition {partition} replaced, added, froze or hooked a parameter in its forward, which "
                "tasks that have graphs of their own cannot follow; do it between steps"
            )
        self._frozen = [(d, name, p) for d, name, p in self._frozen if not p.requires_grad]
        for x in [x for module in self._modules for x in module._buffers.values()]:
            if x is not None and x.grad_fn is not None and id(x) not in self.ids:
                setattr(x, _OF_A_LAYER, True)  # its graph is that of this mini-batch, and not for the next one

    def begin(self, backward: int) -> bool:
        """Start the backward of this number; return `False` if it has started already.

        Raise `RuntimeError` if another is under way, or went through the layers before it came to the pipeline.
        """
        if backward == self._backward:
            return False
        here, idle = threading.get_ident(), self._idle
        if backward < self._backward or not (idle or self._thread in (None, here)):
            raise RuntimeError(
                "two backwards go through one mini-batch at the same time; let one end before the other begins"
            )
        if self._outer:
            self.__exit__()
        left = self.take()
        if idle:  # otherwise they are of a backward that failed, or did not come to the gate, and are dropped
            _refuse_any(left)
        self._backward, self._thread, self._idle, self.must_show = backward, here, False, True
        if backward_id() >= 0:
            at_end(self._end)
        # A recomputation makes no graph of what was frozen when its first pass made none.
        thawed = {p: _stand_in(p).requires_grad_(False) for _, _, p in self._frozen if p.requires_grad}
        for replaced, name, p in self._frozen if thawed else ():
            replaced[name] = thawed.get(p, p)
        return True

    def _end(self) -> None:
        """Note that the backward has ended; raise `RuntimeError` if a gradient was added after `take`."""
        self._thread = None
        if self._idle:
            _refuse_any(self._grads())

    def take(self, *, last: bool = False) -> list[Tensor | None]:
        """Return the summed gradients of `parameters` and clear them. With `last`, any later gradient is an error."""
        grads = self._grads()
        for stand_in in self._stand_ins:
            stand_in.grad = None
            if last:
                stand_in.register_hook(lambda grad: _refuse_any([grad]))
        self._idle = True
        return grads

    def _grads(self) -> list[Tensor | None]:
        return [stand_in.grad for stand_in in self._stand_ins]


def _refuse_any(grads: list[Tensor | None]) -> None:
    if any(grad is not None for grad in grads):
        raise RuntimeError(BY_ANOTHER_WAY)


Change = tuple[dict[str, Any], str, Any]
"""A dictionary, such as the attributes of a module; a key; and what is put there."""


class InPlace:
    """Temporarily make changes; what others change there meanwhile stays only if it may be `for_good`.

    Of parameters and buffers the whole dictionary is replaced, since a layer may add to it in its forward. If Ctrl-C
    skips `__exit__`, `__del__` takes the changes back.
    """

    __slots__ = ("_before", "_changes", "_for_good")

    def __init__(self, changes: Sequence[Change], *, for_good: bool = False) -> None:
        self._changes, self._for_good = changes, for_good
        self._before: list[Any] | None = None

    def __enter__(self) -> None:
        self._before = [place[key] for place, key, _ in self._changes]
        for place, key, value in self._changes:
            place[key] = value

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            for (place, key, value), before in zip(self._changes, self._before, strict=True):
                if not self._for_good or place.get(key) is value:
                    place[key] = before
            self._before = None

    def __del__(self) -> None:
        if getattr(self, "_before", None) is not None:  # it is not there if Ctrl-C came before the end of `__init__`
            self.__exit__()


class _Changed(Tensor):
    """In place of a gradient that a first pass may have used, and that is not the same any more."""

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        if function == Tensor._version.__get__:  # type: ignore[attr-defined]
            return 0
        raise RuntimeError(
            "a layer uses the gradient of its parameter (weight.grad), which has changed since the first pass of a "
            "checkpointed task; change it before forward or after backward (zero_grad, another backward), or use "
            "checkpoint='never'"
        )


def _noted(p: Tensor) -> tuple[weakref.ref[Tensor], int] | None:
    """Return what tells a parameter's gradient from others, but does not keep its memory, which others may need."""
    grad = p.grad if p.is_leaf else None
    return None if grad is None else (weakref.ref(grad), grad._version)


def _shown(met: tuple[weakref.ref[Tensor], int], p: Tensor) -> Tensor:
    grad = p.grad
    if grad is None or met[0]() is not grad or met[1] != grad._version:
        return p.detach().as_subclass(_Changed)
    return grad.data  # which has a version of its own: another thread may change the gradient meanwhile


def _stand_in(p: Tensor) -> Tensor:
    stand_in = p.detach()
    if not isinstance(p, nn.Parameter):
        return stand_in.requires_grad_()
    # Layers may look at the type, and at what users have written on a parameter.
    if type(stand_in) is Tensor and type(p) is not nn.Parameter:
        stand_in = stand_in.as_subclass(type(p)).requires_grad_()
    else:
        stand_in = nn.Parameter(stand_in)
    stand_in.__dict__ = p.__dict__  # what a layer or a hook writes on a parameter is for the parameter
    if getattr(p, "grad_dtype", None) != getattr(stand_in, "grad_dtype", None):
        stand_in.grad_dtype = p.grad_dtype
    return stand_in


def _address(x: Tensor) -> int:
    # Other kinds of tensors may have no memory of their own.
    return x.data_ptr() if type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided else 0
