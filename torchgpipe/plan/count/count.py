"""Count what every layer costs, on the `meta` device, where nothing is computed and no memory is needed.

    counts = count(model, sample)     # a sample of any batch size: only its shape matters
    layers = counts.at(16)            # of micro-batches of 16

Layers run one by one as copies (see `torchgpipe.balance.profile`). What they do grows along a straight line with the
micro-batch's size: a fixed part for the parameters, and as much again for each sample. So two sizes are counted, and
any other follows. Layers that multiply samples with each other are an exception (see `growth`).
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.balance.profile import Rehearsal, rehearse, undisturbed
from torchgpipe.caught import caught
from torchgpipe.plan.count.alike import Alike
from torchgpipe.plan.count.as_on import as_on
from torchgpipe.plan.count.counter import Counter
from torchgpipe.plan.count.footprint import NOTHING, Footprint, LayerCount, Stashed
from torchgpipe.plan.count.growth import between, check_growth
from torchgpipe.plan.count.measure import StorageNumbers, measure_footprint
from torchgpipe.plan.count.remembered import Remembered
from torchgpipe.plan.count.task_bytes import TaskBytes, task_bytes
from torchgpipe.plan.hardware.operators import Operator, dtype_of
from torchgpipe.skip.scope import SkipKey
from torchgpipe.skip.skippable import skips_of
from torchgpipe.tensors.microbatch import TensorOrTensors, check, tensors_of
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
    input: float
    """Bytes of one sample of the model's input."""
    copied: bool = True
    """Whether a partition gets copies of what others hand it; CPU devices share their memory."""
    known: dict[int, list[Footprint]] = field(default_factory=dict, repr=False, compare=False)
    """Footprints that were worked out already, by micro-batch size."""
    tasks: dict[tuple[int, int, int, bool], TaskBytes] = field(default_factory=dict, repr=False, compare=False)
    """And bytes of tasks, by micro-batch size, first layer, the one after the last, and whether it is checkpointed."""

    def footprints(self, size: int) -> list[Footprint]:
        """Return what the layers hold for micro-batches of `size` samples."""
        if size not in self.known:
            pairs = zip(self.low, self.high, strict=True)
            self.known[size] = self._line(size, [(a.footprint, b.footprint) for a, b in pairs])
        return self.known[size]

    def task(self, size: int, start: int, stop: int, *, checkpoint: bool) -> TaskBytes:
        """Return the bytes of a micro-batch of `size` samples on the partition of layers `start` … `stop` - 1."""
        key = (size, start, stop, checkpoint)
        if key not in self.tasks:
            footprints = self.footprints(size)
            self.tasks[key] = task_bytes(footprints, start, stop, checkpoint=checkpoint, copied=self.copied)
        return self.tasks[key]

    def at(self, size: int) -> list[LayerCount]:
        """Return the layers' counts for micro-batches of `size` samples, without footprints."""
        pairs = zip(self.low, self.high, strict=True)
        return self._line(size, [(a._replace(footprint=NOTHING), b._replace(footprint=NOTHING)) for a, b in pairs])

    def _line(self, size: int, pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
        low, high = SIZES
        known: dict[tuple[int, int], Any] = {}
        return [between(a, b, (size - low) / (high - low), known) for a, b in pairs]

    def __len__(self) -> int:
        return len(self.low)


def count(
    module: nn.Sequential,
    sample: TensorOrTensors,
    *,
    memory: bool = True,
    device: str = "cuda",
    autocast: torch.dtype | None = None,
    alike: Alike | None = None,
) -> Counts:
    """Count the layers of `module` for inputs like `sample`, whose batch size does not matter.

    Counted are the kernels of a type of device: "cuda", "cpu", or "meta" itself, which has no fused ones. They run
    under `autocast` to this type of numbers; by default, under what is enabled for that device where it is called.
    Without `memory` footprints are left out, which are most of the work. With one `alike` for several models, layers
    that are in two of them are counted once.

    Raises:
        TypeError: a wrong type, or a layer that cannot be copied.
        ValueError: a layer fails, is compiled, or runs different operators for different batch sizes; the message
            names it.

    Warns:
        UserWarning: a layer does more for every further sample, so that larger micro-batches are counted too low.
    """
    check(sample)
    _refuse_compiled(module)
    meta = torch.device("meta")
    found: list[list[LayerCount]] = []
    numbers = {key: i for i, key in enumerate(skips_of(module)[0])}
    names = list(module._modules)
    remembered, alike = Remembered(), alike or Alike()
    alike.begin(module, device, autocast)
    for size in SIZES:
        given = _empty(sample, size, batched(module))
        with undisturbed(meta), remembered, as_on(device, autocast):
            counted = rehearse(module, given, meta, functools.partial(_count_layer, names, numbers, alike))
            layers = [x._replace(name=name) for name, x in zip(names, counted, strict=True)]
            if memory:
                storages = StorageNumbers(alike, len(tensors_of(given)))
                footprints = rehearse(module, given, meta, functools.partial(measure_footprint, layers, storages))
                layers = [x._replace(footprint=y) for x, y in zip(layers, footprints, strict=True)]
            found.append(layers)
    check_growth(found[0], found[1], SIZES)
    one = sum(x[:1].numel() * x.element_size() for x in tensors_of(sample))
    return Counts(tuple(found[0]), tuple(found[1]), float(one), device != "cpu")


def _refuse_compiled(module: nn.Sequential) -> None:
    for name, layer in module.named_children():
        for part in layer.modules():
            by_call = getattr(part, "_compiled_call_impl", None) is not None
            if by_call or hasattr(part, "_orig_mod") or hasattr(part.forward, "_torchdynamo_orig_callable"):
                raise ValueError(
                    f"layer {name!r} is compiled by torch.compile, and how it fuses operators cannot be counted: "
                    "count or plan the layers before they are compiled"
                )


def _count_layer(
    names: Sequence[str], numbers: Mapping[SkipKey, int], alike: Alike, rehearsal: Rehearsal
) -> LayerCount:
    """Count one layer, but leave out its name; one like an earlier layer is not run again. `numbers` are the skips'."""
    key = alike.behaviour(rehearsal.original, rehearsal.value)
    if key is not None and key in alike.counts:
        found, rehearsal.output = alike.counts[key]
        return found
    which = f"layer {rehearsal.index} ({names[rehearsal.index]!r}, {type(rehearsal.original).__name__})"
    value = rehearsal.prepare()
    reached: set[int] = set()
    given = [_Entry.apply(reached, i, x) for i, x in enumerate(tensors_of(value))]
    rehearsal.scope = {k: None if x is None else _Entry.apply(reached, -1, x) for k, x in rehearsal.scope.items()}
    layer = rehearsal.layer
    entering = set(rehearsal.scope)
    with _naming_layer(which, value), Counter() as forward:
        rehearsal.forward(given[0] if isinstance(value, Tensor) else tuple(given))
    stashes = tuple(Stashed(numbers[key], 0.0 if x is None else float(x.nbytes)) for key, x in rehearsal.scope.items())
    nbytes = float(sum(x.nbytes for x in tensors_of(rehearsal.output)))
    roots = [x for x in rehearsal.results() if x.requires_grad]
    backward = Counter()
    if roots:
        gradients = [torch.empty_like(x) for x in roots]
        with _naming_layer(which, value), backward:
            torch.autograd.backward(roots, gradients)
    gives = tuple(i in reached for i in range(len(given)))
    trained = [p for p in layer.parameters() if p.requires_grad]
    others = [p for p in layer.parameters() if not p.requires_grad]
    accumulate = tuple(Operator("elementwise", dtype_of(p), 0.0, 3.0 * p.nbytes) for p in trained)
    counted = LayerCount(
        name="",
        forward=tuple(forward.operators),
        backward=tuple(backward.operators),
        accumulate=accumulate,
        output=nbytes,
        stashes=stashes,
        pops=tuple(numbers[key] for key in entering if key in numbers),
        parameters=sum(p.nbytes for p in trained),
        parameter_sizes=tuple(p.nbytes for p in trained),
        frozen=sum(x.nbytes for x in (*others, *layer.buffers())),
        gives=gives,
    )
    if key is not None:
        alike.counts[key] = counted, rehearsal.output
    return counted


@contextmanager
def _naming_layer(which: str, value: TensorOrTensors) -> Iterator[None]:
    """Turn whatever a layer raises on this input into one line that names it.

    Raises:
        ValueError: in place of any exception.
    """
    try:
        yield
    except Exception as error:
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        given = ", ".join(f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in tensors_of(value))
        raise ValueError(f"{which} fails on {given}: {first.rstrip('.')}; {ADVICE}") from caught(error)


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
