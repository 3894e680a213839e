"""Test for memory leaks: what a pipeline keeps between forward and backward, and after a step.

After a step, and after it is deleted, a pipeline must keep nothing alive. Peaks within a step are
tested in plan/predict/test_memory.py, and memory after a failure in tests/failures.
"""

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchgpipe import GPipe
from torchgpipe.tensors.checkpoint import checkpointed

from ..plain import piped
from .layers import Pop, Stash
from .ledger import Ledger, assert_eventually, assert_gone, assert_no_thread_more

pytestmark = pytest.mark.usefixtures("only_what_the_tests_make")
WIDTH, CHUNKS = 8, 4
linear = partial(nn.Linear, WIDTH, WIDTH)
BATCH = 16 * CHUNKS
# The bytes of a tensor with the samples of one micro-batch and WIDTH features.
UNIT = BATCH // CHUNKS * WIDTH * torch.float32.itemsize


def pipeline(**options: Any) -> GPipe:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [linear(), nn.Tanh(), nn.Sigmoid()]
    return piped(nn.Sequential(*layers), [3, 3, 3], CHUNKS, **options)


def batch() -> Tensor:
    return torch.randn(BATCH, WIDTH)


def watched(model: GPipe) -> Ledger:
    """Let a new `Ledger` count the live bytes of tensors that the model's tasks create.

    Each parameter first gets a gradient of zeros. The next step adds to it in place. Otherwise, the
    step would create gradients that stay alive and are counted.
    """
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    ledger = Ledger()
    model.observer = ledger
    return ledger


def test_only_inputs_of_tasks_are_kept_for_backward(way: dict[str, Any]) -> None:
    model = pipeline(**way)
    ledger = watched(model)
    with torch.no_grad():
        y = model(batch())
    ledger.assert_comes_to(0)
    y = model(batch())
    # A checkpointed micro-batch keeps two tensors: the inputs of the second and of the third
    # partition. Any other micro-batch keeps two tensors in each of the three partitions: the
    # outputs of tanh and of sigmoid. The partitions' inputs take no more memory, because each of
    # them is the output of the partition before, or belongs to the caller.
    recomputed = checkpointed(way["checkpoint"], CHUNKS)
    kept = recomputed * 2 + (CHUNKS - recomputed) * 3 * 2
    ledger.assert_comes_to(kept * UNIT)
    y.sum().backward()
    ledger.assert_comes_to(0)


@pytest.mark.parametrize("portals", [True, False])
def test_a_skip_is_kept_by_those_who_need_it(portals: bool, engine: str) -> None:
    module = nn.Sequential(Stash(torch.sin, torch.cos), linear(), nn.Tanh(), Pop())
    model = piped(module, [1, 1, 1, 1], CHUNKS, portals=portals, checkpoint="always", engine=engine)
    ledger = watched(model)
    y = model(batch().requires_grad_())
    # Three boundary tensors are kept. The skip is kept once, although it passes several partitions.
    ledger.assert_comes_to(CHUNKS * (3 + 1) * UNIT)
    y.sum().backward()
    ledger.assert_comes_to(0)


def count_tensors() -> int:
    tensors = 0
    for x in gc.get_objects():
        tensors += issubclass(type(x), Tensor)
    return tensors


@pytest.mark.quick(3)
def test_steps_leave_nothing_not_even_to_the_garbage_collector(way: dict[str, Any]) -> None:
    first, last = linear(), linear()
    between = [Stash(torch.sin), nn.BatchNorm1d(WIDTH), nn.Dropout(), Pop()]
    module = nn.Sequential(first, *between, last)
    model = piped(module, [2, 2, 2], CHUNKS, deferred_batch_norm=True, **way)
    ledger = watched(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(batch()).square().sum().backward()
        optimizer.step()
        ledger.assert_comes_to(0)

    step()
    gc.collect()
    gc.disable()
    try:
        threads = set(threading.enumerate())
        tensors = count_tensors()
        for _ in range(10):
            step()
        assert gc.collect() == 0
        assert_eventually(
            lambda: count_tensors() <= tensors, lambda: f"{count_tensors() - tensors} tensors more"
        )
        assert_no_thread_more(threads)
    finally:
        gc.enable()


def backward_refused(model: GPipe) -> None:
    with pytest.raises(RuntimeError, match="create_graph=True"):
        model(batch()).sum().backward(create_graph=True)


@torch.no_grad()
def forward_without_gradients(model: GPipe) -> None:
    model(batch())


def backward_twice(model: GPipe) -> None:
    for _ in range(2):
        model(batch()).sum().backward()


def backward_of_the_input(model: GPipe) -> None:
    x = batch().requires_grad_()
    loss = model(x).sum()
    torch.autograd.grad(loss, x)


USES: dict[str, Callable[[GPipe], object]] = {
    "never used": lambda model: None,
    "forward only": lambda model: model(batch()),
    "without gradients": forward_without_gradients,
    "backward too": backward_twice,
    "backward retained": lambda model: model(batch()).sum().backward(retain_graph=True),
    "backward of the input": backward_of_the_input,
    "backward refused": backward_refused,
}


@pytest.mark.quick(10)
@pytest.mark.filterwarnings("ignore:Using backward")  # PyTorch's warning of create_graph
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_dropping_a_pipeline_frees_all_of_it(
    use: Callable[[GPipe], object], way: dict[str, Any]
) -> None:
    threads = set(threading.enumerate())
    model = pipeline(**way)
    ledger = Ledger()
    model.observer = ledger
    refs = [weakref.ref(x) for x in (model, *model.modules(), model._engine)]
    storages = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
    use(model)
    model.zero_grad()
    del model

    assert_gone(refs)
    ledger.assert_comes_to(0)
    for storage in storages:
        assert_eventually(storage.expired, lambda: "memory of parameters is kept")
    assert_no_thread_more(threads)


def test_outputs_outlive_the_pipeline(way: dict[str, Any]) -> None:
    threads = set(threading.enumerate())
    model = pipeline(**way)
    module = nn.Sequential(*model)
    x = batch()
    model(x).sum().backward()
    expected = [p.grad for p in module.parameters()]
    module.zero_grad()

    loss = model(x).sum()
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None
    loss.backward()
    for parameter, grad in zip(module.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert grad is not None
        assert torch.equal(parameter.grad, grad)
    del loss
    gc.collect()
    assert_no_thread_more(threads)
