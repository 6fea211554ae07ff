"""Opens a target and its assistant and checks that they belong together, before an export begins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.runtime.bundle import manifest as contract
from slipstream.runtime.text.chat import ChatTemplate
from slipstream.runtime.text.codec import TextCodec

from .chat_template import end_of_turn, read_chat_template
from .config import AssistantConfig, TextConfig, assistant_config_from_hf, check_pair, target_config_from_hf
from .config_fields import is_metadata
from .folder import CONFIG, CheckpointFolder
from .generation import read_generation_config, read_num_draft_tokens, read_special_tokens
from .quantized import fold_quantized
from .tensors import Checkpoint, has_tied_head, open_checkpoint
from .tokenizer import check_same_tokenizer, open_tokenizer


@dataclass(frozen=True)
class CheckpointPair:
    """A target and its assistant, opened and checked against each other.

    chat_template: its source, None where the target has none.
    suppress_tokens: ids that the target never chooses.
    notes: what an export should say of the pair, a sentence each.
    """

    target: Checkpoint
    assistant: Checkpoint
    target_config: TextConfig
    assistant_config: AssistantConfig
    generation: contract.Generation
    chat_template: str | None
    suppress_tokens: tuple[int, ...]
    codec: TextCodec
    notes: tuple[str, ...]


def open_pair(target: Path, assistant: Path) -> CheckpointPair:
    """Open and check a pair. Raises CheckpointError with the first thing that does not fit."""
    folders = CheckpointFolder(target), CheckpointFolder(assistant)
    target_config = target_config_from_hf(folders[0].object(CONFIG), str(target))
    assistant_config = assistant_config_from_hf(folders[1].object(CONFIG), str(assistant))
    check_pair(target_config, assistant_config)
    wanted = read_generation_config(folders[0], target_config.vocab_size)
    codec = open_tokenizer(folders[0], wanted.bos_token_id, target_config.vocab_size)
    check_same_tokenizer(*folders, codec.tokenizer)
    generation = contract.Generation(
        bos_token_id=wanted.bos_token_id,
        stop_token_ids=list(wanted.stop_token_ids),
        num_draft_tokens=read_num_draft_tokens(folders[1]),
        sampling=wanted.sampling,
        special_tokens=read_special_tokens(folders[0], codec.tokenizer),
    )
    template = read_chat_template(folders[0])
    checkpoints = fold_quantized(open_checkpoint(folders[0])), fold_quantized(open_checkpoint(folders[1]))
    notes = [note for folder in folders for note in _metadata_notes(folder)]
    text, notes_of_head = _with_head_as_loaded(target_config, checkpoints[0])
    assistant_text, notes_of_assistant = _with_head_as_loaded(assistant_config.text, checkpoints[1])
    notes += notes_of_head + notes_of_assistant + _chat_notes(target, template, generation, codec)
    assistant_config = replace(assistant_config, text=assistant_text)
    return CheckpointPair(
        *checkpoints, text, assistant_config, generation, template, wanted.suppress_tokens, codec, tuple(notes)
    )


def _metadata_notes(folder: CheckpointFolder) -> list[str]:
    config = folder.object(CONFIG)
    parts = (config, config.get("text_config") or {})
    names = sorted({name for part in parts for name in part if is_metadata(name)})
    return [f"{folder.path / CONFIG}: passed over {', '.join(names)}, which change nothing"] if names else []


def _with_head_as_loaded(config: TextConfig, checkpoint: Checkpoint) -> tuple[TextConfig, list[str]]:
    """transformers ties a head to the embedding only where the checkpoint has none of its own, or an equal one."""
    if not config.has_tied_head or has_tied_head(checkpoint):
        return config, []
    note = (
        f"{checkpoint.folder} says tie_word_embeddings, and has an lm_head.weight that differs from its embedding: "
        "that head is used, as transformers does"
    )
    return replace(config, has_tied_head=False), [note]


def _chat_notes(target: Path, template: str | None, generation: contract.Generation, codec: TextCodec) -> list[str]:
    if template is None:
        return [f"{target} has no chat template: prompts go in as they are, and chat messages are refused"]
    token = end_of_turn(ChatTemplate(template, generation.special_tokens), codec)
    if token is None or token in generation.stop_token_ids:
        return []
    note = (
        f"the chat template of {target} ends turns with {codec.tokenizer.id_to_token(token)} ({token}), which is not "
        f"among the stop tokens {', '.join(map(str, generation.stop_token_ids))}: text will run on into further turns. "
        "Add it to eos_token_id in generation_config.json"
    )
    return [note]
