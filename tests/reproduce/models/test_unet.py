"""U-Net has the published sizes, meets its skips at any image size, and suits a pipeline."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reproduce.models import unet
from reproduce.models.unet import PopConcat, Stash
from torchgpipe.skip import verify_skippables

PUBLISHED = [  # (B, C), parameters, layers
    ((5, 64), 232_687_328, 241),
    ((6, 72), 362_157_516, 285),
    ((11, 128), 2_213_834_176, 505),
    ((24, 128), 4_993_859_008, 1_077),
    ((24, 160), 7_802_903_600, 1_077),
    ((48, 160), 15_822_206_000, 2_133),
]

CONVS = [  # of depth 2, B = 2, C = 4: the channels of every convolution in turn
    *[(3, 4), (4, 4)],  # encode 0
    *[(4, 8), (8, 8)],  # encode 1
    *[(8, 16), (16, 8)],  # bottleneck
    *[(16, 4), (4, 4)],  # decode 1
    *[(8, 2), (2, 2)],  # decode 0
    (2, 1),
]

ONE_BLOCK_CONVS = [(3, 4), (4, 8), (8, 8), (16, 4), (8, 2), (2, 1)]  # the same with B = 1

BLOCK = [nn.Conv2d, nn.Dropout2d, nn.InstanceNorm2d, nn.LeakyReLU]

LAYERS = [  # of depth 1, B = 1
    *[*BLOCK, Stash, nn.MaxPool2d],
    *BLOCK,
    *[nn.Upsample, PopConcat, *BLOCK],
    nn.Conv2d,
]

IMAGE_SIZES = [(192, 192), (64, 64), (33, 64), (64, 47), (63, 127), (95, 97), (191, 193), (100, 37)]

MISUSES = [
    ({"depth": 0}, ValueError, "depth must be at least 1, got 0: use 1"),
    ({"num_convs": 0}, ValueError, "num_convs must be at least 1, got 0: use 1"),
    ({"base_channels": 1}, ValueError, "base_channels must be at least 2 .*, got 1: use 2"),
    ({"base_channels": 6.4}, TypeError, "base_channels must be a whole number .*, got 6.4"),
    ({"input_channels": 0}, ValueError, "input_channels must be at least 1, got 0: use 1"),
    ({"output_channels": -1}, ValueError, "output_channels must be at least 1, got -1: use 1"),
]


@pytest.fixture
def meta():
    with torch.device("meta"):
        yield


@pytest.fixture
def model():
    torch.manual_seed(0)
    return unet(depth=3, num_convs=2, base_channels=4)


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def conv_channels(model):
    return [(m.in_channels, m.out_channels) for m in model if isinstance(m, nn.Conv2d)]


# Published sizes


@pytest.mark.parametrize("size, parameters, layers", PUBLISHED, ids=str)
def test_published_parameters_and_layers(meta, size, parameters, layers):
    num_convs, base_channels = size
    model = unet(num_convs=num_convs, base_channels=base_channels)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(model) == layers


def test_defaults_are_the_smallest_published_size(meta):
    assert conv_channels(unet()) == conv_channels(unet(5, 5, 64, 3, 1))


# Layers


@pytest.mark.parametrize("num_convs, channels", [(2, CONVS), (1, ONE_BLOCK_CONVS)])
def test_channels_of_every_convolution(meta, num_convs, channels):
    assert conv_channels(unet(depth=2, num_convs=num_convs, base_channels=4)) == channels


def test_kinds_of_layers(meta):
    assert [type(layer) for layer in unet(depth=1, num_convs=1, base_channels=4)] == LAYERS


def test_settings_of_layers(meta):
    model = unet(depth=1, num_convs=2, base_channels=4)
    *convs, last = [m for m in model if isinstance(m, nn.Conv2d)]
    assert {(m.kernel_size, m.padding, m.stride, m.bias) for m in convs} == {((3, 3), (1, 1), (1, 1), None)}
    assert (last.kernel_size, last.padding, last.stride, last.bias) == ((1, 1), (0, 0), (1, 1), None)
    assert {m.p for m in model if isinstance(m, nn.Dropout2d)} == {0.1}
    assert {m.affine for m in model if isinstance(m, nn.InstanceNorm2d)} == {False}
    assert {m.negative_slope for m in model if isinstance(m, nn.LeakyReLU)} == {0.01}
    assert {(m.scale_factor, m.mode) for m in model if isinstance(m, nn.Upsample)} == {(2.0, "nearest")}


def test_every_stash_has_its_pop(meta):
    model = unet()
    verify_skippables(model)
    assert [sum(isinstance(m, kind) for m in model) for kind in (Stash, PopConcat)] == [5, 5]


# Shapes


@pytest.mark.parametrize("height, width", IMAGE_SIZES)
def test_output_has_the_size_of_the_input(meta, height, width):
    model = unet(num_convs=1, base_channels=4, input_channels=2, output_channels=7)
    assert model(torch.empty(3, 2, height, width)).shape == (3, 7, height, width)


def test_every_layer_hands_on_one_tensor(meta):
    seen = []
    model = unet(depth=2, num_convs=1, base_channels=4)
    for layer in model:
        layer.register_forward_hook(lambda _, inputs, output: seen.append((type(output), output.shape[2])))
    model(torch.empty(2, 3, 32, 32))
    sizes = [32] * 5 + [16] * 6 + [8] * 5 + [16] * 6 + [32] * 7
    assert seen == [(torch.Tensor, size) for size in sizes]


@pytest.mark.parametrize("height, width", [(4, 6), (5, 6), (4, 7), (5, 7)])
def test_odd_input_is_padded_behind_and_goes_before_the_skip(height, width):
    model = nn.Sequential(Stash(), nn.MaxPool2d(2), nn.Upsample(scale_factor=2), PopConcat())
    image = torch.ones(1, 1, height, width)

    padded = torch.zeros(1, 1, height, width)
    padded[..., : height // 2 * 2, : width // 2 * 2] = 1
    assert model(image).equal(torch.cat([padded, image], dim=1))


# As a part of a pipeline


def test_eval_mode_is_deterministic(model, images):
    model.eval()
    first, second = model(images), model(images)
    assert first.equal(second)
    assert first.isfinite().all()
    assert not first[0].equal(first[1])


def test_train_mode_drops_channels_as_the_seed_says(model, images):
    torch.manual_seed(2)
    first, other = model(images), model(images)
    torch.manual_seed(2)
    assert model(images).equal(first)
    assert not other.equal(first)


def test_no_layer_overwrites_its_input(model, images):
    passed = images
    for layer in model:
        before = passed.clone()
        output = layer(passed)
        assert passed.equal(before)
        passed = output


def test_skips_carry_gradient_to_every_parameter(model, images):
    model(images).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("change, error, message", MISUSES)
def test_misuse(change, error, message):
    with pytest.raises(error, match=f"^{message}") as caught:
        unet(**change)
    assert "\n" not in str(caught.value)
