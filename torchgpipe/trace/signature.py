"""The structures of a module's arguments and result, which `sequential` finds from a sample."""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import BoundArguments, Parameter
from typing import Any

from torch import Tensor, nn

from torchgpipe.caught import shortened
from torchgpipe.tensors.microbatch import Input, MicroBatches, TensorOrTensors, check, tensors_of
from torchgpipe.trace.code.lengths import BATCHES, Length, Places, lengths_of
from torchgpipe.trace.code.sizes import Sizes, corners
from torchgpipe.trace.generalise import refuse_concatenated
from torchgpipe.trace.parts import (
    Slot,
    Slots,
    cache_in,
    check_sample,
    in_order_of,
    refuse_arrays,
    same,
)
from torchgpipe.trace.refuse import WITHOUT_CACHE, Untraceable, reason, refused, where

Tensors = Sequence[Tensor]
ByName = dict[str, Any]
Arguments = tuple[tuple[Any, ...], ByName]
"""The positional arguments and the keyword arguments of a call."""


class Signature:
    """The structures of a module's arguments and result.

    The structure of the arguments is found from a sample: the arguments of an example call.

    Args:
        module: The module.
        sample: A tensor, a tuple of arguments, or a dictionary from parameter names to arguments.
        dynamic_shapes: Which lengths may change from call to call, as for `sequential`.

    Attributes:
        names: For each tensor among the arguments, the name of its argument.
        batched: For each tensor among the arguments, whether it has a batch dimension.
        places: For each tensor among the arguments, its dimensions whose length may change.
        points: The sizes for which the module's calls are recorded. Each point has a batch size,
            and perhaps lengths.
        compared: A dictionary for those tensors of the result that have a value for each pair of
            samples. It maps the index of the tensor in the result to the second of its two
            dimensions that are as long as the batch.

    Raises:
        TypeError: If the sample has no tensors, has a cache of keys and values of earlier tokens,
            or does not fit the module's forward.
        ValueError: If `dynamic_shapes` does not fit the sample.
    """

    def __init__(self, module: nn.Module, sample: Any, dynamic_shapes: Any = None) -> None:
        found = inspect.signature(module.forward)
        parameters = found.parameters.values()
        bare = [parameter.replace(annotation=Parameter.empty) for parameter in parameters]
        self._parameters = inspect.Signature(bare)
        self._rest: str | None = None  # the name of the parameter `**kwargs`
        for parameter in bare:
            if parameter.kind is Parameter.VAR_KEYWORD:
                self._rest = parameter.name
        slots = Slots()
        self._given: ByName = {}
        self.names: list[str] = []
        args, kwargs = arguments(sample)
        check_sample(module, args, kwargs)
        self._by_name = isinstance(sample, Mapping)
        bound = self._bound(args, kwargs).arguments
        self._passed = list(self._parameters.bind(*args, **kwargs).arguments)
        for name, value in bound.items():
            if cache := cache_in(value):
                raise Untraceable(
                    f"the module {type(module).__name__} is given a {cache} as {name}, but a "
                    f"pipeline cannot keep a cache from call to call; {WITHOUT_CACHE}"
                )
            self._given[name] = slots.taken(value)
            new = len(slots.tensors) - len(self.names)
            self.names += [name] * new
        self._like = [(tuple(x.shape), x.dtype) for x in slots.tensors]
        self._slots = slots.again()
        self.batched = (True,) * len(self.names)
        places: dict[int, list[Places]] = {}
        self._lengths: list[Length] = []
        if dynamic_shapes is not None:
            self._lengths, places = lengths_of(bound, dynamic_shapes)
        self.places: list[Places] = []
        for x in slots.tensors:
            of_x = places.get(id(x))
            self.places.append(of_x.pop(0) if of_x else {})
        self.compared: dict[int, int] = {}
        self.points = corners([BATCHES, *[length.recorded for length in self._lengths]])

    @property
    def size_names(self) -> list[str]:
        """The name of the batch size, and then the names of the lengths that may change."""
        return ["batch", *[length.name for length in self._lengths]]

    def sizes_of(self, tensors: Tensors) -> Sizes:
        """Return the sizes of a call's tensors: the batch size, then each length that may change.

        Args:
            tensors: The tensors in the arguments of the call, in order.
        """
        sizes = [0] * (1 + len(self._lengths))
        for x, batched, places in zip(tensors, self.batched, self.places, strict=True):
            if batched:
                sizes[0] = len(x)
            for dimension, k in places.items():
                sizes[k] = x.shape[dimension]
        return tuple(sizes)

    @contextmanager
    def at(self, sizes: Sizes, module: nn.Module) -> Iterator[None]:
        """Turn an error of the module within this context into an error with advice.

        Within the context, the module runs on tensors of other sizes than those of the sample.

        Args:
            sizes: The batch size and the lengths of these tensors, for the error message.
            module: The module.

        Raises:
            Untraceable: The module raises an error within the context.
        """
        try:
            yield
        except Untraceable:
            raise
        except Exception as error:
            advice = self.advice(sizes) or (
                f"the module does not take {sizes[0]} samples that are made of this sample: if an "
                "argument has no batch dimension, name it, as in shared=['positions']"
            )
            raise refused(module, where(error), reason(error), advice) from error

    def advice(self, sizes: Sizes) -> str:
        """Return advice for an error message: what to do if the module fails for these sizes.

        The result is "" if the lengths are those of the sample, and only the batch size differs.
        """
        if sizes in self.points:
            for length, size in zip(self._lengths, sizes[1:], strict=True):
                first, name = length.recorded[0], length.name
                if size != first:
                    bound = "min" if size < first else "max"
                    return (
                        f"with this sample, the module takes {name} {first}, but not {size}: give "
                        "a sample that fits both, such as smaller indices, or limit the length by "
                        f"torch.export.Dim({name!r}, {bound}={first})"
                    )
        return ""

    def call(self, module: nn.Module, tensors: Tensors) -> Any:
        """Call the module with the sample's arguments, but with other tensors in them."""
        found = self._slots.put_back(self._given, tensors)
        bound = self._parameters.bind_partial()
        for name in self._passed:
            bound.arguments[name] = found[name]
        if not self._by_name:
            return module(*bound.args, **bound.kwargs)
        by_name = dict(bound.arguments)
        if self._rest is not None:
            by_name.pop(self._rest, None)
            return module(**by_name, **found[self._rest])
        return module(**by_name)

    def arguments(self, input: Any) -> Arguments:
        """Convert an input of the pipeline into positional and keyword arguments.

        A dictionary gives keyword arguments, and a tuple gives positional arguments. If the module
        cannot take these arguments, the input itself is the only argument.
        """
        args, kwargs = arguments(input)
        try:
            self._parameters.bind(*args, **kwargs)
        except TypeError:
            return (input,), {}
        return args, kwargs

    def input_of(self, args: Sequence[Any], kwargs: ByName) -> Input:
        """Return the input of the pipeline for a call: the tensors in the arguments of the call.

        If the only argument is `MicroBatches`, the result is `MicroBatches`, too: each micro-batch
        has the form of the sample, and is replaced by the tensors in it.
        """
        if len(args) == 1 and not kwargs:
            (only,) = args
            if only is None:
                check(None)  # raises an error
            if isinstance(only, MicroBatches):
                return MicroBatches([self.flat(*self.arguments(each)) for each in only])
        return self.flat(args, kwargs)

    def flat(self, args: Sequence[Any], kwargs: ByName) -> TensorOrTensors:
        """Return the tensors in the arguments of a call, after checking the arguments.

        Raises:
            ValueError: If the arguments differ from the sample in more than the batch size, the
                lengths in `dynamic_shapes` and the contents of tensors; or if tensors of this call
                disagree in the batch size or in such a length.
        """
        tensors = self.tensors(args, kwargs)
        self._check_batch_sizes(tensors)
        if self._lengths:
            self._check_lengths(tensors)
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def tensors(self, args: Sequence[Any], kwargs: ByName) -> list[Tensor]:
        """Return the tensors in a call's arguments. Their batch sizes may differ from each other.

        Raises:
            ValueError: If a structure, shape or dtype differs from that in the sample (see `flat`).
        """
        slots = self._slots.again()
        for name, value in self._bound(args, kwargs).arguments.items():
            refuse_arrays(value, name)
            given = self._given[name]
            taken = slots.taken(in_order_of(given, value))
            if taken != given and not same(taken, given):
                raise ValueError(
                    f"argument {name} is {shortened(taken)}, but was {shortened(given)} in the "
                    f"sample that sequential got; {_advice(name, taken, given)}"
                )
        tensors = slots.tensors
        expected = zip(self.names, tensors, self.batched, self.places, self._like, strict=True)
        for name, x, batched, places, (shape, dtype) in expected:
            first = 1 if batched else 0  # the first dimension that has to be the same
            alike = list(x.shape)
            for dimension in places:
                if dimension < x.dim():
                    alike[dimension] = shape[dimension]
            if tuple(alike)[first:] != shape[first:] or x.dtype != dtype:
                batch = " (the first is the batch size)" if batched else ""
                or_else = ""
                is_argument = isinstance(self._given[name], Slot)
                if len(alike) == len(shape) and x.dtype == dtype and is_argument:
                    unlike = [k for k, n in enumerate(shape) if alike[k] != n and k >= first]
                    if unlike[0] > 0:
                        or_else = (
                            ", or, if this length changes from call to call, with dynamic_shapes="
                            f"{{{name!r}: {{{unlike[0]}: torch.export.Dim('length')}}}}"
                        )
                raise ValueError(
                    f"argument {name} has shape {tuple(x.shape)} and type {x.dtype}, but had shape "
                    f"{shape} and type {dtype} in the sample that sequential got"
                    f"{batch}; call sequential again with a sample like this{or_else}"
                )
        return tensors

    def _check_lengths(self, tensors: Tensors) -> None:
        """Check the lengths of tensors that may change from call to call.

        Raises:
            ValueError: If two tensors that must have an equal length differ in this length, or if
                a length is not allowed.
        """
        firsts: dict[int, tuple[str, int, int]] = {}  # the first place of each length
        for name, x, places in zip(self.names, tensors, self.places, strict=True):
            for dimension, k in places.items():
                size = x.shape[dimension]
                length = self._lengths[k - 1]
                first, at, expected = firsts.setdefault(k, (name, dimension, size))
                if size != expected:
                    raise ValueError(
                        f"{length.name} is {expected} in dimension {at} of {first}, but {size} in "
                        f"dimension {dimension} of {name}"
                    )
                length.check(size)

    def _check_batch_sizes(self, tensors: Tensors) -> None:
        first: str | None = None
        size = 0
        for name, x, batched in zip(self.names, tensors, self.batched, strict=True):
            if not batched:
                continue
            if first is None:
                first, size = name, len(x)
            if len(x) != size:
                other = name if size > len(x) else first
                raise ValueError(
                    f"argument {first} has {size} samples (its length in dimension 0), but {name} "
                    f"has {len(x)}; if {other} has no batch dimension, call sequential again, with "
                    f"shared=[{other!r}] or with a batch of two or more samples"
                )

    def returns(
        self, result: Any, slots: Slots, order: Collection[int], compared: Mapping[int, int]
    ) -> None:
        """Set the structure of the module's result, which `structured` will use.

        Args:
            result: The module's result, with slots (placeholders) instead of tensors.
            slots: The object that puts tensors into these slots.
            order: For each slot, the number of its tensor. If the module returns a tensor twice,
                two slots have the same number.
            compared: A dictionary for tensors that have a value for each pair of samples. It maps
                the tensor's number to the second of its two dimensions that are as long as the
                batch.
        """
        unique = list(dict.fromkeys(order))
        self.compared = {
            k: compared[number] for k, number in enumerate(order) if number in compared
        }
        self._result = result
        self._result_slots = slots
        self._order = list(map(unique.index, order))

    def structured(self, outputs: TensorOrTensors) -> Any:
        """Put the output tensors of the layers into the structure that the module returns.

        Raises:
            ValueError: If an output with a value for each pair of samples was concatenated from
                several micro-batches: it lacks the pairs from different micro-batches.
        """
        flat = tensors_of(outputs)
        tensors = [flat[i] for i in self._order]
        refuse_concatenated(tensors, self.compared)
        return self._result_slots.put_back(self._result, tensors)

    def _bound(self, args: Sequence[Any], kwargs: ByName) -> BoundArguments:
        try:
            bound = self._parameters.bind(*args, **kwargs)
        except TypeError as error:
            named = str(self._parameters)[:200]
            advice = ""
            if len(args) == 1 and isinstance(args[0], list):
                advice = "; a list is one argument: give a tuple (or, in model(…), its items)"
            raise TypeError(f"the arguments do not fit forward{named}: {error}{advice}") from None
        bound.apply_defaults()
        return bound


def arguments(sample: Any) -> Arguments:
    """Convert a sample (the arguments of an example call) into positional and keyword arguments.

    A mapping gives keyword arguments, a tuple gives positional arguments, and any other object is
    the only argument.
    """
    if isinstance(sample, Mapping):  # a tokenizer returns a mapping that is no dictionary
        return (), dict(sample)
    if isinstance(sample, tuple):
        return sample, {}
    return (sample,), {}


def _advice(name: str, taken: Any, given: Any) -> str:
    """Return what to do about an argument whose structure differs from that in the sample.

    Args:
        name: The name of the argument.
        taken: The argument of this call, with a slot in place of each tensor.
        given: The argument in the sample, with a slot in place of each tensor.
    """
    advice = "call sequential again with a sample like this"
    if isinstance(given, tuple) and isinstance(taken, Slot):
        advice += f"; or, if all of the tuple is {name}, give it as ((…),)"
    if isinstance(given, Slot) and isinstance(taken, list) and taken:
        if all(isinstance(each, Slot) for each in taken):
            advice = f"if {name} is a list of samples, give torch.stack({name})"
        elif all(isinstance(each, (int, float, list)) for each in taken):
            advice = f"if {name} is a list of samples, give torch.tensor({name})"
    return advice
