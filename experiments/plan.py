"""Predict the peak memory of a training step: see --help."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Fake tensors fill caches of compiled kernels and shapes that this process never uses again.
for name, value in (("LRU_CACHE_CAPACITY", "64"), ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0"), ("MALLOC_ARENA_MAX", "1")):
    os.environ.setdefault(name, value)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from experiments.planning import main  # noqa: E402

if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has read enough, as head does. Python would flush once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
