"""Two runs agree if attention is right, and the demo reports it if they do not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from demo.gpt import GPT, Size, standard_library
from demo.learner import Plan, learning_rate
from demo.training import (
    Curve,
    Training,
    plan_for,
    rowmax_attention,
    standard_attention,
    train,
)

CPU = torch.device("cpu")
SMALL = Plan(Size(2, 2, 32, 64), rows=4, steps=40)


@pytest.fixture(scope="module")
def corpus():
    return standard_library()


def test_the_same_attention_trains_the_same(corpus):
    found = train(SMALL, corpus, CPU, rowmax_attention("torch"))
    assert found.ok
    first, last = (found.curves["rowmax"].smooth[n] for n in (0, -1))
    assert last < 0.9 * first, "it learns"
    assert found.differences.first_losses > 0, "the two runs are two runs"


def _half_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Right forward; the gradient of k is halved."""
    return standard_attention(q, 0.5 * k + 0.5 * k.detach(), v)


def _sees_the_future(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _wrong_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return standard_attention(1.1 * q, k, v)


def _not_a_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return standard_attention(q, k, v) * math.nan


@pytest.mark.parametrize("wrong", [_half_gradient, _sees_the_future, _wrong_scale, _not_a_number])
def test_a_wrong_attention_is_seen(corpus, wrong):
    assert not train(SMALL, corpus, CPU, wrong).ok


def test_training_is_deterministic(corpus):
    plan = SMALL._replace(steps=5)
    runs = [train(plan, corpus, CPU, rowmax_attention("torch"), seed=3) for _ in range(2)]
    assert runs[0].curves["SDPA"].losses == runs[1].curves["SDPA"].losses
    assert runs[0].curves["rowmax"].losses == runs[1].curves["rowmax"].losses


def test_agreement_is_measured_at_the_worst_place():
    ours, theirs = [2.0] * 60, [2.0] * 60
    ours[40:] = [2.2] * 20
    found = Training(
        SMALL, 1, 1, 1, {"rowmax": Curve(ours, [1.0] * 60), "SDPA": Curve(theirs, [1.0] * 60)}
    )
    assert found.differences.first_losses == 0
    assert found.differences.curves == pytest.approx(0.1)
    assert not found.ok


def test_a_model_sees_only_what_came_before():
    torch.manual_seed(0)
    model = GPT(SMALL.size, rowmax_attention("torch"))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    x = torch.randint(256, (1, 64))
    y = x.clone()
    y[:, 40:] = 7
    a, b = model(x), model(y)
    torch.testing.assert_close(a[:, :40], b[:, :40])
    assert not torch.allclose(a[:, 40:], b[:, 40:])


def test_the_corpus_holds_files_out(corpus):
    assert corpus.train.numel() > 10 * corpus.held_out.numel() > 0
    x, y = corpus.batch(3, 16, torch.Generator().manual_seed(0))
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_plans_and_learning_rates():
    plan = plan_for(CPU, None, quick=False)
    assert 500_000 < GPT(plan.size, standard_attention).parameter_count < 1_000_000
    assert plan_for(CPU, 77, quick=False).steps == 77
    rates = [learning_rate(step, 100) for step in range(100)]
    assert max(rates) == 1.0
    assert rates[-1] < 0.05
