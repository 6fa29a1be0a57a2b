"""What all attention variants share: projections into heads, masks, windows, rotary positions.

A variant is a subclass that overrides ``bias`` (a term added to the scores), ``scores`` or ``weights`` (the
probabilities themselves). All see ``Pairs``: queries and keys that meet. One that overrides more than ``bias`` also
overrides ``attend``, which computes the same without making them where it can.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odeformer.attention.pairs import Pairs, Sight, fine, needs_rules
from odeformer.finite import Finite
from odeformer.positions import Rotary
from odeformer.tables import at_least

Slot = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # (batch, n_kv_heads, tokens, head_dim) each


def fused(pairs: Pairs, bias: Tensor | None = None, scale: float | None = None) -> Tensor:
    """softmax(scale Q K^T + bias) V by torch's fused kernel; a query that sees nothing gets 0.

    ``scale``: 1 / sqrt(head_dim) if None. torch has no vmap or forward-mode rules for the kernel: within them (and
    under torch.func.grad, which may be nested) the same is computed in elementary operations.
    """
    query, key, value = pairs.query, pairs.key, pairs.value
    if needs_rules():
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        return weighted(closed_softmax(scores if bias is None else scores + bias, pairs.seen), value)
    # every query stands at a key, which it sees unless masked; on a memory only the mask says what is seen
    stands = not pairs.causal or 0 <= pairs.first <= key.shape[2] - query.shape[2]
    if bias is not None:
        bias = narrow(bias, query.dtype)
    elif pairs.causal and pairs.mask is None and pairs.window is None and query.shape[2] == key.shape[2] and stands:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    if pairs.sight is not None and pairs.sight.holds(pairs):
        if (term := pairs.sight.term(pairs)) is not None:
            bias = term if bias is None else bias + term
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    seen = pairs.seen
    if seen is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    sees = None
    if pairs.mask is not None or not stands:  # rows that see nothing look everywhere and are cleared: no NaN
        sees = seen.any(-1, keepdim=True)
        seen = seen | ~sees
    bias = seen if bias is None else bias.masked_fill(~seen, float("-inf"))
    y = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    return y if sees is None else y * sees


def narrow(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias in a dtype. In float16 a far key's would be -inf, and a row of nothing else NaN."""
    if dtype == torch.float16:
        bias = bias.clamp(min=torch.finfo(dtype).min / 2)
    return bias.to(dtype)


def closed_softmax(scores: Tensor, seen: Tensor | None) -> Tensor:
    """Softmax over the keys that may be seen, 0 elsewhere; all 0, never NaN, where none may be. At least float32."""
    scores = scores.to(fine(scores.dtype))
    if seen is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).masked_fill(~seen, 0)


def weighted(weights: Tensor, value: Tensor) -> Tensor:
    """Sums over the keys of values (..., keys, head_dim) under weights (..., queries, keys), in the values' dtype."""
    return weights.to(value.dtype) @ value


def check_sight(mask: Tensor, x: Tensor, memory: Tensor, more: bool) -> None:
    """Raises TypeError or ValueError unless mask is bool (batch, keys) or (batch, queries, keys).

    ``more``: keys of earlier calls come before those of memory.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError("mask must be a bool tensor (True = may be seen), got "
                        f"{getattr(mask, 'dtype', type(mask).__name__)}")
    (batch, n), m = x.shape[:2], memory.shape[1]
    fits = mask.dim() in (2, 3) and tuple(mask.shape[:-1]) == (batch, n)[:mask.dim() - 1]
    if not fits or mask.shape[-1] < m or (mask.shape[-1] > m and not more):
        raise ValueError(f"mask must have the shape (batch, keys) = {(batch, m)} or (batch, queries, keys) = "
                         f"{(batch, n, m)}{' with more keys' if more else ''}, got {tuple(mask.shape)}")


def cleaned(x: Tensor, memory: Tensor, mask: Tensor, own: bool) -> tuple[Tensor, Tensor]:
    """x and memory (x itself where ``own``) with numbers for what is hidden: a weight of 0 times NaN is NaN."""
    shown = mask if mask.dim() == 2 else mask.any(1)
    if (n_earlier := shown.shape[1] - memory.shape[1]):
        shown = shown[:, n_earlier:]
    shown = shown.unsqueeze(-1)
    if not own:
        return x, memory.masked_fill(~shown, 0)
    # hidden tokens ask, too, and a NaN question would spoil the gradients of all keys
    x = torch.where(shown, x, x.nan_to_num(0, 0, 0))
    return x, x * shown  # several times as fast as filling, and exact now that hidden places are finite


BLOCK = 64  # least number of queries that attend together under a window
QK_NORMS = {
    "none": lambda head_dim: nn.Identity(),
    "rms": nn.RMSNorm,
    "layer": nn.LayerNorm,
}


PROJECTIONS = ("query", "key", "value", "output")


def with_bias(bias: bool | Sequence[str]) -> Sequence[str]:
    """Which projections have a bias. Raises ValueError for another name."""
    if isinstance(bias, bool):
        return PROJECTIONS if bias else ()
    if isinstance(bias, str) or any(name not in PROJECTIONS for name in bias):
        raise ValueError(f"bias must be True, False or some of {', '.join(PROJECTIONS)}, got {bias!r}")
    return bias


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """The norm in its weights' dtype, which under autocast is not that of x."""
    return x if isinstance(norm, nn.Identity) else norm(x.to(norm.weight.dtype)).to(x.dtype)


class Attention(Finite, nn.Module):
    """softmax(Q K^T / sqrt(head_dim) + bias) V with n_heads heads; ``bias`` is the variant's, here none.

    ``n_kv_heads``: heads of key and value, each serving n_heads / n_kv_heads queries (grouped-query attention, Ainslie
    et al. 2023; 1 is multi-query, Shazeer 2019). ``qk_norm``: "none", "rms" or "layer", a norm over head_dim of
    queries and keys (Henry et al. 2020; Dehghani et al. 2023). ``window``: token i sees j where |i - j| < window, at a
    cost of tokens x window; None: all. ``bias``: whether the projections have one, or which of them, such as
    ("query", "key", "value").

    Raises ValueError where d_model is not a multiple of n_heads, or n_heads not one of n_kv_heads.
    """

    def __init__(self, d_model: int, n_heads: int, *, n_kv_heads: int | None = None, qk_norm: str = "none",
                 window: int | None = None, bias: bool | Sequence[str] = True):
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        for name, value in (("d_model", d_model), ("n_heads", n_heads), ("n_kv_heads", n_kv_heads)):
            at_least(name, value, 1)
        if d_model % n_heads:
            raise ValueError(f"d_model must be a multiple of n_heads; got d_model = {d_model}, n_heads = {n_heads}")
        if n_heads % n_kv_heads:
            raise ValueError(f"n_heads must be a multiple of n_kv_heads; got n_heads = {n_heads}, "
                             f"n_kv_heads = {n_kv_heads}")
        if window is not None:
            at_least("window", window, 1)
        if qk_norm not in QK_NORMS:
            raise ValueError(f"qk_norm must be one of {', '.join(QK_NORMS)}, got {qk_norm!r}")
        self.n_heads, self.n_kv_heads, self.head_dim, self.window = n_heads, n_kv_heads, d_model // n_heads, window
        biased = with_bias(bias)
        self.query = nn.Linear(d_model, d_model, bias="query" in biased)
        self.key = nn.Linear(d_model, n_kv_heads * self.head_dim, bias="key" in biased)
        self.value = nn.Linear(d_model, n_kv_heads * self.head_dim, bias="value" in biased)
        self.output = nn.Linear(d_model, d_model, bias="output" in biased)
        self.query_norm, self.key_norm = (QK_NORMS[qk_norm](self.head_dim) for _ in range(2))

    takes_sight = True  # whether forward and pairs take the argument ``sight``
    asks_for_plain_keys = False  # whether ``Pairs.plain`` holds the keys before rotary positions

    def __init_subclass__(cls, **keywords: object) -> None:
        """A variant that takes ``**shared`` has the options of its base beside its own: its signature says so."""
        super().__init_subclass__(**keywords)
        cls.takes_sight = all("sight" in p or any(q.kind is q.VAR_KEYWORD for q in p.values()) for p in (
            inspect.signature(cls.forward).parameters, inspect.signature(cls.pairs).parameters))
        signature = inspect.signature(cls.__init__)
        own = list(signature.parameters.values())[1:]
        if own and own[-1].kind is inspect.Parameter.VAR_KEYWORD:
            names = {p.name for p in own}
            shared = inspect.signature(cls.__mro__[1]).parameters.values()
            own[-1:] = [p for p in shared if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in names]
        cls.__signature__ = signature.replace(parameters=own)

    def extra_repr(self) -> str:
        """Heads and window, for print(model)."""
        return f"n_heads={self.n_heads}, head_dim={self.head_dim}, window={self.window}"

    def heads(self, x: Tensor) -> Tensor:
        """(batch, tokens, heads * head_dim) -> (batch, heads, tokens, head_dim)."""
        shape, size = x.shape, self.head_dim
        return x.view(*shape[:-1], shape[-1] // size, size).transpose(1, 2)

    def project(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (batch, heads, tokens, head_dim)."""
        query, key, value = self.heads(self.query(x)), self.heads(self.key(memory)), self.heads(self.value(memory))
        return normed(self.query_norm, query), normed(self.key_norm, key), value

    @property
    def scale(self) -> float:
        """What Q K^T is multiplied by."""
        return self.head_dim**-0.5

    def bias(self, pairs: Pairs) -> Tensor | None:
        """What is added to the scores, broadcastable to (batch, heads, queries, keys)."""
        return None

    def scores(self, pairs: Pairs) -> Tensor:
        """(batch, heads, queries, keys), before masking."""
        scores, bias = (pairs.query * self.scale) @ pairs.key.transpose(-1, -2), self.bias(pairs)
        return scores if bias is None else scores + bias

    def weights(self, pairs: Pairs) -> Tensor:
        """Attention probabilities (batch, heads, queries, keys), 0 where nothing may be seen."""
        return closed_softmax(self.scores(pairs), pairs.seen)

    def attend(self, pairs: Pairs) -> Tensor:
        """(batch, heads, queries, head_dim): here through torch's fused kernel, equal to ``weights(pairs) @ value``."""
        return fused(pairs, self.bias(pairs), self.scale)

    def pairs(self, x: Tensor, memory: Tensor | None = None, *, mask: Tensor | None = None, causal: bool = False,
              rotary: Rotary | None = None, slot: Slot | None = None, first: int | Tensor | None = None,
              sight: Sight | None = None) -> Pairs:
        """Queries and keys of a call; the arguments are those of ``forward``."""
        own, memory = memory is None, x if memory is None else memory
        self.check_states(x, memory)
        if mask is not None and not (sight is not None and sight.clean):
            check_sight(mask, x, memory, slot is not None)
            x, memory = cleaned(x, memory, mask, own)
        source, key, value = self.project(x, memory)
        query = source
        if rotary is not None:
            query, key = rotary.turn(source), rotary.turn(key)
        if slot is not None:
            key, value = slot(key, value)
            if mask is not None and mask.shape[-1] > key.shape[2]:
                mask = mask[..., mask.shape[-1] - key.shape[2]:]
        group = self.n_heads // self.n_kv_heads
        if group > 1:
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        plain = rotary.back(key) if rotary is not None and self.asks_for_plain_keys else None
        if self.window is not None and not own and not causal:
            raise ValueError("window is for self-attention, got a memory, whose tokens have no distance to the queries")
        if first is None:
            first = key.shape[2] - query.shape[2] if causal else 0
        origin = None
        if not own and not causal and mask is not None and mask.dim() == 2:
            origin = mask.int().argmax(1).view(-1, 1, 1, 1)
        return Pairs(query, key, value, source, mask, causal, first, self.window, origin, plain, sight)

    def check_states(self, x: Tensor, memory: Tensor) -> None:
        """Raises TypeError or ValueError unless both are (batch, tokens, d_model), of one batch."""
        width = self.n_heads * self.head_dim
        for name, states in (("x", x),) if memory is x else (("x", x), ("memory", memory)):
            if not isinstance(states, Tensor) or not states.is_floating_point():
                raise TypeError(f"{name} must be a floating-point tensor, got "
                                f"{getattr(states, 'dtype', type(states).__name__)}")
            if states.dim() != 3 or states.shape[2] != width:
                raise ValueError(f"{name} must have the shape (batch, tokens, d_model = {width}), got "
                                 f"{tuple(states.shape)}")
        if x.shape[0] != memory.shape[0]:
            raise ValueError(f"memory must have the batch size of x, {len(x)}, got {len(memory)}")

    def forward(self, x: Tensor, memory: Tensor | None = None, *, mask: Tensor | None = None, causal: bool = False,
                rotary: Rotary | None = None, slot: Slot | None = None, first: int | Tensor | None = None,
                sight: Sight | None = None) -> Tensor:
        """(batch, queries, d_model) -> (batch, queries, d_model).

        ``memory`` (batch, keys, d_model): what is attended to, x itself if None. ``mask``: bool, True = may be seen,
        (batch, keys) or (batch, queries, keys). ``causal``: no query sees a later key; the last query stands at the
        last key. ``rotary``: turns queries and keys by their positions, which end at the same.
        ``slot``: gives the keys and values of earlier tokens, too, from this call's; ``mask`` then covers them all.
        ``first``: where the first query stands, for priors on a memory, a number or (batch, 1, 1, 1); None: at 0. A
        memory's places are counted from its first real token. ``sight``: of a model's forward pass, for self-attention
        whose output at hidden tokens is dropped (see ``Sight``).
        """
        kept = {} if sight is None else {"sight": sight}
        pairs = self.pairs(x, memory, mask=mask, causal=causal, rotary=rotary, slot=slot, first=first, **kept)
        blocked = self.window is not None and (mask is None or mask.dim() == 2)
        y = self.attend_in_blocks(pairs) if blocked else self.attend(pairs)
        return self.output(y.transpose(1, 2).flatten(2))

    def multiply_adds(self, n_seen: int) -> int:
        """Of scores and weighted values, for a token that sees so many."""
        return 2 * n_seen * self.n_heads * self.head_dim

    def probabilities(self, x: Tensor, memory: Tensor | None = None, **arguments: object) -> Tensor:
        """The attention weights of a call (batch, heads, queries, keys), for looking at; arguments as of the call."""
        return self.weights(self.pairs(x, memory, **arguments))

    def attend_in_blocks(self, pairs: Pairs) -> Tensor:
        """``attend`` with each block of queries meeting only the keys that its window reaches.

        Blocks are folded into the batch: distances are the same in each, so a variant does not notice.
        """
        n, m, reach = pairs.query.shape[2], pairs.key.shape[2], self.window - 1
        size = max(self.window, BLOCK)
        right = 0 if pairs.causal else reach
        if n != m or n <= size + reach:
            return self.attend(pairs.near() if pairs.causal else pairs)
        n_blocks = -(-n // size)
        spare = n_blocks * size - n  # rows added at the end, so that the blocks come out even

        def queries(x: Tensor) -> Tensor:
            x = F.pad(x, (0, 0, 0, spare)).unflatten(2, (n_blocks, size))  # (batch, heads, blocks, size, head_dim)
            return x.transpose(1, 2).flatten(0, 1)

        def keys(x: Tensor) -> Tensor:
            x = F.pad(x, (0, 0, reach, right + spare)).unfold(2, reach + size + right, size)
            return x.permute(0, 2, 1, 4, 3).flatten(0, 1)  # from (batch, heads, blocks, head_dim, keys of a block)

        batch = pairs.query.shape[0]
        mask = torch.ones(1, m, dtype=torch.bool, device=pairs.query.device) if pairs.mask is None else pairs.mask
        mask = F.pad(mask, (reach, right + spare)).unfold(1, reach + size + right, size)
        mask = mask.expand(batch, -1, -1).flatten(0, 1)  # False beyond both ends, too
        plain = None if pairs.plain is None else keys(pairs.plain)
        y = self.attend(Pairs(queries(pairs.query), keys(pairs.key), keys(pairs.value), queries(pairs.source), mask,
                              pairs.causal, reach, self.window, plain=plain))
        return y.unflatten(0, (batch, n_blocks)).transpose(1, 2).flatten(2, 3)[:, :, :n]
