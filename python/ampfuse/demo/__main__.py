"""``python -m ampfuse.demo``: the same as ``ampfuse demo``."""

import sys

from ampfuse.command_line import run_alone
from ampfuse.demo import cli

if __name__ == "__main__":
    sys.exit(run_alone(cli, None, "python -m ampfuse.demo"))
