"""Training steps that others timed on single cards with the P40's chip, GP102: its efficiencies come from them.

None of it is from the papers whose tables are predicted, nor of their models. Left out of what the sources have:
evaluation, for the tables are of training; ResNet-101, which a table is of; models that torchvision has in another
form, or whose convolutions are grouped; runs without cuDNN, or with one that the source has a newer one beside. Where
every step was published, `unsteady` has the models of which, on either machine, the first and the last of the nine
deciles (`statistics.quantiles`, n=10) are a twentieth of the median apart or more. What such steps wait for we do not
know, the host perhaps.

The first two sources are one repository's, on two cards; the last two are one script's, on two machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from research.p40.cards import GTX_1080_TI, TITAN_X, Card

__all__ = ["SOURCES", "Timings"]


class Timings(NamedTuple):
    """What one source says of one machine, for images of 224 x 224."""

    source: str
    """Its repository, then where in there it says so, and with which software."""
    card: Card
    batch: int
    to_images: bool
    """Whether backward goes to the images, too."""
    adds: bool
    """Whether a step sets the parameters' gradients to zero, and backward adds to them (PyTorch's way, then)."""
    steps: Mapping[str, tuple[float, ...]]
    """Milliseconds by torchvision's name of the model: forward and backward, or one number for both.

    A loss, and copying images to the card, is in some of them, and counted in none.
    """
    unsteady: Mapping[str, tuple[float, ...]] = {}
    """The same, of models that are left out for it."""

    @property
    def repository(self) -> str:
        """Who published it: timings of one repository are left out together."""
        return self.source.partition(",")[0]


SOURCES = {
    "Torch7, Titan X": Timings(
        "jcjohnson/cnn-benchmarks, README: Pascal Titan X, cuDNN 5.1.05",
        TITAN_X,
        16,
        True,
        False,
        {
            "vgg16": (41.59, 87.03),
            "vgg19": (48.09, 99.23),
            "resnet18": (10.14, 21.40),
            "resnet34": (17.01, 34.58),
            "resnet50": (35.03, 68.54),
            "resnet152": (75.45, 142.47),
        },
    ),
    "Torch7, GTX 1080 Ti": Timings(
        "jcjohnson/cnn-benchmarks, README: GTX 1080 Ti, cuDNN 5.1.10",
        GTX_1080_TI,
        16,
        True,
        False,
        {
            "vgg16": (41.23, 86.91),
            "vgg19": (48.15, 100.04),
            "resnet18": (10.45, 22.34),
            "resnet34": (16.71, 34.60),
            "resnet50": (34.14, 67.06),
            "resnet152": (73.52, 142.02),
        },
    ),
    "PyTorch 0.3": Timings(
        "u39kun/deep-learning-benchmark, README: GTX 1080 Ti, PyTorch 0.3.0, CUDA 9.0, cuDNN 7.0, 32-bit, train",
        GTX_1080_TI,
        16,
        True,
        True,
        {"vgg16": (131.9,), "resnet152": (206.4,), "densenet161": (211.9,)},
    ),
    "PyTorch, CUDA 10.1": Timings(
        "aisensiy/pytorch-gpu-benchmark, experiment_results/openbayes: GTX 1080 Ti, CUDA 10.1, cuDNN 7.6.3, float, "
        "training; medians of 50 steps",
        GTX_1080_TI,
        12,
        False,
        True,
        {
            "resnet34": (41.0,),
            "resnet50": (74.7,),
            "densenet161": (179.2,),
            "vgg11": (72.2,),
            "vgg11_bn": (80.7,),
            "vgg13": (99.8,),
            "vgg13_bn": (114.0,),
            "vgg16": (117.4,),
            "vgg16_bn": (133.0,),
            "vgg19": (135.2,),
            "vgg19_bn": (152.1,),
        },
        {
            "resnet18": (26,),
            "densenet121": (94.3,),
            "densenet169": (125.4,),
            "densenet201": (150.2,),
            "squeezenet1_0": (27.7,),
            "squeezenet1_1": (20.1,),
        },
    ),
    "PyTorch, CUDA 10.0": Timings(
        "aisensiy/pytorch-gpu-benchmark, experiment_results/bitahub: GTX 1080 Ti, CUDA 10.0, cuDNN 7.6.3, float, "
        "training; medians of 50 steps",
        GTX_1080_TI,
        12,
        False,
        True,
        {
            "resnet34": (44.3,),
            "resnet50": (74.1,),
            "densenet161": (176.1,),
            "vgg11": (59.3,),
            "vgg11_bn": (67.8,),
            "vgg13": (87.5,),
            "vgg13_bn": (101.3,),
            "vgg16": (104.6,),
            "vgg16_bn": (120.2,),
            "vgg19": (122.2,),
            "vgg19_bn": (139.3,),
        },
        {
            "resnet18": (27,),
            "densenet121": (93.9,),
            "densenet169": (120.5,),
            "densenet201": (147.9,),
            "squeezenet1_0": (24.2,),
            "squeezenet1_1": (19.2,),
        },
    ),
}
"""CUDA 10.1 and cuDNN 7.6.3 are what PyTorch 1.3 came with, the papers' version."""
