"""Check that layers made by `sequential` are right also for other inputs than the sample.

`sequential` records the calls that a module makes for a sample, and makes layers of the calls. For
another batch size, length or mode (such as evaluation), the module could make other calls.
"""

import copy
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from torchgpipe.trace.calls import RecordedCalls
from torchgpipe.trace.code.call import Call
from torchgpipe.trace.code.sizes import Sizes
from torchgpipe.trace.compare import check_outputs, is_on_meta, ran
from torchgpipe.trace.generalise import OTHER_MODE, generalise, have_same_functions
from torchgpipe.trace.kept import NeedsResults
from torchgpipe.trace.layer import Layers
from torchgpipe.trace.parts import tensors_in
from torchgpipe.trace.record import AllRecordings, record
from torchgpipe.trace.recorder import Recorder
from torchgpipe.trace.refuse import Untraceable
from torchgpipe.trace.signature import Signature, Tensors
from torchgpipe.trace.whole import HOOKS, Notes, check_notes, stays_whole

State = tuple[bool, torch.dtype | None]
"""Whether a module is in training mode, and the dtype of autocast (`None` if it is off)."""


class SameCallsCheck:
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

    Attributes:
        one_mode: Whether the layers can run only in the mode (training or evaluation) that the
            module has now.
        both_modes: Whether some arguments of the layers' calls depend on the mode.
        masked_encoder: Whether an `nn.TransformerEncoder` with nested tensors gets a padding mask.

    Raises:
        Untraceable: If the module cannot be copied.
    """

    def __init__(
        self,
        module: Module,
        signature: Signature,
        inputs: Tensors,
        whole: Container[Module],
        recorded: AllRecordings,
    ) -> None:
        self._signature = signature
        self._results = recorded.results
        self.one_mode = recorded.reads_mode and not recorded.other_mode
        self.both_modes = bool(recorded.other_mode)
        self.masked_encoder = _has_masked_encoder(module, recorded.recordings[0].calls)
        self._recordings = {
            module.training: recorded.recordings,
            not module.training: recorded.other_mode or recorded.recordings,
        }
        self._whole: list[str] = []
        self._plain: list[tuple[Tensor, Tensor]] = []
        self._state: State = (module.training, _autocast(inputs[0]))
        # The calls for a single sample, if they differ, but the layers compute the same.
        self._one_sample: RecordedCalls | None = None
        self._known: set[tuple[Any, ...]] = set()
        training, cast = self._state
        for recording in recorded.recordings:
            self._known.add((recording.sizes, training, cast))
        for recording in recorded.other_mode:
            self._known.add((recording.sizes, not training, cast))
        self._module = self._copied(module, whole)
        # A submodule can be in another mode than the module.
        self._modes = {part: part.training for part in self._module.modules()}

    def forget_other_mode(self) -> None:
        """From now on, let the layers run only in the module's mode (training or evaluation)."""
        training, _ = self._state
        self.one_mode, self.both_modes = True, False
        self._recordings[not training] = self._recordings[training]
        self._known = {known for known in self._known if known[1] == training}

    def _copied(self, module: Module, whole: Container[Module]) -> Module:
        """Copy the module to `meta`, without its hooks; find the names of submodules in `whole`."""
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
            return copy.deepcopy(module, memo)
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

    def __deepcopy__(self, memo: object) -> "SameCallsCheck":
        return self

    def keep_one_sample(self, tensors: Tensors) -> bool:
        """Let the layers run on a single sample, even if the module then makes other calls.

        Args:
            tensors: Inputs with a single sample.

        Returns:
            Whether the module makes other calls for a single sample. The caller has to check
            whether the layers compute the same as the module, and otherwise has to call
            `forget_one_sample`. If the module raises an error, the result is false.
        """
        training, _ = self._state
        try:
            self(tensors, training)
        except Exception:
            pass
        else:
            return False
        sizes = self._signature.sizes_of(tensors)
        try:
            self._one_sample = self._recorded(tensors, sizes, self._state)
        except Exception:
            return False
        self._known.add((sizes, *self._state))
        return True

    def forget_one_sample(self) -> None:
        """From now on, refuse a single sample if the module makes other calls for it."""
        self._one_sample = None
        self._known = {known for known in self._known if known[0][0] > 1}

    def _check(self, tensors: Tensors, sizes: Sizes, state: State) -> None:
        training, _ = state
        found = self._recorded(tensors, sizes, state)
        one = self._one_sample
        if sizes[0] == 1 and one is not None and have_same_functions(one, found):
            return
        advice = OTHER_MODE if training != self._state[0] else None
        generalise(self._module, [*self._recordings[training], found], advice)

    def _recorded(self, tensors: Tensors, sizes: Sizes, state: State) -> RecordedCalls:
        """Record the calls that the module makes for these tensors, sizes, mode and autocast.

        Raises:
            Untraceable: If the calls cannot be recorded.
        """
        training, cast = state
        notes: Notes = {}
        module, device = self._module, tensors[0].device
        for part, own in self._modes.items():
            part.training = own if training == self._state[0] else training
            # A batch norm in training mode refuses a single sample. But in the original module, the
            # batch norms may be in evaluation mode, and then they accept a single sample.
            if isinstance(part, nn.modules.batchnorm._NormBase):
                part.training = False
        whole = set(map(module.get_submodule, self._whole))
        with torch.autocast(device.type, cast, enabled=cast is not None):
            recorder = Recorder(module, whole, notes, self._results)
            try:
                found = record(recorder, self._signature, tensors, sizes, device)
            except NeedsResults as error:
                limit = ""
                if len(sizes) > 1:
                    limit = (
                        "; if the module itself does not take these lengths, limit them: "
                        "torch.export.Dim(…, max=…)"
                    )
                raise Untraceable(
                    f"a submodule of {type(module).__name__} that is kept as one layer fails for "
                    f"{'x'.join(map(str, sizes))} on tensors without values, in this mode "
                    "(training or evaluation, autocast), but did not when sequential was called: "
                    f"{error.__cause__}{limit}"
                ) from None
        check_notes(module, notes)
        originals = {id(copied): x for x, copied in self._plain}
        for name, x in found.extra.items():
            found.extra[name] = originals.get(id(x), x)
        if state != self._state:
            mode = "training" if training else "evaluation"
            found.state = f" ({mode} mode, {cast or 'no'} autocast)"
        return found


def check_one_sample(module: Module, layers: Layers, signature: Signature, inputs: Tensors) -> None:
    """Find out whether the layers of a module may run on a single sample.

    A module may make other calls for a single sample: for example, it may expand a tensor only if
    there are several samples. Even then, the layers often compute the same as the module.

    The layers may run on a single sample if the module makes the same calls for it as for several
    samples, or if the outputs and gradients of the layers are the same as the module's. Otherwise,
    the layers refuse a single sample.

    Args:
        module: The module.
        layers: The layers that were made of the module.
        signature: The module's signature, which says which inputs have a batch dimension.
        inputs: The tensors of the sample.
    """
    if is_on_meta(module, inputs):
        return
    one: list[Tensor] = []
    for x, batched in zip(inputs, signature.batched, strict=True):
        first = x.detach()[:1] if batched else x.detach()
        one.append(first.requires_grad_(x.requires_grad))
    check: Any = layers[0].check_calls
    if not check.keep_one_sample(one):
        return
    try:
        expected = ran(module, module, signature, one)
        check_outputs(module, ran(module, layers, signature, one), expected)
    except Exception:
        check.forget_one_sample()


def _autocast(x: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast on a tensor's device, or `None` if autocast is off there."""
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _has_masked_encoder(module: Module, calls: Sequence[Call]) -> bool:
    """Return whether an `nn.TransformerEncoder` that uses nested tensors gets a padding mask."""
    paths = []
    for path, part in module.named_modules():
        if isinstance(part, nn.TransformerEncoder) and part.use_nested_tensor:
            paths.append(f"{path}.layers.".removeprefix("."))
    for call in calls:
        is_within = isinstance(call.target, str) and call.target.startswith(tuple(paths))
        if is_within and call.kwargs.get("src_key_padding_mask") is not None:
            return True
    return False
