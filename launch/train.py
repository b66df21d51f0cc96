"""The main job: ``torchrun --nproc-per-node=2 launch/train.py`` or ``python launch/train.py``, with Hydra overrides."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C within the imports: no traceback

from distaccum.train.__main__ import main  # noqa: E402  after the line above

if __name__ == "__main__":
    main()
