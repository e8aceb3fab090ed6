"""What the modes cost on a CPU: step time against standard_no_expert_clip, one hook's overhead, the update's bandwidth.

python experiments/bench.py
python experiments/bench.py --rounds 7 --modes standard_no_expert_clip,sonar --json bench.json

Every measurement is a process of its own, and the modes take turns over the rounds: inside one process, pages that one
mode has freed serve the next, and their ratio then says little. A ratio is that of the medians over all steps of all
rounds; its spread is the least and the greatest of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from experiments.status import write_text

ROOT = Path(__file__).resolve().parent.parent
BASELINE = "standard_no_expert_clip"
MODES = (BASELINE, "standard", "in_backward_all", "sonar", "sonar_per_expert")
# OLMoE, narrow and shallow: 118 M parameters, of which 113 M are experts'.
MIDDLE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 2048,
}
GOALS = {"sonar_ratio": 1.02, "hook_us": 60.0, "share_of_copy": 0.8}


# In a process of its own.


def measure_steps(mode: str, toy: bool, steps: int) -> dict[str, Any]:
    """Milliseconds of each step of one mode, bf16, grouped_mm."""
    import torch

    from experiments.measuring import TOY, Training, batch_of, times_ms
    from lightning_sonar import models

    torch.manual_seed(0)
    sizes: dict[str, Any] = {**TOY["olmoe"], "num_hidden_layers": 1} if toy else MIDDLE
    model = models.build("olmoe", "tiny", backend="grouped_mm", dtype=torch.bfloat16, **sizes)
    training = Training(model, mode)
    batch = batch_of(model, 2, 8 if toy else 64, torch.device("cpu"))
    times = times_ms(lambda: training.step(batch), torch.device("cpu"), steps, warmup=2)
    return {"ms": times, "parameters": sum(p.numel() for p in model.parameters())}


def measure_hook(toy: bool) -> dict[str, Any]:
    """Microseconds a hook costs beyond its update: tensors so small that arithmetic takes next to no time.

    Backward with hooks, less backward without them, less the same updates called one by one.
    """
    import torch

    from experiments.measuring import times_ms
    from lightning_sonar.optim import FusedAdamW
    from lightning_sonar.optim.update import adamw_
    from lightning_sonar.release import release_in_backward

    count, rounds = (8, 3) if toy else (200, 40)
    device = torch.device("cpu")
    tensors = [torch.nn.Parameter(torch.randn(4, 4, 4)) for _ in range(count)]
    factors = [torch.randn(4, 4, 4) for _ in range(count)]
    optimizer = FusedAdamW(tensors, lr=1e-4)
    optimizer.init_state()
    grads = [torch.randn(4, 4, 4) for _ in range(count)]
    state = [optimizer.state[tensor] for tensor in tensors]
    settings: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2}

    def loss() -> torch.Tensor:
        return torch.stack([(tensor * factor).sum() for tensor, factor in zip(tensors, factors, strict=True)]).sum()

    def update_all() -> None:
        for tensor, grad, own in zip(tensors, grads, state, strict=True):
            adamw_(tensor, grad, own["exp_avg"], own["exp_avg_sq"], own["step"], **settings)

    def backward(run: Any) -> list[float]:
        # Only backward counts; building the graph does not.
        found = []
        for _ in range(rounds + 3):
            value = loss()
            found += times_ms(lambda value=value: run(value), device, 1, warmup=0)
            optimizer.step()  # ends the hooks' step; without hooks there are gradients, whose update does not count
            optimizer.zero_grad(set_to_none=True)
        return found[3:]

    plain = statistics.median(backward(lambda value: value.backward()))
    update = statistics.median(times_ms(update_all, device, rounds))
    handle = release_in_backward(optimizer, tensors)
    hooked = statistics.median(backward(handle.backward))
    handle.remove()
    each = {"backward": plain, "update": update, "hooked": hooked}
    return {
        "hook_us": (hooked - plain - update) / count * 1e3,
        "each_us": {name: value / count * 1e3 for name, value in each.items()},
        "hooks": count,
    }


def measure_bandwidth(toy: bool) -> dict[str, Any]:
    """GB/s of the bf16 update and of a copy that moves as many bytes, in turns."""
    import torch

    from experiments.measuring import copy_rate, median_ms
    from lightning_sonar.optim.update import adamw_

    device = torch.device("cpu")
    count = 2**12 if toy else 2**26
    param, grad, first, second = (torch.full((count,), 0.01, dtype=torch.bfloat16) for _ in range(4))
    step = torch.zeros(())
    nbytes = 14 * count  # four tensors read, three written
    updates, copies = [], []
    for _ in range(3):
        ms = median_ms(
            lambda: adamw_(
                param, grad, first, second, step, lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2
            ),
            device,
            2 if toy else 5,
            1,
        )
        updates.append(nbytes / ms / 1e6)
        copies.append(copy_rate(nbytes, device, 2 if toy else 5))
    update, copy = statistics.median(updates), statistics.median(copies)
    return {"update_gb_per_s": update, "copy_gb_per_s": copy, "share_of_copy": update / copy, "elements": count}


def measure(what: str, toy: bool, steps: int) -> dict[str, Any]:
    """One measurement, by the name that a process is given."""
    import torch

    if what == "hook":
        found = measure_hook(toy)
    elif what == "bandwidth":
        found = measure_bandwidth(toy)
    else:
        found = measure_steps(what, toy, steps)
    return {**found, "threads": torch.get_num_threads(), "torch": torch.__version__}


# Around them.


def spawn(what: str, toy: bool, steps: int) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", what, "--steps", str(steps)]
    done = subprocess.run(
        [*command, *(["--toy"] if toy else [])],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"measuring {what} failed with code {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def ratios(times: dict[str, list[list[float]]], baseline: str = BASELINE) -> dict[str, dict[str, float]]:
    """Each mode's step time against the baseline's.

    Args:
        times: by mode, for each round, the milliseconds of its steps.
        baseline: the mode that the others are compared with.

    Returns:
        By mode: the median over all steps, its ratio to the baseline's, and the least and greatest ratio of a round.
    """
    medians = {mode: [statistics.median(steps) for steps in rounds] for mode, rounds in times.items()}
    whole = {mode: statistics.median(ms for steps in rounds for ms in steps) for mode, rounds in times.items()}
    found = {}
    for mode in times:
        each = [own / base for own, base in zip(medians[mode], medians[baseline], strict=True)]
        ratio = whole[mode] / whole[baseline]
        found[mode] = {"median_ms": whole[mode], "ratio": ratio, "least": min(each), "greatest": max(each)}
    return found


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    """ "met" or "missed" by goal, for those that were measured; a ratio may be within the spread over rounds."""
    found = {}
    if "sonar" in result["modes"]:
        row, goal = result["modes"]["sonar"], GOALS["sonar_ratio"]
        met = "met" if row["ratio"] <= goal else "met within the spread" if row["least"] <= goal else "missed"
        found["sonar_ratio"] = met
    if "hook" in result:
        found["hook_us"] = "met" if result["hook"]["hook_us"] <= GOALS["hook_us"] else "missed"
    if "bandwidth" in result:
        share = result["bandwidth"]["share_of_copy"]
        found["share_of_copy"] = "met" if share >= GOALS["share_of_copy"] else "missed"
    return found


def print_result(result: dict[str, Any]) -> None:
    """The table, and a line for each goal."""
    print(f"\n{'mode':<26}{'ms a step':>12}{'ratio':>9}{'spread over rounds':>22}")
    for mode, row in result["modes"].items():
        spread = f"{row['least']:.3f} to {row['greatest']:.3f}"
        print(f"{mode:<26}{row['median_ms']:>12.1f}{row['ratio']:>9.3f}{spread:>22}")
    said = dict.fromkeys(GOALS, "a toy says nothing of it") if result["toy"] else result["verdicts"]
    if "sonar" in result["modes"]:
        row = result["modes"]["sonar"]
        print(
            f"\nsonar against {BASELINE}: {row['ratio']:.3f} (goal at most {GOALS['sonar_ratio']}: "
            f"{said['sonar_ratio']})"
        )
    hook = result["hook"]
    print(
        f"a hook beyond its update: {hook['hook_us']:.1f} us (goal at most {GOALS['hook_us']:.0f}: {said['hook_us']})"
    )
    rate = result["bandwidth"]
    print(
        f"the bf16 update: {rate['update_gb_per_s']:.2f} GB/s, {rate['share_of_copy']:.0%} of a copy's "
        f"{rate['copy_gb_per_s']:.2f} (goal at least {GOALS['share_of_copy']:.0%}: {said['share_of_copy']})"
    )
    if result["toy"]:
        print("Toy sizes: this shows that the script works. Its figures mean nothing.")


def write(path: Path, result: dict[str, Any]) -> None:
    """The file is whole at any moment; nothing that was measured is lost to what fails later."""
    write_text(path, json.dumps(result, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="times that all take a turn (default: %(default)s)")
    parser.add_argument(
        "--steps",
        type=int,
        default=8,
        help="timed steps of a mode in a round, after two untimed (default: %(default)s)",
    )
    parser.add_argument("--modes", default=",".join(MODES), help="names of modes, with commas (default: %(default)s)")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("outputs/bench.json"),
        metavar="PATH",
        help="file of the figures (default: %(default)s)",
    )
    parser.add_argument(
        "--toy",
        action="store_true",
        help="sizes that take no time, to see that the script works; the figures mean nothing",
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(options.measure, options.toy, options.steps)))
        return 0

    from experiments.machine import processor

    modes = options.modes.split(",")
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or options.rounds < 1 or options.steps < 1:
        parser.error(f"--modes takes some of {', '.join(MODES)}, --rounds and --steps at least 1")
    modes = list(dict.fromkeys((BASELINE, *modes)))
    times: dict[str, list[list[float]]] = {mode: [] for mode in modes}
    result: dict[str, Any] = {"toy": options.toy, "rounds": options.rounds, "processor": processor(), "goals": GOALS}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for turn in range(options.rounds):
        # Another mode first in each round, so that a machine that slows down slows none in particular.
        for mode in (*modes[turn % len(modes) :], *modes[: turn % len(modes)]):
            found = spawn(mode, options.toy, options.steps)
            times[mode].append(found.pop("ms"))
            result |= found
            print(f"round {turn + 1}, {mode}: median {statistics.median(times[mode][-1]):.1f} ms", flush=True)
        result |= {"modes": ratios(times), "ms": times}
        write(options.json, result)
    for what in ("hook", "bandwidth"):
        result[what] = spawn(what, options.toy, options.steps)
        write(options.json, result)
    result["verdicts"] = None if options.toy else verdicts(result)
    write(options.json, result)
    print_result(result)
    print(f"Written to {options.json}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
