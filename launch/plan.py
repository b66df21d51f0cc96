"""The forecast of a run: ``python launch/plan.py``, with Hydra overrides; ``distaccum plan`` is the same command."""

from distaccum.tools.plan.command import main

if __name__ == "__main__":
    main()
