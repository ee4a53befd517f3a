"""Small models of transformers with random weights, and inputs: for tests and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 48
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ADDED = {"experts_implementation": "eager"}  # the other one has no float64


class Sizes(NamedTuple):
    """The head size, the tokens of a text and of a decoder, and the window."""

    head: int = 8
    tokens: int = 13
    decoded: int = 7
    window: int = 5


SMALL = Sizes()


class Family(NamedTuple):
    """The names of a configuration and a model, options by sizes, and names of inputs."""

    config: str
    model: str
    options: Callable[[Sizes], dict[str, Any]]
    inputs: str


def _encoder(x: Sizes) -> dict[str, Any]:
    return {
        "hidden_size": 4 * x.head,
        "intermediate_size": 6 * x.head,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": max(256, 2 * x.tokens),
        **_TOKENS,
    }


def _decoder(x: Sizes, **more: Any) -> dict[str, Any]:
    return _encoder(x) | {"num_key_value_heads": 2, "head_dim": x.head} | more


def _moe(x: Sizes) -> dict[str, Any]:
    rope = {"rope_type": "default"}
    more = {"num_local_experts": 2, "num_experts_per_tok": 2, "rope_parameters": rope}
    return _decoder(x, sliding_window=x.window, **more, **_ADDED)


def _chunked(x: Sizes) -> dict[str, Any]:
    more = {"attention_chunk_size": x.window, "moe_layers": [], "no_rope_layers": [1, 0]}
    return _decoder(x, intermediate_size_mlp=6 * x.head, num_local_experts=1, **more)


def _t5(x: Sizes) -> dict[str, Any]:
    layers = {"num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1}
    return {"d_model": 4 * x.head, "d_kv": x.head, "d_ff": 6 * x.head, **layers, **_TOKENS}


def _images(x: Sizes) -> dict[str, Any]:
    return _encoder(x) | {"image_size": 16, "patch_size": 4}


def _clip(x: Sizes) -> dict[str, Any]:
    return {"text_config": _encoder(x), "vision_config": _images(x), "projection_dim": 16}


def _whisper(x: Sizes) -> dict[str, Any]:
    parts = {
        f"{part}_{key}": n
        for part in ("encoder", "decoder")
        for key, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 6 * x.head))
    }
    lengths = {"max_source_positions": x.tokens, "max_target_positions": max(32, 2 * x.decoded)}
    more = {"num_mel_bins": 8, "decoder_start_token_id": 1}
    return {"d_model": 4 * x.head, **parts, **lengths, **more, **_TOKENS}


def _windowed(x: Sizes) -> dict[str, Any]:
    return _decoder(x, sliding_window=x.window)


def _modern(x: Sizes) -> dict[str, Any]:
    return _encoder(x) | {"local_attention": x.window + 1, "global_attn_every_n_layers": 2}


FAMILIES = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM", _decoder, "text"),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", _decoder, "text"),
    "mistral": Family("MistralConfig", "MistralForCausalLM", _windowed, "text"),
    "gemma2": Family("Gemma2Config", "Gemma2ForCausalLM", _windowed, "text"),
    "gemma3": Family("Gemma3TextConfig", "Gemma3ForCausalLM", _windowed, "text"),
    "gpt-oss": Family("GptOssConfig", "GptOssForCausalLM", _moe, "text"),
    "llama4": Family("Llama4TextConfig", "Llama4ForCausalLM", _chunked, "text"),
    "t5": Family("T5Config", "T5ForConditionalGeneration", _t5, "text decoded"),
    "bert": Family("BertConfig", "BertForMaskedLM", _encoder, "text"),
    "modernbert": Family("ModernBertConfig", "ModernBertForMaskedLM", _modern, "text"),
    "vit": Family("ViTConfig", "ViTModel", _images, "images"),
    "clip": Family("CLIPConfig", "CLIPModel", _clip, "text images"),
    "whisper": Family(
        "WhisperConfig", "WhisperForConditionalGeneration", _whisper, "speech decoded"
    ),
}
CAUSAL = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt-oss", "llama4")
_OUTPUTS = ("logits", "last_hidden_state", "text_embeds", "image_embeds", "logits_per_text")


def inputs_of(name: str, x: Sizes = SMALL) -> dict[str, Tensor]:
    """Return random inputs of two rows."""
    text = torch.randint(3, VOCABULARY - 1, (2, x.tokens))
    text[:, x.tokens // 2] = VOCABULARY - 1  # CLIP reads the output of the greatest token
    decoded = torch.randint(3, VOCABULARY, (2, x.decoded))
    images, speech = torch.randn(2, 3, 16, 16), torch.randn(2, 8, 2 * x.tokens)
    every = {
        "text": ("input_ids", text),
        "decoded": ("decoder_input_ids", decoded),
        "images": ("pixel_values", images),
        "speech": ("input_features", speech),
    }
    return dict(every[part] for part in FAMILIES[name].inputs.split())


def padding_of(side: str, x: Sizes = SMALL) -> Tensor:
    """Return an attention_mask ``[2, tokens]`` with a padded row."""
    mask, some = torch.ones(2, x.tokens, dtype=torch.int64), x.tokens // 3
    if side == "left":
        mask[1, :some] = 0
    elif side == "right":
        mask[0, -some:] = 0
    return mask


def model_of(name: str, x: Sizes = SMALL, **changes: Any) -> Any:
    """Return a model with weights that make attention matter."""
    family = FAMILIES[name]
    torch.manual_seed(1)
    config = getattr(transformers, family.config)(**family.options(x) | changes)
    model = getattr(transformers, family.model)(config).eval()
    for key, weight in model.named_parameters():
        if weight.dim() == 1:  # biases, sinks and norms begin as constants
            nn.init.normal_(weight, 0.5 if key.endswith("weight") else 0.0, 0.5)
        else:
            nn.init.normal_(weight, 0.0, 0.3 * (8 / x.head) ** 0.5)
    return model


class Result(NamedTuple):
    """Named outputs and gradients of a model."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def result_of(model: Any, kind: str, dtype: torch.dtype, given: dict[str, Tensor]) -> Result:
    """Return outputs at real tokens, and the gradients of parameters, of a kind of attention."""
    model.set_attn_implementation(kind)
    model.to(dtype).zero_grad()
    given = {key: t.to(dtype) if t.is_floating_point() else t for key, t in given.items()}
    outputs = {key: t for key, t in model(**given, use_cache=False).items() if key in _OUTPUTS}
    real = given.get("attention_mask")
    if real is not None:
        outputs = {
            key: t[real.bool()] if t.shape[:2] == real.shape else t for key, t in outputs.items()
        }
    generator = torch.Generator().manual_seed(3)
    loss = torch.zeros((), device=model.device)
    for t in outputs.values():
        loss = loss + (t * torch.randn(t.shape, generator=generator).to(t)).sum()
    loss.backward()
    gradients = {key: t.grad.clone() for key, t in model.named_parameters() if t.grad is not None}
    return Result({key: t.detach() for key, t in outputs.items()}, gradients)
