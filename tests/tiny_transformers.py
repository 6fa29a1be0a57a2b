"""Tiny models of transformers, one of each class that is read, with weights that are not near 0."""

import torch
import transformers as hf

SHAPE = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 12}
TEXT = {**SHAPE, "vocab_size": 40, "max_position_embeddings": 20}
DISTIL = {"vocab_size": 40, "dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12, "max_position_embeddings": 20}
GPT = {"vocab_size": 40, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 20, "bos_token_id": 1,
       "eos_token_id": 2}
LLAMA = {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 12}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
IMAGE = {**SHAPE, "image_size": 12, "patch_size": 4}
PAIR = {"d_model": 8, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 12, "decoder_ffn_dim": 20, "vocab_size": 40,
        "max_position_embeddings": 20, "pad_token_id": 1, "decoder_start_token_id": 1, "forced_eos_token_id": 0,
        "eos_token_id": 0, "bos_token_id": 2}
SPEECH = {**{k: v for k, v in PAIR.items() if k != "max_position_embeddings"}, "num_mel_bins": 4,
          "max_source_positions": 10, "max_target_positions": 16}
LABELS = {"num_labels": 5}

CASES = {  # name -> (class, config class, config, arguments of the class)
    "bert": ("BertModel", "BertConfig", TEXT, {}),
    "bert without pooler": ("BertModel", "BertConfig", TEXT, {"add_pooling_layer": False}),
    "bert words": ("BertForMaskedLM", "BertConfig", {**TEXT, "hidden_act": "gelu_new"}, {}),
    "bert words untied": ("BertForMaskedLM", "BertConfig", {**TEXT, "tie_word_embeddings": False}, {}),
    "bert classes": ("BertForSequenceClassification", "BertConfig", {**TEXT, **LABELS}, {}),
    "bert tags": ("BertForTokenClassification", "BertConfig", {**TEXT, **LABELS}, {}),
    "roberta": ("RobertaModel", "RobertaConfig", TEXT, {}),
    "roberta words": ("RobertaForMaskedLM", "RobertaConfig", {**TEXT, "hidden_act": "relu"}, {}),
    "roberta classes": ("RobertaForSequenceClassification", "RobertaConfig", {**TEXT, **LABELS}, {}),
    "roberta tags": ("RobertaForTokenClassification", "RobertaConfig", {**TEXT, **LABELS}, {}),
    "distilbert": ("DistilBertModel", "DistilBertConfig", DISTIL, {}),
    "distilbert waves": ("DistilBertModel", "DistilBertConfig", {**DISTIL, "sinusoidal_pos_embds": True}, {}),
    "distilbert words": ("DistilBertForMaskedLM", "DistilBertConfig", DISTIL, {}),
    "distilbert classes": ("DistilBertForSequenceClassification", "DistilBertConfig", {**DISTIL, **LABELS}, {}),
    "distilbert tags": ("DistilBertForTokenClassification", "DistilBertConfig", {**DISTIL, **LABELS}, {}),
    "albert": ("AlbertModel", "AlbertConfig", {**TEXT, "embedding_size": 6}, {}),
    "albert groups": ("AlbertModel", "AlbertConfig", {**TEXT, "embedding_size": 8, "num_hidden_layers": 4,
                                                      "num_hidden_groups": 2}, {}),
    "albert words": ("AlbertForMaskedLM", "AlbertConfig", {**TEXT, "embedding_size": 6}, {}),
    "albert classes": ("AlbertForSequenceClassification", "AlbertConfig", {**TEXT, **LABELS}, {}),
    "albert tags": ("AlbertForTokenClassification", "AlbertConfig", {**TEXT, **LABELS}, {}),
    "gpt2": ("GPT2Model", "GPT2Config", {**GPT, "n_inner": 20}, {}),
    "gpt2 words": ("GPT2LMHeadModel", "GPT2Config", GPT, {}),
    "gpt2 words untied": ("GPT2LMHeadModel", "GPT2Config", {**GPT, "tie_word_embeddings": False}, {}),
    "llama": ("LlamaModel", "LlamaConfig", LLAMA, {}),
    "llama words": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "attention_bias": True, "mlp_bias": True}, {}),
    "llama 3.1": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "rope_parameters": LLAMA3}, {}),
    "llama stretched": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "rope_parameters": LINEAR}, {}),
    "smollm2": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "tie_word_embeddings": True}, {}),
    "mistral": ("MistralModel", "MistralConfig", {**LLAMA, "sliding_window": 4}, {}),
    "mistral words": ("MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": None}, {}),
    "qwen2": ("Qwen2Model", "Qwen2Config", LLAMA, {}),
    "qwen2 words": ("Qwen2ForCausalLM", "Qwen2Config", {**LLAMA, "use_sliding_window": True, "sliding_window": 3,
                                                        "max_window_layers": 0}, {}),
    "vit": ("ViTModel", "ViTConfig", IMAGE, {}),
    "vit without pooler": ("ViTModel", "ViTConfig", {**IMAGE, "qkv_bias": False},
                           {"add_pooling_layer": False, "use_mask_token": True}),
    "vit classes": ("ViTForImageClassification", "ViTConfig", {**IMAGE, **LABELS}, {}),
    "dinov2": ("Dinov2Model", "Dinov2Config", IMAGE, {}),
    "dinov2 without mask": ("Dinov2Model", "Dinov2Config", {**IMAGE, "use_mask_token": False, "qkv_bias": False}, {}),
    "dinov2 classes": ("Dinov2ForImageClassification", "Dinov2Config", {**IMAGE, **LABELS, "use_swiglu_ffn": True}, {}),
    "whisper": ("WhisperModel", "WhisperConfig", SPEECH, {}),
    "whisper words": ("WhisperForConditionalGeneration", "WhisperConfig", SPEECH, {}),
    "bart": ("BartModel", "BartConfig", {**PAIR, "scale_embedding": True}, {}),
    "bart words": ("BartForConditionalGeneration", "BartConfig", PAIR, {}),
    "marian": ("MarianModel", "MarianConfig", {**PAIR, "activation_function": "swish", "scale_embedding": True}, {}),
    "marian words": ("MarianMTModel", "MarianConfig", PAIR, {}),
    "marian of two vocabularies": ("MarianMTModel", "MarianConfig", {
        **PAIR, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 35}, {}),
    "mbart": ("MBartModel", "MBartConfig", PAIR, {}),
    "mbart words": ("MBartForConditionalGeneration", "MBartConfig", {**PAIR, "scale_embedding": True}, {}),
    "pegasus": ("PegasusModel", "PegasusConfig", PAIR, {}),
    "pegasus words": ("PegasusForConditionalGeneration", "PegasusConfig", PAIR, {}),
}
LENGTH = 11


def make(name, dtype=torch.float64):
    """A model, in evaluation mode."""
    kind, config, values, arguments = CASES[name]
    model = getattr(hf, kind)(getattr(hf, config)(**values), **arguments).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # tables of sinusoids are not trained, and not in every file
                parameter.add_(0.3 * torch.randn_like(parameter))
        if name == "bert words untied":
            model.cls.predictions.bias.copy_(model.cls.predictions.decoder.bias)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model.to(dtype)


def inputs(model, batch=2, length=LENGTH):
    """What a model reads, in order, and a mask of its tokens (None for images and speech)."""
    dtype = next(model.parameters()).dtype
    if model.main_input_name == "pixel_values":
        return [torch.randn(batch, 3, 12, 12, dtype=dtype)], None
    target = torch.randint(3, 35, (batch, length - 3))
    if model.main_input_name == "input_features":
        return [torch.randn(batch, 4, 20, dtype=dtype), target], None
    tokens = torch.randint(3, 40, (batch, length))
    mask = torch.arange(length) < torch.tensor([[length], [length - 4]])
    return ([tokens, target] if model.config.is_encoder_decoder else [tokens]), mask


def call(model, tensors, mask=None, **more):
    """What the original gives: logits, or its final states."""
    names = ["decoder_input_ids"] if len(tensors) > 1 else []
    given = dict(zip([model.main_input_name, *names], tensors, strict=True))
    if mask is not None:
        given["attention_mask"] = mask.long()
    output = model(**given, **more)
    return output.last_hidden_state if getattr(output, "logits", None) is None else output.logits
