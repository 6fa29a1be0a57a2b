"""Losses and tasks: values by hand."""

import math

import pytest
import torch

from odeformer import BlockConfig, Decoder, DecoderConfig, Seq2Seq, Seq2SeqConfig
from odeformer.tasks import Language, Translation, perplexity, smoothed_cross_entropy
from odeformer.train import TrainConfig, Trainer


def test_label_smoothing_is_the_mixture_with_the_uniform_distribution():
    logits, targets = torch.randn(2, 3, 5, dtype=torch.float64), torch.tensor([[0, 4, -100], [2, -100, -100]])
    p = logits.softmax(-1)
    wanted = []
    for i, j in ((0, 0), (0, 1), (1, 0)):
        q = torch.full((5,), 0.1 / 5, dtype=torch.float64)
        q[targets[i, j]] += 0.9
        wanted.append(-(q * p[i, j].log()).sum())
    got = smoothed_cross_entropy(logits, targets, smoothing=0.1, ignore_index=-100)
    assert abs(got - sum(wanted) / 3) < 1e-6


def test_padding_moves_neither_the_smoothed_loss_nor_its_gradient():
    logits = torch.randn(1, 4, 5, requires_grad=True)
    targets = torch.tensor([[1, 2, 7, 7]])
    loss = smoothed_cross_entropy(logits, targets, smoothing=0.2, ignore_index=7)
    short = smoothed_cross_entropy(logits[:, :2], targets[:, :2], smoothing=0.2, ignore_index=7)
    assert loss == short
    grad, = torch.autograd.grad(loss, logits)
    assert grad[:, 2:].abs().max() == 0
    assert smoothed_cross_entropy(logits, torch.full((1, 4), 7), ignore_index=7) == 0


def test_float64_losses_stay_float64_and_wrong_shapes_are_named():
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    targets = torch.randint(5, (2, 3))
    wanted = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    assert abs(smoothed_cross_entropy(logits, targets) - wanted) < 1e-14
    with pytest.raises(ValueError, match="targets must have the shape"):
        smoothed_cross_entropy(logits, targets.T.contiguous())
    with pytest.raises(TypeError, match="targets must be int64"):
        smoothed_cross_entropy(logits, targets.float())


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, "much"])
def test_smoothing_outside_the_unit_interval_is_refused(smoothing):
    with pytest.raises(ValueError, match="smoothing"):
        smoothed_cross_entropy(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), smoothing=smoothing)


def test_perplexity_weights_tokens_not_batches():
    losses = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([6.0])]
    assert perplexity(losses) == pytest.approx(math.exp(3.0))
    assert perplexity([torch.cat(losses)]) == pytest.approx(math.exp(3.0))
    assert perplexity(torch.tensor([800.0])) > 1e300
    for nothing in ([], [torch.empty(0)]):
        with pytest.raises(ValueError, match="token_losses"):
            perplexity(nothing)


def test_language_windows_lie_side_by_side_and_a_uniform_model_needs_log2_of_the_vocabulary():
    text = torch.arange(23) % 8
    task = Language("counting", text, text, length=5)
    assert task.n_train == 4
    assert task.batch(torch.tensor([1])).tolist() == [[5, 6, 7, 0, 1, 2]]
    model = Decoder(DecoderConfig(vocab_size=8, max_seq_len=5, n_layers=1, block=BlockConfig(8, 2))).train()
    torch.nn.init.zeros_(model.head.weight)
    assert task.evaluate(model)["bits_per_byte"] == pytest.approx(3.0, rel=1e-6)
    assert model.training
    assert Language("bpe", text, text, length=5, n_test_bytes=46).evaluate(model)["bits_per_byte"] == pytest.approx(1.5)
    assert sum(len(x) for x in task.token_losses(model)) == 22


def test_bits_per_byte_do_not_depend_on_the_batch_size():
    torch.manual_seed(0)
    text = torch.randint(8, (103,))
    task = Language("noise", text, text, length=10)
    model = Decoder(DecoderConfig(vocab_size=8, max_seq_len=10, n_layers=1, block=BlockConfig(8, 2))).eval()
    one, many = (perplexity([x.detach() for x in task.token_losses(model, n)]) for n in (1, 64))
    assert one == pytest.approx(many, rel=1e-6)


def reversal(n):
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 8, (int(torch.randint(2, 5, (1,), generator=generator)),), generator=generator).tolist()
             for _ in range(n)]
    return [(text, text[::-1]) for text in texts]


def test_translation_pads_and_frames_its_pairs():
    task = Translation("toy", [([3, 4], [5]), ([6], [7, 3, 4])], [([3], [4])], start=1, stop=2, pad=0)
    source, target, source_mask, target_mask = task.batch(torch.tensor([0, 1]))
    assert source.tolist() == [[3, 4], [6, 0]]
    assert source_mask.tolist() == [[True, True], [True, False]]
    assert target.tolist() == [[1, 5, 2, 0, 0], [1, 7, 3, 4, 2]]
    assert target_mask.tolist() == [[True] * 3 + [False] * 2, [True] * 5]


def test_a_sequence_to_sequence_model_learns_to_reverse():
    torch.manual_seed(0)
    task = Translation("reversal", reversal(512), reversal(64), start=1, stop=2, pad=0, smoothing=0.0)
    model = Seq2Seq(Seq2SeqConfig(vocab_size=8, max_seq_len=8, n_layers=1, block=BlockConfig(32, 4)))
    before = task.evaluate(model)["perplexity"]
    trainer = Trainer(model, task, TrainConfig(steps=150, batch_size=64, learning_rate=4e-3))
    assert trainer.run(progress=False)
    after = task.evaluate(model)["perplexity"]
    assert after < 1.5 < before
    source, _, mask, _ = task.padded(task.test)
    texts = model.generate(source, mask, start=1, max_new_tokens=6, stop_tokens=[2], pad_token=0)
    right = sum(text[1:].tolist()[:len(y) + 1] == [*y, 2] for text, (_, y) in zip(texts, task.test, strict=True))
    assert right > 0.7 * len(task.test)


def test_training_adds_the_losses_of_experts_with_their_weights():
    text = torch.randint(8, (200,), generator=torch.Generator().manual_seed(0))
    task = Language("noise", text, text, length=10)

    def first_loss(**weights):
        torch.manual_seed(0)
        block = BlockConfig(8, 2, feedforward="experts", feedforward_options={"n_experts": 4, "top_k": 1})
        model = Decoder(DecoderConfig(vocab_size=8, max_seq_len=10, n_layers=2, block=block))
        trainer = Trainer(model, task, TrainConfig(steps=1, batch_size=4, **weights))
        with torch.no_grad():
            solution = task.loss(model.train(), trainer.batch(0))[1]
        return trainer.train_step()["loss"], solution.losses

    plain, losses = first_loss(balance=0.0, router_z=0.0)
    both, _ = first_loss(balance=2.0, router_z=3.0)
    assert both - plain == pytest.approx(2 * losses["balance"].item() + 3 * losses["router_z"].item(), rel=1e-4)
    assert losses["balance"] > 0.9


@pytest.mark.parametrize("make", [
    lambda: Language("x", torch.arange(3), torch.arange(9), length=5),
    lambda: Language("x", torch.arange(9), torch.arange(9), length=0),
    lambda: Translation("x", [], [([1], [2])], start=1, stop=2, pad=0),
])
def test_tasks_without_data_are_refused(make):
    with pytest.raises(ValueError, match=r"train|test|length"):
        make()
