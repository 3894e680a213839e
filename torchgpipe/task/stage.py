"""A stage: one partition on its device, with the skip connections that enter and leave it."""

import threading
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.caught import how_many
from torchgpipe.modules import Swap, Swapped, modules_of, modules_of_pipelines
from torchgpipe.random.generators import own_generators, seed_apart
from torchgpipe.skip.layout import Crossing
from torchgpipe.skip.scope import skip_scope
from torchgpipe.skip.skippable import skips_of
from torchgpipe.task.batchnorm import DeferredBatchNorm
from torchgpipe.task.guards.gradients import FirstTask, Needs
from torchgpipe.task.halves import Halves
from torchgpipe.task.turns import Lock, as_one
from torchgpipe.tensors import accelerator
from torchgpipe.tensors._autograd import is_compiled
from torchgpipe.tensors.item import Shared, versions
from torchgpipe.tensors.microbatch import Flat, Form, check, form_of, together
from torchgpipe.trace.parts import as_tensors

_COMPILED = ("_compiled_call_impl", "_compiled", "forward")
"""Names of attributes in which a module or a traced layer can have compiled code."""

_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)

_Locks = weakref.WeakKeyDictionary[nn.Module, Lock]
_OF_TASKS: _Locks = weakref.WeakKeyDictionary()
OF_RUNS: _Locks = weakref.WeakKeyDictionary()
"""The lock that each module has for tasks, and the one for whole runs of pipelines."""

_making = threading.Lock()
_splits = 0
"""How often modules that had a common lock for tasks have got different ones."""


class Stage:
    """A partition on its device, which runs one micro-batch at a time.

    The thread that runs a micro-batch through the layers holds `lock`. A run of the pipeline with
    gradients (all forwards, all backwards, or a whole `step`) holds the locks in `turn` from its
    beginning to its end. If partitions or pipelines share layers, they share these locks, too.

    Args:
        index: The index of the partition in the model.
        partition: The layers.
        device: The device of the layers.

    Attributes:
        away: The parameters of this partition that are on another device, because a partition there
            uses them, too. Each is mapped to the device of this partition.
        runs_later: Whether the device is a GPU, which runs work after the CPU has submitted it.
    """

    def __init__(self, index: int, partition: nn.Module, device: torch.device) -> None:
        self.index = index
        self.partition = partition
        self.device = device
        self.runs_later = device.type == accelerator.KIND
        self.modules: list[nn.Module] = []
        self._seen: list[tuple[object, ...]] = []
        self._seen_compiled: list[object] = []
        self.away: dict[Tensor, torch.device] = {}
        self._first_tasks: dict[tuple[bool, ...], dict[Needs, FirstTask]] = {}
        self._locked: list[nn.Module] = []
        self._own_lock: Lock = threading.RLock()
        self.lock: Lock = self._own_lock
        self._seen_splits = -1
        self.turn: frozenset[Lock]

    def __str__(self) -> str:
        parameters = sum(p.numel() for p in self.partition.parameters())
        layers = how_many(len([*self.partition.children()]), "layer")
        return f"stage {self.index} on {self.device}: {layers}, {parameters:,} parameters"

    def look(self) -> bool:
        """List the partition's modules and buffers; return whether this list has changed."""
        modules = modules_of(self.partition)
        self.generators = own_generators(modules)
        seen: list[tuple[object, ...]] = []
        compiled: list[object] = []
        for m in modules:
            seen.append((m, type(m), *map(id, m._buffers.values())))
            compiled += [m.__dict__.get(name) for name in _COMPILED]
        if self._seen_splits != _splits:
            self._find_lock()
        if seen == self._seen and compiled == self._seen_compiled:
            return False
        if modules != self.modules or compiled != self._seen_compiled:
            self._first_tasks.clear()
        if modules != self.modules:
            self._locked = _with_locks(modules)
            _make_locks_of_tasks(self._locked)
            self._find_lock()
        self.modules, self._seen, self._seen_compiled = modules, seen, compiled
        self.deferred_norms = [m for m in modules if isinstance(m, DeferredBatchNorm)]
        self.attends = any(isinstance(m, _ATTENTION) for m in modules)
        self.compiled = any(is_compiled(m) for m in modules)
        self.all_compiled = all(is_compiled(layer) for layer in self.partition.children())
        self.halves = Halves(modules)
        return True

    def _find_lock(self) -> None:
        """Find the locks of all modules, which another pipeline with another balance may split."""
        with _making:
            self.lock = as_one({_OF_TASKS[m] for m in self._locked} or {self._own_lock})
            self._seen_splits = _splits

    def find_away(self, shared: Collection[Tensor]) -> None:
        """Find this partition's parameters that are on another device.

        Args:
            shared: The parameters that several partitions use. Only these can be elsewhere.
        """
        self.away = {}
        for p in self.partition.parameters():
            if p in shared and _is_away(p, self.device):
                self.away[p] = self.device

    def connect(self, crossings: Sequence[Crossing]) -> None:
        """Find those skip connections of the model that enter or leave this partition.

        Args:
            crossings: All skip connections from one partition to another.
        """
        self.arrivals = [crossing for crossing in crossings if crossing.target == self.index]
        self.departures = [crossing for crossing in crossings if crossing.source == self.index]
        self._keys = tuple(arrival.key for arrival in self.arrivals)
        # Most partitions need no current device, no scope for skips, and no copies of parameters.
        self._special = (
            self.runs_later or bool(self._keys) or any(skips_of(self.partition)) or bool(self.away)
        )

    def first_tasks(self, kind: tuple[bool, ...]) -> dict[Needs, FirstTask]:
        """Return a dictionary that says what the first task of each kind has shown.

        A key says for each input of a task whether the input requires grad. The guard
        `OutputGradients` fills the dictionary.

        Args:
            kind: The training modes of the layers, and the `requires_grad` of the parameters; or
                `()` if layers are compiled. Mini-batches of the same kind get the same dictionary,
                until layers are replaced or compiled.
        """
        return self._first_tasks.setdefault(kind, {})

    def run(self, inputs: Flat, form: Form, shared: Shared = ()) -> tuple[Flat, Form]:
        """Run the layers on a micro-batch and on the skips that enter the partition.

        The caller must hold this stage's `lock`.

        Args:
            inputs: The tensors of the micro-batch, then the skips.
            form: The form of the micro-batch.
            shared: For each input, whether it shares memory with another tensor. The layers must
                not change such an input in place.

        Returns:
            A tuple of tensors (those of the output, then the skips that leave the partition), and
            the form of the output.
        """
        before = versions(inputs) if True in shared else []
        skips: Flat = ()
        if not self._special:
            y = self.partition(inputs[0] if form is Tensor else together(form, inputs))
        else:
            y, skips = self._run_with_skips(inputs, form)
        if before:
            self._check_shared(before, versions(inputs), shared)
        if isinstance(y, Tensor):
            return (y, *skips), Tensor
        y = as_tensors(y)
        check(y, f"output of partition {self.index}")
        return (*y, *skips), form_of(y)

    def _run_with_skips(self, inputs: Flat, form: Form) -> tuple[Any, Flat]:
        count = len(inputs) - len(self._keys)
        arrived = dict(zip(self._keys, inputs[count:], strict=True))
        # The current device matters for layers that create tensors on device "cuda".
        on_device, copies = accelerator.current(self.device), Swapped(self._copies())
        with on_device, copies, skip_scope(arrived) as scope:
            y = self.partition(together(form, inputs[:count]))
            skips = [scope[departure.key] for departure in self.departures]
        return y, tuple(skips)

    def _copies(self) -> list[Swap]:
        """Return the changes that replace parameters on other devices by copies on this device.

        If gradients are on, the layers already have stand-ins for these parameters (detached copies
        on this device). Then the list is empty.
        """
        swaps = []
        for module in self.modules if self.away else ():
            replaced = {}
            for name, p in module._parameters.items():
                if p is not None and p in self.away:
                    replaced[name] = p.detach().to(self.device)
            if replaced:
                parameters = {**module._parameters, **replaced}
                swaps.append(Swap(module.__dict__, "_parameters", parameters))
        return swaps

    def _check_shared(
        self, before: list[int | None], after: list[int | None], shared: Shared
    ) -> None:
        for each, old, new in zip(shared, before, after, strict=True):
            if each and old != new:
                raise RuntimeError(
                    f"partition {self.index} changed an input in place, but a skip or another "
                    "input shares its memory; without a pipeline both would change, but here "
                    "perhaps only one, because tensors are copied between devices; make the layer "
                    "that changes the input out-of-place (inplace=False), or give it a copy "
                    "(x.clone())"
                )


def seed_gpus_apart(stages: Sequence[Stage], placement: Sequence[int]) -> None:
    """Give GPUs different seeds if they have the same seed (see `seed_apart`).

    Args:
        stages: The stages of this process.
        placement: For each stage of the model, the number of its device.
    """
    numbers: dict[torch.device, int] = {}
    for stage in stages:
        if stage.runs_later:
            number = placement[stage.index]
            numbers[stage.device] = min(number, numbers.get(stage.device, number))
    seed_apart(numbers)


def _is_away(p: Tensor, device: torch.device) -> bool:
    """Return whether the parameter `p` is on another device than `device`."""
    if p.device.type != device.type:
        return True
    # The number of a CPU has no meaning, and its tensors have none.
    return p.device.index is not None and p.device != device


def locks_of(modules: list[nn.Module], known: _Locks) -> frozenset[Lock]:
    """Return the locks that a thread has to hold while a run uses the modules of a pipeline.

    Args:
        modules: The modules. Those that have no lock yet get a common lock.
        known: The lock of each module that has one. The new lock is added to this dictionary.
    """
    own = _with_locks(modules)
    with _making:
        found = {known[m] for m in own if m in known} or {threading.RLock()}
        first = min(found, key=id)
        for module in own:
            known.setdefault(module, first)
        return frozenset(found)


def _with_locks(modules: list[nn.Module]) -> list[nn.Module]:
    """Return the modules that need a lock.

    A module without parameters and buffers needs no lock. So if several partitions use the same
    activation layer, they can run it at the same time.

    A layer can itself be a pipeline. The modules of this inner pipeline are left out: the inner
    pipeline's worker threads take the locks of these modules, while a task of the outer pipeline
    waits for these threads. If the task held the same locks, the task and the threads would wait
    for each other forever.
    """
    inner = modules_of_pipelines(modules)
    return [m for m in modules if (m._parameters or m._buffers) and m not in inner]


def _make_locks_of_tasks(modules: list[nn.Module]) -> None:
    """Give a partition's modules a lock for tasks, which no other module has.

    If some of the modules have a common lock with modules of other partitions, as an earlier
    pipeline had another balance, they get a new lock. Otherwise, partitions would wait for each
    other although they have no layer in common.
    """
    global _splits
    with _making:
        found: dict[Lock, set[nn.Module]] = {}
        new = threading.RLock()
        for module in modules:
            if module in _OF_TASKS:
                found.setdefault(_OF_TASKS[module], set()).add(module)
            else:
                _OF_TASKS[module] = new
        shared = {lock for m, lock in _OF_TASKS.items() if lock in found and m not in found[lock]}
        for lock in shared:
            _OF_TASKS.update(dict.fromkeys(found[lock], threading.RLock()))
            _splits += 1
