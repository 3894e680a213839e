"""Test `torchgpipe.tensors.accelerator` with simulated GPUs: which calls of PyTorch it makes.

In the library, only `accelerator` may name CUDA, and `NAMES` lists the exceptions. No module may
create a tensor on the user's default device.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchgpipe.tensors import accelerator
from torchgpipe.tensors.observe import NOTHING

LIBRARY = Path(__file__).resolve().parents[3] / "torchgpipe"
# The names with "cuda" that other files may have. `None` stands for any name.
NAMES: dict[str, set[str] | None] = {
    "tensors/accelerator.py": None,
    "layers/devices.py": {"cuda"},  # `nn.Module.cuda`
    "plan/count/as_on.py": {"cuda"},
    "distributed/channels/nccl.py": {"CUDA_LAUNCH_BLOCKING"},  # an environment variable
}
# The functions of PyTorch that create a tensor on the default device.
FACTORIES = "arange empty eye full linspace ones rand randint randn tensor zeros"

CPU, META = torch.device("cpu"), torch.device("meta")
GPUS = [torch.device("cuda", index) for index in range(3)]


class FakeStream:
    def __init__(self, device: torch.device, name: str) -> None:
        self.device = device
        self.name = name


class FakeAccelerator:
    """Simulates several GPUs, each with a current stream. One of the GPUs is the current device."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.index = 0
        self.current = [FakeStream(gpu, f"default of {gpu}") for gpu in GPUS]
        for name in ("current_stream", "set_stream", "device_index"):
            patch.setattr(torch.accelerator, name, getattr(self, name))

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current[device.index]

    def set_stream(self, stream: FakeStream) -> None:
        self.index = stream.device.index
        self.current[self.index] = stream

    def device_index(self, index: int) -> Any:
        return _Current(self, index)

    def state(self) -> list[Any]:
        return [self.index, *[stream.name for stream in self.current]]


class _Current:
    def __init__(self, fake: FakeAccelerator, index: int) -> None:
        self.fake = fake
        self.index = index

    def __enter__(self) -> None:
        self.before = self.fake.index
        self.fake.index = self.index

    def __exit__(self, *_: object) -> None:
        self.fake.index = self.before


def test_streams_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeAccelerator(monkeypatch)
    before = fake.state()
    copies: list[Any] = [FakeStream(gpu, f"copies of {gpu}") for gpu in GPUS]
    more: Any = FakeStream(GPUS[2], "more copies of cuda:2")
    with accelerator.using(copies[2], None, more, copies[1]):
        within = fake.state()
        assert within == [1, "default of cuda:0", "copies of cuda:1", "more copies of cuda:2"]
        # A stream of this thread is used again, as a `torch.Stream` itself could not be.
        with accelerator.using(copies[1]):
            assert fake.state() == within
        assert fake.state() == within
    assert fake.state() == before
    with pytest.raises(ValueError, match="on purpose"), accelerator.using(copies[1]):
        raise ValueError("on purpose")
    assert fake.state() == before


@pytest.mark.parametrize("device", [CPU, META])
def test_other_devices_have_no_streams(device: torch.device) -> None:
    assert not accelerator.has_streams(device)
    assert accelerator.new_stream(device) is None
    assert accelerator.current_stream(device) is None
    assert accelerator.time_now(device) is None
    assert accelerator.using(None, None) is NOTHING
    assert accelerator.current(device) is NOTHING
    assert accelerator.with_index(device) == device
    assert accelerator.allocated(device) == 0
    accelerator.make_current(device)
    accelerator.synchronize([device])


def test_only_gpus_have_generators_of_their_own() -> None:
    assert accelerator.with_generators([CPU, GPUS[1], META, GPUS[1]]) == [GPUS[1]]


def test_accelerators_of_other_kinds_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, kind, count in (("cuda", "cuda", 2), ("mps", "cpu", 0), (None, "cpu", 0)):
        device = None if found is None else torch.device(found)
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available, d=device: d
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        assert accelerator.default_kind() == kind
        assert accelerator.all_devices() == GPUS[:count]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="asks for what is there without a GPU")
def test_without_a_gpu_pipelines_are_on_the_cpu() -> None:
    assert accelerator.default_kind() == "cpu"


# What the library calls, with the arguments that it gives. Only on a GPU do these calls run.
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (torch.accelerator.current_accelerator, (), {"check_available": True}),
    (torch.accelerator.device_count, (), {}),
    (torch.accelerator.current_device_index, (), {}),
    (torch.accelerator.set_device_index, (GPUS[0],), {}),
    (torch.accelerator.device_index, (0,), {}),
    (torch.accelerator.synchronize, (GPUS[0],), {}),
    (torch.accelerator.current_stream, (GPUS[0],), {}),
    (torch.accelerator.set_stream, (None,), {}),
    (torch.accelerator.memory_allocated, (GPUS[0],), {}),
]


@pytest.mark.parametrize(
    "function, arguments, named", CALLS, ids=lambda f: getattr(f, "__name__", "")
)
def test_what_pytorch_has(function: Any, arguments: Any, named: Any) -> None:
    bound = inspect.signature(function).bind(*arguments, **named)  # raises if it takes others
    assert len(bound.arguments) == len(arguments) + len(named)


METHODS = {
    torch.Stream: ("record_event", "wait_event", "synchronize", "device"),
    torch.Event: ("record", "synchronize", "elapsed_time"),
}


@pytest.mark.parametrize("kind", METHODS)
def test_what_streams_and_events_have(kind: type) -> None:
    for name in METHODS[kind]:
        assert hasattr(kind, name)


def names_of_cuda(path: Path) -> set[str]:
    """Return all names in a source file, and all strings without spaces, that contain "cuda"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        for field in ("id", "attr", "name", "asname", "module", "arg", "value"):
            text = getattr(node, field, None)
            if isinstance(text, str) and "cuda" in text.lower() and " " not in text:
                found.add(text)
    return found


def test_one_place_names_cuda() -> None:
    naming = {}
    for path in LIBRARY.rglob("*.py"):
        if found := names_of_cuda(path):
            naming[path.relative_to(LIBRARY).as_posix()] = found
    assert naming.keys() == NAMES.keys()
    for name, allowed in NAMES.items():
        assert allowed is None or naming[name] == allowed, name


def without_device(path: Path) -> Iterator[str]:
    """Yield the line of each call in a source file that creates a tensor without `device=`.

    A call of `partial` with a function that creates tensors counts, too.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        for called in (node.func, *node.args[:1]):
            of_torch = isinstance(called, ast.Attribute) and ast.unparse(called.value) == "torch"
            factory = of_torch and called.attr in FACTORIES.split()  # type: ignore[attr-defined]
            if factory and not any(each.arg == "device" for each in node.keywords):
                yield f"{path.name}, line {node.lineno}"


def test_no_tensor_of_the_library_is_on_the_default_device() -> None:
    found: list[str] = []
    for path in LIBRARY.rglob("*.py"):
        found += without_device(path)
    assert found == []
