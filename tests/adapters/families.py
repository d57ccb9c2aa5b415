"""Tiny models of many families, with the parameter names of their layers in order and of their embeddings."""

from __future__ import annotations

from typing import NamedTuple

import transformers as tf
from transformers import PreTrainedModel


class Family(NamedTuple):
    """Prefixes of parameter names. In `layers`, the encoder layers come before the decoder layers."""

    model: str
    config: tf.PreTrainedConfig
    layers: list[str]
    embeddings: list[str]

    def build(self) -> PreTrainedModel:
        return getattr(tf, self.model)(self.config)


BERT = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
DECODER = {**BERT, "num_hidden_layers": 3}
ENCODER = {**DECODER, "max_position_embeddings": 16}
LLAMA = {**DECODER, "num_key_value_heads": 2}
BART = {
    "vocab_size": 32,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
    "decoder_start_token_id": 2,
}
BART_LAYERS = [f"model.{half}.layers.{i}." for half, depth in (("encoder", 2), ("decoder", 3)) for i in range(depth)]
BART_POSITIONS = [f"model.{half}.embed_positions." for half in ("encoder", "decoder")]
BART_NORMS = [f"model.{half}.layernorm_embedding." for half in ("encoder", "decoder")]
TWO_BERTS = tf.EncoderDecoderConfig.from_encoder_decoder_configs(
    tf.BertConfig(**BERT, num_hidden_layers=2), tf.BertConfig(**DECODER, is_decoder=True, add_cross_attention=True)
)


def numbered(prefix: str, number: int = 3) -> list[str]:
    return [f"{prefix}.{i}." for i in range(number)]


FAMILIES = {
    "bert": Family(
        "BertForSequenceClassification",
        tf.BertConfig(**ENCODER),
        numbered("bert.encoder.layer"),
        ["bert.embeddings."],
    ),
    "distilbert": Family(
        "DistilBertForSequenceClassification",
        tf.DistilBertConfig(vocab_size=32, dim=16, n_layers=3, n_heads=2, hidden_dim=16, max_position_embeddings=16),
        numbered("distilbert.transformer.layer"),
        ["distilbert.embeddings."],
    ),
    "roberta": Family(
        "RobertaForMaskedLM",
        tf.RobertaConfig(**ENCODER),
        numbered("roberta.encoder.layer"),
        ["roberta.embeddings."],
    ),
    "electra": Family(
        "ElectraForSequenceClassification",
        tf.ElectraConfig(**ENCODER, embedding_size=8),
        numbered("electra.encoder.layer"),
        ["electra.embeddings.", "electra.embeddings_project."],
    ),
    "deberta-v2": Family(
        "DebertaV2ForSequenceClassification",
        tf.DebertaV2Config(**ENCODER, relative_attention=True, position_buckets=8, norm_rel_ebd="layer_norm"),
        numbered("deberta.encoder.layer"),
        ["deberta.embeddings.", "deberta.encoder.rel_embeddings.", "deberta.encoder.LayerNorm."],
    ),
    "xlnet": Family(
        "XLNetForSequenceClassification",
        tf.XLNetConfig(vocab_size=32, d_model=16, n_layer=3, n_head=2, d_inner=16),
        numbered("transformer.layer"),
        ["transformer.word_embedding.", "transformer.mask_emb"],
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        tf.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0),
        numbered("transformer.h"),
        ["transformer.wte.", "transformer.wpe."],
    ),
    "opt": Family(
        "OPTForCausalLM",
        tf.OPTConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=3,
            ffn_dim=16,
            num_attention_heads=2,
            max_position_embeddings=16,
            word_embed_proj_dim=8,
        ),
        numbered("model.decoder.layers"),
        ["model.decoder.embed_tokens.", "model.decoder.embed_positions.", "model.decoder.project_in."],
    ),
    "bloom": Family(
        "BloomForCausalLM",
        tf.BloomConfig(vocab_size=32, hidden_size=16, n_layer=3, n_head=2),
        numbered("transformer.h"),
        ["transformer.word_embeddings.", "transformer.word_embeddings_layernorm."],
    ),
    "llama": Family("LlamaForCausalLM", tf.LlamaConfig(**LLAMA), numbered("model.layers"), ["model.embed_tokens."]),
    "qwen2": Family("Qwen2ForCausalLM", tf.Qwen2Config(**LLAMA), numbered("model.layers"), ["model.embed_tokens."]),
    "t5": Family(
        "T5ForConditionalGeneration",
        tf.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_decoder_layers=3, num_heads=2),
        numbered("encoder.block", 2) + numbered("decoder.block"),
        ["shared."],
    ),
    "bart": Family(
        "BartForSequenceClassification",
        tf.BartConfig(**BART),
        BART_LAYERS,
        ["model.shared.", *BART_POSITIONS, *BART_NORMS],
    ),
    "mbart": Family(
        "MBartForConditionalGeneration",
        tf.MBartConfig(**BART),
        BART_LAYERS,
        ["model.shared.", *BART_POSITIONS, *BART_NORMS],
    ),
    "marian": Family("MarianMTModel", tf.MarianConfig(**BART), BART_LAYERS, ["model.shared.", *BART_POSITIONS]),
    "encoder-decoder": Family(
        "EncoderDecoderModel",
        TWO_BERTS,
        numbered("encoder.encoder.layer", 2) + numbered("decoder.bert.encoder.layer"),
        ["encoder.embeddings.", "decoder.bert.embeddings."],
    ),
}
