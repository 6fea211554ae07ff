"""Files of a bundle by name: names that stay inside it, hashes, and what may not be read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

SMALL_FILE_BYTES = 16 * 2**20  # files up to here are hashed whenever they are loaded


def plain_name(name: str) -> str:
    """The name of a file directly in its folder. Raises ValueError for paths, which could lead anywhere."""
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        raise ValueError(f"{name!r} is not the name of a file in this folder")
    return name


FileName = Annotated[str, AfterValidator(plain_name)]  # what records name files with


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def no_permission(path: Path) -> str:
    """What to say of a file that is there and may not be read."""
    return f"this user may not read {path}: change its permissions, or run as its owner"
