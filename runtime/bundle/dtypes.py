"""Element types by name, as ONNX spells them: the one table of sizes and numpy types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

DType = Literal["float32", "float16", "bfloat16"]  # what a bundle's graphs compute in
Array = npt.NDArray[Any]
NUMPY: Mapping[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,  # its bits: numpy has no such type
    "int64": np.int64,
    "int8": np.int8,
    "bool": np.bool_,
    "uint8": np.uint8,
}
ITEM_BYTES: Mapping[str, int] = {name: np.dtype(kind).itemsize for name, kind in NUMPY.items()}
