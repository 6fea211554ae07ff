"""The public runtime: load a bundle, generate, stream, and keep a session over several turns."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .backend import MAX_DRAFT_TOKENS
from .bundle import CHAT_TEMPLATE, TOKENIZER, Bundle, Manifest, open_bundle
from .chat import ChatTemplate
from .errors import BusyError, RequestError
from .loop import Loop, Request
from .onnxruntime_backend import DEFAULT_PREFILL_CHUNK, Graphs, OnnxRuntimeBackend
from .results import Chunk, Result
from .text import TextCodec

Messages = Sequence[Mapping[str, Any]]
_SMALL_MODEL_BYTES = 64 * 2**20  # below, handing work to a second thread costs more than it gives


@dataclass(frozen=True)
class GenerationSettings:
    """num_draft_tokens: K per round; None takes the bundle's, 0 is plain decoding.
    max_new_tokens: cap on committed tokens.
    stop: strings that end the text; it is cut before them.
    """

    num_draft_tokens: int | None = None
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()


def load(bundle: str | Path, *, num_threads: int | None = None) -> Pair:
    """Open a bundle for generation on ONNX Runtime's CPU provider.

    num_threads: per operator; None takes one for small models and every core otherwise.
    Raises BundleError or BackendError.
    """
    return Pair(open_bundle(bundle), num_threads=num_threads)


class Pair:
    """A loaded target with its assistant. Sessions share its graphs, not its state.

    ``generate`` and ``stream`` run one request at a time on a sequence of their own: calls
    from several threads queue.
    """

    def __init__(self, bundle: Bundle, *, num_threads: int | None = None) -> None:
        self.manifest: Manifest = bundle.manifest
        if num_threads is None:
            weights = sum(record.size_bytes for record in bundle.manifest.files.values())
            num_threads = 1 if weights < _SMALL_MODEL_BYTES else 0
        elif not 1 <= num_threads <= (os.cpu_count() or 1) * 4:
            raise RequestError(f"num_threads is {num_threads}; this machine has {os.cpu_count()} cores")
        self.codec = TextCodec(bundle.path(TOKENIZER), bundle.manifest.generation.bos_token_id)
        self._template = _chat_template(bundle, self.codec)
        self.graphs = Graphs(bundle, num_threads)
        self._queue = threading.Lock()
        self._queue_holder: int | None = None  # thread that runs ``_own_session``
        self._own_session: Session | None = None

    def session(self) -> Session:
        """A new empty sequence with its own KV buffers."""
        return Session(self)

    def generate(self, prompt: str | Messages, settings: GenerationSettings | None = None) -> Result:
        """Generate from a text prompt or chat messages. Raises RequestError, BackendError or NonFiniteError."""
        with self.stream(prompt, settings) as stream:
            for _ in stream:
                pass
        return stream.result

    def stream(self, prompt: str | Messages, settings: GenerationSettings | None = None) -> Stream:
        """As ``generate``, giving each round's chunk as it comes; waits for its turn.

        Consume a stream on the thread that opened it; that thread gets BusyError when it asks
        for another meanwhile, instead of waiting for itself.
        """
        if self._queue_holder == threading.get_ident():
            raise BusyError("this thread has a stream of the pair open: close it, or use a session for each")
        self._queue.acquire()
        self._queue_holder = threading.get_ident()
        try:
            if self._own_session is None:
                self._own_session = Session(self)
            self._own_session.reset()
            self._own_session.append(prompt)
            return self._own_session.stream(settings, on_close=self._leave_queue)
        except BaseException:
            self._leave_queue()
            raise

    def _leave_queue(self) -> None:
        self._queue_holder = None
        self._queue.release()

    def chat_text(self, messages: Messages) -> str:
        """Prompt text of chat messages. Raises RequestError without a template in the bundle."""
        if self._template is None:
            raise RequestError("this bundle has no chat template: give a text prompt instead of messages")
        return self._template.render(messages)

    def request(self, settings: GenerationSettings) -> Request:
        """Settings checked against this pair. Raises RequestError."""
        num_draft_tokens = settings.num_draft_tokens
        if num_draft_tokens is None:
            num_draft_tokens = self.manifest.generation.num_draft_tokens
        if not 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise RequestError(f"num_draft_tokens is {num_draft_tokens}; it can be 0 to {MAX_DRAFT_TOKENS}")
        if settings.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {settings.max_new_tokens}; it must be at least 1")
        if isinstance(settings.stop, str) or not all(isinstance(stop, str) and stop for stop in settings.stop):
            raise RequestError(f"stop is {settings.stop!r}; a sequence of non-empty strings is expected")
        stops = tuple(self.manifest.generation.stop_token_ids)
        return Request(num_draft_tokens, settings.max_new_tokens, stops, tuple(settings.stop))


class Session:
    """One sequence over several turns: append, generate, append again, reset.

    A session belongs to one thread at a time; a second one gets BusyError at once.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self.backend = OnnxRuntimeBackend(pair.graphs, prefill_chunk=DEFAULT_PREFILL_CHUNK)
        self._loop = Loop(self.backend, pair.codec)
        self._lock = threading.Lock()
        self._messages: list[Mapping[str, Any]] = []
        self._has_answer = False

    @property
    def token_ids(self) -> list[int]:
        """Every token of the sequence, prompts and answers."""
        return list(self._loop.tokens)

    def append(self, prompt: str | Messages) -> None:
        """Continue the sequence with text, or with chat messages.

        Messages are rendered together with those before and the answers between, so the
        sequence is always what the template makes of the whole conversation.
        """
        with self._exclusive():
            if isinstance(prompt, str):
                self._append_text(prompt)
            else:
                self._append_messages(prompt)

    def generate(self, settings: GenerationSettings | None = None) -> Result:
        """Generate from the sequence as it stands. Raises BusyError, RequestError, NonFiniteError."""
        with self.stream(settings) as stream:
            for _ in stream:
                pass
        return stream.result

    def stream(
        self, settings: GenerationSettings | None = None, *, on_close: Callable[[], None] | None = None
    ) -> Stream:
        """As ``generate``, giving each round's chunk. The session is busy until it ends or is closed.

        on_close: called once when the session is free again.
        """
        self._acquire()
        try:
            request = self._pair.request(settings or GenerationSettings())
            if not self._loop.tokens:
                raise RequestError("the sequence is empty: append a prompt first")
            return Stream(self, request, on_close)
        except BaseException:
            self._lock.release()
            raise

    def reset(self) -> None:
        """Forget the sequence."""
        with self._exclusive():
            self._loop.reset()
            self._messages.clear()
            self._has_answer = False

    def _append_text(self, text: str) -> None:
        if self._messages:
            raise RequestError("this session holds a chat: reset it before sending a text prompt")
        codec = self._pair.codec
        ids = codec.encode_more(text) if self._loop.tokens else codec.encode_prompt(text)
        self._loop.check_room(len(self._loop.tokens) + len(ids))
        self._loop.tokens += ids

    def _append_messages(self, messages: Messages) -> None:
        if self._loop.tokens and not self._messages:
            raise RequestError("this session continues a text prompt: reset it before sending chat messages")
        conversation = [*self._messages, *messages]
        ids = self._pair.codec.encode_prompt(self._pair.chat_text(conversation))
        self._loop.check_room(len(ids))
        self._loop.replace(ids)
        self._messages = conversation
        self._has_answer = False

    def _finish(self, result: Result) -> None:
        """Keep the answer as the conversation's next message, or as more of the last one."""
        if not self._messages or not result.token_ids:
            return
        before = self._messages.pop()["content"] if self._has_answer else ""
        self._messages.append({"role": "assistant", "content": before + result.text})
        self._has_answer = True

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

    def __init__(self, session: Session, request: Request, on_close: Callable[[], None] | None) -> None:
        self._is_open = False
        self._cancelled = threading.Event()
        self._running = threading.RLock()  # held during a call, so that close from another thread waits for it
        self._session = session
        self._on_close = on_close
        self._result: Result | None = None
        self._chunks = session._loop.run(request, self._cancelled.is_set)
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
                self._result = self._session._loop.result
                if self._result is not None:
                    self._session._finish(self._result)
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


def _chat_template(bundle: Bundle, codec: TextCodec) -> ChatTemplate | None:
    path = bundle.path(CHAT_TEMPLATE)
    if CHAT_TEMPLATE not in bundle.manifest.files:
        return None
    special_tokens = {"bos_token": codec.bos_token, **bundle.manifest.generation.special_tokens}
    return ChatTemplate(path.read_text(encoding="utf-8"), special_tokens)
