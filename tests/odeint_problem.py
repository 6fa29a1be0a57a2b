"""What the tests of odeint share."""

import pytest
import torch
from torch import nn

F64 = torch.float64
ADAMS = pytest.mark.filterwarnings("ignore:Functional iteration did not converge")  # torchdiffeq's, at its tolerances


def times(backwards=False, n=6, dtype=F64):
    t = torch.linspace(1.0, 2.5, n, dtype=dtype)
    return t.flip(0) if backwards else t


def coupled(t, y):
    return torch.stack([t * y[..., 0] + y[..., 1], t * y[..., 1] - y[..., 0] ** 2 / 4], -1)


def start():
    return torch.tensor([[0.7, -0.4], [0.1, 0.2]], dtype=F64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2).double()

    def forward(self, t, y):
        return torch.tanh(self.layer(y)) * torch.cos(t)
