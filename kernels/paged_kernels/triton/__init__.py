"""The GPU backend: Triton kernels for CUDA and ROCm, and on CPU tensors under Triton's interpreter."""
