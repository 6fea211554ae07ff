"""Attention kernels probed in a child, whose words are its own."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.engines.tensorrt.attention_probe import probe_attention
from slipstream.runtime.bundle.engine_record import AttentionShape
from slipstream.runtime.errors import BackendError
from slipstream.runtime.trt.flavour import TensorRT, load_flavour


def shape(num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionShape:
    return AttentionShape(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype="float16", is_fused=False
    )


def test_a_refused_shape_is_an_answer_and_silences_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorrt_rtx", reason="pip install 'slipstream[tensorrt-rtx]'")
    trt = load_flavour("tensorrt-rtx")
    done = threading.Event()

    def write() -> None:
        count = 0
        while not done.wait(0.02):
            os.write(2, b"x\n")
            count += 1
        written.append(count)

    written: list[int] = []
    thread = threading.Thread(target=write)
    thread.start()
    shapes = [shape(8, 2, 256), shape(8, 1, 512)]
    found = [answer.is_fused for answer in probe_attention(trt, shapes, trt.module.ComputeCapability.SM89)]
    done.set()
    thread.join(10)
    assert found == [True, False]
    assert capfd.readouterr().err == "x\n" * written[0]


def test_a_child_that_fails_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: Any = SimpleNamespace(returncode=-11, stderr="loading\nSegmentation fault\n", stdout="")
    monkeypatch.setattr("subprocess.run", lambda *args, **options: ended)
    module: Any = SimpleNamespace(__version__="1.7.1")
    with pytest.raises(BackendError, match=r"ended with code -11 while .* probed: Segmentation fault"):
        probe_attention(TensorRT("tensorrt-rtx", module, None), [shape(4, 1, 16)], None)
