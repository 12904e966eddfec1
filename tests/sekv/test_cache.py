"""SeKVCache on tiny random models: exact when everything is expanded, causal, the same with and without offload.

Legend: n prompt tokens.
"""

import pytest
import torch

import sekv
from kvcore.attention import prefill
from kvcore.budget import UnreachableBudgetError
from kvcore.method import build_method
from kvcore.tiny import build_tiny

SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.3}
# everything is zoomed into, in the model's dtype
EXACT = {"row_bits": 0, "tau": 1e-30, "max_zoom": 1.0, "checkpoint": "none"}
FORMS = {
    "sketch": {},
    "second_order": {"summary": "second_order", "maps": "none"},
    "mean": {"summary": "mean", "maps": "none"},
    "published": {
        "summary": "mean",
        "maps": "tied",
        "decision": "probability",
        "tau": 0.05,
        "weighted_summary": True,
        "mass_weighted": False,
    },
}


@pytest.fixture(scope="module", autouse=True)
def _inference():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model():
    return build_tiny(eos_token_id=None, **SMALL)[0]


def token_ids(rows, length, seed=0):
    return torch.randint(5, 300, (rows, length), generator=torch.Generator().manual_seed(seed))


def decoded(model, ids, more, budget=0.5, step=1, **options):
    """Cache and logits of `more` fed after the prompt `ids`."""
    cache = build_method("sekv", **options).new_cache(model, budget)
    prefill(model, cache, ids)
    parts = [model(input_ids=part, cache=cache).logits for part in more.split(step, dim=1)]
    return cache, torch.cat(parts, dim=1)


@pytest.mark.parametrize("form", [f for f in FORMS if f != "published"])
def test_everything_expanded_equals_the_full_cache(model, form):
    ids, more = token_ids(1, 160), token_ids(1, 20, 1)
    cache, logits = decoded(model, ids, more, budget=0.99, **EXACT, **FORMS[form])
    full = model(input_ids=torch.cat([ids, more], dim=1)).logits[:, 160:]
    torch.testing.assert_close(logits, full, atol=2e-4, rtol=2e-4)
    assert cache.ledger.h2d_bytes > 0 or cache.zoom_statistics().hit_rate == 1.0


@pytest.mark.parametrize("form", FORMS)
def test_every_form_decodes_within_its_budget_and_reports(model, form):
    cache, logits = decoded(model, token_ids(1, 400), token_ids(1, 24, 1), budget=0.4, step=6, **FORMS[form])
    assert logits.isfinite().all()
    assert 0.3 < cache.ledger.device_share <= 0.4
    zoom = cache.zoom_statistics()
    assert len(zoom.frequency) == 2 and len(zoom.frequency[0]) == 8
    assert zoom.moved_bytes <= zoom.zoomed_bytes
    assert cache.ledger.h2d_bytes == zoom.moved_bytes
    assert (cache.ledger.h2d_stall_seconds > 0) == (zoom.moved_bytes > 0)
    assert zoom.cache_bytes > 0


def test_a6_offload_changes_nothing(model):
    ids, more = token_ids(2, 200), token_ids(2, 30, 1)
    _, on = decoded(model, ids, more)
    for options in ({"offload": False}, {"pin": False}):
        torch.testing.assert_close(decoded(model, ids, more, **options)[1], on, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", [f for f in FORMS if f != "published"])
def test_several_tokens_at_once_equal_one_by_one_where_all_is_zoomed_into(model, form):
    ids, more, options = token_ids(1, 200), token_ids(1, 40, 1), EXACT | FORMS[form]
    several = decoded(model, ids, more, budget=0.99, step=20, **options)[1]
    torch.testing.assert_close(several, decoded(model, ids, more, budget=0.99, **options)[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_several_tokens_at_once_are_as_close_to_the_full_cache_as_one_by_one(model, form):
    ids, more = token_ids(1, 300), token_ids(1, 60, 1)
    full = model(input_ids=torch.cat([ids, more], dim=1)).logits[:, 300:].log_softmax(-1)

    def divergence(step):
        logits = decoded(model, ids, more, budget=0.4, step=step, **FORMS[form])[1].log_softmax(-1)
        return float((full.exp() * (full - logits)).sum(-1).mean())

    single = divergence(1)
    assert 0 < divergence(20) < 1.25 * single


@pytest.mark.parametrize("form", FORMS)
def test_no_future_token_reaches_a_query(model, form):
    ids, more = token_ids(1, 150), token_ids(1, 24, 1)
    changed = more.clone()
    changed[:, 12:] = token_ids(1, 12, 2)
    before = decoded(model, ids, more, step=24, **FORMS[form])[1][:, :12]
    assert torch.equal(decoded(model, ids, changed, step=24, **FORMS[form])[1][:, :12], before)


@pytest.mark.parametrize("form", FORMS)
def test_decoding_with_autograd_enabled_is_the_same(form):
    model = build_tiny(eos_token_id=None, **SMALL)[0]
    ids, more = token_ids(1, 120), token_ids(1, 40, 1)
    expected = decoded(model, ids, more, budget=0.4, **FORMS[form])[1]
    with torch.inference_mode(False), torch.enable_grad():
        fresh = build_tiny(eos_token_id=None, **SMALL)[0]
        ids, more = token_ids(1, 120), token_ids(1, 40, 1)
        cache, logits = decoded(fresh, ids, more, budget=0.4, **FORMS[form])
    assert torch.equal(logits.detach(), expected)
    assert not any(tensor.requires_grad for state in cache.stored_states() for tensor in state.tensors())


def test_chunked_prefill_equals_whole(model):
    ids, more = token_ids(1, 120), token_ids(1, 8, 1)
    _, whole = decoded(model, ids, more, step=8)
    cache = build_method("sekv").new_cache(model, 0.5)
    prefill(model, cache, ids, chunk_size=50)
    torch.testing.assert_close(model(input_ids=more, cache=cache).logits, whole, atol=1e-4, rtol=1e-4)


def test_bf16_stays_close_to_fp32(model):
    half, _ = build_tiny(dtype=torch.bfloat16, eos_token_id=None, **SMALL)
    ids, more = token_ids(1, 200), token_ids(1, 8, 1)
    _, low = decoded(half, ids, more)
    reference = half(input_ids=torch.cat([ids, more], dim=1)).logits[:, 200:]
    assert low.dtype == torch.bfloat16 and low.isfinite().all()
    assert float((low - reference).float().norm() / reference.float().norm()) < 0.5


@pytest.mark.parametrize("name", ["identical", "one_token", "repeated_pair", "code_like"])
@pytest.mark.parametrize("form", ["sketch", "second_order", "published"])
def test_odd_texts(model, name, form):
    texts = {
        "identical": torch.full((1, 120), 7),
        "one_token": torch.tensor([[9]]),
        "repeated_pair": torch.tensor([[5, 6]]).repeat(1, 70),
        "code_like": token_ids(1, 12).repeat_interleave(10, dim=1),
    }
    _, logits = decoded(model, texts[name], token_ids(1, 12, 1), budget=0.3, **FORMS[form])
    assert logits.isfinite().all()


def test_generated_tokens_become_spans(model):
    cache, _ = decoded(model, token_ids(1, 300), token_ids(1, 120, 1), budget=0.4, step=40)
    layer, spans = cache.layers[0], cache.shared.spans
    assert layer.store.used == spans.span_of_token.shape[1] - 1 == layer.map.sketch.codes.shape[-1]
    assert layer.store.used + layer.window.filled == 420  # every token is on the host or in the window
    assert layer.map.coarse_values.shape[2] == spans.lengths.shape[1]


def fed_row_by_row_lengths(model, cache, more, step):
    """Logits of `more` [rows, tokens] after prompts of unequal lengths."""
    pads, parts = torch.tensor(cache.padding)[:, None], []
    for piece in more.split(step, dim=1):
        positions = cache.logical_length + torch.arange(piece.shape[1])[None] - pads
        mask = (torch.arange(cache.logical_length + piece.shape[1])[None] >= pads).long()
        parts.append(model(input_ids=piece, attention_mask=mask, position_ids=positions, cache=cache).logits)
    return torch.cat(parts, dim=1)


@pytest.fixture(scope="module")
def precise():
    """In fp64: fp32 noise of the prefill may move a token across a threshold, and everything after it."""
    return build_tiny(eos_token_id=None, dtype=torch.float64, **SMALL)[0]


# prompt lengths and budget: blocks of unequal sizes; rows without a map; a cap in tokens
UNEQUAL = {"blocks": ((400, 150, 60, 9), 0.4), "no_map": ((300, 290, 40), 0.25), "cap": ((700, 120, 60), 96)}
# steps of several tokens see the slots of their beginning, and small blocks cut them: equal only with equal blocks
EVEN = ((900, 800, 700), 0.4)
# the sketch's basis is kept in fp16, so its estimates carry noise: that form is compared where all is zoomed into
UNEQUAL_CASES = [
    *((form, {}, *UNEQUAL[case], 1) for form in FORMS for case in UNEQUAL if form != "sketch"),
    *((form, {}, *EVEN, 6) for form in FORMS if form != "sketch"),
    *((form, EXACT, (400, 150, 60, 9), 0.99, step) for form in FORMS for step in (1, 6) if form != "published"),
]


def assert_same_map(cache, row, solo):
    """The row's spans, means and codes, after its spills, are those of the run alone."""
    ours, own = cache.layers[-1].map, solo.layers[-1].map
    tokens, spans = (0, 0) if own is None else (int(own.tokens), int(own.spans))
    assert (int(ours.tokens[row]), int(ours.spans[row])) == (tokens, spans)
    assert int(cache.layers[-1].store.counts[row]) == int(solo.layers[-1].store.counts)
    if own is None:
        return
    torch.testing.assert_close(ours.coarse_values[row, :, :spans], own.coarse_values[0, :, :spans], atol=1e-4, rtol=0)
    for name in ("lengths", "starts"):
        of_row, alone = getattr(cache.shared.spans, name)[row], getattr(solo.shared.spans, name)[0]
        assert torch.equal(of_row[:spans], alone[:spans])
    if hasattr(own, "sketch"):
        differ = ours.sketch.codes[row, ..., :tokens] != own.sketch.codes[0, ..., :tokens]
        assert float(differ.float().mean()) < 1e-2


@pytest.mark.parametrize(("form", "more_options", "lengths", "budget", "step"), UNEQUAL_CASES)
def test_rows_of_a_very_unequal_batch_equal_runs_alone(precise, form, more_options, lengths, budget, step):
    model = precise
    # a code of an 8-bit row may move by one level
    options = {**FORMS[form], "row_bits": 0, "checkpoint": "none", **more_options}
    prompts, more = [token_ids(1, n, n) for n in lengths], token_ids(len(lengths), 66, 1)
    padded = torch.cat([torch.nn.functional.pad(p, (max(lengths) - p.shape[1], 0)) for p in prompts])
    mask = (torch.arange(max(lengths))[None] >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    cache = build_method("sekv", **options).new_cache(model, budget)
    prefill(model, cache, padded, mask)
    blocks = {plan.block for plan in cache.layers[0].plans}
    logits = fed_row_by_row_lengths(model, cache, more, step)
    assert len(blocks) > 1 or isinstance(budget, int) or lengths == EVEN[0]
    for row, prompt in enumerate(prompts):
        solo, alone = decoded(model, prompt, more[row : row + 1], budget, step, **options)
        assert solo.layers[0].blocks >= 2
        torch.testing.assert_close(logits[row], alone[0], atol=1e-3, rtol=1e-3, msg=lambda m, row=row: f"{row}: {m}")
        assert_same_map(cache, row, solo)


def test_low_rank_factors_travel(model):
    published = {**FORMS["published"], "row_bits": 0, "max_rank": 2, "gates": True, "min_span": 16, "span_tokens": 32}
    cache, logits = decoded(model, token_ids(1, 400), token_ids(1, 6, 1), budget=0.5, **published)
    assert logits.isfinite().all()
    assert 1 <= cache.zoom_statistics().effective_rank <= 2


def test_published_thresholds_name_the_smallest_reachable_budget(model):
    method = build_method("sekv", segmentation="paper", row_bits=0, **FORMS["published"])
    cache = method.new_cache(model, 0.05)
    with pytest.raises(UnreachableBudgetError, match="smallest it can reach"):
        prefill(model, cache, token_ids(1, 300))


def test_bad_options_name_the_rule():
    for options, message in (
        ({"sketch_bits": 3}, "sketch_bits must be one of"),
        ({"summary": "sketch", "maps": "tied"}, "needs decision=mass"),
        ({"summary": "sketchy"}, "summary must be one of"),
        ({"gates": True}, "needs factors to prune"),
        ({"max_zoom": 2.0}, r"max_zoom must be in \[0, 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            sekv.SeKV(**options)


def test_h1_values_that_are_not_finite_name_the_layer(model):
    cache = build_method("sekv").new_cache(model, 0.5)
    weight = model.model.layers[1].self_attn.k_proj.weight
    kept = weight.clone()
    weight.fill_(float("nan"))
    try:
        with pytest.raises(ValueError, match="layer 1, keys"):
            prefill(model, cache, token_ids(1, 50))
    finally:
        weight.copy_(kept)
