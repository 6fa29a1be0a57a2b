"""Every attention x norm x coupling x solver, generated from the tables: a new entry is tested with all others."""

from itertools import product

import pytest
import torch

import solvers
from odeformer import (
    ATTENTION,
    COUPLINGS,
    FEEDFORWARD,
    NORMS,
    BlockConfig,
    DepthConfig,
    Encoder,
    EncoderConfig,
    load,
)
from solvers.imex import ImexRungeKutta

SELF = [name for name in ATTENTION if not getattr(ATTENTION[name], "for_memory", False)]
TRIPLES = list(product(SELF, NORMS, COUPLINGS))
ALL = sorted(name for name in solvers.SOLVERS if name != "equilibrium")  # which needs injection
EXPLICIT = [name for name in ALL if not solvers.SOLVERS[name].is_implicit]
IMPLICIT = [name for name in ALL if solvers.SOLVERS[name].is_implicit]
TURNS = [(triple, EXPLICIT[59 * i % len(EXPLICIT)]) for i, triple in enumerate(TRIPLES)]
TURNS += [(TRIPLES[53 * i % len(TRIPLES)], name) for i, name in enumerate(IMPLICIT)]  # dear: one triple each
TOKENS = torch.tensor([[1, 2, 3, 4], [4, 3, 0, 0]])
MASK = torch.tensor([[True] * 4, [True] * 2 + [False] * 2])


def encoder(attention, norm, coupling, solver, feedforward="gelu"):
    """A tiny model with large states and small matrices, so that implicit steps can be solved, and with its numbers
    moved away from their start, so that gates that begin at 0 let something through."""
    torch.manual_seed(0)
    steps = 3 if solvers.SOLVERS[solver].is_implicit else 1
    block = BlockConfig(8, 2, d_ff=16, attention=attention, norm=norm, coupling=coupling, feedforward=feedforward)
    model = Encoder(EncoderConfig(vocab_size=5, max_seq_len=4, n_layers=2, block=block,
                                  depth=DepthConfig(solver=solver, steps_per_layer=steps)))
    with torch.no_grad():
        model.token_embedding.weight.mul_(10)
        for name, p in model.layers.named_parameters():
            if "placement" in name and p.dim() < 2:
                p.add_(0.1 * torch.randn_like(p))
            elif p.dim() >= 2:
                p.mul_(0.3)
    return model


def refused(solver, coupling):
    """IMEX methods treat two parts differently, and a composed field has none."""
    return isinstance(solvers.SOLVERS[solver], ImexRungeKutta) and coupling == "composed"


def check(model, folder):
    """Forward, backward, and back from disk bit for bit."""
    model.train()
    out = model(TOKENS, MASK)
    assert out.shape == (2, 4, 8)
    assert out[MASK].isfinite().all()
    (out * torch.randn_like(out))[MASK].sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
    model.eval().save(folder)
    again = load(folder)
    assert torch.equal(again(TOKENS, MASK), model(TOKENS, MASK))


def check_identity(model):
    """With silent output projections nothing moves, where the norm placement leaves it so."""
    with torch.no_grad():
        for layer in model.layers:
            for sublayer in layer.sublayers:
                for p in sublayer.core.output.parameters():
                    p.zero_()
                for name, p in sublayer.placement.named_parameters():
                    if name.endswith("bias"):
                        p.zero_()
        if not all(sublayer.placement.identity_at_zero for layer in model.layers for sublayer in layer.sublayers):
            return
        z = model.embed(TOKENS)
        solution = model(TOKENS, return_solution=True)[1]
        assert (solution.z - z).abs().max() < 1e-6


@pytest.mark.parametrize("i", range(0, len(TURNS), 12))
def test_attention_norm_and_coupling_go_together_under_solvers_in_turn(i, tmp_path):
    """All triples, each under one solver."""
    for j, (triple, solver) in enumerate(TURNS[i:i + 12], i):
        if refused(solver, triple[2]):
            with pytest.raises(ValueError, match="needs a field with two parts"):
                encoder(*triple, solver)
            continue
        model = encoder(*triple, solver)
        check(model, tmp_path / str(j))
        check_identity(model)


def test_every_triple_and_every_solver_has_its_turn():
    triples, names = map(set, zip(*TURNS, strict=True))
    assert names == set(ALL)
    assert triples == set(TRIPLES)


@pytest.mark.parametrize("name", FEEDFORWARD)
def test_every_feed_forward_goes_with_one_step_multistep_and_adaptive_solvers(name, tmp_path):
    for solver in ("euler", "rk4", "ab3", "dopri5"):
        check(encoder("softmax", "pre", "lie", solver, name), tmp_path / solver)


@pytest.mark.exhaustive
@pytest.mark.parametrize("solver", ALL)
def test_the_whole_product(solver, tmp_path):
    """Every triple under every solver, with all checks."""
    for i, triple in enumerate(TRIPLES):
        if refused(solver, triple[2]):
            continue
        model = encoder(*triple, solver)
        check(model, tmp_path / str(i))
        check_identity(model)
