"""The table of printed functions: how PyTorch's functions take the arguments of ATen's ops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autopar.codegen.text.expressions import Binding


@dataclass(frozen=True, slots=True)
class Function:
    """A printed function: positional arguments by ATen's names, and (keyword, ATen's name) pairs.

    The first `required` positional arguments are printed even if they are None. If `splits_last`,
    the function takes the split dim of its first argument as the last dim.
    """

    name: str
    positional: tuple[str, ...]
    keywords: tuple[tuple[str, str], ...]
    required: int = 1
    splits_last: bool = False

    def fits(self, arguments: Iterable[str]) -> bool:
        """Whether an op has all positional arguments; overloads of one name may differ."""
        return {name.removeprefix("*") for name in self.positional} <= set(arguments)


def _function(
    name: str, positional: str, keywords: str = "", *, required: int = 1, splits_last: bool = False
) -> Function:
    """Build a row; each word in `keywords` is `keyword` or `keyword:aten_name`."""
    pairs = [word.partition(":") for word in keywords.split()]
    words = tuple((word, other or word) for word, _, other in pairs)
    return Function(name, tuple(positional.split()), words, required, splits_last)


_CONV = "stride padding dilation groups"
_CONV_TRANSPOSE = "stride padding output_padding groups dilation"
_SDPA = "attn_mask dropout_p is_causal scale enable_gqa"

MODES: Mapping[str, str] = MappingProxyType(
    {
        "upsample_nearest1d": "nearest", "upsample_nearest2d": "nearest",
        "upsample_nearest3d": "nearest", "_upsample_nearest_exact1d": "nearest-exact",
        "_upsample_nearest_exact2d": "nearest-exact", "_upsample_nearest_exact3d": "nearest-exact",
        "upsample_linear1d": "linear", "upsample_bilinear2d": "bilinear",
        "upsample_trilinear3d": "trilinear", "upsample_bicubic2d": "bicubic",
        "_upsample_bilinear2d_aa": "bilinear", "_upsample_bicubic2d_aa": "bicubic",
    }
)  # fmt: skip
# Keyword arguments with which PyTorch's function does what the op does.
ALWAYS: Mapping[str, tuple[tuple[str, bool], ...]] = MappingProxyType(
    {
        "_upsample_bilinear2d_aa": (("antialias", True),),
        "_upsample_bicubic2d_aa": (("antialias", True),),
        "adaptive_max_pool2d": (("return_indices", True),),
        "adaptive_max_pool3d": (("return_indices", True),),
        "silu_": (("inplace", True),),
        "mish_": (("inplace", True),),
        "hardsigmoid_": (("inplace", True),),
    }
)
# Ops printed as `torch.ops.…`: PyTorch's functions of these names take or return something else.
AS_OPS = frozenset(
    {"max_unpool2d", "max_unpool3d", "fractional_max_pool2d", "fractional_max_pool3d", "stft"}
)

# ATen and torch.nn.functional order some arguments differently: embedding, batch_norm, group_norm.
FUNCTIONS: Mapping[str, Function] = MappingProxyType(
    {
        "linear": _function("F.linear", "input weight bias"),
        "matrix_H": _function("torch.adjoint", "self"),
        "mH": _function("torch.adjoint", "self"),
        "bilinear": _function("F.bilinear", "input1 input2 weight bias"),
        "layer_norm": _function("F.layer_norm", "input normalized_shape weight bias", "eps"),
        "rms_norm": _function("F.rms_norm", "input normalized_shape weight", "eps"),
        "group_norm": _function("F.group_norm", "input num_groups weight bias", "eps"),
        "instance_norm": _function(
            "F.instance_norm",
            "input running_mean running_var weight bias",
            "use_input_stats momentum eps",
        ),
        "batch_norm": _function(
            "F.batch_norm",
            "input running_mean running_var weight bias",
            "training momentum eps",
            required=3,
        ),
        "embedding": _function(
            "F.embedding", "indices weight", "padding_idx scale_grad_by_freq sparse"
        ),
        "scaled_dot_product_attention": _function(
            "F.scaled_dot_product_attention", "query key value", _SDPA
        ),
        "gelu": _function("F.gelu", "self", "approximate"),
        "log_sigmoid": _function("F.logsigmoid", "self"),
        "silu_": _function("F.silu", "self"),
        "mish_": _function("F.mish", "self"),
        "hardsigmoid_": _function("F.hardsigmoid", "self"),
        "silu": _function("F.silu", "self"),
        "relu": _function("F.relu", "self"),
        "conv1d": _function("F.conv1d", "input weight bias", _CONV),
        "conv2d": _function("F.conv2d", "input weight bias", _CONV),
        "conv3d": _function("F.conv3d", "input weight bias", _CONV),
        "conv_transpose1d": _function("F.conv_transpose1d", "input weight bias", _CONV_TRANSPOSE),
        "conv_transpose2d": _function("F.conv_transpose2d", "input weight bias", _CONV_TRANSPOSE),
        "conv_transpose3d": _function("F.conv_transpose3d", "input weight bias", _CONV_TRANSPOSE),
        "cross_entropy_loss": _function(
            "F.cross_entropy", "self target", "weight ignore_index reduction label_smoothing"
        ),
        "nll_loss_nd": _function("F.nll_loss", "self target", "weight ignore_index reduction"),
        "pad": _function("F.pad", "self pad", "mode value"),
        "constant_pad_nd": _function("F.pad", "self pad", "value"),
        "glu": _function("F.glu", "self", "dim"),
        "embedding_bag": _function(
            "F.embedding_bag",
            "indices weight offsets",
            "scale_grad_by_freq mode sparse per_sample_weights include_last_offset padding_idx",
        ),
        **dict.fromkeys(
            MODES,
            _function(
                "F.interpolate",
                "input",
                "size:output_size scale_factor:scale_factors align_corners",
            ),
        ),
        "adaptive_max_pool2d": _function("F.adaptive_max_pool2d", "self output_size"),
        "adaptive_max_pool3d": _function("F.adaptive_max_pool3d", "self output_size"),
        "cdist": _function("torch.cdist", "x1 x2", "p compute_mode"),
        "cartesian_prod": _function("torch.cartesian_prod", "*tensors"),
        "block_diag": _function("torch.block_diag", "*tensors"),
        "baddbmm": _function("torch.baddbmm", "self batch1 batch2", "beta alpha"),
        "addmm": _function("torch.addmm", "self mat1 mat2", "beta alpha"),
        "im2col": _function("F.unfold", "self kernel_size", "dilation padding stride"),
        "col2im": _function("F.fold", "self output_size kernel_size", "dilation padding stride"),
        "cat": _function("torch.cat", "tensors", "dim"),
        "stack": _function("torch.stack", "tensors", "dim"),
        "outer": _function("torch.outer", "self vec2"),
        "bmm": _function("torch.bmm", "self mat2"),
        "_grouped_mm": _function("F.grouped_mm", "self mat2", "offs bias"),
        "where": _function("torch.where", "condition self other"),
        "einsum": _function("torch.einsum", "equation *tensors"),
        "broadcast_tensors": _function("torch.broadcast_tensors", "*tensors"),
        "meshgrid": _function("torch.meshgrid", "*tensors", "indexing"),
        "to.dtype": _function("to", "self dtype", "copy"),
    }
)

# The runtime's functions for split ops, by their names in `SplitForm`. They also take the tensor
# axis, and `parts` where the split dim is cut unevenly.
SPLIT_FUNCTIONS: Mapping[str, Function] = MappingProxyType(
    {
        row.name: row
        for row in (
            _function("vocab_parallel_embedding", "indices weight axis", "parts padding_idx"),
            _function(
                "vocab_parallel_embedding_bag",
                "indices weight offsets axis",
                "parts mode per_sample_weights include_last_offset padding_idx",
            ),
            _function(
                "vocab_parallel_cross_entropy",
                "self target axis",
                "parts ignore_index reduction label_smoothing",
                splits_last=True,
            ),
            _function("split_logsumexp", "self dim axis", "keepdim"),
        )
    }
)

# PyTorch's names for the values of ATen's enumerations, in order, by argument.
ENUMERATIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "reduction": ("none", "mean", "sum"),
        "mode": ("sum", "mean", "max"),  # of embedding_bag
        "compute_mode": (
            "use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist",
            "donot_use_mm_for_euclid_dist",
        ),
    }
)  # fmt: skip

BINARY: Mapping[str, tuple[str, Binding]] = MappingProxyType(
    {
        "add": ("+", Binding.SUM),
        "sub": ("-", Binding.SUM),
        "mul": ("*", Binding.PRODUCT),
        "div": ("/", Binding.PRODUCT),
        "true_divide": ("/", Binding.PRODUCT),
        "floor_divide": ("//", Binding.PRODUCT),
        "remainder": ("%", Binding.PRODUCT),
        "matmul": ("@", Binding.PRODUCT),
        "eq": ("==", Binding.COMPARISON),
        "ne": ("!=", Binding.COMPARISON),
        "lt": ("<", Binding.COMPARISON),
        "le": ("<=", Binding.COMPARISON),
        "gt": (">", Binding.COMPARISON),
        "ge": (">=", Binding.COMPARISON),
        "__and__": ("&", Binding.AND),
        "bitwise_and": ("&", Binding.AND),
        "__or__": ("|", Binding.OR),
        "bitwise_or": ("|", Binding.OR),
        "__xor__": ("^", Binding.XOR),
        "bitwise_xor": ("^", Binding.XOR),
        "__lshift__": ("<<", Binding.SHIFT),
        "bitwise_left_shift": ("<<", Binding.SHIFT),
        "__rshift__": (">>", Binding.SHIFT),
        "bitwise_right_shift": (">>", Binding.SHIFT),
    }
)
# In-place operators (`mask &= other`), and the methods that are printed for them.
WRITING: Mapping[str, str] = MappingProxyType(
    {
        "__iand__": "bitwise_and_",
        "__ior__": "bitwise_or_",
        "__ixor__": "bitwise_xor_",
        "__ilshift__": "bitwise_left_shift_",
        "__irshift__": "bitwise_right_shift_",
    }
)
UNARY: Mapping[str, str] = MappingProxyType({"neg": "-", "bitwise_not": "~"})

# Sizes that are printed as one number if they are the same in all dims.
WINDOWS = frozenset({"stride", "padding", "dilation", "kernel_size", "output_size"})
# Methods that take sizes as separate arguments, and methods that take dims by position.
SPREAD = frozenset({"view", "reshape", "permute", "expand", "repeat"})
PLAIN_DIM = frozenset({"unsqueeze", "squeeze", "transpose", "unbind", "flatten", "unflatten"})
DTYPE_METHODS: Mapping[str, str] = MappingProxyType(
    {
        "float32": "float", "float64": "double", "float16": "half", "bfloat16": "bfloat16",
        "bool": "bool", "int64": "long", "int32": "int",
    }
)  # fmt: skip
