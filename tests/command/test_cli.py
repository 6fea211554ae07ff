"""The command line: options, streams, JSON, and every refusal as one message on stderr with exit code 2."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import slipstream.demo
import slipstream.engines.onnxruntime.build
import slipstream.export.checkpoint.opening
import slipstream.export.pair
import slipstream.export.verify.verify
import slipstream.runtime.session
from slipstream import Pair, cli, load
from slipstream.export.verify.report import DraftCheck, GreedyCheck, LogitCheck, Mismatch, Report
from slipstream.runtime.bundle.manifest import open_bundle
from slipstream.runtime.machine.host import AvailableMemory
from tests.support.results import RESULT_KEYS, TIMING_KEYS

COMMANDS = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Done]
PairFolder = Callable[[str], tuple[Path, Path]]


class _Stdin(io.TextIOWrapper):
    def __init__(self, content: bytes | None) -> None:
        super().__init__(io.BytesIO(content or b""), encoding="utf-8")
        self._is_terminal = content is None

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs main() as the ``slipstream`` command does; stdin is a terminal unless bytes are given."""

    def call(*arguments: object, stdin: bytes | None = None) -> Done:
        monkeypatch.setattr(sys, "argv", ["slipstream", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", _Stdin(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        code = stopped.value.code
        assert isinstance(code, int)
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def bundle(bundle_folder: Callable[[str], Path]) -> Path:
    return bundle_folder("edge")


@pytest.fixture(scope="module")
def pair(bundle: Path) -> Pair:
    return load(bundle)


def refused(done: Done, message: str) -> None:
    """One message on stderr (after progress, if there was any), nothing on stdout, exit code 2."""
    progress, error, text = done.err.partition("error: ")
    assert error, done
    assert progress == "" or progress.endswith("\n")
    assert message in text
    assert (done.code, done.out) == (2, "")


def plain(text: str) -> str:
    """Terminal text without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


# help and parsing


@pytest.mark.parametrize("name", ["export", "synth", "generate", "build", "verify", "inspect", "doctor", "demo"])
def test_help_of_a_command_mentions_every_option(name: str) -> None:
    result = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    text = plain(result.output)
    options = [option for parameter in COMMANDS[name].params for option in parameter.opts if option.startswith("-")]
    assert result.exit_code == 0
    assert len(options) >= 1
    assert [option for option in options if option not in text] == []
    assert COMMANDS[name].help.split(".")[0].split("\n")[0] in text


def test_help_lists_the_commands() -> None:
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    assert set(COMMANDS) == {"export", "synth", "generate", "build", "verify", "bench", "inspect", "doctor", "demo"}
    assert [name for name in COMMANDS if f" {name} " not in plain(result.output)] == []


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("generate", "[default: what is fastest]"),
        ("generate", "[default: the checkpoint's]"),
        ("build", "[default: the pair's]"),
        ("verify", "[default: 0 1 2 4 7]"),
        ("export", "[default: generation_config]"),
    ],
)
def test_help_tells_defaults_that_are_computed(command: str, default: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "200"})
    assert default in plain(result.output)


def test_version_is_the_packages() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"slipstream {version('slipstream')}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["inspect", "b", "--length", "0"],
        ["inspect", "b", "--slots", "0"],
        ["generate", "b", "--max-new-tokens", "many"],
        ["generate", "b", "--temparature", "1"],
        ["export", "t", "a"],
        ["export", "t", "a", "-o", "b", "--dtype", "int4"],
        ["export", "t", "a", "-o", "b", "--draft-position", "first"],
        ["verify", "b", "--engine", "torch"],
        ["build", "b"],
        ["verify", "b", "--target", "t", "--assistant", "a", "--num-prompts", "0"],
        ["verify", "b", "--target", "t", "--assistant", "a", "--num-tokens", "0"],
        ["fly"],
        *(["generate", "b", *option.split()] for option in ("-n 0", "-k 16", "-k -1", "--num-threads 0")),
        *(["export", "t", "a", "-o", "b", *option.split()] for option in ("-k 0", "-k 16", "--max-length 1")),
        *(["synth", "e2b", "-o", "b", "--seed", seed] for seed in ("-1", str(2**63), "1.5")),
        *(["inspect", "b", "--slots", batch] for batch in ("1025", "9" * 5000)),
        *(["verify", "b", *option.split()] for option in ("-k 16", "-k -1", "--num-prompts 10001")),
        *(
            ["build", "b", "--engine", "tensorrt-rtx", *option.split()]
            for option in (
                "--workspace 0",
                "--workspace 99999999999999",
                "--max-batch 0",
                "--max-batch 1025",
                "--max-length 1",
                "-k 16",
            )
        ),
    ],
    ids=lambda arguments: " ".join(arguments)[:60],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert "Usage: " in plain(result.stderr)


def test_process_ends_with_2_and_one_message(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", "inspect", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "20"},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {tmp_path} is not a bundle: it has no manifest.json. "
        "Make one with: slipstream export TARGET ASSISTANT -o BUNDLE\n"
    )


def test_interrupt_is_exit_code_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "open_bundle", interrupt)
    done = run("inspect", "b")
    assert (done.code, done.out) == (130, "")


# refusals


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "{tmp}/none", "--prompt", "a"],
        ["inspect", "{tmp}/none"],
        ["verify", "{tmp}/none", "--target", "t", "--assistant", "a"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_missing_bundle_is_refused(arguments: list[str], run: Run, tmp_path: Path) -> None:
    done = run(*(argument.format(tmp=tmp_path) for argument in arguments))
    refused(done, f"{tmp_path}/none is not a bundle: it has no manifest.json. Make one with: slipstream export")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "a", "--prompt-file", "f"], "give one of --prompt, --prompt-file and --messages"),
        (["--prompt", "a", "--messages", "m"], "give one of --prompt, --prompt-file and --messages"),
        (["--messages", "m", "--prompt-file", "f"], "give one of --prompt, --prompt-file and --messages"),
        ([], "there is no prompt: give --prompt TEXT, --prompt-file, --messages, or pipe text in"),
        (["--prompt", "-"], "there is no prompt: give --prompt TEXT"),
        (["--prompt", ""], "the prompt from --prompt is empty"),
        (["--prompt-file", "/nowhere/f"], "/nowhere/f can't be read: [Errno 2] No such file"),
        (["--messages", "/nowhere/m"], "/nowhere/m can't be read: [Errno 2] No such file"),
        (["--prompt", "a", "--stop", ""], "stop is ('',); a sequence of non-empty strings is expected"),
        (["--prompt", "a", "--stop", "a<turn|>"], "stop is 'a<turn|>', which holds the special token <turn|>"),
        (["--prompt", "a", "--num-threads", "100000"], "num_threads is 100000; this machine has"),
        (["--prompt", "a " * 200], "tokens and the context holds 160, one of them new: shorten the prompt"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_generate_options_are_refused(options: list[str], message: str, run: Run, bundle: Path) -> None:
    refused(run("generate", bundle, *options), message)


@pytest.mark.parametrize("content", [b"", b"\n"])
def test_empty_stdin_is_refused(content: bytes, run: Run, bundle: Path) -> None:
    refused(run("generate", bundle, stdin=content), "the prompt from stdin is empty")


def test_stdin_that_is_not_utf8_is_refused(run: Run, bundle: Path) -> None:
    refused(run("generate", bundle, stdin=b"caf\xe9"), "stdin")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "prompts.jsonl has no prompts"),
        (b"\n  \n", "prompts.jsonl has no prompts"),
        (b'"a"\n\n{"prompt": "b"\n', "prompts.jsonl, line 3 is not JSON: Expecting ',' delimiter"),
        (b'"a"\nhello\n', "prompts.jsonl, line 2 is not JSON"),
        (b'{"text": "a"}', 'prompts.jsonl, line 1 is \'{"text": "a"}\'; expected a string, {"prompt": "..."} or'),
        (b'{"prompt": 3}', "prompts.jsonl, line 1 is '{\"prompt\": 3}'; expected a string"),
        (b'{"prompt": "a", "stop": "b"}', "prompts.jsonl, line 1 is"),
        (b"17", "prompts.jsonl, line 1 is '17'; expected a string"),
        (b'"a"\n""', "the prompt from {tmp}/prompts.jsonl, line 2 is empty"),
        (b'{"prompt": ""}', "the prompt from {tmp}/prompts.jsonl, line 1 is empty"),
        (b'{"messages": "a"}', "prompts.jsonl, line 1: a list of chat messages is expected, found str"),
        (b'"caf\xe9"', "prompts.jsonl is not UTF-8 text, which is expected: 'utf-8' codec can't decode"),
        (b'"\\ud800"', "line 1 is not JSON that can be read: it escapes half of a character"),
        (b"1" * 5000, "prompts.jsonl, line 1 is not JSON that can be read: a number has 5000 digits"),
        (b"[" * 100_000, "prompts.jsonl, line 1 is not JSON that can be read: it is nested too deeply"),
    ],
)
def test_bad_prompt_file_is_refused_before_anything_is_generated(
    content: bytes, message: str, run: Run, bundle: Path, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    refused(run("generate", bundle, "--prompt-file", path, "-n", 1), message.replace("{tmp}", str(tmp_path)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[", "messages.json is not JSON"),
        (b"1" * 5000, "messages.json is not JSON that can be read: a number has 5000 digits"),
        (b'{"role": "user", "content": "a"}', "messages.json: a list of chat messages is expected, found dict"),
        (b"[]", "there are no chat messages: give at least one with a role and a content"),
        (b'[{"role": "user"}]', "chat message 0 is {'role': 'user'}; each needs a role and a content"),
        (b'[{"role": "user", "content": "a"}, "b"]', "chat message 1 is 'b'; each needs a role and a content"),
        (b'[{"role": 1, "content": "a"}]', "chat message 0 is {'role': 1, 'content': 'a'}; each needs a role"),
        (
            b'[{"role": "user", "content": [{"type": "image", "url": "x"}]}]',
            "chat message 0 has image content; slipstream runs text only",
        ),
    ],
)
def test_bad_messages_are_refused(content: bytes, message: str, run: Run, bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "messages.json"
    path.write_bytes(content)
    refused(run("generate", bundle, "--messages", path), message)


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["export", "t", "a", "-o", "b"], "export"),
        (["verify", "b", "--target", "t", "--assistant", "a"], "verify"),
        (["demo"], "demo"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_missing_export_extra_is_named_with_its_install_line(
    arguments: list[str], command: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec, absent = importlib.util.find_spec, ("torch", "onnxscript")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in absent else find_spec(name, *rest)
    )
    refused(
        run(*arguments),
        f"slipstream {command} needs torch, onnxscript: install with pip install 'slipstream[export]'. "
        "Running a bundle needs none of them",
    )


def test_verify_says_what_it_compares_with(run: Run) -> None:
    refused(
        run("verify", "b", "--target", "t"),
        "verify --engine onnxruntime compares with transformers: give the checkpoints that the bundle was made from "
        "with --target and --assistant",
    )
    refused(
        run("verify", "b", "--target", "t", "--engine", "tensorrt-rtx"),
        "--target: engines are compared with the bundle's graphs, so leave it out",
    )


def test_doctor_answers_for_one_way_of_running(run: Run, bundle: Path) -> None:
    assert run("doctor", str(bundle)).code == 0
    assert run("doctor", str(bundle), "--engine", "onnxruntime").code == 0
    done = run("doctor", str(bundle), "--engine", "tensorrt")
    assert done.code == 1
    assert "can't run here with --engine tensorrt: gpu: " in " ".join(done.out.split())


def test_graphs_for_onnxruntime_take_no_engine_options(run: Run, bundle: Path) -> None:
    refused(
        run("build", str(bundle), "--engine", "onnxruntime", "--device", "sm89", "-k", "2"),
        "--device, --num-draft-tokens: --engine onnxruntime serves every length, batch and K, so leave it out",
    )


# generate


def test_drawn_text_is_that_of_its_seed_whatever_k(run: Run, bundle: Path) -> None:
    def drawn(*options: object) -> Any:
        asked = "--prompt", "the fox", "-n", 12, "--temperature", 1, "--json", *options
        return run("generate", bundle, *asked).objects[0]

    found = drawn("-k", 3, "--top-k", 20, "--top-p", 0.9, "--min-p", 0.01, "--seed", 5)
    sampling = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 5}
    assert found["sampling"].items() >= sampling.items()
    plain = drawn("-k", 0, "--top-k", 20, "--top-p", 0.9, "--min-p", 0.01, "--seed", 5)
    assert plain["token_ids"] == found["token_ids"]
    assert drawn("--top-k", 20, "--top-p", 0.9, "--min-p", 0.01, "--seed", 6)["token_ids"] != found["token_ids"]


def test_several_samples_of_a_prompt_have_seeds_in_a_row(run: Run, bundle: Path) -> None:
    asked = "--prompt", "the fox", "-n", 12, "--temperature", 1, "--json"
    samples = [json.loads(line) for line in run("generate", bundle, *asked, "--seed", 5, "--n", 3).out.splitlines()]
    assert [sample["sampling"]["seed"] for sample in samples] == [5, 6, 7]
    for sample in samples:
        alone = json.loads(run("generate", bundle, *asked, "--seed", sample["sampling"]["seed"]).out)
        assert alone["token_ids"] == sample["token_ids"]
    assert len({sample["text"] for sample in samples}) == 3


def test_prompts_in_parallel_are_answered_in_their_order(run: Run, bundle: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'"the fox {number}"\n' for number in range(7)))
    asked = "generate", bundle, "--prompt-file", prompts, "-n", 12
    one, many = (
        [json.loads(line)["token_ids"] for line in run(*asked, "--json", *options).out.splitlines()]
        for options in ((), ("--parallel", 3))
    )
    assert one == many
    assert len(many) == 7
    assert run(*asked, "--parallel", 3).out.count("\n") >= 7


def test_text_follows_a_schema_from_a_file(run: Run, bundle: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["yes", "no"]}')
    asked = "generate", bundle, "--prompt", "the fox", "-n", 20, "--json-schema", schema
    assert json.loads(run(*asked).out) in {"yes", "no"}
    schema.write_text("[1]")
    refused(run(*asked), "a JSON schema is an object; this is list")
    schema.write_text('{"type": "nope"}')
    refused(run(*asked), "json_schema can't be followed: Invalid type: nope")


def test_greedy_is_temperature_0(run: Run, bundle: Path) -> None:
    asked = "generate", bundle, "--prompt", "the fox", "-n", 6, "--json"
    assert json.loads(run(*asked, "--greedy").out)["sampling"] is None
    refused(run(*asked, "--greedy", "--temperature", 1), "give one of --greedy and --temperature")
    refused(run(*asked, "--greedy", "--n", 2), "samples differ by their seeds: give a temperature above 0")


def test_the_summary_says_the_seed_and_filters_need_a_temperature(run: Run, bundle: Path) -> None:
    done = run("generate", bundle, "--prompt", "the fox", "-n", 4, "--temperature", 0.5, "--seed", 11)
    assert "drawn at temperature 0.5 with seed 11" in " ".join(done.err.split())
    refused(run("generate", bundle, "--prompt", "the fox", "--top-p", 0.9), "give a temperature above 0")


def test_json_is_one_object_per_prompt_with_the_documented_keys(run: Run, bundle: Path, tmp_path: Path) -> None:
    lines = ['"the fox"', '{"prompt": "the owl"}', '{"messages": [{"role": "user", "content": "the cat"}]}', ""]
    (tmp_path / "prompts.jsonl").write_text("\n\n".join(lines))
    done = run("generate", bundle, "--prompt-file", tmp_path / "prompts.jsonl", "-n", 5, "-k", 2, "--json")
    assert (done.code, done.err) == (0, "")
    assert [list(result) for result in done.objects] == [RESULT_KEYS] * 3
    assert [list(result["timings"]) for result in done.objects] == [TIMING_KEYS] * 3
    for result in done.objects:
        assert (result["num_draft_tokens"], len(result["acceptance"])) == (2, 2)
        assert len(result["token_ids"]) == 5 or result["finish_reason"] == "stop_token"


def test_kinds_of_prompts_with_one_meaning_give_one_answer(run: Run, bundle: Path, tmp_path: Path) -> None:
    message = [{"role": "user", "content": "the fox é"}]
    lines = ["the fox é", {"prompt": "the fox é"}, {"messages": message}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "messages.json").write_text(json.dumps(message))
    results = run("generate", bundle, "--prompt-file", tmp_path / "prompts.jsonl", "-n", 6, "--json").objects
    for source in (["--prompt", "the fox é"], ["--messages", tmp_path / "messages.json"]):
        results += run("generate", bundle, *source, "-n", 6, "--json").objects
    for stdin_option in ([], ["--prompt", "-"]):
        results += run("generate", bundle, *stdin_option, "-n", 6, "--json", stdin="the fox é\n".encode()).objects
    assert len(results) == 7
    assert {json.dumps([result["token_ids"], result["num_prompt_tokens"]]) for result in results} == {
        json.dumps([results[0]["token_ids"], results[0]["num_prompt_tokens"]])
    }


def test_line_separators_inside_a_json_string_do_not_end_its_line(run: Run, bundle: Path, tmp_path: Path) -> None:
    prompts = ["one\u2028two", "three\u0085four"]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(prompt, ensure_ascii=False) for prompt in prompts), encoding="utf-8")
    done = run("generate", bundle, "--prompt-file", path, "-n", 1, "--json")
    assert (done.code, len(done.objects)) == (0, 2)


def test_prompts_are_chat_messages_unless_raw(run: Run, bundle: Path, pair: Pair) -> None:
    chat_ids = pair.codec.encode_prompt(pair.chat_text([{"role": "user", "content": "the fox"}]))
    raw_ids = pair.codec.encode_prompt("the fox")
    assert len(chat_ids) > len(raw_ids)
    for options, ids in (([], chat_ids), (["--raw"], raw_ids)):
        (result,) = run("generate", bundle, "--prompt", "the fox", *options, "-n", 4, "--json").objects
        assert result["num_prompt_tokens"] == len(ids)


def test_messages_of_several_turns_are_one_prompt(run: Run, bundle: Path, pair: Pair, tmp_path: Path) -> None:
    messages = [{"role": role, "content": "the fox"} for role in ("user", "model", "user")]
    (tmp_path / "messages.json").write_text(json.dumps(messages))
    (result,) = run("generate", bundle, "--messages", tmp_path / "messages.json", "-n", 1, "--json").objects
    assert result["num_prompt_tokens"] == len(pair.codec.encode_prompt(pair.chat_text(messages)))


def test_streamed_text_is_the_text_of_the_json(run: Run, bundle: Path) -> None:
    arguments = ["generate", bundle, "--prompt", "the fox", "--raw", "-n", 40]
    done = run(*arguments)
    (result,) = run(*arguments, "--json").objects
    assert len(result["text"]) > 10
    assert (done.code, done.out) == (0, result["text"] + "\n")
    count, reason = len(result["token_ids"]), result["finish_reason"]
    memory, summary = done.err.splitlines()
    assert re.fullmatch(
        r"memory: [0-9.]+ [KM]iB weights, [0-9.]+ KiB KV at 160 tokens, [0-9.]+ [KM]iB workspace at most(, PLE .*)?; "
        r"[0-9.]+ GiB available",
        memory,
    )
    assert re.match(
        rf"{count} tokens, [0-9]+ tokens/s, ended by {reason}, (K chosen, up to [123], accepted by position |no draft)",
        summary,
    )


def test_draft_tokens_change_nothing_but_the_rounds(run: Run, bundle: Path) -> None:
    results = [
        run("generate", bundle, "--prompt", "the owl", "-n", 30, "-k", k, "--json").objects[0] for k in (0, 1, 3, 7)
    ]
    assert [result["num_draft_tokens"] for result in results] == [0, 1, 3, 7]
    assert [result["token_ids"] for result in results] == [results[0]["token_ids"]] * 4
    assert results[0]["acceptance"] == []


def test_plain_summary_tells_that_nothing_was_drafted(run: Run, bundle: Path) -> None:
    assert run("generate", bundle, "--prompt", "a", "-n", 2, "-k", 0).err.rstrip().endswith(", no drafting")


def test_text_ends_before_the_first_stop_string(run: Run, bundle: Path) -> None:
    arguments = ["generate", bundle, "--prompt", "the fox", "--raw", "-n", 40]
    (whole,) = run(*arguments, "--json").objects
    text = whole["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    stops = ["--stop", "no such text", "--stop", stop]
    (result,) = run(*arguments, *stops, "--json").objects
    assert result["text"] == text[: text.index(stop)]
    assert result["finish_reason"] == "stop_string"
    assert run(*arguments, *stops).out == result["text"] + "\n"


def test_json_text_keeps_its_letters(run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(*_: object, **__: object) -> Any:
        pair = SimpleNamespace(
            manifest=SimpleNamespace(files={}),
            generate=lambda prompt, settings: SimpleNamespace(to_dict=lambda: {"text": prompt}),
        )
        return nullcontext(pair)

    monkeypatch.setattr(cli, "Pair", fake)
    assert run("generate", bundle, "--prompt", "naïve ✓", "--json").out == '{"text": "naïve ✓"}\n'


# inspect


def test_inspect_shows_bindings_and_memory(run: Run, bundle: Path) -> None:
    done = run("inspect", bundle)
    lines = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert lines[0].startswith("target with assistant: float32, vocabulary 384, hidden 48, window 16, up to 160 tokens")
    assert lines[1] == "drafts 3 tokens per round at position N, stops at tokens 1, 5"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    bindings = {row[0].split(",")[0]: row[1:] for row in rows if row[0].startswith("kv.")}
    assert bindings == {
        "kv.0.key": ["sliding", "1", "16", "float32", "0", "–"],
        "kv.1.key": ["sliding", "1", "16", "float32", "1, 3, 4", "0"],
        "kv.2.key": ["full", "1", "32", "float32", "2, 5", "1"],
    }
    assert "Memory at 160 tokens, 1 slot (ONNX Runtime CPU)" in done.out
    table = bundle / "per_layer_embedding.bin"
    shown = {row[0]: row[1] for row in rows if len(row) == 2}
    assert (
        shown["PLE table mapped on the host, file cache beside the total"] == f"{table.stat().st_size / 1024:.1f} KiB"
    )
    assert {"total", "peak while loading", "slipstream build --engine onnxruntime"} <= set(shown)


def test_inspect_json_is_the_manifest_with_the_memory(run: Run, bundle: Path) -> None:
    done = run("inspect", bundle, "--json", "--length", 100)
    shown = json.loads(done.out)
    memory = shown.pop("memory")
    assert shown == open_bundle(bundle).manifest.model_dump()
    embedding, target, assistant, table = (
        (bundle / f"{name}.bin").stat().st_size for name in ("embedding", "target", "assistant", "per_layer_embedding")
    )
    assert (memory["place"], memory["length"], memory["num_slots"]) == ("host", 100, 1)
    assert (memory["weights"], memory["embedding"]) == (embedding + target + assistant, embedding)
    assert (memory["released"], memory["per_layer_table"]) == (target + assistant, table)
    # 100 tokens and a padded chunk of 256 want 512 rows, of which the full limit (160 + 256) and the sliding
    # limit (2 windows of 16 with room for a rewind each, and a chunk) leave less
    assert memory["kv_full"] == 2 * 416 * 32 * 4  # layer 2: key and value of 1 head of 32 floats
    assert memory["kv_sliding"] == 2 * 2 * 320 * 16 * 4  # layers 0 and 1: half as wide
    assert memory["kv_start"] == 2 * 128 * 32 * 4 + 2 * 2 * 128 * 16 * 4
    assert memory["packed"] == embedding + target + 2 * assistant  # graphs of one and of three steps
    held = memory["weights"] - memory["released"] + memory["packed"]
    assert memory["total"] == held + sum(memory[part] for part in ("kv_full", "kv_sliding", "growth", "workspace"))
    assert memory["start"] == held + memory["loading"] + memory["kv_start"]
    assert memory["build"] == {
        "onnxruntime": 2 * embedding + target,
        "tensorrt": 4 * (target + assistant),
        "tensorrt-rtx": 4 * (target + assistant),
    }
    assert memory["engines"] == {}


def test_inspect_plans_memory_for_a_batch(run: Run, bundle: Path) -> None:
    one, four = (json.loads(run("inspect", bundle, "--json", "--slots", batch).out)["memory"] for batch in (1, 4))
    assert (four["kv_full"], four["kv_sliding"]) == (4 * one["kv_full"], 4 * one["kv_sliding"])
    assert four["weights"] == one["weights"]


def test_inspect_refuses_a_length_beyond_the_context(run: Run, bundle: Path) -> None:
    refused(run("inspect", bundle, "--length", 161), "--length 161 is beyond the bundle's max length of 160")


# memory


def _leave(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    """Memory of a small board."""
    builds = slipstream.engines.onnxruntime.build
    for module in (cli, builds, slipstream.runtime.session, slipstream.export.pair):
        monkeypatch.setattr(module, "read_state", lambda: AvailableMemory(available, 8 << 30, 0, None))


def test_too_little_memory_refuses_every_command_before_it_works(
    run: Run, bundle: Path, pair_folder: PairFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _leave(monkeypatch, 100 << 10)
    available = "100.0 KiB are available: close other programs, or "
    smaller = "export with --weights int4"
    refused(run("generate", bundle, "--prompt", "a"), f"{available}{smaller}")
    done = run("build", bundle, "--engine", "onnxruntime")
    refused(done, f"{available}build on a larger machine, or {smaller}")
    assert not (bundle / "engines").exists()
    refused(run("export", *pair_folder("edge"), "-o", tmp_path / "new"), f"{available}export on a larger machine")
    assert list(tmp_path.iterdir()) == []


def test_a_length_that_may_not_fit_is_told_and_not_refused(
    run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = json.loads(run("inspect", bundle, "--json").out)["memory"]
    _leave(monkeypatch, memory["total"] - 1)
    done = run("generate", bundle, "--prompt", "a", "-n", 1)
    assert done.code == 0
    assert "note: 160 tokens may need " in done.err
    assert ": close other programs, or " in done.err
    assert "which is less: close other programs, or " in run("inspect", bundle).out


def test_build_and_export_print_their_memory_first(
    run: Run, bundle: Path, pair_folder: PairFolder, tmp_path: Path
) -> None:
    done = run("build", shutil.copytree(bundle, tmp_path / "copy"), "--engine", "onnxruntime")
    assert re.match(r"memory: up to about [0-9.]+ [KM]iB for the build; [0-9.]+ GiB available\n", done.err)
    done = run("export", *pair_folder("edge"), "-o", tmp_path / "new")
    plan, writing = done.err.index(" in memory"), done.err.index("writing the embedding")
    assert plan < writing


# export and demo


def _recorded_export(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def open_pair(*folders: Path) -> Any:
        return SimpleNamespace(
            folders=folders, notes=(), target_config=SimpleNamespace(ple_dim=8 * (folders[0] != Path("plain")))
        )

    def export_pair(pair: Any, out: Path, settings: Any, progress: Any, *, overwrite: bool) -> None:
        progress.start("tracing", 0)
        calls.append({"pair": pair.folders, "out": out, "overwrite": overwrite, **settings.__dict__})

    monkeypatch.setattr(slipstream.export.checkpoint.opening, "open_pair", open_pair)
    monkeypatch.setattr(slipstream.export.pair, "export_pair", export_pair)
    return calls


def test_export_hands_its_options_over(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _recorded_export(monkeypatch)
    done = run("export", "t", "a", "-o", "b")
    assert (done.code, done.out) == (0, "")
    assert "wrote b; look at it with: slipstream inspect b\n" in done.err
    run(*"export t a --out c --dtype float16 --max-length 99 -k 5 --draft-position last --overwrite".split())
    run(*"export t a -o b --weights int4 --block-size 64 --ple device --kv int8".split())
    defaults = {
        "pair": (Path("t"), Path("a")),
        "out": Path("b"),
        "overwrite": False,
        "dtype": "float32",
        "max_length": None,
        "num_draft_tokens": None,
        "draft_position": "pending",
        "weights": "float",
        "block_size": 32,
        "ple": "host",
        "kv": "float",
    }
    given = {"out": Path("c"), "overwrite": True, "dtype": "float16", "max_length": 99, "num_draft_tokens": 5}
    small = {"weights": "int4", "block_size": 64, "ple": "device", "kv": "int8"}
    assert calls == [defaults, defaults | given | {"draft_position": "last"}, defaults | small]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("t a --block-size 64", "--block-size 64 is for --weights int4 or int8, and float weights have no scales"),
        ("plain a --ple host", "--ple host: plain has no per-layer embeddings (E2B and E4B have), so leave it out"),
    ],
)
def test_export_options_that_would_do_nothing_are_refused(
    options: str, message: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _recorded_export(monkeypatch)
    refused(run("export", *options.split(), "-o", "b"), message)
    assert calls == []


def test_generate_options_are_checked_before_the_bundle_is_opened(run: Run, tmp_path: Path) -> None:
    refused(run("generate", tmp_path / "none", "--prompt", "a", "--stop", ""), "stop is ('',)")


def test_inspect_and_doctor_say_how_weights_are_stored(run: Run, bundle_folder: Callable[..., Path]) -> None:
    folder = bundle_folder("wide", weights="int4", kv="int8")
    said = r"float32 with int4 weights in blocks of 32 (\(\d+ matrices left float\) )?and int8 KV"
    for command in ("inspect", "doctor"):
        assert re.search(
            said, " ".join(run(command, folder, "--json" if command == "doctor" else "--slots=1").out.split())
        )


def test_doctor_reads_every_file_when_asked(run: Run, bundle: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bundle, tmp_path / "copied")
    weights = folder / "target.bin"
    content = bytearray(weights.read_bytes())
    assert run("doctor", folder, "--check").code == 0
    content[-1] ^= 1
    weights.write_bytes(content)
    done = run("doctor", folder, "--check", "--json")
    assert done.code == 1
    assert "target.bin was changed since export" in done.out
    refused(run("doctor", "--check"), "--check reads a bundle's files: name the bundle")


def test_output_that_has_no_room_is_one_error(run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(typer, "echo", refuse)
    refused(run("inspect", bundle, "--json"), "the output can't be written: No space left on device")


def test_export_names_a_place_with_brackets_as_it_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _recorded_export(monkeypatch)
    done = run("export", "t", "a", "-o", "[bold]x[/dim]")
    assert done.code == 0
    assert "wrote [bold]x[/dim]; look at it with: slipstream inspect [bold]x[/dim]\n" in done.err


def test_export_of_a_missing_checkpoint_is_refused(run: Run, tmp_path: Path) -> None:
    done = run("export", tmp_path / "t", tmp_path / "a", "-o", tmp_path / "b")
    refused(done, f"{tmp_path}/t does not exist; a folder as transformers saves checkpoints is expected")
    assert list(tmp_path.iterdir()) == []


def test_error_text_with_brackets_is_printed_as_it_is(run: Run, tmp_path: Path) -> None:
    refused(run("inspect", tmp_path / "[red]x[/]"), f"{tmp_path}/[red]x[/] is not a bundle")


@pytest.mark.parametrize(("is_identical", "code"), [(True, 0), (False, 1)])
def test_demo_fails_when_drafted_text_differs(
    is_identical: bool, code: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Path | None] = []

    def demo(keep: Path | None) -> bool:
        kept.append(keep)
        return is_identical

    monkeypatch.setattr(slipstream.demo, "run", demo)
    assert [run("demo").code, run("demo", "--keep", "folder").code] == [code, code]
    assert kept == [None, Path("folder")]


# verify


def test_verify_of_a_good_bundle_is_exit_code_0(run: Run, bundle: Path, pair_folder: PairFolder) -> None:
    target, assistant = pair_folder("edge")
    options = ["--num-prompts", 1, "--num-tokens", 3, "-k", 0, "-k", 2, "--json"]
    done = run("verify", bundle, "--target", target, "--assistant", assistant, *options)
    report = json.loads(done.out)
    assert (done.code, report["passed"], report["failures"]) == (0, True, [])
    assert [check["num_draft_tokens"] for check in report["greedy"]] == [0, 2]
    assert {check["num_tokens"] for check in report["greedy"]} == {3}


@pytest.fixture
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded into transformers."""
    monkeypatch.setattr(slipstream.export.verify.reference, "Reference", lambda *_: None)
    monkeypatch.setattr(slipstream.export.verify.verify, "check_source", lambda *_: None)


def _report(difference: float) -> Report:
    miss = Mismatch(
        prompt=2, position=5, num_draft_tokens=4, found=7, expected=9, margin=0.5, is_excused=difference < 1
    )
    return Report(
        1e-4,
        (LogitCheck("target", 15, difference * 1e-5, 1.0, tokens_equal=True),),
        DraftCheck(2, 8, ()),
        (GreedyCheck(4, 3, 30, (miss,), (), (0.5, 0.25)),),
    )


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("difference", [0.5, 50.0])
def test_verify_tells_a_miss_by_its_exit_code_and_text(
    difference: float, run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slipstream.export.verify.verify, "verify", lambda *_: _report(difference))
    arguments = ["verify", bundle, "--target", "t", "--assistant", "a"]
    text, as_json = run(*arguments), run(*arguments, "--json")
    report = json.loads(as_json.out)
    if difference < 1:
        assert (text.code, as_json.code, report["passed"]) == (0, 0, True)
        assert text.out.splitlines()[-1] == "verified"
        assert "MISS" not in text.out
        return
    assert (text.code, as_json.code, report["passed"]) == (1, 1, False)
    assert text.out.splitlines()[-1] == "not verified"
    assert report["failures"] == [
        "target logits at context 15: |Δ| 5.00e-04 is 5.0e-04 of the scale, allowed 1e-04",
        "K=4, prompt 2, token 5: 7 instead of 9, margin 5.00e-01",
    ]
    for failure in report["failures"]:
        assert f"MISS {failure}" in text.out


@pytest.mark.usefixtures("no_reference")
def test_verify_compares_the_counts_and_prompts_asked_for(
    run: Run, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def verify(*arguments: Any) -> Report:
        calls.append(arguments)
        return _report(0.0)

    monkeypatch.setattr(slipstream.export.verify.verify, "verify", verify)
    (tmp_path / "text").write_text("abc" * 40)
    arguments = ["verify", bundle, "--target", "t", "--assistant", "a"]
    run(*arguments)
    options = "--num-prompts 3 --num-tokens 9 -k 1 --num-draft-tokens 5 --prompt-text".split()
    run(*arguments, *options, tmp_path / "text")
    assert [(len(call[2]), call[3], call[4]) for call in calls] == [(20, 48, [0, 1, 2, 4, 7]), (3, 9, [1, 5])]
    ids = {token for prompt in calls[1][2] for token in prompt}
    assert len(ids) == 4  # BOS and the three letters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-tokens", "160"], "num-tokens"),
        (["--num-tokens", "1000"], "num-tokens"),
        (["--prompt-text", "{tmp}/empty"], "empty"),
        (["--prompt-text", "{tmp}/none"], "none can't be read: [Errno 2] No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_verify_options_are_refused(
    options: list[str], message: str, run: Run, bundle: Path, pair_folder: PairFolder, tmp_path: Path
) -> None:
    (tmp_path / "empty").write_text("")
    target, assistant = pair_folder("edge")
    done = run(
        *["verify", bundle, "--target", target, "--assistant", assistant, "--num-prompts", 1, "--num-tokens", 2],
        *(option.format(tmp=tmp_path) for option in options),
    )
    refused(done, message)


def test_verify_refuses_the_checkpoints_of_another_bundle(run: Run, bundle: Path, pair_folder: PairFolder) -> None:
    target, assistant = pair_folder("wrapped")
    refused(
        run("verify", bundle, "--target", target, "--assistant", assistant),
        f"the bundle was made from another checkpoint than {target}: config.json differs",
    )


def test_verify_of_a_missing_checkpoint_is_refused(run: Run, bundle: Path, tmp_path: Path) -> None:
    done = run("verify", bundle, "--target", tmp_path / "t", "--assistant", tmp_path / "a")
    refused(done, f"{tmp_path}/t/config.json is missing")
