// Convolutions with filters of 3x3 by Winograd's short products, in fp32.
//
// A tile of 2x2 results is made of 4x4 inputs with 16 products for each pair of channels where the
// plain way takes 36 (Lavin and Gray 2016, F(2x2, 3x3)):
//
//     Y  = A' [(G g G') * (B' d B)] A          forward; the error is the same with turned filters
//     dg = G' [(A dY A') * (B' d B)] G         the filters' gradient
//
// In these domains ("planes" 0 to 15) the sums over channels and over tiles are matrix products.
// Sixteen channels are one vector, so this is for processors with vectors of 512 bits; on others
// `vector_lanes` is 0 and nobody calls the rest. Images lie channels last.

#include <torch/library.h>

#include "passing.h"

namespace convoy {

constexpr int64_t kPlanes = 16;    // of a tile of 4x4
constexpr int64_t kTogether = 16;  // accumulators of a small product: tiles x vectors
constexpr int64_t kBlock = 32;     // tiles that are worked on together
// For filters' gradients, whose sums over all tiles stay in a core's cache:
constexpr int64_t kGradientBlock = 64;            // tiles,
constexpr int64_t kOutputs = 256, kInputs = 128;  // and channels

// ---------------------------------------------------------------- shapes

struct Shape {
  int64_t samples, channels, height, width;

  explicit Shape(const Tensor& x)
      : samples(x.size(0)), channels(x.size(1)), height(x.size(2)), width(x.size(3)) {}

  int64_t across() const { return width / 2; }            // tiles in a row
  int64_t rows() const { return samples * (height / 2); }  // rows of tiles
};

// Calls f with the number as a constant, if it is a common one, or with 0.
template <typename F>
void with_known(int64_t channels, const F& f) {
  if (channels == 16) f(std::integral_constant<int, 16>());
  else if (channels == 32) f(std::integral_constant<int, 32>());
  else if (channels == 64) f(std::integral_constant<int, 64>());
  else if (channels == 128) f(std::integral_constant<int, 128>());
  else f(std::integral_constant<int, 0>());
}

// Rows of tiles that are worked on together, so that their planes fit a core's cache.
struct Block {
  int64_t rows, tiles;  // tiles: a multiple of those that a product takes `together`

  Block(const Shape& shape, int64_t wanted, int64_t together = 1) {
    rows = std::min(std::max<int64_t>(1, wanted / shape.across()), shape.rows());
    tiles = round_up(rows * shape.across(), together);
  }

  int64_t count(const Shape& shape) const { return (shape.rows() + rows - 1) / rows; }
};

// Sixteen planes of [tiles][channels]; a line apart, or all would fall on the same cache sets.
struct Planes {
  int64_t channels, stride;
  float* data;

  Planes(int64_t tiles, int64_t channels, Room& room)
      : channels(channels), stride(tiles * channels + kLane), data(room.of(kPlanes * stride)) {}

  float* at(int64_t plane, int64_t tile = 0) const { return data + plane * stride + tile * channels; }
};

// ---------------------------------------------------------------- to the planes and back

// One column of a tile: B' d.
struct Column {
  Lanes row[4] = {};

  Column() = default;
  template <typename T, typename Reader>
  Column(const T* const rows[4], int64_t at, const Reader& read) {
    Lanes d0 = read(0, rows[0] + at), d1 = read(1, rows[1] + at);
    Lanes d2 = read(2, rows[2] + at), d3 = read(3, rows[3] + at);
    row[0] = d0 - d2;
    row[1] = d1 + d2;
    row[2] = d2 - d1;
    row[3] = d1 - d3;
  }
};

// B' d B of a row of tiles, for one vector of channels, from four rows of the image.
template <typename T, typename Reader>
void spread_inputs(
    const T* const rows[4], const Shape& shape, int64_t c, const Reader& read, const Planes& to, float* out) {
  const int64_t channels = shape.channels, stride = to.stride, step = to.channels;
  Column first, second(rows, c, read);  // what lies left of the image is 0
  for (int64_t x = 1; x < shape.width; x += 2, out += step) {
    Column third(rows, x * channels + c, read);
    Column fourth = x + 1 < shape.width ? Column(rows, (x + 1) * channels + c, read) : Column();
    for (int i = 0; i < 4; ++i) {
      float* at = out + 4 * i * stride;
      store(at, first.row[i] - third.row[i]);
      store(at + stride, second.row[i] + third.row[i]);
      store(at + 2 * stride, third.row[i] - second.row[i]);
      store(at + 3 * stride, second.row[i] - fourth.row[i]);
    }
    first = third;
    second = fourth;
  }
}

// The same for a block of rows of tiles, wherever these begin and end in the images, and for as many
// channels as there is room for, beginning with `channel`.
template <typename T, typename Reader>
void spread_block(
    const T* images, const Shape& shape, int64_t channel, int64_t row, int64_t count, Reader read,
    const Planes& to) {
  int64_t line = shape.width * shape.channels, down = shape.height / 2;
  const T* nothing = reinterpret_cast<const T*>(room(3).of(line));  // nobody writes there
  for (int64_t i = 0; i < count; ++i) {
    int64_t sample = (row + i) / down, top = (row + i) % down * 2 - 1;
    const T* rows[4];
    bool inside[4];
    for (int64_t k = 0; k < 4; ++k) {
      inside[k] = top + k >= 0 && top + k < shape.height;
      rows[k] = inside[k] ? images + (sample * shape.height + top + k) * line : nothing;
    }
    for (int64_t c = 0; c < to.channels; c += kLane) {
      read.begin(channel + c, inside);
      spread_inputs(rows, shape, channel + c, read, to, to.at(0, i * shape.across()) + c);
    }
  }
}

// A dY A' of a block of rows of tiles.
template <typename T>
void spread_errors(
    const T* errors, const Shape& shape, int64_t channel, int64_t row, int64_t count, const Planes& to) {
  const int64_t channels = shape.channels, line = shape.width * channels, step = to.channels;
  for (int64_t i = 0; i < count; ++i) {
    const T* upper = errors + (row + i) * 2 * line + channel;
    for (int64_t c = 0; c < to.channels; c += kLane) {
      float* out = to.at(0, i * shape.across()) + c;
      for (int64_t x = 0; x < shape.width; x += 2, out += step) {
        const T* from = upper + x * channels + c;
        Lanes a = load(from), b = load(from + channels);
        Lanes d = load(from + line), e = load(from + line + channels);
        Lanes left[4] = {a, a + d, a - d, -d}, right[4] = {b, b + e, b - e, -e};
        for (int k = 0; k < 4; ++k) {
          float* at = out + 4 * k * to.stride;
          store(at, left[k]);
          store(at + to.stride, left[k] + right[k]);
          store(at + 2 * to.stride, left[k] - right[k]);
          store(at + 3 * to.stride, -right[k]);
        }
      }
    }
  }
}

// A' m A of a row of tiles: two rows of results.
template <typename T, typename Finish>
void gather_row(const Planes& from, int64_t tile, const Shape& shape, T* images, int64_t upper, Finish finish) {
  int64_t channels = shape.channels, line = shape.width * channels;
  for (int64_t c = 0; c < channels; c += kLane) {
    const float* in = from.at(0, tile) + c;
    Lanes first = {};
    for (int i = 0; i < 3; ++i)
      for (int j = 0; j < 3; ++j) first += load(in + (4 * i + j) * from.stride);
    finish.begin(c, first);
    for (int64_t x = 0; x < shape.width; x += 2, in += channels) {
      Lanes p[4], q[4];
      for (int j = 0; j < 4; ++j) {
        Lanes m0 = load(in + j * from.stride), m1 = load(in + (4 + j) * from.stride);
        Lanes m2 = load(in + (8 + j) * from.stride), m3 = load(in + (12 + j) * from.stride);
        p[j] = m0 + m1 + m2;
        q[j] = m1 - m2 - m3;
      }
      int64_t at = upper + x * channels + c;
      store(images + at, finish(at, p[0] + p[1] + p[2]));
      store(images + at + channels, finish(at + channels, p[1] - p[2] - p[3]));
      store(images + at + line, finish(at + line, q[0] + q[1] + q[2]));
      store(images + at + line + channels, finish(at + line + channels, q[1] - q[2] - q[3]));
    }
    finish.end(c);
  }
}

// ---------------------------------------------------------------- products

// m[tile][k] = sum over c of v[tile][c] * u[c][k], for some tiles and vectors of k. Where the number
// of inputs is known beforehand (not 0), each tile's numbers are found without a register.
template <int tiles, int vectors, int known>
inline void multiply(const float* v, int64_t inputs, const float* u, float* m, int64_t out) {
  const int64_t in = known ? known : inputs;
  Lanes sums[tiles][vectors] = {};
  for (int64_t c = 0; c < in; ++c) {
    Lanes by[vectors];
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) by[j] = load(u + (c * vectors + j) * kLane);
#pragma GCC unroll 16
    for (int t = 0; t < tiles; ++t)
#pragma GCC unroll 4
      for (int j = 0; j < vectors; ++j) sums[t][j] += v[t * in + c] * by[j];
  }
#pragma GCC unroll 16
  for (int t = 0; t < tiles; ++t)
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) store(m + t * out + j * kLane, sums[t][j]);
}

template <int vectors, int known>
void multiply_planes(const Planes& v, const float* filters, const Planes& m, int64_t tiles) {
  constexpr int together = kTogether / vectors;
  int64_t in = v.channels, out = m.channels, width = vectors * kLane;
  for (int64_t plane = 0; plane < kPlanes; ++plane, filters += out)
    for (int64_t k = 0; k < out; k += width, filters += in * width)
      for (int64_t t = 0; t < tiles; t += together)
        multiply<together, vectors, known>(v.at(plane, t), in, filters, m.at(plane, t) + k, out);
}

void multiply_all(const Planes& v, const float* filters, const Planes& m, int64_t tiles) {
  with_vectors(vectors_for(m.channels), [&](auto vectors) {
    with_known(v.channels, [&](auto known) { multiply_planes<vectors(), known()>(v, filters, m, tiles); });
  });
}

// sums[k][c] += sum over tiles of w[tile][k] * v[tile][c], for some k and vectors of c.
template <int rows, int vectors>
inline void correlate(
    const float* w, int64_t out, const float* v, int64_t in, int64_t tiles, float* to) {
  Lanes sums[rows][vectors];
#pragma GCC unroll 16
  for (int k = 0; k < rows; ++k)
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) sums[k][j] = load(to + k * in + j * kLane);
  for (int64_t t = 0; t < tiles; ++t) {
    Lanes by[vectors];
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) by[j] = load(v + t * in + j * kLane);
#pragma GCC unroll 16
    for (int k = 0; k < rows; ++k)
#pragma GCC unroll 4
      for (int j = 0; j < vectors; ++j) sums[k][j] += w[t * out + k] * by[j];
  }
#pragma GCC unroll 16
  for (int k = 0; k < rows; ++k)
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) store(to + k * in + j * kLane, sums[k][j]);
}

// Not made part of who calls it: there its sums would not stay in registers.
template <int vectors>
[[gnu::noinline]] void correlate_planes(const Planes& w, const Planes& v, int64_t tiles, float* sums) {
  constexpr int rows = kTogether / vectors;
  int64_t in = v.channels, out = w.channels;
  for (int64_t plane = 0; plane < kPlanes; ++plane, sums += out * in)
    for (int64_t c = 0; c < in; c += vectors * kLane)
      for (int64_t k = 0; k < out; k += rows)
        correlate<rows, vectors>(
            w.at(plane) + k, out, v.at(plane) + c, in, tiles, sums + k * in + c);
}

// ---------------------------------------------------------------- what the engine calls

int64_t vector_lanes() {
#if defined(__AVX512F__)
  return kLane;
#else
  return 0;
#endif
}

// Filters as [3 * row + column][input][output]. For the error, inputs and outputs change places and
// filters are turned by half a circle.
std::vector<float> laid_out(const Tensor& weight, bool error) {
  int64_t out = weight.size(0), in = weight.size(1), pairs = in * out;
  const float* from = weight.const_data_ptr<float>();
  std::vector<float> found(9 * pairs);
  if (error) {
    for (int64_t k = 0; k < out; ++k)
      for (int64_t tap = 0; tap < 9; ++tap, from += in)
        std::copy(from, from + in, found.data() + (8 - tap) * pairs + k * in);
    return found;
  }
  for (int64_t k = 0; k < out; k += kLane)
    for (int64_t tap = 0; tap < 9; ++tap)
      for (int64_t c = 0; c < in; ++c)
        for (int64_t i = 0; i < kLane; ++i)
          found[tap * pairs + c * out + k + i] = from[((k + i) * 9 + tap) * in + c];
  return found;
}

// G g G', in the order in which products read it: [plane][some outputs][input][output of these],
// planes a little apart. The shape only tells the number of outputs, first, and of inputs, last, + 1.
Tensor winograd_filters(const Tensor& given, bool error) {
  auto weight = channels_last(given.to(at::kFloat));
  auto taps = laid_out(weight, error);
  int64_t in = weight.size(error ? 0 : 1), out = weight.size(error ? 1 : 0), pairs = in * out;
  int64_t width = vectors_for(out) * kLane;
  int64_t plane = out * (in + 1);
  auto filters = pooled({out, kPlanes, in + 1}, at::kFloat);
  for (int64_t c = 0; c < in; ++c)
    for (int64_t k = 0; k < out; k += kLane) {
      const float* from = taps.data() + c * out + k;
      Lanes h[4][3];
      for (int j = 0; j < 3; ++j) {
        Lanes g0 = load(from + j * pairs), g1 = load(from + (3 + j) * pairs);
        Lanes g2 = load(from + (6 + j) * pairs);
        h[0][j] = g0;
        h[1][j] = 0.5f * (g0 + g1 + g2);
        h[2][j] = 0.5f * (g0 - g1 + g2);
        h[3][j] = g2;
      }
      float* at = filters.data_ptr<float>() + k / width * (in * width) + c * width + k % width;
      for (int i = 0; i < 4; ++i, at += 4 * plane) {
        store(at, h[i][0]);
        store(at + plane, 0.5f * (h[i][0] + h[i][1] + h[i][2]));
        store(at + 2 * plane, 0.5f * (h[i][0] - h[i][1] + h[i][2]));
        store(at + 3 * plane, h[i][2]);
      }
    }
  return filters;
}

struct Winograd {
  int64_t outputs(const Tensor& filters) const { return filters.size(0); }

  template <typename F>
  Tensor convolve(const Tensor& x, const Norm& norm, const Tensor& filters, const F& make_finish) const {
    Shape in(x);
    auto y = pooled({in.samples, outputs(filters), in.height, in.width}, x.scalar_type());
    Shape out(y);
    const int64_t together = kTogether / vectors_for(out.channels);
    Block block(in, kBlock, together);
    with_type(x, [&](auto sample) {
      using T = decltype(sample);
      in_pieces(block.count(in), [&](Piece piece) {
        Planes v(block.tiles, in.channels, room(0)), m(block.tiles, out.channels, room(1));
        auto finish = make_finish(sample, piece.number);
        int64_t stop = std::min(piece.last * block.rows, in.rows());
        for (int64_t row = piece.first * block.rows; row < stop; row += block.rows) {
          int64_t count = std::min(block.rows, stop - row), tiles = round_up(count * in.across(), together);
          with_reader(norm, [&](auto read) { spread_block(x.const_data_ptr<T>(), in, 0, row, count, read, v); });
          multiply_all(v, filters.const_data_ptr<float>(), m, tiles);
          for (int64_t i = 0; i < count; ++i) {
            int64_t upper = (row + i) * 2 * out.width * out.channels;
            gather_row(m, i * in.across(), out, y.template data_ptr<T>(), upper, finish);
          }
        }
      });
    });
    return y;
  }
};

Tensor winograd(
    const Tensor& x, const Tensor& filters, const Given& bias, const Given& total, const Given& weight,
    const Given& shift) {
  return convolution(Winograd(), x, filters, bias, Norm(total, weight, shift));
}

std::tuple<Tensor, Tensor> winograd_parts(
    const Tensor& x, const Tensor& filters, const Given& bias, const Given& total, const Given& weight,
    const Given& shift) {
  return convolution_parts(Winograd(), x, filters, bias, Norm(total, weight, shift));
}

Tensor winograd_error(const Tensor& dy, const Tensor& filters) {
  return convolution(Winograd(), dy, filters, std::nullopt, Norm());
}

std::tuple<Tensor, Tensor> winograd_back(
    const Tensor& dy, const Tensor& filters, const Tensor& x, const Tensor& total, const Given& weight,
    const Given& shift) {
  return convolution_back(Winograd(), dy, filters, x, Norm(total, weight, shift));
}

// G' u G of all pairs of some channels, from the planes' sums. A filter's place is for `all` inputs.
template <typename T>
void back_to_filters(const float* sums, int64_t inputs, int64_t outputs, T* to, int64_t all) {
  int64_t pairs = inputs * outputs;
  for (int64_t k = 0; k < outputs; ++k)
    for (int64_t c = 0; c < inputs; c += kLane) {
      const float* from = sums + k * inputs + c;
      Lanes half[3][4];
      for (int j = 0; j < 4; ++j) {
        Lanes m0 = load(from + j * pairs), m1 = load(from + (4 + j) * pairs);
        Lanes m2 = load(from + (8 + j) * pairs), m3 = load(from + (12 + j) * pairs);
        half[0][j] = m0 + 0.5f * (m1 + m2);
        half[1][j] = 0.5f * (m1 - m2);
        half[2][j] = 0.5f * (m1 + m2) + m3;
      }
      for (int i = 0; i < 3; ++i) {
        T* at = to + (k * 9 + 3 * i) * all + c;
        store(at, half[i][0] + 0.5f * (half[i][1] + half[i][2]));
        store(at + all, 0.5f * (half[i][1] - half[i][2]));
        store(at + 2 * all, 0.5f * (half[i][1] + half[i][2]) + half[i][3]);
      }
    }
}

// The filters' gradient, for some channels after the other: what is spread anew for each of them
// takes a small part of the time that their sums would take out of the cache.
Tensor winograd_gradient(
    const Tensor& given_dy, const Tensor& given_x, const Given& total, const Given& weight,
    const Given& shift) {
  auto dy = channels_last(given_dy), x = channels_last(given_x);
  Norm norm(total, weight, shift);
  Shape in(x), out(dy);
  Block block(in, kGradientBlock);
  auto found = pooled({out.channels, in.channels, 3, 3}, x.scalar_type());
  const int64_t blocks = (in.channels + kInputs - 1) / kInputs;  // of inputs
  with_type(x, [&](auto sample) {
    using T = decltype(sample);
    auto find_block = [&](int64_t c, int64_t k) {
      int64_t inputs = std::min(kInputs, in.channels - c), outputs = std::min(kOutputs, out.channels - k);
      Planes v(block.tiles, inputs, room(0)), w(block.tiles, outputs, room(1));
      float* sums = room(2).of(kPlanes * inputs * outputs);
      std::fill_n(sums, kPlanes * inputs * outputs, 0.0f);
      for (int64_t row = 0; row < in.rows(); row += block.rows) {
        int64_t count = std::min(block.rows, in.rows() - row);
        with_reader(norm, [&](auto read) {
          spread_block(x.const_data_ptr<T>(), in, c, row, count, read, v);
        });
        spread_errors(dy.const_data_ptr<T>(), out, k, row, count, w);
        with_vectors(vectors_for(inputs), [&](auto vectors) {
          correlate_planes<vectors()>(w, v, count * in.across(), sums);
        });
      }
      T* to = found.data_ptr<T>() + k * 9 * in.channels + c;
      back_to_filters(sums, inputs, outputs, to, in.channels);
    };
    in_pieces(blocks * ((out.channels + kOutputs - 1) / kOutputs), [&](Piece piece) {
      for (int64_t i = piece.first; i < piece.last; ++i)
        find_block(i % blocks * kInputs, i / blocks * kOutputs);
    });
  });
  return found;
}

}  // namespace convoy

TORCH_LIBRARY_IMPL(convoy, CPU, m) {
  m.impl("winograd_filters", &convoy::winograd_filters);
  m.impl("winograd", &convoy::winograd);
  m.impl("winograd_parts", &convoy::winograd_parts);
  m.impl("winograd_error", &convoy::winograd_error);
  m.impl("winograd_back", &convoy::winograd_back);
  m.impl("winograd_gradient", &convoy::winograd_gradient);
}

TORCH_LIBRARY_IMPL(convoy, CompositeImplicitAutograd, m) {
  m.impl("vector_lanes", &convoy::vector_lanes);
}
