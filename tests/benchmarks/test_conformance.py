"""`benchmarks.conformance`: whether it finds planted faults, how it says so, and a few of its rows."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.conformance import CHECKS, ENGINES, main, table
from benchmarks.others.ours import Ranks, Threads
from benchmarks.others.processes import Adapter, compared, run
from reproduce.records.record import load

from ..behaviours.pipe import NotOffered, Pipe, rank
from ..parts import explode

# What a step does on threads or on ranks that goes wrong, how its check ends, and what is said.
FAULTY: dict[str, tuple[type[Pipe], Callable[[], object], str, str]] = {
    "Refuses": (
        Threads,
        lambda: explode(ValueError("batches of eight")),
        "refused",
        "ValueError: batches of eight",
    ),
    "Fails": (
        Threads,
        lambda: torch.zeros(2) + torch.zeros(3),
        "fails",
        "RuntimeError: The size of tensor a",
    ),
    "HasNone": (
        Threads,
        lambda: explode(NotOffered("it takes no step")),
        "not offered",
        "it takes no step",
    ),
    "BatchIO": (Ranks, lambda: rank() and os.kill(os.getpid(), signal.SIGKILL), "ends", "SIGKILL"),  # type: ignore[func-returns-value]
    "Hangs": (Ranks, lambda: time.sleep(1000 * rank()), "hangs", "not finished after 4 seconds"),
}
for name, (base, does, *_) in FAULTY.items():  # other processes import them by name
    step = {"step": lambda self, *_, does=does: (does(), self)[1], "package": "tests"}
    globals()[name] = type(name, (base,), step)

FAULTS: list[tuple[Adapter, str, str, str]] = [
    (ENGINES["threads"], "equal micro-batches", "equal", ""),
    (ENGINES["ranks"], "batch norm, by mini-batch", "equal", ""),
    (ENGINES["ranks"], "in the criterion", "equal", ""),
    *(
        (Adapter(__name__, name, base.ranks), "equal micro-batches", kind, said)
        for name, (base, _, kind, said) in FAULTY.items()
    ),
]


@pytest.mark.parametrize(
    "adapter, check, kind, said", FAULTS, ids=lambda x: x.name if isinstance(x, Adapter) else ""
)
def test_how_a_check_ends(adapter: Adapter, check: str, kind: str, said: str) -> None:
    outcome = run(CHECKS[check], adapter, limit=4.0 if adapter.name == "Hangs" else 60.0)
    assert outcome.kind == kind and outcome.said.startswith(said), outcome


ONE = torch.ones(2)
FOUND: list[tuple[list[dict[str, Tensor | bool | None]], str]] = [
    ([{"x": ONE, "y": ONE}, {"y": ONE, "so": True}], ""),
    (
        [{"x": ONE, "y": ONE}, {"y": ONE * 2, "so": True}],
        "y differs by 1, where the largest value is 1",
    ),
    ([{"x": ONE}, {"y": ONE}], "so: on no rank"),
    ([{"x": ONE, "so": True}, {"y": ONE, "so": False}], "not so: so"),
    ([{"x": ONE, "so": True}, {"y": ONE, "z": ONE}], "z: there, but not in the model"),
]


@pytest.mark.parametrize("ranks, said", FOUND)
def test_all_ranks_together_are_compared(
    ranks: list[dict[str, Tensor | bool | None]], said: str
) -> None:
    assert compared([*ranks], {"x": ONE, "y": ONE, "so": True}).said == said


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    main(
        [
            "--engine",
            "threads",
            "--json",
            str(path),
            "one micro-batch",
            "dropout equal over balances",
        ]
    )
    page = "\n".join(
        "|".join(cell.strip() for cell in line.split("|"))
        for line in table(load(path), "pipe").split("\n")
    )
    assert "|threads|this library|1||||1|||" in page
    assert "|one micro-batch|right|Whoever tries a pipeline" in page
    assert (
        "|dropout equal over balances|differs (threads): not so: both are equal|A seed gives"
        in page
    )
    with pytest.raises(SystemExit):
        main(["one batch"])
    assert (
        "there is no check 'one batch'; the checks are equal micro-batches, one"
        in capsys.readouterr().err
    )
