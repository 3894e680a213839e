"""Checks of a module before it is recorded, of its recordings, and of the layers that are made of them."""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from torchgpipe.trace.calls import Recording
from torchgpipe.trace.layer import Layers
from torchgpipe.trace.parts import tensors_in
from torchgpipe.trace.recorder import Notes, hooks_of
from torchgpipe.trace.refuse import Untraceable, refused, where
from torchgpipe.trace.signature import Signature
from torchgpipe.trace.watch import as_it_was


def check_root(module: nn.Module) -> None:
    """Refuse a module that does more than its forward does, which no layers of it could."""
    if hooks_of(module):
        raise Untraceable(
            f"{type(module).__name__} has hooks of its own, and its layers are not called by it; remove them, or make "
            "it the only child of a module, where it stays whole"
        )
    if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        raise Untraceable(f"{type(module).__name__} is compiled; give the module itself, and compile submodules of it")
    for name, part in module.named_modules():
        if any(map(nn.parameter.is_lazy, (*part.parameters(), *part.buffers()))):
            raise Untraceable(
                f"{type(module).__name__} has parameters without shapes, such as in {name!r}; run it once"
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise Untraceable(
                f"{type(module).__name__} has a scripted part, {name!r}; use the module that was scripted"
            )


def check_notes(root: nn.Module, notes: Notes) -> None:
    """Refuse what a recording cannot repeat. Of another mode there will be another recording."""
    for what, at in notes.values():
        if what != "training":
            why = f"it sets or asks for {what}, which may be otherwise, or would be missed, when the layers run"
            todo = "do that in a submodule of its own; what torch.utils.checkpoint does, the pipeline does itself"
            raise Untraceable(refused(root, at, why, todo)) from None


def check_batch(module: nn.Module, recordings: Sequence[Recording]) -> None:
    """Refuse outputs without a batch dimension."""
    if not recordings[0].outputs:
        raise Untraceable(f"{type(module).__name__} returns no tensor")
    for recording in recordings:
        for first, number in zip(recordings[0].outputs, recording.outputs, strict=False):
            shape = recording.shapes[number]
            if shape != (recording.size, *recordings[0].shapes[first][1:]):
                at = next((call.where for call in recording.calls if number in call.outputs), where())
                why = (
                    f"it returns a tensor of shape {shape} for {recording.size} samples, but outputs of micro-batches "
                    "are concatenated along dimension 0, and no other may grow with the batch"
                )
                what = (
                    "what compares samples or adds them up, such as a loss, belongs after the pipeline: return what it "
                    "is made of; or say which inputs have no batch dimension, shared=[…]"
                )
                raise Untraceable(refused(module, at, why, what))


def check_state(module: nn.Module, layers: Layers) -> None:
    """Refuse layers whose state is not the module's own, by the same names."""
    ours, plain = (m.state_dict(keep_vars=True) for m in (layers, module))
    if ours.keys() != plain.keys() or any(ours[name] is not x for name, x in plain.items()):
        names = sorted(ours.keys() ^ plain.keys()) or sorted(n for n, x in plain.items() if ours[n] is not x)
        raise Untraceable(
            f"{type(module).__name__} keeps state in a way of its own ({', '.join(names[:3])}): modules around others "
            "can have no state_dict hooks and no extra state; keep them as one layer, whole=[…]"
        )


def check_outputs(
    module: nn.Module,
    layers: Layers,
    signature: Signature,
    inputs: Sequence[Tensor],
    expected: tuple[list[Tensor], dict[str, Tensor]],
) -> None:
    """Refuse layers whose outputs, buffers or gradients on the sample are others than the module's, `expected`."""
    values, grads = ran(module, layers, signature, inputs)
    norms = {name: float(y.nan_to_num().norm()) for name, y in expected[1].items()}
    try:
        assert_close(values, expected[0], equal_nan=True)
        for name, y in expected[1].items():
            # Gradients of a tensor that is used several times are added in another order.
            most = (1e-3 + 16 * torch.finfo(y.dtype).eps) * norms[name] + 1e-6 * max(norms.values())
            if grads[name].shape != y.shape or float((grads[name] - y).nan_to_num().norm()) > most:
                raise AssertionError(f"the gradient of {name} differs")
    except AssertionError as error:
        raise Untraceable(
            f"the layers of {type(module).__name__} give something else than the module does: "
            f"{' '.join(str(error).split())}\nkeep a part of it as one layer, whole=[…]"
        ) from None


@contextmanager
def random_kept(module: nn.Module) -> Iterator[None]:
    """At the end, put back the random states of PyTorch, for the module's devices, too, of Python and of NumPy."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    state = numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng({x.device for x in (*module.parameters(), *module.buffers()) if x.is_cuda}):
            yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(state)


def ran(
    module: nn.Module, run: nn.Module, signature: Signature, inputs: Sequence[Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Run the module, or its layers, on the sample. Return outputs, then buffers, and gradients; on `meta` nothing."""
    if any(x.is_meta for x in (*inputs, *module.parameters(), *module.buffers())):
        return [], {}
    with random_kept(module), as_it_was(module), torch.inference_mode(False), torch.enable_grad():
        given = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        outputs = [*tensors_in(signature.call(run, [x.clone() for x in given]))]
        values = [x.detach().clone() for x in (*outputs, *module.buffers())]
        ends = [y for y in outputs if y.requires_grad]
        weights = [torch.linspace(1, 2, y.numel(), device=y.device).to(y.dtype).view(y.shape) for y in ends]
        named = [*zip(signature.names, given, strict=True), *module.named_parameters()]
        wanted = {name: x for name, x in named if x.requires_grad}
        grads: Sequence[Tensor | None] = [None] * len(wanted)
        with suppress(RuntimeError):  # such as of a function without a derivative, which can be evaluated all the same
            if ends and wanted:
                grads = torch.autograd.grad(ends, [*wanted.values()], weights, allow_unused=True)
        dense = [torch.empty(0) if x is None else x.to_dense() if x.is_sparse else x for x in grads]
        return values, dict(zip(wanted, dense, strict=True))
