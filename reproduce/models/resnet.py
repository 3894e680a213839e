"""Build torchvision's ResNet-101 as a flat sequence of 370 layers, and other torchvision models.

The layers are torchvision's own layers, in the same order. Their names have `_` in place of `.`,
such as `layer1_0_conv1`. Weights and eval-mode outputs are bitwise equal to torchvision's. There
are two differences: ReLUs do not work in place, and the input of each bottleneck is passed to the
bottleneck's end as a skip.

The other models of torchvision are built unchanged. `torchgpipe.sequential` can cut them into
layers. All functions that build a model raise `Error` if torchvision is missing or broken.

Source: He et al., "Deep Residual Learning for Image Recognition" (arXiv:1512.03385).
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import Flatten, Identity, Module, ReLU, Sequential

from reproduce.error import Error, suggestion
from reproduce.models.sizes import check_size
from reproduce.models.unet import Stash
from torchgpipe.skip import Namespace, pop, skippable

if TYPE_CHECKING:
    from torchvision.models.resnet import Bottleneck, ResNet

NamedLayer = tuple[str, Module]
RESNET101 = (3, 4, 23, 3)  # bottlenecks in each stage


@skippable(pop=["skip"])
class AddIdentity(Module):
    """A layer that adds the input of the bottleneck to the output of the bottleneck's convolutions.

    If the bottleneck changes the image size or the number of channels, its input is downsampled
    first.
    """

    isolate: Callable[[Namespace], Module]  # set by @skippable

    def __init__(self, downsample: Module | None) -> None:
        super().__init__()
        self.downsample = Identity() if downsample is None else downsample

    def forward(self, image: Tensor) -> Generator[pop, Tensor, Tensor]:
        identity = yield pop("skip")
        total: Tensor = image + self.downsample(identity)
        return total


def layers(model: ResNet) -> Iterator[NamedLayer]:
    """Yield the names and layers of a torchvision ResNet as a flat sequence, in order."""
    yield "conv1", model.conv1
    yield "bn1", model.bn1
    yield "relu", ReLU()
    yield "maxpool", model.maxpool
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        for index, block in model.get_submodule(stage).named_children():
            yield from bottleneck_layers(f"{stage}_{index}", cast("Bottleneck", block))
    yield "avgpool", model.avgpool
    yield "flatten", Flatten()
    yield "fc", model.fc


def bottleneck_layers(name: str, block: Bottleneck) -> Iterator[NamedLayer]:
    """Yield the eleven layers of a bottleneck, each with a name that begins with `name`."""
    identity = Namespace()
    yield f"{name}_identity", Stash().isolate(identity)
    yield f"{name}_conv1", block.conv1
    yield f"{name}_bn1", block.bn1
    yield f"{name}_relu1", ReLU()
    yield f"{name}_conv2", block.conv2
    yield f"{name}_bn2", block.bn2
    yield f"{name}_relu2", ReLU()
    yield f"{name}_conv3", block.conv3
    yield f"{name}_bn3", block.bn3
    yield f"{name}_add", AddIdentity(block.downsample).isolate(identity)
    yield f"{name}_relu3", ReLU()


def import_torchvision(module: str = "models.resnet", needed_by: str = "ResNet-101") -> ModuleType:
    """Import a module of torchvision; raise `Error` if the import fails.

    This happens only when the module is needed, so that all other code works without torchvision.
    """
    try:
        return importlib.import_module(f"torchvision.{module}")
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise Error(
            f"{needed_by} needs torchvision, which cannot be imported here ({cause}): "
            "install the release that goes with your PyTorch, by 'pip install torch torchvision'"
        ) from error


def resnet(
    blocks: Sequence[int], width: int = 64, expansion: int = 4, num_classes: int = 1000
) -> Sequential:
    """Build a ResNet from torchvision's layers, with bottlenecks and random weights.

    Every stage after the first doubles the numbers of channels. Each argument must be a positive
    integer.

    Shapes: (N, 3, H, W) to (N, num_classes), where H and W are at least about 32.

    Args:
        blocks: The number of bottlenecks in each of the four stages.
        width: The number of channels within the bottlenecks of the first stage.
        expansion: The bottlenecks of the first stage return `64 * expansion` channels.
        num_classes: The number of classes.
    """
    for count in blocks:
        check_size("blocks", count)
    check_size("width", width)
    check_size("expansion", expansion)
    check_size("num_classes", num_classes)
    module = import_torchvision()
    bottleneck = type("Bottleneck", (module.Bottleneck,), {"expansion": expansion})
    model = module.ResNet(bottleneck, list(blocks), num_classes=num_classes, width_per_group=width)
    return Sequential(OrderedDict(layers(model)))


def resnet101(num_classes: int = 1000) -> Sequential:
    """Build ResNet-101 with random weights.

    With the same seed, the weights are equal to the weights of torchvision's ResNet-101.
    """
    return resnet(RESNET101, num_classes=num_classes)


def flat_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the entries of a torchvision ResNet's state dict, so that the flat model can load it.

        model.load_state_dict(flat_state(torch.load("resnet101.pth", weights_only=True)))

    `model` can also be a `GPipe` of the flat model. The tensors are shared, not copied. Names that
    are already flat do not change. `load_state_dict` reports names that do not fit.
    """
    renamed = {}
    for key, value in state.items():
        flat_key = re.sub(r"^(layer\d)\.(\d+)\.", r"\1_\2_", key)
        flat_key = flat_key.replace("_downsample.", "_add.downsample.")
        renamed[flat_key] = value
    return renamed


def torchvision_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the entries of a flat model's state dict, so that torchvision's ResNet can load it."""
    renamed = {}
    for key, value in state.items():
        its_key = re.sub(r"^(layer\d)_(\d+)_(?:add\.)?", r"\1.\2.", key)
        renamed[its_key] = value
    return renamed


def torchvision_model(name: str, pixels: int, **options: int) -> Module:
    """Build a model of torchvision with random weights, for images of `pixels` x `pixels`.

    Raise `ValueError` if torchvision has no model called `name`.
    """
    models = import_torchvision("models", f"torchvision:{name}")
    try:
        builder = models.get_model_builder(name)
    except ValueError:
        names = models.list_models(models)
        known = suggestion(name.lower(), names, "torchvision.models.list_models()")
        raise ValueError(f"torchvision has no model {name!r}; {known}") from None
    parameters = inspect.signature(builder).parameters
    # Without weights, nothing is downloaded.
    no_weights = {key: None for key in parameters if key.startswith("weights")}
    if name.startswith("vit_"):  # ViT is built for one image size
        options["image_size"] = pixels
    device = torch.get_default_device()
    # RegNet's constructor computes widths with tensors, and tensors on `meta` have no values.
    with torch.device("cpu" if name.startswith("regnet_") else device):
        model: Module = builder(**no_weights, **options)
    return model.to(device)
