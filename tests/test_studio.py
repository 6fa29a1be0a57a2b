"""The stability report: what it says follows from the numbers, which are those of known fields and dense Jacobians."""

import json
import math
import re
from html import unescape

import numpy as np
import pytest
import torch
from browser import Reader, answer, needs_browser
from torch import nn

from odeformer import (
    BlockConfig,
    Decoder,
    DecoderConfig,
    DepthConfig,
    Encoder,
    EncoderConfig,
    Seq2Seq,
    Seq2SeqConfig,
    VisionConfig,
    VisionEncoder,
)
from odeformer.models import SeriesConfig, SeriesEncoder
from odeformer.pretrained import wrap
from odeformer.studio import explorer, methods, report, stability_report
from odeformer.studio.modes import shares, ways_out
from odeformer.studio.report import JUDGED, SECTIONS, studied, verdicts
from odeformer.studio.stack import Limits
from odeformer.studio.targets import resolve
from solvers import SOLVERS, get_solver
from solvers.stability import growth_factor, imaginary_interval, is_stable, real_interval


class Linear(nn.Module):
    """z -> z + A z: a layer whose field is A."""

    def __init__(self, a):
        super().__init__()
        self.map = nn.Linear(len(a), len(a), bias=False, dtype=torch.float64)
        self.map.weight.data = torch.as_tensor(a, dtype=torch.float64)

    def forward(self, z):
        return z + self.map(z)


def linear(a, n_layers=4, **options):
    """A model whose depth is n_layers of z' = A z."""
    return wrap(nn.ModuleList([Linear(a) for _ in range(n_layers)]), **options)


def found(model, inputs=None, **limits):
    """The one stack of a model, and what each section found."""
    (target,) = resolve([model])
    ((stack, findings),) = studied(target, inputs, Limits(**limits))
    return stack, findings


def said(stack, findings, name):
    assert not isinstance(findings[name], str), findings[name]
    return SECTIONS[name].say(stack, findings[name])


def judged(stack, findings):
    return {line.question: line for line in verdicts(stack, findings)}


def only(monkeypatch, *names):
    """Reports of these sections alone."""
    monkeypatch.setattr(report, "SECTIONS", {name: SECTIONS[name] for name in names})
    monkeypatch.setattr(report, "JUDGED", [name for name in JUDGED if name in names])


STATES = torch.tensor([[[1.0, 0.5], [-0.3, 0.8]]], dtype=torch.float64)
ROTATION = [[0.0, -1.0], [1.0, 0.0]]
BLOCK = BlockConfig(d_model=8, n_heads=2, d_ff=16)


def text_model(**options):
    depth = DepthConfig(**options)
    return Encoder(EncoderConfig(vocab_size=20, max_seq_len=8, n_layers=3, block=BLOCK, depth=depth)).double()


def test_a_rotation_is_said_to_turn_and_nothing_to_decay():
    """λ = ±i: Euler's factor is |1 + i| = √2 a step, the flow keeps lengths; the field is normal and μ = 0."""
    stack, findings = found(linear(ROTATION), STATES)
    modes = findings["region"]
    assert torch.allclose(modes.whole.eigenvalues.imag.abs(), torch.ones(4, 1, 4, dtype=torch.float64))
    region, spectra, growth = (said(stack, findings, name) for name in ("region", "spectra", "growth"))
    assert "0 % of all 4 eigenvalues" in region and "No mode decays." in region
    assert "100 % have a larger imaginary than real part, so the field mostly turns" in spectra
    assert "the median 0 " in growth and "near normal" in growth and "at least 1 " in growth
    assert "accuracy alone limits the step" in said(stack, findings, "reach")
    lyapunov = said(stack, findings, "lyapunov")
    assert "difference is as large at the end as at the start" in lyapunov and "wilder than the flow" in lyapunov
    exponent = findings["lyapunov"].discrete.exponents[0, 0]
    assert exponent.item() == pytest.approx(math.log(2) / 2, abs=1e-9)
    assert "4 times as large at the first layer" in said(stack, findings, "gradients")  # √2 to the 4th
    assert judged(stack, findings)["How stiff is it?"].answer == "not stiff"


def test_a_fast_decay_is_said_to_be_stiff_and_outside():
    """λ = -3, h = 1: Euler is stable up to h = 2/3, rk4 up to 2.785 / 3, backward Euler always."""
    stack, findings = found(linear([[-3.0, 0.0], [0.0, -3.0]]), STATES)
    region, reach = said(stack, findings, "region"), said(stack, findings, "reach")
    assert "At h = 1, 0 % of all 4 eigenvalues" in region and "0 % are inside, so the solver makes the others" in region
    assert "up to h = 0.667 and is used at 1, beyond that" in reach
    steps = {x.name: x.smallest for x in findings["reach"]}
    assert steps["rk4"] == pytest.approx(-real_interval("rk4") / 3, rel=1e-6)
    assert steps["ab2"] == pytest.approx(1 / 3, rel=1e-6) and steps["backward_euler"] == math.inf
    assert float(findings["stiffness"].index.max()) == pytest.approx(12)  # 3 times the 4 layers to go
    lines = judged(stack, findings)
    assert lines["How stiff is it?"].answer == "stiff" and lines["Is this depth a smooth ODE?"].answer == "no"
    assert lines["Is h λ inside the region of its solver?"].answer == "no"
    assert "undo each other" in said(stack, findings, "directions")  # z is multiplied by -2 in each step
    assert "its layers are not steps of a flow" in said(stack, findings, "global")


def test_the_step_is_the_one_that_keeps_95_percent_inside(monkeypatch):
    """Of 40 decaying modes 38 have λ = -1 and 2 have λ = -10: Euler's 2 / |λ| is 2 for 95 % of them, 0.2 for all."""
    only(monkeypatch, "reach")
    a = torch.diag(torch.tensor([-10.0] * 2 + [-1.0] * 38 + [0.5] * 3))
    findings = found(linear(a, n_layers=2), torch.randn(1, 1, 43).double())[1]
    euler = next(x for x in findings["reach"] if x.name == "euler")
    assert euler.h.tolist() == pytest.approx([2, 2]) and euler.strict.tolist() == pytest.approx([0.2, 0.2])
    assert euler.cost == pytest.approx(0.5)


def test_a_slow_decay_is_said_to_be_a_smooth_ode():
    """λ = -0.05 over 4 layers: Euler's 0.95^4 is 0.5 % off exp(-0.2)."""
    stack, findings = found(linear([[-0.05, 0.0], [0.0, -0.05]]), STATES)
    error = abs(0.95**4 - math.exp(-0.2)) / math.exp(-0.2)
    assert findings["global"].own == pytest.approx(error, rel=1e-4)
    assert findings["global"].order == pytest.approx(1.0, abs=0.02)
    lines = judged(stack, findings)
    assert [lines[question].grade for question in ("Is this depth a smooth ODE?", "How stiff is it?",
                                                   "Is h λ inside the region of its solver?")] == ["good"] * 3
    assert "refining its steps would hardly change the network" in said(stack, findings, "global")
    assert "up to h = 40 and is used at 1, within that" in said(stack, findings, "reach")
    assert "a smooth path" in said(stack, findings, "directions") and "small, so" in said(stack, findings, "steps")
    assert "nearly the same network under each" in said(stack, findings, "invariance")
    assert "All layers have the same weights" in said(stack, findings, "weights")


def test_every_sentence_is_another_for_another_model():
    slow, fast = (found(linear(a), STATES) for a in (-0.05 * np.eye(2), [[-3.0, 2.0], [-1.0, 0.5]]))
    skipped = {name for name in SECTIONS if isinstance(slow[1][name], str) or isinstance(fast[1][name], str)}
    assert skipped == {"attention"}  # linear layers have none
    for name in SECTIONS.keys() - skipped - {"weights"}:
        assert said(*slow, name) != said(*fast, name), name


def test_layers_that_differ_are_told_from_layers_that_do_not(monkeypatch):
    only(monkeypatch, "weights", "limit")
    torch.manual_seed(1)
    stack, findings = found(wrap(nn.ModuleList([Linear(0.3 * torch.randn(2, 2)) for _ in range(6)])), STATES)
    assert judged(stack, findings)["Are weights smooth in depth?"].answer in ("no", "in part")
    near = [torch.eye(2) * (0.1 + 0.01 * i) for i in range(6)]
    stack, findings = found(wrap(nn.ModuleList([Linear(a) for a in near])), STATES)
    assert judged(stack, findings)["Are weights smooth in depth?"].answer == "yes"


def test_eigenvalues_in_the_page_are_those_of_torch_func(monkeypatch):
    """Dense Jacobians of whole field and sublayers, by reverse mode at the states of an Euler forward pass."""
    only(monkeypatch, "region")
    model = text_model().eval()
    tokens = torch.randint(0, 20, (1, 5))
    stack, findings = found(model, tokens)
    data = explorer.data(stack, findings["region"])
    assert [field["name"] for field in data["fields"]] == ["the whole field", "attention", "feed-forward"]
    f, z = model.vector_field(model.embed(tokens)), model.embed(tokens).detach()
    for i, (_, _, piece) in enumerate(f.pieces):
        l = torch.tensor(float(i), dtype=torch.float64)
        for field, g in zip(data["fields"], [piece, *piece.parts], strict=True):
            dense = torch.func.jacrev(lambda x, g=g, l=l: g(x, l))(z).reshape(40, 40)
            expected = torch.linalg.eigvals(dense)
            pairs = np.array(field["values"][i]).reshape(-1, 2)
            got = torch.from_numpy(pairs[:, 0] + 1j * pairs[:, 1])
            assert len(got) == 40
            apart = (got[:, None] - expected[None]).abs()
            assert apart.amin(1).max() < 1e-6 and apart.amin(0).max() < 1e-6
        for part in piece.parts:  # Lie: sublayers take turns
            z = (z + part(z, l)).detach()


def test_shares_are_those_of_the_parts_that_take_turns(monkeypatch):
    only(monkeypatch, "region")
    stack, findings = found(text_model(), torch.randint(0, 20, (1, 5)))
    modes = findings["region"]
    assert stack.turns and list(modes.stepped) == ["attention", "feed-forward"]
    inside = [is_stable("euler", modes.fields[name].eigenvalues.numpy()) for name in modes.stepped]
    assert float(shares(modes)[-1]) == pytest.approx(np.mean(inside))
    whole = found(text_model(solver="leapfrog"), torch.randint(0, 20, (1, 5)))[1]["region"]
    assert list(whole.stepped) == ["the whole field"]  # it remembers states, so it takes the sum


@pytest.mark.parametrize("name", [name for name in explorer.METHODS if name in SOLVERS])
def test_polynomials_amplify_as_the_method_does(name):
    method, rng = get_solver(name), np.random.default_rng(0)
    z = rng.normal(size=30) * 2 + 2j * rng.normal(size=30)
    c = [np.polynomial.polynomial.polyval(z, p) for p in explorer.polynomials(method)]
    got = np.array([np.abs(np.roots([x[i] for x in c])).max() for i in range(len(z))])
    assert np.allclose(got, growth_factor(method, z), rtol=1e-6)


@pytest.mark.parametrize("name", ["euler", "rk4", "ab3", "bdf2"])
def test_ways_out_end_where_intervals_do(name):
    ways = ways_out(get_solver(name))
    assert ways[-1] == pytest.approx(-real_interval(name), rel=1e-6)
    if name in ("rk4", "ab3"):  # near the imaginary axis
        assert ways[0] == pytest.approx(imaginary_interval(name), rel=0.01)


def every_model():
    block, tokens = BLOCK, torch.randint(0, 20, (2, 6))
    shape = {"vocab_size": 20, "max_seq_len": 8, "n_layers": 2, "block": block}
    yield "decoder", Decoder(DecoderConfig(**shape, depth=DepthConfig(solver="rk4", weights="shared"))), None
    yield "adaptive", Encoder(EncoderConfig(**shape, depth=DepthConfig(solver="dopri5", rtol=1e-2))), None
    yield "no region", Encoder(EncoderConfig(**shape, depth=DepthConfig(solver="rk2_gate"))), tokens
    yield "fused", Encoder(EncoderConfig(**shape, depth=DepthConfig(fusion="mean"))), tokens
    yield "one layer", Encoder(EncoderConfig(**shape | {"n_layers": 1})), tokens
    yield "one token", Encoder(EncoderConfig(**shape)), tokens[:, :1]
    yield "masked", Encoder(EncoderConfig(**shape)), {"tokens": tokens, "mask": torch.arange(6) < torch.tensor(
        [[6], [4]])}
    yield "composed", Encoder(EncoderConfig(**shape | {"block": BlockConfig(d_model=8, n_heads=2, norm="post",
                                                                             coupling="composed")})), None
    yield "images", VisionEncoder(VisionConfig(image_size=4, patch_size=2, channels=1, n_classes=3, n_layers=2,
                                               block=block)), None
    yield "series", SeriesEncoder(SeriesConfig(n_channels=2, n_outputs=1, n_layers=2, block=BlockConfig(
        d_model=8, n_heads=2, position="none"))), None
    yield "torch", nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3,
                                         enable_nested_tensor=False), torch.randn(2, 4, 8)


MODELS = {name: (model, inputs) for name, model, inputs in every_model()}
MISSING = {"one layer": {"directions", "curvature", "limit", "weights"}, "one token": {"tokens"},
           "torch": set()}


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_has_its_numbers_and_sentences(name):
    model, inputs = MODELS[name]
    stack, findings = found(model, inputs, max_tokens=5, samples=2, max_layers=2)
    absent = {section for section, x in findings.items() if isinstance(x, str)}
    few = {"limit", "weights"} if stack.run.states.shape[0] < 4 else set()
    assert absent <= MISSING.get(name, set()) | few, {section: findings[section] for section in absent}
    for section in SECTIONS.keys() - absent:
        text = said(stack, findings, section)
        assert text.endswith((".", ")")) and "nan" not in text.split() and "  " not in text, (section, text)
    assert len(verdicts(stack, findings)) == len([x for x in JUDGED if x not in absent])
    assert all(module.training for module in model.modules())  # as it was


def test_an_encoder_and_its_decoder_are_two_stacks(monkeypatch):
    only(monkeypatch, "region", "global")
    model = Seq2Seq(Seq2SeqConfig(vocab_size=20, max_seq_len=8, n_layers=2, n_decoder_layers=3, block=BLOCK))
    (target,) = resolve(model)
    stacks = studied(target, None, Limits(samples=2, max_tokens=4))
    assert [stack.name for stack, _ in stacks] == ["Seq2Seq: encoder", "Seq2Seq: decoder"]
    assert [stack.length for stack, _ in stacks] == [2, 3]
    assert stacks[1][0].parts == ["attention", "cross-attention", "feed-forward"]


@pytest.mark.slow
def test_the_same_input_gives_the_same_report(tmp_path, monkeypatch):
    only(monkeypatch, "region", "lyapunov", "paths")
    model = text_model()
    paths = [stability_report(model, tmp_path / f"{i}.html", samples=2, max_tokens=4, seed=5) for i in range(2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize(("targets", "options", "message"), [
    ("rk5", {}, r"unknown target 'rk5'.*no solver and no folder.*rk4"),
    ([], {}, "targets must name at least one"),
    ("rk4", {"inputs": STATES}, "inputs are for models"),
    (nn.Linear(2, 2), {}, "Linear has no residual stack"),
    (nn.Sequential(nn.Conv1d(2, 2, 1)), {}, "inputs must be given for Sequential"),
    ("rk4", {"samples": 0}, "samples must be at least 1"),
])
def test_what_cannot_be_reported_on_is_refused(tmp_path, targets, options, message):
    with pytest.raises(ValueError, match=message):
        stability_report(targets, tmp_path / "a.html", **options)
    assert not (tmp_path / "a.html").exists()


def test_another_object_and_a_folder_without_a_model_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"a target must be the name of a solver.*got int"):
        stability_report([3], tmp_path / "a.html")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        stability_report(tmp_path, tmp_path / "a.html")


def test_a_model_saved_in_half_precision_is_looked_at_in_float32(tmp_path, monkeypatch):
    only(monkeypatch, "steps")
    text_model().bfloat16().save(tmp_path)
    stack, findings = found(tmp_path, samples=1, max_tokens=4)
    assert stack.run.states.dtype == torch.float32 and "The median is" in said(stack, findings, "steps")


def test_weights_that_are_not_finite_are_named(tmp_path):
    model = text_model()
    model.layers[1].attention.core.query.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"these are not: layers\.1\.attention\.core\.query\.weight"):
        stability_report(model, tmp_path / "a.html")


def test_what_does_not_fit_into_memory_says_how_much_it_takes(tmp_path):
    """40 numbers a row: a Jacobian, its copies and eigenvalues are 3 x 40 x 40 x 8 = 38,400 bytes."""
    with pytest.raises(ValueError, match="38,400 bytes and max_bytes is 10,000"):
        stability_report(text_model(), tmp_path / "a.html", inputs=torch.randint(0, 20, (1, 5)), max_bytes=10_000)


def test_a_large_state_has_its_leading_eigenvalues_looked_for(monkeypatch):
    """Of a diagonal field the largest, the leftmost and the rightmost are there, and the report says which."""
    only(monkeypatch, "region")
    monkeypatch.setattr("odeformer.studio.modes.WHOLE", 10)
    diagonal = torch.linspace(-2.0, 0.5, 60).double()
    stack, findings = found(linear(torch.diag(diagonal), n_layers=2), torch.randn(1, 1, 60).double())
    λ = findings["region"].whole.eigenvalues[0, 0]
    λ = λ[~λ.isnan()]
    assert λ.real.min().item() == pytest.approx(-2, abs=0.02) and λ.real.max().item() == pytest.approx(0.5, abs=0.02)
    apart = (λ[:, None] - λ[None]).abs() + torch.eye(len(λ)) * 9
    assert apart.min() > 0.02  # each once
    assert "leading eigenvalues found" in said(stack, findings, "region")


def test_methods_are_compared_by_their_intervals():
    names = ["euler", "rk4", "ab2", "backward_euler", "strang"]
    solvers = [get_solver(name) for name in names]
    rows = [methods.row(solver) for solver in solvers]
    assert [row[4] for row in rows[:2]] == pytest.approx([2.0, 2.785293563], abs=1e-6) and rows[4][4] is None
    text = methods.say(solvers, rows)
    assert "rk4 reaches farthest along the real axis, to -2.79, and euler for the evaluations" in text
    assert "Rotations stay bounded under rk4 and backward_euler, and grow at any step under euler and ab2." in text
    assert "backward_euler is stable along the whole negative axis" in text and "strang has no region" in text
    counted = {name: methods.evaluations(get_solver(name)) for name in ("rk4", "ab2", "dopri54", "dopri5", "strang")}
    assert counted == {"rk4": 4, "ab2": 1, "dopri54": 6, "dopri5": 6, "strang": 3}  # FSAL stages are not evaluated


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report on two models and two solvers."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("report")
    model = text_model()
    model.save(folder / "saved")
    path = stability_report([folder / "saved", "rk4", "ab2"], folder / "report.html", samples=1, max_tokens=4)
    return path, path.read_text(encoding="utf-8")


def embedded(text):
    return json.loads(unescape(re.search(r'<script type="application/json">(.*?)</script>', text, re.DOTALL).group(1)))


def test_the_report_is_one_file_with_a_summary_and_every_section(written):
    _, text = written
    read = Reader(text)
    assert read.loads() == [] and "://" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for section in SECTIONS.values():
        assert section.title in read.text and section.how.replace("`", "") in read.text, section.title
    assert "Is this depth a smooth ODE?" in read.text and "Stability regions of rk4 and ab2" in read.text
    assert "random token ids: no data were named" in read.text and "saved: its depth" in read.text
    assert read.text.index("Summary") < read.text.index("Which solver could take bigger steps?")


COUNTS = """
var box=document.querySelector(".explorer"),part={},out=[];
box.querySelectorAll("[data-part]").forEach(function(e){part[e.dataset.part]=e});
function count(){var d=part.count.dataset;return [d.inside,d.total,d.damped,d.decaying].map(Number)}
function set(name,value){part[name].value=value;part[name].dispatchEvent(new Event("input",{bubbles:true}))}
for(var m=0;m<part.method.options.length;m++)for(var k=0;k<HS.length;k++){
  set("method",m);set("h",HS[k]);
  out.push([part.method.options[m].textContent,HS[k],count(),part.shown.textContent]);
}
set("method",0);set("h",0);set("layer",2);set("field",1);
var one=count();
part.h.focus();
var focused=document.activeElement===part.h;
set("h",2);part.reset.click();
var pixels=part.canvas.getContext("2d").getImageData(0,0,part.canvas.width,part.canvas.height).data,colors=new Set();
for(var i=0;i<pixels.length;i+=4)colors.add(pixels[i]+","+pixels[i+1]+","+pixels[i+2]);
return {out:out,one:one,focused:focused,reset:part.h.value,colors:colors.size,
  label:part.h.getAttribute("aria-valuetext"),
  page:document.documentElement.scrollWidth,words:part.count.textContent};
"""


@needs_browser
def test_the_slider_counts_as_the_root_condition_does(written, tmp_path):
    """For each method and step the share in a browser is that of solvers.stability on the same numbers."""
    path, text = written
    data, steps = embedded(text), [-1.3, 0.45, 2.1]  # away from boundaries
    got = answer(path, COUNTS.replace("HS", json.dumps(steps)), tmp_path, width=390)
    values = [np.array(row).reshape(-1, 2) @ [1, 1j] for row in data["fields"][0]["values"]]
    λ = np.concatenate(values)
    decaying = λ.real < -data["flat"] * max(np.abs(np.concatenate([np.array(row).reshape(-1, 2) @ [1, 1j]
                                                                  for f in data["fields"] for row in f["values"]])))
    assert len(got["out"]) == len(data["methods"]) * len(steps)
    for name, power, counts, _ in got["out"]:
        inside = is_stable(name, data["h"] * 2**power * λ)
        expected = [inside.sum(), len(λ), (inside & decaying).sum(), decaying.sum()]
        assert np.abs(np.array(counts) - expected).max() <= (0 if name != "leapfrog" else 2), (name, power)
    assert got["one"][1] == len(data["fields"][1]["values"][1]) // 2
    assert got["focused"] and got["reset"] == "0" and got["label"] == "h = 1" and got["colors"] > 5
    assert got["page"] <= 390 and "eigenvalues are inside the region of" in got["words"]


def test_the_report_names_what_was_not_measured(tmp_path, monkeypatch):
    only(monkeypatch, "weights", "attention", "invariance")
    path = stability_report(linear(ROTATION, n_layers=1), tmp_path / "a.html", inputs=STATES)
    text = Reader(path.read_text(encoding="utf-8")).text
    assert "Not measured: two layers are needed to compare weights, got 1." in text
    assert "Not measured: the field has no attention" in text


def test_the_run_beside_a_model_gives_its_data_and_its_loss(tmp_path, monkeypatch):
    only(monkeypatch, "gradients")
    from odeformer import settings

    config = VisionConfig(image_size=8, patch_size=4, channels=1, n_classes=10, n_layers=2, block=BLOCK)
    VisionEncoder(config).save(tmp_path)
    (tmp_path / settings.FILE).write_text('data = "digits"\n')
    stack, findings = found(str(tmp_path), samples=3)
    assert stack.source == "the first 3 test examples of digits" and stack.run.states.shape[1] == 3
    assert "the loss it was trained on" in said(stack, findings, "gradients")
    assert stack.loss(stack.run.states[-1]).item() == pytest.approx(math.log(10), rel=1e-4)  # its head begins at 0


def test_no_section_is_judged_and_left_out():
    assert set(JUDGED) == {name for name, section in SECTIONS.items() if section.judge is not None}
    assert report.MARKS.keys() == {"good", "warn", "bad", ""}
