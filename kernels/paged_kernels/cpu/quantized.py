"""Linear layers over weights of 4 and 8 bits on the CPU (see csrc/quantized.h)."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from paged_kernels.cpu.build import cpu_flags
from paged_kernels.quantized import BLOCK, GroupWeight, QuantizedWeight, ScaledWeight, unpack

_P, _I = ctypes.c_void_p, ctypes.c_int64
_Arguments = list[type[ctypes.c_void_p] | type[ctypes.c_int64]]
_PACK: _Arguments = [_P, _P, _I, _I]
_LINEAR_CODES: _Arguments = [_P, _I, _P, _P, _P, _I, _P, _P, _I, _I, _I]
_LINEAR_INT8: _Arguments = [_P, _I, _P, _P, _P, _P, _P, _P, _P, _I, _I, _I]


def make_quantized(
    library: ctypes.CDLL, weight: QuantizedWeight, bias: Tensor | None, out_dtype: torch.dtype
) -> CodesLinear | Int8Linear | OneDnnInt8Linear:
    """The layer for a weight; `out_dtype` is that of its results. float8 weights meet unrounded activations."""
    bias = None if bias is None else bias.to(torch.float32).contiguous()
    if not isinstance(weight, ScaledWeight):
        return CodesLinear(library, weight, bias, out_dtype)
    if weight.numbers.dtype == torch.int8 and weight.rounds_activations and weight.scales.shape[1] == 1:
        if "amx_int8" in cpu_flags() and OneDnnInt8Linear.works():
            return OneDnnInt8Linear(weight, bias, out_dtype)
        return Int8Linear(library, weight, bias, out_dtype)
    return CodesLinear(library, weight, bias, out_dtype)


def _rows(x: Tensor, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """x as [T, K] in `dtype` with unit stride along K. Raises ValueError for another shape or device."""
    if x.dim() != 2 or x.shape[1] != inputs or x.device.type != "cpu":
        raise ValueError(f"x: expected CPU [T, {inputs}], got {list(x.shape)} on {x.device}")
    x = x.to(dtype)
    return x if x.stride(1) == 1 else x.contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class CodesLinear:
    """x @ weight.T + bias for weights of 4 or 8 bits, activations as they are: the product with the exact weight."""

    def __init__(
        self, library: ctypes.CDLL, weight: QuantizedWeight, bias: Tensor | None, out_dtype: torch.dtype
    ) -> None:
        self.out_features, self.in_features = n, k = weight.shape
        self._bias = bias
        self._out_dtype = out_dtype
        self._permutation = None
        panel = int(library.paged_panel())
        columns = -(-n // panel) * panel
        if isinstance(weight, GroupWeight):
            codes = unpack(weight.qweight, weight.bits).t().contiguous()
            scales, zeros = weight.scales.float(), weight.zeros.float()
            self._group, self._permutation = weight.group_size, weight.permutation
            name = "nibble" if weight.bits == 4 else "byte"
        else:
            scales = weight.row_scales().float().t()
            self._group = k if len(scales) == 1 else BLOCK
            if weight.numbers.dtype == torch.int8:  # stored as 0 .. 255 around 128
                codes, zero, name = weight.numbers.view(torch.uint8) ^ 128, 128.0, "byte"
            else:
                codes, zero, name = weight.numbers.view(torch.uint8), 0.0, "float8"
            zeros = torch.full_like(scales, zero)
        self._scales, self._zeros = (
            torch.nn.functional.pad(side, (0, columns - n)).contiguous() for side in (scales, zeros)
        )
        per_byte = 2 if name == "nibble" else 1
        self._codes = torch.empty(columns * -(-k // per_byte), dtype=torch.uint8)
        pack = getattr(library, f"paged_pack_codes_{name}")
        pack.argtypes, pack.restype = _PACK, None
        codes = codes.contiguous()
        pack(codes.data_ptr(), self._codes.data_ptr(), n, k)
        self._linear = getattr(library, f"paged_linear_codes_{name}")
        self._linear.argtypes, self._linear.restype = _LINEAR_CODES, None

    def __call__(self, x: Tensor) -> Tensor:
        x = _rows(x if self._permutation is None else x[:, self._permutation], self.in_features)
        y = torch.empty(len(x), self.out_features)
        if len(x):
            self._linear(
                x.data_ptr(),
                x.stride(0),
                self._codes.data_ptr(),
                self._scales.data_ptr(),
                self._zeros.data_ptr(),
                self._group,
                _address(self._bias),
                y.data_ptr(),
                len(x),
                self.out_features,
                self.in_features,
            )
        return y.to(self._out_dtype)


class Int8Linear:
    """int8 on both sides: x is rounded a row at a time, sums are exact."""

    def __init__(self, library: ctypes.CDLL, weight: ScaledWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = n, k = weight.shape
        self._bias = bias
        self._dtype = dtype
        self._scales = weight.row_scales()[:, 0].float().contiguous()
        numbers = weight.numbers.contiguous()
        self._zeros = numbers.sum(dim=1, dtype=torch.int32) * library.paged_int8_zero()
        panel, per_lane = int(library.paged_panel()), int(library.paged_int8_per_lane())
        self._row = -(-k // per_lane) * per_lane
        self._numbers = torch.empty(-(-n // panel) * panel * self._row, dtype=torch.int8)
        pack = library.paged_pack_int8
        pack.argtypes, pack.restype = _PACK, None
        pack(numbers.data_ptr(), self._numbers.data_ptr(), n, k)
        self._linear = getattr(library, f"paged_linear_int8_{'bf16' if dtype == torch.bfloat16 else 'f32'}")
        self._linear.argtypes, self._linear.restype = _LINEAR_INT8, None

    def __call__(self, x: Tensor) -> Tensor:
        x = _rows(x, self.in_features, self._dtype)
        tokens = len(x)
        y = torch.empty(tokens, self.out_features, dtype=self._dtype)
        if tokens:
            rounded = torch.empty(tokens, self._row, dtype=torch.int16)
            row_scales = torch.empty(tokens)
            self._linear(
                x.data_ptr(),
                x.stride(0),
                rounded.data_ptr(),
                row_scales.data_ptr(),
                self._numbers.data_ptr(),
                self._scales.data_ptr(),
                self._zeros.data_ptr(),
                _address(self._bias),
                y.data_ptr(),
                tokens,
                self.out_features,
                self.in_features,
            )
        return y


class OneDnnInt8Linear:
    """`Int8Linear` on oneDNN's product, through an operator torch's compiler uses, for processors with AMX.

    It is private to torch and takes unsigned activations with one scale: rows are rounded to 0 .. 255 around 128, the
    product is done with scale 1 and each row's scale follows. Ask `works` first.
    """

    def __init__(self, weight: ScaledWeight, bias: Tensor | None, out_dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.onednn.qlinear_prepack(weight.numbers, [64, self.in_features])
        self._scales = weight.row_scales()[:, 0].float().contiguous()
        self._zeros = torch.zeros(self.out_features, dtype=torch.int64)
        self._bias = bias
        self._out_dtype = out_dtype

    def __call__(self, x: Tensor) -> Tensor:
        row_scales = x.abs().amax(dim=1, keepdim=True).float() / 127
        rounded = (x / torch.where(row_scales > 0, row_scales, 1.0)).round_().add_(128).to(torch.uint8)
        y = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, 128, self._weight, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        y *= row_scales
        return (y if self._bias is None else y.add_(self._bias)).to(self._out_dtype)

    @staticmethod
    @functools.cache
    def works() -> bool:
        """Whether the operator exists and computes the right thing, at the largest numbers too.

        Without VNNI it does not: sums of pairs are cut to 16 bits.
        """
        numbers = torch.full((33, 48), 127, dtype=torch.int8)
        numbers[::2, ::3] = -127
        weight = ScaledWeight(numbers, torch.linspace(1, 2, 33)[:, None], True)
        x = torch.linspace(-127, 127, 5 * 48).view(5, 48)
        x[:, 0] = 127
        try:
            got = OneDnnInt8Linear(weight, None, torch.float32)(x)
        except (AttributeError, RuntimeError):
            return False
        return torch.allclose(got, x.round() @ weight.dequantize().t(), rtol=1e-3)
