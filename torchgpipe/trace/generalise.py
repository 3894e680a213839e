"""Merge recordings of a module for several sizes into one list of calls for all sizes.

A recording is the list of calls that the module's forward makes. The sizes are the batch size, and
lengths of inputs that may change. If a number in the calls differs between the recordings, a
formula (`Size`) is found that computes it from the sizes. If anything else differs, the module
makes other calls for other sizes. One list of calls cannot do this, so an error is raised.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor, nn

from torchgpipe.trace.calls import RecordedCalls
from torchgpipe.trace.code.call import Call
from torchgpipe.trace.code.modes import ByMode
from torchgpipe.trace.code.sizes import Size, Sizes, fitted
from torchgpipe.trace.parts import same
from torchgpipe.trace.refuse import Untraceable, Where, own_loss, refused, where

_OTHER_CALLS = (
    "keep the submodule that has this line as one layer, whole=[ItsClass], or say which arguments "
    "have no batch dimension, shared=[…]"
)
_ONE_SAMPLE = (
    "a module can make other calls for a single sample: give sequential two samples or more, and "
    "the pipeline micro-batches of two samples or more"
)


OTHER_MODE = (
    "call the module itself in this mode, which has the same parameters, if all of the pipeline is "
    "in this process and on one device; otherwise, load the pipeline's state into another module, "
    "or make a second pipeline, of another module: sequential(other.eval(), sample)"
)
"""What to do if a module makes other calls in evaluation than in training."""


_OTHER_LENGTHS = (
    "keep the submodule that has this line as one layer, whole=[ItsClass], or leave this length "
    "out of dynamic_shapes"
)


_fixed = attrgetter("target", "outputs", "grad", "since", "result")
"""Returns what has to be the same in two calls that are merged: all except their arguments."""

_PLAIN = (bool, int, float, str, type(None), Size)


def generalise(
    root: nn.Module, recordings: Sequence[RecordedCalls], advice: str | None = None
) -> list[Call]:
    """Merge recordings of a module for several sizes into one list of calls for all sizes.

    Numbers that differ between the recordings are replaced by formulas (`Size`).

    Args:
        root: The module.
        recordings: Its recordings, each for another batch size or other lengths of inputs.
        advice: What the user can do if the recordings differ, as text for the error message. The
            default text is for recordings that differ because of their sizes.

    Raises:
        Untraceable: If the recordings differ in anything but numbers that sizes determine.
    """
    points: list[Sizes] = []
    lists: list[list[Call]] = []
    samples: list[str] = []
    for recording in recordings:
        points.append(recording.sizes)
        lists.append(recording.calls)
        samples.append("x".join(map(str, recording.sizes)) + recording.state)
    calls: list[Call] = []
    at: Where | None = None  # the line that is compared; None before the first call
    try:
        for step in zip(*lists, strict=False):
            call = step[0]
            at = call.where
            passed = []
            for other in step:
                if _fixed(other) != _fixed(call):
                    raise Differs("it calls something else")
                passed.append((other.args, other.kwargs))
            args, kwargs = general(passed, points)
            calls.append(call._replace(args=args, kwargs=kwargs))
        lengths = list(map(len, lists))
        if len(set(lengths)) > 1:
            longest = max(lists, key=len)
            at = longest[min(lengths)].where
            raise Differs(f"it makes {', '.join(map(str, lengths))} calls")
        _check_ends(recordings)
    except Differs as error:
        with_lengths = len(points[0]) > 1
        of = " samples x lengths" if with_lengths else " samples"
        if advice is None:
            advice = _OTHER_LENGTHS if with_lengths else _OTHER_CALLS
        raise refused(
            root,
            at,
            "the module has to make the same calls for all batches, but with batches of "
            f"{', '.join(samples)}{of} it does not do the same: {error}",
            _ONE_SAMPLE if any(sizes[0] == 1 for sizes in points) else advice,
        ) from None
    return calls


def have_same_functions(one: RecordedCalls, other: RecordedCalls) -> bool:
    """Return whether two recordings call the same functions and submodules, with any arguments."""
    return list(map(_fixed, one.calls)) == list(map(_fixed, other.calls))


def _check_ends(recordings: Sequence[RecordedCalls]) -> None:
    """Check that recordings agree in the module's constant tensors and the result's structure.

    Raise `Differs` if they do not.

    Args:
        recordings: The recordings of the module for several sizes.
    """
    structures: list[Any] = []
    ends: list[Any] = []
    for recording in recordings:
        structure = recording.result[0]
        structures.append(structure)
        ends.append((recording.outputs, structure, recording.extra))
    if not all(same(end, ends[0]) for end in ends):
        returned = ", ".join(map(repr, structures))
        raise Differs(
            f"its constant tensors, or the structures that it returns ({returned[:200]}), differ "
            "between batches; a pipeline can only return tensors, and other values that are equal "
            "for all batches"
        )


def check_batch(
    module: nn.Module, recordings: Sequence[RecordedCalls], names: Sequence[str]
) -> dict[int, int]:
    """Check that a module returns tensors, and that dimension 0 of each of them is the batch.

    Args:
        module: The module.
        recordings: The recordings of the module for several batch sizes.
        names: The names of those arguments of the module that are tensors.

    Returns:
        The outputs that have a value for each pair of samples: a dictionary from the number of the
        output to the second of its two dimensions that are as long as the batch.

    Raises:
        Untraceable: The module returns no tensor, or a tensor whose dimension 0 is not the batch.
    """
    compared: dict[int, int] = {}
    first = recordings[0]
    if not first.outputs:
        raise Untraceable(
            f"the module {type(module).__name__} returns no tensor; return the tensors that the "
            "loss needs, such as the model's output"
        )
    for recording in recordings:
        size, *lengths = recording.sizes
        for number, own in zip(first.outputs, recording.outputs, strict=False):
            shape = recording.shapes[own]
            expected = first.shapes[number]
            # With other lengths, other dimensions may have other lengths, too.
            others = expected[1:] if lengths == [*first.sizes[1:]] else shape[1:]
            if shape == (size, *others):
                continue
            dimension = _second_batch(shape, size, others)
            if dimension is not None:
                compared[number] = dimension
                continue
            at = where()
            for call in recording.calls:
                if own in call.outputs:
                    at = call.where
                    break
            elsewhere = shape[:1] + shape[2:] == expected[:1] + expected[2:]
            if shape[1:2] == (size,) and elsewhere:
                raise refused(
                    module,
                    at,
                    f"it returns a tensor of shape {shape} for {size} samples, but "
                    "outputs of micro-batches are concatenated along dimension 0",
                    "the batch is in dimension 1, as in the state of an RNN: return "
                    "state.transpose(0, 1), and transpose it back after the pipeline",
                )
            labels = [name for name in names if name in ("label", "labels", "target", "targets")]
            if shape == () and labels:
                why = "it returns a loss, but outputs of micro-batches are concatenated"
                raise refused(module, at, why, own_loss(module, labels[0]))
            raise refused(
                module,
                at,
                f"it returns a tensor of shape {shape} for {size} samples, but outputs "
                "of micro-batches are concatenated along dimension 0",
                "code that adds up samples, such as a loss, belongs after the pipeline: return the "
                "inputs of this code; or say which arguments have no batch dimension, shared=[…]",
            )
    return compared


def _second_batch(shape: Sequence[int], size: int, others: Sequence[int]) -> int | None:
    """Return the dimension of an output, besides 0, that is always as long as the batch.

    An output has such a dimension if it has a value for each pair of samples.

    Args:
        shape: The shape of the output.
        size: The batch size for which the output has this shape.
        others: The lengths of the output's dimensions after 0 for another batch size.

    Returns:
        The dimension, or `None` if no other dimension, or more than one, depends on the batch size.
    """
    if len(shape) != 1 + len(others) or shape[0] != size:
        return None
    differing = []
    for dimension, (length, other) in enumerate(zip(shape[1:], others, strict=True), 1):
        if length != other:
            differing.append(dimension)
    if len(differing) == 1 and shape[differing[0]] == size:
        return differing[0]
    return None


def refuse_concatenated(outputs: Sequence[Tensor], compared: Mapping[int, int]) -> None:
    """Raise `ValueError` if outputs that compare samples were concatenated from micro-batches.

    Such an output lacks the pairs of samples from different micro-batches.

    Args:
        outputs: The module's outputs, for a micro-batch or concatenated from several.
        compared: A dictionary from the index of each output that has a value for each pair of
            samples to the second of its two dimensions that are as long as the batch.
    """
    for k, dimension in compared.items():
        if outputs[k].shape[dimension] != len(outputs[k]):
            raise ValueError(
                "the module compares each sample with all others, but a pipeline can compare only "
                "samples of the same micro-batch, so it cannot concatenate the outputs; return the "
                "inputs of the comparison and compare them in the loss, as in loss(model(input)), "
                "or call step or evaluate, which give the criterion one micro-batch at a time"
            )


class Differs(Exception):
    """An internal error: a module's recordings for several sizes cannot be merged into one.

    The message says how they differ. The function `generalise` and the class `KeptResults` catch
    this error; `generalise` raises `Untraceable` for the user.
    """


def general(values: Sequence[Any], points: Sequence[Sizes]) -> Any:
    """Merge the values that were recorded for several sizes into one value for all sizes.

    A number that differs is replaced by a formula (`Size`), which computes it from the sizes.

    Args:
        values: For each of `points`, the value, such as the arguments of one call.
        points: The sizes of each recording: a batch size, and perhaps lengths.

    Raises:
        Differs: If the values differ in anything but numbers that such a formula can compute.
    """
    first = values[0]
    kinds = set(map(type, values))
    kind = type(first) if len(kinds) == 1 else None
    if kind is int and len(set(values)) > 1:
        size = fitted(values, points)
        if size is not None:
            return size
    elif kind in (tuple, list) and len(set(map(len, values))) == 1:
        columns = zip(*values, strict=True)
        return kind([general(column, points) for column in columns])
    elif kind is dict and len(set(map(frozenset, values))) == 1:
        found = {}
        for key in first:
            found[key] = general(list(map(itemgetter(key), values)), points)
        return found
    elif kind is slice:
        ends = list(map(attrgetter("start", "stop", "step"), values))
        return slice(*general(ends, points))
    elif all(same(value, first) for value in values):
        return first
    raise Differs(f"it passes {', '.join(map(repr, values))}")


class _Unlike(Exception):
    """An internal error: a module's call in training cannot be merged with its call in evaluation.

    The two calls differ in more than plain arguments, such as numbers. `by_mode` catches the error.
    """


def by_mode(training: Sequence[Call], evaluation: Sequence[Call]) -> list[Call] | None:
    """Merge the calls that a module makes in training and in evaluation into one list.

    Plain arguments that differ, such as numbers, are replaced by `ByMode` placeholders.

    Args:
        training: The calls in training mode.
        evaluation: The calls in evaluation mode.

    Returns:
        The merged calls, or `None` if the calls differ in more than plain arguments.
    """
    if list(map(_fixed, training)) != list(map(_fixed, evaluation)):
        return None
    calls: list[Call] = []
    for one, other in zip(training, evaluation, strict=True):
        try:
            args, kwargs = _merged((one.args, one.kwargs), (other.args, other.kwargs))
        except _Unlike:
            return None
        calls.append(one._replace(args=args, kwargs=kwargs))
    return calls


def _merged(one: Any, other: Any) -> Any:
    """Merge two values; put a `ByMode` placeholder in each place where their plain parts differ."""
    kind = type(one) if type(one) is type(other) else None
    if kind in (tuple, list) and len(one) == len(other):
        return kind([_merged(x, y) for x, y in zip(one, other, strict=True)])
    if kind is slice:
        ends = attrgetter("start", "stop", "step")
        return slice(*_merged(ends(one), ends(other)))
    if kind is dict and list(one) == list(other):
        return {key: _merged(x, other[key]) for key, x in one.items()}
    if same(one, other):
        return one
    if isinstance(one, _PLAIN) and isinstance(other, _PLAIN):
        return ByMode(one, other)
    raise _Unlike
