"""Test on which devices a pipeline's parts are, and how its input is copied to the first device.

A pipeline cannot be moved to devices other than its own. `model.to` its own devices does nothing.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe, MicroBatches
from torchgpipe.tensors import accelerator


def pipeline() -> GPipe:
    layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return GPipe(layers, [1, 1], devices=["cpu", "cpu"])


STAYS: dict[str, Callable[[GPipe], GPipe]] = {
    "to the device": lambda model: model.to("cpu"),
    "to a tensor's device": lambda model: model.to(torch.rand(1)),
    "cpu": lambda model: model.cpu(),
    "to the type": lambda model: model.to(torch.float32),
}


@pytest.mark.parametrize("way", STAYS)
def test_where_it_is_already(way: str) -> None:
    model = pipeline()
    assert STAYS[way](model) is model


def test_the_type_may_change_along_with_the_device() -> None:
    assert {x.dtype for x in pipeline().to("cpu", torch.float64).parameters()} == {torch.float64}


MOVES: dict[str, Callable[[GPipe], GPipe]] = {
    "to": lambda model: model.to("cuda:7"),
    "to meta": lambda model: model.to(device="meta"),
    "to a tensor's device": lambda model: model.to(torch.rand(1, device="meta")),
    "cuda": lambda model: model.cuda(),
    "cuda by number": lambda model: model.cuda(1),
}


@pytest.mark.parametrize("way", MOVES)
def test_elsewhere(way: str) -> None:
    with pytest.raises(TypeError, match="cannot be moved; name the devices when wrapping"):
        MOVES[way](pipeline())


def test_its_text_fits_on_a_screen() -> None:
    model = pipeline()
    assert repr(model).splitlines() == [
        "GPipe(balance=[1, 1], chunks=1, checkpoint='except_last', schedule='GPipe'):",
        "  stage 0 on cpu: 1 layer, 6 parameters",
        "  stage 1 on cpu: 1 layer, 4 parameters",
    ]
    assert repr(model.schedule).splitlines() == [
        "GPipe, stages on [0, 1]",
        "stage 0 on device 0: backward is not split by GPipe",
        "stage 1 on device 1: backward is not split by GPipe",
        "0 | 0 . . . B0",
        "1 | . 0 B0",
    ]
    model.chunks = 100
    assert len(repr(model.schedule).splitlines()) == 3  # the picture would be too wide


def mse(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


USES: dict[str, Callable[[GPipe, Any], object]] = {
    "forward": lambda model, x: model(x),
    "loss": lambda model, x: model.loss(mse, x, torch.zeros(4, 2)),
    "step": lambda model, x: model.step(mse, x, torch.zeros(4, 2)),
    "evaluate": lambda model, x: model.evaluate(mse, x, torch.zeros(4, 2)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("where", ["pinned", "second tensor pinned", "micro-batch pinned", "not"])
def test_a_call_waits_at_its_end_until_pinned_memory_is_copied(
    use: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a call does not return before its input is copied from pinned memory.

    The caller may write to this memory again as soon as the call has returned.
    """
    happened: list[str] = []
    pinned = torch.rand(4, 2)
    inputs: dict[str, Any] = {
        "pinned": pinned,
        "second tensor pinned": (torch.rand(4, 2), pinned),
        "micro-batch pinned": MicroBatches([torch.rand(2, 2), pinned[:2]]),
        "not": torch.rand(4, 2),
    }
    memory = pinned.untyped_storage().data_ptr()

    class Noted(nn.Linear):
        def forward(self, x: Any) -> Tensor:
            happened.append("layer")
            return super().forward(x if isinstance(x, Tensor) else x[0] + x[1])

    def to(x: Tensor, *given: Any, **named: Any) -> Tensor:
        if "device" in named:
            assert named["non_blocking"]
            happened.append("copy")
        return x

    def record_event() -> Mock:
        happened.append("event")
        return Mock(synchronize=lambda: happened.append("wait"))

    # As if the CPU were a GPU: its stream is only asked for an event.
    stream = Mock(record_event=record_event)
    layers = nn.Sequential(Noted(2, 2))
    model = GPipe(layers, [1], devices=["cpu"], chunks=2, checkpoint="never")
    model._stages[0].runs_later = True
    monkeypatch.setattr(accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "is_pinned", lambda x: x.untyped_storage().data_ptr() == memory)
    with torch.no_grad() if use == "forward" else torch.enable_grad():
        USES[use](model, inputs[where])
    copies = 1 if isinstance(inputs[where], Tensor) else 2
    if where == "not":
        assert happened == ["copy"] * copies + ["layer"] * 2
    else:
        assert happened == ["copy"] * copies + ["event"] + ["layer"] * 2 + ["wait"]
