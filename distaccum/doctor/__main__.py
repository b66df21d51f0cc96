"""``python -m distaccum.doctor``, as torchrun starts it on every rank."""

from __future__ import annotations

from distaccum.doctor.command import main

if __name__ == "__main__":
    main()
