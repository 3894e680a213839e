"""Compare the layers with the module that they were made of: its state, and what it computes.

Also compare what the module computes for a sample with what it computes for halves of it.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.testing import assert_close

from torchgpipe.trace.layer import Layers
from torchgpipe.trace.parts import tensors_in
from torchgpipe.trace.refuse import Untraceable
from torchgpipe.trace.restore import as_it_was
from torchgpipe.trace.signature import Signature, Tensors

Ran = tuple[list[Tensor], dict[str, Tensor]]
"""What a run gave: outputs and buffers, and gradients by name."""


def check_state(module: Module, layers: Layers) -> None:
    """Refuse layers whose state is not the module's own, under the same names."""
    ours = layers.state_dict(keep_vars=True)
    plain = module.state_dict(keep_vars=True)
    names = sorted(ours.keys() ^ plain.keys())
    if not names:
        names = sorted(name for name, x in plain.items() if ours[name] is not x)
    if names:
        raise Untraceable(
            f"{type(module).__name__} keeps state in a way of its own ({', '.join(names[:3])}): "
            "modules around others can have no state_dict hooks and no extra state; "
            "keep them as one layer, whole=[…]"
        )


def check_outputs(module: Module, found: Ran, expected: Ran) -> None:
    """Refuse layers that give something else on the sample than the module does.

    Args:
        module: The module.
        found: What a run of the layers gave.
        expected: What a run of the module gave.
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
            # Gradients of a tensor that is used several times are added in another order.
            relative = 1e-3 + 16 * torch.finfo(y.dtype).eps
            most = relative * norms[name] + 1e-6 * max(norms.values())
            grad = grads[name]
            if grad.shape != y.shape or float((grad - y).nan_to_num().norm()) > most:
                raise AssertionError(f"the gradient of {name} differs")
    except AssertionError as error:
        reason = " ".join(str(error).split())
        raise Untraceable(
            f"the layers of {type(module).__name__} give something else than the module does: "
            f"{reason}\nkeep a part of it as one layer, whole=[…]"
        ) from None


def ran(module: Module, run: Module, signature: Signature, inputs: Tensors) -> Ran:
    """Run the module or its layers on the sample, and leave the module as it was.

    Args:
        module: The module.
        run: The module, or its layers.
        signature: The module's signature.
        inputs: The tensors of the sample.

    Returns:
        The outputs and then the buffers, and the gradients by name. On `meta`, nothing.
    """
    held = (*inputs, *module.parameters(), *module.buffers())
    if any(x.is_meta for x in held):
        return [], {}
    with as_it_was(module), torch.inference_mode(False), torch.enable_grad():
        given = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        outputs = _outputs(run, signature, given)
        values = [x.detach().clone() for x in (*outputs, *module.buffers())]
        named = [*zip(signature.names, given, strict=True), *module.named_parameters()]
        wanted = {name: x for name, x in named if x.requires_grad}
        return values, _gradients(outputs, wanted)


def _gradients(outputs: Tensors, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients of a weighted sum of the outputs; a missing gradient is an empty tensor."""
    ends: list[Tensor] = []
    weights: list[Tensor] = []
    for y in outputs:
        if y.requires_grad:
            weight = torch.linspace(1, 2, y.numel(), device=y.device)
            ends.append(y)
            weights.append(weight.to(y.dtype).view(y.shape))
    found: Any = [None] * len(wanted)
    # Some functions have no derivative, but can be evaluated all the same.
    with suppress(RuntimeError):
        if ends and wanted:
            found = torch.autograd.grad(ends, [*wanted.values()], weights, allow_unused=True)
    grads: dict[str, Tensor] = {}
    for name, x in zip(wanted, found, strict=True):
        if x is None:
            grads[name] = torch.empty(0)
        else:
            grads[name] = x.to_dense() if x.is_sparse else x
    return grads


def _outputs(run: Module, signature: Signature, inputs: Tensors) -> list[Tensor]:
    """Return the tensors that the module, or its layers, returns for copies of these inputs."""
    copies = list(map(torch.clone, inputs))
    return list(tensors_in(signature.call(run, copies)))


def check_halves(module: Module, signature: Signature, inputs: Tensors) -> None:
    """Refuse a module that gives something else for the sample's halves than for all of it.

    The module runs in evaluation mode. It is not refused if it has batch norms without running
    statistics, cannot run in evaluation mode, or gives something else each time, such as by
    drawing random numbers.
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
            parts = [_outputs(module, signature, half) for half in halves]
            found = [torch.cat(column) for column in zip(*parts, strict=False)]
            if _alike(found, expected) or not _alike(_outputs(module, signature, inputs), expected):
                return
        except Exception:  # such as of a module that is only for training, or on `meta`
            return
    raise Untraceable(
        f"{type(module).__name__} gives other outputs for the two halves of the sample than for "
        "all of it, in evaluation mode, so it would do something else on micro-batches\n"
        "  dimension 0 has to be the batch, but for arguments that are named in shared=[…]; "
        "what compares samples, such as x - x.mean(0), belongs after the pipeline\n"
        "  a part that compares those of each micro-batch on purpose, such as experts with a "
        "capacity, is let be where it is kept as one layer, whole=[…]"
    )


def _alike(found: Tensors, expected: Tensors) -> bool:
    """Return whether outputs are equal.

    They may differ by rounding, since other kernels may be chosen for another batch size.
    """
    for y, z in zip(found, expected, strict=False):
        if y.shape == z.shape and z.is_floating_point() and z.numel():
            tolerance = 1e-2 + 16 * torch.finfo(z.dtype).eps
            magnitudes = z.detach().abs().nan_to_num(0, 0, 0)
            largest = float(magnitudes.max())
            if not torch.allclose(y, z, rtol=tolerance, atol=tolerance * largest, equal_nan=True):
                return False
    return True
