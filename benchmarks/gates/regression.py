"""Does the regression tell apart what it should? Runs on an unchanged tree, and runs with a planted delay.

    python -m benchmarks.gates.regression             # 16 runs: without a delay, with 3 %, without, with 5 %, and so on
    python -m benchmarks.gates.regression --runs 4 --json trial.json

As in `make regression`, the working tree is compared with a revision beside it: HEAD, from which the tree does not
differ. An alarm is a run in which anything is called worse. Every finished run is kept beside the result at once, with
the ratio of every restart, and an experiment that was broken off goes on there, to more runs or fewer; the result's own
file is replaced when all runs are done. A run during which the tree was changed is not kept.

What so few runs cannot tell is resampled at the end: restarts of all runs with the same delay are drawn at random, as
many as a run has, and judged as a run is. This takes restarts for independent, also those of one run.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from benchmarks.harness import Found, command, keep, positive, start
from reproduce.error import USAGE, Error
from reproduce.machine.description import ROOT
from reproduce.machine.git import Git, checkout
from reproduce.numbers.significance import Decision, Rule
from reproduce.records.record import Record, Result, load, save
from reproduce.regression.cases import CASES
from reproduce.regression.job import Settings
from reproduce.regression.judge import RULE, Judgement, judge_ratios, ratios
from reproduce.regression.main import measure
from reproduce.regression.trees import trees
from reproduce.tables.layout import grid

DELAYS = (0.0, 0.03, 0.0, 0.05)  # of the runs in turn: a drift of the machine meets all kinds
DRAWS = 200  # resampled runs of each kind
ALARM = "any of these: an alarm"
RATIOS = "ratios"  # of the restarts of each case, until all runs are done
Measure = Callable[[Settings], Judgement]


def prove(measured: Measure, settings: Settings, rule: Rule, finished: Sequence[Result], runs: int) -> Found:
    """Yield the result of each run that is not `finished`, and then how often resampled runs call a case worse."""
    done = list(finished)
    for number in range(len(done), runs):
        delay = DELAYS[number % len(DELAYS)]
        began = time.perf_counter()
        judged = measured(replace(settings, slow_down=delay, seed=number))
        values = {
            "seconds": round(time.perf_counter() - began, 1),
            "worse": judged.worse,
            "cases": {case: _judged(decision) for case, decision in judged.decisions.items()},
            RATIOS: {case: [round(x, 6) for x in ratios(samples)] for case, samples in judged.samples.items()},
        }
        done.append(Result("regression", f"run {number + 1}", "measured", config={"planted": delay}, values=values))
        yield done[-1:]
    for delay in sorted({one.config["planted"] for one in done}):
        worse = resampled([one for one in done if one.config["planted"] == delay], rule)
        yield [Result("resampled", f"{delay:.0%}", "measured", config={"planted": delay}, values=dict(worse))]


def resampled(runs: Sequence[Result], rule: Rule) -> Counter[str]:
    """Count in how many of `DRAWS` runs, made of restarts drawn from these runs, each case is called worse."""
    draw = random.Random(0)
    of_cases = {case: [x for run in runs for x in run.values[RATIOS][case]] for case in runs[0].values[RATIOS]}
    restarts = len(next(iter(of_cases.values())))
    worse: Counter[str] = Counter()
    for _ in range(DRAWS):
        drawn = draw.sample(range(restarts), restarts // len(runs))
        found = judge_ratios({case: [of[i] for i in drawn] for case, of in of_cases.items()}, rule, {}).worse
        worse.update([*found, ALARM] if found else [])
    return worse


def _judged(decision: Decision) -> dict[str, float]:
    assert decision.low is not None and decision.high is not None and decision.p is not None
    numbers = {"ratio": decision.ratio, "low": decision.low, "high": decision.high}
    return {**{name: round(x, 4) for name, x in numbers.items()}, "p": decision.p}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is left of the experiment, and print its table."""
    parser = command("gates.regression", __doc__)
    parser.set_defaults(json=ROOT / "results" / "benchmarks" / "regression.json")
    parser.add_argument("--runs", type=positive, default=16, help="runs, half of them unchanged (default 16)")
    parser.add_argument("--fresh", action="store_true", help="forget the runs of an experiment that was broken off")
    options = parser.parse_args(arguments)
    fresh, total = vars(options).pop("fresh"), vars(options).pop("runs")

    settings = Settings([case.name for case in CASES])
    vars(options).update(
        restarts=settings.restarts, rounds=settings.rounds, clock=settings.clock, alpha=RULE.alpha,
        threshold=RULE.threshold, draws=DRAWS,
    )  # fmt: skip
    record = start(options, "gates.regression", "is a planted delay seen?", {"seconds": "s"}, devices=2)
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
    finished = [one for one in record.results if one.experiment == "regression"]
    found = prove(partial(_measured, revision, RULE), settings, RULE, finished, total)
    record = keep(record, unfinished, found, max(total - len(finished), 0) + len({*DELAYS}), table)
    for one in record.results:
        one.values.pop(RATIOS, None)
    save(record, options.json)
    unfinished.unlink()


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
    runs = [one for one in record.results if one.experiment == "regression"]
    resampled = {one.config["planted"]: one.values for one in record.results if one.experiment == "resampled"}
    kinds: dict[float, list[Result]] = {}
    for one in sorted(runs, key=lambda run: float(run.config["planted"])):
        kinds.setdefault(one.config["planted"], []).append(one)
    rows = []
    for case in [*runs[0].values["cases"], ALARM]:
        row = [case]
        for delay, kind in kinds.items():
            found = [one.values["cases"][case]["ratio"] for one in kind] if case != ALARM else []
            worse = sum(case in one.values["worse"] or (case == ALARM and bool(one.values["worse"])) for one in kind)
            drawn = f", {resampled[delay].get(case, 0)} of {settings['draws']}" if delay in resampled else ""
            row += [f"{statistics.median(found):.3f} ({min(found):.3f}-{max(found):.3f})" if found else "",
                    f"{worse} of {len(kind)}{drawn}"]  # fmt: skip
        rows.append(row)
    headers = [
        text for delay in kinds for text in (f"{delay:.0%} slower: ratio" if delay else "unchanged: ratio", "worse")
    ]
    seconds = [one.values["seconds"] for one in runs]
    took = f"{statistics.median(seconds):.0f} s each ({min(seconds):.0f}-{max(seconds):.0f})"
    counts = ", ".join(f"{len(kind)} {f'with a delay of {delay:.0%}' if delay else 'on an unchanged tree'}"
                       for delay, kind in kinds.items())  # fmt: skip
    return (
        f"{len(runs)} runs, {counts}; {took}: {settings['restarts']} restarts of {settings['rounds']} pairs; threshold "
        f"{settings['threshold']:.0%}, alpha {settings['alpha']:g}. Ratios: head by base, median of the runs "
        "(least-greatest). Worse: first of the runs, then of runs resampled from their restarts\n\n"
        + grid(["case", *headers], rows, style)
    )


if __name__ == "__main__":
    main()
