"""Count each layer's operations and bytes on the `meta` device, where nothing is computed.

    counts = count(model, sample)     # only the shape of a sample matters, not its batch size
    layers = counts.at(16)            # for micro-batches of 16 samples

Copies of the layers run one after another (see `torchgpipe.balance.profile`). The cost of a layer
is a fixed cost for its parameters, plus an equal cost for each sample of the micro-batch. So the
layers are counted for only two micro-batch sizes, and the costs for all other sizes are computed
from these two. Layers that multiply samples with each other are an exception (see `growth`).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Sequential

from torchgpipe.balance.profile import Rehearsal, rehearse, undisturbed
from torchgpipe.caught import caught
from torchgpipe.plan.count.as_on import as_on
from torchgpipe.plan.count.counter import Counter
from torchgpipe.plan.count.footprint import Footprint, LayerCount, Stashed, list_skips
from torchgpipe.plan.count.growth import between, check_growth
from torchgpipe.plan.count.known import Alike, Remembered
from torchgpipe.plan.count.measure import StorageNumbers, measure_footprint
from torchgpipe.plan.count.task_bytes import TaskBytes, task_bytes
from torchgpipe.plan.count.tied import counted_once, tied_parameters
from torchgpipe.plan.hardware.operators import Operator, dtype_of
from torchgpipe.tensors import accelerator
from torchgpipe.tensors._autograd import is_compiled
from torchgpipe.tensors.microbatch import TensorOrTensors, like, tensors_of
from torchgpipe.trace.sequential import batched

LayerCounts = tuple[LayerCount, ...]
Footprints = tuple[Footprint, ...]

META = torch.device("meta")
SIZES = (2, 4)
"""The two micro-batch sizes for which layers are counted.

A single sample is not counted, because batch normalization can refuse it.
"""
ADVICE = (
    "check the sample's shape and dtype; layers are counted on device 'meta', where tensors have "
    "no values, so a layer that needs values cannot be counted: find the balance with "
    "torchgpipe.balance, which runs the layers"
)


@dataclass(frozen=True)
class Counts:
    """The operations and bytes of a model's layers, for micro-batches of any size.

    The layers were counted for two micro-batch sizes. The methods compute the values for all
    others.
    """

    low: LayerCounts
    """The layers for the smaller of `SIZES`."""
    high: LayerCounts
    """The layers for the larger of `SIZES`."""
    held: tuple[Footprints, Footprints] = field(repr=False)
    """The memory that the layers take (their footprints), for both sizes."""
    input: float
    """The bytes of one sample of the model's input."""
    copied: bool = True
    """Whether a partition gets copies of its inputs. CPU devices share memory and copy nothing."""
    known: dict[int, Footprints] = field(default_factory=dict, repr=False, compare=False)
    """A cache, which maps micro-batch sizes to footprints."""
    tasks: dict[tuple[int, int, int, bool], TaskBytes] = field(
        default_factory=dict, repr=False, compare=False
    )
    """A cache, which maps the arguments of `task` to its results."""
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """A cache of further values that are computed from the counts."""

    @functools.cached_property
    def once(self) -> list[LayerCount]:
        """The layers' counts for the smaller micro-batch size, with shared parameters counted once.

        A parameter that layers share counts only in the first of these layers.
        """
        return counted_once(self.low)

    @functools.cached_property
    def on_one_device(self) -> "Counts":
        """The same counts for partitions that are all on one device, so that no input is copied."""
        return replace(self, copied=False, tasks={}, cache={})

    def at(self, size: int) -> LayerCounts:
        """Return each layer's operators and bytes for micro-batches of `size` samples."""
        return _line(self.low, self.high, size)  # type: ignore[no-any-return]

    def footprints(self, size: int) -> Footprints:
        """Return the memory that each layer takes for micro-batches of `size` samples."""
        if size not in self.known:
            self.known[size] = _line(*self.held, size)
        return self.known[size]

    def skips(self, size: int) -> Sequence[tuple[int, int, Stashed]]:
        """Return the skips for micro-batches of `size` samples.

        Each skip is a tuple: the number of the layer that stashes it, the number of the layer that
        pops it, and its bytes.
        """
        key = "skips", size
        if key not in self.cache:
            self.cache[key] = list_skips(self.footprints(size))
        found: list[tuple[int, int, Stashed]] = self.cache[key]
        return found

    def task(self, size: int, start: int, stop: int, *, checkpoint: bool) -> TaskBytes:
        """Return the bytes of memory that one task takes: one micro-batch on one partition.

        Args:
            size: The number of samples in the micro-batch.
            start: The first layer of the partition.
            stop: The layer after the partition's last layer.
            checkpoint: Whether the task is checkpointed.
        """
        key = (size, start, stop, checkpoint)
        if key not in self.tasks:
            footprints = self.footprints(size)
            self.tasks[key] = task_bytes(
                footprints, start, stop, checkpoint=checkpoint, copied=self.copied
            )
        return self.tasks[key]

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without the caches, which a pickle or a copy leaves out."""
        return {**vars(replace(self, known={}, tasks={}, cache={}))}

    def __len__(self) -> int:
        return len(self.low)


def _line(low: Any, high: Any, size: int) -> Any:
    """Return the costs for micro-batches of `size` samples, on the line through two counted sizes.

    Args:
        low: The costs for the smaller of `SIZES`, as nested tuples.
        high: The costs for the larger of `SIZES`.
        size: The number of samples.
    """
    smaller, larger = SIZES
    return between(low, high, (size - smaller) / (larger - smaller), {})


def count(
    module: Sequential,
    sample: TensorOrTensors,
    *,
    device: str = accelerator.KIND,
    autocast: torch.dtype | None = None,
    alike: Alike | None = None,
) -> Counts:
    """Count the operations and bytes of the layers of `module`, for inputs like `sample`.

    Args:
        module: The layers.
        sample: An input of any batch size.
        device: The type of device whose kernels are counted, "cuda" or "cpu".
        autocast: The dtype with which to enable autocast for this type of device, or `None` to
            leave autocast as it is.
        alike: A cache of counts, which several calls can share. A layer that behaves like an
            earlier layer, of this or another model, is not counted again.

    Raises:
        TypeError: If a layer cannot be copied.
        ValueError: If a layer raises an error, is compiled, or runs different operators for
            different batch sizes. The message names the layer.

    Warns:
        UserWarning: If the cost of a layer grows faster than the micro-batch size. The counts for
            large micro-batches are then too low.
    """
    _refuse_compiled(module)
    alike = alike or Alike()
    split = batched(module)
    smaller, larger = SIZES
    with undisturbed(META), Remembered(), as_on(device, autocast):
        alike.begin(module, device)
        low, low_held = _at(_empty(sample, smaller, split), module, alike)
        high, high_held = _at(_empty(sample, larger, split), module, alike)
    check_growth(low, high, SIZES)
    one = 0.0
    for x in tensors_of(sample):
        one += x[:1].numel() * x.element_size()
    return Counts(low, high, (low_held, high_held), one, device != "cpu")


def _at(
    sample: TensorOrTensors, module: Sequential, alike: Alike
) -> tuple[LayerCounts, Footprints]:
    """Return the operators and the memory of each layer, for a sample on device `meta`.

    Args:
        sample: The sample, whose batch size is the micro-batch size.
        module: The layers.
        alike: A cache of counts.
    """
    names = list(module._modules)
    tied = tied_parameters(module)
    storages = StorageNumbers(len(tensors_of(sample)))
    measure_count = partial(_count_layer, names)

    def does(rehearsal: Rehearsal) -> LayerCount:
        found = alike.once(measure_count, rehearsal)
        return found._replace(name=names[rehearsal.index], tied=tied[rehearsal.index])

    layers = tuple(rehearse(module, sample, META, does))
    gives = (*[layer.gives for layer in layers], None)

    def holds(rehearsal: Rehearsal) -> Footprint:
        needs = gives[rehearsal.index], gives[rehearsal.index + 1]
        found = alike.once(partial(measure_footprint, *needs), rehearsal, needs)
        return storages.placed(found, rehearsal)

    return layers, tuple(rehearse(module, sample, META, holds))


def _refuse_compiled(module: Sequential) -> None:
    for name, layer in module.named_children():
        for part in layer.modules():
            if is_compiled(part):
                raise ValueError(
                    f"layer {name!r} is compiled by torch.compile, and fused operators cannot be "
                    "counted: count or plan the layers before they are compiled"
                )


def _count_layer(names: Sequence[str], rehearsal: Rehearsal) -> LayerCount:
    """Run one layer on `meta`, and return its operators and the bytes of its tensors.

    Args:
        names: The names of all layers.
        rehearsal: The layer and its input.

    Raises:
        ValueError: If the layer raises an exception. The message is one line and names the layer.
    """
    name = names[rehearsal.index]
    layer = rehearsal.layer
    value = rehearsal.prepare()
    reached: set[int] = set()
    given = tuple([_Entry.apply(reached, i, x) for i, x in enumerate(tensors_of(value))])
    for key, skip in rehearsal.scope.items():
        if skip is not None:
            rehearsal.scope[key] = _Entry.apply(reached, -1, skip)
    forward, backward = Counter(), Counter()
    try:
        with forward:
            rehearsal.forward(like(value, given))
        roots = [x for x in rehearsal.results() if x.requires_grad]
        gradients = [torch.empty_like(x) for x in roots]
        with backward:
            torch.autograd.backward(roots, gradients)
    except Exception as error:
        which = f"layer {rehearsal.index} ({name!r}, {type(rehearsal.original).__name__})"
        inputs = ", ".join([f"{tuple(x.shape)} {dtype_of(x)}" for x in tensors_of(value)])
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        message = f"{which} fails on {inputs}: {first.rstrip('.')}; {ADVICE}"
        raise ValueError(message) from caught(error)
    sizes = []
    accumulate = []
    frozen = sum([buffer.nbytes for buffer in layer.buffers()])
    for parameter in layer.parameters():
        nbytes = parameter.nbytes
        if parameter.requires_grad:
            sizes.append(nbytes)
            dtype = dtype_of(parameter)
            accumulate.append(Operator("elementwise", dtype, 0.0, 3.0 * nbytes))
        else:
            frozen += nbytes
    return LayerCount(
        name=name,
        forward=tuple(forward.operators),
        backward=tuple(backward.operators),
        accumulate=tuple(accumulate),
        output=float(sum([x.nbytes for x in tensors_of(rehearsal.output)])),
        parameters=sum(sizes),
        parameter_sizes=tuple(sizes),
        frozen=frozen,
        gives=tuple([i in reached for i in range(len(given))]),
    )


class _Entry(torch.autograd.Function):
    """An autograd node in front of a layer, whose backward notes that a gradient reaches the input.

    Without this node, the input would be a leaf of the autograd graph. If a layer's backward passes
    the output's gradient on to a leaf unchanged, PyTorch copies it for `.grad`. A pipeline makes no
    such copy, so it must not be counted.
    """

    @staticmethod
    def forward(ctx: Any, reached: set[int], number: int, x: Tensor) -> Tensor:
        ctx.reached, ctx.number = reached, number
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        if grad is not None:
            ctx.reached.add(ctx.number)
        return None, None, None


def _empty(sample: TensorOrTensors, size: int, split: Sequence[bool] | None) -> TensorOrTensors:
    """Return tensors on `meta` like those of the sample, but with `size` samples.

    `split` says which tensors have a batch dimension; with `None`, all have one.
    """

    def empty(x: Tensor, grows: bool = True) -> Tensor:
        shape = (size, *x.shape[1:]) if grows else x.shape
        return torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)

    if isinstance(sample, Tensor):
        return empty(sample)
    return like(sample, [*map(empty, sample, split or [True] * len(sample))])
