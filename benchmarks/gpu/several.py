"""Try what needs several GPUs: copies between GPUs, ranks, a killed rank, the papers' tables.

There are as many processes (ranks) as GPUs. The ranks train a pipeline twice:

1. Each rank has its own GPU, and tensors are sent with NCCL.
2. All ranks share one GPU, and tensors are sent through host memory.

Then one rank is killed in the middle of a task, and the other ranks have to notice that.

In a dry run, there are two ranks on the CPU, and tensors are sent with gloo.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from itertools import permutations
from multiprocessing.connection import Connection
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.gpu.experiments import (
    ENDING,
    LEAST,
    NO_TIME,
    about_failures,
    about_rows,
    run_experiment,
    summary,
)
from benchmarks.gpu.part import Context, Fields
from benchmarks.gpu.schedules import alike
from reproduce.error import Error
from reproduce.run.engines.launch import Ended, Launched
from torchgpipe.distributed import DistributedGPipe, RankFailed
from torchgpipe.tensors import accelerator
from torchgpipe.tensors.observe import NOTHING, Task

PURPOSE = "whether copies, ranks and the papers' tables work on several GPUs"
SHARE = 2
NEEDS = ["click"]

MOST_RANKS = 8
STEPS = 5
"""Timed steps of each way to connect ranks."""
M = 4
"""The number of micro-batches."""
WIDTHS = {"paper": 2048, "tiny": 16}
TABLES = ("amoebanet-speed", "unet-speed", "resnet101-speed")
ROWS = ("naive n2", "GPipe n2m32")
"""The rows that are measured. Published rows would first train for an epoch that is not timed."""
MEASURE = ("--scale", "paper", "--on", "cuda", "--no-emulate", "--steps", "3")
NUMBERS = 1 << 20
"""How many numbers are copied between each pair of devices."""

Said = dict[int, Fields]
"""What each rank has said, by the rank."""


def run(context: Context) -> Fields:
    """Try what needs several devices: copies, ranks, a killed rank, and the papers' tables.

    If the machine has only one device, nothing is tried.
    """
    devices = context.devices[:MOST_RANKS]
    result: Fields = {"devices": len(devices)}
    if len(devices) < 2:
        return result
    ways = ways_of(devices)
    # Ranks are forked processes, so they have to start before this process uses CUDA. Each call may
    # take half of the time that is left, so that ranks that hang do not take all of it.
    width = WIDTHS[context.size]
    for way, places in ways.items():
        result[way] = train(places, width, context.seconds_left() / 2)
        context.write(result)
    first, *_ = ways
    result["kill"] = kill(ways[first], width, context.seconds_left() / 2)
    context.write(result)
    result["pairs"] = copy_between_pairs(devices)
    context.write(result)
    if context.size == "paper":
        tables: Fields = {}
        result["tables"] = tables
        for number, name in enumerate(TABLES):
            seconds = (context.seconds_left() - ENDING) / (len(TABLES) - number)
            if seconds < LEAST:
                result.setdefault("failed", {})[name] = NO_TIME
                continue
            chosen = [f"--row={row}" for row in ROWS]
            record = run_experiment(context, name, (*MEASURE, *chosen), seconds)
            if isinstance(record, str):
                result.setdefault("failed", {})[name] = record
            else:
                tables[name] = summary(record, emulated=False)
            context.write(result)
    return result


def ways_of(devices: Sequence[torch.device]) -> dict[str, list[torch.device]]:
    """Return a dictionary: a way to connect ranks, and a list with the device of each rank.

    The ways are the keys. With "NCCL", each rank has a GPU of its own. With "staging", all ranks
    share one GPU, and send tensors through host memory. On CPUs, the only way is "gloo".
    """
    if devices[0].type == "cpu":
        return {"gloo": [*devices]}
    return {"NCCL": [*devices], "staging": [devices[0]] * len(devices)}


def copy_between_pairs(devices: Sequence[torch.device]) -> Fields:
    """Copy a pattern from each device to every other device, and check what arrives.

    Returns:
        A dictionary with the number of pairs ("pairs"), and a list of the pairs whose copy was
        wrong ("wrong").
    """
    wrong = []
    pairs = 0
    for i, j in permutations(range(len(devices)), 2):
        pairs += 1
        pattern = torch.arange(NUMBERS, device=devices[i]) * (1 + i) + j
        copied = pattern.to(devices[j], copy=True)
        expected = torch.arange(NUMBERS) * (1 + i) + j
        if not torch.equal(copied.cpu(), expected):
            wrong.append([i, j])
    return {"pairs": pairs, "wrong": wrong}


def train(places: Sequence[torch.device], width: int, limit: float) -> Fields:
    """Train a pipeline with a layer on each rank; compare it with the layers without a pipeline.

    Args:
        places: The device of each rank.
        width: The width of the layers.
        limit: The seconds after which a rank that has sent no result counts as failed.

    Returns:
        - `ranks`: the number of ranks
        - `right`: whether the gradients of all ranks are those of the layers without a pipeline
        - `seconds`: the median seconds of a step on the slowest rank
        - `failed`: the reason, if a rank fails; then `right` and `seconds` are missing
    """
    said = run_ranks(_train_on_rank, places, width, limit)
    failed = failure(said, places)
    if failed:
        return {"ranks": len(places), "failed": failed}
    right = all(each["right"] for each in said.values())
    slowest = max(each["seconds"] for each in said.values())
    return {"ranks": len(places), "right": right, "seconds": slowest}


def kill(places: Sequence[torch.device], width: int, limit: float) -> Fields:
    """Kill the last rank in the middle of a task, and see whether the other ranks notice.

    Args:
        places: The device of each rank.
        width: The width of the layers.
        limit: The seconds after which a rank that has sent no result counts as failed.

    Returns:
        - `others`: the number of the other ranks
        - `told`: how many of the other ranks have raised `RankFailed`
        - `seconds`: after how many seconds the last of them has raised this error
        - `failed`: the reason, if a rank has not raised `RankFailed`
    """
    said = run_ranks(_survive_on_rank, places, width, limit)
    others = len(places) - 1
    told = [said[k]["seconds"] for k in range(others) if "seconds" in said.get(k, {})]
    found: Fields = {"others": others, "told": len(told), "seconds": max(told, default=None)}
    if len(told) < others:
        found["failed"] = failure(said, places[:-1])
    return found


def failure(said: Said, places: Sequence[torch.device]) -> str:
    """Return why the first of the ranks failed, or an empty text if no rank failed."""
    for k in range(len(places)):
        reason = said[k].get("failed")
        if reason:
            return f"rank {k}: {reason}"
    return ""


def run_ranks(
    do: Callable[[int, Sequence[torch.device], int], Fields],
    places: Sequence[torch.device],
    width: int,
    limit: float,
) -> Said:
    """Start a process for each rank k, which calls `do(k, places, width)`; return all results.

    Ranks that send no result within `limit` seconds are killed, and count as failed.
    """
    said: Said = {}
    until = time.monotonic() + limit
    with (
        TemporaryDirectory() as folder,
        closing(Launched("fork", len(places), _serve, folder, do, places, width)) as launched,
    ):
        while len(said) < len(places) and time.monotonic() < until:
            silent = {*range(len(places))} - said.keys()
            for k, answer in launched.receive(silent, until - time.monotonic()):
                said[k] = {"failed": f"ended {answer.how}"} if isinstance(answer, Ended) else answer
    for k in {*range(len(places))} - said.keys():
        said[k] = {"failed": f"said nothing within {limit:.0f} s"}
    return said


def _serve(  # noqa: PLR0913 - those of a process, and those of `do`
    k: int,
    link: Connection,
    folder: str,
    do: Callable[[int, Sequence[torch.device], int], Fields],
    places: Sequence[torch.device],
    width: int,
) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    accelerator.make_current(places[k])
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=k, world_size=len(places))
    try:
        answer = do(k, places, width)
    except Exception as error:
        said, *_ = str(error).splitlines() or [""]
        answer = {"failed": f"{type(error).__name__}: {said}"}
    link.send(answer)
    link.poll(None)  # wait to be killed: other ranks may still need this one


def made(
    k: int, places: Sequence[torch.device], width: int
) -> tuple[Any, nn.Module, Tensor, Tensor]:
    """Build what rank k needs to train a pipeline with one layer on each rank.

    Return the pipeline, a copy of all layers to compare with, an input and a target.
    """
    torch.manual_seed(0)
    layers = nn.Sequential()
    for _ in places:
        layers.append(nn.Sequential(nn.Linear(width, width), nn.Tanh()))
    alone = deepcopy(layers).to(places[k])
    x, target = torch.rand(2, 4 * M, width)
    model = DistributedGPipe(layers, [1] * len(places), device=places[k], chunks=M)
    return model, alone, x.to(places[k]), target.to(places[k])


def _train_on_rank(k: int, places: Sequence[torch.device], width: int) -> Fields:
    model, alone, x, target = made(k, places, width)
    seconds = []
    for _ in range(1 + STEPS):
        model.zero_grad()
        accelerator.synchronize([places[k]])
        dist.barrier()
        began = time.perf_counter()
        model.step(mse_loss, x, target)
        accelerator.synchronize([places[k]])
        seconds.append(time.perf_counter() - began)
    mse_loss(alone(x), target).backward()
    expected = dict(alone.named_parameters())
    own = dict(model.named_parameters())
    right = alike(own.values(), [expected[name] for name in own])
    dist.barrier()
    model.close()
    return {"right": right, "seconds": median(seconds[1:])}


def _survive_on_rank(k: int, places: Sequence[torch.device], width: int) -> Fields:
    model, _, x, target = made(k, places, width)
    model.step(mse_loss, x, target)
    if k == len(places) - 1:
        model.observer = _kill_this_process
    began = time.perf_counter()
    try:
        model.step(mse_loss, x, target)
        accelerator.synchronize([places[k]])
    except RankFailed:
        return {"seconds": time.perf_counter() - began}
    raise Error("the step ended, although a rank was killed")


def _kill_this_process(task: Task) -> Any:
    """Kill this process when its task for the second micro-batch begins."""
    if task.micro_batch == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return NOTHING


def lines(result: Fields) -> list[str]:
    """Return up to three lines of text about the results.

    The first line is about ranks and copies. The second is about the first of the papers' tables
    that was measured. The third is about the other tables, and about experiments that failed.
    """
    if result["devices"] < 2:
        return ["left out, for lack of GPUs: these parts need two or more, and there is one"]
    about = "; ".join(_about_ranks(result))
    found = []
    for name, rows in result.get("tables", {}).items():
        found.append(f"{name}, measured: {about_rows(rows)}")
    found += about_failures(result)
    said = [about, " / ".join(found[:1]), " / ".join(found[1:])]
    return [line for line in said if line]


def _about_ranks(result: Fields) -> Iterator[str]:
    pairs = result.get("pairs")
    if pairs:
        yield f"{pairs['pairs'] - len(pairs['wrong'])} of {pairs['pairs']} pairs copied right"
    for way in ("NCCL", "staging", "gloo"):
        if way not in result:
            continue
        row = result[way]
        if "failed" in row:
            yield f"{way}: failed, {row['failed']}"
        else:
            right = "right" if row["right"] else "wrong"
            yield f"{way}: {row['ranks']} ranks, {right} gradients, {1000 * row['seconds']:.1f} ms"
    killed = result.get("kill")
    if killed:
        text = f"a killed rank was noticed by {killed['told']} of {killed['others']} others"
        if killed["told"]:
            text += f" within {killed['seconds']:.1f} s"
        if "failed" in killed:
            text += f", not by {killed['failed']}"
        yield text
