"""Every published size has the published number of parameters."""

import pytest
import torch

from tests.models_zoo.model_files import MODEL_FILES, load

# Counted once per tied tensor. Where a comment works nothing out by hand, `transformers` counts the
# same for the published shape: test_counts_against_transformers.py.
PUBLISHED = {
    ("gpt2", "124m"): 124_439_808,
    ("gpt2", "355m"): 354_823_168,
    ("gpt2", "774m"): 774_030_080,
    ("gpt2", "1.5b"): 1_557_611_200,
    # Brown et al. 2020, table 2.1 says 175.0 B. By hand, for L layers of width d over V words and
    # S places: L (12 d² + 13 d) + V d + S d + 2 d with 96, 12288, 50257, 2048.
    ("gpt2", "175b"): 174_604_259_328,
    ("llama", "1b"): 1_235_814_400,
    ("llama", "8b"): 8_030_261_248,
    ("llama", "70b"): 70_553_706_496,
    ("llama", "405b"): 405_853_388_800,
    ("bert", "base"): 109_514_298,
    ("bert", "large"): 335_174_458,
    ("t5", "small"): 60_506_624,
    ("t5", "base"): 222_903_552,
    ("t5", "large"): 737_668_096,
    ("t5", "3b"): 2_851_598_336,
    ("t5", "11b"): 11_307_321_344,
    ("vit", "b16"): 86_567_656,  # also num_params of torchvision's vit_b_16
    ("vit", "l16"): 304_326_632,
    ("vit", "h14"): 632_045_800,
    # Option A (below) and two shortcuts of a convolution and a norm: + 16·32 + 2·32 + 32·64 + 2·64.
    ("resnet", "20"): 272_474,
    ("resnet", "50"): 25_557_032,  # also torchvision's resnet50
    # PyTorch's quickstart, by hand: 784·512 + 512 + 512·512 + 512 + 512·10 + 10.
    ("mnist", "512"): 669_706,
    # PyTorch's text classification tutorial (95811 words, 64 wide), by hand: 95811·64 + 64·4 + 4.
    ("intent", "ag_news"): 6_132_164,
    # Rows of Criteo's Kaggle data are counted in the data: 33,762,577 · 16 in tables. By hand, of
    # the reference's perceptrons: 13-512-256-64-16, and of 16 + 27 · 26 / 2 = 367, 512-256-1.
    ("dlrm", "kaggle"): 540_201_232 + 155_984 + 320_001,
    # The tutorial's shape (200 wide and inside, 2 layers) over the 33278 words of WikiText-2
    # (Merity et al. 2016, table 1). By hand: 33278·200 in, 33278·200 + 33278 out, and per layer
    # 4 (200² + 200) attention, 2 (200² + 200) feed-forward, 4·200 norms = 242000.
    ("transformer_lm", "wikitext2"): 13_828_478,
}


def parameters_of(name: str, **arguments: str) -> int:
    with torch.device("meta"):
        model = load(name).build_model(**arguments)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "size"), PUBLISHED)
def test_a_size_has_the_published_number_of_parameters(name: str, size: str) -> None:
    assert parameters_of(name, size=size) == PUBLISHED[name, size]


@pytest.mark.parametrize("name", MODEL_FILES)
def test_every_size_but_tiny_has_a_published_number(name: str) -> None:
    checked = {size for file, size in PUBLISHED if file == name}
    assert set(load(name).SIZES) == checked | {"tiny"}


def test_resnet_20_without_parameters_in_shortcuts_has_the_number_of_option_a() -> None:
    # By hand: stem 3·16·9 + 2·16 = 464; stage 16 wide 6 (16·16·9 + 2·16) = 14016;
    # stage 32 wide 16·32·9 + 5·32·32·9 + 6·2·32 = 51072; stage 64 wide 203520 in the same way;
    # head 64·10 + 10 = 650. He et al. 2015, table 6, say 0.27 M.
    assert parameters_of("resnet", size="20", shortcut="pad") == 269_722


def test_group_norm_has_the_parameters_of_batch_norm() -> None:
    assert parameters_of("resnet", size="50", norm="group") == PUBLISHED["resnet", "50"]


@pytest.mark.parametrize("name", MODEL_FILES)
def test_an_unknown_size_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r"'huge' is unknown; there are: tiny, "):
        load(name).build_model(size="huge")
