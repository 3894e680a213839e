"""Train a model of Hugging Face on sentences of many lengths, in one process or over ranks.

    pip install '.[huggingface]'
    python examples/hugging_face.py
    torchrun --local-addr 127.0.0.1 --nproc-per-node 2 examples/hugging_face.py

Without a pipeline, the loss is `module(**inputs, labels=labels).loss`. With a pipeline, a criterion
(`loss_of`) computes the loss of each micro-batch, by the model's own loss function. This loss is a
mean over all labels that are not padding. Their number differs between micro-batches. So the
argument `weight` of `step` is a function that counts these labels. The model has random weights; to
load trained weights, call `from_pretrained`. Llama does not need the `attention_mask`, because the
padding is on the right. The section "Attention without a mask" of the guide (docs/guide.md) says
how to leave the mask out.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.export import Dim
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, LlamaConfig

from torchgpipe import GPipe, sequential
from torchgpipe.balance import balance_by_size
from torchgpipe.distributed import DistributedGPipe

SIZES = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64}
LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 4, "tie_word_embeddings": True}


def padded(sentences: list[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Return a mini-batch: the model's arguments, and the labels, which are -100 for padding."""
    tokens = pad_sequence(sentences, batch_first=True)
    labels = pad_sequence(sentences, batch_first=True, padding_value=-100)
    return {"input_ids": tokens, "attention_mask": (labels != -100).long()}, labels


def loss_of(output: dict[str, Tensor], labels: Tensor) -> Tensor:
    return module.loss_function(output["logits"], labels, module.config.vocab_size)


def count(labels: Tensor) -> Tensor:
    return (labels[:, 1:] != -100).sum()  # the model predicts every token but the first


ranks = "RANK" in os.environ  # torchrun sets RANK
if ranks:
    dist.init_process_group("gloo")
n = dist.get_world_size() if ranks else 2
torch.manual_seed(0)  # All ranks make the same model. Then each keeps only its own layers.
config = LlamaConfig(**SIZES, **LAYERS, use_cache=False)
module = AutoModelForCausalLM.from_config(config)

counting = torch.arange(1, 64)
batches = []
for _ in range(5):
    lengths = torch.randint(5, 60, (16,)).tolist()
    batches.append(padded([counting[:length] for length in lengths]))

sample, labels = batches[0]
length = Dim("length", min=2, max=64)  # each mini-batch has another length
dynamic_shapes = {"input_ids": {1: length}, "attention_mask": {1: length}}
layers = sequential(module, sample, dynamic_shapes=dynamic_shapes)
balance = balance_by_size(n, layers, sample, chunks=4)
if ranks:
    model = DistributedGPipe(layers, balance, chunks=4, schedule="1F1B")
else:
    model = GPipe(layers, balance, devices=["cpu"] * n, chunks=4, schedule="1F1B")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step, (inputs, labels) in enumerate(batches):
    loss = model.step(loss_of, inputs, labels, weight=count)  # the same on all ranks
    optimizer.step()
    optimizer.zero_grad()
    if model.rank == 0:
        print(f"step {step}: loss {loss.item()}")
if ranks:
    dist.destroy_process_group()
