"""Bundles that are damaged on purpose."""

from __future__ import annotations

import json

from slipstream.runtime.bundle.files import file_sha256
from slipstream.runtime.bundle.manifest import Bundle, open_bundle


def rewrite_hash(bundle: Bundle, name: str) -> Bundle:
    """Make a damaged file look like the bundle's own."""
    path = bundle.folder / "manifest.json"
    content = json.loads(path.read_text())
    content["files"][name] = {"sha256": file_sha256(bundle.path(name)), "size_bytes": bundle.path(name).stat().st_size}
    path.write_text(json.dumps(content))
    return open_bundle(bundle.folder)
