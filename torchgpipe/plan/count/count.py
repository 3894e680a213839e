"""Count what every layer costs, on the `meta` device, where nothing is computed and no memory is needed.

    counts = count(model, sample)     # a sample of any batch size: only its shape matters
    layers = counts.at(16)            # of micro-batches of 16

Layers run one by one as copies (see `torchgpipe.balance.profile`). What they do grows along a straight line with the
micro-batch's size: a fixed part for the parameters, and as much again for each sample. So two sizes are counted, and
any other follows. Layers that multiply samples with each other are an exception (see `growth`).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.balance.profile import Rehearsal, rehearse, undisturbed
from torchgpipe.caught import caught
from torchgpipe.plan.count.as_on import as_on
from torchgpipe.plan.count.counter import Counter
from torchgpipe.plan.count.footprint import Footprint, LayerCount
from torchgpipe.plan.count.growth import between, check_growth
from torchgpipe.plan.count.known import Alike, Remembered
from torchgpipe.plan.count.measure import StorageNumbers, measure_footprint
from torchgpipe.plan.count.task_bytes import TaskBytes, task_bytes
from torchgpipe.plan.hardware.operators import Operator, dtype_of
from torchgpipe.tensors._autograd import is_compiled
from torchgpipe.tensors.microbatch import TensorOrTensors, tensors_of
from torchgpipe.trace.layer import batched

SIZES = (2, 4)
"""The micro-batch sizes that are counted; not 1, which batch normalization may refuse."""
ADVICE = (
    "check the sample's shape and type; layers are counted on device 'meta', where tensors have no values, so one that "
    "needs values cannot be: find the balance with torchgpipe.balance, which runs the layers"
)


@dataclass(frozen=True)
class Counts:
    """A model's layers at two micro-batch sizes, and at any other by the straight line through these."""

    low: tuple[LayerCount, ...]
    high: tuple[LayerCount, ...]
    held: tuple[tuple[Footprint, ...], tuple[Footprint, ...]] = field(repr=False)
    """Their footprints, for both."""
    input: float
    """Bytes of one sample of the model's input."""
    copied: bool = True
    """Whether a partition gets copies of what others hand it; CPU devices share their memory."""
    known: dict[int, tuple[Footprint, ...]] = field(default_factory=dict, repr=False, compare=False)
    """Footprints that were worked out already, by micro-batch size."""
    tasks: dict[tuple[int, int, int, bool], TaskBytes] = field(
        default_factory=dict, repr=False, compare=False
    )
    """And bytes of tasks, by micro-batch size, first layer, the one after the last, and whether it is checkpointed."""

    def at(self, size: int) -> tuple[LayerCount, ...]:
        """Return the layers' counts for micro-batches of `size` samples."""
        return _line(self.low, self.high, size)  # type: ignore[no-any-return]

    def footprints(self, size: int) -> tuple[Footprint, ...]:
        """Return what the layers hold for micro-batches of `size` samples."""
        if size not in self.known:
            self.known[size] = _line(*self.held, size)
        return self.known[size]

    def task(self, size: int, start: int, stop: int, *, checkpoint: bool) -> TaskBytes:
        """Return the bytes of a micro-batch of `size` samples on the partition of layers `start` … `stop` - 1."""
        key = (size, start, stop, checkpoint)
        if key not in self.tasks:
            footprints = self.footprints(size)
            self.tasks[key] = task_bytes(
                footprints, start, stop, checkpoint=checkpoint, copied=self.copied
            )
        return self.tasks[key]

    def __len__(self) -> int:
        return len(self.low)


def _line(low: Any, high: Any, size: int) -> Any:
    """Return what is as `low` and `high`, which are for micro-batches of `SIZES`, for those of `size` samples."""
    return between(low, high, (size - SIZES[0]) / (SIZES[1] - SIZES[0]), {})


def count(
    module: nn.Sequential,
    sample: TensorOrTensors,
    *,
    device: str = "cuda",
    autocast: torch.dtype | None = None,
    alike: Alike | None = None,
) -> Counts:
    """Count the layers of `module` for inputs like `sample`, whose batch size does not matter.

    Counted are the kernels of a type of device, "cuda" or "cpu". They run under `autocast` to this type of numbers; by
    default, under what is enabled for that device where it is called. With one `alike` for several models, layers that
    are in two of them are counted once.

    Raises:
        TypeError: a layer cannot be copied.
        ValueError: a layer fails, is compiled, or runs different operators for different batch sizes; the message
            names it.

    Warns:
        UserWarning: a layer does more for every further sample, so that larger micro-batches are counted too low.
    """
    _refuse_compiled(module)
    alike = alike or Alike()
    with undisturbed(torch.device("meta")), Remembered(), as_on(device, autocast):
        alike.begin(module, device)
        (low, low_held), (high, high_held) = (
            _at(_empty(sample, size, batched(module)), module, alike) for size in SIZES
        )
    check_growth(low, high, SIZES)
    one = sum(x[:1].numel() * x.element_size() for x in tensors_of(sample))
    return Counts(low, high, (low_held, high_held), float(one), device != "cpu")


def _at(
    sample: TensorOrTensors, module: nn.Sequential, alike: Alike
) -> tuple[tuple[LayerCount, ...], tuple[Footprint, ...]]:
    """Return what the layers do with a sample on `meta`, and what they hold."""
    names, storages = list(module._modules), StorageNumbers(len(tensors_of(sample)))

    def does(layer: Rehearsal) -> LayerCount:
        return alike.once(functools.partial(_count_layer, names), layer)._replace(
            name=names[layer.index]
        )

    def holds(layer: Rehearsal) -> Footprint:
        needs = gives[layer.index], gives[layer.index + 1]
        return storages.placed(
            alike.once(functools.partial(measure_footprint, *needs), layer, needs), layer
        )

    layers = tuple(rehearse(module, sample, torch.device("meta"), does))
    gives = (*(layer.gives for layer in layers), None)
    return layers, tuple(rehearse(module, sample, torch.device("meta"), holds))


def _refuse_compiled(module: nn.Sequential) -> None:
    for name, layer in module.named_children():
        for part in layer.modules():
            if is_compiled(part):
                raise ValueError(
                    f"layer {name!r} is compiled by torch.compile, and how it fuses operators cannot be counted: "
                    "count or plan the layers before they are compiled"
                )


def _count_layer(names: Sequence[str], rehearsal: Rehearsal) -> LayerCount:
    """Count one layer, of those with these names.

    Raises:
        ValueError: in place of any exception of the layer, in one line that names it.
    """
    value = rehearsal.prepare()
    reached: set[int] = set()
    given = [_Entry.apply(reached, i, x) for i, x in enumerate(tensors_of(value))]
    rehearsal.scope = {
        k: None if x is None else _Entry.apply(reached, -1, x) for k, x in rehearsal.scope.items()
    }
    layer = rehearsal.layer
    forward, backward = Counter(), Counter()
    try:
        with forward:
            rehearsal.forward(given[0] if isinstance(value, Tensor) else tuple(given))
        roots = [x for x in rehearsal.results() if x.requires_grad]
        gradients = [torch.empty_like(x) for x in roots]
        with backward:
            torch.autograd.backward(roots, gradients)
    except Exception as error:
        which = f"layer {rehearsal.index} ({names[rehearsal.index]!r}, {type(rehearsal.original).__name__})"
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        on = ", ".join(f"{tuple(x.shape)} {dtype_of(x)}" for x in tensors_of(value))
        raise ValueError(f"{which} fails on {on}: {first.rstrip('.')}; {ADVICE}") from caught(error)
    trained = [p for p in layer.parameters() if p.requires_grad]
    others = [p for p in layer.parameters() if not p.requires_grad]
    return LayerCount(
        name=names[rehearsal.index],
        forward=tuple(forward.operators),
        backward=tuple(backward.operators),
        accumulate=tuple(
            Operator("elementwise", dtype_of(p), 0.0, 3.0 * p.nbytes) for p in trained
        ),
        output=float(sum(x.nbytes for x in tensors_of(rehearsal.output))),
        parameters=sum(p.nbytes for p in trained),
        parameter_sizes=tuple(p.nbytes for p in trained),
        frozen=sum(x.nbytes for x in (*others, *layer.buffers())),
        gives=tuple(i in reached for i in range(len(given))),
    )


class _Entry(torch.autograd.Function):
    """Let a tensor enter a layer; note that its gradient arrives, and drop that.

    If the tensor were a leaf instead, PyTorch would copy a gradient that the layer passes on unchanged, and the copy
    would be counted, though no step of a pipeline makes it.
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


def _empty(sample: TensorOrTensors, size: int, batched: Sequence[bool] | None) -> TensorOrTensors:
    """Return tensors like the sample's with another batch size, without contents."""

    def empty(x: Tensor, grows: bool = True) -> Tensor:
        shape = (size, *x.shape[1:]) if grows else x.shape
        return torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)

    if isinstance(sample, Tensor):
        return empty(sample)
    return tuple(map(empty, sample, [True] * len(sample) if batched is None else batched))
