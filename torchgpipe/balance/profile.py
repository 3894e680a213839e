"""Profile a sequence layer by layer: seconds of forward and backward, or bytes for a micro-batch.

Every layer runs on what the layers before it put out, skips included, cut off from their graph. An input requires grad
if it would in training, so that a frozen layer costs no backward. A layer runs as a copy, one at a time, so that the
module stays untouched and need not fit the device.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor, nn

from torchgpipe.skip import verify_skippables
from torchgpipe.skip.scope import Scope, skip_scope
from torchgpipe.skip.skippable import skips_of
from torchgpipe.tensors.microbatch import TensorOrTensors, check, mapped, scatter, tensors_of
from torchgpipe.trace.layer import batched, flat

T = TypeVar("T")

RUNS_PER_COPY = 3
"""Timed runs of a copy, so that copying does not take most of the timeout; fewer once that has passed."""


def profile_times(
    module: nn.Sequential, sample: TensorOrTensors, timeout: float, device: torch.device
) -> list[float]:
    """Return the median seconds of every layer's forward plus backward, from rounds over all layers."""
    seconds: list[list[float]] = [[] for _ in module]
    deadline = perf_counter() + timeout

    def measure(rehearsal: Rehearsal) -> list[float]:
        time_run(rehearsal, device)  # a warm-up
        runs = [sum(time_run(rehearsal, device))]
        while len(runs) < RUNS_PER_COPY and perf_counter() < deadline:
            runs.append(sum(time_run(rehearsal, device)))
        return runs

    with undisturbed(device):
        while True:
            for measured, runs in zip(
                seconds, rehearse(module, sample, device, measure), strict=True
            ):
                measured += runs
                if perf_counter() >= deadline and all(seconds):
                    return [median(measured) for measured in seconds]


def profile_sizes(
    module: nn.Sequential,
    input: TensorOrTensors,
    chunks: int,
    param_scale: float,
    device: torch.device,
) -> list[float]:
    """Return every layer's bytes for one micro-batch plus `param_scale` times the bytes of its parameters."""

    def measure(rehearsal: Rehearsal) -> float:
        return _kept_bytes(rehearsal) + param_scale * sum(
            x.nbytes for x in rehearsal.layer.parameters()
        )

    with undisturbed(device):
        return list(rehearse(module, scatter(input, chunks, batched(module))[0], device, measure))


@dataclass(eq=False)
class Rehearsal:
    """Layer number `index` and what enters it. A copy of the layer runs; `make` makes it when it is first needed.

    Runs get copies of `value` and `skips`. The last one has put out `output`, and stashed `scope`.
    """

    original: nn.Module
    value: TensorOrTensors
    skips: Scope
    make: Callable[[], nn.Module]
    index: int = 0
    output: TensorOrTensors = ()
    scope: Scope = field(default_factory=dict)

    @functools.cached_property
    def layer(self) -> nn.Module:
        """The copy."""
        return self.make()

    def prepare(self) -> TensorOrTensors:
        """Forget the last run, and return the input for the next."""
        self.output = ()
        self.scope = {key: None if x is None else _fresh(x) for key, x in self.skips.items()}
        return mapped(_fresh, self.value)

    def forward(self, value: TensorOrTensors) -> None:
        """Run the layer on what `prepare` returned."""
        with skip_scope(self.scope):
            self.output = self.layer(value)

    def saved(self, value: TensorOrTensors) -> dict[int, torch.UntypedStorage]:
        """Run the layer as `forward` does; return the storages that its graph keeps, by their ids."""
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(x: Tensor) -> Tensor:
            if x.layout is torch.strided:
                kept[id(x.untyped_storage())] = x.untyped_storage()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            self.forward(value)
        return kept

    def results(self) -> list[Tensor]:
        """Return the tensors that the last run put out or stashed."""
        return [*tensors_of(self.output), *(x for x in self.scope.values() if x is not None)]


def checked_sample(module: nn.Sequential, sample: TensorOrTensors, done: str) -> TensorOrTensors:
    """Return the tensors of a sample for `module`; refuse layers or a sample that cannot be profiled.

    `done` is what is to be done with the layers, for the message: "balanced".

    Raises:
        TypeError: a wrong type, or skips that do not match.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"only an nn.Sequential can be {done}, got {type(module).__name__}")
    sample = flat(module, sample)
    check(sample)
    verify_skippables(module)
    return sample


def rehearse(
    module: nn.Sequential,
    sample: TensorOrTensors,
    device: torch.device,
    measure: Callable[[Rehearsal], T],
) -> Iterator[T]:
    """Measure the layers in turn; `measure` runs a layer once or more, and its last run feeds the next."""

    def cut_off(x: Tensor) -> Tensor:
        return x.detach().to(device).requires_grad_(x.requires_grad)

    value = mapped(cut_off, sample)
    waiting: Scope = {}
    for index, layer in enumerate(module):
        skips = {key: waiting.pop(key) for key in skips_of(layer)[1] if key in waiting}
        rehearsal = Rehearsal(
            layer, value, skips, functools.partial(placed_copy, module, index, device), index
        )
        measurement = measure(rehearsal)
        check(rehearsal.output, f"the output of layer {index}")
        value = mapped(cut_off, rehearsal.output)
        waiting.update(
            {key: None if x is None else cut_off(x) for key, x in rehearsal.scope.items()}
        )
        # The device may have room for only one layer.
        del rehearsal, skips
        yield measurement


def placed_copy(module: nn.Sequential, index: int, device: torch.device) -> nn.Module:
    """Copy a layer to the device, for training; nothing that the copy does reaches the original."""
    original = module[index]
    # deepcopy refuses tensors that have a graph, which torch.nn.utils.weight_norm keeps as attributes.
    held = [
        x
        for each in original.modules()
        for x in vars(each).values()
        if isinstance(x, Tensor) and not x.is_leaf
    ]
    try:
        layer = copy.deepcopy(original, {id(x): x.detach().clone() for x in held})
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            f"layer {index} ({type(original).__name__}) cannot be copied to be profiled: {error}; "
            "make copy.deepcopy work on it, or give the balance by hand"
        ) from error
    layer = _placed(layer, device)
    # Where a training module has parts frozen by eval(), they stay frozen.
    return layer if module.training else layer.train()


def time_forward(rehearsal: Rehearsal, device: torch.device) -> float:
    """Run forward once; return its seconds."""
    value, _ = rehearsal.prepare(), rehearsal.layer  # a copy, which is not to be timed
    return seconds_of(lambda: rehearsal.forward(value), device)


def time_run(rehearsal: Rehearsal, device: torch.device) -> tuple[float, float]:
    """Run forward and backward once; return the seconds of each."""
    forward = time_forward(rehearsal, device)
    roots = [x for x in rehearsal.results() if x.requires_grad]
    gradients = [torch.ones_like(x) for x in roots]
    if not roots:
        return forward, 0.0
    return forward, seconds_of(lambda: torch.autograd.backward(roots, gradients), device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Do some work, and return the seconds that the device takes for it alone."""
    synchronize(device)
    start = perf_counter()
    work()
    synchronize(device)
    return perf_counter() - start


def _kept_bytes(rehearsal: Rehearsal) -> int:
    """Count the bytes that the layer's forward made for its backward and for later layers."""
    value = rehearsal.prepare()
    entering = [*tensors_of(value), *rehearsal.results()]
    kept = rehearsal.saved(value)
    results = [x.untyped_storage() for x in rehearsal.results() if x.layout is torch.strided]
    kept.update((id(storage), storage) for storage in results)
    for x in (*entering, *rehearsal.layer.parameters(), *rehearsal.layer.buffers()):
        if x.layout is torch.strided:
            kept.pop(id(x.untyped_storage()), None)
    return sum(storage.nbytes() for storage in kept.values())


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Record gradients whatever the caller's mode, and leave the random state as it was."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        yield


def _placed(layer: nn.Module, device: torch.device) -> nn.Module:
    """Move a layer's copy to the device; where it is on `meta`, give it contents that neither grow nor vanish."""
    if device.type == "meta" or not any(x.is_meta for x in (*layer.parameters(), *layer.buffers())):
        return layer.to(device)
    layer.to_empty(device=device)
    with torch.no_grad():
        for x in (*layer.parameters(), *layer.buffers()):
            if x.is_floating_point() and x.dim() > 1:
                x.normal_(std=(2 * len(x) / max(1, x.numel())) ** 0.5)
            else:
                x.fill_(1)
    return layer


def _fresh(x: Tensor) -> Tensor:
    """Copy a tensor for one run; what requires grad is no leaf, so that a layer may work in place."""
    return x.detach().requires_grad_(x.requires_grad).clone()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
