"""The bundle: graph structure, shared bindings, the files around it, refusals, and what failures leave behind."""

from __future__ import annotations

import json
import re
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.export import pair as export_module
from slipstream.export.checkpoint.opening import CheckpointPair, open_pair
from slipstream.export.model.assistant import Assistant
from slipstream.export.model.graphs import TracedGraph
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from slipstream.export.weights.recipes import ALIGNMENT_BYTES
from slipstream.runtime.bundle.files import file_sha256
from slipstream.runtime.bundle.graph_io import PER_LAYER_INPUT, GraphName, for_layers, kv_name, kv_output_name
from slipstream.runtime.bundle.graph_io import inputs as inputs_of
from slipstream.runtime.bundle.graph_io import outputs as outputs_of
from slipstream.runtime.bundle.manifest import MANIFEST, Bundle, Manifest, check_hashes, open_bundle
from slipstream.runtime.errors import BundleError, CheckpointError, RequestError, SlipstreamError
from tests.support.pairs import EOS
from tests.support.progress import SilentProgress

ROOT = Path(__file__).parents[2]
GRAPHS = ("target.onnx", "assistant.onnx", "assistant_3_steps.onnx")
DRAFTS = GRAPHS[1:]
NUM_HEADS, PARTS = 4, ("key", "value")
# layers of the "edge" pair: S S F own KV, S S F read it; the assistant's S and F read layers 1 and 2
OWNERS = (0, 1, 2, 1, 1, 2)
DONORS = (1, 2)

PairFolder = Callable[[str], tuple[Path, Path]]
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def bundle(bundle_folder: Callable[[str], Path]) -> Bundle:
    return open_bundle(bundle_folder("edge"))


@pytest.fixture(scope="module")
def models(bundle: Bundle) -> dict[str, onnx.ModelProto]:
    return {name: onnx.load(bundle.path(name), load_external_data=False) for name in GRAPHS}


@pytest.fixture
def edge(pair_folder: PairFolder) -> CheckpointPair:
    return open_pair(*pair_folder("edge"))


@pytest.fixture
def traced(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """export_pair takes the graphs of the bundle that is there instead of tracing, which takes seconds."""

    def graph(file: str, module: torch.nn.Module) -> TracedGraph:
        recipes: dict[str, Any] = {name: vars(parameter)["recipe"] for name, parameter in module.named_parameters()}
        return TracedGraph(ir.load(bundle.path(file)), recipes)

    def assistant_graph(module: Assistant, *_: object) -> TracedGraph:
        return graph("assistant.onnx" if module.num_steps == 1 else "assistant_3_steps.onnx", module)

    monkeypatch.setattr("slipstream.export.trace.target_graph", lambda module, _: graph("target.onnx", module))
    monkeypatch.setattr("slipstream.export.trace.assistant_graph", assistant_graph)


def export(pair: CheckpointPair, out: Path, overwrite: bool = False, **settings: Any) -> Path:
    export_pair(pair, out, ExportSettings(**settings), SilentProgress(), overwrite=overwrite)
    return out


def nodes(model: onnx.ModelProto, operator: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == operator]


def dims(value: onnx.ValueInfoProto) -> list[int | str]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def metadata(value: onnx.ValueInfoProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in value.metadata_props}


def external(model: onnx.ModelProto) -> dict[str, dict[str, str]]:
    """location, offset and length of every external tensor."""
    return {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }


def replaced(content: Any, path: str, value: Any) -> Any:
    """A JSON document with the field at the dotted path set; None removes it."""
    head, _, rest = path.partition(".")
    key: Any = int(head) if isinstance(content, list) else head
    if rest:
        content[key] = replaced(content[key], rest, value)
    elif value is None:
        del content[key]
    else:
        content[key] = value
    return content


def edit_json(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    for field, value in fields.items():
        content = replaced(content, field.replace("__", "."), value)
    path.write_text(json.dumps(content), encoding="utf-8")


# graphs


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_is_standard_onnx_of_opset_24(name: str, models: dict[str, onnx.ModelProto]) -> None:
    model = models[name]
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 24)]
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.functions
    assert (model.producer_name, bool(model.producer_version)) == ("slipstream", True)


@pytest.mark.parametrize("name", GRAPHS)
def test_queries_of_attention_keep_their_heads(name: str, models: dict[str, onnx.ModelProto]) -> None:
    values = {value.name: dims(value) for value in models[name].graph.value_info}
    attention = nodes(models[name], "Attention")
    queries = [values[node.input[0]] for node in attention]
    assert len(queries) == {"target.onnx": 6, "assistant.onnx": 2, "assistant_3_steps.onnx": 6}[name]
    assert {len(query) for query in queries} == {4}
    assert {query[1] for query in queries} == {NUM_HEADS}
    assert [query[3] for query in queries[:2]] == ([16, 16] if name == "target.onnx" else [16, 32])
    assert {len(node.input) for node in attention} == {4}  # an explicit mask, no past and no length input
    assert {attribute.name for node in attention for attribute in node.attribute} == {"scale"}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_has_the_inputs_and_outputs_of_the_table(
    name: str, models: dict[str, onnx.ModelProto], bundle: Bundle
) -> None:
    kind: GraphName = "target" if name == "target.onnx" else "assistant"
    kv = bundle.manifest.kv if kind == "target" else bundle.manifest.donors
    table = for_layers(inputs_of(kind, has_per_layer_rows=True), kv), for_layers(outputs_of(kind), kv)
    graph = models[name].graph
    assert [value.name for value in graph.input] == [binding.name for binding in table[0]]
    assert [value.name for value in graph.output] == [binding.name for binding in table[1]]
    for value, binding in zip(graph.input, table[0], strict=True):
        sizes = bundle.manifest.sizes
        assert dims(value) == [sizes.get(str(size), size) for size in binding.shape]


def test_sizes_that_change_from_call_to_call_are_symbols(models: dict[str, onnx.ModelProto]) -> None:
    shapes = {value.name: dims(value) for value in models["target.onnx"].graph.input}
    assert shapes["token"] == ["batch", 1]
    assert shapes["draft"] == ["batch", "num_draft_tokens"]
    assert shapes["scored_rows"] == ["batch", "num_scored_rows"]
    for part in PARTS:
        assert shapes[kv_name(0, part)] == shapes[kv_name(1, part)] == ["batch", 1, "sliding_capacity", 16]
        assert shapes[kv_name(2, part)] == ["batch", 1, "full_capacity", 32]
    outputs = {value.name: dims(value) for value in models["target.onnx"].graph.output}
    assert outputs["logits"] == ["batch", "num_scored_rows", 384]
    assert outputs[kv_output_name(2, "key")] == shapes[kv_name(2, "key")]


@pytest.mark.parametrize("name", GRAPHS)
def test_integers_are_int64_and_kv_has_the_bundles_dtype(name: str, models: dict[str, onnx.ModelProto]) -> None:
    types = {value.name: value.type.tensor_type.elem_type for value in models[name].graph.input}
    is_float = {value for value in types if value.startswith("kv.") or value in ("hidden", PER_LAYER_INPUT)}
    assert {types[value] for value in is_float} == {onnx.TensorProto.FLOAT}
    assert {types[value] for value in types.keys() - is_float} == {onnx.TensorProto.INT64}


def test_kv_outputs_are_their_inputs_updated_in_place(models: dict[str, onnx.ModelProto]) -> None:
    updates = {node.input[0]: node.output[0] for node in nodes(models["target.onnx"], "TensorScatter")}
    assert updates == {kv_name(layer, part): kv_output_name(layer, part) for layer in (0, 1, 2) for part in PARTS}


def test_each_target_layer_attends_to_its_owners_buffers(models: dict[str, onnx.ModelProto]) -> None:
    read = [tuple(node.input[1:3]) for node in nodes(models["target.onnx"], "Attention")]
    assert read == [(kv_output_name(owner, "key"), kv_output_name(owner, "value")) for owner in OWNERS]


@pytest.mark.parametrize(("name", "num_steps"), [("assistant.onnx", 1), ("assistant_3_steps.onnx", 3)])
def test_each_assistant_layer_attends_to_its_donors_buffers(
    name: str, num_steps: int, models: dict[str, onnx.ModelProto]
) -> None:
    read = [tuple(node.input[1:3]) for node in nodes(models[name], "Attention")]
    assert read == [(kv_name(donor, "key"), kv_name(donor, "value")) for donor in DONORS] * num_steps
    assert nodes(models[name], "TensorScatter") == []


@pytest.mark.parametrize("name", GRAPHS)
def test_every_kv_binding_is_marked_and_nothing_else(name: str, models: dict[str, onnx.ModelProto]) -> None:
    graph = models[name].graph
    aliases = {kv_name(layer, part): kv_output_name(layer, part) for layer in (0, 1, 2) for part in PARTS}
    aliases |= {output: given for given, output in aliases.items()}
    marked = 0
    for value in (*graph.input, *graph.output):
        if value.name not in aliases:
            assert metadata(value) == {}
            continue
        layer = int(value.name.split(".")[1])
        expected = {
            "slipstream.binding": "shared",
            "slipstream.owner_layer": str(layer),
            "slipstream.layer_type": "full" if layer == 2 else "sliding",
            "slipstream.assistant_readers": {0: "[]", 1: "[0]", 2: "[1]"}[layer],
        }
        if name == "target.onnx":
            expected["slipstream.alias"] = aliases[value.name]
        assert metadata(value) == expected
        marked += 1
    assert marked == (12 if name == "target.onnx" else 4)


@pytest.mark.parametrize("name", GRAPHS)
def test_model_metadata_is_the_manifests_kv_table(
    name: str, models: dict[str, onnx.ModelProto], bundle: Bundle
) -> None:
    properties = {entry.key: entry.value for entry in models[name].metadata_props}
    assert set(properties) == {"slipstream.kv"}
    assert json.loads(properties["slipstream.kv"]) == [buffer.model_dump() for buffer in bundle.manifest.kv]


def test_kv_table_tells_owners_and_readers(bundle: Bundle) -> None:
    table = [
        (b.layer, b.type, b.num_kv_heads, b.head_dim, b.target_readers, b.assistant_readers) for b in bundle.manifest.kv
    ]
    assert table == [(0, "sliding", 1, 16, [], []), (1, "sliding", 1, 16, [3, 4], [0]), (2, "full", 1, 32, [5], [1])]
    assert [buffer.layer for buffer in bundle.manifest.donors] == list(DONORS)


def test_embedding_is_one_tensor_of_one_file_in_every_graph(
    models: dict[str, onnx.ModelProto], bundle: Bundle, edge: CheckpointPair
) -> None:
    places = [external(model)["embed.weight"] for model in models.values()]
    assert places == [{"location": "embedding.bin", "offset": "0", "length": str(384 * 48 * 4)}] * 3
    stored = np.fromfile(bundle.path("embedding.bin"), np.float32).reshape(384, 48)
    assert np.array_equal(stored, edge.target.read("embed_tokens.weight").numpy())
    assert bundle.manifest.embedding_file == "embedding.bin"


def test_assistant_graphs_share_every_weight(models: dict[str, onnx.ModelProto]) -> None:
    one, three = (external(models[name]) for name in DRAFTS)
    assert one == three
    assert {place["location"] for place in one.values()} == {"embedding.bin", "assistant.bin"}


@pytest.mark.parametrize("name", GRAPHS)
def test_weights_start_on_pages_and_do_not_overlap(
    name: str, models: dict[str, onnx.ModelProto], bundle: Bundle
) -> None:
    places = [(p["location"], int(p["offset"]), int(p["length"])) for p in external(models[name]).values()]
    assert all(offset % ALIGNMENT_BYTES == 0 for _, offset, _ in places)
    for (file, offset, length), (next_file, next_offset, _) in zip(sorted(places), sorted(places)[1:], strict=False):
        end = bundle.path(file).stat().st_size if next_file != file else next_offset
        assert offset + length <= end


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_files_hold_no_weights(name: str, models: dict[str, onnx.ModelProto]) -> None:
    elsewhere = external(models[name])
    embedded = [tensor for tensor in models[name].graph.initializer if tensor.name not in elsewhere]
    assert max(np.prod(tensor.dims, dtype=int) for tensor in embedded) <= 32  # rotary frequencies, shapes, ones


def test_nothing_in_the_bundle_tells_where_it_was_made(bundle: Bundle, edge: CheckpointPair) -> None:
    made_in = {str(ROOT).encode(), b"/tmp/", b"site-packages", str(edge.target.folder.parent).encode()}
    for name in (*GRAPHS, MANIFEST):
        content = bundle.path(name).read_bytes()
        assert [place for place in made_in if place in content] == []
    assert (bundle.manifest.source.target, bundle.manifest.source.assistant) == ("target", "assistant")


# the files around the graphs


def test_manifest_lists_every_file_with_size_and_hash(bundle: Bundle) -> None:
    names = {path.name for path in bundle.folder.iterdir()} - {MANIFEST}
    assert set(bundle.manifest.files) == names
    for name, record in bundle.manifest.files.items():
        assert (record.size_bytes, record.sha256) == (bundle.path(name).stat().st_size, file_sha256(bundle.path(name)))


def test_manifest_describes_the_pair(bundle: Bundle, edge: CheckpointPair) -> None:
    manifest = bundle.manifest
    config = edge.target_config
    assert (manifest.vocab_size, manifest.hidden_size, manifest.sliding_window) == (384, 48, 16)
    assert (manifest.max_length, manifest.num_target_layers) == (config.max_positions, 6)
    assert (manifest.dtype, manifest.draft_position_offset) == ("float32", 0)
    assert (manifest.logit_softcap, manifest.num_draft_top_logits) == (config.logit_softcap, 64)
    assert manifest.generation.model_dump() == {
        "bos_token_id": 2,
        "stop_token_ids": [1, 5],
        "num_draft_tokens": 3,
        "sampling": {"do_sample": False, "temperature": 1.0, "top_k": None, "top_p": 1.0},
        "special_tokens": {},
    }
    assert {graph.num_steps: graph.file for graph in manifest.draft_graphs} == {1: DRAFTS[0], 3: DRAFTS[1]}
    assert manifest.source.target_config_sha256 == file_sha256(edge.target.folder / "config.json")
    assert manifest.source.assistant_config_sha256 == file_sha256(edge.assistant.folder / "config.json")
    assert manifest.versions["opset"] == "24"


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_text_files_are_the_targets(name: str, bundle: Bundle, edge: CheckpointPair) -> None:
    assert bundle.path(name).read_bytes() == (edge.target.folder / name).read_bytes()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}é", "{{ bos_token }}é"),
        (None, None),
        ([{"name": "tool", "template": "y"}, {"name": "default", "template": "x"}], "x"),
    ],
    ids=["inline", "none", "list"],
)
def test_chat_template_inside_tokenizer_config_becomes_a_file(
    template: object, expected: str | None, copied: tuple[Path, Path], tmp_path: Path
) -> None:
    (copied[0] / "chat_template.jinja").unlink()
    (copied[0] / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    path = export(open_pair(*copied), tmp_path / "bundle") / "chat_template.jinja"
    assert (path.read_text(encoding="utf-8") if path.exists() else None) == expected
    assert ("chat_template.jinja" in open_bundle(path.parent).manifest.files) == (expected is not None)


@pytest.mark.usefixtures("traced")
def test_exports_of_one_pair_are_the_same_to_the_byte(bundle: Bundle, edge: CheckpointPair, tmp_path: Path) -> None:
    again = export(edge, tmp_path / "again")
    assert open_bundle(again).manifest == bundle.manifest
    check_hashes(open_bundle(again))
    assert again.stat().st_mode & 0o777 == 0o755


@pytest.mark.usefixtures("traced")
def test_settings_are_recorded(edge: CheckpointPair, tmp_path: Path) -> None:
    manifest = open_bundle(
        export(edge, tmp_path / "bundle", max_length=100, num_draft_tokens=2, draft_position="last")
    ).manifest
    assert (manifest.max_length, manifest.generation.num_draft_tokens, manifest.draft_position_offset) == (100, 2, -1)


# refusals of a pair


def _rewrite_tokenizer(*folders: Path, **fields: Any) -> None:
    for folder in folders:
        edit_json(folder / "tokenizer.json", **fields)


_DAMAGED_PAIRS: list[tuple[str, Damage, str]] = [
    ("no target config", lambda p: (p / "target/config.json").unlink(), "target has no config.json: it holds"),
    ("no assistant config", lambda p: (p / "assistant/config.json").unlink(), "assistant has no config.json: it holds"),
    ("no tokenizer", lambda p: (p / "target/tokenizer.json").unlink(), "target/tokenizer.json is missing"),
    (
        "no weights",
        lambda p: (p / "assistant/model.safetensors").unlink(),
        "assistant has neither model.safetensors nor model.safetensors.index.json",
    ),
    (
        "other vocabulary",
        lambda p: _rewrite_tokenizer(p / "assistant", model__vocab__the=3),
        "assistant differ in vocabulary",
    ),
    (
        "other special tokens",
        lambda p: _rewrite_tokenizer(p / "assistant", added_tokens__0__content="<nil>"),
        "assistant differ in ",
    ),
    (
        "not BPE",
        lambda p: _rewrite_tokenizer(p / "target", model__vocab=[["a", 0.0]]),
        "tokenizer.json can't be loaded by tokenizers",
    ),
    (
        "ids beyond the embedding",
        lambda p: _rewrite_tokenizer(p / "target", model__vocab__the=384),
        "tokenizer.json has ids up to 384, the model embeds 384 tokens",
    ),
    (
        "no generation_config",
        lambda p: (p / "target/generation_config.json").unlink(),
        "generation_config.json is missing: a folder as transformers saves checkpoints is expected",
    ),
    (
        "no eos",
        lambda p: edit_json(p / "target/generation_config.json", eos_token_id=None),
        "generation_config.json lacks eos_token_id or bos_token_id",
    ),
    (
        "no bos",
        lambda p: edit_json(p / "target/generation_config.json", bos_token_id=None),
        "generation_config.json lacks eos_token_id or bos_token_id",
    ),
    (
        "eos beyond the vocabulary",
        lambda p: edit_json(p / "target/generation_config.json", eos_token_id=[1, 384]),
        "generation_config.json has token ids outside 0..383: [2, 1, 384]",
    ),
    (
        "suppressed token beyond the vocabulary",
        lambda p: edit_json(p / "target/generation_config.json", suppress_tokens=[-1]),
        "generation_config.json has token ids outside 0..383: [2, 1, 5, -1]",
    ),
    (
        "bos that is no number",
        lambda p: edit_json(p / "target/generation_config.json", bos_token_id="2"),
        "generation_config.json",
    ),
    (
        "another width",
        lambda p: edit_json(p / "assistant/config.json", backbone_hidden_size=64),
        "the assistant's backbone_hidden_size is 64, the target needs 48: this is not the target's assistant",
    ),
]


@pytest.mark.parametrize(
    ("damage", "message"), [case[1:] for case in _DAMAGED_PAIRS], ids=[c[0] for c in _DAMAGED_PAIRS]
)
def test_damaged_pair_is_refused(copied: tuple[Path, Path], damage: Damage, message: str) -> None:
    damage(copied[0].parent)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        open_pair(*copied)


def test_swapped_pair_is_refused_with_the_right_order(pair_folder: PairFolder) -> None:
    target, assistant = pair_folder("edge")
    with pytest.raises(CheckpointError, match=r"is an assistant .* pass the target first and its assistant second$"):
        open_pair(assistant, target)


def test_assistant_of_another_pair_is_refused(pair_folder: PairFolder) -> None:
    with pytest.raises(CheckpointError, match="this is not the target's assistant"):
        open_pair(pair_folder("edge")[0], pair_folder("dense")[1])


def test_assistant_needs_no_tokenizer_and_no_generation_config(copied: tuple[Path, Path]) -> None:
    (copied[1] / "tokenizer.json").unlink()
    (copied[1] / "generation_config.json").unlink()
    assert open_pair(*copied).generation.num_draft_tokens == 4


def test_one_stop_token_is_a_list_of_one(copied: tuple[Path, Path]) -> None:
    edit_json(copied[0] / "generation_config.json", eos_token_id=EOS)
    assert open_pair(*copied).generation.stop_token_ids == [EOS]


# refusals of an export: before anything is traced or written


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(*_: object) -> None:
        pytest.fail("a refusal comes before tracing")

    monkeypatch.setattr("slipstream.export.trace.target_graph", trace)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model__norm__weight": None}, "norm.weight is missing"),
        ({"model__norm__weight": torch.ones(3)}, "norm.weight has shape (3,), (48,) is expected"),
        ({"model__ghost__weight": torch.ones(3)}, "ghost.weight"),
        ({"model__norm__weight": torch.ones(48, dtype=torch.int64)}, "norm.weight has dtype I64; float tensors"),
    ],
    ids=["missing", "shape", "extra", "dtype"],
)
def test_wrong_tensors_are_refused_before_tracing(
    tensors: dict[str, Any], message: str, copied: tuple[Path, Path], tmp_path: Path
) -> None:
    path = copied[0] / "model.safetensors"
    content = load_file(path)
    for name, tensor in tensors.items():
        content.pop(name.replace("__", "."), None)
        if tensor is not None:
            content[name.replace("__", ".")] = tensor
    save_file(content, path)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        export(open_pair(*copied), tmp_path / "out" / "bundle")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("untraced")
def test_a_place_that_can_not_be_written_is_refused_before_tracing(edge: CheckpointPair, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match=r"bundle can't be written: .*Choose another folder"):
        export(edge, tmp_path / "file" / "bundle")


@pytest.mark.usefixtures("untraced")
def test_blocks_that_fit_few_matrices_are_refused_before_tracing(edge: CheckpointPair, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--weights int4 --block-size 128 would leave most matrices float"):
        export(edge, tmp_path / "bundle", weights="int4", block_size=128)


@pytest.mark.parametrize("is_inline", [True, False])
def test_a_chat_template_that_does_not_parse_is_refused(copied: tuple[Path, Path], is_inline: bool) -> None:
    (copied[0] / "chat_template.jinja").unlink(missing_ok=True)
    if is_inline:
        (copied[0] / "tokenizer_config.json").write_text('{"chat_template": "{% for x in %}"}')
    else:
        (copied[0] / "chat_template.jinja").write_text("{% for x in %}")
    name = "tokenizer_config.json" if is_inline else "chat_template.jinja"
    with pytest.raises(CheckpointError, match=rf"{name}: the chat template does not parse, at line 1: .*Correct it"):
        open_pair(*copied)


def test_bundle_files_that_may_not_be_read_are_named(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, _: path.name != "target.bin")
        with pytest.raises(BundleError, match=r"this user may not read .*target.bin: change its permissions"):
            open_bundle(bundle.folder)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(BundleError, match=rf"{MANIFEST} may not be read by this user"):
        open_bundle(bundle.folder)


def test_files_that_may_not_be_read_are_named(copied: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, _: path.suffix != ".safetensors")
    with pytest.raises(CheckpointError, match=r"this user may not read .*model.safetensors: change its permissions"):
        open_pair(*copied)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 161}, "--max-length 161 is outside 2..160, the model's"),
        ({"max_length": 1}, "--max-length 1 is outside 2..160"),
        ({"max_length": 0}, "--max-length 0 is outside 2..160"),
        ({"max_length": -5}, "--max-length -5 is outside 2..160"),
        ({"num_draft_tokens": 16}, "16 draft tokens are outside 1..15"),
        ({"num_draft_tokens": 0}, "0 draft tokens are outside 1..15"),
        ({"num_draft_tokens": -1}, "-1 draft tokens are outside 1..15"),
    ],
    ids=str,
)
def test_setting_out_of_range_is_refused(
    settings: dict[str, Any], message: str, edge: CheckpointPair, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        export(edge, tmp_path / "bundle", **settings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("untraced")
def test_existing_folder_is_kept_without_overwrite(edge: CheckpointPair, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    with pytest.raises(CheckpointError, match=r"bundle exists already: choose another folder or pass --overwrite$"):
        export(edge, tmp_path / "bundle")


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_no_bundle_is_not_overwritten(kind: str, edge: CheckpointPair, tmp_path: Path) -> None:
    out = tmp_path / "out"
    notes = out / "notes.txt" if kind == "folder" else out
    notes.parent.mkdir(exist_ok=True)
    notes.write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is not a bundle, so it is not overwritten"):
        export(edge, out, overwrite=True)
    assert notes.read_text() == "mine"


_Usage = namedtuple("_Usage", "total used free")  # as shutil's own


@pytest.mark.usefixtures("traced")
def test_disk_without_room_is_refused_and_nothing_is_made(
    edge: CheckpointPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(10**9, 10**9 - 10**5, 10**5))
    message = r"the bundle: 8\d\d\.\d KiB of disk .* has 97\.7 KiB free: make room, or write to another disk$"
    with pytest.raises(RequestError, match=message):
        export(edge, tmp_path / "new" / "bundle")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("traced")
def test_disk_with_just_enough_room_is_used(
    edge: CheckpointPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(10**9, 0, 1_250_000))
    assert (export(edge, tmp_path / "bundle") / MANIFEST).exists()


@pytest.mark.usefixtures("traced")
def test_parent_folders_are_made(edge: CheckpointPair, tmp_path: Path) -> None:
    assert open_bundle(export(edge, tmp_path / "a" / "b" / "bundle")).manifest.hidden_size == 48


@pytest.mark.usefixtures("traced")
def test_place_under_a_file_is_refused(edge: CheckpointPair, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SlipstreamError, match="file"):
        export(edge, tmp_path / "file" / "bundle")


# failures on the way


def _raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


_LAST_STEPS = ["write_weights", "_manifest", "_hashed"]
_ERRORS: list[BaseException] = [CheckpointError("a weight is NaN"), OSError("disk full"), KeyboardInterrupt()]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("step", _LAST_STEPS)
@pytest.mark.parametrize("error", _ERRORS, ids=repr)
def test_failure_on_the_way_leaves_nothing(
    step: str, error: BaseException, edge: CheckpointPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, step, _raising(error))
    with pytest.raises(RequestError if isinstance(error, OSError) else type(error)):
        export(edge, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def old_bundle(bundle: Bundle, tmp_path: Path) -> Iterator[Path]:
    """A bundle that is to be overwritten; nothing may stand beside it afterwards."""
    old = tmp_path / "place" / "bundle"
    shutil.copytree(bundle.folder, old)
    yield old
    assert list(old.parent.iterdir()) == [old]


@pytest.mark.usefixtures("traced")
def test_overwriting_replaces_the_whole_bundle(edge: CheckpointPair, old_bundle: Path) -> None:
    (old_bundle / "stale.engine").write_text("x")
    export(edge, old_bundle, overwrite=True, max_length=99)
    assert not (old_bundle / "stale.engine").exists()
    assert open_bundle(old_bundle).manifest.max_length == 99


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("step", _LAST_STEPS)
def test_failed_overwriting_keeps_the_old_bundle(
    step: str, edge: CheckpointPair, old_bundle: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, step, _raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        export(edge, old_bundle, overwrite=True, max_length=99)
    assert open_bundle(old_bundle).manifest == bundle.manifest


@pytest.mark.usefixtures("traced")
def test_bundle_that_can_not_take_its_place_keeps_the_old_one(
    edge: CheckpointPair, old_bundle: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, attempts = Path.rename, []

    def fail_once(path: Path, place: Path) -> Path:
        if place == old_bundle:
            attempts.append(place)
            if len(attempts) == 1:
                raise OSError("the file system went away")
        return rename(path, place)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(RequestError, match="can't be written: the file system went away"):
        export(edge, old_bundle, overwrite=True, max_length=99)
    assert open_bundle(old_bundle).manifest == bundle.manifest


# opening a bundle


@pytest.fixture
def damaged(bundle: Bundle, tmp_path: Path) -> Path:
    """A copy of the bundle that a test may damage."""
    return Path(shutil.copytree(bundle.folder, tmp_path / "bundle"))


def test_folder_without_manifest_is_no_bundle(tmp_path: Path) -> None:
    message = f"{tmp_path} is not a bundle: it has no manifest.json. Make one with: slipstream export TARGET ASSISTANT"
    with pytest.raises(BundleError, match=re.escape(message)):
        open_bundle(tmp_path)


def test_missing_folder_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"is not a bundle: it has no manifest.json"):
        open_bundle(str(tmp_path / "nowhere"))


def test_file_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match=r"is not a bundle: it has no manifest.json"):
        open_bundle(tmp_path / "file")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "manifest.json is not JSON: Expecting value: line 1 column 1 (char 0). Export the pair again"),
        (b'{"a": "\xff"}', "manifest.json is not UTF-8 text: 'utf-8' codec can't decode"),
        (b"[]", "manifest.json holds a list; a JSON object is expected. Export the pair again"),
        (b"{}", "has bundle format None; this slipstream reads 4"),
        (b'{"format_version": 5, "new": true}', "has bundle format 5; this slipstream reads 4. Export the pair again"),
        (b'{"format_version": 3}', "again: slipstream export TARGET ASSISTANT -o "),
        (b'{"format_version": "4"}', "has bundle format 4; this slipstream reads 4"),
        (b'{"format_version": 4}', "manifest.json is not as expected: slipstream_version: Field required. Export"),
    ],
)
def test_broken_manifest_is_refused(damaged: Path, content: bytes, message: str) -> None:
    (damaged / MANIFEST).write_bytes(content)
    with pytest.raises(BundleError, match=re.escape(message)):
        open_bundle(damaged)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab_size", None, "vocab_size: Field required"),
        ("vocab_size", "384", "vocab_size: Input should be a valid integer"),
        ("hidden_size", 0, "hidden_size: Input should be greater than 0"),
        ("dtype", "int8", "dtype: Input should be 'float32', 'float16' or 'bfloat16'"),
        ("draft_position_offset", 1, "draft_position_offset: Input should be 0 or -1"),
        ("kv.1.type", "global", "kv.1.type: Input should be 'sliding' or 'full'"),
        ("kv.0.head_dim", None, "kv.0.head_dim: Field required"),
        ("draft_graphs.0.num_steps", 0, "draft_graphs.0.num_steps: Input should be greater than 0"),
        ("files", {"target.bin": 3}, "files.target.bin: Input should be an object"),
        ("surprise", 1, "surprise: Extra inputs are not permitted"),
    ],
)
def test_damaged_manifest_field_is_named(damaged: Path, field: str, value: Any, message: str) -> None:
    content = replaced(json.loads((damaged / MANIFEST).read_text()), field, value)
    (damaged / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(BundleError, match=re.escape(f"{damaged / MANIFEST} is not as expected: {message}")):
        open_bundle(damaged)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_graph", "other.onnx"),
        ("embedding_file", "other.bin"),
        ("draft_graphs.0.file", "other.onnx"),
        ("draft_graphs", []),
        ("kv", []),
        ("kv.2", None),  # no full layer, and so no full donor
        ("files", {}),
    ],
    ids=str,
)
def test_manifest_that_contradicts_itself_is_refused(damaged: Path, field: str, value: Any) -> None:
    content = replaced(json.loads((damaged / MANIFEST).read_text()), field, value)
    (damaged / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(BundleError, match=MANIFEST):
        open_bundle(damaged)


@pytest.mark.parametrize("name", ["target.onnx", "embedding.bin", "tokenizer.json", "chat_template.jinja"])
def test_missing_file_is_named(damaged: Path, name: str) -> None:
    (damaged / name).unlink()
    message = f"{damaged} lacks {name}, which its manifest lists. Copy the whole folder again"
    with pytest.raises(BundleError, match=re.escape(message)):
        open_bundle(damaged)


@pytest.mark.parametrize("name", ["target.bin", "assistant.onnx"])
def test_changed_size_is_named(damaged: Path, name: str) -> None:
    size = (damaged / name).stat().st_size
    (damaged / name).write_bytes((damaged / name).read_bytes()[:-1])
    message = f"{damaged / name} has {size - 1} bytes, the manifest says {size}. Copy or export the bundle again"
    with pytest.raises(BundleError, match=re.escape(message)):
        open_bundle(damaged)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["target.onnx", "tokenizer.json", "assistant.bin"])
def test_changed_small_file_is_named(damaged: Path, name: str) -> None:
    _flip(damaged / name)
    message = f"{damaged / name} was changed since export. Export the pair again"
    with pytest.raises(BundleError, match=re.escape(message)):
        open_bundle(damaged)


def test_large_files_are_hashed_on_demand_only(damaged: Path) -> None:
    bundle = open_bundle(damaged)
    size = bundle.manifest.files["target.bin"].size_bytes
    _flip(damaged / "target.bin")
    check_hashes(bundle, max_bytes=size - 1)
    for limit in (size, None):
        with pytest.raises(BundleError, match=r"target.bin was changed since export"):
            check_hashes(bundle, max_bytes=limit)


def test_small_files_are_hashed_whatever_large_ones_stand_between(damaged: Path) -> None:
    bundle = open_bundle(damaged)
    _flip(damaged / "tokenizer.json")
    with pytest.raises(BundleError, match=r"tokenizer.json was changed since export"):
        check_hashes(bundle, max_bytes=bundle.manifest.files["target.bin"].size_bytes - 1)


def test_extra_files_do_not_matter(damaged: Path) -> None:
    (damaged / "target.engine").write_text("built later")
    assert isinstance(open_bundle(damaged).manifest, Manifest)
