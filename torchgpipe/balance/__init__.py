"""Choose how many layers each partition gets, so that the partitions cost about the same.

    balance = balance_by_time(4, model, sample)       # cost: seconds
    balance = balance_by_size(4, model, mini_batch)   # cost: bytes
    model = GPipe(model, balance, chunks=8)

A balance is a list with the number of layers of each partition. Both functions run a copy of each
layer on a sample to measure the layer's cost. Then they return the balance whose most expensive
partition costs as little as possible. They do not change the module: its mode, its gradients and
its buffers (such as the statistics of batch norms) stay the same. The states of PyTorch's random
generators stay the same, too.
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
    """Choose a balance by the measured seconds of each layer's forward and backward.

    The cost of a layer is the median of its measured times. The function times all layers, from the
    first to the last, again and again until the timeout. The first of these rounds is always
    completed, so that every layer has a time. In each round, a layer is copied anew, and the copy
    runs once as a warm-up before it is timed.

    Args:
        partitions: How many partitions to make, from 1 to the number of layers.
        module: The sequence to balance, on any device. One layer at a time is copied to `device`.
        sample: An input with as many samples as a micro-batch, on any device: a tensor, or a tuple
            of tensors.
        timeout: The seconds after which no further measurement starts, once every layer has been
            timed.
        device: The device on which the layers are timed. The default is "cuda" if it is available,
            and "cpu" otherwise.

    Returns:
        The number of layers of each partition: the argument `balance` of `GPipe`.

    Raises:
        TypeError: If an argument has a wrong type, a skip is not stashed once and then popped once,
            or a layer cannot be copied.
        ValueError: If `partitions` or `timeout` is out of range, or if the device is "meta", which
            computes nothing.
    """
    sample, place = _check(partitions, module, sample, device)
    if not timeout >= 0:
        raise ValueError(f"timeout must be a number of seconds, 0 or more, but got {timeout!r}")
    if place.type == "meta":
        raise ValueError(
            "nothing takes time on device 'meta', so layers cannot be timed on it: give a real "
            "device, or use balance_by_size"
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
    """Choose a balance by the bytes of memory that each layer takes in training.

        size = bytes for one micro-batch + param_scale * bytes of parameters

    The bytes for one micro-batch are the tensors that the layer's forward allocates, and that its
    backward or a later layer needs. Tensors that share one storage count once. Sparse tensors do
    not count.

    Args:
        partitions: How many partitions to make, from 1 to the number of layers.
        module: The sequence to balance, on any device. One layer at a time is copied to `device`.
        input: A mini-batch, on any device: a tensor, or a tuple of tensors.
        chunks: How many micro-batches the mini-batch will be split into.
        param_scale: How many bytes of memory each byte of parameters takes in training. The
            parameters and their gradients make 2. For the optimizer's state, add 0 with SGD, 1 with
            SGD and momentum, or 2 with Adam. Add 1 if a copy of the parameters is kept.
        device: The device on which the layers run. The default is "cuda" if it is available, and
            "cpu" otherwise. On "meta", sizes are found without computing anything.

    Returns:
        The number of layers of each partition: the argument `balance` of `GPipe`.

    Raises:
        TypeError: If an argument has a wrong type, a skip is not stashed once and then popped once,
            or a layer cannot be copied.
        ValueError: If `partitions`, `chunks` or `param_scale` is out of range, or tensors of the
            input differ in batch size.
    """
    input, place = _check(partitions, module, input, device)
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ValueError(f"chunks must be a positive int, got {chunks!r}")
    if not 0 <= param_scale < float("inf"):
        raise ValueError(f"param_scale must be a finite number, 0 or more, but got {param_scale!r}")
    sizes = profile_sizes(module, input, chunks, param_scale, place)
    return minimise_heaviest(sizes, partitions)


def _check(
    partitions: int, module: nn.Sequential, sample: TensorOrTensors, device: Device | None
) -> tuple[TensorOrTensors, torch.device]:
    """Check the arguments that both functions have; return the sample's tensors and the device.

    The check is done before any layer runs, because running the layers takes time.
    """
    sample = checked_sample(module, sample, "balanced")
    check_partitions(partitions, len(module))
    if device is None:
        device = accelerator.default_kind()
    return sample, torch.device(device)
