"""Transformers whose depth is integrated by an ODE solver of your choice.

Names are imported on first use, so that ``import odeformer`` and ``odeformer --help`` stay quick.
"""

from importlib import import_module

_HOMES = {
    "odeformer.block": ["BlockConfig", "COUPLINGS"],
    "odeformer.depth": ["DepthConfig"],
    "odeformer.attention": ["ATTENTION"],
    "odeformer.feedforward": ["FEEDFORWARD"],
    "odeformer.norms": ["NORMS"],
    "odeformer.positions": ["POSITIONS"],
    "odeformer.weights": ["WEIGHTS"],
    "odeformer.fusion": ["FUSIONS"],
    "odeformer.pruning": ["prune"],
    "odeformer.layout": ["lay_out"],
    "odeformer.calibration": ["calibrate"],
    "odeformer.refit": ["fit", "prolong", "restrict"],
    "odeformer.regularizers": ["REGULARIZERS"],
    "odeformer.init": ["INITIALIZERS"],
    "odeformer.models": ["MODELS", "Encoder", "EncoderConfig", "Decoder", "DecoderConfig", "Seq2Seq",
                         "Seq2SeqConfig", "SeriesEncoder", "SeriesConfig", "SpeechSeq2Seq", "SpeechConfig",
                         "VisionEncoder", "VisionConfig", "EmbeddingConfig", "load"],
    "odeformer.pretrained": ["from_huggingface", "to_huggingface", "wrap"],
    "odeformer.cache": ["CACHES"],
    "odeformer.heads": ["HEADS"],
    "odeformer.tokenizers": ["TOKENIZERS", "BPETokenizer", "ByteTokenizer", "load_tokenizer", "pad_batch"],
    "odeformer.data": ["DATA"],
    "odeformer.train": ["TrainConfig", "Trainer"],
}
_WHERE = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_WHERE)


_MODULES = ("diagnostics", "expert_parallel", "experts", "growth", "hypersolver", "init", "metrics", "norms", "optim",
            "page", "plots", "positions", "presets", "pretrained", "refit", "regularizers", "schedules", "settings",
            "studio", "tasks", "tokenizers", "train")


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"odeformer.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'odeformer' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
