"""Test that ranks train a parameter that several layers share, as the plain layers do."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear

from torchgpipe import GPipe, sequential
from torchgpipe.distributed import DistributedGPipe, tied
from torchgpipe.schedules.named import NAMED
from torchgpipe.state.saves import Saves

from ...behaviours.compare import REORDERED, differences
from ...plain import TWICE
from .test_saves import shared_folder

WORLD = 3
WIDTH = 6
WORDS = 11
pytestmark = pytest.mark.ranks(WORLD)


class Head(nn.Module):
    """The last layer of a language model. It uses the embedding's weight, and has its own bias."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.bias = nn.Parameter(torch.zeros(WORDS))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def gpt(seed: int = 0, blocks: int = 1) -> nn.Sequential:
    """Return a small language model, whose embedding (layer 0) and last layer share a weight.

    Between them, there are two layers for each block.
    """
    torch.manual_seed(seed)
    first = nn.Embedding(WORDS, WIDTH)
    between: list[nn.Module] = []
    for _ in range(blocks):
        between += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(first, *between, Head(first))


def words(seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (8,), generator=draw), torch.randint(WORDS, (8,), generator=draw)


def trained(model: Any, optimizer: torch.optim.Optimizer, *seeds: int) -> dict[str, Tensor]:
    """Train on a mini-batch for each random seed. Return losses, gradient norms and the state."""
    parameters = [*model.parameters()]
    clip = getattr(model, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, parameters))
    found = {}
    for seed in seeds:
        x, target = words(seed)
        if not hasattr(model, "step"):
            loss = cross_entropy(model(x), target)
            loss.backward()
        else:
            loss = model.step(cross_entropy, x, target)
        found[f"loss {seed}"] = loss.detach()
        found[f"norm {seed}"] = clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
    for name, x in model.state_dict().items():
        found[name] = x.clone()
    return found


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.01)


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    picked = {name: expected[name] for name in found}
    assert differences(found, picked, REORDERED) == []


def weight_of(model: DistributedGPipe) -> Tensor | None:
    """Return this rank's copy of the shared weight, or `None` if no layer of this rank has it."""
    names = [name for name, x in model.state_dict().items() if x.shape == (WORDS, WIDTH)]
    return model.state_dict()[names[0]].clone() if names else None


def assert_copies_are_equal(model: DistributedGPipe, count: int = 2) -> None:
    weights: list[Any] = [None] * WORLD
    dist.all_gather_object(weights, weight_of(model))
    copies = [weight for weight in weights if weight is not None]
    assert len(copies) == count
    assert all(torch.equal(copy, copies[0]) for copy in copies)


@pytest.mark.quick(4)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", NAMED)
def test_training(schedule: str, checkpoint: Any) -> None:
    blocks, balance = (2, [1] * 6) if schedule in TWICE else (1, [1, 2, 1])
    plain = gpt(blocks=blocks)
    options: dict[str, Any] = {"chunks": 6, "schedule": schedule, "checkpoint": checkpoint}
    model = DistributedGPipe(gpt(blocks=blocks), balance, **options)
    expected = trained(plain, adam(plain), 1, 2, 3)
    assert_alike(trained(model, adam(model), 1, 2, 3), expected)
    # Rank 0 holds the first and the last stage.
    assert_copies_are_equal(model, count=1 if schedule == "ZBVZeroBubble" else 2)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_copies_stay_equal_to_the_bit(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that copies stay equal although, in this test, no copy is replaced by another one."""
    monkeypatch.setattr(tied, "_values", lambda shared, heard: shared.parameter().detach())
    model = DistributedGPipe(gpt(), [1, 2, 1], chunks=4, schedule="1F1B")
    begin = weight_of(model)
    optimizer = kind(model.parameters(), lr=0.05, weight_decay=0.01)
    trained(model, optimizer, *range(20))
    assert begin is None or not torch.equal(begin, weight_of(model))  # type: ignore[arg-type]
    assert_copies_are_equal(model)


def test_a_backward_of_the_callers_loss() -> None:
    plain, model = gpt(), DistributedGPipe(gpt(), [1, 2, 1], chunks=4)
    x, target = words()
    cross_entropy(plain(x), target).backward()
    model.loss(cross_entropy, x, target).backward()
    expected = {"0.weight": plain[0].weight.grad, "3.weight": plain[0].weight.grad}
    for name, p in model.named_parameters():
        if name in expected:
            assert differences({"": p.grad}, {"": expected[name]}, REORDERED) == []


def test_a_backward_for_the_input_only() -> None:
    """Check that no rank waits for a gradient that another rank does not compute.

    Rank 0 computes the gradient of the input only, and not that of the shared weight.
    """
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, WIDTH, bias=False)
    middle, last = nn.PReLU(), nn.Linear(WIDTH, WIDTH, bias=False)
    last.weight = first.weight
    model = DistributedGPipe(nn.Sequential(first, middle, last), [1, 1, 1], chunks=2)
    x = torch.randn(4, WIDTH, requires_grad=True)
    loss = model.loss(lambda y, _: y.square().sum(), x, None)
    if model.rank == 0:
        (found,) = torch.autograd.grad(loss, x)
        (expected,) = torch.autograd.grad(last(middle(first(x))).square().sum(), x)
        torch.testing.assert_close(found, expected)
    else:
        loss.backward()


def test_a_criterion_that_uses_the_weight() -> None:
    """Check that a gradient from a criterion that uses the weight reaches all copies of it."""
    plain, layers = gpt(), gpt()
    model = DistributedGPipe(layers, [1, 2, 1], chunks=4)
    x, target = words()

    def loss_of(head: nn.Module, y: Tensor, t: Tensor) -> Tensor:
        return cross_entropy(y, t) + head.weight.square().sum()  # type: ignore[operator]

    loss_of(plain[3], plain(x), target).backward()
    model.step(partial(loss_of, layers[3]), x, target)
    for name, p in model.named_parameters():
        if name in ("0.weight", "3.weight"):
            assert differences({"": p.grad}, {"": plain[0].weight.grad}, REORDERED) == []


def uniform(k: int, layer: nn.Module) -> None:
    for p in layer.parameters():
        nn.init.uniform_(p)


def test_layers_on_meta_begin_with_equal_copies() -> None:
    """Check that all copies of the shared weight begin with the values it has in one process.

    In one process, `init` fills the weight twice, once for each of its two layers. The values of
    the second call stay.
    """
    with torch.device("meta"):
        model = DistributedGPipe(gpt(), [1, 2, 1], init=uniform)
        threads = GPipe(gpt(), [1, 2, 1], devices=["cpu"] * 3, init=uniform)
    expected = threads.state_dict()
    for name, x in model.state_dict().items():
        assert torch.equal(x, expected[name]), name
    assert_copies_are_equal(model)


def test_ranks_that_were_made_with_other_seeds_begin_with_equal_copies() -> None:
    model = DistributedGPipe(gpt(seed=dist.get_rank()), [1, 2, 1])
    assert_copies_are_equal(model)


def test_a_frozen_weight() -> None:
    layers = gpt()
    layers[0].requires_grad_(False)
    model = DistributedGPipe(layers, [1, 2, 1], chunks=2)
    model.step(cross_entropy, *words())
    gradients = {name: p.grad is not None for name, p in model.named_parameters()}
    assert (
        gradients
        == [
            {"0.weight": False},
            {"1.weight": True, "1.bias": True},
            {"3.weight": False, "3.bias": True},
        ][model.rank]
    )


def test_a_state_fits_any_balance(tmp_path: Path) -> None:
    """Check that a state with a shared weight, saved on three ranks, can be loaded elsewhere.

    It is loaded in one process, and over ranks with another balance. The optimizer's state of the
    shared weight is saved only once, under the name that the weight has in one process.
    """
    plain, model = gpt(), DistributedGPipe(gpt(), [1, 2, 1], chunks=2)
    of_plain, optimizer = adam(plain), adam(model)
    trained(plain, of_plain, 1, 2)
    trained(model, optimizer, 1, 2)
    saves = Saves(shared_folder(tmp_path))
    saves.save(2, model, optimizer)
    loaded = gpt(5)
    of_loaded = adam(loaded)
    saves.load(loaded, of_loaded)
    assert_alike(dict(loaded.state_dict()), dict(plain.state_dict()))
    again = DistributedGPipe(gpt(6), [1, 1, 2], chunks=2)
    of_again = adam(again)
    saves.load(again, of_again)
    expected = trained(plain, of_plain, 3, 4)
    assert_alike(trained(loaded, of_loaded, 3, 4), expected)
    assert_alike(trained(again, of_again, 3, 4), expected)
    assert_copies_are_equal(again)


class Functional(nn.Module):
    """A language model that uses one weight in two functions: the embedding and the output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))
        self.block = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.norm(self.block(embedding(x, self.weight))), self.weight)


def test_a_traced_module_that_uses_a_weight_twice(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Functional()
    x, _ = words()
    layers = sequential(module, x)
    model = DistributedGPipe(layers, [1, len(layers) - 2, 1], chunks=2)
    optimizer = adam(model)
    trained(model, optimizer, 1)
    saves = Saves(shared_folder(tmp_path))
    saves.save(1, model, optimizer)
    plain = Functional()
    of_plain = adam(plain)
    saves.load(plain, of_plain)
    again = DistributedGPipe(sequential(Functional(), x), [1, len(layers) - 2, 1], chunks=2)
    of_again = adam(again)
    saves.load(again, of_again)
    assert_alike(trained(again, of_again, 2), trained(plain, of_plain, 2))
