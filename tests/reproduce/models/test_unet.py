"""U-Net has the layers that its description says, and meets its skips at any image size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reproduce.models import unet
from reproduce.models.unet import PopConcat, Stash

# Of depth 2, C = 4, with B = 2 and with B = 1: the channels of every convolution in turn.
CONVS = {
    2: [(3, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 8), (16, 4), (4, 4), (8, 2), (2, 2), (2, 1)],
    1: [(3, 4), (4, 8), (8, 8), (16, 4), (8, 2), (2, 1)],
}
BLOCK = [nn.Conv2d, nn.Dropout2d, nn.InstanceNorm2d, nn.LeakyReLU]
LAYERS = [  # of depth 1, B = 1
    *[*BLOCK, Stash, nn.MaxPool2d],
    *BLOCK,
    *[nn.Upsample, PopConcat, *BLOCK],
    nn.Conv2d,
]


def conv_channels(model: nn.Sequential) -> list[tuple[int, int]]:
    return [(m.in_channels, m.out_channels) for m in model if isinstance(m, nn.Conv2d)]


@pytest.mark.parametrize(("num_convs", "channels"), CONVS.items())
def test_channels_of_every_convolution(num_convs: int, channels: list[tuple[int, int]]) -> None:
    with torch.device("meta"):
        assert conv_channels(unet(depth=2, num_convs=num_convs, base_channels=4)) == channels


def test_layers_and_their_settings() -> None:
    with torch.device("meta"):
        model = unet(depth=1, num_convs=1, base_channels=4)
        assert conv_channels(unet()) == conv_channels(unet(5, 5, 64, 3, 1))
    assert [type(layer) for layer in model] == LAYERS
    *convs, last = [m for m in model if isinstance(m, nn.Conv2d)]
    assert {(m.kernel_size, m.padding, m.stride, m.bias) for m in convs} == {((3, 3), (1, 1), (1, 1), None)}
    assert (last.kernel_size, last.padding, last.stride, last.bias) == ((1, 1), (0, 0), (1, 1), None)
    assert {m.p for m in model if isinstance(m, nn.Dropout2d)} == {0.1}
    assert {m.affine for m in model if isinstance(m, nn.InstanceNorm2d)} == {False}
    assert {m.negative_slope for m in model if isinstance(m, nn.LeakyReLU)} == {0.01}
    assert {m.kernel_size for m in model if isinstance(m, nn.MaxPool2d)} == {2}
    assert {(m.scale_factor, m.mode) for m in model if isinstance(m, nn.Upsample)} == {(2.0, "nearest")}


@pytest.mark.parametrize(("height", "width"), [(192, 192), (33, 64), (64, 47), (63, 127), (100, 37)])
def test_output_has_the_size_of_the_input(height: int, width: int) -> None:
    with torch.device("meta"):
        model = unet(num_convs=1, base_channels=4, input_channels=2, output_channels=7)
        assert model(torch.empty(3, 2, height, width)).shape == (3, 7, height, width)


@pytest.mark.parametrize(("height", "width"), [(4, 6), (5, 6), (4, 7)])
def test_odd_input_is_padded_behind_and_goes_before_the_skip(height: int, width: int) -> None:
    model = nn.Sequential(Stash(), nn.MaxPool2d(2), nn.Upsample(scale_factor=2), PopConcat())
    image = torch.ones(1, 1, height, width)

    padded = torch.zeros(1, 1, height, width)
    padded[..., : height // 2 * 2, : width // 2 * 2] = 1
    assert model(image).equal(torch.cat([padded, image], dim=1))
