"""Randomness: two passes of a task draw the same, whoever else draws meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgpipe.randomness import UNSEEDED, PrivateGenerator, Randomness, SavedState, SeededTask
from torchgpipe.seeds import Seeds
from torchgpipe.skip.layout import PartitionSkips
from torchgpipe.stage import Stage

CPU = torch.device("cpu")

DRAWS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(4),
    "randn": lambda: torch.randn(4),
    "rand like": lambda: torch.rand_like(torch.empty(4)),
    "randint": lambda: torch.randint(100, (4,)),
    "randint like": lambda: torch.randint_like(torch.empty(4), 100),
    "randperm": lambda: torch.randperm(9),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 5),
    "bernoulli": lambda: torch.bernoulli(torch.full((16,), 0.5)),
    "bernoulli in place": lambda: torch.empty(16).bernoulli_(0.5),
    "normal": lambda: torch.normal(torch.zeros(4), torch.ones(4)),
    "normal of a size": lambda: torch.normal(0.0, 1.0, (4,)),
    "uniform in place": lambda: torch.empty(4).uniform_(),
    "random in place": lambda: torch.empty(4).random_(),
    "exponential in place": lambda: torch.empty(4).exponential_(),
    "poisson": lambda: torch.poisson(torch.full((16,), 5.0)),
    "binomial": lambda: torch.binomial(torch.full((16,), 9.0), torch.full((16,), 0.5)),
    "gamma": lambda: torch._standard_gamma(torch.full((4,), 2.0)),
    "dirichlet": lambda: torch._sample_dirichlet(torch.ones(4)),
    "dropout": lambda: F.dropout(torch.ones(16)),
    "dropout in place": lambda: F.dropout(torch.ones(16), inplace=True),
    "alpha dropout": lambda: F.alpha_dropout(torch.ones(16), training=True),
    "rrelu": lambda: F.rrelu(-torch.ones(4), training=True),
    "gumbel softmax": lambda: F.gumbel_softmax(torch.zeros(4)),
    "attention with dropout": lambda: F.scaled_dot_product_attention(
        torch.ones(1, 4, 2), torch.ones(1, 4, 2), torch.ones(1, 4, 2), dropout_p=0.5
    ),
    "initialization": lambda: nn.Linear(3, 3).weight.detach(),
}
draws = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def state() -> Tensor:
    return torch.get_rng_state()


def private(seed: int = 7, drew: Callable[[], None] = lambda: None) -> PrivateGenerator:
    return PrivateGenerator(seed, drew)


WAYS: dict[str, Callable[[], Randomness]] = {
    "saved state": lambda: SavedState(None),
    "seeded task": lambda: SeededTask(7, lambda: None),
}


@draws
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_both_passes_draw_the_same(way: Callable[[], Randomness], draw: Callable[[], Tensor]) -> None:
    randomness = way()
    with randomness.first():
        first = [draw(), draw()]
    torch.rand(3)
    before = state()
    with randomness.again():
        second = [draw(), draw()]
    assert all(map(torch.equal, first, second))
    assert torch.equal(state(), before), "the second pass has moved the default generator"
    assert not all(torch.equal(first[0], draw()) for _ in range(9))


def test_a_saved_state_draws_from_the_default_generator() -> None:
    before = state()
    expected = torch.rand(4)
    torch.set_rng_state(before)
    with SavedState(None).first():
        assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_exception_in_the_second_pass_puts_the_state_back(way: Callable[[], Randomness]) -> None:
    randomness = way()
    with randomness.first():
        torch.rand(3)
    before = state()
    with pytest.raises(ArithmeticError), randomness.again():
        torch.rand(2)
        raise ArithmeticError
    assert torch.equal(state(), before)


@draws
def test_a_private_generator(draw: Callable[[], Tensor]) -> None:
    before = state()
    drew: list[None] = []
    with private(7, lambda: drew.append(None)):
        one = draw()
    assert drew, "the draw was not noticed"
    assert torch.equal(state(), before), "the default generator has moved"
    with private(7):
        assert torch.equal(draw(), one)
    others = []
    for seed in range(20, 30):
        with private(seed):
            others.append(draw())
    assert not all(torch.equal(other, one) for other in others), "the seed does not matter"


QUIET: dict[str, Callable[[], object]] = {
    "arithmetic": lambda: torch.ones(3) @ torch.ones(3),
    "softmax": lambda: torch.ones(3).softmax(0),
    "dropout in evaluation": lambda: F.dropout(torch.ones(3), training=False),
    "dropout of none": lambda: F.dropout(torch.ones(3), 0.0, training=False),
    "empty": lambda: torch.empty(3),
    "a generator of the layer's own": lambda: torch.rand(3, generator=torch.Generator().manual_seed(1)),
}


@pytest.mark.parametrize("function", QUIET.values(), ids=QUIET)
def test_what_draws_nothing_is_not_taken_for_a_draw(function: Callable[[], object]) -> None:
    drew: list[None] = []
    with private(7, lambda: drew.append(None)):
        function()
    assert not drew


def test_a_generator_of_the_layers_own_stays_its_own() -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(1))
    with private():
        assert torch.equal(torch.rand(3, generator=torch.Generator().manual_seed(1)), expected)


def test_draws_are_part_of_the_graph() -> None:
    x = torch.ones(16, requires_grad=True)
    with private():
        y = F.dropout(x, 0.5)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # type: ignore[arg-type]


def test_an_operator_that_fails_puts_the_default_generator_back() -> None:
    before = state()
    with private(), pytest.raises(RuntimeError):
        torch.poisson(torch.tensor([-1.0]))
    assert torch.equal(state(), before)
    with private():
        torch.randperm(3)


@pytest.mark.parametrize("names", [("randperm", "poisson"), ("rand", "dropout"), ("randperm", "rand")])
def test_threads_at_once_draw_what_they_draw_alone(names: tuple[str, str]) -> None:
    def several(seed: int, draw: Callable[[], Tensor]) -> Tensor:
        with private(seed):
            return torch.stack([draw() for _ in range(100)])

    expected = [several(k, DRAWS[name]) for k, name in enumerate(names)]
    before, results = state(), [torch.empty(0)] * 2
    start = threading.Barrier(2, timeout=120)

    def run(k: int) -> None:
        start.wait()
        results[k] = several(k, DRAWS[names[k]])

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert all(map(torch.equal, results, expected))
    assert torch.equal(state(), before)


def test_unseeded_is_the_default_generator() -> None:
    before = state()
    expected = torch.rand(4)
    torch.set_rng_state(before)
    with UNSEEDED.first():
        assert torch.equal(torch.rand(4), expected)


class Drawing(nn.Module):
    draws = True

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x) if self.draws else x


def stages(*layers: nn.Module) -> list[Stage]:
    return [Stage(j, nn.Sequential(x), CPU, PartitionSkips((), ())) for j, x in enumerate(layers)]


def mini_batch(parts: list[Stage], m: int = 3, meanwhile: Callable[[], object] = lambda: None) -> list[Any]:
    """Run each task of a mini-batch; return what its source of random numbers was, and the outputs."""
    results = []
    with Seeds(parts, m) as seeds:
        for i in range(m):
            for j, stage in enumerate(parts):
                randomness = seeds.of(i, j)
                with randomness.first():
                    results.append((randomness, stage.run((torch.ones(4),), True)[0][0]))
        meanwhile()
    return results


def seeded_partitions(results: list[Any], n: int) -> set[int]:
    return {k % n for k, (randomness, _) in enumerate(results) if randomness is not UNSEEDED}


def test_after_the_first_mini_batch_only_partitions_that_draw_are_seeded() -> None:
    parts = stages(nn.Tanh(), nn.Dropout(), nn.Tanh())
    assert seeded_partitions(mini_batch(parts), 3) == {0, 1, 2}
    assert seeded_partitions(mini_batch(parts), 3) == {1}
    assert [stage.draws for stage in parts] == [{True: False}, {True: True}, {True: False}]


def test_evaluation_is_found_out_apart() -> None:
    parts = stages(nn.Tanh(), nn.Dropout())
    mini_batch(parts)
    for stage in parts:
        stage.partition.eval()
    assert seeded_partitions(mini_batch(parts), 2) == {0, 1}
    assert seeded_partitions(mini_batch(parts), 2) == set()
    for stage in parts:
        stage.partition.train()
    assert seeded_partitions(mini_batch(parts), 2) == {1}


def test_every_task_draws_from_a_seed_of_its_own() -> None:
    outputs = [y for _, y in mini_batch(stages(Drawing(), Drawing()), m=4)]
    outputs += [y for _, y in mini_batch(stages(Drawing(), Drawing()), m=4)]
    assert len({tuple(y.tolist()) for y in outputs}) == 2 * 4 * 2


def test_the_default_generators_seed_decides() -> None:
    def drawn(seed: int) -> list[Any]:
        torch.manual_seed(seed)
        parts = stages(Drawing(), nn.Tanh())
        outputs = [y for _ in range(3) for _, y in mini_batch(parts)]
        return [*(y.tolist() for y in outputs), torch.rand(2).tolist()]

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize("layer", [nn.Tanh(), nn.Dropout().eval()])
def test_the_callers_numbers_go_on_where_nothing_draws(layer: nn.Module) -> None:
    parts = stages(layer, nn.Tanh())
    before = state()
    for _ in range(3):
        mini_batch(parts)
        assert torch.equal(state(), before)


WARNING = "drew random numbers for the first time"


def test_a_draw_that_was_not_expected() -> None:
    drawing = Drawing()
    drawing.draws = False
    parts = stages(nn.Tanh(), drawing)
    mini_batch(parts), mini_batch(parts)
    drawing.draws = True
    with pytest.warns(RuntimeWarning, match=WARNING):
        mini_batch(parts)
    # Found out anew.
    assert seeded_partitions(mini_batch(parts), 2) == {0, 1}
    assert seeded_partitions(mini_batch(parts), 2) == {1}


def test_it_is_found_out_anew_also_where_warnings_are_errors() -> None:
    drawing = Drawing()
    drawing.draws = False
    parts = stages(drawing)
    mini_batch(parts)
    drawing.draws = True
    with pytest.raises(RuntimeWarning, match=WARNING):
        mini_batch(parts)
    mini_batch(parts)
    assert seeded_partitions(mini_batch(parts), 1) == {0}


def test_a_mini_batch_that_failed_teaches_nothing() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError

    parts = stages(nn.Tanh(), Failing())
    with pytest.raises(ArithmeticError):
        mini_batch(parts)
    assert [stage.draws for stage in parts] == [{}, {}]
    # Nor is what the caller draws afterwards taken for a layer's draw.
    torch.rand(3)
    mini_batch(stages(nn.Tanh()))


def test_a_partition_that_draws_now_and_then_stays_seeded() -> None:
    drawing = Drawing()
    parts = stages(drawing, nn.Tanh())
    for drawing.draws in (True, False, False, True):
        mini_batch(parts)
        assert [stage.draws for stage in parts] == [{True: True}, {True: False}]


def test_another_threads_draw_is_no_layers_where_all_are_seeded() -> None:
    parts = stages(Drawing())
    for _ in range(2):
        mini_batch(parts, meanwhile=lambda: torch.rand(1))
    assert parts[0].draws == {True: True}


def test_draws_between_mini_batches_are_the_callers() -> None:
    parts = stages(nn.Tanh())
    for _ in range(3):
        torch.rand(3)
        mini_batch(parts)  # warns, which is an error here, where it takes them for a layer's
    assert parts[0].draws == {True: False}


@pytest.mark.parametrize("inner", [nn.Tanh, Drawing], ids=["quiet", "drawing"])
@pytest.mark.parametrize("outer", [nn.Tanh, Drawing], ids=["quiet", "drawing"])
def test_mini_batches_under_way_at_once(outer: type[nn.Module], inner: type[nn.Module]) -> None:
    # What one does to the default generator, the other does not take for a draw of its own layers.
    one, other = stages(outer()), stages(inner())
    for _ in range(3):
        mini_batch(one, meanwhile=lambda: mini_batch(other))
    assert (one[0].draws, other[0].draws) == ({True: outer is Drawing}, {True: inner is Drawing})


def test_an_unexpected_draw_while_another_begins() -> None:
    one, other = stages(nn.Tanh()), stages(Drawing())
    mini_batch(one)

    def meanwhile() -> None:
        torch.rand(1)
        mini_batch(other)

    with pytest.warns(RuntimeWarning, match=WARNING):
        mini_batch(one, meanwhile=meanwhile)
    assert one[0].draws == {}
    assert other[0].draws == {True: True}
