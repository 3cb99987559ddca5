// Does the loops over tiles (products.h) with a matrix unit that is acted out here, so that they can
// be tested on any machine, and with a real one where there is one. test_tiles.py compiles and runs it.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "products.h"

using namespace convoy;

// Tiles as the manual describes them: 16 rows of 64 bytes, with 16 pairs of bf16 or 16 of fp32. They
// are there during a turn only, and hold nothing of use at its beginning.
struct Acted {
  static inline unsigned char tiles[8][16][64];
  static inline long products = 0;
  static inline bool configured = false;

  struct Turn {
    Turn() {
      std::memset(tiles, 0xff, sizeof(tiles));
      configured = true;
    }
    ~Turn() { configured = false; }
  };

  static void check() {
    if (!configured) {
      std::printf("a tile was used outside of a turn\n");
      std::exit(1);
    }
  }

  template <int tile>
  static void zero() {
    static_assert(tile < 8);
    check();
    std::memset(tiles[tile], 0, sizeof(tiles[tile]));
  }

  template <int tile>
  static void load(const void* from, int64_t row_bytes) {
    static_assert(tile < 8);
    check();
    for (int row = 0; row < 16; ++row)
      std::memcpy(tiles[tile][row], static_cast<const char*>(from) + row * row_bytes, 64);
  }

  template <int tile>
  static void store(void* to, int64_t row_bytes) {
    check();
    for (int row = 0; row < 16; ++row)
      std::memcpy(static_cast<char*>(to) + row * row_bytes, tiles[tile][row], 64);
  }

  static float bf16(int tile, int row, int at) {
    uint16_t half;
    std::memcpy(&half, tiles[tile][row] + 2 * at, 2);
    uint32_t word = uint32_t(half) << 16;
    float found;
    std::memcpy(&found, &word, 4);
    return found;
  }

  template <int sums, int places, int by>
  static void multiply() {
    static_assert(sums != places && sums != by && places != by);
    check();
    ++products;
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 16; ++n) {
        float sum;
        std::memcpy(&sum, tiles[sums][m] + 4 * n, 4);
        for (int pair = 0; pair < 16; ++pair)
          for (int half = 0; half < 2; ++half)
            sum += bf16(places, m, 2 * pair + half) * bf16(by, pair, 2 * n + half);
        std::memcpy(tiles[sums][m] + 4 * n, &sum, 4);
      }
  }
};

std::vector<Half> random_halves(int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<Half> found(count);
  for (auto& half : found) {
    float number = normal(generator);
    uint32_t word;
    std::memcpy(&word, &number, 4);
    half = Half(word >> 16);
  }
  return found;
}

float value(Half half) {
  uint32_t word = uint32_t(half) << 16;
  float found;
  std::memcpy(&found, &word, 4);
  return found;
}

int failures = 0;

void compare(const char* what, const std::vector<float>& found, const std::vector<double>& truth) {
  double off = 0, norm = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    off += (found[i] - truth[i]) * (found[i] - truth[i]);
    norm += truth[i] * truth[i];
  }
  double error = std::sqrt(off / norm);
  if (!(error < 1e-6)) {
    ++failures;
    std::printf("%s is off by %g\n", what, error);
  }
}

template <typename Unit>
void try_multiply(int64_t channels, int64_t stride, int64_t across, int64_t outputs, int64_t count) {
  Walk walk{channels, channels * stride, across * channels, outputs};
  int64_t steps = walk.steps(), block = kFilterRows * steps * kTile;
  auto in = random_halves((count * stride + 3 * across + 3) * channels + kTileRow, 1);
  auto filters = random_halves(outputs / kLane * block, 2);
  std::vector<double> truth(count * outputs);
  for (int64_t p = 0; p < count; ++p)
    for (int64_t k = 0; k < outputs; ++k)
      for (int64_t r = 0; r < kFilterRows; ++r)
        for (int64_t j = 0; j < steps * kTileRow; ++j) {
          int64_t at = k / kLane * block + (r * steps + j / kTileRow) * kTile;
          at += j % kTileRow / 2 * kTileRow + k % kLane * 2 + j % 2;
          truth[p * outputs + k] += double(value(in[p * walk.apart + r * walk.line + j])) * value(filters[at]);
        }
  std::vector<float> vectors(count * outputs), tiles(count * outputs);
  VectorProducts::multiply(walk, in.data(), filters.data(), count, vectors.data());
  compare("a product in vectors", vectors, truth);
  long before = Acted::products;
  typename TileProducts<Unit>::Turn turn;
  TileProducts<Unit>::multiply(walk, in.data(), filters.data(), count, tiles.data());
  compare("a product in tiles", tiles, truth);
  long expected = std::is_same_v<Unit, Acted> ? count / kLane * outputs / kLane * kFilterRows * steps : 0;
  if (Acted::products - before != expected) {
    ++failures;
    std::printf("%ld products of tiles\n", Acted::products - before);
  }
}

template <typename Unit>
void try_correlate(int64_t count, int64_t outputs_apart, int64_t taps_apart) {
  auto errors = random_halves(kLane * count, 3), image = random_halves((count + 4) * kLane, 4);
  std::vector<Half> pairs[2];
  for (int64_t first = 0; first < 2; ++first)
    for (int64_t p = first; p + 1 < count + 4; p += 2)
      for (int64_t c = 0; c < kLane; ++c)
        for (int64_t half = 0; half < 2; ++half) pairs[first].push_back(image[(p + half) * kLane + c]);
  int64_t size = (kLane - 1) * outputs_apart + 2 * taps_apart + kLane;
  std::vector<double> truth(size, 1.0);
  for (int64_t k = 0; k < kLane; ++k)
    for (int64_t s = 0; s < kFilterRows; ++s)
      for (int64_t c = 0; c < kLane; ++c)
        for (int64_t p = 0; p < count; ++p)
          truth[k * outputs_apart + s * taps_apart + c] +=
              double(value(errors[k * count + p])) * value(image[(p + s) * kLane + c]);
  std::vector<float> vectors(size, 1.0f), tiles(size, 1.0f);  // what was there is added to
  VectorProducts::correlate(
      errors.data(), count, pairs[0].data(), pairs[1].data(), count, vectors.data(), outputs_apart, taps_apart);
  compare("a correlation in vectors", vectors, truth);
  typename TileProducts<Unit>::Turn turn;
  TileProducts<Unit>::correlate(
      errors.data(), count, pairs[0].data(), pairs[1].data(), count, tiles.data(), outputs_apart, taps_apart);
  compare("a correlation in tiles", tiles, truth);
}

template <typename Unit>
void try_unit() {
  for (int64_t channels : {16, 32, 48})
    for (int64_t outputs : {16, 32, 48, 80})
      for (int64_t tiles = 1; tiles < 10; ++tiles)
        try_multiply<Unit>(channels, 1 + tiles % 2, 10, outputs, tiles * kLane);
  for (int64_t count : {32, 96, 288}) {
    try_correlate<Unit>(count, 9 * 16, 16);
    try_correlate<Unit>(count, 9 * 48, 48);
  }
}

int main() {
  try_unit<Acted>();
#ifdef CONVOY_AMX
  if (Amx::ask()) {
    try_unit<Amx>();
    std::printf("with a real matrix unit, too\n");
  }
#endif
  std::printf("%ld products of tiles, %d failures\n", Acted::products, failures);
  return failures > 0;
}
