"""Train only small adapters (LoRA, arXiv:2106.09685) of a GPT, in one process or over ranks.

    python examples/lora.py adapters
    torchrun --local-addr 127.0.0.1 --nproc-per-node 2 examples/lora.py adapters

The weights of the GPT are frozen. Each rank saves only the adapters of its own layers, in the files
`adapters-0`, `adapters-1` and so on. To use the adapters in a GPT without a pipeline, call
`add_adapters(module)`, and load each file by `module.load_state_dict(torch.load(file),
strict=False)`.
"""

import os
import sys

import torch
import torch.distributed as dist
from gpt_model import GPT, Block
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torchgpipe import GPipe, sequential
from torchgpipe.balance import balance_by_size
from torchgpipe.distributed import DistributedGPipe


class LoRA(nn.Module):
    """A linear layer whose weight is frozen, plus a product of two small matrices."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # so the adapter begins without an effect

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


def add_adapters(module: nn.Module) -> None:
    """Freeze all parameters, and add an adapter to both linear layers of each attention."""
    module.requires_grad_(False)
    for block in module.blocks:
        block.query_key_value = LoRA(block.query_key_value)
        block.projection = LoRA(block.projection)


def loss_of(scores: Tensor, next_tokens: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), next_tokens.flatten())


ranks = "RANK" in os.environ  # torchrun sets RANK
if ranks:
    dist.init_process_group("gloo")
n = dist.get_world_size() if ranks else 2
torch.manual_seed(0)  # All ranks make the same model. Then each keeps only its own layers.
module = GPT(words=50, length=16)  # stands for a model that is already trained
add_adapters(module)
texts = torch.randint(50, (32, 1)).repeat(1, 17)  # each repeats one word

layers = sequential(module, texts[:2, :-1], whole=[Block])
balance = balance_by_size(n, layers, texts[:, :-1], chunks=4)
if ranks:
    model = DistributedGPipe(layers, balance, chunks=4)
else:
    model = GPipe(layers, balance, devices=["cpu"] * n, chunks=4)
adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
optimizer = torch.optim.AdamW(adapters.values(), lr=0.01)
for step in range(10):
    loss = model.step(loss_of, texts[:, :-1], texts[:, 1:])
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if model.rank == 0:
        print(f"step {step}: loss {loss.item()}")
torch.save(adapters, f"{sys.argv[1]}-{model.rank}")
if ranks:
    dist.destroy_process_group()
