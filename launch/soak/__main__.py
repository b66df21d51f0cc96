"""Starts the package ``launch.soak``: ``python -m launch.soak`` or ``python launch/soak``."""

import sys
from pathlib import Path

# The checkout in place of this folder, whose module names (`schedule`) other packages have too.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from launch.soak.main import main  # noqa: E402  found by the line above

if __name__ == "__main__":
    sys.exit(main())
