"""Mistakes that a GPU would keep silent about: each is made once in the runtime's functions, and each must show.

One scenario drives the engines against ONNX Runtime: the text at every position, the assistant's
own drafts from every length, which drafts are accepted, what a reset leaves.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import fakes

from . import mistakes
from .machine import Simulator, install
from .mistakes import Change, apply, leave_out, move, replace
from .scenario import Setting, play, setting_of

MISTYPED = (SyntaxError, NameError, AttributeError, TypeError)  # not what a mutation is caught by


@pytest.fixture(scope="module")
def setting(bundle_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """Several KV heads, a position that is not the length, and chunks of 16 so that buffers are soon full."""
    return setting_of(bundle_folder("dense", draft_position="last"), tmp_path_factory.mktemp("mutations"))


@pytest.fixture(scope="module")
def host_setting(bundle_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """Per-layer embeddings that are looked up on the host."""
    return setting_of(bundle_folder("edge"), tmp_path_factory.mktemp("mutations"))


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> Simulator:
    return install(monkeypatch)


_RESET = "self.length[slot] = self.base[slot] = self._rewound_from[slot] = self._moved_to[slot] = 0"
_KEY = "(call.num_draft_tokens, call.batch, self.bucket, self._current, choice.graph)"
_DONOR = "self.cache.tensors[binding.name]"
_STATE = "self._states[self._current].tensors"
_HELD = "max(self.cache.length[slot] for slot in slots) + num_rows"
_SWAPPED = 'binding.name.replace("key", "other").replace("value", "key").replace("other", "value")'

MISTAKES: dict[str, Change] = {
    # bindings
    "a binding left out": replace(
        "before is None or before.address != tensor.address",
        'name != "position" and (before is None or before.address != tensor.address)',
    ),
    "an address that changed is not set": replace(
        "before is None or before.address != tensor.address", "before is None"
    ),
    "a shape that changed is not set": replace("before is None or before.shape != tensor.shape", "before is None"),
    "a misaligned address": replace(
        "self._context.set_tensor_address(name, tensor.address)",
        "self._context.set_tensor_address(name, tensor.address + 64)",
    ),
    "the draft goes elsewhere": replace("call.draft", 'self._unread["draft_top_tokens"]', within="_draft_rest"),
    "the KV of the first slot": replace("of_slot(tensor, slot)", "of_slot(tensor, 0)", within="_prefill_tensors"),
    "a prefill's state in another slot": replace(
        "self.memory.copy_to_slot(call.state.tensors[name], tensor, slot)",
        "self.memory.copy_to_slot(call.state.tensors[name], tensor, 0)",
    ),
    "a prefill's state in the one that is not read": replace(
        "self._states[self._current].tensors.items()",
        "self._states[1 - self._current].tensors.items()",
        within="PairBackend.prefill",
    ),
    "the prefill profile for all": replace("engine.profile_index(profile)", "0"),
    "a bucket above the capacity": replace("min(self.bucket, capacity)", "self.bucket"),
    "no embedding": replace(
        "self.memory.load_file(path, shape, self.manifest.dtype)", "self.memory.allocate(shape, self.manifest.dtype)"
    ),
    "keys for values": replace(_DONOR, 'self.cache.tensors[binding.name.replace("value", "key")]'),
    "keys and values swapped": replace(_DONOR, f"self.cache.tensors[{_SWAPPED}]"),
    "another layer's buffer": replace(_DONOR, 'self.cache.tensors[binding.name.replace("kv.2", "kv.1")]'),
    "a donor of the wrong type": replace(_DONOR, 'self.cache.tensors[binding.name.replace("kv.3", "kv.2")]'),
    "KV output in another buffer": replace(
        '{f"next_{name}": tensor for name, tensor in cache.items()}',
        '{f"next_{name}": cache[name.replace("value", "key")] for name in cache}',
    ),
    "past_length for position": replace(
        _STATE, f'{_STATE} | {{"position": {_STATE}["past_length"]}}', within="_draft_tensors"
    ),
    "position for the draft's past_length": replace(
        _STATE, f'{_STATE} | {{"past_length": {_STATE}["position"]}}', within="_draft_tensors"
    ),
    "position for the target's past_length": replace(
        "{**self._of_batch(call, given), **call.inputs.tensors, **tensors}",
        '{**self._of_batch(call, {**given, "past_length": given["position"]}), **call.inputs.tensors, **tensors}',
    ),
    "two outputs in one buffer": replace(
        '{f"next_{name}": tensor for name, tensor in following.tensors.items()}',
        '{f"next_{name}": following.tensors[name.replace("position", "past_length")] for name in following.tensors}',
    ),
    "the hidden row of the round before": replace(
        _STATE, f'{_STATE} | {{"hidden": self._states[1 - self._current].tensors["hidden"]}}', within="_draft_tensors"
    ),
    # state that goes from round to round
    "outputs on live inputs": replace("self._states[1 - self._current]", "self._states[self._current]"),
    "always the first state": replace("self._states[self._current]", "self._states[0]", within="_round_tensors"),
    "states are not swapped": leave_out("self._current = 1 - self._current"),
    "an idle slot goes on": replace("not limit", "False", within="PairBackend._commit"),
    "an idle slot's length is not told": leave_out("self._resume(batch)"),
    "slots beyond the batch count as known": replace("(False, True)", "(False, False)", within="round"),
    # what goes to the device and comes back
    "a moved base is not uploaded": leave_out("self._base.upload()"),
    "the base of the first sequence only": replace("base[:] = self.cache.base", "base[:1] = self.cache.base[0]"),
    "the bound is not uploaded": leave_out("self.inputs.upload()", within="set_commit_limit"),
    "only the first bound is uploaded": replace("commit_limit != self._commit_limit", "self._commit_limit is None"),
    "a chunk is not uploaded": leave_out("self.inputs.upload()", within="feed"),
    "no wait for a prefill": leave_out("self.memory.synchronize()", within="prefill"),
    "no download": leave_out("self._result.download()"),
    "the work after the download": move("context.enqueue()", after="self._result.download()"),
    "half a download": replace("self._size", "self._size // 3", within="download"),
    # lengths
    "a row too many counted": replace("num_accepted[slot] + 1", "num_accepted[slot] + 2"),
    "a row too few counted": replace(
        "self.cache.length[slot] += len(tokens)", "self.cache.length[slot] += len(tokens) - 1"
    ),
    "the accepts of another sequence": replace("num_accepted[slot] + 1", "max(num_accepted) + 1"),
    "the target's own token is lost": replace("own_token[slot][:count]", "own_token[slot][:count - 1]"),
    "padding is scored": replace(
        'arrays["scored_rows"][0, 0] = len(tokens) - 1', 'arrays["scored_rows"][0, 0] = self.num_rows - 1'
    ),
    "another's length": replace(
        "call.feed(tokens, self.cache.length[slot], self.cache.base[slot], sampling)",
        "call.feed(tokens, self.cache.length[0], self.cache.base[slot], sampling)",
    ),
    "room for one row only": replace(
        "self._prepare(...)", "self._prepare(range(batch), 1)", within="PairBackend.round"
    ),
    "a bucket without the call's own rows": replace(_HELD, "max(self.cache.length[slot] for slot in slots)"),
    "the bucket of the shortest": replace(_HELD, "min(self.cache.length[slot] for slot in slots) + num_rows"),
    "fewer rows than the engine drafts": replace("self._num_steps if num_draft_tokens else 0", "num_draft_tokens"),
    # graphs
    "one graph for every bucket": replace(_KEY, "(call.num_draft_tokens, call.batch, 0, self._current, choice.graph)"),
    "one graph for both states": replace(_KEY, "(call.num_draft_tokens, call.batch, self.bucket, 0, choice.graph)"),
    "one graph for every K": replace(_KEY, "(0, call.batch, self.bucket, self._current, choice.graph)"),
    "one graph for every number of slots": replace(
        _KEY, "(call.num_draft_tokens, 0, self.bucket, self._current, choice.graph)"
    ),
    "captured before the first run": leave_out("self._has_run", within="run"),
    "verified before it is drafted": replace("[*drafting, *contexts]", "[*contexts, *drafting]"),
    "kernels that are swapped later": replace(
        "self.trt.module.DynamicShapesKernelSpecializationStrategy.EAGER",
        "self.trt.module.DynamicShapesKernelSpecializationStrategy.LAZY",
    ),
    # memory
    "half the workspace": replace("workspace.shape[0]", "workspace.shape[0] // 2"),
    "the workspace of the smallest profile": replace("max(sizes)", "min(sizes)"),
    "memory that TensorRT takes itself": replace(
        "self.trt.module.ExecutionContextAllocationStrategy.USER_MANAGED",
        "self.trt.module.ExecutionContextAllocationStrategy.STATIC",
    ),
    "rows moved at a wrong pitch": replace("(front, pitch)", "(front, pitch - _row_bytes(tensor))"),
    "rows of another slot moved": replace("slot * heads * pitch", "slot * pitch", within="move_rows"),
    "rows of another slot zeroed": replace("slot * heads * pitch", "heads * pitch", within="zero_rows"),
    "a window moved one row off": replace(
        "start * _row_bytes(tensor)", "(start + 1) * _row_bytes(tensor)", within="move_rows"
    ),
    "half a window is kept": replace("window + max_draft_tokens + base_step", "window // 2", within="KVCache.__init__"),
    "a base that forgets earlier moves": replace("self.base[slot] + start", "start"),
    "a fork of one row less": replace("length - first", "length - first - 1", within="KVCache.fork"),
    "a fork that forgets the base": replace("(length, self.base[source], self._moved_to[source])", "(length, 0, 0)"),
    "compaction too late": replace("self._held(slot) + num_rows", "self._held(slot)"),
    "a rewind behind what was moved away": replace("first and length - self._window < first", "False"),
    "a reset keeps the base": replace(_RESET, _RESET.replace("self.base[slot] = ", "")),
    "a reset keeps the rows": replace("self._written_end(slot)", "0", within="reset"),
    "rows that are not finite stay": leave_out("self.cache.drop_garbage(...)"),
    # closing
    "contexts before the graphs of them": move(
        "stack.callback(context.close)", after="stack.callback(self._graph.close)"
    ),
    "graphs are not destroyed": leave_out("stack.callback(self._graph.close)"),
    "memory before the context that names it": leave_out(
        "stack.callback(context.close)", within="TensorRTBackend._close"
    ),
    "page-locked memory stays": leave_out("stack.callback(self.memory.close)", within="TensorRTBackend._close"),
    "the runtime before its engines": move("engine.close()", after="self._runtime = None"),
    "the stream before its memory": move("held.callback(self.stream.close)", after="held.callback(self.memory.close)"),
}
# Where per-layer embeddings are looked up on the host.
HOST_MISTAKES: dict[str, Change] = {
    "rows of a draft that is not there yet": leave_out("self.memory.synchronize()", within="_look_up_round"),
    "rows of an earlier round": leave_out("self._look_up_round(call)"),
    "the draft is not downloaded": replace("_Captured(drafting, call.drafted)", "_Captured(drafting, call.decision)"),
    "rows are not uploaded": leave_out("self.per_layer.upload()"),
    "no rows for a chunk": leave_out("self.look_up(...)", within="feed"),
    "the pending token of a round that accepted nothing": replace("own_token[slot][count - 1]", "own_token[slot][0]"),
    "the pending token of a neighbour": replace("self._pending", "self._pending[::-1]", within="_look_up_round"),
}


def test_code_is_found_by_what_it_is_and_only_where_it_stands_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mistakes, "_modules", lambda: ["tests.support.fakes"])
    apply(monkeypatch, replace("(tokens)[len(prompt):]", "tokens"))
    assert fakes.plain_tokens(len, [1, 2], 1) == [1, 2, 2]
    with pytest.raises(AssertionError, match=r"prefill.*round"):
        apply(monkeypatch, leave_out("self._fail(is_late=False)"))


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


def test_the_scenario_passes_on_the_source_as_it_is(setting: Setting, simulator: Simulator) -> None:
    play(simulator, setting)
    assert simulator.launches > 20


def test_the_scenario_passes_with_a_table_on_the_host(host_setting: Setting, simulator: Simulator) -> None:
    play(simulator, host_setting)
    assert simulator.launches > 20


@pytest.mark.parametrize("breaks", MISTAKES)
def test_a_mistake_is_caught(
    breaks: str, setting: Setting, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(monkeypatch, MISTAKES[breaks])
    assert_caught(simulator, setting, breaks)


@pytest.mark.parametrize("breaks", HOST_MISTAKES)
def test_a_mistake_with_a_table_on_the_host_is_caught(
    breaks: str, host_setting: Setting, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(monkeypatch, HOST_MISTAKES[breaks])
    assert_caught(simulator, host_setting, breaks)


def test_a_round_that_nobody_waits_for_is_caught(
    setting: Setting, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for twice: one wait ends what verify_seconds measures."""
    apply(monkeypatch, leave_out("self.memory.synchronize()", within="_run_round"))
    apply(monkeypatch, leave_out("self.memory.synchronize()", within="PairBackend.round"))
    assert_caught(simulator, setting, "no wait for a round")
