// Products with weights of 4 and 8 bits.
//
// Weights only (`paged_linear_codes`): a slice of a panel is turned into float32 in memory that stays in L1, and the
// float32 tiles of gemm.h multiply with it; every weight is turned once for a whole batch of rows and read from memory
// in its few bits. The chain of FMAs of an output is the same whatever the batch.
//
// Both sides in int8 (`paged_linear_int8`): sums are exact int32. A row of lanes of a panel holds two consecutive k for
// each of kPanel outputs; int8 weights are widened in registers and multiplied with int16 pairs of the rounded
// activations, which processors without VNNI do at twice the rate of float32.
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
          const Output out{y + r0 * N + n0, N, static_cast<int>(std::min<int64_t>(kPanel, N - n0)),
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

// One half of a row of lanes: kWidth outputs, two k each.
PAGED_INLINE vi widen_pairs(const int8_t* w) {
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

// sum + the products of the int16 halves of a and b
PAGED_INLINE vi dot_pairs(vi sum, vi a, vi b) {
#if defined(PAGED_AVX512) && defined(__AVX512VNNI__) && !defined(PAGED_SIMDE)
  return {_mm512_dpwssd_epi32(sum.v, a.v, b.v)};
#elif defined(PAGED_AVX512) && !defined(PAGED_SIMDE)
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(a.v, b.v))};
#elif defined(PAGED_AVX2)
  return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(a.v, b.v))};
#else
  return sum + shr_arithmetic<16>(shl<16>(a)) * shr_arithmetic<16>(shl<16>(b)) +
         shr_arithmetic<16>(a) * shr_arithmetic<16>(b);
#endif
}

// Where a tile of int8 products goes: sum * row scale * column scale + bias.
struct ScaledOutput {
  float* y;
  int64_t ldy;
  int columns;
  const float* row_scales;
  const float* column_scales;
  const float* bias;
};

template <int R>
struct Int8Tile {
  static void run(const int16_t* x, int64_t ldx, const int8_t* w, int64_t pairs, const ScaledOutput& out) {
    vi sums[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = vi::zero();
    Rows<R> rows(x, 2 * ldx);
    for (; pairs >= 4; pairs -= 4) {
      __builtin_prefetch(w + 4096, 0, 2);
      __builtin_prefetch(w + 4096 + 64, 0, 2);
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) step(sums, rows, 4 * u, w + u * 2 * kPanel);
      rows.advance(16);
      w += 8 * kPanel;
    }
    for (; pairs > 0; --pairs, w += 2 * kPanel) {
      step(sums, rows, 0, w);
      rows.advance(4);
    }
    float column_scales[kPanel] = {}, bias[kPanel] = {};
    for (int c = 0; c < out.columns; ++c) {
      column_scales[c] = out.column_scales[c];
      if (out.bias) bias[c] = out.bias[c];
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const int n = out.columns - h * kWidth;
        const vf scale = vf::set(out.row_scales[r]) * vf::load(column_scales + h * kWidth);
        const vf value = fma(to_float(sums[r][h]), scale, vf::load(bias + h * kWidth));
        if (n > 0) store_n(out.y + r * out.ldy + h * kWidth, value, n);
      }
  }

 private:
  PAGED_INLINE static void step(vi (&sums)[R][2], const Rows<R>& x, int64_t byte, const int8_t* w) {
    vi w0 = widen_pairs(w), w1 = widen_pairs(w + kPanel);
    PAGED_PIN(w0);
    PAGED_PIN(w1);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vi a = vi::set(x.template at<int32_t>(r, byte));
      sums[r][0] = dot_pairs(sums[r][0], a, w0);
      sums[r][1] = dot_pairs(sums[r][1], a, w1);
      PAGED_PIN(sums[r][0]);
      PAGED_PIN(sums[r][1]);
    }
  }
};

template <int... R>
PAGED_INLINE auto int8_tile_of(int64_t rows, std::integer_sequence<int, R...>) {
  static constexpr decltype(&Int8Tile<1>::run) kTable[] = {&Int8Tile<R + 1>::run...};
  return kTable[rows - 1];
}

// A row of K floats to numbers of at most 127 (nearest, ties to even), `to` having an even number of them. Returns the
// scale, 0 for a row of zeros.
inline float round_row(const float* x, int16_t* to, int64_t K) {
  vf most = vf::zero();
  int64_t k = 0;
  for (; k + kWidth <= K; k += kWidth) most = max(most, abs(vf::load(x + k)));
  float largest = hmax(most);
  for (; k < K; ++k) largest = std::max(largest, x[k] < 0 ? -x[k] : x[k]);
  const float scale = largest / 127.0f;
  const vf divisor = vf::set(scale > 0 ? scale : 1.0f);
  for (k = 0; k < K; k += kWidth) {
    const int n = static_cast<int>(std::min<int64_t>(kWidth, K - k));
    int32_t numbers[kWidth];
    store(numbers, round_to_int(load_n(x + k, n) / divisor));
    for (int i = 0; i < n; ++i) to[k + i] = static_cast<int16_t>(numbers[i]);
  }
  if (K % 2) to[K] = 0;
  return scale;
}

// y[T, N] = x * (weight * scales)^T + bias, x rounded to int8 a row at a time. `rounded` [T, K rounded up to even] and
// `row_scales` [T] are scratch.
inline void gemm_int8(const float* x, int64_t ldx, int16_t* rounded, float* row_scales, const int8_t* weight,
                      const float* scales, const float* bias, float* y, int64_t T, int64_t N, int64_t K) {
  const int64_t pairs = ceil_div(K, 2), panels = ceil_div(N, kPanel);
  const Pieces tiles(T, ceil_div(T, kTileRows));
  const Pieces row_blocks(tiles.parts, ceil_div(tiles.parts, std::max<int64_t>(1, kRowBlockBytes / (4 * kTileRows * pairs))));
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < T; ++t) row_scales[t] = round_row(x + t * ldx, rounded + t * 2 * pairs, K);
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (int64_t rb = 0; rb < row_blocks.parts; ++rb) {
      const int64_t tile0 = row_blocks.begin(rb), block_tiles = row_blocks.begin(rb + 1) - tile0;
      const Pieces shares(panels * block_tiles, threads);
      const int64_t last = shares.begin(thread + 1);
      for (int64_t item = shares.begin(thread); item < last; ++item) {
        const int64_t panel = item / block_tiles, tile = item % block_tiles, n0 = panel * kPanel;
        const int64_t r0 = tiles.begin(tile0 + tile), r1 = tiles.begin(tile0 + tile + 1);
        const ScaledOutput out{y + r0 * N + n0, N, static_cast<int>(std::min<int64_t>(kPanel, N - n0)),
                               row_scales + r0, scales + n0, bias ? bias + n0 : nullptr};
        int8_tile_of(r1 - r0, std::make_integer_sequence<int, kTileRows>())(
            rounded + r0 * 2 * pairs, 2 * pairs, weight + panel * pairs * 2 * kPanel, pairs, out);
      }
    }
  }
}

// weight [N, K] into panels [pairs, kPanel, 2].
inline void pack_int8(const int8_t* weight, int8_t* packed, int64_t N, int64_t K) {
  const int64_t panels = ceil_div(N, kPanel), pairs = ceil_div(K, 2);
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < panels; ++panel) {
    int8_t* to = packed + panel * pairs * 2 * kPanel;
    for (int64_t pair = 0; pair < pairs; ++pair)
      for (int64_t c = 0; c < kPanel; ++c)
        for (int64_t e = 0; e < 2; ++e) {
          const int64_t n = panel * kPanel + c, k = 2 * pair + e;
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

void paged_pack_int8(const int8_t* weight, int8_t* packed, int64_t N, int64_t K) {
  paged::pack_int8(weight, packed, N, K);
}
void paged_linear_int8(const float* x, int64_t ldx, int16_t* rounded, float* row_scales, const int8_t* weight,
                       const float* scales, const float* bias, float* y, int64_t T, int64_t N, int64_t K) {
  paged::gemm_int8(x, ldx, rounded, row_scales, weight, scales, bias, y, T, N, K);
}

}  // extern "C"
