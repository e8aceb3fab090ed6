"""The SonicMoE adapter, around a stand-in that has the package's real signature."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from helpers import batches, small_model
from scattermoe_helpers import TOP_K, doubled, errors, experts, inputs, run
from sonicmoe_stand_in import DECLARED, PACKAGE, install
from torch import nn
from transformers.integrations import sonicmoe as theirs
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lightning_sonar import FusedAdamW, find_expert_tensors, release_in_backward
from lightning_sonar.backends import resolve_backend, sonicmoe

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing loaded is remembered, before or after."""
    sonicmoe._load.cache_clear()
    yield
    sonicmoe._load.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "sonicmoe"]:
        del sys.modules[name]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The stand-in as an installed package on a machine whose GPU will do."""

    def with_options(**options: str) -> None:
        install(tmp_path, **options)
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()

    monkeypatch.setattr(sonicmoe, "_gpu_missing", lambda device: None)
    return with_options


@pytest.fixture
def stand_in(installed) -> Any:
    installed()
    return importlib.import_module("sonicmoe")


def gpu(monkeypatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def test_a_cpu_is_told_that_it_needs_the_gpu_and_a_package():
    with pytest.raises(RuntimeError, match=r"Hopper or Blackwell GPU.*asked for cpu.*package sonic-moe.*kernels"):
        resolve_backend("sonicmoe", "cpu")


def test_an_ampere_gpu_is_named_with_its_capability(monkeypatch):
    gpu(monkeypatch, (8, 6))
    with pytest.raises(RuntimeError, match=r"compute capability 9.0 or higher; this one has 8.6\)"):
        resolve_backend("sonicmoe", "cuda")


def test_a_hopper_gpu_without_packages_is_told_of_them_alone(monkeypatch):
    gpu(monkeypatch, (9, 0))
    monkeypatch.setattr("platform.python_version", lambda: "3.12.1")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    reason = sonicmoe.missing(torch.device("cuda"))
    assert reason is not None
    assert "GPU" not in reason
    assert "pip install sonic-moe" in reason
    assert 'pip install "lightning-sonar[sonicmoe]"' in reason


@pytest.mark.parametrize(
    ("python", "version", "named"),
    [
        ("3.11.9", "2.9.1", "Python >=3.12 (this is 3.11.9)"),
        ("3.12.1", "2.13.0+cu130", "torch <=2.9.1,>=2.7.1 (this is 2.13.0+cu130)"),
        ("3.11.9", "2.13.0", "Python >=3.12 (this is 3.11.9) and torch <=2.9.1,>=2.7.1 (this is 2.13.0)"),
    ],
)
def test_where_pip_would_refuse_the_package_the_reason_is_named_and_no_command(monkeypatch, python, version, named):
    gpu(monkeypatch, (9, 0))
    monkeypatch.setattr("platform.python_version", lambda: python)
    monkeypatch.setattr(torch, "__version__", version)
    reason = sonicmoe.missing(torch.device("cuda"))
    assert reason is not None
    assert f"the package sonic-moe, which up to 0.1.2.post1 wants {named}, or, for transformers' own route" in reason
    assert "pip install sonic-moe" not in reason
    assert 'pip install "lightning-sonar[sonicmoe]"' in reason


def test_what_the_package_declares_is_named_with_what_is_here(installed):
    installed(
        python=">=3.99", requires=f"{DECLARED}\nRequires-Dist: no-such-thing>=3\nRequires-Dist: other; extra == 'dev'"
    )
    reason = sonicmoe.missing(torch.device("cpu"))
    assert reason is not None
    assert f"Python >=3.99 (this is {'.'.join(map(str, sys.version_info[:3]))})" in reason
    assert f"torch <=2.9.1,>=2.7.1 (this is {torch.__version__})" in reason
    assert "no-such-thing>=3 (not installed)" in reason
    assert "other" not in reason.split("or, for transformers")[0]


def test_a_package_whose_call_differs_is_refused_with_the_argument(installed):
    installed(
        package=PACKAGE.replace("concat_layout: bool = False,\n) ->", "is_concatenated_gate_up: bool = False,\n) ->")
    )
    module = experts("olmoe", BF16)
    with pytest.raises(RuntimeError, match=r"sonic-moe has no argument concat_layout .*0\.1\.2"):
        run(module, "sonicmoe", inputs(BF16))


def test_the_dispatch_holds_the_adapter():
    assert ALL_EXPERTS_FUNCTIONS["sonicmoe"] is sonicmoe.sonicmoe_experts_forward


@pytest.mark.parametrize("family", ["olmoe", "granitemoe", "mixtral", "qwen3_moe"])
def test_output_and_gradients_are_as_near_to_the_exact_ones_as_eager_by_name(stand_in, family):
    exact = run(experts(family).double(), "eager", doubled(inputs()))
    given = inputs(BF16)
    ours = run(experts(family, BF16), "sonicmoe", given)
    eager = errors(run(experts(family, BF16), "eager", given), exact)
    assert {name: value for name, value in errors(ours, exact).items() if value > 1.5 * eager[name]} == {}


def test_weights_go_in_as_views_in_the_strides_that_the_package_wants(stand_in):
    module = experts("olmoe", BF16)
    run(module, "sonicmoe", inputs(BF16))
    (call,) = stand_in.calls
    width, inner, count = module.down_proj.shape[1], module.down_proj.shape[2], module.num_experts
    assert call["pointers"] == [module.gate_up_proj.data_ptr(), module.down_proj.data_ptr()]
    assert call["shapes"] == [(2 * inner, width, count), (width, inner, count)]
    assert call["strides"] == [(width, 1, 2 * inner * width), (inner, 1, inner * width)]
    assert call["dtypes"] == ["torch.bfloat16"] * 2 + ["torch.int32"] * 2 + ["torch.bfloat16"] * 2
    assert call["sorted"]
    assert call["E"] == count
    assert not call["inference"]
    assert module.down_proj.grad.is_contiguous()
    assert module.gate_up_proj.grad.is_contiguous()


def test_without_gradients_the_package_is_told_of_inference(stand_in):
    module = experts("olmoe", BF16)
    module.config._experts_implementation = "sonicmoe"
    given = inputs(BF16)
    with torch.no_grad():
        module(given["hidden"], given["index"], given["weights"])
    assert stand_in.calls[0]["inference"]


def test_the_second_weight_is_updated_before_the_first_products_backward(stand_in):
    module = experts("olmoe", BF16)
    events = stand_in.alive
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    run(module, "sonicmoe", inputs(BF16))
    assert events == ["down", "down_proj", "up", "gate_up_proj"]


def test_a_model_trains_in_sonar_mode_with_at_most_one_expert_gradient_alive(stand_in):
    model = small_model("olmoe", BF16, backend="sonicmoe")
    found = find_expert_tensors(model)
    most = []

    class Watch:
        def on_phase(self, phase: str) -> None:
            pass

        def on_gradient(self, tensor: torch.Tensor) -> None:
            most.append(sum(other.grad is not None for other in found.tensors))

    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    handle = release_in_backward(optimizer, found)
    handle.observers.append(Watch())
    losses = []
    for batch in batches(1) * 4:
        loss = model(**batch, use_cache=False).loss
        handle.train_step(loss, max_norm=1.0)
        losses.append(loss.item())
    assert most == [1] * (4 * len(found))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"act_fn": nn.Tanh()}, "its activation is Tanh"),
        ({"act_fn": nn.GELU()}, "its activation is GELU; the kernels have SiLU and the tanh form of GELU"),
        ({"has_gate": False}, "its experts have no gate"),
        ({"has_post_expert_norm": True}, "a norm of their own"),
        ({"is_transposed": True}, "stored transposed"),
        ({"_is_expert_parallel": True}, "expert parallel"),
        ({"num_experts": 3}, "num_experts is 3, and gate_up_proj has 4"),
    ],
)
def test_what_the_kernels_would_compute_wrongly_is_refused_by_name(stand_in, change, message):
    module = experts("olmoe", BF16)
    for name, value in change.items():
        setattr(module, name, value)
    with pytest.raises(ValueError, match=f"cannot run OlmoeExperts: .*{message}.*Use backend='grouped_mm' instead"):
        run(module, "sonicmoe", inputs(BF16))
    assert stand_in.calls == []


def test_a_gate_of_the_modules_own_is_refused(stand_in):
    with pytest.raises(ValueError, match="GptOssExperts: its gate is its own"):
        run(experts("gpt_oss", BF16), "sonicmoe", inputs(BF16))


def test_fp32_weights_are_refused_with_the_precision_to_choose(stand_in):
    with pytest.raises(ValueError, match=r"gate_up_proj is torch.float32, expected torch.bfloat16. Use precision"):
        run(experts("olmoe"), "sonicmoe", inputs())


def test_transformers_own_route_is_taken_when_that_is_what_is_installed(stand_in, monkeypatch):
    monkeypatch.setattr(sonicmoe, "_package_missing", lambda: "the package sonic-moe")
    monkeypatch.setattr(sonicmoe, "_hub_missing", lambda with_gpu: None)
    enum = importlib.import_module("sonicmoe.enums").ActivationType
    bundle = theirs.SonicMoE(enum, stand_in.moe_general_routing_inputs)
    monkeypatch.setattr(theirs, "load_sonicmoe_kernel", lambda: bundle)
    found = run(experts("olmoe", BF16), "sonicmoe", inputs(BF16))
    # Scores in the tokens' dtype, as transformers passes them.
    assert stand_in.calls[0]["dtypes"][1] == "torch.bfloat16"
    assert found["weights"].shape == (len(found["hidden"]), TOP_K)


def test_transformers_own_probe_has_the_last_word_on_its_route(monkeypatch):
    def refuse(raise_error: bool = False) -> bool:
        raise ImportError("nvidia-cutlass-dsl is too old")

    gpu(monkeypatch, (9, 0))
    monkeypatch.setattr("transformers.utils.import_utils.is_kernels_available", lambda *_: True)
    monkeypatch.setattr(sonicmoe.metadata, "version", lambda name: "9.9")
    monkeypatch.setattr(theirs, "is_sonicmoe_loadable", refuse)
    assert "nvidia-cutlass-dsl is too old" in str(sonicmoe.missing(torch.device("cuda")))
