"""What tasks use in place of a partition's parameters.

What goes wrong without it: a hook clips a parameter's gradient. It would run for every micro-batch, and clip each part.

If the graphs of tasks ended in the parameters, each task would add to `.grad` by itself: hooks would run for every
task, and `autograd.grad` would find nothing. So tasks run on stand-ins: detached parameters, which are put into the
layers (in_place.py). A node of the caller's graph that comes after all tasks in backward (`one_node`) returns what they
added up in the stand-ins.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Set

import torch
from torch import Tensor, nn

from torchgpipe.task.guards.in_place import Change
from torchgpipe.tensors._autograd import accumulator_of, at_end, backward_id, sharded

BY_ANOTHER_WAY = (
    "a backward reached a partition's layers by another way than its outputs: a layer keeps a tensor that has a graph, "
    "such as an auxiliary loss, which it should return, or calls backward() in its forward (torch.autograd.grad works)"
)
READS_GRADIENT = (
    "a layer reads the gradient of its parameter (weight.grad), which has none before all micro-batches have gone "
    "backward; read it between steps, and hand the layer what it needs as a buffer or an input"
)
_SCRIPTED = (
    "a scripted layer ({}) keeps its parameters to itself, so that a pipeline cannot hand on their gradients; use the "
    "layer that was scripted, or torch.compile it"
)
_LAZY = "{} has no shape for {!r} before its first input: run the layers once, then train"

_OF_A_LAYER = "_made_by_a_layer"

TOKEN = torch.empty(0, requires_grad=True)
"""A dummy input that requires grad. With it, autograd makes a node even if no other input requires grad."""

_TOKENS_NODE = accumulator_of(TOKEN)
"""Held, as many threads use it: in anomaly mode, two threads that make it at once can wait for each other for ever."""


class StandInParameters:
    """Stand-ins for the parameters of `modules` that take gradients; one for a parameter that occurs twice.

    Stand-ins of an `outer` run, which are given by their ids, stay: gradients are added to these.

    Buffers that take gradients (a hypernetwork's output) have stand-ins, too, and count as parameters.

    In a backward, calls come in this order. An error is raised where gradients are there that no task has added.

        begin             by the first task that the backward reaches
        take              by that node, after all tasks; not if only gradients of inputs are asked for
        _end              by autograd, at the very end; not if the backward fails

    Attributes:
        by_parameter: the stand-in of each parameter that takes a gradient.
        ids: of these parameters and of their stand-ins.
        needs: which of all parameters take a gradient.
        changes: what puts the stand-ins into the modules' dictionaries.
    """

    def __init__(self, modules: Iterable[nn.Module], outer: Set[int] = frozenset()) -> None:
        self.by_parameter: dict[Tensor, Tensor] = {}
        self.changes: list[Change] = []
        self._all: list[tuple[str, Tensor]] = []
        self._frozen: list[
            tuple[dict[str, Tensor | None], str, Tensor]
        ] = []  # parameters that have none
        self._modules = modules = list(modules)
        kept = sharded(modules)
        for module in modules:
            for name in module._buffers:
                x = module._buffers.get(name)  # not by items(), which a recomputation may refuse
                if x is not None and x.requires_grad and not hasattr(x, _OF_A_LAYER):
                    self._all.append((name, x))
                    # Not the whole dictionary: a layer may replace other buffers meanwhile, or these.
                    self.changes.append(
                        Change(module._buffers, name, self._stand_in(x), may_stay=True)
                    )
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
                if p.requires_grad and id(p) not in outer:
                    replaced[name] = self._stand_in(p)
                elif not p.requires_grad:
                    self._frozen.append((replaced, name, p))
            self.changes.append(Change(module.__dict__, "_parameters", replaced))
        self._versions = [p._version for _, p in self._all]
        # A layer must not change these dictionaries in its forward.
        self._watched = [module._parameters for module in modules if module not in kept]
        self._watched += [change.value for change in self.changes if change.key == "_parameters"]
        self._ids = self._ids_watched()
        self.ids = {*map(id, self.by_parameter), *map(id, self.by_parameter.values())}
        self.needs = [p.requires_grad for _, p in self._all]
        self._idle = True  # no backward has begun, or `take` has come
        self._backward = -1  # the number of the latest backward
        self._thread: int | None = None  # where it began, until it has ended
        # Held for the same reason as `_TOKENS_NODE`: several threads may use one stand-in.
        anomaly = torch.is_anomaly_enabled()
        self._nodes = [accumulator_of(x) for x in self.by_parameter.values()] if anomaly else []

    def _stand_in(self, p: Tensor) -> Tensor:
        if p not in self.by_parameter:
            self.by_parameter[p] = _detached(p)
        return self.by_parameter[p]

    def _ids_watched(self) -> list[int]:
        return [id(x) for names in self._watched for x in names.values()]

    def check_unchanged(self, partition: int, *, forward: bool = False) -> None:
        """Raise `RuntimeError` if a parameter was changed in place; ask with `forward` right after a first pass."""
        if [p._version for _, p in self._all] == self._versions:
            return
        changed = next(
            n for (n, p), v in zip(self._all, self._versions, strict=True) if p._version != v
        )
        raise RuntimeError(
            f"parameter {changed!r} of partition {partition} was changed in place "
            + ("by a layer in forward" if forward else "between forward and backward")
            + ", so the recomputation of a checkpointed task would use other values; "
            + (
                "do not change it there"
                if forward
                else "call backward() before the optimizer's step"
            )
            + ", or use checkpoint='never'"
        )

    def check_kept(self, partition: int) -> None:
        """Raise `RuntimeError` if a layer has replaced, added, frozen or hooked a parameter in its forward."""
        frozen = not all(
            [x.requires_grad and not x._backward_hooks for x in self.by_parameter.values()]
        )
        moved = any([_address(p) != _address(x) for p, x in self.by_parameter.items()])
        if frozen or moved or self._ids_watched() != self._ids:
            raise RuntimeError(
                f"a layer of partition {partition} replaced, added, froze or hooked a parameter in its forward, which "
                "tasks that have graphs of their own cannot follow; do it between steps"
            )
        self._frozen = [(d, name, p) for d, name, p in self._frozen if not p.requires_grad]
        for x in [x for module in self._modules for x in module._buffers.values()]:
            if x is not None and x.grad_fn is not None and id(x) not in self.ids:
                setattr(
                    x, _OF_A_LAYER, True
                )  # its graph is that of this mini-batch, and not for the next one

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
        left = self.take()
        if idle:  # otherwise they are of a backward that failed, or did not come to the gate, and are dropped
            _refuse_any(left)
        self._backward, self._thread, self._idle = backward, here, False
        if backward_id() >= 0:
            at_end(self._end)
        # A recomputation makes no graph of what was frozen when its first pass made none.
        thawed = {
            p: _detached(p).requires_grad_(False) for _, _, p in self._frozen if p.requires_grad
        }
        for replaced, name, p in self._frozen if thawed else ():
            replaced[name] = thawed.get(p, p)
        return True

    def _end(self) -> None:
        """Note that the backward has ended; raise `RuntimeError` if a gradient was added after `take`."""
        self._thread = None
        if self._idle:
            _refuse_any([stand_in.grad for stand_in in self.by_parameter.values()])

    def take(self, *, last: bool = False) -> list[Tensor | None]:
        """Return the summed gradients, in the order of `by_parameter`, and clear them.

        With `last`, any later gradient is an error.
        """
        sums = []
        for stand_in in self.by_parameter.values():
            sums.append(stand_in.grad)
            stand_in.grad = None
            if last:
                stand_in.register_hook(lambda grad: _refuse_any([grad]))
        self._idle = True
        return sums


def _refuse_any(grads: list[Tensor | None]) -> None:
    if any(grad is not None for grad in grads):
        raise RuntimeError(BY_ANOTHER_WAY)


def _detached(p: Tensor) -> Tensor:
    stand_in = p.detach()
    if not isinstance(p, nn.Parameter):
        return stand_in.requires_grad_()
    # Layers may look at the type, and at what users have written on a parameter.
    if type(stand_in) is Tensor and type(p) is not nn.Parameter:
        stand_in = stand_in.as_subclass(type(p)).requires_grad_()
    else:
        stand_in = nn.Parameter(stand_in)
    stand_in.__dict__ = (
        p.__dict__
    )  # what a layer or a hook writes on a parameter is for the parameter
    if getattr(p, "grad_dtype", None) != getattr(stand_in, "grad_dtype", None):
        stand_in.grad_dtype = p.grad_dtype
    return stand_in


def _address(x: Tensor) -> int:
    # Other kinds of tensors may have no memory of their own.
    return x.data_ptr() if type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided else 0
