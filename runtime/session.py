"""The public runtime: load a bundle, generate, stream, and keep a session over several turns."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from slipstream.runtime.backend.contract import Backend, Engine
from slipstream.runtime.backend.resources import Resources
from slipstream.runtime.bundle.engine_record import EngineName
from slipstream.runtime.bundle.manifest import CHAT_TEMPLATE, TOKENIZER, Bundle, Manifest, open_bundle
from slipstream.runtime.decode.loop import Loop, Request
from slipstream.runtime.decode.results import Chunk, Result
from slipstream.runtime.decode.settings import GenerationSettings, whole_number
from slipstream.runtime.decode.turns import Turns
from slipstream.runtime.machine.host import give_back_freed_memory, read_state, usual_num_threads
from slipstream.runtime.machine.plan import check_start, run_plan
from slipstream.runtime.text.chat import ChatTemplate, check_messages, check_no_media
from slipstream.runtime.text.codec import TextCodec

from .errors import BusyError, RequestError

Messages = Sequence[Mapping[str, Any]]


def load(bundle: str | Path, *, engine: EngineName = "onnxruntime", num_threads: int | None = None) -> Pair:
    """Open a bundle for generation.

    engine: "onnxruntime" is its CPU provider; "tensorrt" and "tensorrt-rtx" run what
        ``slipstream build`` made for this GPU. "onnxruntime-cuda" is ONNX Runtime's CUDA provider.
    num_threads: per operator on the CPU; None takes one for small models and every core otherwise.
    Raises BundleError, RequestError (for an argument that is none), BackendError (for too little memory, too) or
    MissingExtraError.
    """
    if not isinstance(bundle, str | os.PathLike):
        raise RequestError(f"bundle is {bundle!r}; the path of a bundle's folder is expected")
    return Pair(open_bundle(bundle), engine=engine, num_threads=num_threads)


def _open_engine(bundle: Bundle, engine: EngineName, num_threads: int) -> Engine:
    """Vendor libraries are imported by what is asked for, and by nothing else."""
    if engine == "tensorrt" or engine == "tensorrt-rtx":  # noqa: PLR1714 (narrows the type)
        from slipstream.runtime.trt.backend import TensorRTEngine

        return TensorRTEngine(bundle, engine)
    from slipstream.runtime.ort.backend import OnnxRuntimeEngine

    return OnnxRuntimeEngine(bundle, num_threads, "cpu" if engine == "onnxruntime" else "cuda")


class Pair:
    """A loaded target with its assistant. Sessions share its graphs, not its state.

    ``generate`` and ``stream`` run one request at a time on a sequence of their own: calls
    from several threads queue. Leave its ``with`` block or close it to give GPU memory back.

    plan: memory of one sequence of 4096 tokens, or of what bundle or engines hold.
    """

    def __init__(self, bundle: Bundle, *, engine: EngineName = "onnxruntime", num_threads: int | None = None) -> None:
        if not isinstance(bundle, Bundle):
            raise RequestError(f"bundle is {bundle!r}; open a folder with slipstream.load")
        if engine not in get_args(EngineName):
            raise RequestError(f"engine is {engine!r}; one of {', '.join(get_args(EngineName))} is expected")
        self.manifest: Manifest = bundle.manifest
        if num_threads is None:
            num_threads = usual_num_threads(bundle.manifest)
        elif not 1 <= (num_threads := whole_number("num_threads", num_threads)) <= (os.cpu_count() or 1) * 4:
            raise RequestError(f"num_threads is {num_threads}; this machine has {os.cpu_count()} cores")
        self.plan = run_plan(bundle, engine)
        if self.plan is not None:
            check_start(self.plan, self.manifest, read_state())
        self.codec = TextCodec(bundle.path(TOKENIZER), bundle.manifest.generation.bos_token_id)
        self._template: ChatTemplate | None = None
        if CHAT_TEMPLATE in self.manifest.files:
            special_tokens = {"bos_token": self.codec.bos_token, **self.manifest.generation.special_tokens}
            source = bundle.path(CHAT_TEMPLATE).read_text(encoding="utf-8")
            self._template = ChatTemplate(source, special_tokens, self.codec.special_tokens)
        self.engine: Engine = _open_engine(bundle, engine, num_threads)
        give_back_freed_memory()  # half of what quantized graphs took while they were rewritten and packed
        self._resources = Resources(self.engine)
        weakref.finalize(self, self._resources.close)  # at exit too, in order
        self._turns = Turns(self._resources.check_open)
        self._own_session: Session | None = None  # of the thread whose turn it is

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give all memory back, that of sessions first. Nothing can be generated afterwards.

        A generation of another thread ends with RequestError after the call it is in, which is waited for; so do
        threads that wait for their turn.
        """
        self._resources.close()

    def session(self) -> Session:
        """A new empty sequence with its own KV buffers."""
        return Session(self)

    def new_backend(self, batch: int = 1) -> Backend:
        """Device state for batch sequences, below the loop; closed with the pair."""
        return self._resources.new_backend(batch)

    def generate(
        self,
        prompt: str | Messages,
        settings: GenerationSettings | None = None,
        *,
        timeout: float | None = None,
        cancelled: threading.Event | None = None,
    ) -> Result:
        """Generate from a text prompt or chat messages, when no other thread does.

        timeout: seconds to wait for the turn; None waits for as long as it takes.
        cancelled: set from another thread, ends the wait with BusyError, or the generation after the call it is in.
        Raises RequestError, BackendError, NonFiniteError, or BusyError when the turn did not come.
        """
        return self.stream(prompt, settings, timeout=timeout, cancelled=cancelled).finish()

    def stream(
        self,
        prompt: str | Messages,
        settings: GenerationSettings | None = None,
        *,
        timeout: float | None = None,
        cancelled: threading.Event | None = None,
    ) -> Stream:
        """As ``generate``, giving each round's chunk as it comes.

        Consume a stream on the thread that opened it; that thread gets BusyError when it asks
        for another meanwhile, instead of waiting for itself.
        """
        self._turns.take(timeout, cancelled)
        try:
            if self._own_session is None:
                self._own_session = Session(self)
            self._own_session.reset()
            self._own_session.append(prompt)
            return self._own_session.stream(settings, cancelled=cancelled, on_close=self._turns.leave)
        except BaseException:
            self._turns.leave()
            raise

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

    def request(self, settings: GenerationSettings) -> Request:
        """Settings checked against this pair. Raises RequestError."""
        if not isinstance(settings, GenerationSettings):
            raise RequestError(f"settings is {settings!r}; GenerationSettings are expected")
        stops = self.manifest.generation.stop_token_ids
        engine = self.engine
        return settings.resolve(
            engine.draft_counts, engine.num_draft_tokens, stops, self.codec.special_tokens, engine.num_candidates
        )


class Session:
    """One sequence over several turns: append, generate, append again, reset.

    A session belongs to one thread at a time; a second one gets BusyError at once.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._resources = pair._resources
        self.backend = self._resources.new_backend()
        self._loop = Loop(self.backend, pair.codec)
        self._lock = threading.Lock()
        self._messages: list[Mapping[str, Any]] = []
        self._has_answer = False

    @property
    def token_ids(self) -> list[int]:
        """Every token of the sequence, prompts and answers."""
        return list(self._loop.tokens)

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
        return self.stream(settings).finish()

    def stream(
        self,
        settings: GenerationSettings | None = None,
        *,
        cancelled: threading.Event | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> Stream:
        """As ``generate``, giving each round's chunk. The session is busy until it ends or is closed.

        cancelled: as for ``Pair.generate``. on_close: called once when the session is free again.
        """
        self._acquire()
        try:
            request = self._pair.request(GenerationSettings() if settings is None else settings)
            if not self._loop.tokens:
                raise RequestError("the sequence is empty: append a prompt first")
            return Stream(self, request, cancelled, on_close)
        except BaseException:
            self._lock.release()
            raise

    def reset(self) -> None:
        """Forget the sequence."""
        with self._exclusive():
            self._loop.reset()
            self._messages.clear()
            self._has_answer = False

    def close(self) -> None:
        """Give the KV buffers back. The session can't be used afterwards; its pair can."""
        with self._exclusive():
            self._resources.close_backend(self.backend)

    def __del__(self) -> None:
        if hasattr(self, "backend"):  # a session that did not fit has none
            self._resources.close_backend(self.backend)

    def _append_text(self, text: str) -> None:
        if self._messages:
            raise RequestError("this session holds a chat: reset it before sending a text prompt")
        codec = self._pair.codec
        check_no_media(text, self._pair.manifest.generation.special_tokens)
        ids = codec.encode_more(text) if self._loop.tokens else codec.encode_prompt(text)
        self._loop.check_room(len(self._loop.tokens) + len(ids))
        self._loop.tokens += ids

    def _append_messages(self, messages: Messages) -> None:
        if self._loop.tokens and not self._messages:
            raise RequestError("this session continues a text prompt: reset it before sending chat messages")
        check_messages(messages)
        conversation = [*self._messages, *messages]
        ids = self._pair.chat_ids(conversation)
        self._loop.check_room(len(ids))
        self._loop.replace(ids)
        self._messages = conversation
        self._has_answer = False

    def _finish(self, result: Result) -> Result:
        """Keep the answer as the conversation's next message, or as more of the last one; say what made it.

        Thoughts stay in it between their tokens, where the chat template finds them.
        """
        if self._messages and result.token_ids:
            before = self._messages.pop()["content"] if self._has_answer else ""
            start = len(self._loop.tokens) - len(result.token_ids)
            turn = self._pair.codec.decode_turn(result.token_ids, result.text, self._loop.tokens[:start])
            self._messages.append({"role": "assistant", "content": before + turn})
            self._has_answer = True
        engine = self._pair.engine
        return replace(result, engine=engine.name, notes=(*engine.notes, *self.backend.notes))

    def _acquire(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise BusyError("this session has a generation running: use one session for each, or wait for its end")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self._acquire()
        try:
            yield
        finally:
            self._lock.release()


class Stream:
    """Chunks of one running generation. Close it, or leave its ``with`` block, to stop early.

    ``cancel`` may be called from any thread; ``result`` is there once the stream has ended.
    """

    def __init__(
        self, session: Session, request: Request, cancelled: threading.Event | None, on_close: Callable[[], None] | None
    ) -> None:
        self._is_open = False
        self._cancelled = threading.Event()
        self._running = threading.RLock()  # held during a call, so that close from another thread waits for it
        self._session = session
        self._on_close = on_close
        self._result: Result | None = None
        own = self._cancelled.is_set
        self._chunks = session._loop.run(request, own if cancelled is None else lambda: own() or cancelled.is_set())
        self._is_open = True

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        with self._running:
            try:
                return next(self._chunks)
            except BaseException:  # the end, an error or an interrupt: the session is free again
                self.close()
                raise

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def finish(self) -> Result:
        """The result, once all chunks have come."""
        with self:
            for _ in self:
                pass
        return self.result

    def cancel(self) -> None:
        """Ask the generation to end after the call it is in."""
        self._cancelled.set()

    def close(self) -> None:
        """End now; what was committed so far is the result."""
        if not self._is_open:
            return
        self._cancelled.set()
        with self._running:
            if not self._is_open:
                return
            self._is_open = False
            try:
                self._chunks.close()
                result = self._session._loop.result
                if result is not None:
                    self._result = self._session._finish(result)
            finally:
                self._session._lock.release()
                if self._on_close is not None:
                    self._on_close()

    @property
    def result(self) -> Result:
        """Raises RequestError while the generation runs, or when it never began."""
        if self._result is None:
            raise RequestError("the generation has no result: it has not ended, or it never began")
        return self._result
