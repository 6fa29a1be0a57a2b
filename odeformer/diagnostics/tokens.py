"""How alike tokens become: cosines between them and the rank of their states, over depth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from odeformer.diagnostics.trajectory import Trajectory


def token_cosines(source: Any, *, centred: bool = False) -> Tensor:
    """Mean cosine between the states of two different tokens of a row: how far tokens have clustered.

    (points, batch), in [-1, 1]; 1: all point the same way, as attention alone makes them (Geshkovski et al. 2023; Dong
    et al. 2021). ``centred``: the mean over the row's tokens is taken off before. nan for a row of one token. By the
    norm of the sum of unit vectors, so without a matrix tokens x tokens.
    """
    run = Trajectory.of(source)
    z = _centred(run) if centred else run.real(run.states, 0.0)
    unit = run.real(z / z.norm(dim=-1, keepdim=True), 0.0)
    n = run.n_tokens
    return (unit.sum(2).square().sum(-1) - unit.square().sum((2, 3))) / (n * (n - 1))


def effective_ranks(source: Any, *, centred: bool = False) -> Tensor:
    """exp of the entropy of the normalised singular values of a row's states (tokens, d_model): how many directions
    they really use (Roy & Vetterli 2007).

    (points, batch), from 1 to min(tokens, d_model). ``centred``: the mean over the row's tokens is taken off before.
    """
    run = Trajectory.of(source)
    z = _centred(run) if centred else run.real(run.states, 0.0)
    return effective_rank(torch.linalg.svdvals(z))


def effective_rank(values: Tensor) -> Tensor:
    """exp(-Σ p log p) with p = values / Σ values, over the last axis; nan where all are 0."""
    share = values / values.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1).exp()


def _centred(run: Trajectory) -> Tensor:
    z = run.real(run.states, 0.0)
    return run.real(z - z.sum(2, keepdim=True) / run.n_tokens.view(-1, 1, 1), 0.0)
