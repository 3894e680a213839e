"""Test `step` with nested structures as targets and outputs, and with criteria that return logs."""

import copy
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import InitVar, dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from torchgpipe import GPipe, MicroBatches
from torchgpipe.step.shares import _number
from torchgpipe.step.targets import parted

X = torch.arange(4)


class Output(OrderedDict[str, Any]):
    """A dictionary whose items are also attributes, as the outputs of many language models are."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclass
class Scaled:
    """A dataclass that cannot be copied by a call of its constructor with the values of its fields.

    The constructor changes one field, does not take another one, and takes an argument that is no
    field.
    """

    boxes: Tensor
    scale: InitVar[float] = 1.0
    name: str = field(default="none", init=False)

    def __post_init__(self, scale: float) -> None:
        self.boxes = self.boxes * scale


@dataclass(frozen=True)
class Frozen:
    boxes: Any


def test_containers_keep_their_class_attributes_and_defaults() -> None:
    output: Any = Output(labels=X)
    parts: list[Any] = parted(output, [3, 1])
    assert [type(part) for part in parts] == [Output, Output]
    assert [part.labels.tolist() for part in parts] == [[0, 1, 2], [3]]
    assert parts[1]["labels"].tolist() == [3] and output.labels is X

    counted: defaultdict[str, Any] = defaultdict(list, labels=X)
    assert parted(counted, [3, 1])[1]["more"] == []

    target = Scaled(X, 2.0)
    target.name = "boxes"
    first, last = parted(target, [3, 1])
    assert first.boxes.tolist() == [0, 2, 4] and last.boxes.tolist() == [6]
    assert last.name == "boxes"
    assert parted(Frozen(X), [3, 1])[1].boxes.tolist() == [3]


def test_a_target_in_which_nothing_changes_stays_the_same_object() -> None:
    for target in (Scaled(X, 2.0), UserDict({"a": 1}), Frozen("text"), (1, "a")):
        (found,) = parted(target, [4])
        assert found is target


BOXES = [torch.zeros(n, 4) for n in (2, 4, 1, 3)]
ENTRIES: dict[str, Any] = {
    "dataclasses": [Frozen(x) for x in BOXES],
    "a tuple of dictionaries": tuple({"boxes": x} for x in BOXES),
    "a tuple of names": ("a", "b", "c", "d"),
    "boxes, and nothing for one image": [BOXES[0], None, *BOXES[2:]],
    "sequences, one of them as long as the batch": BOXES,
    "an array of names": np.array(["a", "b", "c", "d"]),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_what_has_an_entry_for_each_sample_is_split_by_entries(name: str) -> None:
    target = ENTRIES[name]
    first, last = parted(target, [3, 1])
    assert type(first) is type(target)
    for k, entry in enumerate([*first, *last]):
        assert entry is target[k] or entry == target[k]
    assert len(last) == 1


def test_arrays_that_are_not_of_the_batch_size_are_not_split() -> None:
    names = np.array(["cat", "dog"])
    assert all(part is names for part in parted(names, [3, 1]))


def test_arrays_in_micro_batches_are_tensors() -> None:
    first, last = parted(MicroBatches([X.numpy(), {"a": X.numpy()}]), [2, 2])
    assert torch.equal(first, X) and torch.equal(last["a"], X)


def test_arrays_that_pytorch_does_not_take_are_converted() -> None:
    backwards = np.arange(4)[::-1]
    one_row = np.arange(2)[None][::-1]
    big_endian = np.arange(4, dtype=">f4")
    (first, last), (row,) = parted(backwards, [3, 1]), parted(one_row, [1])
    assert first.tolist() == [3, 2, 1] and last.tolist() == [0] and row.tolist() == [[0, 1]]
    first, last = parted({"a": big_endian}, [3, 1])
    assert first["a"].tolist() == [0, 1, 2] and last["a"].tolist() == [3]
    assert first["a"].dtype is torch.float32


SPARSE = torch.eye(4).to_sparse()
NESTED = torch.nested.nested_tensor([X, X[:2], X, X[:1]], layout=torch.jagged)


@pytest.mark.parametrize("target", [SPARSE, NESTED, torch.ones(())], ids=["sparse", "nested", "0"])
def test_a_tensor_that_cannot_be_split_is_refused_with_advice(target: Tensor) -> None:
    with pytest.raises(ValueError, match=r"MicroBatches\(\[...\]\)$|closes over$"):
        parted(target, [3, 1])


def piped() -> GPipe:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return GPipe(layers, [1, 1], devices=["cpu", "cpu"], chunks=2)


def test_a_pipeline_that_has_logs_can_be_copied() -> None:
    model = piped()
    x = torch.randn(4, 2)

    def criterion(y: Tensor, t: Tensor) -> tuple[Tensor, Any]:
        loss = mse_loss(y, t)
        return loss, {"loss": loss, "function": lambda: 0}

    model.step(criterion, x, x)
    assert len(model.logs) == 2
    again = copy.deepcopy(model)
    assert again.logs == []
    again.step(criterion, x, x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.int64])
def test_weights_of_small_types_do_not_overflow(dtype: torch.dtype) -> None:
    model = piped()
    x = torch.randn(4, 2)
    many = torch.tensor(60000 if dtype is torch.float16 else 200, dtype=dtype)
    loss = model.step(mse_loss, x, x + 1, weight=lambda part: many)
    torch.testing.assert_close(loss, model.evaluate(mse_loss, x, x + 1))


def test_a_weight_on_the_cpu_is_a_number() -> None:
    """Check that a weight from the CPU is a number: the host waits for a GPU to copy a tensor."""
    assert _number(torch.tensor(3)) == 3
    assert not isinstance(_number(torch.tensor(3)), Tensor)


def test_a_weight_can_be_any_number() -> None:
    model = piped()
    x = torch.randn(4, 2)
    loss = model.step(mse_loss, x, x + 1, weight=lambda part: Fraction(len(part), 3))
    torch.testing.assert_close(loss, model.evaluate(mse_loss, x, x + 1))


@pytest.mark.parametrize("weight", [lambda t: None, lambda t: t[:, 0], lambda t: "1"])
def test_a_weight_must_be_a_number(weight: Any) -> None:
    x = torch.randn(4, 2)
    with pytest.raises(TypeError, match="weight must return the weight of a micro-batch's loss"):
        piped().evaluate(mse_loss, x, x, weight=weight)


# torch.compile reads all attributes of a tensor, even `.grad`.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_criterion_gives_the_same_gradients() -> None:
    """Check that `step` frees the criterion's graph in backward, as compiled criteria require.

    The backward of a compiled criterion raises an error if the graph has to be kept.
    """
    criterion: Any = torch.compile(nn.CrossEntropyLoss(), backend="aot_eager")
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    plain = copy.deepcopy(layers)
    model = GPipe(layers, [2, 1], devices=["cpu", "cpu"], chunks=2)
    x, target = torch.randn(8, 4), torch.arange(8) % 4
    model.step(criterion, x, target)
    cross_entropy(plain(x), target).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
