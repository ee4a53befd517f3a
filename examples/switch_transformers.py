"""Switch a model of transformers to rowmax: one import, one argument. Seconds on a CPU.

    pip install "rowmax[hf]"
    python examples/switch_transformers.py

The model is small and has random weights, so that nothing is downloaded. It trains a few steps and
generates, once with torch's attention and once with rowmax: losses and tokens agree.
"""

import argparse

import torch
import transformers

import rowmax.integrations.transformers  # noqa: F401  # registers "rowmax"

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def model_of(attention: str) -> transformers.PreTrainedModel:
    """Return the same model with any attention."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        sliding_window=24,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation=attention,  # from_pretrained takes it, too
    )
    return transformers.MistralForCausalLM(config).to(DEVICE)


def run(attention: str, steps: int, size: int) -> tuple[list[float], torch.Tensor]:
    """Return the losses of training and the tokens of a generation."""
    model = model_of(attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # the text counts upwards from a random token
    starts = torch.randint(3, 64, (4, 1), generator=torch.Generator().manual_seed(0))
    text = ((starts + torch.arange(size)) % 125 + 3).to(DEVICE)
    mask = torch.ones_like(text)
    mask[1, : size // 4] = 0  # padding on the left
    losses = []
    for _ in range(steps):
        loss = model(text, attention_mask=mask, labels=text.where(mask == 1, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    prompt = {"input_ids": text[:, : size // 2], "attention_mask": mask[:, : size // 2]}
    return losses, model.eval().generate(**prompt, max_new_tokens=8, do_sample=False)


def main(steps: int = 20, size: int = 64) -> dict[str, tuple[list[float], torch.Tensor]]:
    """Return losses and tokens of both kinds of attention."""
    results = {name: run(name, steps, size) for name in ("sdpa", "rowmax")}
    for name, (losses, tokens) in results.items():
        print(f"{name:<6} loss {losses[0]:.4f} to {losses[-1]:.4f}, {tokens[0, -8:].tolist()}")
    same = torch.equal(results["sdpa"][1], results["rowmax"][1])
    print("the tokens are equal" if same else "the tokens differ")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=64)
    main(**vars(parser.parse_args()))
