"""What tasks use in place of a partition's parameters, and the gate through which their gradients leave.

If the graphs of tasks ended in the parameters, each task would add to `.grad` by itself: hooks would run for every
task, and `autograd.grad` would find nothing. So tasks run on stand-ins: detached parameters, put into the layers for as
long as a task runs. A gate is one node of the caller's graph for each partition and mini-batch:

    parameters ─▶ gate ─▶ an empty tensor ─▶ every task of the partition ─▶ …

Its backward comes after those of all tasks, and returns what they added up in the stand-ins.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.tensors._autograd import at_end, backward_id, keeps_graph, sharded

BY_ANOTHER_WAY = (
    "a backward reached a partition's layers by another way than its outputs: a layer keeps a tensor that has a graph, "
    "such as an auxiliary loss, which it should return, or calls backward() in its forward (torch.autograd.grad works)"
)

TOKEN = torch.empty(0, requires_grad=True)
"""A dummy input that requires grad. With it, autograd makes a node even if no other input requires grad."""


class StandInParameters:
    """Stand-ins for the parameters of `modules` that take gradients; one for a parameter that occurs twice."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        made: dict[Tensor, Tensor] = {}
        self._places: list[dict[str, Any]] = []
        self._dicts: list[dict[str, Tensor | None]] = []
        self._all: list[tuple[str, Tensor]] = []
        modules = list(modules)
        kept = sharded(modules)
        for module in modules:
            if not module._parameters or module in kept:
                continue
            if isinstance(module, torch.jit.ScriptModule):
                raise RuntimeError(
                    f"a scripted layer ({module.original_name}) keeps its parameters to itself, so that a pipeline "
                    "cannot hand on their gradients; use the layer that was scripted, or torch.compile it"
                )
            replaced: dict[str, Tensor | None] = {}
            for name, p in module._parameters.items():
                replaced[name] = p
                if p is not None:
                    if nn.parameter.is_lazy(p):
                        raise RuntimeError(
                            f"{type(module).__name__} has no shape for {name!r} before its first input: run the layers "
                            "once, then train"
                        )
                    self._all.append((name, p))
                    if p.requires_grad:
                        replaced[name] = made.get(p)
                        if replaced[name] is None:
                            replaced[name] = made[p] = _stand_in(p)
            self._places.append(module.__dict__)
            self._dicts.append(replaced)
        self._versions = [p._version for _, p in self._all]
        self._watched: list[dict[str, Any]] = [
            *self._dicts,
            *(module._parameters for module in modules if module not in kept),
        ]
        self._ids = [id(x) for d in self._watched for x in d.values()]
        self.parameters = list(made)
        self._stand_ins = list(made.values())
        self._backward = -1
        self._under_way = False
        self._thread: int | None = None
        self.untouched = False  # true from the start of a backward until its first task has run

    def in_place(self) -> InPlace:
        """Put the stand-ins into the modules. The caller holds the lock of the modules."""
        return InPlace("_parameters", self._places, self._dicts)

    def check_unchanged(self, partition: int, *, forward: bool = False) -> None:
        """Raise `RuntimeError` if a parameter was changed in place since the stand-ins were made.

        `forward`: this is asked right after a first pass.
        """
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
        """Raise `RuntimeError` if a layer has replaced, added or frozen a parameter in its forward."""
        frozen = not all([stand_in.requires_grad for stand_in in self._stand_ins])
        moved = [_address(stand_in) for stand_in in self._stand_ins] != [_address(p) for p in self.parameters]
        if frozen or moved or [id(x) for d in self._watched for x in d.values()] != self._ids:
            raise RuntimeError(
                f"a layer of partition {partition} replaced, added or froze a parameter in its forward, which tasks "
                "that have graphs of their own cannot follow; do it between steps"
            )

    def check_without_gradients(self) -> None:
        """Raise `RuntimeError` if a stand-in has a gradient before the first task of this backward has run."""
        if self.untouched and any(stand_in.grad is not None for stand_in in self._stand_ins):
            raise RuntimeError(BY_ANOTHER_WAY)
        self.untouched = False

    def begin(self, backward: int) -> bool:
        """Start a backward; return `False` if it has started already. Drop the gradients of an earlier one that failed.

        Raises:
            RuntimeError: two backwards go through one mini-batch at the same time, or one went through its layers
                before it came to the pipeline.
        """
        if backward == self._backward:
            return False
        here = threading.get_ident()
        if backward < self._backward or (self._under_way and self._thread not in (None, here)):
            raise RuntimeError(
                "two backwards go through one mini-batch at the same time; let one end before the other begins"
            )
        expected = self._under_way
        if any(grad is not None for grad in self.take()) and not expected:
            raise RuntimeError(BY_ANOTHER_WAY)
        self._backward, self._under_way, self.untouched = backward, True, True
        self._thread = here
        if backward_id() >= 0:
            at_end(self._end)
        return True

    def _end(self) -> None:
        """Note, as the last thing of a backward, that it has ended, with no gradient left that nobody takes."""
        self._thread = None
        if not self._under_way and any(stand_in.grad is not None for stand_in in self._stand_ins):
            raise RuntimeError(BY_ANOTHER_WAY)

    def take(self, *, last: bool = False) -> list[Tensor | None]:
        """Return the summed gradients of `parameters` and clear them. With `last`, any later gradient is an error."""
        grads = [stand_in.grad for stand_in in self._stand_ins]
        for stand_in in self._stand_ins:
            stand_in.grad = None
            if last:
                stand_in.register_hook(_refuse)
        self._under_way = False
        return grads


def _refuse(_: Tensor) -> None:
    raise RuntimeError(BY_ANOTHER_WAY)


def gate(stand_ins: StandInParameters, device: torch.device) -> Tensor:
    """Return an empty tensor that tasks take as an input, so that they belong to the graph of the parameters.

    It is made on `device`, where the gradients will be added up. Without parameters it is a mere token.
    """
    opened: Tensor = _Gate.apply(stand_ins, device, *stand_ins.parameters) if stand_ins.parameters else TOKEN
    return opened


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_ins: StandInParameters, device: torch.device, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.stand_ins = stand_ins
        return torch.empty(0, device=device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.stand_ins.take(last=not keeps_graph()))


class InPlace:
    """Temporarily replace the attribute `key` of several modules, whose attributes are `places`.

    For parameters and buffers this is the whole dictionary, since a layer may add to it in its forward. If Ctrl-C skips
    `__exit__`, `__del__` puts the attribute back.
    """

    __slots__ = ("_before", "_key", "_places", "_values")
    _before: list[Any] | None

    def __init__(self, key: str, places: list[dict[str, Any]], values: Sequence[Any]) -> None:
        self._key, self._places, self._values, self._before = key, places, values, None

    def __enter__(self) -> None:
        key, places = self._key, self._places
        self._before = [place[key] for place in places]
        for place, value in zip(places, self._values, strict=True):
            place[key] = value

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            for place, value in zip(self._places, self._before, strict=True):
                place[self._key] = value
            self._before = None

    def __del__(self) -> None:
        if hasattr(self, "_before"):  # or Ctrl-C came before the first line of `__init__`
            self.__exit__()


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
