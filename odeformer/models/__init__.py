"""Whole models, one a file."""

from odeformer.models.decoder import Decoder, DecoderConfig
from odeformer.models.encoder import Encoder, EncoderConfig
from odeformer.models.store import MODELS, load
from odeformer.models.vision import VisionConfig, VisionEncoder

__all__ = ["MODELS", "Decoder", "DecoderConfig", "Encoder", "EncoderConfig", "VisionConfig", "VisionEncoder", "load"]
