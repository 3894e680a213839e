"""Split a sequence of layers into partitions, and place the partitions on devices."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice
from math import nan
from numbers import Integral

import torch
from torch import Tensor, nn

from torchgpipe.caught import shortened
from torchgpipe.layers.checks import AVERAGED
from torchgpipe.random.generators import default_generators
from torchgpipe.tensors import accelerator

Init = Callable[[int, nn.Module], object]
"""A function that fills the parameters and buffers of a layer, given its index in the model."""

_BALANCE = "a list with the number of layers of each partition, such as [2, 3]"
_ADVICE = "; torchgpipe.balance.balance_by_time(2, layers, sample) finds a balance for 2 partitions"


class Partition(nn.Sequential):
    """Consecutive layers of a model, which run once for each micro-batch."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        # DistributedDataParallel reads this attribute when it wraps a module. It must not wrap a
        # partition: the pipeline would not call the wrapper, so no gradients would be averaged.
        raise TypeError(AVERAGED)

    def __dir__(self) -> list[str]:
        # torch.jit.trace reads all attributes that are listed here. This one is for DDP only.
        names: list[str] = super().__dir__()
        names.remove("_ddp_params_and_buffers_to_ignore")
        return names


def split(module: nn.Sequential, balance: Iterable[int] | None) -> list[nn.Sequential]:
    """Split the layers of `module` into partitions: the next `balance[j]` layers form partition j.

    Raises:
        TypeError: If the balance is not a list of whole numbers.
        ValueError: If the balance is `None`, has a number below 1, or does not add up to the number
            of layers.
    """
    if balance is None:
        raise ValueError(f"balance is required: {_BALANCE}{_ADVICE}")
    if not isinstance(balance, Iterable) or isinstance(balance, str | Tensor | Mapping | Set):
        raise TypeError(f"balance must be {_BALANCE}, but got {shortened(balance)}{_ADVICE}")
    balance = list(balance)
    if not all(isinstance(b, Integral) and not isinstance(b, bool) for b in balance):
        raise TypeError(f"balance must be {_BALANCE}, but got {shortened(balance)}{_ADVICE}")
    balance = [int(b) for b in balance]  # they can be numbers of NumPy
    if any(b <= 0 for b in balance):
        raise ValueError(
            f"every partition needs one layer or more, but got the balance {shortened(balance)}"
            + _ADVICE
        )
    if sum(balance) != len(module):
        raise ValueError(
            f"the balance {shortened(balance)} sums up to {sum(balance)} layers, but the module "
            f"has {len(module)} layers" + _ADVICE
        )
    layers = iter(module.named_children())
    partitions: list[nn.Sequential] = []
    for count in balance:
        partition = Partition()
        # `add_module` would refuse a name that is an attribute of Sequential.
        partition._modules.update(islice(layers, count))
        partition.training = module.training
        partitions.append(partition)
    return partitions


def place(
    partitions: Sequence[nn.Sequential], devices: Sequence[torch.device | None], init: Init | None
) -> None:
    """Move the partitions to their devices, and call `init` on each layer to set its parameters.

    Layers on device `meta` get memory on their partition's device. Before `init` is called for
    layer k, the random generators are seeded with a number that depends only on k and on the
    default generator's seed. So the random numbers do not depend on the balance.

    Args:
        partitions: All partitions of the model, in order.
        devices: The device of each partition. A partition whose device is `None` is not changed.
        init: A function that takes the index of a layer in the model and the layer, and sets the
            values of the layer's parameters and buffers. With `None`, the layers keep their values.

    Raises:
        ValueError: If a layer is on device `meta`, and `init` is `None`, or does not fill a buffer
            that is not persistent (so that no `state_dict` has it).
    """
    held = []
    first = 0
    for partition, device in zip(partitions, devices, strict=True):
        if device is not None:
            held.append((first, partition, device))
        first += len(partition)
    made: dict[tuple[Tensor, torch.device | None], Tensor] = {}
    for _, partition, device in held:
        if device.type != "meta":
            _give_memory(partition, device, init, made)
    # Move the partitions in reverse order. If several partitions share a parameter, it ends up on
    # the device of the partition that is moved last, and this should be the first of them.
    for _, partition, device in reversed(held):
        partition.to(device)
    if init is not None:
        for first, partition, device in held:
            _fill(first, partition, device, init)
            _check_buffers(partition, made.values())


def _give_memory(
    partition: nn.Module,
    device: torch.device,
    init: Init | None,
    made: dict[tuple[Tensor, torch.device | None], Tensor],
) -> None:
    """Replace the tensors on device `meta` by empty tensors on `device`.

    If layers share a tensor, they also share its replacement, which is looked up in `made`. For a
    parameter, there is only one replacement. For a buffer, there is one on each device.
    """
    for path, tensors, name, x in _tensors_of(partition):
        if not x.is_meta:
            continue
        if init is None:
            raise ValueError(
                f"'{path}.{name}' is on device 'meta' and has no values: give init=..., a function "
                "that sets the values of a layer, or build the layers on a real device"
            )
        is_parameter = isinstance(x, nn.Parameter)
        key = x, None if is_parameter else device
        if key not in made:
            empty = torch.empty_like(x, device=device)
            made[key] = nn.Parameter(empty, x.requires_grad) if is_parameter else empty
            if _can_be_marked(empty):
                empty.fill_(nan)  # so that it shows if `init` leaves it out
        tensors[name] = made[key]


def _can_be_marked(x: Tensor) -> bool:
    """Return whether a tensor can hold NaN, and can be compared with it."""
    return type(x) is Tensor and x.is_floating_point() and x.element_size() > 1


def _check_buffers(partition: nn.Module, made: Iterable[Tensor]) -> None:
    """Raise `ValueError` if `init` has not filled a buffer that is not persistent.

    Parameters and other buffers can be filled later, from a `state_dict`.

    Args:
        partition: The partition.
        made: The tensors that have replaced tensors on device `meta`.
    """
    ids = set(map(id, made))
    for path, module in partition.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            x = module._buffers.get(name)
            if x is None or id(x) not in ids or not x.numel() or not _can_be_marked(x):
                continue
            if x.isnan().all():
                raise ValueError(
                    f"'{path}.{name}' was on device 'meta', is not persistent (so no state has "
                    "it), and init has not filled it: let init compute its values, too"
                )


def _tensors_of(
    partition: nn.Module,
) -> Iterator[tuple[str, dict[str, Tensor | None], str, Tensor]]:
    """Yield a tuple for each parameter and buffer of a partition.

    The items are the path of the module that has the tensor, the module's dictionary (`_parameters`
    or `_buffers`), the tensor's name in the dictionary, and the tensor.
    """
    for path, module in partition.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, x in tensors.items():
                if x is not None:
                    yield path, tensors, name, x


def _fill(first: int, partition: nn.Sequential, device: torch.device, init: Init) -> None:
    """Call `init` for each layer of a partition; `first` is the first layer's index in the model.

    Random generators are seeded before each call, with a number that depends on the layer's index.
    """
    seed = torch.initial_seed()
    for k, layer in enumerate(partition, first):
        # A parameter that partitions share can be on another device.
        devices = {device, *[p.device for p in layer.parameters()]}
        with torch.random.fork_rng(accelerator.with_generators(devices)), torch.no_grad():
            for each in devices:
                for generator in default_generators(each):
                    generator.manual_seed((seed + k) % 2**64)
            init(k, layer)
