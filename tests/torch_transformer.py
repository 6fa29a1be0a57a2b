"""The layers of torch.nn with the weights of ours: what our models are compared to."""

import torch
from torch import nn


def attention_pairs(theirs: nn.MultiheadAttention, ours):
    """(our parameter, theirs, which third of theirs or None for all of it) of an attention."""
    for i, part in enumerate((ours.query, ours.key, ours.value)):
        yield part.weight, theirs.in_proj_weight, i
        yield part.bias, theirs.in_proj_bias, i
    yield ours.output.weight, theirs.out_proj.weight, None
    yield ours.output.bias, theirs.out_proj.bias, None


def module_pairs(theirs: nn.Module, ours: nn.Module):
    """The same of two modules of one kind: linear maps, layer norms."""
    for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
        yield x, y, None


def layer_pairs(theirs, ours):
    """The same of all parameters of a layer; a decoder's also attends to a memory."""
    cross = ours.cross_attention is not None
    yield from attention_pairs(theirs.self_attn, ours.attention.core)
    yield from module_pairs(theirs.norm1, ours.attention.placement.norm)
    if cross:
        yield from attention_pairs(theirs.multihead_attn, ours.cross_attention.core)
        yield from module_pairs(theirs.norm2, ours.cross_attention.placement.norm)
    yield from module_pairs(theirs.linear1, ours.feedforward.core.hidden)
    yield from module_pairs(theirs.linear2, ours.feedforward.core.output)
    yield from module_pairs(theirs.norm3 if cross else theirs.norm2, ours.feedforward.placement.norm)


def stack_pairs(theirs, ours):
    """The same of layers and final norm: nn.TransformerEncoder or nn.TransformerDecoder, and our model."""
    for layer, block in zip(theirs.layers, ours.layers, strict=True):
        yield from layer_pairs(layer, block)
    if theirs.norm is not None:
        yield from module_pairs(theirs.norm, ours.final_norm)


def part(theirs, which):
    return theirs if which is None else theirs.chunk(3)[which]


@torch.no_grad()
def draw_both(pairs):
    """New values for all parameters, none at 0 or 1, the same in both."""
    for ours, theirs, which in pairs:
        ours.add_(0.1 * torch.randn_like(ours))
        part(theirs, which).copy_(ours)


def encoder_of_torch(n_layers, activation, norm, dtype, d_model=8, n_heads=2, d_ff=32):
    """nn.TransformerEncoder; its final norm as ours, after pre-norm layers alone."""
    layer = nn.TransformerEncoderLayer(d_model, n_heads, d_ff, dropout=0.0, activation=activation, batch_first=True,
                                       norm_first=norm == "pre", dtype=dtype)
    final = nn.LayerNorm(d_model, dtype=dtype) if norm == "pre" else None
    return nn.TransformerEncoder(layer, n_layers, norm=final, enable_nested_tensor=False)


def decoder_of_torch(n_layers, activation, norm, dtype, d_model=8, n_heads=2, d_ff=32):
    """nn.TransformerDecoder, likewise."""
    layer = nn.TransformerDecoderLayer(d_model, n_heads, d_ff, dropout=0.0, activation=activation, batch_first=True,
                                       norm_first=norm == "pre", dtype=dtype)
    return nn.TransformerDecoder(layer, n_layers, norm=nn.LayerNorm(d_model, dtype=dtype) if norm == "pre" else None)


def future(n):
    """What a causal mask of torch.nn hides: True above the diagonal."""
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def assert_close(got, wanted, tolerance):
    """|got - wanted| relative to |wanted|, or to 1 where that is smaller, in the Euclidean norm."""
    assert (got - wanted).norm() <= tolerance * wanted.norm().clamp(min=1)


def assert_same_gradients(pairs, tolerance):
    """Of all parameters as one vector, after both have gone backward."""
    both = [(ours.grad.flatten(), part(theirs.grad, which).flatten()) for ours, theirs, which in pairs]
    got, wanted = (torch.cat(side) for side in zip(*both, strict=True))
    assert_close(got, wanted, tolerance)
