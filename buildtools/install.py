"""Run ``pip install`` and show how many files are compiled, of how many.

    python buildtools/install.py ARGUMENTS_OF_PIP_INSTALL ...

pip's own output is printed if the installation fails, and warnings of the compiler always.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time


def main(arguments: list[str]) -> int:
    command = [sys.executable, "-m", "pip", "install", "-v", *arguments]
    start, shown = time.monotonic(), 0.0
    output = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            output.append(line)
            if step := re.match(r"\s*\[(\d+)/(\d+)\] ", line):
                done, total = map(int, step.groups())
                # A terminal shows each file on one line; a log gets a line now and then.
                if sys.stdout.isatty() or done == total or time.monotonic() - shown > 30:
                    shown = time.monotonic()
                    end = "\n" if done == total or not sys.stdout.isatty() else "\r"
                    seconds = int(shown - start)
                    print(f"  {done} of {total} files compiled, {seconds} s", end=end, flush=True)
            elif re.search(r": warning: ", line):
                print(line, end="")
    if pip.returncode:
        print("".join(output))
    return pip.returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("Interrupted. Run the command again: what is compiled is kept.")
