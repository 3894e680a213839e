"""Check the layers and the settings from which a pipeline is made."""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from torch import Tensor, nn

from torchgpipe.caught import shortened
from torchgpipe.layers.fixed import Fixed
from torchgpipe.task.guards.buffers import COMPARED
from torchgpipe.tensors._autograd import storage_of
from torchgpipe.tensors.checkpoint import MODES
from torchgpipe.tensors.contents import equal
from torchgpipe.tensors.item import versions
from torchgpipe.trace.layer import Layers

AVERAGED = (
    "a partition runs once for each micro-batch; DistributedDataParallel or replicate of it, or of "
    "its layers, would not average gradients once; use replicate(model, device_mesh=...) on the "
    "whole pipeline, or, if no two partitions share a weight, fully_shard on partitions"
)

NOT_SHARDED = (
    "use replicate(model, device_mesh=...) on the whole pipeline; or use fully_shard only on "
    "layers without this weight, and average all other gradients over the replicas after each step"
)
"""How to train replicas of a pipeline whose partitions share a weight."""

MISSED_STEPS = (
    "DistributedDataParallel around a pipeline does not see step(), so gradients would differ "
    "between replicas; wrap a module whose forward returns model.loss(criterion, input, target), "
    "and call backward() on what that returns; or use replicate(model), of "
    "torch.distributed._composable.replicate, in its place, and step()"
)

SHARDED = (
    "fully_shard(model) gathers parameters only once for all micro-batches; shard the partition "
    "instead: fully_shard(model.partition, mesh=...)"
)

REPLACED = (
    "a layer or partition was replaced after the pipeline was made; change the layers first, then "
    "wrap them in a new pipeline (what is inside of a layer may be replaced at any time between "
    "steps)"
)

ADDED = (
    "the pipeline has a module {!r} that is none of its layers; keep modules such as a criterion "
    "outside of the pipeline"
)


def check_module(module: object) -> None:
    """Check that a module only runs a sequence of distinct layers, as a pipeline does.

    Raises:
        TypeError: If the module is not an `nn.Sequential`, or does more than run its layers.
        ValueError: If a layer occurs twice in the sequence.
    """
    if isinstance(module, Fixed):
        raise TypeError(
            f"{type(module).__name__} is a pipeline already; to make another one, wrap the "
            "nn.Sequential that it was made of"
        )
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"GPipe wraps an nn.Sequential, but got {type(module).__name__}; "
            "torchgpipe.sequential(module, sample) makes an nn.Sequential of any module"
        )
    own = _beside_layers(module)
    if own:
        raise TypeError(
            f"GPipe runs only the layers of {type(module).__name__} one after another, but it has "
            f"{' and '.join(own)} of its own, which would be left out; put these into layers, and "
            "wrap an nn.Sequential of the layers"
        )
    seen: dict[nn.Module, str] = {}
    # Not `named_children`: it leaves out a layer's second place.
    for name, layer in module._modules.items():
        if layer is None:
            continue
        other = seen.setdefault(layer, name)
        if other != name:
            raise ValueError(
                f"layers {other!r} and {name!r} are the same module, but a layer can be in only "
                "one place of a pipeline; make a separate layer for each place"
            )


def _beside_layers(module: nn.Sequential) -> list[str]:
    """Return what a sequence has besides its layers, as a list of words such as "parameters".

    A pipeline would ignore these things, because it only runs the layers.
    """
    if type(module) is Layers:
        # It runs its layers one after another, and has two hooks for names in a state.
        overridden, usual = [], {"_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
    else:
        overridden, usual = [*_overridden(module)], set()
    found = []
    for name in overridden:
        # A class may override methods that only show the module.
        special = name.startswith("__") and name not in ("__call__", "__getattr__")
        if not special and name not in ("extra_repr", "_get_name"):
            found.append(f"a method {name}")
    if "forward" in vars(module):
        found.append("a forward")
    if module._compiled_call_impl:
        found.append("a compiled forward (compile the layers instead)")
    if module._parameters:
        found.append("parameters")
    if module._buffers:
        found.append("buffers")
    for name, value in vars(module).items():
        if value and name.endswith("_hooks") and name not in usual:
            found.append("hooks")
            break
    return found


def _overridden(module: nn.Sequential) -> Iterator[str]:
    """Yield the names of the methods of `nn.Sequential` that the module's class overrides."""
    for kind in type(module).__mro__:
        if kind is nn.Sequential:
            return
        for name in vars(kind):
            if callable(getattr(nn.Sequential, name, None)):
                yield name


def check_settings(chunks: object, checkpoint: object) -> None:
    """Raise `ValueError` if `chunks` or `checkpoint` is not an allowed value."""
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ValueError(
            f"chunks must be a whole number of at least 1, but got {shortened(chunks)}"
        )
    if checkpoint not in MODES:
        raise ValueError(
            f"checkpoint must be one of {', '.join(map(repr, MODES))}, but got "
            + shortened(checkpoint)
        )


def warn_of_time_first(module: nn.Sequential, chunks: int) -> None:
    """Warn if a layer of PyTorch takes the time, and not the batch, as dimension 0 of its input.

    Such a layer was made without `batch_first=True`. The pipeline splits dimension 0 into
    micro-batches, so the layer would get pieces of the time.

    Layers behind a layer that is not from `torch.nn` are not checked, because that layer may
    transpose tensors.

    Args:
        module: The layers.
        chunks: The number of micro-batches. With one micro-batch, nothing is split.
    """
    if chunks == 1:
        return
    for name, part in islice(module.named_modules(), 1, None):  # without the module itself
        if not type(part).__module__.startswith("torch.nn."):
            return
        if getattr(part, "batch_first", True) is False:
            warnings.warn(
                f"layer {name!r} ({type(part).__name__}) has batch_first=False, so dimension 0 of "
                "its input is the time, but a pipeline splits dimension 0 into micro-batches; make "
                "the layer with batch_first=True, and give inputs with the batch first",
                stacklevel=4,
            )
            return


def shared_parameters(partitions: Iterable[nn.Module]) -> set[Tensor]:
    """Return the parameters that several partitions share."""
    times = Counter[Tensor]()
    for partition in partitions:
        times.update(partition.parameters())
    return {p for p, count in times.items() if count > 1}


Uses = dict[str, tuple[nn.Module, str]]
"""The names of one parameter: each maps to a module that has it, and to its name in the module."""


def shared_within(partitions: Iterable[nn.Module]) -> list[Uses]:
    """Return, for each parameter that occurs several times in `partitions`, all its names."""
    found: dict[nn.Parameter, Uses] = {}
    for partition in partitions:
        for path, module in partition.named_modules():
            for name, p in module._parameters.items():
                if p is not None:
                    found.setdefault(p, {})[f"{path}.{name}"] = module, name
    return [uses for uses in found.values() if len(uses) > 1]


def check_still_shared(uses: Uses) -> None:
    """Check that a shared parameter is still one parameter, and that sharding has not copied it.

    Args:
        uses: The names that the parameter had when the pipeline was made.

    Raises:
        TypeError: If the names now belong to several parameters, and one of them is a `DTensor`.
    """
    found = {module._parameters.get(name) for module, name in uses.values()}
    # While another thread runs the layers, they have plain tensors in place of parameters.
    apart = len(found) > 1 and all(isinstance(p, nn.Parameter) for p in found)
    if apart and any(hasattr(p, "device_mesh") for p in found):
        raise TypeError(
            f"{' and '.join(map(repr, uses))} were one parameter when the pipeline was made, but "
            "fully_shard or parallelize_module has made several parameters of it, which would "
            f"train apart; do not shard these layers; for replicas, {NOT_SHARDED}"
        )


def shared_buffers(
    partitions: Iterable[nn.Module], own: Iterable[nn.Module]
) -> list[tuple[nn.Module, str]]:
    """Return the buffers in partitions of this process that another partition has, too.

    Args:
        partitions: All partitions of the pipeline.
        own: The partitions of this process.

    Returns:
        A pair for each of these buffers: the module that has the buffer, and the buffer's name in
        the module. Two buffers count as the same if they share memory.
    """
    times = Counter[int]()
    for partition in partitions:
        times.update({_memory(x) for x in partition.buffers()})
    found = []
    for partition in own:
        for module in partition.modules():
            for name, x in module._buffers.items():
                if x is not None and times[_memory(x)] > 1:
                    found.append((module, name))
    return found


def _memory(x: Tensor) -> int:
    return id(x) if nn.parameter.is_lazy(x) else storage_of(x)


@contextmanager
def unchanged(buffers: Sequence[tuple[nn.Module, str]], *, copy: bool) -> Iterator[None]:
    """Check that some buffers do not change within this context.

    They are copies of one buffer on several devices, and buffers that two partitions share. A
    change of one copy would not reach the other copies. And a pipeline does not run the layers of
    two partitions in the order in which a plain sequence runs them. So if layers of both partitions
    changed a buffer, the results would differ from those of the sequence.

    Args:
        buffers: The module and the name of each buffer.
        copy: Whether to compare the values of buffers on the CPU, too. If not, only the version
            counters are compared, but some kernels write to a buffer without increasing its
            counter. On a GPU, the comparison of values would make the host wait.

    Raises:
        RuntimeError: If a buffer was changed.
    """
    held = []
    for module, name in buffers:
        x = module._buffers.get(name)
        if x is not None:
            before = x.detach().clone() if copy and x.device.type in COMPARED else None
            held.append((module, name, x, versions((x,)), before))
    yield
    for module, name, x, version, before in held:
        changed = versions((x,)) != version or (before is not None and equal(x, before) is False)
        now = module._buffers.get(name)
        # A new tensor of another shape or type is a cache that was made for other inputs.
        if now is not None and now is not x and _alike(now, x):
            changed = changed or equal(now, x) is False
        if changed:
            raise RuntimeError(
                "two partitions have layers that change the same buffer (such as one batch norm in "
                "both), but a pipeline runs these layers in another order than a plain sequence; "
                "give each partition its own layer, or keep the layer in evaluation mode"
            )


def _alike(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and x.device == y.device
