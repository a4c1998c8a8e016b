// Causal attention of a packed batch over the paged cache: prefill chunks and decodes in one call.
//
// A cache block holds, for each kv head, two matrices of `block_size` tokens:
//   keys    head_dim rows x block_size columns        values    block_size rows x head_dim columns
// float: row-major. bfloat16: rows 2i and 2i + 1 interleaved, so that one 32-bit lane holds two neighbours of a column:
// the operand order of vdpbf16ps, and one shift or one mask away from float. `block_size` is a multiple of 16.
//
// Work is cut into tiles: some queries of a sequence times the heads that share a kv head (rows), against a range of
// keys, taken `kChunk` at a time with an online softmax (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022).
// The softmax starts anew every `kSplit` keys, and the parts are merged by their log-sum-exp; where a sequence has a
// single tile, they are work for several threads (Flash-Decoding).
// Neighbours in the batch that decode behind the same blocks (beams, samples, rows with one system prompt) make one tile:
// what they share is read once for all of them.
// Chunks and splits start at fixed positions and every dot product adds up in the same order whatever the tile, so a
// row's result depends on its own sequence only, never on the batch around it or on the number of threads.
//
// Slots past a sequence's last key, and blocks before the window of its first query, may hold anything, NaN included.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <omp.h>

#include "vec.h"

#if defined(PAGED_AVX512) && (defined(__AVX512BF16__) || defined(PAGED_SIMDE))
#define PAGED_BF16_DOT 1
#endif

namespace paged::attention {

constexpr int kPanel = 16;     // tokens that a kernel step takes together
constexpr int kChunk = 128;    // keys between two updates of the softmax
constexpr int kSplit = 512;    // keys of a part
constexpr int kTileRows = 48;  // rows that share the keys and values of a chunk while they are in cache
constexpr int kMaxRows = 6;    // rows whose sums are kept in registers together
constexpr int kPanels = kChunk / kPanel;
constexpr int kItemsPerThread = 8;

struct Problem {
  const int32_t* cu_seqlens_q;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  const float* sinks;  // [num_heads] scores of one more key without a value, or null
  int num_tokens, num_seqs, max_blocks;
  int num_heads, num_kv_heads, head_dim, block_size;
  float scale;
  int window;
  float softcap;  // c > 0 turns a scaled score s into c * tanh(s / c)
};

// Elements from one column to the next within a row (or interleaved pair of rows).
template <class KV>
constexpr int kColumn = sizeof(KV) == 2 ? 2 : 1;

// Vectors of sums for each of MR rows: together enough to hide the latency of fma, and no more than the registers hold.
template <int MR>
constexpr int kVectors = MR >= 3 ? 2 : MR >= 2 ? 4 : 8;

PAGED_INLINE vf even_row(const float* p, int64_t) { return vf::load(p); }
PAGED_INLINE vf odd_row(const float* p, int64_t columns) { return vf::load(p + columns); }
PAGED_INLINE vf even_row(const bf16* p, int64_t) { return load_pairs(p).even; }
PAGED_INLINE vf odd_row(const bf16* p, int64_t) { return load_pairs(p).odd; }

// The same value, loaded once: the compiler would rather load it again for every use, and loads are what limits us.
PAGED_INLINE vf in_register(vf x) {
#if defined(PAGED_AVX2) || (defined(PAGED_AVX512) && !defined(PAGED_SIMDE))
  asm("" : "+v"(x.v));
#endif
  return x;
}

// sum[r][j] += coefficient[r] * row + coefficient'[r] * row', for a pair of rows. Coefficients of row r of the tile stand
// at coef + r * RS; vector j of the pair at base[j / (NV / NB)], NV / NB neighbouring vectors at each of the NB bases.
struct FloatDot {
  using Coef = float;

  template <int MR, int NV, int RS, bool kOdd, class KV, int NB>
  static PAGED_INLINE void add(vf (&sum)[MR][NV], const float* coef, const KV* const (&base)[NB], int64_t columns) {
    constexpr int each = NV / NB;
    const auto at = [&](int j) { return base[j / each] + j % each * kWidth * kColumn<KV>; };
    outer_product(sum, [&](int r) { return vf::set(coef[r * RS]); }, [&](int j) { return even_row(at(j), columns); });
    if (kOdd)
      outer_product(sum, [&](int r) { return vf::set(coef[r * RS + 1]); }, [&](int j) { return odd_row(at(j), columns); });
  }

 private:
  // Keeps the shorter side in registers and goes through the other once.
  template <int MR, int NV, class C, class R>
  static PAGED_INLINE void outer_product(vf (&sum)[MR][NV], C coefficient, R row) {
    if constexpr (NV < MR) {
      vf rows[NV];
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) rows[j] = in_register(row(j));
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) {
        const vf c = in_register(coefficient(r));
#pragma GCC unroll 8
        for (int j = 0; j < NV; ++j) sum[r][j] = fma(c, rows[j], sum[r][j]);
      }
    } else {
      vf c[MR];
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) c[r] = in_register(coefficient(r));
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) {
        const vf x = in_register(row(j));
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) sum[r][j] = fma(c[r], x, sum[r][j]);
      }
    }
  }
};

#if defined(PAGED_BF16_DOT)
// The same in bfloat16 products: queries and softmax weights are rounded, sums stay float.
struct PairDot {
  using Coef = bf16;

  template <int MR, int NV, int RS, bool kOdd, int NB>
  static PAGED_INLINE void add(vf (&sum)[MR][NV], const bf16* coef, const bf16* const (&base)[NB], int64_t) {
    vi pair[NV];
    constexpr int each = NV / NB;
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) {
      pair[j] = vi::load(reinterpret_cast<const int32_t*>(base[j / each] + j % each * kWidth * 2));
      if (!kOdd) pair[j] = pair[j] & vi::set(0xffff);
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      int32_t bits;
      std::memcpy(&bits, coef + r * RS, 4);
      vi c = vi::set(bits);
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j)
        sum[r][j].v = _mm512_dpbf16_ps(sum[r][j].v, (__m512bh)c.v, (__m512bh)pair[j].v);
    }
  }
};
#endif

// The keys and values of one chunk for one kv head: where each panel of 16 tokens starts. Only panels [first, last) hold
// some; the others point to any valid address, since a prefetch from an unmapped one costs a walk of the page table.
// While scores are computed the values are fetched, while those are used the keys of the next chunk: half a chunk ahead.
template <class KV>
struct Chunk {
  const KV* k[kPanels];
  const KV* v[kPanels];
  int first, last;
};

// s[r][t] = q[r] . k[t] for the tokens t of panels [first, last); q is packed [head_dim / 2][MR][2]. Writes whole groups
// of panels, so also garbage before and after the ones asked for.
template <class Dot, int MR, class KV>
void scores(const typename Dot::Coef* q, const Chunk<KV>& chunk, int first, int last, int64_t block_size, int head_dim,
            float* s) {
  constexpr int NV = kVectors<MR>;
  constexpr int NP = NV * kWidth / kPanel;
  for (int p = first / NP * NP; p < last; p += NP) {
    const KV* k[NP];
    const KV* v[NP];
    for (int i = 0; i < NP; ++i) {
      const int panel = std::clamp(p + i, first, last - 1);
      k[i] = chunk.k[panel];
      v[i] = chunk.v[panel];
    }
    vf sum[MR][NV];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) sum[r][j] = vf::zero();
    for (int d = 0; d < head_dim; d += 2) {
      Dot::template add<MR, NV, 2, true>(sum, q + d * MR, k, block_size);
#pragma GCC unroll 8
      for (int i = 0; i < NP; ++i) {
        k[i] += 2 * block_size;
        prefetch(v[i]);
        if (sizeof(KV) == 4) prefetch(v[i] + kPanel);
        v[i] += 2 * kPanel;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) store(s + r * kChunk + p * kPanel + j * kWidth, sum[r][j]);
  }
}

// o[r][columns .. + NV vectors] = alpha[r] * o[r][...] + sum over tokens t in [begin, end) of p[r][t] * v[t]; begin is even.
template <class Dot, int MR, int NV, class KV>
void accumulate_columns(const typename Dot::Coef* p, const Chunk<KV>& chunk, const Chunk<KV>& next, int begin, int end,
                        int column, int64_t block_size, int head_dim, const float* alpha, float* o) {
  constexpr int rows = NV * kWidth / (kPanel / 2);  // of the next keys, for each pair of tokens: as many as columns in all
  vf sum[MR][NV];
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j)
      sum[r][j] = vf::load(o + r * head_dim + column + j * kWidth) * vf::set(alpha[r]);
  for (int t = begin; t < end;) {
    const int panel = t / kPanel;
    const int stop = std::min(end, (panel + 1) * kPanel);
    const KV* v[1] = {chunk.v[panel] + t % kPanel * static_cast<int64_t>(head_dim) + column * kColumn<KV>};
    const KV* ahead = next.k[panel] + column * block_size;
    for (; t + 1 < stop; t += 2) {
      Dot::template add<MR, NV, kChunk, true>(sum, p + t, v, head_dim);
      v[0] += 2 * head_dim;
#pragma GCC unroll 16
      for (int i = 0; i < rows; i += kColumn<KV>) prefetch(ahead + i * block_size);
      ahead += rows * block_size;
    }
    if (t < stop) {
      Dot::template add<MR, NV, kChunk, false>(sum, p + t, v, head_dim);
      ++t;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) store(o + r * head_dim + column + j * kWidth, sum[r][j]);
}

template <class Dot, int MR, class KV>
void accumulate(const typename Dot::Coef* p, const Chunk<KV>& chunk, const Chunk<KV>& next, int begin, int end,
                int64_t block_size, int head_dim, const float* alpha, float* o) {
  constexpr int NV = kVectors<MR>;
  int column = 0;
  for (; column + NV * kWidth <= head_dim; column += NV * kWidth)
    accumulate_columns<Dot, MR, NV>(p, chunk, next, begin, end, column, block_size, head_dim, alpha, o);
  for (; column < head_dim; column += kPanel)
    accumulate_columns<Dot, MR, kPanel / kWidth>(p, chunk, next, begin, end, column, block_size, head_dim, alpha, o);
}

// The running softmax of some rows: o / l is the result so far, m the largest score times scale.
struct Rows {
  float* o;  // [rows][head_dim]
  float* m;  // [rows]
  float* l;  // [rows]
};

// A thread's buffers.
template <class Coef>
struct Workspace {
  Coef* q;    // a tile's queries, in groups of MR rows packed [head_dim / 2][MR][2]
  Coef* own;  // the same, of a tile of several sequences, in groups that end where a sequence does
  float* s;   // scores of a group [kMaxRows][kChunk]
  Coef* p;    // softmax weights of a group, the same shape
  float* merged;  // a tile's running softmax over the parts before the one at hand
};

// s = cap * tanh(s * scale / cap), as cap * (1 - 2 / (exp(2 x) + 1)).
inline void cap_scores(float* s, int from, int to, float scale, float cap) {
  const vf factor = vf::set(2 * scale / cap), one = vf::set(1.0f), twice = vf::set(2 * cap), most = vf::set(cap);
  for (int t = from; t < to; t += kWidth) store(s + t, most - twice / (exp(vf::load(s + t) * factor) + one));
}

// One group of MR rows against one chunk. Row r sees the chunk's tokens [begin[r], end[r]), none if that is empty; both
// bounds never fall from row to row.
template <class Dot, int MR, class KV>
void attend_rows(const typename Dot::Coef* q, const Chunk<KV>& chunk, const Chunk<KV>& next, const int* begin,
                 const int* end, int64_t block_size, int head_dim, float scale, float softcap,
                 const Workspace<typename Dot::Coef>& ws, Rows rows) {
  constexpr float inf = std::numeric_limits<float>::infinity();
  const int first = begin[0] / kPanel, last = (end[MR - 1] + kPanel - 1) / kPanel;
  const int from = first * kPanel, to = last * kPanel;
  scores<Dot, MR>(q, chunk, first, last, block_size, head_dim, ws.s);
  if (softcap > 0) {
    for (int r = 0; r < MR; ++r) cap_scores(ws.s + r * kChunk, from, to, scale, softcap);
    scale = 1.0f;
  }

  float before[kWidth] = {}, shift[kWidth] = {}, alpha[kWidth];
  for (int r = 0; r < MR; ++r) {
    float* s = ws.s + r * kChunk;
    std::fill(s + from, s + std::min(begin[r], to), -inf);
    std::fill(s + std::max(from, std::min(end[r], to)), s + to, -inf);
    vf top = vf::set(-inf);
    for (int t = from; t < to; t += kWidth) top = max(vf::load(s + t), top);
    before[r] = rows.m[r];
    rows.m[r] = std::max(rows.m[r], hmax(top) * scale);
    shift[r] = rows.m[r] == -inf ? 0.0f : rows.m[r];  // a row that has seen no key yet keeps o = l = 0
  }
  store(alpha, exp(vf::load(before) - vf::load(shift)));
  for (int r = 0; r < MR; ++r) {
    const float* s = ws.s + r * kChunk;
    auto* p = ws.p + r * kChunk;
    const vf factor = vf::set(scale), offset = vf::set(-shift[r]);
    vf total = vf::zero();
    for (int t = from; t < to; t += kWidth) {
      vf e = exp(fma(vf::load(s + t), factor, offset));
      total += e;
      store(p + t, e);
    }
    rows.l[r] = rows.l[r] * alpha[r] + hsum(total);
  }
  accumulate<Dot, MR>(ws.p, chunk, next, begin[0] & ~1, end[MR - 1], block_size, head_dim, alpha, rows.o);
}

template <class Dot, class KV, class... Args>
PAGED_INLINE void attend_rows(int count, Args&&... args) {
  switch (count) {
    case 1: return attend_rows<Dot, 1, KV>(args...);
    case 2: return attend_rows<Dot, 2, KV>(args...);
    case 3: return attend_rows<Dot, 3, KV>(args...);
    case 4: return attend_rows<Dot, 4, KV>(args...);
    case 6: return attend_rows<Dot, 6, KV>(args...);
  }
}

// Rows of the next group when `left` are left: of 6 where that goes, then one of the sizes above.
PAGED_INLINE int group_size(int left) { return left >= 6 ? 6 : left == 5 ? 3 : left; }

// Queries [query_begin, query_end) of a sequence against its keys [key_begin, key_end), for each kv head; or those of
// `num_seqs` neighbours with one query each, whose blocks are the same up to key `shared_end`. `part` is the offset of the
// item's running softmax in the buffer of parts, or -1 if the item is the whole of its rows' keys.
struct Item {
  int seq, num_seqs;
  int query_begin, query_end;
  int key_begin, key_end, shared_end;
  int64_t part;

  int num_rows(int group) const { return num_seqs * (query_end - query_begin) * group; }
};

// Rows [row_begin, row_end) of an item meet the chunk of keys that starts at `start`, by the block table of `seq`.
struct Visit {
  int start, seq, row_begin, row_end;
};

inline void plan_visits(const Problem& pb, const Item& item, std::vector<Visit>& visits) {
  const int group = pb.num_heads / pb.num_kv_heads;
  visits.clear();
  for (int start = item.key_begin / kChunk * kChunk; start < item.key_end; start += kChunk)
    if (item.num_seqs == 1 || start + kChunk <= item.shared_end)
      visits.push_back({start, item.seq, 0, item.num_rows(group)});
    else
      for (int i = 0; i < item.num_seqs; ++i)
        if (start < pb.seq_lens[item.seq + i]) visits.push_back({start, item.seq + i, i * group, (i + 1) * group});
}

PAGED_INLINE Rows rows_at(float* p, int rows, int head_dim) {
  const int64_t size = static_cast<int64_t>(rows) * head_dim;
  return {p, p + size, p + size + rows};
}

inline void clear_rows(Rows rows, int num_rows, int head_dim) {
  std::fill_n(rows.o, static_cast<int64_t>(num_rows) * head_dim, 0.0f);
  std::fill_n(rows.m, num_rows, -std::numeric_limits<float>::infinity());
  std::fill_n(rows.l, num_rows, 0.0f);
}

template <class Dot, class A>
void pack_queries(const A* q, int64_t token_stride, int rows, int group, int head_dim, typename Dot::Coef* packed) {
  for (int start = 0, count; start < rows; start += count) {
    count = group_size(rows - start);
    auto* out = packed + static_cast<int64_t>(start) * head_dim;
    for (int r = 0; r < count; ++r) {
      const A* x = q + (start + r) / group * token_stride + static_cast<int64_t>((start + r) % group) * head_dim;
      for (int d = 0; d < head_dim; d += 2)
        for (int odd = 0; odd < 2; ++odd) {
          auto& to = out[(static_cast<int64_t>(d / 2) * count + r) * 2 + odd];
          if constexpr (std::is_same_v<A, typename Dot::Coef>)
            to = x[d + odd];
          else
            to = to_float(x[d + odd]);
        }
    }
  }
}

// Fold a second part of the same rows into the first.
inline void merge_rows(Rows into, Rows from, int num_rows, int head_dim) {
  for (int r = 0; r < num_rows; ++r) {
    const float m = std::max(into.m[r], from.m[r]);
    const float a = std::exp(into.m[r] - m), b = std::exp(from.m[r] - m);
    into.m[r] = m;
    into.l[r] = into.l[r] * a + from.l[r] * b;
    float* x = into.o + static_cast<int64_t>(r) * head_dim;
    const float* y = from.o + static_cast<int64_t>(r) * head_dim;
    for (int d = 0; d < head_dim; d += kWidth)
      store(x + d, fma(vf::load(y + d), vf::set(b), vf::load(x + d) * vf::set(a)));
  }
}

// An item's rows for the kv heads [head_begin, head_end), one head after the other: `rows_of(h)` says where its running
// softmax goes, `done(h, rows)` takes it. While a head's last values are used, the first keys of the next head are
// fetched.
template <class Dot, class A, class KV, class RowsOf, class Done>
void attend_item(const Problem& pb, const Item& item, const std::vector<Visit>& visits, int head_begin, int head_end,
                 const A* q, const KV* k, const KV* v, const Workspace<typename Dot::Coef>& ws, RowsOf rows_of,
                 Done done) {
  const int group = pb.num_heads / pb.num_kv_heads, head_dim = pb.head_dim, block_size = pb.block_size;
  const int num_rows = item.num_rows(group);
  const int num_queries = pb.cu_seqlens_q[item.seq + 1] - pb.cu_seqlens_q[item.seq];
  const int first_position = pb.seq_lens[item.seq] - num_queries + item.query_begin;
  const int64_t head_stride = static_cast<int64_t>(block_size) * head_dim;
  const int64_t token_stride = static_cast<int64_t>(pb.num_heads) * head_dim;
  const int64_t first_token = pb.cu_seqlens_q[item.seq] + item.query_begin;

  const auto position_of = [&](int row) {
    return item.num_seqs > 1 ? pb.seq_lens[item.seq + row / group] - 1 : first_position + row / group;
  };

  const auto locate = [&](int kv_head, const Visit& visit) {
    const int32_t* table = pb.block_tables + static_cast<int64_t>(visit.seq) * pb.max_blocks;
    const int key_end = std::min(item.key_end, pb.seq_lens[visit.seq]);
    Chunk<KV> chunk;
    chunk.first = std::max(0, item.key_begin - visit.start) / kPanel;
    chunk.last = (std::min(kChunk, key_end - visit.start) + kPanel - 1) / kPanel;
    for (int i = 0; i < kPanels; ++i) {
      const int position = visit.start + std::clamp(i, chunk.first, chunk.last - 1) * kPanel;
      const int offset = position % block_size;
      const int64_t at = (static_cast<int64_t>(table[position / block_size]) * pb.num_kv_heads + kv_head) * head_stride;
      chunk.k[i] = k + at + static_cast<int64_t>(offset) * kColumn<KV>;
      chunk.v[i] = v + at + static_cast<int64_t>(offset) * head_dim;
    }
    return chunk;
  };

  const auto fetch_keys = [&](const Chunk<KV>& chunk, int first) {
    for (int i = first; i < chunk.last; ++i)
      for (int d = 0; d < head_dim; d += kColumn<KV>) prefetch(chunk.k[i] + static_cast<int64_t>(d) * block_size);
  };

  const Rows before = rows_at(ws.merged, num_rows, head_dim);
  Chunk<KV> next = locate(head_begin, visits.front());
  fetch_keys(next, next.first);
  for (int kv_head = head_begin; kv_head < head_end; ++kv_head) {
    const Rows rows = rows_of(kv_head);
    pack_queries<Dot>(q + first_token * token_stride + static_cast<int64_t>(kv_head) * group * head_dim, token_stride,
                      num_rows, group, head_dim, ws.q);
    for (int i = 0; item.num_seqs > 1 && i < item.num_seqs; ++i)
      pack_queries<Dot>(q + (first_token + i) * token_stride + static_cast<int64_t>(kv_head) * group * head_dim,
                        token_stride, group, group, head_dim, ws.own + static_cast<int64_t>(i) * group * head_dim);
    clear_rows(rows, num_rows, head_dim);
    bool merged = false;
    for (size_t i = 0; i < visits.size(); ++i) {
      const Visit& visit = visits[i];
      if (i > 0 && visit.start % kSplit == 0 && visit.start != visits[i - 1].start) {
        if (merged)
          merge_rows(before, rows, num_rows, head_dim);
        else
          std::copy_n(rows.o, static_cast<int64_t>(num_rows) * (head_dim + 2), before.o);
        merged = true;
        clear_rows(rows, num_rows, head_dim);
      }
      const Chunk<KV> chunk = next;
      const auto* queries = visit.row_end - visit.row_begin == num_rows ? ws.q : ws.own;
      if (i + 1 < visits.size())
        next = locate(kv_head, visits[i + 1]);
      else if (kv_head + 1 < head_end)
        next = locate(kv_head + 1, visits.front());
      for (int r0 = visit.row_begin, count; r0 < visit.row_end; r0 += count) {
        count = group_size(visit.row_end - r0);
        int begin[kMaxRows], end[kMaxRows];
        for (int r = 0; r < count; ++r) {
          const int position = position_of(r0 + r);
          const int visible = pb.window > 0 ? std::max(item.key_begin, position - pb.window + 1) : item.key_begin;
          begin[r] = std::clamp(visible - visit.start, 0, kChunk);
          end[r] = std::clamp(std::min(item.key_end, position + 1) - visit.start, 0, kChunk);
        }
        if (begin[0] >= end[count - 1]) continue;
        const auto* packed = queries + static_cast<int64_t>(r0) * head_dim;
        const Rows some = {rows.o + static_cast<int64_t>(r0) * head_dim, rows.m + r0, rows.l + r0};
        attend_rows<Dot, KV>(count, packed, chunk, next, begin, end, block_size, head_dim, pb.scale, pb.softcap, ws, some);
      }
      fetch_keys(next, chunk.last);  // of a head's last chunk, often a short one, hang the next head's first keys
    }
    if (merged) merge_rows(before, rows, num_rows, head_dim);
    done(kv_head, merged ? before : rows);
  }
}

// out row = o / l, for the item's rows, l with the head's sink in it.
template <class A>
void write_rows(const Problem& pb, const Item& item, int kv_head, Rows rows, A* out) {
  const int group = pb.num_heads / pb.num_kv_heads;
  const int num_rows = item.num_rows(group);
  const int64_t first_token = pb.cu_seqlens_q[item.seq] + item.query_begin;
  for (int r = 0; r < num_rows; ++r) {
    A* to = out + ((first_token + r / group) * pb.num_heads + kv_head * group + r % group) * pb.head_dim;
    float share = 1.0f / rows.l[r];
    if (pb.sinks != nullptr) {
      const float sink = pb.sinks[kv_head * group + r % group], top = std::max(rows.m[r], sink);
      const float seen = std::exp(rows.m[r] - top);
      share = seen / (rows.l[r] * seen + std::exp(sink - top));
    }
    const vf norm = vf::set(share);
    for (int d = 0; d < pb.head_dim; d += kWidth)
      store(to + d, vf::load(rows.o + static_cast<int64_t>(r) * pb.head_dim + d) * norm);
  }
}

// Keys that sequences `a` and `b` have in the same blocks, from the first on.
inline int shared_keys(const Problem& pb, int a, int b) {
  const int32_t* tables[] = {pb.block_tables + static_cast<int64_t>(a) * pb.max_blocks,
                             pb.block_tables + static_cast<int64_t>(b) * pb.max_blocks};
  const int blocks = std::min(pb.seq_lens[a], pb.seq_lens[b]) / pb.block_size;
  return static_cast<int>(std::mismatch(tables[0], tables[0] + blocks, tables[1]).first - tables[0]) * pb.block_size;
}

// How many sequences from `first` on decode behind shared keys, at most `limit`, and how many keys that are. One more is
// taken in as long as no fewer reads are saved.
inline std::pair<int, int> shared_run(const Problem& pb, int first, int limit) {
  int count = 1, keys = 0;
  while (count < limit && first + count < pb.num_seqs) {
    const int next = first + count;
    if (pb.cu_seqlens_q[next + 1] - pb.cu_seqlens_q[next] != 1) break;
    const int common = count == 1 ? shared_keys(pb, first, next) : std::min(keys, shared_keys(pb, first, next));
    if (common < kChunk || count * common < (count - 1) * keys) break;
    keys = common;
    ++count;
  }
  return {count, keys};
}

// The batch cut into items; those of the same rows follow each other. Returns the floats its parts need.
inline int64_t plan(const Problem& pb, std::vector<Item>& items) {
  const int group = pb.num_heads / pb.num_kv_heads;
  const int tile = std::max(1, kTileRows / group);
  int64_t part_floats = 0, decode_parts = 0;
  for (int s = 0; s < pb.num_seqs; ++s)
    if (pb.cu_seqlens_q[s + 1] - pb.cu_seqlens_q[s] == 1) decode_parts += (pb.seq_lens[s] + kSplit - 1) / kSplit;
  // Tiles of several sequences, only as large as leaves each thread some.
  const int64_t spare = decode_parts * pb.num_kv_heads / (kItemsPerThread * omp_get_max_threads());
  const int most = pb.window > 0 ? 1 : static_cast<int>(std::clamp<int64_t>(spare, 1, tile));
  for (const bool split : {false, true})  // whole tiles first: they are the longest
    for (int s = 0, count; s < pb.num_seqs; s += count) {
      count = 1;
      const int num_queries = pb.cu_seqlens_q[s + 1] - pb.cu_seqlens_q[s];
      const int context = pb.seq_lens[s] - num_queries;
      if (num_queries == 0 || split != (num_queries <= tile)) continue;
      int shared = 0;
      if (num_queries == 1 && most > 1) std::tie(count, shared) = shared_run(pb, s, most);
      const int longest = *std::max_element(pb.seq_lens + s, pb.seq_lens + s + count);
      for (int q_end = num_queries; q_end > 0;) {
        const int q_begin = (q_end - 1) / tile * tile;
        const int key_begin = pb.window > 0 ? std::max(0, context + q_begin - pb.window + 1) : 0;
        const int key_end = count > 1 ? longest : context + q_end;
        const bool parts = split && key_begin / kSplit != (key_end - 1) / kSplit;
        for (int k = key_begin; k < key_end;) {
          const int stop = split ? std::min(key_end, (k / kSplit + 1) * kSplit) : key_end;
          items.push_back({s, count, q_begin, q_end, k, stop, shared, parts ? part_floats : -1});
          if (parts) part_floats += static_cast<int64_t>(pb.num_kv_heads) * items.back().num_rows(group) * (pb.head_dim + 2);
          k = stop;
        }
        q_end = q_begin;
      }
    }
  return part_floats;
}

template <class T>
struct Free {
  void operator()(T* p) const { std::free(p); }
};
template <class T>
std::unique_ptr<T[], Free<T>> aligned(int64_t count) {
  const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
  return std::unique_ptr<T[], Free<T>>(static_cast<T*>(std::aligned_alloc(64, bytes)));
}

template <class Dot, class A, class KV>
void attend(const Problem& pb, const A* q, const KV* k, const KV* v, A* out) {
  using Coef = typename Dot::Coef;
  const int64_t token_size = static_cast<int64_t>(pb.num_heads) * pb.head_dim;
  std::fill(out + pb.cu_seqlens_q[pb.num_seqs] * token_size, out + pb.num_tokens * token_size, A{});
  const int group = pb.num_heads / pb.num_kv_heads, head_dim = pb.head_dim;
  const int max_rows = std::max(1, kTileRows / group) * group;
  std::vector<Item> items;
  const auto parts = aligned<float>(plan(pb, items));
  const int64_t units = static_cast<int64_t>(items.size()) * pb.num_kv_heads;
  // With work enough for every thread, a thread takes all kv heads of an item: what it fetches ahead stays useful.
  const int heads = static_cast<int64_t>(items.size()) >= kItemsPerThread * omp_get_max_threads() ? pb.num_kv_heads : 1;
  const auto part_rows = [&](const Item& item, int kv_head) {
    const int rows = item.num_rows(group);
    return rows_at(parts.get() + item.part + static_cast<int64_t>(kv_head) * rows * (head_dim + 2), rows, head_dim);
  };

#pragma omp parallel
  {
    const auto q_buffer = aligned<Coef>(static_cast<int64_t>(max_rows) * head_dim);
    const auto own_buffer = aligned<Coef>(static_cast<int64_t>(max_rows) * head_dim);
    const auto row_buffer = aligned<float>(static_cast<int64_t>(max_rows) * (head_dim + 2));
    const auto merged_buffer = aligned<float>(static_cast<int64_t>(max_rows) * (head_dim + 2));
    const auto s_buffer = aligned<float>(kMaxRows * kChunk);
    const auto p_buffer = aligned<Coef>(kMaxRows * kChunk);
    std::vector<Visit> visits;
    Workspace<Coef> ws = {q_buffer.get(), own_buffer.get(), s_buffer.get(), p_buffer.get(), merged_buffer.get()};
#pragma omp for schedule(dynamic, 1)
    for (int64_t u = 0; u < units; u += heads) {
      const Item& item = items[u / pb.num_kv_heads];
      const int kv_head = static_cast<int>(u % pb.num_kv_heads);
      plan_visits(pb, item, visits);
      attend_item<Dot>(
          pb, item, visits, kv_head, kv_head + heads, q, k, v, ws,
          [&](int h) {
            return item.part >= 0 ? part_rows(item, h) : rows_at(row_buffer.get(), item.num_rows(group), head_dim);
          },
          [&](int h, const Rows& rows) {
            if (item.part < 0) write_rows(pb, item, h, rows, out);
          });
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t u = 0; u < units; ++u) {
      const size_t first = u / pb.num_kv_heads;
      const Item& item = items[first];
      if (item.part < 0 || (first > 0 && items[first - 1].seq == item.seq)) continue;
      const int kv_head = static_cast<int>(u % pb.num_kv_heads);
      const Rows rows = part_rows(item, kv_head);
      for (size_t i = first + 1; i < items.size() && items[i].seq == item.seq; ++i)
        merge_rows(rows, part_rows(items[i], kv_head), item.num_rows(group), head_dim);
      write_rows(pb, item, kv_head, rows, out);
    }
  }
}

}  // namespace paged::attention

extern "C" {

#define PAGED_ATTENTION(NAME, DOT, A, KV)                                                                             \
  void NAME(const A* q, const KV* k, const KV* v, const int32_t* cu_seqlens_q, const int32_t* seq_lens,               \
            const int32_t* block_tables, const float* sinks, A* out, int num_tokens, int num_seqs, int max_blocks,    \
            int num_heads, int num_kv_heads, int head_dim, int block_size, float scale, int window, float softcap) {  \
    const paged::attention::Problem problem = {cu_seqlens_q, seq_lens,     block_tables, sinks,      num_tokens,      \
                                               num_seqs,     max_blocks,   num_heads,    num_kv_heads, head_dim,      \
                                               block_size,   scale,        window,       softcap};                    \
    paged::attention::attend<paged::attention::DOT>(problem, q, k, v, out);                                           \
  }

// q, out [T, num_heads, head_dim]; k, v: one layer of the cache; window 0, softcap 0, sinks null = none. Tokens past the last sequence get zeros.
PAGED_ATTENTION(paged_attention_f32_f32, FloatDot, float, float)
PAGED_ATTENTION(paged_attention_f32_bf16, FloatDot, float, paged::bf16)
#if defined(PAGED_BF16_DOT)
PAGED_ATTENTION(paged_attention_bf16_bf16, PairDot, paged::bf16, paged::bf16)
#else
PAGED_ATTENTION(paged_attention_bf16_bf16, FloatDot, paged::bf16, paged::bf16)
#endif
#undef PAGED_ATTENTION

}  // extern "C"
