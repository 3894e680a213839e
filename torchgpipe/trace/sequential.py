"""`sequential`: any module as a sequence of its own layers. `pipeline`: a `GPipe` of it, planned."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

from torch import Tensor, nn

from torchgpipe.skip.scope import Namespace
from torchgpipe.trace.calls import Call, Recording
from torchgpipe.trace.check import check_batch, check_notes, check_outputs, check_root, check_state, ran, random_kept
from torchgpipe.trace.cut import LayerPlan, cut, held_in
from torchgpipe.trace.generalise import SIZES, Grows, batch_of, generalise
from torchgpipe.trace.layer import BatchSize, Layer, Layers
from torchgpipe.trace.parts import within
from torchgpipe.trace.record import Sizes, record
from torchgpipe.trace.recorder import Notes
from torchgpipe.trace.refuse import Untraceable, refused
from torchgpipe.trace.signature import Signature

Whole = nn.Module | type[nn.Module]


def sequential(
    module: nn.Module, sample: Any, *, whole: Iterable[Whole] = (), shared: Iterable[str] | None = None
) -> Layers:
    """Make a sequence of a module's own layers, in the order in which it calls them.

        layers = sequential(torchvision.models.resnet50(), torch.randn(2, 3, 224, 224))
        model = GPipe(layers, balance, chunks=8)

    The module's forward is recorded on fake tensors, for three batch sizes, and cut where a submodule with parameters
    is called. A tensor that is used later than by the next layer becomes a skip. Submodules, parameters and buffers
    are the module's own, and state has its names. The layers and the pipeline are called like the module, and on the
    sample they are compared with it: outputs, and gradients.

    Submodules whose forward reads `training`, or what no recording can repeat, stay whole, unless they have more than
    half of the parameters. Later calls need the sample's arguments and shapes, but for the batch size. A batch size,
    a mode or an autocast for which the module does something else is refused.

    Args:
        module: any module, with its parameters on one device.
        sample: its arguments: a tensor, a tuple of arguments by place, or a dictionary of them by name.
        whole: submodules, or classes of them, that are not to be cut.
        shared: the names of arguments without a batch dimension, of which every micro-batch gets all. By default this
            is found out: a tensor has a batch dimension if its dimension 0 can grow with that of the others.

    Raises:
        Untraceable: a line of the module cannot be recorded; the message says which, why, and what to do.
    """
    check_root(module)
    signature = Signature(module, sample)
    inputs = signature.tensors(sample)
    if not inputs:
        raise Untraceable(f"{type(module).__name__} is given no tensor, so there is nothing to split")
    kept = _modules(module, whole)
    expected = ran(module, module, signature, inputs)
    first: Untraceable | None = None
    try:
        for batched in _choices(signature, inputs, shared):
            signature.batched = batched
            try:
                with random_kept(module):
                    layers = _layers(module, signature, inputs, set(kept))
            except Untraceable as error:
                first = first or error
            else:
                check_state(module, layers)
                check_outputs(module, layers, signature, inputs, expected)
                return layers
        assert first is not None
        raise first
    finally:
        del first  # its traceback refers to this frame, and would keep the module


def _choices(
    signature: Signature, inputs: Sequence[Tensor], shared: Iterable[str] | None
) -> Iterator[tuple[bool, ...]]:
    """Yield guesses which of the tensors have a batch dimension, the likeliest first; one if the user says it."""
    if shared is not None:
        names = set(shared)
        if unknown := names - set(signature.names):
            raise ValueError(f"shared names {sorted(unknown)}, but the tensors are in {sorted(set(signature.names))}")
        yield tuple(name not in names for name in signature.names)
        return
    for size in dict.fromkeys(len(x) for x in inputs if x.dim()):
        fits = [k for k, x in enumerate(inputs) if x.dim() and len(x) == size]
        for count in range(len(fits), 0, -1):
            for chosen in combinations(fits, count):
                yield tuple(k in chosen for k in range(len(inputs)))


def _modules(root: nn.Module, whole: Iterable[Whole]) -> set[nn.Module]:
    given = [*whole]
    classes = tuple(x for x in given if isinstance(x, type))
    found = {m for m in root.modules() if isinstance(m, classes) or any(m is x for x in given)}
    for x in given:
        if not any(m is x or (isinstance(x, type) and isinstance(m, x)) for m in found):
            raise ValueError(f"{type(root).__name__} has no submodule {x if isinstance(x, type) else type(x)}")
    return found


def _layers(module: nn.Module, signature: Signature, inputs: Sequence[Tensor], whole: set[nn.Module]) -> Layers:
    """Record a module and cut it. Small modules that read the mode, or the like, are added to `whole`."""
    while True:
        notes: Notes = {}
        try:
            recordings = [record(module, whole, inputs, signature, size, notes) for size in SIZES]
        except Untraceable:
            if not _small_modules(notes, module):
                raise
        whole |= (small := _small_modules(notes, module))
        if not small:
            break
    check_batch(module, recordings)
    signature.returns(*recordings[0].result, recordings[0].outputs)
    calls = generalise(module, recordings)
    plans = cut(calls, [_has_parameters(module, call) for call in calls], len(inputs), recordings[0].outputs)
    namespace = Namespace()
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for k, plan in enumerate(plans):
        batch = _batch(module, plan, recordings)
        name = f"{k}:{_name(module, plan)}"
        made = Layer(name, module, plan, namespace, extra=recordings[0].extra, batch=batch)
        layers[name] = made
    sequence = Layers(layers, signature)
    next(iter(layers.values())).sizes = Sizes(module, signature, inputs, whole, recordings)  # type: ignore[assignment]
    sequence.training = module.training
    # What no call uses belongs to the state, too; a second name of a parameter stays with the first.
    holds: dict[Tensor, Any] = {x: layer for layer in layers.values() for x in (*layer.parameters(), *layer.buffers())}
    state, present = module.state_dict(), sequence.state_dict().keys()
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, x in named:
        if name not in present and name in state:
            holds.get(x, made).hold(module, name)
    return sequence


def _small_modules(notes: Notes, root: nn.Module) -> set[nn.Module]:
    """Return which modules of notes are to stay whole; where there is none, refuse what cannot be recorded."""
    sizes = {m: sum(p.numel() for p in m.parameters()) for m in (root, *notes)}
    small = {m for m in notes if m is not root and 2 * sizes[m] <= sizes[root]}
    if not small:
        check_notes(root, notes)
    return small


def _has_parameters(root: nn.Module, call: Call) -> bool:
    if isinstance(call.target, str):
        return any(True for _ in root.get_submodule(call.target).parameters())
    names = {name for name, _ in root.named_parameters(remove_duplicate=False)}
    return not names.isdisjoint(held_in((call.args, call.kwargs)))


def _name(root: nn.Module, plan: LayerPlan) -> str:
    """Return the name of what the layer begins with, or of the module that makes its calls."""
    for call in plan.calls:
        if _has_parameters(root, call):
            name = call.target if isinstance(call.target, str) else call.caller
            return name.replace(".", "/") or type(root).__name__
    return type(root).__name__


def _batch(root: nn.Module, plan: LayerPlan, recordings: Sequence[Recording]) -> BatchSize | None:
    if not any(within([(call.args, call.kwargs) for call in plan.calls], Grows)):
        return None
    for number in (*plan.inputs, *(value for _, value in plan.pops)):
        found = batch_of([recording.shapes[number] for recording in recordings])
        if found is not None:
            return BatchSize(number, *found)
    at = plan.calls[0].where
    raise Untraceable(refused(root, at, "from here on no tensor has a batch dimension", "keep more as one layer"))
