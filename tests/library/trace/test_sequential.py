"""Test where `sequential` cuts a module into layers, and that the module stays as it was.

Some tests also call `pipeline`, which makes a pipeline of a module. Whether the layers compute the
same as the module is tested in tests/behaviours/test_any_model.py.
"""

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import BatchNorm1d, Linear, Module, Parameter, ReLU, Sequential
from torch.testing import assert_close

from torchgpipe import GPipe, pipeline, sequential
from torchgpipe.balance import balance_by_size
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.trace.parts import tensors_in
from torchgpipe.trace.restore import random_states

from ...behaviours.test_any_model import called
from .. import traced
from ..layers import compiled_around, compiled_in_place, same
from ..traced import CASES, Case, rows


def seeding_and_drawing(net: Any, x: Tensor) -> Tensor:
    if not x.is_contiguous():
        return x
    torch.manual_seed(3)
    return net.a(x) * random.random()


def drawing() -> Module:
    last = traced.does(seeding_and_drawing)
    return Sequential(Linear(6, 60), Linear(60, 6), last)


BY_HAND = CASES["attention by hand"]


# Each value has a module, and a text for each layer that `sequential` must make from it. The text
# names the layer's first submodule. It then has a + for each skip that the layer stashes, and a -
# for each skip that the layer pops.
CUTS: dict[str, tuple[Case, list[str]]] = {
    "a tensor that is used twice": (CASES["residual"], ["a", "b", "c"]),
    "a tensor for a later layer": (CASES["branches from one input"], ["a +", "b", "c -"]),
    "in place": (CASES["in place, with views"], ["conv", "norm", "out"]),
    "filled": (CASES["a tensor that is filled"], ["a", "c"]),
    "functions with parameters": (BY_HAND, ["Tokens", "a +", "b", "c -", "Tokens"]),
    "a part that stays whole": (CASES["a part that looks at its input"], ["0", "1", "2"]),
    "a small part that seeds and draws": (Case(drawing, rows), ["0", "1", "2"]),
}


@pytest.mark.parametrize("case, expected", CUTS.values(), ids=CUTS)
def test_cuts(case: Case, expected: list[str]) -> None:
    module = case.make()
    sample = case.sample()
    states = random_states()

    layers = sequential(module, sample, **case.options)

    assert states == random_states()
    found = []
    for name, layer in layers.named_children():
        _, _, begins_with = name.partition(":")
        skips: Any = layer._skips
        popped = "-" * len(skips["pop"])
        stashed = "+" * len(skips["stash"])
        found.append(f"{begins_with} {popped}{stashed}".strip())
    assert found == expected


def on_one_device(layers: Sequential) -> GPipe:
    return GPipe(layers, [len(layers)], devices=["cpu"])


@pytest.mark.parametrize("make", [same, on_one_device])
def test_loading(make: Callable[[Any], Module]) -> None:
    module = traced.Tied()
    sample = torch.randint(9, (5, 4))
    model = make(sequential(module, sample))
    other = {name: x + 1 for name, x in module.state_dict().items()}

    model.load_state_dict(other)

    for name, x in module.state_dict().items():
        assert torch.equal(x, other[name])

    wrong = dict(other)
    del wrong["inner.bias"]
    wrong["inner.more"] = torch.ones(1)
    wrong["x.y"] = rows()
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
    running_mean = module.norm.get_buffer("running_mean")
    nn.init.constant_(running_mean, 2)
    attributes = {**vars(module), "state": module.state_dict()}
    before = copy.deepcopy(attributes)
    sample = rows()
    generators = (torch.default_generator, module.noise.draws)
    random_before = [generator.get_state() for generator in generators]

    sequential(module, sample)

    for generator, state in zip(generators, random_before, strict=True):
        assert torch.equal(generator.get_state(), state)
    assert module.training
    assert module.norm.training == (not frozen)
    assert torch.equal(module.seen, before["_buffers"]["seen"])
    assert {*vars(module), "state"} == before.keys()
    for name, x in module.state_dict().items():
        assert torch.equal(x, before["state"][name])


@pytest.mark.parametrize("name", ["1.b", "1"], ids=["a layer", "a module around layers"])
def test_hooks_run(name: str) -> None:
    module = Sequential(Linear(traced.WIDTH, traced.WIDTH), traced.Residual())
    hooked = module.get_submodule(name)
    seen: list[str] = []
    hooked.register_forward_hook(lambda *_: seen.append("forward"))
    hooked.register_full_backward_hook(lambda *_: seen.append("backward"))
    layers = sequential(module, rows())
    seen.clear()

    balance = [1, len(layers) - 1]
    model = GPipe(layers, balance, devices=["cpu"] * 2, chunks=2, checkpoint="never")
    x = torch.randn(16, traced.WIDTH)
    model(x).sum().backward()

    assert seen == ["forward", "forward", "backward", "backward"]


# torch.compile reads all attributes of a layer's input, even `.grad`, which causes this warning,
# with or without a pipeline.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", [compiled_in_place, traced.compiled_forward, compiled_around])
def test_compiled_parts_are_layers_and_stay_compiled(
    compiled: Callable[[Module], Module],
) -> None:
    torch.compiler.reset()
    linear = Linear(traced.WIDTH, traced.WIDTH)
    module = Sequential(linear, compiled(traced.Residual()))
    layers = sequential(module, rows())
    assert len(layers) == 2

    x = rows()
    expected = module(x)
    torch.compiler.reset()
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        pytest.raises(RuntimeError, match="recompile"),
    ):
        layers(x)
    model = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2)
    assert_close(model(x), expected)


def test_copies_and_two_in_one_sequence() -> None:
    module = traced.Residual()
    layers = sequential(module, rows())
    pickled = pickle.loads(pickle.dumps(layers))
    x = rows()
    many = torch.randn(2, 9, traced.WIDTH)
    for other in (copy.deepcopy(layers), pickled):
        assert torch.equal(other(x), module(x))
        assert_close(torch.func.vmap(other)(many), module(many))
        model = GPipe(other, [1, 1, 1], devices=["cpu"] * 3, chunks=2)
        model_pickled = pickle.loads(pickle.dumps(model))
        assert torch.equal(model_pickled(x), model(x))

    one = sequential(traced.Residual(), rows())
    other = sequential(traced.Residual(), rows())
    together = Sequential(*one, ReLU(), *other)
    model = GPipe(together, [3, 4], devices=["cpu"] * 2, chunks=2)
    assert_close(model(x), other(one(x).relu()))
    state = model.state_dict()
    assert len(state) == len(one.state_dict()) + len(other.state_dict())
    model.load_state_dict(state)


def test_training_and_evaluation() -> None:
    # The module is recorded in evaluation mode, where dropout returns its input.
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
    balance = [1, len(layers) - 1]
    model = GPipe(layers, balance, devices=["cpu"] * 2, chunks=2, deferred_batch_norm=True)
    x = rows()

    model(x)

    expected = BatchNorm1d(traced.WIDTH)
    expected(module.a(x))
    norms = [type(m) for m in layers.modules() if "BatchNorm" in type(m).__name__]
    assert norms == [DeferredBatchNorm]
    state = model.state_dict()
    assert_close(state["norm.running_mean"], expected.running_mean)


class Mixed(Module):
    """A module that uses its parameters in an order that is not that of their names."""

    ORDER = "chafdbge"

    def __init__(self) -> None:
        super().__init__()
        for name in sorted(self.ORDER):
            parameter = Parameter(torch.randn(traced.WIDTH))
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> Tensor:
        in_order = [getattr(self, name) for name in self.ORDER]
        return x + torch.stack(in_order).sum(0)


def test_parameters_are_in_the_order_of_use_and_the_sample_as_it_was() -> None:
    """Check the order of the layers' parameters, and that tracing does not change the sample.

    The parameters must be in the order in which the module uses them, which is the same in every
    process. Optimizers save their state in this order.
    """
    sample = -torch.ones(5, traced.WIDTH)
    changing = Sequential(ReLU(inplace=True), Mixed())
    sequential(changing, sample)
    assert (sample == -1).all()

    layers = sequential(Mixed(), rows())
    names = [name for name, _ in layers.named_parameters()]
    assert "".join(names) == Mixed.ORDER


@pytest.mark.filterwarnings("ignore:the pipeline uses . of the 3 devices")  # it depends on times
@pytest.mark.parametrize("hardware", ["p40x8", "here"])
@pytest.mark.parametrize(
    "name", ["in place, with views", "by keyword, a mask of one sample", "dictionaries"]
)
def test_a_balanced_and_a_planned_pipeline(name: str, hardware: str) -> None:
    case = CASES[name]
    module = case.make().eval()
    sample = case.sample()

    layers = sequential(module, sample)
    balance = balance_by_size(2, layers, sample, chunks=2)
    assert sum(balance) == len(layers)

    model: Any = pipeline(
        module,
        sample,
        devices=["cpu"] * 3,
        batch_size=6,
        chunks=2,
        memory="1GiB",
        hardware=hardware,
    )
    assert 1 <= len(model.partitions) <= 3
    assert model.chunks == 2
    outputs = [*tensors_in(called(model, sample))]
    expected = [*tensors_in(called(module, sample))]
    assert_close(outputs, expected)


class TakesDict(nn.Module):
    """A module that takes a dictionary of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        y: Tensor = self.two(torch.relu(self.one(batch["x"])) * batch["mask"])
        return y


def test_a_dictionary_may_have_its_keys_in_another_order() -> None:
    x, mask = torch.randn(4, 6), torch.rand(4, 1).round()
    module = TakesDict()
    layers = sequential(module, ({"x": x, "mask": mask},))
    model = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2)
    expected = module({"x": x, "mask": mask})
    assert_close(model({"x": x, "mask": mask}), expected)
    assert_close(model({"mask": mask, "x": x}), expected)
