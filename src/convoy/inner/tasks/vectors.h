// Sixteen numbers at a time.

#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <cstdint>

namespace convoy {

constexpr int64_t kLane = 16;  // numbers in a vector

inline int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

typedef float Lanes __attribute__((vector_size(64)));
typedef float Anywhere __attribute__((vector_size(64), aligned(4), may_alias));

inline Lanes load(const float* from) { return *reinterpret_cast<const Anywhere*>(from); }
inline void store(float* to, Lanes value) { *reinterpret_cast<Anywhere*>(to) = value; }

// A number of bf16 is the upper half of one of fp32.
using Half = uint16_t;
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint32_t WordsAnywhere __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint16_t HalvesAnywhere __attribute__((vector_size(32), aligned(2), may_alias));

inline Halves load_halves(const void* from) { return *static_cast<const HalvesAnywhere*>(from); }
inline void store_halves(void* to, Halves value) { *static_cast<HalvesAnywhere*>(to) = value; }
inline Words load_words(const void* from) { return *static_cast<const WordsAnywhere*>(from); }
inline void store_words(void* to, Words value) { *static_cast<WordsAnywhere*>(to) = value; }

inline Words widened(Halves upper) {
#if defined(__AVX512F__)
  return reinterpret_cast<Words>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(upper)));
#else
  return __builtin_convertvector(upper, Words);
#endif
}

inline Lanes as_lanes(Words bits) { return reinterpret_cast<Lanes>(bits); }

// Words of two vectors, numbered from 0 to 31.
inline Words mixed(Words a, Words b, Words which) {
#if defined(__clang__)
  Words found;
  for (int64_t i = 0; i < kLane; ++i) found[i] = which[i] < kLane ? a[which[i]] : b[which[i] - kLane];
  return found;
#else
  return __builtin_shuffle(a, b, which);
#endif
}

inline Halves rounded(Lanes value) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<Halves>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(value)));
#else
  auto bits = reinterpret_cast<Words>(value);
  auto nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(value == value ? nearest : Words{} + 0x7fc0, Halves);
#endif
}

// What is no number stays none.
inline Lanes above_zero(Lanes value) {
#if defined(__AVX512F__)
  return reinterpret_cast<Lanes>(_mm512_max_ps(_mm512_setzero_ps(), reinterpret_cast<__m512>(value)));
#else
  return value < 0 ? Lanes{} : value;
#endif
}

}  // namespace convoy
