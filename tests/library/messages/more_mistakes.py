"""List more common mistakes that users make.

They are not in mistakes.py because a file may have at most 350 lines.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils.rnn import pack_padded_sequence

from torchgpipe import GPipe, MicroBatches, schedules, sequential
from torchgpipe.saves import Saves
from torchgpipe.skip import skippable, stash
from torchgpipe.timeline import record

from .mistakes import LAYER, Mistake, X, layers, model, step


@skippable(stash=["skip"])
class Stashing(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return x


class Aside(nn.Module):
    """A layer that keeps a tensor with an autograd graph as an attribute, which is a mistake."""

    def forward(self, x: Tensor) -> Tensor:
        self.aside = x.square()
        return x


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.a(x) + y


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(9, 2), nn.Linear(2, 2)

    def forward(self, words: Tensor, offsets: Tensor) -> Any:
        return self.out(self.bag(words, offsets))


def traced_sum() -> GPipe:
    layers = sequential(Sum(), (X, X))
    return GPipe(layers, [len(layers)], devices=["cpu"], chunks=2)


def frozen() -> GPipe:
    pipeline = model()
    pipeline.requires_grad_(False)
    return pipeline


def removed_layer() -> None:
    del model()[0]


def kept_aside() -> object:
    aside = Aside()
    pipeline = GPipe(
        nn.Sequential(LAYER, aside), [2], devices=["cpu"], chunks=2, checkpoint="never"
    )
    return pipeline.step(lambda y, t: mse_loss(y, t) + aside.aside.mean(), X, X)


class WithState(nn.Module):
    """A layer that returns a second tensor with the batch in dimension 1, as an RNN does."""

    def forward(self, x: Tensor) -> Any:
        return x, x.unsqueeze(0)


class Packing(nn.Module):
    def forward(self, x: Tensor) -> Any:
        lengths = torch.ones(len(x), dtype=torch.int64)
        return pack_padded_sequence(x[:, None], lengths, batch_first=True, enforce_sorted=False)


class Scaled(nn.Linear):
    """A layer with a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("scale", torch.ones(2), persistent=False)


def unfilled() -> None:
    """Make a pipeline of a layer on `meta` with an `init` that forgets to fill the layer."""
    with torch.device("meta"):
        scaled = nn.Sequential(Scaled())
    GPipe(scaled, [1], devices=["cpu"], init=lambda _, layer: None)


MORE_MISTAKES: dict[str, Mistake] = {
    "a truth value as scaler": (
        lambda: step(mse_loss, scaler=True),
        ["scaler must be a torch.amp.GradScaler()", "but got True"],
    ),
    "the class of a scaler": (
        lambda: step(mse_loss, scaler=torch.amp.GradScaler),
        ["scaler must be a torch.amp.GradScaler()", "but got <class"],
    ),
    "a device that PyTorch does not know": (
        lambda: model(devices=["gpu:0", "gpu:1"]),
        ["'gpu:0' is not a device of PyTorch", "'cuda:0'"],
    ),
    "numbers that are no devices": (
        lambda: model(devices=[0.5, 1.5]),
        ["0.5 is not a device of PyTorch"],
    ),
    "lists as schedule": (
        lambda: model(schedule=[["0F0", "0B0"], ["1F0", "1B0"]]),
        ["schedule must be a name such as '1F1B'", "Schedule(name, placement, lists)", "[['0F0'"],
    ),
    "an empty list of devices": (
        lambda: model(devices=[]),
        ["devices is empty; name a device for each partition"],
    ),
    "a dictionary as balance": (
        lambda: model({0: 1, 1: 1}),
        ["balance must be", "but got {0: 1, 1: 1}"],
    ),
    "a set as balance": (
        lambda: model({1, 2}),
        ["balance must be", "but got {1, 2}"],
    ),
    "text as the number of micro-batches of a schedule": (
        lambda: schedules.make("1F1B", 2, "4"),  # type: ignore[arg-type]
        ["m must be a whole number, but got '4'"],
    ),
    "micro-batches as the target of loss": (
        lambda: model().loss(mse_loss, X, MicroBatches([X])),
        ["loss takes the target of a whole mini-batch", "call step or evaluate"],
    ),
    "a list of as many tensors as samples, each as long": (
        lambda: model().step(mse_loss, X, [X[:, 0]] * 4),
        ["a list of 4 tensors, each with 4 entries, for 4 samples", "give a tuple", "MicroBatches"],
    ),
    "a state of an RNN as input": (
        lambda: model()((X, torch.zeros(1, 4, 2))),
        ["but the sizes are [4, 1]; give the state of an RNN as state.transpose(0, 1)"],
    ),
    "a state of an RNN as output": (
        lambda: GPipe(nn.Sequential(LAYER, WithState()), [1, 1], devices=["cpu"] * 2, chunks=2)(X),
        ["shape (1, 2, 2) for 2 samples", "return state.transpose(0, 1)"],
    ),
    "a packed sequence as output": (
        lambda: GPipe(nn.Sequential(Packing()), [1], devices=["cpu"], chunks=2)(X),
        ["the last partition returns PackedSequence", "call step(criterion, input, target)"],
    ),
    "samples that only the targets count": (
        lambda: step(mse_loss, MicroBatches([X, X]), MicroBatches([X[:1], X])),
        ["cannot be counted", "or its target has another length; give weight="],
    ),
    "a long balance": (
        lambda: model([1] * 1000),
        ["the balance [1, 1, 1,", "… sums up to 1000 layers", "the module has 2"],
    ),
    "a long list as chunks": (lambda: model(chunks=[1] * 1000), ["but got [1, 1", "…"]),
    "many batch sizes": (
        lambda: model()(tuple(torch.zeros(n, 2) for n in range(1, 500))),
        ["the same batch size", "[1, 2, 3", "…"],
    ),
    "a criterion's class without a target": (
        lambda: model().step(nn.CrossEntropyLoss(), X),
        ["CrossEntropyLoss needs a target: call step(criterion, input, target)"],
    ),
    "a criterion's function without a target": (
        lambda: model().evaluate(mse_loss, X),
        ["mse_loss needs a target: call evaluate(criterion, input, target)"],
    ),
    "two values beside the loss": (
        lambda: step(lambda y, t: (mse_loss(y, t), 1, 2)),
        ["must return a scalar tensor, but returned tuple; return (loss, logs)"],
    ),
    "saving with the pipeline first": (
        lambda: Saves("never-made").save(model(), 0, None),  # type: ignore[arg-type]
        ["step must be a whole number, but got GPipe(balance=[1, 1]"],
    ),
    "recording layers": (
        lambda: record(layers()).__enter__(),  # type: ignore[arg-type]
        ["record takes a pipeline, but got Sequential"],
    ),
    "a skip that no layer pops": (
        lambda: GPipe(nn.Sequential(Stashing(), LAYER), [1, 1], devices=["cpu"] * 2),
        ["skips do not match: layer '0' stashes 'skip', which no later layer pops; if a class"],
    ),
    "a pipeline in place of layers": (
        lambda: GPipe(model(), [1, 1]),  # type: ignore[arg-type]
        ["GPipe is a pipeline already", "wrap the nn.Sequential that it was made of"],
    ),
    "a loss for each sample, and what to do": (
        lambda: step(nn.MSELoss(reduction="none")),
        ["returned one of shape (2, 2); return its mean", "without reduction='none'"],
    ),
    "a loss that is a number, and what to do": (
        lambda: step(lambda y, t: mse_loss(y, t).item()),
        ["returned float; leave out .item()"],
    ),
    "no loss, and what to do": (
        lambda: step(lambda y, t: None),
        ["returned NoneType; return the loss"],
    ),
    "frozen parameters": (
        lambda: frozen().step(mse_loss, X, X),
        ["no parameter requires grad", "call evaluate()"],
    ),
    "arguments in a list": (
        lambda: traced_sum().step(mse_loss, [X, X], X),
        ["missing a required argument: 'y'; a list is one argument: give a tuple"],
    ),
    "the criterion of evaluate last": (
        lambda: model().evaluate(X, X, mse_loss),  # type: ignore[arg-type]
        ["criterion must be a function", "call evaluate(criterion, input, target)"],
    ),
    "None as input of a step": (
        lambda: step(mse_loss, None),
        ["got NoneType; give one", "the rank of the first stage has to give it"],
    ),
    "None as input of a traced module": (
        lambda: traced_sum().step(mse_loss, None, X),
        ["got NoneType; give one", "the rank of the first stage has to give it"],
    ),
    "another schedule": (
        lambda: setattr(model(), "schedule", "1F1B"),
        ["keeps the schedule that it was made with, 'GPipe'", "to use '1F1B', make a new pipeline"],
    ),
    "a new layer": (
        lambda: model().__setitem__(0, LAYER),
        ["layer 0 of a pipeline cannot be replaced", "wrap them in a new pipeline"],
    ),
    "no layer": (
        removed_layer,
        ["layer 0 of a pipeline cannot be replaced or removed"],
    ),
    "a list as sample": (
        lambda: sequential(LAYER, [X]),
        ["the sample is a list, which is one argument of Linear", "give a tuple of its arguments"],
    ),
    "a list as sample on meta": (
        lambda: sequential(nn.Linear(2, 2, device="meta"), [X.to("meta")]),
        ["the sample is a list, which is one argument of Linear", "give a tuple of its arguments"],
    ),
    "a buffer that init leaves out": (
        unfilled,
        ["'0.scale' was on device 'meta'", "no state has it", "let init compute its values"],
    ),
    "an EmbeddingBag with offsets": (
        lambda: sequential(Bag(), (torch.arange(8), torch.arange(0, 8, 2))),
        ["Bag gives offsets to an nn.EmbeddingBag", "a tensor with a row for each sample"],
    ),
    "a criterion that reads an attribute of a layer": (
        kept_aside,
        ["the same tensor in several micro-batches", "or, if the criterion reads it", "return it"],
    ),
}
