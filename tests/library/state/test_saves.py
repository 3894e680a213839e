"""Test that a training in one process can be saved and go on from its state with equal results.

The tests also check that misuse raises errors.
"""

import json
import math
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn import BatchNorm1d, Dropout, Linear, Parameter, Sequential
from torch.testing._internal.two_tensor import TwoTensor

from torchgpipe import GPipe
from torchgpipe.state.meeting import Meeting
from torchgpipe.state.saved_files import readable
from torchgpipe.state.saves import Saves

from ...behaviours.compare import differences
from ...behaviours.parts.layers import Do
from ..distributed.training import adam, assert_goes_on

F32 = torch.float32
Optimizers = Callable[[GPipe], torch.optim.Optimizer]
CHANGED = "is not as it was written, by its checksum"
STEP, KEEP = "step must be a whole number", "keep must be a whole number of at least 1"


def noise(module: Any, x: Tensor) -> Tensor:
    return x + torch.rand(x.shape, generator=module.generator).to(x.dtype)


def piped(
    seed: int,
    *,
    width: int = 4,
    balance: tuple[int, ...] = (6,),
    dtype: torch.dtype = torch.float32,
) -> GPipe:
    torch.manual_seed(seed)
    noisy = Do(noise, generator=torch.Generator().manual_seed(7))
    norm = BatchNorm1d(width)
    last = Linear(4, 4)
    layers = Sequential(Linear(5, width), norm, noisy, Dropout(0.3), Linear(width, 4), last)
    last.requires_grad_(seed < 0)
    devices = ["cpu"] * len(balance)
    options: dict[str, Any] = {"chunks": 2, "deferred_batch_norm": True}
    return GPipe(layers.to(dtype), [*balance], devices=devices, **options)


def in_groups(model: GPipe) -> torch.optim.Optimizer:
    first, *others = model.named_parameters()
    groups: Any = [
        {"params": [first], "lr": torch.tensor(0.1)},
        {"params": others, "momentum": 0.8},
    ]
    return torch.optim.SGD(groups, lr=0.01)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (adam, F32),
        (in_groups, F32),
        (lambda model: torch.optim.NAdam(model.parameters()), torch.bfloat16),
    ],
    ids=["adam", "groups", "nadam, whose state is of float32"],
)
def test_going_on(make: Optimizers, dtype: torch.dtype, tmp_path: Path) -> None:
    def make_both(seed: int) -> tuple[GPipe, torch.optim.Optimizer]:
        model = piped(seed, dtype=dtype, balance=(2, 4))
        return model, make(model)

    assert_goes_on(tmp_path, make_both)


NOT_ITS_OWN = {
    "part-00000",
    "part-of-the-report",
    "20240101-step-by-step-notes",
    "20240101-step-3",
    "000003-step-2.best",
    "000005-step-4",
    "0000009-step-3",
}


def test_the_newest_stay(tmp_path: Path) -> None:
    """Check that only the newest states are kept, and that PyTorch's functions can load them.

    The newest states are those that were saved last, whatever their step numbers are.
    """
    model = piped(1)
    optimizer = adam(model)
    saves = Saves(tmp_path, keep=2)
    others = [tmp_path / name / "notes" for name in NOT_ITS_OWN]
    for notes in others:
        notes.parent.mkdir()
        notes.touch()
    first = tmp_path / "000001-step-5"
    second = tmp_path / "000002-step-3"
    elsewhere = tmp_path / "000005-step-4" / "elsewhere"
    assert saves.load(model, optimizer) is None

    saves.save(5, model, optimizer)
    shutil.copytree(first, tmp_path / "000003-step-2.best", dirs_exist_ok=True)
    (first / "more").mkdir()
    saves.save(3, model, optimizer)
    second.rename(elsewhere)
    second.symlink_to(elsewhere)
    for step in (9, 9, 4):
        saves.save(step, model, optimizer)

    for notes in others:
        assert notes.exists()
    assert (elsewhere / "__0_0.distcp").exists()
    names = {path.name for path in tmp_path.iterdir()}
    assert names - NOT_ITS_OWN == {"000004-step-9", "000006-step-4", "lock"}
    assert saves.load(model, None) == {"step": 4}
    state = {"model": piped(2).state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # as there is no process group
        load(state, checkpoint_id=tmp_path / "000006-step-4")
    assert differences(state["model"], model.state_dict()) == []


def test_a_loss_that_is_not_a_number_is_saved(tmp_path: Path) -> None:
    model = piped(0)
    losses = torch.tensor([1.0, torch.nan])
    Saves(tmp_path).save(0, model, None, losses=losses, last=torch.nan)
    found = Saves(tmp_path).load(model, None)
    assert found is not None
    torch.testing.assert_close(found["losses"], losses, rtol=0, atol=0, equal_nan=True)
    assert math.isnan(found["last"])


def slow(model: GPipe) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "slow": 1})
    return optimizer


def counting(model: GPipe) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state["steps"] = 3  # type: ignore[index]
    return optimizer


def of_trained(model: GPipe) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad])


def one_layer() -> GPipe:
    return GPipe(Sequential(Linear(5, 4)), [1], devices=["cpu"])


def adam_with_another_parameter(model: GPipe) -> torch.optim.Optimizer:
    another = Parameter(torch.zeros(2))
    return torch.optim.Adam([*model.parameters(), another])


ANOTHER_SHAPE = r"model.0.weight \(float32 \[4, 5\], here float32 \[5, 5\]\)"
ANOTHER_DTYPE = r"model.0.weight \(float32 .*, here float64 .*\) .* more"
# Each row has four parts: a function that makes the optimizer to save, a function that makes the
# model to load into, a function that makes the optimizer to load into, and a pattern of the error
# that the load must raise.
REFUSED: list[tuple[Optimizers, Callable[[], GPipe], Optimizers, str]] = [
    (adam, lambda: piped(1, width=5), adam, ANOTHER_SHAPE),
    (adam, lambda: piped(1, dtype=torch.float64), adam, ANOTHER_DTYPE),
    (adam, one_layer, adam, "it has besides model.1.weight"),
    (
        adam,
        lambda: piped(1),
        of_trained,
        "it has besides optimizer of 5.weight, optimizer of 5.bias",
    ),
    (of_trained, lambda: piped(-1), adam, "it lacks optimizer of 5.weight, optimizer of 5.bias"),
    (adam, lambda: piped(1), in_groups, "was saved with the optimizer Adam, not with SGD"),
    (
        adam,
        lambda: piped(1),
        adam_with_another_parameter,
        "the optimizer has a parameter that the model does not have",
    ),
    (
        in_groups,
        lambda: piped(1),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        r"'0.weight' and '0.bias' in one group, .* differ: lr is 0.1.* and 0.01",
    ),
]


@pytest.mark.parametrize(("saved_with", "make", "optimizers", "message"), REFUSED)
def test_refused(
    saved_with: Optimizers, make: Callable[[], GPipe], optimizers: Any, message: str, tmp_path: Path
) -> None:
    """Check that a state that does not fit is refused by an error of one line.

    The error must be raised before the model, the optimizer or random generators are changed.
    """
    saved = piped(0)
    Saves(tmp_path).save(0, saved, saved_with(saved))
    model = make()
    optimizer = optimizers(model)
    state_before = [x.clone() for x in model.state_dict().values()]
    random_before = torch.get_rng_state()

    with pytest.raises(ValueError, match=message) as caught:
        Saves(tmp_path).load(model, optimizer)

    assert "\n" not in str(caught.value)
    assert differences([*model.state_dict().values()], state_before) == []
    assert torch.equal(torch.get_rng_state(), random_before)


@pytest.mark.parametrize(
    ("part", "damage", "why"),
    [
        (".metadata", lambda content, _: content[:20], rf"ValueError: \.metadata {CHANGED}"),
        (
            "__0_0.distcp",
            lambda content, weights: content.replace(weights, weights[::-1]),
            f"__0_0.distcp {CHANGED}",
        ),
        ("saved-by-torchgpipe.json", lambda *_: b"", "JSONDecodeError"),
    ],
)
def test_a_damaged_state_is_named(part: str, damage: Any, why: str, tmp_path: Path) -> None:
    model = piped(0)
    Saves(tmp_path).save(0, model, None)
    path = tmp_path / "000001-step-0" / part
    weights = model[0].weight.detach().numpy().tobytes()
    path.write_bytes(damage(path.read_bytes(), weights))
    told = rf"state in .*000001-step-0 cannot be read \(.*{why}.*\); if it is damaged"
    with pytest.raises(RuntimeError, match=told):
        Saves(tmp_path).load(model, None)


def test_what_is_said_without_a_message_or_a_folder(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"the state in it cannot be read \(EOFError\); if"),
        readable(Path("it")),
    ):
        raise EOFError
    (tmp_path / "000001-step-1").symlink_to(tmp_path / "a disk that is not there")
    gone = r"000001-step-1 cannot be read \(FileNotFoundError"
    with pytest.raises(RuntimeError, match=gone):
        Saves(tmp_path).load(piped(0), None)
    # Another process may pretend to be rank 0, and name another folder. This rank must not unpickle
    # files from that folder.
    for elsewhere in ("..", "/tmp"):
        told = torch.tensor([*json.dumps(elsewhere).encode()], dtype=torch.uint8)
        meeting = Meeting(1, partial(lambda told, own: [told, own], told))
        with pytest.raises(RuntimeError, match="rank 1 does not see"):
            meeting.first(tmp_path, lambda: None)


def save_a_new_model(folder: Path, step: Any, make: Any) -> None:
    model = piped(0)
    Saves(folder).save(step, model, make(model))


def saving(step: Any, make: Any = lambda model: None) -> Callable[[Path], object]:
    return lambda folder: save_a_new_model(folder, step, make)


def keeping(keep: Any) -> Callable[[Path], object]:
    return lambda folder: Saves(folder, keep)


def load_from_a_file(folder: Path) -> None:
    Saves(folder / "file").load(piped(0), None)


NOT_SAVED = r"step 0 cannot be saved .*; nothing was saved"


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (saving(None), TypeError, STEP),
        (saving(True), TypeError, STEP),
        (saving(1.5), TypeError, STEP),
        (keeping(0), ValueError, KEEP),
        (keeping(True), ValueError, KEEP),
        (keeping(1.0), ValueError, KEEP),
        (saving(0, slow), ValueError, "the optimizer's state has 'slow', which belongs"),
        (saving(0, counting), ValueError, "the optimizer's state has 'steps', which belongs"),
        (lambda folder: saving(0)(folder / "file"), OSError, NOT_SAVED),
        # This error is raised when a state is loaded, before the training.
        (load_from_a_file, OSError, r"states cannot be saved in .*file"),
    ],
)
def test_misuse(
    act: Callable[[Path], object], error: type[Exception], message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(error, match=message):
        act(tmp_path)
    assert [*tmp_path.glob("*-step-*")] == []


def test_a_weight_whose_class_wraps_other_tensors(tmp_path: Path) -> None:
    """Check that a weight of two tensors, such as an 8-bit weight, can be saved and loaded."""

    def make() -> GPipe:
        layer = Linear(2, 2)
        parts = torch.randn(2, 2), torch.randn(2, 2)
        layer.weight = Parameter(TwoTensor(*parts), requires_grad=False)
        return GPipe(Sequential(layer), [1], devices=["cpu"])

    saved, loaded = make(), make()
    saves = Saves(tmp_path)
    saves.save(0, saved, None)
    with torch.serialization.safe_globals([TwoTensor]):
        saves.load(loaded, None)
    weight: Any = loaded[0].weight
    expected: Any = saved[0].weight
    assert isinstance(weight.detach(), TwoTensor)
    assert torch.equal(weight.a, expected.a)
    assert torch.equal(weight.b, expected.b)


def test_values_with_tensors_are_read_onto_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a value such as a loss is read onto the CPU, whichever GPU it was saved on."""
    places: list[Any] = []
    load_file = torch.load

    def noting(*args: Any, **options: Any) -> Any:
        if not options.get("weights_only"):  # PyTorch itself reads tensors, with weights_only
            places.append(options.get("map_location"))
        return load_file(*args, **options)

    model = piped(0)
    saves = Saves(tmp_path)
    saves.save(1, model, None, best=torch.tensor(0.5))
    monkeypatch.setattr(torch, "load", noting)
    found = saves.load(piped(0), None)
    assert found is not None and found["best"] == 0.5
    assert set(places) == {"cpu"}


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """An optimizer with the name of PyTorch's optimizer whose state is spread over replicas."""


def test_an_optimizer_whose_state_is_spread_is_refused(tmp_path: Path) -> None:
    model = piped(0)
    optimizer = ZeroRedundancyOptimizer(model.parameters())
    with pytest.raises(ValueError, match="is spread over replicas, so one replica cannot save"):
        Saves(tmp_path).save(1, model, optimizer)
