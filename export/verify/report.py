"""What a verification found, and what of it is a miss."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_EXCUSED_SHARE = 1 / 2000


@dataclass(frozen=True)
class LogitCheck:
    """Largest difference over one context. scale: largest |logit| of the reference there."""

    graph: str
    context_length: int
    difference: float
    scale: float
    tokens_equal: bool

    @property
    def relative(self) -> float:
        return self.difference / self.scale


@dataclass(frozen=True)
class Mismatch:
    """A token that differs from the reference's argmax; excused when the reference itself nearly ties."""

    prompt: int
    position: int
    num_draft_tokens: int
    found: int
    expected: int
    margin: float
    is_excused: bool


@dataclass(frozen=True)
class GreedyCheck:
    """Greedy text of one K. differs_from_plain: prompts where drafting changed our own text."""

    num_draft_tokens: int
    num_prompts: int
    num_tokens: int
    mismatches: tuple[Mismatch, ...]
    differs_from_plain: tuple[int, ...]
    acceptance: tuple[float, ...]

    @property
    def agreement(self) -> float:
        """Share of our tokens that are the reference's own after the same text."""
        return 1 - len(self.mismatches) / self.num_tokens


@dataclass(frozen=True)
class SampledCheck:
    """Drawn text of one K. differs_from_plain: prompts where drafting changed it."""

    num_draft_tokens: int
    temperature: float
    num_prompts: int
    num_tokens: int
    differs_from_plain: tuple[int, ...]


@dataclass(frozen=True)
class FirstDraftCheck:
    """accepted: share of first drafts that are the token that the target draws. possible: the most there could be."""

    temperature: float
    num_drafts: int
    accepted: float
    possible: float


@dataclass(frozen=True)
class DraftCheck:
    """Drafts the runtime proposed in its rounds, against transformers' from the same text.

    different: proposals with another token where the reference does not nearly tie.
    """

    num_rounds: int
    num_drafts: int
    different: tuple[str, ...]


@dataclass(frozen=True)
class Cost:
    """How far one kind of rounding moves the target's logits, of their largest: root mean square, and at most."""

    what: str
    rms: float
    largest: float


@dataclass(frozen=True)
class Report:
    """is_quantized: logits and drafts were computed with float32 activations and compared with transformers on the
    same quantized weights and KV; text was generated as users get it, and where it leaves transformers' is no failure.
    costs: of weights against the checkpoint's, and of the activations that text is generated with against float32 ones.
    tolerance: of the logit scale. rounding: added where the target's KV is int8 and a last bit decides a step.
    """

    tolerance: float
    logits: tuple[LogitCheck, ...]
    drafts: DraftCheck
    greedy: tuple[GreedyCheck, ...]
    sampled: tuple[SampledCheck, ...] = ()
    first_drafts: FirstDraftCheck | None = None
    is_quantized: bool = False
    rounding: float = 0.0
    costs: tuple[Cost, ...] = ()

    def allowed(self, check: LogitCheck) -> float:
        return self.tolerance + (self.rounding if check.graph == "target" else 0.0)

    @property
    def failures(self) -> list[str]:
        """What missed, one line each; empty when the bundle is verified."""
        lines = [
            f"{check.graph} logits at context {check.context_length}: |Δ| {check.difference:.2e} is "
            f"{check.relative:.1e} of the scale, allowed {self.allowed(check):.0e}"
            for check in self.logits
            if not check.relative <= self.allowed(check)
        ]
        lines += [
            f"{check.graph} tokens at context {check.context_length} differ from transformers'"
            for check in self.logits
            if not check.tokens_equal
        ]
        lines += self.drafts.different
        for greedy in self.greedy:
            excused = sum(miss.is_excused for miss in greedy.mismatches)
            if not self.is_quantized:
                lines += [_miss_line(miss) for miss in greedy.mismatches if not miss.is_excused]
            if not self.is_quantized and excused > max(1, greedy.num_tokens * _EXCUSED_SHARE):
                lines.append(
                    f"K={greedy.num_draft_tokens}: {excused} near-ties in {greedy.num_tokens} tokens are too many"
                )
            if greedy.differs_from_plain:
                lines.append(
                    f"K={greedy.num_draft_tokens}: drafted text differs from the same rows with drafts rejected in "
                    f"prompts {list(greedy.differs_from_plain)}"
                )
        lines += [
            f"K={check.num_draft_tokens}: drawn text differs from the same rows with drafts rejected in prompts "
            f"{list(check.differs_from_plain)}"
            for check in self.sampled
            if check.differs_from_plain
        ]
        return lines

    @property
    def near_ties(self) -> list[str]:
        """Tokens that differ where the reference itself nearly ties, one line each."""
        return [_miss_line(miss) for check in self.greedy for miss in check.mismatches if miss.is_excused]

    def to_dict(self) -> dict[str, Any]:
        agreement = {str(check.num_draft_tokens): check.agreement for check in self.greedy}
        return {"passed": not self.failures, "failures": self.failures, "agreement": agreement, **asdict(self)}


def _miss_line(miss: Mismatch) -> str:
    return (
        f"K={miss.num_draft_tokens}, prompt {miss.prompt}, token {miss.position}: {miss.found} instead of "
        f"{miss.expected}, margin {miss.margin:.2e}"
    )
