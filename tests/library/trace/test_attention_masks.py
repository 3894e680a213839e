"""Test the guide's recipe for models of Hugging Face: attention without a mask.

The recipe tells the library transformers that no row of a batch has several texts. The pipeline
must then pass a mask to attention in the same cases as the plain model, and have the same results.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import torchgpipe
from torchgpipe import GPipe, sequential
from torchgpipe.skip.layout import skip_layout
from torchgpipe.trace import Untraceable

pytestmark = pytest.mark.slow  # It takes seconds to import transformers.

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guide.md"
WORDS = 16
LENGTH = 8

Passed = set[tuple[bool, bool]]
"""For calls of PyTorch's attention: whether it got a mask, and its argument `is_causal`."""

CAUSAL: Passed = {(False, True)}
MASKED: Passed = {(True, False)}


def gpt2() -> Any:
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 32}
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return model_of("GPT2Config", **sizes, **no_dropout)


def llama() -> Any:
    return model_of("LlamaConfig", **sizes_of_llama())


def mistral(window: int = LENGTH + 1) -> Any:
    return model_of("MistralConfig", sliding_window=window, **sizes_of_llama())


def sizes_of_llama() -> dict[str, int]:
    """Return sizes for a model like Llama, in which two heads share their keys and values."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    return {**sizes, "num_attention_heads": 2, "num_key_value_heads": 1}


def model_of(config_name: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    make_config = getattr(transformers, config_name)
    config = make_config(vocab_size=WORDS, use_cache=False, **tokens, **options)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., nn.Sequential]]:
    """Return a function that runs code of docs/guide.md; afterwards, undo the code's changes."""
    masking_utils = pytest.importorskip("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    monkeypatch.setattr(masking_utils, name, getattr(masking_utils, name))

    def layers_of(module: nn.Module, input_ids: Tensor) -> nn.Sequential:
        blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
        (code,) = [block for block in blocks if name in block]
        names = {"torchgpipe": torchgpipe, "module": module, "input_ids": input_ids}
        exec(code, names)
        layers = names["layers"]
        assert isinstance(layers, nn.Sequential)
        return layers

    yield layers_of
    monkeypatch.undo()


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Passed:
    """Return a set that records for PyTorch's attention whether it gets a mask or `is_causal`."""
    attention = nn.functional.scaled_dot_product_attention
    found: Passed = set()

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        found.add((kwargs["attn_mask"] is not None, kwargs["is_causal"]))
        return attention(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", noted)
    return found


def pipeline_of(layers: nn.Sequential) -> GPipe:
    half = len(layers) // 2
    balance = [half, len(layers) - half]
    return GPipe(layers, balance, devices=["cpu", "cpu"], chunks=2)


def texts(size: int, length: int = LENGTH) -> Tensor:
    return torch.randint(1, WORDS, (size, length))


def assert_trains_alike(
    module: Any, model: GPipe, inputs: dict[str, Tensor], plain_inputs: dict[str, Tensor]
) -> None:
    """Compare loss, gradients and evaluation of a pipeline with those of the plain model.

    Args:
        module: The plain model.
        model: The pipeline.
        inputs: The arguments of the pipeline.
        plain_inputs: The arguments of the plain model. If there is an `attention_mask`, only the
            tokens for which it is 1 are compared.
    """
    tokens = plain_inputs["input_ids"]
    seen = plain_inputs.get("attention_mask", torch.ones_like(tokens)).bool()
    labels = tokens.masked_fill(~seen, -100)

    def criterion(output: Any, labels: Tensor) -> Any:
        return module.loss_function(output["logits"], labels, WORDS)

    def count(labels: Tensor) -> Tensor:
        return (labels[:, 1:] != -100).sum()

    parameters = list(module.parameters())
    loss = model.step(criterion, inputs, labels, weight=count)
    grads = [p.grad for p in parameters]
    module.zero_grad()
    expected = module(**plain_inputs, labels=labels)["loss"]
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-6)
    expected_grads = list(torch.autograd.grad(expected, parameters))
    torch.testing.assert_close(grads, expected_grads, rtol=0, atol=1e-6)

    model.eval()
    with torch.no_grad():
        logits = model(**inputs)["logits"]
        expected = module(**plain_inputs)["logits"]
    model.train()
    torch.testing.assert_close(logits[seen], expected[seen], rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [gpt2, llama, mistral])
def test_the_recipe_leaves_out_the_mask(make: Any, recipe: Any, passed: Passed) -> None:
    module = make()
    with_mask = pipeline_of(sequential(module, {"input_ids": texts(2)}))
    model = pipeline_of(recipe(module, texts(2)))
    passed.clear()
    for size in (4, 5):
        x = {"input_ids": texts(size)}
        assert_trains_alike(module, model, x, x)
    assert passed == CAUSAL
    crossings = skip_layout(model.partitions)
    assert len(crossings) == len(skip_layout(with_mask.partitions)) - 1


def test_the_recipe_for_many_lengths(recipe: Any, passed: Passed) -> None:
    module = llama()
    recipe(module, texts(2))
    shapes = {"input_ids": {1: Dim("length", min=2, max=32)}}
    model = pipeline_of(sequential(module, {"input_ids": texts(2)}, dynamic_shapes=shapes))
    passed.clear()
    for length in (3, LENGTH, 20):
        x = {"input_ids": texts(4, length)}
        assert_trains_alike(module, model, x, x)
    assert passed == CAUSAL


@pytest.mark.parametrize("make", [gpt2, llama, mistral])
def test_micro_batches_of_one_text(make: Any, recipe: Any, passed: Passed) -> None:
    module = make()
    recipe(module, texts(2))
    x = {"input_ids": texts(2)}
    model = pipeline_of(sequential(module, x))
    passed.clear()
    assert_trains_alike(module, model, x, x)
    assert passed == CAUSAL


def test_a_window_that_is_shorter_than_the_texts(recipe: Any, passed: Passed) -> None:
    module = mistral(window=4)
    model = pipeline_of(recipe(module, texts(2)))
    passed.clear()
    x = {"input_ids": texts(4)}
    assert_trains_alike(module, model, x, x)
    assert passed == MASKED


def test_lengths_on_both_sides_of_the_window(recipe: Any) -> None:
    module = mistral(window=4)
    recipe(module, texts(2))
    shapes = {"input_ids": {1: Dim("length", min=2, max=32)}}
    layers = sequential(module, {"input_ids": texts(2, 16)}, dynamic_shapes=shapes)
    layers(texts(4, 20))
    with pytest.raises(Untraceable, match="has to make the same calls"):
        layers(texts(4, 3))


def padded(left: int, right: int) -> dict[str, Tensor]:
    """Return texts and their mask. The first text has padding on the left and on the right."""
    mask = torch.ones(4, LENGTH, dtype=torch.long)
    mask[0, :left] = 0
    mask[0, LENGTH - right :] = 0
    return {"input_ids": texts(4) * mask, "attention_mask": mask}


@pytest.mark.parametrize("make", [gpt2, llama, mistral])
def test_a_mask_that_is_given(make: Any, recipe: Any, passed: Passed) -> None:
    module = make()
    recipe(module, texts(2))
    model = pipeline_of(sequential(module, padded(0, 0)))
    for x in (padded(0, 0), padded(3, 0), padded(0, 3)):
        assert_trains_alike(module, model, x, x)
        passed.clear()
        model(**x)
        assert passed == MASKED


@pytest.mark.parametrize("make", [gpt2, llama, mistral])
def test_padding_on_the_right_needs_no_mask(make: Any, recipe: Any) -> None:
    module = make()
    model = pipeline_of(recipe(module, texts(2)))
    x = padded(0, 3)
    assert_trains_alike(module, model, {"input_ids": x["input_ids"]}, x)
