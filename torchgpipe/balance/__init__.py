"""Balance a sequence of layers over partitions, by the cost of each layer on a sample.

    balance = balance_by_time(4, model, sample)       # cost: seconds
    balance = balance_by_size(4, model, mini_batch)   # cost: bytes
    model = GPipe(model, balance, chunks=8)

A balance is a list: the number of layers in each partition. Both functions run a copy of each layer
to measure its cost. Then they find the balance whose most expensive partition costs as little as
possible. They leave the module as it was, with its mode, gradients and buffers (such as the
statistics of batch norms). They also leave the random state as it was.
"""

import torch
from torch import nn

from torchgpipe.balance.minimise import check_partitions, minimise_heaviest
from torchgpipe.balance.profile import checked_sample, profile_sizes, profile_times
from torchgpipe.tensors import accelerator
from torchgpipe.tensors.microbatch import TensorOrTensors

__all__ = ["balance_by_size", "balance_by_time"]

Device = torch.device | str | int


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: TensorOrTensors,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]:
    """Balance by the time that the forward and backward of every layer take on a sample.

    The cost of a layer is the median of its measured times. The function measures in rounds, from
    the first layer to the last, until the timeout. It always completes the first round. In each
    round, it makes a new copy of a layer, runs the copy once as a warm-up, and then times it.

    Args:
        partitions: How many partitions to make, from 1 to the number of layers.
        module: The sequence to balance, on any device. One layer at a time is copied to `device`.
        sample: An input with as many samples as a micro-batch, on any device: a tensor, or a tuple
            of tensors.
        timeout: Seconds after which no further measurement starts.
        device: The device on which the layers are timed. The default is "cuda" if it is available,
            and "cpu" otherwise.

    Returns:
        The number of layers of each partition: the argument `balance` of `GPipe`.

    Raises:
        TypeError: If an argument has a wrong type, a skip is not stashed once and then popped once,
            or a layer cannot be copied.
        ValueError: If a number is out of range, or if the device is "meta", which computes nothing.
    """
    sample, place = _check(partitions, module, sample, device)
    if not timeout >= 0:
        raise ValueError(f"timeout must be a number of seconds, 0 or more, got {timeout!r}")
    if place.type == "meta":
        raise ValueError(
            "nothing takes time on device 'meta': name a real device, or use balance_by_size"
        )
    seconds = profile_times(module, sample, timeout, place)
    return minimise_heaviest(seconds, partitions)


def balance_by_size(  # noqa: PLR0913 - each is an option of the user's
    partitions: int,
    module: nn.Sequential,
    input: TensorOrTensors,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """Balance by the memory that every layer takes in training.

        size = bytes for one micro-batch + param_scale * bytes of parameters

    The bytes for one micro-batch are those of the storages that the layer's forward allocates, and
    that the layer's backward or a later layer needs. If tensors share a storage, it counts once.
    Sparse tensors do not count.

    Args:
        partitions: How many partitions to make, from 1 to the number of layers.
        module: The sequence to balance, on any device. One layer at a time is copied to `device`.
        input: A mini-batch, on any device: a tensor, or a tuple of tensors.
        chunks: How many micro-batches the mini-batch will be split into.
        param_scale: How many bytes of memory each byte of parameters takes. The parameters and
            their gradients make 2. Add the optimizer's state: 0 for SGD, 1 for SGD with momentum,
            2 for Adam. Add 1 if a copy of the parameters is kept.
        device: The device on which the layers run. The default is "cuda" if it is available, and
            "cpu" otherwise. On "meta", sizes are found without computing anything.

    Returns:
        The number of layers of each partition: the argument `balance` of `GPipe`.

    Raises:
        TypeError: If an argument has a wrong type, a skip is not stashed once and then popped once,
            or a layer cannot be copied.
        ValueError: If a number is out of range, or tensors of the input differ in batch size.
    """
    input, place = _check(partitions, module, input, device)
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ValueError(f"chunks must be a positive int, got {chunks!r}")
    if not 0 <= param_scale < float("inf"):
        raise ValueError(f"param_scale must be a finite number, 0 or more, got {param_scale!r}")
    sizes = profile_sizes(module, input, chunks, param_scale, place)
    return minimise_heaviest(sizes, partitions)


def _check(
    partitions: int, module: nn.Sequential, sample: TensorOrTensors, device: Device | None
) -> tuple[TensorOrTensors, torch.device]:
    """Check the arguments before any layer runs; return the sample's tensors and the device."""
    sample = checked_sample(module, sample, "balanced")
    check_partitions(partitions, len(module))
    if device is None:
        device = accelerator.default_kind()
    return sample, torch.device(device)
