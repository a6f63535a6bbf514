"""The axes of vision models, and of vision with text, with the modelling code behind them."""

from tests.planner.huggingface.expectation import Expectation, biased, dims, each, one, weight

Expectations = tuple[Expectation, ...]

HEADS = "heads·head_dim"


def attention(module: str, output: str = "o_proj") -> Expectations:
    """Every one of these: `hidden_shape = (*input_shape, -1, self.head_dim)`, then `.view`."""
    return (
        biased(f"{module}.q_proj", HEADS, "embed")
        + biased(f"{module}.k_proj", HEADS, "embed")
        + biased(f"{module}.v_proj", HEADS, "embed")
        + biased(f"{module}.{output}", "embed", HEADS)
    )


FFN = biased("mlp.fc1", "ffn", "embed") + biased("mlp.fc2", "embed", "ffn")

# ViTPatchEmbeddings.forward: `self.projection(pixel_values).flatten(2).transpose(1, 2)`.
VIT: Expectations = (
    biased("vit.embeddings.patch_embeddings.projection", "embed", "channels")
    + each("vit.layers", 2, attention("attention"), FFN)
    + biased("classifier", "classes", "embed")
)

# SwinPatchMerging.forward: `torch.cat([input_feature[:, row::2, col::2, :] …], dim=-1)`; the
# relative bias is `table[index].view(area, area, -1).permute(2, 0, 1)`: its dim 1 is the heads.
SWIN_BIAS = "attention.relative_position_bias.relative_position_bias_table"
SWIN_BLOCK = attention("attention") + FFN + one(SWIN_BIAS, 1, "heads")
SWIN: Expectations = (
    biased("swin.embeddings.patch_embeddings.projection", "embed", "channels")
    + each("swin.encoder.layers.0.blocks", 2, SWIN_BLOCK)
    + weight(
        "swin.encoder.layers.0.downsample.reduction", "embed", "[embed | embed | embed | embed]"
    )
    + each("swin.encoder.layers.1.blocks", 2, SWIN_BLOCK)
    + biased("classifier", "classes", "embed")
)

# CLIPModel.forward: `torch.matmul(text_embeds, image_embeds.t())` joins the two projections.
CLIP_LAYER = (attention("self_attn", "out_proj"), FFN)
CLIP: Expectations = (
    weight("text_model.embeddings.token_embedding", "vocab", "embed")
    + weight("vision_model.embeddings.patch_embedding", "embed", "channels")
    + dims("vision_model.embeddings.class_embedding", "embed")
    + each("text_model.encoder.layers", 2, *CLIP_LAYER)
    + each("vision_model.encoder.layers", 2, *CLIP_LAYER)
    + weight("text_projection", "projection", "embed")
    + weight("visual_projection", "projection", "embed")
)


def convolution(module: str) -> Expectations:
    """ResNetConvLayer.forward: convolution, normalization, activation."""
    return weight(f"{module}.convolution", "channels", "channels.2") + biased(
        f"{module}.normalization", "channels"
    )


# ResNetBottleNeckLayer: three convolutions; `hidden_state += residual` joins the ends of a stage.
BOTTLENECK = convolution("layer.0") + convolution("layer.1") + convolution("layer.2")
RESNET: Expectations = (
    convolution("resnet.embedder.embedder")
    + each("resnet.encoder.stages.0.layers", 2, BOTTLENECK)
    + convolution("resnet.encoder.stages.0.layers.0.shortcut")
    + each("resnet.encoder.stages.1.layers", 2, BOTTLENECK)
    + convolution("resnet.encoder.stages.1.layers.0.shortcut")
    + biased("classifier.1", "classes", "channels")
)

# ConvNextLayer.forward: `dwconv` (groups=dim), `permute(0, 2, 3, 1)`, `pwconv1`, `act`, `pwconv2`,
# then `self.layer_scale_parameter * features`.
CONVNEXT_LAYER = (
    biased("dwconv", "channels")
    + biased("layernorm", "channels")
    + biased("pwconv1", "ffn", "channels")
    + biased("pwconv2", "channels", "ffn")
    + dims("layer_scale_parameter", "channels")
)
CONVNEXT: Expectations = (
    biased("convnext.embeddings.patch_embeddings", "channels", "channels.2")
    + each("convnext.encoder.stages.0.layers", 2, CONVNEXT_LAYER)
    + biased("convnext.encoder.stages.1.downsampling_layer.1", "channels", "channels.2")
    + each("convnext.encoder.stages.1.layers", 2, CONVNEXT_LAYER)
    + biased("classifier", "classes", "channels")
)

# SegformerMixMLP.forward: fc1, a depthwise convolution (groups=dim) over the same axis, fc2.
SEGFORMER_FFN = FFN + biased("mlp.dwconv.dwconv", "ffn")
SEGFORMER_QUERY = biased("attention.q_proj", HEADS, "embed")
SEGFORMER_OUTPUT = biased("attention.o_proj", "embed", HEADS)
# SegformerAttention.forward: stage 0 reduces the sequence with a convolution before k and v,
# whose output channels are an axis of their own.
REDUCTION = "attention.sequence_reduction.sequence_reduction"
SEGFORMER_REDUCED = (
    biased(REDUCTION, "channels", "channels.2")
    + biased("attention.k_proj", HEADS, "channels")
    + biased("attention.v_proj", HEADS, "channels")
)
# SegformerDecodeHead.forward: `torch.cat(all_hidden_states[::-1], dim=1)`, one per stage.
SEGFORMER: Expectations = (
    biased("segformer.stages.0.patch_embeddings.proj", "embed", "channels")
    + each(
        "segformer.stages.0.blocks",
        2,
        SEGFORMER_QUERY,
        SEGFORMER_REDUCED,
        SEGFORMER_OUTPUT,
        SEGFORMER_FFN,
    )
    + biased("segformer.stages.1.patch_embeddings.proj", "embed", "channels")
    + each("segformer.stages.1.blocks", 2, attention("attention"), SEGFORMER_FFN)
    + biased("decode_head.linear_projections.0.proj", "channels", "embed")
    + biased("decode_head.linear_projections.1.proj", "channels", "embed")
    + weight("decode_head.linear_fuse", "channels.3", "[channels | channels.2]")
    + biased("decode_head.classifier", "classes", "channels")
)

VISION = {
    "ViT": VIT,
    "Swin": SWIN,
    "CLIP": CLIP,
    "ResNet": RESNET,
    "ConvNeXt": CONVNEXT,
    "SegFormer": SEGFORMER,
}
