"""Check a mini-batch, and split it into micro-batches.

Section 2.2 of the GPipe paper describes micro-batches.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchgpipe.caught import shortened

TensorOrTensors = Tensor | tuple[Tensor, ...]

Flat = tuple[Tensor | None, ...]
"""A task's inputs or outputs: the tensors of the micro-batch, then its skips."""

Form = type[Any] | Callable[[Any], Any]
"""The form of a micro-batch: its class, or a function that makes it from its tensors.

The class is `Tensor` for a single tensor (also of a subclass of `Tensor`), `tuple`, or a subclass
of `tuple`, such as a named tuple. The form is a function if the last partition returns another
structure, such as a dictionary. The same holds for the input of the first partition.
"""


@dataclass(eq=False)
class MicroBatches:
    """Micro-batches that the caller has made, such as sequences sorted by their lengths.

        x = MicroBatches([short, long])
        t = MicroBatches([target_of_short, target_of_long])
        model.step(criterion, x, t)

    A pipeline takes the micro-batches as they are: it ignores its setting `chunks`. So sequences in
    different micro-batches can have different lengths, and micro-batches different numbers of
    samples.

    Args:
        micro_batches: A list of inputs, each in the form of the pipeline's input, or a list of
            targets, each of any type.

    Raises:
        TypeError: If `micro_batches` is neither a list nor a tuple, or has `MicroBatches` in it.
        ValueError: If the list is empty.
    """

    micro_batches: Sequence[Any]

    def __post_init__(self) -> None:
        if not isinstance(self.micro_batches, list | tuple):
            given = type(self.micro_batches).__name__
            raise TypeError(f"MicroBatches takes a list of micro-batches, but got {given}")
        if not self.micro_batches:
            raise ValueError("MicroBatches takes a list of at least one micro-batch, but got none")
        if any(isinstance(each, MicroBatches) for each in self.micro_batches):
            raise TypeError("MicroBatches takes micro-batches, but one of them is MicroBatches")

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.micro_batches)


class Structured(tuple[Tensor, ...]):
    """The tensors of a micro-batch that is neither a tensor nor a tuple, such as a dictionary.

    Attributes:
        form: A function that makes a micro-batch, such as a dictionary, from such tensors.
    """

    form: Callable[[Sequence[Tensor]], Any]

    @classmethod
    def of(cls, tensors: Iterable[Tensor], form: Callable[[Sequence[Tensor]], Any]) -> "Structured":
        """Return a `Structured` that has these tensors, and the function `form` as attribute."""
        made = cls(tensors)
        made.form = form
        return made


def in_form(value: TensorOrTensors) -> Any:
    """Return a micro-batch in the form in which a layer takes it, such as a dictionary."""
    return value.form(value) if isinstance(value, Structured) else value


UNCOUNTED = -1
"""The number of samples of a micro-batch whose tensors differ in dimension 0."""

Input = TensorOrTensors | MicroBatches
"""The input of a pipeline: a mini-batch, or its micro-batches."""


def tensors_of(value: TensorOrTensors) -> tuple[Tensor, ...]:
    """Return the tensors of a micro-batch as a plain tuple."""
    return (value,) if isinstance(value, Tensor) else value


def form_of(value: TensorOrTensors) -> Form:
    """Return the form of a micro-batch, from which `together` makes a micro-batch again.

    The form of a `Structured`, which has the tensors of a dictionary, for example, is the function
    that makes the dictionary from the tensors.
    """
    if isinstance(value, Structured):
        return value.form
    return Tensor if isinstance(value, Tensor) else type(value)


def like(value: TensorOrTensors, tensors: Sequence[Tensor]) -> TensorOrTensors:
    """Return a micro-batch of the same form as `value`, with the given tensors."""
    if isinstance(value, Structured):
        return Structured.of(tensors, value.form)
    return together(form_of(value), tuple(tensors))  # type: ignore[no-any-return]


def together(form: Form, tensors: Flat) -> Any:
    """Make a micro-batch from its tensors: the inverse of `tensors_of`.

    Args:
        form: The form of the micro-batch.
        tensors: The tensors.
    """
    if form is Tensor:
        return tensors[0]
    if form is tuple:
        return tensors
    # A class of `torch.return_types` has no other constructor.
    if not isinstance(form, type) or hasattr(form, "n_fields"):
        return form(tensors)
    # Make a named tuple without calling its constructor: in a subclass of a named tuple, the
    # constructor can take other arguments.
    return tuple.__new__(form, tensors)


def carrying(y: Tensor, x: Tensor) -> Tensor:
    """Copy the Python attributes of `x`, such as `x.scale = 3.0`, to `y`, and return `y`.

    Attributes that `y` already has are not changed.
    """
    if given := x.__dict__:
        y.__dict__.update(given | y.__dict__)
    return y


def moved(tensors: Flat, device: torch.device, *, non_blocking: bool = False) -> Flat:
    """Move tensors to a device, and keep their Python attributes.

    Args:
        tensors: The tensors. An entry that is `None` stays `None`.
        device: The device.
        non_blocking: Whether copies between a GPU and pinned memory may still run when this
            function returns.
    """
    there: list[Tensor | None] = []
    for x in tensors:
        if x is not None:
            x = carrying(x.to(device, non_blocking=non_blocking), x)
        there.append(x)
    return tuple(there)


def is_flat(value: object) -> bool:
    """Return whether a value is a tensor or a tuple of tensors, and so needs no conversion.

    The result is also true for a `PackedSequence`, which is a tuple with values that are no
    tensors. So it is not converted either, and a later check raises an error.
    """
    if isinstance(value, Tensor | PackedSequence):
        return True
    return isinstance(value, tuple) and all(isinstance(x, Tensor) for x in value)


def mapped(function: Callable[[Tensor], Tensor], value: TensorOrTensors) -> TensorOrTensors:
    """Apply a function to each tensor of a micro-batch; return a micro-batch of the results."""
    return like(value, [function(x) for x in tensors_of(value)])


def check(value: object, what: str = "input") -> None:
    """Raise `TypeError` unless a value is a tensor or a non-empty tuple of tensors.

    The value can also be `MicroBatches`. Then each micro-batch must be a tensor or such a tuple.

    Args:
        value: The value.
        what: What the error message calls the value.
    """
    if isinstance(value, MicroBatches):
        for micro_batch in value:
            check(micro_batch, "a micro-batch")
        return
    if isinstance(value, Tensor):
        return
    refuse_array(value, what)
    if not isinstance(value, tuple) or not value:
        got = "an empty tuple" if isinstance(value, tuple) else type(value).__name__
        raise TypeError(
            f"{what} must be a tensor or a tuple of tensors, but got {got}" + _advice(value, what)
        )
    for k, item in enumerate(value):
        refuse_array(item, f"element {k} of {what}")
        if not isinstance(item, Tensor):
            advice = "; a layer that needs another object has to make it of tensors"
            if isinstance(value, PackedSequence):
                advice = (
                    " of a PackedSequence; pass padded sequences and their lengths, and pack and "
                    "unpack them in one layer"
                )
            raise TypeError(
                f"{what} must be a tuple of tensors, but element {k} is {type(item).__name__}"
                + advice
            )


def _advice(value: object, what: str) -> str:
    """Return the end of an error message: what to do about a value that is no tensor or tuple."""
    if value is None and what == "input":
        return "; give one (over ranks, the rank of the first stage has to give it)"
    if callable(value):
        return "; call step(criterion, input, target)"
    if not isinstance(value, list):
        return ""
    if what == "input":
        return (
            "; make a tuple of it; or, if its items are samples of different sizes, such as "
            "images, give MicroBatches of tuples of samples, and weight=len"
        )
    return "; make a tuple of it"


def refuse_array(value: object, what: str) -> None:
    """Raise `TypeError` if a value is a NumPy array; the message calls the value `what`."""
    if type(value).__name__ == "ndarray":
        raise TypeError(
            f"{what} must be a tensor or a tuple of tensors, but got ndarray; torch.from_numpy() "
            "makes a tensor of it"
        )


def scatter(
    value: TensorOrTensors, chunks: int, batched: Sequence[bool] | None = None
) -> list[TensorOrTensors]:
    """Split a mini-batch along dimension 0 into at most `chunks` micro-batches.

    Every tensor is split in the same way, into parts of ⌈batch / chunks⌉ samples. The last part can
    be smaller, and there can be fewer parts than `chunks`. For example, 13 samples and 8 chunks
    give 7 parts: 6 parts of two samples, and one part of one sample.

    Args:
        value: The mini-batch. All of its tensors have the same batch size.
        chunks: The largest number of micro-batches.
        batched: For each tensor, whether it has a batch dimension. A tensor without a batch
            dimension is not split, and becomes part of every micro-batch. By default, all tensors
            have a batch dimension.

    Raises:
        ValueError: If a batched tensor is a scalar, or if batch sizes differ.
    """
    tensors = tensors_of(value)
    if batched is None:
        batched = [True] * len(tensors)
    sizes = []
    for k, (x, split) in enumerate(zip(tensors, batched, strict=True)):
        if not split:
            continue
        if x.is_nested and x.layout is torch.strided:
            raise ValueError(
                f"tensor {k} of the input is nested with layout torch.strided, and cannot be "
                "split; make it with layout=torch.jagged, or give MicroBatches"
            )
        if x.dim() == 0:
            raise ValueError(
                f"every input tensor needs a batch dimension, but tensor {k} is a scalar; its "
                "dimension 0 must have an entry for each sample"
            )
        sizes.append(x.size(0))
    if len(set(sizes)) > 1:
        hint = ""
        if any(x.dim() > 1 and len(x) != sizes[0] == x.size(1) for x in tensors):
            hint = (
                "; give the state of an RNN as state.transpose(0, 1), and transpose it in a layer"
            )
        raise ValueError(
            "all input tensors must have the same batch size (dimension 0), but the sizes are "
            + shortened(sizes)
            + hint
        )

    if chunks == 1 or not sizes:
        return [value]
    columns: list[Iterable[Tensor]] = []
    for x, split in zip(tensors, batched, strict=True):
        columns.append(x.chunk(chunks) if split else repeat(x))
    return [like(value, row) for row in zip(*columns, strict=False)]
