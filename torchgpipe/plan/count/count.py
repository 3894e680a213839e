"""Count each layer's operations and bytes on the `meta` device, where nothing is computed.

    counts = count(model, sample)     # only the shape of a sample matters, not its batch size
    layers = counts.at(16)            # for micro-batches of 16 samples

Copies of the layers run one after another (see `torchgpipe.balance.profile`). The cost of a layer
is a fixed cost for its parameters, plus an equal cost for each sample of the micro-batch. So the
layers are counted for only two micro-batch sizes, and the costs for all other sizes follow from
these two counts. Layers that multiply samples with each other are an exception (see `growth`).
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
from torchgpipe.plan.count.as_on import as_on
from torchgpipe.plan.count.counter import count_layer
from torchgpipe.plan.count.footprint import Footprint, LayerCount, Stashed, list_skips
from torchgpipe.plan.count.growth import between, check_growth
from torchgpipe.plan.count.known import Alike, Remembered
from torchgpipe.plan.count.loss import Loss, gradients_kept
from torchgpipe.plan.count.measure import StorageNumbers, measure_footprint
from torchgpipe.plan.count.task_bytes import NO_TASK, TaskBytes, task_bytes
from torchgpipe.plan.count.tied import counted_once, tied_parameters
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


@dataclass(frozen=True)
class Counts:
    """The operations and bytes of a model's layers, for micro-batches of any size.

    The layers were counted for two micro-batch sizes. From these counts, the methods compute the
    values for all other sizes.
    """

    low: LayerCounts
    """The layers for the smaller of `SIZES`."""
    high: LayerCounts
    """The layers for the larger of `SIZES`."""
    held: tuple[Footprints, Footprints] = field(repr=False)
    """The memory that the layers take (their footprints), for both sizes."""
    input: float
    """The bytes of one sample of the model's input."""
    shared_input: float = 0.0
    """The bytes of those tensors of the input that have no batch dimension, such as a mask."""
    copied: bool = True
    """Whether a partition gets copies of its inputs. CPU devices share memory and copy nothing."""
    loss: "Counts | None" = field(default=None, repr=False)
    """The counts of the criterion, as the only layer; `None` if no criterion was given."""
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
        """These counts for partitions that are all on the same device, which copy no inputs."""
        return replace(self, copied=False, tasks={}, cache={})

    def inputs(self, samples: int) -> float:
        """Return the bytes of an input of so many samples."""
        return self.input * samples + self.shared_input

    def at(self, size: int) -> LayerCounts:
        """Return each layer's operators and bytes for micro-batches of `size` samples."""
        return _line(self.low, self.high, size)  # type: ignore[no-any-return]

    def footprints(self, size: int) -> Footprints:
        """Return the memory that each layer takes for micro-batches of `size` samples."""
        if size not in self.known:
            self.known[size] = _line(*self.held, size)
        return self.known[size]

    def skips(self, size: int) -> Sequence[tuple[int, int, Stashed]]:
        """Return the model's skips, with their bytes for micro-batches of `size` samples.

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

    def loss_task(self, size: int) -> TaskBytes:
        """Return the bytes that the loss of `size` samples takes; all are 0 without a criterion.

        The output of the last layer does not count, because the pipeline holds it.
        """
        if self.loss is None:
            return NO_TASK
        return self.loss.task(size, 0, 1, checkpoint=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields for a pickle or a copy, with empty caches."""
        return {**vars(replace(self, known={}, tasks={}, cache={}))}

    def __len__(self) -> int:
        return len(self.low)


def _line(low: Any, high: Any, size: int) -> Any:
    """Compute the costs for micro-batches of `size` samples from those for two counted sizes.

    Args:
        low: The costs for the smaller of `SIZES`, as nested tuples.
        high: The costs for the larger of `SIZES`.
        size: The number of samples.
    """
    smaller, larger = SIZES
    return between(low, high, (size - smaller) / (larger - smaller), {})


def count(  # noqa: PLR0913 - each decides what is counted
    module: Sequential,
    sample: TensorOrTensors,
    *,
    device: str = accelerator.KIND,
    autocast: torch.dtype | None = None,
    alike: Alike | None = None,
    loss: Loss | None = None,
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
        loss: The criterion and its target, if the loss is to be counted, too.

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

    def at(size: int) -> tuple[LayerCounts, Footprints]:
        longer = module if loss is None else loss.behind(module, size, META)
        with gradients_kept(module):
            return _at(_empty(sample, size, split), longer, alike)

    with undisturbed(META), Remembered(), as_on(device, autocast):
        alike.begin(module, device)
        (low, low_held), (high, high_held) = map(at, SIZES)
    check_growth(low, high, SIZES)
    one = shared = 0.0
    tensors = tensors_of(sample)
    for x, grows in zip(tensors, split or [True] * len(tensors), strict=True):
        if grows:
            one += x[:1].nbytes
        else:
            shared += x.nbytes
    copied = device != "cpu"
    if loss is None:
        return Counts(low, high, (low_held, high_held), one, shared, copied)
    found = Counts(low[-1:], high[-1:], (low_held[-1:], high_held[-1:]), 0.0, copied=copied)
    held = low_held[:-1], high_held[:-1]
    return Counts(low[:-1], high[:-1], held, one, shared, copied, found)


def _at(
    sample: TensorOrTensors, module: Sequential, alike: Alike
) -> tuple[LayerCounts, Footprints]:
    """Run the layers on a sample on device `meta`; return the operators and the memory of each.

    Args:
        sample: The sample, whose batch size is the micro-batch size.
        module: The layers.
        alike: A cache of counts.
    """
    names = list(module._modules)
    tied = tied_parameters(module)
    storages = StorageNumbers(len(tensors_of(sample)))
    measure_count = partial(count_layer, names)

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


def _empty(sample: TensorOrTensors, size: int, split: Sequence[bool] | None) -> TensorOrTensors:
    """Return an input on `meta` like the given one, `sample`, but with a batch size of `size`.

    `split` says for each tensor whether it has a batch dimension. With `None`, all of them have
    one.
    """

    def empty(x: Tensor, grows: bool = True) -> Tensor:
        shape = (size, *x.shape[1:]) if grows else x.shape
        return torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)

    if isinstance(sample, Tensor):
        return empty(sample)
    return like(sample, [*map(empty, sample, split or [True] * len(sample))])
