"""How tokens are chosen: small graphs without weights, the same for every bundle.

The law. The candidates of a row (the largest logits of the vocabulary, descending) are filtered as transformers does:
logits / temperature, the top_k largest, the fewest of those whose probabilities reach top_p, those of at least min_p of
the first one's probability. Of what is left the row takes the candidate with the largest

    logit + temperature * noise,    noise = -log(-log(u)),    u = hash(seed, position, token) in (0, 1)

which draws each with its probability, softmax(logit / temperature) over what is left (Gumbel-max: the noise is
Gumbel's). At temperature 0 it is the first candidate, as in greedy decoding. u has 23 bits: what is less likely than
some 1e-7 is never drawn.

The position is the absolute index of the token that is drawn. Whoever draws a token of a sequence therefore meets the
same noise, in a prefill, a plain step, a verified row, after a rewind: drafted text equals plain text of the same seed.
The assistant draws its drafts with the noise that the target will have, and so mostly the target's own token: with a
chance of at least (1 - TV) / (1 + TV), TV the total variation between the two (Daliri, Musco, Suresh, "Coupling without
communication and drafter-invariant speculative decoding", 2024). Sharing the noise is right because a draft is accepted
if and only if it is the token that the target draws itself.

The hash is x -> x^5 modulo 2^31 - 1, a permutation, in rounds between which seed, position and token are added: int64
with Mul, Add, Mod and Div alone, which ONNX Runtime and both TensorRT take. Its integers are the same everywhere.

``choose_greedy``, ``choose_sampled``: the target's own tokens, accepted drafts and the next round's state, from its
logits. ``choose_processed``: the same over processed logits, with penalties, biases and masks, and log-probabilities of
the model's own logits; what is forbidden has FORBIDDEN added. ``choose_full``: the same with any top_k. ``draw``: a
draft with one more token, from the assistant's candidates. ``runtime/bundle/graph_io.py`` has their inputs and outputs.
"""

NUM_CANDIDATES = 64  # of a row, from which tokens are drawn: Gemma's default top-k; bundles have a larger vocabulary
FORBIDDEN = -1.0e30  # as a bias: below every logit, and finite when two are added
