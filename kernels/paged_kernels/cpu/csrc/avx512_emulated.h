// AVX-512 on CPUs without it: SIMDe's emulation, plus the intrinsics that SIMDe 0.7 lacks. For tests only.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/fma.h>

#include <cstdint>

namespace paged::emulated {

template <class To, class From>
inline To lanes(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To r;
  __builtin_memcpy(&r, &x, sizeof r);
  return r;
}

template <class T, int N>
struct array {
  T at[N];
};
using f32x16 = array<float, 16>;
using i32x16 = array<int32_t, 16>;
using u16x16 = array<uint16_t, 16>;

inline __m512i cvtepu16_epi32(__m256i x) {
  auto a = lanes<u16x16>(x);
  i32x16 r;
  for (int i = 0; i < 16; ++i) r.at[i] = a.at[i];
  return lanes<__m512i>(r);
}
inline __m256i cvtepi32_epi16(__m512i x) {
  auto a = lanes<i32x16>(x);
  u16x16 r;
  for (int i = 0; i < 16; ++i) r.at[i] = static_cast<uint16_t>(a.at[i]);
  return lanes<__m256i>(r);
}
inline __m512 cvtepi32_ps(__m512i x) {
  auto a = lanes<i32x16>(x);
  f32x16 r;
  for (int i = 0; i < 16; ++i) r.at[i] = static_cast<float>(a.at[i]);
  return lanes<__m512>(r);
}
inline __m512i cvtps_epi32(__m512 x) {
  auto a = lanes<f32x16>(x);
  i32x16 r;
  for (int i = 0; i < 16; ++i) r.at[i] = static_cast<int32_t>(__builtin_rintf(a.at[i]));
  return lanes<__m512i>(r);
}
inline __m512i srai_epi32(__m512i x, unsigned n) {
  auto a = lanes<i32x16>(x);
  for (int& v : a.at) v >>= n;
  return lanes<__m512i>(a);
}
inline __m256 extractf32x8_ps(__m512 x, int i) {
  return lanes<array<__m256, 2>>(x).at[i];
}
inline __m512 maskz_loadu_ps(uint16_t mask, const float* p) {
  f32x16 r;
  for (int i = 0; i < 16; ++i) r.at[i] = mask >> i & 1 ? p[i] : 0.0f;
  return lanes<__m512>(r);
}
inline void mask_storeu_ps(float* p, uint16_t mask, __m512 x) {
  auto a = lanes<f32x16>(x);
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) p[i] = a.at[i];
}

}  // namespace paged::emulated

#define _mm512_cvtepu16_epi32 paged::emulated::cvtepu16_epi32
#define _mm512_cvtepi32_epi16 paged::emulated::cvtepi32_epi16
#define _mm512_cvtepi32_ps paged::emulated::cvtepi32_ps
#define _mm512_cvtps_epi32 paged::emulated::cvtps_epi32
#define _mm512_srai_epi32 paged::emulated::srai_epi32
#define _mm512_extractf32x8_ps paged::emulated::extractf32x8_ps
#define _mm512_maskz_loadu_ps paged::emulated::maskz_loadu_ps
#define _mm512_mask_storeu_ps paged::emulated::mask_storeu_ps
