from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lightning_sonar.losses import IGNORED, response_cross_entropy, shift


def test_loss_is_the_mean_over_labelled_tokens_of_the_next_token():
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7)
    labels = torch.tensor([[IGNORED, IGNORED, 3, 4, IGNORED], [IGNORED, 1, 2, 6, 0]])
    picked = [(b, t) for b in range(2) for t in range(1, 5) if labels[b, t] != IGNORED]
    wanted = -sum(F.log_softmax(logits[b, t - 1], -1)[labels[b, t]] for b, t in picked) / len(picked)
    loss, tokens = response_cross_entropy(logits, labels)
    assert tokens == len(picked) == 6
    torch.testing.assert_close(loss, wanted)


def test_prompt_tokens_get_no_gradient():
    logits = torch.randn(1, 4, 5, requires_grad=True)
    response_cross_entropy(logits, torch.tensor([[IGNORED, IGNORED, IGNORED, 2]]))[0].backward()
    assert logits.grad is not None
    assert torch.count_nonzero(logits.grad.sum(-1).abs() + logits.grad.abs().sum(-1)) == 1
    assert logits.grad[0, 2].abs().sum() > 0


def test_bfloat16_logits_are_summed_in_float32():
    torch.manual_seed(0)
    logits = torch.randn(2, 300, 50).bfloat16()
    labels = torch.randint(0, 50, (2, 300))
    loss, _ = response_cross_entropy(logits, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, response_cross_entropy(logits.double().float(), labels)[0], rtol=0, atol=0)


def test_a_batch_without_labels_has_loss_zero_and_zero_gradient():
    logits = torch.randn(1, 3, 4, requires_grad=True)
    loss, tokens = response_cross_entropy(logits, torch.full((1, 3), IGNORED))
    loss.backward()
    assert (loss.item(), tokens.item()) == (0.0, 0)
    assert torch.count_nonzero(logits.grad) == 0


def test_uniform_logits_give_the_logarithm_of_the_vocabulary():
    loss, _ = response_cross_entropy(torch.zeros(1, 4, 11), torch.zeros(1, 4, dtype=torch.long))
    assert loss.item() == pytest.approx(math.log(11))


def test_shift_makes_views():
    logits = torch.randn(1, 3, 4)
    predicted, wanted = shift(logits, torch.tensor([[5, 6, 7]]))
    assert predicted.data_ptr() == logits.data_ptr()
    assert wanted.tolist() == [[6, 7]]
