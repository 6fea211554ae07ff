"""The command line: export, synth, generate, inspect and demo; ``engine_commands.py`` has build, verify and doctor,
``bench_command.py`` bench.

Commands parse, call and print; what they do lives in export/ and runtime/. Every error that
slipstream raises on purpose is one message on stderr and exit code 2.
"""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from rich.markup import escape
from rich.text import Text

from . import bench_command, display, engine_commands
from .options import MAX_BATCH, AsJson, BundlePath, draft_tokens, need_export_extra
from .prompts import read_prompts, read_schema
from .runtime.bundle.dtypes import DType
from .runtime.bundle.engine_record import EngineName
from .runtime.bundle.manifest import CHAT_TEMPLATE, Manifest, WeightFormat, open_bundle
from .runtime.decode.results import Result
from .runtime.decode.settings import GenerationSettings
from .runtime.errors import RequestError, SlipstreamError
from .runtime.machine import plan as plans
from .runtime.machine.host import bytes_text, read_state
from .runtime.session import MAX_SLOTS, Messages, Pair

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Gemma 4 and its assistant drafter: from a checkpoint pair to lossless speculative decoding.",
)


def main() -> None:
    """Run the command line. No character that a stream's encoding lacks ends it: another one takes its place."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    except (SlipstreamError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError):
            if error.errno != errno.ENOSPC or error.filename is not None:
                raise
            text = f"the output can't be written: {error.strerror}"
        display.stderr.print(f"[red]error:[/] {escape(text)}", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from . import __version__

        typer.echo(f"slipstream {__version__}")
        raise typer.Exit


@app.command()
def export(
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Folder of the target checkpoint.")],
    assistant: Annotated[Path, typer.Argument(metavar="ASSISTANT", help="Folder of its assistant checkpoint.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="BUNDLE", help="Folder to create.")],
    dtype: Annotated[DType, typer.Option(help="Of weights, KV and hidden rows. The CPU runs float32.")] = "float32",
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens a sequence may hold. \\[default: what the model was made for]")
    ] = None,
    num_draft_tokens: Annotated[
        int | None, draft_tokens("Default K, unrolled in one graph. \\[default: generation_config]", least=1)
    ] = None,
    draft_position: Annotated[
        Literal["pending", "last"],
        typer.Option(help="Position of the assistant's query: the pending token's (N) or the last (N-1)."),
    ] = "pending",
    weights: Annotated[
        WeightFormat,
        typer.Option(
            help="How matrices are stored: float as they are (in --dtype, or as a quantized checkpoint has them); "
            "int8, int4 quantize them."
        ),
    ] = "float",
    block_size: Annotated[
        int | None,
        typer.Option(help="Weights of --weights int4 or int8 that share a scale: 32, 64 or 128. \\[default: 32]"),
    ] = None,
    ple: Annotated[
        Literal["host", "device"] | None,
        typer.Option(
            help="Where per-layer embeddings (E2B, E4B) are looked up: by the runtime, or in the graph. "
            "\\[default: host]"
        ),
    ] = None,
    kv: Annotated[
        Literal["float", "int8"], typer.Option(help="int8: a quarter of float32's KV memory, on ONNX Runtime only.")
    ] = "float",
    overwrite: Annotated[bool, typer.Option(help="Replace an existing bundle.")] = False,
) -> None:
    """Export a checkpoint pair to a bundle: two ONNX graphs that share KV buffers."""
    need_export_extra("export")
    from .export.checkpoint.opening import open_pair
    from .export.pair import export_pair
    from .export.settings import ExportSettings

    if block_size is not None and weights == "float":
        raise RequestError(
            f"--block-size {block_size} is for --weights int4 or int8, and float weights have no scales: add one of "
            "them, or leave it out"
        )
    pair = open_pair(target, assistant)
    display.say_notes(pair.notes)
    if ple is not None and not pair.target_config.ple_dim:
        raise RequestError(f"--ple {ple}: {target} has no per-layer embeddings (E2B and E4B have), so leave it out")
    block_size = 32 if block_size is None else block_size
    settings = ExportSettings(
        dtype, max_length, num_draft_tokens, draft_position, weights, block_size, ple or "host", kv
    )
    with display.StageProgress() as progress:
        export_pair(pair, out, settings, progress, overwrite=overwrite)
    display.say(f"wrote {out}; look at it with: slipstream inspect {out}")


@app.command()
def synth(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PRESET|CONFIG",
            help="One of e2b, e4b, 12b, 26b-a4b, 31b, mid; or a folder with target/config.json and "
            "assistant/config.json, or a JSON file with both.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder to create; target and assistant go below it.")
    ],
    scale: Annotated[
        Literal["full", "tiny"], typer.Option(help="full: true sizes. tiny: the same structure in a few MB.")
    ] = "full",
    dtype: Annotated[DType, typer.Option(help="Of the written tensors.")] = "bfloat16",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Same seed, same values.")] = 0,
) -> None:
    """Write a random pair of true shape and layout, to try export, build, memory and step costs without the weights."""
    need_export_extra("synth")
    from .export.synth.presets import configs_of
    from .export.synth.synth import synthesize

    with display.StageProgress() as progress:
        synthesize(configs_of(source), out, scale, progress, seed=seed, dtype=dtype)
    display.say(f"wrote {out}; export it with: slipstream export {out}/target {out}/assistant -o BUNDLE")


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
    num_draft_tokens: Annotated[
        int | None, draft_tokens("Draft tokens per round (K); 0 decodes plainly. \\[default: what is fastest]")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Cap on new tokens.")] = 512,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text, or at this special token; may be given again.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the most likely token, as --temperature 0.")] = False,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the most likely token; above it tokens are drawn. \\[default: the checkpoint's]"),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from this many tokens, up to 64. \\[default: the checkpoint's]")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the fewest tokens whose probabilities reach this. \\[default: the checkpoint's]"),
    ] = None,
    min_p: Annotated[float, typer.Option(help="Draw from tokens of this share of the first one's probability.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Draws the same text again, whatever K. \\[default: a random one, shown below]")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="A JSON file with a schema that the text follows; on ONNX Runtime only.")
    ] = None,
    num_samples: Annotated[
        int, typer.Option("--n", min=1, max=MAX_BATCH, help="Texts for each prompt, with seed, seed + 1, ...")
    ] = 1,
    parallel: Annotated[
        int, typer.Option(min=1, max=MAX_SLOTS, help="Prompts at once; text is shown when it is whole then.")
    ] = 1,
    engine: Annotated[EngineName, typer.Option(help="What runs it; onnxruntime is the CPU.")] = "onnxruntime",
    num_threads: Annotated[
        int | None, typer.Option(min=1, help="Threads per operator. \\[default: 1 for small models, else all cores]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Generate text, streaming it to stdout. Drafted text equals plain text, and that of the same seed where drawn.

    A prompt is one user message of a chat when the bundle has a chat template, unless --raw is given.
    """
    if greedy and temperature is not None:
        raise RequestError("give one of --greedy and --temperature")
    temperature, stops = 0.0 if greedy else temperature, tuple(stop or ())
    settings = GenerationSettings(
        num_draft_tokens,
        max_new_tokens,
        stops,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        json_schema=None if json_schema is None else read_schema(json_schema),
    ).checked()
    prompts = read_prompts(prompt, prompt_file, messages)
    opened = open_bundle(bundle)
    plan = plans.run_plan(opened, engine, parallel)
    if plan is not None and not as_json:
        _say_plan(plan, opened.manifest)
    with Pair(opened, engine=engine, num_threads=num_threads, num_slots=parallel) as pair:
        is_chat = not raw and CHAT_TEMPLATE in pair.manifest.files
        requests = [_as_chat(item) if is_chat else item for item in prompts]
        if parallel == num_samples == 1 and not as_json:
            for request in requests:
                _stream(pair, request, settings)
            return
        for result in _results(pair, requests, settings, num_samples, parallel):
            if as_json:
                display.print_json(result.to_dict())
            else:
                typer.echo(result.text)
                _summarize(result)


def _as_chat(prompt: str | Messages) -> Messages:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _results(
    pair: Pair, requests: Sequence[str | Messages], settings: GenerationSettings, num_samples: int, parallel: int
) -> Iterator[Result]:
    """In the order of the prompts, as each is ready."""

    def answers(request: str | Messages) -> list[Result]:
        return pair.samples(request, num_samples, settings) if num_samples > 1 else [pair.generate(request, settings)]

    with ThreadPoolExecutor(parallel) as workers:
        for found in workers.map(answers, requests):
            yield from found


def _say_plan(plan: plans.MemoryPlan, manifest: Manifest) -> None:
    """Memory in one line, and what to change where a long text may not fit."""
    display.stderr.print(f"[dim]{display.memory_line(plan)}[/]", soft_wrap=True)
    if _is_too_large(plan):
        needed, advice = bytes_text(plan.total), plans.what_to_change(plan, manifest)
        display.say_notes([f"{plan.length} tokens may need {needed}: {advice}"])


def _is_too_large(plan: plans.MemoryPlan) -> bool:
    memory = read_state()
    return plan.place == "host" and memory is not None and plan.total > memory.available


def _stream(pair: Pair, prompt: str | Messages, settings: GenerationSettings) -> None:
    thinks = False  # thoughts go to stderr, so that stdout is the answer
    with pair.stream(prompt, settings) as stream:
        for chunk in stream:
            if chunk.thought or (thinks and chunk.text):
                display.stderr.print(Text(chunk.thought, "dim"), end="" if chunk.thought else "\n", soft_wrap=True)
                thinks = bool(chunk.thought)
            typer.echo(chunk.text, nl=False)
    typer.echo()
    _summarize(stream.result)


def _summarize(result: Result) -> None:
    display.stderr.print(f"[dim]{escape(display.summary_line(result))}[/]", soft_wrap=True)
    display.say_notes(result.notes)


app.command()(engine_commands.build)
app.command()(engine_commands.verify)
app.command()(bench_command.bench)


@app.command()
def inspect(
    bundle: BundlePath,
    length: Annotated[
        int | None, typer.Option(min=1, help="Context length to plan for. \\[default: up to 4096]")
    ] = None,
    slots: Annotated[int, typer.Option(min=1, max=MAX_BATCH, help="Sequences at once to plan memory for.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Show which assistant layer reads which target buffer, shapes, and memory at a length and number of slots."""
    opened = open_bundle(bundle)
    manifest = opened.manifest
    if length is not None and length > manifest.max_length:
        raise RequestError(f"--length {length} is beyond the bundle's max length of {manifest.max_length}")
    plan = plans.memory_plan(manifest, length, slots, place="gpu" if manifest.dtype == "bfloat16" else "host")
    if as_json:
        engines = {name: engine.to_dict() for name, engine in plans.engine_plans(opened).items()}
        build = {engine: plans.build_peak(manifest, engine) for engine in get_args(plans.BuildEngine)}
        memory = {**plan.to_dict(), "build": build, "engines": engines}
        display.print_json({**manifest.model_dump(), "memory": memory}, indent=2)
        return
    generation = manifest.generation
    display.stdout.print(
        f"[bold]{escape(manifest.source.target)}[/] with [bold]{escape(manifest.source.assistant)}[/]: "
        f"{manifest.precision}, vocabulary {manifest.vocab_size}, hidden {manifest.hidden_size}, "
        f"window {manifest.sliding_window}, up to {manifest.max_length} tokens\n"
        f"drafts {generation.num_draft_tokens} tokens per round at position "
        f"{'N' if manifest.draft_position_offset == 0 else 'N-1'}, stops at tokens "
        f"{', '.join(map(str, generation.stop_token_ids))}"
    )
    display.stdout.print(display.binding_table(manifest))
    display.stdout.print(display.memory_table(plan))
    display.stdout.print(display.peaks_table(opened))
    if _is_too_large(plan):
        display.stdout.print(f"{display.available_text()}, which is less: {plans.what_to_change(plan, manifest)}")


app.command()(engine_commands.doctor)


@app.command()
def demo(keep: Annotated[Path | None, typer.Option(help="Keep the exported bundle in this folder.")] = None) -> None:
    """Export the tiny pair that ships with slipstream and run it drafted and plain, side by side."""
    need_export_extra("demo")
    from .demo import run

    if not run(keep):
        raise typer.Exit(1)
