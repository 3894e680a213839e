"""Test models that compute their own loss: an error says how `step` computes it, and that works."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe, sequential
from torchgpipe.schedules.named import NAMED
from torchgpipe.trace import Untraceable

from ..plain import TWICE, piped
from .compare import REORDERED, differences

WORDS = 9


class WithLoss(nn.Module):
    """A language model that also computes its loss in forward, as Hugging Face's models do."""

    class config:
        vocab_size = WORDS

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS)
        self.between = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def loss_function(self, logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
        scores, expected = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].flatten()
        return nn.functional.cross_entropy(scores, expected, ignore_index=-100)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self.between(self.embedding(input_ids)))
        if labels is None:
            return {"logits": logits}
        loss = self.loss_function(logits, labels, self.config.vocab_size)
        return {"loss": loss, "logits": logits}


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=8,
        n_head=2,
        n_positions=16,
        vocab_size=WORDS,
        bos_token_id=0,
        eos_token_id=0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def t5() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=2,
        num_heads=2,
        vocab_size=WORDS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model: nn.Module = transformers.AutoModelForSeq2SeqLM.from_config(config)
    model.config.use_cache = model.decoder.config.use_cache = False  # type: ignore[union-attr]
    return model


def bart() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BartConfig(
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        vocab_size=WORDS,
        max_position_embeddings=16,
        dropout=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
    model: nn.Module = transformers.AutoModelForSeq2SeqLM.from_config(config)
    return model


# It takes seconds to import transformers.
MODELS = [WithLoss, *[pytest.param(make, marks=pytest.mark.slow) for make in (gpt2, t5, bart)]]


def padded() -> tuple[Tensor, Tensor]:
    """Return the tokens and the labels of six sentences, which have 2 to 7 words.

    The labels of the padding are -100.
    """
    tokens = torch.randint(WORDS, (6, 7))
    padding = torch.arange(7) >= torch.arange(2, 8)[:, None]
    return tokens, tokens.masked_fill(padding, -100)


@pytest.mark.parametrize("make", MODELS)
def test_the_recipe_does_what_the_model_does(make: Any) -> None:
    module = make()
    tokens, labels = padded()
    with pytest.raises(Untraceable, match="leave labels out of the sample") as caught:
        sequential(module, {"input_ids": tokens, "labels": labels})
    recipe = re.search(r"criterion = (lambda .*), and count = (lambda .*)$", str(caught.value))
    assert recipe is not None
    criterion, count = [eval(text, {"module": module, "torch": torch}) for text in recipe.groups()]

    batch = {"input_ids": tokens}
    if make in (t5, bart):
        advice = "decoder_input_ids = module.prepare_decoder_input_ids_from_labels(labels)"
        assert advice in str(caught.value)
        batch["decoder_input_ids"] = module.prepare_decoder_input_ids_from_labels(labels)
    layers = sequential(module, batch)
    balance = [1, len(layers) - 1]
    model = GPipe(layers, balance, devices=["cpu", "cpu"], chunks=3)
    loss = model.step(criterion, batch, labels, weight=count)

    expected = module(input_ids=tokens, labels=labels)["loss"]
    torch.testing.assert_close(loss, expected.detach())
    parameters = [*module.parameters()]
    grads = [p.grad for p in parameters]
    torch.testing.assert_close(grads, list(torch.autograd.grad(expected, parameters)))


@pytest.mark.quick(6)
@pytest.mark.filterwarnings("ignore:the schedule .* splits backwards")
@pytest.mark.parametrize("schedule", NAMED)
def test_the_recipe_with_every_schedule(schedule: str, engine: str, checkpoint: str) -> None:
    torch.manual_seed(0)
    module = WithLoss()
    plain = copy.deepcopy(module)
    tokens, labels = padded()
    layers = sequential(module, {"input_ids": tokens})
    assert len(layers) == 4
    options: dict[str, Any] = {"engine": engine, "checkpoint": checkpoint, "schedule": schedule}
    balance, v = ([1, 1, 1, 1], 2) if schedule in TWICE else ([2, 2], 1)
    model = piped(layers, balance, v=v, **options)

    def criterion(outputs: Any, labels: Tensor) -> Tensor:
        return module.loss_function(outputs["logits"], labels, WORDS)

    def count(labels: Tensor) -> Tensor:
        return (labels[:, 1:] != -100).sum()

    loss = model.step(criterion, {"input_ids": tokens}, labels, weight=count)
    expected = plain(tokens, labels=labels)["loss"]
    expected.backward()
    assert differences((loss, module), (expected.detach(), plain), REORDERED) == []
