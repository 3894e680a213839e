"""`sequential`: where it cuts, and what it leaves as it was. `pipeline`: a module in, a planned pipeline out.

That the layers do what the module does is in tests/behaviours/test_any_model.py.
"""

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe import GPipe, pipeline, sequential
from torchgpipe.balance import balance_by_size
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.trace.parts import tensors_in
from torchgpipe.trace.recorder import random_states

from ...behaviours.test_any_model import called
from .. import traced
from ..traced import CASES, Case, rows


def drawing() -> nn.Module:
    last = traced.does(
        lambda net, x: (
            torch.manual_seed(3) and net.a(x) * random.random() if x.is_contiguous() else x
        )
    )
    return nn.Sequential(nn.Linear(6, 60), nn.Linear(60, 6), last)


# A module, and its layers: what each begins with, and the skips that it stashes (+) and pops (-).
CUTS: dict[str, tuple[Case, list[str]]] = {
    "a tensor that is used twice": (CASES["residual"], ["a", "b", "c"]),
    "a tensor for a later layer": (CASES["branches from one input"], ["a +", "b", "c -"]),
    "in place": (CASES["in place, with views"], ["conv", "norm", "out"]),
    "filled": (CASES["a tensor that is filled"], ["a", "c"]),
    "functions with parameters": (
        CASES["attention by hand"],
        ["Tokens", "a +", "b", "c -", "Tokens"],
    ),
    "a part that stays whole": (CASES["a part that looks at its input"], ["0", "1", "2"]),
    "a small part that seeds and draws": (Case(drawing, rows), ["0", "1", "2"]),
}


@pytest.mark.parametrize("case, expected", CUTS.values(), ids=CUTS)
def test_cuts(case: Case, expected: list[str]) -> None:
    found, module, sample = [], case.make(), case.sample()
    states = random_states()
    layers = sequential(module, sample, **case.options)
    assert states == random_states()
    for name, layer in layers.named_children():
        skips: Any = layer._skips
        marks = "-" * len(skips["pop"]) + "+" * len(skips["stash"])
        found.append(f"{name.partition(':')[2]} {marks}".strip())
    assert found == expected


@pytest.mark.parametrize(
    "make", [lambda layers: layers, lambda layers: GPipe(layers, [len(layers)], devices=["cpu"])]
)
def test_loading(make: Callable[[Any], nn.Module]) -> None:
    module = traced.Tied()
    model = make(sequential(module, torch.randint(9, (5, 4))))
    other = {name: x + 1 for name, x in module.state_dict().items()}
    model.load_state_dict(other)
    assert all(torch.equal(x, other[name]) for name, x in module.state_dict().items())

    wrong = {name: x for name, x in other.items() if name != "inner.bias"}
    wrong |= {"inner.more": torch.ones(1), "x.y": rows()}
    found = model.load_state_dict(wrong, strict=False)
    assert found.missing_keys == ["inner.bias"]
    assert sorted(found.unexpected_keys) == ["inner.more", "x.y"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "inner.bias"'):
        model.load_state_dict(wrong)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_module_is_left_as_it_was(frozen: bool) -> None:
    module = traced.Counting()
    module.norm.train(not frozen)
    module.seen.fill_(3)
    nn.init.constant_(module.norm.get_buffer("running_mean"), 2)
    before = copy.deepcopy({**vars(module), "state": module.state_dict()})
    sample, draws = rows(), (torch.default_generator, module.noise.draws)
    random = [generator.get_state() for generator in draws]
    sequential(module, sample)
    assert all(map(torch.equal, random, [generator.get_state() for generator in draws]))
    assert (module.training, module.norm.training) == (True, not frozen)
    assert torch.equal(module.seen, before["_buffers"]["seen"])
    assert vars(module).keys() | {"state"} == before.keys()
    for name, x in module.state_dict().items():
        assert torch.equal(x, before["state"][name])


@pytest.mark.parametrize("name", ["1.b", "1"], ids=["a layer", "a module around layers"])
def test_hooks_run(name: str) -> None:
    module, seen = nn.Sequential(nn.Linear(traced.WIDTH, traced.WIDTH), traced.Residual()), []
    module.get_submodule(name).register_forward_hook(lambda *_: seen.append("forward"))
    module.get_submodule(name).register_full_backward_hook(lambda *_: seen.append("backward"))
    layers = sequential(module, rows())
    seen.clear()
    balance = [1, len(layers) - 1]
    x = torch.randn(16, traced.WIDTH)
    GPipe(layers, balance, devices=["cpu"] * 2, chunks=2, checkpoint="never")(x).sum().backward()
    assert seen == ["forward", "forward", "backward", "backward"]


def compiled_call(module: Any) -> nn.Module:
    module.compile(backend="aot_eager")
    return module


def compiled_around(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="aot_eager")  # type: ignore[return-value]


# From torch.compile, also with plain layers, which looks at all attributes of what a layer gets.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", [compiled_call, traced.compiled_forward, compiled_around])
def test_compiled_parts_are_layers_and_stay_compiled(
    compiled: Callable[[nn.Module], nn.Module],
) -> None:
    torch.compiler.reset()
    module = nn.Sequential(nn.Linear(traced.WIDTH, traced.WIDTH), compiled(traced.Residual()))
    layers, x = sequential(module, rows()), rows()
    assert len(layers) == 2
    expected = module(x)
    torch.compiler.reset()
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        pytest.raises(RuntimeError, match="recompile"),
    ):
        layers(x)
    model = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2)
    torch.testing.assert_close(model(x), expected)


def test_copies_and_two_in_one_sequence() -> None:
    module = traced.Residual()
    layers, x, many = sequential(module, rows()), rows(), torch.randn(2, 9, traced.WIDTH)
    for other in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))):
        assert torch.equal(other(x), module(x))
        torch.testing.assert_close(torch.func.vmap(other)(many), module(many))
        model = GPipe(other, [1, 1, 1], devices=["cpu"] * 3, chunks=2)
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    one, other = (sequential(traced.Residual(), rows()) for _ in range(2))
    model = GPipe(nn.Sequential(*one, nn.ReLU(), *other), [3, 4], devices=["cpu"] * 2, chunks=2)
    torch.testing.assert_close(model(x), other(one(x).relu()))
    assert len(model.state_dict()) == len(one.state_dict()) + len(other.state_dict())
    model.load_state_dict(model.state_dict())


def test_training_and_evaluation() -> None:
    # Traced in evaluation, where dropout returns what it is given.
    module = traced.Dropping().eval()
    layers = sequential(module, rows())
    assert not layers.training and not module.drop.training
    for mode in (True, False):
        x = rows()
        module.train(mode)
        layers.train(mode)
        torch.manual_seed(1)
        expected = module(x)
        torch.manual_seed(1)
        assert torch.equal(layers(x), expected)


def test_deferred_batch_norm() -> None:
    module = traced.Counting()
    layers = sequential(module, rows())
    model = GPipe(
        layers, [1, len(layers) - 1], devices=["cpu"] * 2, chunks=2, deferred_batch_norm=True
    )
    x = rows()
    model(x)
    expected = nn.BatchNorm1d(traced.WIDTH)
    expected(module.a(x))
    assert [type(m) for m in layers.modules() if "BatchNorm" in type(m).__name__] == [
        DeferredBatchNorm
    ]
    torch.testing.assert_close(model.state_dict()["norm.running_mean"], expected.running_mean)


class Mixed(nn.Module):
    """Uses its parameters in an order that is not that of their names."""

    ORDER = "chafdbge"

    def __init__(self) -> None:
        super().__init__()
        for name in sorted(self.ORDER):
            self.register_parameter(name, nn.Parameter(torch.randn(traced.WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.stack([getattr(self, name) for name in self.ORDER]).sum(0)


def test_parameters_are_in_the_order_of_use_and_the_sample_as_it_was() -> None:
    """An optimizer's state goes by that order, so that it has to be the same in every process."""
    sample = torch.zeros(5, traced.WIDTH)
    sequential(nn.Sequential(nn.ReLU(inplace=True), Mixed()), sample.sub_(1))
    assert (sample == -1).all()
    layers = sequential(Mixed(), rows())
    assert "".join(name for name, _ in layers.named_parameters()) == Mixed.ORDER


@pytest.mark.parametrize("hardware", ["p40x8", "here"])
@pytest.mark.parametrize(
    "name", ["in place, with views", "by keyword, a mask of one sample", "dictionaries"]
)
def test_a_balanced_and_a_planned_pipeline(name: str, hardware: str) -> None:
    module, sample = CASES[name].make().eval(), CASES[name].sample()
    assert sum(balance_by_size(2, layers := sequential(module, sample), sample, chunks=2)) == len(
        layers
    )
    model: Any = pipeline(
        module,
        sample,
        devices=["cpu"] * 3,
        batch_size=6,
        chunks=2,
        memory="1GiB",
        hardware=hardware,
    )
    assert 1 <= len(model.partitions) <= 3 and model.chunks == 2
    outputs = [called(run, sample) for run in (model, module)]
    torch.testing.assert_close(*([*tensors_in(each)] for each in outputs))
