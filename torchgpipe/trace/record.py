"""Record what a module calls: run it once on fake tensors, which have shapes and no contents.

Every function of PyTorch that the module calls becomes a `Call`, and so does every call of a
submodule that stays whole: PyTorch's own layers, and submodules with hooks or without submodules. A
question about a tensor, such as its shape, becomes no call. Code that needs the contents of a
tensor cannot be recorded.
"""

import copy
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn import Module

from torchgpipe.trace.calls import Recording
from torchgpipe.trace.generalise import generalise
from torchgpipe.trace.notes import Notes, check_notes
from torchgpipe.trace.parts import Slots, tensors_in
from torchgpipe.trace.recorder import Recorder
from torchgpipe.trace.refuse import Untraceable, where
from torchgpipe.trace.restore import as_it_was
from torchgpipe.trace.signature import Signature, Tensors
from torchgpipe.trace.watch import watched
from torchgpipe.trace.whole import HOOKS, stays_whole

State = tuple[bool, torch.dtype | None]
"""Whether a module is in training mode, and the type to which autocast turns its inputs."""


def record(
    recorder: Recorder,
    signature: Signature,
    inputs: Tensors,
    size: int,
    device: torch.device | None = None,
) -> Recording:
    """Record what a module does with fake tensors, and leave the module as it was.

    Args:
        recorder: A new recorder of the module. Modules whose forward uses what a recording cannot
            repeat are added to its notes.
        signature: The module's signature.
        inputs: Tensors like those that the module will get.
        size: How many samples the fake tensors have, if they have a batch dimension.
        device: The device on which a module on `meta`, and its inputs, are taken to be; `None` if
            they are on their device.

    Raises:
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
        given: list[Tensor] = []
        slots = Slots()
        for x, batched in zip(inputs, signature.batched, strict=True):
            shape = (size, *x.shape[1:]) if batched else x.shape
            y = torch.empty(
                shape, dtype=x.dtype, device=device or x.device, requires_grad=x.requires_grad
            )
            given.append(y)
            recorder.add(y, -1)
        try:
            with recorder:
                result = signature.call(recorder.root, given)
                recorder.note_draws()
            structure = slots.taken(result)
        except Untraceable:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines()
            why = f"{type(error).__name__}: {lines[0] if lines else ''}"
            if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
                why = "it depends on what is in a tensor, not only on its shape"
            raise recorder.refusal(where(error), why) from error
        outputs = tuple([recorder.number(x) for x in slots.tensors])
    returned = (structure, slots.again())
    return Recording(size, recorder.calls, recorder.shapes, returned, outputs, recorder.extra)


class Sizes:
    """Refuse a batch size for which a module does something else than its layers.

    For each new batch size, mode and autocast, a copy of the module without contents and hooks is
    recorded, and compared with the recordings that the layers were made of.

    Args:
        module: The module.
        signature: The module's signature.
        inputs: The tensors of the sample.
        whole: The submodules that stay whole.
        recordings: The recordings that the layers were made of.

    Raises:
        Untraceable: If the module cannot be copied.
    """

    def __init__(
        self,
        module: Module,
        signature: Signature,
        inputs: Tensors,
        whole: Container[Module],
        recordings: Sequence[Recording],
    ) -> None:
        self._signature, self._recordings = signature, recordings
        self._whole: list[str] = []
        self._plain: list[tuple[Tensor, Tensor]] = []
        self._state: State = (module.training, _autocast(inputs[0]))
        self._known = {(recording.size, *self._state) for recording in recordings}
        memo: dict[int, Any] = {}  # what stands for objects in the copy, by id
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
            # A recording changes the contents of tensors that are neither parameters nor buffers,
            # if the forward does. So the copy of the module has copies of them.
            for x in tensors_in([*attributes.values()]):
                if id(x) not in own:
                    copied = x.detach().clone()
                    memo[id(x)] = copied
                    self._plain.append((x, copied))
        try:
            self._module = copy.deepcopy(module, memo)
        except Exception as error:
            raise Untraceable(
                f"{type(module).__name__} cannot be copied, to see what it does with other batch "
                f"sizes ({type(error).__name__}: {error}); make copy.deepcopy work on it"
            ) from None

    def __call__(self, tensors: Tensors, training: bool) -> None:
        """Check that the layers are right for the batch size of these inputs, in this mode.

        Args:
            tensors: The inputs of the first layer.
            training: Whether the layers are in training mode.

        Raises:
            Untraceable: If the layers are not right.
        """
        given = zip(tensors, self._signature.batched, strict=True)
        size = next(len(x) for x, batched in given if batched)
        state = (training, _autocast(tensors[0]))
        known = (size, *state)
        if known not in self._known and not tensors[0].is_meta:
            # Modes of this thread, such as a recorder's, do not reach another thread.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(self._check, tensors, size, state).result()
            self._known.add(known)

    def __deepcopy__(self, memo: object) -> "Sizes":
        return self

    def _check(self, tensors: Tensors, size: int, state: State) -> None:
        training, cast = state
        notes: Notes = {}
        module, device = self._module, tensors[0].device
        if module.training != training:
            module.train(training)
        for part in module.modules():
            # Batch norms of the module itself may be in evaluation mode by then. In training mode
            # they would refuse a single sample.
            if isinstance(part, nn.modules.batchnorm._NormBase):
                part.training = False
        whole = set(map(module.get_submodule, self._whole))
        with torch.autocast(device.type, cast, enabled=cast is not None):
            recorder = Recorder(module, whole, notes)
            found = record(recorder, self._signature, tensors, size, device)
        check_notes(module, notes)
        originals = {id(copied): x for x, copied in self._plain}
        for name, x in found.extra.items():
            found.extra[name] = originals.get(id(x), x)
        if state != self._state:
            mode = "training" if training else "evaluation"
            found.state = f" ({mode} mode, {cast or 'no'} autocast)"
        generalise(module, [*self._recordings, found])


def _autocast(x: Tensor) -> torch.dtype | None:
    """Return the type to which autocast turns inputs like this one, if it is enabled."""
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)
