"""The flat ResNet is torchvision's, to the bit, and says so plainly when torchvision is not there."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduce.error import Error
from reproduce.models import resnet101
from reproduce.models.resnet import flat_state, from_torchvision, resnet, torchvision_state
from torchgpipe import GPipe

theirs = pytest.importorskip("torchvision.models.resnet", exc_type=Exception)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def original() -> Any:
    """A torchvision ResNet-101 that no buffer is left at its default in."""
    torch.manual_seed(0)
    model = theirs.resnet101()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.bias, std=0.1)
    return model


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pipelined", [False, True])
def test_torchvision_weights_load_into_the_flat_model(original: Any, images: Tensor, pipelined: bool) -> None:
    """As a user loads a downloaded file: every key fits, and the outputs are equal to the bit."""
    flat: Any = resnet101()
    if pipelined:
        flat = GPipe(flat, [140, 230], devices=["cpu", "cpu"], chunks=1)
    flat.load_state_dict(flat_state(original.state_dict()))
    expected = original.eval()(images)
    assert expected.isfinite().all() and not expected[0].equal(expected[1])
    assert flat.eval()(images).equal(expected)


def test_train_mode_gradients_and_statistics_are_equal(original: Any, images: Tensor) -> None:
    plain, flat = copy.deepcopy(original).train(), from_torchvision(copy.deepcopy(original)).train()
    for model in (plain, flat):
        F.cross_entropy(model(images), torch.tensor([3, 7])).backward()
    torch.testing.assert_close([x.grad for x in flat.parameters()], [x.grad for x in plain.parameters()])
    torch.testing.assert_close([*flat.buffers()], [*plain.buffers()])


def test_same_seed_gives_the_same_weights() -> None:
    torch.manual_seed(0)
    expected = theirs.resnet101(num_classes=10).state_dict()
    torch.manual_seed(0)
    found = resnet101(num_classes=10).state_dict()
    assert all(a.equal(b) for a, b in zip(found.values(), expected.values(), strict=True))


def test_the_flat_state_goes_back_to_torchvision(original: Any) -> None:
    flat = from_torchvision(original)
    assert {id(p) for p in flat.parameters()} == {id(p) for p in original.parameters()}, "layers are shared"
    state = flat.state_dict()
    assert list(flat_state(original.state_dict())) == list(state)
    assert list(flat_state(state)) == list(state), "what is flat stays so"
    back = torchvision_state(state)
    assert list(back) == list(original.state_dict())
    assert all(a.equal(b) for a, b in zip(back.values(), original.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("build", "blocks", "width", "last"),
    [
        (lambda: resnet101(num_classes=5), (3, 4, 23, 3), 64, 2048),
        (lambda: from_torchvision(theirs.resnet50(num_classes=5)), (3, 4, 6, 3), 64, 2048),
        (lambda: resnet((1, 1, 1, 1), width=16, num_classes=5), (1, 1, 1, 1), 16, 2048),
        (lambda: resnet((2, 1, 3, 1), width=8, expansion=1, num_classes=5), (2, 1, 3, 1), 8, 512),
    ],
)
def test_layers(build: Callable[[], nn.Sequential], blocks: tuple[int, ...], width: int, last: int) -> None:
    with torch.device("meta"):
        model = build()
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 5)
    assert len(model) == 4 + 11 * sum(blocks) + 3
    assert model.get_submodule("layer1_0_conv2").out_channels == width
    assert model.get_submodule("layer4_0_conv3").out_channels == last


def test_torchvision_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As one does that was made for another PyTorch."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('no operator\\ntorchvision::nms')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(Error) as caught:
        resnet101()
    assert str(caught.value) == (
        "ResNet-101 needs torchvision, which cannot be imported here (RuntimeError: no operator torchvision::nms): "
        "install the release that goes with your PyTorch, by 'pip install torch torchvision'"
    )
