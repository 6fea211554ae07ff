"""Where the graphs lie. ``python -m slipstream.export.sampling_graphs`` makes them."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from slipstream.runtime.bundle.dtypes import DType

_FOLDER = Path(__file__).parent
CHOOSE = {
    dtype: _FOLDER / f"choose_{dtype}.onnx" for dtype in get_args(DType)
}  # by the type of hidden rows, the manifest's
DRAW = _FOLDER / "draw.onnx"
