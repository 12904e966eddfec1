"""Factors, rows, sketches, summaries and slots: exact where they promise it, finite where it is hard."""

import pytest
import torch

from kvcore.transfer import HostLink
from sekv.attention import Part, mixed_attention, span_parts, token_parts
from sekv.factors import FactorStore, factorise
from sekv.lowrank import rows_are_cheaper, truncated_svd
from sekv.routing import Router, RouterConfig, straight_through
from sekv.rows import RowCodec, Rows, make_store
from sekv.sketch import Sketch, SketchForm
from sekv.slots import EMPTY, PINNED, Slots
from sekv.summary import span_directions, span_means


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SPANS = {
    "random": randn(2, 16, 8),
    "identical": randn(2, 1, 8).expand(2, 16, 8),
    "rank2": randn(2, 16, 2) @ randn(2, 2, 8, seed=1),
    "zero": torch.zeros(2, 16, 8),
}


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_h1_svd_is_exact_at_full_rank_and_finite(span, dtype):
    matrix = SPANS[span].to(dtype)
    factors = truncated_svd(matrix, 8)
    torch.testing.assert_close(factors.rows(), matrix.float(), atol=1e-5, rtol=1e-5)
    gates = torch.full_like(factors.sigma, 0.5).requires_grad_()
    factors.rows(gates).sum().backward()
    assert gates.grad.isfinite().all()


def test_randomised_svd_finds_the_leading_components():
    matrix = randn(3, 200, 4) @ randn(3, 4, 64, seed=1) + 1e-3 * randn(3, 200, 64, seed=2)
    factors = truncated_svd(matrix, 4)
    assert factors.left.shape == (3, 200, 4)
    assert float((factors.rows() - matrix).norm() / matrix.norm()) < 2e-3
    assert torch.equal(truncated_svd(matrix, 4).left, factors.left)  # seeded


def test_h1_values_that_are_not_finite_name_layer_and_span():
    matrix = randn(2, 5, 16, 8)
    matrix[1, 3, 2, 2] = float("nan")
    with pytest.raises(ValueError, match=r"layer 7.*index \[1, 3\]"):
        truncated_svd(matrix, 4, where="layer 7")


def test_raw_rows_where_factors_are_larger():
    assert rows_are_cheaper(40, 128, 32)
    assert not rows_are_cheaper(200, 64, 8)


def test_factor_store_returns_full_rank_rows_and_moves_less_when_gates_close():
    data = randn(1, 2, 60, 16)
    spans = torch.cat([torch.arange(60) // 20]).clamp_max(2)[None]
    config = RouterConfig(num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, max_rank=4, gates=True)
    router = Router(config)
    low = torch.cat([randn(1, 2, 60, 3) @ randn(1, 2, 3, 8, seed=s) for s in (1, 2)], dim=-1)
    store = make_store(Rows(low, None), True, torch.tensor([60]))
    factored, ranks = factorise(store, spans, 3, 4, Router(_ungated(config)), 0, "layer 0")
    assert isinstance(factored, FactorStore) and int(ranks.max()) <= 4
    head, token = torch.tensor([0, 1, 1]), torch.tensor([5, 59, 21])
    rows, moved = factored.request(head, token, HostLink()).arrive()
    torch.testing.assert_close(rows.data, low[0, head, token], atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        router.gate.output.bias.copy_(torch.tensor([4.0, -40, -40, -40]))
    gated, kept = factorise(store, spans, 3, 4, router, 0, "layer 0")
    assert int(kept.max()) == 1
    assert gated.request(head, token, HostLink()).arrive()[1] < moved
    raw, _ = factorise(make_store(Rows(data, None), True, torch.tensor([60])), spans, 3, 16, router, 0, "layer 0")
    assert not isinstance(raw, FactorStore)  # 20 tokens of 8 channels: factors would be larger


def _ungated(config):
    return RouterConfig(**{**config.__dict__, "gates": False})


def test_eight_bit_rows_are_close_and_exact_rows_exact():
    keys, values = randn(1, 2, 50, 16), randn(1, 2, 50, 16, seed=1)
    codec = RowCodec(keys, 8)
    rows = codec.encode(keys, values)
    assert rows.data.dtype == torch.int8
    back = codec.decode(rows)
    assert float((back[0] - keys).abs().max()) < float(keys.abs().max()) / 90
    assert float((back[1] - values).abs().max()) < float(values.abs().max()) / 120
    exact = RowCodec(keys, 0)
    assert torch.equal(exact.decode(exact.encode(keys, values))[0], keys)


@pytest.mark.parametrize(("fine", "bits"), [(12, 4), (12, 8), (4, 4), (0, 4), (4, 8), (12, 2)])
def test_sketch_logits_equal_those_of_the_decoded_form(fine, bits):
    keys, query = randn(2, 2, 70, 16), randn(2, 4, 3, 16, seed=1)
    visible = torch.arange(70) < torch.tensor([[70], [40]])
    moment = query.unflatten(1, (2, 2)).flatten(2, 3)
    sketch, _ = Sketch.fit(keys, visible, moment.mT @ moment, SketchForm.fitting(12, fine, bits))
    summary = sketch.summary(torch.zeros(2, 70, dtype=torch.long), torch.ones(2, 1))
    from sekv.routing import token_logits

    torch.testing.assert_close(sketch.logits(query), token_logits(query, summary), atol=1e-4, rtol=1e-4)


def test_sketch_codes_are_the_nearest_levels_and_take_the_stated_bytes():
    keys, visible = randn(1, 2, 60, 16), torch.ones(1, 60, dtype=torch.bool)
    for fine, bits, token_bytes in ((4, 4, 4), (12, 4, 6), (4, 8, 6), (0, 4, 3)):
        form = SketchForm.fitting(12, fine, bits)
        sketch, analysis = Sketch.fit(keys, visible, None, form)
        assert form.token_bytes == token_bytes == sketch.codes.shape[2]
        # the literal form: every coordinate to the nearest of its levels
        wanted = (keys - sketch.centre.unsqueeze(2)) @ analysis.mT
        levels = torch.tensor([2**bits - 1] * form.fine + [3] * (12 - form.fine))
        nearest = ((wanted - sketch.low.unsqueeze(2)) / sketch.step.unsqueeze(2)).round().clamp_min(0).minimum(levels)
        expected = sketch.low.unsqueeze(2) + nearest * sketch.step.unsqueeze(2)
        torch.testing.assert_close(sketch.coordinates(), expected, atol=1e-5, rtol=1e-5)


def test_sketch_forms_leave_whole_bytes_to_the_coarse_part():
    for dims in range(2, 66, 2):
        for fine in range(0, 66, 2):
            form = SketchForm.fitting(dims, fine, 4)
            assert form.fine >= min(fine, dims) and (form.dims - form.fine) % 4 == 0 and form.fine % 2 == 0
            assert 8 * form.token_bytes == 4 * form.fine + 2 * (form.dims - form.fine)


def test_full_sketch_estimates_logits_well():
    keys, query = randn(1, 2, 200, 16), randn(1, 4, 1, 16, seed=1)
    sketch, _ = Sketch.fit(keys, torch.ones(1, 200, dtype=torch.bool), None, SketchForm(16, 16, 8))
    exact = (query.unflatten(1, (2, 2)).flatten(2, 3) @ keys.mT).view(1, 4, 1, 200)
    assert float((sketch.logits(query) - exact).abs().max()) < 0.2


def test_weighted_means_fall_back_to_uniform_where_weights_vanish():
    rows, span = randn(1, 1, 6, 4), torch.tensor([[0, 0, 0, 1, 1, 2]])
    weights = torch.tensor([[0.0, 1.0, 3.0, 0.0, 0.0, 5.0]])
    means = span_means(rows, span, 2, weights)
    torch.testing.assert_close(means[0, 0, 0], (rows[0, 0, 1] + 3 * rows[0, 0, 2]) / 4)
    torch.testing.assert_close(means[0, 0, 1], rows[0, 0, 3:5].mean(0))


def test_second_order_term_estimates_the_log_mass():
    keys, span = randn(1, 1, 64, 8) * 0.3, (torch.arange(64) // 32)[None]
    mean = span_means(keys, span, 2)
    directions = span_directions(keys, span, mean, 8)
    query = randn(1, 1, 1, 8, seed=3)
    exact = torch.logsumexp((query @ keys.mT).view(2, 32), dim=-1)
    first = (query @ mean.mT).flatten() + torch.tensor(32.0).log()
    second = first + 0.5 * (directions[0, 0] @ query.flatten()).square().sum(-1)
    assert float((second - exact).abs().max()) < 0.3 * float((first - exact).abs().max())


def test_slots_give_up_the_least_used_and_never_the_pinned_or_those_in_use():
    rows = Rows(torch.arange(4.0).view(1, 1, 4, 1), None)
    token, rank = torch.tensor([[[0, 1, 2, -1]]]), torch.tensor([[[PINNED, 3.0, 0.5, EMPTY]]])
    slots = Slots(rows, token, rank)

    def put(*tokens):
        count = len(tokens)
        head, place = torch.zeros(count, dtype=torch.int64), torch.arange(count)
        slots.put(Rows(torch.full((count, 1), 9.0), None), head, place, torch.tensor(tokens), count)
        return sorted(slots.token.flatten().tolist())

    assert put(10, 11, 12) == [0, 1, 10, 11]  # the third finds no slot: token 1 has been used more
    slots.use(slots.token == 10, 1)
    assert put(20, 21) == [0, 1, 10, 20]  # 11 was not used
    for _ in range(4):
        slots.use(slots.token == 20, 1)
    assert put(30, 31, 32) == [0, 20, 30, 31]  # uses fade
    slots.resize([2])
    assert slots.count == 2 and {0, 20} == set(slots.token.flatten().tolist())
    slots.resize([5])
    assert slots.holes and int((slots.rank == EMPTY).sum()) == 3


def _mixed_case():
    query, keys, values = randn(1, 2, 3, 8), randn(1, 1, 20, 8, seed=1), randn(1, 1, 20, 8, seed=2)
    logits = (query.flatten(1, 2)[:, None] @ keys.mT).view(1, 2, 3, 20)
    return logits, values, (torch.arange(20) // 5)[None]


def test_everything_expanded_equals_full_attention():
    logits, values, span = _mixed_case()
    full = torch.softmax(logits, -1) @ values
    coarse = randn(1, 2, 3, 4, seed=4)
    mixed = mixed_attention(span_parts(logits, values, coarse, randn(1, 1, 4, 8), torch.ones(1, 2, 3, 4), span))
    torch.testing.assert_close(mixed, full, atol=1e-5, rtol=1e-5)
    tokens = mixed_attention(token_parts(logits, values, logits, randn(1, 1, 4, 8), torch.ones(1, 2, 3, 20), span))
    torch.testing.assert_close(tokens, full, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_gradient_of_the_zoom_equals_a_finite_difference_of_the_relaxed_form(value):
    logits, values, span = _mixed_case()
    logits, values = logits.double(), values.double()
    coarse, coarse_values = randn(1, 2, 3, 4, seed=4).double(), randn(1, 1, 4, 8, seed=5).double()

    def output(zoom):
        # zoom of span 2; the others stay where they are
        z = torch.full((1, 2, 3, 4), value, dtype=torch.float64)
        z = torch.cat([z[..., :2], zoom.expand(1, 2, 3, 1), z[..., 3:]], dim=-1)
        resident = Part(torch.zeros(1, 2, 3, 1).double(), torch.ones(1, 1, 1, 8).double())
        return mixed_attention([resident, *span_parts(logits, values, coarse, coarse_values, z, span)]).sum()

    zoom = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    output(zoom).backward()
    step = 1e-3
    numeric = (output(torch.tensor(value + step)) - output(torch.tensor(value - step))) / (2 * step)
    torch.testing.assert_close(zoom.grad, numeric.detach(), atol=1e-3, rtol=1e-2)
    assert abs(float(zoom.grad)) > 1e-3


def test_straight_through_is_hard_forward_and_soft_backward():
    margin = torch.tensor([-2.0, 0.0, 3.0], requires_grad=True)
    z = straight_through(margin)
    assert z.tolist() == [0.0, 1.0, 1.0]
    z.sum().backward()
    torch.testing.assert_close(margin.grad, margin.sigmoid() * (1 - margin.sigmoid()))
