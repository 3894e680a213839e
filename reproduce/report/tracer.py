"""Write the timelines that `--trace FILE` asks for: as JSON for Perfetto, and as a picture."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from reproduce.error import Error
from reproduce.records.record import write_atomically
from reproduce.report.chrome_trace import chrome_trace
from reproduce.run.timeline import StepTimeline

__all__ = ["Tracer", "matplotlib_problem"]

PICTURES = (".svg", ".png")


class Tracer:
    """Write each row's timeline beside `file`: `FILE.json` and `FILE.svg`, or `.png` where that is asked for.

    Several rows cannot share a file, so their names come after it, `FILE-pipeline-2.json`, and where there are
    several experiments theirs before that. What cannot be drawn or written is remembered in `problems`: a measurement
    shall not end for want of a picture.
    """

    def __init__(self, file: Path, *, several: bool, experiments: bool = False, draw: bool = True) -> None:
        self.file = file
        self.several = several
        self.experiments = experiments
        self.draw = draw
        self.written: list[Path] = []
        self.problems: list[str] = []

    def __call__(self, experiment: str, row: str, timeline: StepTimeline) -> None:
        """Write a row's timeline."""
        title = f"{experiment}: {row}"
        base = self.file.with_suffix("") if self.file.suffix in (".json", *PICTURES) else self.file
        if self.several:
            name = f"{experiment} {row}" if self.experiments else row
            base = base.with_name(f"{base.name}-{re.sub('[^A-Za-z0-9]+', '-', name)}")
        self._write(base.with_name(f"{base.name}.json"), chrome_trace(timeline, title))
        if not self.draw:
            return
        kind = self.file.suffix if self.file.suffix in PICTURES else PICTURES[0]
        path = base.with_name(base.name + kind)
        try:
            from reproduce.report.gantt import gantt

            picture = gantt(timeline, title, kind[1:])
        except Exception as error:
            self.problems.append(f"{path}: cannot be drawn ({type(error).__name__}: {error})")
        else:
            self._write(path, picture)

    def _write(self, path: Path, content: str | bytes) -> None:
        try:
            write_atomically(path, content)
        except Error as error:
            self.problems.append(str(error))
        else:
            self.written.append(path)


def matplotlib_problem() -> str | None:
    """Say why no picture can be drawn, and what to do; None where one can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "--trace: no picture, only JSON, for matplotlib is not installed: 'pip install matplotlib'"
    return None
