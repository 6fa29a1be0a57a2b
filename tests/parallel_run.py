"""What two processes do in the tests of training in many, and the tiny runs that they make."""

import os
import random
import signal
import time
import warnings
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F

from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig
from odeformer.data.images import Images
from odeformer.models import VisionConfig, VisionEncoder
from odeformer.parallel import Sharded, full
from odeformer.processes import current, joined
from odeformer.tasks import Task
from odeformer.train import TrainConfig, Trainer

SECONDS = 60
VOCABULARY, LENGTH, ROWS, STEPS = 11, 6, 12, 4
# how depth is integrated, and the settings of the run: two updates, of which the second has the first one's moments
CASES = {name: (depth, {"steps": 2} | settings) for name, (depth, settings) in {
    "euler, piecewise": ({}, {"clip": 0.05}),
    "rk4, shared": ({"solver": "rk4", "weights": "shared"}, {"accumulate": 2}),
    "rk4, spline": ({"solver": "rk4", "weights": "spline"}, {"accumulate": 2}),
    "midpoint, cycle": ({"solver": "midpoint", "weights": "cycle"}, {"ema": 0.9, "validate_every": 2, "patience": 1,
                                                              "steps": STEPS}),
    "learned": ({"solver": "pc_ema"}, {"ema": 0.5}),
    "penalties": ({}, {"regularize": {"weight_smoothness": 0.1}, "epsilon": 1e-3}),
    "checkpoint": ({"solver": "rk4", "gradient": "checkpoint"}, {"accumulate": 2}),
    "checkpoint_recursive": ({"solver": "rk4", "gradient": "checkpoint_recursive"}, {}),
    "adjoint": ({"solver": "rk4", "weights": "shared", "steps_per_layer": 4, "gradient": "adjoint"}, {}),
    "reversible": ({"solver": "reversible_heun", "gradient": "reversible"}, {"accumulate": 2}),
}.items()}
EXPERTS = {"feedforward": "experts", "feedforward_options": {"n_experts": 4, "top_k": 2}}
NOISE = {"dropout": 0.2}, {"layer_drop": 0.4}


class Ragged(Task):
    """Next tokens of texts of unequal length, from 2 to LENGTH + 1 tokens."""

    name, metric, unit = "ragged", "loss", "tokens"
    splits = MappingProxyType({"train": ROWS, "valid": 5, "test": 5})

    def __init__(self, disturb=None):
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(VOCABULARY, (22, LENGTH + 1), generator=generator)
        lengths = torch.randint(2, LENGTH + 2, (22, 1), generator=generator)
        self.mask = torch.arange(LENGTH + 1) < lengths
        self.disturb, self.calls = disturb, 0

    def batch(self, rows, split="train"):
        if self.disturb is not None and split == "train":
            self.calls += 1
            self.disturb(self.calls)
        rows = rows + {"train": 0, "valid": ROWS, "test": ROWS + 5}[split]
        return self.tokens[rows], self.mask[rows]

    def forward(self, model, batch, *, save_states=False):
        return model(batch[0][:, :-1], batch[1][:, :-1], return_solution=True, save_states=save_states)

    def criterion(self, outputs, batch):
        real = batch[1][:, 1:]
        return F.cross_entropy(outputs[real], batch[0][:, 1:][real])

    def count(self, batch):
        return int(batch[1][:, 1:].sum())

    def evaluate(self, model, split="test"):
        batch = self.batch(torch.arange(5), split)
        model.eval()
        with torch.no_grad():
            loss = self.criterion(self.forward(model, batch)[0], batch).item()
        model.train()
        return {"loss": loss}


def decoder(block=(), depth=()):
    torch.manual_seed(7)
    block, depth = BlockConfig(8, 2, d_ff=12, **dict(block)), DepthConfig(**dict(depth))
    return Decoder(DecoderConfig(vocab_size=VOCABULARY, max_seq_len=LENGTH, n_layers=3, block=block, depth=depth,
                                 tie_embeddings=True)).double()


def trainer(way, depth=(), settings=(), *, block=(), out=None, disturb=None):
    """A run of STEPS updates on 6 of 12 examples each."""
    options = {"steps": STEPS, "batch_size": 6, "warmup": 0, "schedule": "constant", "learning_rate": 0.01,
               "checkpoint_every": 2, **dict(settings)}
    return Trainer(decoder(block, depth), Ragged(disturb), TrainConfig(parallel=way, **options), out)


def result(run):
    """What a finished run gave."""
    return {"rows": run.rows, "validations": run.validations,
            "model": {name: x.detach().clone() for name, x in run.model.state_dict().items()}}


def finish(run):
    assert run.run(progress=False)
    return result(run)


def two(rank, port, work, folder):
    """One of two processes: what it finds goes into a file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}
    folder = Path(folder)
    try:
        with joined("cpu", timeout=SECONDS):
            found = work(rank, folder)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    torch.save(found, folder / f"{rank}.pt")


def checks(rank, folder):
    """All that two processes can do one after the other."""
    found = {f"{way}, {name}": finish(trainer(way, *CASES[name])) for name in CASES for way in ("ddp", "fsdp")}
    for way in ("ddp", "fsdp", "experts"):
        found[f"{way}, experts"] = finish(trainer(way, block=EXPERTS))
        found[f"{way}, others"] = exchanged(way, folder)
    for way in ("ddp", "fsdp"):
        found[f"{way}, rezero"] = finish(trainer(way, block={"norm": "rezero"}))
        found[f"{way}, noise"] = noisy(way, folder / f"noise {way}")
        found[f"{way}, signal"] = interrupted(way, folder / f"signal {way}", rank)
        found[f"{way}, adaptive"] = finish(vision(way, 4, **ADAPTIVE))
        found[f"{way}, implicit"] = finish(vision(way, **IMPLICIT))
        found[f"{way}, held back"] = held_back(way)
    found["units"] = {name: units(name) for name in CASES}
    found["refused"] = refused()
    return found


def exchanged(way, folder):
    """Go on with a run of one process, and leave one for one process."""
    block = EXPERTS if way == "experts" else {}
    run = trainer(way, settings={"ema": 0.9}, block=block, out=folder / f"one {way}")
    found = {"resumed": run.resume(), "step": run.step, **finish(run)}
    run = trainer(way, settings={"ema": 0.9}, block=block, out=folder / f"two {way}")
    assert not run.run(stop_at=2, progress=False)
    run.save()
    return found


ADAPTIVE = {"solver": "dopri5", "rtol": 1e-7, "atol": 1e-10}
IMPLICIT = {"solver": "implicit_midpoint", "gradient": "implicit", "steps_per_layer": 6}


def vision(way, spread=0, **depth):
    """A run on images that differ in size, by ``spread`` orders of magnitude."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8, 1, 4, 4, generator=generator, dtype=torch.float64)
    x = x * torch.logspace(-spread / 2, spread / 2, 8).view(-1, 1, 1, 1)
    images = Images("noise", 2, x, torch.arange(8) % 2, x, torch.arange(8) % 2)
    torch.manual_seed(7)
    model = VisionEncoder(VisionConfig(image_size=4, channels=1, n_classes=2, patch_size=2, n_layers=2,
                                       block=BlockConfig(8, 2, coupling="parallel"), depth=DepthConfig(**depth)))
    return Trainer(model.double(), images, TrainConfig(steps=2, batch_size=8, parallel=way, learning_rate=1e-3))


def held_back(way):
    """The largest gradient of a parameter after the first of two parts of a batch, and after the second."""
    run, found = trainer(way), []
    for last in (False, True):
        with run.parallel.pass_of(last):
            run.loss(run.parts(0)[0])[0].backward()
        grad = run.model.layers[0].feedforward.core.output.weight.grad
        found.append(None if grad is None else full(grad).clone())
    return found


def noisy(way, folder):
    """A run with dropout and layer drop, whole and in two pieces, and what each process drew."""
    settings = {"ema": 0.9, "validate_every": 1}
    trainer(way, NOISE[1], settings, block=NOISE[0])
    drawn = [float(torch.rand(()).item()), random.random(), float(np.random.rand())]
    whole = finish(trainer(way, NOISE[1], settings, block=NOISE[0]))
    cut = trainer(way, NOISE[1], settings, block=NOISE[0], out=folder)
    cut.run(stop_at=3, progress=False)  # its last checkpoint is that of step 2
    again = trainer(way, NOISE[1], settings, block=NOISE[0], out=folder)
    return {"drawn": drawn, "resumed": again.resume(), "step": again.step, "whole": whole, "cut": finish(again)}


def interrupted(way, folder, rank):
    """A run in which the second process gets SIGTERM while it makes its third batch."""
    def disturb(call):
        if rank == 1 and call == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    run = trainer(way, out=folder, disturb=disturb)
    return {"ended": run.run(progress=False), "step": run.step}


def units(name):
    """How many parts of a case's model are gathered one by one, beside the whole."""
    run = trainer("fsdp", *CASES[name])
    assert isinstance(run.parallel, Sharded)
    return sum(hasattr(module, "reshard") for module in run.model.modules()) - 1


REFUSED = {
    "none": lambda: trainer("none"),
    "batch_size": lambda: trainer("ddp", settings={"batch_size": 3, "accumulate": 2}),
    "n_train": lambda: trainer("ddp", settings={"batch_size": 20, "accumulate": 7}),
    "no experts": lambda: trainer("experts"),
    "divided": lambda: trainer("experts", block={**EXPERTS, "feedforward_options": {"n_experts": 3}}),
    "adjoint": lambda: trainer("experts", {"solver": "rk4", "gradient": "adjoint"}, block=EXPERTS),
    "idle": lambda: idle("fsdp"),
    "idle in ddp": lambda: idle("ddp"),
}


def idle(way):
    """A model with a parameter that has no part in the loss."""
    model = decoder()
    model.extra = torch.nn.Linear(2, 2).double()
    Trainer(model, Ragged(), TrainConfig(steps=1, batch_size=6, parallel=way)).train_step()


def refused():
    """The errors of what is refused, in both processes at the same time."""
    found = {}
    for name, make in REFUSED.items():
        try:
            make()
        except ValueError as error:
            found[name] = str(error)
    return found


def failing(rank, folder):
    """The second process fails at its third batch."""
    return troubled(rank, folder, lambda: int("x"))


def killed(rank, folder):
    """The second process is killed at its third batch."""
    return troubled(rank, folder, lambda: os.kill(os.getpid(), signal.SIGKILL))


def troubled(rank, folder, trouble):
    def disturb(call):
        if rank == 1 and call == 3:
            (folder / "moment").write_text(repr(time.time()))
            trouble()

    assert current().n == 2
    return finish(trainer("ddp", out=folder / "run", disturb=disturb))
