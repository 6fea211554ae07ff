"""The pages: links lead somewhere, commands exist, and the README stays short."""

from __future__ import annotations

import re
import shlex
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from slipstream import GenerationSettings, load
from tests.test_docker import IMAGES, PROJECT, ROOT, check_command

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README_LINES = 150
_PAGE_NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


def prose(page: Path) -> str:
    """A page without its code."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", lambda code: code[0] if "](" not in code[0] else "", text)


def anchors(page: Path) -> set[str]:
    """Headings as GitHub links to them: lower case, without punctuation, spaces as dashes."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page whose file, or heading in it, is not there."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def commands(page: Path) -> list[str]:
    """Lines of a page's code blocks, joined where they are continued."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [line.strip() for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]


@pytest.mark.parametrize("page", _PAGE_NAMES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    assert broken_links(ROOT / page) == []


def test_a_link_to_a_file_or_heading_that_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`: three\n[a](#one-two-three) [b](#four) [c](none.md) `[d](code)`\n```\n[e](code)\n```\n"
    )
    assert broken_links(page) == ["#four", "none.md"]


def test_every_page_of_docs_is_linked_from_the_readme() -> None:
    linked = re.findall(r"\]\((docs/[\w.-]+)\)", prose(ROOT / "README.md"))
    assert {page for page in _PAGE_NAMES if page.startswith("docs/")} <= set(linked)


def test_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


@pytest.mark.parametrize("page", _PAGE_NAMES)
def test_commands_in_the_pages_exist(page: str) -> None:
    inline = re.findall(r"`(slipstream [^`\n]+)`", (ROOT / page).read_text(encoding="utf-8"))
    for line in [*commands(ROOT / page), *inline]:
        words = shlex.split(line, comments=True)
        if line.startswith("docker run"):
            image = next(i for i, word in enumerate(words) if word.startswith("slipstream:"))
            check_command(words[image + 1 :])
        elif line.startswith("slipstream "):
            check_command(words[1:])


@pytest.mark.parametrize("page", _PAGE_NAMES)
def test_targets_modules_and_images_in_the_pages_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    code = "\n".join([*re.findall(r"`([^`\n]+)`", text), *commands(ROOT / page)])
    assert set(re.findall(r"^make ([a-z-]+)", code, flags=re.MULTILINE)) <= {*targets}
    modules = [name.removeprefix("slipstream.") for name in re.findall(r"python -m\s+([a-z_.0-9]+)", text)]
    assert [name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").is_file()] == []
    tags = re.findall(r"slipstream:([\w.]+)-(\w+)", text)
    assert {(version, image) for version, image in tags} <= {(PROJECT["version"], image) for image in IMAGES}
    assert all((ROOT / path).is_file() for path in re.findall(r"--file (docker/\S+)", text))


def test_the_map_has_every_folder_with_code() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    folders = {path.parent for part in ("runtime", "export", "engines") for path in (ROOT / part).rglob("*.py")}
    names = {f"`{folder.relative_to(ROOT).as_posix()}/`" for folder in folders if folder.name != "passes"}
    assert [name for name in sorted(names) if name not in text] == []


def test_the_longest_way_of_a_prompt_is_the_one_on_the_map(bundle_folder: Callable[[str], Path]) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text[text.index("## The longest way of a prompt") :]
    hops = [name for line in re.findall(r"^\d+\. (.+?) –", section, flags=re.MULTILINE) for name in line.split(", ")]
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "slipstream" in str(frame.f_globals.get("__name__")):
            called.append(f"`{frame.f_code.co_qualname}`")

    with load(bundle_folder("demo")) as pair:
        threading.setprofile(note)  # of the engine's thread, which begins now
        sys.setprofile(note)
        try:
            pair.stream([{"role": "user", "content": "Hello"}], GenerationSettings(max_new_tokens=1)).finish()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    met = iter(called)
    assert [hop for hop in hops if hop not in met] == []


def examples() -> list[tuple[str, str]]:
    """Page and code of every Python example."""
    blocks = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
    return [(page, code) for page in _PAGE_NAMES for code in blocks.findall((ROOT / page).read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("page", "code"), examples(), ids=[page for page, _ in examples()])
def test_examples_run(
    page: str, code: str, bundle_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "BUNDLE" in code, "an example loads a bundle"
    exec(compile(code.replace("BUNDLE", str(bundle_folder("demo"))), page, "exec"), {"__name__": "example"})
