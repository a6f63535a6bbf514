"""The table of rules: one line per op, in the manner of einsum.

The letters say what may be split: a letter of operands and results is split in all of them alike; a
letter of operands alone is summed over, so a split of it leaves a partial sum; `[d]` is not split.
What is not here is never wrong, only slower: it is split along a recognisable batch, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypedDict, Unpack

from autopar.planner.graph import Op
from autopar.planner.rules import contractions, cuts
from autopar.planner.rules import factoring as f
from autopar.planner.rules import multiplying as m
from autopar.planner.rules import shapes as s
from autopar.planner.rules.computation import Computing
from autopar.planner.rules.rule import Linear, OpKind, Rule, Saved, Traffic
from autopar.planner.rules.shapes import ShapeFunction
from autopar.planner.rules.signature import Pattern

_FIRST, _JOINTLY, _EACH = Linear.FIRST, Linear.JOINTLY, Linear.EACH


class _Facts(TypedDict, total=False):
    """The columns of a line that most lines leave out."""

    computes: Computing
    kind: OpKind
    traffic: Traffic
    linear: Linear
    added: str
    sizes: str
    cuts: tuple[str, ...]


def _contraction(
    targets: str,
    shape: str | ShapeFunction,
    *,
    contracts: str,
    saves: str,
    names: str = "",
    **facts: Unpack[_Facts],
) -> list[Rule]:
    """Matrix products: 2·∏(letters) FLOPs for each group of letters."""
    facts = {"linear": _EACH, **facts}
    return _lines(targets, shape, saves, contracts=contracts, names=names, **facts)


def _convolution(targets: str, pattern: str, contracts: str, names: str) -> list[Rule]:
    return _lines(
        targets, Pattern.parse(pattern, g="groups"), "input if weight, weight if input",
        contracts=contracts, names=names, kind=OpKind.CONVOLUTION, linear=_EACH,
        computes=m.convolution,
    )  # fmt: skip


def _computing(targets: str, computes: Computing, saves: str = "*inputs, out") -> list[Rule]:
    """Ops of which nothing is known but their batch, and what they compute."""
    return _lines(targets, s.opaque, saves, computes=computes)


def _lines(
    targets: str,
    shape: Pattern | ShapeFunction | str,
    saves: str = "",
    *,
    names: str = "",
    contracts: str = "",
    **facts: Unpack[_Facts],
) -> list[Rule]:
    pairs = [pair.partition("=") for pair in names.split()]
    return [
        Rule(
            target=target,
            shape=Pattern.parse(shape) if isinstance(shape, str) else shape,
            contracts=tuple(filter(None, contracts.split(","))),
            saves=Saved.parse_all(saves),
            names=MappingProxyType({letter: name for letter, _, name in pairs}),
            **facts,
        )
        for target in targets.split()
    ]


def _moving(targets: str) -> list[Rule]:
    """Ops that multiply no matrices, and whose dims are not told: priced by the bytes they move."""
    return _lines(targets, s.opaque, "*inputs, out")


def _views(targets: str, shape: ShapeFunction, **facts: Unpack[_Facts]) -> list[Rule]:
    facts = {"linear": _JOINTLY, "traffic": Traffic.NONE, **facts}
    return _lines(targets, shape, **facts)


def _elementwise(targets: str, saves: str = "", **facts: Unpack[_Facts]) -> list[Rule]:
    return _lines(targets, s.elementwise, saves, **facts)


_NORM_SAVES = "input, weight if input"
_RECURRENT_SAVES = "input, data, hx, out, own(computed)"
_CELL_SAVES = "input, hx, own(computed)"

_RULES = (
    # --- contractions
    *_contraction(
        "linear", "input … i, weight o i, bias? o -> … o", contracts="… i o",
        saves="input if weight, weight if input",
    ),
    *_contraction(
        "addmm", contractions.added_product("mat1", "mat2"), contracts="m k n",
        saves="mat1 if mat2, mat2 if mat1", added="self",
    ),
    *_contraction("mm", "self m k, mat2 k n -> m n", contracts="m k n",
                  saves="self if mat2, mat2 if self"),
    *_contraction(
        "bmm", "self b m k, mat2 b k n -> b m n", contracts="b m k n",
        saves="self if mat2, mat2 if self", names="b=heads k=head_dim n=head_dim",
    ),
    *_contraction(
        "baddbmm", contractions.added_product("batch1", "batch2"), contracts="b m k n",
        saves="batch1 if batch2, batch2 if batch1", names="b=heads k=head_dim n=head_dim",
        added="self",
    ),
    *_contraction(
        "matmul", contractions.matmul, contracts="… m k n",
        saves="self if other, other if self", names="…=heads k=head_dim n=head_dim",
    ),
    *_contraction(  # of each group of rows by a matrix of its own
        "_grouped_mm", "self [n] i, mat2 [e] i o, offs? [g] -> n o", contracts="n i o",
        saves="self if mat2, mat2 if self", names="e=experts", computes=m.grouped("self", "mat2"),
    ),
    *_lines("outer", "self m, vec2 n -> m n", "self if vec2, vec2 if self", linear=_EACH),
    *_contraction("einsum", contractions.einsum, contracts="*", saves="tensors"),
    *_lines(
        "scaled_dot_product_attention", contractions.attention,
        "query, key, value, out, f32(… h q)", contracts="… h q t e,… h q t f",
        kind=OpKind.ATTENTION, computes=m.attention,
        names="h=heads k=kv_heads g=group e=head_dim f=head_dim q=seq t=seq",
    ),
    *_convolution(
        "conv1d conv1d.padding", "input n g·c [x], weight g·o c [k], bias? g·o -> n g·o [p]",
        "n g o c p k", "c=channels o=channels",
    ),
    *_convolution(
        "conv2d conv2d.padding",
        "input n g·c [y] [x], weight g·o c [j] [k], bias? g·o -> n g·o [p] [q]",
        "n g o c p q j k", "c=channels o=channels y=height x=width p=height q=width",
    ),
    *_convolution(
        "conv3d conv3d.padding", "input n g·c [z] [y] [x], weight g·o c [i] [j] [k], bias? g·o "
        "-> n g·o [r] [p] [q]", "n g o c r p q i j k", "c=channels o=channels",
    ),
    *_convolution(  # each input is spread over the weights of its channel
        "conv_transpose1d", "input n g·c [x], weight g·c o [k], bias? g·o -> n g·o [p]",
        "n g o c x k", "c=channels o=channels",
    ),
    *_convolution(
        "conv_transpose2d.input",
        "input n g·c [y] [x], weight g·c o [j] [k], bias? g·o -> n g·o [p] [q]",
        "n g o c y x j k", "c=channels o=channels y=height x=width p=height q=width",
    ),
    *_convolution(
        "conv_transpose3d.input", "input n g·c [z] [y] [x], weight g·c o [i] [j] [k], bias? g·o "
        "-> n g·o [r] [p] [q]", "n g o c z y x i j k", "c=channels o=channels",
    ),
    *_computing("convolution _convolution convolution_overrideable cudnn_convolution "
                "_slow_conv2d_forward conv_tbc", m.convolution, "input, self, weight"),
    # --- recurrent layers and cells: what is kept are the gates, and the states between steps
    *_computing("lstm.input lstm.data", m.recurrent(4, kept=6, unfused=1), _RECURRENT_SAVES),
    *_computing("gru.input gru.data", m.recurrent(3, kept=7, unfused=12), _RECURRENT_SAVES),
    *_computing("rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data",
                m.recurrent(1, kept=1, unfused=4), _RECURRENT_SAVES),
    *_computing("lstm_cell", m.cell(4, kept=6), _CELL_SAVES),
    *_computing("gru_cell", m.cell(3, kept=5), _CELL_SAVES),
    *_computing("rnn_tanh_cell rnn_relu_cell", m.cell(1, kept=1), _CELL_SAVES),
    # --- products of other forms
    *_computing("mv", m.matrices("self", "vec"), "self if vec, vec if self"),
    *_computing("addmv", m.matrices("mat", "vec"), "mat if vec, vec if mat"),
    *_computing("dot", m.matrices("self", "tensor"), "self if tensor, tensor if self"),
    *_computing("vdot linalg_matmul", m.matrices("self", "other"), "self if other, other if self"),
    *_computing("inner", m.rows_by_rows("self", "other"), "self if other, other if self"),
    *_computing("addbmm", m.summed_products, "batch1 if batch2, batch2 if batch1"),
    *_computing("tensordot", m.over_dims, "self if other, other if self"),
    *_computing("chain_matmul linalg_multi_dot", m.chain, "*inputs"),
    *_computing("matrix_power linalg_matrix_power", m.power),
    *_computing("bilinear", m.bilinear, "input1, input2, weight"),
    *_computing("cdist _cdist_forward", m.rows_by_rows("x1", "x2")),
    *_computing("_scaled_mm _scaled_mm_v2", m.matrices("self", "mat2")),
    *_computing("transformers.grouped_mm_fallback.default", m.grouped("input", "weight"),
                "input if weight, weight if input"),
    *_computing("_scaled_grouped_mm _scaled_grouped_mm_v2", m.grouped("self", "mat2")),
    *_computing("_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
                "_scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu "
                "_flash_attention_forward _efficient_attention_forward", m.attention),
    # --- linear algebra and Fourier transforms
    *_computing("inverse linalg_inv linalg_inv_ex", f.cubic(2, 4), "out"),
    *_computing("linalg_tensorinv", f.folded(2, 4), "out"),
    *_computing("linalg_solve linalg_solve_ex _linalg_solve_ex",
                f.solved(2 / 3, matrix=("A",), by=("B",))),
    *_computing("linalg_tensorsolve", f.folded(2 / 3, 4)),
    *_computing("linalg_solve_triangular", f.solved(0, matrix=("self",), by=("B",))),
    *_computing("triangular_solve", f.solved(0, matrix=("A",), by=("self",))),
    *_computing("linalg_lu_solve", f.solved(0, matrix=("LU",), by=("B",))),
    *_computing("cholesky_solve", f.solved(0, matrix=("input2",), by=("self",))),
    *_computing("cholesky linalg_cholesky linalg_cholesky_ex", f.cubic(1 / 3, 4), "out"),
    *_computing("cholesky_inverse", f.cubic(2 / 3, 4)),
    *_computing("linalg_ldl_factor", f.cubic(1 / 3, 4)),
    *_computing("linalg_lu linalg_lu_factor linalg_lu_factor_ex", f.cubic(2 / 3, 4), "out"),
    *_computing("det linalg_det slogdet linalg_slogdet logdet", f.cubic(2 / 3, 2)),
    *_computing("linalg_qr qr", f.factored(lambda m, n: 4 * m * n**2 - 4 / 3 * n**3,
                                           lambda m, n: 6 * m * n**2), "out"),
    *_computing("linalg_householder_product orgqr", f.factored(
        lambda m, n: 4 * m * n**2 - 4 / 3 * n**3, lambda m, n: 12 * m * n**2)),
    *_computing("linalg_svd svd pinverse linalg_pinv linalg_pinv.atol_rtol_tensor "
                "linalg_pinv.atol_rtol_float",
                f.factored(lambda m, n: 6 * m * n**2 + 20 * n**3, lambda m, n: 8 * m * n**2)),
    *_computing("linalg_svdvals linalg_cond linalg_matrix_rank linalg_matrix_norm.str_ord",
                f.factored(lambda m, n: 2 * m * n**2 + 2 * n**3, lambda m, n: 4 * m * n**2)),
    *_computing("linalg_eigh", f.cubic(9, 6), "out"),
    *_computing("linalg_eigvalsh", f.cubic(4 / 3, 4)),
    *_computing("linalg_eig", f.cubic(25, 8), "out"),
    *_computing("linalg_eigvals", f.cubic(10, 8)),
    # about eight products; the backward is that of a matrix twice as large
    *_computing("matrix_exp linalg_matrix_exp", f.cubic(16, 128), "self"),
    *_computing("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 "
                "fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn "
                "fft_hfftn fft_ihfftn _fft_c2c _fft_r2c _fft_c2r", f.fourier, ""),
    *_computing("stft stft.center istft", f.short_time_fourier, "window"),
    *_computing("ctc_loss.IntList ctc_loss.Tensor", f.connectionist),
    # --- look-ups
    *_lines("embedding", contractions.embedding, "indices", traffic=Traffic.GATHERED,
            kind=OpKind.LOOKUP, names="v=entries d=embed"),
    *_lines("embedding_bag embedding_bag.padding_idx", s.opaque, "indices, offsets, "
            "per_sample_weights, weight if per_sample_weights", traffic=Traffic.GATHERED,
            kind=OpKind.BAG, computes=m.bags),
    # --- norms and softmax
    *_lines("layer_norm", "input … [d], weight? d, bias? d -> … d",
            _NORM_SAVES + ", f32(…), f32(…)", kind=OpKind.NORM, names="d=embed"),
    *_lines("rms_norm", "input … [d], weight? d -> … d", _NORM_SAVES + ", f32(…)",
            kind=OpKind.NORM, names="d=embed"),
    *_lines("batch_norm", "input n c […], weight? c, bias? c, running_mean? c, "
            "running_var? c -> n c […]",
            _NORM_SAVES + ", f32(c), f32(c)", kind=OpKind.BATCH_NORM, names="c=channels"),
    *_lines("group_norm instance_norm", s.opaque, _NORM_SAVES, kind=OpKind.NORM),
    *_lines("softmax.int log_softmax.int _softmax.default", s.over("dim"), "out",
            kind=OpKind.SOFTMAX),
    *_lines("cross_entropy_loss", contractions.cross_entropy, "self(n v …), target",
            kind=OpKind.CROSS_ENTROPY, names="v=classes"),
    *_lines("nll_loss nll_loss_nd", "self n v …, target n …, weight? v ->", "target",
            kind=OpKind.CLASS_LOSS),
    *_lines("mse_loss smooth_l1_loss l1_loss huber_loss binary_cross_entropy_with_logits",
            s.paired, "self, target", kind=OpKind.LOSS),
    # --- elementwise
    *_elementwise("add.Tensor add_.Tensor", kind=OpKind.ADDITION, linear=_JOINTLY, added="other"),
    *_elementwise("sub.Tensor sub_.Tensor", kind=OpKind.SUBTRACTION, linear=_JOINTLY,
                  added="other"),
    *_elementwise("rsub.Scalar", linear=_JOINTLY, added="other"),
    *_elementwise("add.Scalar", kind=OpKind.ADDITION),
    *_elementwise("sub.Scalar", kind=OpKind.SUBTRACTION),
    *_elementwise("neg clone _to_copy", linear=_JOINTLY),
    *_elementwise("contiguous", kind=OpKind.CONTIGUOUS, linear=_JOINTLY),
    *_elementwise("to.dtype to.device to.dtype_layout", kind=OpKind.CAST, linear=_JOINTLY),
    *_lines("to.other type_as", s.of_type, kind=OpKind.CAST, linear=_FIRST),
    *_elementwise("mul.Tensor mul_.Tensor", "self if other, other if self", linear=_EACH),
    *_elementwise("mul.Scalar", linear=_JOINTLY),
    *_elementwise("div.Tensor div_.Tensor", "other if self, self if other"),
    *_elementwise("div.Scalar", linear=_JOINTLY),
    *_elementwise("gelu silu log softplus elu sin cos mish", "self", kind=OpKind.EXPONENTIAL),
    *_elementwise("tanh sigmoid exp tanh_ sigmoid_", "out", kind=OpKind.EXPONENTIAL),
    *_elementwise("erf", kind=OpKind.EXPONENTIAL),
    *_elementwise("pow.Tensor_Scalar abs hardtanh hardswish leaky_relu clamp", "self"),
    *_elementwise("relu relu_ rsqrt sqrt reciprocal", "out"),
    *_elementwise("pow.Scalar", "out"),
    *_elementwise("pow.Tensor_Tensor", "self, exponent, out"),
    *_elementwise("clamp_min clamp_max log_sigmoid square celu selu relu6 hardsigmoid hardshrink "
                  "softshrink threshold logit expm1 exp2 log2 log10 tan sinh cosh asin acos atan "
                  "asinh acosh atanh sinc erfc lgamma special_entr nan_to_num", "self"),
    *_lines("prelu _prelu_kernel", s.opaque, "self, weight"),
    *_elementwise("atan2 hypot logaddexp logaddexp2 xlogy.Tensor clamp.Tensor clamp_min.Tensor "
                  "clamp_max.Tensor", "*inputs"),
    *_elementwise("dropout dropout_ feature_dropout", "bool(*) when fused, noise(*) when unfused",
                  kind=OpKind.DROPOUT),
    *_elementwise("where.self", "condition"),
    *_elementwise("where.ScalarOther where.ScalarSelf where.Scalar", "condition"),
    *_elementwise("masked_fill.Scalar masked_fill_.Scalar masked_fill.Tensor", "mask"),
    *_elementwise("maximum minimum min.other max.other", "self, other"),
    *_elementwise("eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar "
                  "gt.Tensor gt.Scalar ge.Tensor ge.Scalar logical_not logical_and logical_or "
                  "logical_xor bitwise_not isnan isinf floor ceil round sign floor_divide "
                  "remainder.Scalar remainder.Tensor log1p copy_ fill_ fill_.Scalar detach "
                  "zeros_like ones_like full_like rand_like randn_like "
                  "empty_like bernoulli bernoulli_.float"),
    *_elementwise("__and__.Tensor __and__.Scalar bitwise_and.Tensor bitwise_and.Scalar "
                  "__or__.Tensor __or__.Scalar bitwise_or.Tensor bitwise_or.Scalar "
                  "__xor__.Tensor __xor__.Scalar bitwise_xor.Tensor bitwise_xor.Scalar "
                  "__iand__.Tensor __iand__.Scalar __ior__.Tensor __ior__.Scalar "
                  "__ixor__.Tensor __ixor__.Scalar __lshift__.Scalar __rshift__.Scalar"),
    # --- views
    *_views("view _unsafe_view", s.reshape, sizes="size"),
    *_views("unsqueeze squeeze squeeze.dim squeeze.dims flatten.using_ints", s.reshape),
    *_views("unflatten.int", s.reshape, cuts=("sizes",)),
    *_views("reshape", s.reshape, kind=OpKind.CONTIGUOUS, sizes="shape"),
    *_views("transpose.int transpose_", s.permuted(s.transpose_order)),
    *_views("permute", s.permuted(s.permute_order)),
    *_views("t numpy_T", s.permuted(s.reversed_order)),
    *_views("mT", s.permuted(s.matrix_order)),
    *_views("expand broadcast_to", s.expanded, kind=OpKind.EXPAND, sizes="size"),
    *_views("expand_as", s.expanded_as, kind=OpKind.EXPAND, linear=_FIRST),
    *_views("broadcast_tensors", s.broadcast),
    *_views("chunk tensor_split.sections", cuts.split, kind=OpKind.PARTS),
    *_views("split.Tensor split.sizes", cuts.split, kind=OpKind.PARTS, cuts=("split_size",)),
    *_views("split_with_sizes", cuts.split, kind=OpKind.PARTS, cuts=("split_sizes",)),
    *_lines("tensor_split.indices tensor_split.tensor_indices_or_sections", s.opaque,
            "*inputs, out", kind=OpKind.PARTS),
    *_views("slice.Tensor", cuts.sliced, kind=OpKind.PART, cuts=("start", "end")),
    *_views("narrow", cuts.sliced, kind=OpKind.PART, cuts=("start", "length")),
    *_views("select.int unbind.int", cuts.selected, kind=OpKind.PART),
    # --- moving data
    *_lines("cat", cuts.cat, linear=_JOINTLY),
    *_lines("stack", cuts.stack, linear=_JOINTLY),
    *_lines("repeat", s.repeated, kind=OpKind.REPEAT, linear=_JOINTLY),
    *_lines("repeat_interleave.self_int", s.interleaved, kind=OpKind.REPEAT, linear=_JOINTLY),
    *_lines("pad constant_pad_nd", cuts.padded, linear=_JOINTLY, added="value"),
    *_lines("slice_scatter select_scatter", cuts.scattered, linear=_JOINTLY),
    *_lines("index.Tensor", cuts.indexed, "indices", traffic=Traffic.GATHERED, linear=_FIRST),
    *_lines("gather", cuts.gathered, "index", traffic=Traffic.GATHERED, linear=_FIRST),
    *_lines("im2col col2im", s.opaque),
    *_lines("index_add index_add_ index_copy index_copy_ index_fill.int_Scalar index_select "
            "scatter.src scatter.value scatter_.src scatter_.value scatter_add scatter_add_ "
            "index_put index_put_ masked_select masked_scatter masked_scatter_",
            s.opaque, "index, indices, mask"),
    *_moving("scatter_reduce.two scatter_reduce_.two take_along_dim one_hot nonzero where "
             "unfold diagonal diag_embed tril_ triu_ rot90 pixel_shuffle pixel_unshuffle "
             "channel_shuffle hstack vstack concat concatenate repeat_interleave.Tensor real imag "
             "view_as_real view_as_complex complex polar resolve_conj histc bincount searchsorted "
             "bucketize unique_dim _unique2 cumprod cummax logcumsumexp kthvalue median.dim mode"),
    *_moving("max_pool1d max_pool3d max_pool1d_with_indices max_pool2d_with_indices avg_pool3d "
             "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d "
             "upsample_nearest1d.vec upsample_nearest3d.vec upsample_linear1d.vec "
             "upsample_trilinear3d.vec _upsample_nearest_exact2d.vec grid_sampler "
             "affine_grid_generator rrelu glu cosine_similarity pairwise_distance "
             "kl_div binary_cross_entropy normal_functional addcmul addcdiv lerp.Tensor "
             "lerp.Scalar kron linalg_cross"),
    *_lines("roll flip", s.over("dims"), linear=_JOINTLY),
    # --- reductions
    *_lines("sum sum.dim_IntList", s.reduced(partial=True), kind=OpKind.SUM, linear=_JOINTLY),
    *_lines("mean mean.dim", s.reduced(partial=True), kind=OpKind.MEAN, linear=_JOINTLY),
    *_lines("amax amin argmax argmin max.dim min.dim max min any all any.dim all.dim",
            s.reduced(partial=False)),
    *_lines("linalg_vector_norm norm.Scalar norm.ScalarOpt_dim logsumexp prod prod.dim_int std "
            "std.dim std.correction var var.dim var.correction", s.reduced(partial=False),
            "self, out"),
    *_lines("cumsum sort topk argsort diff", s.over("dim")),
    # --- pooling and resizing
    *_lines("max_pool2d", "self n c [y] [x] -> n c [p] [q]", "self, i64(n c p q)"),
    *_lines("avg_pool2d adaptive_avg_pool2d", "self n c [y] [x] -> n c [p] [q]", linear=_JOINTLY),
    *_lines("adaptive_avg_pool1d avg_pool1d", "self n c [x] -> n c [p]", linear=_JOINTLY),
    *_lines("upsample_bilinear2d.vec upsample_nearest2d.vec upsample_bicubic2d.vec",
            "input n c [y] [x] -> n c [p] [q]", linear=_JOINTLY),
    # --- made from nothing
    *_lines("arange arange.start arange.start_step", s.made, kind=OpKind.RANGE),
    *_lines("new_ones new_zeros new_full new_empty", s.made, kind=OpKind.NEW),
    *_lines("zeros ones full empty rand randn scalar_tensor linspace eye tril triu", s.made),
)  # fmt: skip


def _full_name(target: str) -> str:
    """Complete an op's name; one of a library stands with all three parts."""
    if target.count(".") == 2:
        return target
    return f"aten.{target}" if "." in target else f"aten.{target}.default"


TABLE: Mapping[str, Rule] = MappingProxyType({_full_name(rule.target): rule for rule in _RULES})

_UNKNOWN = Rule(target="", shape=s.opaque, saves=Saved.parse_all("*inputs, out"))


def rule_of(target: str) -> Rule:
    """Return the rule of an op; an op that has none gets the one that knows only the batch."""
    return TABLE.get(target, _UNKNOWN)


def kind_of(op: Op) -> OpKind:
    """Return what sort of op it is."""
    return rule_of(op.target).kind


def has_rule(target: str) -> bool:
    """Whether the table says what the dims of an op are."""
    return rule_of(target).shape is not s.opaque


def has_line(target: str) -> bool:
    """Whether the table says what an op computes, even if not what its dims are."""
    return target in TABLE
