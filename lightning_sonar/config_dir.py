"""Where the Hydra configs are: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path


def config_dir() -> Path:
    """The absolute folder of the configs.

    Raises:
        FileNotFoundError: if the installation has none; the message lists where it looked.
    """
    package = Path(__file__).resolve().parent
    places = [package / "conf", package.parent / "conf"]
    for place in places:
        if (place / "config.yaml").is_file():
            return place
    raise FileNotFoundError(f"No config.yaml of lightning_sonar in {' or '.join(map(str, places))}. Reinstall it.")
