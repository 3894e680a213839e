"""Check that `balance_by_time` and `balance_by_size` accept all kinds of models.

The tests also check that both functions leave the model unchanged, and refuse wrong arguments.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn import Dropout, Embedding, LazyLinear, Linear, Module, ReLU, Sequential, Tanh

from torchgpipe.balance import balance_by_size, balance_by_time
from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.skip import Namespace
from torchgpipe.skip.scope import current_scope
from torchgpipe.tensors import accelerator

from ...behaviours.parts.kinds import KINDS
from ...behaviours.parts.layers import Do, shared_parts
from ..layers import Lambda, Pop, Stash

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
BALANCES: dict[str, Callable[..., list[int]]] = {
    "time": lambda *args, **kwargs: balance_by_time(*args, timeout=0.0, **kwargs),
    "size": lambda *args, **kwargs: balance_by_size(*args, chunks=2, **kwargs),
}
either = pytest.mark.parametrize("balance_by", BALANCES.values(), ids=BALANCES)


def pair(skip: Callable[[Any], Any], join: Callable[[Any, Any], Any]) -> tuple[Module, Module]:
    """Return two layers that share a skip.

    The first layer stashes `skip(input)`. The second layer pops this skip, and joins it to its own
    input by the function `join`.
    """
    namespace = Namespace()
    stash = Stash(skip, Linear(4, 4))
    stash.isolate(namespace)  # type: ignore[operator]
    pop = Pop(join)
    pop.isolate(namespace)  # type: ignore[operator]
    return stash, pop


def skips() -> Sequential:
    outer_stash, outer_pop = pair(Linear(4, 4), lambda x, skip: x + skip.relu_())
    inner = pair(Linear(4, 4), lambda x, skip: x + skip.relu_())
    none_stash, none_pop = pair(lambda x: None, lambda x, none: x)
    within_one = Sequential(*inner)
    return Sequential(outer_stash, none_stash, within_one, Linear(4, 4), none_pop, outer_pop)


def last(kind: str) -> Callable[[], Sequential]:
    """Return a function that builds a model whose last layer is of the given kind."""
    return lambda: Sequential(Linear(4, 4), Linear(4, 4), KINDS[kind](shared_parts()))


def twice(layer: Module) -> Sequential:
    return Sequential(layer, layer)


def in_place_on_a_leaf() -> Sequential:
    return Sequential(ReLU(inplace=True), ReLU(inplace=True))


def integers_out() -> Sequential:
    return Sequential(Linear(4, 4), Lambda(lambda x: x.argmax(1)))


def swapping() -> Sequential:
    swap = KINDS["swap"](None)
    return Sequential(swap, swap, swap)


X = torch.rand(6, 4)
X_GRAD = torch.rand(6, 4, requires_grad=True)
INTEGERS = torch.randint(5, (6,))
# These kinds of layers change a tensor in place that their own backward needs. PyTorch raises an
# error for them, with or without profiling.
REFUSED = {"buffer in place", "parameter in place", "and its buffer in place"}
# The test models. The value of each name is a function that builds the model, and a sample of its
# input. For each kind of layer in `KINDS`, there is a model whose last layer is of this kind.
# Further models are added below.
MODELS: dict[str, tuple[Callable[[], Sequential], Any]] = {
    name: (last(name), X) for name in KINDS if name not in REFUSED
}
MODELS |= {
    "input requires grad": (lambda: Sequential(Linear(4, 4), Tanh()), X_GRAD),
    "dropout at first": (lambda: Sequential(Dropout(), Linear(4, 4)), X_GRAD),
    "in place on a leaf": (in_place_on_a_leaf, X_GRAD),
    "integers in": (lambda: Sequential(Embedding(5, 4), Linear(4, 4)), INTEGERS),
    "integers out": (integers_out, X),
    "tuple": (swapping, (X_GRAD, X)),
    "skips": (skips, X),
    "one layer twice": (lambda: twice(Linear(4, 4)), X),
    "double": (lambda: Sequential(Linear(4, 4), Tanh()).double(), X.double()),
}


def state(module: Module, sample: Any) -> list[object]:
    """Return copies of everything that profiling must not change in a module and a sample."""
    parameters = [*module.parameters()]
    samples = [sample] if isinstance(sample, Tensor) else [*sample]
    random = [torch.get_rng_state()]
    if torch.cuda.is_available():
        random += torch.cuda.get_rng_state_all()
    kept = [*module.state_dict().values(), *samples, *random]
    grads: list[object] = []
    for x in [*parameters, *samples]:
        grad = None if x.grad is None else x.grad.tolist()
        grads.append((x.requires_grad, grad))
    return [
        [x.tolist() for x in kept],
        [id(x) for x in [*parameters, *module.buffers()]],
        grads,
        [(m.training, type(m)) for m in module.modules()],
        [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dict(current_scope())],
    ]


@either
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("build, sample", MODELS.values(), ids=MODELS)
def test_model_stays_as_it_was(build: Any, sample: Any, device: str, balance_by: Any) -> None:
    model = build()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.rand_like(parameter)
    before = state(model, sample)

    balance = balance_by(2, model, sample, device=device)

    assert len(balance) == 2
    assert min(balance) >= 1
    assert sum(balance) == len(model)
    assert state(model, sample) == before


@either
def test_lazy_layers_stay_lazy(balance_by: Callable[..., list[int]]) -> None:
    lazy = [LazyLinear(1000), LazyLinear(1000), LazyLinear(1)]
    model = Sequential(*lazy)
    balance = balance_by(2, model, X)
    assert sum(balance) == 3
    assert [type(layer) for layer in model] == [LazyLinear] * 3


class Look(Module):
    """A layer that records whether it runs in training mode and whether autograd records it.

    The layer also checks that only one copy of it is alive at a time.
    """

    def __init__(self, copies: weakref.WeakSet[Module]) -> None:
        super().__init__()
        self.seen: set[tuple[bool, bool]] = set()
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        assert self in self.copies
        takes_grad = x.requires_grad and torch.is_grad_enabled() and not x.is_inference()
        self.seen.add((self.training, takes_grad))
        return x

    def __deepcopy__(self, memo: object) -> Look:
        twin = Look(self.copies).train(self.training)
        twin.seen = self.seen
        self.copies.add(twin)
        assert len(self.copies) == 1
        return twin


# Each row has a function that sets the training modes of two layers, and the two modes in which
# profiling must then run these layers (`True` is training mode).
@either
@pytest.mark.parametrize(
    "mode, training",
    [
        (lambda module: module, [True, True]),
        (lambda module: module.eval(), [True, True]),
        (lambda module: module[0].eval(), [False, True]),
    ],
)
@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
def test_layers_run_as_in_training_but_frozen_parts_stay_frozen(
    mode: Callable[[Module], object], training: list[bool], context: Any, balance_by: Any
) -> None:
    with context():
        copies: weakref.WeakSet[Module] = weakref.WeakSet()
        looks = [Look(copies), Look(copies)]
        first, second = [Sequential(Linear(4, 4), look) for look in looks]
        model = Sequential(first, second)
        mode(model)
        sample = torch.rand(6, 4)
        before = state(model, sample)

        balance_by(1, model, sample)

        assert state(model, sample) == before
    for look, trains in zip(looks, training, strict=True):
        assert look.seen == {(trains, True)}
    assert not copies


@either
def test_error_in_a_layer_arrives_and_leaves_nothing_behind(
    balance_by: Callable[..., list[int]],
) -> None:
    model = skips()
    model[2] = Lambda(lambda x: (torch.rand(1), 1 // 0))
    before = state(model, X)
    with pytest.raises(ZeroDivisionError):
        balance_by(2, model, X)
    assert state(model, X) == before


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["profile_times", "profile_sizes"])
def test_default_device(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "default_kind", lambda: device)
    profile = Mock(return_value=[1.0])
    monkeypatch.setattr(f"torchgpipe.balance.{name}", profile)
    balance_by = balance_by_time if name == "profile_times" else balance_by_size
    balance_by(1, Sequential(ReLU()), X)
    assert profile.call_args.args[-1] == torch.device(device)


RELUS = Sequential(ReLU(), ReLU())
POP_ALONE = Sequential(Pop())
LOCKED = Sequential(ReLU(), Do(lambda _, x: x, lock=threading.Lock()))
NOTHING_OUT = Sequential(ReLU(), Lambda(lambda _: None))
NAN = float("nan")
# Each row holds arguments that both functions refuse, the error's type, and a part of its message.
MISUSE: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    ((0, RELUS, X), ValueError, "partitions must be at least 1, got 0"),
    ((3, RELUS, X), ValueError, "cannot fill 3 partitions with 2 layers: .* at most 2"),
    ((1.5, RELUS, X), TypeError, "partitions must be an int, got 1.5"),
    ((True, RELUS, X), TypeError, "partitions must be an int, got True"),
    ((1, ReLU(), X), TypeError, "got ReLU; torchgpipe.sequential"),
    ((1, RELUS, (X, [1])), TypeError, "element 1 of input is a list"),
    ((1, POP_ALONE, X), TypeError, "pops 'skip', which no earlier layer stashes"),
    ((1, LOCKED, X), TypeError, r"layer 1 \(Do\) cannot be copied .*lock"),
    ((1, NOTHING_OUT, X), TypeError, "output of layer 1 must be a tensor"),
]
# These arguments are wrong for only one of the two balancing functions. Each row has this function,
# the sample, the options, and a part of the error message.
OF_ONE: list[tuple[Callable[..., list[int]], Any, dict[str, Any], str]] = [
    (balance_by_time, X, {"timeout": -1.0}, "timeout must be .* got -1.0"),
    (balance_by_time, X, {"timeout": NAN}, "timeout must be .* got nan"),
    (balance_by_time, X, {"device": "meta"}, "nothing takes time on device 'meta'"),
    (balance_by_size, X, {"chunks": 0}, "chunks must be a positive int, got 0"),
    (balance_by_size, X, {"chunks": 2.0}, "chunks must be a positive int, got 2.0"),
    (balance_by_size, X, {"param_scale": -1.0}, "param_scale must be .* got -1.0"),
    (balance_by_size, X, {"param_scale": NAN}, "param_scale must be .* got nan"),
    (balance_by_size, (X, X[:1]), {"chunks": 2}, "the same batch size"),
]
COSTS = [
    ([1, -2], "not negative, but got -2 for layer 1"),
    ([1, NAN], "not negative, but got nan for layer 1"),
    ([1, 1, float("inf")], "finite numbers and not negative, but got inf for layer 2"),
]


def misuses() -> list[tuple[Any, Any, Any, type[Exception], str]]:
    """List the wrong calls of balancing functions.

    Each row has a function, its arguments, its options, the type of the exception that the call
    must raise, and a pattern of the message.
    """
    rows: list[tuple[Any, Any, Any, type[Exception], str]] = []
    on_cpu = {"device": "cpu"}
    for arguments, error, message in MISUSE:
        rows += [(each, arguments, on_cpu, error, message) for each in BALANCES.values()]
    for balance_by, sample, options, message in OF_ONE:
        arguments = (1, RELUS, sample)
        rows.append((balance_by, arguments, options, ValueError, message))
    for costs, message in COSTS:
        rows.append((minimise_heaviest, (costs, 1), {}, ValueError, message))
    return rows


@pytest.mark.parametrize("balance_by, arguments, options, error, message", misuses())
def test_misuse(
    balance_by: Any, arguments: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        balance_by(*arguments, **options)
