"""What benchmarks of real sizes share: steps of a loaded pair, alternating turns, memory, the machine."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime
import torch
import transformers

from slipstream.runtime.backend.choosing import Choice
from slipstream.runtime.ort.backend import OnnxRuntimeBackend
from slipstream.runtime.session import Pair

from .yardstick import Yardstick

Operation = Callable[[], object]


class Steps:
    """Target, draft and round of a pair that holds some rows; calls repeat the same rows, so nothing grows."""

    def __init__(self, pair: Pair, held: int, most_rows: int) -> None:
        backend = pair.new_backend()
        assert isinstance(backend, OnnxRuntimeBackend)
        self.backend = backend
        random = np.random.default_rng(0)
        ids = random.integers(8, pair.manifest.vocab_size, held).tolist()
        for start in range(0, held, backend.prefill_chunk):
            backend.prefill(0, ids[start : start + backend.prefill_chunk])
        backend._prepare([0], backend._rows_run(most_rows, 1))

    def target(self, num_rows: int) -> Operation:
        """Verification of num_rows rows and the choice after it, with the lookup of per-layer rows on the host."""
        call = self.backend._round_call(num_rows - 1, 1)
        call.set_commit_limit([1])
        _, targets = self.backend._bound_round(call, Choice.of([]))

        def run() -> None:
            self.backend._look_up_round(call)
            for graph in targets:
                graph.run()

        return run

    def draft(self, num_steps: int) -> Operation:
        """num_steps draft steps."""
        drafts, _ = self.backend._bound_round(self.backend._round_call(num_steps, 1), Choice.of([]))

        def run() -> None:
            for graph in drafts:
                graph.run()

        return run

    def round(self, num_draft_tokens: int) -> Operation:
        """Drafts and their verification."""
        draft, verify = self.draft(num_draft_tokens), self.target(num_draft_tokens + 1)

        def run() -> None:
            draft()
            verify()

        return run


def alternating(
    operations: Mapping[str, Operation], turns: int, watch: Yardstick, passes: int = 6, calls: int = 3
) -> dict[str, list[float]]:
    """Milliseconds of each operation, a median per turn. A pass makes some calls of each, after one call unseen.
    Between turns the watch reads memory.

    Passes are short, so that all operations meet the same moods of a machine that others use, too:
    memory was seen to go from 28 to 45 GB/s within seconds. Calls come in a row, as in a text.
    """
    found: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(turns):
        times: dict[str, list[float]] = {name: [] for name in operations}
        for _, (name, run) in itertools.product(range(passes), operations.items()):
            run()
            for _ in range(calls):
                before = perf_counter()
                run()
                times[name].append((perf_counter() - before) * 1e3)
        for name, values in times.items():
            found[name].append(statistics.median(values))
        watch.read()
    return found


def memory_kib(pid: int | str = "self") -> dict[str, int]:
    """Pss in all, and of it anonymous memory and file pages; KiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
    return {name: values[name] for name in ("Pss", "Pss_Anon", "Pss_File")}


def machine() -> dict[str, Any]:
    """What every result file says of where it was measured."""
    return {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "onnxruntime": onnxruntime.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
