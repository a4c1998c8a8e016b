// Dense y[T, N] = x[T, K] * weight[N, K]^T (+ bias) with weights packed once, for T from 1 to thousands.
//
// A packed weight is cut into panels of kPanel = 2 * kWidth output columns. A panel holds rows of kPanel 32-bit lanes:
// one k of float32, or two consecutive k of bfloat16 (the even one in the low half); zero beyond N and K.
//
// The inner kernel keeps a tile of up to kTileRows x kPanel sums in registers, broadcasts x straight from its rows and
// streams the panel (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008). Around it:
// blocks of K whose slice of a panel stays near L1, blocks of rows whose slice of x stays in L2, and an even split of
// all (panel, tile) pairs among threads, so that neither few panels nor few rows leave a thread idle.
// bfloat16 weights are widened in registers, which costs next to nothing beside six rows of FMAs.
//
// Every output is the same chain of FMAs over k, whatever T, the row's place in the batch and the number of threads:
// results do not depend on the batch, to the bit. (With one row the chain's latency is still shorter than the wait for
// the weights.)
#pragma once

#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "vec.h"

#if defined(PAGED_SIMDE) || (defined(PAGED_AVX512) && defined(__AVX512BF16__))
#define PAGED_BF16_DOT 1
#endif

namespace paged {

constexpr int kPanel = 2 * kWidth;
constexpr int kTileRows = kWidth == 16 ? 12 : 6;
constexpr int64_t kBlockK = 576;
constexpr int64_t kRowBlockBytes = 224 << 10;

PAGED_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// [0, n) in `parts` pieces whose sizes differ by at most one.
struct Pieces {
  int64_t parts, size, larger;
  Pieces(int64_t n, int64_t parts) : parts(parts), size(n / parts), larger(n % parts) {}
  PAGED_INLINE int64_t begin(int64_t i) const { return i * size + std::min(i, larger); }
};

// Which weights a tile prefetches into L2, some lines every four steps: a fair share of the next panel, so that memory
// is read evenly, or where one tile is all there is, its own panel a little ahead.
struct Ahead {
  int64_t tiles, lines, tile_bytes;
  static constexpr int64_t kDistance = 4096;
  Ahead(int64_t tiles, int64_t steps) : tiles(tiles), lines(tiles == 1 ? 4 : tiles < 4 ? 2 : 1) {
    tile_bytes = steps / 4 * lines * 64;
  }
  PAGED_INLINE const char* of(const void* panel, const void* next, int64_t tile) const {
    return tiles == 1 ? static_cast<const char*>(panel) + kDistance : static_cast<const char*>(next) + tile * tile_bytes;
  }
};

// R rows of x, `stride` bytes apart. One base pointer for every three rows keeps all addresses in few registers.
template <int R>
struct Rows {
  static constexpr int kBases = (R + 2) / 3;
  const char* base[kBases];
  int64_t stride;

  PAGED_INLINE Rows(const void* x, int64_t stride) : stride(stride) {
    for (int b = 0; b < kBases; ++b) base[b] = static_cast<const char*>(x) + 3 * b * stride;
  }
  PAGED_INLINE void advance(int64_t bytes) {
#pragma GCC unroll 8
    for (int b = 0; b < kBases; ++b) {
      base[b] += bytes;
      asm("" : "+r"(base[b]));
    }
    asm("" : "+r"(stride));
  }
  template <class T>
  PAGED_INLINE T at(int r, int64_t byte) const {
    T value;
    std::memcpy(&value, base[r / 3] + stride * (r % 3) + byte, sizeof value);
    return value;
  }
};

template <int R>
using Sums = vf[R][2];

// sums[r] += x[r][at byte] * (w0, w1)
template <int R>
PAGED_INLINE void multiply(Sums<R>& sums, const Rows<R>& x, int64_t byte, vf w0, vf w1) {
  PAGED_PIN(w0);
  PAGED_PIN(w1);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    vf a = vf::set(x.template at<float>(r, byte));
    sums[r][0] = fma(a, w0, sums[r][0]);
    sums[r][1] = fma(a, w1, sums[r][1]);
    PAGED_PIN(sums[r][0]);
    PAGED_PIN(sums[r][1]);
  }
}

// The three kinds of product. `step` multiplies one row of lanes into the sums, `last` the odd k at the end;
// kElements is how many k a row of lanes holds, kXBytes how far x moves with it.

struct Float32 {
  using X = float;
  using Lane = float;
  static constexpr int kElements = 1;
  static constexpr int kXBytes = 4;
  template <int R>
  PAGED_INLINE static void step(Sums<R>& sums, const Rows<R>& x, int64_t byte, const Lane* w) {
    multiply<R>(sums, x, byte, vf::load(w), vf::load(w + kWidth));
  }
  template <int R>
  PAGED_INLINE static void last(Sums<R>&, const Rows<R>&, const Lane*) {}
};

struct Bf16Weight {
  using X = float;
  using Lane = int32_t;
  static constexpr int kElements = 2;
  static constexpr int kXBytes = 8;
  template <int R>
  PAGED_INLINE static void step(Sums<R>& sums, const Rows<R>& x, int64_t byte, const Lane* w) {
    multiply<R>(sums, x, byte, even(w), even(w + kWidth));
    asm("" : "+r"(w));  // load again rather than hold four vectors
    multiply<R>(sums, x, byte + 4, odd(w), odd(w + kWidth));
  }
  template <int R>
  PAGED_INLINE static void last(Sums<R>& sums, const Rows<R>& x, const Lane* w) {
    multiply<R>(sums, x, 0, even(w), even(w + kWidth));
  }
  PAGED_INLINE static vf even(const Lane* w) { return bitcast_f(shl<16>(vi::load(w))); }
  PAGED_INLINE static vf odd(const Lane* w) {
    return bitcast_f(vi::load(w) & vi::set(static_cast<int32_t>(0xffff0000u)));
  }
};

#if defined(PAGED_BF16_DOT)
PAGED_INLINE vf bf16_dot(vf sum, vi a, vi b) {
#if defined(PAGED_SIMDE)
  vf even = fma(bitcast_f(shl<16>(a)), bitcast_f(shl<16>(b)), sum);
  vi high = vi::set(static_cast<int32_t>(0xffff0000u));
  return fma(bitcast_f(a & high), bitcast_f(b & high), even);
#else
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
#endif
}

struct Bf16Both {
  using X = bf16;
  using Lane = int32_t;
  static constexpr int kElements = 2;
  static constexpr int kXBytes = 4;
  template <int R>
  PAGED_INLINE static void step(Sums<R>& sums, const Rows<R>& x, int64_t byte, const Lane* w) {
    dot<R, int32_t>(sums, x, byte, w);
  }
  template <int R>
  PAGED_INLINE static void last(Sums<R>& sums, const Rows<R>& x, const Lane* w) {
    dot<R, uint16_t>(sums, x, 0, w);
  }

 private:
  template <int R, class Elements>
  PAGED_INLINE static void dot(Sums<R>& sums, const Rows<R>& x, int64_t byte, const Lane* w) {
    vi w0 = vi::load(w), w1 = vi::load(w + kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      vi a = vi::set(x.template at<Elements>(r, byte));
      sums[r][0] = bf16_dot(sums[r][0], a, w0);
      sums[r][1] = bf16_dot(sums[r][1], a, w1);
    }
  }
};
#endif

// Where a tile's result goes: y[R, columns] with `ldy` floats from row to row, or where that is not null, `half` in its
// place; `bias` may be null.
struct Output {
  float* y;
  bf16* half;
  int64_t ldy;
  int columns;
  const float* bias;
  bool accumulate;

  PAGED_INLINE void finish(vf sum, int64_t row, int column) const {
    const int n = columns - column;
    const int64_t at = row * ldy + column;
    if (n <= 0) return;
    if (accumulate) sum += load_n(y + at, n);
    if (bias) sum += load_n(bias + column, n);
    if (half)
      store_n(half + at, sum, n);
    else
      store_n(y + at, sum, n);
  }
};

template <class Kind, int R>
struct Tile {
  // Multiplies k elements of R rows of x with the panel rows at w, prefetching `lines` cache lines from `ahead` on with
  // every four steps.
  static void run(const typename Kind::X* x, int64_t ldx, const typename Kind::Lane* w, int64_t k, const char* ahead,
                  int64_t lines, const Output& out) {
    Sums<R> sums;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = vf::zero();

    Rows<R> rows(x, ldx * static_cast<int64_t>(sizeof(typename Kind::X)));
    int64_t steps = k / Kind::kElements;
    for (; steps >= 4; steps -= 4) {
      for (int64_t line = 0; line < lines; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) Kind::template step<R>(sums, rows, u * Kind::kXBytes, w + u * kPanel);
      rows.advance(4 * Kind::kXBytes);
      w += 4 * kPanel;
    }
    for (; steps > 0; --steps) {
      Kind::template step<R>(sums, rows, 0, w);
      rows.advance(Kind::kXBytes);
      w += kPanel;
    }
    if (k % Kind::kElements) Kind::template last<R>(sums, rows, w);

#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h)
        out.finish(sums[r][h], r, h * kWidth);
  }
};

template <class Kind, int... R>
PAGED_INLINE auto tile_of(int64_t rows, std::integer_sequence<int, R...>) {
  static constexpr decltype(&Tile<Kind, 1>::run) kTable[] = {&Tile<Kind, R + 1>::run...};
  return kTable[rows - 1];
}

template <class Kind>
PAGED_INLINE auto tile_of(int64_t rows) {
  return tile_of<Kind>(rows, std::make_integer_sequence<int, kTileRows>());
}

// y[T, N] = x * weight^T + bias, x with `ldx` elements from row to row, y contiguous. Where `half` is not null, it takes
// the result, rounded once, and y is for the sums of all blocks of K but the last.
template <class Kind>
void gemm(const typename Kind::X* x, int64_t ldx, const typename Kind::Lane* weight, const float* bias, float* y,
          bf16* half, int64_t T, int64_t N, int64_t K) {
  const int64_t lanes = ceil_div(K, Kind::kElements) * kPanel, panels = ceil_div(N, kPanel);
  const int64_t k_blocks = ceil_div(K, kBlockK), pairs = ceil_div(K, 2);
  const Pieces tiles(T, ceil_div(T, kTileRows));
  const int64_t tile_bytes = static_cast<int64_t>(sizeof(typename Kind::X)) * kTileRows * ceil_div(K, k_blocks);
  const Pieces row_blocks(tiles.parts, ceil_div(tiles.parts, std::max<int64_t>(1, kRowBlockBytes / tile_bytes)));

#pragma omp parallel
  {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (int64_t rb = 0; rb < row_blocks.parts; ++rb) {
      const int64_t tile0 = row_blocks.begin(rb), block_tiles = row_blocks.begin(rb + 1) - tile0;
      const Pieces shares(panels * block_tiles, threads);
      const int64_t first = shares.begin(thread), last = shares.begin(thread + 1);
      for (int64_t kb = 0; kb < k_blocks; ++kb) {
        const Pieces k_block(pairs, k_blocks);
        const int64_t k0 = 2 * k_block.begin(kb), k1 = std::min(K, 2 * k_block.begin(kb + 1));
        const Ahead ahead(block_tiles, (k1 - k0) / Kind::kElements);
        int64_t panel = first / block_tiles, tile = first % block_tiles;
        for (int64_t item = first; item < last; ++item) {
          const int64_t r0 = tiles.begin(tile0 + tile), r1 = tiles.begin(tile0 + tile + 1), n0 = panel * kPanel;
          const auto* w = weight + panel * lanes + k0 / Kind::kElements * kPanel;
          const Output out{y + r0 * N + n0,
                           half && kb + 1 == k_blocks ? half + r0 * N + n0 : nullptr,
                           N,
                           static_cast<int>(std::min<int64_t>(kPanel, N - n0)),
                           bias && kb == 0 ? bias + n0 : nullptr,
                           kb > 0};
          tile_of<Kind>(r1 - r0)(x + r0 * ldx + k0, ldx, w, k1 - k0, ahead.of(w, w + lanes, tile), ahead.lines, out);
          if (++tile == block_tiles) {
            tile = 0;
            ++panel;
          }
        }
      }
    }
  }
}

// Lanes of a packed weight [N, K].
template <class Kind>
int64_t packed_lanes(int64_t N, int64_t K) {
  return ceil_div(N, kPanel) * ceil_div(K, Kind::kElements) * kPanel;
}

// weight [N, K] row-major into `packed`, untouched memory that is asked to lie in huge pages first.
template <class Element>
void pack(const Element* weight, Element* packed, int64_t N, int64_t K) {
  constexpr int64_t kElements = sizeof(float) / sizeof(Element);
  const int64_t rows = ceil_div(K, kElements), panels = ceil_div(N, kPanel);
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(packed) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = reinterpret_cast<uintptr_t>(packed + panels * rows * kPanel * kElements) / kHuge * kHuge;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < panels; ++panel) {
    Element* to = packed + panel * rows * kPanel * kElements;
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t column = 0; column < kPanel; ++column)
        for (int64_t e = 0; e < kElements; ++e) {
          const int64_t n = panel * kPanel + column, k = row * kElements + e;
          *to++ = n < N && k < K ? weight[n * K + k] : Element{};
        }
  }
}

// out[T, K] = rows `ids` of the packed weight [N, K].
template <class Element, class Out, class Convert>
void gather(const Element* packed, const int64_t* ids, Out* out, int64_t T, int64_t K, Convert convert) {
  constexpr int64_t kElements = sizeof(float) / sizeof(Element);
  const int64_t rows = ceil_div(K, kElements);
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < T; ++t) {
    const Element* column = packed + (ids[t] / kPanel * rows * kPanel + ids[t] % kPanel) * kElements;
    for (int64_t k = 0; k < K; ++k)
      out[t * K + k] = convert(column[k / kElements * kPanel * kElements + k % kElements]);
  }
}

}  // namespace paged

extern "C" {

int paged_width() { return paged::kWidth; }

int64_t paged_packed_lanes_float32(int64_t N, int64_t K) { return paged::packed_lanes<paged::Float32>(N, K); }
int64_t paged_packed_lanes_bfloat16(int64_t N, int64_t K) { return paged::packed_lanes<paged::Bf16Weight>(N, K); }

void paged_pack_float32(const float* weight, float* packed, int64_t N, int64_t K) { paged::pack(weight, packed, N, K); }
void paged_pack_bfloat16(const paged::bf16* weight, paged::bf16* packed, int64_t N, int64_t K) {
  paged::pack(weight, packed, N, K);
}

void paged_linear_float32(const float* x, int64_t ldx, const float* weight, const float* bias, float* y, int64_t T,
                          int64_t N, int64_t K) {
  paged::gemm<paged::Float32>(x, ldx, weight, bias, y, nullptr, T, N, K);
}
void paged_linear_bfloat16(const float* x, int64_t ldx, const int32_t* weight, const float* bias, float* y, int64_t T,
                           int64_t N, int64_t K) {
  paged::gemm<paged::Bf16Weight>(x, ldx, weight, bias, y, nullptr, T, N, K);
}

#if defined(PAGED_BF16_DOT)
void paged_linear_bfloat16_dot(const paged::bf16* x, int64_t ldx, const int32_t* weight, const float* bias, float* y,
                               int64_t T, int64_t N, int64_t K) {
  paged::gemm<paged::Bf16Both>(x, ldx, weight, bias, y, nullptr, T, N, K);
}
// `sums` [T, N] is scratch.
void paged_linear_bfloat16_dot_half(const paged::bf16* x, int64_t ldx, const int32_t* weight, const float* bias,
                                    float* sums, paged::bf16* y, int64_t T, int64_t N, int64_t K) {
  paged::gemm<paged::Bf16Both>(x, ldx, weight, bias, sums, y, T, N, K);
}
#endif

void paged_gather_float32(const float* packed, const int64_t* ids, float* out, int64_t T, int64_t K) {
  paged::gather(packed, ids, out, T, K, [](float v) { return v; });
}
void paged_gather_bfloat16(const paged::bf16* packed, const int64_t* ids, float* out, int64_t T, int64_t K) {
  paged::gather(packed, ids, out, T, K, [](paged::bf16 v) { return paged::to_float(v); });
}
void paged_gather_bfloat16_raw(const paged::bf16* packed, const int64_t* ids, paged::bf16* out, int64_t T, int64_t K) {
  paged::gather(packed, ids, out, T, K, [](paged::bf16 v) { return v; });
}

}  // extern "C"
