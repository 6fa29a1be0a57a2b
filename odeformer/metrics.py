"""Numbers by which models are trained and judged, each weighted by tokens and the same for every batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from odeformer.tables import probability

IGNORED = -100  # a target that counts for nothing


def smoothed_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0,
                           ignore_index: int = IGNORED) -> Tensor:
    """Mean over the targets that count of (1 - ε) (-log p_target) + ε mean over the vocabulary of -log p.

    Label smoothing (Szegedy et al. 2016; Vaswani et al. 2017, section 5.4) with ε = ``smoothing``. ``logits``: (...,
    vocab_size); ``targets``: int64 (...); those that are ``ignore_index``, padding, take no part. 0 where none counts.

    Raises ValueError unless 0 <= smoothing < 1 and the shapes agree, TypeError for targets of another dtype.
    """
    probability("smoothing", smoothing)
    if targets.dtype != torch.int64:
        raise TypeError(f"targets must be int64, got {targets.dtype}")
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets must have the shape of logits without the vocabulary, {tuple(logits.shape[:-1])}, "
                         f"got {tuple(targets.shape)}")
    total = F.cross_entropy(exact(logits).flatten(0, -2), targets.flatten(), ignore_index=ignore_index,
                            label_smoothing=smoothing, reduction="sum")
    return total / (targets != ignore_index).sum().clamp(min=1)


def exact(x: Tensor) -> Tensor:
    """x in float32, or in float64 where it is that: losses are not computed in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def perplexity(token_losses: Sequence[Tensor]) -> float:
    """exp of the mean negative log likelihood (nats) over all tokens, however they were batched."""
    if isinstance(token_losses, Tensor):
        token_losses = [token_losses]
    losses = torch.cat([x.flatten().double() for x in token_losses]) if token_losses else torch.empty(0)
    if not len(losses):
        raise ValueError("token_losses must hold at least one loss")
    return losses.mean().exp().item()


@torch.no_grad()
def accuracy(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, *, batch_size: int = 512) -> float:
    """The share of images (n, channels, size, size) whose largest logit is at their class."""
    hits = sum((model(a).argmax(-1) == b).sum().item()
               for a, b in zip(x.split(batch_size), y.split(batch_size), strict=True))
    return hits / len(y)


def translation_scores(written: Sequence[str], wanted: Sequence[str]) -> dict[str, Any]:
    """``bleu`` and ``chrf`` (0 to 100) of whole corpora by sacrebleu (Papineni et al. 2002; Popović 2015; Post 2018).

    ``bleu_signature`` and ``chrf_signature`` say which variant that is; scores with equal signatures can be compared.
    Raises ImportError without sacrebleu, ValueError for unequal numbers of texts or none.
    """
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError as error:
        raise ImportError("BLEU and chrF need the package sacrebleu: pip install 'odeformer-depth[bench]'") from error
    if len(written) != len(wanted) or not written:
        raise ValueError(f"written and wanted must hold as many texts each, at least one; got {len(written)} and "
                         f"{len(wanted)}")
    found: dict[str, Any] = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        found[name] = metric.corpus_score(list(written), [list(wanted)]).score
        found[f"{name}_signature"] = str(metric.get_signature())
    return found
