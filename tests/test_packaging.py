"""What an installation looks like: made from the source distribution, as a user of a released version would get it."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

# Calls the build backend in a folder: python -c BUILD build_sdist|build_wheel OUT
BUILD = "import sys; from scikit_build_core import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"


def _build(what: str, folder: Path, out: Path) -> Path:
    """Run the build backend's `what` in `folder`; the path of what it made. C++ kernels only, to be quick."""
    result = subprocess.run(
        [sys.executable, "-c", BUILD, what, str(out)],
        cwd=folder,
        env={**os.environ, "NEO_ISPC": "OFF"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return out / result.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution."""
    out = tmp_path_factory.mktemp("sdist")
    with tarfile.open(_build("build_sdist", REPOSITORY, out)) as archive:
        archive.extractall(out, filter="data")
    (folder,) = (path for path in out.iterdir() if path.is_dir())
    return folder


@pytest.fixture(scope="module")
def wheel_files(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names in a wheel built from the source distribution alone."""
    with zipfile.ZipFile(_build("build_wheel", sdist, tmp_path_factory.mktemp("wheel"))) as archive:
        return archive.namelist()


def test_sdist_has_every_source(sdist: Path) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout: the list of files to compare with is missing")
    missing = [
        name
        for name in tracked.stdout.splitlines()
        if not name.startswith(".") and (REPOSITORY / name).exists() and not (sdist / name).exists()
    ]
    assert missing == []
    assert not (sdist / "build").exists()
    assert not (sdist / ".venv").exists()


def test_wheel_installs_one_package(wheel_files: list[str]) -> None:
    top_level = {name.split("/")[0] for name in wheel_files}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"neo_compile"}


def test_wheel_is_complete(wheel_files: list[str]) -> None:
    for pattern in ("neo_compile/*.py", "neo_compile/passes/*.py", "neo_compile/app/*.py"):
        for path in REPOSITORY.glob(pattern):
            assert path.relative_to(REPOSITORY).as_posix() in wheel_files
    for path in (REPOSITORY / "runtime").rglob("*.py"):
        assert f"neo_compile/{path.relative_to(REPOSITORY).as_posix()}" in wheel_files
    assert "neo_compile/py.typed" in wheel_files
    assert sum(name.startswith("neo_compile/_C.") and name.endswith(".so") for name in wheel_files) == 1
    assert not any(name.endswith((".cpp", ".h", ".ispc", ".isph")) for name in wheel_files)
    assert any(name.endswith("licenses/LICENSE") for name in wheel_files)


def test_installed_entry_points() -> None:
    (backend,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="neo")
    assert backend.value == "neo_compile.backend:neo"
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="neo")
    assert command.value == "neo_compile.app.cli:main"


def test_runtime_is_part_of_the_package(tmp_path: Path) -> None:
    # Elsewhere than in the repository, whose top level has a folder `runtime`.
    code = "import neo_compile.runtime.scheduler as scheduler; print(scheduler.__name__)"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.strip() == "neo_compile.runtime.scheduler", result.stderr


def test_versions_agree() -> None:
    import neo_compile

    assert importlib.metadata.version("neo-compile") == neo_compile.__version__
