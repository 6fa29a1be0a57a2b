"""Where a model's steps fall: adaptive solving with padding and batch-mates, grids, calibrated ones, random ends."""

import json
import math

import pytest
import torch
from smooth_models import LENGTH, VOCAB, D, state, tiny, tokens

import odeformer
from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig, Encoder, EncoderConfig, Seq2Seq, Seq2SeqConfig
from odeformer.calibration import calibrate
from odeformer.smooth_weights import SMOOTH
from solvers import SOLVERS

ADAPTIVE = ("dopri5", "bosh3", "dopri8")


def alike(a, b):
    """The same steps, NFE and rejections. Sums over more keys round otherwise, and error estimates are small
    differences of large sums, so step sizes agree to less than float64 has."""
    assert a.nfe == b.nfe and a.n_rejected == b.n_rejected and a.n_steps == b.n_steps
    assert a.steps == pytest.approx(b.steps, rel=1e-6)


# Adaptive solving of a whole model


@pytest.mark.parametrize("weights", ["piecewise", "spline"])
@pytest.mark.parametrize("solver", ADAPTIVE)
def test_a_sentence_padded_to_512_has_the_states_steps_and_nfe_that_it_has_alone(weights, solver):
    torch.manual_seed(0)
    model = Encoder(EncoderConfig(vocab_size=VOCAB, max_seq_len=512, n_layers=3, block=BlockConfig(D, 2),
                                  depth=DepthConfig(weights=weights, solver=solver, rtol=1e-4))).double().eval()
    x = tokens(1)
    padded = torch.cat([x, torch.randint(VOCAB, (1, 512 - LENGTH))], 1)
    mask = torch.arange(512).view(1, -1) < LENGTH
    alone, a = model(x, return_solution=True)
    among, b = model(padded, mask, return_solution=True)
    assert (among[:, :LENGTH] - alone).abs().max() < 1e-9
    assert (b.states[:, :, :LENGTH] - a.states).abs().max() < 1e-9
    alike(a, b)


def test_a_row_has_its_own_steps_with_per_sample_and_the_worst_ones_without():
    model = tiny(solver="dopri54", rtol=1e-5, moved=0.1, solver_options={"per_sample": True})
    z = state(4) * torch.tensor([1.0, 4.0, 0.5, 2.0], dtype=torch.float64).view(4, 1, 1)
    together = model.evolve(z)
    for i in range(4):
        alone = model.evolve(z[i : i + 1])
        assert (together.z[i] - alone.z[0]).abs().max() < 1e-9
        assert together.steps[i] == pytest.approx(alone.steps[0], rel=1e-6)
    worst = tiny(solver="dopri5", rtol=1e-5, moved=0.1)
    exact = tiny(solver="dopri8", rtol=1e-8, atol=1e-9, moved=0.1).evolve(z).z
    errors = (worst.evolve(z).z - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    assert errors.max() < 1e-3


def test_the_solution_says_where_steps_were_taken_and_rejected():
    solution = tiny(solver="dopri5", rtol=1e-5, moved=0.3).evolve(state(), save=True)
    assert sum(solution.steps) == pytest.approx(4.0, abs=1e-9)
    assert solution.n_steps == len(solution.steps) == len(solution.errors)
    assert max(solution.errors) <= 1
    # two evaluations choose the first step, one begins each further piece, six a trial step
    assert solution.nfe == 2 + 3 + 6 * (solution.n_steps + solution.n_rejected)


@pytest.mark.parametrize("drops", [{"block": {"dropout": 0.3}}, {"layer_drop": 0.3}])
def test_what_is_drawn_is_frozen_so_that_adaptive_solves_stay_cheap(drops):
    still = tiny(solver="dopri5", rtol=1e-4, weights="shared").evolve(state()).nfe
    model = tiny(solver="dopri5", rtol=1e-4, weights="shared", **drops).train()
    torch.manual_seed(0)
    assert model.evolve(state()).nfe < 4 * still + 6 * 4


@pytest.mark.parametrize("solver", [name for name, s in SOLVERS.items() if s.is_adaptive])
def test_adaptive_solvers_are_refused_where_the_future_would_leak_and_the_reason_is_given(solver):
    with pytest.raises(ValueError, match="causal"):
        tiny(Decoder, DecoderConfig, solver=solver)


# Grids


@pytest.mark.parametrize("solver", ["euler", "rk4", "ab3", "strang", "midpoint", "dense"])
def test_a_given_grid_is_what_is_integrated_on(solver):
    grid = (0.0, 0.25, 1.0, 1.9, 2.0, 3.0, 3.5, 4.0)
    for weights in ("shared", "spline", "piecewise"):
        model = tiny(solver=solver, weights=weights, grid=grid, moved=0.1)
        solution = model.evolve(state(), save=True)
        assert solution.depths == list(grid)
        even = tiny(solver=solver, weights=weights, grid=[0, 1, 2, 3, 4], moved=0.1)
        assert torch.equal(even.evolve(state()).z, tiny(solver=solver, weights=weights, moved=0.1).evolve(state()).z)


def test_a_grid_comes_along_with_another_solver_and_goes_where_steps_are_given():
    model = tiny(weights="spline", grid=(0.0, 1.0, 4.0))
    assert model.with_solver("rk4").config.depth.grid == (0.0, 1.0, 4.0)
    assert model.with_solver("rk4", n_steps=3).config.depth.grid is None
    assert model.with_solver("dopri5").config.depth.grid is None
    assert model.with_solver("rk4", grid=[0, 4]).evolve(state()).n_steps == 1


@pytest.mark.parametrize(("options", "words"), [
    ({"grid": (0.0, 2.0)}, "n_layers = 4"), ({"grid": (0.5, 4.0)}, "from 0"), ({"grid": (0.0, 3.0, 2.0, 4.0)}, "grid"),
    ({"grid": (0.0, 4.0), "weights": "piecewise"}, "whole l"), ({"grid": (0.0, 4.0), "n_steps": 2}, "both"),
    ({"grid": (0.0, 4.0), "solver": "dopri5"}, "fixed-step"), ({"grid": (0.0, 4.0), "layer_drop": 0.1}, "whole l"),
    ({"grid": (0.0, 1.0, 2.0, 3.0, 4.0), "fusion": "mean"}, "fusion"), ({"steer": 1.0}, "steer"),
    ({"steer": 0.5, "fusion": "mean"}, "fusion"), ({"steer": 0.9, "grid": (0.0, 3.5, 4.0)}, "last step"),
    ({"grid": "even"}, "grid"),
])
def test_wrong_grids_and_ends_are_refused(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        tiny(**{"weights": "shared"} | options)


# Calibrated grids


def stirred():
    """A model whose field is strong near the beginning: weights that fade with depth."""
    model = tiny(weights="linear", weights_options={"n_knots": 3}, solver="rk4", moved=0.3)
    with torch.no_grad():
        for block, size in zip(model.layers, (2.0, 0.3, 0.1), strict=True):
            for p in block.parameters():
                p.mul_(size)
    return model


@pytest.fixture(scope="module")
def calibrated():
    """The stirred model, and what its calibration gave."""
    model = stirred()
    return model, calibrate(model, tokens(4), nfe=32)


def test_a_target_nfe_is_kept_and_the_grid_is_better_than_equal_steps(calibrated):
    model, result = calibrated
    assert result.nfe == 32 and len(result.grid) == 9
    assert result.model.config.depth.grid == result.grid and model.config.depth.grid is None
    assert result.error < 0.7 * result.uniform_error
    exact = model.with_solver("dopri8", rtol=1e-8, atol=1e-9)
    other = torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(9))
    gaps = [(m(other) - exact(other)).norm() for m in (result.model, model.with_solver("rk4", n_steps=8))]
    assert gaps[0] < gaps[1]


def test_a_target_error_is_met_with_the_fewest_steps():
    model = stirred()
    result = calibrate(model, tokens(4), error=1e-4)
    assert result.error <= 1e-4
    z = model.embed(tokens(4))
    exact = model.with_solver("dopri8", rtol=1e-8, atol=1e-9).evolve(z).z
    rows = (result.model.evolve(z).z - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    assert rows.max().item() == pytest.approx(result.error, rel=1e-2)
    assert calibrate(model, tokens(4), nfe=result.nfe - 4).error > 1e-4


@pytest.mark.parametrize("weights", ["piecewise", "shared", "spline"])
def test_a_causal_model_is_calibrated_on_other_data_and_leaks_nothing(weights):
    model = tiny(Decoder, DecoderConfig, weights=weights, solver="rk4", moved=0.2)
    result = calibrate(model, tokens(4), nfe=24)
    for i in (1, 3, 5):
        x = tokens(2).clone()
        x[:, i:] = (x[:, i:] + 3) % VOCAB
        assert (result.model(x) - result.model(tokens(2)))[:, :i].abs().max() < 1e-12
    prompt = tokens(1)[:, :3]
    own = calibrate(model, prompt, nfe=16).model
    text = own.generate(prompt, max_new_tokens=3)
    assert torch.equal(text[:, :3], prompt)
    assert torch.equal(text, own.generate(prompt, max_new_tokens=3, cache=None))


def test_it_is_saved_with_the_model(calibrated, tmp_path):
    model = calibrated[1].model
    model.save(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["config"]
    assert written["depth"]["grid"] == list(model.config.depth.grid)
    again = odeformer.load(tmp_path)
    assert again.config.depth.grid == model.config.depth.grid
    assert torch.equal(again(tokens()), model.eval()(tokens()))


def test_masks_training_mode_and_both_parts_of_a_translator():
    model = stirred().train()
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, 3:] = False
    model.layers[0].eval()
    result = calibrate(model, tokens(2), mask=mask, nfe=16)
    assert model.training and not model.layers[0].training and model.layers[1].training and result.nfe == 16
    both = Seq2Seq(Seq2SeqConfig(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=2, block=BlockConfig(D, 2),
                                 depth=DepthConfig(weights="spline", solver="midpoint"))).double()
    done = calibrate(both, tokens(2), tokens(2), nfe=6)
    assert done.nfe == (6, 6)
    assert done.model.encoder.config.depth.grid == done.grid[0]
    assert done.model.decoder.config.depth.grid == done.grid[1]


def test_a_row_of_padding_alone_and_a_multistep_method():
    mask = torch.ones(3, LENGTH, dtype=torch.bool)
    mask[2] = False
    result = calibrate(stirred(), tokens(3), mask=mask, error=1e-3)
    assert 0 < result.error <= 1e-3
    many = calibrate(stirred().with_solver("ab3"), tokens(2), nfe=30)
    assert 28 <= many.nfe <= 30


def test_kinks_stay_known_where_layers_are_dropped_depth_ends_at_random_or_the_input_is_injected():
    for options in ({"layer_drop": 0.2}, {"steer": 0.3}, {"injection": True}, {}):
        model = tiny(weights="linear", weights_options={"n_knots": 4}, solver="dopri5", **options).train()
        kinks = model.evolve(state()).field.kinks
        assert kinks == pytest.approx((4 / 3, 8 / 3)), options


def test_what_cannot_be_calibrated_is_said():
    for options, words in (({}, "one of"), ({"nfe": 8, "error": 0.1}, "one of"), ({"nfe": 3}, "at least 4"),
                           ({"error": 0.0}, "error"), ({"nfe": 2.5}, "nfe")):
        with pytest.raises((ValueError, TypeError), match=words):
            calibrate(stirred(), tokens(1), **options)
    for call in (lambda: calibrate(torch.nn.Linear(2, 2), tokens(1), nfe=8),
                 lambda: calibrate(stirred(), tokens(1), nfe=8, return_solution=True)):
        with pytest.raises(TypeError, match=r"model must|return_solution"):
            call()
    with pytest.raises(ValueError, match="its own steps"):
        calibrate(tiny(solver="dopri5"), tokens(1), nfe=8)
    with pytest.raises(ValueError, match="not reached"):
        calibrate(tiny(solver="euler", moved=0.1), tokens(1), error=1e-9)


# STEER


@pytest.mark.parametrize("weights", ["piecewise", "shared", *SMOOTH])
def test_steer_ends_at_a_random_depth_in_training_only(weights):
    model = tiny(weights=weights, solver="rk4", steer=0.5, moved=0.1)
    assert model.evolve(state()).l == 4.0
    model.train()
    torch.manual_seed(0)
    ends = [model.evolve(state()).l for _ in range(20)]
    assert all(3.5 <= end <= 4.5 for end in ends) and max(ends) - min(ends) > 0.4
    torch.manual_seed(0)
    again = model.evolve(state(), save=True)
    assert again.l == ends[0] and again.depths[-1] == ends[0] and again.n_steps == 4
    again.z.sum().backward()


def test_steer_integrates_the_same_field_over_another_span():
    """Against a model whose last layer is longer: for an autonomous field the end is all that matters."""
    model = tiny(weights="shared", solver="dopri5", rtol=1e-9, atol=1e-11, steer=0.5, block={"coupling": "composed"})
    torch.manual_seed(3)
    solution = model.train().evolve(state())
    f = model.vector_field(state())
    wanted = odeformer.depth.solvers.solve(f, state(), span=(0.0, solution.l), solver="dopri8", rtol=1e-11, atol=1e-12)
    assert (solution.z - wanted.z).abs().max() < 1e-7
    assert not math.isclose(solution.l, 4.0)
