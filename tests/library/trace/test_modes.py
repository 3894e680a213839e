"""Test traced modules that read whether they are in training or in evaluation mode."""

import copy
import pickle
import random
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss, scaled_dot_product_attention
from torch.testing import assert_close

from torchgpipe import GPipe, sequential
from torchgpipe.trace.refuse import Untraceable

X = torch.linspace(-1, 1, 24).view(4, 6).sin()


class Dropping(nn.Module):
    """A module whose forward passes its mode (training or evaluation) to two functions.

    One function takes the mode itself, and the other one a number that is 0 in evaluation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.p = 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = dropout(self.a(x), self.p, training=self.training).view(len(x), 1, 2, 3)
        z = scaled_dot_product_attention(y, y, y, dropout_p=self.p if self.training else 0.0)
        return self.c(self.b(z.reshape(len(x), -1)))


class WithAuxiliaryHead(nn.Module):
    """A module that has a second output in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return (self.b(y), self.c(y)) if self.training else self.b(y)


class Classifier(nn.Module):
    """A classifier of padded texts. In evaluation, PyTorch runs its encoder by other operators."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens: Tensor, padding: Tensor) -> Any:
        encoded = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
        return self.out(encoded[:, 0])


def outputs(run: Any, *args: Tensor) -> Tensor:
    """Set the random seed, run a pipeline or a module, and return its output."""
    torch.manual_seed(5)
    output: Tensor = run(*args)
    return output


@pytest.mark.parametrize("training", [True, False])
def test_arguments_that_depend_on_the_mode(training: bool) -> None:
    """Check that traced layers follow the mode (training or evaluation) of the pipeline.

    The mode in which the module was traced must not matter.
    """
    module = Dropping().train(training)
    layers = sequential(module, X)
    model = GPipe(layers, [2, 1], devices=["cpu", "cpu"], engine="graph")
    for mode in (True, False, True):
        model.train(mode)
        module.train(mode)
        assert_close(outputs(model, X), outputs(module, X))
    assert module.training
    assert not torch.equal(model(X), model.eval()(X))  # dropout is random in training only


def test_the_code_reads_the_mode() -> None:
    first: Any = sequential(Dropping(), X)[0]
    assert "training=self.training" in first.code
    assert "dropout_p=(0.5 if self.training else 0.0)" in first.code


def pickled(layers: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(layers))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies(copied: Any) -> None:
    module = Dropping()
    layers = copied(sequential(module, X)).eval()
    assert_close(layers(X), module.eval()(X))


@pytest.mark.parametrize("training", [True, False])
def test_other_calls_in_the_other_mode(training: bool) -> None:
    """Check a module that calls other functions in training than in evaluation.

    Tracing must warn. A pipeline of the layers must refuse to run in the other mode, and the error
    must say what to do.
    """
    module = WithAuxiliaryHead().train(training)
    mode = "training" if training else "evaluation"
    with pytest.warns(UserWarning, match=f"makes other calls when it is not in {mode}"):
        layers = sequential(module, X)
    model = GPipe(layers, [1, len(layers) - 1], devices=["cpu", "cpu"], chunks=2)
    model(X)
    model.train(not training)
    said = re.escape("a second pipeline, of another module: sequential(other.eval(), sample)")
    with pytest.raises(Untraceable, match=said):
        model(X)


class ScaledAtRandom(nn.Module):
    """A module that draws a number by Python's `random`, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0
        if self.training:
            random.seed(0)  # both recordings draw the same number
            scale = random.random()
        return self.second(self.first(x) * scale)


@pytest.mark.filterwarnings("ignore:ScaledAtRandom makes other calls")
def test_random_numbers_of_training_are_not_recorded_in_evaluation() -> None:
    module = ScaledAtRandom().eval()
    layers = sequential(module, X)
    assert_close(layers(X), module(X))
    with pytest.raises(Untraceable, match="random numbers beside PyTorch's"):
        layers.train()(X)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_with_padding() -> None:
    module = Classifier()
    tokens = torch.arange(24).remainder(11).view(4, 6)
    padding = (torch.arange(6) > 3).expand(4, 6)
    with pytest.warns(UserWarning, match="PyTorch makes the outputs of padded positions zero"):
        layers = sequential(module, (tokens, padding))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that its nested tensors may change
        model = GPipe(layers, [2, 2], devices=["cpu", "cpu"], chunks=2)
        target = torch.zeros(4, 3)
        model.step(mse_loss, (tokens, padding), target)
        expected = module.eval()(tokens, padding)
        assert_close(model.eval()(tokens, padding), expected)
        with torch.no_grad():
            assert_close(model.predict(tokens, padding), module(tokens, padding))


class Adapted(nn.Module):
    """A module with an adapter, which `eval()` adds to a weight, and `train()` takes out again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.merged = nn.Linear(6, 6), nn.Linear(6, 6), False
        self.adapter = nn.Parameter(torch.ones(6, 6))

    def train(self, mode: bool = True) -> Any:
        if mode == self.merged:
            self.a.weight.data += -self.adapter.data if mode else self.adapter.data
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if not self.merged:
            y = y + x @ self.adapter.t()
        return self.b(dropout(y, 0.5, self.training))


@pytest.mark.filterwarnings("ignore:Adapted has its own method train")
def test_weights_are_not_changed_by_a_trial_in_the_other_mode() -> None:
    module = Adapted()
    weight = module.a.weight.detach().clone()
    sequential(module, X)
    assert torch.equal(module.a.weight, weight)


class Around(nn.Module):
    """A model with a large submodule that reads its mode, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.out = Dropping(), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.norm(self.inner(x)))


def test_a_submodule_in_another_mode() -> None:
    """Check that a submodule traced in eval mode stays in this mode for all batch sizes."""
    module = Around()
    module.inner.eval()
    model = GPipe(sequential(module, X), [2, 3], devices=["cpu", "cpu"], engine="graph")
    for size in (4, 3, 7):
        x = torch.randn(size, 6)
        assert_close(model(x), module(x))


def test_one_sample_in_evaluation() -> None:
    """Check that a single sample is traced in eval mode, although batch norm fails in training."""
    module = Around().eval()
    layers = sequential(module, X[:1])
    assert_close(layers(X), module(X))


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated")
def test_a_pipeline_is_traced_and_exported_in_evaluation() -> None:
    """Check that `torch.jit.trace` and `torch.export` accept a pipeline in evaluation mode."""
    layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()
    model = GPipe(layers, [2, 1], devices=["cpu", "cpu"], chunks=2)
    traced: Any = torch.jit.trace(model, X)
    exported = torch.export.export(model, (X,)).module()
    other = torch.randn(4, 6)
    assert_close(traced(other), layers(other))
    assert_close(exported(other), layers(other))
    with pytest.raises(RuntimeError, match=r"call model.eval\(\) first"):
        torch.jit.trace(model.train(), X)


class Frozen(nn.Module):
    """A module whose method `train` keeps its backbone in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.relu(self.backbone(x)))
        return y

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.backbone.eval()
        return self


def test_a_module_with_a_mode_of_its_own_is_warned_of() -> None:
    module = Frozen().train()
    with pytest.warns(
        UserWarning, match=r"^Frozen has its own method train\(\) or eval\(\), which"
    ):
        layers = sequential(module, X)
    model = GPipe(layers, [1, len(layers) - 1], devices=["cpu"] * 2, chunks=2)
    norm: Any = module.backbone[1]
    model.train()
    assert norm.training

    module.train()  # as the warning advises

    before = norm.running_mean.clone()
    model(X)
    assert torch.equal(norm.running_mean, before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sequential(nn.Sequential(Frozen(), nn.Linear(6, 6)), X, whole=[Frozen])
        Frozen.train.__module__ = "transformers.modeling_utils"
        sequential(module, X)  # this method of Hugging Face's models only chooses kernels
