"""Train several replicas of a pipeline; comments show the lines of a DDP script that change.

    torchrun --local-addr 127.0.0.1 --nproc-per-node 4 examples/data_parallel.py state

Each replica is a pipeline over two ranks, so four ranks train two replicas. A comment that begins
with "Before:" quotes a script for `DistributedDataParallel` (DDP). The lines below the comment
replace the quoted lines. Each rank has only some of the layers. So all ranks together save one
checkpoint, in the folder `state`.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# Before: from torch.nn.parallel import DistributedDataParallel
from torchgpipe.distributed import DistributedGPipe

STAGES = 2  # the ranks of one replica
EPOCHS = 3
BATCH = 16  # samples in a mini-batch of all replicas together


def build() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(8, 1))


def build_data() -> TensorDataset:
    x = torch.randn(128, 8)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


dist.init_process_group("gloo")
torch.manual_seed(0)  # All ranks make the same model. Then each keeps only its own layers.
layers, data = build(), build_data()

shape = dist.get_world_size() // STAGES, STAGES
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "stage"))
replicas = mesh["replica"]

# Before: model = DistributedDataParallel(layers)
model = DistributedGPipe(layers, balance=[2, 2], mesh=mesh["stage"], chunks=4, schedule="1F1B")
replicate(model, device_mesh=replicas)

# Before: sampler = DistributedSampler(data)
sampler = DistributedSampler(data, num_replicas=replicas.size(), rank=replicas.get_local_rank())
loader = DataLoader(data, BATCH // replicas.size(), sampler=sampler)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, target in loader:
        optimizer.zero_grad()
        # Before: loss = mse_loss(model(x), target); loss.backward()
        loss = model.step(mse_loss, x, target)
        # Before: clip_grad_norm_(model.parameters(), 1.0)
        model.clip_grad_norm_(1.0)
        optimizer.step()
    dist.all_reduce(loss, group=replicas.get_group())
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item() / replicas.size()}")

# Before: if dist.get_rank() == 0: torch.save({"model": layers.state_dict(), …}, file)
options = StateDictOptions(flatten_optimizer_state_dict=True)
model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=sys.argv[1])
dist.destroy_process_group()
