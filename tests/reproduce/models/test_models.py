"""Tests of the models that experiments train.

The tests check numbers of parameters, outputs, gradients, and errors for impossible sizes. Models
of torchvision that are split into layers must have the results of torchvision to the bit.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Sequential

from reproduce.error import Error
from reproduce.models.built import MODELS, SizedModel, amoebanetd, resnet101, unet
from reproduce.models.resnet import flat_state, resnet, torchvision_model, torchvision_state
from torchgpipe import GPipe

from ...behaviours.row import tensors

PUBLISHED = [  # model, size, parameters, layers
    ("AmoebaNet-D", (18, 208), 81_505_540, 24),
    ("AmoebaNet-D", (36, 544), 1_055_832_376, 42),
    ("AmoebaNet-D", (72, 512), 1_844_858_344, 78),
    ("U-Net", (5, 64), 232_687_328, 241),
    ("U-Net", (11, 128), 2_213_834_176, 505),
    ("U-Net", (48, 160), 15_822_206_000, 2_133),
    ("ResNet-101", (), 44_549_160, 370),
]

Build = Callable[[], Sequential]
Shape = tuple[int, ...]
# Each value has four parts: a function that builds a small model; the shape of its input; the shape
# of its output; and a checksum of the output. Before the checksums were recorded, each operation of
# these models was checked separately.
SMALL: dict[str, tuple[Build, Shape, Shape, float]] = {
    "AmoebaNet-D": (
        lambda: amoebanetd(3, 8, num_classes=10),
        (2, 3, 224, 224),
        (2, 10),
        3.398336042,
    ),
    "U-Net": (
        lambda: unet(3, num_convs=2, base_channels=4),
        (2, 3, 33, 47),
        (2, 1, 33, 47),
        352.271286651,
    ),
    "U-Net of one block": (lambda: unet(1, 1, 4, 2, 7), (2, 2, 8, 8), (2, 7, 8, 8), 9.124446095),
    "ResNet": (
        lambda: resnet((2, 1, 3, 1), 8, expansion=1, num_classes=10),
        (2, 3, 64, 64),
        (2, 10),
        -1.115410356,
    ),
}

THIRDS = (
    "num_layers must be a positive multiple of 3 "
    "(the normal cells stand in three equal groups), got"
)
INT = "num_layers must be a whole number (int), got"
MISUSES: list[tuple[Build, type[Exception], str]] = [
    (lambda: amoebanetd(7, 8), ValueError, f"{THIRDS} 7: use 6, for example"),
    (lambda: amoebanetd(0, 8), ValueError, f"{THIRDS} 0: use 3, for example"),
    (lambda: amoebanetd(3, 30), ValueError, "num_filters must be a positive multiple of 8"),
    (
        lambda: amoebanetd(3, 8, 0),
        ValueError,
        "num_classes must be at least 1, got 0: use 1, for example",
    ),
    (lambda: amoebanetd(6.0, 8), TypeError, f"{INT} 6.0"),  # type: ignore[arg-type]
    (lambda: amoebanetd(True, 8), TypeError, f"{INT} True"),
    (lambda: unet(depth=0), ValueError, "depth must be at least 1"),
    (lambda: unet(num_convs=-7), ValueError, "num_convs must be at least 1"),
    (
        lambda: unet(base_channels=1),
        ValueError,
        "base_channels must be at least 2 (the last cell has half of them)",
    ),
    (lambda: unet(input_channels=0), ValueError, "input_channels must be at least 1"),
    (lambda: unet(output_channels=0), ValueError, "output_channels must be at least 1"),
    (lambda: resnet101(num_classes=0), ValueError, "num_classes must be at least 1"),
    (lambda: resnet((1, 0, 1, 1)), ValueError, "blocks must be at least 1"),
    (lambda: resnet((1, 1, 1, 1), width=0), ValueError, "width must be at least 1"),
    (lambda: resnet((1, 1, 1, 1), expansion=0), ValueError, "expansion must be at least 1"),
]
IDS = [message.split()[0] for _, _, message in MISUSES]
WIDER = {name: (build, images) for name, (build, images, _, _) in SMALL.items()}
# If a layer has a single channel, a gradient can be zero by chance. So use a wider model.
WIDER["AmoebaNet-D"] = lambda: amoebanetd(3, 32, num_classes=10), (2, 3, 224, 224)


@pytest.mark.parametrize(("name", "size", "parameters", "layers"), PUBLISHED)
def test_sizes_are_the_published_ones(
    name: str, size: tuple[int, ...], parameters: int, layers: int
) -> None:
    rates = {0.1} if name == "U-Net" else set()
    with torch.device("meta"):
        model = SizedModel(name, size, MODELS[name].input_shape).layers()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(model) == layers
    assert {layer.p for layer in model if isinstance(layer, nn.Dropout2d)} == rates


@pytest.mark.parametrize(("build", "images", "outputs", "number"), SMALL.values(), ids=SMALL)
def test_what_it_computes(build: Build, images: Shape, outputs: Shape, number: float) -> None:
    """Check that the output of a model has the recorded checksum.

    All parameters and pixels are different numbers. So any change of the computation changes the
    checksum.
    """
    model = build().double().eval()
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            scale = (2 / parameter[0].numel()) ** 0.5
            parameter.copy_(waves(*parameter.shape, start=k) * scale)
        found = model(waves(*images))
    assert found.shape == outputs
    checksum = (found * waves(*outputs)).sum().item()
    assert checksum == pytest.approx(number, rel=1e-6)


def waves(*shape: int, start: float = 0) -> Tensor:
    count = torch.Size(shape).numel()
    angles = torch.arange(count, dtype=torch.float64) + start
    return angles.sin().view(shape)


@pytest.mark.parametrize(("build", "images"), WIDER.values(), ids=WIDER)
def test_inputs_stay_and_parameters_get_gradients(build: Build, images: Shape) -> None:
    model = build()
    passed: Tensor | tuple[Tensor, ...] = waves(*images).float()
    for layer in model:
        before = [x.clone() for x in tensors(passed)]
        output = layer(passed)
        assert all(map(torch.equal, tensors(passed), before))
        passed = output
    loss = tensors(passed)[0].square().sum()
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert 0 < parameter.grad.abs().sum() < torch.inf, key


@pytest.mark.parametrize(("build", "kind", "message"), MISUSES, ids=IDS)
def test_what_no_model_is_built_of(build: Build, kind: type[Exception], message: str) -> None:
    with torch.device("meta"), pytest.raises(kind) as caught:
        build()
    assert str(caught.value).startswith(message)


def test_torchvision_weights_load_into_the_flat_model_and_back() -> None:
    """Check that weights of ResNet-101 can be exchanged with torchvision, in both directions.

    With equal weights, the outputs of both models must be equal to the bit.
    """
    from torchvision import models as theirs

    torch.manual_seed(0)
    original = theirs.resnet101()
    for module in original.modules():
        if isinstance(module, nn.BatchNorm2d):  # no buffer has its default value
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.bias, std=0.1)
    before, images = original.state_dict(), torch.randn(2, 3, 64, 64)
    original.eval()
    expected = original(images)
    assert expected.isfinite().all()
    assert not expected[0].equal(expected[1])

    flat: Any = GPipe(resnet101(), [140, 230], devices=["cpu", "cpu"], chunks=1)
    flat.load_state_dict(flat_state(before))
    flat.eval()

    assert flat(images).equal(expected)
    state = flat.state_dict()
    assert list(state) == list(flat_state(before))
    assert list(state) == list(flat_state(state)), "a flat state stays as it is"
    back = torchvision_state(state)
    assert list(back) == list(before)
    for ours, theirs_before in zip(back.values(), before.values(), strict=True):
        assert ours.equal(theirs_before)


@pytest.mark.parametrize("model", [("ResNet-101", ()), ("torchvision:resnet18", (64,))], ids=str)
def test_a_seed_gives_the_same_weights_and_every_row_its_own(model: tuple[str, Shape]) -> None:
    from torchvision import models as theirs

    name, size = model
    build = SizedModel(name, size, (3, 64, 64), 5).layers
    original = getattr(theirs, "resnet101" if name == "ResNet-101" else "resnet18")

    def weights(build: Callable[..., nn.Module], **options: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = build(**options)
        return list(model.parameters())

    expected = weights(original, num_classes=5)
    one, other = weights(build), weights(build)

    assert all(map(torch.equal, one, expected))
    assert all(map(torch.equal, other, expected))
    assert not {x.data_ptr() for x in one} & {x.data_ptr() for x in other}


@pytest.mark.parametrize("name", ["vit_b_16", "regnet_y_1_6gf"])
def test_models_that_ask_for_more_are_built_without_memory_and_for_any_image(name: str) -> None:
    with torch.device("meta"):
        model = torchvision_model(name, 64, num_classes=5)
        output = model(torch.empty(2, 3, 64, 64))
    assert output.shape == (2, 5)


def test_torchvision_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check the error if torchvision cannot be imported.

    For example, it may have been built for another PyTorch. The error must be a single line.
    """
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('no operator\\ntorchvision::nms')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in list(sys.modules):
        if name.partition(".")[0] == "torchvision":
            monkeypatch.delitem(sys.modules, name)
    said = r"^ResNet-101 needs torchvision, which .*RuntimeError: no operator torchvision"
    with pytest.raises(Error, match=said):
        resnet101()
