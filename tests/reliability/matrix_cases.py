"""What the contract matrix checks: one function per feature, on one method, architecture and dtype.

Every check holds in every dtype, so it compares runs of equal shapes: those are the same to the bit.

Legend: n prompt tokens, q tokens of a decode step.
"""

import copy
import functools

import pytest
import torch
from contract_cases import fed, generate, left_padded, prefilled, stored, token_ids

from kvcore.attention import prefill
from kvcore.method import build_method
from kvcore.tiny import build_tiny

# name -> transformers' model type and what differs from SMALL; SmolLM is a llama with tied embeddings
SMOLLM = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
ARCHITECTURES = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "smollm": ("llama", SMOLLM),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPT = 48
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "eos_token_id": None,
}
# chunks and one forward differ by rounding in the prefill; after it also by a code's step or a choice between near ties
PREFILL_TOLERANCE = {"fp32": 1e-4, "bf16": 0.25}
# a beam's own score against the same tokens fed again, in nats over the whole answer
SCORE_TOLERANCE = {"fp32": 1e-3, "bf16": 0.1}


class Stand:
    """One method on one model, with one prefill that every feature copies."""

    def __init__(self, name: str, architecture: str, dtype: str) -> None:
        self.name, self.architecture, self.dtype = name, architecture, dtype
        self.model = model_of(architecture, dtype)
        self.ids = token_ids(1, PROMPT)
        self.base, self.logits = prefilled(self.model, name, self.ids)
        self.budget = self.base.budget.value

    def copy(self):
        return copy.deepcopy(self.base)

    def fresh(self, budget: float | None = None):
        return build_method(self.name).new_cache(self.model, self.budget if budget is None else budget)

    def asked(self, question: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.ids.expand(len(question), -1), question], dim=1)


@functools.cache
def model_of(architecture: str, dtype: str, window: int | None = None):
    model_type, different = ARCHITECTURES[architecture]
    options = {**SMALL, **different}
    if window is not None:
        options |= {"sliding_window": window}
        if architecture.startswith("qwen"):
            options |= {"use_sliding_window": True, "max_window_layers": 0}
    return build_tiny(dtype=DTYPES[dtype], model_type=model_type, **options)[0]


@functools.cache
def stand_of(name: str, architecture: str, dtype: str) -> Stand:
    return Stand(name, architecture, dtype)


def by_hand(stand: Stand, cache, question: torch.Tensor, new: int) -> torch.Tensor:
    """Greedy tokens [1, new] of a loop over single forwards."""
    logits, tokens = fed(stand.model, cache, question, step=question.shape[1]), []
    for _ in range(new):
        tokens.append(logits[:, -1:].argmax(-1))
        logits = fed(stand.model, cache, tokens[-1]) if len(tokens) < new else logits
    assert logits.isfinite().all()
    return torch.cat(tokens, dim=1)


def check_greedy(stand: Stand) -> None:
    question = token_ids(1, 3, 1)
    out = generate(stand.model, stand.asked(question), stand.copy(), max_new_tokens=6)
    assert torch.equal(out[:, PROMPT + 3 :], by_hand(stand, stand.copy(), question, 6))


def check_sampling(stand: Stand) -> None:
    ids = stand.asked(token_ids(1, 3, 1))
    greedy = generate(stand.model, ids, stand.copy(), max_new_tokens=6)
    assert torch.equal(generate(stand.model, ids, stand.copy(), max_new_tokens=6, do_sample=True, top_k=1), greedy)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(generate(stand.model, ids, stand.copy(), max_new_tokens=6, do_sample=True, temperature=2.0))
    assert torch.equal(*drawn)


def check_beam(stand: Stand) -> None:
    """The score of the best beam is that of its own tokens: no beam continues another's cache."""
    question, cache, again = token_ids(1, 3, 1), stand.copy(), stand.copy()
    cache.batch_repeat_interleave(3)
    again.batch_repeat_interleave(3)
    beams = {"num_beams": 3, "length_penalty": 0.0, "return_dict_in_generate": True, "output_scores": True}
    out = generate(stand.model, stand.asked(question), cache, max_new_tokens=6, **beams)
    answer = out.sequences[:, PROMPT + 3 :]
    first = fed(stand.model, again, question.expand(3, -1), step=3)[:1, -1:]
    # the same shape as in the search, so that the numbers are the same
    later = fed(stand.model, again, answer[:, :-1].expand(3, -1))[:1]
    logprobs = torch.cat([first, later], dim=1).float().log_softmax(-1)
    score = logprobs.gather(-1, answer[..., None]).sum()
    assert abs(float(score - out.sequences_scores[0])) <= SCORE_TOLERANCE[stand.dtype]


def check_assisted(stand: Stand) -> None:
    ids = stand.asked(token_ids(1, 3, 1).repeat(1, 3))
    plain, refusal = generate(stand.model, ids, stand.copy()), ""
    try:
        assert torch.equal(generate(stand.model, ids, stand.copy(), prompt_lookup_num_tokens=3), plain)
    except NotImplementedError as error:
        refusal = str(error)
    assert not refusal or (f"'{stand.name}'" in refusal and "assisted or prompt-lookup" in refusal)


def check_padded(stand: Stand) -> None:
    """Rows do not see each other's text nor their padding."""
    more = token_ids(2, 4, 5)
    found = []
    for seed, filler in ((1, 0), (2, 7)):
        ids, mask = left_padded([token_ids(1, PROMPT, 9)[0], token_ids(1, PROMPT - 17, seed)[0]])
        ids[mask == 0] = filler
        cache = stand.fresh()
        logits = prefill(stand.model, cache, ids, mask)
        assert cache.padding == [0, 17] and cache.row_tokens() == [PROMPT, PROMPT - 17]
        found.append((logits, fed(stand.model, cache, more, step=2)))
        assert all(part.isfinite().all() for part in found[-1])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one[0], other[0])
        assert not torch.equal(one[1], other[1])
    ids, mask = left_padded([token_ids(1, PROMPT, 9)[0], token_ids(1, PROMPT - 17, 1)[0]])
    ids[mask == 0] = 11
    cache = stand.fresh()
    assert torch.equal(prefill(stand.model, cache, ids, mask), found[0][0])
    assert torch.equal(fed(stand.model, cache, more, step=2), found[0][1])


def check_chunked(stand: Stand) -> None:
    cache = stand.fresh()
    logits = prefill(stand.model, cache, stand.ids, chunk_size=13)
    tolerance = PREFILL_TOLERANCE[stand.dtype]
    torch.testing.assert_close(logits, stand.logits, atol=tolerance, rtol=tolerance)
    found, expected = cache.memory_bytes(), stand.base.memory_bytes()
    if stand.name == "kvquant" and not torch.equal(logits, stand.logits):
        # how many entries lie outside its ranges depends on their last bits; each is a place and a value
        entry = 4 + stand.logits.element_size()
        most = sum(layer.settings[0].bytes(PROMPT, cache.spec) for layer in cache.layers) + 64  # lengths
        assert (found[0] - expected[0]) % entry == 0 and max(found[0], expected[0]) <= most
        found, expected = found[1:], expected[1:]
    assert found == expected
    assert cache.logical_length == PROMPT and not cache._staged
    by_generate = build_method(stand.name).new_cache(stand.model, stand.budget, prefill_tokens=PROMPT)
    out = generate(stand.model, stand.ids, by_generate, max_new_tokens=4, prefill_chunk_size=13)
    expected = logits.argmax(-1, keepdim=True)
    assert torch.equal(out[:, PROMPT : PROMPT + 1], expected)
    rest = torch.cat([fed(stand.model, cache, token) for token in out[:, PROMPT:-1].split(1, dim=1)], dim=1)
    assert torch.equal(rest.argmax(-1), out[:, PROMPT + 1 :])


def check_two_turns(stand: Stand) -> None:
    cache, hand = stand.copy(), stand.copy()
    first, second = token_ids(1, 3, 1), token_ids(1, 4, 2)
    said = generate(stand.model, stand.asked(first), cache, max_new_tokens=4)
    answer = by_hand(stand, hand, first, 4)
    assert torch.equal(said[:, PROMPT + 3 :], answer)
    # the last token of an answer has not been read yet: it comes first in the next turn
    out = generate(stand.model, torch.cat([said, second], dim=1), cache, max_new_tokens=4)
    assert torch.equal(out[:, -4:], by_hand(stand, hand, torch.cat([answer[:, -1:], second], dim=1), 4))
    assert cache.logical_length == hand.logical_length == PROMPT + 3 + 4 + 4 + 3


def check_many_questions(stand: Stand) -> None:
    before = [tensor.clone() for tensor in stored(stand.base)]
    questions = [token_ids(1, 3, 1), token_ids(1, 5, 2), token_ids(1, 3, 1)]
    answers = [generate(stand.model, stand.asked(q), stand.copy(), max_new_tokens=5) for q in questions]
    assert torch.equal(answers[0], answers[2])
    own = stand.fresh()
    prefill(stand.model, own, stand.ids)
    assert torch.equal(generate(stand.model, stand.asked(questions[1]), own, max_new_tokens=5), answers[1])
    assert all(torch.equal(a, b) for a, b in zip(before, stored(stand.base), strict=True))


def check_crop(stand: Stand) -> None:
    """Cropping is exact or refused by name, and a refusal leaves the cache as it was."""
    cache, more = stand.copy(), token_ids(1, 4, 2)
    fed(stand.model, cache, token_ids(1, 3, 1), step=3)
    twin, refusal = copy.deepcopy(cache), ""
    try:
        cache.crop(-3)
    except NotImplementedError as error:
        refusal = str(error)
    removed = not refusal
    assert removed or f"'{stand.name}' does not support crop" in refusal
    expected = fed(stand.model, stand.copy() if removed else twin, more)
    assert cache.logical_length == PROMPT + (0 if removed else 3)
    assert torch.equal(fed(stand.model, cache, more), expected)


def check_window(stand: Stand) -> None:
    """Sliding-window layers under a budget are refused by name; llama has none and keeps its full attention."""
    model = model_of(stand.architecture, stand.dtype, window=16)
    if model.config.model_type == "llama":
        assert build_method(stand.name).new_cache(model, stand.budget).spec.sliding_windows == (None, None)
        return
    if not build_method(stand.name).ignores_budget:
        with pytest.raises(NotImplementedError, match=rf"'{stand.name}'.*sliding-window.*16.*budget=1\.0"):
            build_method(stand.name).new_cache(model, stand.budget)
    cache = build_method(stand.name).new_cache(model, 1.0)
    logits = prefill(model, cache, stand.ids)
    full = build_method("full").new_cache(model, 1.0)
    assert torch.equal(prefill(model, full, stand.ids), logits)
    more = token_ids(1, 4, 3)
    assert torch.equal(fed(model, cache, more, step=2), fed(model, full, more, step=2))


def check_several_tokens(stand: Stand) -> None:
    """A step of several tokens is causal: what comes later in it changes nothing before."""
    one, other = token_ids(1, 6, 1), token_ids(1, 6, 1)
    other[:, 3:] = token_ids(1, 3, 8)
    first, second = (fed(stand.model, stand.copy(), ids, step=6) for ids in (one, other))
    assert first.isfinite().all() and second.isfinite().all()
    assert torch.equal(first[:, :3], second[:, :3])
    assert not torch.equal(first[:, 3:], second[:, 3:])


FEATURES = {
    "greedy": check_greedy,
    "sampling": check_sampling,
    "beam": check_beam,
    "assisted": check_assisted,
    "padded": check_padded,
    "chunked": check_chunked,
    "two_turns": check_two_turns,
    "many_questions": check_many_questions,
    "crop": check_crop,
    "window": check_window,
    "q_len": check_several_tokens,
}
