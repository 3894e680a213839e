"""Every model: as large as published, to the parameter; fit for a pipeline; a wrong size is one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from reproduce.models import MODELS, amoebanetd, resnet101, unet
from reproduce.models.resnet import from_torchvision, resnet, torchvision_model

PUBLISHED = [  # model, size, parameters, layers
    ("AmoebaNet-D", (18, 208), 81_505_540, 24),
    ("AmoebaNet-D", (18, 256), 122_470_120, 24),
    ("AmoebaNet-D", (18, 416), 319_024_120, 24),
    ("AmoebaNet-D", (18, 544), 542_734_840, 24),
    ("AmoebaNet-D", (36, 544), 1_055_832_376, 42),
    ("AmoebaNet-D", (72, 512), 1_844_858_344, 78),
    ("U-Net", (5, 64), 232_687_328, 241),
    ("U-Net", (6, 72), 362_157_516, 285),
    ("U-Net", (11, 128), 2_213_834_176, 505),
    ("U-Net", (24, 128), 4_993_859_008, 1_077),
    ("U-Net", (24, 160), 7_802_903_600, 1_077),
    ("U-Net", (48, 160), 15_822_206_000, 2_133),
    ("ResNet-101", (), 44_549_160, 370),
]

SMALL: dict[str, tuple[Callable[[], nn.Sequential], int]] = {  # how to build it, height and width of its images
    "AmoebaNet-D": (lambda: amoebanetd(3, 8, num_classes=10), 224),
    "U-Net": (lambda: unet(depth=3, num_convs=2, base_channels=4), 32),
    "ResNet": (lambda: resnet((1, 1, 1, 1), width=8, num_classes=10), 64),
}

MISUSES: list[tuple[Callable[[], nn.Sequential], str]] = [
    (lambda: amoebanetd(7, 8), "num_layers must be a positive multiple of 3 (the normal cells stand in three equal "
                               "groups), got 7: use 6, for example"),
    (lambda: amoebanetd(0, 8), "num_layers must be a positive multiple of 3 (the normal cells stand in three equal "
                               "groups), got 0: use 3, for example"),
    (lambda: amoebanetd(3, 30), "num_filters must be a positive multiple of 8 (the narrowest convolutions have D/8 "
                                "channels), got 30: use 32, for example"),
    (lambda: amoebanetd(3, 8, 0), "num_classes must be at least 1, got 0: use 1, for example"),
    (lambda: unet(depth=0), "depth must be at least 1, got 0: use 1, for example"),
    (lambda: unet(num_convs=-7), "num_convs must be at least 1, got -7: use 1, for example"),
    (lambda: unet(base_channels=1), "base_channels must be at least 2 (the last cell has half of them), got 1: use 2, "
                                    "for example"),
    (lambda: unet(input_channels=0), "input_channels must be at least 1, got 0: use 1, for example"),
    (lambda: unet(output_channels=0), "output_channels must be at least 1, got 0: use 1, for example"),
    (lambda: resnet101(num_classes=0), "num_classes must be at least 1, got 0: use 1, for example"),
    (lambda: resnet((1, 1, 1)), "blocks must be four numbers, one for each stage, got 3: use (3, 4, 23, 3)"),
    (lambda: resnet((1, 0, 1, 1)), "blocks must be at least 1, got 0: use 1, for example"),
    (lambda: resnet(width=0), "width must be at least 1, got 0: use 1, for example"),
    (lambda: resnet(expansion=0), "expansion must be at least 1, got 0: use 1, for example"),
]  # fmt: skip


def images(size: int) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def tensors(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize(("name", "size", "parameters", "layers"), PUBLISHED)
def test_parameters_and_layers_are_the_published_ones(
    name: str, size: tuple[int, ...], parameters: int, layers: int
) -> None:
    with torch.device("meta"):
        model = MODELS[name].build(*size)
        assert sum(p.numel() for p in model.parameters()) == parameters
        assert len(model) == layers


@pytest.mark.parametrize("name", SMALL)
def test_no_layer_overwrites_its_input(name: str) -> None:
    build, size = SMALL[name]
    passed: Tensor | tuple[Tensor, ...] = images(size)
    for layer in build():
        before = [x.clone() for x in tensors(passed)]
        output = layer(passed)
        assert all(map(torch.equal, tensors(passed), before))
        passed = output


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    build, size = SMALL[name]
    model = build()
    output = model(images(size))
    assert output.shape == ((2, 1, size, size) if name == "U-Net" else (2, 10))
    output.square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and 0 < parameter.grad.abs().sum() < torch.inf, key


@pytest.mark.parametrize(("build", "message"), MISUSES, ids=[message.split()[0] for _, message in MISUSES])
def test_a_size_that_no_model_has(build: Callable[[], nn.Sequential], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        build()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("build", "message"),
    [
        *((lambda value=value: amoebanetd(value, 8), f"num_layers must be a whole number .*, got {value!r}")
          for value in (6.0, "6", None, True)),
        (lambda: from_torchvision(nn.Linear(1, 1)), r"model must be a torchvision ResNet, got Linear: see resnet101"),
        (lambda: from_torchvision(torchvision_model("resnet18", 64)),
         "model must be a ResNet of Bottleneck blocks, got one of BasicBlock: use resnet50, resnet101 or"),
    ],
)  # fmt: skip
def test_what_is_of_another_type(build: Callable[[], nn.Sequential], message: str) -> None:
    with torch.device("meta"), pytest.raises(TypeError, match=f"^{message}"):
        build()
