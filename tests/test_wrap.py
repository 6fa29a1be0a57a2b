"""Residual stacks as they are, under any solver."""

import pytest
import torch
from torch import nn

import solvers
from odeformer import REGULARIZERS, Encoder, EncoderConfig, growth, prune, refit
from odeformer.block import BlockConfig
from odeformer.pretrained import wrap
from solvers import SOLVERS

D, N = 6, 4


class Layer(nn.Module):
    """z + tanh(z W + b) c, c being an argument."""

    def __init__(self, scale=0.3):
        super().__init__()
        self.inner = nn.Linear(D, D)
        self.scale, self.calls = scale, 0

    def forward(self, z, c=1.0):
        self.calls += 1
        return z + self.scale * torch.tanh(self.inner(z)) * c


class Model(nn.Module):
    """An embedding, layers, a head."""

    def __init__(self, layer=Layer, n=N):
        super().__init__()
        self.embedding, self.head = nn.Linear(2, D), nn.Linear(D, 3)
        self.layers = nn.ModuleList(layer() for _ in range(n))

    def forward(self, x, c=1.0):
        z = self.embedding(x)
        for i, layer in enumerate(self.layers):
            z = self.between(layer(z, c=c * (i + 1)), i)
        return self.head(z)

    def between(self, z, i):
        return z


def stack(n=N, **options):
    return nn.ModuleList(Layer(**options) for _ in range(n)).double()


def state(batch=2):
    return torch.randn(batch, 5, D, dtype=torch.float64)


def test_euler_gives_what_the_layers_give_and_calls_each_once():
    layers, z = stack(), state()
    wanted = z
    for layer in layers:
        wanted = layer(wanted, 2.0)
    for layer in layers:
        layer.calls = 0
    got, solution = wrap(layers)(z, 2.0, return_solution=True)
    assert (got - wanted).abs().max() < 1e-14
    assert [layer.calls for layer in layers] == [1] * N and solution.nfe == N
    assert solution.depths == list(range(N + 1)) and torch.equal(solution.states[0], z)


def test_the_layers_stay_the_users_own():
    layers = stack()
    wrapped = wrap(layers)
    assert wrapped.layers is layers and {*wrapped.parameters()} == {*layers.parameters()}
    fine = wrapped.with_solver("rk4", steps_per_layer=2)
    assert fine.layers is layers and wrapped.solver.name == "euler"
    before = fine(z := state())
    with torch.no_grad():
        layers[1].inner.bias.add_(1)
    assert (fine(z) - before).abs().max() > 1e-3


def test_the_field_is_the_layer_minus_the_state_and_rk4_is_the_formula():
    layers, z = stack(2), state()
    f = lambda layer, y: layer(y, 0.5) - y  # noqa: E731
    wanted = z
    for layer in layers:
        a = f(layer, wanted)
        b = f(layer, wanted + a / 2)
        c = f(layer, wanted + b / 2)
        d = f(layer, wanted + c)
        wanted = wanted + (a + 2 * b + 2 * c + d) / 6
    wrapped = wrap(layers, solver="rk4")
    got, solution = wrapped(z, c=0.5, return_solution=True)
    assert (got - wanted).abs().max() < 1e-14 and solution.nfe == 8
    field = wrapped.vector_field(z, c=0.5)
    for depth, layer in ((0.3, layers[0]), (1.0, layers[1])):
        assert (field(z, torch.tensor(depth)) - f(layer, z)).abs().max() < 1e-15
        assert (solution.field(z, torch.tensor(depth)) - f(layer, z)).abs().max() < 1e-15


@pytest.mark.parametrize("name", SOLVERS)
def test_every_solver_works_in_place(name):
    """One layer twice is an autonomous field: all methods of an order above 0 come near the flow."""
    layer, z = Layer(0.2).double(), state(1)[:, :2]
    wrapped = wrap(nn.ModuleList([layer]), n_layers=2)
    solver = SOLVERS[name]
    reference = wrapped.with_solver("dopri8", rtol=1e-10, atol=1e-12)(z).detach()
    try:
        amount = {} if solver.is_adaptive else {"steps_per_layer": 6}
        other = wrapped.with_solver(name, **({"injection": True} if name == "equilibrium" else amount))
    except ValueError as error:
        assert "two parts" in str(error), name  # IMEX methods
        return
    got = other(z)
    assert got.shape == z.shape and got.isfinite().all()
    if solver.order and name not in ("momentum", "equilibrium"):  # a second-order equation, and a rest point
        assert (got - reference).abs().max() < 0.05, name


@pytest.mark.parametrize("solver", ["euler", "rk4"])
def test_injection_draws_wrapped_layers_back_to_the_state_they_started_from(solver):
    layers, z0 = stack(), state()

    class Pull(nn.Module):
        """z + what the layer adds + z0 - z, which a plain stack under the same solver then integrates."""

        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, z):
            return self.layer(z) + z0 - z

    wanted = wrap(nn.ModuleList(map(Pull, layers)), solver=solver)(z0)
    torch.testing.assert_close(wrap(layers, solver=solver, injection=True)(z0), wanted)
    torch.testing.assert_close(wrap(layers).with_solver(solver, injection=True)(z0), wanted)


def test_the_equilibrium_of_a_wrapped_layer_depends_on_its_input_and_needs_injection():
    linear = nn.Linear(4, 4, bias=False).double()
    with torch.no_grad():
        linear.weight.copy_(0.5 * torch.eye(4))
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    found = wrap(nn.ModuleList([linear]), solver="equilibrium", injection=True, rtol=1e-8, atol=1e-10)(x)
    torch.testing.assert_close(found, x / 1.5, rtol=1e-6, atol=1e-7)  # 0 = (z / 2 - z) + x - z
    with pytest.raises(ValueError, match="needs injection=True"):
        wrap(nn.ModuleList([linear]), solver="equilibrium")


@pytest.mark.parametrize(("call", "what"), [
    (lambda model: model.parameter_report(5), "parameter_report"),
    (lambda model: refit.fit(model, "linear"), "fit"),
    (lambda model: prune(model, [0]), "prune"),
    (lambda model: growth.deepen(model), "deepen"),
    (lambda model: REGULARIZERS["weight_smoothness"](model), "weight_smoothness"),
], ids=lambda x: x if isinstance(x, str) else "")
def test_what_needs_layers_of_our_own_says_so(call, what):
    with pytest.raises(ValueError, match=f"{what} is for layers of odeformer's own"):
        call(wrap(stack()))


def test_adaptive_solvers_meet_the_layers_boundaries():
    layers, z = stack(), state()
    reference = wrap(layers, solver="rk4", steps_per_layer=64)(z)
    got = wrap(layers, solver="dopri5", rtol=1e-8, atol=1e-10)(z)
    assert (got - reference).abs().max() < 1e-7


def test_gradients_are_those_of_the_layers_under_every_gradient_mode():
    layers, z = stack(), state().requires_grad_()
    weight, parameter = torch.randn_like(z), layers[0].inner.weight
    x = z
    for layer in layers:
        x = layer(x, 1.0)
    wanted = torch.autograd.grad((x * weight).sum(), [z, parameter])
    for gradient in ("backprop", "checkpoint"):
        got = torch.autograd.grad((wrap(layers, gradient=gradient)(z) * weight).sum(), [z, parameter])
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, wanted, strict=True)), gradient
    exact = torch.autograd.grad((wrap(layers, solver="rk4", steps_per_layer=8)(z) * weight).sum(), [z, parameter])
    adjoint = wrap(layers, solver="rk4", steps_per_layer=8, gradient="adjoint")(z)
    got = torch.autograd.grad((adjoint * weight).sum(), [z, parameter])
    assert all((a - b).abs().max() < 1e-4 * b.abs().max() for a, b in zip(got, exact, strict=True))


def test_a_wrapped_stack_compiles_to_one_graph_and_has_jacobians():
    layers, z = stack(2), state()
    wrapped = wrap(layers, solver="midpoint")
    for layer in layers:
        layer.forward = lambda y, c=1.0, layer=layer: y + torch.tanh(layer.inner(y))  # without the counter
    torch.compiler.reset()
    assert torch.allclose(torch.compile(wrapped, fullgraph=True, backend="eager")(z), wrapped(z), atol=1e-14)
    f, direction = wrapped.vector_field(z), torch.randn_like(z)
    _, tangent = torch.func.jvp(lambda y: f(y, torch.tensor(0.5)), (z,), (direction,))
    h = 1e-6
    secant = (f(z + h * direction, torch.tensor(0.5)) - f(z - h * direction, torch.tensor(0.5))) / (2 * h)
    assert (tangent - secant).abs().max() < 1e-8


# models around a stack


def test_a_model_keeps_its_call_and_its_arguments_for_each_layer():
    model, x = Model().double(), torch.randn(2, 5, 2, dtype=torch.float64)
    wrapped, wanted = wrap(model), model(x, 0.5)
    for layer in model.layers:
        layer.calls = 0
    got, solution = wrapped(x, 0.5, return_solution=True)
    assert wrapped.config.stack == "layers" and wrapped.config.n_layers == N
    assert (got - wanted).abs().max() < 1e-14 and solution.nfe == N
    assert [layer.calls for layer in model.layers] == [1] * N
    assert (solution.states[0] - model.embedding(x)).abs().max() == 0
    z, field = wrapped.begin(x, 0.5)
    assert torch.equal(z, solution.states[0])
    for i, layer in enumerate(model.layers):
        wanted = layer(z, c=0.5 * (i + 1)) - z
        assert (field(z, torch.tensor(i + 0.5)) - wanted).abs().max() < 1e-15


def test_one_layer_called_with_other_arguments_each_time_is_a_field_of_pieces():
    layer, x = Layer().double(), torch.randn(2, 5, 2, dtype=torch.float64)
    model = Model().double()
    model.layers = nn.ModuleList([layer] * N)
    z, field = wrap(model).begin(x)
    assert [piece[:2] for piece in field.pieces] == [(i, i + 1) for i in range(N)]
    assert (field(z, torch.tensor(2.5)) - layer(z, c=3.0) + z).abs().max() < 1e-15


def test_the_model_is_as_it_was_after_a_pass_and_after_an_error():
    model, x = Model().double(), torch.randn(2, 5, 2, dtype=torch.float64)
    wrapped, keys, own = wrap(model, solver="rk4"), list(model.state_dict()), [*model.layers]
    wanted = model(x)
    wrapped(x)
    with pytest.raises(RuntimeError):
        wrapped(x[..., :1])
    assert [*model.layers] == own and list(model.state_dict()) == keys and torch.equal(model(x), wanted)


def test_a_sequential_and_torchs_own_encoder():
    z = state()
    layers = nn.Sequential(*stack())
    assert (wrap(layers)(z) - layers(z)).abs().max() < 1e-14
    layer = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(D), enable_nested_tensor=False).double().eval()
    hidden = torch.arange(5) >= torch.tensor([[5], [3]])
    with torch.no_grad():
        wanted = encoder(z, src_key_padding_mask=hidden)
        wrapped = wrap(encoder)
        assert wrapped.config.stack == "layers"
        assert (wrapped(z, src_key_padding_mask=hidden) - wanted)[~hidden].abs().max() < 1e-12
        assert wrapped.with_solver("rk4")(z, return_solution=True)[1].nfe == 12
        nested = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 8, batch_first=True), 2).double().eval()
        with pytest.raises(ValueError, match="enable_nested_tensor=False"), pytest.warns(UserWarning):
            wrap(nested)(z, src_key_padding_mask=hidden)


class Tuples(Layer):
    """(state, None), or with a second output that the next layer needs."""

    more = False

    def forward(self, z, c=1.0, bias=None):
        y = super().forward(z, c)
        return (y, torch.ones(()) if bias is None else bias) if self.more else (y, None)


class WithTuples(Model):
    def forward(self, x, more=False):
        z, bias, self.seen = self.embedding(x), None, []
        for layer in self.layers:
            layer.more = more
            z, bias = layer(z, bias=bias)
            self.seen.append(bias)
        return self.head(z)


@pytest.mark.parametrize("more", [False, True])
def test_layers_that_give_tuples(more):
    model, x = WithTuples(Tuples).double(), torch.randn(2, 5, 2, dtype=torch.float64)
    wanted = model(x, more)
    got, solution = wrap(model)(x, more, return_solution=True)
    assert (got - wanted).abs().max() < 1e-14 and solution.nfe == N
    assert all((bias is not None) == more for bias in model.seen)
    alone = wrap(nn.ModuleList(model.layers), solver="rk4")(model.embedding(x))
    assert (wrap(model, solver="rk4")(x, more) - model.head(alone)).abs().max() < 1e-14


def test_padding_is_out_of_error_norms_where_the_model_has_an_attention_mask():
    class Masked(Model):
        def forward(self, x, attention_mask=None):
            return super().forward(x)

    model, x = Masked().double(), torch.randn(2, 5, 2, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([[3], [3]])
    wrapped = wrap(model, solver="dopri5", rtol=1e-6)
    spoilt = x.clone()
    spoilt[:, 3:] *= 1e3  # would call for other steps
    steps = [wrapped(y, attention_mask=mask.long(), return_solution=True)[1].steps for y in (x, spoilt)]
    assert steps[0] == steps[1]
    assert wrapped(spoilt, return_solution=True)[1].steps != steps[0]


def test_a_causal_stack_refuses_adaptive_solvers_unless_told():
    layers = stack()
    layers[0].is_causal = True
    assert wrap(layers).causal
    with pytest.raises(ValueError, match="later tokens move earlier outputs"):
        wrap(layers, solver="dopri5")
    with pytest.raises(ValueError, match="later tokens move earlier outputs"):
        wrap(layers).with_solver("dopri5")
    assert wrap(layers, solver="dopri5", causal=False)(state()).isfinite().all()


# what is refused


def test_a_model_without_a_stack_is_told_what_was_looked_for():
    for model in (nn.Linear(2, 2), nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])})):
        with pytest.raises(ValueError, match=r"no residual stack: looked for an nn\.ModuleList"):
            wrap(model)
    with pytest.raises(ValueError, match="must hold layers"):
        wrap(nn.ModuleList())
    with pytest.raises(TypeError, match="int"):
        wrap(3)
    encoder = Encoder(EncoderConfig(vocab_size=4, max_seq_len=4, n_layers=1, block=BlockConfig(8, 2)))
    with pytest.raises(TypeError, match="with_solver"):
        wrap(encoder)


def test_of_several_stacks_one_must_be_chosen():
    both = nn.ModuleDict({"first": Model(), "second": Model(n=2)}).double()
    with pytest.raises(ValueError, match=r"several stacks of layers: first\.layers, second\.layers"):
        wrap(both)
    assert wrap(both, stack="second.layers").config.n_layers == 2
    for wrong in ("third", "first.head", ""):
        with pytest.raises(ValueError, match="stack"):
            wrap(both, stack=wrong)
    with pytest.raises(ValueError, match="stack"):
        wrap(stack(), stack="layers")


def test_layers_that_change_the_shape_are_named():
    layers = nn.ModuleList([Layer(), nn.Linear(D, D + 1)]).double()
    with pytest.raises(ValueError, match=r"layer 1 \(Linear\) must keep the state's shape \(2, 5, 6\), got \(2, 5, 7"):
        wrap(layers)(state())

    class Wide(Model):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(n, n + 1)) for n in range(D, D + 3))

        def forward(self, x):
            z = self.embedding(x)
            for layer in self.layers:
                z = layer(z)
            return z
    with pytest.raises(ValueError, match=r"layer 0 \(Sequential\) must keep"):
        wrap(Wide())(torch.randn(2, 5, 2))
    with pytest.raises(ValueError, match="must give a state"):
        wrap(nn.ModuleList([nn.LSTM(D, D), Dicts()]))(torch.randn(2, 5, D))


class Dicts(nn.Module):
    def forward(self, z):
        return {"z": z}


def test_weights_that_are_no_numbers_are_named():
    model = Model()
    with torch.no_grad():
        model.layers[2].inner.bias[1] = float("nan")
    with pytest.raises(ValueError, match=r"NaN or infinity in layers\.2\.inner\.bias"):
        wrap(model)


def test_models_that_do_more_than_call_layers_in_turn_are_refused():
    class More(Model):
        def between(self, z, i):
            return z * 2 if i == 1 else z

    class Fewer(Model):
        def forward(self, x):
            return self.layers[0](self.embedding(x))

    class Twice(Model):
        def forward(self, x):
            return super().forward(x) + super().forward(x)

    x = torch.randn(2, 5, 2)
    with pytest.raises(ValueError, match="changes the state between layers 1 and 2"):
        wrap(More())(x)
    with pytest.raises(ValueError, match=r"called 1 times.*n_layers is 4"):
        wrap(Fewer())(x)
    assert wrap(Fewer(), n_layers=1)(x).shape == (2, 5, D)
    with pytest.raises(ValueError, match=r"more often than n_layers = 4|between layers"):
        wrap(Twice())(x)


def test_options_that_a_stack_does_not_have_are_named():
    for name in ("weights", "fusion", "layer_drop", "step"):
        with pytest.raises(ValueError, match=f"unknown option '{name}'.*solver"):
            wrap(stack(), **{name: 1})
    with pytest.raises(ValueError, match="n_layers"):
        wrap(stack(), n_layers=0)
    with pytest.raises(ValueError, match="layer_drop"):
        wrap(stack()).with_solver("rk4", layer_drop=0.5)
    with pytest.raises(ValueError, match="two parts"):
        wrap(stack(), solver="imex_euler")
    with pytest.raises(ValueError, match="to be saved"):
        wrap(stack()).save("nowhere")


def test_dropout_is_refused_where_it_would_look_like_an_error():
    layers = nn.ModuleList(nn.TransformerEncoderLayer(D, 2, 8, batch_first=True) for _ in range(2)).double()
    wrapped = wrap(layers, solver="dopri5")
    with pytest.raises(ValueError, match=r"dropout.*0\.dropout"):
        wrapped(state())
    assert wrapped.eval()(state()).isfinite().all()
    assert wrap(layers.train(), solver="rk4")(state()).isfinite().all()


def test_the_field_of_a_wrapped_model_goes_into_solve():
    model, x = Model().double(), torch.randn(2, 5, 2, dtype=torch.float64)
    z, field = wrap(model).begin(x)
    solution = solvers.solve(field, z, span=(0.0, float(N)), solver="midpoint", n_steps=2 * N)
    assert (model.head(solution.z) - wrap(model, solver="midpoint", steps_per_layer=2)(x)).abs().max() < 1e-14
