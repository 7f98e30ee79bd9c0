"""For tests: apex's names on ampfuse's modules, taken away again afterwards."""

import contextlib
import sys

from ampfuse.amp import function_casts
from ampfuse.compat import apex
from ampfuse.compat.apex.installing import EXTENSIONS


def _names():
    return {n: m for n, m in sys.modules.items() if n.split(".")[0] in ("apex", *EXTENSIONS)}


@contextlib.contextmanager
def clean():
    """What a block installs under apex's names, and the state of amp, end with it."""
    before = _names()
    state = apex.amp._amp_state
    try:
        yield
    finally:
        if hasattr(state, "handle"):
            state.handle._deactivate()
        function_casts.restore_registered()
        state.hard_override = state.allow_incoming_model_not_fp32 = False
        for name in _names():
            del sys.modules[name]
        sys.modules.update(before)
