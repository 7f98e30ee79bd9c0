"""``python -m ampfuse.demo``: the same as ``ampfuse demo``."""

import sys

from ampfuse.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
