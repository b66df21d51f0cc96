"""The main job: ``torchrun --nproc-per-node=2 launch/train.py`` or ``python launch/train.py``, with Hydra overrides."""

from distaccum.train.__main__ import main

if __name__ == "__main__":
    main()
