"""English to German on LibreOffice's help pages under several solvers, beside a plain torch.nn Transformer.

One BPE vocabulary for both languages, shared and tied embeddings, label smoothing 0.1, greedy search; BLEU and chrF
by sacrebleu on pages that were not trained on. Equal parameters, equal data, equal updates. The models are small and
trained for minutes: the numbers compare solvers, they are no translation system.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from matplotlib.figure import Figure

from benchmarks.fronts import Fronts
from benchmarks.reference import TorchSeq2Seq
from benchmarks.training import BASELINE, REFERENCE, averaged, cases, compared, depth, grouped, scatter, train
from odeformer import BlockConfig, Seq2Seq, Seq2SeqConfig
from odeformer.data import DATA
from odeformer.tasks import Translation
from odeformer.tokenizers import BPETokenizer

__all__ = ["COLUMNS", "PRESETS", "cases", "draw", "measure", "summary"]

COLUMNS = ("solver", "NFE", "parameters", "BLEU", "chrF", "perplexity", "spread", "over euler", "verdict",
           "CPU s an update")
PRESETS = {
    "quick": {"seeds": 3, "steps": 60, "n_layers": 1, "d_model": 64, "batch_size": 32, "vocab_size": 1000, "test": 50},
    "cpu": {"seeds": 5, "steps": 120, "n_layers": 2, "d_model": 64, "batch_size": 32, "vocab_size": 1000, "test": 200},
    "gpu": {"seeds": 5, "steps": 30000, "n_layers": 6, "d_model": 512, "batch_size": 128, "vocab_size": 8000,
            "test": 2000},
}
LONGEST = 32  # tokens; longer pairs are left out
SIZE = (10, 3.8)
FRONTS = Fronts(score="perplexity", label="perplexity a token, unseen pages", higher=False)
WORKERS = 2


@cache
def task(vocab_size: int, n_test: int) -> tuple[Translation, Any, list[tuple[str, str]]]:
    """The task, its tokenizer, and the test pairs as text."""
    data = DATA["libreoffice"](target="de")
    bpe = BPETokenizer.train([text for pair in data.train for text in pair], vocab_size=vocab_size)

    def encoded(pairs: Any) -> list[Any]:
        """((source ids, target ids), (source, target)) of the pairs that are short enough."""
        both = [((bpe.encode(source), bpe.encode(target)), (source, target)) for source, target in pairs]
        return [(ids, texts) for ids, texts in both if min(map(len, ids)) > 0 and max(map(len, ids)) <= LONGEST]

    test = encoded(data.test)
    test = test[:: max(1, len(test) // n_test)][:n_test]
    made = Translation("libreoffice en-de", [ids for ids, _ in encoded(data.train)], [ids for ids, _ in test],
                       start=bpe.start, stop=bpe.stop, pad=bpe.pad)
    return made, bpe, [texts for _, texts in test]


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """One training run, then greedy translation of the test pairs."""
    config = Seq2SeqConfig(vocab_size=case["vocab_size"], max_seq_len=2 * LONGEST, n_layers=case["n_layers"],
                           block=BlockConfig(case["d_model"], case["d_model"] // 32, dropout=0.0),
                           depth=depth(case["solver"]), tie_embeddings=True, share_embeddings=True)
    kind = TorchSeq2Seq if case["solver"] == REFERENCE else Seq2Seq
    made, bpe, texts = task(case["vocab_size"], case["test"])
    model, row = train(lambda: kind(config), made, seed=case["seed"], steps=case["steps"],
                       batch_size=case["batch_size"], learning_rate=1e-3)
    written = translate(model, made, bpe)
    return [row | made.evaluate(model) | scores(written, [y for _, y in texts])]


def translate(model: Any, made: Translation, bpe: Any, batch_size: int = 64) -> list[str]:
    """Greedy translations of the test sources."""
    written = []
    for i in range(0, len(made.test), batch_size):
        source, _, mask, _ = made.padded(made.test[i:i + batch_size])
        ids = model.generate(source, mask, start=made.start, max_new_tokens=LONGEST, stop_tokens=[made.stop],
                             pad_token=made.pad)
        written += [bpe.decode(row[1:].tolist()) for row in ids]
    return written


def scores(written: list[str], wanted: list[str]) -> dict[str, Any]:
    """BLEU and chrF with the signature of the former."""
    from sacrebleu.metrics import BLEU, CHRF

    bleu = BLEU()
    return {"bleu": bleu.corpus_score(written, [wanted]).score, "chrf": CHRF().corpus_score(written, [wanted]).score,
            "signature": str(bleu.get_signature())}


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line a solver, over seeds."""
    lines = []
    groups = grouped(rows, "solver")
    for (solver,), group in groups.items():
        cells = compared(group, groups[BASELINE,], "perplexity", higher_is_better=False, digits=1)
        bleu, chrf = (f"{averaged(group, name)[0]:.1f}" for name in ("bleu", "chrf"))
        lines.append((solver, f"{group[0]['nfe']:g}", f"{group[0]['parameters']}", bleu, chrf, *cells,
                      f"{averaged(group, 'seconds')[0]:.3f}"))
    return lines


def draw(rows: list[dict[str, Any]], figure: Figure) -> None:
    """BLEU and perplexity against NFE."""
    for axes, (name, label) in zip(figure.subplots(1, 2), (("bleu", "BLEU"), ("perplexity", "perplexity a token")),
                                   strict=True):
        scatter(axes, grouped(rows, "solver"), name, f"{label}, unseen pages")
