"""One module for each framework, imported by who uses that framework and by nobody else.

=========================  =============================
``lightning``, ``fabric``  precision plugins
``accelerate``             levels for an ``Accelerator``
``transformers``           levels for a ``Trainer``
``timm``                   the optimizers by name
=========================  =============================

``pip install 'ampfuse[integrations]'`` installs the versions that these are tested with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needs(package: str) -> Iterator[None]:
    """A block of imports from `package`. If that is missing, ImportError says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ImportError(
            f"ampfuse.integrations needs {package} here: run pip install {package}, or "
            "pip install 'ampfuse[integrations]' for the versions that ampfuse is tested with.",
            name=package,
        ) from error
