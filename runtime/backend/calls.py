"""One shape of a call: what the host gives it, what it decides, and the state that goes from round to round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from slipstream.runtime.bundle import graph_io
from slipstream.runtime.bundle.dtypes import Array
from slipstream.runtime.sampling import FORBIDDEN

from .choosing import write_sampling
from .contract import Mask, Sampling
from .per_layer_table import PerLayerTable
from .tensors import Memory, Mirror, front, num_bytes


class State:
    """What a round hands to the next one: tensors by the input's name, a row for each slot."""

    def __init__(self, memory: Memory, sizes: Mapping[str, int], dtype: str) -> None:
        given = graph_io.specs(graph_io.placed(graph_io.INPUTS, "state"), sizes, dtype)
        self.tensors = memory.allocate_all(given)


class Logits:
    """Where logits of a call's scored rows lie from one graph's run to the next: one buffer for calls of every size."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._largest: Any = None

    def of(self, shape: Sequence[int]) -> Any:
        """A tensor of float32; one that was given before may be a part of it, or of a smaller one."""
        if self._largest is None or num_bytes(shape, "float32") > num_bytes(self._largest.shape, "float32"):
            self._largest = self._memory.allocate(shape, "float32")
        return front(self._largest, shape)


class Call:
    """One shape of a target call and the choice after it: what the host gives, and what is decided.

    sizes: of every dimension by name. inputs: uploaded by the host. scores: from target to choice.
    decision: own_token [B, R], num_accepted [B], is_finite [B]; all that ever comes back to the host.
    per_layer: the rows of a per-layer table that is looked up on the host, for every row of the call.
    """

    inputs: Mirror
    draft: Any

    def __init__(
        self, memory: Memory, sizes: Mapping[str, int], dtype: str, logits: Logits, table: PerLayerTable | None
    ) -> None:
        """sizes: of batch, num_rows and num_scored_rows, and the manifest's. dtype: the manifest's."""
        self.num_rows, self.batch = sizes["num_rows"], sizes["batch"]
        self._memory, self._dtype = memory, dtype
        self.sizes = {**sizes, "num_draft_tokens": self.num_rows - 1}
        self.per_layer: Mirror | None = None
        if table is not None:
            self.per_layer = self._mirror(graph_io.INPUTS, "table")
            self._lookup = table.lookup(*self.per_layer.arrays.values())
            self._tokens = np.zeros((sizes["batch"], self.num_rows), np.int64)
            self._token, self._draft = self._tokens[:, :1], self._tokens[:, 1:]
        given = graph_io.specs(graph_io.placed(graph_io.outputs("target"), "graph"), self.sizes, dtype)
        (shape, _), hidden = given["logits"], given["hidden"]
        self.scores = {"logits": logits.of(shape), "hidden": memory.allocate(*hidden)}
        self.decision = self._mirror(graph_io.OUTPUTS, "decision")
        decision = self.decision.arrays
        self.is_finite, self.num_accepted = decision["is_finite"], decision["num_accepted"]
        self.own_token = decision["own_token"]
        self._logprobs: Mirror | None = None
        self._masks: Mirror | None = None

    @property
    def masks(self) -> Mirror:
        """The bias of each row, where any sequence is masked."""
        if self._masks is None:
            self._masks = self._mirror(graph_io.INPUTS, "mask")
        return self._masks

    def fill_masks(self, masks: Sequence[Mask | None], drafts: Sequence[Sequence[int]]) -> None:
        """Ask what may come after each draft, and upload it. masks, drafts: of the call's sequences."""
        [bias] = self.masks.arrays.values()
        for sequence, (mask, draft) in enumerate(zip(masks, drafts, strict=True)):
            bias[sequence] = 0
            if mask is not None:
                allowed = mask(draft)[: bias.shape[1]]
                bias[sequence, : len(allowed)] = np.where(allowed, 0, FORBIDDEN)
        self.masks.upload()

    @property
    def logprobs(self) -> Mirror:
        """What choose_processed and choose_full give beside the decision."""
        if self._logprobs is None:
            self._logprobs = self._mirror(graph_io.OUTPUTS, "logprob")
        return self._logprobs

    def _mirror(self, bindings: Iterable[graph_io.Binding], *places: graph_io.Place) -> Mirror:
        return self._memory.mirror(graph_io.specs(graph_io.placed(bindings, *places), self.sizes, self._dtype))

    def look_up(self, token: Array, draft: Array) -> None:
        """Upload the per-layer rows of token [B, 1] and draft [B, Q - 1], where the table is on the host."""
        if self.per_layer is not None:
            self._token[...], self._draft[...] = token, draft
            self._lookup(self._tokens)
            self.per_layer.upload()


def _given() -> list[graph_io.Binding]:
    """Inputs of the target and of any graph that chooses after it."""
    return [*graph_io.inputs("target"), *graph_io.inputs("choose_full")]


class PrefillCall(Call):
    """Everything that a chunk of one slot needs comes from the host; nothing is accepted.

    state: what the round after it reads, for that slot.
    """

    def __init__(
        self, memory: Memory, sizes: Mapping[str, int], dtype: str, logits: Logits, table: PerLayerTable | None
    ) -> None:
        super().__init__(memory, {**sizes, "batch": 1, "num_scored_rows": 1}, dtype, logits, table)
        self.inputs = self._mirror(_given(), "state", "draft", "host", "base", "sampling")
        self.inputs.arrays["commit_limit"][:] = 1
        self.draft = self.inputs.tensors["draft"]
        self.state = State(memory, self.sizes, dtype)

    def feed(self, tokens: Sequence[int], past_length: int, base: int, sampling: Sampling) -> None:
        """Fill and upload the inputs."""
        arrays = self.inputs.arrays
        arrays["token"][0, 0] = tokens[0]
        arrays["draft"][0, : len(tokens) - 1] = tokens[1:]
        arrays["draft"][0, len(tokens) - 1 :] = 0  # padding, above the new length
        arrays["scored_rows"][0, 0] = len(tokens) - 1
        arrays["past_length"][0], arrays["base"][0] = past_length, base
        write_sampling(arrays, 0, sampling)
        self.inputs.upload()
        self.look_up(arrays["token"], arrays["draft"])


class RoundCall(Call):
    """The draft comes from the assistant and the rest from the state; the host bounds what may be added.

    num_rows: of the target; those after the K + 1 of a round hold token 0 and are never accepted.
    drafted: the draft, for the host to see where it looks per-layer rows up.
    """

    def __init__(
        self,
        memory: Memory,
        sizes: Mapping[str, int],
        dtype: str,
        logits: Logits,
        table: PerLayerTable | None,
        num_draft_tokens: int,
    ) -> None:
        super().__init__(memory, {**sizes, "num_scored_rows": sizes["num_rows"]}, dtype, logits, table)
        self.num_draft_tokens = num_draft_tokens
        self.drafted = self._mirror(graph_io.inputs("target"), "draft")
        self.draft = self.drafted.tensors["draft"]
        self.inputs = self._mirror(_given(), "host")
        self.inputs.arrays["scored_rows"][:] = np.arange(self.num_rows)
        self.inputs.arrays["is_generated"][:] = 1
        self._commit_limit: list[int] | None = None

    def set_commit_limit(self, commit_limit: list[int]) -> None:
        """Upload the bound when it is not the one already there: a steady loop uploads nothing."""
        if commit_limit != self._commit_limit:
            self._commit_limit = commit_limit
            self.inputs.arrays["commit_limit"][:] = commit_limit
            self.inputs.upload()
