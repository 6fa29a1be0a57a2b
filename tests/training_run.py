"""A tiny run that depends on everything a checkpoint has to hold, for the tests of training."""

import random

import numpy as np
import torch

from odeformer import BlockConfig, Decoder, DecoderConfig, DepthConfig
from odeformer.tasks import Language
from odeformer.train import TrainConfig, Trainer

TEXT = torch.randint(8, (120,), generator=torch.Generator().manual_seed(0))
STEPS = 12


class Noisy(Language):
    """Its loss draws from the generators of numpy and of Python as well."""

    def criterion(self, outputs, batch):
        return super().criterion(outputs, batch) * (1 + 0.1 * np.random.rand() + 0.1 * random.random())


def trainer(out, *, seed=0, **options):
    """Dropout, layer drop, parts, an average, early stopping, and epochs of two and a half batches."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    depth = DepthConfig(layer_drop=0.3)
    model = Decoder(DecoderConfig(vocab_size=8, max_seq_len=10, n_layers=2, depth=depth,
                                  block=BlockConfig(8, 2, d_ff=8, dropout=0.2)))
    task = Noisy("noise", TEXT, TEXT[:50], length=10, valid=TEXT[20:60])
    options = {"steps": STEPS, "batch_size": 4, "accumulate": 2, "checkpoint_every": 3, "ema": 0.9, "validate_every": 2,
               "patience": 50, "warmup": 3, "learning_rate": 0.05, "schedule": "wsd", **options}
    return Trainer(model, task, TrainConfig(seed=seed, **options), out)


def state(trainer):
    """All tensors of a trainer, by name."""
    found = {f"model.{name}": x.clone() for name, x in trainer.model.state_dict().items()}
    for i, values in trainer.optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{i}.{name}": x.clone() for name, x in values.items()}
    for part, values in (("average", trainer.average.state_dict()), ("best", trainer.best.weights)):
        found |= {f"{part}.{name}": x.clone() for name, x in values.items()}
    return found | {"best": torch.tensor([trainer.best.step, trainer.best.misses, trainer.best.value])}


def equal(a, b):
    """Whether two such states are the same, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def to_the_end(out, **options):
    """A process of its own: go on from what there is, and end by writing the weights."""
    torch.set_num_threads(1)
    run = trainer(out, **options)
    run.resume()
    assert run.run(progress=False)
    torch.save(state(run), out / "end.pt")
