"""Experts spread over two real processes (gloo) against one process (eq. 53)."""

import datetime

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig
from odeformer.expert_parallel import ExpertParallel, average_gradients, collect, spread
from odeformer.experts import Experts
from odeformer.routing import Visit

WIDTH, SECONDS = 6, 60
# what is called, and the rows of the batch that the first of two processes has
LAYERS = {
    "plain": ({}, 2),
    "swiglu, blocks, no bias": ({"activation": "swiglu", "grouping": "blocks", "bias": False}, 2),
    "all chosen": ({"top_k": 4, "gate": "topk_then_softmax"}, 2),
    "capacity": ({"capacity_factor": 0.5}, 2),
    "one expert has all": ({"top_k": 1}, 2),
    "a process without tokens": ({}, 4),
}
MODELS = {"rk4": {"solver": "rk4"}, "checkpoint": {"solver": "midpoint", "gradient": "checkpoint"}}


def layer(name):
    """The whole layer, and the batch: the same in every process."""
    torch.manual_seed(3)
    module = Experts(WIDTH, 8, **{"n_experts": 4, "top_k": 2, **LAYERS[name][0]}).double()
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)
    x, weight = torch.randn(2, 4, 5, WIDTH, dtype=torch.float64)
    if name == "one expert has all":
        with torch.no_grad():
            module.router.weight.zero_()
            module.router.weight[0, 0] = 1.0
        x[..., 0] = 2.0
    return module, x, weight


def mine(name, rank):
    first = LAYERS[name][1]
    return slice(0, first) if rank == 0 else slice(first, 4)


def run_layer(module, x, weight, mask):
    """Output, a task's loss that is a sum over tokens, the losses of the router, and its load."""
    reports = {}
    y = module(x, Visit(mask=mask, report=reports.__setitem__))
    return y, (y * weight).sum(), 2.0 * reports["balance"] + 0.3 * reports["router_z"], reports["load"]


def padding():
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[0, 3:], mask[3, :1] = False, False
    return mask


def model(name):
    torch.manual_seed(4)
    options = {"n_experts": 4, "top_k": 2, "activation": "gelu"}
    block = BlockConfig(8, 2, feedforward="experts", feedforward_options=options)
    return Decoder(DecoderConfig(vocab_size=11, max_seq_len=7, n_layers=2, block=block,
                                 depth=DepthConfig(**MODELS[name]))).double()


def run_model(model, tokens):
    logits, solution = model(tokens, return_solution=True)
    task = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return task + 0.1 * solution.losses["balance"]


def step(model, loss, between=lambda model: None):
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    loss(model).backward()
    between(model)
    optimiser.step()


def work(rank, folder):
    """What one of two processes does; what it finds goes into a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=SECONDS))
    found = {}
    for name in LAYERS:
        module, x, weight = layer(name)
        module, rows = spread(module), mine(name, rank)
        x = x[rows].clone().requires_grad_()
        y, task, losses, load = run_layer(module, x, weight[rows], padding()[rows])
        (task + losses).backward()
        average_gradients(module)
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        held = [tuple(p.shape) for p in module.held_here()]
        found[name] = {"y": y.detach(), "x": x.grad, "load": load, "held": held,
                       "after": collect(module).state_dict()}
    tokens = torch.arange(28).view(4, 7).mul(5).remainder(11)
    for name in MODELS:
        whole = spread(model(name))
        step(whole, lambda whole: run_model(whole, tokens[2 * rank:2 * rank + 2]), average_gradients)
        kinds = {type(block.feedforward.core) for block in whole.layers}
        found[name] = {"kinds": kinds == {ExpertParallel}, "after": collect(whole).state_dict()}
    try:
        spread(Experts(WIDTH, 8, n_experts=3))
    except ValueError as error:
        found["error"] = str(error)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two processes found."""
    folder = tmp_path_factory.mktemp("gloo")
    processes = mp.start_processes(work, args=(str(folder),), nprocs=2, join=False, start_method="spawn")
    end = datetime.datetime.now() + datetime.timedelta(seconds=SECONDS)
    try:
        while not processes.join(timeout=1):
            assert datetime.datetime.now() < end, "the processes hang"
    finally:
        for process in processes.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def close(a, b):
    assert a.shape == b.shape and (a.numel() == 0 or (a - b).abs().max() < 1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_eq_53_two_processes_give_the_outputs_gradients_and_parameters_of_one(found, name):
    module, x, weight = layer(name)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    x.requires_grad_()
    y, task, losses, load = run_layer(module, x, weight, padding())
    (task / 2 + losses).backward()  # the mean of the processes' losses: each has all of the router's
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert any((module.state_dict()[key] - value).abs().max() > 1e-3 for key, value in before.items())
    for rank in range(2):
        rows, ours = mine(name, rank), found[rank][name]
        close(ours["y"], y.detach()[rows])
        close(ours["x"] / 2, x.grad[rows])
        close(ours["load"], load)
        assert ours["held"][0] == (2, WIDTH, 8)  # half of the experts
        for key, value in module.state_dict().items():
            close(ours["after"][key], value)


def test_experts_without_tokens_have_no_gradient_and_nothing_waits_for_them(found):
    module, _, _ = layer("one expert has all")
    assert found[0]["one expert has all"]["load"].tolist() == [1, 0, 0, 0]
    assert torch.equal(found[1]["one expert has all"]["after"]["hidden.weight"][1:], module.hidden.weight[1:])


@pytest.mark.parametrize("name", MODELS)
def test_a_spread_decoder_makes_the_step_of_one_process(found, name):
    whole = model(name)
    tokens = torch.arange(28).view(4, 7).mul(5).remainder(11)
    step(whole, lambda whole: run_model(whole, tokens))
    for ours in found:
        assert ours[name]["kinds"]
        for key, value in whole.state_dict().items():
            close(ours[name]["after"][key], value)


def test_processes_must_divide_the_experts(found):
    assert "n_experts must be a multiple of the number of processes, got 3 and 2" in found[0]["error"]
