"""odeformer estimate: operations found without doing them, priced by a machine; and the command line around it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from odeformer import (
    ATTENTION,
    FEEDFORWARD,
    FUSIONS,
    WEIGHTS,
    BlockConfig,
    Decoder,
    DecoderConfig,
    DepthConfig,
    Encoder,
    EncoderConfig,
    Seq2Seq,
    Seq2SeqConfig,
    SeriesConfig,
    SeriesEncoder,
    SpeechConfig,
    SpeechSeq2Seq,
    VisionConfig,
    VisionEncoder,
)
from odeformer.cli import main
from odeformer.estimate import estimate, forward_cost, token_cost
from odeformer.machine import FLOWS, Machine, Table, between, read_off
from odeformer.models.base import to_be_filled
from odeformer.tracing import Operation, Trace, on_nothing, without_choices
from odeformer.workload import inputs, loss
from solvers import SOLVERS, ExplicitRungeKutta

D, HEADS, LAYERS, TOKENS, VOCAB = 16, 2, 3, 8, 11
ROOT = Path(__file__).parent.parent


def decoder(solver="euler", n_layers=LAYERS, block=None, tokens=TOKENS, **depth):
    return Decoder(DecoderConfig(vocab_size=VOCAB, max_seq_len=tokens, n_layers=n_layers,
                                 block=BlockConfig(D, HEADS, **(block or {})),
                                 depth=DepthConfig(solver=solver, **depth)))


def flat(second_per_multiply_add=1e-9, second_per_byte=0.0, pass_=0.0, step=0.0, call=0.0, update=(0.0, 0.0)):
    """A machine on which all takes what it should: products in proportion, adding by bytes, the rest nothing."""
    def table(n, products):
        return Table(n, 0.0, {key: [(1.0, products * n * key * second_per_multiply_add)] for key in (1, 10**6)})

    flows = {kind: [(1.0, 0.0)] for kind in FLOWS} | {"add": [(1.0, second_per_byte)]}
    ways = [(pass_, step, call, 1.0)] * 3
    return Machine(flows, table(1, 1), table(1, 1), table(4, 2), table(4, 5), *ways, update, 1.0, 1)


MODELS = {
    "encoder": lambda: Encoder(EncoderConfig(vocab_size=VOCAB, max_seq_len=TOKENS, n_layers=2,
                                             block=BlockConfig(D, HEADS), head="classification", n_outputs=3)),
    "decoder": decoder,
    "seq2seq": lambda: Seq2Seq(Seq2SeqConfig(vocab_size=VOCAB, max_seq_len=TOKENS, n_layers=2, n_decoder_layers=3,
                                             block=BlockConfig(D, HEADS), depth=DepthConfig(solver="midpoint"))),
    "vision": lambda: VisionEncoder(VisionConfig(image_size=8, patch_size=4, n_classes=3, channels=1, n_layers=2,
                                                 block=BlockConfig(D, HEADS))),
    "series": lambda: SeriesEncoder(SeriesConfig(n_channels=2, n_outputs=3, n_layers=2, head="classification",
                                                 block=BlockConfig(D, HEADS, position="none"))),
    "speech": lambda: SpeechSeq2Seq(SpeechConfig(n_mels=4, max_frames=10, vocab_size=VOCAB, max_seq_len=TOKENS,
                                                 n_layers=2, block=BlockConfig(D, HEADS))),
}


def traces(make, batch=2, tokens=None):
    """The operations of a pass and of a training pass, and the most that is held."""
    model = without_choices(make())
    given = inputs(model, batch, tokens)
    model.eval()
    with torch.no_grad(), Trace() as forward:
        model(*given)
    with Trace() as both:
        loss(model.train(), given)[0].backward()
    return forward, both


def same(make, **sizes):
    """On nothing, a pass has the operations that it has on numbers, and holds as much."""
    real = traces(make, **sizes)
    with on_nothing(), to_be_filled():
        found = traces(make, **sizes)
    for a, b in zip(real, found, strict=True):
        views = Operation("view", ())
        assert {op: n for op, n in a.counts.items() if op != views} == {
            op: n for op, n in b.counts.items() if op != views}
        assert abs(a.counts[views] - b.counts[views]) < 0.1 * a.counts[views]
        assert abs(a.peak - b.peak) < 0.02 * a.peak  # depths, and a mask or two


# what is traced


def often(names, first):
    """All names, those beside the first ones marked as slow."""
    return [name if name in first else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", often(WEIGHTS, ("piecewise", "shared", "spline", "hyper")))
def test_a_pass_on_nothing_has_the_operations_and_holds_the_memory_of_one_on_numbers(name):
    same(lambda: decoder(n_layers=2, weights=name))


FIXED = [name for name, s in SOLVERS.items() if not s.is_adaptive and not s.is_implicit]


@pytest.mark.parametrize("solver", often(FIXED, ("euler", "ab2", "reversible_midpoint")))
def test_every_solver_with_a_known_number_of_evaluations_is_traced(solver):
    """A pass, a training pass, and the writing of a token."""
    def make(n_layers):
        return decoder(solver, n_layers=n_layers, block={"coupling": "parallel", "norm": "none"}, weights="shared")

    try:
        nfe = make(1)(torch.zeros(2, TOKENS, dtype=torch.int64), return_solution=True)[1].nfe
    except ValueError:
        pytest.skip("not for a decoder")
    with on_nothing(), to_be_filled():
        model = without_choices(make(1))
        assert forward_cost(model, inputs(model, 2), flat(), 0).nfe == nfe
        assert token_cost(model, 2, TOKENS // 2, flat(), 0).nfe == nfe
    remembers = not (isinstance(SOLVERS[solver], ExplicitRungeKutta) or hasattr(SOLVERS[solver], "windows"))
    same(lambda: make(2 if remembers else 1))


@pytest.mark.parametrize("name", often([name for name, a in ATTENTION.items() if not getattr(a, "for_memory", False)],
                                       ("window", "relative")))
def test_every_attention_is_traced(name):
    same(lambda: decoder(n_layers=1, block={"attention": name}))


@pytest.mark.parametrize("name", often([name for name in FEEDFORWARD if "expert" not in name], ("swiglu",)))
def test_every_feed_forward_is_traced(name):
    same(lambda: decoder(n_layers=1, block={"feedforward": name}))


@pytest.mark.parametrize("gradient", often(["backprop", "checkpoint", "reversible"], ("checkpoint",)))
def test_gradient_modes_are_traced(gradient):
    solver = "reversible_midpoint" if gradient == "reversible" else "midpoint"
    same(lambda: decoder(solver, weights="shared", block={"coupling": "composed"}, gradient=gradient))


@pytest.mark.parametrize("name", often(FUSIONS, ("learned",)))
def test_every_fusion_is_traced(name):
    same(lambda: decoder(fusion=name))


@pytest.mark.parametrize("name", ["experts", "expert_slices"])
def test_experts_are_taken_as_equally_busy(name):
    """Each token is served by two of four, whoever they are: 2 x 2 d d_ff multiply-adds, as in a dense network of twice
    the width, and those of the router."""
    def make(**block):
        return decoder(n_layers=1, block=block)

    routed = estimate(lambda: make(feedforward=name, d_ff=12, feedforward_options={"n_experts": 4, "top_k": 2}), flat())
    dense = estimate(lambda: make(feedforward="relu", d_ff=24), flat())
    if name == "experts":
        assert routed.forward.multiply_adds - dense.forward.multiply_adds == TOKENS * 4 * D
    assert routed.forward.multiply_adds > 0 and routed.step.seconds > routed.forward.seconds


@pytest.mark.parametrize("name", MODELS)
def test_multiply_adds_of_every_model_are_those_that_torch_counts(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    tokens = 6 if name == "series" else None
    given = inputs(model, 2, tokens)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        _, solution = model(*given, return_solution=True)
    convolved = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "conv" in str(op))
    found = estimate(MODELS[name], flat(), batch=2, n_tokens=tokens)
    assert found.forward.multiply_adds == (counter.get_total_flops() - convolved) // 2
    parts = [getattr(solution, part) for part in ("encoder", "decoder") if hasattr(solution, part)] or [solution]
    assert found.forward.nfe == sum(part.nfe for part in parts)
    assert (found.token is None) == (name != "decoder")


def test_multiply_adds_and_parameters_of_a_plain_decoder_are_those_counted_by_hand():
    """A layer has 12 d² for a token and 2 n d of attention; on the way back twice and 5 / 2 times that."""
    batch = 3
    found = estimate(decoder, flat(), batch=batch)
    block = 12 * D**2 + (4 * D + 4 * D + D) + 4 * D  # matrices, their biases, two norms
    assert found.parameters == VOCAB * D + TOKENS * D + LAYERS * block + 2 * D + D * VOCAB
    head, rows = D * VOCAB, batch * TOKENS
    assert found.forward.multiply_adds == rows * (LAYERS * (12 * D**2 + 2 * TOKENS * D) + head)
    assert found.step.multiply_adds == rows * (LAYERS * (36 * D**2 + 7 * TOKENS * D) + 3 * head)
    seen = TOKENS // 2 + 1
    assert found.token.multiply_adds == batch * (LAYERS * (12 * D**2 + 2 * seen * D) + head)


def test_memory_is_what_is_held_at_most():
    x = torch.randn(1000)
    with Trace() as trace:
        a = x + 1  # 4,000 bytes
        b = a * 2
        del a
        c = b.view(10, 100)[3:5]  # the same storage
        d = torch.cat([c, c])
        del b
    assert trace.peak == 4000 * 2 and trace.live == 4000 + d.nbytes
    del c, d
    assert trace.live == 0


def test_what_a_step_holds_is_what_autograd_keeps_gradients_and_the_optimizers_numbers():
    """At least those, and no more than the largest tensors beside them."""
    model, kept = decoder("rk4"), {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss(model, inputs(model, 4))
    saved = sum(n for n, _ in kept.values())
    weights = sum(p.nbytes for p in model.parameters())
    found = estimate(lambda: decoder("rk4"), flat(), batch=4).step.bytes
    assert 3 * weights + saved <= found <= 4 * weights + saved + 12 * 4 * 4 * TOKENS * 4 * D


def test_accumulating_holds_less_and_does_as_much():
    whole, parts = (estimate(decoder, flat(), batch=8, accumulate=n) for n in (1, 4))
    assert parts.step.multiply_adds == whole.step.multiply_adds and parts.step.bytes < whole.step.bytes
    assert parts.step.seconds == pytest.approx(whole.step.seconds)


# what it is priced at


def test_curves_are_read_between_points_and_beyond_in_proportion():
    curve = [(1.0, 2.0), (10.0, 200.0), (100.0, 20000.0)]  # 2 x²
    assert read_off(curve, 3.0) == pytest.approx(18.0) and read_off(curve, 30.0) == pytest.approx(1800.0)
    assert read_off(curve, 0.1) == 2.0 and read_off(curve, 200.0) == 40000.0
    table = {1: [(1.0, 1.0)], 16: [(1.0, 4.0)]}  # the root of the key, in proportion to the work
    assert between(table, 4, 3.0) == pytest.approx(6.0)
    assert between(table, 32, 1.0) == 8.0 and between(table, 0.5, 1.0) == 1.0


def test_seconds_are_those_of_products_and_of_what_is_around_them():
    batch = 2
    found = estimate(decoder, flat(1e-9), batch=batch)
    for cost in (found.forward, found.step, found.token):
        assert cost.seconds == pytest.approx(1e-9 * cost.multiply_adds)
    with on_nothing():
        forward, both = traces(decoder, batch)
    around = estimate(decoder, flat(1e-30, pass_=10.0, step=1.0, call=1e-3, update=(1e-4, 1e-6)), batch=batch)
    assert around.forward.seconds == pytest.approx(10 + LAYERS + 1e-3 * forward.n_operations, rel=1e-3)
    tensors = 2 + LAYERS * 16 + 2 + 1  # embeddings, matrices and biases and norms of layers, the last norm, the head
    update = 1e-4 * tensors + 1e-6 * found.parameters
    assert around.step.seconds == pytest.approx(10 + LAYERS + 1e-3 * both.n_operations + update, rel=1e-3)


def test_adding_is_priced_by_bytes():
    assert flat(0.0, second_per_byte=1e-9).work(Operation("add", (100, 1200))) == pytest.approx(1.2e-6)
    assert flat().work(Operation("view", ())) == 0


def test_a_machine_comes_back_from_its_file(tmp_path):
    machine = flat(1e-9, 2e-9, 3.0, 4.0, 5.0, (6.0, 7.0))
    machine.save(tmp_path / "machine.json")
    again = Machine.load(tmp_path / "machine.json")
    assert estimate(decoder, again) == estimate(decoder, machine)
    (tmp_path / "machine.json").write_text("{}")
    with pytest.raises(ValueError, match="no measurement of a machine"):
        Machine.load(tmp_path / "machine.json")


@pytest.mark.slow
def test_an_estimate_is_near_what_a_pass_takes(monkeypatch):
    """Within a factor of two on a machine that does other things meanwhile; the benchmark ``scaling`` asks for 20 %."""
    from odeformer import machine

    monkeypatch.setattr(machine, "ROUNDS", 2)
    monkeypatch.setattr(machine, "MOMENT", 1e-3)
    model = decoder("rk4", block={}, tokens=64)
    given = inputs(model, 4)

    def forward():
        with torch.no_grad():
            model(*given)

    found = estimate(lambda: decoder("rk4", tokens=64), machine.measure(), batch=4)
    taken = machine.timed([forward, lambda: loss(model, given)[0].backward()])
    assert 0.5 < found.forward.seconds / taken[0] < 2 and 0.5 < found.step.seconds / taken[1] < 2


# what is refused, and what stays as it was


@pytest.mark.parametrize("solver", ["dopri5", "gauss4"])
def test_a_solver_whose_work_depends_on_the_input_is_refused(solver):
    def make():
        return Encoder(EncoderConfig(vocab_size=4, max_seq_len=4, n_layers=1, block=BlockConfig(
            8, 2, coupling="parallel"), depth=DepthConfig(solver=solver)))

    with pytest.raises(ValueError, match=solver):
        estimate(make, flat())


def test_sizes_that_a_model_does_not_read_are_refused():
    for sizes, name in (({"batch": 0}, "batch"), ({"n_tokens": TOKENS + 1}, "n_tokens"),
                        ({"batch": 2, "accumulate": 3}, "accumulate")):
        with pytest.raises(ValueError, match=name):
            estimate(decoder, flat(), **sizes)
    with pytest.raises(ValueError, match="n_tokens"):
        estimate(MODELS["series"], flat())
    with pytest.raises(ValueError, match="n_tokens"):
        estimate(MODELS["vision"], flat(), n_tokens=4)
    with pytest.raises(TypeError, match="Linear"):
        estimate(lambda: torch.nn.Linear(2, 2), flat())


def test_an_estimate_moves_no_random_state_and_makes_no_model():
    """A model that would need 40 GB is estimated."""
    before = torch.get_rng_state()
    found = estimate(lambda: Decoder(DecoderConfig(vocab_size=32000, max_seq_len=64, n_layers=2,
                                                   block=BlockConfig(20480, 16))), flat())
    assert found.parameters > 10**10 and found.step.bytes > 16 * 10**10 and "GiB" in str(found)
    assert torch.equal(torch.get_rng_state(), before)


# the command line


@pytest.fixture
def machine(tmp_path):
    """A file with a machine's numbers."""
    flat().save(tmp_path / "machine.json")
    return str(tmp_path / "machine.json")


def test_a_settings_file_and_a_folder_are_estimated(tmp_path, machine, capsys):
    (tmp_path / "run.toml").write_text('data = "python_docs"\n[model]\nmax_seq_len = 12\n[block]\nd_model = 16\n'
                                       '[depth]\nsolver = "rk4"\n[train]\nbatch_size = 10\n')
    assert main(["estimate", str(tmp_path / "run.toml"), "--machine", machine, "--model.n_layers", "2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "a batch of 10 x 12 tokens" in said[0] and said[2].split()[:3] == ["forward", "pass", "8"]
    decoder("midpoint").save(tmp_path / "model")
    command = ["estimate", str(tmp_path / "model"), "--machine", machine, "--batch-size", "2", "--tokens", "4"]
    assert main(command) == 0
    said = capsys.readouterr().out
    found = estimate(lambda: decoder("midpoint"), flat(), batch=2, n_tokens=4)
    assert f"{found.forward.multiply_adds:,}" in said and "a batch of 2 x 4 tokens" in said
    assert "a new token" in said and said.strip() == str(found)


def test_what_cannot_be_estimated_comes_out_as_one_line(tmp_path, machine, capsys):
    def said(*arguments):
        assert main(["estimate", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    toml = tmp_path / "run.toml"
    toml.write_text('data = "python_docs"\n')
    assert "dopri5" in said(toml, "--machine", machine, "--depth.solver", "dopri5")
    assert "autocast" in said(toml, "--machine", machine, "--train.autocast", "bfloat16")
    assert "unknown setting" in said(toml, "--machine", machine, "--depth.solvr", "rk4")
    assert "no settings file" in said(tmp_path / "none.toml", "--machine", machine)
    assert "config.json" in said(tmp_path, "--machine", machine)
    decoder().save(tmp_path / "model")
    assert "is for a settings file" in said(tmp_path / "model", "--machine", machine, "--depth.solver", "rk4")
    assert "threads" in said(toml, "--machine", machine, "--threads", "0")
    (tmp_path / "broken.json").write_text("{}")
    assert "no measurement" in said(toml, "--machine", tmp_path / "broken.json")


def test_help_of_every_command_comes_without_torch_but_for_that_of_train():
    """Which lists all settings with their defaults."""
    code = ("import sys, contextlib, io\nfrom odeformer.cli import COMMANDS, main\n"
            "for name in COMMANDS:\n    if name == 'train': continue\n"
            "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
            "        main([name, '--help'])\n"
            "print([m for m in ('torch', 'numpy', 'scipy', 'matplotlib', 'torchdiffeq', 'tqdm') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"
