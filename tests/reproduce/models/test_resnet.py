"""Models of torchvision, split into layers: outputs are bitwise equal; a missing torchvision is a clear error."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reproduce.error import Error
from reproduce.models.built import SizedModel, resnet101
from reproduce.models.resnet import flat_state, torchvision_model, torchvision_state
from torchgpipe import GPipe

theirs = pytest.importorskip("torchvision.models", exc_type=Exception)  # type: ignore[arg-type]


def test_torchvision_weights_load_into_the_flat_model_and_back() -> None:
    """As when a user loads a downloaded file: every key fits, and outputs are bitwise equal."""
    torch.manual_seed(0)
    original = theirs.resnet101()
    for module in original.modules():
        if isinstance(module, nn.BatchNorm2d):  # no buffer has its default value
            assert module.running_mean is not None and module.running_var is not None
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.bias, std=0.1)
    before, images = original.state_dict(), torch.randn(2, 3, 64, 64)
    flat: Any = GPipe(resnet101(), [140, 230], devices=["cpu", "cpu"], chunks=1)
    flat.load_state_dict(flat_state(before))
    expected = original.eval()(images)
    assert expected.isfinite().all() and not expected[0].equal(expected[1])
    assert flat.eval()(images).equal(expected)
    state = flat.state_dict()
    assert [*flat_state(before)] == [*state] == [*flat_state(state)], "what is flat stays so"
    back = torchvision_state(state)
    assert [*back] == [*before] and all(map(torch.equal, back.values(), before.values()))


@pytest.mark.parametrize("model", [("ResNet-101", ()), ("torchvision:resnet18", (64,))], ids=str)
def test_a_seed_gives_the_same_weights_and_every_row_its_own(model: tuple[str, tuple[int, ...]]) -> None:
    build, name = SizedModel(*model, (3, 64, 64), 5).layers, model[0].lower().replace("-", "").rpartition(":")[2]

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
    with pytest.raises(Error, match=r"^ResNet-101 needs torchvision, which .*RuntimeError: no operator torchvision"):
        resnet101()
