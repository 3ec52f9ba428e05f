"""The structure in ARCHITECTURE.md: imports go one way, a public class is defined once, READMEs name every module."""

from __future__ import annotations

import ast
import collections
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.tools import DEADLINE_SECONDS
from wattwatch.watcher.config.settings import RECEIVER_TYPES

ROOT = Path(__file__).parents[1]
LINT_IMPORTS = "from importlinter.cli import lint_imports_command; lint_imports_command()"
PACKAGES = ("collectors", "trainer", "watcher")
RECEIVERS = Path("watcher/alerting/receivers")
STAGES = (
    "cli", "demo", "backtest", "daemon", "incidents", "web", "recordings", "alerting", "engine", "diagnosis", "config",
    "detection", "common",
)  # fmt: skip


def broken_contracts(directory: Path) -> str:
    """What import-linter reports about pyproject.toml in a directory; "" if every contract holds.

    In a process of its own: it configures logging for itself, which disables the loggers that other tests read.
    """
    command = [sys.executable, "-P", "-c", LINT_IMPORTS, "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(directory)}
    ran = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    return "" if ran.returncode == 0 else ran.stdout + ran.stderr


def modules(root: Path) -> Iterator[Path]:
    """Every module of the distribution except `__init__.py`, relative to `root`."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if path.name != "__init__.py":
                yield path.relative_to(root)


def classes_defined_twice(root: Path) -> dict[str, list[Path]]:
    """Public module-level classes that have more than one definition, and the modules that define them."""
    found = collections.defaultdict(list)
    for path in modules(root):
        for statement in ast.parse((root / path).read_text("utf-8")).body:
            if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
                found[statement.name].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def modules_without_a_line(root: Path) -> list[Path]:
    """Modules that the README of their folder, or of the nearest folder above that has one, does not name.

    Receivers are listed by their registration instead: a new one is one module and one line.
    """
    missing = []
    for path in modules(root):
        if path.parent == RECEIVERS and path.stem in RECEIVER_TYPES:
            continue
        folder = next(parent for parent in (root / path).parents if (parent / "README.md").exists())
        if path.name not in (folder / "README.md").read_text("utf-8"):
            missing.append(path)
    return missing


def test_imports_go_one_way() -> None:
    """The contracts in pyproject.toml: layers of the watcher, independence of the trainer, no cycles."""
    assert broken_contracts(ROOT) == ""


def test_a_public_class_is_defined_once() -> None:
    assert classes_defined_twice(ROOT) == {}


def test_the_readme_of_a_folder_names_its_modules() -> None:
    assert modules_without_a_line(ROOT) == []


def test_nothing_is_loose_at_the_root_of_the_watcher() -> None:
    files = {path.name for path in (ROOT / "watcher").iterdir() if path.is_file()}
    assert files == {"__init__.py", "README.md", "py.typed"}


def test_a_second_definition_and_an_unnamed_module_are_found(tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "README.md").write_text("| `named.py` | the first |\n")
    (tmp_path / "watcher" / "named.py").write_text("class Verdict: ...\nclass _Private: ...\n")
    (tmp_path / "trainer" / "unnamed.py").write_text("class Verdict: ...\nclass _Private: ...\n")
    assert classes_defined_twice(tmp_path) == {"Verdict": [Path("trainer/unnamed.py"), Path("watcher/named.py")]}
    assert modules_without_a_line(tmp_path) == [Path("trainer/unnamed.py")]


def test_an_upward_import_breaks_the_contract(tmp_path: Path) -> None:
    """The contract file is read by a library; a planted violation shows that it is read at all."""
    contracts = (ROOT / "pyproject.toml").read_text("utf-8").split("[tool.importlinter]", 1)[1]
    (tmp_path / "pyproject.toml").write_text("[tool.importlinter]" + contracts.replace("wattwatch", "planted"))
    for package in ("planted", "planted/collectors", "planted/trainer", "planted/watcher"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for stage in STAGES:
        (tmp_path / "planted" / "watcher" / f"{stage}.py").touch()
    assert broken_contracts(tmp_path) == ""
    (tmp_path / "planted" / "watcher" / "detection.py").write_text("from planted.watcher import cli\n")
    assert "planted.watcher.detection -> planted.watcher.cli" in broken_contracts(tmp_path)
