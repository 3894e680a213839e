"""Check which models can become pipelines, and whether the pipelines compute the same results.

    python -m benchmarks.any_model torchvision --out results/benchmarks/any_model.json

docs/any-model.md says which results of a model and its pipelines are compared, and how. A stopped
run can be resumed: the program skips each model whose result is already in the record file, unless
the option `--again` is given.
"""

import copy
import gc
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from textwrap import wrap
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import Module

from benchmarks.any_model_lists import LISTS, Case
from benchmarks.harness import Found, by_case, cell, collect, command, continued, in_format, start
from benchmarks.pipelines import evenly
from reproduce.models.built import changed
from reproduce.records.record import Record, Result, load
from reproduce.tables.layout import grid
from tests.behaviours.compare import differences
from torchgpipe import GPipe, sequential
from torchgpipe.tensors.checkpoint import MODES
from torchgpipe.trace.parts import tensors_in

PARTITIONS = (1, 2, 4)
CHUNKS = 2
TOLERANCE = 1e-4
"""The tolerance relative to the largest value of a tensor.

A pipeline may add up the gradients of a reused tensor in another order.
"""

Named = dict[str, Tensor | None]


class Unequal(Exception):
    """The error for a pipeline whose results differ from its model's. Its message says where."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the models of one list, record the results, and print tables of all recorded results.

    A list has the models of one package, such as torchvision.
    """
    parser = command("any_model", __doc__ or "", seed=0)
    parser.add_argument("list", choices=LISTS)
    parser.add_argument("--model", nargs="+", metavar="NAME", help="these models of the list only")
    parser.add_argument("--again", action="store_true", help="also models that the record has")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    title = "models that become pipelines"
    record = start(options, "any_model", title, {}, devices=max(PARTITIONS))
    listed = options.list
    record = replace(record, software={listed: version(listed)})
    path = options.out
    if path is not None and path.exists():
        record = continued(record, load(path))

    models = LISTS[listed]()
    for name in options.model or ():
        if name not in models:
            parser.error(f"--model {name}: unknown; choose from {', '.join(models)}")
    known = by_case(record).get(listed, {})
    missing = [Result(listed, name, "not run") for name in models if name not in known]
    record = replace(record, results=[*record.results, *missing])

    todo = {}
    for name in options.model or models:
        if options.again or name not in known or known[name].status == "not run":
            todo[name] = models[name]
    if not todo:
        path = None
    found = check(listed, todo, options.seed)
    shown = in_format(options.format, table)
    collect(record, path, found, len(todo), shown)


def check(experiment: str, models: Mapping[str, Callable[[], Case]], seed: int) -> Found:
    """Check one model after another; yield, for each model, a list with its result.

    Before a model's random weights and its batch are made, PyTorch is seeded with `seed`.
    """
    for name, build in models.items():
        torch.manual_seed(seed)
        try:
            yield [check_model(experiment, name, build())]
        except Exception as error:  # models and their pipelines may raise anything
            reason = str(error)
            if not isinstance(error, Unequal):
                reason = f"{type(error).__name__}: {reason}"
            # A record must not contain the folder in which this machine's packages are installed.
            reason = re.sub(r"/\S*/(site|dist)-packages/", "", reason)
            yield [Result(experiment, name, "failed", reason=reason[:600])]
        gc.collect()


def check_model(experiment: str, name: str, case: Case) -> Result:
    """Compare a model with its pipelines, one for each number of partitions and checkpoint mode.

    If a pipeline's results differ from the model's, the comparison is repeated in float64, because
    the difference can be rounding noise. For example, the gradient of a bias before a norm is zero
    in theory, so its computed value is only noise. In float64, this noise is smaller than the
    tolerance.

    Raises:
        Unequal: If results differ in float64, too, or if `sequential` has changed the model. The
            message says what differs.
    """
    try:
        return _check_model(experiment, name, case)
    except Unequal:
        sample = changed(_double, case.sample)
        found = _check_model(experiment, name, Case(case.module.double(), sample))
        return replace(found, config={**found.config, "dtype": "float64"})


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _chunk(i: int, x: Tensor) -> Tensor:
    return x.chunk(CHUNKS)[i]


def _check_model(experiment: str, name: str, case: Case) -> Result:
    module, sample = case
    before = copy.deepcopy(module.state_dict())  # with the versions of the modules' classes
    random = torch.get_rng_state()
    layers = sequential(module, sample)
    equal = torch.equal(random, torch.get_rng_state())
    after = module.state_dict()
    for key, x in before.items():
        equal = equal and torch.equal(x, after[key])
    if not equal:
        raise Unequal("sequential has changed the model or the random numbers")

    micro_batches = [changed(partial(_chunk, i), sample) for i in range(CHUNKS)]
    plain = outputs_and_gradients(case, module, micro_batches)
    module.load_state_dict(before)
    for n in PARTITIONS:
        for mode in MODES:
            balance = evenly(layers, min(n, len(layers)))
            devices = ["cpu"] * len(balance)
            pipeline = GPipe(layers, balance, devices=devices, chunks=CHUNKS, checkpoint=mode)
            if pipeline.state_dict().keys() != before.keys():
                raise Unequal("the names of the state differ")
            piped = outputs_and_gradients(case, pipeline, [sample])
            if lines := differences(piped, plain, TOLERANCE):
                raise Unequal(f"{n} partitions, {mode}: {lines[0]}")
            module.load_state_dict(before)
    config: dict[str, Any] = {
        "partitions": list(PARTITIONS),
        "chunks": CHUNKS,
        "checkpoint": list(MODES),
    }
    return Result(experiment, name, "measured", config=config)


def outputs_and_gradients(case: Case, model: Module, samples: list[Any]) -> Named:
    """Run a model on each input in `samples`, then run one backward through all outputs.

    Return a dictionary with the outputs, the parameters' gradients and the buffers. Each key says
    what the tensor is, for example "gradient of 0.weight".
    """
    case.module.zero_grad()
    results = []
    for sample in samples:
        result = model(**sample) if isinstance(sample, dict) else model(sample)
        results.append(list(tensors_in(result)))
    outputs = [torch.cat(column) for column in zip(*results, strict=True)]

    total: Tensor | None = None
    for y in outputs:
        if y.requires_grad:
            weights = torch.linspace(1, 2, y.numel(), dtype=y.dtype).view_as(y)
            mean = (y * weights).mean()
            total = mean if total is None else total + mean
    assert total is not None
    total.backward()

    found: Named = {}
    for k, y in enumerate(outputs):
        found[f"output {k}"] = y.detach()
    for name, p in case.module.named_parameters():
        found[f"gradient of {name}"] = p.grad
    for name, b in case.module.named_buffers():
        found[f"buffer {name}"] = b.clone()
    return found


def table(record: Record, style: str = "simple") -> str:
    """Render tables of all checked models.

    The first table counts the results for each list of models (such as `torchvision`). Then, for
    each list, come the names of the models whose pipelines gave equal results, and a table with
    the results of all other models.
    """
    cases = by_case(record)
    summary, lists = [], []
    for name in LISTS:
        models = cases.get(name)
        if not models:
            continue
        statuses = [result.status for result in models.values()]
        measured, failed = statuses.count("measured"), statuses.count("failed")
        software = (record.software or {})[name]
        summary.append([name, str(software), str(len(models)), str(measured), str(failed)])
        equal, others = [], []
        for model in sorted(models):
            said = _said(models[model])
            if said == "equal":
                equal.append(model)
            else:
                others.append([model, said])
        names = ", ".join(equal) or "none"
        lists.append("\n".join(wrap(f"Models of {name} with equal results: {names}.", 160)))
        if others:
            lists.append(grid(["other models", "result"], others, style))
    heads = ["list", "version", "models", "equal", "refused or not equal"]
    return "\n\n".join([grid(heads, summary, style), *lists])


def _said(result: Result) -> str:
    """Return the text for a model's result in a table, such as "equal" or an error message."""
    if result.status == "not run":
        return "not run"
    if result.status == "measured":
        dtype = result.config.get("dtype")
        return "equal" if dtype is None else f"equal, {dtype}"
    return cell(result.reason)


if __name__ == "__main__":
    main()
