"""Writes ``train.bin`` and ``val.bin``: a text's bytes as uint16 token ids, the last tenth held out.

``python prepare.py`` takes the documentation that comes with every CPython, ``python prepare.py FILE...`` your files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

if sys.argv[1:]:
    text = b"\n".join(Path(name).read_bytes() for name in sys.argv[1:])
else:
    text = "\n".join(topics[name] for name in sorted(topics)).encode()

ids = np.frombuffer(text, dtype=np.uint8).astype("<u2")
cut = int(0.9 * len(ids))
for name, part in (("train", ids[:cut]), ("val", ids[cut:])):
    part.tofile(f"{name}.bin")
    print(f"{name}.bin: {len(part):,} tokens")
