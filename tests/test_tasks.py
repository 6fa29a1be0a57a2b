"""Losses and tasks: values by hand."""

import math

import pytest
import torch

from odeformer import BlockConfig, ByteTokenizer, Decoder, DecoderConfig, Seq2Seq, Seq2SeqConfig
from odeformer.data.images import Images
from odeformer.data.series import Series
from odeformer.metrics import translation_scores
from odeformer.tasks import (
    Classification,
    Language,
    SeriesPrediction,
    Task,
    Translation,
    as_task,
    perplexity,
    smoothed_cross_entropy,
)
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
    wide = torch.cat([text, text.new_tensor([300])])  # an id that no byte is: how long the text is nobody knows
    task = Language("bpe", wide, text, length=5)
    assert task.metric == "bits_per_token"
    assert task.evaluate(model).keys() == {"bits_per_token", "perplexity"}
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


def test_bits_per_byte_and_per_character_are_those_of_the_whole_text():
    """A model that gives every byte the probability 1/8: 3 bits a byte; a character of 1.5 bytes on average has 4.5."""
    text = torch.arange(24) % 8
    task = Language("two scripts", text, text, length=5, n_test_bytes=24, n_test_characters=16, valid=text[:9],
                    n_valid_bytes=9)
    model = Decoder(DecoderConfig(vocab_size=8, max_seq_len=5, n_layers=1, block=BlockConfig(8, 2)))
    torch.nn.init.zeros_(model.head.weight)
    wanted = {"bits_per_byte": 3.0, "bits_per_character": 4.5, "perplexity": 8.0}
    assert task.evaluate(model) == pytest.approx(wanted, rel=1e-6)
    assert task.evaluate(model, "valid") == pytest.approx({"bits_per_byte": 3.0, "perplexity": 8.0}, rel=1e-6)


class Words(torch.nn.Module):
    """Logits that depend on the last token alone, so that losses differ from token to token."""

    def forward(self, source, target, source_mask, target_mask):
        torch.manual_seed(0)
        table = torch.randn(8, 8, dtype=torch.float64)
        return table[target]


def test_perplexity_and_accuracy_do_not_depend_on_the_batch_size():
    pairs = reversal(23)
    task = Translation("toy", pairs, pairs, start=1, stop=2, pad=0)
    table = (torch.manual_seed(0), torch.randn(8, 8, dtype=torch.float64))[1].log_softmax(-1)
    losses = [-table[a, b] for _, y in pairs for a, b in zip([1, *y], [*y, 2], strict=True)]
    for size in (1, 4, 64):
        assert task.evaluate(Words(), batch_size=size)["perplexity"] == pytest.approx(
            torch.stack(losses).mean().exp().item(), rel=1e-12)
    x = torch.randn(23, 3, 1, 1)
    images = Classification(Images("x", 3, x, torch.arange(23) % 3, x, torch.arange(23) % 3))
    hits = (x.flatten(1).argmax(1) == torch.arange(23) % 3).double().mean().item()
    model = torch.nn.Flatten()
    assert {images.evaluate(model, batch_size=size)["accuracy"] for size in (1, 4, 64)} == {hits}


def test_bleu_and_chrf_are_sacrebleus_with_their_signatures():
    import sacrebleu

    written, wanted = ["the cat sat on a mat", "good morning"], ["the cat sat on the mat", "good morning all"]
    scores = translation_scores(written, wanted)
    assert scores["bleu"] == sacrebleu.corpus_bleu(written, [wanted]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(written, [wanted]).score
    assert scores["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert translation_scores(wanted, wanted)["bleu"] == pytest.approx(100)
    with pytest.raises(ValueError, match="as many texts each"):
        translation_scores(written, wanted[:1])


def test_without_sacrebleu_the_sentence_names_it(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(ImportError, match="sacrebleu: pip install"):
        translation_scores(["a"], ["a"])


def test_test_pairs_are_translated_where_their_texts_are_known():
    tokenizer = ByteTokenizer()
    texts = [("abc", "abc def ghi jkl"), ("x", "mno pqr stu vwx")]
    pairs = [(tokenizer.encode(a), tokenizer.encode(b)) for a, b in texts]

    class Copy(torch.nn.Module):
        config = Seq2SeqConfig(vocab_size=259, max_seq_len=20, n_layers=1, block=BlockConfig(8, 2))

        def forward(self, source, target, source_mask, target_mask):
            return torch.zeros(*target.shape, 259)

        def generate(self, source, mask, *, start, max_new_tokens, stop_tokens, pad_token):
            asked.append((start, max_new_tokens, stop_tokens, pad_token))
            return torch.tensor([[start, *tokenizer.encode(b), tokenizer.stop] for _, b in texts])

    asked = []
    task = Translation("toy", pairs, pairs, start=257, stop=258, pad=256, valid=pairs, tokenizer=tokenizer,
                       references=[b for _, b in texts])
    scores = task.evaluate(Copy())
    assert scores["bleu"] == pytest.approx(100) and scores["chrf"] == pytest.approx(100)
    assert scores["perplexity"] == pytest.approx(259) and asked == [(257, 19, [258], 256)]
    assert task.evaluate(Copy(), "valid").keys() == {"perplexity"}
    with pytest.raises(ValueError, match="references must come with a tokenizer"):
        Translation("toy", pairs, pairs, start=257, stop=258, pad=256, references=["a"])


def test_images_put_aside_are_those_that_are_validated_and_no_others_are_missing():
    x = torch.arange(20.0).view(20, 1, 1, 1)
    images = Images("x", 2, x, torch.zeros(20, dtype=torch.int64), -1 - x, torch.zeros(20, dtype=torch.int64))
    task = Classification(images, 0.2)
    assert task.splits == {"train": 16, "valid": 4, "test": 20} and task.n_train == 16 and task.n_valid == 4
    seen = {split: {v.item() for v in task.batch(torch.arange(n), split)[0].flatten()} for split, n in
            task.splits.items()}
    assert seen["train"] | seen["valid"] == {float(i) for i in range(20)} and not seen["train"] & seen["valid"]
    assert seen["test"] == {-1.0 - i for i in range(20)}
    assert torch.equal(Classification(images).batch(torch.arange(20))[0], x)


def test_what_counts_is_what_the_mean_loss_is_a_mean_over():
    """A sum over the batch is count times the mean, so that two halves weighted by count give the whole."""
    pairs = reversal(9)
    parts = (torch.zeros(9, 4, 1), torch.zeros(9, 4, dtype=torch.float64), torch.ones(9, 4, dtype=torch.bool))
    y = torch.arange(9.0)
    text = torch.arange(50) % 8
    for task, outputs in (
        (Translation("toy", pairs, pairs, start=1, stop=2, pad=0), lambda b: torch.randn(*b[1][:, 1:].shape, 8)),
        (Language("x", text, text, length=5), lambda b: torch.randn(len(b), 5, 8)),
        (as_task(Images("x", 3, y[:, None, None, None], y.long() % 3, y[:, None, None, None], y.long())),
         lambda b: torch.randn(len(b[0]), 3)),
        (as_task(Series("x", (), *parts, y, *parts, y)), lambda b: torch.randn(len(b[0]), 1)),
    ):
        assert isinstance(task, Task)
        whole = task.batch(torch.arange(9))
        full = outputs(whole).double()
        total = task.criterion(full, whole) * task.count(whole)
        halves = [task.batch(rows) for rows in torch.arange(9).split(4)]
        sums = [task.criterion(full[i * 4:(i + 1) * 4][:, :outputs(half).shape[1]] if full.dim() == 3 else
                               full[i * 4:(i + 1) * 4], half) * task.count(half) for i, half in enumerate(halves)]
        assert sum(task.count(half) for half in halves) == task.count(whole)
        assert sum(sums).item() == pytest.approx(total.item(), rel=1e-6), task.name
    assert isinstance(as_task(Series("x", (), *parts, y, *parts, y)), SeriesPrediction)


@pytest.mark.parametrize("make", [
    lambda: Language("x", torch.arange(3), torch.arange(9), length=5),
    lambda: Language("x", torch.arange(9), torch.arange(9), length=0),
    lambda: Translation("x", [], [([1], [2])], start=1, stop=2, pad=0),
])
def test_tasks_without_data_are_refused(make):
    with pytest.raises(ValueError, match=r"train|test|length"):
        make()
