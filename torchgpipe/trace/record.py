"""Record a module's calls by running it once on fake tensors, which have shapes but no contents.

A recording has two kinds of calls:

- each call of a PyTorch function
- each call of a submodule that is kept whole, which means that it is not cut into layers. Examples
  are PyTorch's own layers, submodules with hooks, and submodules that have no submodules.

Reading an attribute of a tensor, such as its shape, is not recorded. Code that needs the contents
of a tensor cannot be recorded.
"""

import re
from collections.abc import Container, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn import Module

from torchgpipe.trace.calls import RecordedCalls
from torchgpipe.trace.code.call import Call
from torchgpipe.trace.code.lengths import shape_at
from torchgpipe.trace.code.sizes import Sizes
from torchgpipe.trace.generalise import by_mode, generalise
from torchgpipe.trace.kept import KeptResults, NeedsResults
from torchgpipe.trace.parts import Slots, cache_in, same
from torchgpipe.trace.recorder import Recorder
from torchgpipe.trace.refuse import WITHOUT_CACHE, Untraceable, reason, refused, where
from torchgpipe.trace.restore import as_it_was, set_mode
from torchgpipe.trace.signature import Signature, Tensors
from torchgpipe.trace.watch import watched
from torchgpipe.trace.whole import Notes, check_notes, small_modules

NEEDS_CONTENTS = (DataDependentOutputException, DynamicOutputShapeException)
"""The errors of operators that need the contents of a tensor, which fake tensors do not have."""

_OTHER_BATCH = (
    "dimension 0 of the sample has to be the batch, and the module has to take any number of "
    "samples: write x.shape[0] or -1 where it has a fixed number of samples, and name the "
    "arguments that have no batch dimension: shared=[…]"
)
"""What to do if a module fails for another batch size than the sample's."""


def record(
    recorder: Recorder,
    signature: Signature,
    inputs: Tensors,
    sizes: Sizes,
    device: torch.device | None = None,
) -> RecordedCalls:
    """Run a module on fake tensors and record its calls; then restore the module's state.

    Args:
        recorder: A new recorder of the module. It also notes which submodules do something that a
            recording cannot repeat.
        signature: The module's signature.
        inputs: Tensors with the shapes and dtypes of the module's inputs.
        sizes: The batch size of the fake tensors, and the lengths that may change.
        device: The device of the fake tensors, if the module is on `meta`. With `None`, they have
            the devices of the module and of `inputs`.

    Raises:
        NeedsResults: If a submodule that is kept whole needs the contents of a tensor, and the
            submodule's results are not known.
        Untraceable: If the module needs the contents of a tensor, or raises an error.
    """
    with (
        as_it_was(recorder.root),
        torch.inference_mode(False),
        torch.enable_grad(),
        recorder.fake,
        watched(recorder),
    ):
        recorder.put_fakes(device)
        recorder.sizes, recorder.device = sizes, device
        given: list[Tensor] = []
        slots = Slots()
        described = zip(inputs, signature.batched, signature.places, strict=True)
        for x, batched, places in described:
            shape = shape_at(x.shape, batched, places, sizes)
            y = torch.empty(
                shape, dtype=x.dtype, device=device or x.device, requires_grad=x.requires_grad
            )
            given.append(y)
            recorder.add(y, -1)
        try:
            with recorder:
                result = signature.call(recorder.root, given)
                recorder.note_draws()
            if cache := cache_in(result):
                why = f"it returns a {cache}, which a pipeline does not keep from call to call"
                raise refused(recorder.root, None, why, WITHOUT_CACHE)
            structure = slots.taken(result)
        except (Untraceable, NeedsResults):
            raise
        except Exception as error:
            # The recorder raises a `TypeError` to refuse a line. If this happens within an operator
            # such as `x * y`, Python raises another `TypeError`, so use the recorder's own reason.
            if recorder.refused is not None:
                raise recorder.refusal(*recorder.refused) from error
            why = reason(error)
            if isinstance(error, NEEDS_CONTENTS):
                why = "it depends on what is in a tensor, not only on its shape"
            if "hidden size" in why:  # PyTorch's RNNs say so
                what = (
                    "the state of an RNN has the batch in dimension 1: let the module take it with "
                    "the batch in dimension 0, and transpose it there: state.transpose(0, 1)"
                )
                raise refused(recorder.root, where(error), why, what) from error
            if advice := signature.advice(sizes):
                raise refused(recorder.root, where(error), why, advice) from error
            if isinstance(error, RuntimeError) and re.search("size|shape|dim", str(error)):
                raise refused(recorder.root, where(error), why, _OTHER_BATCH) from error
            raise recorder.refusal(where(error), why) from error
        outputs = tuple([recorder.number(x) for x in slots.tensors])
    returned = (structure, slots.again())
    return RecordedCalls(sizes, recorder.calls, recorder.shapes, returned, outputs, recorder.extra)


class AllRecordings(NamedTuple):
    """The calls that were recorded in a module's forward, for inputs of several sizes.

    A forward that reads the mode (`training`) may make other calls in training than in evaluation.
    So its calls are recorded in both modes.

    Attributes:
        recordings: A recording for each of the sizes, in the mode that the module is in.
        results: The results of submodules that cannot run on fake tensors, if there are any.
        other_mode: A recording for each of the sizes, in the other mode. It is empty if
            `reads_mode` is false, or if recording the module in the other mode fails.
        reads_mode: Whether the recorded code reads the mode. Submodules that are kept whole
            (recorded as one call) may read it.
    """

    recordings: list[RecordedCalls]
    results: KeptResults | None
    other_mode: Sequence[RecordedCalls] = ()
    reads_mode: bool = False


def record_all(
    module: Module, signature: Signature, inputs: Tensors, whole: set[Module]
) -> AllRecordings:
    """Record a module's calls for several batch sizes, and for several lengths of its inputs.

    If the calls in small submodules cannot be recorded, these submodules are added to `whole`, and
    the whole module is recorded again. If the code reads the mode (`training`), the calls are also
    recorded in the other mode (training or evaluation).

    Args:
        module: The module.
        signature: The module's signature.
        inputs: The tensors of the sample.
        whole: The submodules that are kept whole, which means that each is recorded as one call.
            This function adds more of them.
    """
    results: KeptResults | None = None
    while True:
        notes: Notes = {}
        try:
            recordings = []
            for sizes in signature.points:
                recorder = Recorder(module, whole, notes, results)
                recordings.append(record(recorder, signature, inputs, sizes))
        except NeedsResults:
            results = KeptResults(module, signature, inputs, whole)
            continue
        except Untraceable:
            small = small_modules(notes, module)
            if not small:
                raise
        else:
            small = small_modules(notes, module)
            if not small:
                break
        whole |= small
    # `small_modules` has refused all other notes, so a note that is left says that a module reads
    # its mode.
    other_mode = _in_other_mode(module, signature, inputs, whole, results) if notes else ()
    return AllRecordings(recordings, results, other_mode, reads_mode=bool(notes))


def _in_other_mode(
    module: Module,
    signature: Signature,
    inputs: Tensors,
    whole: Container[Module],
    results: KeptResults | None,
) -> Sequence[RecordedCalls]:
    """Record a module in the other mode: in evaluation if it is in training, or the reverse.

    Args:
        module: The module.
        signature: The module's signature.
        inputs: The tensors of the sample.
        whole: The submodules that are kept whole: each is recorded as one call.
        results: The results of submodules that cannot run on fake tensors, if there are any.

    Returns:
        A list with a recording for each of the sizes in `signature.points`. It is empty if
        recording fails in this mode.
    """
    recordings = []
    notes: Notes = {}
    with as_it_was(module):
        set_mode(module, not module.training)
        try:
            for sizes in signature.points:
                recorder = Recorder(module, whole, notes, results)
                recordings.append(record(recorder, signature, inputs, sizes))
            check_notes(module, notes)
        except (Untraceable, NeedsResults):
            return ()
    return recordings


def in_both_modes(module: Module, recorded: AllRecordings) -> tuple[AllRecordings, list[Call]]:
    """Merge the recordings for all sizes, and for both modes, into the calls of the layers.

    If the module makes other calls in evaluation than in training, the layers only have the calls
    for the mode that the module is in. Return a pair: the recordings that were used, and the calls.
    """
    calls = generalise(module, recorded.recordings)
    if recorded.other_mode:
        merged = _merged(module, calls, recorded)
        if merged is not None:
            return recorded, merged
    return recorded._replace(other_mode=()), calls


def _merged(module: Module, calls: list[Call], recorded: AllRecordings) -> list[Call] | None:
    """Merge `calls` with the module's calls in the other mode (training or evaluation).

    Return `None` if they differ in more than plain arguments, such as numbers.
    """
    own, other = recorded.recordings[0], recorded.other_mode[0]
    ends = (own.outputs, own.result[0], own.extra), (other.outputs, other.result[0], other.extra)
    if not same(*ends):
        return None
    try:
        others = generalise(module, recorded.other_mode)
    except Untraceable:
        return None
    return by_mode(calls, others) if module.training else by_mode(others, calls)
