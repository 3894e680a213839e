"""Test the errors of `sequential`: they quote the line that cannot be traced, and give advice."""

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe, sequential
from torchgpipe.trace import Untraceable
from torchgpipe.trace.restore import random_states

from .. import traced
from ..traced import WIDTH, does, rows
from .refused import AUTOCAST, CASES


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    make, with_line, said = CASES[name]
    module = make()
    sample = rows()
    states = random_states()

    with pytest.raises(Untraceable) as caught:
        sequential(module, sample)

    assert states == random_states()
    message = str(caught.value)
    forward_name = name.partition(",")[0]
    line = f'`"{forward_name}": lambda'
    assert (line in message) == with_line
    for part in said:
        assert part in message
    freed = weakref.ref(module)
    del module, caught
    # A compiled module is not freed at once, because it refers to itself.
    assert freed() is None or name.startswith("compiled")


def each_with_each(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return a matrix with a score for each pair of a sample of `x` and a sample of `y`."""
    return net.a(x) @ net.b(y).t()


class Pairs(traced.Net):
    forward = each_with_each


def test_a_batched_tensor_is_not_taken_for_a_shared_one() -> None:
    """Check a module that computes a score for each pair of a sample of `x` and one of `y`.

    A micro-batch needs a part of `x` and the whole `y`, so the caller must say that `y` is shared.
    If both were split, the pairs of samples from different micro-batches would be missing.
    """
    sample = (rows(), rows())
    with pytest.warns(UserWarning, match=r"a value for each pair of samples.* shared=\[…\]"):
        sequential(Pairs(), sample)
    module = Pairs()
    # Without `shared`, lengths tell which tensor has the batch dimension, if the lengths differ.
    another_length = (rows(), torch.randn(3, WIDTH))
    for shared, (x, y) in ((["y"], sample), (None, another_length)):
        layers = sequential(module, (x, y), shared=shared)
        model = GPipe(layers, [len(layers)], devices=["cpu"], chunks=2)
        torch.testing.assert_close(model(x, y), module(x, y))


class Experts(nn.Module):
    """A mixture of experts with a single expert, which changes the samples of highest score.

    It changes about a quarter of the batch. So the result for a sample depends on the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.choice = nn.Linear(WIDTH, 1)
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.choice(x).flatten()
        capacity = 1 + len(x) // 4
        taken = scores.topk(capacity).indices
        outputs = self.expert(x[taken])
        return x.index_add(0, taken, outputs)


class OnlyTraining(traced.Net):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise RuntimeError("there is nothing to evaluate")
        centred = self.a(x) - x.mean(0)
        return self.b(centred)


def norm_without_statistics() -> nn.Module:
    norm = nn.BatchNorm1d(6, track_running_stats=False)
    return nn.Sequential(nn.Linear(6, 6), norm)


def drawing() -> nn.Module:
    return does(lambda net, x: net.a(nn.functional.dropout(x)))


def experts() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Experts())


def only_for_training() -> nn.Module:
    return nn.Sequential(OnlyTraining(), nn.Linear(6, 200))


LET_BE: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "a norm without statistics": (norm_without_statistics, {}),
    "draws": (drawing, {}),
    "a capacity of experts": (experts, {"whole": [Experts]}),
    "what is only for training": (only_for_training, {}),
}


@pytest.mark.parametrize("name", LET_BE)
def test_what_compares_samples_for_a_known_reason_is_let_be(name: str) -> None:
    make, options = LET_BE[name]
    layers = sequential(make(), torch.randn(8, WIDTH), **options)
    assert len(layers) > 0


def read_the_mode(net: Any, given: Any) -> Tensor:
    y: Tensor = net.a(given[0]) if torch.is_grad_enabled() else given[0]
    return y


def test_a_module_that_cannot_be_recorded_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that not every guess of the inputs with a batch dimension is tried."""
    tries: list[Any] = []
    in_file = sys.modules["torchgpipe.trace.sequential"]
    record_layers: Any = vars(in_file)["_layers"]

    def count_tries(*arguments: Any) -> Any:
        tries.append(arguments)
        return record_layers(*arguments)

    monkeypatch.setattr(in_file, "_layers", count_tries)
    with pytest.raises(Untraceable, match="the mode of gradients"):
        sequential(does(read_the_mode), ([rows() for _ in range(5)],))
    assert len(tries) == 1


def masked(**given: Any) -> dict[str, Any]:
    """Return arguments for `traced.Masked`: those in `given`, and the usual ones for all others."""
    mask = torch.arange(WIDTH) > 2
    return {"x": rows(), "mask": mask, "double": True, **given}


# The arguments of a call that differ from the sample, and a part of the error message.
CALLS: list[tuple[dict[str, Any], str]] = [
    ({"double": False}, "double is False, but was True in the sample"),
    ({"mask": None}, "mask is None, but was Tensor in the sample"),
    ({"x": rows(7)}, "x has shape (5, 7)"),
    ({"mask": torch.ones(1, dtype=torch.bool)}, "mask has shape (1,)"),
    ({"x": rows().double()}, "x has shape (5, 6) and type torch.float64"),
]


@pytest.mark.parametrize("given, message", CALLS)
@pytest.mark.parametrize("pipeline", [True, False])
def test_called_otherwise(pipeline: bool, given: dict[str, Any], message: str) -> None:
    layers = sequential(traced.Masked(), masked())
    model = GPipe(layers, [len(layers)], devices=["cpu"]) if pipeline else layers
    arguments = masked(**given)
    with pytest.raises(ValueError) as caught:
        model(**arguments)
    assert message in str(caught.value)


def take_the_difference(net: Any, given: Any) -> Tensor:
    ((pair,),) = given
    difference: Tensor = net.a(pair["x"] - pair["y"])
    return difference


def take_x(net: Any, given: Any) -> Tensor:
    y: Tensor = net.a(given["x"])
    return y


def test_keys_of_dictionaries_can_be_in_any_order() -> None:
    module = does(take_the_difference)
    x, y = rows(), rows() + 1
    layers: Any = sequential(module, (([{"x": x, "y": y}],),))
    torch.testing.assert_close(layers(([{"y": y, "x": x}],)), module(([{"x": x, "y": y}],)))


def test_an_array_within_an_argument_is_refused() -> None:
    with pytest.raises(TypeError, match=r" has an ndarray; torch.from_numpy\(\) makes a tensor"):
        sequential(does(take_x), ({"x": rows(), "other": np.ones(3)},))


def test_only_the_own_files_read_the_gradient_mode_unnoticed(tmp_path: Path) -> None:
    """Check that code is refused in a file whose name ends as that of a file of this library."""
    code = "def call(net, x):\n    return net.a(x) if torch.is_grad_enabled() else x\n"
    scope: dict[str, Any] = {"torch": torch}
    path = tmp_path / "voice_recorder.py"
    path.write_text(code)
    exec(compile(code, str(path), "exec"), scope)
    with pytest.raises(Untraceable, match="it sets or asks for the mode of gradients"):
        sequential(does(scope["call"]), rows())


def cut_residual(**options: Any) -> None:
    sequential(traced.Residual(), rows(), **options)


def cut_residual_with_another_width() -> None:
    sequential(traced.Residual(), rows(7))


def run_under_another_autocast() -> None:
    """Trace a module without autocast, and run its layers under autocast, to get an error.

    The module casts to the dtype of a linear layer's output, which depends on autocast. The traced
    layers would always cast to the dtype without autocast.
    """
    module = does(lambda net, x: net.b(x).to(net.a(x).dtype))
    layers = sequential(module, rows())
    with AUTOCAST:
        layers(rows())


ANOTHER_WIDTH = r"cannot be multiplied \(5x7 and 6x6\)"
UNDER_AUTOCAST = (
    r"2, 3, 5, 5 \(training mode, torch.bfloat16 autocast\) samples it does not do the same"
)
WRONG_SHARED = r"shared names \['y'\], but the tensors are in \['x'\]"
WRONG_WHOLE = "Residual has no submodule <class"


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (cut_residual_with_another_width, RuntimeError, ANOTHER_WIDTH),
        (run_under_another_autocast, Untraceable, UNDER_AUTOCAST),
        (lambda: cut_residual(shared=["y"]), ValueError, WRONG_SHARED),
        (lambda: cut_residual(whole=[nn.Conv2d]), ValueError, WRONG_WHOLE),
    ],
)
def test_misuse(act: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        act()
