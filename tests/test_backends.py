from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from helpers import batches, small_model
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lightning_sonar.backends import BACKENDS, resolve_backend


def test_auto_is_grouped_mm_on_a_cpu():
    assert resolve_backend("auto", "cpu") == "grouped_mm"


def test_auto_falls_back_to_what_runs(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    assert resolve_backend("auto", "cpu") == "batched_mm" or resolve_backend("auto", "cpu") == "eager"
    with pytest.raises(RuntimeError, match=r"'grouped_mm' cannot run on cpu: it needs torch.nn.functional.grouped_mm"):
        resolve_backend("grouped_mm", "cpu")


def test_an_old_gpu_is_told_what_it_lacks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(RuntimeError, match=r"compute capability 8.0 or higher \(this one has 7.5\).*run here: .*eager"):
        resolve_backend("grouped_mm", "cuda")


def test_scattermoe_on_a_cpu_names_the_gpu_and_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        RuntimeError, match=r"'scattermoe' cannot run on cpu: it needs a GPU.*TRITON_INTERPRET=1.*grouped_mm"
    ):
        resolve_backend("scattermoe", "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_backend("scattermoe", "cpu") == "scattermoe"


def test_auto_never_chooses_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    assert resolve_backend("auto", "cpu") == "batched_mm"


def test_batched_mm_warns_that_it_copies_weights():
    with pytest.warns(UserWarning, match="gathers a copy of an expert's whole weight"):
        assert resolve_backend("batched_mm", "cpu") == "batched_mm"


def test_unknown_backend_lists_the_choices():
    with pytest.raises(ValueError, match="backend='triton' is not a backend. Choose one of auto, grouped_mm"):
        resolve_backend("triton", "cpu")


def test_every_backend_is_in_the_dispatch():
    assert all(name == "eager" or name in ALL_EXPERTS_FUNCTIONS for name in BACKENDS)


@pytest.mark.parametrize("family", ["olmoe", "granite"])
def test_backends_agree_on_loss_and_gradients_by_name(family):
    results = {}
    for backend in ("eager", "grouped_mm", "batched_mm"):
        model = small_model(family, backend=backend)
        batch = batches(1)[0]
        loss = model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss
        loss.backward()
        results[backend] = {name: p.grad for name, p in model.named_parameters()} | {"loss": loss.detach()}
    for backend in ("grouped_mm", "batched_mm"):
        for name, value in results["eager"].items():
            torch.testing.assert_close(results[backend][name], value, rtol=1e-4, atol=1e-6, msg=f"{backend}: {name}")


@pytest.mark.parametrize(("capability", "warns"), [((10, 0), True), ((9, 0), False), ((12, 0), False)])
def test_grouped_mm_warns_on_the_gpus_where_it_was_reported_wrong(monkeypatch, capability, warns):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for name in ("auto", "grouped_mm"):
        with pytest.warns(UserWarning, match="172439") if warns else nullcontext():
            assert resolve_backend(name, "cuda:0") == "grouped_mm"
