"""The ScatterMoE backend: interpreted against transformers' eager experts, and compiled for GPUs that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FAMILIES = ["olmoe", "granitemoe", "mixtral", "qwen3_moe", "gpt_oss", "nemotron_h"]
pytest.importorskip("triton")


def run_script(script: str, *arguments: str, **environment: str) -> dict[str, Any]:
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, (str(ROOT), clean.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "tests" / script), *arguments],
        env={**clean, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(f"{script} {' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    return run_script("scattermoe_cases.py", TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_script("scattermoe_compile.py", "layouts", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))


@pytest.mark.parametrize("family", FAMILIES)
def test_output_and_gradients_equal_eager_in_fp32_by_name(interpreted: dict[str, Any], family: str) -> None:
    found = interpreted[family]["fp32"]
    assert {"out", "hidden", "weights", "down_proj"} < set(found)
    assert {name: error for name, error in found.items() if error > 1e-6} == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_near_to_the_exact_result_as_eager(interpreted: dict[str, Any], family: str) -> None:
    ours, eager = interpreted[family]["bf16"], interpreted[family]["eager_bf16"]
    assert {name: (ours[name], eager[name]) for name in ours if ours[name] > 1.25 * eager[name]} == {}
    assert interpreted[family]["dtypes"] == ["torch.bfloat16"]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_whole_tensors_and_zero_for_an_expert_without_tokens(
    interpreted: dict[str, Any], family: str
) -> None:
    assert interpreted[family]["contiguous"]
    assert set(interpreted[family]["empty"].values()) == {0.0}


@pytest.mark.parametrize("routing", ["one_token", "one_expert", "every_expert", "top_one"])
def test_extreme_routings_are_as_near_to_the_exact_result_as_eager(interpreted: dict[str, Any], routing: str) -> None:
    # fp32 against fp64. One token has two routing weights, whose gradients cancel: eager too is off by 1e-6 there.
    ours, eager = interpreted[routing]["ours"], interpreted[routing]["eager"]
    assert {name: (ours[name], eager[name]) for name in ours if ours[name] > 3 * eager[name] + 5e-7} == {}
    assert max(ours.values()) < 5e-6


@pytest.mark.parametrize("ids", ["other_ranks", "negative_ids"])
def test_ids_of_no_expert_here_contribute_nothing(interpreted: dict[str, Any], ids: str) -> None:
    found = interpreted[ids]
    assert {name: error for name, error in found["errors"].items() if error > 1e-6} == {}
    assert found["lonely"] == 0


def test_under_autocast_fp32_weights_get_fp32_gradients_of_bf16_products(interpreted: dict[str, Any]) -> None:
    found = interpreted["autocast"]
    assert found["dtypes"] == ["torch.float32"]
    for name, error in found["ours"].items():
        # Wider than for bf16 modules: one small batch, and both round every operand.
        assert 1e-4 < error < 1.5 * found["eager"][name], name


def test_the_same_bits_every_time(interpreted: dict[str, Any]) -> None:
    assert interpreted["twice"] == []


def test_a_retained_graph_gives_the_same_gradients_again(interpreted: dict[str, Any]) -> None:
    assert interpreted["retained"]["wrong"] == []


def test_backward_computes_only_what_is_asked_for(interpreted: dict[str, Any]) -> None:
    # Products and weight gradients launched in a backward with inputs=[...].
    assert interpreted["retained"]["counts"] == {
        "hidden": [2, 0],
        "weights": [1, 0],
        "gate_up_proj": [1, 1],
        "down_proj": [0, 1],
    }


def test_checkpointing_changes_no_bit(interpreted: dict[str, Any]) -> None:
    assert interpreted["checkpointed"] == {"False": [], "True": []}


@pytest.mark.parametrize("part", ["up", "down"])
def test_a_second_derivative_is_refused_by_name(interpreted: dict[str, Any], part: str) -> None:
    for word in ["scattermoe", "no second derivative", "create_graph=True", "backend='grouped_mm'"]:
        assert word in interpreted["second_derivative"][part]


def test_transforms_of_torch_func_are_refused_by_name(interpreted: dict[str, Any]) -> None:
    for word in ["backend='scattermoe'", "torch.func", "backend='grouped_mm'"]:
        assert word in interpreted["functorch"]


def test_forward_keeps_the_input_the_first_product_and_the_routing_weights_only(interpreted: dict[str, Any]) -> None:
    assert interpreted["kept"]["kept"] == interpreted["kept"]["expected"]


def test_one_weight_gradient_lives_at_a_time(interpreted: dict[str, Any]) -> None:
    assert interpreted["one_gradient_at_a_time"] == [
        "allocate, alive 0",
        "hook down_proj",
        "allocate, alive 0",
        "hook gate_up_proj",
    ]


def test_backward_through_a_weight_that_changed_raises(interpreted: dict[str, Any]) -> None:
    assert "modified by an inplace operation" in interpreted["changed_weight"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("norm", ["has_post_expert_norm", "grouped_mm"]),
        ("activation", ["act_fn (PReLU) has parameters", "grouped_mm"]),
        ("half", ["gate_up_proj is torch.float16", "expected torch.bfloat16 or torch.float32"]),
        ("count", ["num_experts is 5", "(4, 48, 40)"]),
        ("sharded", ["down_proj is a DTensor", "grouped_mm"]),
        ("autocast", ["autocast asks for torch.float16", "bf16-mixed"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(interpreted: dict[str, Any], what: str, words: list[str]) -> None:
    for word in ["OlmoeExperts", *words]:
        assert word in interpreted["refusals"][what]


def test_fake_tensors_give_shapes_without_a_launch(interpreted: dict[str, Any]) -> None:
    assert interpreted["fake"] == {"gate_up_proj": [4, 48, 40], "down_proj": [4, 40, 24]}


def test_two_steps_of_olmoe_on_rows_of_16_tokens_equal_eager(interpreted: dict[str, Any]) -> None:
    found = interpreted["train"]
    assert found["losses"]["scattermoe"] == pytest.approx(found["losses"]["eager"], rel=1e-6)
    assert {name: error for name, error in found["errors"].items() if error > 1e-5} == {}
    assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"} <= set(found["moved"])


def check(found: dict[str, Any]) -> None:
    """What holds for every kernel on every GPU."""
    for case, figures in found.items():
        assert figures["spilled"] == 0, case
        assert figures["shared"] <= figures["shared_limit"], case
        # No offset is 32-bit, however large the weights; no sum depends on the order in which programs finish.
        assert figures["offsets"] == ["i64"], case
        assert figures["widened_late"] == [], case
        assert figures["atomics"] == 0, case
        if not case.startswith("gfx"):
            assert figures["wide_copies"] > 0, case
            assert figures["narrow_copies"] == 0, case


def test_kernels_for_large_layers_neither_spill_nor_overrun_shared_memory(compiled: dict[str, Any]) -> None:
    assert len(compiled) == 6
    check(compiled)


def test_bf16_products_run_on_tensor_cores(compiled: dict[str, Any]) -> None:
    for case, figures in compiled.items():
        assert figures["tensor_core"] > 0, case


@pytest.mark.slow
def test_every_product_of_olmoe_and_granite_compiles_for_every_gpu(tmp_path: Path) -> None:
    found = run_script("scattermoe_compile.py", "all", TRITON_CACHE_DIR=str(tmp_path))
    assert len(found) == 6 * 4 * 6
    check(found)
    for case, figures in found.items():
        if "fp32-fp32" not in case:
            assert figures["any_tensor_core"] > 0, case
        # Blocks of fewer than 64 rows are too small for wgmma and tcgen05; they run on mma.sync.
        if "fp32-fp32" not in case and "few" not in case:
            assert figures["tensor_core"] > 0, case


@pytest.mark.slow
def test_the_command_trains_with_the_backend_as_it_does_with_eager(tmp_path: Path) -> None:
    small = ["model.num_layers=1", "data.seq_len=64", "data.batch_size=1", "data.max_records=200"]
    small += ["trainer.max_steps=2", "trainer.limit_val_batches=1", "callbacks=none", "trainer.precision=32-true"]
    losses = {}
    for backend in ("eager", "scattermoe"):
        folder = tmp_path / backend
        done = subprocess.run(
            [sys.executable, "experiments/run.py", f"backend={backend}", *small, f"hydra.run.dir='{folder}'"],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        losses[backend] = json.loads((folder / "result.json").read_text())["train_loss"]
    assert losses["scattermoe"] == pytest.approx(losses["eager"], rel=1e-5)
