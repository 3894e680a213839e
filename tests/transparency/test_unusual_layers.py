"""Layers that do more than compute: what they do is done as without a pipeline, or refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgpipe import GPipe

from ..plain import piped
from .compare import assert_same_use, assert_transparent

BALANCE = [2, 2]


def refused(match: str | None) -> AbstractContextManager[object]:
    return nullcontext() if match is None else pytest.raises(RuntimeError, match=match)


def layers(first: nn.Module | None = None, last: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(first or nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6), last or nn.Tanh())


class Padded(nn.Module):
    """Attention that leaves out the ends of sequences, for which PyTorch has another way without gradients."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.encoder(x, src_key_padding_mask=(torch.arange(4) >= 2).expand(len(x), 4))
        return y


def test_attention_in_evaluation_mode(way: dict[str, Any]) -> None:
    assert_transparent(layers(Padded()).eval(), torch.randn(6, 4, 6), BALANCE, **way)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_pipeline_within_plain_checkpointing(way: dict[str, Any]) -> None:
    """The pipeline's forward then runs within its own backward."""

    def use(run: nn.Module) -> Tensor:
        x = torch.ones(6, 6, requires_grad=True)
        checkpointed = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
        checkpointed.square().sum().backward()
        assert x.grad is not None
        return x.grad

    assert_same_use(use, layers(), BALANCE, **way)


class OwnCheckpoint(torch.autograd.Function):
    """Keep nothing, and run dropout again in backward with the numbers of the first time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.numbers = torch.get_rng_state()
        return F.dropout(x, 0.5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.numbers)
            return F.dropout(grad, 0.5)


class Checkpointing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = OwnCheckpoint.apply(x)
        return y


class Seeding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return F.dropout(x, 0.5)


@pytest.mark.parametrize(("layer", "match"), [(Checkpointing, "random numbers in backward"), (Seeding, "manual_seed")])
def test_layers_that_set_the_generator(layer: type[nn.Module], match: str, way: dict[str, Any]) -> None:
    x = torch.ones(6, 50, requires_grad=True)
    model = piped(nn.Sequential(layer(), nn.Identity()), [1, 1], 3, **way)
    # A layer that sets the generator back by itself is at odds with private generators only.
    with refused(match if way["engine"] == "workers" or (way["engine"], layer) == ("ranks", Seeding) else None):
        y = model(x)
        y.sum().backward()
        assert x.grad is not None and torch.equal(y, x.grad)


@pytest.mark.parametrize("grad", [True, False])
def test_a_generator_of_two_partitions(grad: bool, way: dict[str, Any]) -> None:
    model = layers()
    model[0].generator = model[3].generator = torch.Generator()  # type: ignore[assignment]
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=r"one torch\.Generator"):
        piped(model, BALANCE, 3, **way)(torch.randn(6, 6))


def test_another_thread_keeps_its_numbers(way: dict[str, Any]) -> None:
    """Where no layer draws, a recomputation sets no generator back."""
    model = piped(layers(), BALANCE, 3, **way)
    drawn: list[float] = []
    for layer in (model[1], model[2]):
        layer.register_full_backward_hook(lambda *_: drawn.append(torch.rand(()).item()))
    for _ in range(2):
        loss = model(torch.ones(6, 6, requires_grad=True)).sum()
        drawn.append(torch.rand(()).item())
        loss.backward()
    assert len(drawn) == len(set(drawn)) >= 8


def test_numbers_that_another_thread_draws_amid_the_first_pass(way: dict[str, Any]) -> None:
    class Meanwhile(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=torch.rand, args=(5,))
            if torch.is_grad_enabled() is (way["checkpoint"] == "never"):  # in first passes
                thread.start()
                thread.join()
            return F.dropout(x, 0.5)

    x = torch.ones(6, 50, requires_grad=True)
    y = piped(nn.Sequential(Meanwhile(), nn.Identity()), [1, 1], 3, **way)(x)
    with refused(None if way["checkpoint"] == "never" or way["engine"] == "workers" else "more or fewer random"):
        y.sum().backward()
        assert x.grad is not None and torch.equal(y, x.grad)


BETWEEN: dict[str, tuple[Callable[[GPipe], object], str | None]] = {
    "a forward hook removed": (lambda run: run[1]._forward_hooks.clear(), None),
    "a forward hook added": (lambda run: run[2].register_forward_hook(lambda m, i, y: 2 * y) and None, None),
    "a forward pre-hook added": (lambda run: run[2].register_forward_pre_hook(lambda m, i: (2 * i[0],)) and None, None),
    "what a tool writes on a layer": (lambda run: setattr(run[3], "calls", 5), None),
    "a setting of a layer": (lambda run: setattr(run[3], "negative_slope", 5.0), "'negative_slope' of LeakyReLU"),
}


@pytest.mark.parametrize(("change", "match"), BETWEEN.values(), ids=BETWEEN)
def test_changes_between_forward_and_backward(
    change: Callable[[GPipe], object], match: str | None, way: dict[str, Any]
) -> None:
    def use(run: Any) -> None:
        run[1].register_forward_hook(lambda module, inputs, y: 3 * y)
        loss = run(torch.randn(6, 6)).square().sum()
        change(run)
        loss.backward()

    with refused(None if way["checkpoint"] == "never" else match):
        assert_same_use(use, layers(last=nn.LeakyReLU()), BALANCE, **way)


def test_two_backwards_at_once(way: dict[str, Any]) -> None:
    started, go_on = threading.Event(), threading.Event()

    class Waiting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if not started.is_set():
                started.set()
                assert go_on.wait(60)
            return grad

    class Wait(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = Waiting.apply(x)
            return y

    model = piped(layers(Wait()), BALANCE, 1, **way)
    model.observer = lambda task: nullcontext()  # each task has a graph of its own then
    weight = model[1].weight
    loss = model(torch.randn(6, 6, requires_grad=True)).square().sum()
    found: list[Tensor] = []

    def gradient() -> Tensor:
        return torch.autograd.grad(loss, weight, retain_graph=True)[0]

    first = threading.Thread(target=lambda: found.append(gradient()), daemon=True)
    first.start()
    assert started.wait(60)
    with pytest.raises(RuntimeError, match="two backwards"):
        gradient()
    go_on.set()
    first.join(60)
    assert torch.equal(found[0], gradient())


class Auxiliary(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.loss = y.square().mean()
        return y


def test_an_auxiliary_loss_that_is_kept(engine: str) -> None:
    model = piped(layers(Auxiliary(6, 6)), BALANCE, 1, engine=engine, checkpoint="never")
    model.observer = lambda task: nullcontext()  # each task has a graph of its own then
    loss = model(torch.randn(6, 6)).sum() + model[0].loss
    with pytest.raises(RuntimeError, match="another way than its outputs"):
        loss.backward(retain_graph=True)


class Rewriting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.sign()
        return super().forward(x)


def test_a_parameter_whose_data_are_replaced_in_forward(way: dict[str, Any]) -> None:
    model = piped(layers(Rewriting(6, 6)), BALANCE, 3, **way)
    one_graph = way == {"engine": "graph", "checkpoint": "never"}
    with refused(None if one_graph else "replaced, added or froze a parameter|was changed in place"):
        model(torch.randn(6, 6)).sum().backward()
        assert model[0].weight.unique().tolist() == [-1, 1]


def test_what_a_layer_writes_on_a_parameter(way: dict[str, Any]) -> None:
    class Marking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.seen = True  # type: ignore[attr-defined]
            return super().forward(x)

    model = piped(layers(Marking(6, 6), Marking(6, 6)), BALANCE, 3, **way)
    model(torch.randn(6, 6)).sum().backward()
    assert any(hasattr(p, "seen") for p in model.parameters())


def test_a_backward_in_inference_mode(way: dict[str, Any]) -> None:
    def use(run: nn.Module) -> None:
        loss = run(torch.randn(6, 6)).square().sum()
        with torch.inference_mode():
            loss.backward()

    assert_same_use(use, layers(), BALANCE, **way)


def test_the_number_of_threads(way: dict[str, Any]) -> None:
    seen: list[int] = []

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            x.register_hook(lambda grad: seen.append(torch.get_num_threads())) if x.requires_grad else None
            return x.clone()

    model = piped(layers(Counting(), Counting()), BALANCE, 3, **way)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            model(torch.randn(6, 6)).sum().backward()
            assert set(seen) == {threads}
            seen.clear()
    finally:
        torch.set_num_threads(before)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y


def test_a_norm_of_two_partitions_whose_buffers_were_replaced(way: dict[str, Any]) -> None:
    norm = nn.BatchNorm1d(6, affine=False)
    model = piped(layers(Normed(norm), Normed(norm)), BALANCE, 3, **way)
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match="change the same buffer"):
        model(torch.randn(6, 6))


class Frozen(nn.Sequential):
    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def test_a_sequence_with_a_method_of_its_own() -> None:
    with pytest.raises(TypeError, match="a method train of its own"):
        piped(Frozen(*layers()), BALANCE, 3)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this PyTorch has no grad_dtype")
def test_gradients_of_another_type(way: dict[str, Any]) -> None:
    module = layers().bfloat16()
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32
    model = piped(module, BALANCE, 3, **way)
    model(torch.randn(6, 6, dtype=torch.bfloat16)).float().square().sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
