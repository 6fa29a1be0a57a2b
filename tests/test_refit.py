"""prolong, restrict, fit: the same weights over depth in another basis, against projections written out with numpy."""

import numpy as np
import pytest
import torch
from smooth_models import FORMULAS, stacked, state, tiny, tokens

import odeformer
from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig, Seq2Seq, Seq2SeqConfig, refit
from odeformer.smooth_weights import SMOOTH

NESTED = {  # sizes whose functions are all among those of the second
    "linear": ("n_knots", 3, 5), "spline": ("n_knots", 5, 7), "fourier": ("n_basis", 3, 5),
    "chebyshev": ("n_basis", 2, 4), "sequence": ("n_knots", 2, 4), "lowrank": ("n_knots", 3, 5)}
KEY = "attention.core.query.weight"


def theta(model, l, key=KEY):
    return model.layers.theta(torch.tensor(l, dtype=torch.float64))[key].detach().numpy()


@pytest.mark.parametrize("name", NESTED)
def test_prolonging_to_a_nested_basis_changes_nothing(name):
    option, few, many = NESTED[name]
    model = tiny(weights=name, weights_options={option: few}, moved=0.3, solver="rk4", n_steps=8)
    new, residuals = refit.prolong(model, **{option: many})
    assert new.config.depth.weights_options[option] == many and model.config.depth.weights_options[option] == few
    assert residuals.keys() == dict(model.layers[0].named_parameters()).keys()
    assert max(residuals.values()) < 1e-12
    assert (new(tokens()) - model(tokens())).abs().max() < 1e-10
    back = refit.restrict(new, **{option: few})
    assert back.residual < 1e-10 and (back.model(tokens()) - model(tokens())).abs().max() < 1e-9


def test_the_residual_of_a_basis_that_is_not_nested_is_that_of_an_l2_projection():
    model = tiny(weights="linear", weights_options={"n_knots": 5}, moved=0.3)
    new, residuals = refit.restrict(model, n_knots=4)
    c, n = stacked(model, KEY), 20001
    depths = np.linspace(0, 4, n)
    hats = [np.stack([np.interp(depths, np.linspace(0, 4, k), row) for row in np.eye(k)], 1) for k in (5, 4)]
    weight = np.full(n, 1.0)
    weight[[0, -1]] = 0.5  # the trapezoidal rule
    root = np.sqrt(weight)[:, None]
    matrix = np.linalg.lstsq(root * hats[1], root * hats[0], rcond=None)[0]
    wanted = np.tensordot(matrix, c, 1)
    assert np.abs(stacked(new, KEY) - wanted).max() < 1e-5
    before = np.tensordot(hats[0], c, 1)
    lost = np.tensordot(hats[1], wanted, 1) - before
    assert residuals[KEY] == pytest.approx(np.sqrt((lost**2 * weight[:, None, None]).sum()
                                                   / (before**2 * weight[:, None, None]).sum()), rel=1e-4)


@pytest.mark.parametrize("weights", ["spline", "chebyshev"])
@pytest.mark.parametrize(("solver", "at"), [("euler", 0.0), ("rk4", 0.5)])
def test_layers_are_fitted_where_the_solver_reads_them(weights, solver, at):
    """With as many coefficients as layers the fit goes through all of them."""
    model = tiny(n_layers=5, solver=solver, moved=0.3)
    option = {"chebyshev": "n_basis"}.get(weights, "n_knots")
    new, residuals = refit.fit(model, weights, **{option: 5})
    assert max(residuals.values()) < 1e-9
    for i, block in enumerate(model.layers):
        assert np.abs(theta(new, i + at) - block.get_parameter(KEY).detach().numpy()).max() < 1e-9


def test_a_fit_with_fewer_coefficients_is_the_least_squares_one():
    model = tiny(n_layers=8, solver="midpoint", moved=0.3)
    new, residuals = refit.fit(model, "spline", n_knots=5)
    layers = stacked(model, KEY)
    values = np.stack([FORMULAS["spline"](np.eye(5), i + 0.5, 8) for i in range(8)])
    coefficients, *_ = np.linalg.lstsq(values, layers.reshape(8, -1), rcond=None)
    assert np.abs(stacked(new, KEY).reshape(5, -1) - coefficients).max() < 1e-10
    lost = values @ coefficients - layers.reshape(8, -1)
    assert residuals[KEY] == pytest.approx(np.linalg.norm(lost) / np.linalg.norm(layers), rel=1e-9)
    assert residuals[KEY] > 0.1  # layers drawn independently are not smooth, and it says so


def test_a_fit_of_layers_that_are_smooth_already_loses_nothing_and_keeps_the_output():
    smooth = tiny(n_layers=6, weights="spline", weights_options={"n_knots": 4}, moved=0.2, solver="euler")
    layered, residuals = refit.fit(smooth, "piecewise")
    for i, block in enumerate(layered.layers):
        assert np.abs(theta(smooth, float(i)) - block.get_parameter(KEY).detach().numpy()).max() < 1e-12
    assert (layered(tokens()) - smooth(tokens())).abs().max() < 1e-10  # euler reads both at whole l
    again, residuals = refit.fit(layered, "spline", n_knots=4)
    assert max(residuals.values()) < 1e-10
    assert (again(tokens()) - smooth(tokens())).abs().max() < 1e-9


@pytest.mark.parametrize("old", ["linear", "modulated", "hyper", "fourier"])
def test_smooth_weights_are_fitted_by_others(old):
    options = {"d_embedding": 4} if old in ("modulated", "hyper") else {}
    model = tiny(weights=old, weights_options=options, moved=0.1, n_layers=4)
    new, residuals = refit.fit(model, "chebyshev", n_basis=14)
    assert max(residuals.values()) < (0.05 if old == "linear" else 1e-3)
    for l in (0.2, 1.9, 3.7):
        assert np.abs(theta(new, l) - theta(model, l)).max() < 0.02


def test_lowrank_takes_the_leading_directions_of_what_varies():
    """Layers W + a_i b with one b: rank 1 is enough, and exact with as many knots as places."""
    model = tiny(n_layers=4, solver="rk4")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.layers[0].named_parameters():
            b = torch.randn(p.shape[-1], generator=generator, dtype=p.dtype)
            for block in list(model.layers)[1:]:
                block.get_parameter(name).copy_(p)
                if p.dim() == 2:
                    a = torch.randn(p.shape[0], 1, generator=generator, dtype=p.dtype)
                    block.get_parameter(name).add_(a * b)
    new, residuals = refit.fit(model, "lowrank", rank=1, n_knots=4, basis="spline")
    assert max(residuals.values()) < 1e-9
    assert np.abs(theta(new, 2.5) - model.layers[2].get_parameter(KEY).detach().numpy()).max() < 1e-9
    _, worse = refit.fit(tiny(n_layers=4, solver="rk4", moved=0.3), "lowrank", rank=1, n_knots=4, basis="spline")
    assert worse[KEY] > 0.1


def test_ties_heads_and_both_parts_come_along(tmp_path):
    model = Decoder(DecoderConfig(vocab_size=9, max_seq_len=6, n_layers=4, tie_embeddings=True,
                                  block=BlockConfig(8, 2), depth=DepthConfig(weights="linear"))).double()
    new = refit.prolong(model, n_knots=3).model
    x = torch.arange(6).view(1, 6)
    assert (new(x) - model(x)).abs().max() < 1e-12
    assert new.head.weight is new.token_embedding.weight is not model.head.weight
    both = Seq2Seq(Seq2SeqConfig(vocab_size=9, max_seq_len=6, n_layers=4, share_embeddings=True,
                                 block=BlockConfig(8, 2), depth=DepthConfig(weights="linear"))).double()
    done = refit.prolong(both, n_knots=3)
    assert (done.model(x, x) - both(x, x)).abs().max() < 1e-12 and any("encoder." in k for k in done.residuals)
    assert done.model.decoder.token_embedding.weight is done.model.encoder.token_embedding.weight
    done.model.save(tmp_path)
    assert torch.equal(odeformer.load(tmp_path)(x, x), done.model.eval()(x, x))


def test_each_part_keeps_options_of_its_own():
    depth = [DepthConfig(weights="lowrank", weights_options={"rank": rank, "n_knots": 2}) for rank in (1, 3)]
    both = Seq2Seq(Seq2SeqConfig(vocab_size=9, max_seq_len=6, n_layers=4, block=BlockConfig(8, 2), depth=depth[0],
                                 decoder_depth=depth[1])).double()
    with torch.no_grad():
        for p in both.parameters():
            p.add_(0.1 * torch.randn_like(p))
    new, residuals = refit.prolong(both, n_knots=3)
    assert new.decoder.config.depth.weights_options == {"rank": 3, "n_knots": 3} and max(residuals.values()) < 1e-10
    x = torch.arange(6).view(1, 6)
    assert (new(x, x) - both(x, x)).abs().max() < 1e-10
    other = Seq2Seq(Seq2SeqConfig(vocab_size=9, max_seq_len=6, n_layers=4, block=BlockConfig(8, 2), depth=depth[0],
                                  decoder_depth=DepthConfig(weights="chebyshev")))
    with pytest.raises(ValueError, match="of the decoder"):
        refit.prolong(other, n_knots=3)


def test_what_was_frozen_stays_frozen():
    model = tiny(weights="linear", weights_options={"n_knots": 3})
    for block in model.layers:
        block.attention.requires_grad_(False)
    new = refit.prolong(model, n_knots=5).model
    assert {name.split(".")[1] for name, p in new.layers.named_parameters() if not p.requires_grad} == {"attention"}


@pytest.mark.parametrize("name", SMOOTH)
def test_float32_models_are_fitted_in_float64(name):
    model = tiny(weights=name, moved=0.1).float()
    new = refit.fit(model, "chebyshev", n_basis=8).model
    assert {p.dtype for p in new.parameters()} == {torch.float32}
    assert new.evolve(state().float()).z.dtype == torch.float32


@pytest.mark.parametrize(("call", "words"), [
    (lambda m: refit.prolong(m, n_knots=2), "at least"), (lambda m: refit.restrict(m, n_knots=9), "at most"),
    (lambda m: refit.prolong(m), "one of"), (lambda m: refit.prolong(m, n_knots=4, n_basis=4), "one of"),
    (lambda m: refit.prolong(m, n_basis=7), "n_basis"), (lambda m: refit.fit(m, "hyper"), "trained"),
    (lambda m: refit.fit(m, "modulated"), "trained"), (lambda m: refit.fit(m, "spline", at=1.5), "at must"),
    (lambda m: refit.fit(m, "spline", at="0"), "at must"), (lambda m: refit.prolong(m, n_knots="5"), "n_knots"),
    (lambda m: refit.fit(m, "splines"), "spline"), (lambda m: refit.fit(m, "spline", n_knots=3), "n_knots"),
    (lambda m: refit.fit(tiny(n_layers=4), "spline", n_knots=6), "at most 4"),
    (lambda m: refit.prolong(tiny(weights="hyper"), n_basis=9), "network"),
    (lambda m: refit.prolong(torch.nn.Linear(2, 2), n_knots=3), "model"),
])
def test_what_cannot_be_done_is_said(call, words):
    model = tiny(weights="linear", weights_options={"n_knots": 4})
    with pytest.raises((ValueError, TypeError), match=words):
        call(model)
