// Float and int32 vectors of one compile-time width, the same code for AVX-512 (16 lanes), AVX2 + FMA (8) and any
// other CPU (8, GCC vectors). With PAGED_SIMDE the AVX-512 path is emulated, so that it can be run anywhere.
//
//   vf  lanes of float      vi  lanes of int32 (two's complement, wraps)      vm  one mask bit per lane
//
// Free functions named like <cmath> (fma, exp, log, sqrt, max, min, abs) take vectors; hsum, hmax, hmin reduce one.
// max(a, b) and min(a, b) return b where either is NaN, as x86 does (portable path included).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(PAGED_SIMDE)
#include "avx512_emulated.h"
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(PAGED_SIMDE) || (defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__))
#define PAGED_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__)
#define PAGED_AVX2 1
#else
#define PAGED_PORTABLE 1
#endif

#define PAGED_INLINE inline __attribute__((always_inline))

namespace paged {

struct bf16 {
  uint16_t bits;
};

PAGED_INLINE float to_float(bf16 x) {
  uint32_t u = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Round to nearest even; NaN stays NaN.
PAGED_INLINE bf16 to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16_t>((u >> 16) | 0x40u)};
  return bf16{static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

// Keep a value in a register here, so that the compiler neither reloads nor recomputes it further down.
#if defined(PAGED_SIMDE) || defined(PAGED_PORTABLE)
#define PAGED_PIN(x) (void)(x)
#elif defined(PAGED_AVX512)
#define PAGED_PIN(x) asm("" : "+v"((x).v))
#else
#define PAGED_PIN(x) asm("" : "+x"((x).v))
#endif

PAGED_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

#if defined(PAGED_AVX512)

constexpr int kWidth = 16;

struct vm {
  __mmask16 v;
};
struct vi {
  __m512i v;
  PAGED_INLINE static vi zero() { return {_mm512_setzero_si512()}; }
  PAGED_INLINE static vi set(int32_t x) { return {_mm512_set1_epi32(x)}; }
  PAGED_INLINE static vi iota() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
  PAGED_INLINE static vi load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
};
struct vf {
  __m512 v;
  static constexpr int width = kWidth;
  PAGED_INLINE static vf zero() { return {_mm512_setzero_ps()}; }
  PAGED_INLINE static vf set(float x) { return {_mm512_set1_ps(x)}; }
  PAGED_INLINE static vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
  PAGED_INLINE static vf load(const bf16* p) {
    __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
  }
};
struct vfpair {
  vf even, odd;
};

// The first n lanes, n >= 0.
PAGED_INLINE vm first_n(int n) { return {static_cast<__mmask16>(n >= 16 ? 0xffffu : (1u << n) - 1u)}; }
PAGED_INLINE uint32_t bits(vm m) { return m.v; }
PAGED_INLINE vm operator&(vm a, vm b) { return {static_cast<__mmask16>(a.v & b.v)}; }
PAGED_INLINE vm operator|(vm a, vm b) { return {static_cast<__mmask16>(a.v | b.v)}; }
PAGED_INLINE vm operator~(vm a) { return {static_cast<__mmask16>(~a.v)}; }

PAGED_INLINE void store(float* p, vf x) { _mm512_storeu_ps(p, x.v); }
PAGED_INLINE void store(int32_t* p, vi x) { _mm512_storeu_si512(p, x.v); }

PAGED_INLINE vf bitcast_f(vi x) { return {_mm512_castsi512_ps(x.v)}; }
PAGED_INLINE vi bitcast_i(vf x) { return {_mm512_castps_si512(x.v)}; }
PAGED_INLINE vf to_float(vi x) { return {_mm512_cvtepi32_ps(x.v)}; }
PAGED_INLINE vi round_to_int(vf x) { return {_mm512_cvtps_epi32(x.v)}; }

PAGED_INLINE vf operator+(vf a, vf b) { return {_mm512_add_ps(a.v, b.v)}; }
PAGED_INLINE vf operator-(vf a, vf b) { return {_mm512_sub_ps(a.v, b.v)}; }
PAGED_INLINE vf operator*(vf a, vf b) { return {_mm512_mul_ps(a.v, b.v)}; }
PAGED_INLINE vf operator/(vf a, vf b) { return {_mm512_div_ps(a.v, b.v)}; }
PAGED_INLINE vf fma(vf a, vf b, vf c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
PAGED_INLINE vf fnma(vf a, vf b, vf c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
PAGED_INLINE vf max(vf a, vf b) { return {_mm512_max_ps(a.v, b.v)}; }
PAGED_INLINE vf min(vf a, vf b) { return {_mm512_min_ps(a.v, b.v)}; }
PAGED_INLINE vf sqrt(vf a) { return {_mm512_sqrt_ps(a.v)}; }
PAGED_INLINE vm operator<(vf a, vf b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
PAGED_INLINE vm operator<=(vf a, vf b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
PAGED_INLINE vm operator==(vf a, vf b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
PAGED_INLINE vm is_nan(vf a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
PAGED_INLINE vf select(vm m, vf yes, vf no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }

PAGED_INLINE vi operator+(vi a, vi b) { return {_mm512_add_epi32(a.v, b.v)}; }
PAGED_INLINE vi operator-(vi a, vi b) { return {_mm512_sub_epi32(a.v, b.v)}; }
PAGED_INLINE vi operator*(vi a, vi b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
PAGED_INLINE vi operator&(vi a, vi b) { return {_mm512_and_si512(a.v, b.v)}; }
PAGED_INLINE vi operator|(vi a, vi b) { return {_mm512_or_si512(a.v, b.v)}; }
PAGED_INLINE vi operator^(vi a, vi b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int S>
PAGED_INLINE vi shl(vi a) { return {_mm512_slli_epi32(a.v, S)}; }
template <int S>
PAGED_INLINE vi shr_logical(vi a) { return {_mm512_srli_epi32(a.v, S)}; }
template <int S>
PAGED_INLINE vi shr_arithmetic(vi a) { return {_mm512_srai_epi32(a.v, S)}; }
PAGED_INLINE vm operator<(vi a, vi b) { return {_mm512_cmpgt_epi32_mask(b.v, a.v)}; }
PAGED_INLINE vm operator==(vi a, vi b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
PAGED_INLINE vi select(vm m, vi yes, vi no) { return {_mm512_mask_blend_epi32(m.v, no.v, yes.v)}; }

// Unsigned 32 x 32 -> 64 bit product of each lane, as its high and low halves.
PAGED_INLINE void mul_hi_lo(vi a, vi b, vi& hi, vi& lo) {
  __m512i even = _mm512_mul_epu32(a.v, b.v);
  __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), _mm512_srli_epi64(b.v, 32));
  hi.v = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
  lo.v = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
}

PAGED_INLINE vf load_n(const float* p, int n) {
  if (n >= 16) return vf::load(p);
  return {_mm512_maskz_loadu_ps(first_n(n).v, p)};
}
PAGED_INLINE void store_n(float* p, vf x, int n) {
  if (n >= 16) return store(p, x);
  _mm512_mask_storeu_ps(p, first_n(n).v, x.v);
}

PAGED_INLINE vi compress(vi x, vm m) { return {_mm512_maskz_compress_epi32(m.v, x.v)}; }

PAGED_INLINE float hsum(vf x) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
PAGED_INLINE float hmax(vf x) {
  __m256 h = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

PAGED_INLINE void store(bf16* p, vf x) {
  __m512i u = _mm512_castps_si512(x.v);
  __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), lsb), 16);
  r = _mm512_mask_blend_epi32(is_nan(x).v, r, _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
}

#elif defined(PAGED_AVX2)

constexpr int kWidth = 8;

struct vm {
  __m256i v;
};
struct vi {
  __m256i v;
  PAGED_INLINE static vi zero() { return {_mm256_setzero_si256()}; }
  PAGED_INLINE static vi set(int32_t x) { return {_mm256_set1_epi32(x)}; }
  PAGED_INLINE static vi iota() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)}; }
  PAGED_INLINE static vi load(const int32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
};
struct vf {
  __m256 v;
  static constexpr int width = kWidth;
  PAGED_INLINE static vf zero() { return {_mm256_setzero_ps()}; }
  PAGED_INLINE static vf set(float x) { return {_mm256_set1_ps(x)}; }
  PAGED_INLINE static vf load(const float* p) { return {_mm256_loadu_ps(p)}; }
  PAGED_INLINE static vf load(const bf16* p) {
    __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))};
  }
};
struct vfpair {
  vf even, odd;
};

PAGED_INLINE vm first_n(int n) { return {_mm256_cmpgt_epi32(_mm256_set1_epi32(n), vi::iota().v)}; }
PAGED_INLINE uint32_t bits(vm m) { return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(m.v))); }
PAGED_INLINE vm operator&(vm a, vm b) { return {_mm256_and_si256(a.v, b.v)}; }
PAGED_INLINE vm operator|(vm a, vm b) { return {_mm256_or_si256(a.v, b.v)}; }
PAGED_INLINE vm operator~(vm a) { return {_mm256_xor_si256(a.v, _mm256_set1_epi32(-1))}; }

PAGED_INLINE void store(float* p, vf x) { _mm256_storeu_ps(p, x.v); }
PAGED_INLINE void store(int32_t* p, vi x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.v); }

PAGED_INLINE vf bitcast_f(vi x) { return {_mm256_castsi256_ps(x.v)}; }
PAGED_INLINE vi bitcast_i(vf x) { return {_mm256_castps_si256(x.v)}; }
PAGED_INLINE vf to_float(vi x) { return {_mm256_cvtepi32_ps(x.v)}; }
PAGED_INLINE vi round_to_int(vf x) { return {_mm256_cvtps_epi32(x.v)}; }

PAGED_INLINE vf operator+(vf a, vf b) { return {_mm256_add_ps(a.v, b.v)}; }
PAGED_INLINE vf operator-(vf a, vf b) { return {_mm256_sub_ps(a.v, b.v)}; }
PAGED_INLINE vf operator*(vf a, vf b) { return {_mm256_mul_ps(a.v, b.v)}; }
PAGED_INLINE vf operator/(vf a, vf b) { return {_mm256_div_ps(a.v, b.v)}; }
PAGED_INLINE vf fma(vf a, vf b, vf c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
PAGED_INLINE vf fnma(vf a, vf b, vf c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }
PAGED_INLINE vf max(vf a, vf b) { return {_mm256_max_ps(a.v, b.v)}; }
PAGED_INLINE vf min(vf a, vf b) { return {_mm256_min_ps(a.v, b.v)}; }
PAGED_INLINE vf sqrt(vf a) { return {_mm256_sqrt_ps(a.v)}; }
PAGED_INLINE vm operator<(vf a, vf b) { return {_mm256_castps_si256(_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))}; }
PAGED_INLINE vm operator<=(vf a, vf b) { return {_mm256_castps_si256(_mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ))}; }
PAGED_INLINE vm operator==(vf a, vf b) { return {_mm256_castps_si256(_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ))}; }
PAGED_INLINE vm is_nan(vf a) { return {_mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q))}; }
PAGED_INLINE vf select(vm m, vf yes, vf no) { return {_mm256_blendv_ps(no.v, yes.v, _mm256_castsi256_ps(m.v))}; }

PAGED_INLINE vi operator+(vi a, vi b) { return {_mm256_add_epi32(a.v, b.v)}; }
PAGED_INLINE vi operator-(vi a, vi b) { return {_mm256_sub_epi32(a.v, b.v)}; }
PAGED_INLINE vi operator*(vi a, vi b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
PAGED_INLINE vi operator&(vi a, vi b) { return {_mm256_and_si256(a.v, b.v)}; }
PAGED_INLINE vi operator|(vi a, vi b) { return {_mm256_or_si256(a.v, b.v)}; }
PAGED_INLINE vi operator^(vi a, vi b) { return {_mm256_xor_si256(a.v, b.v)}; }
template <int S>
PAGED_INLINE vi shl(vi a) { return {_mm256_slli_epi32(a.v, S)}; }
template <int S>
PAGED_INLINE vi shr_logical(vi a) { return {_mm256_srli_epi32(a.v, S)}; }
template <int S>
PAGED_INLINE vi shr_arithmetic(vi a) { return {_mm256_srai_epi32(a.v, S)}; }
PAGED_INLINE vm operator<(vi a, vi b) { return {_mm256_cmpgt_epi32(b.v, a.v)}; }
PAGED_INLINE vm operator==(vi a, vi b) { return {_mm256_cmpeq_epi32(a.v, b.v)}; }
PAGED_INLINE vi select(vm m, vi yes, vi no) { return {_mm256_blendv_epi8(no.v, yes.v, m.v)}; }

PAGED_INLINE void mul_hi_lo(vi a, vi b, vi& hi, vi& lo) {
  __m256i even = _mm256_mul_epu32(a.v, b.v);
  __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a.v, 32), _mm256_srli_epi64(b.v, 32));
  hi.v = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  lo.v = _mm256_mullo_epi32(a.v, b.v);
}

PAGED_INLINE vf load_n(const float* p, int n) {
  if (n >= 8) return vf::load(p);
  return {_mm256_maskload_ps(p, first_n(n).v)};
}
PAGED_INLINE void store_n(float* p, vf x, int n) {
  if (n >= 8) return store(p, x);
  _mm256_maskstore_ps(p, first_n(n).v, x.v);
}

// For each mask, the lanes that it sets, lowest first: one byte a lane.
struct CompressTable {
  uint64_t lanes[256];
  constexpr CompressTable() : lanes() {
    for (int mask = 0; mask < 256; ++mask)
      for (int lane = 0, n = 0; lane < 8; ++lane)
        if (mask >> lane & 1) lanes[mask] |= static_cast<uint64_t>(lane) << 8 * n++;
  }
};
inline constexpr CompressTable kCompress;
PAGED_INLINE vi compress(vi x, vm m) {
  __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&kCompress.lanes[bits(m)])));
  return {_mm256_permutevar8x32_epi32(x.v, lanes)};
}

PAGED_INLINE float hsum(vf x) {
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
PAGED_INLINE float hmax(vf x) {
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

PAGED_INLINE void store(bf16* p, vf x) {
  __m256i u = _mm256_castps_si256(x.v);
  __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), lsb), 16);
  r = _mm256_blendv_epi8(r, _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40)), is_nan(x).v);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

#else  // PAGED_PORTABLE

constexpr int kWidth = 8;

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint64_t u64x8 __attribute__((vector_size(64)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));

struct vm {
  i32x8 v;
};
struct vi {
  i32x8 v;
  PAGED_INLINE static vi zero() { return {i32x8{}}; }
  PAGED_INLINE static vi set(int32_t x) { return {i32x8{x, x, x, x, x, x, x, x}}; }
  PAGED_INLINE static vi iota() { return {i32x8{0, 1, 2, 3, 4, 5, 6, 7}}; }
  PAGED_INLINE static vi load(const int32_t* p) {
    vi r;
    std::memcpy(&r.v, p, sizeof r.v);
    return r;
  }
};
struct vf {
  f32x8 v;
  static constexpr int width = kWidth;
  PAGED_INLINE static vf zero() { return {f32x8{}}; }
  PAGED_INLINE static vf set(float x) { return {f32x8{x, x, x, x, x, x, x, x}}; }
  PAGED_INLINE static vf load(const float* p) {
    vf r;
    std::memcpy(&r.v, p, sizeof r.v);
    return r;
  }
  PAGED_INLINE static vf load(const bf16* p) {
    u16x8 h;
    std::memcpy(&h, p, sizeof h);
    return {reinterpret_cast<f32x8>(__builtin_convertvector(h, u32x8) << 16)};
  }
};
struct vfpair {
  vf even, odd;
};

PAGED_INLINE vm first_n(int n) { return {vi::iota().v < vi::set(n).v}; }
PAGED_INLINE uint32_t bits(vm m) {
  uint32_t r = 0;
  for (int i = 0; i < kWidth; ++i) r |= static_cast<uint32_t>(m.v[i] & 1) << i;
  return r;
}
PAGED_INLINE vm operator&(vm a, vm b) { return {a.v & b.v}; }
PAGED_INLINE vm operator|(vm a, vm b) { return {a.v | b.v}; }
PAGED_INLINE vm operator~(vm a) { return {~a.v}; }

PAGED_INLINE void store(float* p, vf x) { std::memcpy(p, &x.v, sizeof x.v); }
PAGED_INLINE void store(int32_t* p, vi x) { std::memcpy(p, &x.v, sizeof x.v); }

PAGED_INLINE vf bitcast_f(vi x) { return {reinterpret_cast<f32x8>(x.v)}; }
PAGED_INLINE vi bitcast_i(vf x) { return {reinterpret_cast<i32x8>(x.v)}; }
PAGED_INLINE vf to_float(vi x) { return {__builtin_convertvector(x.v, f32x8)}; }
PAGED_INLINE vi round_to_int(vf x) {
  vi r;
  for (int i = 0; i < kWidth; ++i) r.v[i] = static_cast<int32_t>(__builtin_rintf(x.v[i]));
  return r;
}

PAGED_INLINE vf operator+(vf a, vf b) { return {a.v + b.v}; }
PAGED_INLINE vf operator-(vf a, vf b) { return {a.v - b.v}; }
PAGED_INLINE vf operator*(vf a, vf b) { return {a.v * b.v}; }
PAGED_INLINE vf operator/(vf a, vf b) { return {a.v / b.v}; }
PAGED_INLINE vf fma(vf a, vf b, vf c) { return {a.v * b.v + c.v}; }
PAGED_INLINE vf fnma(vf a, vf b, vf c) { return {c.v - a.v * b.v}; }
PAGED_INLINE vf max(vf a, vf b) { return {a.v > b.v ? a.v : b.v}; }
PAGED_INLINE vf min(vf a, vf b) { return {a.v < b.v ? a.v : b.v}; }
PAGED_INLINE vf sqrt(vf a) {
  vf r;
  for (int i = 0; i < kWidth; ++i) r.v[i] = __builtin_sqrtf(a.v[i]);
  return r;
}
PAGED_INLINE vm operator<(vf a, vf b) { return {a.v < b.v}; }
PAGED_INLINE vm operator<=(vf a, vf b) { return {a.v <= b.v}; }
PAGED_INLINE vm operator==(vf a, vf b) { return {a.v == b.v}; }
PAGED_INLINE vm is_nan(vf a) { return {a.v != a.v}; }
PAGED_INLINE vf select(vm m, vf yes, vf no) { return {m.v ? yes.v : no.v}; }

PAGED_INLINE vi operator+(vi a, vi b) { return {reinterpret_cast<i32x8>((u32x8)a.v + (u32x8)b.v)}; }
PAGED_INLINE vi operator-(vi a, vi b) { return {reinterpret_cast<i32x8>((u32x8)a.v - (u32x8)b.v)}; }
PAGED_INLINE vi operator*(vi a, vi b) { return {reinterpret_cast<i32x8>((u32x8)a.v * (u32x8)b.v)}; }
PAGED_INLINE vi operator&(vi a, vi b) { return {a.v & b.v}; }
PAGED_INLINE vi operator|(vi a, vi b) { return {a.v | b.v}; }
PAGED_INLINE vi operator^(vi a, vi b) { return {a.v ^ b.v}; }
template <int S>
PAGED_INLINE vi shl(vi a) { return {reinterpret_cast<i32x8>((u32x8)a.v << S)}; }
template <int S>
PAGED_INLINE vi shr_logical(vi a) { return {reinterpret_cast<i32x8>((u32x8)a.v >> S)}; }
template <int S>
PAGED_INLINE vi shr_arithmetic(vi a) { return {a.v >> S}; }
PAGED_INLINE vm operator<(vi a, vi b) { return {a.v < b.v}; }
PAGED_INLINE vm operator==(vi a, vi b) { return {a.v == b.v}; }
PAGED_INLINE vi select(vm m, vi yes, vi no) { return {m.v ? yes.v : no.v}; }

PAGED_INLINE void mul_hi_lo(vi a, vi b, vi& hi, vi& lo) {
  u64x8 p = __builtin_convertvector((u32x8)a.v, u64x8) * __builtin_convertvector((u32x8)b.v, u64x8);
  lo.v = reinterpret_cast<i32x8>(__builtin_convertvector(p, u32x8));
  hi.v = reinterpret_cast<i32x8>(__builtin_convertvector(p >> 32, u32x8));
}

PAGED_INLINE vf load_n(const float* p, int n) {
  if (n >= kWidth) return vf::load(p);
  float tmp[kWidth] = {};
  for (int i = 0; i < n; ++i) tmp[i] = p[i];
  return vf::load(tmp);
}
PAGED_INLINE void store_n(float* p, vf x, int n) {
  if (n >= kWidth) return store(p, x);
  for (int i = 0; i < n; ++i) p[i] = x.v[i];
}

PAGED_INLINE vi compress(vi x, vm m) {
  vi r = x;
  for (int i = 0, n = 0; i < kWidth; ++i)
    if (m.v[i]) r.v[n++] = x.v[i];
  return r;
}

PAGED_INLINE float hsum(vf x) {
  return ((x.v[0] + x.v[4]) + (x.v[2] + x.v[6])) + ((x.v[1] + x.v[5]) + (x.v[3] + x.v[7]));
}
PAGED_INLINE float hmax(vf x) {
  float r = x.v[0];
  for (int i = 1; i < kWidth; ++i) r = x.v[i] > r ? x.v[i] : r;
  return r;
}

PAGED_INLINE void store(bf16* p, vf x) {
  u32x8 u = reinterpret_cast<u32x8>(x.v);
  u32x8 r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  r = x.v != x.v ? (u >> 16) | 0x40 : r;
  u16x8 h = __builtin_convertvector(r, u16x8);
  std::memcpy(p, &h, sizeof h);
}

#endif

// ---- the same on every path ----

PAGED_INLINE bool any(vm m) { return bits(m) != 0; }
PAGED_INLINE vm operator>(vf a, vf b) { return b < a; }
PAGED_INLINE vm operator>=(vf a, vf b) { return b <= a; }
PAGED_INLINE vm operator>(vi a, vi b) { return b < a; }
PAGED_INLINE vf& operator+=(vf& a, vf b) { return a = a + b; }
PAGED_INLINE vf& operator-=(vf& a, vf b) { return a = a - b; }
PAGED_INLINE vf& operator*=(vf& a, vf b) { return a = a * b; }
PAGED_INLINE vi& operator+=(vi& a, vi b) { return a = a + b; }
PAGED_INLINE vi& operator^=(vi& a, vi b) { return a = a ^ b; }
PAGED_INLINE vf operator-(vf a) { return bitcast_f(bitcast_i(a) ^ vi::set(INT32_MIN)); }
PAGED_INLINE vf abs(vf a) { return bitcast_f(bitcast_i(a) & vi::set(INT32_MAX)); }
PAGED_INLINE float hmin(vf x) { return -hmax(-x); }
PAGED_INLINE vi add_where(vm m, vi a, vi b) { return select(m, a + b, a); }

// Write the lanes that m sets next to each other at p, and anything in the rest of a whole vector; returns their number.
PAGED_INLINE int compress_store(int32_t* p, vi x, vm m) {
  store(p, compress(x, m));
  return __builtin_popcount(bits(m));
}
PAGED_INLINE int compress_store(float* p, vf x, vm m) {
  store(p, bitcast_f(compress(bitcast_i(x), m)));
  return __builtin_popcount(bits(m));
}

// 2 * kWidth bfloat16 at p: lane i of `even` is element 2i, of `odd` element 2i + 1.
PAGED_INLINE vfpair load_pairs(const bf16* p) {
  vi u = vi::load(reinterpret_cast<const int32_t*>(p));
  return {bitcast_f(shl<16>(u)), bitcast_f(u & vi::set(static_cast<int32_t>(0xffff0000u)))};
}

// The first n <= kWidth lanes of p, zero beyond; nothing past p + n is touched.
PAGED_INLINE vf load_n(const bf16* p, int n) {
  if (n >= kWidth) return vf::load(p);
  bf16 tmp[kWidth] = {};
  for (int i = 0; i < n; ++i) tmp[i] = p[i];
  return vf::load(tmp);
}
PAGED_INLINE void store_n(bf16* p, vf x, int n) {
  if (n >= kWidth) return store(p, x);
  bf16 tmp[kWidth];
  store(tmp, x);
  for (int i = 0; i < n; ++i) p[i] = tmp[i];
}

// 2^n for -126 <= n <= 127.
PAGED_INLINE vf exp2_int(vi n) { return bitcast_f(shl<23>(n + vi::set(127))); }

// Relative error below 2e-7 wherever the result is normal; exp(-inf) = 0, exp(inf) = inf, NaN stays NaN.
// Range reduction to |r| <= ln(2) / 2, then the minimax polynomial of Cephes' expf.
PAGED_INLINE vf exp(vf x) {
  x = min(vf::set(89.0f), max(vf::set(-104.0f), x));
  vi n = round_to_int(x * vf::set(1.44269504088896341f));
  vf nf = to_float(n);
  vf r = fnma(nf, vf::set(0.693359375f), x);
  r = fnma(nf, vf::set(-2.12194440e-4f), r);
  vf p = fma(vf::set(1.9875691500e-4f), r, vf::set(1.3981999507e-3f));
  p = fma(p, r, vf::set(8.3334519073e-3f));
  p = fma(p, r, vf::set(4.1665795894e-2f));
  p = fma(p, r, vf::set(1.6666665459e-1f));
  p = fma(p, r, vf::set(5.0000001201e-1f));
  p = fma(p, r * r, r + vf::set(1.0f));
  vi half = shr_arithmetic<1>(n);
  return p * exp2_int(half) * exp2_int(n - half);
}

// Relative error below 2e-7 (absolute near 1); log(0) = -inf, log(negative) = NaN, log(inf) = inf, subnormals included.
// Mantissa to [sqrt(1/2), sqrt(2)), then the minimax polynomial of Cephes' logf.
PAGED_INLINE vf log(vf x) {
  vm tiny = x < vf::set(std::numeric_limits<float>::min());
  vi u = bitcast_i(select(tiny, x * vf::set(8388608.0f), x));
  vi e = shr_logical<23>(u) - select(tiny, vi::set(126 + 23), vi::set(126));
  vf m = bitcast_f((u & vi::set(0x007fffff)) | vi::set(0x3f000000));
  vm low = m < vf::set(0.707106781186547524f);
  vf ef = to_float(e) - select(low, vf::set(1.0f), vf::zero());
  vf r = select(low, m + m, m) - vf::set(1.0f);
  vf z = r * r;
  vf p = fma(vf::set(7.0376836292e-2f), r, vf::set(-1.1514610310e-1f));
  p = fma(p, r, vf::set(1.1676998740e-1f));
  p = fma(p, r, vf::set(-1.2420140846e-1f));
  p = fma(p, r, vf::set(1.4249322787e-1f));
  p = fma(p, r, vf::set(-1.6668057665e-1f));
  p = fma(p, r, vf::set(2.0000714765e-1f));
  p = fma(p, r, vf::set(-2.4999993993e-1f));
  p = fma(p, r, vf::set(3.3333331174e-1f));
  vf y = fma(ef, vf::set(-2.12194440e-4f), p * z * r);
  y = fma(ef, vf::set(0.693359375f), fnma(vf::set(0.5f), z, y) + r);
  const float inf = std::numeric_limits<float>::infinity();
  y = select(x < vf::set(inf), y, x);  // inf and NaN pass through
  y = select(x < vf::zero(), vf::set(std::numeric_limits<float>::quiet_NaN()), y);
  return select(x == vf::zero(), vf::set(-inf), y);
}

}  // namespace paged
