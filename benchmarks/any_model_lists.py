"""List the models that `benchmarks.any_model` checks.

Each model has a name, and a function that builds the model and a batch for it. Weights are random,
and nothing is downloaded. Models are in training mode, but without dropout, so that the results of
a model and its pipeline can be compared. If a model accepts small images, its images are small.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from torchvision import models

SAMPLES = 5
"""The size of a batch, of which one micro-batch has three samples and the other has two.

So a batch size that became a constant in tracing is detected.
"""
IMAGES = (64, 56, 96, 128, 160, 192, 224, 256)
"""Image sizes to try for timm's models, before a model's default."""


class Case(NamedTuple):
    """A model to check, and its input: a tensor, or a dictionary of keyword arguments."""

    module: Module
    sample: Any


Build = Callable[[], Case]
Options = dict[str, Any]

_IMAGE_SIZES = {"inception_v3": 299, "maxvit_t": 224, "vit_h_14": 56}


def torchvision_models() -> dict[str, Build]:
    """Return torchvision's classification and segmentation models."""
    names = models.list_models(module=models)
    names += models.list_models(module=models.segmentation)
    found: dict[str, Build] = {}
    for name in names:
        build = partial(_torchvision, name)
        found[name] = partial(_without_dropout, build)
    return found


def _torchvision(name: str) -> Case:
    size = _IMAGE_SIZES.get(name, 64)
    options: Options = {"weights": None, "num_classes": 10}
    if name.startswith("vit"):
        options["image_size"] = size
    if name in models.list_models(module=models.segmentation):
        options["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    module = models.get_model(name, **options)
    return Case(module, torch.randn(SAMPLES, 3, size, size))


def timm_models() -> dict[str, Build]:
    """Return functions that build timm models, by name: one small model of each family."""
    import timm

    found: dict[str, Build] = {}
    for family in timm.list_modules():
        names = timm.list_models(module=family, pretrained=False)
        if names:
            name = min(names, key=_size)
            build = partial(_timm, name)
            found[name] = partial(_without_dropout, build)
    return found


_SMALL = (
    "test",
    "atto",
    "pico",
    "femto",
    "nano",
    "xxs",
    "tiny",
    "_t0",
    "xs",
    "_b0",
    "18",
    "26",
    "mini",
    "small",
    "_s",
)


def _size(name: str) -> tuple[int, int, str]:
    """Return a sort key for a model's name: names with a word such as "tiny" come first."""
    for k, hint in enumerate(_SMALL):
        if hint in name:
            return k, len(name), name
    return len(_SMALL), len(name), name


def _timm(name: str) -> Case:
    """Build a timm model, and a batch of the smallest images in `IMAGES` that the model accepts.

    Each size is tried on device `meta`, which costs no memory. If none works, the images have the
    model's default size.
    """
    import timm

    for size, option in product(IMAGES, ("img_size", None)):
        options: Options = {"pretrained": False, "num_classes": 10}
        if option is not None:
            options[option] = size
        try:
            with torch.device("meta"):
                module = timm.create_model(name, **options)
                module(torch.empty(2, 3, size, size))
        except Exception:  # an unknown option or an unsuitable size may raise anything
            continue
        module = timm.create_model(name, **options)
        return Case(module, torch.randn(SAMPLES, 3, size, size))
    module = timm.create_model(name, pretrained=False, num_classes=10)
    shape = module.default_cfg["input_size"]
    return Case(module, torch.randn(SAMPLES, *shape))


# Values for fields of a configuration object of the library transformers. With these values, the
# model is tiny. The object ignores fields that it does not know.
_TINY: Options = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "image_size": 32,
    "patch_size": 8,
    "use_cache": False,
    "pad_token_id": 0,
}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_GQA = {"num_key_value_heads": 2}
_CONV = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32]}
_AUDIO = {
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
}
_CLIP_PART = {**_TINY, "projection_dim": 16}
_CLIP = {"text_config": _CLIP_PART.copy(), "vision_config": _CLIP_PART.copy()}

# A configuration with one of these options sets its own sizes, and does not use `_TINY`.
_OWN_SIZES = {"text_config", "depths", "block_sizes"}

# For each name: the configuration class, the model class, further options, and the kind of sample.
TRANSFORMERS: dict[str, tuple[str, str, Options, str]] = {
    "albert": ("AlbertConfig", "AlbertModel", {"embedding_size": 16}, "text"),
    "bart": ("BartConfig", "BartModel", _BART, "pair"),
    "beit": ("BeitConfig", "BeitModel", {}, "image"),
    "bert": ("BertConfig", "BertForSequenceClassification", {}, "text"),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"n_layer": 2, "n_head": 4}, "text"),
    "camembert": ("CamembertConfig", "CamembertModel", {}, "text"),
    "clip": ("CLIPConfig", "CLIPModel", {**_CLIP, "projection_dim": 16}, "clip"),
    "convbert": ("ConvBertConfig", "ConvBertModel", {"embedding_size": 32}, "text"),
    "convnext": (
        "ConvNextConfig",
        "ConvNextForImageClassification",
        {**_CONV, "image_size": 32},
        "image",
    ),
    "deberta-v2": ("DebertaV2Config", "DebertaV2Model", {}, "text"),
    "deit": ("DeiTConfig", "DeiTForImageClassification", {}, "image"),
    "dinov2": ("Dinov2Config", "Dinov2Model", {}, "image"),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertModel",
        {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
        "text",
    ),
    "electra": ("ElectraConfig", "ElectraModel", {"embedding_size": 16}, "text"),
    "falcon": ("FalconConfig", "FalconForCausalLM", {}, "text"),
    "funnel": (
        "FunnelConfig",
        "FunnelModel",
        {
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 64,
            "vocab_size": 97,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
        },
        "text",
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**_GQA, "head_dim": 8}, "text"),
    "gpt-neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        "text",
    ),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}, "text"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "text"),
    "gptj": (
        "GPTJConfig",
        "GPTJForCausalLM",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
        "text",
    ),
    "hubert": ("HubertConfig", "HubertModel", _AUDIO, "audio"),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GQA, "text"),
    "marian": ("MarianConfig", "MarianModel", {**_BART, "decoder_start_token_id": 1}, "pair"),
    "mistral": ("MistralConfig", "MistralForCausalLM", _GQA, "text"),
    "mobilebert": (
        "MobileBertConfig",
        "MobileBertModel",
        {"embedding_size": 16, "intra_bottleneck_size": 16},
        "text",
    ),
    "mpnet": ("MPNetConfig", "MPNetModel", {}, "text"),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 64, "word_embed_proj_dim": 32}, "text"),
    "pegasus": ("PegasusConfig", "PegasusModel", _BART, "pair"),
    "phi": ("PhiConfig", "PhiForCausalLM", {}, "text"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _GQA, "text"),
    "resnet": (
        "ResNetConfig",
        "ResNetForImageClassification",
        {**_CONV, "embedding_size": 8, "layer_type": "basic"},
        "image",
    ),
    "roberta": ("RobertaConfig", "RobertaModel", {}, "text"),
    "segformer": (
        "SegformerConfig",
        "SegformerForSemanticSegmentation",
        {
            "hidden_sizes": [8, 16, 16, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 4],
            "decoder_hidden_size": 16,
        },
        "image",
    ),
    "swin": (
        "SwinConfig",
        "SwinModel",
        {
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
            "image_size": 32,
            "patch_size": 4,
        },
        "image",
    ),
    "t5": ("T5Config", "T5ForConditionalGeneration", {**_T5, "decoder_start_token_id": 0}, "pair"),
    "vit": ("ViTConfig", "ViTForImageClassification", {}, "image"),
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2Model", _AUDIO, "audio"),
}


def transformers_models() -> dict[str, Build]:
    """Return functions that build tiny models of the package transformers, by name."""
    found: dict[str, Build] = {}
    for name, row in TRANSFORMERS.items():
        build = partial(_transformers, *row)
        found[name] = partial(_without_dropout, build)
    return found


def _transformers(config_name: str, model_name: str, more: Options, kind: str) -> Case:
    import transformers

    options = {} if _OWN_SIZES & more.keys() else _TINY
    make_config = getattr(transformers, config_name)
    config = make_config(**{**options, **more})
    ids = torch.randint(1, 97, (SAMPLES, 12))
    mask = torch.ones_like(ids)
    image = torch.randn(SAMPLES, 3, 32, 32)
    sound = torch.randn(SAMPLES, 800)
    samples = {
        "text": {"input_ids": ids, "attention_mask": mask},
        "pair": {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids.flip(1)},
        "image": {"pixel_values": image},
        "clip": {"input_ids": ids, "attention_mask": mask, "pixel_values": image},
        "audio": {"input_values": sound},
    }
    make_model = getattr(transformers, model_name)
    model = make_model(config)
    return Case(model.train(), samples[kind])


LISTS = {
    "torchvision": torchvision_models,
    "transformers": transformers_models,
    "timm": timm_models,
}


def _without_dropout(build: Build) -> Case:
    """Build a model, and set its probabilities of dropout and of drop path to zero.

    A probability is found by its name, such as "dropout", among the attributes of all modules and
    of their configurations.
    """
    case = build()
    for module in case.module.modules():
        kind = type(module).__name__
        drops = "Drop" in kind or "Depth" in kind
        for holder in (module, getattr(module, "config", None)):
            if not holder:
                continue
            for name, value in list(vars(holder).items()):
                named = "drop" in name or (name == "p" and drops)
                if named and isinstance(value, float):
                    setattr(holder, name, 0.0)
    return case
