"""`GPipe` as a module: its construction, attributes, partitions and devices, and what it refuses and why.

Its results, and names in state dicts, are tested in tests/behaviours, errors while it runs in tests/failures.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe import GPipe, is_checkpointing, is_recomputing
from torchgpipe.layers.checks import check_module
from torchgpipe.layers.devices import choose_devices
from torchgpipe.layers.split import split
from torchgpipe.task.guards.seeded import PrivateGenerator
from torchgpipe.tensors._autograd import mode_stacks
from torchgpipe.tensors.checkpoint import CheckpointPhase

from .layers import linears

CPU, META, CUDA = (
    torch.device("cpu"),
    torch.device("meta"),
    [torch.device("cuda", k) for k in range(3)],
)
X = torch.ones(1)
CHUNKS = "chunks must be a whole number of at least 1, but got"
MODES = "checkpoint must be one of 'always', 'except_last', 'never', but got"
MOVED = "and cannot be moved; name the devices when wrapping the module: GPipe(module, balance, devices="


def made(module: Any = None, balance: Any = (1, 1), **options: Any) -> GPipe:
    """Make a pipeline of two layers, with valid defaults for all arguments."""
    return GPipe(
        linears(2) if module is None else module, balance, **{"devices": ["cpu"] * 2, **options}
    )


def changed(change: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a function that changes a sequence of layers, and then checks it."""
    return lambda _: check_module((module := linears(1), change(module))[0])


LAYER = nn.Linear(1, 1)
ONE_TWICE = nn.Sequential(OrderedDict(first=LAYER, between=nn.ReLU(), again=LAYER))
RESIDUAL: Any = type("Residual", (nn.Sequential,), {"forward": torch.sin})()
chosen: Any = choose_devices
parts: Any = split
# The call, the error's type, and its message: what was given, and what to do.
REFUSED: list[tuple[Callable[[Any], object], type[Exception], str]] = [
    (
        lambda _: made(engine="inline"),
        ValueError,
        "one of 'auto', 'graph', 'workers', but got 'inline'",
    ),
    (
        lambda _: made(engine="workers", devices=["cpu", "meta"]),
        ValueError,
        "is for CPU devices, but got ['cpu', 'm",
    ),
    (lambda _: GPipe(linears(2), [1, 1], ["cpu"] * 2), TypeError, "positional argument"),  # type: ignore[call-arg]
    (
        lambda model: model([torch.rand(2, 2)]),
        TypeError,
        "input must be a tensor or a tuple of tensors, but got list",
    ),
    (lambda model: model.cuda(device=torch.device("cuda", 1)), TypeError, MOVED),
    (lambda model: model.cpu(), TypeError, MOVED),
    (lambda model: model.to("cuda:0"), TypeError, MOVED),
    (lambda model: model.to("cpu", torch.float64), TypeError, MOVED),
    (lambda model: model.to(tensor=torch.rand(1)), TypeError, MOVED),
    (
        lambda _: check_module([nn.Linear(1, 1)]),
        TypeError,
        "GPipe wraps an nn.Sequential, but got list",
    ),
    (
        lambda _: check_module(RESIDUAL),
        TypeError,
        "layers of Residual one after another, but it has a method",
    ),
    (changed(lambda m: setattr(m, "forward", torch.sin)), TypeError, "it has a forward of its own"),
    (
        changed(lambda m: m.register_parameter("p", nn.Parameter(X))),
        TypeError,
        "it has parameters of its own",
    ),
    (
        changed(lambda m: m.register_full_backward_hook(print)),
        TypeError,
        "it has hooks of its own, which would",
    ),
    (
        changed(lambda m: (m.register_buffer("b", X), m.register_forward_hook(print))),
        TypeError,
        "it has buffers and h",
    ),
    (
        lambda _: check_module(ONE_TWICE),
        ValueError,
        "layers 'first' and 'again' are the same module; a layer ",
    ),
    (
        lambda _: chosen(["cpu"], 2),
        IndexError,
        "2 partitions, but 1 devices; give a balance of at most 1 parti",
    ),
    (
        lambda _: chosen("cuda:0", 2),
        TypeError,
        "a list of devices, one per partition, but got 'cuda:0'",
    ),
    (lambda _: chosen(0, 2), TypeError, "a list of devices, one per partition, but got 0"),
    (
        lambda _: parts(linears(3), 2),
        TypeError,
        "balance must be a list, the layers of each partition, but got 2",
    ),
    (
        lambda _: parts(linears(3), [1]),
        ValueError,
        "the balance [1] sums up to 1 layers, but the module has 3",
    ),
    (
        lambda _: parts(linears(3), [3, 0]),
        ValueError,
        "one layer or more, but got the balance [3, 0]",
    ),
    (
        lambda _: parts(linears(3), [1.5, 1.5]),
        ValueError,
        "one layer or more, but got the balance [1.5, 1.5]",
    ),
]


@pytest.mark.parametrize("do, error, message", REFUSED)
def test_refused(do: Callable[[Any], object], error: type[Exception], message: str) -> None:
    model = made()
    with pytest.raises(error, match=re.escape(message)):
        do(model)
    assert {(p.device, p.dtype) for p in model.parameters()} == {(CPU, torch.float32)}


@pytest.mark.parametrize(
    "name, value, message",
    [
        *(("chunks", x, CHUNKS) for x in (0, True, 1.5, "8")),
        *(("checkpoint", x, MODES) for x in ("sometimes", True)),
    ],
)
def test_settings_are_checked_also_where_they_are_changed_later(
    name: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=f"{message} {value!r}"):
        made(**{name: value})
    model = made()
    setattr(model, name, value)
    with pytest.raises(ValueError, match=f"{message} {value!r}"):
        model(torch.ones(1, 2))


def test_silence_is_accepted_and_does_nothing() -> None:
    with pytest.warns(
        DeprecationWarning, match=r"GPipe\(silence=…\) does nothing any more, and will go"
    ):
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
    assert {p.dtype for partition in model.partitions for p in partition.parameters()} == {dtype}
    assert model(torch.rand(4, 2, dtype=dtype)).dtype == dtype


def test_it_has_what_was_given() -> None:
    layers = list(linears(5))
    module = type("Special", (nn.Sequential,), {})(*layers)  # a subclass that adds nothing
    model = GPipe(
        module, iter([2, 1, 2]), devices=iter(["cpu", "meta", "cpu"]), chunks=4, checkpoint="never"
    )

    assert (model.balance, model.devices) == ([2, 1, 2], [CPU, META, CPU])
    assert (model.chunks, model.checkpoint, model.observer) == (4, "never", None)
    assert [list(partition.children()) for partition in model.partitions] == [
        layers[:2],
        layers[2:3],
        layers[3:],
    ]
    assert all(isinstance(partition, nn.Sequential) for partition in model.partitions)
    assert [p.device for p in model.parameters()] == [CPU] * 4 + [META] * 2 + [CPU] * 4


def test_it_is_a_sequence() -> None:
    module = nn.Sequential(
        OrderedDict(a=nn.Linear(2, 2), b=nn.ReLU(), c=nn.Tanh(), d=nn.Linear(2, 3))
    )
    model = GPipe(module, [1, 2, 1], devices=["cpu"] * 3)
    assert len(model) == 4
    assert list(model.named_children()) == list(module.named_children())
    assert model.get_submodule("d") is module.d
    assert repr(model) == repr(module).replace("Sequential(", "GPipe(", 1)
    assert (
        list(model)
        == [model[k] for k in range(4)]
        == [model[k] for k in range(-4, 0)]
        == list(module)
    )
    for index in (4, -5):
        with pytest.raises(IndexError):
            model[index]
    for part in (slice(None), slice(1, 3), slice(-2, None), slice(0, 4, 2), slice(4, 9)):
        found = model[part]
        assert isinstance(found, nn.Sequential)
        assert list(found.named_children()) == list(module[part].named_children())
    module = nn.Sequential()
    module._modules.update(
        forward=nn.ReLU(), append=nn.Tanh(), pop=nn.ReLU()
    )  # names of attributes
    one, other = split(module, [1, 2])
    assert [*one.named_children(), *other.named_children()] == [*module.named_children()]
    assert (len(one), len(other)) == (1, 2)


def test_without_layers_it_is_the_identity() -> None:
    model, x = GPipe(nn.Sequential(), [], devices=[]), torch.rand(3, 2)
    assert (len(model), list(model), model.balance, model.devices) == (0, [], [], [])
    assert model(x) is x
    assert model((x, x)) == (x, x)


# A context that is never left, since Ctrl-C comes just before its exit; and whether this thread is still in it.
LEFT: dict[str, tuple[Any, Callable[[], bool]]] = {
    "no gradients": (torch.no_grad, lambda: not torch.is_grad_enabled()),
    "a pass": (CheckpointPhase, lambda: is_checkpointing() or is_recomputing()),
    "a generator": (
        PrivateGenerator,
        lambda: PrivateGenerator.present() is not None or mode_stacks() != ([], []),
    ),
}


@pytest.mark.parametrize(
    "name, backward", [*((name, False) for name in LEFT), ("a pass", True), ("a generator", True)]
)
def test_an_interrupt_before_a_context_is_left(
    name: str, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this thread, which runs the last partition."""
    kind, within = LEFT[name]
    model = made(
        nn.Sequential(nn.Linear(2, 2), nn.Dropout()),
        chunks=2,
        checkpoint="always",
        engine="workers",
    )
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


# The argument `devices`, the number of partitions, the chosen devices if there are three CUDA devices.
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert choose_devices(given, n) == chosen
    assert choose_devices(None, 1) == [CUDA[0]], "without a warning that there are more"
    with pytest.raises(IndexError, match="too few devices: 4 partitions, but 3 devices"):
        choose_devices(None, 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_devices(None, 4) == [CPU] * 4


def test_a_list_of_more_devices_than_there_are_partitions_warns() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.warns(
        UserWarning, match="names 3 devices, of which the pipeline uses the first 2"
    ) as warned:
        model = GPipe(layers, [1, 1], devices=["cpu"] * 3)
    assert model.devices == [CPU] * 2
    assert [each.filename for each in warned] == [__file__]


def test_the_advice_works() -> None:
    """The code in the message runs unchanged, given the caller's own variables."""
    with pytest.raises(ValueError, match="balance is required") as caught:
        split(linears(3), None)
    code = "\n".join(line.strip() for line in str(caught.value).split(":\n\n", 1)[1].splitlines())
    names: dict[str, Any] = {"GPipe": GPipe, "model": linears(3), "sample": torch.rand(2, 2)}

    exec(code.replace("...", 'devices=["cpu"] * partitions'), names)

    assert sum(names["model"].balance) == 3
    assert len(names["model"].partitions) == 2


def sharing() -> nn.Sequential:
    module = linears(4)
    module[2].weight = module[0].weight
    return module


@pytest.mark.parametrize("balance", [[2, 2], [1, 2, 1]], ids=str)
def test_a_parameter_on_two_devices_is_refused(balance: list[int]) -> None:
    module = sharing()
    message = "'0.weight' and '2.weight' are one parameter, but would be on cpu and meta; choose a balance that keeps"
    with pytest.raises(ValueError, match=message):
        GPipe(module, balance, devices=["cpu", *["meta"] * (len(balance) - 1)])
    assert {p.device for p in module.parameters()} == {CPU}, (
        "a module that is refused has been moved"
    )
    GPipe(module, [1, 1, 2], devices=["cpu", "meta", "cpu"])
    assert module[2].weight is module[0].weight


def test_layers_on_meta_get_memory_and_values() -> None:
    with torch.device("meta"):
        module = sharing()
    with pytest.raises(
        ValueError, match=r"'0.weight' is on device 'meta' and has no values: give init="
    ):
        GPipe(module, [2, 2], devices=["cpu"] * 2)

    def init(k: int, layer: nn.Module) -> None:
        for p in layer.parameters():
            p.normal_(mean=100.0 * k)

    before = torch.get_rng_state()
    model = GPipe(module, [2, 2], devices=["cpu"] * 2, init=init)
    assert torch.equal(torch.get_rng_state(), before)
    assert model[2].weight is model[0].weight
    biases = [p.mean().item() for name, p in model.named_parameters() if name.endswith("bias")]
    assert [round(bias / 100) for bias in biases] == [0, 1, 2, 3]
    again = GPipe(linears(4), [1, 3], devices=["cpu"] * 2, init=init)
    assert torch.equal(again[3].weight, model[3].weight)
