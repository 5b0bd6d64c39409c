"""Imports go only downwards, and the scheduling files are standard library only.

    errors, checks, config <- _native, reference <- attention <- ops <- staged <- passes <- backend
    request <- plan <- block_pool, cost_model <- scheduler <- engine

Imports inside functions are lazy re-exports and hooks; they are allowed, as are imports for type checking.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "neo_compile"
RUNTIME = ROOT / "runtime"

# Scheduling, bottom up. A file imports only files before it.
POLICY_FILES = (
    "request",
    "plan",
    "block_pool",
    "interpolation",
    "cost_model",
    "cost_tables",
    "scheduler_config",
    "queues",
    "decision",
    "tiering",
    "admission",
    "composition",
    "hiding",
    "composer",
    "symmetric",
    "scheduler",
)

# The compiler, bottom up; files of one tuple do not import each other's successors.
COMPILER_LAYERS = (
    ("errors", "checks", "config"),
    ("_native", "reference"),
    ("attention",),
    ("ops",),
    ("staged",),
    ("passes",),
    ("backend",),
)


def eager_imports(path: Path) -> set[str]:
    """Modules that importing the file imports: not those inside functions or `if TYPE_CHECKING`."""
    found: set[str] = set()

    def visit(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import on line {node.lineno}"
                found.add(node.module or "")
                if node.module and node.module.startswith("neo_compile"):
                    found.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.If):
                if "TYPE_CHECKING" not in ast.dump(node.test):
                    visit(node.body)
                visit(node.orelse)
            elif isinstance(node, ast.Try):
                visit(node.body + node.orelse + node.finalbody)
                for handler in node.handlers:
                    visit(handler.body)
            elif isinstance(node, ast.With | ast.ClassDef):
                visit(node.body)

    visit(ast.parse(path.read_text()).body)
    return found


def existing(paths: list[Path]) -> list[Path]:
    return sorted(path for path in paths if path.exists() and path.stat().st_size)


def is_below(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


POLICY_PATHS = existing([RUNTIME / f"{name}.py" for name in POLICY_FILES])
RUNTIME_PATHS = existing(list(RUNTIME.rglob("*.py")))
COMPILER_PATHS = existing([path for path in PACKAGE.rglob("*.py") if (PACKAGE / "app") not in path.parents])


def level_of(path: Path) -> int | None:
    """Position in COMPILER_LAYERS."""
    top = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return next((i for i, layer in enumerate(COMPILER_LAYERS) if top in layer), None)


LAYERED_PATHS = [path for path in COMPILER_PATHS if level_of(path) is not None]


@pytest.mark.parametrize("path", POLICY_PATHS, ids=names(POLICY_PATHS))
def test_scheduling_is_standard_library_and_goes_downwards(path):
    position = POLICY_FILES.index(path.stem)
    allowed = {
        "neo_compile.errors",
        "neo_compile.checks",
        *(f"neo_compile.runtime.{name}" for name in POLICY_FILES[:position]),
    }
    for module in eager_imports(path):
        if is_below(module, "neo_compile"):
            assert any(is_below(module, name) for name in allowed), f"{path.name} imports {module}"
        else:
            assert module.split(".")[0] in sys.stdlib_module_names, f"{path.name} imports {module}"


@pytest.mark.parametrize("path", COMPILER_PATHS, ids=names(COMPILER_PATHS))
def test_the_compiler_never_imports_the_runtime_or_the_app(path):
    for module in eager_imports(path):
        for upper in ("neo_compile.runtime", "neo_compile.app"):
            assert not is_below(module, upper), f"{path.name} imports {module}"


@pytest.mark.parametrize("path", LAYERED_PATHS, ids=names(LAYERED_PATHS))
def test_the_compiler_imports_downwards(path):
    for module in eager_imports(path):
        for layer in COMPILER_LAYERS[level_of(path) + 1 :]:
            for name in layer:
                assert not is_below(module, f"neo_compile.{name}"), f"{path.name} imports {module}"


@pytest.mark.parametrize("path", RUNTIME_PATHS, ids=names(RUNTIME_PATHS))
def test_the_runtime_meets_the_compiler_only_at_the_staged_model(path):
    for module in eager_imports(path):
        assert not is_below(module, "neo_compile.app"), f"{path.name} imports {module}"
        assert not is_below(module, "neo_compile.passes"), f"{path.name} imports {module}"
        assert not is_below(module, "neo_compile.backend"), f"{path.name} imports {module}"


def test_importing_the_scheduler_needs_no_torch():
    code = "import sys, neo_compile.runtime.scheduler as s; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_eager_imports_sees_through_conditions_but_not_into_functions(tmp_path):
    source = tmp_path / "module.py"
    source.write_text(
        "import a\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import b\nelse:\n    import c\n"
        "try:\n    import d\nexcept ImportError:\n    import e\n"
        "def f():\n    import g\n"
        "class C:\n    import h\n"
    )
    assert eager_imports(source) == {"a", "typing", "c", "d", "e", "h"}
