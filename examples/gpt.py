"""Train a GPT with tied weights, in one process or over ranks; a complete training script.

    python examples/gpt.py states
    torchrun --local-addr 127.0.0.1 --nproc-per-node 2 examples/gpt.py states

The script has a data loader, autocast to bfloat16, accumulated gradients, gradient clipping, a
cosine schedule of the learning rate, and the pipeline schedule 1F1B. After each epoch, it saves the
state of the training in the folder `states`. If the script is started again, it continues from the
last saved epoch, even with another number of ranks.
"""

import os
import sys

import torch
import torch.distributed as dist
from gpt_model import GPT, Block
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler

from torchgpipe import GPipe, sequential
from torchgpipe.balance import balance_by_size
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.saves import Saves

TEXTS, WORDS, LENGTH = 200, 50, 16
EPOCHS = 4
ACCUMULATE = 2  # mini-batches for each step of the optimizer
CHUNKS = 4  # micro-batches of each mini-batch


def loss_of(scores: Tensor, next_tokens: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), next_tokens.flatten()) / ACCUMULATE


ranks = "RANK" in os.environ  # torchrun sets RANK
if ranks:
    dist.init_process_group("gloo")
n = dist.get_world_size() if ranks else 2

# Each text counts upwards: 0, 1, 2, …; 1, 2, 3, …; and so on.
texts = (torch.arange(TEXTS)[:, None] + torch.arange(LENGTH + 1)) % WORDS
# The ranks of a pipeline need the same mini-batches. So all of them are rank 0 of one replica.
sampler = DistributedSampler(texts, num_replicas=1, rank=0)
loader = DataLoader(texts, batch_size=20, sampler=sampler)

torch.manual_seed(0)  # All ranks make the same model. Then each keeps only its own layers.
sample = texts[:8, :-1]
layers = sequential(GPT(WORDS, LENGTH), sample, whole=[Block])
balance = balance_by_size(n, layers, sample)
if ranks:
    model = DistributedGPipe(layers, balance, chunks=CHUNKS, schedule="1F1B")
else:
    model = GPipe(layers, balance, devices=["cpu"] * n, chunks=CHUNKS, schedule="1F1B")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
cosine = CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader) // ACCUMULATE)

saves = Saves(sys.argv[1])
found = saves.load(model, optimizer)  # None if nothing has been saved
if found:
    cosine.load_state_dict(found["cosine"])
for epoch in range(found["step"] + 1 if found else 0, EPOCHS):
    sampler.set_epoch(epoch)  # so each epoch has another order
    for number, batch in enumerate(loader, 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.step(loss_of, batch[:, :-1], batch[:, 1:])
        if number % ACCUMULATE == 0:
            model.clip_grad_norm_(1.0)  # by the norm over all ranks
            optimizer.step()
            optimizer.zero_grad()
            cosine.step()
    saves.save(epoch, model, optimizer, cosine=cosine.state_dict())
    if model.rank == 0:
        print(f"epoch {epoch}: loss {loss.item() * ACCUMULATE}")
if ranks:
    dist.destroy_process_group()
