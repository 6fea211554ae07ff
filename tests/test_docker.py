"""docker/: hadolint finds nothing, and what it does not check: users, pins, what is installed, compose, the pages."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml  # type: ignore[import-untyped]  # its stubs would be one more package, for one call
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from slipstream.cli import app

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = {
    canonicalize_name(name): version
    for name, version in re.findall(
        r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
}
IMAGES = sorted(path.name.removesuffix(".Dockerfile") for path in DOCKER.glob("*.Dockerfile"))
RUNTIME_IMAGES = sorted(set(IMAGES) - {"export"})
TENSORRT = re.compile(r"tensorrt(-cu13.*)?")  # its libraries come from NVIDIA's own index
EXPORT_ONLY = {"onnxscript", "safetensors", "torch", "transformers"}
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # it is a group
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))

every_image = pytest.mark.parametrize("image", IMAGES)


def instructions(image: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions and their arguments, without comments and line breaks."""
    text = (DOCKER / f"{image}.Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def arguments(image: str, instruction: str) -> list[str]:
    return [value for name, value in instructions(image) if name == instruction]


def final_stage(image: str) -> dict[str, str]:
    """The last value of each instruction in the stage that becomes the image."""
    all_of_them = instructions(image)
    start = max(i for i, (name, _) in enumerate(all_of_them) if name == "FROM")
    return dict(all_of_them[start:])


def installed_requirements(image: str) -> list[Requirement]:
    """What the image's pip commands name; the wheel in them is slipstream."""
    named = []
    for run in arguments(image, "RUN"):
        for command in run.split(" && "):
            words = shlex.split(command)
            if "install" in words and words[0] == "pip":
                options = re.compile(r"-{1,2}\w")
                rest = words[words.index("install") + 1 :]
                takes_value = {"--constraint", "--extra-index-url"}
                named += [
                    word
                    for before, word in zip(["", *rest], rest, strict=False)
                    if not options.match(word) and before not in takes_value
                ]
    return [Requirement(re.sub(r"^(\$\(echo )?/wheels/\*\.whl\)?", "slipstream", word)) for word in named]


def closure(roots: Iterable[Requirement]) -> set[str]:
    """Names of the packages that come with these, as far as their metadata is installed here."""
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(roots)
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for line in _requires(name, extras):
            dependency = Requirement(line)
            marker = dependency.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
                waiting.append(dependency)
    return {name for name, _ in seen}


def _requires(name: str, extras: frozenset[str]) -> list[str]:
    if name == PROJECT["name"]:
        optional: dict[str, list[str]] = PROJECT["optional-dependencies"]
        return [*PROJECT["dependencies"], *(line for extra in extras for line in optional[extra])]
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


@every_image
def test_hadolint_finds_nothing(image: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    command = [str(hadolint), "--no-color", str(DOCKER / f"{image}.Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_an_image_for_each_kind_of_machine() -> None:
    assert IMAGES == ["cpu", "datacenter", "export", "jetson", "rtx"]


def test_all_images_have_one_base_with_its_whole_version() -> None:
    bases = {value.split()[0] for image in IMAGES for value in arguments(image, "FROM")}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+(@sha256:[0-9a-f]{64})?", bases.pop())


@every_image
def test_final_stage_is_not_root_checks_its_health_and_starts_slipstream(image: str) -> None:
    stage = final_stage(image)
    uid, gid = map(int, stage["USER"].split(":"))
    assert uid >= 1000
    assert gid >= 1000
    assert 'CMD ["slipstream", "doctor", "--engine", "' in stage["HEALTHCHECK"]
    assert stage["ENTRYPOINT"] == '["slipstream"]'
    assert stage["STOPSIGNAL"] == "SIGINT"
    assert stage["COPY"] == "--from=builder /opt/slipstream /opt/slipstream"


def test_images_differ_in_their_packages_and_their_environment_only() -> None:
    def common(image: str) -> list[tuple[str, str]]:
        return [
            (name, value)
            for name, value in instructions(image)
            if "venv" not in value and name not in ("ENV", "HEALTHCHECK")
        ]

    assert all(common(image) == common("cpu") for image in IMAGES)


@every_image
def test_what_is_copied_exists_and_passes_dockerignore(image: str) -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignore
    for value in arguments(image, "COPY"):
        *sources, _ = value.split()
        for source in sources if not value.startswith("--from") else []:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignore, source


@every_image
def test_every_package_is_pinned(image: str) -> None:
    requirements = installed_requirements(image)
    specifiers = {canonicalize_name(requirement.name): str(requirement.specifier) for requirement in requirements}
    assert {"slipstream", "hatchling"} <= specifiers.keys()
    if "tensorrt" in closure(requirements):
        assert re.fullmatch(r"==11(\.\d+){2}(\.\d+|\.\*)", specifiers[canonicalize_name("tensorrt")])
    for name in specifiers.keys() & CONSTRAINTS.keys():
        assert specifiers[name] in {"", f"=={CONSTRAINTS[name]}"}
    names = {name for name in closure(requirements) if not TENSORRT.fullmatch(name)} - {PROJECT["name"]}
    if image == "export":
        names = {name for name in names if not name.startswith("nvidia-")}  # those come with torch's CUDA build
    assert names <= set(CONSTRAINTS)


@pytest.mark.parametrize("image", RUNTIME_IMAGES)
def test_runtime_images_have_neither_torch_nor_transformers(image: str) -> None:
    packages = closure(installed_requirements(image))
    assert "onnxruntime" in packages
    assert EXPORT_ONLY.isdisjoint(packages)


@pytest.mark.parametrize("image", sorted(set(RUNTIME_IMAGES) - {"cpu"}))
def test_engine_images_can_build(image: str) -> None:
    extra = "tensorrt-rtx" if image == "rtx" else "tensorrt"
    assert {extra, "onnx", "onnx-ir", "cuda-python"} <= closure(installed_requirements(image))


def test_export_image_can_export() -> None:
    assert closure(installed_requirements("export")) >= EXPORT_ONLY


@pytest.mark.parametrize("image", RUNTIME_IMAGES)
def test_compose_has_a_careful_service(image: str) -> None:
    service = COMPOSE["services"][image]
    build = service["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    assert build["dockerfile"] == f"docker/{image}.Dockerfile"
    assert service["image"] == f"slipstream:{PROJECT['version']}-{image}"
    assert service["profiles"] == [image]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["user"] == "${SLIPSTREAM_UID:-10001}:${SLIPSTREAM_GID:-10001}"
    assert [(volume["target"], volume["read_only"]) for volume in service["volumes"]] == [("/bundles", True)]
    check_command(service["command"])


def test_compose_gives_gpus_to_those_that_need_one() -> None:
    services = COMPOSE["services"]
    assert sorted(services) == RUNTIME_IMAGES
    assert [name for name in sorted(services) if "deploy" in services[name]] == ["datacenter", "rtx"]
    assert [name for name in sorted(services) if "runtime" in services[name]] == ["jetson"]


def check_command(words: list[str]) -> None:
    """The command line names a command and options that slipstream has."""
    assert words[0] in COMMANDS
    command = COMMANDS[words[0]]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known, words
