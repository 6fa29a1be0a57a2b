"""Steps of each row's own in models whose field knows something of each row."""

import growing
import pytest
import torch
from torch import nn

from odeformer import COUPLINGS, FEEDFORWARD, WEIGHTS, BlockConfig, DepthConfig, SeriesConfig, SeriesEncoder, wrap
from odeformer.smooth_weights import SMOOTH

TIGHT = {"rtol": 1e-9, "atol": 1e-11}
NEEDED = {"expert_slices": {"n_experts": 2, "activation": "gelu", "gate": "topk_then_softmax"}}
ROUGH = {"relu", "reglu", "experts"}  # of which no solver meets a tight tolerance
CASES = [*(("coupling", x) for x in COUPLINGS), *(("feedforward", x) for x in FEEDFORWARD if x not in ROUGH),
         *(("weights", x) for x in WEIGHTS if x not in SMOOTH), ("position", "rope"), ("injection", True)]


def both(make, call):
    """What a solver with a step a row gives, and what another with one step size for all gives."""
    rows = make(solver="tsit54", solver_options={"per_sample": True}, **TIGHT)
    return call(rows), call(rows.with_solver("dopri8", **TIGHT))


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_padded_batches_are_solved_row_by_row(kind, name):
    mask = torch.arange(growing.LENGTH) >= torch.tensor([[0], [4], [9]])

    def make(**depth):
        options = {f"{kind}_options": NEEDED[name]} if name in NEEDED else {}
        block = {kind: name, **options} if kind not in ("weights", "injection") else {}
        depth |= {kind: name} if kind in ("weights", "injection") else {}
        return growing.tiny(block=block, **depth)

    tokens = torch.randint(growing.VOCAB, (3, growing.LENGTH))
    torch.manual_seed(0)
    ours, wanted = both(make, lambda model: model(tokens, mask))
    torch.testing.assert_close(ours * mask.unsqueeze(-1), wanted * mask.unsqueeze(-1), rtol=1e-5, atol=1e-6)


def test_series_of_unequal_length():
    def make(**depth):
        return growing.shaken(SeriesEncoder(SeriesConfig(n_channels=2, n_outputs=3, n_layers=2, block=BlockConfig(
            8, 2, position="rope"), depth=DepthConfig(**depth))))

    values, times = torch.randn(3, 6, 2, dtype=torch.float64), torch.rand(3, 6, dtype=torch.float64).cumsum(1)
    mask = torch.arange(6) < torch.tensor([[6], [3], [1]])
    ours, wanted = both(make, lambda model: model(values, times, mask))
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


def test_wrapped_layers_with_arguments_of_each_row():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True).double()
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, hidden = torch.randn(4, 5, 8, dtype=torch.float64), torch.arange(5) >= torch.tensor([[5], [2], [3], [4]])
    ours = wrap(stack, solver="tsit54", solver_options={"per_sample": True}, **TIGHT)(x, src_key_padding_mask=hidden)
    wanted = wrap(stack, solver="rk4", steps_per_layer=64)(x, src_key_padding_mask=hidden)
    torch.testing.assert_close(ours[~hidden], wanted[~hidden], rtol=1e-5, atol=1e-6)
