"""The parts of a training run: groups of parameters, schedules, accumulation, averages, early stopping, the data order.
"""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig, Seq2Seq, Seq2SeqConfig, VisionConfig, load
from odeformer import VisionEncoder as Vision
from odeformer.best import Best
from odeformer.checkpoint import random_states, set_random_states
from odeformer.data.images import Images
from odeformer.ema import Average
from odeformer.optim import KINDS, adamw, groups, kinds, kinds_table
from odeformer.order import BatchOrder, put_aside
from odeformer.regularizers import REGULARIZERS
from odeformer.schedules import SCHEDULES, agree
from odeformer.tasks import Classification, Language, SeriesPrediction, Task, Translation
from odeformer.train import TrainConfig, Trainer

TEXT = torch.randint(8, (400,), generator=torch.Generator().manual_seed(0))


def decoder(**options):
    torch.manual_seed(0)
    depth, block = options.pop("depth", DepthConfig()), BlockConfig(8, 2, **options)
    return Decoder(DecoderConfig(vocab_size=8, max_seq_len=10, n_layers=2, depth=depth, block=block))


def language(**options):
    return Language("noise", TEXT, TEXT[:50], length=10, **options)


# ---- AdamW


def test_matrices_are_decayed_and_no_other_kind_of_parameter_is():
    block = {"attention": "relative", "feedforward": "experts"}
    model = decoder(**block, depth=DepthConfig(solver="dense"))
    found = kinds(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    wanted = {"token_embedding.weight": "embedding", "position.table": "position", "solver.a": "coefficient",
              "layers.0.attention.core.query.weight": "matrix", "layers.0.attention.core.query.bias": "bias",
              "layers.0.attention.core.key_table": "position", "layers.0.attention.placement.norm.weight": "norm",
              "layers.0.attention.placement.norm.bias": "norm", "layers.0.feedforward.core.hidden.weight": "matrix",
              "layers.0.feedforward.core.hidden.bias": "bias", "layers.0.feedforward.core.router.weight": "matrix",
              "head.weight": "matrix", "final_norm.weight": "norm"}
    assert {name: found[name] for name in wanted} == wanted
    assert [name for name, kind in KINDS.items() if kind.decayed] == ["matrix"]
    fused = kinds(decoder(depth=DepthConfig(fusion="learned")))
    assert fused["fusion.a.0"] == "vector" and fused["fusion.b.0"] == "scalar"
    torch.manual_seed(0)
    image = Vision(VisionConfig(image_size=4, patch_size=2, channels=1, n_classes=2, n_layers=1, pooling="class_token",
                                block=BlockConfig(8, 2, norm="weighted")))
    assert kinds(image)["class_token"] == "vector" and kinds(image)["patch_embedding.weight"] == "matrix"
    assert all(kind == "norm" for name, kind in kinds(image).items() if "placement" in name)
    tied = Seq2Seq(Seq2SeqConfig(vocab_size=8, max_seq_len=8, n_layers=1, block=BlockConfig(8, 2), tie_embeddings=True,
                                 share_embeddings=True))
    assert [kind for name, kind in kinds(tied).items() if "embedding" in name or "head" in name] == ["embedding"]


def test_the_first_update_of_adamw_is_its_formula_with_decay_on_matrices_alone():
    """w ← w - η λ w - η g / (|g| + ε) after one step (Kingma & Ba 2015; Loshchilov & Hutter 2019)."""
    model = decoder().double()
    optimizer = adamw(model, learning_rate=0.1, weight_decay=0.5, betas=(0.8, 0.9), epsilon=1e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(TEXT[:10][None]).logsumexp(-1).sum().backward()
    optimizer.step()
    for name, p in model.named_parameters():
        decay = 0.5 if kinds(model)[name] == "matrix" else 0.0
        wanted = before[name] * (1 - 0.1 * decay) - 0.1 * p.grad / (p.grad.abs() + 1e-3)
        assert (p - wanted).abs().max() < 1e-12, name


def test_frozen_parameters_are_in_no_group_and_a_frozen_model_is_refused():
    model = decoder()
    model.token_embedding.requires_grad_(False)
    chosen = {id(p) for group in groups(model, 0.1) for p in group["params"]}
    assert chosen == {id(p) for name, p in model.named_parameters() if name != "token_embedding.weight"}
    with pytest.raises(ValueError, match="all are frozen"):
        adamw(model.requires_grad_(False), learning_rate=1.0, weight_decay=0.0)


def test_the_table_of_kinds_has_a_line_for_each_parameter():
    model = decoder()
    lines = kinds_table(model).splitlines()
    assert len(lines) == 1 + len(list(model.parameters()))
    assert "layers.0.attention.core.query.weight        8 x 8   matrix     yes" in lines
    row = next(line for line in lines if line.startswith("position.table")).split()
    assert row == ["position.table", "10", "x", "8", "position", "no"]


# ---- schedules


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_warms_up_linearly_and_stays_within_0_and_1(name):
    factors = [SCHEDULES[name](step, warmup=10, total=100) for step in range(1, 121)]
    assert factors[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert all(0 <= factor <= 1 for factor in factors)


def test_wsd_is_1_and_then_falls_as_its_shape_says():
    """Hu et al. 2024; 1 - sqrt(x) of Hägele et al. 2024."""
    wsd = SCHEDULES["wsd"]
    assert {wsd(step, warmup=10, total=100) for step in range(10, 81)} == {1.0}
    assert wsd(85, warmup=10, total=100) == pytest.approx(1 - math.sqrt(0.25))
    assert wsd(85, warmup=10, total=100, shape="linear", floor=0.2) == pytest.approx(0.2 + 0.8 * 0.75)
    assert wsd(100, warmup=10, total=100) == 0 and wsd(100, warmup=10, total=100, decay=0.0) == 1
    assert SCHEDULES["cosine"](100, warmup=10, total=100, floor=0.1) == pytest.approx(0.1)


def test_lengths_agree_as_far_as_the_factors_do():
    def factor(name):
        return lambda step, total: SCHEDULES[name](step, warmup=5, total=total)

    assert agree(factor("constant"), 50, (50, 90)) and agree(factor("inverse_sqrt"), 50, (50, 90))
    assert agree(factor("wsd"), 40, (50, 90)) and not agree(factor("wsd"), 41, (50, 90))
    assert agree(factor("cosine"), 5, (50, 90)) and not agree(factor("cosine"), 6, (50, 90))


@pytest.mark.parametrize(("options", "words"), [
    ({"schedule": "wds"}, "did you mean 'wsd'"), ({"schedule": "wsd", "schedule_options": {"decya": 1}}, "decay"),
    ({"schedule": "wsd", "schedule_options": {"decay": 2}}, "share"), ({"patience": 2}, "validate_every"),
    ({"schedule": "wsd", "schedule_options": {"shape": "round"}}, "sqrt, linear"), ({"ema": 1.0}, "ema"),
    ({"accumulate": 65}, "batch_size = 64"), ({"clip": 0}, "clip"), ({"autocast": "float8"}, "bfloat16"),
    ({"beta2": 1}, "beta2"), ({"regularize": {"kinetic": math.nan}}, "regularize"), ({"seed": -1}, "seed"),
    ({"checkpoint_minutes": 0}, "checkpoint_minutes"), ({"weight_decay": -1}, "weight_decay"),
])
def test_settings_that_make_no_sense_are_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        TrainConfig(steps=3, **options)


# ---- accumulation, clipping, precision


def unequal():
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 9, (12,), generator=generator).tolist()
    pairs = [([3, 4], torch.randint(3, 8, (n,), generator=generator).tolist()) for n in lengths]
    return Translation("toy", pairs, pairs, start=1, stop=2, pad=0)


def images():
    x = torch.randn(13, 1, 4, 4, dtype=torch.float64)
    return Classification(Images("noise", 3, x, torch.arange(13) % 3, x, torch.arange(13) % 3))


def seq2seq():
    return Seq2Seq(Seq2SeqConfig(vocab_size=8, max_seq_len=12, n_layers=1, block=BlockConfig(8, 2)))


def vision():
    block = BlockConfig(8, 2)
    return Vision(VisionConfig(image_size=4, patch_size=2, channels=1, n_classes=3, n_layers=1, block=block))


CASES = {"tokens": (unequal, seq2seq, 12), "images": (images, vision, 13), "text": (language, decoder, 12)}


@pytest.mark.parametrize("clip", [0.05, math.inf])
@pytest.mark.parametrize("case", CASES)
def test_a_batch_in_parts_is_the_batch_at_once(case, clip):
    """In float64 to 1e-12: loss, gradient norm and weights, with unequal numbers of tokens in the parts."""
    make_task, make_model, size = CASES[case]
    results = []
    for accumulate in (1, 3, 5):
        torch.manual_seed(0)
        task, model = make_task(), make_model().double()
        # the sign-like first update of Adam with the default ε would turn rounding into ± η
        trainer = Trainer(model, task, TrainConfig(steps=3, batch_size=size, accumulate=accumulate, clip=clip, warmup=0,
                                                   learning_rate=0.1, epsilon=1e-2))
        parts = trainer.parts(0)
        assert len(parts) == accumulate
        if case == "tokens" and accumulate > 1:
            assert len({task.count(part) for part in parts}) > 1
        assert trainer.run(progress=False)
        results.append((trainer.rows, [p.detach().clone() for p in model.parameters()]))
    for rows, weights in results[1:]:
        for row, wanted in zip(rows, results[0][0], strict=True):
            assert row == pytest.approx(wanted, abs=1e-12)
        assert max((a - b).abs().max() for a, b in zip(weights, results[0][1], strict=True)) < 1e-12


def test_the_whole_gradient_is_clipped_once_before_the_update():
    """One update by plain descent in place of AdamW: w moves by η times a gradient of the norm ``clip``."""
    model = decoder().double()
    trainer = Trainer(model, language(), TrainConfig(steps=1, batch_size=8, accumulate=4, clip=0.01))
    trainer.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer.factor = lambda step: 1 / trainer.config.learning_rate
    before = [p.detach().clone() for p in model.parameters()]
    norm = trainer.train_step()["norm"]
    moved = torch.stack([(p - q).norm() for p, q in zip(model.parameters(), before, strict=True)]).norm().item()
    assert norm > 0.1  # the one before clipping is reported
    assert moved == pytest.approx(0.01, rel=1e-4)  # torch divides by norm + 1e-6


def test_autocast_computes_in_bfloat16_and_keeps_state_and_weights_in_float32():
    model, seen = decoder(depth=DepthConfig(solver="rk4")), {"state": set(), "weights": set()}
    block = model.layers[0]
    block.attention.placement.register_forward_pre_hook(lambda module, inputs: seen["state"].add(inputs[0].dtype))
    block.attention.core.query.register_forward_hook(lambda module, inputs, y: seen["weights"].add(y.dtype))
    trainer = Trainer(model, language(), TrainConfig(steps=2, batch_size=4, autocast="bfloat16"))
    with trainer.precision():
        _, solution = trainer.task.loss(model, trainer.batch(0))
    assert trainer.run(progress=False)
    assert seen == {"state": {torch.float32}, "weights": {torch.bfloat16}} and solution.z.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    plain = Trainer(decoder(depth=DepthConfig(solver="rk4")), language(), TrainConfig(steps=2, batch_size=4))
    plain.run(progress=False)
    assert trainer.rows[0]["loss"] != plain.rows[0]["loss"]
    assert trainer.rows[0]["loss"] == pytest.approx(plain.rows[0]["loss"], rel=0.02)


# ---- what else is added to the loss


def test_regularisers_are_added_with_their_weights(monkeypatch):
    monkeypatch.setitem(REGULARIZERS, "size", lambda model, solution: solution.z.square().mean())
    monkeypatch.setitem(REGULARIZERS, "states", lambda model, solution: solution.states.abs().max())
    losses = {}
    for name, weights in {"none": {}, "both": {"size": 2.0, "states": 0.5}, "zero": {"size": 0.0}}.items():
        trainer = Trainer(decoder(), language(), TrainConfig(steps=1, batch_size=4, regularize=weights))
        with torch.no_grad():
            _, solution = trainer.task.loss(trainer.model, trainer.batch(0), save_states=True)
        losses[name] = trainer.train_step()["loss"]
    added = 2 * solution.z.square().mean() + 0.5 * solution.states.abs().max()
    assert losses["both"] - losses["none"] == pytest.approx(added.item(), rel=1e-4)
    assert losses["zero"] == losses["none"]
    with pytest.raises(ValueError, match="did you mean 'size'"):
        Trainer(decoder(), language(), TrainConfig(steps=1, regularize={"sise": 1.0}))


# ---- averages and early stopping


def test_the_average_is_that_of_the_formula_and_leaves_the_model_as_it_was():
    model = torch.nn.Linear(2, 1, bias=False).double()
    average, wanted = Average(model, 0.5), model.weight.detach().clone()
    for step in range(1, 6):
        with torch.no_grad():
            model.weight.add_(step)
        d = min(0.5, (1 + step) / (10 + step))
        wanted = d * wanted + (1 - d) * model.weight.detach()
        average.update(step)
    assert (average.state_dict()["weight"] - wanted).abs().max() < 1e-14
    live = model.weight.detach().clone()
    with average.applied():
        assert torch.equal(model.weight, average.state_dict()["weight"])
    assert torch.equal(model.weight, live)
    with pytest.raises(ValueError, match="other parameters"):
        average.load_state_dict({"bias": wanted})


def test_with_an_average_the_model_ends_with_it_and_it_is_what_is_validated(tmp_path):
    task = language(valid=TEXT[:60])
    trainer = Trainer(decoder(), task, TrainConfig(steps=6, batch_size=4, ema=0.9, validate_every=3), tmp_path)
    assert trainer.run(progress=False)
    last = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    weights = dict(trainer.model.named_parameters())
    assert all(torch.equal(weights[name], x) for name, x in last["average"].items())
    assert not torch.equal(weights["head.weight"], last["model"]["head.weight"])
    assert [row["step"] for row in trainer.validations] == [3, 6]
    assert trainer.validations[-1] == {"step": 6, **task.evaluate(trainer.model, "valid")}


def test_the_best_model_is_kept_and_patience_ends_the_run():
    class Judged(Language):
        values = iter([3.0, 2.0, math.nan, 2.5, 1.0])

        def evaluate(self, model, split="test"):
            kept.append((split, model.head.weight.detach().clone()))
            return {"bits_per_byte": next(self.values)}

    kept = []
    task = Judged("noise", TEXT, TEXT[:50], length=10, valid=TEXT[:60])
    trainer = Trainer(decoder(), task, TrainConfig(steps=40, batch_size=4, validate_every=2, patience=2, warmup=0))
    assert trainer.run(progress=False)
    assert trainer.step == 8 and trainer.best.step == 4 and trainer.best.value == 2.0
    assert {split for split, _ in kept} == {"valid"}  # never the test data
    assert torch.equal(trainer.model.head.weight, kept[1][1]) and not torch.equal(kept[1][1], kept[-1][1])
    assert trainer.run(progress=False) and trainer.step == 8


def test_higher_is_better_where_the_task_says_so():
    model, best = torch.nn.Linear(1, 1), Best(2, higher=True)
    assert [best.report(value, step, model) for step, value in enumerate([1.0, 0.5, 2.0, 2.0])] == [
        True, False, True, False]
    assert not best.over and not best.report(math.nan, 5, model) and best.over


def test_validation_moves_no_random_state_and_nothing_of_the_training():
    class Noisy(Language):
        def evaluate(self, model, split="test"):
            torch.rand(7)
            return super().evaluate(model, split)

    rows = []
    for every in (None, 1):
        task = Noisy("noise", TEXT, TEXT[:50], length=10, valid=TEXT[:60])
        trainer = Trainer(decoder(dropout=0.2), task, TrainConfig(steps=4, batch_size=4, validate_every=every))
        torch.manual_seed(3)
        trainer.run(progress=False)
        rows.append(trainer.rows)
    assert rows[0] == rows[1]


def test_without_validation_data_validation_is_refused():
    with pytest.raises(ValueError, match="validate_every needs validation data"):
        Trainer(decoder(), language(), TrainConfig(steps=4, validate_every=2))


# ---- the order of the data and random states


def test_an_epoch_shows_every_example_once_and_the_order_depends_on_the_seed():
    order = BatchOrder(10, 3, seed=4)
    epochs = [[order.rows(3 * epoch + i) for i in range(3)] for epoch in range(2)]
    for batches in epochs:
        assert len(set(torch.cat(batches).tolist())) == 9  # the tenth is left out
    assert not torch.equal(torch.cat(epochs[0]), torch.cat(epochs[1]))
    assert torch.equal(BatchOrder(10, 3, seed=4).rows(4), epochs[1][1])  # whatever was asked before
    assert not torch.equal(BatchOrder(10, 3, seed=5).rows(4), epochs[1][1])
    assert BatchOrder(2, 3, seed=0).rows(7).sort().values.tolist() == [0, 1]


def test_what_is_put_aside_is_not_trained_on_and_always_the_same():
    train, valid = put_aside(20, 0.25)
    assert len(valid) == 5 and sorted([*train.tolist(), *valid.tolist()]) == list(range(20))
    torch.manual_seed(9)
    assert torch.equal(put_aside(20, 0.25)[1], valid)
    assert put_aside(20, 0)[0].tolist() == list(range(20))
    with pytest.raises(ValueError, match="leaves none"):
        put_aside(1, 0.5)


def test_all_random_states_come_back():
    state = random_states()
    drawn = [torch.rand(3).tolist(), np.random.rand(3).tolist(), np.random.randn(), random.random(), random.gauss(0, 1)]
    set_random_states(state)
    assert drawn == [torch.rand(3).tolist(), np.random.rand(3).tolist(), np.random.randn(), random.random(),
                     random.gauss(0, 1)]


def test_validation_moves_no_random_state_whatever_a_task_draws():
    class Drawing(Language):
        def evaluate(self, model, split="test", batch_size=64):
            torch.rand(1), np.random.rand(), random.random()
            return {"bits_per_byte": 1.0}

    trainer = Trainer(decoder(), Drawing("noise", TEXT, TEXT[:50], length=10, valid=TEXT[:50]),
                      TrainConfig(steps=2, batch_size=4, validate_every=1))
    before = [torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()]
    trainer.validate()
    assert torch.equal(torch.get_rng_state(), before[0]) and (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


def test_a_task_of_ones_own_needs_five_names():
    class Own:
        name, n_train = "own", 6

        def batch(self, rows):
            return rows.float()[:, None], rows.float()[:, None]

        def loss(self, model, batch):
            return (model(batch[0]) - batch[1]).square().mean(), SimpleNamespace(nfe=1)

        def evaluate(self, model):
            return {}

    model = torch.nn.Linear(1, 1).double().float()
    whole = Trainer(model, Own(), TrainConfig(steps=2, batch_size=6, accumulate=2))
    assert whole.run(progress=False) and whole.rows[0]["count"] == 6
    assert Task.unit == "examples"


def test_series_are_cut_to_the_longest_of_a_batch_and_judged_by_what_they_predict():
    from odeformer.data.series import Series

    values, mask = torch.zeros(3, 4, 1), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
    parts = (values, torch.zeros(3, 4, dtype=torch.float64), mask)
    numbers = SeriesPrediction(Series("x", (), *parts, torch.tensor([1.0, 2, 3]), *parts, torch.tensor([1.0, 2, 3])))
    assert [x.shape[1] for x in numbers.batch(torch.tensor([0, 1]))[:3]] == [2, 2, 2]

    class Constant(torch.nn.Module):
        def forward(self, values, times, mask):
            return torch.full((len(values), 1), 2.0)

    assert numbers.evaluate(Constant()) == {"rmse": pytest.approx(math.sqrt(2 / 3))}
    assert numbers.metric == "rmse" and not numbers.higher


def test_loading_the_folder_of_a_run_that_has_not_ended_says_how_to_go_on(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="has not ended: go on with --resume"):
        load(tmp_path)
