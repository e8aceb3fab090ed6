"""Low-bit optimizers where something is unusual: strides, empty tensors, slices, shards, several ranks, plans."""

from __future__ import annotations

import copy
import functools
import json
import math
from dataclasses import replace

import pytest
import torch
from distributed_run import launch, run_once
from helpers import AutomaticLM, batches, differing, make_trainer, small_model, snapshot
from low_bit_cases import all_torchao, bnb, bnb_experts, eager, needs_bitsandbytes  # noqa: F401
from omegaconf import OmegaConf

from experiments.plan_tables import show_plans
from experiments.planning import main as plan
from experiments.result import optimizer_name, versions
from lightning_sonar import FusedAdamW, Mode, SonarMoEStrategy, release_in_backward
from lightning_sonar.data.loader import ResumableLoader, ShuffledBatches
from lightning_sonar.memory.planner import plan_memory
from lightning_sonar.optim import (
    ExpertsAndDense,
    ao_adamw8bit,
    bnb_adamw8bit,
    is_element_wise,
    largest_update,
    make_states,
)

pytestmark = pytest.mark.usefixtures("deterministic")

# -- strides -------------------------------------------------------------------------------------------------------


def strided():
    """``[8, 32, 64]``, the first dimension innermost in memory."""
    return torch.nn.Parameter(torch.randn(64, 32, 8, generator=torch.Generator().manual_seed(0)).transpose(0, 2))


def steps(optimizer, parameter, seeds):
    for seed in seeds:
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("watch_every", [0, 1, 2])
@pytest.mark.parametrize("chunk", [4096, 2**22])
def test_bitsandbytes_updates_a_parameter_of_other_strides_in_watched_steps_too(needs_bitsandbytes, watch_every, chunk):  # noqa: F811
    ours, its = strided(), strided()
    optimizer = bnb_adamw8bit([ours], lr=1e-2, watch_every=watch_every)
    optimizer.chunk = chunk
    library = needs_bitsandbytes.optim.AdamW8bit([its], lr=1e-2)
    assert torch.equal(steps(optimizer, ours, range(4)), steps(library, its, range(4)))
    assert not torch.equal(ours, strided())


def test_states_that_bitsandbytes_saved_of_other_strides_go_on_in_chunks(needs_bitsandbytes):  # noqa: F811
    its = strided()
    library = needs_bitsandbytes.optim.AdamW8bit([its], lr=1e-2)
    steps(library, its, range(2))
    assert not library.state[its]["state1"].is_contiguous()
    ours = torch.nn.Parameter(its.detach().clone())
    optimizer = bnb_adamw8bit([ours], watch_every=1)
    optimizer.chunk = 4096
    optimizer.load_state_dict(library.state_dict())
    assert torch.equal(steps(optimizer, ours, (7, 8)), steps(library, its, (7, 8)))


@pytest.mark.usefixtures("needs_bitsandbytes")
def test_moments_of_a_parameter_of_other_strides_are_quantised_in_its_order():
    parameter = strided()
    plain = torch.optim.AdamW([parameter], lr=1e-2)
    steps(plain, parameter, range(2))
    optimizer = bnb_adamw8bit([parameter])
    optimizer.load_state_dict(plain.state_dict())
    state = optimizer.state[parameter]
    walked = state["state1"].as_strided((parameter.numel(),), (1,)).int()
    found = state["qmap1"][walked] * state["absmax1"].repeat_interleave(256)
    wanted = plain.state[parameter]["exp_avg"].reshape(-1)
    torch.testing.assert_close(found, wanted, rtol=0.06, atol=0.02 * float(wanted.abs().max()))


@all_torchao
@pytest.mark.usefixtures("eager")
def test_torchao_updates_a_parameter_of_other_strides_as_the_library_does(make):
    ours, its = strided(), strided()
    optimizer = make([ours], lr=1e-2, watch_every=1)
    optimizer.chunk = 4096
    library = optimizer.library([its], lr=1e-2)
    assert torch.equal(steps(optimizer, ours, range(3)), steps(library, its, range(3)))


@pytest.mark.parametrize("make", [bnb_adamw8bit, ao_adamw8bit], ids=["bnb", "torchao"])
@pytest.mark.usefixtures("eager", "needs_bitsandbytes")
def test_an_empty_tensor_is_left_out_of_the_watch(make):
    tensors = [torch.nn.Parameter(torch.zeros(0, 4)), torch.nn.Parameter(torch.ones(4, 4))]
    optimizer = make(tensors, lr=1e-2, watch_every=1)
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    assert largest_update(optimizer) == pytest.approx(0.01, rel=0.05)


# -- what the kernels can count ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("needs_bitsandbytes")
def test_more_elements_than_the_kernels_of_bitsandbytes_count_go_in_chunks(monkeypatch):
    whole, cut = (torch.nn.Parameter(strided().detach().contiguous()) for _ in range(2))
    optimizer = bnb_adamw8bit([cut], lr=1e-2, watch_every=0)
    assert optimizer.most == 2**31 - 1
    optimizer.most = optimizer.chunk = 4096
    sizes = []
    run_part = optimizer._run
    monkeypatch.setattr(
        optimizer, "_run", lambda group, part, state: [sizes.append(part.numel()), run_part(group, part, state)]
    )
    steps(optimizer, cut, range(3))
    assert sizes == [4096] * 4 * 3
    assert torch.equal(cut, steps(bnb_adamw8bit([whole], lr=1e-2, watch_every=0), whole, range(3)))


@pytest.mark.usefixtures("needs_bitsandbytes")
def test_what_cannot_be_cut_into_what_the_kernels_count_is_refused():
    parameter = torch.nn.Parameter(torch.zeros(3, 4097))
    optimizer = bnb_adamw8bit([parameter])
    optimizer.most = optimizer.chunk = 4096
    with (
        pytest.warns(UserWarning, match="updated whole"),
        pytest.raises(ValueError, match=r"4,096 elements.*\[3, 4097\]"),
    ):
        steps(optimizer, parameter, (0,))


@pytest.mark.usefixtures("eager")
def test_constants_that_change_are_warned_of_once_since_torchao_compiles_for_each():
    tensors = [strided(), strided()]
    optimizer = ao_adamw8bit(tensors)
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    for _ in range(2):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.8, 0.999)
    with pytest.warns(UserWarning, match=r"from .*0\.9, 0\.999.* to .*0\.8.*cycle_momentum=False") as caught:
        optimizer.step()
    assert len(caught) == 1
    optimizer.param_groups[0]["betas"] = (0.7, 0.999)
    optimizer.step()


# -- slices and shards ---------------------------------------------------------------------------------------------


def with_biases(experts, dense):
    """Experts, their 2-D biases, which ExpertsAndDense takes for dense, and a dense matrix."""
    torch.manual_seed(0)
    tensors = [torch.nn.Parameter(torch.randn(shape)) for shape in ((4, 16, 32), (4, 4096), (64, 64))]
    makers = (functools.partial(kind, lr=1e-2) for kind in (experts, dense))
    return tensors, ExpertsAndDense(tensors, *makers)


@pytest.mark.usefixtures("needs_bitsandbytes")
@pytest.mark.parametrize("mode", ["sonar_per_expert", Mode("all", "none", granularity="expert")])
def test_slices_of_what_a_low_bit_child_holds_are_refused(mode):
    tensors, optimizer = with_biases(FusedAdamW, bnb_adamw8bit)
    with pytest.raises(ValueError, match="slice on its own.*BitsAndBytesAdamW8bit is not known to be one"):
        release_in_backward(optimizer, tensors[:2], mode=mode)
    assert not is_element_wise(optimizer)


@pytest.mark.usefixtures("needs_bitsandbytes")
def test_slices_of_an_element_wise_child_go_beside_a_low_bit_one():
    found = []
    for mode in ("standard_no_expert_clip", "sonar_per_expert"):
        tensors, optimizer = with_biases(FusedAdamW, bnb_adamw8bit)
        handle = release_in_backward(optimizer, tensors[:1], mode=mode)
        for _ in range(3):
            handle.train_step(sum((tensor**3).sum() for tensor in tensors), max_norm=1.0)
        handle.remove()
        found.append(tensors)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Shard(torch.Tensor):
    """What is asked of a DTensor to know it."""

    def to_local(self):
        return self.as_subclass(torch.Tensor)


@pytest.mark.usefixtures("needs_bitsandbytes")
def test_bitsandbytes_refuses_shards_and_says_what_takes_them():
    shard = torch.Tensor._make_subclass(Shard, torch.zeros(4, 32, 64), True)
    with pytest.raises(ValueError, match=r"sharded parameter of shape \[4, 32, 64\].*adamw8bit.*SonarMoEDDPStrategy"):
        make_states(bnb_adamw8bit([shard]))


# -- where counts of steps are -------------------------------------------------------------------------------------


class Elsewhere(torch.Tensor):
    """A count of steps on a device."""

    read = 0

    def cpu(self):
        Elsewhere.read += 1
        return self.as_subclass(torch.Tensor)


@pytest.mark.usefixtures("eager")
def test_torchaos_count_of_steps_comes_back_from_the_device_once():
    parameter = strided()
    optimizer = ao_adamw8bit([parameter])
    make_states(optimizer)
    Elsewhere.read = 0
    optimizer.state[parameter]["step"] = torch.tensor(3.0).as_subclass(Elsewhere)
    steps(optimizer, parameter, range(3))
    assert type(optimizer.state[parameter]["step"]) is torch.Tensor
    assert float(optimizer.state[parameter]["step"]) == 6
    assert Elsewhere.read == 1


# -- resumed in another mode ---------------------------------------------------------------------------------------


def run(mode, optimizer, count, ckpt=None):
    data = batches(6)
    module = AutomaticLM(small_model(seed=0 if ckpt is None else 5), optimizer)
    given = ResumableLoader(data, ShuffledBatches(len(data), 1, seed=0), collate_fn=lambda examples: examples[0])
    trainer = make_trainer(SonarMoEStrategy(mode=mode), count, max_epochs=-1)
    trainer.fit(module, given, ckpt_path=ckpt, weights_only=True if ckpt else None)
    return trainer, module


@pytest.mark.parametrize("optimizer", [bnb, bnb_experts], ids=["all", "experts"])
@pytest.mark.usefixtures("needs_bitsandbytes")
def test_a_run_of_bitsandbytes_goes_on_bitwise_in_another_mode(optimizer, tmp_path):
    straight = snapshot(*run("sonar", optimizer, 6))
    for first, then in (("sonar", "standard_no_expert_clip"), ("standard_no_expert_clip", "sonar")):
        path = str(tmp_path / f"{first}.ckpt")
        run(first, optimizer, 3)[0].save_checkpoint(path)
        assert differing(straight, snapshot(*run(then, optimizer, 6, path))) == []


@pytest.mark.parametrize("copied", [False, True], ids=["itself", "copied"])
@pytest.mark.usefixtures("needs_bitsandbytes")
def test_hooks_on_the_state_dict_of_one_made_of_two_are_called(copied):
    _, optimizer = with_biases(bnb_adamw8bit, FusedAdamW)
    optimizer = copy.deepcopy(optimizer) if copied else optimizer
    seen = []
    optimizer.register_state_dict_pre_hook(lambda it: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda it, saved: {**saved, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda it, saved: seen.append(saved.pop("more")))
    optimizer.register_load_state_dict_post_hook(lambda it: seen.append("loaded"))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert seen == ["before saving", 1, "loaded"]
    assert saved["more"] == 1


# -- several ranks -------------------------------------------------------------------------------------------------

CASES = (
    "low_bit_ddp",
    "low_bit_ddp_bf16",
    "low_bit_ddp_parted",
    "low_bit_ddp_exact",
    "low_bit_fsdp_watched",
    "low_bit_fsdp",
)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("needs_bitsandbytes")
def test_several_ranks_do_bit_for_bit_what_other_training_does(case):
    ranks = [found[case] for found in run_once(CASES)]
    if case == "low_bit_fsdp":
        assert all("sharded parameter" in found for found in ranks)
        return
    if case == "low_bit_fsdp_watched":
        pytest.importorskip("torchao")
        for found in ranks:
            assert differing(found["expected"]["values"], found["found"]["values"]) == []
            assert found["expected"]["largest"] is None
            assert 0 < found["found"]["largest"] < 1
        return
    for found in ranks:
        assert differing(found["expected"], found["found"]) == []
        assert differing(ranks[0]["found"], found["found"]) == []
        codes = [name for name, value in found["found"].items() if value.dtype == torch.uint8 and "experts" in name]
        assert len(codes) == 8


@pytest.mark.slow
def test_four_ranks_watch_what_they_would_do_unwatched(tmp_path):
    pytest.importorskip("torchao")
    for found in launch(["low_bit_fsdp_watched"], tmp_path, world=4):
        case = found["low_bit_fsdp_watched"]
        assert differing(case["expected"]["values"], case["found"]["values"]) == []
        assert 0 < case["found"]["largest"] < 1


# -- plans and results ---------------------------------------------------------------------------------------------

SMALL = ["model=olmoe", "model.size=tiny", "model.num_layers=1"]


def test_a_plan_names_what_is_refused_and_goes_on(tmp_path, capsys):
    assert plan([*SMALL, "mode=sonar_per_expert,sonar", "optimizer=adamw4bit_experts", f"out={tmp_path}"]) == 0
    assert [row["mode"] for row in json.loads((tmp_path / "plan.json").read_text())["rows"]] == ["sonar"]
    out = " ".join(capsys.readouterr().out.split())
    assert "not planned: mode sonar_per_expert with optimizer ao_adamw4bit for experts, FusedAdamW: " in out
    assert "ao_adamw4bit is not known to be one. Use mode='sonar'" in out


def test_a_plan_of_nothing_but_what_is_refused_fails_with_the_reason(tmp_path, capsys):
    assert plan([*SMALL, "mode=sonar_per_expert", "optimizer=bnb_adamw8bit", f"out={tmp_path}"]) == 2
    assert "bnb_adamw8bit is not known to be one" in capsys.readouterr().err


def test_plans_of_modes_and_optimizers_are_readable_in_100_columns(capsys):
    one = plan_memory(size="tiny", num_layers=1)
    modes, parted = ("standard", "standard_no_expert_clip", "sonar"), "bnb AdamW8bit for experts, FusedAdamW (model)"
    show_plans([replace(one, mode=mode, optimizer=name) for mode in modes for name in ("FusedAdamW", parted)], 0)
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 100
    for row in ("bnb AdamW8bit", "for experts,", "FusedAdamW (model)"):
        assert sum(row in line for line in lines) == 3 * 3
    assert sum(line.split()[:1] == ["standard_no_expert_clip"] for line in lines) == 2 * 3


def test_a_result_names_how_the_optimizer_rounds_and_its_library():
    plain = {"_target_": "lightning_sonar.FusedAdamW", "stochastic_rounding": True}
    low = {"_target_": "lightning_sonar.optim.ao_adamw8bit", "bf16_stochastic_round": True}
    both = {"_target_": "lightning_sonar.optim.ExpertsAndDense", "experts": low, "dense": plain}
    names = [optimizer_name(OmegaConf.create(each)) for each in (plain, {**plain, "stochastic_rounding": False}, both)]
    rounding = ", stochastic rounding"
    assert names == [f"FusedAdamW{rounding}", "FusedAdamW", f"ao_adamw8bit{rounding} for experts, FusedAdamW{rounding}"]
    assert {"bitsandbytes", "torchao", "flashoptim"} <= versions().keys()
    assert math.isfinite(float(versions()["python"].split(".")[0]))
