"""Whole models, one a file."""

from odeformer.models.decoder import Decoder, DecoderConfig
from odeformer.models.encoder import Encoder, EncoderConfig
from odeformer.models.seq2seq import Seq2Seq, Seq2SeqConfig
from odeformer.models.series import SeriesConfig, SeriesEncoder
from odeformer.models.speech import SpeechConfig, SpeechEncoder, SpeechSeq2Seq
from odeformer.models.store import MODELS, load
from odeformer.models.text import EmbeddingConfig
from odeformer.models.vision import VisionConfig, VisionEncoder

__all__ = ["MODELS", "Decoder", "DecoderConfig", "EmbeddingConfig", "Encoder", "EncoderConfig", "Seq2Seq",
           "Seq2SeqConfig", "SeriesConfig", "SeriesEncoder", "SpeechConfig", "SpeechEncoder", "SpeechSeq2Seq",
           "VisionConfig", "VisionEncoder", "load"]
