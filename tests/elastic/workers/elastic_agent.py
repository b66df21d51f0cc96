"""The agent, with stand-ins for its workers."""

import sys
from pathlib import Path

from distaccum.elastic.agent.command import main

if __name__ == "__main__":
    main([sys.executable, str(Path(__file__).with_name("elastic_standin.py"))])
