"""``accumulation="host"``: exact accumulation whose expert gradients wait in host memory."""

from __future__ import annotations

import gc
import weakref

import lightning as L
import pytest
import torch
from helpers import AutomaticLM, batches, differing, fit, fused, loader, make_trainer, small_model, snapshot
from test_in_backward import Toy, equal, inputs, toy, values

from lightning_sonar import FusedAdamW, MemoryProfiler, Mode, SonarMoEStrategy, find_expert_tensors, release_in_backward
from lightning_sonar.accumulate import HostSums
from lightning_sonar.host import is_host
from lightning_sonar.losses import response_cross_entropy

pytestmark = [pytest.mark.usefixtures("deterministic"), pytest.mark.filterwarnings("ignore:Gradients are accumulated")]

MICRO = 3
CLIPS = ["none", "exact", "lagged", "per_tensor", "per_expert"]


def train(accumulation: str, *, mode="sonar", steps=3, clip=0.5, algorithm="norm", dtype=torch.float32, **options):
    """Train the toy; returns its values and the norms of each step."""
    model, made, handle = toy(mode, accumulation=accumulation, measure_norms=True, **options)
    model.to(dtype)
    norms = []
    for step in range(steps):
        for micro in range(MICRO):
            loss = model(inputs(10 * step + micro).to(dtype)) / MICRO
            handle.train_step(loss, max_norm=clip, algorithm=algorithm, last=micro == MICRO - 1)
        norms.append(float(handle.grad_norms()["experts"]))
    found = values(model, made)
    handle.remove()
    return found, norms


# Equality.


@pytest.mark.parametrize("optimizer", [FusedAdamW, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("expert_clip", CLIPS)
def test_host_is_exact_accumulation_bitwise_in_float32(expert_clip, optimizer):
    exact, host = (train(a, expert_clip=expert_clip, optimizer=optimizer) for a in ("exact", "host"))
    assert equal(exact[0], host[0])
    assert exact[1] == host[1], "the norms are those of the sums"


@pytest.mark.parametrize("mode", ["sonar_per_expert", "in_backward_all", Mode("experts", "all", "expert", "exact")])
def test_host_is_exact_accumulation_bitwise_in_other_modes(mode):
    clip = 0.0 if mode == "in_backward_all" else 0.5
    exact, host = (train(a, mode=mode, clip=clip) for a in ("exact", "host"))
    assert equal(exact[0], host[0])


def test_the_sum_is_clipped_by_value_as_in_exact_accumulation():
    exact, host, free = (
        train(a, clip=c, algorithm="value") for a, c in (("exact", 1e-3), ("host", 1e-3), ("host", 0.0))
    )
    assert equal(exact[0], host[0])
    assert not equal(host[0], free[0])


def test_where_nothing_steps_in_backward_host_is_exact():
    exact, host = (train(a, mode="standard") for a in ("exact", "host"))
    assert equal(exact[0], host[0])


def test_one_microbatch_a_step_takes_no_host_memory_and_changes_nothing():
    results = []
    for accumulation in ("exact", "host"):
        model, made, handle = toy(accumulation=accumulation)
        for step in range(3):
            handle.train_step(model(inputs(step)), max_norm=0.5)
        assert handle.host_sums == []
        results.append(values(model, made))
    assert equal(*results)


def test_a_bfloat16_sum_is_taken_in_float32_and_rounded_once():
    model, _made, handle = toy(accumulation="host")
    model.to(torch.bfloat16)
    grads, seen = [], []

    class See:
        def on_phase(self, phase): ...

        def on_gradient(self, tensor):
            if tensor is model.first:
                (seen if not handle.accumulating else grads).append(tensor.grad.clone())

    handle.observers.append(See())
    for micro in range(MICRO):
        handle.train_step(model(inputs(micro).bfloat16()), last=micro == MICRO - 1)
    last = Toy().to(torch.bfloat16)
    last(inputs(MICRO - 1).bfloat16()).backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], sum((g.float() for g in [*grads[1:], last.first.grad]), grads[0].float()).bfloat16())


@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
@pytest.mark.parametrize("family", ["olmoe", "granite"])
def test_host_is_exact_accumulation_bitwise_under_the_trainer(family, automatic):
    results = []
    for accumulation in ("exact", "host"):
        trainer, module = fit(
            small_model(family),
            "sonar",
            automatic=automatic,
            steps=2,
            data=batches(6),
            accumulate_grad_batches=3,
            strategy_options={"accumulation": accumulation},
        )
        results.append(snapshot(trainer, module))
    assert differing(*results) == []


def big_batch(accumulation: str | None, optimizer, lr: float, steps: int = 2) -> dict[str, torch.Tensor]:
    """Four sequences a step: four microbatches of one, or one of four (None)."""
    model = small_model()
    made = optimizer(model.parameters(), lr=lr)
    handle = release_in_backward(made, find_expert_tensors(model), accumulation=accumulation or "exact")
    for step in range(steps):
        whole = batches(1, batch_size=4, seed=step)[0]
        parts = [whole] if accumulation is None else [{k: v[i : i + 1] for k, v in whole.items()} for i in range(4)]
        for index, part in enumerate(parts):
            output = model(input_ids=part["input_ids"], attention_mask=part["attention_mask"], use_cache=False)
            loss = response_cross_entropy(output.logits, part["labels"])[0] / len(parts)
            handle.train_step(loss, max_norm=1e9, last=index == len(parts) - 1)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_exact_and_host_equal_one_big_batch_and_per_microbatch_does_not():
    start = {name: p.detach() for name, p in small_model().named_parameters()}
    # Every sequence has as many tokens in its loss as any other. SGD: Adam would blow up what rounding makes of
    # gradients that are all but zero.
    whole, exact, host, paper = (big_batch(a, torch.optim.SGD, 1.0) for a in (None, "exact", "host", "per_microbatch"))
    experts = [name for name in whole if "experts" in name]
    moved = sum((whole[n] - start[n]).square().sum() for n in experts).sqrt()

    def apart(found) -> float:
        return float(sum((whole[n] - found[n]).square().sum() for n in experts).sqrt() / moved)

    assert apart(exact) < 1e-5
    assert apart(host) == apart(exact)
    # The same gradients to first order in SGD: what differs is that a later microbatch sees the earlier ones' updates.
    assert apart(paper) > 1e-3
    # Adam divides each microbatch's step by its own second moment.
    adam, adam_paper = (big_batch(a, FusedAdamW, 1e-3) for a in (None, "per_microbatch"))
    moved = sum((adam[n] - start[n]).square().sum() for n in experts).sqrt()
    gap = sum((adam[n] - adam_paper[n]).square().sum() for n in experts).sqrt()
    assert float(gap / moved) > 0.5


# What goes wrong in a step stays in it.


@pytest.mark.parametrize("expert_clip", CLIPS)
@pytest.mark.parametrize("where", range(MICRO))
def test_a_bad_microbatch_skips_the_step_and_leaves_nothing_behind(where, expert_clip):
    results = []
    for accumulation, bad in (("host", True), ("host", False), ("exact", True)):
        model, made, handle = toy(accumulation=accumulation, expert_clip=expert_clip)
        for step in range(3):
            if step == 1 and not bad:
                continue
            for micro in range(MICRO):
                loss = model(inputs(10 * step + micro))
                loss = loss * float("nan") if step == 1 and micro == where else loss
                handle.train_step(loss, max_norm=0.5, last=micro == MICRO - 1)
        assert handle.skipped_steps == int(bad)
        results.append(values(model, made))
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])


def test_an_abandoned_step_leaves_no_sum_behind():
    results = []
    for broken in (True, False):
        model, made, handle = toy(accumulation="host")
        if broken:
            handle.train_step(model(inputs(5)), last=False)
            handle.abandon_step()
        handle.train_step(model(inputs(1)), last=False)
        handle.train_step(model(inputs(2)))
        results.append(values(model, made))
    assert equal(*results)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("expert_clip", ["none", "exact"])
def test_a_tensor_that_the_last_microbatch_leaves_out_is_updated_by_the_sum_of_the_others(expert_clip, raw):
    if raw and expert_clip == "exact":
        pytest.skip("exact clipping needs the handle to run backward")
    results = []
    for accumulation in ("exact", "host"):
        model, made, handle = toy(accumulation=accumulation, expert_clip=expert_clip, on_nonfinite="ignore")
        for _ in range(2):
            short = model.all_experts(model.dense(inputs(2)), model.first).square().mean()
            if raw:
                with handle.accumulate():
                    model(inputs(1)).backward()
                short.backward()
                made.step()
                made.zero_grad()
            else:
                handle.train_step(model(inputs(1)), max_norm=0.1, last=False)
                handle.train_step(short, max_norm=0.1)
        assert made.state[model.second]["step"] == 2
        results.append(values(model, made))
    assert equal(*results)


def test_a_gradient_with_a_graph_is_refused_in_every_microbatch():
    model, _made, handle = toy(accumulation="host")
    with pytest.raises(RuntimeError, match=r"create_graph=True.*first|second"):
        handle.backward(
            model(inputs()), lambda: torch.autograd.backward(model(inputs()), create_graph=True), last=False
        )


# Memory.


def test_gradients_go_to_the_host_one_at_a_time_and_buffers_are_made_once():
    model, _made, handle = toy(accumulation="host")
    seen: list[int] = []
    for _ in range(2):
        for micro in range(MICRO):
            handle.train_step(model(inputs(micro)), last=micro == MICRO - 1)
            assert model.first.grad is None
            assert model.second.grad is None
        seen.append(sum(buffer.data_ptr() for buffer in handle.host_sums))
    assert seen[0] == seen[1]
    assert all(is_host(buffer.untyped_storage()) for buffer in handle.host_sums)
    assert sum(b.nbytes for b in handle.host_sums) == model.first.nbytes + model.second.nbytes
    refs = [weakref.ref(buffer.untyped_storage()) for buffer in handle.host_sums]
    handle.remove()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def profiled(accumulation: str, microbatches: int, **options):
    profiler = MemoryProfiler(warmup=1, steps=1, figure=False)
    fit(
        small_model(dtype=torch.bfloat16, num_layers=3),
        "sonar",
        steps=3,
        data=batches(3 * microbatches),
        accumulate_grad_batches=microbatches,
        callbacks=[profiler],
        strategy_options={"accumulation": accumulation, **options},
    )
    return profiler.report


@pytest.mark.parametrize("expert_clip", ["none", "exact"])
def test_the_peak_of_expert_gradients_is_that_of_one_microbatch(expert_clip):
    plain, exact, host = (profiled(a, m, expert_clip=expert_clip) for a, m in (("exact", 1), ("exact", 3), ("host", 3)))
    assert host.peak_expert_gradient_bytes == plain.peak_expert_gradient_bytes
    assert host.peak_expert_gradients == plain.peak_expert_gradients == 1
    assert exact.peak_expert_gradients == 6
    experts = find_expert_tensors(small_model(num_layers=3))
    assert host.host_bytes == 4 * sum(tensor.numel() for tensor in experts.values())
    assert plain.host_bytes == exact.host_bytes == 0
    assert host.peak_bytes < exact.peak_bytes
    if expert_clip == "none":
        assert host.peak_bytes == profiled("per_microbatch", 3).peak_bytes


def test_a_wide_sum_is_added_piece_by_piece(monkeypatch):
    monkeypatch.setattr("lightning_sonar.accumulate._CHUNK", 100)
    tensor = torch.nn.Parameter(torch.zeros(7, 5, 6, dtype=torch.bfloat16))
    parts = [torch.randn(7, 5, 6).bfloat16() for _ in range(3)]
    sums = HostSums()
    for part in parts[:2]:
        tensor.grad = part.clone()
        sums.add(tensor)
    # Transposed in memory: what counts is the element, not its place.
    tensor.grad = parts[2].mT.contiguous().mT
    kept = tensor.grad
    sums.complete(tensor)
    assert tensor.grad is kept
    assert torch.equal(tensor.grad, sum((p.float() for p in parts[1:]), parts[0].float()).bfloat16())
    assert not sums.under_way


def test_exact_accumulation_names_host_as_the_remedy():
    model, _made, handle = toy()
    with pytest.warns(UserWarning, match="accumulation='host'"):
        handle.train_step(model(inputs()), last=False)


def test_a_fit_gives_the_host_memory_back():
    strategy = SonarMoEStrategy(accumulation="host")
    module = AutomaticLM(small_model(), fused())
    refs = []

    class Look(MemoryProfiler):
        def on_train_end(self, trainer, pl_module):
            refs.extend(weakref.ref(b.untyped_storage()) for b in trainer.strategy.in_backward.host_sums)

    trainer = make_trainer(strategy, 2, accumulate_grad_batches=2, callbacks=[Look(figure=False)])
    trainer.fit(module, loader(batches(4)))
    gc.collect()
    assert len(refs) == 4
    assert all(ref() is None for ref in refs)


@pytest.mark.parametrize("who", ["optimizer", "module"])
def test_zeroed_gradients_take_the_sums_with_them(who):
    results = []
    for accumulation in ("exact", "host"):
        model, made, handle = toy(accumulation=accumulation)
        handle.train_step(model(inputs(0)), max_norm=0.5, last=False)
        (made if who == "optimizer" else model).zero_grad()
        handle.train_step(model(inputs(1)), max_norm=0.5, last=False)
        handle.train_step(model(inputs(2)), max_norm=0.5)
        results.append(values(model, made))
    assert equal(*results)


def test_a_number_of_microbatches_that_changes_on_the_way_is_as_in_exact_accumulation():
    class Changes(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            trainer.accumulate_grad_batches = [3, 2, 4][(batch_idx // 3) % 3]

    results = []
    for accumulation in ("exact", "host"):
        module = AutomaticLM(small_model(), fused())
        trainer = make_trainer(SonarMoEStrategy(accumulation=accumulation), -1, callbacks=[Changes()])
        trainer.fit(module, loader(batches(18)))
        results.append(snapshot(trainer, module))
    assert differing(*results) == []
