"""FAMILIES: the model types that are read and written, by the ``model_type`` of their config."""

from odeformer.pretrained.bart import BartFamily, MarianFamily, MbartFamily, PegasusFamily
from odeformer.pretrained.bert import AlbertFamily, BertFamily, DistilBertFamily, RobertaFamily
from odeformer.pretrained.family import Family
from odeformer.pretrained.gpt2 import Gpt2Family
from odeformer.pretrained.llama import LlamaFamily, MistralFamily, Qwen2Family
from odeformer.pretrained.vit import Dinov2Family, VitFamily
from odeformer.pretrained.whisper import WhisperFamily

FAMILIES: dict[str, Family] = {
    "bert": BertFamily(),
    "roberta": RobertaFamily(),
    "distilbert": DistilBertFamily(),
    "albert": AlbertFamily(),
    "gpt2": Gpt2Family(),
    "llama": LlamaFamily(),
    "mistral": MistralFamily(),
    "qwen2": Qwen2Family(),
    "vit": VitFamily(),
    "dinov2": Dinov2Family(),
    "whisper": WhisperFamily(),
    "bart": BartFamily(),
    "marian": MarianFamily(),
    "mbart": MbartFamily(),
    "pegasus": PegasusFamily(),
}


def family_of(model_type: str | None, architecture: str) -> Family:
    """The family of a transformers class. Raises ValueError for one that is not read, with those that are."""
    family = FAMILIES.get(model_type or "")
    if family is None:
        raise ValueError(f"model_type must be one of {', '.join(FAMILIES)}, got {model_type!r}; wrap(model) takes any "
                         "model with a residual stack as it is")
    if architecture not in family.architectures:
        raise ValueError(f"a model of type {model_type!r} must be one of {', '.join(family.architectures)}, got "
                         f"{architecture}; wrap(model) takes it as it is")
    return family
