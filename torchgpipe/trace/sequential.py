"""`sequential`: any module as a sequence of its own layers."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from torchgpipe.skip.scope import Namespace
from torchgpipe.tensors._autograd import is_compiled
from torchgpipe.tensors.microbatch import tensors_of
from torchgpipe.trace.calls import BatchSize, Call, Held, LayerPlan, Recording, cut
from torchgpipe.trace.compare import check_halves, check_outputs, check_state, ran
from torchgpipe.trace.generalise import SIZES, Grows, check_batch, generalise
from torchgpipe.trace.layer import Layer, Layers
from torchgpipe.trace.notes import Notes, check_notes
from torchgpipe.trace.parts import within
from torchgpipe.trace.record import Sizes, record
from torchgpipe.trace.recorder import Recorder
from torchgpipe.trace.refuse import Untraceable, refused
from torchgpipe.trace.signature import Signature, Tensors, arguments
from torchgpipe.trace.whole import hooks_of

Whole = nn.Module | type[nn.Module]
"""A submodule, or a class of submodules."""

Batched = tuple[bool, ...]
"""Which of the tensors have a batch dimension."""


def sequential(
    module: nn.Module,
    sample: Any,
    *,
    whole: Iterable[Whole] = (),
    shared: Iterable[str] | None = None,
) -> Layers:
    """Make a sequence of a module's own layers, in the order in which it calls them.

        layers = sequential(torchvision.models.resnet50(), torch.randn(2, 3, 224, 224))
        model = GPipe(layers, balance, chunks=8)

    The module's forward is recorded on fake tensors, for three batch sizes, and cut where a
    submodule with parameters is called. A tensor that is used later than by the next layer becomes
    a skip. Submodules, parameters and buffers are the module's own, and the state has the module's
    names. The layers and the pipeline are called like the module.

    Outputs and gradients of the layers on the sample are compared with the module's. In evaluation
    mode, the module's outputs for the two halves of the sample are compared with its outputs for
    all of it, unless some submodules are kept `whole`. So a module is refused if it compares
    samples, or if the batch is not in the first dimension.

    A submodule stays whole if its forward reads `training` or does something that no recording can
    repeat, unless it has more than half of the parameters. Later calls need the sample's arguments
    and shapes, except for the batch size. A batch size, a mode or an autocast for which the module
    does something else is refused.

    Args:
        module: Any module, with its parameters on one device.
        sample: The module's arguments: a tensor, a tuple of arguments by place, or a dictionary of
            arguments by name.
        whole: Submodules that are not to be cut, or classes of them. They may compare the samples
            of a micro-batch.
        shared: The names of arguments without a batch dimension, which every micro-batch gets
            whole. By default they are found: a tensor has a batch dimension if its dimension 0 can
            grow together with dimension 0 of the other tensors.

    Returns:
        The layers, which `GPipe` takes as any other `nn.Sequential`.

    Raises:
        Untraceable: If a line of the module cannot be recorded. The message says which line, why,
            and what to do.
        ValueError: If the module has no such submodule as `whole` says, or no such argument as
            `shared` says.
    """
    _check_root(module)
    signature = Signature(module, sample)
    inputs = tensors_of(signature.flat(*arguments(sample)))
    if not inputs:
        raise Untraceable(
            f"{type(module).__name__} is given no tensor, so there is nothing to split"
        )
    kept = _kept(module, whole)
    expected = ran(module, module, signature, inputs)
    first: Untraceable | None = None
    try:
        for choices in _choices(signature, inputs, shared):
            for batched in choices:
                signature.batched = batched
                try:
                    layers = _layers(module, signature, inputs, set(kept))
                except Untraceable as error:
                    first = first or error
                    # The module itself runs if these tensors are batched. With fewer of them, it
                    # would run as well, but the result would be another one.
                    if error.__cause__ is None:
                        break
                else:
                    check_state(module, layers)
                    check_outputs(module, ran(module, layers, signature, inputs), expected)
                    # What the user keeps whole may compare samples, as experts with a capacity do.
                    if not kept:
                        check_halves(module, signature, inputs)
                    return layers
        assert first is not None
        raise first
    finally:
        del first  # its traceback refers to this frame, and would keep the module


def _kept(module: Module, whole: Iterable[Whole]) -> set[Module]:
    """Return the submodules that the user wants to keep whole."""
    kept: set[Module] = set()
    for chosen in whole:
        alike: set[Module] = set()
        for m in module.modules():
            if m is chosen or (isinstance(chosen, type) and isinstance(m, chosen)):
                alike.add(m)
        if not alike:
            kind = chosen if isinstance(chosen, type) else type(chosen)
            raise ValueError(f"{type(module).__name__} has no submodule {kind}")
        kept |= alike
    return kept


def _choices(
    signature: Signature, inputs: Tensors, shared: Iterable[str] | None
) -> Iterator[Iterable[Batched]]:
    """Yield guesses which of the tensors have a batch dimension.

    Guesses for the same batch size come together, those with the most tensors first. If the user
    names the arguments without a batch dimension, there is one guess.
    """
    if shared is not None:
        names = set(shared)
        if unknown := names - set(signature.names):
            known = sorted(set(signature.names))
            raise ValueError(f"shared names {sorted(unknown)}, but the tensors are in {known}")
        yield [tuple([name not in names for name in signature.names])]
        return
    members: dict[int, list[int]] = {}  # the tensors of each length of dimension 0
    for k, x in enumerate(inputs):
        if x.dim():
            members.setdefault(len(x), []).append(k)
    for fits in members.values():
        yield _subsets(fits, len(inputs))


def _subsets(members: Sequence[int], n: int) -> Iterator[Batched]:
    """Yield which of `n` are in each subset of `members` but the empty one, the largest first."""
    for count in range(len(members), 0, -1):
        for chosen in combinations(members, count):
            yield tuple([k in chosen for k in range(n)])


def _layers(module: Module, signature: Signature, inputs: Tensors, whole: set[Module]) -> Layers:
    """Record a module and cut it into layers."""
    recordings = _recordings(module, signature, inputs, whole)
    recording = recordings[0]
    check_batch(module, recordings)
    signature.returns(*recording.result, recording.outputs)
    calls = generalise(module, recordings)
    plans = cut(calls, _names(module, calls), len(inputs), recording.outputs)
    namespace = Namespace()
    layers: OrderedDict[str, Module] = OrderedDict()
    for k, plan in enumerate(plans):
        plan.name = f"{k}:{plan.name or type(module).__name__}"
        plan.batch = _batch(module, plan, recordings)
        layers[plan.name] = Layer(module, plan, namespace, recording.extra)
    sequence = Layers(layers, signature)
    first: Any = sequence[0]
    first.sizes = Sizes(module, signature, inputs, whole, recordings)
    sequence.training = module.training
    _hold_unused(module, sequence)
    return sequence


def _recordings(
    module: Module, signature: Signature, inputs: Tensors, whole: set[Module]
) -> list[Recording]:
    """Record a module for several batch sizes.

    Small submodules that cannot be recorded, such as one that reads the mode, are added to `whole`,
    and the module is recorded again.
    """
    while True:
        notes: Notes = {}
        try:
            recordings = []
            for size in SIZES:
                recorder = Recorder(module, whole, notes)
                recordings.append(record(recorder, signature, inputs, size))
        except Untraceable:
            small = _small_modules(notes, module)
            if not small:
                raise
        else:
            small = _small_modules(notes, module)
            if not small:
                return recordings
        whole |= small


def _small_modules(notes: Notes, root: Module) -> set[Module]:
    """Return the noted modules that have at most half of the parameters.

    Raises:
        Untraceable: If there is none, and the root module cannot be recorded.
    """
    total = sum(map(Tensor.numel, root.parameters()))
    small: set[Module] = set()
    for m in notes:
        size = sum(map(Tensor.numel, m.parameters()))
        if m is not root and 2 * size <= total:
            small.add(m)
    if not small:
        check_notes(root, notes)
    return small


def _names(root: Module, calls: Iterable[Call]) -> list[str]:
    """Return by call the name of the layer that begins with it; "" if it has no parameters."""
    parameters = dict(root.named_parameters(remove_duplicate=False))
    names: list[str] = []
    for call in calls:
        if isinstance(call.target, str):
            name = call.target
            has = any(parameter.startswith(f"{name}.") for parameter in parameters)
        else:
            name = call.caller
            held = within((call.args, call.kwargs), Held)
            has = any(tensor.name in parameters for tensor in held)
        shown = name.replace(".", "/") or type(root).__name__
        names.append(shown if has else "")
    return names


def _batch(root: Module, plan: LayerPlan, recordings: Sequence[Recording]) -> BatchSize | None:
    """Return where a layer reads the batch size; `None` if no call of it needs that."""
    passed = [(call.args, call.kwargs) for call in plan.calls]
    if not any(within(passed, Grows)):
        return None
    for number in (*plan.inputs, *dict(plan.pops).values()):
        shapes = [recording.shapes[number] for recording in recordings]
        for dimension, lengths in enumerate(zip(*shapes, strict=False)):
            each = lengths[0] // SIZES[0]
            if each > 0 and list(lengths) == [each * size for size in SIZES]:
                return BatchSize(number, dimension, each)
    at = plan.calls[0].where
    raise refused(
        root, at, "from here on no tensor has a batch dimension", "keep more as one layer"
    )


def _hold_unused(module: Module, sequence: Layers) -> None:
    """Let layers hold the parameters and buffers that no call uses, since the state has them, too.

    A second name of a parameter is held by the layer that has the first name.
    """
    holders: dict[Tensor, Any] = {}
    for layer in sequence:
        for x in (*layer.parameters(), *layer.buffers()):
            holders[x] = layer
    last = sequence[-1]
    state = module.state_dict()
    present = sequence.state_dict().keys()
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    for name, x in (*parameters, *buffers):
        if name not in present and name in state:
            holders.get(x, last).hold(module, name)


def _check_root(module: Module) -> None:
    """Refuse a module whose call does more than its forward, which layers could not do."""
    kind = type(module).__name__
    if hooks_of(module):
        raise Untraceable(
            f"{kind} has hooks of its own, and its layers are not called by it; remove them, or "
            "make it the only child of a module, where it stays whole"
        )
    if is_compiled(module):
        raise Untraceable(
            f"{kind} is compiled; give the module itself, and compile submodules of it"
        )
    for name, part in module.named_modules():
        if any(map(nn.parameter.is_lazy, (*part.parameters(), *part.buffers()))):
            raise Untraceable(
                f"{kind} has parameters without shapes, such as in {name!r}; run it once"
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise Untraceable(
                f"{kind} has a scripted part, {name!r}; use the module that was scripted"
            )
