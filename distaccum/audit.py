"""``python -m distaccum.audit`` and ``distaccum-audit``: a script's gradient beside the global batch's.

A file of its own, which nothing imports: ``from distaccum import audit`` is the context manager of
:mod:`distaccum.auditing.session`, and an import of this module would hide it.
"""

from __future__ import annotations

from distaccum.auditing.command import main

if __name__ == "__main__":
    main()
