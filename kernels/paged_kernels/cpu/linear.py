"""Linear layers and embeddings over packed weights.

`PackedWeight` owns the memory of a weight in the kernels' panel layout (see csrc/gemm.h); a `PackedLinear` multiplies
with it, a `PackedEmbedding` reads rows out of it, and tied embeddings are both over one.
`OneDnnLinear` is oneDNN's own prepacked bfloat16 product, for processors with AMX.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

_P, _I = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES = {
    "paged_pack_float32": [_P, _P, _I, _I],
    "paged_pack_bfloat16": [_P, _P, _I, _I],
    "paged_linear_float32": [_P, _I, _P, _P, _P, _I, _I, _I],
    "paged_linear_bfloat16": [_P, _I, _P, _P, _P, _I, _I, _I],
    "paged_linear_bfloat16_dot": [_P, _I, _P, _P, _P, _I, _I, _I],
    "paged_linear_bfloat16_dot_half": [_P, _I, _P, _P, _P, _P, _I, _I, _I],
    "paged_gather_float32": [_P, _P, _P, _I, _I],
    "paged_gather_bfloat16": [_P, _P, _P, _I, _I],
    "paged_gather_bfloat16_raw": [_P, _P, _P, _I, _I],
}
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def has_bf16_dot(library: ctypes.CDLL) -> bool:
    """Whether the library was compiled with a bf16 x bf16 product."""
    return hasattr(library, "paged_linear_bfloat16_dot")


def bf16_is_lossless(weight: Tensor) -> bool:
    """Whether every element survives the way to bfloat16 and back (a bfloat16 checkpoint read as float32, say)."""
    if weight.dtype == torch.bfloat16:
        return True
    return all(torch.equal(rows.bfloat16().to(rows.dtype), rows) for rows in (weight[:1], weight))


class PackedWeight:
    """A weight [N, K] as panels, float32 or bfloat16."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor, dtype: torch.dtype) -> None:
        self.shape = n, k = weight.shape
        self.dtype = dtype
        self._functions = {}
        for name, argtypes in _SIGNATURES.items():
            if hasattr(library, name):
                function = getattr(library, name)
                function.argtypes, function.restype = argtypes, None
                self._functions[name] = function
        packed_lanes = getattr(library, f"paged_packed_lanes_{_NAMES[dtype]}")
        packed_lanes.argtypes, packed_lanes.restype = [_I, _I], _I
        self.data = torch.empty(packed_lanes(n, k), dtype=torch.float32)
        source = weight.to(dtype).contiguous()
        self._functions[f"paged_pack_{_NAMES[dtype]}"](source.data_ptr(), self.data.data_ptr(), n, k)

    def linear(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype = torch.float32) -> Tensor:
        """x [T, K] float32 or (with bfloat16 weights) bfloat16 -> [T, N] in `out_dtype`, bias [N] float32 added.

        Raises ValueError for another shape, dtype or device.
        """
        n, k = self.shape
        half = x.dtype == torch.bfloat16
        if x.dim() != 2 or x.shape[1] != k or x.dtype not in _NAMES or x.device.type != "cpu":
            raise ValueError(
                f"x: expected CPU float32 or bfloat16 [T, {k}], got {x.dtype} {list(x.shape)} on {x.device}"
            )
        name = f"paged_linear_{_NAMES[self.dtype]}{'_dot' if half else ''}"
        if name not in self._functions:
            raise ValueError(f"x: {x.dtype} activations do not go with {self.dtype} weights in these kernels")
        if x.stride(1) != 1:
            x = x.contiguous()
        results = [torch.empty(len(x), n, dtype=torch.float32)]
        if half and out_dtype == torch.bfloat16:
            name += "_half"
            results.append(torch.empty(len(x), n, dtype=torch.bfloat16))
        if len(x):
            self._functions[name](
                x.data_ptr(),
                x.stride(0),
                self.data.data_ptr(),
                None if bias is None else bias.data_ptr(),
                *(y.data_ptr() for y in results),
                len(x),
                n,
                k,
            )
        return results[-1].to(out_dtype)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """ids [T] int64 -> rows [T, K] in `dtype`. Raises IndexError for an id outside 0..N-1."""
        n, k = self.shape
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < n:
            raise IndexError(f"ids: expected 0..{n - 1}")
        raw = "_raw" if dtype == self.dtype == torch.bfloat16 else ""
        out = torch.empty(len(ids), k, dtype=torch.bfloat16 if raw else torch.float32)
        ids = ids.to(torch.int64).contiguous()
        self._functions[f"paged_gather_{_NAMES[self.dtype]}{raw}"](
            self.data.data_ptr(), ids.data_ptr(), out.data_ptr(), len(ids), k
        )
        return out.to(dtype)


class PackedLinear:
    """x [T, K] -> x @ weight.T + bias, [T, N] in `out_dtype`."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"bias: expected [{self.out_features}], got {list(bias.shape)}")
        self._out_dtype = out_dtype

    def __call__(self, x: Tensor) -> Tensor:
        return self._weight.linear(x, self._bias, self._out_dtype)


class PackedEmbedding:
    """ids [T] -> rows [T, H] in `dtype`."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        self._weight = weight
        self._dtype = dtype

    def __call__(self, ids: Tensor) -> Tensor:
        return self._weight.rows(ids, self._dtype)


class OneDnnLinear:
    """oneDNN's product with a weight in oneDNN's own order, through the operators torch's compiler uses.

    For processors with tile multiplication (AMX), where it is several times as fast as vectors are. The operators are
    private to torch: ask `works` first.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
        self._bias = None if bias is None else bias.to(weight.dtype).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y

    @staticmethod
    def works(dtype: torch.dtype) -> bool:
        """Whether the operators exist, take `dtype` here and compute the right thing."""
        x = torch.linspace(-1, 1, 5 * 48).view(5, 48).to(dtype)
        weight = torch.linspace(1, -1, 33 * 48).view(33, 48).to(dtype)
        bias = torch.linspace(-2, 2, 33).to(dtype)
        try:
            got = OneDnnLinear(weight, bias)(x)
        except (AttributeError, RuntimeError):
            return False
        want = F.linear(x.float(), weight.float(), bias.float())
        return got.dtype == dtype and torch.allclose(got.float(), want, rtol=2e-2, atol=2e-2)
