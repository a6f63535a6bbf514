"""The models of other libraries that the trial takes: of each family the smallest, of all tasks."""

from __future__ import annotations

from collections.abc import Mapping

from tests.field.cells import MODELS, Subject
from tests.field.models.any_type import types_of


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "timm": _names(
        """
        cait_xxs24_224 coat_tiny convit_tiny cpubone_nano crossvit_tiny_240 cs3darknet_focus_s
        cspnext_tiny csatv2 deit_tiny_patch16_224 densenet121 dla34 dpn68 edgenext_xx_small
        efficientformer_l1 efficientformerv2_s0 efficientvim_m1 efficientvit_b0 efficientvit_m0
        ese_vovnet19b_slim_dw eva02_tiny_patch14_224 fasternet_t0 fastvit_s12 gcvit_xxtiny
        ghostnet_050 halonet_h1 hardcorenas_b hgnetv2_b0 hrnet_w18_small iformer_s
        inception_next_atto lcnetv2_small legacy_seresnet18 lowformer_b0 mobilenetv3_small_050
        mobilevit_xxs pit_xs_224 pvt_v2_b0 regnetx_002 repghostnet_050 repvit_m1 resnest14d
        resnetv2_18 rexnet_100 shvit_s1 skresnet18 starnet_s050 swiftformer_xs test_byobnet
        test_coatnet test_convnext test_efficientnet test_mambaout test_nfnet test_resnet test_vit
        test_vit_relpos tiny_vit_5m_224 visformer_tiny vit_tiny_r_s16_p8_224 xcit_nano_12_p8_224
        """
    ),
    "torchvision": _names(
        """
        alexnet convnext_tiny deeplabv3_mobilenet_v3_large densenet121 efficientnet_b0
        fcn_resnet50 googlenet inception_v3 lraspp_mobilenet_v3_large maxvit_t mc3_18 mnasnet0_5
        mobilenet_v2 mobilenet_v3_small mvit_v2_s r2plus1d_18 r3d_18 regnet_x_400mf resnet18 s3d
        shufflenet_v2_x0_5 squeezenet1_1 swin3d_t swin_t swin_v2_t vgg11 vit_b_16
        """
    ),
}


def kinds_of(task: str) -> tuple[str, ...]:
    """Return the models of a library, or the types that transformers has for a task."""
    return LIBRARIES[task] if task in LIBRARIES else types_of(task)


def subject_of(task: str, kind: str, *, cache: bool = False) -> Subject:
    """Return the model of a library, or the type that transformers has for a task.

    cache: as it comes, where it comes with a cache of keys and values.
    """
    if task in LIBRARIES:
        return Subject(path=MODELS / f"any_{task}.py", arguments=(f"kind={kind}",))
    arguments = (f"kind={kind}", f"task={task}", *(["cache=true"] if cache else []))
    return Subject(path=MODELS / "any_type.py", arguments=arguments)
