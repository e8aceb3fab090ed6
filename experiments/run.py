"""Train an MoE model in one of the modes, measure it, and leave the figures in a folder.

python experiments/run.py model=olmoe mode=sonar
python experiments/run.py -m mode=standard,sonar backend=eager,grouped_mm
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from experiments.launch import launch

if __name__ == "__main__":
    sys.exit(launch(Path(__file__).resolve(), sys.argv[1:]))
