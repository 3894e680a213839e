"""Partitions: split a sequence of layers by the balance, place the parts on devices, keep the state's names."""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.task.guards.randomness import default_generators
from torchgpipe.tensors._autograd import storage_of
from torchgpipe.tensors.checkpoint import MODES
from torchgpipe.trace.layer import Layers

Init = Callable[[int, nn.Module], object]
"""Fills the parameters and buffers of a layer, whose index in the model is given."""

_ADVICE = """
Let the library balance the layers, by the time that they take:

    from torchgpipe.balance import balance_by_time
    partitions = 2  # the number of devices
    balance = balance_by_time(partitions, model, sample)
    model = GPipe(model, balance, ...)
"""


AVERAGED = (
    "a partition runs once for each micro-batch; DistributedDataParallel or replicate of it, or of "
    "its layers, would not average gradients once; use it on the whole pipeline, or use "
    "fully_shard on partitions"
)

MISSED_STEPS = (
    "DistributedDataParallel around a pipeline does not see step(), so gradients would differ "
    "between replicas; wrap a module whose forward returns model.loss(criterion, input, target), "
    "and call backward() on what that returns; or use replicate(model), of "
    "torch.distributed._composable.replicate, in its place, and step()"
)

MOVING = (
    "a pipeline keeps each partition on the device that it was made with, and cannot be moved; "
    "name the devices when wrapping the module: GPipe(module, balance, devices=[…]), or device=… "
    "on a rank"
)


def check_module(module: object) -> None:
    """Raise `TypeError` or `ValueError` if `module` is no `nn.Sequential` of distinct layers, or more than that."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"GPipe wraps an nn.Sequential, but got {type(module).__name__}; make one of any "
            "module's layers: torchgpipe.sequential(module, sample)"
        )
    # What a subclass of nn.Sequential overrides, except methods that only show it.
    classes = type(module).__mro__[: type(module).__mro__.index(nn.Sequential)]
    names = [
        name
        for kind in classes
        for name in vars(kind)
        if callable(getattr(nn.Sequential, name, None))
    ]
    shown = {
        "extra_repr",
        "_get_name",
        *(n for n in names if n[:2] == "__" and n not in ("__call__", "__getattr__")),
    }
    has: dict[str, object] = {
        **{f"a method {name}": True for name in names if name not in shown},
        "a forward": "forward" in vars(module),
        "a compiled forward (compile the layers instead)": module._compiled_call_impl,
        "parameters": module._parameters,
        "buffers": module._buffers,
        "hooks": any(value for name, value in vars(module).items() if name.endswith("_hooks")),
    }
    own = [what for what, found in has.items() if found]
    if own and type(module) is not Layers:
        raise TypeError(
            f"GPipe runs the layers of {type(module).__name__} one after another, but it has "
            f"{' and '.join(own)} of its own, which would be left out; put them into layers, and "
            "wrap an nn.Sequential of these"
        )
    seen: dict[nn.Module, str] = {}
    # Not `named_children`: it leaves out a layer's second place.
    for name, layer in module._modules.items():
        if layer is not None and (other := seen.setdefault(layer, name)) != name:
            raise ValueError(
                f"layers {other!r} and {name!r} are the same module; a layer can be in one place "
                "only, so give each place a layer of its own"
            )


def check_settings(chunks: object, checkpoint: object) -> None:
    """Raise `ValueError` if chunks or checkpoint is out of range."""
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ValueError(f"chunks must be a whole number of at least 1, but got {chunks!r}")
    if checkpoint not in MODES:
        raise ValueError(
            f"checkpoint must be one of {', '.join(map(repr, MODES))}, but got {checkpoint!r}"
        )


def choose_devices(
    devices: Iterable[int | str | torch.device] | None, n: int
) -> list[torch.device]:
    """Return one device for each of `n` partitions: the first of those given, of all CUDA devices, or the CPU."""
    if isinstance(devices, str | torch.device | int):
        raise TypeError(
            f"devices must be a list of devices, one per partition, but got {devices!r}"
        )
    if devices is not None:
        found = [torch.device(device) for device in devices]
    elif torch.cuda.is_available():
        found = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    else:
        found = [torch.device("cpu")] * n
    if len(found) < n:
        raise IndexError(
            f"too few devices: {n} partitions, but {len(found)} devices; give a balance of at most "
            f"{len(found)} partitions, or name a device several times in devices=[…]"
        )
    if devices is not None and len(found) > n:
        warnings.warn(
            f"devices=[…] names {len(found)} devices, of which the pipeline uses the first {n}; "
            "name no more than it uses, or choose a balance and a schedule for all of them",
            stacklevel=3,
        )
    # "cuda" and "cuda:0" are one device, and have to compare equal.
    return [
        torch.device("cuda", torch.cuda.current_device()) if str(d) == "cuda" else d
        for d in found[:n]
    ]


class Partition(nn.Sequential):
    """Consecutive layers of a model, which run once for each micro-batch."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        # DistributedDataParallel asks for it. It would wait for a forward of its own, and add up
        # nothing without.
        raise TypeError(AVERAGED)


def split(module: nn.Sequential, balance: Iterable[int] | None) -> list[nn.Sequential]:
    """Split `module` into partitions of `balance[j]` consecutive layers, which keep their names."""
    if balance is None:
        raise ValueError("balance is required: the number of layers of each partition" + _ADVICE)
    if not isinstance(balance, Iterable):
        raise TypeError(
            f"balance must be a list, the layers of each partition, but got {balance!r}" + _ADVICE
        )
    balance = list(balance)
    if any(not isinstance(b, int) or isinstance(b, bool) or b <= 0 for b in balance):
        raise ValueError(
            f"every partition needs one layer or more, but got the balance {balance}" + _ADVICE
        )
    if sum(balance) != len(module):
        raise ValueError(
            f"the balance {balance} sums up to {sum(balance)} layers, but the module has "
            f"{len(module)}" + _ADVICE
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


def translate_old_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename, in place, the keys of a state saved by torchgpipe 0.0.7 (`partitions.j.layer…`) to the model's own."""
    if any(name == "partitions" for name, _ in module.named_children()):
        return
    old = re.compile(re.escape(prefix) + r"partitions\.\d+\.")
    for key in [key for key in state if old.match(key)]:
        state[prefix + old.sub("", key)] = state.pop(key)


def check_parameters(partitions: Iterable[nn.Module], places: Iterable[object]) -> None:
    """Raise `ValueError` if partitions in different places (devices, or ranks) share a parameter."""
    owner: dict[nn.Parameter, tuple[str, object]] = {}
    for partition, place in zip(partitions, places, strict=True):
        for name, parameter in partition.named_parameters():
            other = owner.setdefault(parameter, (name, place))
            if other[1] != place:
                raise ValueError(
                    f"{other[0]!r} and {name!r} are one parameter, but would be on {other[1]} and "
                    f"{place}; choose a balance that keeps them in one partition, or give each a "
                    "parameter of its own"
                )


def shared_buffers(
    partitions: Iterable[nn.Module], own: Iterable[nn.Module]
) -> list[tuple[nn.Module, str]]:
    """Return which buffers of `own` partitions share memory with other partitions': modules, and names there."""
    times = Counter(x for partition in partitions for x in {*map(_memory, partition.buffers())})
    places = [
        (module, *item)
        for partition in own
        for module in partition.modules()
        for item in module._buffers.items()
    ]
    return [(module, name) for module, name, x in places if x is not None and times[_memory(x)] > 1]


def _memory(x: Tensor) -> int:
    return id(x) if nn.parameter.is_lazy(x) else storage_of(x)


class Elsewhere:
    """A hook that leaves out what a state says of partitions that are not this process's `own`."""

    def __init__(self, partitions: Iterable[nn.Module], own: Sequence[nn.Module]) -> None:
        self._names = {n for p in partitions for n in p.state_dict()} - {
            n for p in own for n in p.state_dict()
        }

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Drop their entries, before a state is loaded."""
        for name in self._names:
            state.pop(prefix + name, None)


def place(
    partitions: Sequence[nn.Sequential], devices: Sequence[torch.device | None], init: Init | None
) -> None:
    """Move the partitions to their devices, except those that have none; fill their layers by `init`.

    Layers on `meta` get memory. The random numbers of layer k depend on k and the default
    generator's seed alone.
    """
    placed = [
        (p, device) for p, device in zip(partitions, devices, strict=True) if device is not None
    ]
    made: dict[tuple[Tensor, torch.device], Tensor] = {}  # a tensor in two places stays one
    for partition, device in placed:
        for path, module in partition.named_modules():
            for tensors in (module._parameters, module._buffers):
                for name, x in tensors.items():
                    if x is None or not x.is_meta or device.type == "meta":
                        continue
                    if init is None:
                        raise ValueError(
                            f"'{path}.{name}' is on device 'meta' and has no values: give "
                            "init=..., which fills a layer, or build the layers on a real device"
                        )
                    if (x, device) not in made:
                        empty = torch.empty_like(x, device=device)
                        made[x, device] = (
                            nn.Parameter(empty, x.requires_grad)
                            if isinstance(x, nn.Parameter)
                            else empty
                        )
                    tensors[name] = made[x, device]
    for partition, device in placed:
        partition.to(device)
    first, seed = 0, torch.initial_seed()
    for partition, here in zip(partitions, devices, strict=True):
        if init is not None and here is not None:
            for k, layer in enumerate(partition, first):
                with torch.random.fork_rng([here] if here.type == "cuda" else []), torch.no_grad():
                    for generator in default_generators(here):
                        generator.manual_seed(seed + k)
                    init(k, layer)
        first += len(partition)
