"""Does the regression tell apart what it should? Many runs on an unchanged tree, and many with a planted delay.

    python -m benchmarks.regression                  # 20 unchanged and 10 planted runs
    python -m benchmarks.regression --unchanged 2 --planted 1 --json trial.json

As in `make regression`, the working tree is compared with a revision beside it: HEAD, from which the tree does not
differ. An alarm is a run in which anything is called worse. Every finished run is kept beside the result at once, with
every sample, and an experiment that was broken off goes on there; the result's own file is replaced when all runs are
done. A run during which the tree was changed is not kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.circumstances import checkout, circumstances, keep
from reproduce.error import USAGE, Error
from reproduce.numbers.significance import Decision, Rule
from reproduce.regression.cases import CASES
from reproduce.regression.job import Settings
from reproduce.regression.judge import TOGETHER, Judgement
from reproduce.regression.main import measure
from reproduce.regression.trees import trees
from reproduce.tables.benchmark_block import BENCHMARKS

__all__ = ["main", "order", "prove", "table"]

DELAY = 0.1
Run = dict[str, Any]
Measure = Callable[[Settings], Judgement]


def order(unchanged: int, planted: int) -> list[float]:
    """Return the delay of each run: the kinds spread evenly, so that a drift of the machine meets both."""
    places = [((i + 0.5) / unchanged, 0.0) for i in range(unchanged)]
    places += [((i + 0.5) / planted, DELAY) for i in range(planted)]
    return [delay for _, delay in sorted(places)]


def prove(
    measured: Measure, delays: Sequence[float], settings: Settings, runs: list[Run], kept: Callable[[], None]
) -> None:
    """Add to `runs` those that it lacks, of one run for each delay; `kept` is called after each."""
    for number, delay in list(enumerate(delays))[len(runs) :]:
        began = time.perf_counter()
        judged = measured(Settings(settings.cases, settings.restarts, settings.rounds, delay, seed=number))
        cases = {
            each.case: {**_kept(each.decision), "base": _digits(each.samples.base), "head": _digits(each.samples.head)}
            for each in judged.cases
        }
        runs.append({
            "planted": delay,
            "seconds": round(time.perf_counter() - began, 1),
            "worse": judged.worse,
            "cases": {**cases, TOGETHER: _kept(judged.together)},
        })  # fmt: skip
        kept()


def _kept(decision: Decision | None) -> Run:
    assert decision is not None and decision.low is not None and decision.high is not None and decision.p is not None
    numbers = {"ratio": decision.ratio, "low": decision.low, "high": decision.high}
    return {**{name: round(x, 4) for name, x in numbers.items()}, "p": decision.p}


def _digits(restarts: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the seconds with five digits, which is more than a clock's noise, and half a file of them all."""
    return [[float(f"{seconds:.5g}") for seconds in restart] for restart in restarts]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is left of the experiment, and print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regression", description=__doc__.splitlines()[0])
    parser.add_argument("--unchanged", type=int, default=20, help="runs on an unchanged tree (default 20)")
    parser.add_argument("--planted", type=int, default=10, help=f"runs with a delay of {DELAY:.0%}% (default 10)")
    parser.add_argument("--json", type=Path, default=BENCHMARKS / "regression.json", metavar="FILE", help="the result")
    parser.add_argument("--fresh", action="store_true", help="forget the runs of an experiment that was broken off")
    options = parser.parse_args(arguments)
    if options.unchanged < 1 or options.planted < 1:
        parser.error("--unchanged and --planted must be at least 1")

    settings, rule = Settings([case.name for case in CASES]), Rule()
    under = circumstances()
    if under["revision"] is None or under["dirty"]:
        parser.error(
            "the tree has changes, or is no git checkout; what is proved has to be a revision, so commit first"
        )
    what = {"restarts": settings.restarts, "rounds": settings.rounds, "alpha": rule.alpha, "threshold": rule.threshold,
            "delays": order(options.unchanged, options.planted), "revision": under["revision"]}  # fmt: skip
    unfinished = options.json.with_name(f".{options.json.stem}.unfinished.json")
    result: dict[str, Any] = {"what": what, "runs": []}
    if unfinished.exists() and not options.fresh:
        before = json.loads(unfinished.read_text())
        if before["what"] != what:
            parser.error(f"{unfinished} is of another revision or other settings; finish that, or start --fresh")
        under, result = before["circumstances"], {"what": what, "runs": before["runs"]}

    def kept() -> None:
        if checkout() != {"revision": what["revision"], "dirty": False}:
            del result["runs"][-1]
            raise Error(f"the tree is no longer {what['revision'][:9]} without changes; go back to that first", USAGE)
        keep(unfinished, "regression", under, result)
        last = result["runs"][-1]
        said = f"ALARM: {', '.join(last['worse'])}" if last["worse"] else "no alarm"
        number = f"run {len(result['runs'])} of {len(what['delays'])}, planted {last['planted']:.0%}"
        print(f"{number}, {last['seconds']} s: {said}", file=sys.stderr, flush=True)

    try:
        with trees("HEAD", None) as (base, head):
            if head.dirty:
                raise Error(
                    "there are files in torchgpipe that git does not know; add and commit, or remove them", USAGE
                )
            prove(lambda each: measure(base, head, each, rule), what["delays"], settings, result["runs"], kept)
    except KeyboardInterrupt:
        print(f"interrupted; {len(result['runs'])} runs are kept, go on with the same command", file=sys.stderr)
        raise SystemExit(130) from None
    except Error as error:
        raise SystemExit(f"experiment: {error}; {len(result['runs'])} runs are kept") from None
    print(table(result))
    keep(options.json, "regression", under, result)
    unfinished.unlink()


def table(result: dict[str, Any], style: str = "simple") -> str:
    """Render how often each case, and any of them, was called worse, and the ratios that were found."""
    from tabulate import tabulate

    what, runs = result["what"], result["runs"]
    kinds = [[run for run in runs if bool(run["planted"]) is planted] for planted in (False, True)]
    rows = []
    for case in runs[0]["cases"]:
        row = [case]
        for kind in kinds:
            found = [run["cases"][case]["ratio"] for run in kind]
            row += [f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})",
                    f"{sum(case in run['worse'] for run in kind)} of {len(kind)}"]  # fmt: skip
        rows.append(row)
    alarms = [f"{sum(bool(run['worse']) for run in kind)} of {len(kind)}" for kind in kinds]
    rows.append(["any of these: an alarm", "", alarms[0], "", alarms[1]])
    delay = max(what["delays"])
    headings = ["case", "unchanged: ratio", "worse", f"{delay:.0%} slower: ratio", "worse"]
    body = tabulate(rows, headers=headings, disable_numparse=True, tablefmt=style)
    seconds = [run["seconds"] for run in runs]
    took = f"{statistics.median(seconds):.0f} s each ({min(seconds):.0f}-{max(seconds):.0f})"
    return (
        f"{len(kinds[0])} runs on an unchanged tree and {len(kinds[1])} with a planted delay, {took}: "
        f"{what['restarts']} restarts of {what['rounds']} pairs; threshold {what['threshold']:.0%}, "
        f"alpha {what['alpha']:g}. Ratios: head by base, median of the runs (least-greatest)\n\n{body}"
    )


if __name__ == "__main__":
    main()
