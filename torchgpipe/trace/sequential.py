"""Cut any module into a sequence of layers, which share the module's parameters (`sequential`)."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from torchgpipe.caught import shortened
from torchgpipe.skip.scope import Namespace
from torchgpipe.tensors._autograd import is_compiled
from torchgpipe.tensors.microbatch import TensorOrTensors
from torchgpipe.trace.calls import cut, sizes_read
from torchgpipe.trace.code.call import Call, Held
from torchgpipe.trace.compare import (
    check_other_lengths,
    check_other_mode,
    check_outputs,
    check_samples,
    check_state,
    ran,
)
from torchgpipe.trace.generalise import check_batch
from torchgpipe.trace.layer import Layer, Layers
from torchgpipe.trace.parts import within
from torchgpipe.trace.record import NEEDS_CONTENTS, in_both_modes, record_all
from torchgpipe.trace.refuse import Untraceable, advising_a_tuple
from torchgpipe.trace.same_calls import SameCallsCheck, check_one_sample
from torchgpipe.trace.signature import Signature, Tensors, arguments
from torchgpipe.trace.whole import (
    Whole,
    hooks_of,
    kept_by_user,
    refuse_own_checkpointing,
    warn_of_own_modes,
)

Batched = tuple[bool, ...]
"""For each input tensor, whether it has a batch dimension."""

MOST_GUESSES = 100
"""How many guesses about which tensors have a batch dimension are tried.

This many are tried for each length that dimension 0 of the tensors has.
"""


def sequential(
    module: nn.Module,
    sample: Any,
    *,
    whole: Iterable[Whole] = (),
    shared: Iterable[str] | None = None,
    dynamic_shapes: Any = None,
) -> Layers:
    """Make a sequence of a module's own layers, in the order in which the module calls them.

        layers = sequential(torchvision.models.resnet50(), torch.randn(2, 3, 224, 224))
        model = GPipe(layers, balance, chunks=8)

    The function runs the module's forward on fake tensors and records the calls in it, for three
    batch sizes. With lengths in `dynamic_shapes`, it makes more recordings: five for one length,
    nine for two, and about twice as many for each further length. It cuts the list of calls where a
    submodule with parameters is called. A tensor becomes a skip (skip connection) if a layer after
    the next layer uses it.

    The layers have the module's own submodules, parameters and buffers, and their `state_dict` has
    the module's names. The layers, and a pipeline of them, are called like the module.

    The layers' outputs and gradients on the sample are compared with the module's. Unless some
    submodules are kept `whole`, the module's outputs (in evaluation mode) for the two halves of the
    sample are also compared with those for the undivided sample. So the function raises an error if
    the module compares samples, or if the batch is not in the first dimension. But an output may
    have a value for each pair of samples, such as the product of each image with each text. Then
    there is a warning, because pairs from different micro-batches get no value.

    A submodule with at most half of the parameters is kept whole (not cut) if its forward reads
    `training`, or does something that a recording cannot repeat. A larger submodule may pass its
    mode to functions, as in `dropout(x, training=self.training)`. If a larger submodule makes other
    calls in evaluation than in training, there is a warning, and the layers run in one mode only.
    If it does something that a recording cannot repeat, an error is raised.

    Later calls need arguments like the sample's, with the same shapes except for the batch size and
    the lengths in `dynamic_shapes`. A later call raises an error if the module makes other calls
    for its batch size, lengths, mode or autocast.

    Args:
        module: Any module, with its parameters on one device.
        sample: The module's arguments: a tensor, a tuple of positional arguments, or a dictionary
            of keyword arguments.
        whole: Submodules, or classes of submodules, that are not cut. These submodules may compare
            the samples of a micro-batch.
        shared: The names of arguments without a batch dimension. Every micro-batch gets the whole
            argument. By default, the function finds them: a tensor has a batch dimension if its
            dimension 0 can grow together with dimension 0 of the other tensors.
        dynamic_shapes: Which lengths besides the batch size may change from call to call, in the
            form that `torch.export.export` takes, such as
            `{"tokens": {1: torch.export.Dim("length")}}`. Dimensions with the same `Dim` have the
            same length. Many modules do something else for length 1, so give a sample of length 2
            or more. Before a call with length 1, the layers' calls are compared with the module's,
            and the call is refused if they differ.

    Returns:
        The layers, which `GPipe` takes like any other `nn.Sequential`.

    Raises:
        Untraceable: If a line of the module cannot be recorded. The message says which line, why,
            and what to do.
        ValueError: If `whole` names a submodule that the module does not have, or `shared` names an
            argument that the module does not have; if `dynamic_shapes` does not fit the sample; or
            if the module is on `meta`, and the sample is not.
        TypeError: If `whole` or `shared` is not a list, or the sample has no tensors.

    Warns:
        UserWarning: If a part of the module that is cut has its own method `train` or `eval`.
    """
    _check_root(module)
    refuse_own_checkpointing(module)
    signature = Signature(module, sample, dynamic_shapes)
    inputs = signature.tensors(*arguments(sample))
    if any(p.is_meta for p in module.parameters()) and not any(x.is_meta for x in inputs):
        raise ValueError(
            f"the module {type(module).__name__} is on meta, but the sample is on "
            f"{inputs[0].device}; give a sample on meta, too, such as "
            "torch.zeros(8, 64, device='meta')"
        )
    with advising_a_tuple(module, sample):
        return _first_that_fits(module, signature, inputs, shared, whole)


def _first_that_fits(
    module: Module,
    signature: Signature,
    inputs: Tensors,
    shared: Iterable[str] | None,
    whole: Iterable[Whole],
) -> Layers:
    """Guess which inputs have a batch dimension; return the layers for the first guess that works.

    Args:
        module: The module.
        signature: Its signature. This function sets which inputs have a batch dimension.
        inputs: The tensors of the sample.
        shared: See `sequential`.
        whole: See `sequential`.
    """
    kept = kept_by_user(module, whole)
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
                    # If the error has no `__cause__`, the module runs with this guess of the
                    # batched inputs, but its calls cannot be recorded. So do not try guesses with
                    # fewer batched inputs: with these, the module could run, but would compute
                    # something else. Code that needs the contents of tensors fails for any guess.
                    if error.__cause__ is None or isinstance(error.__cause__, NEEDS_CONTENTS):
                        break
                else:
                    check_state(module, layers)
                    check_outputs(module, ran(module, layers, signature, inputs), expected)
                    check_other_lengths(module, layers, signature, inputs)
                    check_other_mode(module, layers, signature, inputs)
                    check_samples(module, signature, inputs, kept)
                    check_one_sample(module, layers, signature, inputs)
                    warn_of_own_modes(module, layers)
                    return layers
        if first is None:
            raise Untraceable(
                f"the sample of {type(module).__name__} has no batch dimension: each tensor is a "
                "scalar, or its dimension 0 is in dynamic_shapes; give a batch of two samples or "
                "more, with the batch as dimension 0"
            )
        raise first
    finally:
        del first  # Its traceback refers to this frame, which keeps the module alive.


def _choices(
    signature: Signature, inputs: Tensors, shared: Iterable[str] | None
) -> Iterator[Iterable[Batched]]:
    """Yield lists of guesses about which input tensors have a batch dimension.

    A guess has a bool for each tensor: whether dimension 0 of the tensor is the batch. All tensors
    with a batch dimension must have the same length in it. So there is one list of guesses for each
    length of dimension 0. In a list, guesses with more batched tensors come first.

    Args:
        signature: The signature of the module.
        inputs: The tensors of the sample.
        shared: The names of the arguments without a batch dimension. If they are given, they
            determine the only guess.
    """
    if shared is not None:
        if isinstance(shared, str) or not isinstance(shared, Iterable):
            raise TypeError(
                f"shared must be a list of arguments' names, such as ['mask'], but got {shared!r}"
            )
        names = set(shared)
        if unknown := names - set(signature.names):
            known = sorted(set(signature.names))
            raise ValueError(
                f"shared names {shortened(list(unknown))}, but the tensors are in {known}"
            )
        described = zip(signature.names, signature.places, strict=True)
        yield [tuple([name not in names and 0 not in places for name, places in described])]
        return
    members: dict[int, list[int]] = {}  # the tensors of each length of dimension 0
    for k, x in enumerate(inputs):
        if x.dim() and 0 not in signature.places[k]:
            members.setdefault(len(x), []).append(k)
    for fits in members.values():
        yield islice(_subsets(fits, len(inputs)), MOST_GUESSES)


def _subsets(members: Sequence[int], n: int) -> Iterator[Batched]:
    """Yield each non-empty subset of `members` (numbers below `n`), the largest subset first.

    A subset is a tuple of `n` bools: whether the subset has the number 0, the number 1, and so on.
    """
    for count in range(len(members), 0, -1):
        for chosen in combinations(members, count):
            yield tuple([k in chosen for k in range(n)])


def _layers(module: Module, signature: Signature, inputs: Tensors, whole: set[Module]) -> Layers:
    """Record the calls of a module, and cut them into layers; return the layers.

    Args:
        module: The module.
        signature: Its signature, which says which inputs have a batch dimension.
        inputs: The tensors of the sample.
        whole: The submodules that are kept whole (recorded as one call). This function adds more.
    """
    recorded = record_all(module, signature, inputs, whole)
    recordings = recorded.recordings
    recording = recordings[0]
    compared = check_batch(module, recordings, signature.names)
    signature.returns(*recording.result, recording.outputs, compared)
    recorded, calls = in_both_modes(module, recorded)
    plans = cut(calls, _names(module, calls), len(inputs), recording.outputs)
    namespace = Namespace()
    layers: OrderedDict[str, Module] = OrderedDict()
    for k, plan in enumerate(plans):
        plan.name = f"{k}:{plan.name or type(module).__name__}"
        plan.sizes = sizes_read(module, plan, recordings, signature.size_names)
        layers[plan.name] = Layer(module, plan, namespace, recording.extra, signature.size_names)
    sequence = Layers(layers, signature)
    # Not by `setattr`: the layer can have a submodule of the name.
    vars(sequence[0])["check_calls"] = SameCallsCheck(module, signature, inputs, whole, recorded)
    sequence.training = module.training
    _hold_unused(module, sequence)
    return sequence


def _names(root: Module, calls: Iterable[Call]) -> list[str]:
    """Return for each call the name of the layer that can begin with it; "" if no layer can.

    A layer can begin only with a call that uses parameters. Its name is the path of the submodule
    that is called, or that makes the call, such as `layer1/0/conv2`.
    """
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


def _hold_unused(module: Module, sequence: Layers) -> None:
    """Add to the layers all parameters and buffers of a module that no call uses.

    The layers' `state_dict` needs these tensors, because the module's `state_dict` has them. They
    are added to the last layer. But if a parameter has a second name, this name is added to the
    layer that already has the parameter.
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
    """Raise an error if a module has its own hooks, is compiled, or has lazy or scripted parts."""
    if not isinstance(module, Module):
        given = module.__name__ if isinstance(module, type) else type(module).__name__
        what = f"the class {given}; give a module of it" if isinstance(module, type) else given
        raise TypeError(f"sequential takes an nn.Module, but got {what}")
    kind = type(module).__name__
    if isinstance(module, Layers):
        raise TypeError(
            "sequential got layers that sequential has made of a module; give these layers to "
            "GPipe, or give the module itself to sequential"
        )
    if hooks_of(module):
        raise Untraceable(
            f"the module {kind} has hooks of its own, which would not run, because a pipeline "
            "calls only the layers; remove the hooks, or make it a submodule of another module"
        )
    if is_compiled(module):
        raise Untraceable(
            f"the module {kind} is compiled; give sequential the module as it was before "
            "torch.compile, and compile its submodules instead"
        )
    for name, part in module.named_modules():
        own = (*part.parameters(recurse=False), *part.buffers(recurse=False))
        if any(map(nn.parameter.is_lazy, own)):
            raise Untraceable(
                f"the module {kind} has lazy parameters without shapes, such as in "
                f"{name or kind!r}; run the module once before it is cut into layers"
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise Untraceable(
                f"the module {kind} has a scripted part, {name or kind!r}; give sequential the "
                "module as it was before torch.jit.script"
            )


def flat(module: Module, sample: Any) -> TensorOrTensors:
    """Convert the arguments of a model's call to the input of the model's first layer.

    Args:
        module: The model, a sequence of layers. The arguments are converted only if the model is a
            `Layers`, which `sequential` has made. For other models, `sample` is returned as it is.
        sample: The arguments: a tensor, a tuple, or a dictionary from names to arguments.
    """
    signature = module.signature if isinstance(module, Layers) else None
    return sample if signature is None else signature.flat(*arguments(sample))


def batched(module: Module) -> Sequence[bool] | None:
    """Return for each input of `module` whether it has a batch dimension.

    Only layers that `sequential` has made (`Layers`) can have inputs without a batch dimension. For
    other layers, return `None`.
    """
    signature = module.signature if isinstance(module, Layers) else None
    return None if signature is None else signature.batched
