"""`sequential`: any module as a sequence of its own layers. `pipeline`: a `GPipe` of it, planned."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.testing import assert_close

from torchgpipe.skip.scope import Namespace
from torchgpipe.tensors._autograd import is_compiled
from torchgpipe.tensors.microbatch import tensors_of
from torchgpipe.trace.calls import BatchSize, Call, Held, LayerPlan, Recording, cut
from torchgpipe.trace.generalise import SIZES, Grows, check_batch, generalise
from torchgpipe.trace.layer import Layer, Layers
from torchgpipe.trace.parts import tensors_in, within
from torchgpipe.trace.record import Sizes, as_it_was, record
from torchgpipe.trace.recorder import Notes, check_notes, hooks_of
from torchgpipe.trace.refuse import Untraceable, refused
from torchgpipe.trace.signature import Signature, arguments

Whole = nn.Module | type[nn.Module]
Ran = tuple[list[Tensor], dict[str, Tensor]]


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

    The module's forward is recorded on fake tensors, for three batch sizes, and cut where a submodule with parameters
    is called. A tensor that is used later than by the next layer becomes a skip. Submodules, parameters and buffers
    are the module's own, and state has its names. The layers and the pipeline are called like the module, and on the
    sample they are compared with it: outputs, and gradients.

    In evaluation mode, the module's outputs for the two halves of the sample are compared with those for all of it,
    unless parts of it are kept `whole`. A module that compares samples, or has them in another dimension than the
    first, is refused.

    Submodules whose forward reads `training`, or what no recording can repeat, stay whole, unless they have more than
    half of the parameters. Later calls need the sample's arguments and shapes, but for the batch size. A batch size,
    a mode or an autocast for which the module does something else is refused.

    Args:
        module: any module, with its parameters on one device.
        sample: its arguments: a tensor, a tuple of arguments by place, or a dictionary of them by name.
        whole: submodules, or classes of them, that are not to be cut. They may compare the samples of a micro-batch.
        shared: the names of arguments without a batch dimension, of which every micro-batch gets all. By default this
            is found out: a tensor has a batch dimension if its dimension 0 can grow with that of the others.

    Raises:
        Untraceable: a line of the module cannot be recorded; the message says which, why, and what to do.
    """
    _check_root(module)
    signature = Signature(module, sample)
    inputs = tensors_of(signature.flat(*arguments(sample)))
    if not inputs:
        raise Untraceable(
            f"{type(module).__name__} is given no tensor, so there is nothing to split"
        )
    kept: set[nn.Module] = set()
    for x in whole:
        alike = {
            m for m in module.modules() if m is x or (isinstance(x, type) and isinstance(m, x))
        }
        if not alike:
            raise ValueError(
                f"{type(module).__name__} has no submodule {x if isinstance(x, type) else type(x)}"
            )
        kept |= alike
    expected = _ran(module, module, signature, inputs)
    first: Untraceable | None = None
    try:
        for choices in _choices(signature, inputs, shared):
            for batched in choices:
                signature.batched = batched
                try:
                    layers = _layers(module, signature, inputs, set(kept))
                except Untraceable as error:
                    first = first or error
                    if error.__cause__ is None:
                        break  # the module itself runs with these batched, so that fewer would be another result
                else:
                    _check_state(module, layers)
                    _check_outputs(module, _ran(module, layers, signature, inputs), expected)
                    if not kept:  # what the user keeps whole may compare samples, as experts with a capacity do
                        _check_halves(module, signature, inputs)
                    return layers
        assert first is not None
        raise first
    finally:
        del first  # its traceback refers to this frame, and would keep the module


def _choices(
    signature: Signature, inputs: Sequence[Tensor], shared: Iterable[str] | None
) -> Iterator[Iterable[tuple[bool, ...]]]:
    """Yield guesses which of the tensors have a batch dimension; one if the user says it.

    Those for one batch size come together, and among them the one with the most tensors comes first.
    """
    if shared is not None:
        names = set(shared)
        if unknown := names - set(signature.names):
            raise ValueError(
                f"shared names {sorted(unknown)}, but the tensors are in {sorted(set(signature.names))}"
            )
        yield [tuple(name not in names for name in signature.names)]
        return
    for size in dict.fromkeys(len(x) for x in inputs if x.dim()):
        fits = [k for k, x in enumerate(inputs) if x.dim() and len(x) == size]
        yield _subsets(fits, len(inputs))


def _subsets(members: Sequence[int], n: int) -> Iterator[tuple[bool, ...]]:
    """Yield which of `n` are in each subset of `members` but the empty one, the largest first."""
    for count in range(len(members), 0, -1):
        for chosen in combinations(members, count):
            yield tuple(k in chosen for k in range(n))


def _layers(
    module: nn.Module, signature: Signature, inputs: Sequence[Tensor], whole: set[nn.Module]
) -> Layers:
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
    plans = cut(calls, [_name(module, call) for call in calls], len(inputs), recordings[0].outputs)
    namespace = Namespace()
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for k, plan in enumerate(plans):
        plan.name, plan.batch = (
            f"{k}:{plan.name or type(module).__name__}",
            _batch(module, plan, recordings),
        )
        layers[plan.name] = made = Layer(module, plan, namespace, recordings[0].extra)
    sequence = Layers(layers, signature)
    next(iter(layers.values())).sizes = Sizes(module, signature, inputs, whole, recordings)  # type: ignore[assignment]
    sequence.training = module.training
    # What no call uses belongs to the state, too; a second name of a parameter stays with the first.
    holds: dict[Tensor, Any] = {
        x: layer for layer in layers.values() for x in (*layer.parameters(), *layer.buffers())
    }
    state, present = module.state_dict(), sequence.state_dict().keys()
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
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


def _name(root: nn.Module, call: Call) -> str:
    """Return the name of the layer that begins with a call; none if the call has no parameters."""
    names = {name for name, _ in root.named_parameters(remove_duplicate=False)}
    if isinstance(call.target, str):
        name, has = call.target, any(each.startswith(f"{call.target}.") for each in names)
    else:
        name, has = (
            call.caller,
            any(x.name in names for x in within((call.args, call.kwargs), Held)),
        )
    return has * (name.replace(".", "/") or type(root).__name__)


def _batch(root: nn.Module, plan: LayerPlan, recordings: Sequence[Recording]) -> BatchSize | None:
    """Return a dimension of what a layer takes that grows with the batch size; `None` if no call needs that."""
    if not any(within([(call.args, call.kwargs) for call in plan.calls], Grows)):
        return None
    for number in (*plan.inputs, *(value for _, value in plan.pops)):
        for dimension, lengths in enumerate(
            zip(*(recording.shapes[number] for recording in recordings), strict=False)
        ):
            each = lengths[0] // SIZES[0]
            if each > 0 and all(n == each * size for n, size in zip(lengths, SIZES, strict=True)):
                return BatchSize(number, dimension, each)
    at = plan.calls[0].where
    raise refused(
        root, at, "from here on no tensor has a batch dimension", "keep more as one layer"
    )


def _check_root(module: nn.Module) -> None:
    """Refuse a module that does more than its forward does, which no layers of it could."""
    if hooks_of(module):
        raise Untraceable(
            f"{type(module).__name__} has hooks of its own, and its layers are not called by it; remove them, or make "
            "it the only child of a module, where it stays whole"
        )
    if is_compiled(module):
        raise Untraceable(
            f"{type(module).__name__} is compiled; give the module itself, and compile submodules of it"
        )
    for name, part in module.named_modules():
        if any(map(nn.parameter.is_lazy, (*part.parameters(), *part.buffers()))):
            raise Untraceable(
                f"{type(module).__name__} has parameters without shapes, such as in {name!r}; run it once"
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise Untraceable(
                f"{type(module).__name__} has a scripted part, {name!r}; use the module that was scripted"
            )


def _check_state(module: nn.Module, layers: Layers) -> None:
    """Refuse layers whose state is not the module's own, by the same names."""
    ours, plain = (m.state_dict(keep_vars=True) for m in (layers, module))
    if ours.keys() != plain.keys() or any(ours[name] is not x for name, x in plain.items()):
        names = sorted(ours.keys() ^ plain.keys()) or sorted(
            n for n, x in plain.items() if ours[n] is not x
        )
        raise Untraceable(
            f"{type(module).__name__} keeps state in a way of its own ({', '.join(names[:3])}): modules around others "
            "can have no state_dict hooks and no extra state; keep them as one layer, whole=[…]"
        )


def _check_outputs(module: nn.Module, found: Ran, expected: Ran) -> None:
    """Refuse layers whose outputs, buffers or gradients on the sample are others than the module's, `expected`."""
    (values, grads), (plain_values, plain_grads) = found, expected
    norms = {name: float(y.nan_to_num().norm()) for name, y in plain_grads.items()}
    try:
        assert_close(values, plain_values, equal_nan=True)
        for name, y in plain_grads.items():
            # Gradients of a tensor that is used several times are added in another order.
            most = (1e-3 + 16 * torch.finfo(y.dtype).eps) * norms[name] + 1e-6 * max(norms.values())
            if grads[name].shape != y.shape or float((grads[name] - y).nan_to_num().norm()) > most:
                raise AssertionError(f"the gradient of {name} differs")
    except AssertionError as error:
        raise Untraceable(
            f"the layers of {type(module).__name__} give something else than the module does: "
            f"{' '.join(str(error).split())}\nkeep a part of it as one layer, whole=[…]"
        ) from None


def _ran(module: nn.Module, run: nn.Module, signature: Signature, inputs: Sequence[Tensor]) -> Ran:
    """Run the module, or its layers, on the sample. Return outputs, then buffers, and gradients; on `meta` nothing."""
    if any(x.is_meta for x in (*inputs, *module.parameters(), *module.buffers())):
        return [], {}
    with as_it_was(module), torch.inference_mode(False), torch.enable_grad():
        given = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        outputs = _outputs(run, signature, given)
        values = [x.detach().clone() for x in (*outputs, *module.buffers())]
        ends = [y for y in outputs if y.requires_grad]
        weights = [
            torch.linspace(1, 2, y.numel(), device=y.device).to(y.dtype).view(y.shape) for y in ends
        ]
        named = [*zip(signature.names, given, strict=True), *module.named_parameters()]
        wanted = {name: x for name, x in named if x.requires_grad}
        grads: Sequence[Tensor | None] = [None] * len(wanted)
        with suppress(
            RuntimeError
        ):  # such as of a function without a derivative, which can be evaluated all the same
            if ends and wanted:
                grads = torch.autograd.grad(ends, [*wanted.values()], weights, allow_unused=True)
        dense = [torch.empty(0) if x is None else x.to_dense() if x.is_sparse else x for x in grads]
        return values, dict(zip(wanted, dense, strict=True))


def _outputs(run: nn.Module, signature: Signature, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that the module, or its layers, returns for copies of these inputs."""
    return [*tensors_in(signature.call(run, [x.clone() for x in inputs]))]


def _check_halves(module: nn.Module, signature: Signature, inputs: Sequence[Tensor]) -> None:
    """Refuse a module that, in evaluation mode, gives something else for the sample's halves than for all of it.

    Modules with batch norms without running statistics, those that give something else each time, such as by random
    numbers, and those that cannot run in evaluation mode are let be.
    """
    everything = [*module.modules()]
    if any(isinstance(m, _BatchNorm) and m.running_mean is None for m in everything):
        return
    of_halves = [
        x.chunk(2) if batched else (x, x)
        for x, batched in zip(inputs, signature.batched, strict=True)
    ]
    with as_it_was(module), torch.inference_mode(False), torch.enable_grad():
        for part in everything:
            part.training = False
        try:
            expected = _outputs(module, signature, inputs)
            parts = [_outputs(module, signature, half) for half in zip(*of_halves, strict=False)]
            found = [torch.cat(column) for column in zip(*parts, strict=False)]
            if _alike(found, expected) or not _alike(_outputs(module, signature, inputs), expected):
                return
        except Exception:  # such as of a module that is only for training, or on `meta`
            return
    raise Untraceable(
        f"{type(module).__name__} gives other outputs for the two halves of the sample than for all of it, in "
        "evaluation mode, so it would do something else on micro-batches\n"
        "  dimension 0 has to be the batch, but for arguments that are named in shared=[…]; what compares samples, "
        "such as x - x.mean(0), belongs after the pipeline\n"
        "  a part that compares those of each micro-batch on purpose, such as experts with a capacity, is let be where "
        "it is kept as one layer, whole=[…]"
    )


def _alike(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return whether outputs are equal, up to the rounding of kernels that are chosen for another batch size."""
    for y, z in zip(found, expected, strict=False):
        if y.shape == z.shape and z.is_floating_point() and z.numel():
            tolerance = 1e-2 + 16 * torch.finfo(z.dtype).eps
            largest = float(z.detach().abs().nan_to_num(0, 0, 0).max())
            if not torch.allclose(y, z, rtol=tolerance, atol=tolerance * largest, equal_nan=True):
                return False
    return True
