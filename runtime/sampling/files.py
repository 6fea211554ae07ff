"""Where the graphs lie. ``python -m slipstream.export.sampling_graphs`` makes them."""

from __future__ import annotations

from pathlib import Path

from slipstream.runtime.bundle.dtypes import DType
from slipstream.runtime.bundle.graph_io import ChooseName

_FOLDER = Path(__file__).parent
DRAW = _FOLDER / "draw.onnx"


def choose_path(name: ChooseName, dtype: DType) -> Path:
    """dtype: of hidden rows, the manifest's."""
    return _FOLDER / f"{name}_{dtype}.onnx"
