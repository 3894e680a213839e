"""`GPipe` as a module: its construction, its attributes, and what it refuses and why.

Its results are tested in tests/behaviours, errors while it runs in tests/failures, and which modules, balances and
devices it refuses in test_partition.py.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe import GPipe, is_checkpointing, is_recomputing
from torchgpipe.task.seeded import PrivateGenerator
from torchgpipe.tensors._autograd import mode_stacks
from torchgpipe.tensors.checkpoint import Passing

from .layers import linears

CPU, META = torch.device("cpu"), torch.device("meta")


def made(module: Any = None, balance: Any = (1, 1), **options: Any) -> GPipe:
    """Make a pipeline of two layers, with valid defaults for all arguments."""
    return GPipe(linears(2) if module is None else module, balance, **{"devices": ["cpu"] * 2, **options})


CHUNKS = "chunks must be a whole number of at least 1, but got"
MODES = "checkpoint must be one of 'always', 'except_last', 'never', but got"
MOVED = r"cannot be moved; name the devices .*GPipe\(module, balance, devices="

# The call, the error's type, and its message: what was given, and what to do.
REFUSED: list[tuple[Callable[[Any], object], type[Exception], str]] = [
    (lambda _: made(engine="inline"), ValueError, "one of 'auto', 'graph', 'workers', but got 'inline'"),
    (lambda _: made(engine="workers", devices=["cpu", "meta"]), ValueError, r"is for CPU devices, but got \['cpu', 'm"),
    (lambda _: GPipe(linears(2), [1, 1], ["cpu"] * 2), TypeError, "positional argument"),  # type: ignore[call-arg]
    (lambda model: model([torch.rand(2, 2)]), TypeError, "input must be a tensor or a tuple of tensors, but got list"),
    (lambda model: model.cuda(device=torch.device("cuda", 1)), TypeError, MOVED),
    (lambda model: model.cpu(), TypeError, MOVED),
    (lambda model: model.to("cuda:0"), TypeError, MOVED),
    (lambda model: model.to("cpu", torch.float64), TypeError, MOVED),
    (lambda model: model.to(tensor=torch.rand(1)), TypeError, MOVED),
]


@pytest.mark.parametrize("do, error, message", REFUSED)
def test_refused(do: Callable[[Any], object], error: type[Exception], message: str) -> None:
    model = made()
    with pytest.raises(error, match=message):
        do(model)
    assert {(p.device, p.dtype) for p in model.parameters()} == {(CPU, torch.float32)}


@pytest.mark.parametrize(
    "name, value, message",
    [*(("chunks", x, CHUNKS) for x in (0, True, 1.5, "8")), *(("checkpoint", x, MODES) for x in ("sometimes", True))],
)
def test_settings_are_checked_also_where_they_are_changed_later(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message} {value!r}"):
        made(**{name: value})
    model = made()
    setattr(model, name, value)
    with pytest.raises(ValueError, match=f"{message} {value!r}"):
        model(torch.ones(1, 2))


def test_silence_is_accepted_and_does_nothing() -> None:
    with pytest.warns(DeprecationWarning, match=r"GPipe\(silence=…\) does nothing any more, and will go"):
        model = made(silence=60)
    assert not hasattr(model, "silence")


@pytest.mark.parametrize(
    "convert, dtype",
    [
        (lambda model: model.to(dtype=torch.float64), torch.float64),
        (lambda model: model.to(torch.float64, non_blocking=True), torch.float64),
        (lambda model: model.half(), torch.float16),
        (lambda model: model.to(memory_format=torch.channels_last), torch.float32),
    ],
)
def test_its_type_is_changed(convert: Callable[[GPipe], GPipe], dtype: torch.dtype, engine: str) -> None:
    model = made(engine=engine, chunks=2)
    assert convert(model) is model
    assert {p.dtype for partition in model.partitions for p in partition.parameters()} == {dtype}
    assert model(torch.rand(4, 2, dtype=dtype)).dtype == dtype


def test_it_has_what_was_given() -> None:
    module = linears(5)
    layers = list(module)
    model = GPipe(module, iter([2, 1, 2]), devices=iter(["cpu", "meta", "cpu"]), chunks=4, checkpoint="never")

    assert (model.balance, model.devices) == ([2, 1, 2], [CPU, META, CPU])
    assert (model.chunks, model.checkpoint, model.observer) == (4, "never", None)
    assert [list(partition.children()) for partition in model.partitions] == [layers[:2], layers[2:3], layers[3:]]
    assert all(isinstance(partition, nn.Sequential) for partition in model.partitions)
    assert [p.device for p in model.parameters()] == [CPU] * 4 + [META] * 2 + [CPU] * 4


def test_it_is_a_sequence() -> None:
    module = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.ReLU(), c=nn.Tanh(), d=nn.Linear(2, 3)))
    model = GPipe(module, [1, 2, 1], devices=["cpu"] * 3)
    assert len(model) == 4
    assert list(model.named_children()) == list(module.named_children())
    assert model.get_submodule("d") is module.d
    assert repr(model) == repr(module).replace("Sequential(", "GPipe(", 1)
    assert list(model) == [model[k] for k in range(4)] == [model[k] for k in range(-4, 0)] == list(module)
    for index in (4, -5):
        with pytest.raises(IndexError):
            model[index]
    for part in (slice(None), slice(1, 3), slice(-2, None), slice(0, 4, 2), slice(4, 9)):
        found = model[part]
        assert isinstance(found, nn.Sequential)
        assert list(found.named_children()) == list(module[part].named_children())


def test_without_layers_it_is_the_identity() -> None:
    model, x = GPipe(nn.Sequential(), [], devices=[]), torch.rand(3, 2)
    assert (len(model), list(model), model.balance, model.devices) == (0, [], [], [])
    assert model(x) is x
    assert model((x, x)) == (x, x)


def test_the_input_may_be_on_another_device() -> None:
    model = made(devices=["meta"] * 2, chunks=2)
    y = model(torch.rand(4, 2))
    y.sum().backward()
    assert (y.device, y.shape) == (META, (4, 2))
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())


# A context that is never left, since Ctrl-C comes just before its exit; and whether this thread is still in it.
LEFT: dict[str, tuple[Any, Callable[[], bool]]] = {
    "no gradients": (torch.no_grad, lambda: not torch.is_grad_enabled()),
    "a pass": (Passing, lambda: is_checkpointing() or is_recomputing()),
    "a generator": (PrivateGenerator, lambda: PrivateGenerator.present() is not None or mode_stacks() != ([], [])),
}


@pytest.mark.parametrize("name, backward", [*((name, False) for name in LEFT), ("a pass", True), ("a generator", True)])
def test_an_interrupt_before_a_context_is_left(name: str, backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this thread, which runs the last partition."""
    kind, within = LEFT[name]
    model = made(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), chunks=2, checkpoint="always", engine="workers")
    here, leave, left = threading.get_ident(), kind.__exit__, iter([1])

    def exit(context: Any, *error: Any) -> Any:
        if threading.get_ident() == here and next(left, 0):
            raise KeyboardInterrupt
        return leave(context, *error)

    loss = model(torch.rand(4, 2)).sum()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(kind, "__exit__", exit)
        loss.backward() if backward else model(torch.rand(4, 2))
    assert not within()
    model(torch.rand(4, 2)).sum().backward()
