"""The public runtime: load a bundle, generate, stream, many at once, and keep a session over several turns."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from slipstream.runtime.backend.contract import MAX_SEED, Backend, Engine
from slipstream.runtime.backend.resources import Resources
from slipstream.runtime.bundle.engine_record import EngineName
from slipstream.runtime.bundle.manifest import TOKENIZER, Bundle, open_bundle
from slipstream.runtime.decode.engine_thread import EngineThread
from slipstream.runtime.decode.generation import Event, Generation, Request
from slipstream.runtime.decode.results import Result
from slipstream.runtime.decode.saved import read_saved, write_saved
from slipstream.runtime.decode.settings import GenerationSettings, whole_number
from slipstream.runtime.decode.streams import AsyncStream, Stream
from slipstream.runtime.machine.host import give_back_freed_memory, read_state, usual_num_threads
from slipstream.runtime.machine.plan import check_start, run_plan
from slipstream.runtime.text.chat import ChatTemplate, check_messages, check_no_media, open_template
from slipstream.runtime.text.codec import TextCodec
from slipstream.runtime.text.grammar import GrammarCompiler

from .errors import BusyError, ContextFullError, RequestError

Messages = Sequence[Mapping[str, Any]]
MAX_SLOTS = 256
_NO_COMPILER: GrammarCompiler | None = None  # before the first schema


def load(
    bundle: str | Path, *, engine: EngineName = "onnxruntime", num_threads: int | None = None, num_slots: int = 1
) -> Pair:
    """Open a bundle for generation.

    engine: "onnxruntime" is its CPU provider; "tensorrt" and "tensorrt-rtx" run what
        ``slipstream build`` made for this GPU. "onnxruntime-cuda" is ONNX Runtime's CUDA provider.
    num_threads: per operator on the CPU; None takes one for small models and every core otherwise.
    num_slots: generations that run at once; others wait. Each has KV buffers of its own.
    Raises BundleError, RequestError (for an argument that is none), BackendError (for too little memory, too) or
    MissingExtraError.
    """
    if not isinstance(bundle, str | os.PathLike):
        raise RequestError(f"bundle is {bundle!r}; the path of a bundle's folder is expected")
    return Pair(open_bundle(bundle), engine=engine, num_threads=num_threads, num_slots=num_slots)


def _open_engine(bundle: Bundle, engine: EngineName, num_threads: int) -> Engine:
    """Vendor libraries are imported by what is asked for, and by nothing else."""
    if engine == "tensorrt" or engine == "tensorrt-rtx":  # noqa: PLR1714 (narrows the type)
        from slipstream.runtime.trt.backend import TensorRTEngine

        return TensorRTEngine(bundle, engine)
    from slipstream.runtime.ort.backend import OnnxRuntimeEngine

    return OnnxRuntimeEngine(bundle, num_threads, "cpu" if engine == "onnxruntime" else "cuda")


class Pair:
    """A loaded target with its assistant. All generations, from any thread at once, run on one thread over its slots.

    What a finished generation left in a slot is kept until the slot is needed: a prompt that begins with the same
    tokens, the next turn of a session or a shared system prompt, is fed from where it differs.
    Leave its ``with`` block or close it to give GPU memory back.

    plan: memory of num_slots sequences of 4096 tokens, or of what bundle or engines hold.
    """

    def __init__(
        self, bundle: Bundle, *, engine: EngineName = "onnxruntime", num_threads: int | None = None, num_slots: int = 1
    ) -> None:
        if not isinstance(bundle, Bundle):
            raise RequestError(f"bundle is {bundle!r}; open a folder with slipstream.load")
        if engine not in get_args(EngineName):
            raise RequestError(f"engine is {engine!r}; one of {', '.join(get_args(EngineName))} is expected")
        self.bundle, self.manifest = bundle, bundle.manifest
        if num_threads is None:
            num_threads = usual_num_threads(bundle.manifest)
        elif not 1 <= (num_threads := whole_number("num_threads", num_threads)) <= (os.cpu_count() or 1) * 4:
            raise RequestError(f"num_threads is {num_threads}; this machine has {os.cpu_count()} cores")
        if not 1 <= (num_slots := whole_number("num_slots", num_slots)) <= MAX_SLOTS:
            raise RequestError(f"num_slots is {num_slots}; 1 to {MAX_SLOTS} is expected")
        self.plan = run_plan(bundle, engine, num_slots)
        if self.plan is not None:
            check_start(self.plan, self.manifest, read_state())
        self.codec = TextCodec(bundle.path(TOKENIZER), bundle.manifest.generation.bos_token_id)
        self._template = open_template(bundle, self.codec)
        self.engine: Engine = _open_engine(bundle, engine, num_threads)
        give_back_freed_memory()  # half of what quantized graphs took while they were rewritten and packed
        self._compiling, self._compiler = threading.Lock(), _NO_COMPILER
        self._resources = Resources(self.engine)
        self._thread = EngineThread(self._resources, self.engine, num_slots)
        weakref.finalize(self, self._thread.close)  # at exit too, in order

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, drain: bool = False) -> None:
        """Give all memory back. Nothing can be generated afterwards.

        drain: let generations that run or wait end first; otherwise they end with RequestError after the call that the
        engine is in. Waits for that, from whatever thread.
        """
        self._thread.close(drain=drain)

    def session(self) -> Session:
        """A new empty conversation."""
        return Session(self)

    def resume(self, path: str | Path) -> Session:
        """A session that was saved with ``Session.save``. Raises RequestError for files that are no such thing."""
        session = Session(self)
        tokens, messages, has_answer = read_saved(path, self.bundle)
        session._restore(tokens, messages, has_answer=has_answer)
        return session

    def new_backend(self, num_slots: int = 1) -> Backend:
        """Device state of several slots, below all this; closed with the pair."""
        return self._resources.new_backend(num_slots)

    def generate(
        self,
        prompt: str | Messages,
        settings: GenerationSettings | None = None,
        *,
        timeout: float | None = None,
        cancelled: threading.Event | None = None,
    ) -> Result:
        """Generate from a text prompt or chat messages.

        timeout: seconds to wait for a slot; None waits for as long as it takes.
        cancelled: set from another thread, ends the wait or the generation after the call it is in.
        Raises RequestError, BackendError, NonFiniteError, or BusyError when no slot became free or too many wait.
        """
        tokens, request = self.prompt_ids(prompt), self.request(settings)
        return self._finish(tokens, request, timeout=timeout, cancelled=cancelled)

    def _finish(self, tokens: Sequence[int], request: Request, **options: Any) -> Result:
        return Stream(lambda deliver: self.submit(tokens, request, deliver, **options), has_chunks=False).finish()

    def stream(
        self,
        prompt: str | Messages,
        settings: GenerationSettings | None = None,
        *,
        timeout: float | None = None,
        cancelled: threading.Event | None = None,
    ) -> Stream:
        """As ``generate``, giving each round's chunk as it comes."""
        tokens, request = self.prompt_ids(prompt), self.request(settings)
        return Stream(lambda deliver: self.submit(tokens, request, deliver, timeout=timeout, cancelled=cancelled))

    def astream(
        self, prompt: str | Messages, settings: GenerationSettings | None = None, *, timeout: float | None = None
    ) -> AsyncStream:
        """As ``stream``, in an event loop: ``async for chunk in pair.astream(prompt)``."""
        return self._astream(prompt, settings, timeout, has_chunks=True)

    def _astream(
        self, prompt: str | Messages, settings: GenerationSettings | None, timeout: float | None, *, has_chunks: bool
    ) -> AsyncStream:
        async def start(deliver: Callable[[Event], None]) -> Generation:
            tokens = await asyncio.to_thread(self.prompt_ids, prompt)
            return self.submit(tokens, self.request(settings), deliver, timeout=timeout)

        return AsyncStream(start, has_chunks=has_chunks)

    async def agenerate(
        self, prompt: str | Messages, settings: GenerationSettings | None = None, *, timeout: float | None = None
    ) -> Result:
        """As ``generate``, in an event loop; cancelled with its task."""
        return await self._astream(prompt, settings, timeout, has_chunks=False).finish()

    def samples(self, prompt: str | Messages, num_samples: int, settings: GenerationSettings) -> list[Result]:
        """Several texts of one prompt, which is fed once: sample i has the seed of the settings plus i.

        Raises what ``generate`` raises.
        """
        tokens, request = self.prompt_ids(prompt), self.request(settings)
        if (num_samples := whole_number("num_samples", num_samples)) < 1:
            raise RequestError(f"num_samples is {num_samples}; it must be at least 1")
        sampling = request.sampling
        if sampling.is_greedy or sampling.seed + num_samples - 1 > MAX_SEED:
            raise RequestError("samples differ by their seeds: give a temperature above 0, and a seed that leaves room")
        requests = [replace(request, sampling=replace(sampling, seed=sampling.seed + i)) for i in range(num_samples)]
        streams = [Stream(partial(self._prepare, tokens, each), has_chunks=False) for each in requests]
        first, *others = (stream.generation for stream in streams)
        first.followers += others
        self._thread.submit(first)
        return [stream.finish() for stream in streams]

    def keep(self, prompt: str | Messages) -> Result:
        """Feed a prompt that others begin with, such as a system prompt, and evict it last. Raises as ``generate``."""
        tokens, request = self.prompt_ids(prompt), self.request(GenerationSettings())
        return self._finish(tokens, request, is_kept=True)

    def prompt_ids(self, prompt: str | Messages) -> list[int]:
        """Tokens of a text prompt or chat messages. Raises RequestError."""
        if isinstance(prompt, str):
            check_no_media(prompt, self.manifest.generation.special_tokens)
            return self.codec.encode_prompt(prompt)
        check_messages(prompt)
        return self.chat_ids(prompt)

    def chat_text(self, messages: Messages) -> str:
        """Prompt text of chat messages, for reading. Raises RequestError without a template in the bundle."""
        return self._checked_template().render(messages)

    def chat_ids(self, messages: Messages) -> list[int]:
        """Prompt tokens of chat messages. What a message spells like a control token is text in them.

        Raises RequestError without a template in the bundle.
        """
        return self.codec.encode_prompt(*self._checked_template().render_parts(messages))

    def _checked_template(self) -> ChatTemplate:
        if self._template is None:
            raise RequestError("this bundle has no chat template: give a text prompt instead of messages")
        return self._template

    def request(self, settings: GenerationSettings | None) -> Request:
        """Settings checked against this pair. Raises RequestError."""
        settings = GenerationSettings() if settings is None else settings
        if not isinstance(settings, GenerationSettings):
            raise RequestError(f"settings is {settings!r}; GenerationSettings are expected")
        engine, special_tokens = self.engine, self.codec.special_tokens
        return settings.resolve(
            engine.draft_counts,
            self.manifest.generation,
            special_tokens,
            self.manifest.vocab_size,
            has_whole_rows=engine.has_whole_rows,
        )

    def check_room(self, num_tokens: int) -> None:
        """Raises ContextFullError where a sequence of so many tokens has no room for a new one."""
        if num_tokens >= self._thread.max_length:
            raise ContextFullError(
                f"the sequence has {num_tokens} tokens and the context holds {self._thread.max_length}, one of "
                "them new: shorten the prompt, or export with a larger --max-length"
            )

    def submit(
        self, tokens: Sequence[int], request: Request, deliver: Callable[[Event], None], **options: Any
    ) -> Generation:
        """Put a generation into the queue: what every other way to generate comes to.

        deliver, options: of a Generation. Raises BusyError, ContextFullError or RequestError.
        """
        generation = self._prepare(tokens, request, deliver, **options)
        self._thread.submit(generation)
        return generation

    def _prepare(
        self, tokens: Sequence[int], request: Request, deliver: Callable[[Event], None], **options: Any
    ) -> Generation:
        self._resources.check_open()
        self.check_room(len(tokens))
        matcher = None if request.json_schema is None else self._grammars().json_schema(request.json_schema)
        return Generation(
            tokens, request, self.codec, self._thread.max_length, deliver=deliver, matcher=matcher, **options
        )

    def _grammars(self) -> GrammarCompiler:
        with self._compiling:
            if self._compiler is None:
                stops = self.manifest.generation.stop_token_ids
                self._compiler = GrammarCompiler(self.bundle.path(TOKENIZER), self.manifest.vocab_size, stops)
            return self._compiler


class Session:
    """One conversation over several turns: append, generate, append again, reset.

    A session generates once at a time; a second call meanwhile gets BusyError at once.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._lock = threading.Lock()
        self._tokens: list[int] = []
        self._messages: list[Mapping[str, Any]] = []
        self._has_answer = False
        self._is_closed = False

    @property
    def token_ids(self) -> list[int]:
        """Every token of the sequence, prompts and answers."""
        return list(self._tokens)

    def append(self, prompt: str | Messages) -> None:
        """Continue the sequence with text, or with chat messages. Raises BusyError, RequestError or ContextFullError.

        Control tokens in text are control tokens; those in messages are text. Messages are rendered together with those
        before and the answers between, so the sequence is always what the template makes of the whole conversation.
        """
        with self._exclusive():
            if isinstance(prompt, str):
                self._append_text(prompt)
            else:
                self._append_messages(prompt)

    def generate(self, settings: GenerationSettings | None = None) -> Result:
        """Generate from the sequence as it stands. Raises BusyError, RequestError, NonFiniteError."""
        return self._stream(settings, None, has_chunks=False).finish()

    def stream(self, settings: GenerationSettings | None = None, *, cancelled: threading.Event | None = None) -> Stream:
        """As ``generate``, giving each round's chunk. The session is busy until the generation ends.

        cancelled: as for ``Pair.generate``.
        """
        return self._stream(settings, cancelled, has_chunks=True)

    def _stream(
        self, settings: GenerationSettings | None, cancelled: threading.Event | None, *, has_chunks: bool
    ) -> Stream:
        self._acquire()
        try:
            request = self._pair.request(settings)
            if not self._tokens:
                raise RequestError("the sequence is empty: append a prompt first")
            return Stream(
                lambda deliver: self._pair.submit(
                    self._tokens, request, deliver, cancelled=cancelled, on_end=self._take_in
                ),
                has_chunks=has_chunks,
            )
        except BaseException:
            self._lock.release()
            raise

    def reset(self) -> None:
        """Forget the sequence."""
        with self._exclusive():
            self._restore([], [], has_answer=False)

    def save(self, path: str | Path) -> None:
        """Write the sequence to a file, for ``Pair.resume``; whole or not at all. Raises BusyError or RequestError."""
        with self._exclusive():
            write_saved(path, self._pair.bundle, self._tokens, self._messages, has_answer=self._has_answer)

    def close(self) -> None:
        """Forget the sequence for good."""
        with self._exclusive():
            self._restore([], [], has_answer=False)
            self._is_closed = True

    def _restore(self, tokens: list[int], messages: list[Mapping[str, Any]], *, has_answer: bool) -> None:
        self._tokens, self._messages, self._has_answer = tokens, messages, has_answer

    def _append_text(self, text: str) -> None:
        if self._messages:
            raise RequestError("this session holds a chat: reset it before sending a text prompt")
        codec = self._pair.codec
        check_no_media(text, self._pair.manifest.generation.special_tokens)
        ids = codec.encode_more(text) if self._tokens else codec.encode_prompt(text)
        self._pair.check_room(len(self._tokens) + len(ids))
        self._tokens += ids

    def _append_messages(self, messages: Messages) -> None:
        if self._tokens and not self._messages:
            raise RequestError("this session continues a text prompt: reset it before sending chat messages")
        check_messages(messages)
        conversation = [*self._messages, *messages]
        ids = self._pair.chat_ids(conversation)
        self._pair.check_room(len(ids))
        self._restore(ids, conversation, has_answer=False)

    def _take_in(self, generation: Generation) -> None:
        """Keep the answer as the conversation's next message, or as more of the last one; on the engine's thread.

        Thoughts stay in it between their tokens, where the chat template finds them.
        """
        try:
            before, result = self._tokens, generation.result
            self._tokens = generation.tokens
            if self._messages and result is not None and result.token_ids:
                content = self._messages.pop()["content"] if self._has_answer else ""
                turn = self._pair.codec.decode_turn(result.token_ids, result.text, before)
                self._messages.append({"role": "assistant", "content": content + turn})
                self._has_answer = True
        finally:
            self._lock.release()

    def _acquire(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise BusyError("this session has a generation running: use one session for each, or wait for its end")
        if self._is_closed:
            self._lock.release()
            raise RequestError("this session is closed: open another")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self._acquire()
        try:
            yield
        finally:
            self._lock.release()
