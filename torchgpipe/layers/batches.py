"""Divide a mini-batch into micro-batches, and concatenate the outputs of micro-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.caught import shortened
from torchgpipe.task.guards.inputs import begins_in_place
from torchgpipe.task.stage import Stage
from torchgpipe.tensors import accelerator
from torchgpipe.tensors.gather import ONE_AT_A_TIME, gather
from torchgpipe.tensors.microbatch import (
    UNCOUNTED,
    Input,
    MicroBatches,
    Structured,
    TensorOrTensors,
    mapped,
    scatter,
    tensors_of,
)
from torchgpipe.trace.parts import Structure, same
from torchgpipe.trace.same_calls import SameCallsCheck
from torchgpipe.trace.signature import Signature

Divided = tuple[list[TensorOrTensors], torch.Event | None]
"""The micro-batches of a mini-batch, and an event that occurs when pinned memory was copied."""


def divided(input: Input, chunks: int, stage: Stage, signature: Signature | None) -> Divided:
    """Divide a mini-batch into micro-batches, and move them to the device of the first stage.

    Tensors in pinned memory are copied to the device asynchronously, so the copy can still run when
    this function returns. The caller of the pipeline may refill the pinned tensors as soon as the
    pipeline returns. So the pipeline waits for the copy before it returns, by the event that this
    function returns. The function itself does not wait: the copy may be queued behind the previous
    step's work on the GPU, and meanwhile the thread can submit tasks.

    Args:
        input: The mini-batch, or the micro-batches that the caller has made.
        chunks: The largest number of micro-batches into which a mini-batch is divided.
        stage: The first stage.
        signature: The signature of a traced module: it says which tensors have a batch dimension.

    Returns:
        The micro-batches, and an event that occurs when the copies from pinned memory have ended;
        `None` in place of the event if there are no such copies.
    """
    device = stage.device
    # A copy to the host must be waited for: the host could read it before it has arrived.
    move = partial(Tensor.to, device=device, non_blocking=stage.runs_later)
    if isinstance(input, MicroBatches):
        micro_batches = [mapped(move, micro_batch) for micro_batch in input]
    else:
        batched = None if signature is None else signature.batched
        micro_batches = scatter(mapped(move, input), chunks, batched)
    copied = record_copies(input, device) if stage.runs_later else None
    one_tensor = len(micro_batches) > 1 and isinstance(micro_batches[0], Tensor)
    if one_tensor and begins_in_place(stage.partition):
        # The micro-batches are views of one tensor, so they share one version counter. If a layer
        # changed one micro-batch in place, autograd would take all of them as changed. So clone
        # them.
        micro_batches = [mapped(torch.clone, x) for x in micro_batches]
    return micro_batches, copied


def check_calls(micro_batches: Sequence[TensorOrTensors], partition: nn.Module) -> None:
    """Check that a traced module makes the calls of its layers, before a worker thread runs them.

    For micro-batches of a new size, the check records the module's calls. Recording replaces
    functions of PyTorch in the whole process, so `torch.compile` must not compile a layer in
    another thread meanwhile.

    Args:
        micro_batches: The micro-batches.
        partition: The layers of the first partition.
    """
    first: Any = next(partition.children(), None)
    check = getattr(first, "check_calls", None)
    if isinstance(check, SameCallsCheck):
        for micro_batch in micro_batches:
            check(tensors_of(micro_batch), first.training)


def record_copies(input: Input, device: torch.device) -> torch.Event | None:
    """Return a CUDA event that occurs when the input's pinned tensors have been copied to the GPU.

    Return `None` if no tensor of the input is in pinned memory.
    """
    given = input if isinstance(input, MicroBatches) else [input]
    for each in given:
        for x in tensors_of(each):
            if x.device.type == "cpu" and x.is_pinned():
                stream = accelerator.current_stream(device)
                assert stream is not None
                return stream.record_event()
    return None


def joined(outputs: list[Any]) -> Any:
    """Concatenate the outputs of all micro-batches along dimension 0: the inverse of `divided`.

    Mappings and dataclasses become one mapping or dataclass, whose tensors are concatenated.

    Raises:
        TypeError: If the outputs differ in structure, or in values that are no tensors.
        ValueError: If tensors cannot be concatenated.
    """
    if len(outputs) == 1 or not (isinstance(outputs[0], Mapping) or is_dataclass(outputs[0])):
        return gather(outputs)
    returns = f"the last partition returns {type(outputs[0]).__name__}"
    found = [Structure.of(y) for y in outputs]
    structure, _ = found[0]
    for i, (other, tensors) in enumerate(found):
        if not same(other.value, structure.value):
            raise TypeError(
                f"{returns} with other keys, or with other values that are no tensors, for "
                f"micro-batch {i} than for micro-batch 0; return the same keys and values for all "
                f"micro-batches, or {ONE_AT_A_TIME}"
            )
        if len({x.size(0) if x.dim() else None for x in tensors}) > 1:
            shapes = shortened([tuple(x.shape) for x in tensors])
            raise ValueError(
                f"{returns} of tensors that differ in dimension 0, which has to be the batch: "
                f"their shapes are {shapes}; return only tensors with the batch as dimension 0, "
                f"or {ONE_AT_A_TIME}"
            )
    return gather([Structured.of(tensors, structure) for _, tensors in found])


def the_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the only argument of a call, by place or as `input=`.

    Raises:
        TypeError: If there is no such argument, or if there are other arguments.
    """
    if not args and kwargs.keys() == {"input"}:
        return kwargs["input"]
    if len(args) != 1 or kwargs:
        given = ", ".join([f"{len(args)} by place", *kwargs])
        raise TypeError(
            f"the pipeline takes one input, a tensor or a tuple of tensors, but got {given}; give "
            "several tensors as one tuple"
        )
    return args[0]


def samples(micro_batch: TensorOrTensors, signature: Signature | None) -> int:
    """Return how many samples a micro-batch has, or 1 if no tensor has a batch dimension.

    Return `UNCOUNTED` if tensors of the micro-batch differ in dimension 0, because then it is
    unclear how many samples there are. An example is a micro-batch with a tensor of tokens and a
    tensor of sequence lengths.
    """
    tensors = tensors_of(micro_batch)
    batched = [True] * len(tensors) if signature is None else signature.batched
    sizes = set()
    for x, split in zip(tensors, batched, strict=True):
        if split and x.dim():
            sizes.add(len(x))
    if len(sizes) > 1:
        return UNCOUNTED
    return sizes.pop() if sizes else 1
