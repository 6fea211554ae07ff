"""Every input and output of the graphs, once: what tracing, bindings, builds, memory and comparisons go by.

An input or output is added here, to the module that computes it, and to who gives or reads it; nothing else names
its shape or type. The table in docs/bundle.md is compared with this one by a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from .dtypes import NUMPY, Array
from .manifest import KVBuffer

ChooseName = Literal["choose_greedy", "choose_sampled", "choose_processed", "choose_full"]
GraphName = Literal["target", "assistant", ChooseName, "draw"]
ENGINE_CHOICES: tuple[ChooseName, ...] = ("choose_greedy", "choose_sampled")  # that TensorRT builds
Condition = Literal["", "per-layer embeddings outside the graph", "engines"]
# Of an input: who gives it in a round. A prefill is given "state" and "draft" by the host, too.
# Of an output: where it goes. Output next_x of "state" and "cache" is the next round's input x.
# "graph": from the target to a choose graph, or from the assistant to draw, under one name; nobody reads the
# assistant's in greedy decoding.
# "history", "mask", "logprob": of choose_processed and choose_full, where a sequence needs it.
Place = Literal[
    "host", "state", "draft", "base", "cache", "table", "engine", "graph", "sampling", "constant",
    "history", "mask", "decision", "logprob", "step",
]  # fmt: skip
NUM_LOGPROBS = 20  # of a row, at most: what OpenAI's API offers
ROWS_INPUT = {"sliding": "sliding_rows", "full": "full_rows"}
PER_LAYER_INPUT = "per_layer_rows"
EMBEDDING_INPUT = "embedding_table"
BUCKET_SUFFIX = ".bucket"  # of a buffer's first rows, inside an engine
_OF_THE_BUNDLE = {"hidden_size", "vocab_size", "num_draft_top_logits", "per_layer_width"}
_BOTH: tuple[GraphName, ...] = ("target", "assistant")
_PROCESSED: tuple[GraphName, ...] = ("choose_processed", "choose_full")
_CHOOSING: tuple[GraphName, ...] = ("choose_greedy", "choose_sampled", *_PROCESSED)
_DRAWING: tuple[GraphName, ...] = ("choose_sampled", *_PROCESSED)
_SAMPLING: tuple[GraphName, ...] = (*_DRAWING, "draw")
_DECIDING: tuple[GraphName, ...] = ("target", *_CHOOSING)


@dataclass(frozen=True)
class Binding:
    """One input or output.

    name: with {layer} for KV tensors, which there is one of per buffer.
    shape: sizes by name, as a graph's dynamic dimensions or the manifest call them.
    dtype: an element type, or "bundle" for the manifest's, or "kv" for the buffer's own.
    condition: when it is there, "" for always.
    """

    name: str
    graphs: tuple[GraphName, ...]
    shape: tuple[str | int, ...]
    dtype: str
    place: Place
    meaning: str
    condition: Condition = ""

    def sized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with every name replaced by its size."""
        return tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)

    def typed(self, dtype: str) -> str:
        """The element type. dtype: the manifest's."""
        return dtype if self.dtype == "bundle" else self.dtype

    @property
    def is_kv(self) -> bool:
        return self.place == "cache"


_KV_SHAPE = ("batch", "num_kv_heads", "{type}_capacity", "head_dim")
_ROWS_OUTSIDE: Condition = "per-layer embeddings outside the graph"
_ENGINES: Condition = "engines"

INPUTS = (
    Binding("token", (*_BOTH, *_PROCESSED), ("batch", 1), "int64", "state", "pending; the first of a prefill's chunk"),
    Binding(
        "draft", _DECIDING, ("batch", "num_draft_tokens"), "int64", "draft",
        "tokens after it: the draft, or the rest of a prefill's chunk; may be empty",
    ),
    Binding(
        "draft", ("assistant", "draw"), ("batch", "num_drafted"), "int64", "draft", "the draft so far; may be empty"
    ),
    Binding("hidden", ("assistant",), ("batch", 1, "hidden_size"), "bundle", "state", "the target's row before token"),
    Binding("position", ("assistant",), ("batch",), "int64", "state", "of each draft step: token's or one before"),
    Binding(
        "past_length", (*_BOTH, *_CHOOSING, "draw"), ("batch",), "int64", "state",
        "rows of KV that are valid; new rows go from there on",
    ),
    Binding("base", _BOTH, ("batch",), "int64", "base", "absolute position of row 0 of the sliding buffers"),
    Binding(
        "scored_rows", _DECIDING, ("batch", "num_scored_rows"), "int64", "host",
        "rows to score, ascending; drafts up to the first of them are taken as given",
    ),
    Binding(
        "commit_limit", _CHOOSING, ("batch",), "int64", "host",
        "tokens that may be added: 1 accepts no draft, at most scored rows; 0 leaves a sequence as it is",
    ),
    Binding("is_generated", _PROCESSED, ("batch",), "int64", "host", "1 where the rows are counted; 0 of a prompt's"),
    Binding("kv.{layer}.key", _BOTH, _KV_SHAPE, "kv", "cache", "of every buffer; the assistant has the two donors'"),
    Binding("kv.{layer}.value", _BOTH, _KV_SHAPE, "kv", "cache", "as the keys"),
    Binding(
        PER_LAYER_INPUT, ("target",), ("batch", "num_rows", "per_layer_width"), "bundle", "table",
        "rows of the per-layer table for token and draft", _ROWS_OUTSIDE,
    ),
    Binding(
        ROWS_INPUT["sliding"], _BOTH, ("sliding_bucket",), "int64", "engine",
        "0, 1, 2, ...: as many rows are attended to", _ENGINES,
    ),
    Binding(ROWS_INPUT["full"], _BOTH, ("full_bucket",), "int64", "engine", "the same of full buffers", _ENGINES),
    Binding(
        EMBEDDING_INPUT, _BOTH, ("vocab_size", "hidden_size"), "bundle", "engine",
        "the target's embedding, one buffer for both engines", _ENGINES,
    ),
    Binding(
        "logits", _CHOOSING, ("batch", "num_scored_rows", "vocab_size"), "float32", "graph",
        "of each scored row, before the softcap",
    ),
    Binding(
        "hidden", _CHOOSING, ("batch", "num_rows", "hidden_size"), "bundle", "graph",
        "the target's rows of token and draft",
    ),
    Binding(
        "draft_top_logits", ("draw",), ("batch", 1, "num_draft_top_logits"), "float32", "graph",
        "of the candidates of the step, descending",
    ),
    Binding(
        "draft_top_tokens", ("draw",), ("batch", 1, "num_draft_top_logits"), "int64", "graph",
        "ids of draft_top_logits",
    ),
    Binding("temperature", _SAMPLING, ("batch",), "float32", "sampling", "0 takes the first candidate"),
    Binding("top_k", _SAMPLING, ("batch",), "int64", "sampling", "candidates that may be drawn, 1 or more"),
    Binding("top_p", _SAMPLING, ("batch",), "float32", "sampling", "of the probability is drawn from, above 0 to 1"),
    Binding("min_p", _SAMPLING, ("batch",), "float32", "sampling", "least probability, of the first one's; 0 to 1"),
    Binding("seed", _SAMPLING, ("batch",), "int64", "sampling", "of the noise, 0 or more"),
    Binding("repetition_penalty", _PROCESSED, ("batch",), "float32", "sampling", "of prompt and text; 1 is none"),
    Binding("presence_penalty", _PROCESSED, ("batch",), "float32", "sampling", "of what is in the text; 0 is none"),
    Binding("frequency_penalty", _PROCESSED, ("batch",), "float32", "sampling", "for each time in the text; 0 is none"),
    Binding("prompt_seen", _PROCESSED, ("batch", "vocab_size"), "float32", "history", "1 where the prompt has it"),
    Binding(
        "token_counts", _PROCESSED, ("batch", "vocab_size"), "float32", "history",
        "how often the text has each token, the pending one and drafts aside",
    ),
    Binding("logit_bias", _PROCESSED, ("batch", "vocab_size"), "float32", "history", "added after penalties"),
    Binding(
        "row_bias", _PROCESSED, ("batch", "num_scored_rows", "vocab_size"), "float32", "mask",
        "added too, for each row; -1e30 forbids",
    ),
    Binding("position_offset", _CHOOSING, (1,), "int64", "constant", "the manifest's draft_position_offset"),
    Binding("logit_softcap", _DRAWING, (1,), "float32", "constant", "the manifest's; 0 where it has none"),
)  # fmt: skip
OUTPUTS = (
    Binding(
        "logits", ("target",), ("batch", "num_scored_rows", "vocab_size"), "float32", "graph",
        "of each scored row, before the softcap",
    ),
    Binding("hidden", ("target",), ("batch", "num_rows", "hidden_size"), "bundle", "graph", "after the final norm"),
    Binding("is_finite", ("target",), ("batch",), "bool", "decision", "false where a row has a NaN or infinity"),
    Binding(
        "own_token", _CHOOSING, ("batch", "num_scored_rows"), "int64", "decision",
        "the target's own token after each scored row: the likeliest, or the one that is drawn",
    ),
    Binding("num_accepted", _CHOOSING, ("batch",), "int64", "decision", "drafts that were accepted"),
    Binding("next_token", _CHOOSING, ("batch", 1), "int64", "state", "the next round's token"),
    Binding("next_hidden", _CHOOSING, ("batch", 1, "hidden_size"), "bundle", "state", "the next round's hidden"),
    Binding("next_past_length", _CHOOSING, ("batch",), "int64", "state", "the next round's past_length"),
    Binding("next_position", _CHOOSING, ("batch",), "int64", "state", "the next round's position"),
    Binding(
        "next_token_counts", _PROCESSED, ("batch", "vocab_size"), "float32", "history", "the input's buffer, in place"
    ),
    Binding("logprob", _PROCESSED, ("batch", "num_scored_rows"), "float32", "logprob", "of the own token, natural"),
    Binding(
        "top_logprobs", _PROCESSED, ("batch", "num_scored_rows", NUM_LOGPROBS), "float32", "logprob",
        "of the model's own logits, before temperature, penalties, biases and masks; descending",
    ),
    Binding(
        "top_logprob_tokens", _PROCESSED, ("batch", "num_scored_rows", NUM_LOGPROBS), "int64", "logprob",
        "ids of top_logprobs",
    ),
    Binding("next_kv.{layer}.key", ("target",), _KV_SHAPE, "kv", "cache", "the input's buffer, updated in place"),
    Binding("next_kv.{layer}.value", ("target",), _KV_SHAPE, "kv", "cache", "as the keys"),
    Binding(
        "next_draft", ("assistant", "draw"), ("batch", "num_drafted_next"), "int64", "draft",
        "the draft with the graph's steps appended",
    ),
    Binding(
        "draft_top_logits", ("assistant",), ("batch", "num_steps", "num_draft_top_logits"), "float32", "graph",
        "of each step, descending",
    ),
    Binding(
        "draft_top_tokens", ("assistant",), ("batch", "num_steps", "num_draft_top_logits"), "int64", "graph",
        "ids of draft_top_logits",
    ),
    Binding(
        "next_hidden", ("assistant",), ("batch", 1, "hidden_size"), "bundle", "step", "hidden of a step after these",
    ),
)  # fmt: skip


def inputs(graph: GraphName, *, has_per_layer_rows: bool = False, is_engine: bool = False) -> list[Binding]:
    """Inputs of a graph in their order; of KV tensors there is one for all layers, see ``for_layers``."""
    there = {"", *([_ROWS_OUTSIDE] if has_per_layer_rows else []), *([_ENGINES] if is_engine else [])}
    return [binding for binding in INPUTS if graph in binding.graphs and binding.condition in there]


def outputs(graph: GraphName) -> list[Binding]:
    """Outputs of a graph in their order."""
    return [binding for binding in OUTPUTS if graph in binding.graphs]


def placed(bindings: Iterable[Binding], *places: Place) -> list[Binding]:
    """The bindings that have one of these places, in their order."""
    return [binding for binding in bindings if binding.place in places]


def for_layers(bindings: Iterable[Binding], buffers: Sequence[KVBuffer]) -> list[Binding]:
    """KV bindings once per buffer, with its name, shape and type; the others as they are."""
    return [
        made
        for binding in bindings
        for made in ([_of_buffer(binding, buffer) for buffer in buffers] if binding.is_kv else [binding])
    ]


def _of_buffer(binding: Binding, buffer: KVBuffer) -> Binding:
    shape = ("batch", buffer.num_kv_heads, f"{buffer.type}_capacity", buffer.head_dim)
    return replace(binding, name=binding.name.format(layer=buffer.layer), shape=shape, dtype=buffer.dtype)


def kv_name(layer: int, part: str) -> str:
    """Name of a KV input; ``part`` is "key" or "value"."""
    return f"kv.{layer}.{part}"


def kv_output_name(layer: int, part: str) -> str:
    """Name of the output that updates ``kv_name(layer, part)`` in place."""
    return f"next_{kv_name(layer, part)}"


def layer_types(buffers: Sequence[KVBuffer]) -> dict[str, str]:
    """ "sliding" or "full" by name of a KV input."""
    return {kv_name(buffer.layer, part): buffer.type for buffer in buffers for part in ("key", "value")}


def dynamic_sizes(bindings: Iterable[Binding]) -> set[str]:
    """Sizes that differ from call to call, but for the capacity, which engines have fixed."""
    names = {size for binding in bindings if not binding.is_kv for size in binding.shape if isinstance(size, str)}
    return names - _OF_THE_BUNDLE


def specs(bindings: Iterable[Binding], sizes: Mapping[str, int], dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and element type by name. dtype: the manifest's."""
    return {binding.name: (binding.sized(sizes), binding.typed(dtype)) for binding in bindings}


def feeds(graph: GraphName, values: Mapping[str, object], *, has_per_layer_rows: bool = False) -> dict[str, Array]:
    """A call's inputs as arrays, KV tensors as they are given: integers in their types, zeros for what is not given.

    values: by name. Raises ValueError for a name or shape that the graph has not.
    """
    known = {b.name: b for b in inputs(graph, has_per_layer_rows=has_per_layer_rows)}
    arrays = {name: np.asarray(value) for name, value in values.items()}
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        if (binding := known.get(name)) is None and not name.startswith("kv."):
            raise ValueError(f"{name} is not an input of the {graph}; those are {', '.join(known)}")
        if binding is None:
            continue
        if array.ndim != len(binding.shape) or any(
            found != (sizes.setdefault(size, found) if isinstance(size, str) else size)
            for found, size in zip(array.shape, binding.shape, strict=True)
        ):
            raise ValueError(f"{name} is {array.shape}; {binding.shape} is expected, with {sizes}")
        if binding.dtype in NUMPY:
            arrays[name] = array.astype(NUMPY[binding.dtype])
    for name, binding in known.items():
        if name not in arrays and not binding.is_kv:
            arrays[name] = np.zeros(binding.sized(sizes), NUMPY[binding.dtype])
    return arrays
