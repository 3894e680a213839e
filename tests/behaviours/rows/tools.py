"""PyTorch's tools around a training: each works with a pipeline as without one, or is refused.

docs/works-with.md shows these rows with their notes. What is done is in examples/works_with.py, where users see it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize

from examples import works_with as do

from ...plain import Plain, piped
from ...ranks import current
from ..compare import REORDERED
from ..parts.layers import Do, checkpointed, linear, made
from ..row import Row, steps


class Block(nn.Module):
    """A layer with something inside that tools change; other processes find its class by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


def layers(change: Callable[[Any], object] = id) -> nn.Sequential:
    """Return the model, with something done to it before it becomes a pipeline."""
    made = nn.Sequential(nn.Linear(6, 8), Block(), Block(), nn.Linear(8, 3))
    change(made)
    return made


def batches(rank: int = 0) -> do.Batches:
    """Return three mini-batches of a rank's own. Of four micro-batches, the last one is smaller."""
    return [(torch.randn(10, 6), torch.randn(10, 3)) for _ in range(3 * rank + 3)][-3:]


graphs: list[object] = []


def backend(graph: Any, inputs: object) -> Any:
    """Note what is compiled, and leave it as it is."""
    graphs.append(graph)
    return graph


def train_compiled(run: nn.Module, batches: do.Batches, compiled: bool) -> Any:
    """Workers that compile a layer at once may do so more than once."""
    graphs.clear()
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        losses = do.train(run, batches)
    assert bool(graphs) == compiled
    return losses


def compile_model(run: nn.Module, batches: do.Batches) -> Any:
    model: Any = torch.compile(run, backend=backend)
    return train_compiled(model, batches, compiled=isinstance(run, Plain))


def compile_each(layers: Any) -> None:
    for name, layer in layers.named_children():
        layers._modules[name] = torch.compile(layer, backend=backend)


def then(change: Callable[[Any], object]) -> Callable[[Any, do.Batches], Any]:
    """Train, change the pipeline, and train it on."""

    def use(run: Any, batches: do.Batches) -> Any:
        losses = do.train(run, batches)
        run.zero_grad()
        change(run)
        return losses, do.train(run, batches)

    return use


def adapted(base: nn.Linear) -> nn.Module:
    """Return the layer, frozen, with an adapter beside it (LoRA)."""
    down, up = (
        nn.Linear(base.in_features, 2, bias=False),
        nn.Linear(2, base.out_features, bias=False),
    )
    return Do(
        lambda self, x: self.base(x) + self.up(self.down(x)),
        base=base.requires_grad_(False),
        down=down,
        up=up,
    )


def adapt(layers: Any) -> None:
    layers.requires_grad_(False)
    layers[1].linear = adapted(layers[1].linear)


def save_for_another_balance(run: Any, batches: do.Batches) -> nn.Module:
    other = Plain(layers(), chunks=4) if isinstance(run, Plain) else piped(layers(), [1, 3], 4)
    do.checkpoint_files(run, other, batches)
    return other


def from_meta(run: nn.Module, batches: do.Batches) -> list[float]:
    run.load_state_dict(layers().state_dict())
    return do.train(run, batches)


def assign(layers: nn.Module) -> None:
    weights = layers.state_dict()
    layers.to("meta").load_state_dict(weights, assign=True)


def put_either(layers: Any) -> None:
    """Put a layer in that uses one half of its parameters, and the other half when it is told so."""
    branches = nn.ModuleList([Block(), Block()])
    layers[1] = Do(lambda self, x: self.branches[self.taken](x), branches=branches, taken=0)


def cached_parametrizations(run: nn.Module, batches: do.Batches) -> None:
    x, target = batches[0]
    with parametrize.cached():
        loss = mse_loss(run(x), target)
    loss.backward()


def gradient_penalty(run: nn.Module, batches: do.Batches) -> None:
    for x, target in batches:
        x.requires_grad_()
        loss = mse_loss(run(x), target)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()


def transforms(run: nn.Module, batches: do.Batches) -> Any:
    parameters = {name: p.detach() for name, p in run.named_parameters()}
    inputs = torch.stack([x for x, _ in batches])
    gradients = torch.func.grad(lambda p: functional_call(run, p, (inputs[0],)).square().mean())(
        parameters
    )
    return gradients, torch.func.vmap(run)(inputs)


def forward_mode(run: nn.Module, batches: do.Batches) -> Any:
    with forward_ad.dual_level():
        parameters = {
            name: forward_ad.make_dual(p, torch.ones_like(p)) for name, p in run.named_parameters()
        }
        return forward_ad.unpack_dual(functional_call(run, parameters, (batches[0][0],)))


def tool(
    name: str, use: Callable[[Any, Any], Any] = do.train, note: str = "", **options: Any
) -> Row:
    """Return a row of the usual model, whose batches have a smaller last micro-batch."""
    given: dict[str, Any] = {"layers": layers, "given": batches, "balance": (2, 2), "chunks": 4}
    return Row(name, use=use, note=note, **given | options)


def changed(name: str, change: Callable[[Any], object], note: str = "", **options: Any) -> Row:
    """Return a row in which something is done to the layers before they become a pipeline."""
    return tool(name, note=note, layers=partial(layers, change), **options)


def replicated(
    name: str,
    use: Callable[[Any, Any], Any] = do.train,
    note: str = "",
    change: Callable[[Any], object] = id,
    **options: Any,
) -> Row:
    """Return a row of `DistributedDataParallel` over two ranks, each with mini-batches of its own."""

    def wrapped(run: Any, batches: Any) -> Any:
        return use(DistributedDataParallel(run, **options), batches)

    return changed(name, change, note, use=wrapped, given=of_this_rank)


def of_this_rank() -> do.Batches:
    return batches(current().index)


def past_replicas(run: nn.Module, batches: do.Batches) -> None:
    replicas = DistributedDataParallel(run)
    do.steps(replicas.module, batches)


def shard(layers: nn.Sequential) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)


class Synchronized(nn.Module):
    """A norm that subtracts the mean over samples and processes."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        return x - mean / dist.get_world_size()


def synchronize(layers: Any) -> None:
    layers[1] = Synchronized()


class TwoLinears(nn.Module):
    """Two linear layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.narrow(self.wide(x).tanh())
        return y


def parallelize(layers: Any) -> None:
    mesh = init_device_mesh("cpu", (2,))
    layers[1], layers[2] = TwoLinears(), TwoLinears()
    for layer in layers[1:3]:
        parallelize_module(layer, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})


def but_graph_never(message: str) -> dict[str, str]:
    """Refuse it wherever tasks have graphs of their own."""
    return dict.fromkeys(("workers", "ranks", "always", "except_last"), message)


# Tests over ranks go backward by `autograd.grad` on each of them (../../everywhere.py).
ALONE: dict[str, Any] = {
    "without": {"ranks": "it needs one process with the whole model, and its backward"}
}

ROWS = [
    tool(
        "`autocast`, `GradScaler` and clipping",
        do.mixed_precision,
        "Autocast keeps no copies of weights between micro-batches: their gradients are summed in full precision.",
    ),
    tool(
        "hooks of parameters",
        do.hooks_of_parameters,
        "Once a step, with the mini-batch's gradient.",
        **ALONE,
    ),
    tool(
        "an optimizer in backward",
        do.optimizer_in_backward,
        "By `register_post_accumulate_grad_hook`.",
    ),
    tool(
        "hooks of layers and of the model",
        do.hooks_of_layers,
        "A layer's run once per micro-batch, the model's once a step. A layer's forward hooks run again when it is "
        "recomputed.",
        **ALONE,
    ),
    tool(
        "an average of the weights",
        do.average_of_weights,
        "`AveragedModel` holds another pipeline.",
        **ALONE,
    ),
    tool(
        "`save_on_cpu` and other `saved_tensors_hooks`",
        do.activations_on_the_host,
        "They do not reach what is recomputed, and with workers only the last partition.",
    ),
    Row(
        "`torch.utils.checkpoint` inside a layer",
        made(linear, partial(checkpointed, False), partial(checkpointed, True)),
        use=steps,
        note="Reentrant or not.",
        **ALONE,
    ),
    changed(
        "`torch.compile` of the layers",
        lambda layers: [layer.compile(backend=backend) for layer in layers],
        "Each layer is compiled twice, as a first pass takes no gradients. A compiled batch norm in training "
        'cannot be recomputed, which is refused: use `checkpoint="never"`.',
        use=partial(train_compiled, compiled=True),
    ),
    changed(
        "`torch.compile(layer)` in the place of a layer",
        compile_each,
        "As `layer.compile()`; names of state get `_orig_mod`, as without a pipeline.",
        use=partial(train_compiled, compiled=True),
    ),
    tool(
        "`torch.compile(model)`", compile_model, "It compiles nothing: compile the layers.", **ALONE
    ),
    tool(
        "`torch.jit.trace(model, x)`",
        do.traced,
        "Trace the layers, `model[:]`.",
        refused={
            "": r"cannot be traced or exported; (trace .* model\[:\]|load the states of all ranks)"
        },
    ),
    tool(
        "`torch.export.export(model, (x,))`",
        do.exported,
        "Export the layers, `model[:]`.",
        refused={"": r"cannot be traced or exported; trace or export its layers, model\[:\]"},
        **ALONE,
    ),
    tool(
        "`torch.jit.trace` and `torch.export` of `model[:]`",
        do.layers_alone,
        "The layers run as one mini-batch.",
        **ALONE,
    ),
    changed("adapters (LoRA), added before wrapping", adapt, "Weights may be frozen."),
    tool("adapters (LoRA), added after wrapping", then(adapt), "Inside of layers."),
    tool(
        "a whole layer replaced after wrapping",
        then(lambda run: setattr(run, "3", adapted(run[3]))),
        "Change the layers first, then wrap them.",
        refused={"": "a layer or partition was replaced after the pipeline was made"},
        **ALONE,
    ),
    changed(
        "`weight_norm` and other parametrizations",
        lambda layers: parametrizations.weight_norm(layers[0]),
        "Also when added after wrapping.",
        use=then(lambda run: parametrizations.weight_norm(run[3])),
    ),
    # The layer uses its weight twice, and a task adds up these two gradients first.
    changed(
        "`spectral_norm`",
        lambda layers: parametrizations.spectral_norm(layers[0]),
        "One step of its power iteration per micro-batch, none in recomputation.",
        tolerance=REORDERED,
    ),
    changed(
        "`parametrize.cached()`",
        lambda layers: parametrizations.weight_norm(layers[0]),
        "It keeps one weight for all micro-batches, but each needs a graph of its own. Works under `no_grad()`.",
        use=cached_parametrizations,
        refused=but_graph_never(r"parametrize\.cached"),
    ),
    tool(
        "`torch.func.functional_call`",
        do.other_parameters,
        "With other parameters for the whole model.",
        **ALONE,
    ),
    tool(
        "a gradient penalty (`create_graph=True`)",
        gradient_penalty,
        "The backward of a pipeline cannot be differentiated again.",
        refused=but_graph_never("create_graph=True"),
    ),
    tool(
        "`torch.func.grad`, `torch.func.vmap`",
        transforms,
        "Transforms do not reach the tasks of a pipeline.",
        refused=but_graph_never(r"torch\.func transforms"),
        **ALONE,
    ),
    tool(
        "forward-mode gradients",
        forward_mode,
        "They do not reach the tasks of a pipeline.",
        refused=but_graph_never("forward-mode gradients"),
        **ALONE,
    ),
    tool(
        "`torch.distributed.checkpoint`",
        save_for_another_balance,
        "By `get_state_dict` and `set_state_dict`, also into another balance.",
        **ALONE,
    ),
    changed(
        "from `meta` by `to_empty`",
        lambda layers: layers.to("meta").to_empty(device="cpu"),
        "Then load the weights, before wrapping or after.",
        use=from_meta,
        **ALONE,
    ),
    changed(
        "from `meta` by `load_state_dict(assign=True)`",
        assign,
        "Before wrapping or after. Make the optimizer last: parameters are other objects then.",
        use=then(lambda run: run.load_state_dict(layers().state_dict(), assign=True)),
        **ALONE,
    ),
    tool("a forked process", do.forked_process, "It has workers of its own.", **ALONE),
    tool("a spawned process", do.spawned_process, "The pipeline may be an argument.", **ALONE),
    tool(
        "the profiler",
        do.profiler,
        "It records the calling thread. For workers set `experimental_config=_ExperimentalConfig("
        "profile_all_threads=True)` of `torch._C._profiler`. `FlopCounterMode` has no such setting: use "
        '`engine="graph"`.',
        **ALONE,
    ),
]

REPLICAS = [
    replicated("`DistributedDataParallel`", note="Gradients are averaged once a step."),
    replicated(
        "`DistributedDataParallel(static_graph=True)`",
        lambda run, given: do.train(run, given + given),
        "As without a pipeline.",
        static_graph=True,
    ),
    replicated(
        "`DistributedDataParallel(find_unused_parameters=True)`",
        then(lambda run: setattr(run.module[1], "taken", 1)),
        "A checkpointed partition counts as using all of its parameters, so there may be a warning that none "
        "is unused.",
        change=put_either,
        find_unused_parameters=True,
    ),
    replicated(
        "`DistributedDataParallel`, accumulating with `no_sync`",
        do.no_sync,
        "As without a pipeline.",
    ),
    tool(
        "`ddp.module.step(…)` within `DistributedDataParallel`",
        past_replicas,
        "It would average nothing: use one of the two below.",
        given=of_this_rank,
        refused={"": "DistributedDataParallel around a pipeline does not see step"},
    ),
    tool(
        "`DistributedDataParallel` of a module that returns `model.loss(…)`",
        do.loss_in_replicas,
        "Gradients are averaged once a step.",
        given=of_this_rank,
    ),
    # A step adds up the micro-batches' shares of the mean; plain layers take one mean.
    tool(
        "`replicate`, and `model.step(…)`",
        do.steps_in_replicas,
        "Of `torch.distributed._composable.replicate`. Gradients are averaged once a step.",
        given=of_this_rank,
        tolerance=REORDERED,
    ),
    # Gradients of micro-batches are averaged over ranks one by one.
    changed(
        "FSDP2: `fully_shard` of the layers",
        shard,
        "Each micro-batch gathers weights and reduces gradients. Ranks have to do so in one order, but workers run "
        "at once.",
        given=of_this_rank,
        tolerance=REORDERED,
        refused={"workers": "layers that FSDP shards"},
    ),
    changed(
        "tensor parallelism: `parallelize_module` of the layers",
        parallelize,
        "Also on ranks, over a mesh with a dimension for each. Clip by the pipeline's "
        "`clip_grad_norm_`, which takes DTensors and plain gradients together.",
        refused={"workers": "calls a collective"},
    ),
    changed(
        "collectives in layers, as in synchronized norms",
        synchronize,
        "Also on ranks. Workers refuse those of each partition's first micro-batch before they "
        "are called. Those that only a later one calls, or only backward, are not found. A "
        "criterion's are right.",
        given=of_this_rank,
        refused={"workers": "calls a collective"},
    ),
]
