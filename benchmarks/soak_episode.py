"""An episode of the soak: its processes, waits for what is to happen, and numbers are compared, from outside."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT, die_with_parent
from benchmarks.soak_checks import ended_otherwise, lost_steps, sprung, wrong_numbers
from benchmarks.soak_plan import RANKS, Episode
from benchmarks.soak_processes import Crew, Order, Process
from benchmarks.soak_reports import Clock, Lines

GRACE = 2.0
"""Seconds that other ranks have to end after the silence."""

LEAVE = 10.0
"""Seconds that the rank has on which the fault sprang, from when nothing holds it up."""

STEP = 45.0
"""Seconds without a step, and without a fault, after which a training hangs."""


class Trial:
    """An episode that is under way.

    Attributes:
        wrong: numbers that are not those of the undisturbed training.
        hangs: who has not ended in time.
        alarms: what else is not as it should be.
        ends: by attempt, how many seconds after its fault the last of the other ranks had ended.
        numbers: how many losses, norms, and tensors of states were compared.
    """

    def __init__(self, episode: Episode, crew: Crew, folder: Path) -> None:
        self.episode, self._crew, self._folder = episode, crew, folder
        self.clock = Clock()
        self.reference = Lines(folder / "reference")
        self.told = [
            {rank: Lines(folder / f"{number}.{rank}") for rank in range(len(attempt.balance))}
            for number, attempt in enumerate(episode.attempts)
        ]
        self._reports = [self.reference, *(lines for told in self.told for lines in told.values())]
        self.wrong: list[str] = []
        self.hangs: list[str] = []
        self.alarms: list[str] = []
        self.ends: dict[int, float | None] = {}
        self.numbers = 0

    def bad(self) -> bool:
        """Return whether anything is not as it should be."""
        return bool(self.wrong or self.hangs or self.alarms)

    def run(self) -> None:
        """Train, go on after each fault, and compare."""
        try:
            self._train()
        finally:
            for lines in self._reports:
                lines.close()
        begun = [told for told in self.told if any(lines.all for lines in told.values())]
        self.alarms += ended_otherwise(self.episode, begun)
        self.wrong, self.numbers = wrong_numbers(self.reference, begun)
        if not self.bad():
            self.alarms += lost_steps(self.episode, begun)

    def _train(self) -> None:
        self._folder.mkdir(parents=True)
        self._crew[None].tell(Order(self.episode, None, self._folder))
        if self.episode.home == "torchrun":
            self._under_torchrun()
        else:
            for number in range(len(self.episode.attempts)):
                self._attempt(number)
                if self.bad() or ended_otherwise(self.episode, self.told[: number + 1]):
                    break
        if not self._until(lambda: self.reference.last("use") is not None):
            raise RuntimeError(f"the undisturbed training has not ended, see {self._folder}")

    def _attempt(self, number: int) -> None:
        """Let ranks train until the attempt's fault, or to the end."""
        kept = self.episode.home == "kept processes"
        told, fault = self.told[number], self.episode.attempts[number].fault
        log, released = self._folder / f"{number}.log", self._folder / f"released {number}"
        networks = self._crew.networks if fault is not None and fault.kind == "link cut" else None
        ranks = {
            rank: self._crew[rank] if kept else Process(rank, log, kept=False, apart=networks is not None)
            for rank in told
        }
        for process in ranks.values():
            process.tell(Order(self.episode, number, self._folder))

        def ended(*which: int) -> bool:
            return all([not ranks[rank].alive() or (kept and told[rank].last("ended") is not None) for rank in which])

        in_time = self._until(lambda: ended(*ranks) or self._sprung(number) is not None)
        if fault is not None and (at := self._sprung(number)) is not None:
            others, stopped = [rank for rank in ranks if rank != fault.rank], self.clock.stopped
            if networks is not None:
                networks.cut(fault.rank)
                released.touch()
            in_time = self._until(lambda: ended(*others), at + self.episode.silence + GRACE)
            last = max(ranks[rank].ended or (told[rank].last("ended") or {"at": at})["at"] for rank in others)
            self.ends[number] = last - at - (self.clock.stopped - stopped) if in_time else None
            released.touch()
            if fault.kind == "stopped":
                ranks[fault.rank].end()
            in_time &= self._until(lambda: ended(*ranks), time.monotonic() + LEAVE)
            if networks is not None:
                networks.cut()
        if kept and in_time:
            in_time = self._until(lambda: all(told[rank].last("use") or not ranks[rank].alive() for rank in ranks))
        if not in_time:
            self._hang(number, ranks, [rank for rank in ranks if not ended(rank)])
        lost = [rank for rank, process in ranks.items() if kept and not process.alive()]
        self.alarms += [f"attempt {number}, rank {rank}: a process that is kept has ended" for rank in lost]

    def _sprung(self, number: int) -> float | None:
        return sprung(self.episode.attempts[number].fault, self.told[number])

    def _hang(self, number: int, ranks: Mapping[int, Process], hanging: Sequence[int]) -> None:
        """Write down who hangs, and where; end all."""
        self.hangs.append(f"attempt {number}: no end of ranks {hanging}")
        for process in ranks.values():
            if process.alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        for process in ranks.values():
            process.end()

    def _under_torchrun(self) -> None:
        """Let torchrun start ranks, and start them again after each fault."""
        order = self._folder / "order"
        order.write_bytes(pickle.dumps(Order(self.episode, 0, self._folder)))
        restarts = len(self.episode.attempts) - 1
        options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={RANKS}", f"--max-restarts={restarts}"]
        script = ["-m", "benchmarks.soak_processes", str(self._folder)]
        with (self._folder / "torchrun.log").open("w") as log:
            agent = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options, *script],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
            try:
                in_time = self._until(lambda: agent.poll() is not None)
            finally:
                agent.terminate()
                agent.wait()
        if not in_time:
            self.hangs.append("torchrun has not ended")
        elif agent.returncode:
            self.alarms.append(f"torchrun ended with exit code {agent.returncode}")

    def _until(self, so: Callable[[], bool], end: float | None = None) -> bool:
        """Wait until something is so; return whether it was in time, which by default ends when nothing goes on."""
        limit = time.monotonic() + STEP if end is None else end
        while True:
            if gap := self.clock.look():  # what was stopped with the soak has its time anew
                limit = max(limit + gap, time.monotonic() + self.episode.silence + GRACE)
            if any([lines.new() for lines in self._reports]) and end is None:
                limit = time.monotonic() + STEP
            if so():
                return True
            if time.monotonic() > limit:
                return False
            time.sleep(0.01)

    def line(self) -> dict[str, Any]:
        """Return what to write down."""
        attempts = self.episode.attempts
        told = [line for told in self.told for lines in told.values() for line in lines.all]
        first = [line for told in self.told for line in told[0].all]
        steps = [line["step"] for line in first if line["what"] == "step"]
        kept = self.episode.home == "kept processes" and not self.bad()
        using: dict[int | None, Lines] = {None: self.reference}
        if kept:
            using |= {rank: lines for told in self.told for rank, lines in told.items()}
        ran = sum(bool(any(lines.all for lines in told.values())) for told in self.told)
        return {
            "episode": self.episode.number,
            "home": self.episode.home,
            "ranks": [len(attempt.balance) for attempt in attempts[:ran]],
            "steps": len(steps),
            "mini_batches": sum(len(self.episode.steps[step].batches) for step in steps),
            "evaluations": sum(self.episode.steps[step].evaluation is not None for step in steps),
            "saves": sum(line["what"] == "saved" for line in first),
            "numbers": self.numbers,
            "slow": [line for line in told if line["what"] == "slow"] and attempts[0].slow and attempts[0].slow.place,
            "faults": [
                {"kind": fault.kind, "place": fault.place, "rank": fault.rank, "end": self.ends.get(number)}
                for number, (_, fault, _) in enumerate(attempts)
                if fault is not None and self._sprung(number)
            ],
            "wrong": self.wrong,
            "hangs": self.hangs,
            "alarms": self.alarms,
            "stopped": round(self.clock.stopped, 1),
            "use": {
                "undisturbed" if rank is None else f"rank {rank}": {"life": self._crew.life(rank), **line["use"]}
                for rank, lines in using.items()
                if (line := lines.last("use")) is not None
            },
        }
