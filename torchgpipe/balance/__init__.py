"""Balance a sequence of layers over partitions, by what its layers cost on a sample.

    balance = balance_by_time(4, model, sample)       # even seconds
    balance = balance_by_size(4, model, mini_batch)   # even bytes
    model = GPipe(model, balance, chunks=8)

Both profile the layers one by one on copies, and then minimise the heaviest partition exactly. The module is
left as it was: mode, gradients, buffers (statistics of batch normalization too) and random state.
"""

import torch
from torch import nn

from torchgpipe.balance.minimise import check_partitions, minimise_heaviest
from torchgpipe.balance.profile import checked_sample, profile_sizes, profile_times
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
    """Balance by the time that forward and backward of every layer take on a sample.

    The layers are timed in turn, each after a warm-up, over and over until the timeout (every layer at least
    once); a layer's cost is the median.

    Args:
        partitions: number of partitions, from 1 to the number of layers.
        module: the sequence to balance, on any device; one layer at a time is copied to `device`.
        sample: an input of the size of a micro-batch, a tensor or a tuple of tensors, on any device.
        timeout: seconds after which no further measurement starts.
        device: where the layers are timed; by default "cuda" where there is one, otherwise "cpu".

    Returns:
        The number of layers of each partition, as `GPipe` takes it.

    Raises:
        TypeError: a wrong type, skips that do not match, or a layer that cannot be copied.
        ValueError: a number out of range, or the device "meta", on which nothing takes time.
    """
    sample, place = _check(partitions, module, sample, device)
    if not timeout >= 0:
        raise ValueError(f"timeout must be a number of seconds, 0 or more, got {timeout!r}")
    if place.type == "meta":
        raise ValueError(
            "nothing takes time on device 'meta': name one that computes, or use balance_by_size"
        )
    return minimise_heaviest(profile_times(module, sample, timeout, place), partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: TensorOrTensors,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """Balance by the memory that every layer takes to train.

        size = bytes for one micro-batch + param_scale * bytes of parameters

    The bytes for one micro-batch are counted: the storages that the layer's forward made and that backward or a later
    layer needs, each once; sparse tensors are not among them.

    Args:
        partitions, module: as for `balance_by_time`.
        input: a mini-batch, a tensor or a tuple of tensors, on any device.
        chunks: number of micro-batches that the mini-batch will be split into.
        param_scale: bytes held per byte of parameters. Parameters and gradients alone make 2; add the
            optimizer's state: 2 for SGD, 3 with momentum, 4 for Adam; and 1 more where a copy is kept.
        device: as for `balance_by_time`; "meta" works out the sizes without computing.

    Returns, and raises, what `balance_by_time` does; and `ValueError` for tensors that disagree on the batch size.
    """
    input, place = _check(partitions, module, input, device)
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ValueError(f"chunks must be a positive int, got {chunks!r}")
    if not 0 <= param_scale < float("inf"):
        raise ValueError(f"param_scale must be a finite number, 0 or more, got {param_scale!r}")
    return minimise_heaviest(profile_sizes(module, input, chunks, param_scale, place), partitions)


def _check(
    partitions: int, module: nn.Sequential, sample: TensorOrTensors, device: Device | None
) -> tuple[TensorOrTensors, torch.device]:
    """Refuse what cannot be balanced, before the time is spent; return the tensors and the device to profile on."""
    sample = checked_sample(module, sample, "balanced")
    check_partitions(partitions, len(module))
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return sample, torch.device(device)
