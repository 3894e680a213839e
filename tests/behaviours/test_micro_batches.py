"""Tests of `step` and `evaluate` with `MicroBatches`, and with mappings and dataclasses as inputs.

With `MicroBatches`, the caller splits the mini-batch. Micro-batches can then have different lengths
of sequences and numbers of samples. Losses and gradients must be those of the layers without a
pipeline.
"""

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from torchgpipe import GPipe, MicroBatches, sequential
from torchgpipe.schedules.named import NAMED

from ..plain import TWICE, piped
from .compare import REORDERED, differences

CLASSES = 7
SIZES = [(2, 5), (1, 9), (4, 3), (2, 2)]
"""For each micro-batch, the number of sequences and their length."""


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
    return nn.Sequential(nn.Embedding(CLASSES, 6), *hidden, nn.Linear(6, CLASSES))


def sentences(seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(CLASSES, size, generator=draw) for size in SIZES]


def per_token(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten(), reduction=reduction)


def sum_per_token(output: Tensor, target: Tensor) -> Tensor:
    return per_token(output, target, "sum")


def expected(criterion: Callable[..., Tensor], weights: Sequence[float]) -> Any:
    """Run the layers without a pipeline on each micro-batch, and run backward.

    Args:
        criterion: The loss function.
        weights: For each micro-batch, the factor of its loss.

    Returns:
        The sum of the weighted losses, and the layers with their gradients.
    """
    plain = layers()
    total = torch.zeros(())
    for x, target, weight in zip(sentences(1), sentences(2), weights, strict=True):
        loss = criterion(plain(x), target) * weight
        loss.backward()
        total = total + loss.detach()
    return total, plain


WRONG: Any = torch.zeros(3)
SAMPLES = [n / 9 for n, _ in SIZES]
TOKENS = [n * length / 35 for n, length in SIZES]


@pytest.mark.parametrize(
    ("criterion", "options", "weights"),
    [
        (per_token, {}, SAMPLES),
        (per_token, {"weight": Tensor.numel}, TOKENS),
        (sum_per_token, {"reduction": "sum"}, [1.0] * 4),
    ],
    ids=["by samples", "by tokens", "sum"],
)
@pytest.mark.parametrize("schedule", NAMED)
def test_micro_batches_of_their_own_lengths(
    criterion: Any,
    options: dict[str, Any],
    weights: list[float],
    schedule: str,
    engine: str,
    checkpoint: str,
) -> None:
    balance, v = ([2, 1, 1, 1], 2) if schedule in TWICE else ([3, 2], 1)
    settings = {"schedule": schedule, "engine": engine, "checkpoint": checkpoint}
    # `MicroBatches` are taken as they are, so `chunks` has no effect.
    model = piped(layers(), balance, v=v, chunks=1, devices=("cpu", "cpu"), **settings)
    x, target = MicroBatches(sentences(1)), MicroBatches(sentences(2))
    loss = model.step(criterion, x, target, **options)
    plain_loss, plain = expected(criterion, weights)
    assert differences((loss, model), (plain_loss, plain), REORDERED) == []


class Pooled(nn.Module):
    """A layer that returns the mean over the tokens of each packed sequence.

    Its input is a tensor with the tokens of all sequences, and a tensor with their lengths.
    """

    def forward(self, packed: tuple[Tensor, Tensor]) -> Tensor:
        tokens, lengths = packed
        return torch.stack([part.mean(0) for part in tokens.split(lengths.tolist())])


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 6)

    def forward(self, packed: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, lengths = packed
        return self.embedding(tokens), lengths


def packed() -> MicroBatches:
    micro_batches = []
    for lengths in ([3, 2], [4], [1, 1, 2]):
        tokens = torch.arange(sum(lengths)) % CLASSES
        micro_batches.append((tokens, torch.tensor(lengths)))
    return MicroBatches(micro_batches)


def test_packed_sequences_need_a_weight(engine: Any) -> None:
    """Check that a step with packed sequences needs the argument `weight`, which counts samples.

    A packed micro-batch is a tensor of tokens and a tensor of lengths. The library cannot tell how
    many samples it has.
    """
    torch.manual_seed(0)
    parts = nn.Sequential(Embedded(), Pooled(), nn.Linear(6, CLASSES))
    model = piped(parts, [2, 1], devices=("cpu", "cpu"), engine=engine)
    target = MicroBatches([torch.zeros(n, dtype=torch.long) for n in (2, 1, 3)])
    with pytest.raises(ValueError, match=r"cannot be counted.*weight="):
        model.step(cross_entropy, packed(), target)
    with pytest.raises(ValueError, match=r"cannot be split.*MicroBatches\(\[...\]\)"):
        model.step(cross_entropy, packed(), torch.zeros(6), reduction="sum")
    loss = model.step(cross_entropy, packed(), target, weight=len)
    torch.manual_seed(0)
    plain = nn.Sequential(Embedded(), Pooled(), nn.Linear(6, CLASSES))
    plain_loss = torch.zeros(())
    for x, t in zip(packed(), target, strict=True):
        plain_loss = plain_loss + cross_entropy(plain(x), t) * len(t) / 6
    plain_loss.backward()
    assert differences((loss, model), (plain_loss.detach(), plain), REORDERED) == []


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.left(a) + self.right(b)


def test_micro_batches_of_a_traced_module_are_in_the_form_of_its_sample() -> None:
    torch.manual_seed(0)
    sample = torch.randn(2, 4), torch.randn(2, 5)
    module = TwoTowers()
    traced = sequential(module, sample)
    model = GPipe(traced, [1, len(traced) - 1], devices=["cpu", "cpu"])
    micro_batches = [sample, (torch.randn(3, 4), torch.randn(3, 5))]
    target = torch.randn(5, 3)
    loss = model.evaluate(nn.functional.mse_loss, MicroBatches(micro_batches), target)
    outputs = torch.cat([module(*args) for args in micro_batches])
    torch.testing.assert_close(loss, nn.functional.mse_loss(outputs, target).detach())
    assert torch.equal(model.predict(MicroBatches(micro_batches)), outputs)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda model: MicroBatches([]), ValueError, "at least one micro-batch"),
        (lambda model: MicroBatches(WRONG), TypeError, "a list of.*but got Tensor"),
        (lambda model: model(MicroBatches([3])), TypeError, "a micro-batch must be a tensor.*int"),
        (
            lambda model: model.step(
                per_token, MicroBatches(sentences(1)), MicroBatches(sentences(2)[:3])
            ),
            ValueError,
            "the input has 4 micro-batches, but the target has 3",
        ),
        (
            lambda model: model(MicroBatches(sentences(1))),
            ValueError,
            r"differ in other dimensions.*step\(criterion, input, target\)",
        ),
    ],
)
def test_refusals(use: Callable[[Any], object], error: type[Exception], message: str) -> None:
    model = GPipe(layers(), [3, 2], devices=["cpu", "cpu"])
    with pytest.raises(error, match=message):
        use(model)


@dataclass
class Pair:
    x: Tensor
    scale: Tensor
    name: str


class First(nn.Module):
    """A layer whose input is a mapping or a `Pair`, not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, given: Any) -> Tensor:
        values = given if isinstance(given, Mapping) else vars(given)
        assert values["name"] == "a batch"
        return self.linear(values["x"]) * values["scale"][:, None]


class OwnDict(UserDict[str, Any]):
    """A mapping like a tokenizer's `BatchEncoding`."""


def taking_structures() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(First(), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))


def tensors(seed: int, size: int = 8) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=draw)
    return {"x": x, "scale": torch.rand(size, generator=draw), "name": "a batch"}


def divided(values: dict[str, Any], chunks: int) -> list[dict[str, Any]]:
    split = zip(values["x"].chunk(chunks), values["scale"].chunk(chunks), strict=True)
    return [{"x": x, "scale": scale, "name": "a batch"} for x, scale in split]


KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dict": dict,
    "UserDict": OwnDict,
    "dataclass": lambda values: Pair(**values),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_first_layer_can_take_a_structure(
    kind: Callable[[dict[str, Any]], Any], engine: str, checkpoint: str
) -> None:
    options: dict[str, Any] = {"engine": engine, "checkpoint": checkpoint}
    model = piped(taking_structures(), [2, 2], chunks=4, devices=("cpu", "cpu"), **options)
    plain, target = taking_structures(), torch.ones(8, 3)
    values = tensors(1)
    total = torch.zeros(())
    for given, t in zip(divided(values, 4), target.chunk(4), strict=True):
        loss = mse_loss(plain(kind(given)), t) / 4
        loss.backward()
        total = total + loss.detach()
    found = model.step(mse_loss, kind(values), target)
    assert differences((found, model), (total, plain), REORDERED) == []
    with torch.no_grad():
        output = model(kind(values))
        if output is not None:
            expected = torch.cat([plain(kind(given)) for given in divided(values, 4)])
            assert differences(output, expected, REORDERED) == []


def test_structures_as_micro_batches(engine: str) -> None:
    model = piped(taking_structures(), [2, 2], chunks=1, engine=engine, devices=("cpu", "cpu"))
    plain = taking_structures()
    given = [tensors(1, 2), tensors(2, 3)]
    target = MicroBatches([torch.ones(2, 3), torch.ones(3, 3)])
    total = torch.zeros(())
    for x, t in zip(given, target, strict=True):
        loss = mse_loss(plain(x), t) * len(t) / 5
        loss.backward()
        total = total + loss.detach()
    found = model.step(mse_loss, MicroBatches(given), target)
    assert differences((found, model), (total, plain), REORDERED) == []


@pytest.mark.parametrize(
    "given, message",
    [
        ({"name": "a batch"}, "input must have tensors, but got dict without any"),
        ({"x": torch.ones(8, 4), "scale": torch.ones(7)}, "must have the same batch size"),
        ([torch.ones(8, 4)], "input must be a tensor or a tuple of tensors, but got list"),
    ],
)
def test_structures_that_are_refused(given: Any, message: str) -> None:
    model = piped(taking_structures(), [2, 2], chunks=4, engine="graph", devices=("cpu", "cpu"))
    with pytest.raises((TypeError, ValueError), match=message):
        model.step(mse_loss, given, torch.ones(8, 3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_that_cannot_be_split() -> None:
    model = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu"], chunks=2)
    nested = torch.nested.nested_tensor([torch.zeros(1, 2), torch.zeros(2, 2)])
    with pytest.raises(ValueError, match="tensor 0 of the input is nested"):
        model(nested)
