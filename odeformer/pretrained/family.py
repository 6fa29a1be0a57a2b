"""What a type of model of Hugging Face must say to be read and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from odeformer.depth import DepthConfig
from odeformer.pretrained.rules import Rule


class Family:
    """One model type.

    ``architectures``: the names of the transformers classes, the base model's first; in the others it is ``base``.
    ``inputs``: what those classes call the arguments of ours,
    in order, and ``masks`` their attention masks. ``side``: beginnings of the names of tensors that checkpoints of this
    type hold beside what a class uses, such as the pooler beside a language model's head; of a folder they are left
    out.
    """

    architectures: tuple[str, ...] = ()
    base: str = "model"
    inputs: tuple[str, ...] = ("input_ids",)
    masks: tuple[str, ...] = ("attention_mask",)
    side: tuple[str, ...] = ()

    def make(self, theirs: Any, architecture: str, state: Mapping[str, Tensor], depth: Mapping[str, Any],
             block: Mapping[str, Any], origin: Mapping[str, Any]) -> nn.Module:
        """Our model for their config, unfilled. ``depth``: options of DepthConfig, ``block``: those of BlockConfig that
        the user chose; ``origin`` goes into the config.

        Raises ValueError for what their config asks and we do not have.
        """
        raise NotImplementedError

    def rules(self, model: nn.Module, theirs: Any, architecture: str) -> list[Rule]:
        """Which tensor of theirs is which of the model's."""
        raise NotImplementedError

    def stacks(self, architecture: str) -> dict[str, tuple[str, str]]:
        """For each stack of ours ("" where the model is one): the path of their list of layers, and of what comes
        after it."""
        raise NotImplementedError

    def headless(self, architecture: str) -> bool:
        """Whether a class is the base model, the first of the architectures."""
        return architecture == self.architectures[0]

    def at(self, architecture: str) -> str:
        """What stands before the names of the base model's tensors."""
        return "" if self.headless(architecture) else f"{self.base}."

    def arguments(self, model: nn.Module) -> dict[str, Any]:
        """Arguments of their class beside the config, to make it again."""
        return {}


def depth_config(options: Mapping[str, Any], **fixed: Any) -> DepthConfig:
    """The user's options with what the checkpoint says."""
    return DepthConfig(**{**options, **fixed})
