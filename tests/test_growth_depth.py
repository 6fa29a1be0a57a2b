"""Growth in depth: layers that change nothing, copies, interpolations, and refinements whose errors shrink in order."""

import math

import pytest
import torch
from growing import decoder, inputs, run, seq2seq, shaken, tiny

from odeformer import NORMS, WEIGHTS, BlockConfig
from odeformer.attention.softmax import SoftmaxAttention
from odeformer.growth import SCHEMES, deepen, refinement_error
from odeformer.models import SpeechConfig, SpeechSeq2Seq
from solvers import SOLVERS, LinearMultistep

EXACT = 1e-10


def change(model, other, given=None):
    given = inputs(model) if given is None else given
    return max((a - b).abs().max().item() for a, b in zip(run(model, given), run(other, given), strict=True))


def weights_of(block):
    return block.attention.core.query.weight


# a layer that does nothing yet

SILENT = {"pre": "core.output", "completep": "core.output", "layerscale": "core.output", "none": "core.output",
          "res": "placement.norm", "sandwich": "placement.output_norm", "rezero": "placement.alpha"}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("coupling", ["lie", "strang", "parallel", "composed"])
def test_an_inserted_layer_is_the_identity_or_refused_for_every_norm(norm, coupling):
    model = tiny(n_layers=3, solver="rk4", block={"norm": norm, "coupling": coupling})
    if norm not in SILENT:
        with pytest.raises(ValueError, match="increment that is no multiple of a parameter"):
            deepen(model, at=1)
        return
    for at in range(4) if coupling == "lie" else (1,):
        deeper = deepen(model, scheme="zero", at=at)
        assert deeper.config.n_layers == len(deeper.layers) == 4
        assert change(model, deeper) < EXACT
        for sublayer in deeper.layers[at].sublayers:
            named = [p for name, p in sublayer.named_parameters() if f"{name}.".startswith(f"{SILENT[norm]}.")]
            assert named and not any(p.any() for p in named)
        others = [block for i, block in enumerate(deeper.layers) if i != at]
        for old, new in zip(model.layers, others, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(old.parameters(), new.parameters(), strict=True))


def carried(solver):
    """Methods that take something from one piece of depth into the next."""
    return solver in ("momentum", "revnet", "reversible_midpoint", "reversible_rk4", "dense")


@pytest.mark.parametrize("solver", [name for name in SOLVERS if not SOLVERS[name].is_adaptive])
def test_an_inserted_layer_is_the_identity_under_every_solver_or_refused_for_its_history(solver):
    mild = {"norm": "rezero"} if SOLVERS[solver].is_implicit else {}  # so that every stage is found
    model = tiny(n_layers=2, solver=solver, block=mild)
    refusal = ("history runs across layers" if carried(solver) else "learned correction depends on l" if
               solver == "hypersolver" else None)
    if refusal:
        with pytest.raises(ValueError, match=refusal):
            deepen(model, at=1)
        return
    assert change(model, deepen(model, at=1)) < EXACT


def test_history_across_layers_is_what_is_refused():
    across = LinearMultistep([1.0], [1.5, -0.5], across_pieces=True)
    for solver in (across, "lie"):
        options = {} if solver is across else {"solver_options": {"base": across}}
        with pytest.raises(ValueError, match="history runs across layers"):
            deepen(tiny(solver=solver, **options), at=0)
    model = tiny(solver="ab2", steps_per_layer=3)
    assert change(model, deepen(model, at=1)) < EXACT


@pytest.mark.parametrize("solver", ["bosh3", "dopri5"])
def test_an_adaptive_solver_keeps_the_function_within_its_tolerance(solver):
    model = tiny(solver=solver, rtol=1e-5, atol=1e-7, block={"norm": "rezero"})
    assert change(model, deepen(model, at=1)) < 1e-4
    assert change(model, deepen(model)) < EXACT  # at the end nothing follows


@pytest.mark.parametrize("options", [{"weighted": {"gamma": 1.0, "beta": 0.4}}, {"weighted": {"gamma": 1.0}}])
def test_weighted_norms_can_be_silent_where_the_state_passes_outside(options):
    (norm, given), = options.items()
    model = tiny(block={"norm": norm, "norm_options": given})
    assert change(model, deepen(model, at=1)) < EXACT
    for other in ({"gamma": 0.5}, {"gamma": 1.0, "mode": "learned"}):
        with pytest.raises(ValueError, match="no multiple of a parameter"):
            deepen(tiny(block={"norm": norm, "norm_options": other}))


@pytest.mark.parametrize(("options", "message"), [
    ({"fusion": "mean"}, "fusion 'mean'"), ({"fusion": "learned"}, "learned weights that link layers"),
    ({"layer_drop": 0.2, "layer_drop_schedule": "linear"}, "change with their number"),
    ({"weights": "shared"}, "cannot share blocks"), ({"weights": "cycle"}, "cannot share blocks"),
    ({"weights": "spline"}, r"odeformer\.refit\.prolong"), ({"weights": "hyper"}, r"odeformer\.refit\.prolong"),
    ({"weights": "shared", "n_steps": 3}, "n_steps = 3 over 4 layers"),
])
def test_what_acts_upon_other_layers_is_refused_with_the_reason(options, message):
    with pytest.raises(ValueError, match=message):
        deepen(tiny(n_layers=4, **options), at=1)


def test_layer_drop_of_one_rate_and_plain_residual_fusion_are_no_obstacle():
    model = tiny(n_layers=3, layer_drop=0.2)
    assert change(model, deepen(model, at=1)) < EXACT
    model = tiny(n_layers=3, fusion="residual")
    assert change(model, deepen(model, at=1)) < EXACT
    model = tiny(n_layers=6, weights="sequence", weights_options={"n_knots": 3})
    deeper = deepen(model)  # 0 0 1 1 2 2 and a block of its own
    assert [deeper.layers.index(i) for i in range(7)] == [0, 0, 1, 1, 2, 2, 3]
    assert change(model, deeper) < EXACT


def test_experts_and_cached_generation_go_through_an_inserted_layer():
    model = decoder(block={"feedforward": "experts", "feedforward_options": {"n_experts": 3, "top_k": 2}})
    deeper = deepen(model, at=1)
    assert change(model, deeper) < EXACT
    prompt = torch.randint(5, (2, 3))
    assert torch.equal(*(part.generate(prompt, max_new_tokens=5) for part in (model, deeper)))


# layers made of layers

ORDERS = {  # of 3 layers
    "stack": {6: [0, 1, 2, 0, 1, 2], 8: [0, 1, 2, 0, 1, 2, 0, 1]},
    "interleave": {6: [0, 0, 1, 1, 2, 2], 5: [0, 0, 1, 1, 2]},
}


@pytest.mark.parametrize("scheme", ORDERS)
def test_stacked_and_interleaved_layers_are_copies_in_order(scheme):
    model = tiny(n_layers=3, block={"norm": "post"})
    for n_layers, order in ORDERS[scheme].items():
        deeper = deepen(model, scheme=scheme, n_layers=n_layers)
        for i, block in zip(order, deeper.layers, strict=True):
            for a, b in zip(model.layers[i].parameters(), block.parameters(), strict=True):
                assert torch.equal(a, b) and a is not b
        assert len({id(p) for p in deeper.parameters()}) == len(list(deeper.parameters()))
        for name in ("token_embedding", "position", "final_norm"):
            for a, b in zip(getattr(model, name).parameters(), getattr(deeper, name).parameters(), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("n_layers", [4, 6, 7])
def test_interpolated_layers_lie_on_the_lines_between_the_midpoints(n_layers):
    """Layer j of n stands at (j + 1/2) 3 / n, the old ones at 1/2, 3/2, 5/2; as scipy's interp would have it."""
    model = tiny(n_layers=3)
    deeper = deepen(model, scheme="interpolate", n_layers=n_layers)
    old = [weights_of(block) for block in model.layers]
    for j, block in enumerate(deeper.layers):
        at = (j + 0.5) * 3 / n_layers
        hats = [max(0.0, 1 - abs(at - (i + 0.5))) for i in range(3)]
        hats[0] += max(0.0, 0.5 - at)
        hats[2] += max(0.0, at - 2.5)
        assert abs(sum(hats) - 1) < 1e-12
        assert (weights_of(block) - sum(h * w for h, w in zip(hats, old, strict=True))).abs().max() < 1e-14


def test_doubling_interpolates_at_quarters():
    model = tiny(n_layers=2)
    a, b = (weights_of(block) for block in model.layers)
    got = [weights_of(block) for block in deepen(model, scheme="interpolate", n_layers=4).layers]
    for new, wanted in zip(got, (a, (3 * a + b) / 4, (a + 3 * b) / 4, b), strict=True):
        assert (new - wanted).abs().max() < 1e-15


@pytest.mark.parametrize("name", ["shared", "cycle", "cycle_rev", "sequence"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_shared_blocks_stay_shared_or_the_scheme_is_refused(name, scheme):
    model = tiny(n_layers=6, weights=name)
    try:
        deeper = deepen(model, scheme=scheme, n_layers=12)
    except ValueError as error:
        assert "cannot share blocks" in str(error)
        assert scheme == "interpolate" or (name, scheme) in (("sequence", "stack"),)
        return
    order = [0, 1, 2, 3, 4, 5] * 2 if scheme == "stack" else [i // 2 for i in range(12)]
    for j, i in enumerate(order):
        old, new = model.layers[model.layers.index(i)], deeper.layers[deeper.layers.index(j)]
        assert torch.equal(weights_of(old), weights_of(new))
    assert len(deeper.layers) <= 2 * len(model.layers)
    assert deeper.config.depth.weights == name


def test_the_old_model_stays_and_steps_and_what_depends_on_the_depth_follow():
    model = tiny(n_layers=2, weights="shared", n_steps=6, block={"norm": "completep"}).train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    deeper = deepen(model, scheme="stack", n_layers=4)
    assert deeper.config.depth.n_steps == 12
    assert deeper.layers[0].attention.placement.scale == 1 / 2  # that of 2 layers
    assert deeper.training and all(module.training for module in deeper.modules())
    with torch.no_grad():
        for p in deeper.parameters():
            p.zero_()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("part", ["both", "encoder", "decoder"])
@pytest.mark.parametrize("tied", [{}, {"tie_embeddings": True, "share_embeddings": True}])
def test_the_parts_of_a_seq2seq_grow_together_or_one_by_one(part, tied):
    model = seq2seq(n_layers=3, model={"n_decoder_layers": 2, **tied})
    assert change(model, deepen(model, at=1, part=part)) < EXACT
    deeper = deepen(model, scheme="interleave", n_layers=6, part=part)
    grown = ("encoder", "decoder") if part == "both" else (part,)
    for name, before in (("encoder", 3), ("decoder", 2)):
        assert len(getattr(deeper, name).layers) == (6 if name in grown else before)
    assert (deeper.decoder.head.weight is deeper.encoder.token_embedding.weight) == bool(tied)
    run(deeper, inputs(deeper))


def test_a_model_of_speech_grows_deeper_in_both_parts():
    block = BlockConfig(8, 2)
    model = shaken(SpeechSeq2Seq(SpeechConfig(n_mels=3, max_frames=12, vocab_size=7, max_seq_len=5, n_layers=2,
                                              block=block, tie_embeddings=True)))
    given = (torch.randn(2, 3, 12, dtype=torch.float64), torch.randint(7, (2, 5))), {}
    assert change(model, deepen(model, at=1), given) < EXACT
    assert deepen(model, scheme="stack", n_layers=3, part="encoder").config.n_layers == 3


# a finer grid


@pytest.mark.parametrize("norm", SILENT)
@pytest.mark.parametrize("solver", ["euler", "rk4", "strang"])
def test_refined_layers_are_the_old_ones_in_smaller_steps(norm, solver):
    """f / m over m layers of depth 1 is f over one layer in steps of 1 / m."""
    model = tiny(solver=solver, block={"norm": norm})
    for factor in (2, 3):
        refined = deepen(model, scheme="refine", n_layers=2 * factor)
        assert change(refined, model.with_solver(solver, steps_per_layer=factor)) < 1e-9


@pytest.mark.parametrize("weights", ["shared", "cycle", "sequence"])
def test_refining_shared_weights_halves_h(weights):
    model = tiny(n_layers=4, weights=weights, solver="rk4")
    refined = deepen(model, scheme="refine", n_layers=8)
    assert len(refined.layers) == (len(model.layers) if weights != "cycle" else 4)
    assert change(refined, model.with_solver("rk4", steps_per_layer=2)) < 1e-12


def test_an_uneven_refinement_keeps_the_depth_of_every_layer():
    model = tiny(n_layers=2, solver="rk4", block={"coupling": "parallel"})
    refined = deepen(model, scheme="refine", n_layers=5)  # 0 0 0 1 1
    for new, old, m in zip(refined.layers, [0, 0, 0, 1, 1], [3, 3, 3, 2, 2], strict=True):
        big, small = (block.attention.core.output.weight for block in (model.layers[old], new))
        assert (small * m - big).abs().max() < 1e-15
        assert torch.equal(weights_of(new), weights_of(model.layers[old]))


@pytest.mark.parametrize(("solver", "coupling", "order"), [
    ("euler", "lie", 1), ("euler", "parallel", 1), ("rk4", "lie", 1), ("rk4", "strang", 2), ("heun2", "parallel", 2),
    ("kutta3", "parallel", 3), ("rk4", "parallel", 4)])
def test_what_refinement_changes_is_a_truncation_error_of_the_solvers_order(solver, coupling, order):
    model = tiny(solver=solver, block={"coupling": coupling, "norm": "rezero"})
    with torch.no_grad():
        for block in model.layers:
            for sublayer in block.sublayers:
                sublayer.placement.alpha.mul_(0).add_(0.4)
    given = inputs(model)
    args, named = given
    report = refinement_error(model, *args, times=3, **named)
    assert report.n_layers == (2, 4, 8, 16)
    assert abs(report.orders[-1] - order) < 0.15
    fine = run(model.with_solver("rk4" if coupling != "parallel" else solver, steps_per_layer=32), given)[1]
    z = run(model, given)[1]
    true = ((z - fine).square().mean() / z.square().mean()).sqrt().item()
    assert abs(report.error / true - 1) < 0.25


def test_refinement_of_a_seq2seq_and_of_a_model_that_is_exact():
    model = seq2seq(n_layers=1, solver="heun2", block={"coupling": "parallel"})
    args, named = inputs(model)
    report = refinement_error(model, *args, times=2, **named)
    assert report.n_layers == (1, 2, 4) and report.error > 0
    silent = tiny()
    with torch.no_grad():
        for name, p in silent.layers.named_parameters():
            if ".output." in name:
                p.zero_()
    args, named = inputs(silent)
    report = refinement_error(silent.train(), *args, times=2, **named)
    assert (report.changes, report.error) == ((0.0, 0.0), 0.0)
    assert all(module.training for module in silent.modules())
    assert report.orders == (math.inf,)


def test_refinement_error_refuses_what_has_no_grid():
    model = tiny(solver="dopri5")
    with pytest.raises(ValueError, match="'dopri5' is adaptive"):
        refinement_error(model, torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="times must be at least 2"):
        refinement_error(tiny(), torch.zeros(1, 3, dtype=torch.int64), times=1)


@pytest.mark.parametrize(("options", "message"), [
    ({"block": {"norm": "post"}}, "no multiple of a parameter"), ({"block": {"norm": "deepnorm"}}, "no multiple"),
    ({"block": {"coupling": "composed"}}, "holds a whole step"), ({"fusion": "mean"}, "fusion 'mean'"),
    ({"weights": "linear"}, "prolong"), ({"layer_drop": 0.1, "layer_drop_schedule": "linear"}, "number"),
])
def test_what_cannot_be_refined_is_refused_with_the_reason(options, message):
    with pytest.raises(ValueError, match=message):
        deepen(tiny(n_layers=4, **options), scheme="refine", n_layers=8)


# arguments


class OwnAttention(SoftmaxAttention):
    """Grows in depth as any, since it is copied."""


def test_own_classes_are_copied_and_refused_only_where_nothing_scales_their_increment():
    model = tiny(block={"attention": OwnAttention})
    assert change(model, deepen(model, at=0)) < EXACT

    class NoOutput(torch.nn.Linear):
        def __init__(self, d_model, n_heads):
            super().__init__(d_model, d_model)

        def forward(self, x, mask=None, causal=False, rotary=None, slot=None):
            return super().forward(x)

    model = tiny(block={"attention": NoOutput})
    with pytest.raises(ValueError, match="NoOutput has no output projection"):
        deepen(model, at=0)
    assert len(deepen(model, scheme="stack", n_layers=4).layers) == 4


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"scheme": "copy"}, ValueError, "scheme must be one of zero, stack"), ({"at": 3}, ValueError, "at must be from 0"),
    ({"at": -1}, ValueError, "at must be at least 0"), ({"at": 1.0}, TypeError, "at must be an int"),
    ({"n_layers": 4}, ValueError, "n_layers is not for scheme 'zero'"),
    ({"scheme": "stack", "at": 1, "n_layers": 4}, ValueError, "at is not for scheme 'stack'"),
    ({"scheme": "stack"}, ValueError, "n_layers must be given"), ({"scheme": "stack", "n_layers": 2}, ValueError,
                                                                  "n_layers must be at least 3"),
    ({"scheme": "stack", "n_layers": 4.0}, TypeError, "n_layers must be an int"),
    ({"part": "encoder"}, ValueError, "for Seq2Seq"), ({"part": "head"}, ValueError, "part must be"),
])
def test_arguments_that_make_no_deeper_model_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        deepen(tiny(), **arguments)


def test_only_models_with_layers_grow_deeper():
    with pytest.raises(TypeError, match="got Linear"):
        deepen(torch.nn.Linear(2, 2))


def test_every_family_of_weights_is_tried():
    assert {"piecewise", "shared", "cycle", "cycle_rev", "sequence"} <= WEIGHTS.keys()
