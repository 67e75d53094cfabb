# ruff: noqa: E501 - a row of the table is a line
"""The table of models: those of transformers, timm, torchvision and diffusers, each in a small configuration."""

from __future__ import annotations

import re
from typing import Any

from bench.model_rows import Draw, Made, Row, made, real, whole
from bench.package_table import PACKAGES

SEQ, VOCAB, CLASSES = 12, 112, 12
IMAGE = real(3, 32, 32)
USUAL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "use_cache": False, "head_dim": 8,
}  # fmt: skip
"""What most configurations of transformers call their sizes."""
TOKENS = whole(VOCAB, SEQ, low=3)


def _configured(model: str) -> str:
    return re.split("For(?=[A-Z])", model)[0]


def _given(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes without those that a configuration does not take, which are `...`."""
    return {name: size for name, size in sizes.items() if size is not ...}


def _text(
    model: str, config: str = "", *, labels: Draw = TOKENS, inputs: dict[str, Draw] | None = None, **sizes: Any
) -> Row:
    """A model of text; `config`: the configuration's name, by default that of the model up to "For"."""
    own = made(f"transformers:{config or _configured(model)}Config", **_given({**USUAL, **sizes}))
    batch = {"input_ids": TOKENS, "labels": labels} if inputs is None else inputs
    return Row("transformers", model, made(f"transformers:{model}", own), batch)


def _sorted(model: str, config: str = "", **sizes: Any) -> Row:
    """A model that sorts texts into classes."""
    return _text(model, config, labels=Draw((4,), 3), num_labels=3, **sizes)


def _images(model: str, config: str = "", **sizes: Any) -> Row:
    usual = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 48, "num_labels": CLASSES}  # fmt: skip
    own = made(f"transformers:{config or _configured(model)}Config", **_given({**usual, **sizes}))
    return Row(
        "transformers",
        model,
        made(f"transformers:{model}", own),
        {"pixel_values": IMAGE, "labels": Draw((4,), CLASSES)},
    )


EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
BART: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 2,
}  # fmt: skip
T5: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
SOUND = {"input_values": real(800), "labels": Draw((4,), 3)}
WAV2VEC: dict[str, Any] = {
    "conv_dim": (16, 16), "conv_kernel": (10, 4), "conv_stride": (5, 4), "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2, "classifier_proj_size": 16, "num_labels": 3,
    "apply_spec_augment": False, "layerdrop": 0.0,
}  # fmt: skip

DECODERS = [
    *(_text(f"{name}ForCausalLM") for name in (
        "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi", "Phi3", "StableLm", "Starcoder2", "Olmo", "Olmo2",
        "Olmo3", "Cohere", "Cohere2", "Granite", "Nemotron", "Persimmon", "Glm", "Glm4", "Helium", "SmolLM3", "Arcee",
        "Apertus", "Exaone4", "Ernie4_5", "SeedOss", "HunYuanDenseV1", "Ministral", "Ministral3", "NanoChat", "Cwm",
        "GPTNeoX", "BioGpt", "VaultGemma", "ModernBertDecoder", "Jais2", "HyperCLOVAX", "DiffLlama", "GraniteSWA",
    )),
    *(_text(f"{name}ForCausalLM", **EXPERTS) for name in (
        "Mixtral", "Qwen2Moe", "Qwen3Moe", "GptOss", "GraniteMoe", "Olmoe", "Phimoe", "MiniMaxM2", "FlexOlmo",
    )),
    _text("Gemma3ForCausalLM", "Gemma3Text"),
    _text("OPTForCausalLM", ffn_dim=48, word_embed_proj_dim=32),
    _text("GPTNeoForCausalLM", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]),
    _text("GPTJForCausalLM", n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
    _text("CodeGenForCausalLM", n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_ctx=64),
    _text("GPTBigCodeForCausalLM", n_embd=32, n_layer=2, n_head=4),
    _text("BloomForCausalLM", n_layer=2, n_head=4),
    _text("FalconForCausalLM", head_dim=..., num_kv_heads=2, new_decoder_architecture=True),
    _text("MptForCausalLM", d_model=32, n_layers=2, n_heads=4, expansion_ratio=2),
    _text("XGLMForCausalLM", d_model=32, ffn_dim=48, num_layers=2, attention_heads=4),
    _text("RwkvForCausalLM", attention_hidden_size=32),
    _text("MambaForCausalLM", state_size=8),
    _text("Mamba2ForCausalLM", state_size=8, num_heads=8, n_groups=2, chunk_size=4),
    _text("RecurrentGemmaForCausalLM", lru_width=32, attention_window_size=8, num_hidden_layers=3),
    _text("DeepseekV3ForCausalLM", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_group=1, topk_group=1,
          q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4),
    _text("Lfm2ForCausalLM", layer_types=["conv", "full_attention"]),
    _text("BitNetForCausalLM"),
    _text("DogeForCausalLM"),
]  # fmt: skip
ENCODERS = [
    *(_text(f"{name}ForMaskedLM") for name in (
        "Bert", "Roberta", "Electra", "Ernie", "MegatronBert", "RemBert", "RobertaPreLayerNorm", "RoFormer",
        "Camembert", "Data2VecText", "XLMRoberta", "XLMRobertaXL", "ModernBert", "NomicBert", "MPNet", "IBert", "LayoutLM", "Nystromformer", "EuroBert",
    )),
    _text("AlbertForMaskedLM", embedding_size=16),
    _text("DebertaForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _text("DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _text("DistilBertForMaskedLM", dim=32, n_layers=2, n_heads=4, hidden_dim=48),
    _text("FNetForMaskedLM"),
    _text("ConvBertForMaskedLM", embedding_size=32, head_ratio=2, conv_kernel_size=3),
    _text("MobileBertForMaskedLM", embedding_size=32, true_hidden_size=32, intra_bottleneck_size=32),
    _text("SqueezeBertForMaskedLM", embedding_size=32, q_groups=1, k_groups=1, v_groups=1, post_attention_groups=1, intermediate_groups=1, output_groups=1),
    _text("FunnelForMaskedLM", num_hidden_layers=..., block_sizes=[1, 1], num_decoder_layers=1, d_model=32, n_head=4, d_head=8, d_inner=48),
    _text("EsmForMaskedLM", position_embedding_type="rotary", mask_token_id=3),
    _text("LongformerForMaskedLM", attention_window=4),
    _text("PerceiverForMaskedLM", inputs={"inputs": whole(VOCAB, 64, low=3), "labels": whole(VOCAB, 64, low=3)}, num_latents=8, d_latents=32, d_model=32,
          num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=4, qk_channels=32, v_channels=32),
    _sorted("BertForSequenceClassification"), _sorted("LlamaForSequenceClassification"),
    _sorted("XLNetForSequenceClassification", max_position_embeddings=..., d_model=32, n_layer=2, n_head=4, d_inner=48),
    _sorted("FlaubertForSequenceClassification", emb_dim=32, n_layers=2, n_heads=4),
]  # fmt: skip
SEQ2SEQ = [
    *(_text(f"{name}ForConditionalGeneration", **BART) for name in (
        "Bart", "MBart", "Pegasus", "Blenderbot", "BlenderbotSmall", "PLBart", "M2M100", "PegasusX",
    )),
    *(_text(f"{name}ForConditionalGeneration", **T5) for name in ("T5", "MT5", "UMT5", "LongT5")),
    _text("ProphetNetForConditionalGeneration", num_hidden_layers=..., num_encoder_layers=2, num_decoder_layers=2, num_encoder_attention_heads=4,
          num_decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, decoder_start_token_id=2),
    _text("LEDForConditionalGeneration", **BART, attention_window=4, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64),
    Row("transformers", "WhisperForConditionalGeneration", made("transformers:WhisperForConditionalGeneration", made(
        "transformers:WhisperConfig", **{**USUAL, **BART}, num_mel_bins=8, max_source_positions=16, max_target_positions=16)),
        {"input_features": real(8, 32), "labels": TOKENS}),
    Row("transformers", "Speech2TextForConditionalGeneration", made("transformers:Speech2TextForConditionalGeneration", made(
        "transformers:Speech2TextConfig", **{**USUAL, **BART}, input_feat_per_channel=8, conv_channels=16, max_source_positions=32, max_target_positions=16)),
        {"input_features": real(32, 8), "labels": TOKENS}),
]  # fmt: skip
SPEECH = [
    Row("transformers", f"{name}ForSequenceClassification", made(f"transformers:{name}ForSequenceClassification", made(
        f"transformers:{name}Config", **{**USUAL, **WAV2VEC})), SOUND)
    for name in ("Wav2Vec2", "Hubert", "WavLM", "UniSpeech", "UniSpeechSat", "Data2VecAudio")
]  # fmt: skip
VISION = [
    *(_images(f"{name}ForImageClassification") for name in ("ViT", "DeiT", "Dinov2", "Dinov2WithRegisters", "Beit", "Data2VecVision", "IJepa", "ViTMSN")),
    _images("SwinForImageClassification", num_attention_heads=..., patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4),
    _images("Swinv2ForImageClassification", num_attention_heads=..., patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4),
    _images("ConvNextForImageClassification", patch_size=4, hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    _images("ConvNextV2ForImageClassification", patch_size=4, hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    _images("ResNetForImageClassification", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]),
    _images("RegNetForImageClassification", num_hidden_layers=..., embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8),
    _images("BitForImageClassification", num_hidden_layers=..., embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], num_groups=8),
    _images("SegformerForImageClassification", num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[16, 32], num_attention_heads=[2, 4], sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2], decoder_hidden_size=16),
    _images("PvtForImageClassification", depths=[1, 1], num_encoder_blocks=2, hidden_sizes=[16, 32], num_attention_heads=[2, 4], sequence_reduction_ratios=[2, 1], patch_sizes=[4, 2], strides=[4, 2], mlp_ratios=[2, 2]),
    _images("PoolFormerForImageClassification", depths=[1, 1], num_encoder_blocks=2, hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1]),
    _images("FocalNetForImageClassification", patch_size=4, embed_dim=16, depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3], hidden_sizes=[16, 32]),
    _images("MobileNetV1ForImageClassification"), _images("MobileNetV2ForImageClassification"),
    _images("MobileViTForImageClassification", hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32]),
    Row("transformers", "CLIPModel", made("transformers:CLIPModel", made("transformers:CLIPConfig",
        text_config={**USUAL, "projection_dim": 16}, vision_config={**USUAL, "image_size": 32, "patch_size": 8}, projection_dim=16)),
        {"input_ids": TOKENS, "pixel_values": IMAGE}, {"return_loss": True}),
]  # fmt: skip
_MLP = {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 32}


def _named(target: str) -> Made:
    """A class of timm, as an argument."""
    return made("pydoc:locate", f"timm.models.{target}")


TIMM = [
    Row("timm", name, made("timm:create_model", name, num_classes=CLASSES, **sizes), (real(3, size, size),))
    for name, size, sizes in (
        ("resnet10t", 64, {}), ("resnet18", 64, {}), ("resnext26ts", 64, {}), ("seresnext26t_32x4d", 64, {}), ("ecaresnext26t_32x4d", 64, {}),
        ("res2net50_26w_4s", 64, {"layers": (1, 1, 1, 1)}), ("efficientnet_lite0", 64, {}), ("mobilenetv3_small_050", 64, {}), ("mobilenetv2_035", 64, {}),
        ("mnasnet_small", 64, {}), ("tinynet_e", 64, {}), ("lcnet_035", 64, {}), ("ghostnet_050", 64, {}), ("repvgg_a0", 64, {}),
        ("regnetx_002", 64, {}), ("regnety_002", 64, {}), ("convnext_atto", 64, {}), ("convnextv2_atto", 64, {}), ("vit_tiny_patch16_224", 32, {"img_size": 32, "depth": 2}),
        ("deit_tiny_patch16_224", 32, {"img_size": 32, "depth": 2}), ("beit_base_patch16_224", 32, {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 4}),
        ("eva02_tiny_patch14_224", 28, {"img_size": 28, "depth": 2}), ("cait_xxs24_224", 32, {"img_size": 32, "depth": 2}), ("swin_tiny_patch4_window7_224", 32, {"img_size": 32, "window_size": 4, "depths": (1, 1), "num_heads": (2, 4), "embed_dim": 16}),
        ("levit_128s", 64, {"img_size": 64}), ("efficientvit_b0", 64, {}), ("edgenext_xx_small", 64, {}), ("mobilevit_xxs", 64, {}), ("coat_lite_tiny", 64, {"img_size": 64}),
        ("crossvit_9_240", 240, {}), ("ese_vovnet19b_dw", 64, {}), ("dla34", 64, {}), ("densenet121", 64, {"block_config": (2, 2, 2, 2)}), ("hardcorenas_a", 64, {}),
        ("fastvit_t8", 64, {}), ("mambaout_femto", 64, {}), ("starnet_s1", 64, {}), ("repvit_m0_9", 64, {}), ("tiny_vit_5m_224", 64, {}),
    )
] + [
    Row("timm", name, made(f"timm.models.{model}", num_classes=CLASSES, **sizes), (real(3, size, size),))
    for name, model, size, sizes in (
        ("mixer_s32_224", "mlp_mixer:MlpMixer", 32, _MLP),
        ("resmlp_12_224", "mlp_mixer:MlpMixer", 32, {**_MLP, "mlp_ratio": 4, "block_layer": _named("mlp_mixer.ResBlock"), "norm_layer": _named("mlp_mixer.Affine")}),
        ("gmlp_s16_224", "mlp_mixer:MlpMixer", 32, {**_MLP, "mlp_ratio": 6, "block_layer": _named("mlp_mixer.SpatialGatingBlock"), "mlp_layer": _named("mlp_mixer.GatedMlp")}),
        ("poolformer_s12", "metaformer:MetaFormer", 64, {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32), "downsample_norm": None, "mlp_bias": True, "norm_layers": _named("metaformer.GroupNorm1"), "layer_scale_init_values": 1e-5, "res_scale_init_values": None, "use_mlp_head": False}),
        ("convmixer_768_32", "convmixer:ConvMixer", 32, {"depth": 2, "dim": 32, "kernel_size": 7, "patch_size": 7}),
        ("efficientformer_l1", "efficientformer:EfficientFormer", 224, {"depths": (1, 1, 1, 2), "embed_dims": (8, 16, 24, 32), "num_vit": 1}),
    )
]  # fmt: skip
TORCHVISION = [
    Row("torchvision", f"torchvision.{name}", made(f"torchvision.models:{name}", num_classes=CLASSES, **sizes), (real(3, 64, 64),))
    for name, sizes in (
        ("resnet18", {}), ("squeezenet1_1", {}), ("shufflenet_v2_x0_5", {}), ("mobilenet_v2", {"width_mult": 0.35}), ("mobilenet_v3_small", {"width_mult": 0.5}), ("efficientnet_b0", {}), ("mnasnet0_5", {}), ("densenet121", {}), ("regnet_y_400mf", {}),
    )
]  # fmt: skip
_UNET = {
    "sample_size": 16, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "block_out_channels": (16, 32), "norm_num_groups": 4,
}  # fmt: skip
DIFFUSERS = [
    Row("diffusers", "UNet2DModel", made("diffusers:UNet2DModel", **_UNET, down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8),
        {"sample": real(4, 16, 16), "timestep": Draw((4,), 1000)}),
    Row("diffusers", "UNet2DConditionModel", made("diffusers:UNet2DConditionModel", **_UNET, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=24, attention_head_dim=4),
        {"sample": real(4, 16, 16), "timestep": Draw((4,), 1000), "encoder_hidden_states": real(6, 24)}),
    Row("diffusers", "AutoencoderKL", made("diffusers:AutoencoderKL", block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, latent_channels=4, sample_size=16), {"sample": real(3, 16, 16)}),
    Row("diffusers", "VQModel", made("diffusers:VQModel", block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, latent_channels=4, num_vq_embeddings=16), {"sample": real(3, 16, 16)}),
    Row("diffusers", "DiTTransformer2DModel", made("diffusers:DiTTransformer2DModel", num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=1000, norm_num_groups=4),
        {"hidden_states": real(4, 8, 8), "timestep": Draw((4,), 1000), "class_labels": Draw((4,), 10)}),
    Row("diffusers", "PixArtTransformer2DModel", made("diffusers:PixArtTransformer2DModel", num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2, cross_attention_dim=32, caption_channels=24),
        {"hidden_states": real(4, 8, 8), "timestep": Draw((4,), 1000), "encoder_hidden_states": real(6, 24)}, {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}),
    Row("diffusers", "SD3Transformer2DModel", made("diffusers:SD3Transformer2DModel", sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=24, out_channels=4),
        {"hidden_states": real(4, 8, 8), "encoder_hidden_states": real(6, 32), "pooled_projections": real(24), "timestep": Draw((4,), 1000)}),
    Row("diffusers", "Transformer2DModel", made("diffusers:Transformer2DModel", num_attention_heads=4, attention_head_dim=8, in_channels=16, num_layers=2, norm_num_groups=4), {"hidden_states": real(16, 8, 8)}),
    Row("diffusers", "UNet1DModel", made("diffusers:UNet1DModel", sample_size=64, in_channels=2, out_channels=2, block_out_channels=(16, 32), down_block_types=("DownBlock1D", "DownBlock1D"), up_block_types=("UpBlock1D", "UpBlock1D"), extra_in_channels=0, time_embedding_type="fourier", use_timestep_embedding=False),
        {"sample": real(2, 64), "timestep": Draw((4,), 1000)}),
    Row("diffusers", "PriorTransformer", made("diffusers:PriorTransformer", num_attention_heads=4, attention_head_dim=8, num_layers=2, embedding_dim=16, num_embeddings=6, additional_embeddings=4),
        {"hidden_states": real(16), "timestep": Draw((4,), 1000), "proj_embedding": real(16), "encoder_hidden_states": real(6, 16)}),
    Row("diffusers", "UVit2DModel", made("diffusers:UVit2DModel", hidden_size=32, cond_embed_dim=16, micro_cond_encode_dim=8, micro_cond_embed_dim=40, encoder_hidden_size=24, vocab_size=32, codebook_size=24, in_channels=32, block_out_channels=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, block_num_heads=4),
        {"input_ids": whole(32, 8, 8), "encoder_hidden_states": real(6, 24), "pooled_text_emb": real(16), "micro_conds": real(5)}),
    Row("diffusers", "AutoencoderTiny", made("diffusers:AutoencoderTiny", encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16), num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)), {"sample": real(3, 16, 16)}),
]  # fmt: skip
ROWS: list[Row] = [*DECODERS, *ENCODERS, *SEQ2SEQ, *SPEECH, *VISION, *TIMM, *TORCHVISION, *DIFFUSERS, *PACKAGES]
