// What stands between the matrix products of a decoder layer, one pass over memory each: norms, rotary embedding with
// the store to the paged cache, the gated activation. Sums and products are float whatever the activations' type.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "vec.h"

namespace paged::fused {

inline float inverse_rms(const float* x, int n, float eps) {
  vf sum[4] = {vf::zero(), vf::zero(), vf::zero(), vf::zero()};
  int i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const vf a = vf::load(x + i + j * kWidth);
      sum[j] = fma(a, a, sum[j]);
    }
  for (; i < n; i += kWidth) {
    const vf a = load_n(x + i, n - i);
    sum[0] = fma(a, a, sum[0]);
  }
  return 1.0f / std::sqrt(hsum((sum[0] + sum[1]) + (sum[2] + sum[3])) / n + eps);
}

// out = x / rms(x) * weight; out may be x.
template <class Out>
void norm_row(const float* x, const float* weight, int n, float eps, Out* out) {
  const vf factor = vf::set(inverse_rms(x, n, eps));
  for (int i = 0; i < n; i += kWidth) store_n(out + i, load_n(x + i, n - i) * factor * load_n(weight + i, n - i), n - i);
}

template <class Out>
void rms_norm(const float* x, const float* weight, Out* out, int tokens, int hidden, float eps) {
#pragma omp parallel for schedule(static) if (tokens > 1)
  for (int t = 0; t < tokens; ++t) norm_row(x + static_cast<int64_t>(t) * hidden, weight, hidden, eps, out + static_cast<int64_t>(t) * hidden);
}

template <class A>
void add_rms_norm(const A* x, float* residual, const float* weight, A* out, int tokens, int hidden, float eps) {
#pragma omp parallel for schedule(static) if (tokens > 1)
  for (int t = 0; t < tokens; ++t) {
    const int64_t at = static_cast<int64_t>(t) * hidden;
    for (int i = 0; i < hidden; i += kWidth)
      store_n(residual + at + i, load_n(residual + at + i, hidden - i) + load_n(x + at + i, hidden - i), hidden - i);
    norm_row(residual + at, weight, hidden, eps, out + at);
  }
}

// Rotate pairs (x[i], x[i + half]) by the angles whose cosines and sines stand in `rope`, [cos | sin] of `half` each.
inline void rotate(float* x, const float* rope, int half) {
  for (int i = 0; i < half; i += kWidth) {
    const int n = half - i;
    const vf a = load_n(x + i, n), b = load_n(x + half + i, n);
    const vf cos = load_n(rope + i, n), sin = load_n(rope + half + i, n);
    store_n(x + i, fnma(b, sin, a * cos), n);
    store_n(x + half + i, fma(a, sin, b * cos), n);
  }
}

// Write one token's key or value to its place in a block of the cache; attention.h describes the two layouts.
inline void store_key(float* block, const float* x, int head_dim, int64_t block_size, int64_t offset) {
  for (int d = 0; d < head_dim; ++d) block[d * block_size + offset] = x[d];
}
inline void store_key(bf16* block, const float* x, int head_dim, int64_t block_size, int64_t offset) {
  for (int d = 0; d < head_dim; d += kWidth) {
    bf16 half[kWidth];
    store(half, vf::load(x + d));
    bf16* to = block + (d / 2 * block_size + offset) * 2;
    for (int i = 0; i < kWidth; i += 2) std::memcpy(to + i * block_size, half + i, 4);
  }
}
inline void store_value(float* block, const float* x, int head_dim, int64_t offset) {
  std::memcpy(block + offset * head_dim, x, head_dim * sizeof(float));
}
// 16 bits at a time: another thread may be writing the neighbour that shares the pair.
inline void store_value(bf16* block, const float* x, int head_dim, int64_t offset) {
  bf16* pair = block + offset / 2 * 2 * head_dim + offset % 2;
  for (int d = 0; d < head_dim; d += kWidth) {
    bf16 half[kWidth];
    store(half, vf::load(x + d));
    for (int i = 0; i < kWidth; ++i) pair[2 * (d + i)] = half[i];
  }
}

template <class A, class KV>
void rope_and_store(const A* qkv, const int32_t* positions, const int64_t* slots, const float* rope, const float* q_norm,
                    const float* k_norm, A* q, KV* k, KV* v, int tokens, int num_heads, int num_kv_heads, int head_dim,
                    int rotary_dim, int block_size, float eps) {
#pragma omp parallel if (tokens > 1)
  {
    std::vector<float> buffer(head_dim);
    float* x = buffer.data();
#pragma omp for schedule(static)
    for (int t = 0; t < tokens; ++t) {
      const A* in = qkv + static_cast<int64_t>(t) * (num_heads + 2 * num_kv_heads) * head_dim;
      A* out = q + static_cast<int64_t>(t) * num_heads * head_dim;
      const float* angles = rope + static_cast<int64_t>(positions[t]) * rotary_dim;
      const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
      for (int h = 0; h < num_heads + 2 * num_kv_heads; ++h, in += head_dim) {
        if (h >= num_heads && slots[t] < 0) break;
        for (int d = 0; d < head_dim; d += kWidth) store(x + d, vf::load(in + d));
        const bool is_q = h < num_heads, is_v = h >= num_heads + num_kv_heads;
        const int kv_head = is_v ? h - num_heads - num_kv_heads : h - num_heads;
        const int64_t at = (block * num_kv_heads + kv_head) * block_size * head_dim;
        if (is_v) {
          store_value(v + at, x, head_dim, offset);
          continue;
        }
        if (const float* weight = is_q ? q_norm : k_norm) norm_row(x, weight, head_dim, eps, x);
        rotate(x, angles, rotary_dim / 2);
        if (is_q)
          for (int d = 0; d < head_dim; d += kWidth) store(out + h * head_dim + d, vf::load(x + d));
        else
          store_key(k + at, x, head_dim, block_size, offset);
      }
    }
  }
}

PAGED_INLINE vf silu(vf x) { return x / (vf::set(1.0f) + exp(-x)); }

// 0.5 x (1 + tanh(y)) is x sigmoid(2 y).
PAGED_INLINE vf gelu_tanh(vf x) {
  const vf y = x * fma(vf::set(0.044715f * 1.5957691216057308f) * x, x, vf::set(1.5957691216057308f));
  return x / (vf::set(1.0f) + exp(-y));
}

inline vf gelu(vf x) {
  float lanes[kWidth];
  store(lanes, x);
  for (float& lane : lanes) lane = 0.5f * lane * (1.0f + std::erf(lane * 0.70710678f));
  return vf::load(lanes);
}

// [tokens, 2 size] -> [tokens, size]: the first half activated, times the second.
template <vf (*Activate)(vf), class A>
void gated(const A* gate_up, A* out, int tokens, int size) {
#pragma omp parallel for schedule(static) if (tokens > 1)
  for (int t = 0; t < tokens; ++t) {
    const A* gate = gate_up + static_cast<int64_t>(t) * 2 * size;
    const A* up = gate + size;
    A* to = out + static_cast<int64_t>(t) * size;
    for (int i = 0; i < size; i += kWidth) {
      const int n = size - i;
      store_n(to + i, Activate(load_n(gate + i, n)) * load_n(up + i, n), n);
    }
  }
}

}  // namespace paged::fused

extern "C" {

#define PAGED_FUSED(SUFFIX, A)                                                                                        \
  void paged_rms_norm_##SUFFIX(const float* x, const float* weight, A* out, int tokens, int hidden, float eps) {      \
    paged::fused::rms_norm(x, weight, out, tokens, hidden, eps);                                                      \
  }                                                                                                                   \
  void paged_add_rms_norm_##SUFFIX(const A* x, float* residual, const float* weight, A* out, int tokens, int hidden,  \
                                   float eps) {                                                                       \
    paged::fused::add_rms_norm(x, residual, weight, out, tokens, hidden, eps);                                        \
  }                                                                                                                   \
  void paged_silu_mul_##SUFFIX(const A* gate_up, A* out, int tokens, int size) {                                      \
    paged::fused::gated<paged::fused::silu>(gate_up, out, tokens, size);                                              \
  }                                                                                                                   \
  void paged_gelu_mul_##SUFFIX(const A* gate_up, A* out, int tokens, int size) {                                      \
    paged::fused::gated<paged::fused::gelu>(gate_up, out, tokens, size);                                              \
  }                                                                                                                   \
  void paged_gelu_tanh_mul_##SUFFIX(const A* gate_up, A* out, int tokens, int size) {                                 \
    paged::fused::gated<paged::fused::gelu_tanh>(gate_up, out, tokens, size);                                         \
  }
PAGED_FUSED(f32, float)
PAGED_FUSED(bf16, paged::bf16)
#undef PAGED_FUSED

// k, v: one layer of the cache; q_norm and k_norm may be null.
#define PAGED_ROPE_AND_STORE(SUFFIX, A, KV)                                                                           \
  void paged_rope_and_store_##SUFFIX(const A* qkv, const int32_t* positions, const int64_t* slots, const float* rope, \
                                     const float* q_norm, const float* k_norm, A* q, KV* k, KV* v, int tokens,        \
                                     int num_heads, int num_kv_heads, int head_dim, int rotary_dim, int block_size,   \
                                     float eps) {                                                                     \
    paged::fused::rope_and_store(qkv, positions, slots, rope, q_norm, k_norm, q, k, v, tokens, num_heads,             \
                                 num_kv_heads, head_dim, rotary_dim, block_size, eps);                                \
  }
PAGED_ROPE_AND_STORE(f32_f32, float, float)
PAGED_ROPE_AND_STORE(f32_bf16, float, paged::bf16)
PAGED_ROPE_AND_STORE(bf16_bf16, paged::bf16, paged::bf16)
#undef PAGED_ROPE_AND_STORE

}  // extern "C"
