// Products of bf16 numbers that are added up in fp32, two at a time: on a matrix unit's tiles, or in
// vectors. Both read the same order of numbers, so who uses them need not know which it is.
//
//     multiply     y[p][k] = sum over rows r of a filter, places j of
//                            in[r * line + p * apart + j] * filters[k][r][j]
//     correlate    sums[k][s][c] += sum over p of errors[k][p] * in[p + s][c]
//
// `filters` are [k / 16][r][j / 32][pair of places][k of 16][place of pair], with zeros where j has
// an end; `even` and `odd` hold an image's pairs of neighbours [p / 2][c of 16][p % 2], beginning
// with numbers 0 and 1.

#pragma once

#include <type_traits>

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define CONVOY_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "vectors.h"

namespace convoy {

constexpr int64_t kTile = 512;      // numbers of bf16 in a tile: 16 rows of 32
constexpr int64_t kTileRow = 32;    // which are 16 pairs
constexpr int64_t kFilterRows = 3;  // and as many columns

// How filters go over an image in a frame.
struct Walk {
  int64_t channels, apart, line;  // of a place; from one to the next that is asked for, to the one below
  int64_t outputs;

  int64_t steps() const { return (kFilterRows * channels + kTileRow - 1) / kTileRow; }
};

// ---------------------------------------------------------------- in vectors

inline Lanes upper_halves(Words pairs) { return as_lanes(pairs & 0xffff0000u); }
inline Lanes lower_halves(Words pairs) { return as_lanes(pairs << 16); }

// sums + a0 * b0 + a1 * b1, where `a` is one pair for all.
inline Lanes add_products(Lanes sums, uint32_t a, Words b) {
  Words all = Words{} + a;
#if defined(__AVX512BF16__)
  return reinterpret_cast<Lanes>(_mm512_dpbf16_ps(
      reinterpret_cast<__m512>(sums), reinterpret_cast<__m512bh>(all), reinterpret_cast<__m512bh>(b)));
#else
  return sums + lower_halves(all) * lower_halves(b) + upper_halves(all) * upper_halves(b);
#endif
}

inline uint32_t pair_at(const Half* from) {
  uint32_t pair;
  __builtin_memcpy(&pair, from, sizeof(pair));
  return pair;
}

struct VectorProducts {
  // What must be done before and after; nothing here.
  struct Turn {};

  [[gnu::noinline]] static void multiply(const Walk& walk, const Half* in, const Half* filters, int64_t count, float* y) {
    int64_t k = 0, block = kFilterRows * walk.steps() * kTile;
    for (; k + 2 * kLane <= walk.outputs; k += 2 * kLane, filters += 2 * block)
      for (int64_t p = 0; p < count; p += 8)
        some<8, 2>(walk, in + p * walk.apart, filters, block, y + p * walk.outputs + k);
    for (; k < walk.outputs; k += kLane, filters += block)
      for (int64_t p = 0; p < count; p += 16)
        some<16, 1>(walk, in + p * walk.apart, filters, block, y + p * walk.outputs + k);
  }

  [[gnu::noinline]] static void correlate(
      const Half* errors, int64_t stride, const Half* even, const Half* odd, int64_t count, float* sums,
      int64_t outputs_apart, int64_t taps_apart) {
    constexpr int rows = 8;
    for (int64_t k = 0; k < kLane; k += rows, errors += rows * stride, sums += rows * outputs_apart) {
      Lanes found[rows][kFilterRows] = {};
      for (int64_t p = 0; p < count; p += 2) {
        Words by[kFilterRows] = {
            load_words(even + p * kLane), load_words(odd + p * kLane), load_words(even + (p + 2) * kLane)};
#pragma GCC unroll 8
        for (int i = 0; i < rows; ++i)
#pragma GCC unroll 3
          for (int s = 0; s < kFilterRows; ++s)
            found[i][s] = add_products(found[i][s], pair_at(errors + i * stride + p), by[s]);
      }
      for (int i = 0; i < rows; ++i)
        for (int s = 0; s < kFilterRows; ++s) {
          float* to = sums + i * outputs_apart + s * taps_apart;
          store(to, load(to) + found[i][s]);
        }
    }
  }

 private:
  template <int places, int vectors>
  static void some(const Walk& walk, const Half* in, const Half* filters, int64_t block, float* y) {
    Lanes sums[places][vectors] = {};
    int64_t pairs = walk.steps() * kLane;
    for (int64_t r = 0; r < kFilterRows; ++r, in += walk.line)
      for (int64_t j = 0; j < pairs; ++j, filters += kTileRow) {
        Words by[vectors];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; ++v) by[v] = load_words(filters + v * block);
#pragma GCC unroll 16
        for (int p = 0; p < places; ++p)
#pragma GCC unroll 2
          for (int v = 0; v < vectors; ++v)
            sums[p][v] = add_products(sums[p][v], pair_at(in + p * walk.apart + 2 * j), by[v]);
      }
#pragma GCC unroll 16
    for (int p = 0; p < places; ++p)
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) store(y + p * walk.outputs + v * kLane, sums[p][v]);
  }
};

// ---------------------------------------------------------------- in tiles

// Calls f with 0, 1, ... as constants.
template <int count, typename F>
inline void for_each_of(const F& f) {
  if constexpr (count > 0) {
    for_each_of<count - 1>(f);
    f(std::integral_constant<int, count - 1>());
  }
}

// Eight tiles of 16 rows of 64 bytes: four of sums, the others for what is multiplied.
template <typename Unit>
struct TileProducts {
  using Turn = typename Unit::Turn;

  [[gnu::noinline]] static void multiply(const Walk& walk, const Half* in, const Half* filters, int64_t count, float* y) {
    int64_t k = 0, block = kFilterRows * walk.steps() * kTile;
    for (; k + 2 * kLane <= walk.outputs; k += 2 * kLane, filters += 2 * block)
      in_blocks<2, 2>(walk, in, filters, block, count / kLane, y + k);
    if (k < walk.outputs) in_blocks<4, 1>(walk, in, filters, block, count / kLane, y + k);
  }

  [[gnu::noinline]] static void correlate(
      const Half* errors, int64_t stride, const Half* even, const Half* odd, int64_t count, float* sums,
      int64_t outputs_apart, int64_t taps_apart) {
    auto rows_apart = int64_t(sizeof(float)) * outputs_apart;
    for_each_of<kFilterRows>([&](auto s) { Unit::template load<s()>(sums + s() * taps_apart, rows_apart); });
    for (int64_t p = 0; p < count; p += kTileRow) {
      const Half* from[kFilterRows] = {even + p * kLane, odd + p * kLane, even + (p + 2) * kLane};
      Unit::template load<4>(errors + p, stride * int64_t(sizeof(Half)));
      for_each_of<kFilterRows>([&](auto s) {
        Unit::template load<5 + s()>(from[s()], kRowBytes);
        Unit::template multiply<s(), 4, 5 + s()>();
      });
    }
    for_each_of<kFilterRows>([&](auto s) { Unit::template store<s()>(sums + s() * taps_apart, rows_apart); });
  }

 private:
  static constexpr int64_t kRowBytes = kTileRow * sizeof(Half);

  // Some tiles of places, as alike in number as can be: a tile alone would wait for itself.
  template <int most, int by>
  static void in_blocks(
      const Walk& walk, const Half* in, const Half* filters, int64_t block, int64_t tiles, float* y) {
    while (tiles > 0) {
      int64_t turns = (tiles + most - 1) / most, some = (tiles + turns - 1) / turns;
      for_each_of<most>([&](auto i) {
        if (some == i() + 1) one_block<i() + 1, by>(walk, in, filters, block, y);
      });
      in += some * kLane * walk.apart;
      y += some * kLane * walk.outputs;
      tiles -= some;
    }
  }

  template <int places, int by>
  static void one_block(const Walk& walk, const Half* in, const Half* filters, int64_t block, float* y) {
    constexpr int first = 4 + by, others = 4 - by;  // tiles of places take turns
    const int64_t apart = walk.apart * int64_t(sizeof(Half)), steps = walk.steps(), line = walk.line;
    const int64_t tile_apart = kLane * walk.apart;
    for_each_of<places * by>([](auto i) { Unit::template zero<i()>(); });
    for (int64_t r = 0; r < kFilterRows; ++r, in += line)
      for (int64_t j = 0; j < steps; ++j, filters += kTile) {
        for_each_of<by>([&](auto v) { Unit::template load<4 + v()>(filters + v() * block, kRowBytes); });
        for_each_of<places>([&](auto p) {
          constexpr int tile = first + p() % others;
          Unit::template load<tile>(in + p() * tile_apart + j * kTileRow, apart);
          for_each_of<by>([&](auto v) { Unit::template multiply<p() * by + v(), tile, 4 + v()>(); });
        });
      }
    for_each_of<places * by>([&](auto i) {
      float* to = y + i() / by * kLane * walk.outputs + i() % by * kLane;
      Unit::template store<i()>(to, walk.outputs * int64_t(sizeof(float)));
    });
  }
};

#ifdef CONVOY_AMX

// The matrix unit that Intel calls AMX.
struct Amx {
  // Says whether the kernel lets this process use it; it must be asked once, before anything else:
  // tiles make its switches of threads dearer.
  static bool ask() {
    constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
  }

  // While it lives, this thread's tiles have 16 rows of 64 bytes.
  struct Turn {
    Turn() {
      struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      } shapes;
      asm volatile("ldtilecfg %0" ::"m"(shapes));
    }
    ~Turn() { asm volatile("tilerelease"); }
    Turn(const Turn&) = delete;
  };

  template <int tile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
  }

  template <int tile>
  static void load(const void* from, int64_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(tile) : "memory");
  }

  template <int tile>
  static void store(void* to, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(tile) : "memory");
  }

  // sums[m][n] += sum over pairs of places[m][pair] . by[pair][n]
  template <int sums, int places, int by>
  static void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(places), "i"(by));
  }
};

#endif

}  // namespace convoy
