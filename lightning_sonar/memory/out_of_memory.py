"""What is said when a run goes out of memory: what was alive, and which change would have fitted. Arithmetic only."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_sonar.memory.report import size_text
from lightning_sonar.modes import MODES, Mode, mode_name

_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_AMOUNT = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_LOSSES = ("nothing", "clipping on experts", "all clipping")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out: PyTorch's own (CUDA), the CPU allocator's, or Python's."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def asked_for(message: str) -> tuple[int, int] | None:
    """Bytes that the refused allocation asked for, and how far the text may be off by rounding; None if it is silent.

    PyTorch's CUDA allocator writes two digits behind the point, its CPU allocator all bytes.
    """
    return _amount(rf"[Tt]ried to allocate {_AMOUNT}", message)


def allocated(message: str) -> int | None:
    """Bytes that PyTorch's CUDA allocator had handed out when it refused, if the message says so."""
    found = _amount(rf"Of the allocated memory {_AMOUNT} is allocated by PyTorch", message)
    return None if found is None else found[0]


def _amount(pattern: str, text: str) -> tuple[int, int] | None:
    found = re.search(pattern, text)
    if found is None:
        return None
    unit = _UNITS[found[2]]
    return int(float(found[1]) * unit), 0 if unit == 1 else int(0.005 * unit) + 1


@dataclass(frozen=True)
class Alive:
    """What was alive when memory ran out, in bytes.

    Attributes:
        parameters: the model's parameters.
        optimizer_state: the state that the optimizers had by then.
        expert_gradients: gradients of expert tensors.
        dense_gradients: all other gradients.
        rest: activations, temporaries and whatever else there was; ``rest_source`` says how it was found.
        rest_source: where ``rest`` comes from.
    """

    parameters: int
    optimizer_state: int
    expert_gradients: int
    dense_gradients: int
    rest: int
    rest_source: str

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.parameters + self.optimizer_state + self.expert_gradients + self.dense_gradients + self.rest


@dataclass(frozen=True)
class Needs:
    """What a whole step needs, in bytes: some of it whatever the mode, some of it as the mode decides.

    Attributes:
        parameters: the model's parameters.
        states: optimizer state once every trained tensor has been stepped.
        expert_gradients: gradients of all trained expert tensors.
        dense_gradients: gradients of all other trained tensors.
        largest_expert_gradient: the largest among the first.
        largest_dense_gradient: the largest among the second.
        rest: all that was alive beside these when memory ran out, what was asked for included.
        process: the part of ``rest`` that was there before the step, which no batch size changes.
    """

    parameters: int
    states: int
    expert_gradients: int
    dense_gradients: int
    largest_expert_gradient: int
    largest_dense_gradient: int
    rest: int
    process: int = 0

    @property
    def activations(self) -> int:
        """The part of the rest that the batch decides, at most, in bytes."""
        return max(0, self.rest - self.process)

    def of(self, mode: Mode, accumulating: bool = False) -> int:
        """Bytes that a step needs in ``mode``.

        Parameters, states, the gradients that are kept until backward ends, the largest one that is freed inside
        it, and the rest. It is an upper bound where memory ran out in backward, as the rest only shrinks from
        there on, and a lower one where it ran out in forward, as the rest was still growing.

        Args:
            mode: the mode.
            accumulating: gradients are summed over several backwards before the hooks act, so all are kept.
        """
        kept, passing = 0, 0
        parts = (
            (True, self.expert_gradients, self.largest_expert_gradient),
            (False, self.dense_gradients, self.largest_dense_gradient),
        )
        for is_expert, total, largest in parts:
            if mode.steps_in_backward(is_expert) and not accumulating:
                passing = max(passing, largest)
            else:
                kept += total
        return self.parameters + self.states + kept + passing + self.rest


@dataclass(frozen=True)
class Option:
    """One change that may make the run fit.

    Attributes:
        change: what to change.
        needed_bytes: what a step would need then; None if arithmetic cannot tell.
        fits: whether that is there; None if arithmetic cannot tell.
        note: what it costs, or what is not known.
    """

    change: str
    needed_bytes: int | None
    fits: bool | None
    note: str = ""


def options(
    needs: Needs, *, capacity: int, mode: Mode | None, accumulating: bool = False, cuda: bool = False
) -> list[Option]:
    """What would have fitted, best first: what fits and gives up least, what may fit, what does not.

    Args:
        needs: what a step needs, in bytes.
        capacity: bytes that there are for it.
        mode: the run's mode; None is plain Lightning, which keeps and clips all gradients.
        accumulating: whether the run sums gradients over several backwards and its hooks wait for the last one.
        cuda: whether a caching allocator may have been fragmented.
    """
    present = mode or MODES["standard"]
    now = needs.of(present, accumulating)
    modes = _modes(needs, capacity, mode, accumulating, now)
    found = [option for _, option in modes]
    if now <= capacity:
        remedy = " PYTORCH_ALLOC_CONF=expandable_segments:True helps against fragments." if cuda else ""
        note = f"memory was fragmented, or something else took it for a moment.{remedy}"
        found.append(Option("the same settings once more", now, None, note))
    else:
        found += _smaller_batch(needs, capacity, now, modes)
        lacks, most = now - capacity, needs.activations
        rest = f"{size_text(lacks)} would have to go, and activations are {size_text(most)} at most"
        for change, what in (
            ("cross-entropy in chunks (model.loss=chunked, LanguageModel(loss='chunked'))", "never holds all logits"),
            ("activation checkpointing (model.checkpointing=true)", "keeps the inputs of the layers only"),
        ):
            note = f"{what}; how much that takes off is not known here: {rest}"
            found.append(Option(change, None, None if most >= lacks else False, note))
    # The sort is stable, so what gives up least stays first among equals.
    return sorted(found, key=lambda option: {True: 0, None: 1, False: 2}[option.fits])


def _modes(needs: Needs, capacity: int, mode: Mode | None, accumulating: bool, now: int) -> list[tuple[Mode, Option]]:
    """The named modes that need less than the run did, those first that give up least."""
    found = []
    for name, other in MODES.items():
        needed = needs.of(other)
        if other.in_backward == "none" or needed >= now or (accumulating and other.expert_clip == "exact"):
            continue  # accumulated, exact clipping saves nothing
        settings = [f"mode={name!r}"]
        note = f"gives up {other.gives_up}"
        if accumulating:
            settings.append("accumulation='per_microbatch'")
            note += ", and updates once a microbatch"
        if other.clip == "none":
            note += " (gradient_clip_val=None)"
        text = ", ".join(settings)
        change = f"strategy=SonarMoEStrategy({text})" if mode is None else text
        found.append((other, Option(change, needed, needed <= capacity, note)))
    return sorted(found, key=lambda pair: _LOSSES.index(pair[0].gives_up) if pair[0].gives_up in _LOSSES else 9)


def _smaller_batch(needs: Needs, capacity: int, now: int, modes: list[tuple[Mode, Option]]) -> list[Option]:
    """A smaller batch in the run's mode, or else in the leanest one, if that does not fit with the whole batch."""
    candidates = [(now, "same mode")]
    leanest = min((option for _, option in modes), key=lambda option: option.needed_bytes or 0, default=None)
    if leanest is not None and leanest.needed_bytes is not None:
        candidates.append((leanest.needed_bytes, leanest.change))
    for needed, change in candidates:
        if needed <= capacity:
            return []
        # Activations are linear in the batch, and all else stays.
        left = capacity - (needed - needs.activations)
        percent = int(100 * left / needs.activations) if needs.activations else 0
        if percent >= 1:
            text = f"a batch of at most {percent}% of this one ({change})"
            return [Option(text, None, True, f"if its activations are all of {size_text(needs.activations)}")]
    fixed = candidates[-1][0] - needs.activations
    return [Option("a smaller batch", fixed, False, "not even without any activations; the model is too large")]


@dataclass(frozen=True)
class OutOfMemory:
    """One failure, ready for JSON; `message` is what a person reads.

    Attributes:
        error: the first line of the exception.
        device: the device that ran out, such as ``cuda:0``.
        phase: ``forward``, ``backward``, ``clip``, ``step``, ``done`` (after the step), or what else was going on.
        step: optimizer step of this fit, 0 is the first.
        mode: name of the mode; None in plain Lightning.
        asked_bytes: what the refused allocation asked for, if the exception says so.
        asked_gradient: whether that is the size of a gradient that was still to come.
        capacity_bytes: what this process could have had for tensors (and, where ``alive.rest`` is process memory,
            for itself).
        alive: what was alive.
        needed_by_mode: bytes that a step needs in each named mode.
        needed_bytes: the same for the mode of the run.
        options: what would have fitted, best first.
        process_bytes: the part of ``capacity_bytes`` that this process takes beside tensors, where that is in it.
        advice: what ``MemoryProfiler(advise=...)`` says, which stands before the options.
    """

    error: str
    device: str
    phase: str
    step: int
    mode: str | None
    asked_bytes: int | None
    asked_gradient: bool
    capacity_bytes: int
    alive: Alive
    needed_by_mode: dict[str, int]
    needed_bytes: int
    options: list[Option]
    process_bytes: int = 0
    advice: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dictionaries, lists and numbers, with the message."""
        return dataclasses.asdict(self) | {"message": self.message}

    @property
    def unfinished(self) -> bool:
        """Whether memory ran out in forward: more activations were still to come, and no one counted them."""
        return self.phase == "forward"

    @property
    def message(self) -> str:
        """What happened, what the memory was made of, and what would have fitted."""
        alive, asked = self.alive, "the exception does not say how much"
        if self.asked_bytes is not None:
            asked = size_text(self.asked_bytes) + (", the size of a gradient" if self.asked_gradient else "")
        mode = "plain Lightning" if self.mode is None else f"mode {self.mode!r}"
        lines = [
            f"Out of memory on {self.device} in phase {self.phase!r} of optimizer step {self.step} ({mode}).",
            f"  asked for  {asked}",
            f"  there is   {size_text(self.capacity_bytes)} for this process on {self.device}",
            f"  alive      {size_text(alive.total)}: parameters {size_text(alive.parameters)}, optimizer state "
            f"{size_text(alive.optimizer_state)}, expert gradients {size_text(alive.expert_gradients)}, dense "
            f"gradients {size_text(alive.dense_gradients)}, rest {size_text(alive.rest)} ({alive.rest_source})",
            f"  a step     needs {'at least ' if self.unfinished else ''}{size_text(self.needed_bytes)} as it is set",
        ]
        if self.advice:
            lines.append("What would have fitted, cheapest first, by the plan of each (a simulated step):")
            lines += [f"  {line}" for line in self.advice]
        sums = "parameters, states, the gradients that a mode keeps, and the rest as it was"
        verb = "may have" if self.unfinished else "would have"
        lines.append(f"What {verb} fitted, best first, by arithmetic ({sums}):")
        lines += [f"  {index}. {self._line(option)}" for index, option in enumerate(self.options, 1)]
        if self.unfinished:
            lines.append(
                "  It ran out in forward, before all activations were there: these needs are the least there can be. "
                "What a whole step needs, says plan_memory(...)."
            )
        return "\n".join(lines)

    def _line(self, option: Option) -> str:
        parts = [option.change + ":"]
        if option.needed_bytes is not None:
            spare = self.capacity_bytes - option.needed_bytes
            verdict = f"{size_text(abs(spare))} {'to spare' if spare >= 0 else 'too much'}"
            least = "at least " if self.unfinished else ""
            parts.append(f"needs {least}{size_text(option.needed_bytes)}, {verdict};")
        fits = "may fit" if self.unfinished else "fits"
        parts.append({True: fits, False: "does not fit", None: "may fit"}[option.fits])
        return " ".join(parts) + (f"; {option.note}" if option.note else "")


def failure(
    error: BaseException,
    needs: Needs,
    alive: Alive,
    *,
    capacity: int,
    mode: Mode | None,
    accumulating: bool,
    asked: int | None,
    asked_gradient: bool,
    device: str,
    phase: str,
    step: int,
) -> OutOfMemory:
    """Put what was measured and what follows from it into one record; all sizes in bytes."""
    return OutOfMemory(
        error=(str(error).splitlines() or [""])[0],
        device=device,
        phase=phase,
        step=step,
        mode=None if mode is None else mode_name(mode),
        asked_bytes=asked,
        asked_gradient=asked_gradient,
        capacity_bytes=capacity,
        alive=alive,
        needed_by_mode={name: needs.of(other, accumulating) for name, other in MODES.items()},
        needed_bytes=needs.of(mode or MODES["standard"], accumulating),
        process_bytes=needs.process,
        options=options(needs, capacity=capacity, mode=mode, accumulating=accumulating, cuda=device.startswith("cuda")),
    )
