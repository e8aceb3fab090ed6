"""Arithmetic on a model's configuration, by which the search for what fits saves simulations."""

from __future__ import annotations

from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from experiments.plans import model_values
from lightning_sonar import models
from lightning_sonar.memory.optimizer_models import with_models
from lightning_sonar.memory.planner import PRECISIONS
from lightning_sonar.memory.simulate import SimulationMode
from lightning_sonar.memory.sizing import training_requirement
from lightning_sonar.modes import resolve_mode


class Shape:
    """What can be said of settled configurations of one model without simulating a step; what is slow is kept."""

    def __init__(self) -> None:
        self._config: Any = None
        self._counts = (0, 0)
        self._per_element: dict[str, tuple[float, float]] = {}

    def floor(self, cfg: DictConfig) -> int:
        """Bytes of the parameters, the states and the gradients that the mode keeps, whatever the batch."""
        self._look(cfg)
        mode = resolve_mode(cfg.mode.name, cfg.mode.expert_clip)
        need = training_requirement(*self._counts, mode, PRECISIONS[str(cfg.trainer.precision)])
        # States in host memory take none of the device's.
        states = 0 if cfg.mode.get("expert_state_device") else self.states(cfg)
        return need.parameters + states + need.gradients

    def states(self, cfg: DictConfig) -> int:
        """Bytes of the optimizer's states, as it makes them for two tensors; 0 if it cannot step them here."""
        self._look(cfg)
        dtype = PRECISIONS[str(cfg.trainer.precision)]
        key = f"{dtype} {OmegaConf.to_yaml(cfg.optimizer)}"
        if key not in self._per_element:
            self._per_element[key] = state_bytes(cfg.optimizer, dtype)
        dense, experts = self._per_element[key]
        total, in_experts = self._counts
        return int(dense * (total - in_experts) + experts * in_experts)

    def activations(self, cfg: DictConfig) -> int:
        """Roughly the bytes that one sequence adds to the peak: good for a first guess and for nothing else."""
        self._look(cfg)
        config = self._config.get_text_config()
        hidden, layers = config.hidden_size, config.num_hidden_layers
        inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        top = getattr(config, "num_experts_per_tok", 1)
        width = PRECISIONS[str(cfg.trainer.precision)].itemsize
        layer = width * (14 * hidden + top * (2 * hidden + 4 * inner))
        kept = layers * width * hidden + layer if cfg.model.checkpointing else layers * layer
        # Logits, their fp32 copy and its gradient.
        head = config.vocab_size * (width + 8) if cfg.model.loss == "full" else 0
        return cfg.data.seq_len * (kept + head)

    def _look(self, cfg: DictConfig) -> None:
        if self._config is None:
            self._config = models.build_config(
                cfg.model.name,
                cfg.model.size,
                num_layers=cfg.model.num_layers,
                model_id=cfg.model.id,
                trust_remote_code=cfg.model.trust_remote_code,
                **model_values(cfg),
            )
            self._counts = models.count_parameters(self._config, cfg.model.trust_remote_code)


def state_bytes(optimizer: DictConfig, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes of state for each element of a dense and of an expert tensor, by stepping one of each on fake tensors.

    Low-bit optimizers are stood for by their models, which allocate as much. 0 where one cannot be made here: it then
    prunes nothing.

    Args:
        optimizer: the configuration, whose target makes the optimizer from parameters.
        dtype: of the parameters.
    """
    try:
        with SimulationMode():
            tensors = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((512, 512), (4, 256, 256))]
            for tensor in tensors:
                tensor.grad = torch.zeros_like(tensor)
            made = with_models(instantiate(optimizer))(tensors)
            made.step()
        states = [[v for v in made.state[t].values() if isinstance(v, torch.Tensor)] for t in tensors]
        dense, experts = (sum(v.nbytes for v in state if v.numel() > 1) / 512**2 for state in states)
        return dense, experts
    except Exception:  # whatever an optimizer says that needs another device or package
        return 0.0, 0.0
