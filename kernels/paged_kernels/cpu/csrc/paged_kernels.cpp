// The one translation unit of the CPU kernels: every header exports its extern "C" entry points.
#include "attention.h"
#include "fused.h"
#include "gemm.h"
#include "quantized.h"
#include "sampling.h"
