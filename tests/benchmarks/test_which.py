"""Test that the predictions in docs/which.md are what the code predicts today."""

import shlex

import pytest

from benchmarks import models, which
from benchmarks.which import CASES, Case, fastest, predicted, result, speed, without_pipeline
from reproduce.cli.plan import plan
from reproduce.records.record import load
from torchgpipe.plan.predict.memory import DeviceBytes
from torchgpipe.plan.search.alternatives import Alternative

QUICK = Case("gpt2_long", 4, "rtx4090x4")  # its batch has the fewest choices


def test_a_prediction_is_not_stale() -> None:
    assert QUICK in CASES
    kept = [each for each in load(which.PATH).results if each.experiment == QUICK.name]
    made = predicted(QUICK)
    assert len(made) == len(which.WAYS)
    for new, old in zip(made, kept, strict=True):
        assert (new.row, new.status, new.config) == (old.row, old.status, old.config)
        # Other releases of PyTorch can run other operators.
        for name in ("throughput", "step_time"):
            assert new.values[name] == pytest.approx(old.values[name], rel=0.02), (new.row, name)


def test_the_record_has_all_cases() -> None:
    names = [each.experiment for each in load(which.PATH).results]
    assert list(dict.fromkeys(names)) == [case.name for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_command_beside_a_case_asks_for_it(case: Case) -> None:
    program, *arguments = shlex.split(case.command.replace("\\\n", ""))
    assert [program, *arguments[:3]] == ["python", "-m", "reproduce", "plan"]
    asked = plan.make_context("plan", arguments[3:]).params
    assert asked["model"] == f"{models.__name__}:{case.model}"
    assert asked["batch_size"] == case.batch_size
    assert asked["hardware"].name == case.hardware
    assert asked["optimizer"] == which.OPTIMIZER
    assert asked["orders"] == which.SCHEDULE
    assert asked["master_weights"]
    assert asked["devices"] is None  # those of the hardware


def alternative(peak: float, *, recomputed: bool = False) -> Alternative:
    memory = DeviceBytes(peak, 0.0, 0.0)
    return Alternative("FSDP", 4, 1, 1, recomputed, 2.0, memory)


def test_without_room_there_is_no_speed() -> None:
    fits = without_pipeline(QUICK, alternative(10.0, recomputed=True), room=10.0)
    assert fits.values["throughput"] == QUICK.batch_size / 2
    assert speed(fits) == "2.00*"
    assert speed(without_pipeline(QUICK, alternative(10.0), room=10.0)) == "2.00"
    assert speed(without_pipeline(QUICK, alternative(10.5), room=10.0)) == "no room"


def test_the_fastest_are_named_and_what_is_close_to_them() -> None:
    seconds = {"data parallel": 1.04, "FSDP": 1.0, "pipeline": 1.06, "both": None}
    ways = {way: result(QUICK, way, {}, each, 0.0) for way, each in seconds.items()}
    assert fastest(ways) == ["FSDP", "data parallel"]
