"""Measure schedules over two ranks, some beside PyTorch's: steps by turns, in the same two processes.

A ratio is the time of the other way's step over this one's, round by round, and its median: above 1, this one is
faster. `replayed` is the same ratio as the lists say, whose tasks take what they took here.
"""

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from copy import deepcopy
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import Found, by_case, collect, command, start
from reproduce.error import Error
from reproduce.records.record import Record, Result
from reproduce.run.engines.launch import Ended, Launched
from reproduce.tables.layout import grid
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.schedules import make
from torchgpipe.timeline.stopwatch import Stopwatch

N, LAYERS = 2, 4  # ranks, and layers on each
SIZES = {
    "short": (512, 64),
    "small": (1024, 64),
    "medium": (1024, 128),
    "large": (2048, 64),
}  # width, samples
PAIRS = {
    8: {"GPipe": "ScheduleGPipe", "1F1B": "Schedule1F1B"},
    2: {"ZBH1": "1F1B"},
}  # by micro-batches

Tasks = dict[tuple[Any, ...], float]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every size and number of micro-batches, and print a table."""
    parser = command("schedules", __doc__, rounds=60)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=[*SIZES], help="of the tasks")
    parser.add_argument(
        "--chunks", nargs="+", type=int, choices=PAIRS, default=[*PAIRS], help="micro-batches"
    )
    options = parser.parse_args(arguments)
    record = start(
        options, "schedules", "seconds of a step over two ranks", {"seconds": "s"}, devices=N
    )
    cases = [*product(options.chunks, options.size)]
    collect(record, options.json, measure(cases, options.rounds), len(cases), table)


def measure(cases: Sequence[tuple[int, str]], rounds: int) -> Found:
    """Yield the results of each case, one for each way."""
    for m, size in cases:
        samples: dict[str, list[float]] = defaultdict(list)
        tasks: dict[str, Tasks] = defaultdict(dict)
        with (
            TemporaryDirectory() as folder,
            closing(Launched("spawn", N, _rank, folder, m, *SIZES[size], rounds)) as launched,
        ):
            running = {*range(N)}
            while running:
                for k, said in launched.receive(running):
                    running.remove(k)
                    if isinstance(said, Ended):
                        raise Error(f"rank {k} ended {said.how}")
                    for way, (seconds, own) in said.items():
                        samples[way] = seconds
                        tasks[way] |= own
        yield [
            _result(f"m={m} {size}", way, PAIRS[m].get(way), m, samples, tasks) for way in samples
        ]


def _result(
    case: str,
    way: str,
    other: str | None,
    m: int,
    samples: dict[str, list[float]],
    tasks: dict[str, Tasks],
) -> Result:
    values: dict[str, Any] = {}
    if other is not None:
        turns = zip(samples[other], samples[way], strict=True)
        values = {
            "over": other,
            "ratio": statistics.median(theirs / ours for theirs, ours in turns),
        }
        if tasks[other]:
            seconds = [
                make(name, N, m, 1, "never").replay(tasks[name].__getitem__).seconds
                for name in (other, way)
            ]
            values["replayed"] = seconds[0] / seconds[1]
    return Result(case, way, "measured", values=values, samples={"seconds": samples[way]})


def _rank(
    k: int, link: Connection, folder: str, m: int, width: int, samples: int, rounds: int
) -> None:
    """Take steps of all ways in turn; send each way's seconds, and the typical ones of this rank's tasks."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(folder, 'store')}", rank=k, world_size=N
    )
    torch.manual_seed(0)
    layers = nn.Sequential(
        *(layer for _ in range(N * LAYERS) for layer in (nn.Linear(width, width), nn.Tanh()))
    )
    x, target = torch.rand(2, m * samples, width)
    ways = {
        name: _way(name, deepcopy(layers), m, x, target) for name in (*PAIRS[m], *PAIRS[m].values())
    }
    first, *others = [_gradients(part, step()) for part, step, _ in ways.values()]
    for gradients in others:
        for ours, theirs in zip(gradients, first, strict=True):
            torch.testing.assert_close(ours, theirs)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    events: dict[str, dict[tuple[Any, ...], list[float]]] = {
        name: defaultdict(list) for name in ways
    }
    order = random.Random(0)
    for turn in range(-3, rounds):
        for name in order.sample(sorted(ways), len(ways)):
            part, step, model = ways[name]
            part.zero_grad()
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - began)
            model.observer = stopwatch = Stopwatch(
                {k: torch.device("cpu")}
            )  # PyTorch's schedules do not look at it
            step()  # once more, not timed as a whole
            model.observer = None
            for event in stopwatch.events() if turn >= 0 else ():
                events[name][event.kind, event.micro_batch, event.partition].append(
                    event.end - event.start
                )
    found = {
        name: {task: statistics.median(each) for task, each in tasks.items()}
        for name, tasks in events.items()
    }
    link.send({name: (seconds[name], found[name]) for name in ways})
    link.poll(None)  # until both are killed: the other rank may still need this one


def _way(
    name: str, layers: nn.Sequential, m: int, x: Tensor, target: Tensor
) -> tuple[nn.Module, Callable[[], object], Any]:
    """Return this rank's layers, a function that does a step, and what has an observer."""
    rank, balance = dist.get_rank(), [len(layers) // N] * N
    if name.startswith("Schedule"):
        from reproduce.run.engines.schedules import schedule

        part = layers[rank * balance[0] :][: balance[0]]
        theirs = schedule(name, part, chunks=m, checkpointed=0, loss_fn=nn.functional.mse_loss)
        return (
            part,
            lambda: theirs.step(*[x] * (rank == 0), **({"target": target} if rank else {})),
            part,
        )
    model = DistributedGPipe(layers, balance, chunks=m, checkpoint="never", schedule=name)
    given = (x, None) if rank == 0 else (None, target)
    return model.partition, partial(model.step, nn.functional.mse_loss, *given), model


def _gradients(part: nn.Module, _: Any) -> list[Tensor]:
    return [p.grad.clone() for p in part.parameters() if p.grad is not None]


def table(record: Record, style: str = "simple") -> str:
    """Render each way's milliseconds and ratio, and geometric means of the ratios."""
    rows, ratios = [], defaultdict[str, list[float]](list)
    for case, found in by_case(record).items():
        for way, result in found.items():
            values, over = result.values, str(result.values.get("over", ""))
            if over:
                ratios[f"{way} over {over}"].append(float(values["ratio"]))
                seconds = [
                    f"{1000 * float(found[name].values['seconds']):.2f}" for name in (way, over)
                ]
                cells = [
                    f"{values[name]:.3f}" if name in values else ""
                    for name in ("ratio", "replayed")
                ]
                rows.append([case, way, seconds[0], over, seconds[1], *cells])
    means = [
        f"- {pair}: {math.exp(statistics.fmean(map(math.log, found))):.3f}, the geometric mean"
        for pair, found in ratios.items()
    ]
    heads = ["case", "schedule", "ms a step", "beside", "ms a step", "ratio", "replayed"]
    return "\n".join([grid(heads, rows, style), "", *means])


if __name__ == "__main__":
    main()
