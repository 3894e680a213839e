"""Notice storages as operators return them, and forget them when they die: which bytes are alive, and when."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.plan.count.footprint import SUMMED, Change
from torchgpipe.tensors._autograd import holders, without_torch_function
from torchgpipe.trace.parts import tensors_in

GIVEN, ADDED = -2, -3
"""What a change has in place of a storage's number: it concerns a gradient that backward starts from, or one of a
parameter that is added to an earlier one."""
COPIES = (torch.ops.aten.clone.default, torch.ops.aten.new_empty_strided.default)
"""The operators by which autograd copies a gradient, if it cannot give the parameter the gradient itself."""
ALONE = 2
"""How many tensors have a gradient's storage when autograd gives it to its parameter, and nobody else has it."""


class Live(TorchDispatchMode):
    """Note every storage that comes to life or dies in this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.changes: list[Change] = []
        self._known: dict[int, int | None] = {}
        self._made_by: dict[int, Any] = {}
        self.gradients: set[int] = set()
        """The storages of the parameters' gradients."""
        self._summed: set[int] = set()
        self._given: set[int] = set()
        self._given_written = False

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """Count neither life nor death of tensors that the caller holds anyway."""
        self._known.update((id(x.untyped_storage()), None) for x in tensors)

    def enter(self, x: Tensor, number: int) -> None:
        """Note the death of a storage that entered the layer."""
        self._watch(x.untyped_storage(), number)

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Begin the trace: a backward starts from these gradients, whose deaths are noted as `GIVEN`."""
        self._given = {id(x.untyped_storage()) for x in tensors}
        self._known.update(dict.fromkeys(self._given, GIVEN))
        self.changes.clear()

    def given_only_read(self) -> bool:
        """Return whether those gradients were neither changed in place nor kept, so it matters not who holds them."""
        return not self._given_written and len(self._given) == sum(x.storage == GIVEN for x in self.changes)

    def taken_over(self, grad: Tensor) -> bool:
        """Return whether a parameter's gradient is what an operator made for it alone, and not a copy of that."""
        storage = grad.untyped_storage()
        made_by = self._made_by.get(id(storage))
        copied = made_by is None or made_by in COPIES
        return not copied and holders(storage) <= ALONE

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with without_torch_function():
            result = func(*args, **kwargs)
            in_place = func is torch.ops.aten.add_.Tensor and isinstance(args[1], Tensor)
            if in_place and id(args[0].untyped_storage()) in self.gradients:
                self._summed.add(id(args[1].untyped_storage()))
            for x in tensors_in(result):
                storage = x.untyped_storage()
                if id(storage) not in self._known:
                    self.changes.append(Change(float(storage.nbytes()), None))
                    self._watch(storage, None)
                    self._made_by[id(storage)] = func
                elif id(storage) in self._given and func._schema.is_mutable:
                    self._given_written = True
            return result

    def _watch(self, storage: torch.UntypedStorage, number: int | None) -> None:
        if id(storage) in self._known:
            return
        self._known[id(storage)] = number
        weakref.finalize(storage, self._forget, id(storage), float(storage.nbytes())).atexit = False

    def _forget(self, key: int, nbytes: float) -> None:
        number = self._known.pop(key, None)
        self._made_by.pop(key, None)
        self.changes.append(Change(-nbytes, SUMMED if key in self._summed else number))
        self._summed.discard(key)

    def peak(self) -> float:
        """Return the most bytes since it began, those that entered apart."""
        live = most = 0.0
        for change in self.changes:
            if change.storage is None:
                live += change.bytes
                most = max(most, live)
        return most
