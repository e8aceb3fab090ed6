from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from loss_cases import B, H, T, V, assert_within, case, in_double, largest_error, plain, run
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_sonar.chunked_loss import chunked_cross_entropy
from lightning_sonar.losses import IGNORED
from lightning_sonar.memory.tracker import StorageTracker


@pytest.mark.parametrize("chunk", [None, 1, 7, 32, 96, 1000])
@pytest.mark.parametrize("options", [{}, {"scale": 1 / 6}, {"softcap": 3.0}, {"scale": 2.0, "softcap": 5.0}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_float32_equals_the_whole_loss_within_one_millionth(chunk, options, bias):
    inputs = case(bias=bias)
    assert_within(run(chunked_cross_entropy, inputs, chunk=chunk, **options), run(plain, inputs, **options), 1e-6)


def test_the_number_of_tokens_is_that_of_the_whole_loss():
    inputs = case()
    assert chunked_cross_entropy(**inputs)[1] == plain(**inputs)[1] == (inputs["labels"][:, 1:] != IGNORED).sum()


@pytest.mark.parametrize("chunk", [None, 8, 64])
def test_bfloat16_gradients_are_as_near_to_float64_as_the_whole_losss(chunk):
    inputs = case(torch.bfloat16, shape=(2, 65, 512, 64))
    exact = run(in_double, {n: v.double() if v.is_floating_point() else v for n, v in inputs.items()})
    chunked, whole = run(chunked_cross_entropy, inputs, chunk=chunk), run(plain, inputs)
    assert abs(chunked[0] - exact[0]) <= 1.01 * abs(whole[0] - exact[0])
    for name, wanted in exact[1].items():
        assert chunked[1][name].dtype == torch.bfloat16
        off, plain_off = ((gradients[name].double() - wanted).norm() for gradients in (chunked[1], whole[1]))
        assert off <= 1.01 * plain_off, name


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_what_an_autocast_linear_layer_would(hidden_dtype):
    inputs = case(hidden_dtype, weight_dtype=torch.float32, bias=True)
    found, wanted, unrounded = [], [], []
    for compute, kept in ((chunked_cross_entropy, found), (plain, wanted)):
        with torch.autocast("cpu", torch.bfloat16):
            kept.append(run(compute, inputs))
    unrounded.append(run(chunked_cross_entropy, {n: v.float() if n == "hidden" else v for n, v in inputs.items()}))
    assert_within(found[0], wanted[0], 2 * torch.finfo(torch.bfloat16).eps)
    assert found[0][0].item() == pytest.approx(wanted[0][0].item(), rel=1e-6), "the same logits, rounded the same way"
    assert largest_error(found[0][1]["weight"], unrounded[0][1]["weight"]) > 1e-4, "the products ran in bfloat16"


def test_tokens_that_do_not_count_get_no_gradient():
    inputs = case()
    _, gradients = run(chunked_cross_entropy, inputs)
    counts = torch.zeros(B, T, dtype=torch.bool)
    counts[:, :-1] = inputs["labels"][:, 1:] != IGNORED
    moved = gradients["hidden"].abs().sum(-1) > 0
    assert torch.equal(moved, counts)


def test_a_batch_without_labels_has_loss_zero_and_zero_gradients():
    inputs = {**case(), "labels": torch.full((B, T), IGNORED)}
    loss, gradients = run(chunked_cross_entropy, inputs)
    assert loss.item() == 0.0
    assert all(torch.count_nonzero(gradient) == 0 for gradient in gradients.values())


def test_one_token_is_enough():
    inputs = case(shape=(1, 2, V, H))
    assert chunked_cross_entropy(**inputs)[1] == 1
    assert_within(run(chunked_cross_entropy, inputs), run(plain, inputs), 1e-6)


def test_a_sequence_of_one_position_has_nothing_to_predict():
    loss, gradients = run(chunked_cross_entropy, case(shape=(2, 1, V, H)))
    assert loss.item() == 0.0
    assert all(torch.count_nonzero(gradient) == 0 for gradient in gradients.values())


def test_several_backwards_over_one_graph_give_the_same_gradients():
    inputs = case()
    hidden, weight = (inputs[name].clone().requires_grad_() for name in ("hidden", "weight"))
    loss, _ = chunked_cross_entropy(hidden * 1.0, weight, inputs["labels"])
    loss.backward(retain_graph=True)
    first = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = None
    (loss / 2).backward(inputs=[hidden])
    assert torch.equal(hidden.grad * 2, first[0])
    assert torch.equal(weight.grad, first[1]), "not asked for the second time"


def test_a_backward_for_other_inputs_makes_no_gradient_of_the_weight():
    inputs = case(shape=(1, 4, 4096, 16))
    hidden, weight = (inputs[name].requires_grad_() for name in ("hidden", "weight"))
    loss, _ = chunked_cross_entropy(hidden, weight, inputs["labels"])
    peak = {}
    for name, asked in (("hidden", hidden), ("weight", weight)):
        with StorageTracker() as tracker:
            loss.backward(inputs=[asked], retain_graph=True)
        peak[name] = tracker.ledger.peak_bytes
    assert peak["hidden"] < weight.nbytes <= peak["weight"]


@pytest.mark.parametrize("asked", ["hidden", "weight"])
def test_autograd_grad_gives_each_gradient_alone(asked):
    inputs = case()
    wanted = run(plain, inputs)[1][asked]
    leaves = {name: v.requires_grad_() if v.is_floating_point() else v for name, v in inputs.items()}
    assert largest_error(torch.autograd.grad(chunked_cross_entropy(**leaves)[0], leaves[asked])[0], wanted) < 1e-6


def test_a_tied_embedding_gets_both_gradients():
    inputs = case()
    ids = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(5))
    gradients = []
    for compute in (chunked_cross_entropy, plain):
        weight = inputs["weight"].clone().requires_grad_()
        compute(F.embedding(ids, weight).tanh(), weight, inputs["labels"])[0].backward()
        gradients.append(weight.grad)
    assert largest_error(*gradients) < 1e-6


def test_frozen_inputs_get_no_gradient():
    inputs = case()
    for trained in ("hidden", "weight"):
        leaves = {name: value.clone() for name, value in inputs.items()}
        leaves[trained].requires_grad_()
        chunked_cross_entropy(**leaves)[0].backward()
        assert largest_error(leaves[trained].grad, run(plain, inputs)[1][trained]) < 1e-6
        assert leaves["weight" if trained == "hidden" else "hidden"].grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_give_the_same_bits(dtype):
    inputs = case(dtype)
    (loss, gradients), (again, gradients_again) = (run(chunked_cross_entropy, inputs) for _ in range(2))
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], gradients_again[name]) for name in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_as_large_as_the_logits_is_ever_alive(dtype):
    inputs = case(dtype, shape=(2, 256, 2048, 64))
    logits = 2 * 256 * 2048 * dtype.itemsize
    peak, largest = {}, {}
    for name, compute in (("whole", plain), ("chunked", chunked_cross_entropy)):
        with StorageTracker() as tracker:
            run(compute, inputs)
        peak[name] = tracker.ledger.peak_bytes
        largest[name] = max(event.delta for event in tracker.ledger._events)
    assert largest["whole"] >= logits
    assert largest["chunked"] < logits / 3
    assert peak["chunked"] < peak["whole"] / 5


def test_no_gradient_is_alive_between_forward_and_backward():
    inputs = case(shape=(2, 16, 2048, 16))
    weight = inputs["weight"].requires_grad_()
    with StorageTracker() as tracker:
        loss, _ = chunked_cross_entropy(inputs["hidden"], weight, inputs["labels"])
        assert tracker.ledger.live_bytes < weight.nbytes / 10
    assert loss.grad_fn is not None


def test_fake_tensors_run_forward_and_backward_with_the_same_peak():
    peaks = []
    inputs = case(torch.bfloat16)
    for fake in (False, True):
        with FakeTensorMode() if fake else torch.enable_grad():
            own = {name: torch.empty(v.shape, dtype=v.dtype) if fake else v for name, v in inputs.items()}
            with StorageTracker() as tracker:
                loss, gradients = run(chunked_cross_entropy, own)
            peaks.append(tracker.ledger.peak_bytes)
            assert loss.shape == ()
            assert gradients["weight"].shape == (V, H)
    assert peaks[0] == peaks[1]


def test_a_label_outside_the_vocabulary_is_named():
    inputs = case()
    for wrong in (V, -1):
        labels = inputs["labels"].clone()
        labels[0, -1] = wrong
        with pytest.raises(ValueError, match=f"no token of a vocabulary of {V}.*index {wrong}.*Expected 0 to 95"):
            chunked_cross_entropy(inputs["hidden"], inputs["weight"], labels)


def test_shapes_and_values_that_do_not_fit_are_named():
    inputs = case()
    hidden, weight, labels = inputs.values()
    with pytest.raises(ValueError, match=r"hidden \[2, 13, 16\] with labels \[2, 12\]"):
        chunked_cross_entropy(hidden, weight, labels[:, 1:])
    with pytest.raises(ValueError, match=r"weight \[96, 15\] for hidden \[2, 13, 16\]"):
        chunked_cross_entropy(hidden, weight[:, 1:], labels)
    with pytest.raises(ValueError, match="chunk=0"):
        chunked_cross_entropy(hidden, weight, labels, chunk=0)
    with pytest.raises(ValueError, match="expected one of auto, torch, liger"):
        chunked_cross_entropy(hidden, weight, labels, kernel="triton")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a CUDA device and liger-kernel 0.6.4"):
        chunked_cross_entropy(hidden, weight, labels, kernel="liger")
