"""transformers' own models as plain functions of token ids: the reference of every verification."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .opening import open_pair

Array = npt.NDArray[Any]


class Reference:
    """The checkpoints in transformers, as plain functions of token ids. Needs the weights in memory."""

    def __init__(self, target: Path, assistant: Path, dtype: str) -> None:
        import transformers

        pair = open_pair(target, assistant)  # the same checks and messages as an export
        self.folders = target, assistant
        self.window = pair.target_config.sliding_window
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        load = {"dtype": getattr(torch, dtype), "local_files_only": True}
        self.target: Any = transformers.AutoModelForCausalLM.from_pretrained(target, **load).eval()
        self.assistant: Any = transformers.AutoModelForCausalLM.from_pretrained(assistant, **load).eval()
        wanted = self.target.generation_config
        self.suppress_tokens: list[int] = wanted.suppress_tokens or []
        self.generation = transformers.GenerationConfig(  # of the checkpoint's settings only what greedy text obeys
            do_sample=False, pad_token_id=0, suppress_tokens=self.suppress_tokens or None
        )
        self.target.generation_config = transformers.GenerationConfig()

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
        window = self.window
        donors = {
            name.removesuffix("_attention"): tuple(
                part[:, :, -window if name.startswith("sliding") else 0 :].numpy() for part in pair
            )
            for name, pair in out.shared_kv_states.items()
        }
        token, state, rows = ids[-1], out.last_hidden_state[:, -1:].numpy(), []
        for _ in range(num_steps):
            logits, state = self.draft_step(token, state, len(ids) - 1 + position_offset, donors)
            rows.append(logits)
            token = int(logits.argmax())
        return rows

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
