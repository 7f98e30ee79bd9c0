"""Reads ``names.ini``."""

import configparser
from pathlib import Path

_FILE = configparser.ConfigParser()
_FILE.read(Path(__file__).with_suffix(".ini"), encoding="utf-8")


def names(namespace: str, kind: str) -> list[str]:
    """The functions that the file lists there."""
    return _FILE[namespace][kind].split()
