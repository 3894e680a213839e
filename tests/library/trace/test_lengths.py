"""Test the argument `dynamic_shapes` of `sequential`: its forms, and what is refused.

The argument says which dimensions may have another length in each call. Whether the layers compute
the same as the module for each length is tested in tests/behaviours/test_any_model.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.testing import assert_close

from torchgpipe import GPipe, MicroBatches, sequential
from torchgpipe.trace import Untraceable
from torchgpipe.trace.same_calls import SameCallsCheck

from .texts import GPT, SHAPES, WIDTH, Long, generated, text

LENGTH = Dim("length")


class Joined(nn.Module):
    """A module with inputs of two different lengths, which also uses the product of both lengths.

    One of its arguments is a dictionary of tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: dict[str, Tensor], places: Tensor) -> Tensor:
        x, y = pair["x"], pair["y"]
        n, s, t = x.shape[0], x.shape[1], y.shape[1]
        scores = self.a(x + places) @ self.b(y).transpose(1, 2)
        return scores.view(n, s * t).view(n, s, t)


def joined(n: int, s: int, t: int) -> tuple[Any, Tensor]:
    pair = {"x": torch.randn(n, s, WIDTH), "y": torch.randn(n, t, WIDTH)}
    return pair, torch.randn(s, WIDTH)


S = Dim("s")
TAKEN: list[Any] = [
    {"pair": {"x": {1: S}, "y": {1: Dim("t")}}, "places": {0: S}},
    ({"x": (Dim("batch"), S, None), "y": [None, Dim("t"), Dim.STATIC]}, {-2: S}),
    {"pair": {"x": {0: Dim.AUTO, 1: S}, "y": {1: Dim.DYNAMIC}}, "places": {0: S, 1: WIDTH}},
]


@pytest.mark.parametrize("shapes", TAKEN)
def test_what_it_takes(shapes: Any) -> None:
    module = Joined()
    layers = sequential(module, joined(3, 4, 8), dynamic_shapes=shapes)
    model = GPipe(layers, [1, len(layers) - 1], devices=["cpu"] * 2, chunks=2)
    for sizes in ((4, 6, 7), (3, 2, 9)):
        given = joined(*sizes)
        assert_close(model(*given), module(*given))


class Attends(nn.Module):
    """A module whose two arguments may have different lengths, as in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.a(target) @ self.b(source).transpose(1, 2)


def test_one_tensor_as_the_sample_of_two_arguments() -> None:
    module, x = Attends(), torch.randn(2, 8, WIDTH)
    shapes = {"source": {1: Dim("s")}, "target": {1: Dim("t")}}
    layers = sequential(module, (x, x), dynamic_shapes=shapes)
    given = torch.randn(2, 6, WIDTH), torch.randn(2, 9, WIDTH)
    assert_close(layers(*given), module(*given))


def test_one_code_serves_all_lengths() -> None:
    layers: Any = sequential(GPT(), text(2, 8), dynamic_shapes=SHAPES)
    assert "torch.arange(length, device=device)" in layers[0].code
    assert any(".reshape(batch * length, 8)" in layer.code for layer in layers)


def test_micro_batches_of_several_lengths() -> None:
    module = GPT()
    layers = sequential(module, text(2, 8), dynamic_shapes=SHAPES)
    model = GPipe(layers, [len(layers)], devices=["cpu"])
    given = [text(2, 5), text(3, 7)]
    seen: list[Tensor] = []

    def total(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.detach())
        return output.sum()

    model.step(total, MicroBatches(given), MicroBatches([0, 0]), reduction="sum")
    for output, x in zip(seen, given, strict=True):
        assert_close(output, module(x))


REFUSED: list[tuple[Any, type[Exception], str]] = [
    ({"words": {1: LENGTH}}, ValueError, r"names \['words'\], but the sample has \['mask', 'tok"),
    ((None, None, None), ValueError, "has 3 entries, but the sample has 2 arguments"),
    (LENGTH, TypeError, r"has the form of torch.export, such as \{'tokens'"),
    ({"tokens": LENGTH}, TypeError, "has the form of torch.export"),
    ({"tokens": {1: "length"}}, TypeError, "but has 'length' for tokens"),
    ({"tokens": {2: LENGTH}}, ValueError, "has dimension 2 of tokens, which has 2 dimensions"),
    ({"tokens": (None,)}, ValueError, "has 1 entries for tokens, which has 2 dimensions"),
    ({"tokens": {1: 2 * LENGTH}}, TypeError, r"has 2\*length for tokens, but a length that is"),
    ({"tokens": {1: Dim("t", min=7, max=8)}}, ValueError, "are too few between 7 and 8: give"),
    ({"tokens": {1: Dim("t", max=7)}}, ValueError, "t is 8, but dynamic_shapes allows at least 1"),
    (
        {"tokens": {1: LENGTH}, "mask": {0: LENGTH, 1: None}},
        ValueError,
        "length is one length, but the sample has 8 in dimension 1 of tokens and 2 in dimension 0",
    ),
]


@pytest.mark.parametrize(("shapes", "error", "message"), REFUSED)
def test_wrong_shapes(shapes: Any, error: type[Exception], message: str) -> None:
    sample = {"tokens": text(2, 8), "mask": torch.ones(2, 8)}
    with pytest.raises(error, match=message):
        sequential(GPT(), sample, dynamic_shapes=shapes)


CALLS: list[tuple[tuple[int, int], tuple[int, int], str]] = [
    ((2, 33), (2, 33), "length is 33, but dynamic_shapes allows at least 1 and at most 32"),
    ((2, 5), (2, 6), "length is 5 in dimension 1 of tokens, but 6 in dimension 1 of mask"),
]


@pytest.mark.parametrize(("tokens", "mask", "message"), CALLS)
def test_wrong_lengths(tokens: tuple[int, int], mask: tuple[int, int], message: str) -> None:
    shapes = {**SHAPES, "mask": SHAPES["tokens"]}
    sample = {"tokens": text(2, 8), "mask": torch.ones(2, 8)}
    layers = sequential(GPT(), sample, dynamic_shapes=shapes)
    model = GPipe(layers, [len(layers)], devices=["cpu"])
    with pytest.raises(ValueError, match=message):
        model(tokens=text(*tokens), mask=torch.ones(mask))


class Scaled(nn.Module):
    """A module that multiplies by 1 / length, which is a Python number but not a whole one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 / x.shape[1])


def test_what_does_something_else_for_another_length() -> None:
    with pytest.raises(Untraceable, match=r"2x8, 3x8, 2x6, .* it passes 0.125(?s:.*)dynamic_sh"):
        sequential(Scaled(), torch.randn(2, 8, WIDTH), dynamic_shapes=({1: LENGTH},))
    layers = sequential(Long(), text(2, 8), dynamic_shapes=SHAPES)
    layers(text(2, 9))
    with pytest.raises(Untraceable, match=r"2x10 samples x lengths it does not do the same"):
        layers(text(2, 10))


class At(nn.Module):
    """A module that returns the entry at `index` of each sample.

    The index is one number for each sample, or a single number for all samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.at = nn.Linear(WIDTH, WIDTH), Indexed()

    def forward(self, x: Tensor, index: Any) -> Any:
        return self.at(self.a(x), index)


class Indexed(nn.Module):
    def forward(self, x: Tensor, index: Any) -> Tensor:
        return x[torch.arange(len(x)), index]


class Counted(Indexed):
    """A submodule that converts the tensor `index` to Python numbers, so it needs real values."""

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return x[torch.arange(len(x)), [int(k) for k in index]]


@pytest.mark.parametrize("index", [7, torch.tensor([7, 7])])
@pytest.mark.parametrize("kept", [[], [Counted]])
def test_a_sample_that_does_not_fit_other_lengths(index: Any, kept: list[type[nn.Module]]) -> None:
    module, x = At(), torch.randn(2, 8, WIDTH)
    if kept:
        index = torch.as_tensor(index).expand(2)
        module.at = Counted()
    message = (
        r"^At cannot be traced at .*/test_lengths.py:\d+ \(`return x\[torch.*`\): "
        r"IndexError: index 7 is out of bounds for dimension \d with size [46]; "
        r"with this sample, the module takes length 8, but not [46]: give a sample that fits "
        r"both, .* torch.export.Dim\('length', min=8\)$"
    )
    with pytest.raises(Untraceable, match=message):
        sequential(module, (x, index), whole=kept, dynamic_shapes={"x": {1: LENGTH}})
    shapes = {"x": {1: Dim("length", min=8)}}
    layers = sequential(module, (x, index), whole=kept, dynamic_shapes=shapes)
    longer = torch.randn(2, 9, WIDTH)
    assert_close(layers(longer, index), module(longer, index))


def test_a_sample_that_does_not_fit_longer_lengths() -> None:
    shapes = {"tokens": {1: Dim("length", min=32)}}
    with pytest.raises(Untraceable, match=r"takes length 32, but not 48: .*\('length', max=32\)$"):
        sequential(GPT(), text(2, 32), dynamic_shapes=shapes)


class Divided(nn.Module):
    """A submodule that divides by a length, which it reads from a dictionary.

    The forward of the module around it writes the length into this dictionary.
    """

    def __init__(self, known: dict[str, int]) -> None:
        super().__init__()
        self.known = known

    def forward(self, x: Tensor) -> Tensor:
        return x / self.known["length"]


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.known = {"length": 8}
        self.linear, self.divided = nn.Linear(WIDTH, WIDTH), Divided(self.known)

    def forward(self, x: Tensor) -> Tensor:
        self.known["length"] = x.shape[1]
        return self.divided(self.linear(x))


def test_lengths_are_compared_with_the_module() -> None:
    """Check that `sequential` refuses layers that use the sample's length for every input.

    Only the module's own forward writes the length into the dictionary that a submodule reads. A
    pipeline's layers do not run this forward.
    """
    sample = torch.randn(2, 8, WIDTH)
    sequential(Noting(), sample)
    with pytest.raises(Untraceable, match="compute something else than the module does"):
        sequential(Noting(), sample, dynamic_shapes=({1: LENGTH},))


def test_without_dynamic_shapes_the_error_says_how_to_give_them() -> None:
    layers = sequential(GPT(), text(2, 8))
    with pytest.raises(ValueError, match=r"dynamic_shapes=\{'tokens': \{1: torch.export.Dim"):
        layers(text(2, 9))


class DynamicCache:
    """A stand-in for the class of Hugging Face's transformers that stores keys and values."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT()

    def forward(self, tokens: Tensor, past: DynamicCache | None = None) -> Any:
        past = past or DynamicCache()
        past.keys.append(self.model.embedding(tokens))
        return {"logits": self.model(tokens), "past": past}


@pytest.mark.parametrize(
    ("past", "message"),
    [(None, "it returns a DynamicCache"), (DynamicCache(), "is given a DynamicCache as past")],
)
def test_a_cache_is_refused_with_the_recipe(past: Any, message: str) -> None:
    recipe = r"use_cache = False\); to generate text with a cache, call the module itself"
    with pytest.raises(Untraceable, match=rf"{message}(?s:.*){recipe}"):
        sequential(Caching(), (text(2, 4), past))


def test_generation_without_a_cache() -> None:
    """Check that a pipeline and its module generate the same tokens, always the likeliest."""
    module = GPT().eval()
    layers = sequential(module, text(2, 4), dynamic_shapes=SHAPES)
    model = GPipe(layers, [4, len(layers) - 4], devices=["cpu"] * 2, chunks=2)
    given = text(2, 3)
    assert torch.equal(generated(model.predict, given, 8), generated(module, given, 8))


def test_a_misspelt_name_in_a_dictionary_is_refused() -> None:
    shapes = {"pair": {"X": {1: S}}, "places": {0: S}}
    with pytest.raises(ValueError, match=r"names \['X'\] in pair, but the sample has \['x', 'y'\]"):
        sequential(Joined(), joined(3, 4, 8), dynamic_shapes=shapes)


def test_new_lengths_are_checked_before_workers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that all new lengths of a mini-batch are recorded before its first task starts.

    A recording replaces functions of PyTorch in the whole process. If a worker thread compiled a
    layer at the same time, `torch.compile` would fail.
    """
    layers = sequential(GPT(), text(2, 6), dynamic_shapes=SHAPES)
    model = GPipe(layers, [4, len(layers) - 4], devices=["cpu"] * 2)
    begun: list[object] = []
    seen: list[int] = []
    check = SameCallsCheck._check

    def check_noted(*args: Any) -> None:
        seen.append(len(begun))
        check(*args)

    @contextmanager
    def observe(task: object) -> Iterator[None]:
        begun.append(task)
        yield

    monkeypatch.setattr(SameCallsCheck, "_check", check_noted)
    model.observer = observe
    model.evaluate(lambda y, _: y.mean(), MicroBatches([text(2, 5), text(2, 9), text(3, 7)]))
    assert seen and not any(seen)
    assert begun
