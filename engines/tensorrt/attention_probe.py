"""Which attention shapes TensorRT has a kernel for, asked in a process of its own.

TensorRT's compiler reports a refusal past the logger, straight to the process's stderr, and here a refusal is an
answer. A child's stderr can be kept apart without silencing anybody else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from slipstream.runtime.bundle.engine_record import AttentionShape
from slipstream.runtime.errors import BackendError
from slipstream.runtime.trt.flavour import TensorRT, load_flavour

_ROWS, _HELD = 5, 256


def probe_attention(trt: TensorRT, shapes: Sequence[AttentionShape], capability: Any) -> list[AttentionShape]:
    """The shapes with ``is_fused`` found out.

    capability: a ComputeCapability member, None for the current device. Raises BackendError when the child fails.
    """
    question = {
        "flavour": trt.flavour,
        "capability": None if capability is None else capability.name,
        "shapes": [shape.model_dump() for shape in shapes],
    }
    child = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    if child.returncode != 0:
        words = child.stderr.strip().splitlines() or ["it gave no message"]
        raise BackendError(
            f"{trt.flavour} {trt.version} ended with code {child.returncode} while its attention kernels were probed: "
            f"{words[-1]}"
        )
    answers = json.loads(child.stdout.splitlines()[-1])
    return [shape.model_copy(update={"is_fused": answer}) for shape, answer in zip(shapes, answers, strict=True)]


def _is_fused(trt: TensorRT, shape: AttentionShape, capability: Any) -> bool:
    """Whether a network of that one attention builds without leave to take it apart."""
    module = trt.module
    builder = module.Builder(trt.logger)
    network = builder.create_network(1 << int(module.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    dtype = getattr(module, shape.dtype)
    query = network.add_input("query", dtype, (1, shape.num_heads, _ROWS, shape.head_dim))
    key = network.add_input("key", dtype, (1, shape.num_kv_heads, _HELD, shape.head_dim))
    value = network.add_input("value", dtype, (1, shape.num_kv_heads, _HELD, shape.head_dim))
    attention = network.add_attention(query, key, value, module.AttentionNormalizationOp.SOFTMAX, False)
    attention.mask = network.add_input("visible", module.bool, (1, 1, _ROWS, _HELD))
    attention.decomposable = False
    network.mark_output(attention.get_output(0))
    config = builder.create_builder_config()
    set_capability(config, capability)
    return builder.build_serialized_network(network, config) is not None


def set_capability(config: Any, capability: Any) -> None:
    """Build for a compute capability; None leaves the current device's."""
    if capability is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(capability, 0)


if __name__ == "__main__":
    question = json.load(sys.stdin)
    trt, name = load_flavour(question["flavour"]), question["capability"]
    capability = None if name is None else getattr(trt.module.ComputeCapability, name)
    answers = [_is_fused(trt, AttentionShape.model_validate(shape), capability) for shape in question["shapes"]]
    sys.stdout.write(json.dumps(answers) + "\n")
