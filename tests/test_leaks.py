"""What a pipeline keeps: no tensor and no thread beyond its life, and no activation that checkpointing saves."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchgpipe import GPipe, is_recomputing
from torchgpipe.observe import Task
from torchgpipe.skip import pop, skippable, stash

from .plain import piped

# Many samples of few features, so that activations outweigh the gradients of weights.
WIDTH = 8
BATCH, CHUNKS = 512, 8
# Bytes of a tensor of WIDTH features for each sample of a micro-batch.
UNIT = BATCH // CHUNKS * WIDTH * torch.float32.itemsize


@pytest.fixture(scope="module", autouse=True)
def only_what_the_tests_make() -> Iterator[None]:
    """Set aside what is there already, so that a collection takes milliseconds."""
    # What PyTorch imports when it is first used.
    model = pipeline(layers())
    model.observer = Ledger()
    model(torch.randn(BATCH, WIDTH)).sum().backward()
    del model
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Ledger:
    """Count the bytes of those tensors alive that operators of tasks made; an observer of a pipeline."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __call__(self, task: Task) -> TorchDispatchMode:
        return _Recording(self)

    def record(self, given: object, made: object) -> None:
        """Count what an operator has made, but not what it was given."""
        with self._lock:
            new = {StorageWeakRef(s): s.nbytes() for s in storages_in(made)}
            self._made.update({ref: new[ref] for ref in new.keys() - {StorageWeakRef(s) for s in storages_in(given)}})
        self.peak = max(self.peak, self.alive)

    @property
    def alive(self) -> int:
        with self._lock:
            self._made = {ref: size for ref, size in self._made.items() if not ref.expired()}
            return sum(self._made.values())


class _Recording(TorchDispatchMode):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ledger.record((args, kwargs), result)
        return result


def storages_in(value: object) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_leaves(value) if isinstance(x, Tensor)]


def eventually(condition: Callable[[], bool], seconds: float = 120) -> bool:
    """Wait for what a worker does just after it has reported its end; only what never comes takes as long."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(1e-3)
    return condition()


def layers() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Sigmoid())))


def pipeline(module: nn.Sequential, balance: Sequence[int] = (3, 3, 3), **options: Any) -> GPipe:
    return piped(module, balance, CHUNKS, **options)


def with_gradients(model: nn.Module) -> None:
    """Let gradients accumulate in place, so that a step makes no tensor that stays."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


# What a micro-batch keeps for backward in each partition of `layers`, if not checkpointed: the outputs of tanh and
# sigmoid. The input is the output of the partition before, or the caller's.
ACTIVATIONS = 2 * UNIT


def test_only_inputs_of_tasks_are_kept_for_backward(way: dict[str, Any]) -> None:
    checkpointed = {"always": CHUNKS, "except_last": CHUNKS - 1, "never": 0}[way["checkpoint"]]
    model = pipeline(layers(), **way)
    with_gradients(model)
    ledger = model.observer = Ledger()
    y = model(torch.randn(BATCH, WIDTH))
    # Of a checkpointed micro-batch, the inputs of the second and third partition.
    expected = checkpointed * 2 * UNIT + (CHUNKS - checkpointed) * 3 * ACTIVATIONS
    assert eventually(lambda: ledger.alive == expected), f"{ledger.alive} bytes instead of {expected}"
    y.sum().backward()
    assert eventually(lambda: ledger.alive == 0), f"{ledger.alive} bytes are left after backward"


def test_backward_takes_one_tasks_working_set_more(engine: str) -> None:
    def peak_of_one_task() -> int:
        ledger, module = Ledger(), layers()[:3]
        with_gradients(module)
        x = torch.randn(BATCH // CHUNKS, WIDTH, requires_grad=True)
        x.grad = torch.zeros_like(x)
        with ledger(Task("recompute", 0, 0)):
            module(x).backward(torch.ones_like(x))
        return ledger.peak

    model = pipeline(layers(), checkpoint="always", engine=engine)
    with_gradients(model)
    ledger = model.observer = Ledger()
    loss = model(torch.randn(BATCH, WIDTH)).sum()
    kept = ledger.alive
    ledger.peak = 0
    loss.backward()
    # Partitions work at once. As one gives a gradient to the next, it lets go of an input of the same size.
    bound = kept + 3 * peak_of_one_task()
    assert ledger.peak <= bound
    # Were recomputed activations kept, the bound would be passed.
    assert bound < CHUNKS * 3 * ACTIVATIONS


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x.sin())
        return x.cos()


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x * skip


@pytest.mark.parametrize("portals", [True, False])
def test_a_skip_is_kept_by_those_who_need_it(portals: bool, engine: str) -> None:
    module = nn.Sequential(Stash(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), Pop())
    model = pipeline(module, [1, 1, 1, 1], portals=portals, checkpoint="always", engine=engine)
    with_gradients(model)
    ledger = model.observer = Ledger()
    y = model(torch.randn(BATCH, WIDTH, requires_grad=True))
    # Three boundaries, and the skip once, however many partitions it passes.
    expected = CHUNKS * (3 + 1) * UNIT
    assert eventually(lambda: ledger.alive == expected), f"{ledger.alive} bytes instead of {expected}"
    y.sum().backward()
    assert eventually(lambda: ledger.alive == 0)


def test_nothing_is_kept_without_gradients(way: dict[str, Any]) -> None:
    model = pipeline(layers(), **way)
    ledger = model.observer = Ledger()
    with torch.no_grad():
        y = model(torch.randn(BATCH, WIDTH))
    assert eventually(lambda: ledger.alive == 0)
    assert y.shape == (BATCH, WIDTH)


def trained_with_everything(way: dict[str, Any]) -> tuple[GPipe, Callable[[], None]]:
    """Return a pipeline of dropout, batch norm and a skip, and a step of it."""

    module = nn.Sequential(nn.Linear(8, 8), Stash(), nn.BatchNorm1d(8), nn.Dropout(), Pop(), nn.Linear(8, 2))
    model = piped(module, [2, 2, 2], 4, deferred_batch_norm=True, **way)
    with_gradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(14, 8)).square().sum().backward()
        optimizer.step()

    return model, step


def count_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


def test_steps_hold_tensors_and_threads_constant(way: dict[str, Any]) -> None:
    model, step = trained_with_everything(way)
    for _ in range(3):
        step()
    tensors, threads = count_tensors(), set(threading.enumerate())
    for _ in range(30):
        step()
    assert eventually(lambda: count_tensors() <= tensors), f"{count_tensors() - tensors} tensors more"
    assert set(threading.enumerate()) <= threads  # those of other tests may end meanwhile
    assert len(model) == 6


def test_steps_leave_nothing_to_the_garbage_collector(way: dict[str, Any]) -> None:
    model, step = trained_with_everything(way)
    ledger = model.observer = Ledger()
    step()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            step()
            assert eventually(lambda: ledger.alive == 0), f"{ledger.alive} bytes wait for the collector"
    finally:
        gc.enable()


class Trouble(nn.Module):
    """Raise what it is told to, in the first pass, the second, or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.error: BaseException | None = None
        self.when = ""

    def forward(self, x: Tensor) -> Tensor:
        self._raise("recompute" if is_recomputing() else "forward")
        y: Tensor = self.linear(x)
        if y.requires_grad:
            y.register_hook(self._in_backward)
        return y

    def _in_backward(self, grad: Tensor) -> None:
        self._raise("backward")

    def _raise(self, now: str) -> None:
        if self.error is not None and now == self.when:
            error, self.error = self.error, None
            raise error


def without_gradients(model: GPipe, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def backward_too(model: GPipe, x: Tensor) -> None:
    for _ in range(2):
        model(x).sum().backward()


def backward_of_the_input(model: GPipe, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x)


def backward_refused(model: GPipe, x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="create_graph=True"):
        model(x).sum().backward(create_graph=True)


def failing(when: str, partition: int, error: type[BaseException]) -> Callable[[GPipe, Tensor], None]:
    def use(model: GPipe, x: Tensor) -> None:
        model(x).sum().backward()
        trouble = model[partition]
        trouble.error, trouble.when = error("trouble"), when
        try:
            model(x).sum().backward()
        except error:
            assert trouble.error is None
        else:
            assert model.checkpoint == "never" and when == "recompute", "nothing was raised"
            trouble.error = None

    return use


USES: dict[str, Callable[[GPipe, Tensor], object]] = {
    "never used": lambda model, x: None,
    "forward only": lambda model, x: model(x),
    "without gradients": without_gradients,
    "backward too": backward_too,
    "backward retained": lambda model, x: model(x).sum().backward(retain_graph=True),
    "backward of the input": backward_of_the_input,
    "backward refused": backward_refused,
    **{
        f"{error.__name__} in {when} of partition {partition}": failing(when, partition, error)
        for error in (ArithmeticError, KeyboardInterrupt)
        for when in ("forward", "recompute", "backward")
        for partition in (0, 2)
    },
}


@pytest.mark.filterwarnings("ignore:Using backward")  # PyTorch's own, on create_graph
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_dropping_a_pipeline_frees_all_of_it(use: Callable[[GPipe, Tensor], object], way: dict[str, Any]) -> None:
    threads = set(threading.enumerate())
    model = pipeline(nn.Sequential(Trouble(), Trouble(), Trouble()), [1, 1, 1], **way)
    ledger = model.observer = Ledger()
    refs = [weakref.ref(x) for x in (model, *model, *model.partitions, model._engine)]
    storages = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
    use(model, torch.randn(BATCH, WIDTH))
    model.zero_grad()
    del model

    # After an exception PyTorch's own queue keeps nodes that have not run, until the thread's next backward.
    torch.ones((), requires_grad=True).mul(2).backward()

    def gone() -> bool:
        gc.collect()
        return not any(ref() for ref in refs) and all(s.expired() for s in storages) and ledger.alive == 0

    assert eventually(gone), [ref() for ref in refs]
    assert eventually(lambda: set(threading.enumerate()) <= threads), "worker threads are left"


def test_outputs_outlive_the_pipeline(way: dict[str, Any]) -> None:
    threads = set(threading.enumerate())
    module = layers()
    model = pipeline(module, **way)
    x = torch.randn(BATCH, WIDTH)
    loss = model(x).sum()
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None
    loss.backward()
    grads = [p.grad for p in module.parameters()]
    assert all(g is not None for g in grads)

    module.zero_grad()
    pipeline(module, **way)(x).sum().backward()
    assert all(map(torch.equal, grads, (p.grad for p in module.parameters())))  # type: ignore[arg-type]
    del loss
    gc.collect()
    assert eventually(lambda: set(threading.enumerate()) <= threads), "worker threads are left"
