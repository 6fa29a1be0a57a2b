"""Parameter sharing over depth (text after eq. 31; Takase & Kiyono 2021): which layer uses which block, and that it
stays so through copies, moves and files."""

import copy
import pickle

import pytest
import torch

import odeformer
from odeformer import WEIGHTS, BlockConfig, Decoder, DecoderConfig, DepthConfig, Encoder, EncoderConfig, VisionConfig
from odeformer.models.vision import VisionEncoder

VOCAB, LENGTH, D = 17, 6, 8

# Figure 1 of Takase & Kiyono 2021 has 3 blocks for 6 layers; the others follow from their Algorithm 1
PATTERNS = {
    ("piecewise", 4, None): [0, 1, 2, 3],
    ("shared", 4, None): [0, 0, 0, 0],
    ("sequence", 6, 3): [0, 0, 1, 1, 2, 2],
    ("sequence", 6, 2): [0, 0, 0, 1, 1, 1],
    ("sequence", 5, None): [0, 0, 1, 1, 2],
    ("sequence", 4, 4): [0, 1, 2, 3],
    ("cycle", 6, 3): [0, 1, 2, 0, 1, 2],
    ("cycle", 5, 2): [0, 1, 0, 1, 0],
    ("cycle", 6, None): [0, 1, 2, 0, 1, 2],
    ("cycle_rev", 6, 3): [0, 1, 2, 2, 1, 0],
    ("cycle_rev", 9, 3): [0, 1, 2, 0, 1, 2, 2, 1, 0],
    ("cycle_rev", 7, 3): [0, 1, 2, 0, 1, 2, 2],
    ("cycle_rev", 3, 3): [0, 1, 2],
    ("cycle_rev", 2, 1): [0, 0],
}
SHARING = [name for name, kind in WEIGHTS.items() if kind.by_layer and name != "piecewise"]


def tiny(kind=Encoder, config=EncoderConfig, *, n_layers=5, block=(), **depth):
    torch.manual_seed(0)
    return kind(config(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=n_layers, block=BlockConfig(D, 2, **dict(block)),
                       depth=DepthConfig(**depth))).double().eval()


def tokens(batch=2):
    return torch.randint(VOCAB, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("case", "pattern"), PATTERNS.items(), ids=str)
def test_layers_use_the_blocks_that_the_paper_says(case, pattern):
    name, n_layers, n_knots = case
    options = {} if n_knots is None else {"n_knots": n_knots}
    layers = tiny(n_layers=n_layers, weights=name, weights_options=options).layers
    assert [layers.index(i) for i in range(n_layers)] == pattern
    assert len(layers) == max(pattern) + 1
    assert count(layers) == len(layers) * count(tiny(n_layers=1).layers)


def untied(model):
    """A piecewise model whose layers hold copies of the shared blocks."""
    other = tiny(n_layers=model.config.n_layers, solver=model.config.depth.solver,
                 block={"coupling": model.config.block.coupling})
    state = {key: value for key, value in model.state_dict().items() if not key.startswith("layers.")}
    other.load_state_dict(state, strict=False)
    for i, block in enumerate(other.layers):
        block.load_state_dict(model.layers[model.layers.index(i)].state_dict())
    return other


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize(("solver", "coupling"), [("euler", "lie"), ("rk4", "parallel"), ("midpoint", "strang")])
def test_shared_layers_compute_what_equal_layers_do_and_gather_their_gradients(name, solver, coupling):
    model = tiny(weights=name, solver=solver, block={"coupling": coupling})
    other = untied(model)
    x, y = model(tokens()), other(tokens())
    assert (x - y).abs().max() < 1e-13
    weight = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
    (x * weight).sum().backward()
    (y * weight).sum().backward()
    wanted = [torch.zeros_like(p) for p in model.layers.parameters()]
    places = {id(p): i for i, p in enumerate(model.layers.parameters())}
    for i, block in enumerate(other.layers):
        for mine, theirs in zip(model.layers[model.layers.index(i)].parameters(), block.parameters(), strict=True):
            wanted[places[id(mine)]] += theirs.grad
    for p, grad in zip(model.layers.parameters(), wanted, strict=True):
        assert (p.grad - grad).abs().max() < 1e-11 * max(1, grad.abs().max())


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_entry_survives_copies_moves_pickles_and_files(name, tmp_path):
    model = tiny(Decoder, DecoderConfig, weights=name, solver="rk4")
    out, n = model(tokens()), count(model)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    model.save(tmp_path)
    loaded = odeformer.load(tmp_path)
    for again in (copied, pickled, loaded):
        assert torch.equal(again(tokens()), out) and count(again) == n
        assert not {p.data_ptr() for p in again.parameters()} & {p.data_ptr() for p in model.parameters()}
    assert loaded.config == model.config
    moved = copied.float()
    assert {p.dtype for p in moved.parameters()} == {torch.float32} and count(moved) == n
    assert (moved(tokens()) - out).abs().max() < 1e-4
    with torch.no_grad():  # one place: what changes there changes wherever the block is used
        for again in (pickled, loaded):
            for p in again.layers.parameters():
                p.mul_(1.1)
            assert not torch.equal(again(tokens()), out)
        assert torch.equal(pickled(tokens()), loaded(tokens()))
    out.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.layers.parameters())


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_entry_trains_under_every_kind_of_solver_and_gradient_mode(name):
    for solver, gradient in (("euler", "checkpoint"), ("ab3", "backprop"), ("reversible_midpoint", "reversible"),
                             ("dopri5", "backprop"), ("rk2_gate", "backprop")):
        model = tiny(n_layers=3, weights=name, solver=solver, gradient=gradient, block={"dropout": 0.1}).train()
        out, solution = model(tokens(), return_solution=True)
        out.cos().sum().backward()
        assert all(p.grad.isfinite().all() for p in model.layers.parameters()), (name, solver)
        assert solution.l == 3


@pytest.mark.parametrize("name", [name for name in SHARING if name != "shared"])  # which is one piece of depth
def test_layers_that_share_a_block_draw_dropout_masks_of_their_own(name):
    model = tiny(weights=name, weights_options={"n_knots": 1}, n_layers=2, block={"dropout": 0.5}).train()
    context = odeformer.block.Context(training=True)
    x = torch.ones(2, LENGTH, D)
    site = model.layers[0].attention
    first, second = (context.drop(site, layer, 0.5, x) for layer in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first, context.drop(site, 0, 0.5, x))


def test_a_vision_model_shares_too():
    config = {"image_size": 4, "patch_size": 2, "n_classes": 3, "channels": 1, "block": BlockConfig(D, 2)}
    sizes = [count(VisionEncoder(VisionConfig(**config, n_layers=4, depth=DepthConfig(weights=name))).layers)
             for name in ("piecewise", "cycle", "shared")]
    assert sizes[0] == 2 * sizes[1] == 4 * sizes[2]


def test_wrong_numbers_of_blocks_are_refused():
    for name in ("cycle", "cycle_rev", "sequence"):
        for n_knots, error, word in ((0, ValueError, "at least 1"), (6, ValueError, "n_layers = 5"),
                                     (2.0, TypeError, "int")):
            with pytest.raises(error, match="n_knots") as caught:
                tiny(weights=name, weights_options={"n_knots": n_knots})
            assert word in str(caught.value)
    with pytest.raises(ValueError, match="n_knots"):
        tiny(weights="piecewise", weights_options={"n_knots": 2})
