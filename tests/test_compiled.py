"""Compiled models: the values, gradients and counts of the model that they were, from one graph for every depth."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn

import odeformer
from odeformer import (
    BlockConfig,
    Decoder,
    DecoderConfig,
    DepthConfig,
    Encoder,
    EncoderConfig,
    Seq2Seq,
    Seq2SeqConfig,
)
from solvers import SOLVERS, ExplicitRungeKutta

VOCAB, LENGTH = 11, 9
EXPLICIT = [name for name, solver in SOLVERS.items() if not (solver.is_adaptive or solver.is_implicit)]
OTHERS = [name for name in SOLVERS if name not in EXPLICIT]
# of every family one or two, chosen to be quick: the others are marked slow
QUICK = {"euler", "ab2", "strang", "leapfrog"}

# torch warns itself, and drops what it said, when it traces a function of a tensor that is no leaf
pytestmark = [pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
              pytest.mark.filterwarnings("ignore:gradient=.adjoint. gives the gradient of the continuous problem")]


class Counting:
    """A backend that runs what was traced, and counts the graphs."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def tiny(kind=Encoder, config=EncoderConfig, *, n_layers=2, block=(), **depth):
    """A small model in float64, in training mode."""
    return kind(config(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=n_layers, block=BlockConfig(8, 2, **dict(block)),
                       depth=DepthConfig(**depth))).double()


def compiled(model, backend="eager", **options):
    """A compiled copy: what a model compiled in place is."""
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    twin.compile(backend=backend, **options)
    return twin


def tokens(batch=2, length=LENGTH):
    return torch.randint(VOCAB, (batch, length))


def padding():
    return torch.arange(LENGTH) < torch.tensor([[LENGTH], [5]])


def run(model, *inputs, **named):
    """The output, the gradients of a loss and the Solution, from one and the same random state."""
    torch.manual_seed(7)
    model.zero_grad()
    y, solution = model(*inputs, **named, return_solution=True)
    y.square().sum().backward()
    return y.detach(), {name: p.grad for name, p in model.named_parameters()}, solution


def assert_same(twin, model, *inputs, tolerance=1e-10, **named):
    """Values, gradients and evaluations, forth and back."""
    (y, grads, solution), (y0, grads0, solution0) = run(twin, *inputs, **named), run(model, *inputs, **named)
    assert (y - y0).abs().max() <= tolerance * y0.abs().max()
    for name, g in grads0.items():
        if g is None:
            assert grads[name] is None, name
        else:
            assert (grads[name] - g).abs().max() <= tolerance * max(g.abs().max(), 1), name
    assert (solution.nfe, solution.nfe_backward) == (solution0.nfe, solution0.nfe_backward)
    assert solution.steps == solution0.steps


# --- one graph --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("coupling", ["lie", "composed"])
def test_one_graph_serves_every_layer_every_number_of_steps_and_every_depth(coupling):
    backend = Counting()
    model = compiled(tiny(n_layers=2, block={"coupling": coupling}, solver="midpoint"), backend)
    ids = tokens()
    model(ids)
    assert backend.graphs == 1
    for steps_per_layer in (2, 3):
        model.with_solver("midpoint", steps_per_layer=steps_per_layer)(ids)
    model.with_solver("midpoint", grid=[0, 0.25, 1, 1.5, 2])(ids)
    deep = tiny(n_layers=6, block={"coupling": coupling}, solver="midpoint")
    deep.compiled = model.compiled
    deep(ids)
    assert backend.graphs == 1
    with torch.no_grad():
        model(ids)
    assert backend.graphs == 2  # without what backward needs


@pytest.mark.parametrize(("depth", "n_graphs"), [
    ({"solver": "ab3", "steps_per_layer": 4}, 1), ({"solver": "dopri5"}, 1),
    ({"solver": "midpoint", "weights": "linear"}, 2), ({"solver": "midpoint", "weights": "hyper"}, 2)])
@torch.no_grad()
def test_one_graph_of_the_field_or_of_each_sublayer_serves_all_other_solvers_and_weights_that_move(depth, n_graphs):
    backend = Counting()
    model = compiled(tiny(n_layers=4, block={"coupling": "parallel"}, **depth), backend)
    model(tokens())
    assert backend.graphs == n_graphs
    model.with_solver("ab2", steps_per_layer=3)(tokens())
    assert backend.graphs == n_graphs


def test_another_batch_size_is_compiled_once_for_all_others():
    backend = Counting()
    model = compiled(tiny(), backend)
    counts = []
    for batch in (2, 3, 4, 5):
        model(tokens(batch))
        counts.append(backend.graphs)
    assert counts == [1, 2, 2, 2]


def test_more_models_than_torch_would_compile_one_function_for_do_not_meet_its_limit():
    torch._dynamo.reset()
    backend = Counting()
    with torch._dynamo.config.patch(recompile_limit=2):
        for attention in ("softmax", "local_gaussian", "relative", "alibi"):
            model = tiny(n_layers=1, block={"attention": attention})
            model.compile(backend=backend)
            model(tokens())
    assert backend.graphs == 4


# --- the same values and gradients ------------------------------------------------------------------------------------
class Mixing(nn.Module):
    """Attention of few operations, so that a method of many stages is traced soon: of the mean of what may be seen."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.output = nn.Linear(d_model, d_model)

    def forward(self, x, memory=None, *, mask=None, causal=False):
        return self.output(torch.tanh(x) + (x * mask[..., None]).mean(1, keepdim=True))


class Bending(nn.Module):
    """A feed-forward layer of few operations."""

    def __init__(self, d_model, d_ff):
        super().__init__()
        self.output = nn.Linear(d_model, d_model)

    def forward(self, x):
        return torch.tanh(self.output(x))


LIGHT = {"attention": Mixing, "feedforward": Bending, "norm": "none", "coupling": "parallel"}


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
                                  for name in EXPLICIT])
def test_every_explicit_fixed_step_solver_gives_a_compiled_model_the_same_values_and_gradients(name):
    """The quick ones with a block as it is by default, all others with a light one."""
    model = tiny(solver=name, steps_per_layer=3, block={} if name in QUICK else LIGHT)
    assert_same(compiled(model), model, tokens(), padding())


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_adaptive_and_implicit_solvers_do_too(name):
    options = {"block": {"norm": "res", "norm_options": {}, "coupling": "parallel", "init": "gpt2"}, "solver": name}
    if not SOLVERS[name].is_adaptive:
        options["steps_per_layer"] = 4
    if getattr(SOLVERS[name], "to_equilibrium", False):
        options |= {"injection": True, "weights": "shared"}
    model = tiny(n_layers=1, **options)
    with torch.no_grad():
        for p in model.layers.parameters():
            p.mul_(0.3)  # a field that every iteration converges for
    assert_same(compiled(model), model, tokens(), tolerance=1e-6)


CASES = {
    "dropout": ({"dropout": 0.3}, {}),
    "layer drop": ({}, {"layer_drop": 0.4}),
    "moving weights": ({}, {"weights": "linear"}),
    "experts": ({"feedforward": "experts"}, {}),
    "checkpoint": ({}, {"gradient": "checkpoint"}),
}
MORE = {
    **{f"{key}={value}": ({key: value}, {}) for key, value in (
        ("coupling", "strang"), ("coupling", "parallel"), ("norm", "weighted"), ("position", "rope"),
        ("attention", "local_gaussian"), ("attention", "relative"), ("feedforward", "swiglu"))},
    **{f"{key}={value}": ({}, {key: value}) for key, value in (
        ("weights", "cycle"), ("weights", "spline"), ("weights", "modulated"), ("weights", "lowrank"),
        ("weights", "hyper"), ("fusion", "mean"), ("injection", True), ("gradient", "checkpoint_recursive"))},
    "a mask for each evaluation": ({"dropout": 0.3, "dropout_per": "evaluation"}, {}),
    "shared": ({"dropout": 0.3}, {"weights": "shared", "n_steps": 5}),
    "shared layer drop": ({}, {"weights": "shared", "layer_drop": 0.4, "layer_drop_per": "batch",
                               "layer_drop_schedule": "linear"}),
    "adjoint": ({"dropout": 0.3}, {"gradient": "adjoint", "steps_per_layer": 4}),
    "reversible": ({"dropout": 0.3}, {"solver": "leapfrog", "gradient": "reversible"}),
}


@pytest.mark.parametrize(("block", "depth", "training"), [
    *(pytest.param(*options, True, id=name) for name, options in CASES.items()),
    *(pytest.param(*options, True, id=name, marks=pytest.mark.slow) for name, options in MORE.items()),
    *(pytest.param(*options, False, id=f"{name}, evaluation", marks=() if name == "layer drop" else pytest.mark.slow)
      for name, options in (CASES | MORE).items() if any(word in str(options) for word in ("drop", "experts")))])
def test_a_compiled_model_has_the_values_gradients_and_random_draws_of_the_model(block, depth, training):
    model = tiny(block=block, **{"solver": "midpoint"} | depth).train(training)
    assert_same(compiled(model), model, tokens(), padding())


def test_aot_autograd_gives_the_same_gradients():
    model = tiny(block={"dropout": 0.3})
    assert_same(compiled(model, "aot_eager"), model, tokens(), padding())


def test_a_half_precision_model_keeps_its_state_in_float32():
    model = tiny(n_layers=3, solver="midpoint", steps_per_layer=8).bfloat16().eval()
    twin, ids = compiled(model), tokens()
    wanted = copy.deepcopy(model).double()(ids)
    with torch.no_grad():
        y, y0 = twin(ids), model(ids)
    assert y.dtype == torch.bfloat16
    error, error0 = (y.double() - wanted).abs().mean(), (y0.double() - wanted).abs().mean()
    assert error <= 1.2 * error0


def test_encoder_and_decoder_of_a_seq2seq_model_are_compiled():
    backend = Counting()
    model = Seq2Seq(Seq2SeqConfig(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=2, block=BlockConfig(8, 2))).double()
    twin = compiled(model, backend)
    inputs = tokens(), tokens(2, 6), padding()
    assert_same(twin, model, *inputs)
    assert backend.graphs == 2
    greedy = {"start": 1, "max_new_tokens": 4}
    assert torch.equal(twin.generate(*inputs[::2], **greedy), model.generate(*inputs[::2], **greedy))


def test_a_compiled_model_generates_the_same_tokens_with_and_without_a_cache():
    model = tiny(Decoder, DecoderConfig, solver="midpoint").eval()
    twin, prompt = compiled(model), tokens(2, 3)
    for options in ({}, {"cache": None}):
        assert torch.equal(twin.generate(prompt, max_new_tokens=5, **options),
                           model.generate(prompt, max_new_tokens=5, **options))


# --- in place, and nothing else changes -------------------------------------------------------------------------------
def test_compiling_changes_neither_names_of_parameters_nor_files_and_copies_stay_compiled(tmp_path):
    backend = Counting()
    model = tiny()
    names, ids = list(model.state_dict()), tokens()
    torch._dynamo.reset()
    assert model.compile(backend=backend) is None
    y = model(ids)
    assert list(model.state_dict()) == names
    copied = copy.deepcopy(model)
    assert torch.equal(copied(ids), y)
    assert torch.equal(model.with_solver("euler")(ids), y)
    assert backend.graphs == 1
    model.save(tmp_path)
    loaded = odeformer.load(tmp_path)
    assert loaded.compiled is None
    assert (loaded(ids) - model.eval()(ids)).abs().max() < 1e-12


def test_a_pickled_model_is_compiled_anew():
    model, ids = compiled(tiny()), tokens()
    y = model(ids)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert again.compiled.options == model.compiled.options
    assert again.compiled.functions == {}
    assert torch.equal(again(ids), y)


def test_options_go_to_torch_compile():
    model = tiny(n_layers=1)
    torch._dynamo.reset()
    model.compile(backend="no such backend")
    with pytest.raises(Exception, match="no such backend"):
        model(tokens())


class Reading(nn.Module):
    """A feed-forward layer that reads a value, which no single graph can hold."""

    def __init__(self, d_model, d_ff):
        super().__init__()
        self.linear = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.linear(x) * (2.0 if x.sum().item() > 0 else 1.0)


def test_a_field_that_cannot_be_one_graph_is_refused_unless_several_are_allowed():
    model, ids = tiny(n_layers=1, block={"feedforward": Reading}), tokens()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        compiled(model)(ids)
    assert (compiled(model, fullgraph=False)(ids) - model(ids)).abs().max() < 1e-12


def test_within_torch_func_the_field_is_evaluated_as_it_is_written():
    model, ids = tiny(solver="rk4"), tokens()
    twin = compiled(model)
    fields = [m.vector_field(m.embed(ids)).pieces[1][2] for m in (model, twin)]
    z, v = model.embed(ids).detach(), torch.randn(2, LENGTH, 8, dtype=torch.float64)
    wanted, got = (torch.func.jvp(lambda z: f(z, torch.tensor(1.5)), (z,), (v,)) for f in fields)  # noqa: B023
    assert (wanted[1] - got[1]).abs().max() < 1e-12
    got = torch.func.vjp(lambda z: twin.evolve(z).z, z)[1](v)[0]
    assert (got - torch.func.vjp(lambda z: model.evolve(z).z, z)[1](v)[0]).abs().max() < 1e-10


def test_a_compiled_model_can_be_compiled_as_a_whole():
    model, ids = tiny(n_layers=1), tokens()
    whole = torch.compile(compiled(model), backend="eager", fullgraph=True)
    assert (whole(ids) - model(ids)).abs().max() < 1e-12


def test_second_derivatives_of_what_aot_autograd_compiled_are_refused_by_torch():
    model = compiled(tiny(n_layers=1), "aot_eager")
    loss = model(tokens()).square().sum()
    grads = torch.autograd.grad(loss, list(model.layers.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        sum(g.square().sum() for g in grads).backward()


def test_layers_of_somebody_else_are_refused():
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)
    with pytest.raises(ValueError, match="wrapped model"):
        odeformer.wrap(stack).compile()


def test_a_tableau_of_ones_own_is_compiled():
    solver = ExplicitRungeKutta(SOLVERS["ralston2"].tableau)
    model = tiny(solver="euler").with_solver(solver)
    backend = Counting()
    assert_same(compiled(model, backend), model, tokens())
    assert backend.graphs == 1


# --- inductor ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_inductor_gives_the_same_values_and_gradients_and_training_learns():
    model = tiny(block={"dropout": 0.1}, solver="midpoint").float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin = compiled(model, "inductor")
        assert_same(twin, model, tokens(), padding(), tolerance=2e-4)
        ids, optimizer = tokens(), torch.optim.Adam(twin.parameters(), 1e-2)
        losses = []
        for _ in range(15):
            optimizer.zero_grad()
            loss = (twin(ids)[..., 0] - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("solver", ["euler", "rk4", "ab2"])
def test_a_fixed_step_forward_and_training_step_are_captured_as_cuda_graphs(solver):
    model = tiny(solver=solver, steps_per_layer=3).float().cuda()
    ids = tokens().cuda()

    def step():
        loss = model(ids).square().mean()
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(stream)
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        graph.replay()
    assert loss.isfinite()
    assert all((p.grad - g).abs().max() <= 1e-4 * max(g.abs().max(), 1e-3)
               for p, g in zip(model.parameters(), wanted, strict=True))


def test_counts_and_attention_of_a_compiled_model_are_those_of_the_model_as_written():
    """Their hooks are set after the first call, which compiled layers would not see."""
    from odeformer import diagnostics

    model = Decoder(DecoderConfig(vocab_size=11, max_seq_len=6, n_layers=2, block=BlockConfig(8, 2),
                                  depth=DepthConfig(solver="midpoint"))).eval()
    tokens = torch.arange(6)[None]
    solution = model(tokens, return_solution=True)[1]
    report, weights = model.parameter_report(), diagnostics.attention_maps(solution)
    model.compile(backend="eager")
    with torch.no_grad():
        model(tokens)
        again = model(tokens, return_solution=True)[1]
    assert model.parameter_report() == report
    torch.testing.assert_close(diagnostics.attention_maps(again), weights)
