"""Test the loss that `step` returns: an ordinary tensor, but `backward()` raises an error."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.testing import assert_close

from torchgpipe import GPipe

X = torch.arange(8.0).view(4, 2)
LINE = r"^step\(\) has run the backward already: remove loss\.backward\(\).*model\.loss\(.*\)$"


def pipeline(**options: Any) -> GPipe:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return GPipe(layers, [1, 1], devices=["cpu", "cpu"], chunks=2, **options)


def logged(output: Tensor, target: Tensor) -> tuple[Tensor, str]:
    return mse_loss(output, target), "logged"


@pytest.mark.parametrize("engine", ["workers", "graph"])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZBH1"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("criterion", [mse_loss, logged])
def test_backward_after_a_step_is_refused(
    engine: str, schedule: str, reduction: str, criterion: Any
) -> None:
    model = pipeline(engine=engine, schedule=schedule)
    loss = model.step(criterion, X, X, reduction=reduction)
    with pytest.raises(RuntimeError, match=LINE):
        loss.backward(torch.ones_like(loss))


def test_a_loss_that_step_did_not_return_goes_backward() -> None:
    model = pipeline()
    loss = model.step(mse_loss, X, X)
    with torch.no_grad():
        assert vars(model.evaluate(mse_loss, X, X)) == {}
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.loss(mse_loss, X, X).backward()
    assert_close([p.grad for p in model.parameters()], gradients)
    # A loss that is computed from the returned one, such as a penalty scaled by it.
    scale = torch.ones((), requires_grad=True)
    (loss * scale).backward()
    assert scale.grad == loss


def test_the_loss_is_an_ordinary_tensor_in_all_else() -> None:
    loss = pipeline().step(mse_loss, X, X)
    plain = torch.tensor(loss.item())
    assert type(loss) is Tensor
    assert not loss.requires_grad
    assert f"{loss:.3f} {loss}" == f"{plain:.3f} {plain}"
    assert repr({"loss": loss}) == repr({"loss": plain})
    total: Any = 0.0
    for _ in range(2):
        total += loss
    copies = [copy.copy(loss), copy.deepcopy(loss), loss.detach(), loss.double().float()]
    for result in (total / 2, torch.stack([loss]).mean(), *copies):
        assert vars(result) == {}
        assert torch.equal(result, plain)


def test_what_is_saved_of_a_loss_is_an_ordinary_tensor() -> None:
    loss = pipeline().step(mse_loss, X, X)
    value = loss.item()
    # A copy's values, not those of the tensor that it was copied from, are saved.
    tripled = copy.deepcopy(loss).mul_(3)
    for x, expected in ((loss, value), (copy.copy(loss), value), (tripled, 3 * value)):
        file = io.BytesIO()
        torch.save({"loss": x}, file)
        file.seek(0)
        for loaded in (torch.load(file, weights_only=True)["loss"], pickle.loads(pickle.dumps(x))):
            assert vars(loaded) == {}
            assert loaded.item() == pytest.approx(expected)
