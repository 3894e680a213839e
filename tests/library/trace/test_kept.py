"""Test submodules that `sequential` keeps as one layer (`whole=`), and that need real values.

`sequential` must not run such a submodule on made-up inputs. For example, with made-up lengths of
zero, a packed sequence would raise an error.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from torchgpipe import GPipe, sequential
from torchgpipe.trace.refuse import Untraceable

WORDS, WIDTH, LENGTH = 12, 6, 7


class Encoder(nn.Module):
    """A module that encodes sentences of different lengths, by an LSTM on packed sequences."""

    def __init__(self, are_sorted: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.are_sorted = are_sorted

    def forward(self, words: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        embedded = self.embedding(words)
        packed = pack_padded_sequence(
            embedded, lengths, batch_first=True, enforce_sorted=self.are_sorted
        )
        outputs, (last, _) = self.lstm(packed)
        padded, _ = pad_packed_sequence(outputs, batch_first=True, total_length=LENGTH)
        return {"all": padded, "last": last[-1]}


class Reader(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.hidden, self.out = nn.Linear(WIDTH, 20), nn.Linear(20, 3)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        encoded = self.encoder(words, lengths)
        pooled = encoded["all"].sum(1) + encoded["last"]
        result: Tensor = self.out(self.hidden(pooled).relu())
        return result


def sentences(n: int) -> tuple[Tensor, Tensor]:
    lengths = torch.arange(n) * 5 % LENGTH + 1
    return torch.randint(WORDS, (n, LENGTH)), lengths.sort(descending=True).values


@pytest.mark.parametrize("are_sorted", [False, True])
@pytest.mark.parametrize("engine", ["graph", "workers"])
def test_packed_sequences(engine: Any, are_sorted: bool) -> None:
    """Check that a pipeline computes the same as its module, in training and in eval mode."""
    module = Reader(Encoder(are_sorted))
    layers = sequential(module, sentences(4), whole=[Encoder])
    assert [name.partition(":")[2] for name, _ in layers.named_children()] == [
        "encoder",
        "hidden",
        "out",
    ]
    model = GPipe(layers, [2, 1], devices=["cpu", "cpu"], chunks=2, engine=engine)
    for training, n in ((True, 13), (False, 6)):
        model.train(training)
        words, lengths = sentences(n)
        expected = module(words, lengths)
        torch.testing.assert_close(model(words, lengths), expected)
    model(words, lengths).sum().backward()
    found = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    module(words, lengths).sum().backward()
    for grad, p in zip(found, module.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad)


class AllWords(Encoder):
    """An encoder that cuts its output to the length of all sentences of the batch together."""

    def forward(self, words: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        encoded = super().forward(words, lengths)
        return {**encoded, "all": encoded["all"][:, : int(lengths.sum())]}


@pytest.mark.parametrize(
    ("encoder", "device", "message"),
    [
        (Encoder, "meta", "needs the values of tensors.*with the module on the CPU"),
        (AllWords, "cpu", "shapes are not determined by the batch size"),
    ],
)
def test_refusals(encoder: type[Encoder], device: str, message: str) -> None:
    module = Reader(encoder()).to(device)
    words = torch.randint(WORDS, (3, LENGTH))
    with pytest.raises(Untraceable, match=message):
        sequential(module, (words.to(device), torch.tensor([1, 1, 2])), whole=[encoder])


class Positions(nn.Module):
    """A module without children, with a table that is a plain attribute and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class ReadsTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.out = torch.nn.utils.spectral_norm(nn.Linear(WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.positions(x) * self.positions.table)
        return y


def test_plain_tensors_of_submodules_at_another_batch_size() -> None:
    """Check tensors that are plain attributes, which the check of other batch sizes replaces.

    The hook of `spectral_norm` has such a tensor, and the module itself reads another one.
    """
    module = ReadsTable().eval()
    layers = sequential(module, torch.randn(2, WIDTH))
    x = torch.randn(4, WIDTH)
    torch.testing.assert_close(layers(x), module(x))
    table = module.positions.table
    assert isinstance(table, Tensor)
    assert type(table) is Tensor


class Contents(nn.Module):
    """A module that reads how many tensors it gets, and the contents of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 3)
        self.calls = 0

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        x = torch.stack([*features.values()]).sum(0)
        y: Tensor = self.out(x) * x.sum().item()
        return y


def test_code_that_needs_contents_is_not_tried_for_each_guess_of_batched_inputs() -> None:
    module = Contents()
    features = {f"f{k}": torch.randn(2, WIDTH) for k in range(12)}
    with pytest.raises(Untraceable, match="depends on what is in a tensor"):
        sequential(module, (features,))
    assert module.calls < 10


class Pool(nn.Module):
    """A part without children that needs the contents of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * x.max().item()


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool = nn.Linear(WIDTH, WIDTH), Pool()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.pool(self.first(x))
        return y


def test_the_advice_names_the_part_that_needs_contents() -> None:
    with pytest.raises(Untraceable, match=r"whole=\[Pool\]"):
        sequential(Pooled(), torch.randn(2, WIDTH))
    layers = sequential(Pooled(), torch.randn(2, WIDTH), whole=[Pool])
    assert len(layers) == 2


def test_a_lack_of_memory_is_not_taken_for_other_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that `sequential` tells of memory if it lacks when gradients are compared."""
    calls = []
    grad = torch.autograd.grad

    def lacking(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", lacking)
    with pytest.raises(torch.OutOfMemoryError):
        sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.randn(2, 2))
