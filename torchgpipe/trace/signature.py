"""The signature of a traced module: the structures around the tensors that it takes and returns."""

import inspect
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from torchgpipe.tensors.microbatch import TensorOrTensors, tensors_of
from torchgpipe.trace.generalise import same
from torchgpipe.trace.parts import Slots


class Signature:
    """What a module takes and returns, from a sample: a tensor, a tuple of arguments, or a dictionary of them by name.

    For each tensor among the arguments, `names` has that of its argument, and `batched` whether it has a batch
    dimension.
    """

    def __init__(self, module: nn.Module, sample: Any) -> None:
        found = inspect.signature(module.forward)
        bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
        self._parameters = inspect.Signature(bare)
        self._rest = next((p.name for p in bare if p.kind is inspect.Parameter.VAR_KEYWORD), None)
        self._slots = Slots()
        self._given: dict[str, Any] = {}
        self.names: list[str] = []
        args, kwargs = arguments(sample)
        self._by_name = isinstance(sample, dict)
        self._passed = [*self._parameters.bind(*args, **kwargs).arguments]
        for name, value in self._bound(args, kwargs).arguments.items():
            self._given[name] = self._slots.taken(value)
            self.names += [name] * (len(self._slots.tensors) - len(self.names))
        self._like = [(tuple(x.shape), x.dtype) for x in self._slots.tensors]
        self._slots = self._slots.again()
        self.batched = (True,) * len(self.names)

    def call(self, module: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """Call the module as with the sample, with these tensors in place of the sample's."""
        found = self._slots.put_back(self._given, tensors)
        bound = self._parameters.bind_partial()
        bound.arguments.update({name: found[name] for name in self._passed})
        if not self._by_name:
            return module(*bound.args, **bound.kwargs)
        more = {} if self._rest is None else found[self._rest]
        return module(
            **{name: x for name, x in bound.arguments.items() if name != self._rest}, **more
        )

    def arguments(self, input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that an input stands for, as a sample does; a tuple may be one argument, too."""
        args, kwargs = arguments(input)
        try:
            self._parameters.bind(*args, **kwargs)
        except TypeError:
            return (input,), {}
        return args, kwargs

    def flat(self, args: Sequence[Any], kwargs: dict[str, Any]) -> TensorOrTensors:
        """Return the tensors among the arguments; raise if these differ from the sample's in more than batch size."""
        slots = self._slots.again()
        for name, value in self._bound(args, kwargs).arguments.items():
            taken = slots.taken(value)
            if taken != self._given[name] and not same(taken, self._given[name]):
                raise ValueError(
                    f"{name} is {taken!r}, but was {self._given[name]!r} in the sample that the module was traced "
                    "with; call sequential again with a sample like this"
                )
        for name, x, batched, (shape, dtype) in zip(
            self.names, slots.tensors, self.batched, self._like, strict=True
        ):
            if tuple(x.shape)[batched:] != shape[batched:] or x.dtype != dtype:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)} and type {x.dtype}, but {shape} and {dtype} in the sample "
                    f"that the module was traced with{' (the first is the batch size)' if batched else ''}; "
                    "call sequential again with a sample like this"
                )
        return slots.tensors[0] if len(slots.tensors) == 1 else tuple(slots.tensors)

    def returns(self, result: Any, slots: Slots, order: Collection[int]) -> None:
        """Remember the structure of what the module returns; `order` numbers the tensors, equal ones alike."""
        unique = list(dict.fromkeys(order))
        self._result, self._result_slots = result, slots.again()
        self._order = [unique.index(number) for number in order]

    def structured(self, outputs: TensorOrTensors) -> Any:
        """Return what the module returns, with these tensors."""
        flat = tensors_of(outputs)
        return self._result_slots.put_back(self._result, [flat[i] for i in self._order])

    def _bound(self, args: Sequence[Any], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        bound = self._parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound


def arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments, by place and by name, that a sample stands for."""
    if isinstance(sample, dict):
        return (), sample
    return (sample if isinstance(sample, tuple) else (sample,)), {}
