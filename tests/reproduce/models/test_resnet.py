"""Models of torchvision, split into layers: outputs are bitwise equal; a missing torchvision is a clear error."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reproduce.error import Error
from reproduce.models import resnet101
from reproduce.models.resnet import flat_state, layers_of, torchvision_model, torchvision_state
from torchgpipe import GPipe

theirs = pytest.importorskip("torchvision.models", exc_type=Exception)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def original() -> Any:
    """Return a torchvision ResNet-101 in which no buffer has its default value."""
    torch.manual_seed(0)
    model = theirs.resnet101()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.bias, std=0.1)
    return model


def test_torchvision_weights_load_into_the_flat_model(original: Any) -> None:
    """As when a user loads a downloaded file: every key fits, and outputs are bitwise equal."""
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    flat: Any = GPipe(resnet101(), [140, 230], devices=["cpu", "cpu"], chunks=1)
    flat.load_state_dict(flat_state(original.state_dict()))
    expected = original.eval()(images)
    assert expected.isfinite().all() and not expected[0].equal(expected[1])
    assert flat.eval()(images).equal(expected)


def test_the_flat_state_goes_back_to_torchvision(original: Any) -> None:
    flat = resnet101()
    flat.load_state_dict(flat_state(original.state_dict()))
    state = flat.state_dict()
    assert list(flat_state(original.state_dict())) == list(state)
    assert list(flat_state(state)) == list(state), "what is flat stays so"
    back = torchvision_state(state)
    assert list(back) == list(original.state_dict())
    assert all(map(torch.equal, back.values(), original.state_dict().values()))


@pytest.mark.parametrize(
    ("name", "build"),
    [("resnet101", lambda: resnet101(5)), ("squeezenet1_1", lambda: layers_of("squeezenet1_1", 64, 5))],
)
def test_a_seed_gives_the_same_weights_and_every_row_its_own(name: str, build: Callable[[], nn.Sequential]) -> None:
    def weights(build: Callable[..., nn.Module], **options: int) -> list[Tensor]:
        torch.manual_seed(0)
        return [*build(**options).parameters()]

    expected, one, other = weights(getattr(theirs, name), num_classes=5), weights(build), weights(build)
    assert all(map(torch.equal, one, expected)) and all(map(torch.equal, other, expected))
    assert not {x.data_ptr() for x in one} & {x.data_ptr() for x in other}


@pytest.mark.parametrize("name", ["vit_b_16", "regnet_y_1_6gf"])
def test_models_that_ask_for_more_are_built_without_memory_and_for_any_image(name: str) -> None:
    with torch.device("meta"):
        model = torchvision_model(name, 64, num_classes=5)
        assert model(torch.empty(2, 3, 64, 64)).shape == (2, 5)


def test_torchvision_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A torchvision that was built for another PyTorch raises like this."""
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('no operator\\ntorchvision::nms')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        Error, match=r"^ResNet-101 needs torchvision, which .* here .RuntimeError: no operator torchvision"
    ):
        resnet101()
