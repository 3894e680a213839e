"""Compare a module with the layers that `sequential` has made of it.

The layers must have the same `state_dict`, and give the same outputs and gradients for the sample
(the example input). Also, the module must give the same outputs for the two halves of the sample as
for the whole sample, because a pipeline splits its input.
"""

import warnings
from collections.abc import Collection, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.testing import assert_close

from torchgpipe.trace.code.lengths import with_lengths
from torchgpipe.trace.generalise import OTHER_MODE
from torchgpipe.trace.layer import Layers
from torchgpipe.trace.parts import tensors_in
from torchgpipe.trace.refuse import Untraceable
from torchgpipe.trace.restore import as_it_was, set_mode
from torchgpipe.trace.signature import Signature, Tensors

Ran = tuple[list[Tensor], dict[str, Tensor]]
"""The results of a run: a list of outputs and buffers, and a dictionary from names to gradients."""


def check_state(module: Module, layers: Layers) -> None:
    """Raise `Untraceable` if the layers' `state_dict` and the module's are not equal.

    Args:
        module: The module.
        layers: The layers that were made of the module.
    """
    ours = layers.state_dict(keep_vars=True)
    plain = module.state_dict(keep_vars=True)
    names = sorted(ours.keys() ^ plain.keys())
    if not names:
        names = sorted(name for name, x in plain.items() if ours[name] is not x)
    if names:
        raise Untraceable(
            f"the module {type(module).__name__} changes its state_dict ({', '.join(names[:3])}): "
            "a module that is cut into layers must have no state_dict hooks and no extra state; "
            "keep submodules that have them as one layer: sequential(…, whole=[…])"
        )


def check_outputs(module: Module, found: Ran, expected: Ran) -> None:
    """Raise `Untraceable` if the layers' outputs or gradients differ from the module's.

    Args:
        module: The module.
        found: The results of the layers, from `ran`.
        expected: The results of the module for the same input, from `ran`.
    """
    values, grads = found
    plain_values, plain_grads = expected
    norms: dict[str, float] = {}
    for name, y in plain_grads.items():
        finite = y.nan_to_num()
        norms[name] = float(finite.norm())
    try:
        assert_close(values, plain_values, equal_nan=True)
        for name, y in plain_grads.items():
            # The gradient of a tensor that is used several times is a sum. Its order may differ.
            relative = 1e-3 + 16 * torch.finfo(y.dtype).eps
            most = relative * norms[name] + 1e-6 * max(norms.values())
            grad = grads[name]
            if grad.shape != y.shape or float((grad - y).nan_to_num().norm()) > most:
                raise AssertionError(f"the gradient of {name} differs")
    except AssertionError as error:
        reason = " ".join(str(error).split())
        raise Untraceable(
            f"the layers of {type(module).__name__} compute something else than the module does: "
            f"{reason}; keep the submodule that causes this as one layer: sequential(…, whole=[…])"
        ) from None


def check_other_lengths(
    module: Module, layers: Layers, signature: Signature, inputs: Tensors
) -> None:
    """Compare the layers' outputs and gradients with the module's for inputs of other lengths.

    Nothing happens if no length may change from call to call.

    Args:
        module: The module.
        layers: The layers that were made of the module.
        signature: The module's signature, which says which lengths may change.
        inputs: The tensors of the sample. Inputs of other lengths are made of them.

    Raises:
        Untraceable: If the outputs or the gradients differ.
    """
    if not any(signature.places):
        return
    *_, sizes = signature.points
    others: list[Tensor] = []
    for x, places in zip(inputs, signature.places, strict=True):
        others.append(with_lengths(x, places, sizes))
    with signature.at(sizes, module):
        expected = ran(module, module, signature, others)
    check_outputs(module, ran(module, layers, signature, others), expected)


def check_other_mode(module: Module, layers: Layers, signature: Signature, inputs: Tensors) -> None:
    """Compare the layers with the module also in the mode (training or evaluation) that is not set.

    This is done only if the recorded code reads the mode (`training`). If the module makes other
    calls in the other mode, which the layers do not have, there is only a warning. There is also a
    warning if the module gives a padding mask to an encoder that evaluation treats in another way.

    Args:
        module: The module.
        layers: The layers of the module.
        signature: The module's signature.
        inputs: The tensors of the sample.
    """
    check: Any = layers[0].check_calls
    mode = "training" if module.training else "evaluation"
    if check.both_modes and not _are_alike_in_other_mode(module, layers, signature, inputs):
        check.forget_other_mode()
    if check.masked_encoder:
        warnings.warn(
            f"{type(module).__name__} gives a padding mask to an nn.TransformerEncoder: in "
            "evaluation without gradients, PyTorch makes the outputs of padded positions zero, but "
            "the layers do not; do not use these outputs, or set enable_nested_tensor=False",
            stacklevel=4,
        )
    if check.one_mode:
        warnings.warn(
            f"{type(module).__name__} makes other calls when it is not in {mode}, and its layers "
            f"only have the calls for {mode}; in the other mode, {OTHER_MODE}",
            stacklevel=4,
        )


def _are_alike_in_other_mode(
    module: Module, layers: Layers, signature: Signature, inputs: Tensors
) -> bool:
    """Return whether a module and its layers give equal results in the mode that is not set.

    This is evaluation mode if the module is in training mode, and the reverse. If the module itself
    fails in this mode, nothing can be compared, and the result is true. For example, a batch norm
    in training mode fails if the batch has only one sample.
    """
    with as_it_was(module), as_it_was(layers):
        training = not module.training
        set_mode(layers, training)
        set_mode(module, training)
        try:
            expected = ran(module, module, signature, inputs)
        except Exception:
            return True
        try:
            check_outputs(module, ran(module, layers, signature, inputs), expected)
        except Exception:
            return False
    return True


def ran(module: Module, run: Module, signature: Signature, inputs: Tensors) -> Ran:
    """Run a module, or the layers made of it, forward and backward; then restore the module.

    Args:
        module: The module.
        run: What to run: the module, or its layers.
        signature: The module's signature.
        inputs: The tensors of the sample.

    Returns:
        A list of the outputs and then the buffers, and a dictionary from names to gradients.
        Both are empty if a tensor is on `meta`, where tensors have no values.
    """
    if is_on_meta(module, inputs):
        return [], {}
    slow = mock.patch.object(torch.backends.mha, "get_fastpath_enabled", lambda: False)
    with as_it_was(module), torch.inference_mode(False), torch.enable_grad(), slow:
        given = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        outputs = _outputs(run, signature, given)
        values = [x.detach().clone() for x in (*outputs, *module.buffers())]
        named = [*zip(signature.names, given, strict=True), *module.named_parameters()]
        wanted = {name: x for name, x in named if x.requires_grad}
        return values, _gradients(outputs, wanted)


def is_on_meta(module: Module, inputs: Tensors) -> bool:
    """Return whether a tensor of the module or an input is on `meta`, and so has no contents."""
    held = (*inputs, *module.parameters(), *module.buffers())
    return any(x.is_meta for x in held)


def _gradients(outputs: Tensors, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a dictionary from names of tensors to gradients of a weighted sum of the outputs.

    If a tensor gets no gradient, the dictionary has an empty tensor for it.

    Args:
        outputs: The outputs.
        wanted: A dictionary from names to the tensors whose gradients are computed.
    """
    ends: list[Tensor] = []
    weights: list[Tensor] = []
    for y in outputs:
        if y.requires_grad:
            weight = torch.linspace(1, 2, y.numel(), device=y.device)
            ends.append(y)
            weights.append(weight.to(y.dtype).view(y.shape))
    found: Any = [None] * len(wanted)
    try:
        if ends and wanted:
            found = torch.autograd.grad(ends, [*wanted.values()], weights, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        pass  # Some functions can be evaluated but have no derivative.
    grads: dict[str, Tensor] = {}
    for name, x in zip(wanted, found, strict=True):
        if x is None:
            grads[name] = torch.empty(0, device=wanted[name].device)
        else:
            grads[name] = x.to_dense() if x.is_sparse else x
    return grads


def _outputs(run: Module, signature: Signature, inputs: Tensors) -> list[Tensor]:
    """Run a module, or the layers made of it, on copies of the inputs; return the output tensors.

    Args:
        run: The module, or its layers.
        signature: The module's signature.
        inputs: The tensors among the arguments.
    """
    copies = list(map(torch.clone, inputs))
    return list(tensors_in(signature.call(run, copies)))


def check_samples(
    module: Module, signature: Signature, inputs: Tensors, kept: Collection[Module]
) -> None:
    """Check that a module computes each sample independently; warn if it compares pairs of samples.

    Args:
        module: The module.
        signature: The module's signature.
        inputs: The tensors of the sample.
        kept: The submodules that the user keeps whole (not cut). They may compare samples. So if
            there are any, the outputs for the two halves of the sample are not checked.
    """
    if not kept and not is_on_meta(module, inputs):
        _check_halves(module, signature, inputs)
    if signature.compared:
        warnings.warn(
            f"{type(module).__name__} returns a value for each pair of samples, and step compares "
            "only samples of the same micro-batch; to compare all samples of a mini-batch, return "
            "what is compared, and compare it in the loss, as in loss(model(input)); or, if an "
            "argument has no batch dimension, name it, shared=[…]",
            stacklevel=4,
        )


def _check_halves(module: Module, signature: Signature, inputs: Tensors) -> None:
    """Compare a module's outputs for the two halves of the sample with those for the whole sample.

    If they differ, the module compares samples, so outputs of a pipeline would differ, too. The
    module runs in evaluation mode. The check is skipped in three cases:

    - The module has batch norms without running statistics.
    - The module cannot run in evaluation mode.
    - The outputs are different in each run, for example because the module draws random numbers.

    Args:
        module: The module.
        signature: The module's signature, which says which inputs have a batch dimension.
        inputs: The tensors of the sample. Each half has half of the entries of dimension 0.

    Raises:
        Untraceable: If the outputs differ.
    """
    everything = [*module.modules()]
    for part in everything:
        if isinstance(part, _BatchNorm) and part.running_mean is None:
            return
    given = zip(inputs, signature.batched, strict=True)
    pieces = [x.chunk(2) if batched else (x, x) for x, batched in given]
    with as_it_was(module), torch.inference_mode(False), torch.enable_grad():
        for part in everything:
            part.training = False
        try:
            expected = _outputs(module, signature, inputs)
            halves = zip(*pieces, strict=False)
            found = [_outputs(module, signature, half) for half in halves]
            if all(map(_alike, found, _halves_of(expected, signature.compared))):
                return
            # Two runs that draw random numbers can be alike by chance, but hardly four.
            if not all(_alike(_outputs(module, signature, inputs), expected) for _ in range(3)):
                return
        except Exception as error:
            if "offsets[0] has to be 0" in str(error):
                raise Untraceable(
                    f"{type(module).__name__} gives offsets to an nn.EmbeddingBag, which cannot be "
                    "split into micro-batches, because they count from the first sample; give the "
                    "nn.EmbeddingBag a tensor with a row for each sample (padding_idx=…)"
                ) from None
            return  # for example because the module only works in training
    raise Untraceable(
        f"the module {type(module).__name__} gives other outputs for the two halves of the sample "
        "than for the undivided sample (in evaluation mode), so outputs for micro-batches would "
        "differ, too; "
        "dimension 0 of each argument has to be the batch, except for arguments that are named "
        "in shared=[…]; code that compares samples, such as x - x.mean(0), belongs after the "
        "pipeline; if a submodule compares the samples of each micro-batch on purpose, such as "
        "experts with a capacity, keep this submodule as one layer: sequential(…, whole=[…])"
    )


def _halves_of(outputs: Tensors, compared: Mapping[int, int]) -> list[list[Tensor]]:
    """Split outputs into those for the first half of the samples, and those for the second half.

    If an output compares samples, so that its shape is (samples, samples), for example, each half
    gets only the values for pairs of its own samples.

    Args:
        outputs: The outputs for all samples, with the samples as dimension 0.
        compared: A dictionary from the index of each output that compares samples to the index of
            its other dimension that is as long as the batch (1 in the example).

    Returns:
        Two lists, each with one tensor for each output.
    """
    halves: list[list[Tensor]] = [[], []]
    for k, y in enumerate(outputs):
        for j, rows in enumerate(y.chunk(2)):
            halves[j].append(rows.chunk(2, compared[k])[j] if k in compared else rows)
    return halves


def _alike(found: Tensors, expected: Tensors) -> bool:
    """Return whether two lists of outputs are equal, except for rounding.

    PyTorch may choose other kernels for another batch size, which may round differently.
    """
    for y, z in zip(found, expected, strict=False):
        if y.shape == z.shape and z.is_floating_point() and z.numel():
            tolerance = 1e-2 + 16 * torch.finfo(z.dtype).eps
            magnitudes = z.detach().abs().nan_to_num(0, 0, 0)
            largest = float(magnitudes.max())
            if not torch.allclose(y, z, rtol=tolerance, atol=tolerance * largest, equal_nan=True):
                return False
    return True
