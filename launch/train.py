"""The main job: ``torchrun --nproc-per-node=2 launch/train.py`` or ``python launch/train.py``, with Hydra overrides."""

import signal
import sys
from importlib.util import find_spec

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C within the imports: no traceback

NEEDED = ("torch", "numpy", "hydra", "omegaconf", "safetensors", "rich")
if missing := [name for name in NEEDED if find_spec(name) is None]:
    there = "`pip install -e .` installs them, and `bash launch/train.sh` does so first"
    sys.exit(f"not installed, and needed: {', '.join(missing)}; {there}")

from distaccum.train.__main__ import main  # noqa: E402  after the lines above

if __name__ == "__main__":
    main()
