"""For processes forked from one that has imported this: all that a training run imports is there already."""

from training_run import to_the_end, trainer

__all__ = ["to_the_end"]

trainer(None)
