"""The key/value cache: what a decoder gives token by token is what it gives for the whole text at once."""

import inspect
import itertools

import pytest
import torch
from attention_reference import SELF, VARIANTS

from odeformer import (
    ATTENTION,
    CACHES,
    COUPLINGS,
    FEEDFORWARD,
    NORMS,
    POSITIONS,
    WEIGHTS,
    BlockConfig,
    Decoder,
    DecoderConfig,
    DepthConfig,
    Seq2Seq,
    Seq2SeqConfig,
)
from odeformer.fusion import FUSIONS
from solvers import SOLVERS

VOCAB, LENGTH = 11, 6
FIXED = [name for name, solver in SOLVERS.items() if not (solver.is_adaptive or solver.is_implicit)]
UNEVEN = [3, 1, 2]


def stir(model):
    """Every parameter moved off its start, so that biases, priors and gates that start at 0 count; float64."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model.double().eval()


def decoder(*, n_layers=2, position="learned", block=(), **depth):
    return stir(Decoder(DecoderConfig(
        vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=n_layers, depth=DepthConfig(**depth),
        block=BlockConfig(8, 2, **{"d_ff": 8, "position": position, **dict(block)}))))


def translator(*, cross="softmax", options=(), block=(), **depth):
    block = {"cross_attention": cross, "cross_attention_options": dict(options), **dict(block)}
    return stir(Seq2Seq(Seq2SeqConfig(vocab_size=VOCAB, max_seq_len=LENGTH, n_layers=2, depth=DepthConfig(**depth),
                                      block=BlockConfig(8, 2, d_ff=8, **block))))


def tokens(batch=2, length=LENGTH):
    return torch.randint(VOCAB, (batch, length))


def left_padding(batch=2, length=LENGTH):
    """Row i has 2 i tokens of padding on the left."""
    return torch.arange(length).expand(batch, -1) >= 2 * torch.arange(batch)[:, None]


def read(call, ids, mask=None, pieces=(1,) * LENGTH, cache=None):
    """The logits of a text that is read piece by piece, and the cache."""
    out = []
    for piece, seen in zip(ids.split(list(pieces), 1),
                           itertools.repeat(None) if mask is None else mask.split(list(pieces), 1), strict=False):
        logits, cache = call(piece, seen, cache=cache)
        out.append(logits)
    return torch.cat(out, 1), cache


def off(model, ids, mask=None, pieces=(1,) * LENGTH, policy="exact", **options):
    """The largest difference of cached and full logits at real tokens, relative to the largest logit."""
    with torch.no_grad():
        full = model(ids, mask)
        cached, _ = read(model, ids, mask, pieces, model.new_cache(policy, **options))
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    return (cached - full)[real].abs().max() / full[real].abs().max()


def exact(model, what="", pieces=UNEVEN):
    """Cached is full, in float64: first three tokens, some of them padding on the left, then one, then two."""
    n = sum(pieces)
    assert off(model, tokens(length=n), left_padding(length=n), pieces) < 1e-12, what


@pytest.mark.parametrize("name", FIXED)
def test_cached_is_full_for_every_fixed_step_solver_and_coupling(name):
    # 6 steps are more than any starter takes; methods of many stages have no memory from step to step
    steps = 6 if name.startswith("ab") else 2 if SOLVERS[name].n_stages <= 4 else 1
    for coupling in COUPLINGS:
        exact(decoder(n_layers=1, solver=name, steps_per_layer=steps, block={"coupling": coupling}), coupling, (3, 1))


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_cached_is_full_token_by_token_and_in_any_pieces(coupling):
    for solver in ("euler", "rk4", "leapfrog"):
        model = decoder(solver=solver, steps_per_layer=2, block={"coupling": coupling})
        for pieces, mask in (((1,) * LENGTH, None), ((1,) * LENGTH, left_padding()), ((5, 1), None), ([LENGTH], None)):
            assert off(model, tokens(), mask, pieces) < 1e-12, (solver, pieces)


@pytest.mark.parametrize("name", [name for name in SOLVERS if name not in FIXED])
def test_adaptive_and_implicit_solvers_with_a_cache_are_refused_with_the_reason(name):
    model = decoder()
    cache = model.new_cache()
    with pytest.raises(ValueError, match="later tokens move earlier outputs"):
        model.with_solver(name)(tokens(), cache=cache)
    assert cache.n_tokens == 0 and cache.bytes() == 0
    with pytest.raises(ValueError, match="later tokens move earlier outputs"):
        model.with_solver(name).generate(tokens(length=2), max_new_tokens=2)


@pytest.mark.parametrize("label", SELF)
def test_cached_is_full_for_every_attention_variant(label):
    name, options = VARIANTS[label]
    grouped = {"n_kv_heads": 1} if "n_kv_heads" in inspect.signature(ATTENTION[name]).parameters else {}
    for solver, position, more in (("ab2", "learned", {}), ("rk4", "rope", {"window": 3, **grouped})):
        model = decoder(solver=solver, steps_per_layer=2 if solver == "ab2" else 1, position=position,
                        block={"attention": name, "attention_options": {**options, **more}})
        exact(model, solver)
    assert off(model.float(), tokens(), left_padding(), UNEVEN) < 1e-5


@pytest.mark.parametrize("solver", ["rk4", "ab2"])
def test_cached_is_full_for_every_norm_weights_and_feedforward(solver):
    depth = {"solver": solver, "steps_per_layer": 3 if solver == "ab2" else 1}
    for coupling in COUPLINGS:
        for name in WEIGHTS:
            exact(decoder(n_layers=3, weights=name, block={"coupling": coupling}, **depth), (coupling, name))
    for name in NORMS:
        exact(decoder(block={"norm": name}, **depth), name)
    for name in FEEDFORWARD:
        exact(decoder(block={"feedforward": name}, **depth), name)


@pytest.mark.parametrize("name", FUSIONS)
def test_cached_is_full_for_every_fusion_and_form(name):
    forms = [form for form, refused in FUSIONS[name].forms.items() if refused is None]
    for form, solver in itertools.product(forms, ("midpoint", "ab2")):
        exact(decoder(n_layers=3, solver=solver, steps_per_layer=2 if solver == "ab2" else 1, fusion=name,
                      fusion_options={"form": form}), (form, solver))


def test_cached_is_full_under_layer_drop_whose_layers_count_with_their_odds():
    for weights in ("piecewise", "shared"):
        exact(decoder(layer_drop=0.4, weights=weights, solver="rk4"))


@pytest.mark.parametrize("position", POSITIONS)
def test_each_left_padded_row_equals_its_run_alone(position):
    """Learned and sinusoidal positions count real tokens; rotary ones see differences only."""
    ids, mask = tokens(3), left_padding(3)
    for solver in ("euler", "rk4"):
        model = decoder(position=position, solver=solver)
        for pieces in ((LENGTH,), (4, 1, 1), (1,) * LENGTH):
            with torch.no_grad():
                got, _ = read(model, ids, mask, pieces, model.new_cache())
                full = model(ids, mask)
                for i in range(3):
                    alone = model(ids[i:i + 1, 2 * i:])[0]
                    assert (got[i, 2 * i:] - alone).abs().max() < 1e-12 * alone.abs().max(), (solver, pieces)
                    assert (full[i, 2 * i:] - alone).abs().max() < 1e-12 * alone.abs().max(), (solver, pieces)


def test_a_mask_that_comes_late_means_that_all_before_was_real():
    model = decoder(solver="midpoint")
    ids, mask = tokens(), torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, 4] = False  # a hole
    with torch.no_grad():
        full, cache = model(ids, mask), model.new_cache()
        a, _ = model(ids[:, :3], cache=cache)
        b, _ = model(ids[:, 3:5], mask[:, 3:5], cache=cache)
        c, _ = model(ids[:, 5:], cache=cache)
    assert torch.equal(cache.mask, mask)
    assert (torch.cat([a, b, c], 1) - full)[mask].abs().max() < 1e-12 * full.abs().max()


# an encoder-decoder


TO_MEMORY = [label for label, (name, options) in VARIANTS.items()
             if "window" not in (name, *options) and label != "cross ratio"]


@pytest.mark.parametrize("label", TO_MEMORY)
def test_cached_decoding_is_full_decoding_for_every_cross_attention(label):
    name, options = VARIANTS[label]
    source, real = tokens(2, 5), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    ids, mask = tokens(), left_padding()
    for solver, coupling in (("rk4", "lie"), ("ab2", "composed")):
        model = translator(cross=name, options=options, solver=solver, steps_per_layer=3 if solver == "ab2" else 1,
                           block={"coupling": coupling, "position": "rope" if solver == "rk4" else "learned"})
        with torch.no_grad():
            memory = model.encode(source, real)
            full = model(source, ids, real, mask)
            got, _ = read(lambda x, m, cache: model.decode(x, memory, real, m, cache=cache),  # noqa: B023
                          ids, mask, UNEVEN, model.new_cache())
            assert (got - full)[mask].abs().max() < 1e-12 * full.abs().max(), solver


@pytest.mark.parametrize("weights", WEIGHTS)
def test_cached_decoding_is_full_decoding_for_every_coupling_and_weights(weights):
    source, ids = tokens(2, 5), tokens()
    for coupling, solver in itertools.product(COUPLINGS, ("euler", "midpoint")):
        model = translator(solver=solver, weights=weights, block={"coupling": coupling})
        with torch.no_grad():
            memory, full = model.encode(source), model(source, ids)
            got, cache = read(lambda x, m, cache: model.decode(x, memory, target_mask=m, cache=cache),  # noqa: B023
                              ids, None, UNEVEN, model.new_cache())
        assert (got - full).abs().max() < 1e-12 * full.abs().max(), (coupling, solver)
        crossed = [slot for key, slot in cache.slots.items() if key[0] == "cross"]
        assert crossed and all(slot.length == 5 for slot in crossed)  # the memory is projected once a pass of tokens


# policies


def test_the_first_stage_policy_is_exact_for_euler_and_lie_and_an_approximation_for_rk4():
    ids = tokens()
    assert off(decoder(), ids, policy="first_stage") < 1e-12
    assert off(decoder(), ids, left_padding(), UNEVEN, policy="first_stage") < 1e-12
    for solver, coupling in (("rk4", "lie"), ("midpoint", "parallel"), ("euler", "strang")):
        model = decoder(solver=solver, block={"coupling": coupling})
        assert off(model, ids, policy="first_stage") > 1e-6, solver
        assert off(model, ids, None, [LENGTH], policy="first_stage") < 1e-12  # one pass needs no earlier keys


@pytest.mark.parametrize("solver", ["euler", "rk4"])
def test_the_window_policy_is_exact_where_the_attentions_window_is_no_wider(solver):
    ids, mask = tokens(), left_padding()
    model = decoder(solver=solver, block={"attention": "window", "attention_options": {"window": 3}})
    for window in (3, 5):
        assert off(model, ids, policy="window", window=window) < 1e-12
        assert off(model, ids, mask, UNEVEN, policy="window", window=window) < 1e-12
    assert off(model, ids, policy="window", window=2) > 1e-6
    full = decoder(solver=solver, position="rope", block={"attention": "alibi"})
    assert off(full, ids, policy="window", window=LENGTH) < 1e-12
    assert off(full, ids, policy="window", window=4) > 1e-6


def test_the_window_policy_gives_by_hand_what_each_token_sees_in_its_window():
    """One layer, one token at a time: keys and values of the last 3 tokens, this one among them."""
    model = decoder(n_layers=1, position="none")
    ids = tokens()
    with torch.no_grad():
        got, _ = read(model, ids, cache=model.new_cache("window", window=3))
        for i in range(LENGTH):
            alone = model(ids[:, max(0, i - 2):i + 1])[:, -1]
            assert (got[:, i] - alone).abs().max() < 1e-12 * alone.abs().max()


def test_the_window_policys_memory_is_bounded():
    model = Decoder(DecoderConfig(vocab_size=VOCAB, max_seq_len=200, n_layers=1, block=BlockConfig(8, 2))).eval()
    cache = model.new_cache("window", window=4)
    with torch.no_grad():
        for i in range(200):
            _, cache = model(tokens(1, 1), cache=cache)
            assert cache.bytes() == min(i + 1, 3) * 2 * 8 * 4
            assert all(slot.key.shape[2] <= 64 for slot in cache.slots.values())
    assert cache.n_tokens == 200


@pytest.mark.parametrize("solver", ["euler", "rk4", "ab2"])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_bytes_are_layers_x_evaluations_x_tokens_x_2_x_heads_x_head_dim(solver, coupling):
    heads, batch, calls = 1, 3, []
    model = decoder(n_layers=2, solver=solver, steps_per_layer=2,
                    block={"coupling": coupling, "attention_options": {"n_kv_heads": heads}})
    for block in model.layers:
        block.attention.core.register_forward_hook(lambda *_: calls.append(1))
    for dtype, size in ((torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2)):
        cache, n = model.to(dtype).new_cache(), 0
        with torch.no_grad():
            for piece in (2, 1, 3):
                calls.clear()
                model(tokens(batch, piece), cache=cache)
                n += piece
                assert cache.bytes() == len(calls) * n * 2 * batch * heads * 4 * size
    assert f"{cache.bytes() / 2**20:.2f} MiB" in repr(cache)


def test_bytes_of_the_cheaper_policies_and_of_a_memory_by_hand():
    model, ids = decoder(n_layers=3, solver="rk4"), tokens()
    token = 2 * 2 * 8 * 8  # batch, key and value, d_model, float64
    with torch.no_grad():
        for policy, options, held in (("exact", {}, 4 * 3 * LENGTH), ("first_stage", {}, 3 * LENGTH),
                                      ("window", {"window": 4}, 4 * 3 * 3)):
            _, cache = read(model, ids, cache=model.new_cache(policy, **options))
            assert cache.bytes() == held * token, policy
        model = translator(solver="rk4")
        cache, memory = model.new_cache(), model.encode(tokens(2, 5))
        model.decode(ids[:, :3], memory, cache=cache)
        assert cache.bytes() == (2 * 4 * 3 + 2 * 5) * token  # the memory's once a layer


# reordering, failing, mixing


@pytest.mark.parametrize("policy", CACHES)
def test_reordered_rows_go_on_as_if_they_had_been_read_in_that_order(policy):
    ids, mask, index = tokens(3), left_padding(3), torch.tensor([2, 0, 0, 1])
    model = decoder(solver="rk4")
    options = {"window": 3} if policy == "window" else {}
    with torch.no_grad():
        _, cache = read(model, ids[:, :4], mask[:, :4], (3, 1), model.new_cache(policy, **options))
        cache.reorder(index)
        got, _ = read(model, ids[index, 4:], mask[index, 4:], (1, 1), cache)
        wanted, _ = read(model, ids[index], mask[index], (3, 1, 1, 1), model.new_cache(policy, **options))
        full = model(ids[index], mask[index])[:, 4:]
    assert (got - wanted[:, 4:]).abs().max() < 1e-12 * full.abs().max()
    assert ((got - full).abs().max() < 1e-12 * full.abs().max()) == (policy == "exact")
    assert torch.equal(cache.mask, mask[index])


def test_reordering_moves_the_memory_of_an_encoder_too():
    model, source, ids = translator(solver="midpoint"), tokens(3, 5), tokens(3)
    real, index = torch.arange(5).expand(3, -1) < torch.tensor([[5], [3], [4]]), torch.tensor([1, 1, 2, 0])
    with torch.no_grad():
        memory, cache = model.encode(source, real), model.new_cache()
        model.decode(ids[:, :4], memory, real, cache=cache)
        cache.reorder(index)
        got, _ = model.decode(ids[index, 4:], memory[index], real[index], cache=cache)
        wanted = model(source[index], ids[index], real[index])[:, 4:]
    assert (got - wanted).abs().max() < 1e-12 * wanted.abs().max()


@pytest.mark.parametrize("policy", CACHES)
@pytest.mark.parametrize("grad", [False, True])
def test_a_pass_that_raised_can_be_made_again(policy, grad):
    model, ids, failing = decoder(solver="rk4"), tokens(), []
    options = {"window": 3} if policy == "window" else {}

    def fail(*_):
        if failing:
            raise KeyboardInterrupt

    with torch.set_grad_enabled(grad):
        wanted, _ = read(model, ids, None, (2, 3, 1), model.new_cache(policy, **options))
        model.layers[1].feedforward.core.register_forward_hook(fail)
        cache, got = model.new_cache(policy, **options), []
        for piece in ids.split((2, 3, 1), 1):
            failing.append(True)
            for other in (piece.flip(0), piece.repeat(2, 1) if cache.batch is None else piece):
                with pytest.raises(KeyboardInterrupt):
                    model((other + 1) % VOCAB, cache=cache)
            failing.clear()
            got.append(model(piece, cache=cache)[0])
    assert torch.equal(torch.cat(got, 1), wanted)


def test_a_first_decoding_pass_that_raised_leaves_nothing_of_its_memory():
    model, ids, failing = translator(), tokens(), [True]

    def fail(*_):
        if failing:
            raise KeyboardInterrupt

    model.decoder.layers[1].feedforward.core.register_forward_hook(fail)
    source, cache = tokens(2, 5), model.new_cache()
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            model.decode(ids, model.encode(tokens(2, 4)), cache=cache)
        failing.clear()
        got, _ = model.decode(ids, model.encode(source), cache=cache)
        assert (got - model(source, ids)).abs().max() < 1e-12


def wrong(call, *words, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def test_what_a_cache_cannot_go_on_with_is_refused_and_changes_nothing():
    model, ids = decoder(), tokens()
    for mask in (None, left_padding()):
        cache = model.new_cache()
        with torch.no_grad():
            model(ids[:, :5], None if mask is None else mask[:, :5], cache=cache)
            before = cache.bytes()
            wrong(lambda: model(tokens(3, 1), cache=cache), "cache", "batch of 2", "3")  # noqa: B023
            wrong(lambda: model(tokens(2, 3), cache=cache), "3 positions after 5", "max_seq_len = 6")  # noqa: B023
            wrong(lambda: model(tokens(2, 1), torch.ones(2, 6, dtype=torch.bool), cache=cache),  # noqa: B023
                  "mask", "(2, 6)")
            other = model.with_solver("rk4")
            wrong(lambda: other(ids[:, 5:], cache=cache), "cache", "2 evaluations", "8")  # noqa: B023
            assert cache.n_tokens == 5 and cache.bytes() == before and cache.batch == 2
            got, _ = model(ids[:, 5:], None if mask is None else mask[:, 5:], cache=cache)
            full = model(ids, mask)[:, 5:]
        assert (got - full).abs().max() < 1e-12 * full.abs().max()
    wrong(lambda: model.new_cache("exct"), "cache policy", "exct", "exact")
    wrong(lambda: model.new_cache("exact", window=3), "window", "exact")
    wrong(lambda: model.new_cache("window", window=0), "window", "at least 1")


@pytest.mark.parametrize("gradient", ["checkpoint", "checkpoint_recursive", "reversible", "adjoint"])
def test_a_gradient_mode_that_evaluates_again_is_refused_with_a_cache_where_gradients_are_taken(gradient):
    solver = "reversible_midpoint" if gradient == "reversible" else "rk4"
    if gradient not in SOLVERS[solver].gradients:
        pytest.skip("not a mode of this solver")
    model, ids = decoder(solver=solver, gradient=gradient, steps_per_layer=1), tokens()
    cache = model.new_cache()
    wrong(lambda: model(ids, cache=cache), "gradient", gradient, "no_grad")
    assert cache.n_tokens == 0
    with torch.no_grad():
        full = model(ids)
        assert (model(ids, cache=cache)[0] - full).abs().max() < 1e-12 * full.abs().max()


def gradients_agree(model, pieces, policy="exact", **options):
    """Of the parameters, through cached pieces and through the whole pass."""
    ids, mask, parameters = tokens(), left_padding(), list(model.parameters())
    weight = torch.randn(2, LENGTH, VOCAB, dtype=torch.float64) * mask.unsqueeze(-1)
    full = torch.autograd.grad((model(ids, mask) * weight).sum(), parameters)
    logits, _ = read(model, ids, mask, pieces, model.new_cache(policy, **options))
    got = torch.autograd.grad((logits * weight).sum(), parameters)
    return all((x - y).abs().max() <= 1e-11 * y.abs().max().clamp(min=1) for x, y in zip(got, full, strict=True))


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_gradients_through_cached_pieces_are_those_of_the_whole_pass(coupling):
    for solver in ("euler", "rk4", "ab2"):
        steps = 3 if solver == "ab2" else 1
        assert gradients_agree(decoder(solver=solver, steps_per_layer=steps, block={"coupling": coupling}), UNEVEN)


def test_gradients_through_single_tokens_and_through_a_window_are_those_of_the_whole_pass():
    assert gradients_agree(decoder(solver="rk4"), (1,) * LENGTH)
    windowed = {"attention": "window", "attention_options": {"window": 3}}
    assert gradients_agree(decoder(solver="rk4", block=windowed), (1,) * LENGTH, "window", window=3)


def test_gradients_are_right_where_keys_and_values_are_frozen():
    """Then keys carry no gradient, but the queries' graph holds them: they must not be written over."""
    model, ids = decoder(n_layers=1), tokens()
    for name, p in model.named_parameters():
        p.requires_grad_("query" in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    full = torch.autograd.grad(model(ids).square().sum(), trained)
    logits, _ = read(model, ids, cache=model.new_cache())
    got = torch.autograd.grad(logits.square().sum(), trained)
    for x, y in zip(got, full, strict=True):
        assert (x - y).abs().max() <= 1e-11 * y.abs().max()


def test_a_prefix_read_without_gradients_serves_passes_with_them_and_the_reverse():
    model, ids = decoder(solver="rk4"), tokens()
    full, cache = model(ids).detach(), model.new_cache()
    for i, grad in enumerate((False, True, False, True, True, False)):
        with torch.set_grad_enabled(grad):
            logits, _ = model(ids[:, i:i + 1], cache=cache)
        assert logits.requires_grad == grad
        assert (logits[:, 0] - full[:, i]).abs().max() < 1e-12 * full.abs().max()


def test_a_cache_changes_nothing_of_the_model_and_two_caches_do_not_meet():
    model, a, b = decoder(solver="rk4"), tokens(), tokens(3)
    with torch.no_grad():
        full_a, full_b = model(a), model(b)
        first, second, got_a, got_b = model.new_cache(), model.new_cache(), [], []
        for i in range(LENGTH):
            got_a.append(model(a[:, i:i + 1], cache=first)[0])
            assert torch.equal(model(b), full_b)
            got_b.append(model(b[:, i:i + 1], cache=second)[0])
    assert (torch.cat(got_a, 1) - full_a).abs().max() < 1e-12 * full_a.abs().max()
    assert (torch.cat(got_b, 1) - full_b).abs().max() < 1e-12 * full_b.abs().max()
    assert not [name for name, x in model.named_buffers() if "cache" in name]


def test_a_cached_call_returns_logits_cache_and_solution_in_this_order():
    model, ids = decoder(solver="midpoint"), tokens()
    cache = model.new_cache()
    logits, same, solution = model(ids, cache=cache, return_solution=True)
    assert same is cache and solution.nfe == 4 and solution.z.shape == (2, LENGTH, 8)
    assert torch.equal(model.head(model.final_norm(solution.z)), logits)
    assert isinstance(model(ids), torch.Tensor)


def test_an_own_cache_policy_works_wherever_a_name_does():
    class Counting(CACHES["exact"]):
        passes = 0

        def trim(self):
            self.passes += 1

    model = decoder()
    cache = model.new_cache(Counting)
    assert isinstance(cache, Counting)
    with torch.no_grad():
        read(model, tokens(), cache=cache)
    assert cache.passes == LENGTH


def test_a_wrong_index_is_refused_before_anything_moves():
    model = decoder()
    ids = torch.randint(model.config.vocab_size, (2, 4))
    cache = model.new_cache()
    with torch.no_grad():
        model(ids, cache=cache)
        before = model(ids[:, :1], cache=cache)[0]
        for index, error in ((None, TypeError), (torch.tensor([True, False]), TypeError),
                             (torch.tensor([[0]]), ValueError), (torch.tensor([0, 2]), ValueError),
                             (torch.tensor([-1]), ValueError)):
            with pytest.raises(error, match="index"):
                cache.reorder(index)
        assert len(before) == 2
        model(ids[:, :1], cache=cache)
        with pytest.raises(TypeError, match="cache must be made by new_cache"):
            model(ids, cache={})
