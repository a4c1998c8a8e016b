// The one translation unit of the CPU kernels: every header exports its extern "C" entry points.
#include "gemm.h"
#if __has_include("attention.h")
#include "attention.h"
#endif
#if __has_include("fused.h")
#include "fused.h"
#endif
#if __has_include("sampling.h")
#include "sampling.h"
#endif
