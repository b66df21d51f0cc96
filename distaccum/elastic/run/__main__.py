"""``python -m distaccum.elastic.run``, as an agent starts it: the main job, in a process of an elastic job."""

from __future__ import annotations

import signal

from distaccum.train.__main__ import main

if __name__ == "__main__":
    main("distaccum.elastic.run.launch:main", dies_by=signal.SIGKILL)
