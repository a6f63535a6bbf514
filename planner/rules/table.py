"""The table of rules: one row per op, similar to einsum.

A letter stands for a dim that may be split. It is split in all operands and results that have it;
if only operands have it, it is summed over, so splitting it leaves a partial sum. `[d]` is not
split.
Without a row, an op's plan is not wrong, only slower: the op is split along its batch dim if its
sizes show one, and else not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType

from autopar.planner.cluster.cluster import Collective
from autopar.planner.graph.layouts import WHOLE
from autopar.planner.graph.ops import Op
from autopar.planner.rules import contractions as c
from autopar.planner.rules import products as m
from autopar.planner.rules import shapes as s
from autopar.planner.rules.rule import (
    Linear,
    OpKind,
    Rule,
    SavedForBackward,
    SplitForm,
    Traffic,
    computing,
    lines,
)

_NO, _FIRST, _JOINTLY, _EACH = Linear.NO, Linear.FIRST, Linear.JOINTLY, Linear.EACH


_contraction = partial(lines, linear=_EACH, alike="*inputs")
_factoring = partial(computing, is_wide=True)
_convolution = partial(
    _contraction,
    saves="input if weight, weight if input",
    kind=OpKind.CONVOLUTION,
    computes=m.convolution,
)
_elementwise = partial(lines, shape=s.elementwise, is_elementwise=True)
_views = partial(lines, kind=OpKind.VIEW, linear=_JOINTLY, traffic=Traffic.NONE)
# Ops without matrix products and with unknown dims: priced by the bytes they move.
_moving = partial(lines, shape=s.opaque, saves="*inputs, out")
_NORM_SAVES = "input, weight if input"
_RUNNING = ("running_mean", "running_var")
_SINGULAR_VALUES = m.factored(lambda m, n: 2 * m * n**2 + 2 * n**3, lambda m, n: 4 * m * n**2)
_RECURRENT_SAVES = "input, data, hx, out, own(computed)"
_CELL_SAVES = "input, hx, own(computed)"

_RULES = (
    # --- contractions
    *_contraction("linear", "input … i, weight o i, bias? o -> … o", contracts="… i o",
                  saves="input if weight, weight if input"),
    *_contraction("addmm", c.added_product("mat1", "mat2"), contracts="m k n",
                  saves="mat1 if mat2, mat2 if mat1", added="self"),
    *_contraction("mm", "self m k, mat2 k n -> m n", contracts="m k n",
                  saves="self if mat2, mat2 if self"),
    *_contraction("bmm", "self b m k, mat2 b k n -> b m n", contracts="b m k n",
                  saves="self if mat2, mat2 if self", names="b=heads k=head_dim n=head_dim"),
    *_contraction("baddbmm", c.added_product("batch1", "batch2"), contracts="b m k n",
                  saves="batch1 if batch2, batch2 if batch1",
                  names="b=heads k=head_dim n=head_dim", added="self"),
    *_contraction("matmul", c.matmul, contracts="… m k n",
                  saves="self if other, other if self", names="…=heads k=head_dim n=head_dim"),
    *_contraction(  # each group of rows times its own matrix
        "_grouped_mm", "self [n] i, mat2 [e] i o, offs? [g] -> n o", contracts="n i o",
        saves="self if mat2, mat2 if self", names="e=experts", computes=m.grouped("self", "mat2"),
        kind=OpKind.GROUPED, alike="self mat2",
    ),
    *lines("outer", "self m, vec2 n -> m n", "self if vec2, vec2 if self", linear=_EACH),
    *_contraction("einsum", c.einsum, contracts="*", saves="tensors", alike=""),
    *lines("scaled_dot_product_attention", c.attention,
           "query, key, value, out, f32(… h q)", contracts="… h q t e,… h q t f",
           kind=OpKind.ATTENTION, computes=m.attention,
           names="h=heads k=kv_heads g=group e=head_dim f=head_dim q=seq t=seq"),
    *_convolution("conv1d conv1d.padding",
                  "input n g·c [x], weight g·o c [k], bias? g·o -> n g·o [p]",
                  contracts="n g o c p k", names="c=channels o=channels"),
    *_convolution("conv2d conv2d.padding",
                  "input n g·c [y] [x], weight g·o c [j] [k], bias? g·o -> n g·o [p] [q]",
                  contracts="n g o c p q j k",
                  names="c=channels o=channels y=height x=width p=height q=width"),
    *_convolution("conv3d conv3d.padding", "input n g·c [z] [y] [x], weight g·o c [i] [j] [k], "
                  "bias? g·o -> n g·o [r] [p] [q]",
                  contracts="n g o c r p q i j k", names="c=channels o=channels"),
    # in the next three, each input is spread over its channel's weights
    *_convolution("conv_transpose1d", "input n g·c [x], weight g·c o [k], bias? g·o -> n g·o [p]",
                  contracts="n g o c x k", names="c=channels o=channels"),
    *_convolution("conv_transpose2d.input",
                  "input n g·c [y] [x], weight g·c o [j] [k], bias? g·o -> n g·o [p] [q]",
                  contracts="n g o c y x j k",
                  names="c=channels o=channels y=height x=width p=height q=width"),
    *_convolution("conv_transpose3d.input", "input n g·c [z] [y] [x], weight g·c o [i] [j] [k], "
                  "bias? g·o -> n g·o [r] [p] [q]",
                  contracts="n g o c z y x i j k", names="c=channels o=channels"),
    *computing("convolution _convolution convolution_overrideable cudnn_convolution "
                "_slow_conv2d_forward conv_tbc", m.convolution, "input, self, weight"),
    # --- recurrent layers and cells: gates, and states between steps, are saved
    *computing("lstm.input lstm.data", m.recurrent(4, kept=6, unfused=1), _RECURRENT_SAVES,
                kind=OpKind.RECURRENT),
    *computing("gru.input gru.data", m.recurrent(3, kept=7, unfused=12), _RECURRENT_SAVES,
                kind=OpKind.RECURRENT),
    *computing("rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data",
                m.recurrent(1, kept=1, unfused=4), _RECURRENT_SAVES,
                kind=OpKind.RECURRENT),
    *computing("lstm_cell", m.cell(4, kept=6), _CELL_SAVES, kind=OpKind.RECURRENT),
    *computing("gru_cell", m.cell(3, kept=5), _CELL_SAVES, kind=OpKind.RECURRENT),
    *computing("rnn_tanh_cell rnn_relu_cell", m.cell(1, kept=1), _CELL_SAVES,
                kind=OpKind.RECURRENT),
    # --- products of other forms
    *computing("mv", m.matrices("self", "vec"), "self if vec, vec if self", linear=_EACH),
    *computing("addmv", m.matrices("mat", "vec"), "mat if vec, vec if mat"),
    *computing("dot", m.matrices("self", "tensor"), "self if tensor, tensor if self",
                linear=_EACH),
    *computing("vdot linalg_matmul", m.matrices("self", "other"), "self if other, other if self"),
    *computing("inner", m.rows_by_rows("self", "other"), "self if other, other if self"),
    *computing("addbmm", m.summed_products, "batch1 if batch2, batch2 if batch1"),
    *computing("tensordot", m.over_dims, "self if other, other if self"),
    *computing("chain_matmul linalg_multi_dot", m.chain, "*inputs"),
    *computing("matrix_power linalg_matrix_power", m.power),
    *computing("bilinear", m.bilinear, "input1, input2, weight"),
    *computing("cdist _cdist_forward", m.rows_by_rows("x1", "x2"), is_wide=True),
    *computing("pdist", m.rows_by_rows("self", "self"), is_wide=True),
    *computing("_scaled_mm _scaled_mm_v2", m.matrices("self", "mat2")),
    *computing("transformers.grouped_mm_fallback.default", m.grouped("input", "weight"),
                "input if weight, weight if input", kind=OpKind.GROUPED),
    *computing("_scaled_grouped_mm _scaled_grouped_mm_v2", m.grouped("self", "mat2")),
    *computing("_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
                "_scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu "
                "_flash_attention_forward _efficient_attention_forward", m.attention),
    # --- linear algebra and Fourier transforms
    *_factoring("inverse linalg_inv linalg_inv_ex", m.cubic(2, 4), "out"),
    *_factoring("linalg_tensorinv", m.folded(2, 4), "out"),
    *_factoring("linalg_solve linalg_solve_ex _linalg_solve_ex",
                m.solved(2 / 3, matrix="A", by="B")),
    *_factoring("linalg_tensorsolve", m.folded(2 / 3, 4)),
    *_factoring("linalg_solve_triangular", m.solved(0, matrix="self", by="B")),
    *_factoring("triangular_solve", m.solved(0, matrix="A", by="self")),
    *_factoring("linalg_lu_solve", m.solved(0, matrix="LU", by="B")),
    *_factoring("cholesky_solve", m.solved(0, matrix="input2", by="self")),
    *_factoring("cholesky linalg_cholesky linalg_cholesky_ex", m.cubic(1 / 3, 4), "out"),
    *_factoring("cholesky_inverse", m.cubic(2 / 3, 4)),
    *_factoring("linalg_ldl_factor", m.cubic(1 / 3, 4)),
    *_factoring("linalg_lu linalg_lu_factor linalg_lu_factor_ex", m.cubic(2 / 3, 4), "out"),
    *_factoring("det linalg_det slogdet linalg_slogdet logdet", m.cubic(2 / 3, 2), linear=_NO),
    *_factoring("linalg_qr qr", m.factored(lambda m, n: 4 * m * n**2 - 4 / 3 * n**3,
                                           lambda m, n: 6 * m * n**2), "out"),
    *_factoring("linalg_householder_product orgqr", m.factored(
        lambda m, n: 4 * m * n**2 - 4 / 3 * n**3, lambda m, n: 12 * m * n**2)),
    *_factoring("linalg_svd svd pinverse linalg_pinv linalg_pinv.atol_rtol_tensor "
                "linalg_pinv.atol_rtol_float",
                m.factored(lambda m, n: 6 * m * n**2 + 20 * n**3, lambda m, n: 8 * m * n**2)),
    *_factoring("linalg_svdvals linalg_cond linalg_matrix_rank", _SINGULAR_VALUES, linear=_NO),
    *computing("linalg_matrix_norm.str_ord", _SINGULAR_VALUES, linear=_NO),
    *_factoring("linalg_lstsq", m.factored(lambda m, n: 2 * m * n**2, lambda m, n: 6 * m * n**2)),
    *_moving("linalg_matrix_norm", linear=_NO),
    *_factoring("linalg_eigh", m.cubic(9, 6), "out"),
    *_factoring("linalg_eigvalsh", m.cubic(4 / 3, 4)),
    *_factoring("linalg_eig", m.cubic(25, 8), "out"),
    *_factoring("linalg_eigvals", m.cubic(10, 8)),
    # about eight products of n × n; the backward is the exponential of a 2·n × 2·n matrix
    *computing("matrix_exp linalg_matrix_exp", m.cubic(16, 128), "self"),
    *computing("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 "
                "fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn "
                "fft_hfftn fft_ihfftn _fft_c2c _fft_r2c _fft_c2r", m.fourier, "", is_wide=True),
    *_factoring("stft stft.center istft", m.short_time_fourier, "window"),
    *_factoring("ctc_loss.IntList ctc_loss.Tensor", m.connectionist),
    # --- look-ups
    *lines("embedding", c.embedding, "indices", traffic=Traffic.GATHERED,
           kind=OpKind.LOOKUP, names="v=entries d=embed",
           split_form=SplitForm(letter="v", function="vocab_parallel_embedding")),
    *lines("embedding_bag embedding_bag.padding_idx", c.bags, "indices, offsets, "
           "per_sample_weights, weight if per_sample_weights", traffic=Traffic.BAGGED,
           kind=OpKind.BAG, computes=m.bags, alike="weight per_sample_weights",
           names="v=vocab d=embed",
           split_form=SplitForm(letter="v", function="vocab_parallel_embedding_bag")),
    # --- norms and softmax
    *lines("layer_norm", "input … [d], weight? d, bias? d -> … d",
           _NORM_SAVES + ", f32(…), f32(…)", kind=OpKind.NORM, names="d=embed", alike="*inputs"),
    *lines("rms_norm", "input … [d], weight? d -> … d", _NORM_SAVES + ", f32(…)",
           kind=OpKind.NORM, names="d=embed"),
    *lines("batch_norm", "input n c […], weight? c, bias? c, running_mean? c, "
           "running_var? c -> n c […]",
           _NORM_SAVES + ", f32(c), f32(c)", kind=OpKind.BATCH_NORM, names="c=channels",
           updates=_RUNNING),
    *lines("group_norm", s.opaque, _NORM_SAVES, kind=OpKind.NORM, alike="*inputs"),
    *lines("instance_norm", s.opaque, _NORM_SAVES, kind=OpKind.NORM, updates=_RUNNING),
    *lines("softmax.int log_softmax.int _softmax.default", s.over("dim"), "out",
           kind=OpKind.SOFTMAX, linear=_NO),
    *lines("cross_entropy_loss", c.cross_entropy, "self(n v …), target",
           kind=OpKind.CROSS_ENTROPY, names="v=classes", alike="self weight",
           split_form=SplitForm(
               # a row's maximum, sum of exponentials, target logit and sum of logits
               letter="v", function="vocab_parallel_cross_entropy", gives=WHOLE,
               sends=((Collective.ALL_GATHER, 4),))),
    *lines("nll_loss nll_loss_nd", "self n v …, target n …, weight? v ->", "target",
           kind=OpKind.CLASS_LOSS, alike="self weight"),
    *lines("mse_loss smooth_l1_loss l1_loss huber_loss binary_cross_entropy_with_logits",
           s.paired, "self, target", kind=OpKind.LOSS),
    *_moving("binary_cross_entropy", alike="self target"),
    *_moving("multi_margin_loss multilabel_margin_loss", is_wide=True),
    # --- elementwise
    *_elementwise("add.Tensor add_.Tensor", kind=OpKind.ADDITION, linear=_JOINTLY, added="other"),
    *_elementwise("sub.Tensor sub_.Tensor", kind=OpKind.SUBTRACTION, linear=_JOINTLY,
                  added="other"),
    *_elementwise("rsub.Scalar", kind=OpKind.NEGATION, linear=_JOINTLY, added="other"),
    *_elementwise("add.Scalar", kind=OpKind.ADDITION),
    *_elementwise("sub.Scalar", kind=OpKind.SUBTRACTION),
    *_elementwise("neg", kind=OpKind.NEGATION, linear=_JOINTLY),
    *_elementwise("clone _to_copy", kind=OpKind.COPY, linear=_JOINTLY),
    *_elementwise("contiguous", kind=OpKind.CONTIGUOUS, linear=_JOINTLY),
    *_elementwise("to.dtype to.device to.dtype_layout", kind=OpKind.CAST, linear=_JOINTLY),
    *lines("to.other type_as", s.of_type, kind=OpKind.CAST, linear=_FIRST),
    *_elementwise("mul.Tensor mul_.Tensor", saves="self if other, other if self",
                  kind=OpKind.MULTIPLICATION, linear=_EACH),
    *_elementwise("mul.Scalar", kind=OpKind.MULTIPLICATION, linear=_JOINTLY),
    *_elementwise("div.Tensor div_.Tensor", saves="other if self, self if other",
                  kind=OpKind.DIVISION),
    *_elementwise("div.Scalar", kind=OpKind.DIVISION, linear=_JOINTLY),
    *_moving("true_divide.Tensor", kind=OpKind.DIVISION),
    *_elementwise("floor_divide remainder.Scalar remainder.Tensor", kind=OpKind.QUOTIENT),
    *_moving("div.Tensor_mode div.Scalar_mode", kind=OpKind.QUOTIENT),
    *_elementwise("clamp clamp_min", saves="self", kind=OpKind.CLAMP, linear=_NO),
    *_elementwise("gelu silu log softplus elu sin cos mish", saves="self", kind=OpKind.EXPONENTIAL,
                  linear=_NO),
    *_elementwise("tanh sigmoid exp tanh_ sigmoid_", saves="out", kind=OpKind.EXPONENTIAL,
                  linear=_NO),
    *_elementwise("erf", kind=OpKind.EXPONENTIAL, linear=_NO),
    *_elementwise("pow.Tensor_Scalar", saves="self", kind=OpKind.POWER, linear=_NO),
    *_elementwise("pow.Scalar", saves="out", kind=OpKind.POWER, linear=_NO),
    *_elementwise("abs hardtanh hardswish leaky_relu clamp_max log_sigmoid "
                  "square celu selu relu6 hardsigmoid hardshrink softshrink threshold logit expm1 "
                  "exp2 log2 log10 tan sinh cosh asin acos atan asinh acosh atanh sinc erfc lgamma "
                  "special_entr nan_to_num", saves="self", linear=_NO),
    *_elementwise("relu relu_ rsqrt sqrt reciprocal", saves="out", linear=_NO),
    *_elementwise("log1p", linear=_NO),
    *_elementwise("pow.Tensor_Tensor", saves="self, exponent, out", kind=OpKind.POWER, linear=_NO),
    *lines("prelu _prelu_kernel", s.opaque, "self, weight"),
    *_elementwise("clamp.Tensor clamp_min.Tensor", saves="*inputs", kind=OpKind.CLAMP, linear=_NO),
    *_elementwise("atan2 hypot logaddexp logaddexp2 xlogy.Tensor clamp_max.Tensor", saves="*inputs",
                  linear=_NO),
    *_elementwise("dropout dropout_ feature_dropout", kind=OpKind.DROPOUT,
                  saves="bool(*) when fused, noise(*) when unfused"),
    *_elementwise("where.self", saves="condition"),
    *_elementwise("where.ScalarOther where.ScalarSelf where.Scalar", saves="condition"),
    *_elementwise("masked_fill.Scalar masked_fill_.Scalar", saves="mask", kind=OpKind.FILL),
    *_elementwise("masked_fill.Tensor", saves="mask"),
    *_elementwise("maximum minimum min.other max.other", saves="self, other", linear=_NO),
    *_elementwise("eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar "
                  "gt.Tensor gt.Scalar ge.Tensor ge.Scalar", kind=OpKind.COMPARISON),
    *_elementwise("logical_not logical_and logical_or logical_xor bitwise_not isnan isinf floor "
                  "ceil round sign fill_.Scalar rand_like randn_like bernoulli bernoulli_.float"),
    *_elementwise("detach", kind=OpKind.VIEW),
    *_elementwise("copy_", kind=OpKind.WRITE),
    *_elementwise("zeros_like ones_like full_like empty_like", kind=OpKind.LIKE),
    *_moving("fill.Scalar", kind=OpKind.FILL),
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
    *_views("transpose.int transpose_", s.permuted(s.transpose_order), permutes=True),
    *_views("permute", s.permuted(s.permute_order), permutes=True),
    *_views("t numpy_T", s.permuted(s.reversed_order), permutes=True),
    *_views("mT", s.permuted(s.matrix_order), permutes=True),
    *_views("expand broadcast_to", s.expanded, kind=OpKind.EXPAND, sizes="size"),
    *_views("view_as", s.as_other(s.reshape), linear=_FIRST),
    *_views("expand_as", s.as_other(s.expanded), kind=OpKind.EXPAND, linear=_FIRST),
    *_views("broadcast_tensors", s.broadcast, kind=OpKind.OTHER),
    *_views("chunk tensor_split.sections", c.split, kind=OpKind.PARTS),
    *_views("split.Tensor split.sizes", c.split, kind=OpKind.PARTS, cuts=("split_size",)),
    *_views("split_with_sizes", c.split, kind=OpKind.PARTS, cuts=("split_sizes",)),
    *lines("tensor_split.indices tensor_split.tensor_indices_or_sections", s.opaque,
           "*inputs, out", kind=OpKind.PARTS),
    *_views("slice.Tensor", c.sliced, kind=OpKind.PART, cuts=("start", "end"),
            written_by="aten.slice_scatter.default"),
    *_views("narrow", c.sliced, kind=OpKind.PART, cuts=("start", "length")),
    *_views("select.int", c.selected, kind=OpKind.PART,
            written_by="aten.select_scatter.default"),
    *_views("unbind.int", c.selected, kind=OpKind.PART),
    # --- moving data
    *lines("cat", c.cat, kind=OpKind.JOIN, linear=_JOINTLY),
    *lines("stack", c.stack, kind=OpKind.JOIN, linear=_JOINTLY),
    *lines("repeat", s.repeated, kind=OpKind.REPEAT, linear=_JOINTLY),
    *lines("repeat_interleave.self_int", s.interleaved, kind=OpKind.REPEAT, linear=_JOINTLY),
    *lines("pad constant_pad_nd", c.padded, linear=_JOINTLY, added="value"),
    *lines("slice_scatter select_scatter", c.scattered, kind=OpKind.SCATTER,
           linear=_JOINTLY),
    *lines("index.Tensor", c.indexed, "indices", kind=OpKind.INDEX, traffic=Traffic.GATHERED,
           linear=_FIRST),
    *lines("gather", c.gathered, "index", traffic=Traffic.GATHERED, linear=_FIRST),
    *lines("im2col col2im", s.opaque),
    *lines("index_add index_add_ scatter_add scatter_add_", s.opaque, "index",
           kind=OpKind.ADD_AT, alike="self source src"),
    *lines("index_put index_put_ scatter.src scatter.value scatter_.src scatter_.value", s.opaque,
           "index, indices", kind=OpKind.WRITE_AT, alike="self values src"),
    *lines("index_copy index_copy_ index_fill.int_Scalar index_select masked_select "
           "masked_scatter masked_scatter_", s.opaque, "index, mask"),
    *_moving("scatter_reduce.two scatter_reduce_.two take_along_dim one_hot unfold diag_embed "
             "rot90 pixel_shuffle pixel_unshuffle channel_shuffle hstack vstack concat "
             "concatenate repeat_interleave.Tensor real imag view_as_real view_as_complex "
             "resolve_conj searchsorted.Tensor bucketize.Tensor cummax kthvalue median.dim mode"),
    *_moving("nonzero nonzero_numpy argwhere where", kind=OpKind.PLACES),
    *_moving("autopar.gradient.default", kind=OpKind.GRADIENT),
    *_moving("complex polar", is_wide=True),
    *_moving("grid_sampler", alike="input grid"),
    *_moving("diagonal tril_ triu_ trace fill_diagonal_", kind=OpKind.DIAGONAL),
    *_moving("histc bincount", kind=OpKind.COUNT), *_moving("as_strided", kind=OpKind.STRIDED),
    *_moving("unique_dim _unique2 unique_consecutive unique_dim_consecutive", kind=OpKind.VALUES),
    *_moving("cumprod logcumsumexp", kind=OpKind.ALONG), *_moving("renorm", kind=OpKind.SLICES),
    *_moving("sort.stable", kind=OpKind.SORT),
    *_moving("argsort.stable", kind=OpKind.ARGSORT),
    *_moving("max_pool1d max_pool3d max_pool1d_with_indices max_pool2d_with_indices avg_pool3d "
             "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d "
             "upsample_nearest1d.vec upsample_nearest3d.vec upsample_linear1d.vec "
             "upsample_trilinear3d.vec _upsample_nearest_exact2d.vec "
             "affine_grid_generator rrelu glu cosine_similarity pairwise_distance "
             "kl_div normal_functional addcmul addcdiv lerp.Tensor "
             "lerp.Scalar kron linalg_cross"),
    *lines("roll flip", s.over("dims"), kind=OpKind.ALONG, linear=_JOINTLY),
    # --- reductions
    *lines("sum sum.dim_IntList", s.reduced(partial=True), kind=OpKind.SUM, linear=_JOINTLY),
    *lines("mean mean.dim", s.reduced(partial=True), kind=OpKind.MEAN, linear=_JOINTLY,
           split_form=SplitForm(letter="r")),
    *_moving("count_nonzero count_nonzero.dim_IntList", kind=OpKind.SUM),
    *lines("amax amin argmax argmin max.dim min.dim max min any all any.dim all.dim",
           s.reduced(partial=False), linear=_NO),
    *lines("logsumexp", s.reduced(partial=True), "self, out", linear=_NO,
           split_form=SplitForm(letter="r", function="split_logsumexp", gives=WHOLE,
                                sends=((Collective.ALL_GATHER, 1),))),
    *lines("linalg_vector_norm norm.Scalar norm.ScalarOpt_dim prod prod.dim_int std "
           "std.dim std.correction var var.dim var.correction", s.reduced(partial=False),
           "self, out", linear=_NO),
    *lines("cumsum topk diff", s.over("dim"), kind=OpKind.ALONG),
    *lines("sort", s.over("dim"), kind=OpKind.SORT),
    *lines("argsort", s.over("dim"), kind=OpKind.ARGSORT),
    # --- pooling and resizing
    *lines("max_pool2d", "self n c [y] [x] -> n c [p] [q]", "self, i64(n c p q)"),
    *lines("avg_pool2d adaptive_avg_pool2d", "self n c [y] [x] -> n c [p] [q]", linear=_JOINTLY),
    *lines("adaptive_avg_pool1d avg_pool1d", "self n c [x] -> n c [p]", linear=_JOINTLY),
    *lines("upsample_bilinear2d.vec upsample_nearest2d.vec upsample_bicubic2d.vec",
           "input n c [y] [x] -> n c [p] [q]", linear=_JOINTLY),
    # --- new tensors
    *lines("arange arange.start arange.start_step", s.made, kind=OpKind.RANGE),
    *lines("new_ones new_zeros new_full new_empty", s.made, kind=OpKind.NEW),
    *lines("tril triu", s.made, kind=OpKind.DIAGONAL),
    *lines("full", s.made, kind=OpKind.FILL),
    *lines("zeros ones rand randn scalar_tensor linspace eye", s.made),
)  # fmt: skip


TABLE: Mapping[str, Rule] = MappingProxyType({rule.target: rule for rule in _RULES})

_UNKNOWN = Rule(target="", shape=s.opaque, saves=SavedForBackward.parse_all("*inputs, out"))


def rule_of(target: str) -> Rule:
    """Return the rule of an op; without a row, a rule that knows only the batch dim."""
    return TABLE.get(target, _UNKNOWN)


def rule_out_of_place(target: str) -> Rule:
    """Return the rule of an op; for an in-place op, that of its out-of-place form."""
    return TABLE.get(target) or rule_of(re.sub(r"_(?=\.)", "", target))


def kind_of(op: Op) -> OpKind:
    """Return the kind of an op."""
    return rule_of(op.target).kind


def takes_statistics(op: Op) -> bool:
    """Whether an op is a batch norm that normalises by the statistics of its input."""
    return kind_of(op) is OpKind.BATCH_NORM and bool(op.argument("training"))


def split_functions() -> Iterator[str]:
    """Yield the names of the runtime's functions that ranks call instead of split ops."""
    forms = (rule.split_form for rule in _RULES)
    yield from (form.function for form in forms if form is not None and form.function)


def has_rule(target: str) -> bool:
    """Whether the table has a signature for an op."""
    return rule_of(target).shape is not s.opaque


def has_row(target: str) -> bool:
    """Whether the table has a row for an op, perhaps one without a signature."""
    return target in TABLE
