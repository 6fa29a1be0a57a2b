"""Images to classes: patches, where they stand, what is read out."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import odeformer
from odeformer import COUPLINGS, BlockConfig, DepthConfig, VisionConfig, VisionEncoder
from odeformer.grid_positions import GRID_POSITIONS
from odeformer.positions import apply_rope
from solvers import SOLVERS

F64 = torch.float64


def tiny(*, position="learned", size=8, patch=2, channels=3, n_layers=2, pooling="mean", depth=(), d_model=8,
         dtype=F64, **block):
    """A model whose head no longer starts at 0."""
    model = VisionEncoder(VisionConfig(
        image_size=size, patch_size=patch, channels=channels, n_classes=5, n_layers=n_layers, pooling=pooling,
        block=BlockConfig(d_model, 2, position=position, **block), depth=DepthConfig(**dict(depth))))
    with torch.no_grad():
        model.head.weight.normal_()
        model.head.bias.normal_()
    return model.to(dtype).eval()


def images(batch=2, channels=3, height=8, width=8, dtype=F64):
    return torch.randn(batch, channels, height, width, dtype=dtype)


def wrong(call, *words, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


# patches


def test_patches_go_row_by_row_and_hold_channel_by_channel_their_pixels_row_by_row():
    x = torch.arange(2 * 4 * 6, dtype=F64).view(1, 2, 4, 6)  # value = 24 channel + 6 row + column
    model = tiny(size=4, channels=2)
    patches = model.patches(x)
    assert patches.shape == (1, 6, 8)
    assert patches[0, 0].tolist() == [0, 1, 6, 7, 24, 25, 30, 31]
    assert patches[0, 1].tolist() == [2, 3, 8, 9, 26, 27, 32, 33]
    assert patches[0, 3].tolist() == [12, 13, 18, 19, 36, 37, 42, 43]  # the second row begins
    assert patches[0, 5, 0] == 16


def test_the_patch_embedding_is_a_convolution_with_a_stride_of_its_size():
    model, x = tiny(position="none"), images(height=10, width=6)
    kernel = model.patch_embedding.weight.view(8, 3, 2, 2)
    wanted = F.conv2d(x, kernel, model.patch_embedding.bias, stride=2).flatten(2).mT
    assert (model.embed(x) - wanted).abs().max() < 1e-12


# pooling


@pytest.mark.parametrize("solver", ["euler", "rk4", "dopri5"])
def test_mean_pooling_and_the_class_token_read_out_what_they_say(solver):
    x = images()
    mean = tiny(depth={"solver": solver})
    logits, solution = mean(x, return_solution=True)
    assert solution.z.shape == (2, 16, 8)
    states = torch.stack([mean.final_norm(solution.z[:, i]) for i in range(16)])
    assert (logits - F.linear(states.sum(0) / 16, mean.head.weight, mean.head.bias)).abs().max() < 1e-12
    first = tiny(pooling="class_token", depth={"solver": solver})
    with torch.no_grad():
        first.class_token.normal_()
    logits, solution = first(x, return_solution=True)
    assert solution.z.shape == (2, 17, 8)
    assert (logits - first.head(first.final_norm(solution.z[:, 0]))).abs().max() < 1e-12
    z = first.embed(x)
    assert torch.equal(z[:, 0], first.class_token.expand(2, -1))
    assert torch.equal(z[:, 1:], first.patch_embedding(first.patches(x)) + first.position(4, 4))


def test_a_new_model_gives_even_odds():
    model = VisionEncoder(VisionConfig(image_size=4, patch_size=2, n_classes=5, n_layers=1, block=BlockConfig(8, 2)))
    assert model(torch.randn(2, 3, 4, 4)).abs().max() == 0


# positions


def grid(name, rows=3, columns=4, d_model=8, **options):
    return GRID_POSITIONS[name](rows, columns, d_model, **options).double()


@pytest.mark.parametrize(("rows", "columns"), [(3, 4), (5, 2), (1, 7)])
def test_two_dimensional_sinusoids_by_the_plain_formula(rows, columns):
    got = grid("sinusoidal", d_model=12)(rows, columns)
    assert got.shape == (rows * columns, 12) and got.dtype == F64
    for r in range(rows):
        for c in range(columns):
            wanted = []
            for place in (r, c):  # half of the coordinates each, sines then cosines
                angles = [place / 10000 ** (2 * i / 6) for i in range(3)]
                wanted += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            assert (got[r * columns + c] - torch.tensor(wanted, dtype=F64)).abs().max() < 1e-12


def test_sinusoids_are_rounded_once_in_half_precision():
    exact = GRID_POSITIONS["sinusoidal"](3, 4, 8).double()(20, 30)
    half = GRID_POSITIONS["sinusoidal"](3, 4, 8).bfloat16()(20, 30)
    assert half.dtype == torch.bfloat16 and torch.equal(half, exact.bfloat16())


def test_learned_positions_are_the_table_at_the_configured_size_and_bicubic_elsewhere():
    position = grid("learned")
    assert torch.equal(position(3, 4), position.table.reshape(12, 8))
    for rows, columns in ((6, 8), (4, 3), (3, 5), (2, 2), (12, 1)):
        wanted = F.interpolate(position.table.permute(2, 0, 1).unsqueeze(0), (rows, columns), mode="bicubic",
                               align_corners=False)
        assert torch.equal(position(rows, columns), wanted.squeeze(0).flatten(1).T)
    with torch.no_grad():
        position.table.copy_(torch.arange(8.0).expand(3, 4, 8))  # the same everywhere: so it stays
    assert (position(7, 5) - torch.arange(8.0)).abs().max() < 1e-12
    (grad,) = torch.autograd.grad(position(7, 5).sum(), position.table)
    assert (grad.sum() - 7 * 5 * 8).abs() < 1e-9


def cubic(t, a=-0.75):
    """Keys' kernel (1981), with torch's a."""
    t = abs(t)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


@pytest.mark.parametrize("n", [16, 5, 11])
def test_learned_positions_of_a_longer_row_by_the_cubic_kernel(n):
    """Column c of n stands at (c + 1/2) 8 / n - 1/2 of the table, whose edges go on as they are."""
    position = grid("learned", 1, 8)
    got = position(1, n)
    for c in range(n):
        at = (c + 0.5) * 8 / n - 0.5
        near = [math.floor(at) + i for i in (-1, 0, 1, 2)]
        wanted = sum(cubic(at - j) * position.table[0, min(max(j, 0), 7)] for j in near)
        assert (got[c] - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("base", [100.0, 10.0])
def test_axial_rotary_tables_by_the_plain_formula(base):
    rotary = grid("rope", base=base).rotary(3, 5, 8, torch.device("cpu"), F64)
    for r in range(3):
        for c in range(5):
            angles = [r, r * base ** -0.5, c, c * base ** -0.5]  # 4 coordinates of rows, 4 of columns
            for i, angle in enumerate(angles):
                assert abs(rotary.cos[r * 5 + c, i] - math.cos(angle)) < 1e-14
                assert abs(rotary.sin[r * 5 + c, i] - math.sin(angle)) < 1e-14
    assert grid("rope")(3, 5) == 0.0
    assert grid("rope").rotary(3, 5, 8, torch.device("cpu"), torch.bfloat16).cos.dtype == torch.float32


def test_axial_rotary_scores_see_the_difference_of_rows_and_of_columns_alone():
    """q at (r, c) and k at (r', c'): the same product wherever the pair is moved, another for each offset."""
    rows, columns = 5, 6
    rotary = grid("rope").rotary(rows, columns, 8, torch.device("cpu"), F64)
    q, k = torch.randn(2, 8, dtype=F64)
    turned_q, turned_k = (rotary.turn(x.expand(1, rows * columns, 8))[0] for x in (q, k))
    products = (turned_q @ turned_k.T).view(rows, columns, rows, columns)
    by_offset = {}
    for r in range(rows):
        for c in range(columns):
            for r2 in range(rows):
                for c2 in range(columns):
                    by_offset.setdefault((r2 - r, c2 - c), []).append(float(products[r, c, r2, c2]))
    assert all(max(x) - min(x) < 1e-12 for x in by_offset.values())
    means = [x[0] for x in by_offset.values()]
    assert len({round(x, 9) for x in means}) == len(means)  # no two offsets look alike
    assert abs(by_offset[0, 0][0] - float(q @ k)) < 1e-12
    # columns alone are the one-dimensional rope of the second half of the pairs
    half = torch.cat([q[2:4], q[6:8]])
    plain = apply_rope(half.expand(1, columns, 4), torch.arange(columns), layout="half")
    ours = torch.cat([turned_q[:columns, 2:4], turned_q[:columns, 6:8]], 1)
    assert (ours[:, 0::2] - plain[0][:, 0::2]).abs().max() < 1e-12  # the first frequency is 1 in both


def test_a_class_token_is_not_turned_and_no_position_makes_a_bag_of_patches():
    model = tiny(position="rope", pooling="class_token")
    rotary = model.turning((4, 4), torch.zeros((), dtype=F64))
    x = torch.randn(1, 2, 17, 4, dtype=F64)
    assert torch.equal(rotary.turn(x)[:, :, 0], x[:, :, 0])
    without = tiny(position="rope").turning((4, 4), x)
    assert torch.equal(rotary.turn(x)[:, :, 1:], without.turn(x[:, :, 1:]))
    bag, order = tiny(position="none"), torch.randperm(16)
    picture = images()
    patches = picture.unfold(2, 2, 2).unfold(3, 2, 2).flatten(2, 3)[:, :, order].unflatten(2, (4, 4))
    shuffled = patches.permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 8, 8)
    assert (bag(shuffled) - bag(picture)).abs().max() < 1e-12
    for name in GRID_POSITIONS:
        if name != "none":
            model = tiny(position=name)
            assert (model(shuffled) - model(picture)).abs().max() > 1e-4, name


# sizes


@pytest.mark.parametrize("pooling", ["mean", "class_token"])
@pytest.mark.parametrize("position", GRID_POSITIONS)
def test_images_of_any_size_in_whole_patches_are_taken(position, pooling):
    model = tiny(position=position, pooling=pooling, depth={"solver": "midpoint"})
    for height, width in ((8, 8), (4, 12), (2, 2), (16, 6), (10, 8)):
        logits, solution = model(images(height=height, width=width), return_solution=True)
        n = height * width // 4 + (pooling == "class_token")
        assert logits.shape == (2, 5) and logits.isfinite().all() and solution.z.shape == (2, n, 8)
    tall, wide = images(height=4, width=12), images(height=12, width=4)
    assert (model(tall) - model(wide)).abs().max() > 1e-6


def test_another_size_turns_by_its_own_grid():
    """One layer by hand: 2 x 3 patches, each query and key turned by its row and column."""
    model = tiny(position="rope", n_layers=1)
    x = images(1, height=4, width=6)
    z = model.embed(x)
    block = model.layers[0]
    core = block.attention.core
    y = block.attention.placement.norm(z)
    q, k, v = (part(y).view(6, 2, 4) for part in (core.query, core.key, core.value))

    def turned(t):
        out = t.clone()
        for i in range(6):
            for pair, angle in enumerate((i // 3, i % 3)):  # head_dim 4: one pair for the row, one for the column
                a, b = t[i, :, pair].clone(), t[i, :, pair + 2].clone()
                out[i, :, pair] = a * math.cos(angle) - b * math.sin(angle)
                out[i, :, pair + 2] = a * math.sin(angle) + b * math.cos(angle)
        return out

    with torch.no_grad():
        q, k = turned(q), turned(k)
        weights = (torch.einsum("ihd,jhd->hij", q, k) / 2).softmax(-1)
        z = z + core.output(torch.einsum("hij,jhd->ihd", weights, v).flatten(1))
        part = block.feedforward
        z = z + part.core(part.placement.norm(z))
        wanted = model.head(model.final_norm(z).mean(1))
    assert (model(x) - wanted).abs().max() < 1e-12


def test_a_state_of_another_grid_needs_to_be_told_so():
    model = tiny(position="rope")
    small = images(height=4, width=6)
    z = model.embed(small)
    wrong(lambda: model.evolve(z), "6 patches", "16", "turning")
    got = model.evolve(z, rotary=model.turning((2, 3), z))
    _, solution = model(small, return_solution=True)
    assert torch.equal(got.z, solution.z)
    whole = images()
    _, solution = model(whole, return_solution=True)
    assert torch.equal(model.evolve(model.embed(whole)).z, solution.z)


# solvers, files, gradients


@pytest.mark.parametrize("solver", [name for name in SOLVERS if name != "equilibrium"])  # it needs injection
def test_every_solver_integrates_images(solver):
    for position in ("sinusoidal", "rope"):
        model = tiny(position=position, coupling="parallel").with_solver(solver)
        with torch.no_grad():
            for p in model.layers.parameters():
                p.mul_(0.3)  # one step of an implicit method a layer
            logits, solution = model(images(), return_solution=True)
        assert logits.isfinite().all() and solution.nfe > 0


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_solvers_converge_to_one_answer_for_images(coupling):
    model = tiny(position="rope", pooling="class_token", coupling=coupling, n_layers=1)
    with torch.no_grad():
        for p in model.layers.parameters():
            p.mul_(0.5)
        x = images()
        wanted = model.with_solver("dopri8", rtol=1e-9, atol=1e-11)(x)
        got = model.with_solver("rk4", steps_per_layer=40)(x)
        far = model.with_solver("rk4", steps_per_layer=2)(x)
    assert (got - wanted).abs().max() < 0.1 * (far - wanted).abs().max() + 1e-8


@pytest.mark.parametrize("pooling", ["mean", "class_token"])
@pytest.mark.parametrize("position", GRID_POSITIONS)
@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_saved_models_give_the_same_logits_bit_for_bit_at_every_size(position, pooling, dtype, tmp_path):
    model = tiny(position=position, pooling=pooling, dtype=dtype, depth={"solver": "rk4"})
    if pooling == "class_token":
        nn.init.normal_(model.class_token)
    model.save(tmp_path)
    again = odeformer.load(tmp_path)
    assert again.config == model.config
    for height, width in ((8, 8), (4, 12)):
        x = images(height=height, width=width, dtype=dtype)
        assert torch.equal(again(x), model(x)) and model(x).dtype == dtype


@pytest.mark.parametrize("pooling", ["mean", "class_token"])
@pytest.mark.parametrize("position", GRID_POSITIONS)
def test_gradients_reach_every_parameter(position, pooling):
    model = tiny(position=position, pooling=pooling, depth={"solver": "rk4"})
    for height, width in ((8, 8), (4, 6)):
        model.zero_grad()
        x = images(height=height, width=width).requires_grad_()
        model(x).square().sum().backward()
        still = [name for name, p in model.named_parameters() if not p.grad.isfinite().all() or p.grad.abs().max() == 0]
        # softmax does not see a shift of all keys alike, so a key's bias has no effect without turning
        assert all(name.endswith("key.bias") for name in still) and (x.grad != 0).all()


# errors


def test_wrong_configurations_name_the_argument():
    def config(**changes):
        given = {"image_size": 8, "patch_size": 2, "n_classes": 3, "n_layers": 1, "block": BlockConfig(8, 2)}
        return VisionConfig(**{**given, **changes})

    for name in ("image_size", "patch_size", "n_classes", "channels"):
        wrong(lambda: config(**{name: 0}), name, "at least 1")  # noqa: B023
        wrong(lambda: config(**{name: 2.0}), name, "2.0", error=TypeError)  # noqa: B023
    wrong(lambda: config(image_size=9), "image_size", "multiple of patch_size", "9, 2")
    wrong(lambda: config(pooling="max"), "pooling", "mean", "class_token", "'max'")
    wrong(lambda: VisionEncoder(config(n_layers=0)), "n_layers")
    flat = BlockConfig(6, 2, position="sinusoidal")
    wrong(lambda: VisionEncoder(config(block=flat)), "d_model", "multiple of 4", "6")
    wrong(lambda: VisionEncoder(config(block=BlockConfig(12, 2, position="rope"))), "head_dim", "multiple of 4", "6")
    for base in (0.0, 1.0, -1.0, math.inf, math.nan, "x"):
        wrong(lambda: GRID_POSITIONS["rope"](2, 2, 8, base=base), "base", repr(base))  # noqa: B023
    wrong(lambda: VisionEncoder(config(block=BlockConfig(8, 2, position="rope", position_options={"bse": 1}))), "bse")


def test_wrong_images_name_what_came_and_what_is_allowed():
    model = tiny()
    wrong(lambda: model(images()[0]), "images", "(batch, channels = 3, height, width)", "(3, 8, 8)")
    wrong(lambda: model(images(channels=1)), "images", "channels = 3", "(2, 1, 8, 8)")
    wrong(lambda: model(images(height=7)), "images", "patch_size = 2", "7 x 8")
    wrong(lambda: model(images(width=0)), "images", "8 x 0")
    wrong(lambda: model(images(batch=0)), "images", "(0, 3, 8, 8)")
    wrong(lambda: model(torch.zeros(1, 3, 8, 8, dtype=torch.uint8)), "images", "uint8", error=TypeError)
    wrong(lambda: model([[1.0]]), "images", "list", error=TypeError)
