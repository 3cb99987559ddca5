// Max-pools whose windows lie side by side, images channels last. Who won is kept as one byte.
//
// Channels are taken sixteen at a time, also where there are fewer: what is written too much is
// written again, and right, by who comes next. So all is written in the order in which it lies, and
// behind the last there is room (pool.h); what would be read from behind the last is not.

#include <torch/library.h>

#include "lanes.h"

namespace convoy {

namespace {

typedef int32_t Places __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint8_t BytesAnywhere __attribute__((vector_size(16), aligned(1), may_alias));

// Sixteen numbers, or as many as there are before the end.
template <typename T>
inline Lanes load_before(const T* from, const T* end) {
  if (end - from >= kLane) return load(from);
  T some[kLane] = {};
  std::copy(from, std::max(from, end), some);
  return load(some);
}

struct Windows {
  int64_t samples, channels, height, width, rows, columns, down, across;

  Windows(const Tensor& x, at::IntArrayRef size)
      : samples(x.size(0)), channels(x.size(1)), height(x.size(2)), width(x.size(3)), rows(size[0]),
        columns(size[1]), down(height / rows), across(width / columns) {}
};

// The largest number of each window and its place there. As torch: the first of equals wins, and
// what is no number wins over all.
template <typename T>
void find_largest(const Windows& in, const T* x, const T* end, T* y, uint8_t* won) {
  int64_t channels = in.channels, line = in.width * channels;
  for (int64_t row = 0; row < in.samples * in.down; ++row) {
    const T* first = x + (row / in.down * in.height + row % in.down * in.rows) * line;
    for (int64_t j = 0; j < in.across; ++j, first += in.columns * channels, y += channels, won += channels)
      for (int64_t c = 0; c < channels; c += kLane) {
        Lanes best = load_before(first + c, end);
        Places place = {};
        for (int64_t r = 0; r < in.rows; ++r)
          for (int64_t s = r == 0 ? 1 : 0; s < in.columns; ++s) {
            Lanes other = load_before(first + r * line + s * channels + c, end);
            Places better = (other > best) | (other != other);
            best = better ? other : best;
            place = better ? Places{} + int32_t(r * in.columns + s) : place;
          }
        store(y + c, best);
        *reinterpret_cast<BytesAnywhere*>(won + c) = __builtin_convertvector(place, Bytes);
      }
  }
}

// Hands each window's error to its winner, row by row of the image.
template <typename T>
void hand_back(const Windows& in, const T* dy, const T* end, const uint8_t* won, T* dx) {
  int64_t channels = in.channels, rest = (in.width - in.across * in.columns) * channels;
  for (int64_t n = 0; n < in.samples; ++n)
    for (int64_t i = 0; i < in.height; ++i) {
      if (i >= in.down * in.rows) {
        dx = std::fill_n(dx, in.width * channels, T(0));
        continue;
      }
      int64_t result = (n * in.down + i / in.rows) * in.across * channels;
      for (int64_t j = 0; j < in.across; ++j, result += channels)
        for (int64_t s = 0; s < in.columns; ++s, dx += channels)
          for (int64_t c = 0; c < channels; c += kLane) {
            Bytes who = *reinterpret_cast<const BytesAnywhere*>(won + result + c);
            Places mine = __builtin_convertvector(who, Places) == int32_t(i % in.rows * in.columns + s);
            store(dx + c, mine ? load_before(dy + result + c, end) : Lanes{});
          }
      dx = std::fill_n(dx, rest, T(0));
    }
}

std::tuple<Tensor, Tensor> max_pool(const Tensor& given, at::IntArrayRef size) {
  auto x = channels_last(given);
  Windows in(x, size);
  at::DimVector shape{in.samples, in.channels, in.down, in.across};
  auto y = pooled(shape, x.scalar_type()), places = pooled(shape, at::kByte);
  with_type(x, [&](auto sample) {
    using T = decltype(sample);
    const T* from = x.const_data_ptr<T>();
    find_largest(in, from, from + x.numel(), y.template data_ptr<T>(), places.data_ptr<uint8_t>());
  });
  return {y, places};
}

Tensor max_pool_back(
    const Tensor& given, const Tensor& places, const Tensor& x, at::IntArrayRef size) {
  auto dy = channels_last(given);
  auto dx = pooled(x.sizes(), dy.scalar_type());
  with_type(dy, [&](auto sample) {
    using T = decltype(sample);
    const T* from = dy.const_data_ptr<T>();
    hand_back(Windows(x, size), from, from + dy.numel(), places.const_data_ptr<uint8_t>(),
              dx.template data_ptr<T>());
  });
  return dx;
}

}  // namespace

}  // namespace convoy

TORCH_LIBRARY_IMPL(convoy, CPU, m) {
  m.impl("max_pool", &convoy::max_pool);
  m.impl("max_pool_back", &convoy::max_pool_back);
}
