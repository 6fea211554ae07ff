"""The command line: export, generate, verify, inspect and demo.

Commands parse, call and print; what they do lives in export/ and runtime/. Every error that
slipstream raises on purpose is one message on stderr and exit code 2.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from . import display
from .runtime.backend import MAX_DRAFT_TOKENS
from .runtime.bundle import CHAT_TEMPLATE, open_bundle
from .runtime.errors import MissingExtraError, RequestError, SlipstreamError
from .runtime.onnxruntime_backend import DEFAULT_PREFILL_CHUNK
from .runtime.plan import memory_plan
from .runtime.session import GenerationSettings, Messages, Pair, load

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Gemma 4 and its assistant drafter: from a checkpoint pair to lossless speculative decoding.",
)

BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder made by [bold]slipstream export[/].")]
TargetPath = Annotated[Path, typer.Argument(metavar="TARGET", help="Folder of the target checkpoint.")]
AssistantPath = Annotated[Path, typer.Argument(metavar="ASSISTANT", help="Folder of its assistant checkpoint.")]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        "--num-draft-tokens", "-k", help="Draft tokens per round (K); 0 decodes plainly. \\[default: the pair's]"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Threads = Annotated[
    int | None, typer.Option(help="Threads per operator. \\[default: 1 for small models, else all cores]")
]


class DTypeChoice(StrEnum):
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class EngineChoice(StrEnum):
    tensorrt = "tensorrt"
    tensorrt_rtx = "tensorrt-rtx"


class PositionChoice(StrEnum):
    pending = "pending"
    last = "last"


def main() -> None:
    """Entry point of the ``slipstream`` command."""
    try:
        app()
    except SlipstreamError as error:
        display.stderr.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        display.stderr.print("interrupted")
        sys.exit(130)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from . import __version__

        typer.echo(f"slipstream {__version__}")
        raise typer.Exit


@app.command()
def export(
    target: TargetPath,
    assistant: AssistantPath,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="BUNDLE", help="Folder to create.")],
    dtype: Annotated[DTypeChoice, typer.Option(help="Of weights, KV and hidden rows. The CPU runs float32.")] = (
        DTypeChoice.float32
    ),
    max_length: Annotated[
        int | None, typer.Option(help="Tokens a sequence may hold. \\[default: what the model was made for]")
    ] = None,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-draft-tokens", "-k", help="Default K, unrolled in one graph. \\[default: generation_config]"
        ),
    ] = None,
    draft_position: Annotated[
        PositionChoice,
        typer.Option(help="Position of the assistant's query: the pending token's (N) or the last (N-1)."),
    ] = PositionChoice.pending,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing bundle.")] = False,
) -> None:
    """Export a checkpoint pair to a bundle: two ONNX graphs that share KV buffers."""
    _need_export_extra("export")
    from .export.opening import open_pair
    from .export.pair import ExportSettings, export_pair

    settings = ExportSettings(dtype.value, max_length, num_draft_tokens, draft_position.value)
    with display.StageProgress() as progress:
        export_pair(open_pair(target, assistant), out, settings, progress, overwrite=overwrite)
    display.stderr.print(
        f"wrote {escape(str(out))}; look at it with: slipstream inspect {escape(str(out))}", soft_wrap=True
    )


@app.command()
def generate(
    bundle: BundlePath,
    prompt: Annotated[str | None, typer.Option(help="The prompt; '-' or none reads it from stdin.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help='JSON lines: a string, {"prompt": "..."} or {"messages": [{"role", "content"}, ...]} each.'),
    ] = None,
    messages: Annotated[Path | None, typer.Option(help="A JSON file with a list of chat messages.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Feed prompts as they are, without the chat template.")] = False,
    num_draft_tokens: DraftTokens = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Cap on new tokens.")] = 512,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given again.")] = None,
    num_threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Generate text, streaming it to stdout. Greedy: drafted text equals plain text.

    A prompt is one user message of a chat when the bundle has a chat template, unless --raw is given.
    """
    prompts = list(_prompts(prompt, prompt_file, messages))
    pair = load(bundle, num_threads=num_threads)
    is_chat = not raw and CHAT_TEMPLATE in pair.manifest.files
    settings = GenerationSettings(num_draft_tokens, max_new_tokens, tuple(stop or ()))
    for item in prompts:
        request: str | Messages = [{"role": "user", "content": item}] if isinstance(item, str) and is_chat else item
        if as_json:
            typer.echo(json.dumps(pair.generate(request, settings).to_dict(), ensure_ascii=False))
        else:
            _stream(pair, request, settings)


def _stream(pair: Pair, prompt: str | Messages, settings: GenerationSettings) -> None:
    with pair.stream(prompt, settings) as stream:
        for chunk in stream:
            typer.echo(chunk.text, nl=False)
    typer.echo()
    display.stderr.print(f"[dim]{escape(display.summary_line(stream.result))}[/]", soft_wrap=True)


def _prompts(prompt: str | None, prompt_file: Path | None, messages: Path | None) -> Iterator[str | Messages]:
    given = [option for option in (prompt, prompt_file, messages) if option is not None]
    if len(given) > 1:
        raise RequestError("give one of --prompt, --prompt-file and --messages")
    if prompt_file is not None:
        yield from _json_lines(_read(prompt_file), str(prompt_file))
    elif messages is not None:
        yield _message_list(_parse(_read(messages), str(messages)), str(messages))
    elif prompt is None or prompt == "-":
        if sys.stdin.isatty():
            raise RequestError("there is no prompt: give --prompt TEXT, --prompt-file, --messages, or pipe text in")
        try:
            yield _non_empty(sys.stdin.read().rstrip("\n"), "stdin")
        except UnicodeDecodeError as error:
            raise RequestError(f"stdin is not UTF-8 text: {error}") from error
    else:
        yield _non_empty(prompt, "--prompt")


def _json_lines(text: str, where: str) -> Iterator[str | Messages]:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise RequestError(f"{where} has no prompts")
    for number, line in lines:
        at = f"{where}, line {number}"
        content = _parse(line, at)
        if isinstance(content, dict) and set(content) == {"messages"}:
            yield _message_list(content["messages"], at)
        elif isinstance(content, dict) and set(content) == {"prompt"} and isinstance(content["prompt"], str):
            yield _non_empty(content["prompt"], at)
        elif isinstance(content, str):
            yield _non_empty(content, at)
        else:
            raise RequestError(
                f'{at} is {line.strip()[:60]!r}; expected a string, {{"prompt": "..."}} or {{"messages": [...]}}'
            )


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where} is not JSON: {error}") from error


def _message_list(content: Any, where: str) -> Messages:
    if not isinstance(content, list):
        raise RequestError(f"{where}: a list of chat messages is expected, found {type(content).__name__}")
    return content


def _non_empty(text: str, where: str) -> str:
    if not text:
        raise RequestError(f"the prompt from {where} is empty")
    return text


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} can't be read: {error}") from error


@app.command()
def build(
    bundle: BundlePath,
    engine: Annotated[EngineChoice, typer.Option(help="tensorrt for this GPU, tensorrt-rtx for any of its targets.")],
    device: Annotated[str | None, typer.Option(help="Compute capability for tensorrt-rtx, such as sm89.")] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens per sequence. \\[default: the bundle's]")
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Sequences per call.")] = 1,
    num_draft_tokens: DraftTokens = None,
    workspace: Annotated[int, typer.Option(min=1, help="Scratch memory of the build, in MiB.")] = 1024,
) -> None:
    """Build TensorRT engines beside the graphs. Nothing runs them yet: generation is on ONNX Runtime."""
    _need_packages("build", ("onnx", "onnx_ir"), f"slipstream[export,{engine.value}]")
    from .engines.build import build_engines
    from .runtime.engine_record import EngineSettings

    opened = open_bundle(bundle)
    settings = EngineSettings(
        flavour=engine.value,
        device=device or "",
        max_length=opened.manifest.max_length if max_length is None else max_length,
        max_batch=max_batch,
        num_draft_tokens=opened.manifest.generation.num_draft_tokens if num_draft_tokens is None else num_draft_tokens,
        workspace_mib=workspace,
    )
    with display.StageProgress() as progress:
        outcome = build_engines(opened, settings, progress)
    display.stdout.print(display.engine_table(outcome.record))
    verb = "built" if outcome.is_new else "up to date, nothing built:"
    display.stderr.print(f"{verb} {escape(str(outcome.folder))}", soft_wrap=True)


@app.command()
def verify(
    bundle: BundlePath,
    target: Annotated[Path, typer.Option(help="Target checkpoint the bundle was made from.")],
    assistant: Annotated[Path, typer.Option(help="Assistant checkpoint the bundle was made from.")],
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts for the greedy comparison.")] = 20,
    num_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each.")] = 48,
    draft_counts: Annotated[
        list[int] | None,
        typer.Option("--num-draft-tokens", "-k", help="K to compare; repeatable. \\[default: 0 1 2 4 7]"),
    ] = None,
    prompt_text: Annotated[Path | None, typer.Option(help="Text file to cut the prompts from.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a bundle with transformers: logits, then greedy text. Exit code 1 on a miss."""
    _need_export_extra("verify")
    from .export.reference import Reference
    from .export.verify import check_source, sample_prompts
    from .export.verify import verify as compare

    opened = open_bundle(bundle)
    check_source(opened, target, assistant)
    manifest = opened.manifest
    counts = draft_counts or [0, 1, 2, 4, 7]
    if not all(0 <= count <= MAX_DRAFT_TOKENS for count in counts):
        raise RequestError(f"--num-draft-tokens {counts} has values outside 0..{MAX_DRAFT_TOKENS}")
    if num_tokens > manifest.max_length - 2:
        raise RequestError(f"--num-tokens {num_tokens} leaves no room for a prompt in {manifest.max_length} tokens")
    codec = Pair(opened).codec
    ids = codec.encode_more(_non_empty(_read(prompt_text), str(prompt_text)) if prompt_text else _VERIFY_TEXT)
    prompts = sample_prompts(
        ids, codec.bos_token_id, num_prompts, manifest.sliding_window, manifest.max_length, num_tokens
    )
    with display.StageProgress() as progress:
        progress.start("loading the checkpoints into transformers", 0)
        reference = Reference(target, assistant, manifest.dtype)
        report = compare(opened, reference, prompts, num_tokens, counts, progress)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        for table in display.report_tables(report):
            display.stdout.print(table)
        for miss in report.near_ties:
            display.stdout.print(f"near-tie {escape(miss)}")
        for failure in report.failures:
            display.stdout.print(f"[red]MISS[/] {escape(failure)}")
        display.stdout.print("[green]verified[/]" if not report.failures else "[red]not verified[/]")
    if report.failures:
        raise typer.Exit(1)


@app.command()
def inspect(
    bundle: BundlePath,
    length: Annotated[
        int | None, typer.Option(min=1, help="Context length to plan for. \\[default: up to 4096]")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences to plan memory for.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Show which assistant layer reads which target buffer, shapes, and memory at a length and batch."""
    manifest = open_bundle(bundle).manifest
    length = length or min(manifest.max_length, 4096)
    if length > manifest.max_length:
        raise RequestError(f"--length {length} is beyond the bundle's max length of {manifest.max_length}")
    plan = memory_plan(manifest, length, batch, DEFAULT_PREFILL_CHUNK, MAX_DRAFT_TOKENS)
    if as_json:
        memory = {**plan.__dict__, "total": plan.total}
        typer.echo(json.dumps({**manifest.model_dump(), "memory": memory}, indent=2))
        return
    generation = manifest.generation
    display.stdout.print(
        f"[bold]{escape(manifest.source.target)}[/] with [bold]{escape(manifest.source.assistant)}[/]: "
        f"{manifest.dtype}, vocabulary {manifest.vocab_size}, hidden {manifest.hidden_size}, "
        f"window {manifest.sliding_window}, up to {manifest.max_length} tokens\n"
        f"drafts {generation.num_draft_tokens} tokens per round at position "
        f"{'N' if manifest.draft_position_offset == 0 else 'N-1'}, stops at tokens "
        f"{', '.join(map(str, generation.stop_token_ids))}"
    )
    display.stdout.print(display.binding_table(manifest))
    display.stdout.print(display.memory_table(plan))


@app.command()
def demo(
    keep: Annotated[Path | None, typer.Option(help="Keep the exported bundle in this folder.")] = None,
) -> None:
    """Export the tiny pair that ships with slipstream and run it drafted and plain, side by side."""
    _need_export_extra("demo")
    from .demo import run

    if not run(keep):
        raise typer.Exit(1)


def _need_export_extra(command: str) -> None:
    _need_packages(command, ("torch", "transformers", "onnx", "onnxscript", "safetensors"), "slipstream[export]")


def _need_packages(command: str, packages: tuple[str, ...], requirement: str) -> None:
    missing = [name for name in packages if not importlib.util.find_spec(name)]
    if missing:
        raise MissingExtraError(
            f"slipstream {command} needs {', '.join(missing)}: install with pip install '{requirement}'. "
            "Running a bundle needs none of them"
        )


_VERIFY_TEXT = (
    "Once upon a time there was a curious fox who lived by the river. Every morning the fox cleaned a small lantern "
    "until it shone, and every evening the animals of the valley came to listen to its stories. One windy night the "
    "lantern was gone. The fox looked behind the door, under the old oak tree and along the water, and at last asked "
    "an owl for help. The owl had seen something golden near the bridge, where the path turns towards the hills. "
    "How far is it? asked the fox. Not further than a song, said the owl, and they set out together through the rain. "
    "By 7:30 they had found it: 12 steps from the bridge, beneath a blanket of leaves. The lesson was a simple one."
)
