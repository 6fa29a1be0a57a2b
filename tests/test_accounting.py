"""parameter_report against parameters counted by hand and multiply-adds counted by torch."""

import pytest
import torch
from smooth_models import D, tiny, tokens
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from odeformer import WEIGHTS, BlockConfig, Decoder, DecoderConfig, DepthConfig, Seq2Seq, Seq2SeqConfig
from odeformer.models import VisionConfig, VisionEncoder


def counted(model, *inputs):
    """Multiply-adds of a pass by torch's counter, which sees every matrix product."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(*inputs)
    return counter.get_total_flops() // 2


BLOCK = 4 * D * D + 4 * D + 2 * 4 * D * D + 4 * D + D + 4 * D  # four maps, two of the feed-forward, two norms


@pytest.mark.parametrize("name", WEIGHTS)
def test_parameters_are_counted_once_and_the_plain_transformer_has_a_block_a_layer(name):
    model = tiny(n_layers=4, weights=name)
    report = model.parameter_report()
    assert report["parameters"] == sum(p.numel() for p in model.parameters())
    assert report["layer_parameters"] == sum(p.numel() for p in model.layers.parameters())
    assert report["plain"]["layer_parameters"] == 4 * BLOCK
    assert report["plain"]["nfe"] == 4


@pytest.mark.parametrize(("solver", "steps", "nfe"), [("euler", 1, 4), ("rk4", 1, 16), ("midpoint", 2, 16)])
@pytest.mark.parametrize("coupling", ["lie", "parallel", "composed", "strang"])
def test_multiply_adds_are_those_that_torch_counts(solver, steps, nfe, coupling):
    model = tiny(Decoder, DecoderConfig, n_layers=4, solver=solver, steps_per_layer=steps,
                 block={"coupling": coupling})
    report = model.parameter_report()
    assert report["nfe"] == nfe or coupling == "strang"
    batch = tokens(2)
    assert report["multiply_adds"] * batch.numel() == counted(model, batch)
    plain = tiny(Decoder, DecoderConfig, n_layers=4, solver="euler")
    assert report["plain"]["multiply_adds"] * batch.numel() == counted(plain, batch)


@pytest.mark.parametrize("options", [{"n_kv_heads": 1}, {}])
def test_fewer_tokens_and_grouped_heads_count_less(options):
    model = tiny(n_layers=2, block={"attention_options": options})
    assert model.parameter_report(4)["multiply_adds"] * 8 == counted(model, tokens(2)[:, :4])
    assert model.parameter_report(4)["multiply_adds"] < model.parameter_report(6)["multiply_adds"]


@pytest.mark.parametrize("tables", ["k", "qk", "qkv"])
def test_tables_of_offsets_count_with_their_products(tables):
    options = {"tables": tables, "max_distance": 3}
    model = tiny(n_layers=2, block={"attention": "relative", "attention_options": options})
    plain = tiny(n_layers=2)
    added = model.parameter_report(6)["multiply_adds"] - plain.parameter_report(6)["multiply_adds"]
    assert added == 2 * len(tables) * 7 * D


def test_a_mixture_weighs_values_twice():
    mixture, plain = (tiny(n_layers=2, block={"attention": name}) for name in ("local_mixture", "local_gaussian"))
    assert mixture.parameter_report(6)["multiply_adds"] - plain.parameter_report(6)["multiply_adds"] == 2 * 6 * D


def test_slices_count_for_those_that_serve():
    options = {"n_experts": 4, "top_k": 1}
    dense = tiny(n_layers=2, block={"feedforward": "relu", "d_ff": 16}).parameter_report()["multiply_adds"]
    routed = tiny(n_layers=2, block={"feedforward": "expert_slices", "d_ff": 16, "feedforward_options": options})
    assert routed.parameter_report()["multiply_adds"] == dense + 2 * 4 * D - 2 * (3 * 2 * 16 * D) // 4


def test_experts_count_for_those_that_serve():
    dense = tiny(n_layers=2, block={"feedforward": "relu", "d_ff": 16}).parameter_report()
    routed = tiny(n_layers=2, block={"feedforward": "experts", "d_ff": 16, "feedforward_options":
                                     {"n_experts": 4, "top_k": 1}}).parameter_report()
    assert routed["multiply_adds"] - dense["multiply_adds"] == 2 * 4 * D  # the routers
    assert routed["layer_parameters"] > 2 * dense["layer_parameters"]


def test_a_solver_that_chooses_its_steps_has_no_nfe_beforehand():
    report = tiny(solver="dopri5").parameter_report()
    assert report["nfe"] is None and report["multiply_adds"] is None and report["plain"]["nfe"] == 4
    assert "-" in str(report)


def test_a_report_leaves_the_random_state_and_the_mode_as_they_were():
    model = tiny(weights="spline", block={"dropout": 0.5}, layer_drop=0.2, steer=0.3).train()
    before = torch.get_rng_state()
    model.parameter_report()
    assert torch.equal(torch.get_rng_state(), before) and model.training and model.layers.training


@pytest.mark.parametrize("solver", ["implicit_midpoint", "ars222", "gauss4"])
def test_work_that_depends_on_the_input_is_not_guessed(solver):
    report = tiny(solver=solver, block={"coupling": "parallel"}).parameter_report()
    assert report["nfe"] is None and report["multiply_adds"] is None


def test_both_parts_of_a_translator_and_images():
    model = Seq2Seq(Seq2SeqConfig(vocab_size=9, max_seq_len=6, n_layers=2, share_embeddings=True,
                                  block=BlockConfig(8, 2), depth=DepthConfig(solver="rk4")))
    report = model.parameter_report()
    assert report["parameters"] == sum(p.numel() for p in model.parameters())
    assert report["nfe"] == 16 and report["encoder"]["nfe"] == report["decoder"]["nfe"] == 8
    x = torch.zeros(1, 6, dtype=torch.int64)
    assert report["multiply_adds"] * 6 == counted(model, x, x)
    vision = VisionEncoder(VisionConfig(image_size=4, patch_size=2, n_classes=3, channels=1, n_layers=2,
                                        block=BlockConfig(8, 2)))
    report, images = vision.parameter_report(), torch.zeros(2, 1, 4, 4)
    assert report["n_tokens"] == 4 and report["nfe"] == 2
    assert report["multiply_adds"] == -(-(counted(vision, images) // 2 - 4 * 4 * 8) // 4)  # without the patches' map
    with pytest.raises(TypeError, match="n_tokens"):
        vision.parameter_report(0.5)
