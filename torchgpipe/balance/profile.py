"""Measure each layer: the seconds of its forward and backward, or its bytes for a micro-batch.

The layers run one after another, each on the outputs and skips of the layers before it. These
tensors are detached from the earlier layers' autograd graph. A detached tensor requires grad if the
original does, so that the layer does the same backward as in training. Only a copy of the layer
runs, so that the module does not change. One copy exists at a time, so that the device needs memory
for only one layer.
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
from torchgpipe.task.guards.cast_cache import without_cast_cache
from torchgpipe.tensors import accelerator
from torchgpipe.tensors.microbatch import (
    TensorOrTensors,
    check,
    in_form,
    mapped,
    scatter,
    tensors_of,
)
from torchgpipe.trace.parts import as_tensors, taken_apart
from torchgpipe.trace.sequential import batched, flat

T = TypeVar("T")

RUNS_PER_COPY = 3
"""How often each copy is timed. With fewer runs, copying could take most of the timeout."""


def profile_times(
    module: nn.Sequential, sample: TensorOrTensors, timeout: float, device: torch.device
) -> list[float]:
    """Return for each layer the median seconds of its forward and backward together.

    Args:
        module: The layers.
        sample: An input of the first layer.
        timeout: The seconds after which no further measurement starts, once every layer has been
            timed.
        device: Where the layers run.
    """
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
            measurements = rehearse(module, sample, device, measure)
            for measured, runs in zip(seconds, measurements, strict=True):
                measured += runs
                if perf_counter() >= deadline and all(seconds):
                    return list(map(median, seconds))


def profile_sizes(
    module: nn.Sequential,
    input: TensorOrTensors,
    chunks: int,
    param_scale: float,
    device: torch.device,
) -> list[float]:
    """Return for each layer the sum of its bytes for one micro-batch and for its parameters.

    Args:
        module: The layers.
        input: A mini-batch.
        chunks: How many micro-batches the mini-batch is split into.
        param_scale: How many bytes of memory each byte of parameters takes.
        device: Where the layers run.
    """

    def measure(rehearsal: Rehearsal) -> float:
        kept = _kept_bytes(rehearsal)
        parameters = sum(x.nbytes for x in rehearsal.layer.parameters())
        return kept + param_scale * parameters

    micro_batches = scatter(input, chunks, batched(module))
    with undisturbed(device):
        return list(rehearse(module, micro_batches[0], device, measure))


@dataclass(eq=False)
class Rehearsal:
    """A layer to measure: its inputs, the copy that runs in its place, and the last run's results.

    Attributes:
        original: The layer itself. It never runs; only its copy does.
        value: The layer's input. Every run gets a copy of it.
        skips: The skips that the layer pops. Every run gets copies of them.
        make: A function that makes the copy of the layer. It is called when the copy is first
            needed.
        index: The number of the layer.
        output: The output of the last run.
        scope: The skips that the last run stashed.
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
        """The copy of the layer that runs."""
        return self.make()

    def prepare(self) -> TensorOrTensors:
        """Prepare a run: delete the last results, copy the skips, return a copy of the input."""
        self.output = ()
        self.scope = {}
        for key, x in self.skips.items():
            self.scope[key] = None if x is None else _fresh(x)
        return mapped(_fresh, self.value)

    def forward(self, value: TensorOrTensors) -> None:
        """Run the layer's copy on an input that `prepare` has returned."""
        with skip_scope(self.scope):
            self.output = as_tensors(self.layer(in_form(value)))
        check(self.output, f"the output of layer {self.index}")

    def saved(self, value: TensorOrTensors) -> dict[int, torch.UntypedStorage]:
        """Run the layer's copy; map ids to the storages that autograd has saved in this run."""
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(x: Tensor) -> Tensor:
            if x.layout is torch.strided:
                storage = x.untyped_storage()
                kept[id(storage)] = storage
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            self.forward(value)
        return kept

    def results(self) -> list[Tensor]:
        """Return the tensors that the last run returned or stashed."""
        stashed = [x for x in self.scope.values() if x is not None]
        return [*tensors_of(self.output), *stashed]


def checked_sample(module: nn.Sequential, sample: TensorOrTensors, done: str) -> TensorOrTensors:
    """Check that a module can be profiled with a sample, and return the sample's tensors.

    Args:
        module: The layers.
        sample: An input, with the structure that the layers take.
        done: What the caller will do with the module, for the error message: "balanced", for
            example.

    Raises:
        TypeError: If an argument has a wrong type, or a skip is not stashed once and popped once.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"only an nn.Sequential can be {done}, but got {type(module).__name__}; "
            "torchgpipe.sequential(module, sample) turns any module into one"
        )
    sample = taken_apart(flat(module, sample))
    check(sample)
    verify_skippables(module)
    return sample


def rehearse(
    module: nn.Sequential,
    sample: TensorOrTensors,
    device: torch.device,
    measure: Callable[[Rehearsal], T],
) -> Iterator[T]:
    """Call `measure` for one layer after another, and yield what it returns for each layer.

    Args:
        module: The layers.
        sample: An input of the first layer.
        device: Where the layers run.
        measure: A function that takes a layer as a `Rehearsal`, runs it at least once, and returns
            a measurement. The output of the last run becomes the input of the next layer.
    """

    def cut_off(x: Tensor) -> Tensor:
        return x.detach().to(device).requires_grad_(x.requires_grad)

    value = mapped(cut_off, sample)
    waiting: Scope = {}
    for index, layer in enumerate(module):
        _, pops = skips_of(layer)
        skips: Scope = {}
        for key in pops:
            if key in waiting:
                skips[key] = waiting.pop(key)
        make = functools.partial(placed_copy, module, index, device)
        rehearsal = Rehearsal(layer, value, skips, make, index)
        measurement = measure(rehearsal)
        value = mapped(cut_off, rehearsal.output)
        waiting.update(
            {key: None if x is None else cut_off(x) for key, x in rehearsal.scope.items()}
        )
        # The device may have room for only one layer, so no variable may keep this layer's tensors.
        del rehearsal, skips
        yield measurement


def placed_copy(module: nn.Sequential, index: int, device: torch.device) -> nn.Module:
    """Copy layer number `index` of the module to the device, for training.

    Running the copy never changes the original.

    Args:
        module: The model. If it is in training mode, each part of the copy keeps its own mode.
            Otherwise, the whole copy is set to training mode.
        index: The index of the layer in the model.
        device: The device of the copy.

    Raises:
        TypeError: If the layer cannot be copied.
    """
    original = module[index]
    # copy.deepcopy refuses tensors with an autograd graph, such as those that
    # torch.nn.utils.weight_norm keeps as attributes of a module. So such tensors are copied
    # beforehand, without their graph, and copy.deepcopy is given the copies.
    copies: dict[int, Tensor] = {}
    for submodule in original.modules():
        for x in vars(submodule).values():
            if isinstance(x, Tensor) and not x.is_leaf:
                copies[id(x)] = x.detach().clone()
    try:
        layer = copy.deepcopy(original, copies)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            f"layer {index} ({type(original).__name__}) cannot be copied to be profiled: {error}; "
            "make copy.deepcopy work on the layer, or choose the balance by hand"
        ) from error
    layer = _placed(layer, device)
    # If the module is in training mode, submodules that are in eval mode stay in eval mode.
    return layer if module.training else layer.train()


def time_forward(rehearsal: Rehearsal, device: torch.device) -> float:
    """Run forward once; return its seconds."""
    value = rehearsal.prepare()
    _ = rehearsal.layer  # The copy is made here, so that its time does not count.
    return seconds_of(lambda: rehearsal.forward(value), device)


def time_run(rehearsal: Rehearsal, device: torch.device) -> tuple[float, float]:
    """Run a layer's forward and backward once; return the seconds of each of the two."""
    forward = time_forward(rehearsal, device)
    roots = [x for x in rehearsal.results() if x.requires_grad]
    gradients = list(map(torch.ones_like, roots))
    if not roots:
        return forward, 0.0
    return forward, seconds_of(lambda: torch.autograd.backward(roots, gradients), device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Call `work`, and return the seconds until the device has finished what `work` started."""
    synchronize(device)
    start = perf_counter()
    work()
    synchronize(device)
    return perf_counter() - start


def _kept_bytes(rehearsal: Rehearsal) -> int:
    """Run a layer; return the bytes of tensors that its forward keeps for backward or later layers.

    The layer's input, the skips that it pops, its parameters and its buffers do not count.
    """
    value = rehearsal.prepare()
    entering = [*tensors_of(value), *rehearsal.results()]
    kept = rehearsal.saved(value)
    for x in rehearsal.results():
        if x.layout is torch.strided:
            storage = x.untyped_storage()
            kept[id(storage)] = storage
    layer = rehearsal.layer
    for x in (*entering, *layer.parameters(), *layer.buffers()):
        if x.layout is torch.strided:
            kept.pop(id(x.untyped_storage()), None)
    return sum(storage.nbytes() for storage in kept.values())


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Enable gradients within this context, even under `no_grad`; then restore the random state.

    Autocast's cache is off. Otherwise, it would keep converted weights of all copies of layers
    until the caller's autocast ends.
    """
    devices = accelerator.with_generators([device])
    with (
        torch.random.fork_rng(devices),
        torch.inference_mode(False),
        torch.enable_grad(),
        without_cast_cache(),
    ):
        yield


def _placed(layer: nn.Module, device: torch.device) -> nn.Module:
    """Move the copy of a layer to a device, and return the copy.

    Tensors on `meta` have no values. If the layer has such tensors, and is moved to a real device,
    its parameters and buffers get new values: ones, or random numbers with such a variance that
    activations neither grow nor shrink much.
    """
    held = [*layer.parameters(), *layer.buffers()]
    if device.type == "meta" or not any(x.is_meta for x in held):
        return layer.to(device)
    layer.to_empty(device=device)
    with torch.no_grad():
        for x in (*layer.parameters(), *layer.buffers()):
            if x.is_floating_point() and x.dim() > 1:
                variance = 2 * len(x) / max(1, x.numel())
                x.normal_(std=variance**0.5)
            else:
                x.fill_(1)
    return layer


def _fresh(x: Tensor) -> Tensor:
    """Return a copy that a layer may change in place.

    Autograd forbids changing a leaf tensor that requires grad in place. The copy requires grad if
    the original does, but it is not a leaf, so it may be changed.
    """
    return x.detach().requires_grad_(x.requires_grad).clone()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
