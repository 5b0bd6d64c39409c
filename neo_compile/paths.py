"""Where files that outlive a process are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The directory of cost tables and converted models: NEO_CACHE, or neo_compile under the user's cache directory."""
    explicit = os.environ.get("NEO_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "neo_compile"
