"""What ships: the archives' file lists, the links behind them, and what serving a bundle imports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import slipstream

ROOT = Path(__file__).parents[1]
PARTS = ("engines", "export", "runtime")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FORBIDDEN = {
    "onnx",
    "onnx_ir",
    "onnxscript",
    "polygraphy",
    "safetensors",
    "slipstream.engines",
    "slipstream.export",
    "torch",
    "transformers",
}


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, target: str, out: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out), cwd=source)
    (archive,) = out.iterdir()
    return archive


def files_under(folder: Path) -> set[str]:
    """Relative names of the files in a folder; links to folders are not followed."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def package_files() -> set[str]:
    folders = {"slipstream": "slipstream"} | {part: f"slipstream/{part}" for part in PARTS}
    return {f"{shipped}/{name}" for folder, shipped in folders.items() for name in files_under(ROOT / folder)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked_sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def test_the_package_holds_every_part_and_the_demo_pair(package_files: set[str]) -> None:
    modules = {f"slipstream/{part}/__init__.py" for part in PARTS}
    checkpoints = {
        f"slipstream/export/demo_pair/{model}/{name}"
        for model in ("target", "assistant")
        for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    }
    chat_template = {"slipstream/export/demo_pair/target/chat_template.jinja"}
    assert modules | checkpoints | chat_template <= package_files


def test_wheel_holds_the_package_and_nothing_else(wheel: Path, package_files: set[str]) -> None:
    metadata = f"slipstream-{PROJECT['version']}.dist-info"
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    assert {name for name in names if not name.startswith(metadata)} == package_files
    assert f"{metadata}/licenses/LICENSE" in names


def test_sdist_holds_the_package_and_what_builds_it(unpacked_sdist: Path, package_files: set[str]) -> None:
    beside = {".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "hatch_build.py", "pyproject.toml"}
    assert files_under(unpacked_sdist) == package_files | beside


def test_wheel_of_the_sdist_is_the_wheel(wheel: Path, unpacked_sdist: Path, tmp_path: Path) -> None:
    assert build(unpacked_sdist, "wheel", tmp_path).read_bytes() == wheel.read_bytes()


def _unpacked_zip(folder: Path) -> Path:
    """The sources as zipfile unpacks an archive of them: links are files that hold their target."""
    for name in ("README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "hatch_build.py", ".gitignore"):
        shutil.copy2(ROOT / name, folder)
    for part in (*PARTS, "slipstream"):
        ignored = shutil.ignore_patterns("__pycache__", *(PARTS if part == "slipstream" else ()))
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    for part in PARTS:
        (folder / "slipstream" / part).write_text(f"../{part}")
    return folder


def test_wheel_of_an_unpacked_zip_archive_is_the_wheel(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = _unpacked_zip(tmp_path / "source")
    built = build(source, "wheel", tmp_path / "out")
    assert sorted(zipfile.ZipFile(built).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_a_source_without_a_part_is_refused_with_the_reason(tmp_path: Path) -> None:
    source = _unpacked_zip(tmp_path)
    shutil.rmtree(source / "runtime")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "runtime is missing. Get the whole source again" in done.stderr


@pytest.mark.parametrize("part", PARTS)
def test_part_is_a_relative_link(part: str) -> None:
    assert (ROOT / "slipstream" / part).readlink() == Path(f"../{part}")


@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs git and a clone, not a source archive"
)
def test_links_are_committed_as_links() -> None:
    entries = run("git", "ls-files", "--stage", *(f"slipstream/{part}" for part in PARTS), cwd=ROOT).splitlines()
    modes = {entry.split("\t")[1]: entry.split()[0] for entry in entries}
    assert modes == {f"slipstream/{part}": "120000" for part in PARTS}


@pytest.mark.parametrize("package", ["slipstream.cli", "slipstream.runtime"])
def test_serving_imports_nothing_that_exports(package: str, tmp_path: Path) -> None:
    script = f"""
import importlib, json, pkgutil, sys
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(getattr(package, "__path__", []), {package!r} + "."):
    importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""
    modules = json.loads(run(sys.executable, "-c", script, cwd=tmp_path))
    assert FORBIDDEN.isdisjoint(modules)


def test_version_is_the_projects() -> None:
    assert slipstream.__version__ == PROJECT["version"]
