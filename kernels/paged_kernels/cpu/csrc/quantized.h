// Products with weights of 4 and 8 bits.
//
// Weights only (`paged_linear_codes`): a slice of a panel is turned into float32 in memory that stays in L1, and the
// float32 tiles of gemm.h multiply with it; every weight is turned once for a whole batch of rows and read from memory
// in its few bits. The chain of FMAs of an output is the same whatever the batch.
//
// Both sides in int8 (`paged_linear_int8`): sums are exact int32. A row of lanes of a panel holds some consecutive k for
// each of kPanel outputs: four with VNNI, which multiplies signed weights with unsigned activations, numbers around 128;
// else two, widened in registers and multiplied with int16 pairs, at twice the rate of float32.
#pragma once

#include "gemm.h"

namespace paged {

constexpr int64_t kCodesBlockK = 256;

// A format turns kPanel codes at a time into numbers. kPerByte codes of consecutive k share a byte, the first in the
// low bits.
struct Nibbles {
  static constexpr int kPerByte = 2;
  template <int E>
  PAGED_INLINE static float number(uint8_t byte) {
    return static_cast<float>(static_cast<int32_t>(E ? byte >> 4 : byte & 15));
  }
};
struct Bytes {
  static constexpr int kPerByte = 1;
  template <int E>
  PAGED_INLINE static float number(uint8_t byte) {
    return static_cast<float>(static_cast<int32_t>(byte));
  }
};
struct Float8 {  // e4m3fn: exponent and mantissa at the top of a float's, the bias put right by a power of 2
  static constexpr int kPerByte = 1;
  template <int E>
  PAGED_INLINE static float number(uint8_t byte) {
    const uint32_t bits = static_cast<uint32_t>(byte & 0x80) << 24 | static_cast<uint32_t>(byte & 0x7f) << 20;
    float value;
    std::memcpy(&value, &bits, 4);
    return value * 0x1p120f;
  }
};

// A weight [N, K]: number (code - zero) * scale with scales and zeros [ceil(K / group), panels * kPanel].
struct Codes {
  const uint8_t* codes;
  const float* scales;
  const float* zeros;
  int64_t group, stride;
};

// to[c] = number E of bytes[c], zero and scale applied
template <class Format, int E>
PAGED_INLINE void unpack_row(const uint8_t* bytes, const float* scale, const float* zero, float* to) {
#pragma omp simd
  for (int c = 0; c < kPanel; ++c) to[c] = (Format::template number<E>(bytes[c]) - zero[c]) * scale[c];
}

// to[k1 - k0, kPanel] = the panel's weights of k0 .. k1 - 1, k0 even.
template <class Format>
void unpack(const Codes& weight, int64_t panel, int64_t K, int64_t k0, int64_t k1, float* to) {
  constexpr int kPer = Format::kPerByte;
  const uint8_t* bytes = weight.codes + (panel * ceil_div(K, kPer) + k0 / kPer) * kPanel;
  for (int64_t k = k0; k < k1;) {
    const int64_t g = k / weight.group, end = std::min(k1, (g + 1) * weight.group);
    const float* scale = weight.scales + g * weight.stride + panel * kPanel;
    const float* zero = weight.zeros + g * weight.stride + panel * kPanel;
    float s[kPanel], z[kPanel];
    for (int c = 0; c < kPanel; ++c) s[c] = scale[c], z[c] = zero[c];
    for (; k < end; k += kPer, bytes += kPanel, to += kPer * kPanel) {
      unpack_row<Format, 0>(bytes, s, z, to);
      if constexpr (kPer == 2) unpack_row<Format, 1>(bytes, s, z, to + kPanel);
    }
  }
}

// y[T, N] = x[T, K] * weight^T + bias; groups are of an even number of inputs where codes share bytes.
template <class Format>
void gemm_codes(const float* x, int64_t ldx, const Codes& weight, const float* bias, float* y, int64_t T, int64_t N,
                int64_t K) {
  const int64_t panels = ceil_div(N, kPanel), k_blocks = ceil_div(K, kCodesBlockK);
  const Pieces tiles(T, ceil_div(T, kTileRows));
  const int64_t tile_bytes = 4 * kTileRows * kCodesBlockK;
  const Pieces row_blocks(tiles.parts, ceil_div(tiles.parts, std::max<int64_t>(1, kRowBlockBytes / tile_bytes)));
#pragma omp parallel
  {
    alignas(64) float slice[kCodesBlockK * kPanel + kPanel];
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (int64_t rb = 0; rb < row_blocks.parts; ++rb) {
      const int64_t tile0 = row_blocks.begin(rb), block_tiles = row_blocks.begin(rb + 1) - tile0;
      const Pieces shares(panels * block_tiles, threads);
      const int64_t first = shares.begin(thread), last = shares.begin(thread + 1);
      for (int64_t kb = 0; kb < k_blocks; ++kb) {
        const int64_t k0 = kb * kCodesBlockK, k1 = std::min(K, k0 + kCodesBlockK);
        int64_t unpacked = -1;
        for (int64_t item = first; item < last; ++item) {
          const int64_t panel = item / block_tiles, tile = item % block_tiles, n0 = panel * kPanel;
          if (panel != unpacked) unpack<Format>(weight, unpacked = panel, K, k0, k1, slice);
          const int64_t r0 = tiles.begin(tile0 + tile), r1 = tiles.begin(tile0 + tile + 1);
          const Output out{y + r0 * N + n0, nullptr, N, static_cast<int>(std::min<int64_t>(kPanel, N - n0)),
                           bias && kb == 0 ? bias + n0 : nullptr, kb > 0};
          tile_of<Float32>(r1 - r0)(x + r0 * ldx + k0, ldx, slice, k1 - k0, nullptr, 0, out);
        }
      }
    }
  }
}

// codes [N, K], one in a byte, into panels of kPer codes a byte; rows beyond N and k beyond K are 0.
template <class Format>
void pack_codes(const uint8_t* codes, uint8_t* packed, int64_t N, int64_t K) {
  constexpr int kPer = Format::kPerByte;
  const int64_t panels = ceil_div(N, kPanel), rows = ceil_div(K, kPer);
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < panels; ++panel) {
    uint8_t* to = packed + panel * rows * kPanel;
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t c = 0; c < kPanel; ++c) {
        const int64_t n = panel * kPanel + c;
        uint8_t byte = 0;
        for (int e = 0; e < kPer; ++e) {
          const int64_t k = row * kPer + e;
          if (n < N && k < K) byte |= static_cast<uint8_t>(codes[n * K + k] << (4 * e));
        }
        *to++ = byte;
      }
  }
}

// int8 on both sides ----------------------------------------------------------------------------------------------

#if defined(PAGED_AVX512) && defined(__AVX512VNNI__) && !defined(PAGED_SIMDE)
struct Int8 {
  using X = uint8_t;
  static constexpr int kPer = 4;
  static constexpr int32_t kZero = 128;
  PAGED_INLINE static vi weights(const int8_t* w) { return {_mm512_loadu_si512(w)}; }
  PAGED_INLINE static vi dot(vi sum, vi x, vi w) { return {_mm512_dpbusd_epi32(sum.v, x.v, w.v)}; }
};
#else
struct Int8 {
  using X = int16_t;
  static constexpr int kPer = 2;
  static constexpr int32_t kZero = 0;

  PAGED_INLINE static vi weights(const int8_t* w) {
#if defined(PAGED_AVX512) && !defined(PAGED_SIMDE)
    return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)))};
#elif defined(PAGED_AVX2)
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)))};
#else
    int32_t lanes[kWidth];
    for (int c = 0; c < kWidth; ++c)
      lanes[c] = static_cast<int32_t>(static_cast<uint16_t>(w[2 * c])) | static_cast<int32_t>(w[2 * c + 1]) << 16;
    return vi::load(lanes);
#endif
  }

  PAGED_INLINE static vi dot(vi sum, vi x, vi w) {
#if defined(PAGED_AVX512) && !defined(PAGED_SIMDE)
    return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(x.v, w.v))};
#elif defined(PAGED_AVX2)
    return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(x.v, w.v))};
#else
    return sum + shr_arithmetic<16>(shl<16>(x)) * shr_arithmetic<16>(shl<16>(w)) +
           shr_arithmetic<16>(x) * shr_arithmetic<16>(w);
#endif
  }
};
#endif

// Where a tile of int8 products goes: (sum - what kZero added) * row scale * column scale + bias.
template <class A>
struct ScaledOutput {
  A* y;
  int64_t ldy;
  int columns;
  const float* row_scales;
  const float* column_scales;
  const int32_t* zeros;
  const float* bias;
};

template <class A, int R>
struct Int8Tile {
  static constexpr int kRow = Int8::kPer * kPanel;  // bytes of a row of lanes

  static void run(const Int8::X* x, int64_t stride, const int8_t* w, int64_t rows_of_lanes, const ScaledOutput<A>& out) {
    vi sums[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = vi::zero();
    Rows<R> rows(x, stride);
    for (; rows_of_lanes >= 4; rows_of_lanes -= 4) {
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) {
        __builtin_prefetch(w + 4096 + u * kRow, 0, 2);
        step(sums, rows, 4 * u, w + u * kRow);
      }
      rows.advance(16);
      w += 4 * kRow;
    }
    for (; rows_of_lanes > 0; --rows_of_lanes, w += kRow) {
      step(sums, rows, 0, w);
      rows.advance(4);
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const int from = h * kWidth, n = out.columns - from;
      if (n <= 0) break;
      int32_t zeros[kWidth] = {};
      std::memcpy(zeros, out.zeros + from, 4 * std::min(n, kWidth));
      const vf column_scale = load_n(out.column_scales + from, n);
      const vf bias = out.bias ? load_n(out.bias + from, n) : vf::zero();
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vf scale = vf::set(out.row_scales[r]) * column_scale;
        store_n(out.y + r * out.ldy + from, fma(to_float(sums[r][h] - vi::load(zeros)), scale, bias), n);
      }
    }
  }

 private:
  PAGED_INLINE static void step(vi (&sums)[R][2], const Rows<R>& x, int64_t byte, const int8_t* w) {
    vi w0 = Int8::weights(w), w1 = Int8::weights(w + kRow / 2);
    if constexpr (Int8::kPer == 2) {  // or the compiler widens weights for every row
      PAGED_PIN(w0);
      PAGED_PIN(w1);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vi a = vi::set(x.template at<int32_t>(r, byte));
      sums[r][0] = Int8::dot(sums[r][0], a, w0);
      sums[r][1] = Int8::dot(sums[r][1], a, w1);
      if constexpr (Int8::kPer == 2) {
        PAGED_PIN(sums[r][0]);
        PAGED_PIN(sums[r][1]);
      }
    }
  }
};

template <class A, int... R>
PAGED_INLINE auto int8_tile_of(int64_t rows, std::integer_sequence<int, R...>) {
  static constexpr decltype(&Int8Tile<A, 1>::run) kTable[] = {&Int8Tile<A, R + 1>::run...};
  return kTable[rows - 1];
}

// A row of K numbers to whole ones of at most 127 (nearest, ties to even) around kZero. Returns the scale, 0 for a row of
// zeros, NaN for one that is not finite.
template <class A>
inline float round_row(const A* x, Int8::X* to, int64_t K) {
  vf most = vf::zero(), nothing = vf::zero();
  for (int64_t k = 0; k < K; k += kWidth) {
    const vf a = load_n(x + k, static_cast<int>(std::min<int64_t>(kWidth, K - k)));
    most = max(most, abs(a));
    nothing = fma(a, vf::zero(), nothing);
  }
  const float scale = hmax(most) / 127.0f + hsum(nothing);
  const vf divisor = vf::set(scale > 0 ? scale : 1.0f);
  for (int64_t k = 0; k < K; k += kWidth) {
    const int n = static_cast<int>(std::min<int64_t>(kWidth, K - k));
    int32_t numbers[kWidth];
    Int8::X narrow[kWidth];
    store(numbers, round_to_int(load_n(x + k, n) / divisor) + vi::set(Int8::kZero));
    for (int i = 0; i < kWidth; ++i) narrow[i] = static_cast<Int8::X>(numbers[i]);
    std::memcpy(to + k, narrow, n * sizeof(Int8::X));
  }
  return scale;
}

// y[T, N] = x * (weight * scales)^T + bias, x rounded to int8 a row at a time. `rounded` [T, K rounded up to kPer] and
// `row_scales` [T] are scratch; zeros [N] are kZero times the sums of the weight's rows.
template <class A>
void gemm_int8(const A* x, int64_t ldx, Int8::X* rounded, float* row_scales, const int8_t* weight, const float* scales,
               const int32_t* zeros, const float* bias, A* y, int64_t T, int64_t N, int64_t K) {
  const int64_t lanes = ceil_div(K, Int8::kPer), panels = ceil_div(N, kPanel), stride = lanes * Int8::kPer;
  const Pieces tiles(T, ceil_div(T, kTileRows));
  const Pieces row_blocks(tiles.parts, ceil_div(tiles.parts, std::max<int64_t>(1, kRowBlockBytes / (4 * kTileRows * lanes))));
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < T; ++t) row_scales[t] = round_row(x + t * ldx, rounded + t * stride, K);
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (int64_t rb = 0; rb < row_blocks.parts; ++rb) {
      const int64_t tile0 = row_blocks.begin(rb), block_tiles = row_blocks.begin(rb + 1) - tile0;
      const Pieces shares(panels * block_tiles, threads);
      const int64_t last = shares.begin(thread + 1);
      for (int64_t item = shares.begin(thread); item < last; ++item) {
        const int64_t panel = item / block_tiles, tile = item % block_tiles, n0 = panel * kPanel;
        const int64_t r0 = tiles.begin(tile0 + tile), r1 = tiles.begin(tile0 + tile + 1);
        const ScaledOutput<A> out{y + r0 * N + n0, N, static_cast<int>(std::min<int64_t>(kPanel, N - n0)),
                                  row_scales + r0, scales + n0, zeros + n0, bias ? bias + n0 : nullptr};
        int8_tile_of<A>(r1 - r0, std::make_integer_sequence<int, kTileRows>())(
            rounded + r0 * stride, stride * static_cast<int64_t>(sizeof(Int8::X)),
            weight + panel * lanes * Int8::kPer * kPanel, lanes, out);
      }
    }
  }
}

// weight [N, K] into panels [lanes, kPanel, kPer].
inline void pack_int8(const int8_t* weight, int8_t* packed, int64_t N, int64_t K) {
  const int64_t panels = ceil_div(N, kPanel), lanes = ceil_div(K, Int8::kPer);
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < panels; ++panel) {
    int8_t* to = packed + panel * lanes * Int8::kPer * kPanel;
    for (int64_t lane = 0; lane < lanes; ++lane)
      for (int64_t c = 0; c < kPanel; ++c)
        for (int64_t e = 0; e < Int8::kPer; ++e) {
          const int64_t n = panel * kPanel + c, k = Int8::kPer * lane + e;
          *to++ = n < N && k < K ? weight[n * K + k] : 0;
        }
  }
}

}  // namespace paged

extern "C" {

int paged_panel() { return paged::kPanel; }

#define PAGED_CODES(name, Format)                                                                                    \
  void paged_pack_codes_##name(const uint8_t* codes, uint8_t* packed, int64_t N, int64_t K) {                        \
    paged::pack_codes<paged::Format>(codes, packed, N, K);                                                           \
  }                                                                                                                  \
  void paged_linear_codes_##name(const float* x, int64_t ldx, const uint8_t* codes, const float* scales,             \
                                 const float* zeros, int64_t group, const float* bias, float* y, int64_t T,          \
                                 int64_t N, int64_t K) {                                                             \
    const int64_t stride = paged::ceil_div(N, paged::kPanel) * paged::kPanel;                                        \
    paged::gemm_codes<paged::Format>(x, ldx, {codes, scales, zeros, group, stride}, bias, y, T, N, K);               \
  }
PAGED_CODES(nibble, Nibbles)
PAGED_CODES(byte, Bytes)
PAGED_CODES(float8, Float8)
#undef PAGED_CODES

int paged_int8_per_lane() { return paged::Int8::kPer; }
int paged_int8_zero() { return paged::Int8::kZero; }
void paged_pack_int8(const int8_t* weight, int8_t* packed, int64_t N, int64_t K) {
  paged::pack_int8(weight, packed, N, K);
}
#define PAGED_INT8(SUFFIX, A)                                                                                        \
  void paged_linear_int8_##SUFFIX(const A* x, int64_t ldx, void* rounded, float* row_scales, const int8_t* weight,   \
                                  const float* scales, const int32_t* zeros, const float* bias, A* y, int64_t T,     \
                                  int64_t N, int64_t K) {                                                            \
    paged::gemm_int8(x, ldx, static_cast<paged::Int8::X*>(rounded), row_scales, weight, scales, zeros, bias, y, T,   \
                     N, K);                                                                                          \
  }
PAGED_INT8(f32, float)
PAGED_INT8(bf16, paged::bf16)
#undef PAGED_INT8

}  // extern "C"
