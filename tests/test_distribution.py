"""What `pip install` brings: one import package, two commands and every data file, also from the sdist."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.tools import DEADLINE_SECONDS

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def build(what: str, source: Path, out: Path) -> Path:
    """Runs the build backend as pip does, without its isolation: an isolated build fetches setuptools."""
    command = [sys.executable, "-P", "-c", BUILD, what, str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=DEADLINE_SECONDS)
    (path,) = out.iterdir()
    return path


def package_files(root: Path) -> set[str]:
    """Files of the three folders, without caches, relative to `root`."""
    return {
        str(path.relative_to(root))
        for folder in ("collectors", "trainer", "watcher")
        for path in (root / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that is built from the unpacked sdist."""
    work = tmp_path_factory.mktemp("distribution")
    source = work / "checkout"
    shutil.copytree(
        ROOT,
        source,
        symlinks=True,  # wattwatch/ holds links to the three folders
        ignore=lambda folder, names: [
            name for name in names if name.startswith(".") or name in ("tests", "build", "dist", "__pycache__")
        ],
    )
    sdist = build("build_sdist", source, work / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    return zipfile.ZipFile(build("build_wheel", unpacked, work / "wheel"))


def test_one_import_package_is_installed(wheel: zipfile.ZipFile) -> None:
    assert {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" not in name} == {"wattwatch"}


def test_every_module_and_data_file_is_installed(wheel: zipfile.ZipFile) -> None:
    installed = {name.removeprefix("wattwatch/") for name in wheel.namelist()}
    assert package_files(ROOT) - installed == set()


def test_two_commands_are_installed(wheel: zipfile.ZipFile) -> None:
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    lines = wheel.read(entry_points).decode().splitlines()
    assert [line.split(" = ")[0] for line in lines if " = " in line] == ["wattwatch", "wattwatch-train"]
