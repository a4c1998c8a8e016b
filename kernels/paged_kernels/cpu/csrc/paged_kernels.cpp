// The one translation unit of the CPU kernels: every header exports its extern "C" entry points.
#include "attention.h"
#include "fused.h"
#include "gemm.h"
#include "sampling.h"
