"""One device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_sonar.strategies.mixin import SonarMoEStrategyMixin

if TYPE_CHECKING:
    _Base = SingleDeviceStrategy
else:
    _Base = object


class TrainersDevice(_Base):
    """Lets a single-device strategy run on the device that the Trainer chooses, unless one is given."""

    def __init__(self, device: str | torch.device | None = None, **kwargs: Any) -> None:
        super().__init__(device="cpu" if device is None else device, **kwargs)
        # Its presence makes the Trainer's connector fill in the device it has chosen.
        self.parallel_devices: list[torch.device] | None = None if device is None else [self._root_device]

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices
        if not devices:
            return self._root_device
        if len(devices) > 1:
            raise ValueError(
                f"SonarMoEStrategy runs on one device, but the Trainer was given {len(devices)}. Set devices=1, or "
                "take SonarMoEDDPStrategy (each device holds the whole model) or SonarMoEFSDPStrategy (each a shard)."
            )
        return devices[0]


class SonarMoEStrategy(SonarMoEStrategyMixin, TrainersDevice, SingleDeviceStrategy):
    """Updates expert tensors inside backward, on one device::

        trainer = L.Trainer(strategy=SonarMoEStrategy(), gradient_clip_val=1.0, precision="bf16-true")
        trainer.fit(any_lightning_module_unchanged, data)

    The device is the Trainer's (``accelerator``, ``devices``) unless ``device`` is given. The other arguments are those
    of `SonarMoEStrategyMixin`.
    """

    strategy_name = "sonar_moe"
