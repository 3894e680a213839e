"""Run a memory experiment: count the published models' parameters, then measure every row's peak, one at a time."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from reproduce.experiments import Row
from reproduce.records.decode import Json
from reproduce.run.failure import explain
from reproduce.run.peak import measure_peak
from reproduce.run.session import Session
from reproduce.run.training import FakeData

FLOAT_BYTES = 4


def plan_memory(session: Session) -> None:
    """Tell the progress display how many steps are to come."""
    for row in session.scale.rows:
        session.progress.plan(session.job(row), session.scale.steps, row.work())


def run_memory(session: Session) -> None:
    """Record sizes and peaks, whatever becomes of each row."""
    on_meta = session.devices.kind == "meta"  # there the rows themselves are of the published size
    for row in () if on_meta else session.experiment.scale("paper").rows:
        session.start(f"counting the parameters of {row.name}")
        counted = replace(session.result(row), scale="paper", device="meta", values=_model_values(row))
        session.recorder.put(counted)

    for row in session.expected():
        try:
            used, values = measure_memory(session, row, session.scale.steps)
        except Exception as error:
            session.put_failure(row, explain(error))
        else:
            session.put(used, values=values)
        finally:
            session.progress.stop()


def measure_memory(session: Session, row: Row, steps: int) -> tuple[Row, dict[str, Json]]:
    """Return the row as it was run, balance included, and its model's size and peak memory."""
    session.free()
    training = session.build(row, FakeData([row], session.seed))

    def before(step: int) -> None:
        session.start(f"memory of {row.name}, step {step + 1} of {steps}", session.job(row))

    peak = measure_peak(training, session.devices, steps=steps, before=before)
    return training.row, {**_model_values(row), **peak}


def count_parameters(row: Row) -> int:
    """Count the parameters of the row's model, on the meta device: exactly, and without memory for them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in row.build().parameters())


def _model_values(row: Row) -> dict[str, Json]:
    """Count the model's parameters, and the bytes of parameters, gradients and optimizer state."""
    parameters = count_parameters(row)
    return {"parameters": parameters, "model_bytes": parameters * FLOAT_BYTES * (2 + row.optimizer.state)}
