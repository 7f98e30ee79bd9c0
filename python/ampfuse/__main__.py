"""``python -m ampfuse``: the same as ``ampfuse``."""

from __future__ import annotations

import sys

from ampfuse.cli import main

if __name__ == "__main__":
    sys.exit(main())
