"""Kernels of a trace are summed by kind, and what lies between them is idle."""

from __future__ import annotations

import pytest

from benchmarks.on_gpu.kernels import IDLE, kind_of, summed


def test_seconds_are_summed_by_kind_and_gaps_are_idle() -> None:
    spans = [
        (0.0, 4.0, "nvjet_tst_128x64"),
        (2.0, 3.0, "elementwise_kernel"),
        (6.0, 8.0, "nvjet_x"),
    ]
    found = summed(spans, steps=2)
    assert found.seconds["matrix product"] == pytest.approx(3e-6)  # 4 + 2, over two steps
    assert found.seconds["elementwise"] == pytest.approx(0.5e-6)
    assert found.seconds[IDLE] == pytest.approx(1e-6)  # from 4 to 6
    assert found.launched == 1.5
    name, seconds, calls = found.largest[0]
    assert (name, calls) == ("nvjet_tst_128x64", 0.5)
    assert seconds == pytest.approx(2e-6)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void pytorch_flash::flash_fwd_kernel<…>", "attention"),
        ("sm90_xmma_fprop_implicit_gemm_bf16", "convolution"),
        ("nvjet_hsh_256x128_64x4_2x1_v_bz_TNT", "matrix product"),
        (
            "multi_tensor_apply_kernel<FusedAdamMathFunctor>",
            "optimizer, clipping and copies of all weights",
        ),
        ("vectorized_layer_norm_kernel<c10::BFloat16>", "norm"),
        ("cunn_SoftMaxForward", "softmax, cross entropy"),
        ("triton_poi_fused_mul_silu_0", "compiled by inductor"),
        ("direct_copy_kernel_cuda, vectorized_elementwise_kernel", "copies and casts"),
        ("reduce_kernel<512, 1, MeanOps>", "reduction"),
    ],
)
def test_a_kernel_is_known_by_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind
