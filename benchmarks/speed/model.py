"""Point 2: an Encoder and a Decoder under Euler beside torch.nn, a plain torch model with the same weights, and
x-transformers; shared weights under rk4 over Euler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.reference import future, stack
from benchmarks.speed.peers import later
from benchmarks.speed.timing import MODES, interleaved
from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig, Encoder, EncoderConfig

N_LAYERS, VOCAB = 6, 64
SHAPES = [(1, 16, 64), (8, 32, 128), (8, 128, 256)]
TORCH_NN = {"forward": (0.98, 0.98, 1.01), "forward + backward": (0.85, 0.95, 1.00)}
PLAIN = 1.02
RK4 = 4.05
KINDS = {"Encoder": (Encoder, EncoderConfig), "Decoder": (Decoder, DecoderConfig)}


def cases(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Size x kind x padding x pass, then rk4."""
    shapes = [list(shape) for shape in SHAPES[:settings["sizes"]]]
    for shape in shapes:
        for kind in KINDS:
            for padded in (False, True):
                for mode in MODES:
                    yield {"shape": shape, "kind": kind, "padded": padded, "pass": mode}
    for shape in shapes:
        yield {"shape": shape, "kind": "rk4"}


def make(kind: str, shape: list[int], **depth: Any) -> Any:
    """A model of ours; head_dim 32, or 64 from d_model 256 on."""
    torch.manual_seed(0)
    _, n_tokens, d_model = shape
    model, config = KINDS[kind]
    return model(config(vocab_size=VOCAB, max_seq_len=n_tokens, n_layers=N_LAYERS,
                        block=BlockConfig(d_model, max(2, d_model // 64)), depth=DepthConfig(**depth)))


def batch(shape: list[int], padded: bool) -> tuple[Tensor, Tensor | None]:
    """Tokens, and a mask under which sequences are from half as long to whole."""
    n, longest, _ = shape
    tokens = torch.randint(VOCAB, (n, longest))
    if not padded:
        return tokens, None
    lengths = torch.linspace(longest / 2, longest, n + 1)[1:].long() - (n == 1) * (longest // 4)
    return tokens, torch.arange(longest) < lengths[:, None]


class Plain(nn.Module):
    """The layers written out over the modules of ours: no solver, no field, no checks."""

    def __init__(self, model: Any):
        super().__init__()
        self.model, self.n_heads, self.causal = model, model.config.block.n_heads, model.causal

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the model gives."""
        model, n = self.model, tokens.shape[1]
        z = model.token_embedding(tokens) + model.position.table[:n]
        seen = None if mask is None else mask[:, None, None]
        causal = self.causal and mask is None
        if self.causal and mask is not None:
            seen = seen & torch.ones(n, n, dtype=torch.bool).tril()
        for layer in model.layers:
            a, f = layer.attention, layer.feedforward
            x = a.placement.norm(z)
            q, k, v = (g(x).view(*x.shape[:2], self.n_heads, -1).transpose(1, 2)
                       for g in (a.core.query, a.core.key, a.core.value))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal)
            z = z + a.core.output(y.transpose(1, 2).reshape(x.shape))
            z = z + f.core.output(F.gelu(f.core.hidden(f.placement.norm(z))))
        z = model.final_norm(z)
        return z if model.head is None else model.head(z)


class TorchNN(nn.Module):
    """torch.nn's own layers with the weights of ours."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        self.layers = stack(model.config.block, N_LAYERS)
        for theirs, ours in zip(self.layers.layers, model.layers, strict=True):
            core, attention = ours.attention.core, theirs.self_attn
            parts = (core.query, core.key, core.value)
            pairs = [(attention.in_proj_weight, torch.cat([p.weight for p in parts])),
                     (attention.in_proj_bias, torch.cat([p.bias for p in parts]))]
            for new, old in ((attention.out_proj, core.output), (theirs.linear1, ours.feedforward.core.hidden),
                             (theirs.linear2, ours.feedforward.core.output),
                             (theirs.norm1, ours.attention.placement.norm),
                             (theirs.norm2, ours.feedforward.placement.norm)):
                pairs += [(new.weight, old.weight), (new.bias, old.bias)]
            with torch.no_grad():
                for new, old in pairs:
                    new.copy_(old)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the model gives."""
        model, n = self.model, tokens.shape[1]
        z = model.token_embedding(tokens) + model.position.table[:n]
        hidden = None if mask is None else ~mask
        if model.causal:
            causal = future(n) if mask is None else ~torch.ones(n, n, dtype=torch.bool).tril()
            z = self.layers(z, mask=causal, src_key_padding_mask=hidden, is_causal=True)
        else:
            z = self.layers(z, src_key_padding_mask=hidden)
        return z if model.head is None else model.head(z)


@contextmanager
def fast_path(on: bool) -> Iterator[None]:
    """torch.nn's fused layer for inference, which evaluation mode without gradients takes."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(on)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def x_transformers(model: Any, tokens: Tensor, mask: Tensor | None) -> Callable[[], Tensor]:
    """x-transformers of the same size, with its fused attention; weights of its own."""
    from x_transformers import Decoder as XDecoder
    from x_transformers import Encoder as XEncoder
    from x_transformers import TransformerWrapper

    block, kind = model.config.block, XDecoder if model.causal else XEncoder
    layers = kind(dim=block.d_model, depth=N_LAYERS, heads=block.n_heads, attn_flash=True,
                  attn_dim_head=block.d_model // block.n_heads)
    theirs = TransformerWrapper(num_tokens=VOCAB, max_seq_len=tokens.shape[1], attn_layers=layers)
    return lambda: theirs(tokens, mask=mask, return_embeddings=model.head is None)


def measure(case: dict[str, Any], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """One row a peer. Raises AssertionError where a peer with our weights gives something else."""
    if case["kind"] == "rk4":
        return measure_rk4(case, rounds, seconds)
    shape, mode = case["shape"], case["pass"]
    model = make(case["kind"], shape).eval()  # no dropout here: evaluation mode changes nothing but torch.nn's path
    tokens, mask = batch(shape, case["padded"])
    plain, theirs = Plain(model), TorchNN(model).eval()
    check(model, plain, theirs, tokens, mask)
    calls = {"ours": lambda: model(tokens, mask), "plain torch": lambda: plain(tokens, mask),
             "torch.nn": under(False, lambda: theirs(tokens, mask)),
             "x-transformers": later(x_transformers, model, tokens, mask)}
    if mode == "forward":
        calls["torch.nn, fast path"] = under(True, lambda: theirs(tokens, mask))
    times = interleaved({name: MODES[mode](call) for name, call in calls.items()}, rounds, seconds)
    where, note = f"{mode}, {tuple(shape)}", f"{case['kind']}, {'padded' if case['padded'] else 'not padded'}"
    target = TORCH_NN[mode][SHAPES.index(tuple(shape))]
    rows = [times.ratio(f"Euler over {name}, {where}", "ours", name, limit, note=note)
            for name, limit in (("torch.nn", target), ("torch.nn, fast path", target), ("plain torch", PLAIN))
            if name in calls]
    return [*rows, times.ratio(f"Euler over x-transformers, {mode}", "ours", "x-transformers", note=note)]


def under(fast: bool, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The call with torch.nn's fast path on or off."""
    def made() -> Tensor:
        with fast_path(fast):
            return call()

    return made


def check(model: Any, plain: nn.Module, theirs: nn.Module, tokens: Tensor, mask: Tensor | None) -> None:
    """Raises AssertionError unless all give the same at real tokens."""
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    with torch.no_grad(), fast_path(False):
        ours = model(tokens, mask)[real]
        for other in (plain, theirs):
            if not torch.allclose(other(tokens, mask)[real], ours, atol=1e-4):
                raise AssertionError(f"{type(other).__name__} with our weights gives something else")


def measure_rk4(case: dict[str, Any], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Four evaluations a step over one."""
    euler = make("Encoder", case["shape"], weights="shared").eval()
    rk4, (tokens, _) = euler.with_solver("rk4"), batch(case["shape"], False)
    calls = {"euler": lambda: euler(tokens), "rk4": lambda: rk4(tokens)}
    times = interleaved({name: MODES["forward"](call) for name, call in calls.items()}, rounds, seconds)
    return [times.ratio("rk4 over Euler, shared weights", "rk4", "euler", RK4, note=str(tuple(case["shape"])))]
