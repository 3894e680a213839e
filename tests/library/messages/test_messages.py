"""Check that errors for common mistakes are one line, and say what is wrong and what to do."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from torchgpipe import GPipe, sequential

from ..traced import CASES
from .mistakes import ARRAY, MISTAKES, Mistake, X, model, step
from .more_mistakes import MORE_MISTAKES

LENGTH = torch.export.Dim("length")
HIDDEN = nn.Parameter(torch.ones(2))


class Net(nn.Module):
    """A module whose forward returns `function(module, input)`. It tests mistakes in a forward."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.rnn = nn.Linear(2, 2), nn.Linear(2, 2), nn.GRU(2, 2)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class WithState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(2, 2, batch_first=True), nn.Linear(2, 2)

    def forward(self, x: Tensor, state: Tensor) -> Any:
        output, _ = self.rnn(x, state)
        return self.out(output)


def traced(function: Callable[[Any, Tensor], Any], x: Tensor = X, **options: Any) -> object:
    return sequential(Net(function), x, **options)


def state_of_rnn(net: Any, x: Tensor) -> Any:
    output, state = net.rnn(x.transpose(0, 1))
    return net.a(output.transpose(0, 1)), state


class DynamicCache:
    def __init__(self, x: Tensor) -> None:
        self.kept = x


class Keeping(nn.Module):
    def forward(self, x: Tensor, cache: DynamicCache) -> Tensor:
        return x + cache.kept


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.keeping = nn.Linear(2, 2), Keeping()

    def forward(self, x: Tensor) -> Any:
        return self.keeping(self.a(x), DynamicCache(x))


class Linear(nn.Module):
    """A layer named like a class of PyTorch. Layers of adapter libraries often have such names."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        y = self.base(x)
        return y if y.sum() > 0 else -y


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(9, 2), nn.Embedding(9, 2), nn.Linear(2, 2)

    def forward(self, words: Tensor, places: Tensor) -> Any:
        return self.out(self.words(words) + self.places(places))


class Packs(nn.Module):
    """A layer that packs its input into sequences that all have length 3."""

    def forward(self, x: Tensor) -> Any:
        return pack_padded_sequence(x, torch.full((len(x),), 3), batch_first=True)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.packs, self.rnn = Packs(), nn.GRU(2, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        output, _ = self.rnn(self.packs(x))
        return pad_packed_sequence(output, batch_first=True)[0]


class OfPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, pair: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Any:
        return self.a(pair[0]) + self.b(pair[1])


def of_pair(input: Any) -> object:
    layers = sequential(OfPair(), ((X, X),))
    return GPipe(layers, [len(layers)], devices=["cpu"]).predict(input)


def of_list(input: Any) -> object:
    layers: Any = traced(lambda net, x: net.a(x))
    return GPipe(layers, [len(layers)], devices=["cpu"])(input)


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return mse_loss(self.a(x), labels)


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, row: int) -> Any:
        return self.b(self.a(x)[:, row])


def one_row() -> object:
    places = torch.arange(3).unsqueeze(0)
    found = sequential(Positions(), (torch.zeros(1, 3, dtype=torch.long), places))
    return found(torch.zeros(4, 3, dtype=torch.long), places)


TRACED: dict[str, Mistake] = {
    "a shape as sample": (
        lambda: sequential(nn.Linear(64, 64), (8, 64)),
        ["sample must have the tensors that Linear is called with", "torch.zeros(8, 64)"],
    ),
    "an array as sample": (
        lambda: sequential(nn.Linear(2, 2), ARRAY),
        ["sample must have the tensors", "has only ndarray"],
    ),
    "a class as module": (
        lambda: sequential(nn.Linear, X),  # type: ignore[arg-type]
        ["takes an nn.Module", "the class Linear"],
    ),
    "a name as whole": (
        lambda: traced(lambda net, x: net.a(x), whole=["a"]),
        ["contains the string 'a'", "give the class itself, or module.get_submodule(…)"],
    ),
    "one class as whole": (
        lambda: traced(lambda net, x: net.a(x), whole=nn.Linear),
        ["whole must be a list", "Linear"],
    ),
    "a class that the module does not have, as whole": (
        lambda: traced(lambda net, x: net.a(x), whole=[nn.Conv2d]),
        ["Net has no submodule", "Conv2d"],
    ),
    "one name as shared": (
        lambda: traced(lambda net, x: net.a(x), shared="x"),
        ["shared must be a list of arguments' names", "but got 'x'"],
    ),
    "a name that no argument has, as shared": (
        lambda: traced(lambda net, x: net.a(x), shared=["y"]),
        ["shared names ['y']", "['x']"],
    ),
    "packed sequences between layers": (
        lambda: sequential(Packed(), torch.zeros(4, 3, 2), whole=[Packs]),
        ["Packs is kept as one layer and returns a PackedSequence", "pad_packed_sequence"],
    ),
    "a tuple that is one argument": (
        lambda: of_pair((X, X)),
        ["pair is Tensor, but was (Tensor, Tensor)", "if all of the tuple is pair", "((…),)"],
    ),
    "a list of samples as input": (
        lambda: of_list([*X]),
        ["but was Tensor in the sample", "if x is a list of samples, give torch.stack(x)"],
    ),
    "a list of numbers as input": (
        lambda: of_list(X.tolist()),
        ["but was Tensor in the sample", "if x is a list of samples, give torch.tensor(x)"],
    ),
    "a sample of one row": (one_row, ["words has 4 samples", "places has 1", "shared=['places']"]),
    "the state of an RNN": (
        lambda: traced(state_of_rnn, torch.zeros(4, 3, 2)),
        ["shape (1, 2, 2) for 2 samples", "batch is in dimension 1", "state.transpose(0, 1)"],
    ),
    "the state of an RNN that is kept whole": (
        lambda: traced(state_of_rnn, torch.zeros(4, 3, 2), whole=[nn.GRU]),
        ["batch is in dimension 1", "state.transpose(0, 1)"],
    ),
    "the state of an RNN as input": (
        lambda: sequential(WithState(), (torch.zeros(4, 3, 2), torch.zeros(1, 4, 2))),
        ["Expected hidden size", "batch in dimension 1", "state.transpose(0, 1)"],
    ),
    "a single sample": (
        lambda: traced(lambda net, x: net.a(x) if len(x) > 1 else net.a(x) + 1, X[:1]),
        ["1 samples", "give sequential two samples or more"],
    ),
    "a checkpoint": (
        lambda: traced(lambda net, x: net.b(checkpoint(net.a, x, use_reentrant=False))),
        ["torch.utils.checkpoint", "leave out this call", "checkpoint='always'"],
    ),
    "a reentrant checkpoint": (
        lambda: traced(lambda net, x: net.b(checkpoint(net.a, x, use_reentrant=True))),
        ["torch.utils.checkpoint", "leave out this call", "checkpoint='always'"],
    ),
    "a cache": (
        lambda: sequential(Cached(), X),
        ["an argument of type DynamicCache", "module.decoder.config.use_cache = False"],
    ),
    "a model's own loss": (
        lambda: sequential(OwnLoss(), (X, X)),
        ["it returns a loss", "leave labels out of the sample", "weight=count"],
    ),
    "an index that does not fit other lengths": (
        lambda: sequential(Row(), (torch.zeros(2, 8, 2), 7), dynamic_shapes=({1: LENGTH}, None)),
        ["index 7 is out of bounds", "takes length 8, but not 6", "Dim('length', min=8)"],
    ),
    "a layer with the name of another": (
        lambda: sequential(nn.Sequential(nn.Linear(2, 2), Linear()), X),
        ["keep its Linear as one layer: whole=[type(module.get_submodule('1'))]"],
    ),
    "a sample without a batch": (
        lambda: sequential(nn.ReLU(), torch.ones(())),
        ["the sample of ReLU has no batch dimension", "give a batch of two samples or more"],
    ),
    "a module on meta, and a sample that is not": (
        lambda: sequential(nn.Linear(2, 2, device="meta"), X),
        ["Linear is on meta, but the sample is on cpu", "torch.zeros(8, 64, device='meta')"],
    ),
    "layers as module": (
        lambda: sequential(sequential(nn.Linear(2, 2), X), X),
        ["layers that sequential has made of a module", "give these layers to GPipe"],
    ),
    "no output": (
        lambda: traced(lambda net, x: None),
        ["Net returns no tensor; return the tensors"],
    ),
    "a branch on a tensor": (
        lambda: traced(lambda net, x: net.a(x) if x.sum() > 0 else x),
        ["Net cannot be traced at", "it depends on what is in a tensor", "put that part into"],
    ),
    "a parameter that is not registered, in an operator": (
        lambda: traced(lambda net, x: net.a(x) * HIDDEN),
        ["Net cannot be traced at", "it uses a parameter that is not registered"],
    ),
    "a fixed number of samples": (
        lambda: traced(lambda net, x: net.a(x).view(4, 2)),
        ["shape '[4, 2]' is invalid", "write x.shape[0] or -1 where it has a fixed number"],
    ),
    "two arguments for a module that takes one": (
        lambda: sequential(nn.Linear(2, 2), (X, X)),
        ["the arguments do not fit forward(input): too many positional arguments"],
    ),
    "an argument by another name": (
        lambda: sequential(nn.Linear(2, 2), X)(x=X),
        ["the arguments do not fit forward(input): missing a required argument: 'input'"],
    ),
    "a single sample without a batch": (
        lambda: sequential(nn.Linear(4, 4), torch.zeros(4)),
        ["Linear cannot be traced", "dimension 0 of the sample has to be the batch"],
    ),
    "what compares samples": (
        lambda: traced(lambda net, x: net.a(x) - x.mean(0), torch.randn(4, 2)),
        ["other outputs for the two halves", "belongs after the pipeline"],
    ),
    "a number in whole": (
        lambda: traced(lambda net, x: net.a(x), whole=[3]),
        ["a list of submodules or their classes, but has 3"],
    ),
    "a number as whole": (
        lambda: traced(lambda net, x: net.a(x), whole=3),
        ["a list of submodules or their classes, but got 3"],
    ),
    "a number as shared": (
        lambda: traced(lambda net, x: net.a(x), shared=3),
        ["shared must be a list of arguments' names, such as ['mask'], but got 3"],
    ),
    "many names as shared": (
        lambda: traced(lambda net, x: net.a(x), shared=[f"mask{k}" for k in range(1000)]),
        ["shared names ['mask", "…, but the tensors are in ['x']"],
    ),
}


ERRORS = (TypeError, ValueError, IndexError, RuntimeError, AttributeError)


@pytest.mark.filterwarnings("ignore:.torch.jit.(trace|trace_method). is deprecated")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", [*MISTAKES, *MORE_MISTAKES, *TRACED])
def test_a_mistake(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, words = (MISTAKES | MORE_MISTAKES | TRACED)[name]
    with pytest.raises(ERRORS) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    assert [word for word in words if word not in message] == []


GIVE_TARGET = "give step(criterion, input, target)"
COUNTED = {"weight": lambda t: (t != -100).sum()}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes from Python 3.11 on")
def test_a_target_on_another_device_is_named() -> None:
    with pytest.raises(RuntimeError) as caught:
        step(mse_loss, X, X.to("meta"))
    (note,) = vars(caught.value)["__notes__"]
    assert note.endswith(
        "the output is on cpu, but a tensor of the target on meta: give target.to('cpu')"
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes from Python 3.11 on")
@pytest.mark.parametrize(
    ("criterion", "hint", "options"),
    [
        (lambda y, t: mse_loss(y, t), f"its target is None: {GIVE_TARGET}", {}),
        (lambda y, t: mse_loss(y, t), f"whose target is None: {GIVE_TARGET}", COUNTED),
        (lambda y: y.mean(), "the criterion is called with two arguments, (output, target)", {}),
    ],
)
def test_what_is_wrong_with_a_criterion_is_named(criterion: Any, hint: str, options: Any) -> None:
    with pytest.raises((AttributeError, TypeError)) as caught:
        model().step(criterion, X, **options)
    (note,) = vars(caught.value)["__notes__"]
    assert note.endswith(hint)


def test_a_criterion_that_needs_no_target() -> None:
    loss = model().step(lambda output, _: output.square().mean(), X)
    assert loss.item() >= 0


def test_success_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Check that `sequential` prints nothing if it succeeds, even if it first guessed wrongly.

    It guesses which of the arguments have a batch dimension.
    """
    case = CASES["a mask as long as the batch"]
    sequential(case.make(), case.sample())
    assert capfd.readouterr() == ("", "")
