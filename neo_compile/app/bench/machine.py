"""Where figures come from: the part of a report's "machine" that every benchmark shares."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from typing import Any

from neo_compile import _native

PACKAGES = ("neo-compile", "torch", "transformers")


def machine_facts(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """CPU, usable cores, kernels and versions of what is installed of `packages`."""
    return {
        "cpu": _native.cpu_name(),
        "usable_cpus": len(_native.usable_cpus()),
        "isa": _native.isa(),
        "python": platform.python_version(),
        "versions": _versions(packages),
    }


def _versions(packages: Sequence[str]) -> dict[str, str]:
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
