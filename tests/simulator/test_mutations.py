"""Mistakes that a GPU would keep silent about: each is made once in the runtime's source, and each must show.

One scenario drives the engines against ONNX Runtime: the text at every position, the assistant's
own drafts from every length, which drafts are accepted, what a reset leaves. Drafts are replaced
by right and wrong ones as the script wants, so that any number of them is accepted.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from slipstream import runtime
from slipstream.runtime.bundle.graph_io import PER_LAYER_INPUT, kv_name
from slipstream.runtime.bundle.manifest import Bundle
from slipstream.runtime.errors import NonFiniteError, RewindError
from slipstream.runtime.ort.backend import OnnxRuntimeEngine
from tests.support.engine_fixtures import build_simulated, feed, onnxruntime_backend
from tests.support.pairs import BOS, VOCAB_SIZE

from .machine import Simulator, install

FOLDER = Path(runtime.__file__).parent
# In the order of their imports.
MODULES = ("backend/cuda", "backend/kv_cache", "backend/pair", "trt/engine", "trt/backend")
MISTYPED = (SyntaxError, NameError, AttributeError, TypeError)  # not what a mutation is caught by
K = 3
PROMPT_LENGTHS = (70, 41, 9, 37)
TEXT_LENGTH = 172


Mistake = tuple[str, str, str]  # module, its text, what replaces it


@dataclass(frozen=True)
class Reference:
    """The text of a prompt, the target's top logits at each position, and drafts by the number of rows held."""

    num_prompt_tokens: int
    text: list[int]
    logits: npt.NDArray[np.float32]
    drafts: dict[int, list[int]]


@dataclass(frozen=True)
class Setting:
    bundle: Bundle
    references: list[Reference]


@pytest.fixture(scope="module")
def setting(bundle_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """Several KV heads, a position that is not the length, and chunks of 16 so that buffers are soon full."""
    return setting_of(bundle_folder("dense", draft_position="last"), tmp_path_factory.mktemp("mutations"))


@pytest.fixture(scope="module")
def host_setting(bundle_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """Per-layer embeddings that are looked up on the host."""
    return setting_of(bundle_folder("edge"), tmp_path_factory.mktemp("mutations"))


def setting_of(source: Path, folder: Path) -> Setting:
    bundle = build_simulated(source, folder, prefill_chunk=16)
    random = np.random.default_rng(7)
    prompts = [[BOS, *random.integers(8, VOCAB_SIZE, length - 1).tolist()] for length in PROMPT_LENGTHS]
    return Setting(bundle, [reference(bundle, ids) for ids in prompts])


def reference(bundle: Bundle, prompt: list[int]) -> Reference:
    backend = onnxruntime_backend(bundle)
    text, drafts = prompt + feed(backend, [prompt])[0], dict[int, list[int]]()
    while len(text) < TEXT_LENGTH:
        held = backend.length[0]
        text += backend.round(K, [0]).tokens[0]
        drafts[held] = backend.last_draft(K)[0]
    return Reference(len(prompt), text, reference_logits(bundle, text), drafts)


def reference_logits(bundle: Bundle, text: list[int]) -> npt.NDArray[np.float32]:
    """All rows in one call of the portable graph, without a cache to speak of."""
    ids = np.array([text])
    inputs = {
        "token": ids[:, :1],
        "draft": ids[:, 1:],
        "past_length": np.zeros(1, np.int64),
        "base": np.zeros(1, np.int64),
        "scored_rows": np.arange(len(text))[None],
        "draft_length": np.zeros(1, np.int64),
    }
    for buffer in bundle.manifest.kv:
        for part in ("key", "value"):
            shape = (1, buffer.num_kv_heads, len(text), buffer.head_dim)
            inputs[kv_name(buffer.layer, part)] = np.zeros(shape, np.float32)
    graphs = OnnxRuntimeEngine(bundle, num_threads=1)
    if graphs.per_layer_table is not None:
        inputs[PER_LAYER_INPUT] = graphs.per_layer_table.rows(ids)
    logits: npt.NDArray[np.float32] = graphs.target.run(["top_logits"], inputs)[0][0]
    return logits


class Player:
    """Drives one backend and holds every call against the references."""

    def __init__(self, simulator: Simulator, backend: Any, references: Sequence[Reference]) -> None:
        self.simulator = simulator
        self.backend = backend
        self.references = list(references)
        self._right: Sequence[int] = ()
        self._own_drafts: list[list[int]] = []
        self._logits: npt.NDArray[np.float32] = np.zeros(0, np.float32)

    def start(self) -> None:
        """Prefill every prompt in chunks."""
        self.simulator.tamper = self._see
        first = feed(self.backend, [ref.text[: ref.num_prompt_tokens] for ref in self.references])
        assert first == [[ref.text[ref.num_prompt_tokens]] for ref in self.references]
        self._check_logits([ref.num_prompt_tokens - 1 for ref in self.references], [0] * len(self.references))

    def prefill(self, counts: Sequence[int]) -> None:
        """Feed that many tokens of each text."""
        held = list(self.backend.length)
        after = [h + count for h, count in zip(held, counts, strict=True)]
        pairs = list(zip(self.references, held, after, strict=True))
        step = self.backend.prefill([ref.text[start:end] for ref, start, end in pairs])
        assert step.tokens == [[ref.text[end]] for ref, _, end in pairs]
        assert list(self.backend.length) == after
        self._check_logits([end - 1 for end in after], [0] * len(after))

    def round(self, right: Sequence[int], limits: Sequence[int] | None = None, k: int = K) -> None:
        """right: how many drafts are made right. limits: the bound of each sequence."""
        held, limits = list(self.backend.length), limits or [k] * len(right)
        self._right, self._own_drafts = right, []
        self.simulator.tamper = self._see
        step = self.backend.round(k, limits)
        accepted = [min(r, limit) if k else 0 for r, limit in zip(right, limits, strict=True)]
        pairs = list(zip(self.references, held, accepted, strict=True))
        assert step.tokens == [ref.text[start + 1 : start + 2 + count] for ref, start, count in pairs]
        assert list(self.backend.length) == [start + 1 + count for _, start, count in pairs]
        assert self._own_drafts == ([ref.drafts[start] for ref, start, _ in pairs] if k else [])
        self._check_logits(held, accepted)

    def _see(self, graph: str, outputs: dict[str, Any]) -> None:
        """Keep what the engines gave, and put drafts in place of the assistant's."""
        if graph == "target":
            self._logits = outputs["top_logits"].copy()
            return
        self._own_drafts = outputs["next_draft"].tolist()
        for sequence, (ref, right) in enumerate(zip(self.references, self._right, strict=True)):
            start = self.backend.length[sequence]
            draft = np.array(ref.text[start + 1 : start + 1 + K])
            draft[right:] = (draft[right:] + 1) % VOCAB_SIZE
            outputs["next_draft"][sequence] = draft

    def _check_logits(self, positions: Sequence[int], accepted: Sequence[int]) -> None:
        """Of every row that counts."""
        for sequence, (ref, start, count) in enumerate(zip(self.references, positions, accepted, strict=True)):
            rows = self._logits[sequence, : count + 1]
            np.testing.assert_allclose(rows, ref.logits[start : start + count + 1], atol=1e-3)

    def rewind(self, counts: Sequence[int]) -> None:
        """Go back that many rows, and feed one more than that again."""
        for sequence, count in enumerate(counts):
            self.backend.rewind(sequence, self.backend.length[sequence] - count)
        self.prefill([count + 1 for count in counts])

    def reset(self, sequence: int, ref: Reference) -> None:
        self.backend.reset(sequence)
        self.references[sequence] = ref
        for rows in self.kv():
            assert not rows[sequence].any()
            assert len(rows) == 1 or rows[sequence - 1].any(), "its neighbour keeps its rows"

    def kv(self) -> Iterator[Any]:
        for tensor in self.backend.cache.tensors.values():
            yield self.backend.memory.read(tensor)

    def survive_a_row_that_is_not_finite(self) -> None:
        tensor, held = self.backend.cache.tensors["kv.0.value"], self.backend.length[0]
        saved = self.backend.memory.read(tensor)
        broken = saved.copy()
        broken[0, :, held - self.backend.cache.base[0] - 5] = np.nan
        self.backend.memory.write(tensor, broken)
        with pytest.raises(NonFiniteError):
            self.backend.round(K, [K])
        rows = self.backend.memory.read(tensor)
        self.backend.memory.write(tensor, np.where(np.isnan(rows), saved, rows))
        assert all(np.isfinite(rows).all() for rows in self.kv())
        assert self.backend.length[0] == held


def play_alone(player: Player, others: Sequence[Reference]) -> None:
    """Accepts of every count, clamps, plain rounds, a rewind, a row that is not finite, other prompts."""
    player.start()
    for right in (3, 0, 2, 1):
        player.round([right])
    for _ in range(3):
        player.round([3], k=0)
    player.round([3], [1])
    player.round([3], [1])
    player.rewind([2])
    player.round([2])
    player.rewind([0])
    player.survive_a_row_that_is_not_finite()
    player.round([1])
    for ref in others:  # each after an odd number of rounds
        player.reset(0, ref)
        player.start()
        for right in (0, 3, 1):
            player.round([right])


def play_together(player: Player, other: Reference) -> None:
    """Three lengths beyond the window: full buffers, the end of the first bucket, and one sequence made anew."""
    player.start()
    for i in range(10):
        player.round([i % 4, (i + 1) % 4, 3], [3, 2, i % 4])
    player.round([3, 3, 3], [2, 1, 2], k=2)
    player.rewind([4, 1, 0])
    while player.backend.length[0] < 132:
        player.round([3, 0, 1])
    player.round([3, 3, 3], k=0)
    assert min(player.backend.cache.base[:2]) > 0
    with pytest.raises(RewindError):
        player.backend.rewind(0, player.backend.cache.base[0] + 3)
    player.reset(1, other)
    player.prefill([1, other.num_prompt_tokens, 1])
    for i in range(6):
        player.round([1, 3, (i + 2) % 4])


def play(simulator: Simulator, setting: Setting) -> None:
    """The scenario, on whatever source is loaded now."""
    module: Any = sys.modules["slipstream.runtime.trt.backend"]
    long, middle, short, other = setting.references
    engines = module.TensorRTEngine(setting.bundle, "tensorrt-rtx")
    backends = [engines.new_backend(), engines.new_backend(3)]
    try:
        play_alone(Player(simulator, backends[0], [other]), [short, middle])
        play_together(Player(simulator, backends[1], [long, middle, short]), short)
        for backend in backends:
            backend.close()
        engines.close()
        simulator.check_closed()
    finally:
        for backend in backends:  # what broke can't be closed any more
            backend.is_closed = True


def load(patch: pytest.MonkeyPatch, *mistakes: Mistake) -> None:
    """Load the runtime's modules anew with texts replaced."""
    for name in MODULES:
        path = FOLDER / f"{name}.py"
        source = path.read_text(encoding="utf-8")
        for file, text, replacement in mistakes:
            if name == file:
                assert source.count(text) == 1, f"{file} has this {source.count(text)} times: {text}"
                source = source.replace(text, replacement)
        module: Any = types.ModuleType(f"slipstream.runtime.{name.replace('/', '.')}")
        module.__package__, module.__file__ = module.__name__.rpartition(".")[0], str(path)
        patch.setitem(sys.modules, module.__name__, module)
        exec(compile(source, path, "exec"), vars(module))


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> Simulator:
    return install(monkeypatch)


def test_the_scenario_passes_on_the_source_as_it_is(
    setting: Setting, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(monkeypatch)
    play(simulator, setting)
    assert simulator.launches > 20


CUDA, CACHE, PAIR, ENGINE, BACKEND = MODULES
_SET_ADDRESS = "if before is None or before.address != tensor.address:"
_SET_SHAPE = "(before is None or before.shape != tensor.shape)"
_DONOR = "= self.cache.tensors[kv_name(donor.layer, part)]"
_DOWNLOAD = "            context.enqueue()\n        self._result.download()"
_KEY = "key = (call.num_draft_tokens, self._bucket, self._current)"
_CLOSE_GRAPH = (
    "        if self._graph is not None:\n            self._graph.close()\n"
    "        for context in self._contexts:\n            context.close()\n"
)
_CLOSE_ENGINES = "        for engine in self._engines:\n            engine.close()\n        self._runtime = None\n"
_PITCHES = "(front, pitch), (front + start * _row_bytes(tensor), pitch)"
_RESET = "self.length[sequence] = self.base[sequence] = self._written[sequence] = self._moved_to[sequence] = 0"

MUTATIONS: list[tuple[str, str, str, str]] = [  # module, its text, what replaces it, what that breaks
    # bindings
    (BACKEND, _SET_ADDRESS, f'{_SET_ADDRESS[:-1]} if name != "position" else False:', "a binding left out"),
    (BACKEND, _SET_ADDRESS, "if before is None:", "an address that changed is not set"),
    (BACKEND, _SET_SHAPE, "before is None", "a shape that changed is not set"),
    (BACKEND, "tensor.address), name)", "tensor.address + 64), name)", "a misaligned address"),
    (BACKEND, '"next_draft": call.draft', '"next_draft": self._unread["top_tokens"]', "the draft goes elsewhere"),
    (BACKEND, "call, self._states[0])", "call, self._states[1])", "a prefill writes the second state"),
    (BACKEND, "engine.profile_index(profile)", "0", "the prefill profile for all"),
    (BACKEND, "min(self._bucket, self.cache.capacity[kind])", "self._bucket", "a bucket above the capacity"),
    (
        ENGINE,
        "self.memory.load_file(path, ",
        "self.memory.allocate(",
        "no embedding",
    ),
    (PAIR, _DONOR, _DONOR.replace("part)", '"key")'), "keys for values"),
    (PAIR, _DONOR, _DONOR.replace("part)", '{"key": "value", "value": "key"}[part])'), "keys and values swapped"),
    (PAIR, _DONOR, _DONOR.replace("donor.layer", 'donor.layer - (donor.type == "sliding")'), "another layer's buffer"),
    (PAIR, _DONOR, _DONOR.replace("donor.layer", "self.manifest.donors[0].layer"), "a donor of the wrong type"),
    (
        PAIR,
        "= cache[kv_name(buffer.layer, part)]",
        '= cache[kv_name(buffer.layer, "key")]',
        "KV output in another buffer",
    ),
    (PAIR, '"position": now.position', '"position": now.past_length', "past_length for position"),
    (
        PAIR,
        '"past_length": now.past_length,\n',
        '"past_length": now.position,\n',
        "position for the draft's past_length",
    ),
    (PAIR, '"past_length": now.past_length}', '"past_length": now.position}', "position for the target's past_length"),
    (PAIR, '"next_position": self.position', '"next_position": self.past_length', "two outputs in one buffer"),
    (
        PAIR,
        '"hidden": now.hidden',
        '"hidden": self._states[1 - self._current].hidden',
        "the hidden row of the round before",
    ),
    # state that goes from round to round
    (PAIR, "self._states[1 - self._current]\n", "self._states[self._current]\n", "outputs on live inputs"),
    (
        PAIR,
        "now, following = self._states[self._current]",
        "now, following = self._states[0]",
        "always the first state",
    ),
    (PAIR, "self._current = 1 - self._current", "pass", "states are not swapped"),
    (PAIR, "        self._current = 0\n", "", "a prefill leaves the current state as it was"),
    # what goes to the device and comes back
    (PAIR, "            self._base.upload()", "            pass", "a moved base is not uploaded"),
    (PAIR, "base[:] = self.cache.base\n", "base[:1] = self.cache.base[0]\n", "the base of the first sequence only"),
    (PAIR, "            self.inputs.upload()", "            pass", "the bound is not uploaded"),
    (
        PAIR,
        "if draft_length != self._draft_length:",
        "if self._draft_length is None:",
        "only the first bound is uploaded",
    ),
    (PAIR, "        call.inputs.upload()\n", "", "a chunk is not uploaded"),
    (
        PAIR,
        "self._run_prefill(call)\n        self.memory.synchronize()",
        "self._run_prefill(call)",
        "no wait for a prefill",
    ),
    (BACKEND, _DOWNLOAD, _DOWNLOAD.partition("\n")[0], "no download"),
    (
        BACKEND,
        _DOWNLOAD,
        _DOWNLOAD.replace("  context.enqueue()", "  self._result.download()\n            context.enqueue()").rpartition(
            "\n"
        )[0],
        "the download before the work",
    ),
    (CUDA, 'self._size, "DeviceToHost"', 'self._size // 3, "DeviceToHost"', "half a download"),
    # lengths
    (PAIR, "[1] * self.batch", "[2] * self.batch", "a row too many counted"),
    (PAIR, "[len(ids) for ids in tokens])\n", "[len(ids) - 1 for ids in tokens])\n", "a row too few counted"),
    (PAIR, "num_fed[sequence] + count", "num_fed[sequence] + max(accepted)", "the accepts of another sequence"),
    (PAIR, "tokens[: count + 1]", "tokens[:count]", "the target's own token is lost"),
    (PAIR, "= len(ids) - 1\n", "= max(map(len, tokens)) - 1\n", "padding is scored"),
    (
        PAIR,
        '["past_length"][sequence] = self.cache.length[sequence]',
        '["past_length"][sequence] = self.cache.length[0]',
        "another's length",
    ),
    (PAIR, "self._prepare(call.num_rows)", "self._prepare(1)", "room for one row only"),
    (BACKEND, "max(self.cache.length) + num_rows", "max(self.cache.length)", "a bucket without the call's own rows"),
    (BACKEND, "max(self.cache.length) + num_rows", "min(self.cache.length) + num_rows", "the bucket of the shortest"),
    (BACKEND, "self._num_steps if num_draft_tokens else 0", "num_draft_tokens", "fewer rows than the engine drafts"),
    # graphs
    (BACKEND, _KEY, _KEY.replace("self._bucket", "0"), "one graph for every bucket"),
    (BACKEND, _KEY, _KEY.replace("self._current", "0"), "one graph for both states"),
    (BACKEND, _KEY, _KEY.replace("call.num_draft_tokens", "0"), "one graph for every K"),
    (BACKEND, " and self._has_run and ", " and ", "captured before the first run"),
    (BACKEND, "[*contexts, verify]", "[verify, *contexts]", "verified before it is drafted"),
    (ENGINE, "Strategy.EAGER", "Strategy.LAZY", "kernels that are swapped later"),
    # memory
    (BACKEND, "workspace.shape[0])", "workspace.shape[0] // 2)", "half the workspace"),
    (ENGINE, "int(max(sizes))", "int(min(sizes))", "the workspace of the smallest profile"),
    (ENGINE, "Strategy.USER_MANAGED", "Strategy.STATIC", "memory that TensorRT takes itself"),
    (CUDA, _PITCHES, _PITCHES.replace(", pitch)", ", pitch - _row_bytes(tensor))"), "rows moved at a wrong pitch"),
    (
        CUDA,
        "front = tensor.address + sequence * heads * pitch",
        "front = tensor.address + sequence * pitch",
        "rows of another sequence moved",
    ),
    (
        CUDA,
        "first = tensor.address + sequence * heads * pitch",
        "first = tensor.address + heads * pitch",
        "rows of another sequence zeroed",
    ),
    (
        CUDA,
        "start * _row_bytes(tensor), pitch)",
        "(start + 1) * _row_bytes(tensor), pitch)",
        "a window moved one row off",
    ),
    (
        CACHE,
        "self._kept_rows = window + max_draft_tokens + 1",
        "self._kept_rows = window // 2",
        "half a window is kept",
    ),
    (CACHE, "= self.base[sequence] + start", "= start", "a base that forgets earlier moves"),
    (CACHE, '+ num_rows > self.capacity["sliding"]', '> self.capacity["sliding"]', "compaction too late"),
    (CACHE, "if first and length - self._window < first:", "if False:", "a rewind behind what was moved away"),
    (CACHE, _RESET, _RESET.replace("self.base[sequence] = ", ""), "a reset keeps the base"),
    (CACHE, "0, self._written[sequence])", "0, 0)", "a reset keeps the rows"),
    (
        PAIR,
        "                self.cache.drop_garbage(sequence)",
        "                pass",
        "rows that are not finite stay",
    ),
    # closing
    (
        BACKEND,
        _CLOSE_GRAPH,
        _CLOSE_GRAPH[_CLOSE_GRAPH.index("        for") :] + _CLOSE_GRAPH[: _CLOSE_GRAPH.index("        for")],
        "contexts before the graphs of them",
    ),
    (BACKEND, _CLOSE_GRAPH, _CLOSE_GRAPH[_CLOSE_GRAPH.index("        for") :], "graphs are not destroyed"),
    (
        BACKEND,
        "                stack.callback(self._prefill_context.close)",
        "                pass",
        "memory before the context that names it",
    ),
    (
        BACKEND,
        "            stack.callback(self.memory.close)\n",
        "",
        "page-locked memory stays",
    ),
    (
        ENGINE,
        _CLOSE_ENGINES,
        "        self._runtime = None\n        for engine in self._engines:\n            engine.close()\n",
        "the runtime before its engines",
    ),
    (
        ENGINE,
        "            stack.callback(self.stream.close)\n            stack.callback(self.memory.close)\n",
        "            stack.callback(self.memory.close)\n            stack.callback(self.stream.close)\n",
        "the stream before its memory",
    ),
]


def assert_caught(simulator: Simulator, setting: Setting, breaks: str) -> None:
    caught = None
    try:
        play(simulator, setting)
    except MISTYPED:
        raise
    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 (anything else is how it shows)
        caught = f"{type(error).__name__}: {error}"
        simulator.is_abandoned = True  # what broke is dropped in any order, from here on
    gc.collect()
    assert caught is not None, f"{breaks}: nothing noticed"


_WAIT = "        if call.num_draft_tokens:\n            self.memory.synchronize()\n"
_LOOK_UP = "np.concatenate([self._pending, call.drafted.arrays"
HOST_MUTATIONS: list[tuple[str, str, str, str]] = [
    (PAIR, _WAIT, "", "rows of a draft that is not there yet"),
    (BACKEND, "            self._look_up_round(call)", "            pass", "rows of an earlier round"),
    (BACKEND, "_Captured(contexts, call.drafted)", "_Captured(contexts, call.decision)", "the draft is not downloaded"),
    (PAIR, "            self.per_layer.upload()", "            pass", "rows are not uploaded"),
    (PAIR, "        call.look_up(np.concatenate([arrays", "        (np.concatenate([arrays", "no rows for a chunk"),
    (PAIR, "= own[sequence][count]", "= own[sequence][0]", "the pending token of a round that accepted nothing"),
    (PAIR, _LOOK_UP, _LOOK_UP.replace("self._pending", "self._pending[::-1]"), "the pending token of a neighbour"),
]


def test_the_scenario_passes_with_a_table_on_the_host(
    host_setting: Setting, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(monkeypatch)
    play(simulator, host_setting)


@pytest.mark.parametrize(
    ("where", "file", "text", "replacement", "breaks"),
    [("setting", *m) for m in MUTATIONS] + [("host_setting", *m) for m in HOST_MUTATIONS],
    ids=[f"{m[0]}: {m[3]}" for m in [*MUTATIONS, *HOST_MUTATIONS]],
)
def test_a_mistake_is_caught(
    where: str,
    file: str,
    text: str,
    replacement: str,
    breaks: str,
    request: pytest.FixtureRequest,
    simulator: Simulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting: Setting = request.getfixturevalue(where)
    load(monkeypatch, (file, text, replacement))
    assert_caught(simulator, setting, breaks)


def test_a_round_that_nobody_waits_for_is_caught(
    setting: Setting, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for twice: one wait ends what verify_seconds measures."""
    inner = "self.memory.synchronize()\n        self._last"
    outer = "self._run_round(call)\n        self.memory.synchronize()"
    load(monkeypatch, (BACKEND, inner, "self._last"), (PAIR, outer, "self._run_round(call)"))
    assert_caught(simulator, setting, "no wait for a round")
