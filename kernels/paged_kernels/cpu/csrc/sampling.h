// One token from each row of logits: greedy, or Gumbel-max after temperature, top-k, top-p and min-p.
//
// Adding Gumbel noise g and taking the argmax draws from softmax (Gumbel 1954; "Gumbel-max"). g depends on nothing but the
// row's key, sample and position, and the token: Philox4x32-10 (Salmon et al., SC 2011) of the counter
// (token, position, sample, 0), whose first word gives u = (its upper 23 bits + 1/2) / 2^23 and g = -log(-log(u)).
//
// Nothing is sorted that need not be. One pass finds the maximum of every `kChunk` logits; later passes enter only chunks
// that can matter. Noise is bounded, so without truncation only logits close enough to the best score draw any. The k-th
// largest chunk maximum is no more than the k-th largest logit; what lies ln(n / (1 - p)) nats below the maximum cannot
// be part of the top-p set; and each truncation keeps a prefix of the order (logit descending, id ascending), whose end
// is found by histogram, sorting one bin.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "vec.h"

namespace paged::sampling {

constexpr int kChunk = 64;               // logits that share a maximum
constexpr int kBlock = 512;              // candidates that draw together
constexpr int kBins = 1024;              // of the histogram
constexpr int kBinShift = 17;            // 64 bins to an octave
constexpr int kFirstBin = (127 - 6) * 64;  // the octaves from 2^-6 to 2^10
constexpr float kMaxNoise = 16.64f;      // -log(-log(1 - 2^-24)) = 16.6355
constexpr float kNegligible = 32.0f;     // nats: e^-32 of the maximum's mass is nothing, even times the vocabulary
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();

struct Params {
  float temperature;
  int top_k;
  float top_p, min_p;
  uint64_t noise_key;
  int sample, position;
};

struct Row {
  const float* logits;
  int size;
  const float* maxima;  // of each chunk
  float best;
  int argmax;
};

// The lanes of logits [i, i + kWidth) of a row of `size`, -inf beyond its end.
PAGED_INLINE vf load_logits(const float* logits, int i, int size) {
  if (i + kWidth <= size) return vf::load(logits + i);
  return select(first_n(size - i), load_n(logits + i, size - i), vf::set(-kInfinity));
}

// Chunk maxima, and the row's own with its lowest id. False where the row cannot be sampled from: it holds NaN or +inf, or
// nothing but -inf.
inline bool scan(const float* logits, int size, float* maxima, Row& row) {
  vm nan = is_nan(vf::zero());
  float best = -kInfinity;
  for (int start = 0; start < size; start += kChunk) {
    vf top[2] = {vf::set(-kInfinity), vf::set(-kInfinity)};
    for (int i = start; i < std::min(start + kChunk, size); i += 2 * kWidth) {
      const vf a = load_logits(logits, i, size);
      top[0] = max(a, top[0]);
      nan = nan | is_nan(a);
      if (i + kWidth >= size) break;
      const vf b = load_logits(logits, i + kWidth, size);
      top[1] = max(b, top[1]);
      nan = nan | is_nan(b);
    }
    best = std::max(best, maxima[start / kChunk] = hmax(max(top[0], top[1])));
  }
  if (any(nan) || !std::isfinite(best)) return false;
  int id = static_cast<int>(std::find(maxima, maxima + (size + kChunk - 1) / kChunk, best) - maxima) * kChunk;
  while (logits[id] != best) ++id;
  row = {logits, size, maxima, best, id};
  return true;
}

// Tokens with their logits; lists are written in whole vectors, so their ends are padded.
struct Candidates {
  std::vector<float> logits, weights;
  std::vector<int32_t> ids, bins;
  std::vector<uint64_t> order;
  int count = 0;

  void reserve(int size) {
    const size_t padded = static_cast<size_t>(size) + 2 * kWidth;
    if (ids.size() >= padded) return;
    logits.resize(padded);
    weights.resize(padded);
    ids.resize(padded);
    bins.resize(padded);
  }

  // Append the tokens of a chunk whose logits are at least `threshold`.
  void gather(const Row& row, int start, float threshold) {
    float* const to_logits = logits.data();
    int32_t* const to_ids = ids.data();
    const int end = std::min(start + kChunk, row.size);
    int n = count;
    for (int i = start; i < end; i += kWidth) {
      const vf x = load_logits(row.logits, i, row.size);
      const vm wanted = x >= vf::set(threshold);
      if (!any(wanted)) continue;
      compress_store(to_logits + n, x, wanted);
      n += compress_store(to_ids + n, vi::iota() + vi::set(i), wanted);
    }
    count = n;
  }

  // Bins in the order of falling logits, equal logits in one.
  void bins_from_fall(float best) {
    for (int i = 0; i < count; i += kWidth) {
      const vf fall = abs(vf::set(best) - vf::load(logits.data() + i));  // never -0
      vi bin = shr_logical<kBinShift>(bitcast_i(fall)) - vi::set(kFirstBin);
      bin = select(bin < vi::zero(), vi::zero(), bin);
      store(bins.data() + i, select(bin < vi::set(kBins), bin, vi::set(kBins - 1)));
    }
  }

  // Drop the tokens whose bin is `end` or more; only logits and ids follow.
  void keep_bins_below(int end) {
    int kept = 0;
    for (int i = 0; i < count; i += kWidth) {
      const vm wanted = (vi::load(bins.data() + i) < vi::set(end)) & first_n(count - i);
      compress_store(logits.data() + kept, vf::load(logits.data() + i), wanted);
      kept += compress_store(ids.data() + kept, vi::load(ids.data() + i), wanted);
    }
    count = kept;
  }
};

// The best (logit / temperature + noise) so far; of equals the lowest id.
class Draw {
 public:
  Draw(const Row& row, const Params& params) : params_(params), id_(row.argmax) {
    vi word[2] = {vi::set(id_), vi::set(id_)};
    philox(word);
    float score[kWidth];
    store(score, vf::set(row.best) / vf::set(params.temperature) + noise(word[0]));
    score_ = score[0];
  }

  int id() const { return id_; }

  // Logits below this cannot win whatever their noise; rounding errs towards keeping them.
  float threshold() const {
    const double t = params_.temperature, score = score_;
    return static_cast<float>((score - kMaxNoise - 1e-6 * (std::fabs(score) + kMaxNoise)) * t);
  }

  void consider(const Candidates& list) {
    const vf temperature = vf::set(params_.temperature);
    for (int i = 0; i < list.count; i += 2 * kWidth) {
      vi word[2] = {vi::load(list.ids.data() + i), vi::load(list.ids.data() + i + kWidth)};
      philox(word);
      for (int j = 0; j < 2 && i + j * kWidth < list.count; ++j) {
        const int at = i + j * kWidth;
        const vf scaled = vf::load(list.logits.data() + at) / temperature;
        const vm promising = (scaled + noise_bound(word[j]) >= vf::set(score_)) & first_n(list.count - at);
        if (any(promising)) compare(list.ids.data() + at, scaled + noise(word[j]), bits(promising));
      }
    }
  }

 private:
  void compare(const int32_t* ids, vf scores, uint32_t lanes) {
    float score[kWidth];
    store(score, scores);
    for (; lanes != 0; lanes &= lanes - 1) {
      const int lane = __builtin_ctz(lanes);
      if (score[lane] > score_ || (score[lane] == score_ && ids[lane] < id_)) {
        score_ = score[lane];
        id_ = ids[lane];
      }
    }
  }

  // The first output word of each of two vectors of ids, in their place: together they hide the latency of products.
  PAGED_INLINE void philox(vi (&c0)[2]) const {
    const vi m0 = vi::set(static_cast<int32_t>(0xD2511F53u)), m1 = vi::set(static_cast<int32_t>(0xCD9E8D57u));
    const vi position = vi::set(params_.position), sample = vi::set(params_.sample);
    vi c1[2] = {position, position}, c2[2] = {sample, sample}, c3[2] = {vi::zero(), vi::zero()};
    uint32_t k0 = static_cast<uint32_t>(params_.noise_key), k1 = static_cast<uint32_t>(params_.noise_key >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        vi hi0, lo0, hi1, lo1;
        mul_hi_lo(c0[j], m0, hi0, lo0);
        mul_hi_lo(c2[j], m1, hi1, lo1);
        c0[j] = hi1 ^ c1[j] ^ vi::set(static_cast<int32_t>(k0));
        c1[j] = lo1;
        c2[j] = hi0 ^ c3[j] ^ vi::set(static_cast<int32_t>(k1));
        c3[j] = lo0;
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
  }

  PAGED_INLINE static vf noise(vi word) {
    const vf u = (to_float(shr_logical<9>(word)) + vf::set(0.5f)) * vf::set(0x1p-23f);
    return -log(-log(u));
  }

  // At least the noise: -log(u) >= 1 - u, and log2(v) >= exponent + mantissa - 1, which is what v's bits spell.
  PAGED_INLINE static vf noise_bound(vi word) {
    const vf v = (vf::set(8388607.5f) - to_float(shr_logical<9>(word))) * vf::set(0x1p-23f);
    return fma(to_float(bitcast_i(v)), vf::set(-0x1p-23f * 0.693147181f), vf::set(127.0f * 0.693147181f + 1e-4f));
  }

  Params params_;
  float score_;
  int id_;
};

// exp((logit - best) / temperature) of every candidate.
inline void weigh(Candidates& list, float best, float temperature) {
  for (int i = 0; i < list.count; i += kWidth) {
    const vf nats = (vf::load(list.logits.data() + i) - vf::set(best)) / vf::set(temperature);
    store(list.weights.data() + i, exp(nats));
  }
}

// The sum of exp((logit - best) / temperature) over the row, but for negligible chunks.
inline double total_weight(const Row& row, float temperature) {
  double total = 0.0;
  for (int start = 0; start < row.size; start += kChunk) {
    if ((row.best - row.maxima[start / kChunk]) / temperature > kNegligible) continue;
    vf sum = vf::zero();
    for (int i = start; i < std::min(start + kChunk, row.size); i += kWidth)
      sum += exp((load_logits(row.logits, i, row.size) - vf::set(row.best)) / vf::set(temperature));
    total += hsum(sum);
  }
  return total;
}

// Sorts like (logit descending, position in the list ascending); lists are ordered by id.
inline uint64_t order_key(float logit, int position) {
  logit += 0.0f;  // -0 is 0
  int32_t u;
  std::memcpy(&u, &logit, 4);
  const uint32_t falling = static_cast<uint32_t>(u < 0 ? u : ~u & INT32_MAX);
  return static_cast<uint64_t>(falling) << 32 | static_cast<uint32_t>(position);
}

// Reduce the list to the shortest prefix, in the order (logit descending, id ascending), whose weight reaches `goal`.
inline void keep_prefix(Candidates& list, float best, double goal) {
  list.bins_from_fall(best);
  double weight[2][kBins] = {};  // two, so that equal neighbours need not wait for each other
  for (int i = 0; i < list.count; ++i) weight[i & 1][list.bins[i]] += list.weights[i];
  double before = 0.0;
  int last = 0;
  for (; last < kBins; ++last) {
    const double bin = weight[0][last] + weight[1][last];
    if (before + bin >= goal) break;
    before += bin;
  }
  list.order.clear();
  for (int i = 0; i < list.count; ++i)
    if (list.bins[i] == last) list.order.push_back(order_key(list.logits[i], i));
  std::sort(list.order.begin(), list.order.end());
  for (const uint64_t key : list.order) {
    const uint32_t i = static_cast<uint32_t>(key);
    if (before < goal) list.bins[i] = last - 1;
    before += list.weights[i];
  }
  list.keep_bins_below(last);
}

// A lower bound of the k-th largest logit that is itself above -inf.
inline float kth_largest_bound(const Row& row, int k, std::vector<float>& scratch) {
  const int chunks = (row.size + kChunk - 1) / kChunk;
  if (k > chunks) return kLowest;
  scratch.assign(row.maxima, row.maxima + chunks);
  std::nth_element(scratch.begin(), scratch.begin() + (k - 1), scratch.end(), std::greater<float>());
  return std::max(scratch[k - 1], kLowest);
}

struct Scratch {
  std::vector<float> maxima, selection;
  Candidates list;
};

inline int draw_from_all(const Row& row, Draw draw, Candidates& list) {
  float threshold = draw.threshold();
  list.reserve(kBlock + kChunk);
  list.count = 0;
  for (int start = 0; start < row.size; start += kChunk) {
    if (row.maxima[start / kChunk] >= threshold) list.gather(row, start, threshold);
    if (list.count < kBlock && start + kChunk < row.size) continue;
    draw.consider(list);
    list.count = 0;
    threshold = draw.threshold();
  }
  return draw.id();
}

inline int draw_truncated(const Row& row, const Params& params, Draw draw, Scratch& scratch) {
  const bool top_k = params.top_k > 0 && params.top_k < row.size, top_p = params.top_p < 1.0f;
  const double temperature = params.temperature, most_nats = -std::log(static_cast<double>(params.min_p));
  const auto logit_below_best = [&](double nats) {  // rounded down
    return static_cast<float>(row.best - (nats + 0.01) * temperature - 1e-6 * std::fabs(row.best));
  };
  float threshold = kLowest;
  double total = 0.0;
  if (top_k) {
    threshold = kth_largest_bound(row, params.top_k, scratch.selection);
  } else if (top_p) {
    total = total_weight(row, params.temperature);
    threshold = std::max(threshold, logit_below_best(std::log(row.size / ((1.0 - params.top_p) * total))));
  }
  if (!(top_k && top_p)) threshold = std::max(threshold, logit_below_best(most_nats));

  Candidates& list = scratch.list;
  list.reserve(row.size);
  list.count = 0;
  for (int start = 0; start < row.size; start += kChunk)
    if (row.maxima[start / kChunk] >= threshold) list.gather(row, start, threshold);
  if (top_k && list.count > params.top_k) {
    std::fill_n(list.weights.begin(), list.count, 1.0f);
    keep_prefix(list, row.best, params.top_k);
  }
  if (top_p) {
    weigh(list, row.best, params.temperature);
    if (top_k) total = std::accumulate(list.weights.begin(), list.weights.begin() + list.count, 0.0);
    keep_prefix(list, row.best, params.top_p * total);
  }
  if (params.min_p > 0.0f) {
    for (int i = 0; i < list.count; ++i) list.bins[i] = (row.best - list.logits[i]) / temperature > most_nats;
    list.keep_bins_below(1);
  }
  draw.consider(list);
  return draw.id();
}

inline int sample_row(const float* logits, int size, const Params& params, Scratch& scratch) {
  scratch.maxima.resize((size + kChunk - 1) / kChunk);
  Row row;
  if (!scan(logits, size, scratch.maxima.data(), row)) return -1;
  if (!(params.temperature > 0.0f) || !std::isfinite(row.best / params.temperature)) return row.argmax;
  const Draw draw(row, params);
  const bool truncated = (params.top_k > 0 && params.top_k < size) || params.top_p < 1.0f || params.min_p > 0.0f;
  return truncated ? draw_truncated(row, params, draw, scratch) : draw_from_all(row, draw, scratch.list);
}

// The ids of the k greatest logits of a scanned row, falling, ties by id. `k` is at most the row's size.
inline void top_ids(const Row& row, int k, int32_t* out, Scratch& scratch) {
  const float threshold = kth_largest_bound(row, k, scratch.selection);
  Candidates& list = scratch.list;
  list.reserve(row.size);
  list.count = 0;
  for (int start = 0; start < row.size; start += kChunk)
    if (row.maxima[start / kChunk] >= threshold) list.gather(row, start, threshold);
  list.order.clear();
  for (int i = 0; i < list.count; ++i) list.order.push_back(order_key(list.logits[i], i));
  const int found = std::min(k, list.count);
  std::partial_sort(list.order.begin(), list.order.begin() + found, list.order.end());
  for (int i = 0; i < found; ++i) out[i] = list.ids[static_cast<uint32_t>(list.order[i])];
  for (int id = 0, i = found; i < k; ++id)  // nothing but -inf is left
    if (row.logits[id] == -kInfinity) out[i++] = id;
}

inline int rank_of(const float* logits, int size, int64_t token) {
  const vf own = vf::set(logits[token]);
  int rank = 1;
  for (int i = 0; i < size; i += kWidth) rank += __builtin_popcount(bits(own < load_logits(logits, i, size)));
  return rank;
}

// The log of the summed exponentials of all `width` logits; top and rank among the first `size`.
inline void summarize_row(const float* logits, int width, int size, int k, int64_t token, float* log_sum_exp,
                          int32_t* rank, int32_t* top, Scratch& scratch) {
  scratch.maxima.resize((width + kChunk - 1) / kChunk);
  Row row;
  const bool usable = scan(logits, width, scratch.maxima.data(), row);
  *log_sum_exp = usable ? row.best + static_cast<float>(std::log(total_weight(row, 1.0f)))
                        : std::numeric_limits<float>::quiet_NaN();
  *rank = rank_of(logits, size, token);
  if (k == 0) return;
  if (usable && (size == width || scan(logits, size, scratch.maxima.data(), row)))
    top_ids(row, k, top, scratch);
  else
    std::iota(top, top + k, 0);
}

// Token by token, what stands before the one to choose makes its own logit smaller.
inline void penalize_row(float* logits, const int32_t* tokens, int num_tokens, int num_prompt_tokens, float repetition,
                         float presence, float frequency, std::vector<int32_t>& counts, std::vector<int32_t>& seen) {
  seen.clear();
  for (int i = 0; i < num_tokens; ++i) {
    int32_t& count = counts[tokens[i]];  // 1 + occurrences in the output, 0 where the token was not met
    if (count == 0) {
      count = 1;
      seen.push_back(tokens[i]);
    }
    count += i >= num_prompt_tokens;
  }
  for (const int32_t token : seen) {
    float x = logits[token];
    x = x > 0.0f ? x / repetition : x * repetition;
    const int32_t in_output = counts[token] - 1;
    if (in_output > 0) x -= presence + frequency * static_cast<float>(in_output);
    logits[token] = x;
    counts[token] = 0;
  }
}

}  // namespace paged::sampling

extern "C" {

// logits [rows, stride], of which the first `size` of each row count; all other arguments are [rows].
void paged_sample(const float* logits, const float* temperature, const int32_t* top_k, const float* top_p,
                  const float* min_p, const int64_t* noise_key, const int32_t* sample, const int32_t* position,
                  int64_t* out, int rows, int stride, int size) {
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1)
  for (int r = 0; r < rows; ++r) {
    thread_local paged::sampling::Scratch scratch;
    const paged::sampling::Params params = {temperature[r], top_k[r],  top_p[r],   min_p[r],
                                            static_cast<uint64_t>(noise_key[r]), sample[r], position[r]};
    out[r] = paged::sampling::sample_row(logits + static_cast<int64_t>(r) * stride, size, params, scratch);
  }
}

// logits [R, stride], masked in place; row[r] is one of R; allowed [rows, ceil(stride / 32)].
void paged_mask(float* logits, const int64_t* row, const int32_t* allowed, int rows, int stride) {
  const int words = (stride + 31) / 32;
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1)
  for (int r = 0; r < rows; ++r) {
    for (int w = 0; w < words; ++w) {
      const uint32_t bits = static_cast<uint32_t>(allowed[static_cast<int64_t>(r) * words + w]);
      if (bits == UINT32_MAX) continue;
      float* const at = logits + row[r] * stride + 32 * w;
      const int count = std::min(32, stride - 32 * w);
      for (int i = 0; i < count; ++i)
        if (!(bits >> i & 1)) at[i] = -paged::sampling::kInfinity;
    }
  }
}

// logits [R, stride], penalised in place; tokens [rows, length]; all other arguments are [rows], row[r] one of R.
void paged_penalize(float* logits, const int32_t* tokens, const int64_t* row, const int32_t* num_tokens,
                    const int32_t* num_prompt_tokens, const float* repetition, const float* presence,
                    const float* frequency, int rows, int length, int stride) {
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1)
  for (int r = 0; r < rows; ++r) {
    thread_local std::vector<int32_t> counts, seen;
    if (counts.size() < static_cast<size_t>(stride)) counts.resize(stride);
    paged::sampling::penalize_row(logits + row[r] * stride, tokens + static_cast<int64_t>(r) * length, num_tokens[r],
                                  num_prompt_tokens[r], repetition[r], presence[r], frequency[r], counts, seen);
  }
}

// logits [rows, stride], of which the first `size` of each row have ranks; top [rows, k]; all other arguments are [rows].
void paged_summarize(const float* logits, const int64_t* tokens, float* log_sum_exp, int32_t* ranks, int32_t* top,
                     int rows, int stride, int size, int k) {
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1)
  for (int r = 0; r < rows; ++r) {
    thread_local paged::sampling::Scratch scratch;
    paged::sampling::summarize_row(logits + static_cast<int64_t>(r) * stride, stride, size, k, tokens[r],
                                   log_sum_exp + r, ranks + r, top + static_cast<int64_t>(r) * k, scratch);
  }
}

}  // extern "C"
