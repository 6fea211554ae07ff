"""The bar of an assistant graph is that of one step, and verification gives back what it opens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.export.verify import verify as verification
from slipstream.export.verify.costs import WeightCost, activation_cost
from slipstream.export.verify.reference import Array, Reference
from slipstream.export.verify.verify import sample_prompts, verify
from slipstream.runtime.backend.pair import PairBackend
from slipstream.runtime.bundle.manifest import open_bundle
from slipstream.runtime.bundle.onnxruntime_record import FLOAT32_ACTIVATIONS
from slipstream.runtime.ort.backend import OnnxRuntimeEngine
from tests.support.pairs import BOS
from tests.support.progress import SilentProgress

VOCAB_SIZE, WIDTH = 64, 8


def step(hidden: Array, error: float) -> tuple[Array, Array]:
    """Logits [V] and the next state of a pair whose states double in each step, each wrong by a share."""
    return np.linspace(0, 10, VOCAB_SIZE), hidden * 2 * (1 + error)


class Drafting:
    """A session over num_steps steps, each wrong by a share of the state."""

    def __init__(self, num_steps: int, error: float) -> None:
        self._num_steps, self._error = num_steps, error

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in ("token", "hidden")]

    def run(self, names: Sequence[str], inputs: dict[str, Array]) -> list[Array]:
        state, rows = inputs["hidden"], []
        for _ in range(self._num_steps):
            logits, state = step(state, self._error)
            rows.append(logits)
        tokens = np.argsort(-np.array(rows), axis=1)[None, :, :4]
        return [tokens[:, :, 0], np.take_along_axis(np.array(rows)[None], tokens, 2), tokens, state]


def check_steps(error: float, bundle_folder: Callable[[str], Path]) -> float:
    """The relative difference that a check of five unrolled steps reports."""
    manifest = open_bundle(bundle_folder("edge")).manifest
    graphs: Any = SimpleNamespace(manifest=manifest, drafts={n: Drafting(n, error) for n in (1, 5)})
    reference: Any = SimpleNamespace(draft_step=lambda token, hidden, position, donors: step(hidden, 0.0))
    return verification._check_draft(graphs, reference, 20, 5, 0).relative


def test_rounding_that_grows_over_steps_is_no_miss(bundle_folder: Callable[[str], Path]) -> None:
    assert check_steps(4e-5, bundle_folder) <= verification.TOLERANCE["float32"]


def test_a_step_that_is_wrong_by_itself_is_a_miss(bundle_folder: Callable[[str], Path]) -> None:
    assert check_steps(2e-4, bundle_folder) > verification.TOLERANCE["float32"]


def test_verification_closes_every_backend_it_makes(
    pair_folder: Callable[[str], tuple[Path, Path]],
    bundle_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = open_bundle(bundle_folder("edge"))
    opened: list[PairBackend] = []
    most_open = 0
    original = PairBackend.__init__

    def record(self: PairBackend, *args: Any, **more: Any) -> None:
        nonlocal most_open
        original(self, *args, **more)
        opened.append(self)
        most_open = max(most_open, sum(not backend.is_closed for backend in opened))

    monkeypatch.setattr(PairBackend, "__init__", record)
    prompts = sample_prompts(range(20, 280), BOS, 2, bundle.manifest.sliding_window, bundle.manifest.max_length, 8)
    verify(bundle, Reference(*pair_folder("edge"), "float32"), prompts, 8, [0, 3], SilentProgress())
    assert most_open == 1


def test_costs_of_weights_and_activations_are_measured_apart(
    pair_folder: Callable[[str], tuple[Path, Path]], bundle_folder: Callable[..., Path]
) -> None:
    bundle = open_bundle(bundle_folder("blocks", weights="int4", block_size=32))
    reference = Reference(*pair_folder("blocks"), "float32")
    texts = [list(range(20, 40)), list(range(50, 80))]
    weights = WeightCost(reference, texts)
    reference.round_weights(bundle.manifest.weights)
    used, exact = OnnxRuntimeEngine(bundle, 1), OnnxRuntimeEngine(bundle, 1, accuracy_level=FLOAT32_ACTIVATIONS)
    found = weights.measure("int4 weights"), activation_cost(used, exact, texts)
    assert 1e-3 < found[1].rms < found[0].rms < found[0].largest < 1
    assert activation_cost(exact, exact, texts).largest == 0
    assert not reference.is_exact
