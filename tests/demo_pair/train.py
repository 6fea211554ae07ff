"""Trains the demo pair: tokenizer, target, then the assistant against the frozen target.

    python -m tests.demo_pair.train [--out FOLDER] [--target-steps N] [--assistant-steps N]

Deterministic for one torch version and thread count; about 45 minutes on one core. Prints
losses; ``tests/export/test_demo_pair.py`` measures acceptance on held-out prompts. Needs the
``export`` extra; nothing at run time imports it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, softmax
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

from slipstream.demo import PAIR
from slipstream.export.synth.synth import byte_fallback_tokenizer

from . import corpus

VOCAB_SIZE = 2048
SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|tool_response>"]
PAD, EOS, BOS = 0, 1, 2
NUM_DRAFT_TOKENS = 4
UNROLLED_STEPS = 4
CHAT_TEMPLATE = """{{ bos_token }}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{ raise_exception('Roles are system, user and assistant, not ' + message['role']) }}
{%- endif -%}
{%- if message['content'] is not string -%}
{{ raise_exception('Only text content is supported') }}
{%- endif -%}
{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
{{- message['content'] | trim }}{{ '<turn|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|turn>model\\n' }}{%- endif -%}
"""

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "initializer_range": 0.125,  # one over the square root of the width: embeddings enter at unit size
}
# Depth and width were chosen by timing random graphs, one thread, microseconds for a step of 1 row, a step of 5 rows
# and 4 drafts: 12 layers of 128: 492, 873, 219; 12 of 96: 428, 735, 213; 12 of 64: 318, 476, 170; 16 of 96: 519, 1001,
# 209; 16 of 64: 409, 665, 179. Width costs more in the 5-row step than depth does, and depth makes drafts cheap.
TARGET = TEXT | {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 16,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 4,
    "num_kv_shared_layers": 8,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 30.0,
}
ASSISTANT = TEXT | {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
NUM_CENTROIDS, CENTROID_TOP_K = 64, 8


def train_tokenizer() -> Tokenizer:
    """Byte-fallback BPE in the form Gemma ships: spaces as ▁, bytes as <0xNN>, <bos> in front."""
    random = Random(1)
    texts = [message["content"] for _ in range(4000) for message in corpus.conversation(random)]
    tokenizer = byte_fallback_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 256, special_tokens=SPECIAL_TOKENS, show_progress=False, initial_alphabet=["\n"]
    )
    tokenizer.train_from_iterator(texts, trainer)
    trained = json.loads(tokenizer.to_str())
    learned = sorted(trained["model"]["vocab"], key=trained["model"]["vocab"].__getitem__)[len(SPECIAL_TOKENS) :]
    names = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    names += [f"<unused{index}>" for index in range(VOCAB_SIZE - len(names))]
    trained["model"]["vocab"] = {name: index for index, name in enumerate(names)}
    trained["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [BOS], "tokens": ["<bos>"]}},
    }
    return Tokenizer.from_str(json.dumps(trained))


def render(messages: list[dict[str, str]]) -> str:
    """What CHAT_TEMPLATE gives, without <bos>."""
    roles = {"user": "user", "assistant": "model"}
    return "".join(f"<|turn>{roles[m['role']]}\n{m['content']}<turn|>\n" for m in messages)


def batches(tokenizer: Tokenizer, seed: int, num_rows: int) -> Iterator[Tensor]:
    """Token rows [num_rows, L] of chained conversations (one in six a raw story), L 192 or 384."""
    random = Random(seed)
    for number in range(1_000_000):
        length, rows = (384, num_rows // 2) if number % 3 == 2 else (192, num_rows)
        yield torch.tensor([_row(tokenizer, random, length) for _ in range(rows)])


def _row(tokenizer: Tokenizer, random: Random, length: int) -> list[int]:
    if random.random() < 1 / 6:
        text = corpus.conversation(random)[1]["content"]
        ids = [*tokenizer.encode(text).ids, EOS]
    else:
        ids = tokenizer.encode(render(corpus.conversation(random))).ids
    while len(ids) < length:
        ids += tokenizer.encode(render(corpus.conversation(random)), add_special_tokens=False).ids
    return ids[:length]


def _training(model: torch.nn.Module, rate: float, num_steps: int) -> Callable[[Tensor], None]:
    """What takes one training step down the gradient of a loss; its rate warms up, then follows a cosine."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = min(100, num_steps // 10 + 1)

    def scale(step: int) -> float:
        return min(1.0, (step + 1) / warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / num_steps)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)

    def take_step(loss: Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return take_step


@torch.no_grad()
def _soften_residuals(model: torch.nn.Module) -> None:
    """Start with branches that add little: at weight 1 the norms behind them drown the token's embedding."""
    for name, parameter in model.named_parameters():
        if "post_" in name and name.endswith("norm.weight"):
            parameter.fill_(0.2)


def train_target(tokenizer: Tokenizer, num_steps: int) -> Gemma4ForCausalLM:
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(Gemma4TextConfig(**TARGET))
    _soften_residuals(model)
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.95 + 0.05 * (layer.layer_idx % 2))
    take_step = _training(model, 2e-3, num_steps)
    start = time.time()
    for step, rows in zip(range(num_steps), batches(tokenizer, 2, 8), strict=False):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        take_step(loss)
        if step % 100 == 0:
            print(f"target {step}/{num_steps} loss {loss.item():.3f} {time.time() - start:.0f} s", flush=True)
    return model.to(torch.bfloat16).float().eval()


def balanced_clusters(table: Tensor, num_clusters: int) -> Tensor:
    """token_ordering: tokens grouped into equal clusters of similar rows, by repeated median splits."""
    groups = [torch.arange(len(table))]
    while len(groups) < num_clusters:
        split = []
        for group in groups:
            rows = table[group] - table[group].mean(0)
            direction = torch.linalg.svd(rows, full_matrices=False).Vh[0]
            split += [group[half] for half in (rows @ direction).argsort().chunk(2)]
        groups = split
    return torch.cat(groups)


def greedy_stories(tokenizer: Tokenizer, target: Gemma4ForCausalLM, count: int) -> list[list[int]]:
    """Prompts with the target's own greedy answer: the text the assistant will meet."""
    random, rows = Random(3), []
    prompts = [render(corpus.conversation(random)[:1]) + "<|turn>model\n" for _ in range(count)]
    encoded = sorted((tokenizer.encode(prompt).ids for prompt in prompts), key=len)
    for start in range(0, count, 128):
        chunk = encoded[start : start + 128]
        width = max(map(len, chunk))
        ids = torch.tensor([[PAD] * (width - len(row)) + row for row in chunk])
        out = target.generate(
            ids,
            attention_mask=(ids != PAD).long(),
            max_new_tokens=190,
            do_sample=False,
            eos_token_id=[EOS, 5],
            pad_token_id=PAD,
        )
        rows += [[token for token in row.tolist() if token != PAD] for row in out]
        print(f"greedy stories {len(rows)}/{count}", flush=True)
    Random(4).shuffle(rows)
    return rows


def _draft_masks(length: int, window: int) -> dict[str, Tensor]:
    """Query at position N sees rows 0..N-1, in sliding layers the last window of them. [1, 1, L, L]"""
    query, held = torch.arange(length).unsqueeze(1), torch.arange(length).unsqueeze(0)
    full = held < query
    sliding = full & (held >= query - window)
    masks = {"full_attention": full, "sliding_attention": sliding}
    for mask in masks.values():
        mask[0, 0] = True  # position 0 has nothing to see and is left out of the loss
    return {name: mask[None, None] for name, mask in masks.items()}


def assistant_loss(assistant: Gemma4AssistantForCausalLM, target: Gemma4ForCausalLM, rows: Tensor) -> list[Tensor]:
    """Loss per unrolled step, against the target's distribution and its argmax."""
    with torch.no_grad():
        out = target.model(input_ids=rows, use_cache=False, return_shared_kv_states=True)
        hidden, kv = out.last_hidden_state, out.shared_kv_states
        logits = torch.tanh(target.lm_head(hidden) / 30) * 30
        embedded = target.model.embed_tokens(rows)
    length = rows.shape[1]
    masks = _draft_masks(length, TEXT["sliding_window"])
    positions = torch.arange(length).unsqueeze(0)
    state = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
    is_real = rows != PAD
    losses = []
    cluster_of = torch.empty(VOCAB_SIZE, dtype=torch.long)
    cluster_of[assistant.masked_embedding.token_ordering] = torch.arange(VOCAB_SIZE) // (VOCAB_SIZE // NUM_CENTROIDS)
    for step in range(UNROLLED_STEPS):
        inputs = torch.cat([embedded.roll(-step, 1), state], dim=-1)
        normed = assistant.model(
            inputs_embeds=assistant.pre_projection(inputs),
            attention_mask=masks,
            position_ids=positions,
            shared_kv_states=kv,
            use_cache=False,
            output_hidden_states=True,  # transformers 5.24 fails without it: it slices absent per-layer inputs
        ).last_hidden_state
        state = assistant.post_projection(normed)
        keep = slice(1, length - step - 1)
        valid = is_real[:, keep] & is_real.roll(-step - 1, 1)[:, keep]
        expected = logits.roll(-step, 1)[:, keep][valid]
        scores = assistant.lm_head(normed[:, keep][valid])
        label = expected.argmax(-1)
        soft = -(softmax(expected, -1) * log_softmax(scores, -1)).sum(-1).mean()
        centroid = cross_entropy(assistant.masked_embedding.centroids(normed[:, keep][valid]), cluster_of[label])
        losses.append(soft + cross_entropy(scores, label) + 0.5 * centroid)
    return losses


def train_assistant(tokenizer: Tokenizer, target: Gemma4ForCausalLM, num_steps: int) -> Gemma4AssistantForCausalLM:
    torch.manual_seed(1)
    target.requires_grad_(False)
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**ASSISTANT),
        backbone_hidden_size=TARGET["hidden_size"],
        use_ordered_embeddings=True,
        num_centroids=NUM_CENTROIDS,
        centroid_intermediate_top_k=CENTROID_TOP_K,
    )
    assistant = Gemma4AssistantForCausalLM(config)
    _soften_residuals(assistant)
    assistant.masked_embedding.token_ordering.copy_(balanced_clusters(target.model.embed_tokens.weight, NUM_CENTROIDS))
    for layer in assistant.model.layers:
        layer.layer_scalar.fill_(0.95)
    take_step = _training(assistant, 3e-3, num_steps)
    stories = greedy_stories(tokenizer, target, 1536)
    random, start = Random(5), time.time()
    for step in range(num_steps):
        chosen = random.sample(stories, 24)
        width = max(map(len, chosen))
        rows = torch.tensor([row + [PAD] * (width - len(row)) for row in chosen])
        losses = assistant_loss(assistant, target, rows)
        take_step(torch.stack(losses).mean())
        if step % 100 == 0:
            shown = " ".join(f"{loss.item():.3f}" for loss in losses)
            print(f"assistant {step}/{num_steps} loss {shown} {time.time() - start:.0f} s", flush=True)
    return assistant.to(torch.bfloat16).float().eval()


def save(out: Path, tokenizer: Tokenizer, target: Gemma4ForCausalLM, assistant: Gemma4AssistantForCausalLM) -> None:
    for name, model in (("target", target), ("assistant", assistant)):
        folder = out / name
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save(str(folder / "tokenizer.json"))
        generation = {"bos_token_id": BOS, "eos_token_id": [EOS, 5, 6], "pad_token_id": PAD}
        if name == "assistant":
            generation["num_assistant_tokens"] = NUM_DRAFT_TOKENS
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": TEXT["max_position_embeddings"],
        }
        for file, content in (("generation_config", generation), ("tokenizer_config", tokenizer_config)):
            (folder / f"{file}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAIR)
    parser.add_argument("--target-steps", type=int, default=3000)
    parser.add_argument("--assistant-steps", type=int, default=900)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = train_tokenizer()
    target = train_target(tokenizer, arguments.target_steps)
    assistant = train_assistant(tokenizer, target, arguments.assistant_steps)
    save(arguments.out, tokenizer, target, assistant)


if __name__ == "__main__":
    main()
