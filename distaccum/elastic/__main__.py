"""``python -m distaccum.elastic``: an agent of an elastic job."""

from __future__ import annotations

from distaccum.elastic.agent.command import main

if __name__ == "__main__":
    main()
