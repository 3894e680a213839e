"""The flat ResNet is torchvision's, to the bit, and says so plainly when torchvision is not there."""

from __future__ import annotations

import copy
import importlib
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reproduce.models import resnet101
from reproduce.models.resnet import (
    AddIdentity,
    StashIdentity,
    flat_state,
    from_torchvision,
    resnet,
    torchvision_state,
)
from torchgpipe import GPipe
from torchgpipe.skip import verify_skippables

try:
    from torchvision.models import resnet as torchvision_resnet
except Exception as error:  # one built for another PyTorch breaks with RuntimeError or OSError
    unusable = f"torchvision cannot be imported: {type(error).__name__}: {error}"
else:
    unusable = ""

needs_torchvision = pytest.mark.skipif(bool(unusable), reason=unusable)

BOTTLENECK = ["identity", "conv1", "bn1", "relu1", "conv2", "bn2", "relu2", "conv3", "bn3", "add", "relu3"]
BLOCKS = {"layer1": 3, "layer2": 4, "layer3": 23, "layer4": 3}
NAMES = [
    *["conv1", "bn1", "relu", "maxpool"],
    *[f"{stage}_{i}_{name}" for stage, count in BLOCKS.items() for i in range(count) for name in BOTTLENECK],
    *["avgpool", "flatten", "fc"],
]

BOUNDARIES = [  # layer, shape after it, of a mini-batch of 2
    ("conv1", (2, 64, 112, 112)),
    ("maxpool", (2, 64, 56, 56)),
    ("layer1_2_relu3", (2, 256, 56, 56)),
    ("layer2_0_conv1", (2, 128, 56, 56)),
    ("layer2_0_add", (2, 512, 28, 28)),
    ("layer2_3_relu3", (2, 512, 28, 28)),
    ("layer3_22_relu3", (2, 1024, 14, 14)),
    ("layer4_2_relu3", (2, 2048, 7, 7)),
    ("avgpool", (2, 2048, 1, 1)),
    ("flatten", (2, 2048)),
    ("fc", (2, 1000)),
]


@pytest.fixture
def meta():
    with torch.device("meta"):
        yield


@pytest.fixture(scope="module")
def original():
    """A torchvision ResNet-101 that no buffer is left at its default in."""
    torch.manual_seed(0)
    model = torchvision_resnet.resnet101()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.bias, std=0.1)
    return model


@pytest.fixture
def images():
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


# Layers


@needs_torchvision
def test_parameters_and_layers(meta):
    model = resnet101()
    assert sum(p.numel() for p in model.parameters()) == 44_549_160
    assert len(model) == 370
    assert [name for name, _ in model.named_children()] == NAMES


@needs_torchvision
def test_every_boundary(meta):
    shapes = {}
    model = resnet101()
    for name, layer in model.named_children():
        layer.register_forward_hook(lambda _, inputs, output, name=name: shapes.update({name: output.shape}))
    model(torch.empty(2, 3, 224, 224))
    assert list(shapes) == NAMES
    assert [(name, shapes[name]) for name, _ in BOUNDARIES] == BOUNDARIES


@needs_torchvision
def test_every_stash_has_its_pop(meta):
    model = resnet101()
    verify_skippables(model)
    assert [sum(isinstance(m, kind) for m in model) for kind in (StashIdentity, AddIdentity)] == [33, 33]


@needs_torchvision
def test_no_layer_overwrites_its_input(original, images):
    passed = images
    for layer in from_torchvision(original):
        before = passed.clone()
        output = layer(passed)
        assert passed.equal(before)
        passed = output


@needs_torchvision
def test_no_relu_is_in_place(meta):
    relus = [m for m in resnet101().modules() if isinstance(m, nn.ReLU)]
    assert len(relus) == 1 + 3 * sum(BLOCKS.values())
    assert not any(m.inplace for m in relus)


@needs_torchvision
def test_other_bottleneck_resnets_can_be_regrouped(meta):
    model = from_torchvision(torchvision_resnet.resnet50(num_classes=5))
    assert len(model) == 4 + len(BOTTLENECK) * (3 + 4 + 6 + 3) + 3
    assert model(torch.empty(1, 3, 64, 64)).shape == (1, 5)


# Equal to torchvision's


@needs_torchvision
def test_eval_mode_output_is_equal_to_the_bit(original, images):
    original.eval()
    expected = original(images)
    flat = from_torchvision(original)
    assert expected.isfinite().all() and not expected[0].equal(expected[1])
    assert flat(images).equal(expected)


@needs_torchvision
def test_train_mode_output_gradients_and_statistics_are_equal(original, images):
    plain, flat = copy.deepcopy(original).train(), from_torchvision(copy.deepcopy(original)).train()
    for model in (plain, flat):
        F.cross_entropy(model(images), torch.tensor([3, 7])).backward()

    for (name, expected), found in zip(plain.named_parameters(), flat.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, msg=name)
    for (name, expected), found in zip(plain.named_buffers(), flat.buffers(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)


@needs_torchvision
def test_same_seed_gives_the_same_weights():
    torch.manual_seed(0)
    expected = torchvision_resnet.resnet101(num_classes=10).state_dict()
    torch.manual_seed(0)
    found = resnet101(num_classes=10).state_dict()
    assert len(found) == len(expected)
    assert all(a.equal(b) for a, b in zip(found.values(), expected.values(), strict=True))


@needs_torchvision
def test_layers_are_shared_with_the_original(original):
    flat = from_torchvision(original)
    assert {id(p) for p in flat.parameters()} == {id(p) for p in original.parameters()}


@needs_torchvision
@pytest.mark.parametrize("pipelined", [False, True])
def test_torchvision_weights_load_into_the_flat_model(original, images, pipelined):
    """As a user loads a downloaded file: every key fits, and the outputs are equal to the bit."""
    flat = resnet101()
    if pipelined:
        flat = GPipe(flat, [140, 230], devices=["cpu", "cpu"], chunks=1)
    flat.load_state_dict(flat_state(original.state_dict()))
    assert flat.eval()(images).equal(original.eval()(images))


@needs_torchvision
def test_the_flat_state_goes_back_to_torchvision(original):
    state = from_torchvision(original).state_dict()
    assert list(flat_state(original.state_dict())) != list(original.state_dict())
    assert {*flat_state(original.state_dict())} == {*state}
    assert flat_state(state).keys() == state.keys(), "what is flat stays so"
    other = torchvision_resnet.resnet101()
    other.load_state_dict(torchvision_state(state))
    assert all(a.equal(b) for a, b in zip(other.state_dict().values(), original.state_dict().values(), strict=True))


@needs_torchvision
@pytest.mark.parametrize(
    ("blocks", "width", "expansion", "layers"), [((1, 1, 1, 1), 16, 4, 51), ((2, 1, 3, 1), 8, 1, 84)]
)
def test_smaller_resnets_keep_the_structure(meta, blocks, width, expansion, layers):
    model = resnet(blocks, width=width, expansion=expansion, num_classes=5)
    names = [name for name, _ in model.named_children()]
    assert len(names) == layers
    assert [name for name in names if name in NAMES] == names, "its layers are called as ResNet-101's"
    assert model.get_submodule("layer1_0_conv2").out_channels == width
    assert model.get_submodule("layer4_0_conv3").out_channels == 512 * expansion
    assert model(torch.empty(2, 3, 32, 32)).shape == (2, 5)


# Misuse


@needs_torchvision
@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: nn.Linear(1, 1), "torchvision ResNet, got Linear: "),
        (lambda: torchvision_resnet.resnet18(), "ResNet of Bottleneck blocks, got one of BasicBlock: "),
    ],
    ids=["another model", "basic blocks"],
)
def test_model_that_cannot_be_regrouped(meta, build, message):
    with pytest.raises(TypeError, match=f"^model must be a {message}") as caught:
        from_torchvision(build())
    assert "\n" not in str(caught.value)


def test_no_class():
    with pytest.raises(ValueError, match=r"^num_classes must be at least 1, got 0"):
        resnet101(num_classes=0)


@pytest.mark.parametrize(
    ("blocks", "width", "message"),
    [
        ((1, 1, 1), 64, "blocks must be four numbers, one for each stage, got 3: "),
        ((1, 0, 1, 1), 64, "blocks must be at least 1, got 0: "),
        ((1, 1, 1, 1), 0, "width must be at least 1, got 0: "),
    ],
)
def test_sizes_that_no_resnet_has(blocks, width, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        resnet(blocks, width=width)


@pytest.fixture
def forget(monkeypatch):
    """Make the next import of a package run anew; the old one is put back after the test."""

    def forget(package):
        for name in list(sys.modules):
            if name == package or name.startswith(f"{package}."):
                monkeypatch.delitem(sys.modules, name)

    return forget


@pytest.mark.parametrize(
    "error, cause",
    [
        ("ModuleNotFoundError('No torchvision')", "ModuleNotFoundError: No torchvision"),
        ("RuntimeError('no operator\\ntorchvision::nms')", "RuntimeError: no operator torchvision::nms"),
        ("OSError('libcudart.so: cannot open')", "OSError: libcudart.so: cannot open"),
    ],
    ids=["missing", "made for another torch", "missing a library"],
)
def test_torchvision_that_cannot_be_imported(monkeypatch, tmp_path, forget, error, cause):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    forget("torchvision")

    with pytest.raises(ImportError) as caught:
        resnet101()
    message = str(caught.value)
    assert message.startswith("ResNet-101 needs torchvision, ")
    assert f"({cause}): install" in message
    assert "\n" not in message


def test_other_models_need_no_torchvision(monkeypatch, forget):
    forget("benchmarks")
    forget("torchvision")
    monkeypatch.setitem(sys.modules, "torchvision", None)
    models = importlib.import_module("reproduce.models")
    with torch.device("meta"):
        assert len(models.amoebanetd(3, 8)) == 9
        assert len(models.unet(1, 1, 2)) == 17
