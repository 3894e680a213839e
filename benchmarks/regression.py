"""Does the regression tell apart what it should? Many runs on an unchanged tree, and many with a planted delay.

    python -m benchmarks.regression                  # 20 unchanged and 10 planted runs
    python -m benchmarks.regression --unchanged 2 --planted 1 --json trial.json

As in `make regression`, the working tree is compared with a revision beside it: HEAD, from which the tree does not
differ. An alarm is a run in which anything is called worse. Every finished run is kept beside the result at once, with
every sample, and an experiment that was broken off goes on there; the result's own file is replaced when all runs are
done. A run during which the tree was changed is not kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from benchmarks.harness import Found, command, keep, positive, render, start
from reproduce.error import USAGE, Error
from reproduce.machine.git import Git, checkout
from reproduce.numbers.significance import Decision, Rule
from reproduce.records.record import Record, Result, load
from reproduce.regression.cases import CASES
from reproduce.regression.job import Settings
from reproduce.regression.judge import TOGETHER, Judgement
from reproduce.regression.main import measure
from reproduce.regression.trees import trees
from reproduce.tables.render import BENCHMARKS

DELAY = 0.1
Measure = Callable[[Settings], Judgement]


def order(unchanged: int, planted: int) -> list[float]:
    """Return the delay of each run: the kinds spread evenly, so that a drift of the machine meets both."""
    places = [((i + 0.5) / unchanged, 0.0) for i in range(unchanged)]
    places += [((i + 0.5) / planted, DELAY) for i in range(planted)]
    return [delay for _, delay in sorted(places)]


def prove(measured: Measure, delays: Sequence[float], settings: Settings, finished: int = 0) -> Found:
    """Yield the result of one run for each delay, but for those that are `finished`."""
    for number, delay in list(enumerate(delays))[finished:]:
        began = time.perf_counter()
        judged = measured(replace(settings, slow_down=delay, seed=number))
        cases = {
            case: {**_judged(judged.decisions[case]), "base": _digits(samples.base), "head": _digits(samples.head)}
            for case, samples in judged.samples.items()
        }
        values = {
            "seconds": round(time.perf_counter() - began, 1),
            "worse": judged.worse,
            "cases": {**cases, TOGETHER: _judged(judged.decisions[TOGETHER])},
        }
        yield [Result("regression", f"run {number + 1}", "measured", config={"planted": delay}, values=values)]


def _judged(decision: Decision) -> dict[str, float]:
    assert decision.low is not None and decision.high is not None and decision.p is not None
    numbers = {"ratio": decision.ratio, "low": decision.low, "high": decision.high}
    return {**{name: round(x, 4) for name, x in numbers.items()}, "p": decision.p}


def _digits(restarts: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the seconds with five digits, which is more than a clock's noise, and half a file of them all."""
    return [[float(f"{seconds:.5g}") for seconds in restart] for restart in restarts]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is left of the experiment, and print its table."""
    parser = command("regression", __doc__)
    parser.set_defaults(json=BENCHMARKS / "regression.json")
    parser.add_argument("--unchanged", type=positive, default=20, help="runs on an unchanged tree (default 20)")
    parser.add_argument("--planted", type=positive, default=10, help=f"runs with a delay of {DELAY:.0%}% (default 10)")
    parser.add_argument("--fresh", action="store_true", help="forget the runs of an experiment that was broken off")
    options = parser.parse_args(arguments)
    fresh = vars(options).pop("fresh")

    settings, rule, delays = Settings([case.name for case in CASES]), Rule(), order(options.unchanged, options.planted)
    vars(options).update(restarts=settings.restarts, rounds=settings.rounds, alpha=rule.alpha, threshold=rule.threshold)
    record = start(options, "regression", "is a planted delay seen?", {"seconds": "s"}, devices=2)
    assert record.run is not None
    revision, what = record.run.git, record.run.settings
    if revision is None or revision.dirty:
        parser.error(
            "the tree has changes, or is no git checkout; what is proved has to be a revision, so commit first"
        )
    unfinished = options.json.with_name(f".{options.json.stem}.unfinished.json")
    if unfinished.exists() and not fresh:
        try:
            record = load(unfinished)
        except Error as error:
            parser.error(f"{error}; start --fresh")
        if record.run is None or (record.run.git, record.run.settings) != (revision, what):
            parser.error(f"{unfinished} is of another revision or other settings; finish that, or start --fresh")
    runs = prove(partial(_measured, revision, rule), delays, settings, len(record.results))
    keep(record, unfinished, runs, len(delays) - len(record.results), table)
    unfinished.replace(options.json)


def _measured(revision: Git, rule: Rule, settings: Settings) -> Judgement:
    """Measure HEAD beside the working tree, which does not differ.

    Raises:
        Error: it does, now at least, or there is no end to it.
    """
    with trees("HEAD", None) as (base, head):
        if head.dirty:
            raise Error("there are files in torchgpipe that git does not know; add and commit, or remove them", USAGE)
        judged = measure(base, head, settings, rule)
    if checkout() != revision:
        raise Error(f"the tree is no longer {revision.revision[:9]} without changes; go back to that first", USAGE)
    return judged


def table(record: Record, style: str = "simple") -> str:
    """Render how often each case, and any of them, was called worse, and the ratios that were found."""
    assert record.run is not None
    settings = record.run.settings
    kinds = [[one for one in record.results if bool(one.config["planted"]) is planted] for planted in (False, True)]
    rows = []
    for case in record.results[0].values["cases"]:
        row = [case]
        for kind in kinds:
            found = [one.values["cases"][case]["ratio"] for one in kind]
            row += [f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})" if found else "",
                    f"{sum(case in one.values['worse'] for one in kind)} of {len(kind)}"]  # fmt: skip
        rows.append(row)
    alarms = [f"{sum(bool(one.values['worse']) for one in kind)} of {len(kind)}" for kind in kinds]
    rows.append(["any of these: an alarm", "", alarms[0], "", alarms[1]])
    body = render(["case", "unchanged: ratio", "worse", f"{DELAY:.0%} slower: ratio", "worse"], rows, style)
    seconds = [one.values["seconds"] for one in record.results]
    took = f"{statistics.median(seconds):.0f} s each ({min(seconds):.0f}-{max(seconds):.0f})"
    return (
        f"{len(kinds[0])} runs on an unchanged tree and {len(kinds[1])} with a planted delay, {took}: "
        f"{settings['restarts']} restarts of {settings['rounds']} pairs; threshold {settings['threshold']:.0%}, "
        f"alpha {settings['alpha']:g}. Ratios: head by base, median of the runs (least-greatest)\n\n{body}"
    )


if __name__ == "__main__":
    main()
