// Prints the GFLOP/s of independent fused multiply-adds in registers, one thread for each OpenMP thread: the arithmetic
// a core cannot exceed in float32, whatever the library.
#include <chrono>
#include <cstdio>

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Vec __attribute__((vector_size(4 * kLanes)));

constexpr int kChains = 12;  // two FMA pipes with a latency of 4-5 cycles need 8-10 independent chains
constexpr long kRounds = 20'000'000;

static float chains(float seed) {
  Vec acc[kChains], scale, shift;
  for (int l = 0; l < kLanes; ++l) scale[l] = 0.999f + seed, shift[l] = 0.001f;
  for (int c = 0; c < kChains; ++c)
    for (int l = 0; l < kLanes; ++l) acc[c][l] = seed + c;
  for (long i = 0; i < kRounds; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = acc[c] * scale + shift;
  }
  float sum = 0;
  for (int c = 0; c < kChains; ++c)
    for (int l = 0; l < kLanes; ++l) sum += acc[c][l];
  return sum;
}

int main(int argc, char**) {
  double best = 0;
  float sink = 0;
  for (int attempt = 0; attempt < 8; ++attempt) {
    int threads = 0;
    const auto start = std::chrono::steady_clock::now();
#pragma omp parallel reduction(+ : sink, threads)
    {
      sink += chains(1e-6f * argc);
      threads += 1;
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const double rate = 2.0 * kLanes * kChains * kRounds * threads / seconds / 1e9;
    if (rate > best) best = rate;
  }
  std::printf("%.1f\n", best);
  return sink == 42.0f;
}
