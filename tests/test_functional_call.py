"""torch.func.functional_call leaves a model as it was, whatever is inside it."""

import copy

import growing
import pytest
import torch
from torch.func import functional_call

from odeformer import ATTENTION, FEEDFORWARD, NORMS, WEIGHTS

CASES = [*(("attention", name) for name in ATTENTION if not getattr(ATTENTION[name], "for_memory", False)),
         *(("norm", name) for name in NORMS), *(("feedforward", name) for name in FEEDFORWARD),
         *(("weights", name) for name in WEIGHTS),
         *(("cross_attention", name) for name in ATTENTION if name != "window")]
NEEDED = {"experts": {"n_experts": 2, "top_k": 1}}


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_parameters_are_the_models_own_again_after_a_call_with_others(kind, name):
    if kind == "weights":
        model = growing.tiny(weights=name)
    else:
        options = {f"{kind}_options": NEEDED[name]} if name in NEEDED else {}
        model = (growing.seq2seq if kind == "cross_attention" else growing.tiny)(block={kind: name, **options})
    given, own = growing.inputs(model), dict(model.named_parameters())
    before = growing.run(model, given)
    args, named = given
    functional_call(model, {path: torch.zeros_like(p) for path, p in own.items()}, args, named)
    assert all(p is own[path] for path, p in model.named_parameters())
    for ours, wanted in zip(growing.run(model, given), before, strict=True):
        assert torch.equal(ours, wanted)
    copy.deepcopy(model)
    loss = model(*args, **named)
    loss.square().sum().backward()
    missing = [path for path, p in own.items() if p.grad is None]
    assert not missing or kind == "feedforward", missing  # an expert that no token goes to
