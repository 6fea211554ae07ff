"""Every error slipstream raises on purpose, as one tree.

A message says what was found, what was expected and what to do about it. The CLI prints
it as is and exits with 2; anything else that escapes is a bug.
"""


class SlipstreamError(Exception):
    """Base of every error that slipstream raises on purpose.

    found: what happened, and what was expected. advice: what to do about it, "" where found says that too.
    """

    def __init__(self, found: str, advice: str = "") -> None:
        super().__init__(f"{found}. {advice}" if advice else found)
        self.found = found
        self.advice = advice


class CheckpointError(SlipstreamError):
    """A checkpoint (config, tensors or tokenizer) can't be exported as a pair."""


class BundleError(SlipstreamError):
    """A bundle is missing, incomplete, of another version or changed since it was written."""


class BackendError(SlipstreamError):
    """The inference backend could not be loaded, or failed while running a graph."""


class RequestError(SlipstreamError):
    """What the caller asked for can't be honoured (prompt, option, message or setting)."""


class ContextFullError(RequestError):
    """The context has no room for what is asked for: a prompt and one new token, or more rows."""


class RewindError(RequestError):
    """A rewind goes further back than the sliding buffers hold: prefill has to start again from position 0."""


class NonFiniteError(SlipstreamError):
    """A graph produced NaN or infinity; nothing of that call was kept."""


class BusyError(SlipstreamError):
    """A session is in use by another thread."""


class MissingExtraError(SlipstreamError):
    """A command needs an optional dependency group that is not installed."""
