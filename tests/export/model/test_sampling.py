"""The graphs that draw tokens: what the package ships is what is traced, and TensorRT-RTX builds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from slipstream.engines.tensorrt.builder import with_sizes
from slipstream.export import sampling_graphs
from slipstream.export.model.ops import OPSET
from slipstream.export.model.sampling import Draw
from slipstream.runtime.bundle import graph_io
from slipstream.runtime.sampling.files import choose_path

BUILD_SECONDS = 20  # half a second is usual; some spellings of the same law never end
BUILD = """
import sys
from pathlib import Path
import onnx_ir as ir
from slipstream.engines.tensorrt.builder import BuildOptions, engine_from_network, network_from_onnx
from slipstream.runtime.trt.flavour import load_flavour
trt, path = load_flavour("tensorrt-rtx"), Path(sys.argv[1])
options = BuildOptions(trt.module.ComputeCapability.SM89, 256, None)
engine = engine_from_network(trt, network_from_onnx(trt, ir.load(path), path), [], options, lambda: True)
print(len(engine))
"""


def test_the_shipped_graphs_are_those_that_are_traced() -> None:
    differing = [path.name for path, made in sampling_graphs.contents().items() if path.read_bytes() != made]
    assert differing == [], "run python -m slipstream.export.sampling_graphs"


class Drafted(nn.Module):
    """Steps of a made-up assistant that draws: each follows from the token before it."""

    def __init__(self, num_steps: int, num_candidates: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logits = nn.Parameter(torch.randn(512, 512))  # of the next token, by token
        self.num_steps, self.num_candidates, self.draw = num_steps, num_candidates, Draw()

    def forward(self, token: Tensor, past_length: Tensor, *settings: Tensor) -> Tensor:
        drafted = token[:, :0]
        for _ in range(self.num_steps):
            last = torch.cat([token, drafted], dim=1)[:, -1:]
            logits, tokens = torch.topk(nn.functional.embedding(last, self.logits), self.num_candidates)
            drafted = self.draw(drafted, past_length, logits, tokens, *settings)
        return drafted


def assert_builds(model: ir.Model, path: Path) -> None:
    """In a process of its own: a build that doesn't end can't be stopped."""
    pytest.importorskip("tensorrt_rtx", reason="pip install 'slipstream[tensorrt-rtx]'")
    ir.save(model, path)
    command = [sys.executable, "-c", BUILD, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100_000


@pytest.mark.parametrize("name", graph_io.ENGINE_CHOICES)
@pytest.mark.parametrize("vocab_size", [2048, 262144])
def test_choosing_builds_with_tensorrt_rtx(name: graph_io.ChooseName, vocab_size: int, tmp_path: Path) -> None:
    rows = {"num_scored_rows": 5, "num_rows": 5, "num_draft_tokens": 4}
    sizes = {"batch": 2, "vocab_size": vocab_size, "hidden_size": 256, **rows}
    assert_builds(with_sizes(ir.load(choose_path(name, "bfloat16")), sizes), tmp_path / "choose.onnx")


@pytest.mark.filterwarnings("ignore")  # torch's own, while it exports
def test_drafts_of_several_draws_build_with_tensorrt_rtx(tmp_path: Path) -> None:
    past_length, top_k, seed = torch.zeros((3, 1), dtype=torch.int64)
    temperature, top_p, min_p = torch.zeros(3, 1)
    inputs = (torch.zeros((1, 1), dtype=torch.int64), past_length, temperature, top_k, top_p, min_p, seed)
    exported = torch.export.export(Drafted(4, 64), inputs, strict=False)
    program = torch.onnx.export(exported, dynamo=True, opset_version=OPSET, verbose=False)
    assert program is not None
    assert_builds(program.model, tmp_path / "draft.onnx")
