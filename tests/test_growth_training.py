"""Training goes on after growth: gradients and moments of the grown model are those that it would have had."""

import copy

import pytest
import torch
from growing import VOCAB, decoder, inputs, seq2seq, tiny, vision
from torch import nn

from odeformer import ATTENTION, FEEDFORWARD, FUSIONS, NORMS, WEIGHTS
from odeformer.growth import deepen, grow_optimizer, widen

LR, BETAS, EPS, DECAY = 1e-2, (0.8, 0.9), 1e-6, 0.03


def adamw(model, **options):
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
                             lr=LR, betas=BETAS, eps=EPS, **options)


def loss_of(model, given, targets):
    """Of the first outputs, so that a wider encoder's states, which are copies, have the same."""
    args, named = given
    y = model(*args, **named)
    return ((y[..., :targets.shape[-1]] - targets) ** 2).mean()


def batch(model):
    """Inputs and targets."""
    given = inputs(model)
    args, named = given
    with torch.no_grad():
        return given, torch.randn_like(model(*args, **named))


def gradients(model, given, targets):
    names, params = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss_of(model, given, targets), params, allow_unused=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def assert_gradients_grow(model, wider):
    """What grow_optimizer does to moments is what autograd says of the wider model's gradients."""
    given, targets = batch(model)
    old, new = gradients(model, given, targets), gradients(wider, given, targets)
    optimizer = torch.optim.AdamW(model.parameters())
    params = dict(model.named_parameters())
    for name, p in params.items():
        optimizer.state[p] = {"step": torch.tensor(3.0), "exp_avg": old[name].clone(), "exp_avg_sq": old[name] ** 2}
    grown = grow_optimizer(optimizer, model, wider)
    size = max(g.abs().max() for g in new.values())
    for name, p in wider.named_parameters():
        state = grown.state[p]
        assert (state["exp_avg"] - new[name]).abs().max() < 1e-10 * size, name
        assert (state["exp_avg_sq"] - new[name] ** 2).abs().max() < 1e-10 * size**2, name
        assert state["step"] == 3.0


HEADED = {"head": "tagging", "n_outputs": 3}
ALL = {"d_model": 24, "d_ff": 50}


@pytest.mark.parametrize("name", [name for name in ATTENTION if not getattr(ATTENTION[name], "for_memory", False)])
@pytest.mark.parametrize("n_heads", [2, 3, None])
def test_gradients_of_every_attention_grow_as_the_moments_do(name, n_heads):
    options = [{}]
    if name == "local_gaussian":
        options += [{"gamma_mode": "predicted", "sigma": [1.0, 2.0], "sigma_mode": "learned"}, {"qk_norm": "layer"},
                    {"n_kv_heads": 1}]
    for given in options:
        if name == "alibi" and n_heads != 2:
            return
        model = tiny(model=HEADED, block={"attention": name, "attention_options": given})
        assert_gradients_grow(model, widen(model, n_heads=n_heads, **ALL))


@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_every_norm_grow_as_the_moments_do(name):
    model = tiny(model=HEADED, block={"norm": name})
    assert_gradients_grow(model, widen(model, **ALL))
    if name == "weighted":
        model = tiny(model=HEADED, block={"norm": name, "norm_options": {"mode": "predicted"}})
        assert_gradients_grow(model, widen(model, **ALL))


@pytest.mark.parametrize("name", FEEDFORWARD)
def test_gradients_of_every_feed_forward_grow_as_the_moments_do(name):
    options = {"n_experts": 4, "top_k": 2, "gate": "softmax_then_topk"} if "expert" in name else {}
    model = tiny(model=HEADED, block={"feedforward": name, "feedforward_options": options, "d_ff": 24})
    assert_gradients_grow(model, widen(model, d_model=16, d_ff=40))


@pytest.mark.parametrize("name", WEIGHTS)
def test_gradients_of_every_family_of_weights_grow_as_the_moments_do(name):
    model = tiny(model=HEADED, weights=name, n_layers=4)
    assert_gradients_grow(model, widen(model, d_model=16))


@pytest.mark.parametrize("name", FUSIONS)
def test_gradients_of_every_fusion_grow_as_the_moments_do(name):
    for form in ("plain", "pre"):
        model = tiny(model=HEADED, fusion=name, fusion_options={"form": form}, n_layers=3)
        assert_gradients_grow(model, widen(model, d_model=16))


def test_gradients_of_whole_models_grow_as_the_moments_do():
    for model in (decoder(model={"tie_embeddings": True}), vision(model={"pooling": "class_token"}), decoder(),
                  seq2seq(model={"tie_embeddings": True, "share_embeddings": True}),
                  tiny(model={"head": "masked_lm"}), tiny(model=HEADED, solver="rk2_gate")):
        assert_gradients_grow(model, widen(model, d_model=16))


def test_unequal_shares_of_hidden_units_and_heads_keep_the_moments_exact():
    model = tiny(model=HEADED)
    assert_gradients_grow(model, widen(model, d_ff=64, unequal=0.7))


def test_a_step_of_adamw_after_growth_is_the_one_that_brute_force_gives():
    """Moments by hand from the gradients that the wider model, made anew from each old weights, has on the same
    batches; then one step of Loshchilov & Hutter's AdamW by formula."""
    model = decoder(model={"tie_embeddings": True})
    optimizer = adamw(model)
    first, second, n = {}, {}, 4
    batches = [batch(model) for _ in range(n + 1)]
    for step in range(n):
        for name, g in gradients(widen(model, d_model=16, d_ff=48), *batches[step]).items():
            first[name] = BETAS[0] * first.get(name, 0) + (1 - BETAS[0]) * g
            second[name] = BETAS[1] * second.get(name, 0) + (1 - BETAS[1]) * g * g
        optimizer.zero_grad()
        loss_of(model, *batches[step]).backward()
        optimizer.step()
    wider = widen(model, d_model=16, d_ff=48)
    grown = grow_optimizer(optimizer, model, wider)
    wanted = {}
    for name, g in gradients(wider, *batches[n]).items():
        m = BETAS[0] * first[name] + (1 - BETAS[0]) * g
        v = BETAS[1] * second[name] + (1 - BETAS[1]) * g * g
        p = dict(wider.named_parameters())[name].detach()
        decayed = p * (1 - LR * (DECAY if p.dim() >= 2 else 0))
        unbiased = m / (1 - BETAS[0] ** (n + 1)), v / (1 - BETAS[1] ** (n + 1))
        wanted[name] = decayed - LR * unbiased[0] / (unbiased[1].sqrt() + EPS)
    loss_of(wider, *batches[n]).backward()
    grown.step()
    for name, p in wider.named_parameters():
        assert (p - wanted[name]).abs().max() < 1e-10, name


@pytest.mark.parametrize("kind", ["sgd", "rmsprop", "adagrad", "adam", "adamax", "nadam", "radam"])
def test_other_optimisers_go_on_as_if_the_model_had_been_wider(kind):
    """Momenta and squares by replaying the wider gradients through torch's own optimiser at a rate of 0."""
    make = {"sgd": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9), "adamax": torch.optim.Adamax,
            "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr, momentum=0.5, centered=True),
            "adagrad": torch.optim.Adagrad, "nadam": torch.optim.NAdam, "radam": torch.optim.RAdam,
            "adam": lambda p, lr: torch.optim.Adam(p, lr=lr, amsgrad=True)}[kind]
    model = tiny(model=HEADED)
    wider = widen(model, d_model=16, d_ff=40)
    optimizer, replayed = make(model.parameters(), lr=0.0), make(wider.parameters(), lr=0.0)
    for _ in range(3):
        given = batch(model)
        for part, chosen in ((model, optimizer), (wider, replayed)):
            chosen.zero_grad()
            loss_of(part, *given).backward()
            chosen.step()
    grown = grow_optimizer(optimizer, model, wider)
    for p in wider.parameters():
        for key, value in replayed.state[p].items():
            got, wanted = (torch.as_tensor(x, dtype=torch.float64) for x in (grown.state[p][key], value))
            size = wanted.abs().max()  # Adamax adds its eps to gradients, RMSprop divides by roots with it
            assert (got - wanted).abs().max() < 2e-8 + (1e-2 * size if kind == "rmsprop" else 0)


def test_groups_and_settings_go_along_and_what_was_left_out_stays_out():
    model = tiny(model=HEADED)
    model.token_embedding.requires_grad_(False)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": params[:5], "lr": 0.5}, {"params": params[5:-1]}], lr=0.1, betas=BETAS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    del scheduler
    for grow in (lambda: widen(model, d_model=16), lambda: deepen(model, scheme="stack", n_layers=3)):
        grown = grow_optimizer(optimizer, model, new := grow())
        assert [group["lr"] for group in grown.param_groups] == [0.25, 0.05]
        assert all(group["betas"] == BETAS and group["initial_lr"] > 0.05 for group in grown.param_groups)
        held = {id(p) for group in grown.param_groups for p in group["params"]}
        left_out = {name for name, p in new.named_parameters() if id(p) not in held}
        last = next(name for name, p in model.named_parameters() if p is params[-1])
        assert left_out == {"token_embedding.weight", last}
        assert not grown.state  # nothing had been trained


def test_deeper_models_get_the_moments_of_the_layers_that_they_are_made_of():
    model = tiny(model=HEADED)
    optimizer = adamw(model)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, *batch(model)).backward()
        optimizer.step()

    def moments(model, optimizer, layer, name, key="exp_avg"):
        return optimizer.state[model.get_parameter(f"layers.{layer}.{name}")][key]

    weight, output = "attention.core.query.weight", "feedforward.core.output.weight"
    stacked = deepen(model, scheme="stack", n_layers=4)
    grown = grow_optimizer(optimizer, model, stacked)
    for j in range(4):
        assert torch.equal(moments(stacked, grown, j, weight), moments(model, optimizer, j % 2, weight))
    between = deepen(model, scheme="interpolate", n_layers=4)
    grown = grow_optimizer(optimizer, model, between)
    for key in ("exp_avg", "exp_avg_sq"):
        a, b = (moments(model, optimizer, i, weight, key) for i in range(2))
        assert (moments(between, grown, 1, weight, key) - (3 * a + b) / 4).abs().max() < 1e-15
    refined = deepen(model, scheme="refine", n_layers=4)
    grown = grow_optimizer(optimizer, model, refined)
    for power, key in ((1, "exp_avg"), (2, "exp_avg_sq")):  # an increment halved halves gradients, but its own factor's
        assert (moments(refined, grown, 3, weight, key) * 2**power
                - moments(model, optimizer, 1, weight, key)).abs().max() < 1e-15
        assert torch.equal(moments(refined, grown, 3, output, key), moments(model, optimizer, 1, output, key))
    silent = deepen(model, at=1)
    grown = grow_optimizer(optimizer, model, silent)
    assert not any(p in grown.state for p in silent.layers[1].parameters())
    for new, old in ((0, 0), (2, 1)):
        assert torch.equal(moments(silent, grown, new, weight), moments(model, optimizer, old, weight))


def test_refining_shrinks_gradients_as_it_says():
    """With ever smaller steps the gradients of m copies sum to the old one: each is 1 / m of it (its output's: all)."""
    model = tiny(model=HEADED, solver="rk4", block={"coupling": "parallel", "norm": "rezero"})
    fine = deepen(model, scheme="refine", n_layers=8)
    finer = deepen(fine, scheme="refine", n_layers=16)
    given = batch(model)
    a, b = gradients(fine, *given), gradients(finer, *given)
    for name, factor in (("attention.core.query.weight", 2), ("feedforward.placement.alpha", 1)):
        both = (b[f"layers.0.{name}"] + b[f"layers.1.{name}"]) / 2 * factor
        assert (both - a[f"layers.0.{name}"]).norm() < 0.01 * a[f"layers.0.{name}"].norm()


@pytest.mark.parametrize("grow", [lambda model: widen(model, d_model=16, d_ff=48, unequal=0.3),
                                  lambda model: deepen(model, at=1)], ids=["widen", "deepen"])
def test_the_loss_goes_on_where_it_was_and_falls(grow):
    model = decoder(n_layers=2).float()
    tokens = torch.randint(VOCAB, (16, 1)).expand(-1, 8).contiguous()  # each text repeats its first token

    def loss(model):
        logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def train(model, optimizer, steps):
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(loss(model))
            losses[-1].backward()
            optimizer.step()
        return [x.item() for x in losses]

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    before = train(model, optimizer, 60)
    last = loss(model).item()
    grown = grow(model)
    after = train(grown, grow_optimizer(optimizer, model, grown), 30)
    assert abs(after[0] - last) < 1e-4 * last
    assert before[0] > 2 * last > 2 * after[-1]
    assert max(after) < 1.05 * last


def test_growth_on_growth_carries_the_optimiser_step_by_step():
    model = tiny(model=HEADED)
    optimizer = adamw(model)
    loss_of(model, *batch(model)).backward()
    optimizer.step()
    middle = widen(model, d_model=16)
    between = grow_optimizer(optimizer, model, middle)
    last = deepen(middle, scheme="interleave", n_layers=4)
    grown = grow_optimizer(between, middle, last)
    assert all(p in grown.state for p in last.parameters())
    with pytest.raises(ValueError, match="optimizer holds"):
        grow_optimizer(optimizer, middle, last)
    again = copy.deepcopy(last)
    assert all(p in grow_optimizer(between, middle, again).state for p in again.parameters())


def test_optimisers_and_models_that_do_not_belong_together_are_refused():
    model = tiny(model=HEADED)
    wider = widen(model, d_model=16)
    with pytest.raises(ValueError, match="what widen or deepen returned"):
        grow_optimizer(adamw(model), model, tiny(model=HEADED))
    with pytest.raises(ValueError, match=r"holds .* parameters that are not old_model's"):
        grow_optimizer(adamw(wider), model, wider)
    with pytest.raises(ValueError, match="was not made of old_model"):
        grow_optimizer(adamw(model), tiny(), wider)
    lbfgs = torch.optim.LBFGS(model.parameters())
    given = batch(model)

    def closure():
        lbfgs.zero_grad()
        loss = loss_of(model, *given)
        loss.backward()
        return loss

    lbfgs.step(closure)
    with pytest.raises(ValueError, match="which growth does not know"):
        grow_optimizer(lbfgs, model, wider)
