"""AmoebaNet-D computes what its genotypes say."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reproduce.models import amoebanetd
from reproduce.models.amoebanet import NORMAL, OPERATIONS, REDUCTION, Cell, FactorizedReduction, Genotype

GENOTYPES = {  # written again as text, state:operation, so that no slip in a table goes unseen
    NORMAL: """
        1:conv 1x1 + 1:pool 3x3, 1:none + 0:conv 1x7-7x1, 0:conv 1x1 + 0:conv 1x7-7x1,
        2:pool 3x3 + 2:none, 1:avg pool 3x3 + 5:conv 1x1; 0 3 4 6; stride 1""",
    REDUCTION: """
        0:max pool 2x2 + 0:pool 3x3, 2:none + 1:conv 3x3, 2:conv 1x7-7x1 + 2:pool 3x3,
        3:none + 1:max pool 2x2, 2:avg pool 3x3 + 3:conv 1x1; 4 5 6; stride 2""",
}

STRIDED = {  # the kernels of the convolutions at stride 2, and the strides of those that have another than 1
    "none": "1x1/2x2 1x1/2x2",
    "conv 1x1": "1x1/2x2",
    "conv 3x3": "1x1 3x3/2x2 1x1",
    "conv 1x7-7x1": "1x1 1x7/1x2 7x1/2x1 1x1",
}


def sized(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size))


def test_what_cells_hand_on() -> None:
    """Each a pair of tensors, of which a reduction makes the first half as large, and with twice the channels."""
    with torch.device("meta"):
        passed = torch.empty(2, 3, 224, 224)
        sizes = []
        for layer in amoebanetd(3, 32):
            passed = layer(passed)
            sizes.append([tuple(x.shape[1:3]) for x in (passed if isinstance(passed, tuple) else [passed])])
    firsts = [(8, 112), (48, 56), (96, 28), (128, 28), (192, 14), (256, 14), (384, 7), (512, 7)]
    assert sizes == [firsts[:1], *(list(pair) for pair in zip(firsts[1:], firsts, strict=False)), [(1000,)]]


@pytest.mark.parametrize(("genotype", "text"), GENOTYPES.items(), ids=["normal", "reduction"])
def test_genotype(genotype: Genotype, text: str) -> None:
    pairs = ", ".join(" + ".join(f"{state}:{name}" for state, name in pair) for pair in genotype.pairs)
    output = " ".join(str(state) for state in genotype.output)
    assert f"{pairs}; {output}; stride {genotype.stride}" == " ".join(text.split())


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name: str) -> None:
    with torch.device("meta"):
        operation = OPERATIONS[name](8, 2)
        convs = [m for m in operation.modules() if isinstance(m, nn.Conv2d)]
        found = [sized(m.kernel_size) + f"/{sized(m.stride)}" * (m.stride != (1, 1)) for m in convs]
        assert " ".join(found) == STRIDED.get(name, "")
        assert operation(torch.empty(2, 8, 14, 14)).shape == (2, 8, 7, 7)
        size = 13 if name == "max pool 2x2" else 14  # the only one without padding
        assert OPERATIONS[name](8, 1)(torch.empty(2, 8, 14, 14)).shape == (2, 8, size, size)


@pytest.mark.parametrize("name", ["avg pool 3x3", "pool 3x3"])
def test_average_pools_do_not_count_padding(name: str) -> None:
    step = torch.zeros(1, 1, 6, 6)
    step[..., 3:] = 1
    expected = step.clone()
    expected[..., 2], expected[..., 3] = 1 / 3, 2 / 3
    torch.testing.assert_close(OPERATIONS[name](1, 1)(step), expected)


def test_every_convolution_follows_a_relu_leads_to_a_batch_norm_and_has_no_bias() -> None:
    with torch.device("meta"):
        modules = list(amoebanetd(6, 16).modules())
    letters = {nn.ReLU: "r", nn.Conv2d: "c", nn.BatchNorm2d: "b"}
    order = "".join(letters.get(type(m), "") for m in modules)
    assert re.fullmatch("(rcb|rccb)+", order)
    assert all(m.bias is None for m in modules if isinstance(m, nn.Conv2d))


@pytest.mark.parametrize(("height", "width"), [(8, 8), (7, 5), (6, 9)])
def test_factorized_reduction_reads_even_and_odd_pixels(height: int, width: int) -> None:
    layer = FactorizedReduction(4, 6).eval()
    image = torch.randn(2, 4, height, width)

    positive = image.clamp(min=0)
    even = positive[:, :, 0::2, 0::2]
    odd = F.pad(positive, (0, 1, 0, 1))[:, :, 1::2, 1::2]
    filters = [conv.weight.flatten(1) for conv in (layer.even, layer.odd)]
    halves = [torch.einsum("oc,nchw->nohw", f, half) for f, half in zip(filters, (even, odd), strict=True)]
    torch.testing.assert_close(layer(image), layer.bn(torch.cat(halves, dim=1)))


def test_cell_sums_pairs_and_concatenates_what_its_genotype_says() -> None:
    pairs = (((0, "none"), (1, "none")), ((2, "none"), (1, "none")))
    genotype = Genotype(pairs, output=(3, 0), stride=1)
    cell = Cell(genotype, (4, 4), 4, after_reduction=False).eval()
    s1, s2 = torch.randn(2, 4, 5, 5), torch.randn(2, 4, 5, 5)

    output, handed_on = cell((s1, s2))
    fitted = cell.fit1(s1)
    torch.testing.assert_close(output, torch.cat([fitted + s2 + s2, fitted], dim=1))
    assert handed_on is s1
