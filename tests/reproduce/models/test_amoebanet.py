"""AmoebaNet-D has the published sizes, computes what its genotypes say, and suits a pipeline."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reproduce.models import amoebanetd
from reproduce.models.amoebanet import NORMAL, OPERATIONS, REDUCTION, Cell, FactorizedReduction, Genotype

PUBLISHED = [  # (L, D), parameters, layers
    ((18, 208), 81_505_540, 24),
    ((18, 256), 122_470_120, 24),
    ((18, 416), 319_024_120, 24),
    ((18, 544), 542_734_840, 24),
    ((36, 544), 1_055_832_376, 42),
    ((72, 512), 1_844_858_344, 78),
]

GENOTYPES = {  # written again as text, state:operation, so that no slip in a table goes unseen
    NORMAL: """
        1:conv 1x1 + 1:pool 3x3, 1:none + 0:conv 1x7-7x1, 0:conv 1x1 + 0:conv 1x7-7x1,
        2:pool 3x3 + 2:none, 1:avg pool 3x3 + 5:conv 1x1; 0 3 4 6; stride 1""",
    REDUCTION: """
        0:max pool 2x2 + 0:pool 3x3, 2:none + 1:conv 3x3, 2:conv 1x7-7x1 + 2:pool 3x3,
        3:none + 1:max pool 2x2, 2:avg pool 3x3 + 3:conv 1x1; 4 5 6; stride 2""",
}

BOUNDARIES = [  # of (3, 32): layer, then (channels, height and width) of each tensor it hands on
    ("stem", [(8, 112)]),
    ("stem_reduction1", [(3 * 16, 56), (8, 112)]),
    ("stem_reduction2", [(3 * 32, 28), (3 * 16, 56)]),
    ("group1_normal1", [(4 * 32, 28), (3 * 32, 28)]),
    ("reduction1", [(3 * 64, 14), (4 * 32, 28)]),
    ("group2_normal1", [(4 * 64, 14), (3 * 64, 14)]),
    ("reduction2", [(3 * 128, 7), (4 * 64, 14)]),
    ("group3_normal1", [(4 * 128, 7), (3 * 128, 7)]),
]

OPERATION_CONVS = [  # of 8 channels at stride 2: operation, then its convolutions
    ("none", [(8, 4, (1, 1), (2, 2)), (8, 4, (1, 1), (2, 2))]),
    ("conv 1x1", [(8, 8, (1, 1), (2, 2))]),
    ("conv 3x3", [(8, 2, (1, 1), (1, 1)), (2, 2, (3, 3), (2, 2)), (2, 8, (1, 1), (1, 1))]),
    (
        "conv 1x7-7x1",
        [(8, 2, (1, 1), (1, 1)), (2, 2, (1, 7), (1, 2)), (2, 2, (7, 1), (2, 1)), (2, 8, (1, 1), (1, 1))],
    ),
    ("avg pool 3x3", []),
    ("pool 3x3", []),
    ("max pool 2x2", []),
]

MISUSES = [
    ({"num_layers": 7}, ValueError, "num_layers must be a positive multiple of 3 .*, got 7: use 6"),
    ({"num_layers": 0}, ValueError, "num_layers must be a positive multiple of 3 .*, got 0: use 3"),
    ({"num_layers": 6.0}, TypeError, "num_layers must be a whole number .*, got 6.0"),
    ({"num_filters": 34}, ValueError, "num_filters must be a positive multiple of 8 .*, got 34: use 32"),
    ({"num_filters": 4}, ValueError, "num_filters must be a positive multiple of 8 .*, got 4: use 8"),
    ({"num_filters": -8}, ValueError, "num_filters must be a positive multiple of 8 .*, got -8: use 8"),
    ({"num_filters": "8"}, TypeError, "num_filters must be a whole number .*, got '8'"),
    ({"num_classes": 0}, ValueError, "num_classes must be at least 1, got 0: use 1"),
]


@pytest.fixture
def meta():
    with torch.device("meta"):
        yield


@pytest.fixture
def model():
    torch.manual_seed(0)
    return amoebanetd(3, 8, num_classes=10)


@pytest.fixture
def images():
    return torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


# Published sizes


@pytest.mark.parametrize("size, parameters, layers", PUBLISHED, ids=str)
def test_published_parameters_and_layers(meta, size, parameters, layers):
    model = amoebanetd(*size)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(model) == layers


@pytest.mark.parametrize("num_layers", [3, 6, 18])
def test_there_are_six_layers_besides_the_normal_cells(meta, num_layers):
    assert len(amoebanetd(num_layers, 8)) == num_layers + 6


# What layers hand on


def test_every_boundary(meta):
    images = torch.empty(2, 3, 224, 224)
    passed = images
    found = []
    for name, layer in amoebanetd(3, 32).named_children():
        passed = layer(passed)
        found.append((name, passed))

    *cells, (last, scores) = found
    shapes = [(name, [t.shape for t in as_tuple(value)]) for name, value in cells]
    assert shapes == [(name, [(2, c, size, size) for c, size in tensors]) for name, tensors in BOUNDARIES]
    assert all(type(value) is (torch.Tensor if name == "stem" else tuple) for name, value in cells)
    assert (last, scores.shape) == ("classifier", (2, 1000))


@pytest.mark.parametrize("num_classes", [1, 10])
def test_output_shape(meta, num_classes):
    model = amoebanetd(3, 8, num_classes=num_classes)
    assert model(torch.empty(5, 3, 224, 224)).shape == (5, num_classes)


# Genotypes and their operations


@pytest.mark.parametrize("genotype, text", GENOTYPES.items(), ids=["normal", "reduction"])
def test_genotype(genotype, text):
    pairs = ", ".join(" + ".join(f"{state}:{name}" for state, name in pair) for pair in genotype.pairs)
    output = " ".join(str(state) for state in genotype.output)
    assert f"{pairs}; {output}; stride {genotype.stride}" == " ".join(text.split())


@pytest.mark.parametrize("genotype", GENOTYPES, ids=["normal", "reduction"])
def test_genotype_reads_only_earlier_states_and_leaves_no_sum_unused(genotype):
    read = set()
    for index, pair in enumerate(genotype.pairs):
        for state, operation in pair:
            assert state < index + 2
            assert operation in OPERATIONS
            read.add(state)
    assert read | set(genotype.output) == set(range(len(genotype.pairs) + 2))


@pytest.mark.parametrize("operation, expected", OPERATION_CONVS, ids=[name for name, _ in OPERATION_CONVS])
def test_convolutions_of_an_operation(meta, operation, expected):
    convs = [m for m in OPERATIONS[operation](8, 2).modules() if isinstance(m, nn.Conv2d)]
    assert [(m.in_channels, m.out_channels, m.kernel_size, m.stride) for m in convs] == expected


def test_operations_are_all_in_the_table():
    assert {name for name, _ in OPERATION_CONVS} == set(OPERATIONS)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_keeps_channels_and_divides_size_by_stride(meta, operation, stride):
    output = OPERATIONS[operation](8, stride)(torch.empty(2, 8, 14, 14))
    size = 13 if (operation, stride) == ("max pool 2x2", 1) else 14 // stride  # the only one without padding
    assert output.shape == (2, 8, size, size)


@pytest.mark.parametrize("operation", ["avg pool 3x3", "pool 3x3"])
def test_average_pools_do_not_count_padding(operation):
    ones = torch.ones(1, 1, 6, 6)
    assert OPERATIONS[operation](1, 1)(ones).equal(ones)


def test_every_convolution_follows_a_relu_leads_to_a_batch_norm_and_has_no_bias(meta):
    modules = list(amoebanetd(6, 16).modules())
    letters = {nn.ReLU: "r", nn.Conv2d: "c", nn.BatchNorm2d: "b"}
    order = "".join(letters.get(type(m), "") for m in modules)
    assert re.fullmatch("(rcb|rccb)+", order)
    assert all(m.bias is None for m in modules if isinstance(m, nn.Conv2d))


@pytest.mark.parametrize("height, width", [(8, 8), (7, 5), (6, 9)])
def test_factorized_reduction_reads_even_and_odd_pixels(height, width):
    layer = FactorizedReduction(4, 6).eval()
    image = torch.randn(2, 4, height, width)

    positive = image.clamp(min=0)
    even = positive[:, :, 0::2, 0::2]
    odd = F.pad(positive, (0, 1, 0, 1))[:, :, 1::2, 1::2]
    filters = [conv.weight.flatten(1) for conv in (layer.even, layer.odd)]
    halves = [torch.einsum("oc,nchw->nohw", f, half) for f, half in zip(filters, (even, odd), strict=True)]
    torch.testing.assert_close(layer(image), layer.bn(torch.cat(halves, dim=1)))


# Cells


def test_cell_sums_pairs_and_concatenates_what_its_genotype_says():
    pairs = (((0, "none"), (1, "none")), ((2, "none"), (1, "none")))
    genotype = Genotype(pairs, output=(3, 0), stride=1)
    cell = Cell(genotype, (4, 4), 4, after_reduction=False).eval()
    s1, s2 = torch.randn(2, 4, 5, 5), torch.randn(2, 4, 5, 5)

    output, _ = cell((s1, s2))
    fitted = cell.fit1(s1)
    torch.testing.assert_close(output, torch.cat([fitted + s2 + s2, fitted], dim=1))


def test_only_operations_that_read_the_inputs_are_strided():
    cell = Cell(REDUCTION, (8, 8), 8, after_reduction=False)
    for pair, pair_sum in zip(REDUCTION.pairs, cell.sums, strict=True):
        for (state, _), operation in zip(pair, (pair_sum.left, pair_sum.right), strict=True):
            image = torch.randn(2, 8, 12, 12)
            assert operation(image).shape[2] == (6 if state in (0, 1) else 12)


OLDER_STATES = [  # channels of s2, whether a reduction came before: what fits it to 8 channels
    (8, False, nn.Identity),
    (6, False, nn.Sequential),
    (8, True, FactorizedReduction),
    (6, True, FactorizedReduction),
]


@pytest.mark.parametrize("inputs, after_reduction, fit", OLDER_STATES)
def test_older_state_is_fitted_only_as_far_as_needed(inputs, after_reduction, fit):
    cell = Cell(NORMAL, (8, inputs), 8, after_reduction=after_reduction)
    assert type(cell.fit2) is fit


@pytest.mark.parametrize("genotype", GENOTYPES, ids=["normal", "reduction"])
def test_cell_hands_on_its_own_first_input(genotype):
    cell = Cell(genotype, (8, 6), 8, after_reduction=False)
    s1, s2 = torch.randn(2, 8, 4, 4), torch.randn(2, 6, 4, 4)
    output, handed_on = cell((s1, s2))
    assert handed_on is s1
    assert output.shape == (2, cell.out_channels, 4 // genotype.stride, 4 // genotype.stride)


def test_lone_tensor_stands_for_both_states():
    cell = Cell(REDUCTION, (8, 8), 16, after_reduction=False).eval()
    image = torch.randn(2, 8, 4, 4)
    lone, pair = cell(image), cell((image, image))
    assert lone[0].equal(pair[0])
    assert lone[1] is image


# As a part of a pipeline


def test_eval_mode_is_deterministic(model, images):
    model.eval()
    first, second = model(images), model(images)
    assert first.equal(second)
    assert first.isfinite().all()
    assert not first[0].equal(first[1])


def test_no_layer_overwrites_its_input(model, images):
    passed = images
    for layer in model:
        before = [t.clone() for t in as_tuple(passed)]
        output = layer(passed)
        assert all(now.equal(then) for now, then in zip(as_tuple(passed), before, strict=True))
        passed = output
    assert not any(getattr(m, "inplace", False) for m in model.modules())


def test_every_parameter_gets_a_gradient(model, images):
    F.cross_entropy(model(images), torch.tensor([3, 7])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("change, error, message", MISUSES)
def test_misuse(change, error, message):
    with pytest.raises(error, match=f"^{message}") as caught:
        amoebanetd(**{"num_layers": 3, "num_filters": 8, **change})
    assert "\n" not in str(caught.value)
