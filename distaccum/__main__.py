"""``python -m distaccum NAME ...`` and ``torchrun ... -m distaccum train``: the command ``distaccum``."""

from __future__ import annotations

from distaccum.program import main

if __name__ == "__main__":
    main()
