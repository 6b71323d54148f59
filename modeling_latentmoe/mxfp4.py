"""MXFP4: the 4-bit codec, the quantizer that keeps routed experts packed, and checks of the result.

Layout (Kimi-K3 checkpoint, OCP Microscaling E2M1 values with E8M0 scales): a matrix [out, in] is stored as
`packed` uint8 [out, in / 2] (column 2c in the low nibble of byte c, column 2c + 1 in the high one; bit 3 of a
nibble is the sign) and `scale` uint8 [out, in / 32] (byte s multiplies 32 consecutive columns by
2^(s - 127)). Together 4.25 bits per weight.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import Mxfp4Config

from .configuration_latentmoe import MXFP4_GROUP, PACKED_FORMAT, QUANT_METHOD
from .conversion import SHOWN_FAULTS, decoding_converters, packed_converters

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_NIBBLES = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES))
# Values of both nibbles of every byte, low nibble first; and the multiplier of every scale byte.
_PAIRS = torch.stack((_NIBBLES.repeat(16), _NIBBLES.repeat_interleave(16)), dim=-1)
_MULTIPLIERS = torch.tensor([2.0 ** (s - 127) for s in range(255)] + [float("nan")])


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 packed [..., out, in / 2] and scale [..., out, in / 32] -> weights [..., out, in] in `dtype`.

    Every value of a normal range is exact in bfloat16 and wider. Scale 255 is NaN, as in OCP Microscaling;
    the largest scales may overflow to infinity in dtypes narrower than float64. ValueError for other dtypes
    or shapes.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"MXFP4 needs uint8 packed and scale, got {packed.dtype} and {scale.dtype}")
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * MXFP4_GROUP:
        raise ValueError(f"MXFP4 shapes do not fit: packed {tuple(packed.shape)}, scale {tuple(scale.shape)}")
    compute = torch.promote_types(dtype, torch.float32)
    values = F.embedding(packed.int(), _PAIRS.to(packed.device, compute)).flatten(-2)
    multipliers = _MULTIPLIERS.to(packed.device, compute)[scale.int()]
    return (values.unflatten(-1, (-1, MXFP4_GROUP)) * multipliers.unsqueeze(-1)).flatten(-2).to(dtype)


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Float weights [..., out, in] -> (packed uint8 [..., out, in / 2], scale uint8 [..., out, in / 32]).

    The scale of a group is the smallest power of two (at least 2^-127) under which its largest magnitude is
    at most 6, so nothing is ever clipped and the rounding error is at most a fifth of that magnitude; a group
    of zeros gets scale 1. Values round to the nearest E2M1 number, ties to the even code; the sign of zero is
    kept. Weights that came from `decode` are reproduced exactly. ValueError for a width that is no multiple
    of 32, for NaN or infinite weights, and for magnitudes beyond 6 * 2^127.
    """
    if weight.shape[-1] % MXFP4_GROUP:
        raise ValueError(f"MXFP4 groups {MXFP4_GROUP} columns, got a weight of shape {tuple(weight.shape)}")
    groups = weight.to(torch.promote_types(weight.dtype, torch.float32)).unflatten(-1, (-1, MXFP4_GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    if not largest.isfinite().all():
        raise ValueError("MXFP4 cannot store NaN or infinite weights")
    # largest = m * 2^e with m in [0.5, 1), and 6 = 0.75 * 2^3.
    mantissa, exponent = torch.frexp(largest)
    code = exponent - 3 + (mantissa > 0.75) + 127
    code = torch.where(largest == 0, 127, code.clamp(min=0))
    if (code > 254).any():
        raise ValueError("MXFP4 cannot store magnitudes beyond 6 * 2^127")
    x = groups.abs() / _MULTIPLIERS.to(weight.device, groups.dtype)[code]
    # E2M1 steps by 0.5 below 2, by 1 below 4, by 2 up to 6, and torch.round goes to even on ties.
    index = torch.where(x < 2, (2 * x).round(), torch.where(x < 4, x.round() + 2, (x / 2).round() + 4))
    nibbles = (index.to(torch.uint8) + 8 * groups.signbit().to(torch.uint8)).flatten(-2)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), code.squeeze(-1).to(torch.uint8)


class DecodeExperts(ConversionOps):
    """Packed and scale matrices of every expert -> one stacked float tensor [experts, rows, in].

    Sources alternate: packed and scale of the first matrix, then of the second, whose rows come after.
    """

    @torch.no_grad()
    def convert(self, input_dict, source_patterns, target_patterns, model, full_layer_name, **kwargs):
        target = model.get_parameter(full_layer_name)
        stack = torch.empty(target.shape, dtype=target.dtype)
        patterns = list(zip(source_patterns[0::2], source_patterns[1::2], strict=True))
        height = target.shape[1] // len(patterns)
        for number, (packed_pattern, scale_pattern) in enumerate(patterns):
            pairs = zip(input_dict.pop(packed_pattern), input_dict.pop(scale_pattern), strict=True)
            place = slice(number * height, (number + 1) * height)
            # Expert by expert into place: a layer's floats exist once.
            for expert, (packed, scale) in enumerate(pairs):
                stack[expert, place] = decode(packed, scale, target.dtype)
        return {target_patterns[0]: stack}

    @property
    def reverse_op(self) -> ConversionOps:
        # A dequantised model forgets these converters after loading and is saved as a float one.
        raise NotImplementedError("dequantised experts are saved as float weights")


class LatentMoEMxfp4Config(Mxfp4Config):
    """`quantization_config` of a model with packed experts.

    dequantize: decode the experts to floats while loading instead of keeping them packed.
    """

    # A subclass of the in-tree config: only such ones may override `dequantize` in `from_pretrained`.
    def __init__(self, dequantize: bool = False, format: str = PACKED_FORMAT, **kwargs):
        super().__init__(dequantize=dequantize)
        self.quant_method = QUANT_METHOD
        self.format = format

    def to_dict(self) -> dict:
        return {"quant_method": self.quant_method, "format": self.format}


class LatentMoEMxfp4Quantizer(HfQuantizer):
    """Loads experts packed, or decoded with `dequantize`; the model checks checkpoint and result itself."""

    requires_calibration = True

    def validate_environment(self, *args, **kwargs) -> None:
        """Nothing but torch is needed."""

    def _process_model_after_weight_loading(self, model, **kwargs):
        if self.quantization_config.dequantize:
            # transformers 5.22 and 5.23 keep the load-only converters, which saving could not reverse.
            model.__dict__.pop("_weight_conversions", None)
        return model

    def update_weight_conversions(self, weight_conversions, model=None):
        if self.quantization_config.dequantize:
            return decoding_converters(DecodeExperts()) + weight_conversions
        return packed_converters() + weight_conversions

    def get_new_dtype(self, converter, param, dtype):
        # `param` is a lazy slice of a safetensors file, or a tensor when a state dict was given.
        is_bytes = param.dtype == torch.uint8 if isinstance(param, Tensor) else param.get_dtype() == "U8"
        return None if is_bytes else dtype

    @property
    def is_trainable(self) -> bool:
        """True: bytes stay frozen while adapters and other weights train."""
        return True

    def is_serializable(self) -> bool:
        return True


def assert_packed(model: nn.Module) -> None:
    """ValueError unless all routed experts of `model` are frozen MXFP4 bytes of the right shapes."""
    faults = []
    for name, module, stem, shape in _expert_stacks(model):
        for leaf, divisor in ((f"{stem}_proj", 2), (f"{stem}_scale", MXFP4_GROUP)):
            expected = (*shape[:-1], shape[-1] // divisor)
            param = module._parameters.get(leaf)
            if param is None:
                faults.append(f"{name}.{leaf} does not exist")
            elif param.dtype != torch.uint8 or param.requires_grad or tuple(param.shape) != expected:
                found = f"{'trainable' if param.requires_grad else 'frozen'} {param.dtype} {list(param.shape)}"
                faults.append(f"{name}.{leaf} is {found} instead of frozen torch.uint8 {list(expected)}")
    if faults:
        raise ValueError(f"{len(faults)} expert tensors are not packed MXFP4: {'; '.join(faults[:SHOWN_FAULTS])}")


def storage_report(model: nn.Module) -> str:
    """One line: the bits per weight that routed experts and all other weights of `model` take in memory."""
    experts = [
        param
        for _, module, stem, _ in _expert_stacks(model)
        for leaf, param in module.named_parameters(recurse=False)
        if leaf in (f"{stem}_proj", f"{stem}_scale")
    ]
    inside = {id(param) for param in experts}
    others = [param for param in model.parameters() if id(param) not in inside]
    weights = sum(shape.numel() for *_, shape in _expert_stacks(model))
    dtypes = "/".join(sorted({str(param.dtype).removeprefix("torch.") for param in experts}))
    parts = []
    if weights:
        parts.append(f"routed experts {_storage(weights, experts)} ({dtypes})")
    if others:
        parts.append(f"all other weights {_storage(sum(param.numel() for param in others), others)}")
    return "; ".join(parts)


def _storage(weights: int, params: list[Tensor]) -> str:
    size = sum(param.nbytes for param in params)
    return f"{weights:,} in {size / 2**20:,.2f} MiB = {8 * size / weights:.2f} bits each"


def _expert_stacks(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Size]]:
    """(module name, module, stem, logical shape) of every stack of expert matrices.

    Recognised by an attribute: the class may exist twice, from the installed package and from remote code.
    """
    for name, module in model.named_modules():
        for stem, shape in module.__dict__.get("logical_shapes", {}).items():
            yield name, module, stem, shape


# This file can be imported twice (installed package and remote code): the last import serves both.
auto.AUTO_QUANTIZATION_CONFIG_MAPPING.pop(QUANT_METHOD, None)
auto.AUTO_QUANTIZER_MAPPING.pop(QUANT_METHOD, None)
auto.register_quantization_config(QUANT_METHOD)(LatentMoEMxfp4Config)
auto.register_quantizer(QUANT_METHOD)(LatentMoEMxfp4Quantizer)
