"""Which models become pipelines, and whether these do what the models do: `python -m benchmarks.any_model LIST`.

Each model of a list goes through `torchgpipe.sequential`, and then through a `GPipe` of 1, 2 and 4 CPU partitions,
with two micro-batches of a batch of five, in each mode of checkpointing. Outputs, gradients of all parameters and all
buffers are compared with those of the model run on each micro-batch in turn. `--theirs` gives the same models to
PyTorch's own `pipeline()`.

The lists are `torchvision`, `transformers` and `timm`; the last two need `pip install transformers timm`. What was
found for a model is kept in results/any-model/, and is not looked for again without `--again`. In the end the
tables in docs/any-model.md are written anew.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.any_model_lists import LISTS, Case
from benchmarks.any_model_page import FOLDER, write
from benchmarks.any_model_theirs import theirs
from torchgpipe import GPipe, sequential
from torchgpipe.checkpoint import MODES
from torchgpipe.skip.skippable import skips_of
from torchgpipe.trace.layer import Layers
from torchgpipe.trace.parts import tensors_in

PARTITIONS = (1, 2, 4)
CHUNKS = 2
TOLERANCE = 1e-4
"""Of the largest value of a tensor: gradients of a tensor that is used several times are added in another order."""
ZERO = 1e-12
"""What is less is rounding around zero, such as the gradient of a bias that softmax takes out again."""

Outcome = dict[str, Tensor | None]


def main() -> None:
    """Check the models of a list, and keep what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.any_model", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("list", choices=LISTS)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these models of the list only")
    parser.add_argument("--again", action="store_true", help="also models that the record has")
    parser.add_argument("--theirs", action="store_true", help="PyTorch's pipeline(), instead of this library's")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    column = "theirs" if options.theirs else "ours"
    path = FOLDER / f"{options.list}-{column}.json"
    record = json.loads(path.read_text()) if path.exists() else {"list": options.list, "models": {}}
    record["versions"] = {name: version(name) for name in sorted({"torch", options.list})}
    models = LISTS[options.list]()
    record["of"] = len(models)
    for name, build in models.items():
        if (options.only and name not in options.only) or (name in record["models"] and not options.again):
            continue
        start = time.perf_counter()
        torch.manual_seed(0)
        try:
            found = theirs(build, TOLERANCE) if options.theirs else ours(build())
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:600]}
        seconds = time.perf_counter() - start
        record["models"][name] = {key: without_paths(said) for key, said in found.items()}
        print(f"{name}: {json.dumps(found)} ({seconds:.0f} s)", flush=True)
        _save(record, path)
        gc.collect()
    _save(record, path)
    write()


def _save(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def without_paths(said: Any) -> Any:
    """Return a message without the folder in which packages are on this machine."""
    return re.sub(r"/\S*/(site|dist)-packages/", "", said) if isinstance(said, str) else said


def ours(case: Case) -> dict[str, Any]:
    """Make a sequence of the model, and compare it in all configurations."""
    before = {name: x.clone() for name, x in case.module.state_dict().items()}
    random = torch.get_rng_state()
    start = time.perf_counter()
    layers = sequential(case.module, case.sample)
    found: dict[str, Any] = {"seconds": round(time.perf_counter() - start, 2)}
    after = case.module.state_dict()
    if not torch.equal(random, torch.get_rng_state()) or any(not torch.equal(x, after[k]) for k, x in before.items()):
        raise AssertionError("sequential has changed the model or the random numbers")
    found["layers"] = len(layers)
    found["skips"] = sum(len(skips_of(layer)[0]) for layer in layers)
    plain = outcome(case, case.module, split(case.sample))
    restore(case.module, before)
    for n in PARTITIONS:
        for mode in MODES:
            pipeline = GPipe(layers, balance(layers, n), devices=["cpu"] * n, chunks=CHUNKS, checkpoint=mode)
            if pipeline.state_dict().keys() != before.keys():
                raise AssertionError("the names of the state differ")
            found[f"{n} {mode}"] = compared(outcome(case, pipeline, [case.sample]), plain)
            restore(case.module, before)
    return found


def restore(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Give the buffers the values that they had; parameters have not changed."""
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in state:
                buffer.copy_(state[name])


def balance(layers: Layers, n: int) -> list[int]:
    """Return equal numbers of layers; where a model has fewer than partitions, one each."""
    n = min(n, len(layers))
    return [len(layers) * (j + 1) // n - len(layers) * j // n for j in range(n)]


def split(sample: Any) -> list[Any]:
    """Return the micro-batches of a sample."""
    if isinstance(sample, dict):
        columns = {name: x.chunk(CHUNKS) for name, x in sample.items()}
        return [{name: xs[i] for name, xs in columns.items()} for i in range(CHUNKS)]
    return [*sample.chunk(CHUNKS)]


def outcome(case: Case, model: nn.Module, samples: list[Any]) -> Outcome:
    """Run forward on each of the samples, then one backward; return outputs, gradients and buffers by name."""
    case.module.zero_grad()
    called = [model(**sample) if isinstance(sample, dict) else model(sample) for sample in samples]
    columns = zip(*([*tensors_in(result)] for result in called), strict=True)
    outputs = [torch.cat(column) for column in columns]
    total = sum(
        (y * torch.linspace(1, 2, y.numel(), dtype=y.dtype).view_as(y)).mean() for y in outputs if y.requires_grad
    )
    assert isinstance(total, Tensor)
    total.backward()
    found: Outcome = {f"output {k}": y.detach() for k, y in enumerate(outputs)}
    found |= {f"gradient of {name}": p.grad for name, p in case.module.named_parameters()}
    return found | {f"buffer {name}": b.clone() for name, b in case.module.named_buffers()}


def compared(ours: Outcome, plain: Outcome) -> str:
    """Return `equal`, or what differs first."""
    return next((f"{name}: {said}" for name, x in plain.items() if (said := difference(ours[name], x))), "equal")


def difference(y: Tensor | None, x: Tensor | None) -> str:
    """Return how `y` differs from `x`; nothing if it does not."""
    if x is None or y is None:
        return "" if x is y else f"{'missing' if y is None else 'there, but not in the model'}"
    if x.shape != y.shape:
        return f"shape {tuple(y.shape)} for {tuple(x.shape)}"
    if torch.equal(x, y):
        return ""
    most = (x.double() - y.double()).abs().max().item()
    largest = x.double().abs().max().item()
    return (
        "" if most <= TOLERANCE * largest + ZERO else f"differs by {most:.2g}, where the largest value is {largest:.2g}"
    )


if __name__ == "__main__":
    main()
