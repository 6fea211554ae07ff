"""transformers' own models as plain functions of token ids: the reference of every verification."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.checkpoint.quantized import QuantizedCheckpoint
from slipstream.export.checkpoint.tensors import Checkpoint
from slipstream.export.model.layers import Blocks
from slipstream.export.weights.quantize import blocks_of, dequantize, is_quantizable, quantize
from slipstream.runtime.bundle.manifest import KVBuffer, Weights
from slipstream.runtime.errors import CheckpointError

from .rounded_kv import round_kv, rounded

Array = npt.NDArray[Any]


def _round_linear(name: str, linear: torch.nn.Linear, blocks: Blocks) -> None:
    """Give a Linear the values its quantized matrix stands for, as a new parameter: a tied head shares its own."""
    if is_quantizable((f"{name}.weight",), linear.in_features, blocks):
        weight = linear.weight.detach()
        codes, scales = quantize(weight, blocks, weight.dtype)
        linear.weight = torch.nn.Parameter(dequantize(codes, scales), requires_grad=False)


def _load(checkpoint: Checkpoint, dtype: str) -> Any:
    """A checkpoint in transformers; a quantized one as the values that it stands for."""
    import transformers

    load: dict[str, Any] = {"dtype": getattr(torch, dtype), "local_files_only": True}
    if not isinstance(checkpoint, QuantizedCheckpoint):
        return transformers.AutoModelForCausalLM.from_pretrained(checkpoint.folder, **load).eval()
    config = transformers.AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
    vars(config).pop("quantization_config", None)  # absent where hf_quant_config.json has it
    values = {header.key: checkpoint.read(name) for name, header in checkpoint.headers.items()}
    model = getattr(transformers, checkpoint.config["architectures"][0])
    return model.from_pretrained(None, config=config, state_dict=values, **load).eval()


class Reference:
    """The checkpoints in transformers, as plain functions of token ids. Needs the weights in memory."""

    def __init__(self, target: Path, assistant: Path, dtype: str) -> None:
        import transformers

        pair = open_pair(target, assistant)  # the same checks and messages as an export
        self.folders = target, assistant
        self.blocks: Blocks | None = None
        self._donors: dict[str, KVBuffer] = {}  # by layer type, where their KV is rounded
        self._scores_rows = pair.assistant_config.centroid_head is not None
        self.window = pair.target_config.sliding_window
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.target, self.assistant = (_load(checkpoint, dtype) for checkpoint in (pair.target, pair.assistant))
        self._is_stored = any(isinstance(each, QuantizedCheckpoint) for each in (pair.target, pair.assistant))
        self.suppress_tokens = list(pair.suppress_tokens)
        self.generation = transformers.GenerationConfig(  # of the checkpoint's settings only what greedy text obeys
            do_sample=False, pad_token_id=0, suppress_tokens=self.suppress_tokens or None
        )
        self.target.generation_config = transformers.GenerationConfig()

    @property
    def is_exact(self) -> bool:
        """Whether its weights are the checkpoints' float ones, not rounded yet."""
        return self.blocks is None and not self._is_stored

    def round_weights(self, weights: Weights) -> None:
        """Round every matrix to what a bundle's stands for; tables that are gathered stay as they are.

        Raises CheckpointError for a format that transformers is not compared in, and when they were rounded before.
        """
        if self._is_stored:
            return  # loaded as the values that the checkpoints, and the bundle with them, stand for
        if weights.format == "fp8" or weights.format == "nvfp4":  # noqa: PLR1714 (narrows the type)
            raise CheckpointError(f"there is no reference for {weights.format} weights: verify compares float and int")
        blocks = blocks_of(weights.format, weights.block_size or 0)
        if blocks == self.blocks:
            return
        if blocks is None or self.blocks is not None:
            raise CheckpointError(f"this reference was rounded to {self.blocks}, not {blocks}: open the pair again")
        self.blocks = blocks
        for model, gathered in ((self.target, ()), (self.assistant, ("lm_head",) if self._scores_rows else ())):
            for name, module in model.named_modules():
                if isinstance(module, torch.nn.Linear) and name not in gathered:
                    _round_linear(name, module, blocks)

    def round_kv(self, kv: Sequence[KVBuffer]) -> None:
        """Let target and assistant attend to keys and values as a bundle stores them, int8 or float."""
        round_kv(self.target, kv)
        self._donors = {buffer.type: buffer for buffer in kv if buffer.dtype == "int8" and buffer.assistant_readers}

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Array:
        """[len(ids), V] float32."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # transformers 5.24 fails on a KV-shared target without PLE unless it has to keep every row
            out = self.target(input_ids=torch.tensor([list(ids)]), use_cache=False, output_hidden_states=True)
        result: Array = out.logits[0].float().numpy()
        result[:, self.suppress_tokens] = np.finfo(np.float32).min
        return result

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """transformers' plain greedy generate; prompts of one length share a call."""
        texts: dict[int, list[int]] = {}
        for length in sorted({len(prompt) for prompt in prompts}):
            members = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
            ids = torch.tensor([prompts[i] for i in members])
            out = self.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self.generation,
                max_new_tokens=num_tokens,
                output_hidden_states=True,
                return_dict_in_generate=True,
            ).sequences
            texts |= dict(zip(members, out[:, length:].tolist(), strict=True))
        return [texts[i] for i in range(len(prompts))]

    @torch.no_grad()
    def draft(self, ids: Sequence[int], num_steps: int, position_offset: int) -> list[Array]:
        """Logits [V] of each draft step after a text whose last token is pending; steps follow their argmax."""
        out = self.target.get_decoder()(
            input_ids=torch.tensor([list(ids[:-1])]),
            use_cache=False,
            return_shared_kv_states=True,
            output_hidden_states=True,
        )
        donors = {
            name.removesuffix("_attention"): self._held(name.removesuffix("_attention"), *pair)
            for name, pair in out.shared_kv_states.items()
        }
        token, state, rows = ids[-1], out.last_hidden_state[:, -1:].numpy(), []
        for _ in range(num_steps):
            logits, state = self.draft_step(token, state, len(ids) - 1 + position_offset, donors)
            rows.append(logits)
            token = int(logits.argmax())
        return rows

    def _held(self, layer_type: str, key: torch.Tensor, value: torch.Tensor) -> tuple[Array, Array]:
        """Key and value [1, H, S, D] as the assistant may see them: of a sliding donor the last window, as stored."""
        first = -self.window if layer_type == "sliding" else 0
        key, value = key[:, :, first:], value[:, :, first:]
        donor = self._donors.get(layer_type)
        if donor is not None:
            key, value = rounded(key, donor.key_scale), rounded(value, donor.value_scale)
        return key.numpy(), value.numpy()

    @torch.no_grad()
    def draft_step(
        self, token: int, hidden: Array, position: int, donors: Mapping[str, tuple[Array, ...]]
    ) -> tuple[Array, Array]:
        """One assistant step: logits [V] and the next hidden row [1, 1, N].

        donors: key and value [1, H, rows, D] per layer type, exactly the rows that may be seen.
        """
        embedded = self.target.get_input_embeddings()(torch.tensor([[token]]))
        out = self.assistant(
            inputs_embeds=torch.cat([embedded, torch.from_numpy(hidden)], dim=-1),
            position_ids=torch.tensor([[position]]),
            shared_kv_states={
                f"{name}_attention": tuple(torch.from_numpy(part) for part in pair) for name, pair in donors.items()
            },
        )
        return out.logits[0, 0].float().numpy(), out.last_hidden_state.numpy()
