"""Test `GPipe` as a module: its construction, its attributes, its partitions and its devices.

Other tests check what `GPipe` refuses (test_gpipe_refusals.py), its results and the names in its
state dict (tests/behaviours), and its errors at run time (tests/failures).
"""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import (
    GRU,
    Dropout,
    Linear,
    Module,
    ReLU,
    Sequential,
    Tanh,
    TransformerEncoderLayer,
)

import torchgpipe.balance
from torchgpipe import GPipe, is_checkpointing, is_recomputing
from torchgpipe.layers.devices import choose_devices
from torchgpipe.layers.split import split
from torchgpipe.random.seeded import PrivateGenerator
from torchgpipe.tensors import accelerator
from torchgpipe.tensors._autograd import mode_stacks
from torchgpipe.tensors.checkpoint import CheckpointPhase

from .layers import linears

CPU, META = torch.device("cpu"), torch.device("meta")
CUDA = [torch.device("cuda", k) for k in range(3)]


def made(module: Any = None, balance: Any = (1, 1), **options: Any) -> GPipe:
    layers = linears(2) if module is None else module
    options = {"devices": ["cpu"] * 2, **options}
    return GPipe(layers, balance, **options)


def test_silence_is_accepted_and_does_nothing() -> None:
    silent = r"GPipe\(silence=…\) does nothing any more, and will go"
    with pytest.warns(DeprecationWarning, match=silent):
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
def test_its_type_is_changed(
    convert: Callable[[GPipe], GPipe], dtype: torch.dtype, engine: str
) -> None:
    model = made(engine=engine, chunks=2)
    assert convert(model) is model
    for partition in model.partitions:
        for parameter in partition.parameters():
            assert parameter.dtype == dtype
    output = model(torch.rand(4, 2, dtype=dtype))
    assert output.dtype == dtype


class Special(Sequential):
    """A subclass that adds nothing."""


def test_it_has_what_was_given() -> None:
    layers = list(linears(5))
    balance, devices = [2, 1, 2], ["cpu", "meta", "cpu"]
    module = Special(*layers)
    model = GPipe(module, iter(balance), devices=iter(devices), chunks=4, checkpoint="never")

    assert model.balance == balance
    assert model.devices == [CPU, META, CPU]
    assert model.chunks == 4
    assert model.checkpoint == "never"
    assert model.observer is None
    first, second, third = model.partitions
    for partition, expected in ((first, layers[:2]), (second, layers[2:3]), (third, layers[3:])):
        assert isinstance(partition, Sequential)
        assert list(partition.children()) == expected
    assert [p.device for p in model.parameters()] == [CPU] * 4 + [META] * 2 + [CPU] * 4


def test_it_is_a_sequence() -> None:
    named = OrderedDict(a=Linear(2, 2), b=ReLU(), c=Tanh(), d=Linear(2, 3))
    module = Sequential(named)
    model = GPipe(module, [1, 2, 1], devices=["cpu"] * 3)
    assert len(model) == 4
    assert list(model.named_children()) == list(module.named_children())
    assert model.get_submodule("d") is module.d
    assert list(model) == list(module)
    for index in range(-4, 4):
        assert model[index] is module[index]
    for index in (4, -5):
        with pytest.raises(IndexError):
            model[index]
    for part in (slice(None), slice(1, 3), slice(-2, None), slice(0, 4, 2), slice(4, 9)):
        found = model[part]
        assert isinstance(found, Sequential)
        assert list(found.named_children()) == list(module[part].named_children())

    # A layer may have the name of an attribute of `Sequential`.
    module = Sequential()
    module._modules.update(forward=ReLU(), append=Tanh(), pop=ReLU())
    one, other = split(module, [1, 2])
    assert [*one.named_children(), *other.named_children()] == [*module.named_children()]
    assert len(one) == 1
    assert len(other) == 2


def test_without_layers_it_is_the_identity() -> None:
    model = GPipe(Sequential(), [], devices=[])
    x = torch.rand(3, 2)
    assert len(model) == 0
    assert list(model) == []
    assert model.balance == []
    assert model.devices == []
    assert model(x) is x
    assert model((x, x)) == (x, x)


def in_a_generator() -> bool:
    return PrivateGenerator.present() is not None or mode_stacks() != ([], [])


# Each value has a class of context managers, and a function that returns whether this thread is
# still inside such a context. The test raises KeyboardInterrupt before `__exit__` runs.
LEFT: dict[str, tuple[Any, Callable[[], bool]]] = {
    "no gradients": (torch.no_grad, lambda: not torch.is_grad_enabled()),
    "a pass": (CheckpointPhase, lambda: is_checkpointing() or is_recomputing()),
    "a generator": (PrivateGenerator, in_a_generator),
}
FORWARDS = [(name, False) for name in LEFT]


@pytest.mark.parametrize("name, backward", [*FORWARDS, ("a pass", True), ("a generator", True)])
def test_an_interrupt_before_a_context_is_left(
    name: str, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check an interrupt of the calling thread right before it leaves a context manager.

    The calling thread also runs the last partition, and enters such contexts for it. After the
    interrupt, no context may stay in effect.
    """
    kind, within = LEFT[name]
    layers = Sequential(Linear(2, 2), Dropout())
    model = made(layers, chunks=2, checkpoint="always", engine="workers")
    here = threading.get_ident()
    leave = kind.__exit__
    interrupted = False

    def exit(context: Any, *error: Any) -> Any:
        nonlocal interrupted
        if threading.get_ident() == here and not interrupted:
            interrupted = True
            raise KeyboardInterrupt
        return leave(context, *error)

    loss = model(torch.rand(4, 2)).sum()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(kind, "__exit__", exit)
        if backward:
            loss.backward()
        else:
            model(torch.rand(4, 2))
    assert not within()
    model(torch.rand(4, 2)).sum().backward()


# Each row has the argument `devices`, the number of partitions, and the devices that the pipeline
# must then use. There are three CUDA devices, and the current one is CUDA device 2.
DEVICES: list[tuple[Any, int, list[torch.device]]] = [
    (None, 2, [CUDA[0], CUDA[1]]),
    (["meta", "cpu"], 2, [META, CPU]),
    (iter([CPU, "meta"]), 2, [CPU, META]),
    (["cuda", "cuda:1", torch.device("cuda")], 3, [CUDA[2], CUDA[1], CUDA[2]]),
    ([], 0, []),
]


@pytest.mark.parametrize("given, n, chosen", DEVICES)
def test_devices(
    given: Any, n: int, chosen: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "all_devices", lambda: CUDA)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    assert choose_devices(given, n) == chosen
    assert choose_devices(None, 1) == [CUDA[0]], "without a warning that there are more"
    with pytest.raises(IndexError, match="too few devices: 4 partitions, but 3 devices"):
        choose_devices(None, 4)
    monkeypatch.setattr(accelerator, "all_devices", list)
    assert choose_devices(None, 4) == [CPU] * 4


def test_a_list_of_more_devices_than_there_are_partitions_warns() -> None:
    layers = Sequential(Linear(2, 2), Linear(2, 2))
    named = "names 3 devices, of which the pipeline uses the first 2"
    with pytest.warns(UserWarning, match=named) as warned:
        model = GPipe(layers, [1, 1], devices=["cpu"] * 3)
    assert model.devices == [CPU] * 2
    assert [each.filename for each in warned] == [__file__]


class OwnSequential(Sequential):
    """A class of sequential layers that is not from `torch.nn`."""


class Transposed(Module):
    """A layer of the user's own class, which makes time the first dimension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)


@pytest.mark.parametrize(
    ("layers", "options", "warns"),
    [
        ([Linear(4, 4), TransformerEncoderLayer(4, 2)], {}, True),
        ([Sequential(Linear(4, 4), GRU(4, 4)), Tanh()], {}, True),
        ([Linear(4, 4), TransformerEncoderLayer(4, 2)], {"chunks": 1}, False),
        ([Linear(4, 4), TransformerEncoderLayer(4, 2, batch_first=True)], {}, False),
        ([Transposed(), TransformerEncoderLayer(4, 2)], {}, False),
    ],
)
@pytest.mark.parametrize("kind", [Sequential, OwnSequential])
def test_time_in_dimension_0_warns(
    kind: type[Sequential], layers: list[Module], options: dict[str, Any], warns: bool
) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        made(kind(*layers), **{"chunks": 2, **options})
    said = [str(each.message) for each in warned if "batch_first=False" in str(each.message)]
    assert len(said) == warns
    assert {each.filename for each in warned} <= {__file__}


@pytest.mark.parametrize(("schedule", "warns"), [("1F1B", False), ("ZBH1", True)])
def test_a_schedule_that_would_split_backwards_warns(schedule: str, warns: bool) -> None:
    model = made(schedule=schedule)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model.compile()  # layers are compiled only when they run
    assert [each.filename for each in warned] == [__file__] * warns
    for each in warned:
        assert "saves no time; take another one, such as 1F1B" in str(each.message)


def test_the_advice_works() -> None:
    """Check that the code which the error message for a missing balance suggests works."""
    with pytest.raises(ValueError, match="balance is required") as caught:
        split(linears(3), None)
    _, _, advice = str(caught.value).partition("; ")
    call, _, _ = advice.partition(" finds ")
    names = {"torchgpipe": torchgpipe, "layers": linears(3), "sample": torch.rand(2, 2)}

    balance = eval(call, names)

    assert len(balance) == 2
    assert sum(balance) == 3


def sharing() -> Sequential:
    module = linears(4)
    module[2].weight = module[0].weight
    return module


def test_layers_on_meta_get_memory_and_values() -> None:
    with torch.device("meta"):
        module = sharing()
    no_values = r"'0.weight' is on device 'meta' and has no values: give init="
    with pytest.raises(ValueError, match=no_values):
        GPipe(module, [2, 2], devices=["cpu"] * 2)

    def init(k: int, layer: Module) -> None:
        for p in layer.parameters():
            p.normal_(mean=100.0 * k)

    before = torch.get_rng_state()
    model = GPipe(module, [2, 2], devices=["cpu"] * 2, init=init)
    assert torch.equal(torch.get_rng_state(), before)
    assert model[2].weight is model[0].weight
    for k in range(4):
        mean = model[k].bias.mean().item()
        assert round(mean / 100) == k
    again = GPipe(linears(4), [1, 3], devices=["cpu"] * 2, init=init)
    assert torch.equal(again[3].weight, model[3].weight)
    torch.manual_seed(-1)  # the largest seed, to which no layer's index can be added
    with torch.device("meta"):
        on_meta = linears(4)
    GPipe(on_meta, [1, 3], devices=["cpu"] * 2, init=init)
