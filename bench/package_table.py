# ruff: noqa: E501 - a row of the table is a line
"""The table of models, of packages that few use."""

from __future__ import annotations

from bench.model_rows import Draw, Row, made, real, whole

IMAGE, TOKENS, SEQUENCE = (real(3, 32, 32),), (whole(64, 16),), (real(16, 32),)
VIT = {"image_size": 32, "patch_size": 8, "num_classes": 12, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48}
PACKAGES: list[Row] = [
    *(Row("vit-pytorch", f"vit_pytorch.{name.replace(':', '.')}", made(f"vit_pytorch.{name}", **{**VIT, **more}), IMAGE) for name, more in (
        ("vit:ViT", {}), ("simple_vit:SimpleViT", {}), ("deepvit:DeepViT", {}), ("cait:CaiT", {"depth": 1, "cls_depth": 1}), ("vit_for_small_dataset:ViT", {}), ("parallel_vit:ViT", {}),
    )),
    Row("mlp-mixer-pytorch", "MLPMixer", made("mlp_mixer_pytorch:MLPMixer", image_size=32, channels=3, patch_size=8, dim=32, depth=2, num_classes=12), IMAGE),
    Row("g-mlp-pytorch", "gMLP", made("g_mlp_pytorch:gMLP", num_tokens=64, dim=32, depth=2, seq_len=16), TOKENS),
    Row("res-mlp-pytorch", "ResMLP", made("res_mlp_pytorch:ResMLP", image_size=32, patch_size=8, dim=32, depth=2, num_classes=12), IMAGE),
    Row("perceiver-pytorch", "Perceiver", made("perceiver_pytorch:Perceiver", input_channels=3, input_axis=2, num_freq_bands=2, max_freq=4.0, depth=1, num_latents=8, latent_dim=32, latent_heads=2, latent_dim_head=8, cross_dim_head=8, num_classes=12), (real(8, 8, 3),)),
    Row("linear-attention-transformer", "LinearAttentionTransformerLM", made("linear_attention_transformer:LinearAttentionTransformerLM", num_tokens=64, dim=32, heads=4, depth=2, max_seq_len=16), TOKENS),
    Row("performer-pytorch", "PerformerLM", made("performer_pytorch:PerformerLM", num_tokens=64, max_seq_len=16, dim=32, depth=1, heads=4, dim_head=8), TOKENS),
    Row("conformer", "Conformer", made("conformer:Conformer", dim=32, depth=2, dim_head=8, heads=4), SEQUENCE),
    Row("nystrom-attention", "Nystromformer", made("nystrom_attention:Nystromformer", dim=32, dim_head=8, heads=4, depth=2, num_landmarks=4), SEQUENCE),
    Row("linformer", "Linformer", made("linformer:Linformer", dim=32, seq_len=16, depth=2, heads=4, k=8), SEQUENCE),
    Row("axial-attention", "AxialAttention", made("axial_attention:AxialAttention", dim=32, dim_index=1, heads=4, num_dimensions=2), (real(32, 8, 8),)),
    Row("lambda-networks", "LambdaLayer", made("lambda_networks:LambdaLayer", dim=32, dim_out=32, n=8, dim_k=8, heads=4, dim_u=1), (real(32, 8, 8),)),
    Row("halonet-pytorch", "HaloAttention", made("halonet_pytorch:HaloAttention", dim=32, block_size=4, halo_size=2, dim_head=8, heads=4), (real(32, 8, 8),)),
    Row("egnn-pytorch", "EGNN", made("egnn_pytorch:EGNN", dim=32), (real(8, 32), real(8, 3))),
    Row("slot-attention", "SlotAttention", made("slot_attention:SlotAttention", num_slots=4, dim=32), SEQUENCE),
    Row("mixture-of-experts", "mixture_of_experts.MoE", made("mixture_of_experts:MoE", dim=32, num_experts=4), SEQUENCE),
    Row("soft-moe-pytorch", "SoftMoE", made("soft_moe_pytorch:SoftMoE", dim=32, seq_len=16, num_experts=4), SEQUENCE),
    Row("siren-pytorch", "SirenNet", made("siren_pytorch:SirenNet", dim_in=2, dim_hidden=32, dim_out=3, num_layers=2), (real(2),)),
    Row("tab-transformer-pytorch", "FTTransformer", made("tab_transformer_pytorch:FTTransformer", categories=(4, 6), num_continuous=4, dim=32, dim_out=2, depth=1, heads=4), (whole(4, 2), real(4))),
    Row("itransformer", "iTransformer", made("iTransformer:iTransformer", num_variates=6, lookback_len=16, dim=32, depth=1, heads=4, dim_head=8, pred_length=4), (real(16, 6),)),
    Row("vector-quantize-pytorch", "FSQ", made("vector_quantize_pytorch:FSQ", levels=[4, 4, 4], dim=32), SEQUENCE),
    Row("minGRU-pytorch", "minGRU", made("minGRU_pytorch:minGRU", 32), SEQUENCE),
    Row("segformer-pytorch", "Segformer", made("segformer_pytorch:Segformer", dims=(16, 16, 32, 32), heads=(1, 2, 2, 4), ff_expansion=(2, 2, 2, 2), reduction_ratio=(8, 4, 2, 1), num_layers=1, decoder_dim=16, num_classes=4), (real(3, 64, 64),)),
    Row("rtdl-revisiting-models", "MLP", made("rtdl_revisiting_models:MLP", d_in=8, d_out=2, n_blocks=2, d_block=32, dropout=0.1), (real(8),)),
    Row("rtdl-revisiting-models", "rtdl.ResNet", made("rtdl_revisiting_models:ResNet", d_in=8, d_out=2, n_blocks=2, d_block=32, d_hidden=None, d_hidden_multiplier=2.0, dropout1=0.1, dropout2=0.1), (real(8),)),
    Row("rtdl-num-embeddings", "PeriodicEmbeddings", made("rtdl_num_embeddings:PeriodicEmbeddings", 8, lite=False), (real(8),)),
    Row("tabm", "TabM", made("tabm:TabM.make", n_num_features=8, d_out=2, k=4, d_block=32, n_blocks=2), (real(8),)),
    Row("fair-esm", "ESM2", made("esm:ESM2", num_layers=2, embed_dim=32, attention_heads=4), (whole(20, 16, low=4),)),
    Row("pytorch-tcn", "TCN", made("pytorch_tcn:TCN", num_inputs=32, num_channels=[16, 16]), (real(32, 16),)),
    Row("mambapy", "Mamba", made("mambapy.mamba:Mamba", made("mambapy.mamba:MambaConfig", d_model=32, n_layers=2, d_state=4)), SEQUENCE),
    Row("ncps", "CfC", made("ncps.torch:CfC", 32, 16), (real(6, 32),)),
    Row("efficientnet_pytorch", "EfficientNet", made("efficientnet_pytorch:EfficientNet.from_name", "efficientnet-b0", num_classes=12), (real(3, 64, 64),)),
    Row("x-transformers", "TransformerWrapper", made("x_transformers:TransformerWrapper", num_tokens=64, max_seq_len=16, attn_layers=made("x_transformers:Decoder", dim=32, depth=2, heads=4)), TOKENS),
    Row("x-transformers", "ViTransformerWrapper", made("x_transformers:ViTransformerWrapper", image_size=32, patch_size=8, num_classes=12, attn_layers=made("x_transformers:Encoder", dim=32, depth=2, heads=4)), IMAGE),
    Row("torch-geometric", "GCN", made("torch_geometric.nn:GCN", 8, 16, 2, 4), (Draw((16, 8)), Draw((2, 32), 16))),
    Row("torch-geometric", "GraphSAGE", made("torch_geometric.nn:GraphSAGE", 8, 16, 2, 4), (Draw((16, 8)), Draw((2, 32), 16))),
    Row("torch-geometric", "GIN", made("torch_geometric.nn:GIN", 8, 16, 2, 4), (Draw((16, 8)), Draw((2, 32), 16))),
    Row("neuraloperator", "FNO", made("neuralop.models:FNO", n_modes=(4, 4), in_channels=2, out_channels=2, hidden_channels=16, n_layers=2), (real(2, 16, 16),)),
    Row("monai", "UNet", made("monai.networks.nets:UNet", spatial_dims=2, in_channels=1, out_channels=2, channels=(8, 16), strides=(2,)), (real(1, 16, 16),)),
    Row("monai", "BasicUNet", made("monai.networks.nets:BasicUNet", spatial_dims=2, in_channels=1, out_channels=2, features=(8, 8, 16, 16, 16, 8)), (real(1, 32, 32),)),
    Row("local-attention", "LocalTransformer", made("local_attention:LocalTransformer", num_tokens=64, dim=32, depth=1, max_seq_len=16, local_attn_window_size=8, heads=4, dim_head=8), TOKENS),
    Row("bottleneck-transformer-pytorch", "BottleStack", made("bottleneck_transformer_pytorch:BottleStack", dim=32, fmap_size=8, dim_out=32, num_layers=2, heads=4, dim_head=8), (real(32, 8, 8),)),
    Row("glom-pytorch", "Glom", made("glom_pytorch:Glom", dim=32, levels=2, image_size=32, patch_size=8), IMAGE, {"iters": 2}),
    Row("uformer-pytorch", "Uformer", made("uformer_pytorch:Uformer", dim=8, stages=2, num_blocks=1, window_size=4, dim_head=8, heads=2, ff_mult=2), IMAGE),
    Row("loralib", "loralib.Linear", made("loralib:Linear", 32, 16, r=4, lora_dropout=0.1), (real(32),)),
    Row("asteroid-filterbanks", "Encoder", made("asteroid_filterbanks:Encoder", made("asteroid_filterbanks:FreeFB", 16, 8)), (real(1, 256),)),
    Row("st-moe-pytorch", "st_moe_pytorch.MoE", made("st_moe_pytorch:MoE", dim=32, num_experts=4), SEQUENCE),
    Row("pytorch-tabnet", "TabNet", made("pytorch_tabnet.tab_network:TabNet", 8, 2, n_d=8, n_a=8, n_steps=2, virtual_batch_size=4, group_attention_matrix=made("torch:eye", 8)), (real(8),)),
    Row("snntorch", "Leaky", made("snntorch:Leaky", beta=0.9, init_hidden=True, learn_beta=True), (real(16),)),
    Row("sinkhorn-transformer", "SinkhornTransformerLM", made("sinkhorn_transformer:SinkhornTransformerLM", num_tokens=64, dim=32, heads=4, depth=2, bucket_size=4, max_seq_len=16), TOKENS),
    *(Row("vit-pytorch", f"vit_pytorch.{name.replace(':', '.')}", made(f"vit_pytorch.{name}", **{**VIT, **more}), IMAGE) for name, more in (
        ("simple_vit_with_register_tokens:SimpleViT", {}), ("simple_vit_with_qk_norm:SimpleViT", {}), ("simple_vit_with_value_residual:SimpleViT", {}), ("vit_with_patch_dropout:ViT", {}),
        ("learnable_memory_vit:ViT", {}), ("xcit:XCiT", {"depth": 1, "cls_depth": 1}),
    )),
]  # fmt: skip
