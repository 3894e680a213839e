"""Which models can become pipelines, and whether the pipelines compute the same.

    python -m benchmarks.any_model torchvision --json results/benchmarks/any_model.json

What is compared, and how, is in docs/any-model.md. Without `--again`, models that the record has already are skipped,
so a stopped run can be resumed.
"""

import gc
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from textwrap import wrap
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from benchmarks.any_model_lists import LISTS, Case
from benchmarks.harness import Found, by_case, cell, collect, command, continued, start
from benchmarks.pipelines import evenly
from reproduce.records.record import Record, Result, load
from reproduce.tables.layout import grid
from tests.behaviours.compare import differences
from torchgpipe import GPipe, sequential
from torchgpipe.tensors.checkpoint import MODES
from torchgpipe.trace.parts import tensors_in

PARTITIONS = (1, 2, 4)
CHUNKS = 2
TOLERANCE = 1e-4
"""Relative to the largest value of a tensor. A pipeline may add up gradients of a reused tensor in another order."""


class Unequal(Exception):
    """A pipeline does not compute the same as its model."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the models of a list, record the results, and print tables of the whole record."""
    parser = command("any_model", __doc__ or "")
    parser.add_argument("list", choices=LISTS)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these models of the list only")
    parser.add_argument("--again", action="store_true", help="also models that the record has")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    record = start(
        options, "any_model", "models that become pipelines", {}, devices=max(PARTITIONS)
    )
    record = replace(record, software={options.list: version(options.list)})
    if options.json is not None and options.json.exists():
        record = continued(record, load(options.json))
    models = LISTS[options.list]()
    there = by_case(record).get(options.list, {})
    missing = [Result(options.list, name, "not run") for name in models if name not in there]
    record = replace(record, results=[*record.results, *missing])
    todo = {
        name: models[name]
        for name in options.only or models
        if options.again or name not in there or there[name].status == "not run"
    }
    path = options.json if todo else None
    collect(record, path, check(options.list, todo), len(todo), table)


def check(experiment: str, models: Mapping[str, Callable[[], Case]]) -> Found:
    """Yield the result of each model."""
    for name, build in models.items():
        torch.manual_seed(0)
        try:
            yield [check_model(experiment, name, build())]
        except Exception as error:  # models and their pipelines may raise anything
            said = str(error) if isinstance(error, Unequal) else f"{type(error).__name__}: {error}"
            said = re.sub(
                r"/\S*/(site|dist)-packages/", "", said
            )  # the path of this machine's packages
            yield [Result(experiment, name, "failed", reason=said[:600])]
        gc.collect()


def check_model(experiment: str, name: str, case: Case) -> Result:
    """Compare the model's pipelines in all configurations with the model; if one differs, repeat in float64.

    Gradients that should be zero, such as of a bias before a norm, are rounding noise, which is small in float64.

    Raises:
        Unequal: it differs; the message says where.
    """
    try:
        return _check_model(experiment, name, case)
    except Unequal:
        sample = each(lambda x: x.double() if x.is_floating_point() else x, case.sample)
        found = _check_model(experiment, name, Case(case.module.double(), sample))
        return replace(found, config={**found.config, "dtype": "float64"})


def _check_model(experiment: str, name: str, case: Case) -> Result:
    before = {name: x.clone() for name, x in case.module.state_dict().items()}
    random = torch.get_rng_state()
    layers = sequential(case.module, case.sample)
    after = case.module.state_dict()
    if not torch.equal(random, torch.get_rng_state()) or any(
        not torch.equal(x, after[k]) for k, x in before.items()
    ):
        raise Unequal("sequential has changed the model or the random numbers")
    micro_batches = [each(lambda x, i=i: x.chunk(CHUNKS)[i], case.sample) for i in range(CHUNKS)]
    plain = outputs_and_gradients(case, case.module, micro_batches)
    case.module.load_state_dict(before)
    for n in PARTITIONS:
        for mode in MODES:
            balance = evenly(layers, min(n, len(layers)))
            pipeline = GPipe(
                layers, balance, devices=["cpu"] * len(balance), chunks=CHUNKS, checkpoint=mode
            )
            if pipeline.state_dict().keys() != before.keys():
                raise Unequal("the names of the state differ")
            if said := differences(
                outputs_and_gradients(case, pipeline, [case.sample]), plain, TOLERANCE
            ):
                raise Unequal(f"{n} partitions, {mode}: {said[0]}")
            case.module.load_state_dict(before)
    config: dict[str, Any] = {
        "partitions": list(PARTITIONS),
        "chunks": CHUNKS,
        "checkpoint": list(MODES),
    }
    return Result(experiment, name, "measured", config=config)


def each(does: Callable[..., Tensor], sample: Any) -> Any:
    """Apply a function to a sample's tensors."""
    return (
        {name: does(x) for name, x in sample.items()} if isinstance(sample, dict) else does(sample)
    )


def outputs_and_gradients(
    case: Case, model: nn.Module, samples: list[Any]
) -> dict[str, Tensor | None]:
    """Run forward on each sample, then one backward; return outputs, gradients and buffers by name."""
    case.module.zero_grad()
    called = [model(**sample) if isinstance(sample, dict) else model(sample) for sample in samples]
    columns = zip(*([*tensors_in(result)] for result in called), strict=True)
    outputs = [torch.cat(column) for column in columns]
    total = sum(
        (y * torch.linspace(1, 2, y.numel(), dtype=y.dtype).view_as(y)).mean()
        for y in outputs
        if y.requires_grad
    )
    assert isinstance(total, Tensor)
    total.backward()
    found: dict[str, Tensor | None] = {f"output {k}": y.detach() for k, y in enumerate(outputs)}
    found |= {f"gradient of {name}": p.grad for name, p in case.module.named_parameters()}
    return found | {f"buffer {name}": b.clone() for name, b in case.module.named_buffers()}


def table(record: Record, style: str = "simple") -> str:
    """Render a count of equal models in each list, their names, and the results of the others."""
    cases = by_case(record)
    summary, lists = [], []
    for name in LISTS:
        if not (models := cases.get(name, {})):
            continue
        statuses = [result.status for result in models.values()]
        counts = [str(statuses.count(status)) for status in ("measured", "failed")]
        summary.append([name, str((record.software or {})[name]), str(len(models)), *counts])
        ends = {model: _said(models[model]) for model in sorted(models)}
        equal = ", ".join(model for model, said in ends.items() if said == "equal")
        lists.append("\n".join(wrap(f"Equal, of {name}: {equal or 'none'}.", 160)))
        if others := [[model, said] for model, said in ends.items() if said != "equal"]:
            lists.append(grid(["other models", "result"], others, style))
    return "\n\n".join(
        [
            grid(["list", "version", "models", "equal", "refused or not equal"], summary, style),
            *lists,
        ]
    )


def _said(result: Result) -> str:
    """Return the result of a model's check, in about 100 characters."""
    equal = f"equal, {result.config['dtype']}" if "dtype" in result.config else "equal"
    return {"not run": "not run", "measured": equal}.get(result.status) or cell(result.reason)


if __name__ == "__main__":
    main()
