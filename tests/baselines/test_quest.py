"""Quest against a literal reading of section 3.3 of https://arxiv.org/abs/2406.10774."""

import pytest
import torch
from retrieval_cases import GROUP, NUM_KV_HEADS, build_layers, exact_entries, feed, literal_attention, make_case

from kvcore.budget import UnreachableBudgetError
from kvcore.method import build_method
from kvcore.tiny import build_tiny


def page_score(case, head, token, page):
    """Mean over the group of sum_i max(q_i M_i, q_i m_i)."""
    total = 0.0
    for query in case.queries[head * GROUP : (head + 1) * GROUP, token]:
        for channel, component in enumerate(query.tolist()):
            column = case.keys[head, page, channel].tolist()
            total += max(component * max(column), component * min(column)) / GROUP
    return total


def literal_quest(case, token, sinks, window, count, page_size):
    """Chosen tokens per KV head, and the output."""
    window = list(range(token + 1 - window, token + 1))
    middle = list(range(sinks, window[0]))
    pages = [middle[start : start + page_size] for start in range(0, len(middle), page_size)]
    chosen = []
    for head in range(NUM_KV_HEADS):
        ranked = sorted(pages, key=lambda page, head=head: -page_score(case, head, token, page))
        chosen.append([t for page in ranked for t in page][:count])
    entries = [exact_entries(case, h, [*range(sinks), *chosen[h], *window]) for h in range(NUM_KV_HEADS)]
    return chosen, literal_attention(case, token, entries)


def test_pages_and_outputs_equal_the_paper_formula():
    case = make_case(prompt=100, steps=14)
    layer = build_layers("quest", 0.3, [case], dense_layers=0, page_size=8)
    size = int(layer.unit_tokens[0])
    assert size == 8
    for offset in range(14):
        output = feed(layer, [case], offset)
        token = case.prompt + offset
        split = layer.planner.split(token + 1, size)
        sinks, window = int(layer.resident.sink_counts[0]), int(layer.resident.counts[0])
        assert window <= split.window
        # a row's page grid starts behind its sinks and never moves
        chosen, expected = literal_quest(case, token, sinks, window, split.fetched, size)
        assert split.fetched % size == 0
        query = case.queries[None, :, token : token + 1]
        slots, live = layer.attended_slots(query, 0.25)
        for head in range(NUM_KV_HEADS):
            picked = (slots[0, head][live[0, head]] + sinks).tolist()
            assert sorted(picked) == sorted(chosen[head])
        torch.testing.assert_close(output[0, :, 0], expected, atol=1e-4, rtol=1e-4)


def test_dense_layers_attend_to_everything():
    case = make_case(prompt=90, steps=4)
    layer = build_layers("quest", 0.3, [case], layer=0)
    for offset in range(4):
        token = case.prompt + offset
        entries = [exact_entries(case, head, list(range(token + 1))) for head in range(NUM_KV_HEADS)]
        output = feed(layer, [case], offset)[0, :, 0]
        torch.testing.assert_close(output, literal_attention(case, token, entries), atol=1e-4, rtol=1e-4)
        assert layer.attended == token + 1


def test_pages_kept_on_the_device_cost_no_traffic():
    case = make_case(prompt=150, steps=3)
    layer = build_layers("quest", 0.3, [case], dense_layers=0, offload=False)
    feed(layer, [case], 0)
    assert layer.fetched_bytes == 0
    assert layer.attended == pytest.approx(0.3 * 151, abs=16)


def test_an_unreachable_budget_names_the_smallest_one():
    model, _ = build_tiny()
    with pytest.raises(UnreachableBudgetError, match=r"the smallest it can reach here is 0.004") as error:
        build_method("quest").new_cache(model, budget=0.002)
    assert 0.002 < error.value.smallest < 0.01


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="page_size must be >= 1; received 0"):
        build_method("quest", page_size=0)
    with pytest.raises(ValueError, match=r"fetch_share must be in \(0, 1\]; received 1.5"):
        build_method("quest", fetch_share=1.5)
