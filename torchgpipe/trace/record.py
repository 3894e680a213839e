"""Record a module's calls by running it once on fake tensors, which have shapes but no contents.

A recording has two kinds of calls:

- each call of a PyTorch function
- each call of a submodule that is kept whole, which means that it is not cut into layers. Examples
  are PyTorch's own layers, submodules with hooks, and submodules that have no submodules.

Reading an attribute of a tensor, such as its shape, is not recorded. Code that needs the contents
of a tensor cannot be recorded.
"""

import copy
import re
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn import Module

from torchgpipe.trace.calls import RecordedCalls
from torchgpipe.trace.code.lengths import shape_at
from torchgpipe.trace.code.sizes import Sizes
from torchgpipe.trace.generalise import generalise
from torchgpipe.trace.kept import KeptResults, NeedsResults
from torchgpipe.trace.notes import Notes, check_notes
from torchgpipe.trace.parts import Slots, cache_in, tensors_in
from torchgpipe.trace.recorder import Recorder
from torchgpipe.trace.refuse import WITHOUT_CACHE, Untraceable, reason, refused, where
from torchgpipe.trace.restore import as_it_was
from torchgpipe.trace.signature import Signature, Tensors
from torchgpipe.trace.watch import watched
from torchgpipe.trace.whole import HOOKS, stays_whole

_OTHER_BATCH = (
    "dimension 0 of the sample has to be the batch, and the module has to take any number of "
    "samples: write x.shape[0] or -1 where it has a fixed number of samples, and name the "
    "arguments that have no batch dimension: shared=[…]"
)
"""What to do if a module fails for another batch size than the sample's."""

State = tuple[bool, torch.dtype | None]
"""Whether a module is in training mode, and the dtype of autocast (`None` if it is off)."""


def record(
    recorder: Recorder,
    signature: Signature,
    inputs: Tensors,
    sizes: Sizes,
    device: torch.device | None = None,
) -> RecordedCalls:
    """Run a module on fake tensors and record its calls; then restore the module's state.

    Args:
        recorder: A new recorder of the module. It also notes which submodules use something that a
            recording cannot repeat.
        signature: The module's signature.
        inputs: Tensors with the shapes and dtypes of the module's inputs.
        sizes: The batch size of the fake tensors, and the lengths that may change.
        device: The device of the fake tensors, if the module is on `meta`. With `None`, they have
            the devices of the module and of `inputs`.

    Raises:
        NeedsResults: If a submodule that is kept whole needs the contents of a tensor, and its
            results are not known.
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
            if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
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


class Recorded(NamedTuple):
    """The recordings of a module for several sizes of its inputs.

    Attributes:
        recordings: A recording for each of the sizes.
        results: The results of submodules that cannot run on fake tensors, if there are any.
    """

    recordings: list[RecordedCalls]
    results: KeptResults | None


class OtherSizes:
    """A check, before the layers run, that the module would make the same calls as its layers.

    For each new batch size, length, mode and autocast, the calls of a copy of the module are
    recorded. This recording is compared with the recordings from which the layers were made. The
    copy is on `meta` and has no hooks.

    Args:
        module: The module.
        signature: The module's signature.
        inputs: The tensors of the sample.
        whole: The submodules that are kept as one layer.
        recorded: The recordings from which the layers were made.

    Raises:
        Untraceable: If the module cannot be copied.
    """

    def __init__(
        self,
        module: Module,
        signature: Signature,
        inputs: Tensors,
        whole: Container[Module],
        recorded: Recorded,
    ) -> None:
        self._signature = signature
        self._recordings, self._results = recorded
        self._whole: list[str] = []
        self._plain: list[tuple[Tensor, Tensor]] = []
        self._state: State = (module.training, _autocast(inputs[0]))
        self._known = {(recording.sizes, *self._state) for recording in self._recordings}
        memo: dict[int, Any] = {}  # maps the id of an original to its object in the copy
        for x in (*module.parameters(), *module.buffers()):
            y = torch.empty_like(x, device="meta")
            if isinstance(x, nn.Parameter):
                y = nn.Parameter(y, x.requires_grad)
            memo[id(x)] = y
        own = set(memo)
        for name, part in module.named_modules():
            if part is not module and stays_whole(part, whole):
                self._whole.append(name)
            attributes = vars(part)
            for hooks in HOOKS:
                if hooks in attributes:
                    memo[id(attributes[hooks])] = type(attributes[hooks])()
            # If the forward changes tensors that are neither parameters nor buffers, recording it
            # changes them, too. So the copy of the module gets copies of these tensors.
            for x in tensors_in([*attributes.values()]):
                if id(x) not in own:
                    copied = x.detach().clone()
                    memo[id(x)] = copied
                    self._plain.append((x, copied))
        try:
            self._module = copy.deepcopy(module, memo)
        except Exception as error:
            raise Untraceable(
                f"the module {type(module).__name__} cannot be copied "
                f"({type(error).__name__}: {error}); "
                "sequential needs a copy to check other batch sizes, so make copy.deepcopy work on "
                "the module"
            ) from None

    def __call__(self, tensors: Tensors, training: bool) -> None:
        """Check that the module would make the same calls as the layers for these inputs.

        Nothing is checked if a check with the same sizes, mode and autocast has already passed.

        Args:
            tensors: The inputs of the first layer.
            training: Whether the layers are in training mode.

        Raises:
            Untraceable: If the module's calls differ from those of the layers.
        """
        sizes = self._signature.sizes_of(tensors)
        state = (training, _autocast(tensors[0]))
        known = (sizes, *state)
        if known not in self._known and not tensors[0].is_meta:
            # The check runs in a new thread, because modes that are active in this thread, such as
            # a `TorchFunctionMode` of the user, would see the calls of the check.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(self._check, tensors, sizes, state).result()
            self._known.add(known)

    def __deepcopy__(self, memo: object) -> "OtherSizes":
        return self

    def _check(self, tensors: Tensors, sizes: Sizes, state: State) -> None:
        training, cast = state
        notes: Notes = {}
        module, device = self._module, tensors[0].device
        if module.training != training:
            module.train(training)
        for part in module.modules():
            # A batch norm in training mode refuses a single sample. But in the original module, the
            # batch norms may be in evaluation mode, and then they take it.
            if isinstance(part, nn.modules.batchnorm._NormBase):
                part.training = False
        whole = set(map(module.get_submodule, self._whole))
        with torch.autocast(device.type, cast, enabled=cast is not None):
            recorder = Recorder(module, whole, notes, self._results)
            try:
                found = record(recorder, self._signature, tensors, sizes, device)
            except NeedsResults as error:
                raise Untraceable(
                    f"a submodule of {type(module).__name__} that is kept as one layer needs the "
                    "values of its inputs in this mode (training or evaluation, autocast), but did "
                    f"not need them when sequential was called: {error.__cause__}"
                ) from None
        check_notes(module, notes)
        originals = {id(copied): x for x, copied in self._plain}
        for name, x in found.extra.items():
            found.extra[name] = originals.get(id(x), x)
        if state != self._state:
            mode = "training" if training else "evaluation"
            found.state = f" ({mode} mode, {cast or 'no'} autocast)"
        generalise(module, [*self._recordings, found])


def _autocast(x: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast on a tensor's device, or `None` if autocast is off there."""
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)
