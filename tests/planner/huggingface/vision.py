"""Vision models, and vision with text, as tiny families."""

from types import MappingProxyType

import torch
from transformers import (
    CLIPConfig,
    CLIPModel,
    ConvNextConfig,
    ConvNextForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from tests.planner.huggingface.family import Batch, Family, class_ids, token_ids

COLOURS, CLASSES, VOCAB, LENGTH = 3, 11, 99, 14
SQUARE, WIDE, WINDOWED = (20, 20), (32, 64), (48, 80)


def pixels(batch_size: int, size: tuple[int, int]) -> torch.Tensor:
    """Draws pictures."""
    return torch.randn(batch_size, COLOURS, *size)


def square_batch(batch_size: int) -> Batch:
    """Makes square pictures with one class each."""
    return {"pixel_values": pixels(batch_size, SQUARE), "labels": class_ids(batch_size, CLASSES)}


def swin_batch(batch_size: int) -> Batch:
    """Makes pictures whose two sides differ in the number of windows."""
    return {"pixel_values": pixels(batch_size, WINDOWED), "labels": class_ids(batch_size, CLASSES)}


def wide_batch(batch_size: int) -> Batch:
    """Makes wide pictures with one class each."""
    return {"pixel_values": pixels(batch_size, WIDE), "labels": class_ids(batch_size, CLASSES)}


def segmentation_batch(batch_size: int) -> Batch:
    """Makes wide pictures with one class per pixel."""
    labels = torch.randint(0, CLASSES, (batch_size, *WIDE))
    return {"pixel_values": pixels(batch_size, WIDE), "labels": labels}


def caption_batch(batch_size: int) -> Batch:
    """Makes pictures and their captions, each ending in the end-of-text token."""
    ids = token_ids(batch_size, LENGTH, VOCAB)
    ids[:, -1] = VOCAB - 1
    return {"input_ids": ids, "pixel_values": pixels(batch_size, SQUARE)}


class ContrastiveCLIP(CLIPModel):  # type: ignore[misc]
    """CLIP that always returns its contrastive loss, which otherwise has to be asked for."""

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> object:
        """Calls CLIP with `return_loss`."""
        return super().forward(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)


def sizes(**axes: tuple[int, ...]) -> MappingProxyType[str, tuple[int, ...]]:
    """Gives each axis its sizes, stage after stage."""
    return MappingProxyType({"classes": (CLASSES,), **axes})


VISION = (
    Family(
        name="ViT",
        model_class=ViTForImageClassification,
        config=ViTConfig(
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=6,
            intermediate_size=80,
            image_size=SQUARE[0],
            patch_size=5,
            num_labels=CLASSES,
        ),
        inputs=square_batch,
        sizes=sizes(embed=(48,), heads=(6,), head_dim=(8,), ffn=(80,), channels=(COLOURS,)),
    ),
    Family(
        name="Swin",  # the second stage has twice the embedding of the first
        model_class=SwinForImageClassification,
        config=SwinConfig(
            image_size=WINDOWED,
            patch_size=2,
            embed_dim=20,
            depths=[2, 2],
            num_heads=[2, 5],
            window_size=4,
            mlp_ratio=3.0,
            num_labels=CLASSES,
        ),
        inputs=swin_batch,
        sizes=sizes(
            embed=(20, 40), heads=(2, 5), head_dim=(10, 8), ffn=(60, 120), channels=(COLOURS,)
        ),
    ),
    Family(
        name="CLIP",
        model_class=ContrastiveCLIP,
        config=CLIPConfig(
            text_config={
                "vocab_size": VOCAB,
                "hidden_size": 48,
                "intermediate_size": 80,
                "num_hidden_layers": 2,
                "num_attention_heads": 6,
                "max_position_embeddings": 21,
                "pad_token_id": 1,
                "bos_token_id": 0,
                "eos_token_id": VOCAB - 1,
            },
            vision_config={
                "hidden_size": 60,
                "intermediate_size": 88,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": SQUARE[0],
                "patch_size": 5,
            },
            projection_dim=36,
        ),
        inputs=caption_batch,
        sizes=sizes(
            vocab=(VOCAB,),
            embed=(48, 60),
            heads=(6, 4),
            head_dim=(8, 15),
            ffn=(80, 88),
            projection=(36,),
            channels=(COLOURS,),
        ),
    ),
    Family(
        name="ResNet",
        model_class=ResNetForImageClassification,
        config=ResNetConfig(
            embedding_size=12,
            hidden_sizes=[40, 56],
            depths=[2, 2],
            layer_type="bottleneck",
            num_labels=CLASSES,
        ),
        inputs=wide_batch,
        sizes=sizes(channels=(COLOURS, 12, 40, 56, 10, 14)),
    ),
    Family(
        name="ConvNeXt",  # its ffn is always four times its channels
        model_class=ConvNextForImageClassification,
        config=ConvNextConfig(
            num_stages=2, hidden_sizes=[20, 36], depths=[2, 2], num_labels=CLASSES
        ),
        inputs=wide_batch,
        sizes=sizes(channels=(COLOURS, 20, 36), ffn=(80, 144)),
    ),
    Family(
        name="SegFormer",
        model_class=SegformerForSemanticSegmentation,
        config=SegformerConfig(
            num_encoder_blocks=2,
            depths=[2, 2],
            sr_ratios=[4, 1],
            hidden_sizes=[20, 48],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[2, 6],
            mlp_ratios=[3, 2],
            decoder_hidden_size=56,
            num_labels=CLASSES,
        ),
        inputs=segmentation_batch,
        sizes=sizes(
            embed=(20, 48),
            heads=(2, 6),
            head_dim=(10, 8),
            ffn=(60, 96),
            channels=(COLOURS, 20, 48, 56),
        ),
    ),
)
