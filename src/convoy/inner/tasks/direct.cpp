// Convolutions of any filter size and stride for few channels, in fp32.
//
// Images lie channels last, so what a filter's row covers is one stretch of numbers. With the image
// in a frame of zeros, a row of results is
//
//     y[x][k] = sum over filter rows r, places j of in[r][x * step + j] * w[r][j][k]
//
// which is a small matrix product for some results x and vectors of k at a time. The error of a
// stride of s is s x s such convolutions of stride 1, each of which makes every s-th number; the
// filters' gradient is the outer products of in[r][x * step + j] and dy[x][k], added up.
//
// Where results have few channels, neighbours are made together: as one result of more channels, by
// a filter that is as wide as all of theirs and 0 where a neighbour's own does not reach.

#include <torch/library.h>

#include "lanes.h"

namespace convoy {

namespace {

constexpr int kPixels = 8;  // results that are worked on together

// A filter's way over an image, as tasks/convolutions.py gives it.
struct Window {
  int64_t rows, columns, down, across, above, left;  // size, stride, padding
  int64_t together;                                  // neighbours that are made as one

  explicit Window(at::IntArrayRef given)
      : rows(given[0]), columns(given[1]), down(given[2]), across(given[3]), above(given[4]),
        left(given[5]), together(given[6]) {}

  int64_t reach() const { return columns + (together - 1) * across; }  // of the wide filter
};

int64_t vectors_of(int64_t channels) { return vectors_for(whole_vectors(channels)); }

// An image in a frame of zeros, as fp32, with some room behind it that products may read.
struct Framed {
  int64_t rows, line;  // numbers in a row
  float* data;

  Framed(int64_t rows, int64_t columns, int64_t channels, int64_t step)
      : rows(rows), line(columns * channels), data(room(0).of((rows + 1) * line + kPixels * step + kLane)) {}

  template <typename T>
  void fill(const T* image, int64_t height, int64_t width, int64_t channels, int64_t above,
            int64_t left) const {
    int64_t count = width * channels, before = left * channels;
    std::fill_n(data, above * line, 0.0f);
    for (int64_t row = 0; row < height; ++row) {
      float* to = data + (above + row) * line;
      std::fill_n(to, before, 0.0f);
      const T* from = image + row * count;
      for (int64_t i = 0; i < count; ++i) to[before + i] = float(from[i]);
      std::fill(to + before + count, to + line, 0.0f);
    }
    std::fill_n(data + (above + height) * line, (rows - above - height) * line, 0.0f);
  }
};

// y[x][k] for some results and vectors of k; filters are [row][place][k of these].
template <int vectors>
inline void multiply(
    const float* in, int64_t line, int64_t step, const float* filters, int64_t rows, int64_t places,
    float* y, int64_t width) {
  Lanes sums[kPixels][vectors] = {};
  for (int64_t r = 0; r < rows; ++r, in += line)
    for (int64_t j = 0; j < places; ++j, filters += vectors * kLane) {
      Lanes by[vectors];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) by[v] = load(filters + v * kLane);
#pragma GCC unroll 8
      for (int x = 0; x < kPixels; ++x)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) sums[x][v] += in[x * step + j] * by[v];
    }
#pragma GCC unroll 8
  for (int x = 0; x < kPixels; ++x)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) store(y + x * width + v * kLane, sums[x][v]);
}

// A row of results, [x][k] with k in whole vectors; there is room for some more results.
void make_row(
    const float* in, int64_t line, int64_t step, const float* filters, int64_t rows, int64_t places,
    float* y, int64_t count, int64_t outputs) {
  int64_t width = whole_vectors(outputs), held = std::min<int64_t>(2, vectors_of(outputs));
  for (int64_t k = 0; k < width; k += held * kLane, filters += rows * places * held * kLane)
    for (int64_t x = 0; x < count; x += kPixels) {
      if (held == 2)
        multiply<2>(in + x * step, line, step, filters, rows, places, y + x * width + k, width);
      else
        multiply<1>(in + x * step, line, step, filters, rows, places, y + x * width + k, width);
    }
}

// Puts filters, as [k][row][column][c] at any strides, into the order that make_row reads.
template <typename F>
float* put_filters(
    float* to, int64_t rows, int64_t columns, int64_t inputs, int64_t outputs, const F& weight) {
  int64_t held = std::min<int64_t>(2, vectors_of(outputs)) * kLane;
  for (int64_t k = 0; k < whole_vectors(outputs); k += held)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t s = 0; s < columns; ++s)
        for (int64_t c = 0; c < inputs; ++c)
          for (int64_t i = k; i < k + held; ++i) *to++ = i < outputs ? weight(i, r, s, c) : 0.0f;
  return to;
}

// Of the results that lie `phase` behind a multiple of the stride: filter rows that reach them.
int64_t reaching(int64_t size, int64_t stride, int64_t phase) {
  return phase < size ? (size - phase + stride - 1) / stride : 0;
}

// Adds the bias to a row of results, counts them for a norm where asked for, and hands them over.
// Results of less than a vector are followed by a few numbers too many, which the next result
// overwrites: so rows must be made in order, and there must be room for a vector behind the last.
template <bool counting, typename T>
void finish_row(const float* row, int64_t count, int64_t outputs, const float* bias, T* to, Sums* sums) {
  int64_t width = whole_vectors(outputs);
  for (int64_t k = 0; k < width; k += kLane) {
    int64_t filled = std::min(kLane, outputs - k);
    Lanes more = load(bias + k), middle = {}, some = {}, squared = {};
    if (counting && k >= sums->known) {
      store(sums->middle.data() + k, as_stored<T>(load(row + k) + more));
      sums->known = k + kLane;
    }
    if (counting) middle = load(sums->middle.data() + k);
    for (int64_t x = 0; x < count; ++x) {
      Lanes y = as_stored<T>(load(row + x * width + k) + more);
      if (filled == kLane || outputs < kLane)
        store(to + x * outputs + k, y);
      else
        for (int64_t i = 0; i < filled; ++i) to[x * outputs + k + i] = T(row[x * width + k + i] + bias[k + i]);
      if (counting) {
        some += y - middle;
        squared += (y - middle) * (y - middle);
      }
    }
    if (counting) sums->add(k, some, squared);
  }
  if (counting) sums->count += count;
}

// sums[j][k] += in[x * step + j] * errors[x][k] over all results, for some places j.
template <int places, int vectors>
void correlate(
    const float* in, int64_t line, int64_t step, const float* errors, int64_t width, int64_t down,
    int64_t across, float* to) {
  Lanes sums[places][vectors];
#pragma GCC unroll 16
  for (int j = 0; j < places; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) sums[j][v] = load(to + j * width + v * kLane);
  for (int64_t i = 0; i < down; ++i)
    for (int64_t x = 0; x < across; ++x, errors += width) {
      const float* from = in + i * line + x * step;
      Lanes by[vectors];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) by[v] = load(errors + v * kLane);
#pragma GCC unroll 16
      for (int j = 0; j < places; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) sums[j][v] += from[j] * by[v];
    }
#pragma GCC unroll 16
  for (int j = 0; j < places; ++j)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) store(to + j * width + v * kLane, sums[j][v]);
}

// ---------------------------------------------------------------- what the engine calls

Tensor direct_filters(const Tensor& given, at::IntArrayRef how, bool error) {
  Window window(how);
  auto weight = channels_last(given.to(at::kFloat));
  int64_t outputs = weight.size(0), inputs = weight.size(1);
  const float* w = weight.const_data_ptr<float>();
  auto at = [=](int64_t k, int64_t r, int64_t s, int64_t c) {
    return w[((k * window.rows + r) * window.columns + s) * inputs + c];
  };
  int64_t from = error ? outputs : inputs, to = (error ? inputs : outputs) * window.together;
  auto found = pooled({window.rows * window.reach() * from * whole_vectors(to)}, at::kFloat);
  float* next = found.data_ptr<float>();
  if (!error) {
    put_filters(next, window.rows, window.reach(), inputs, to, [&](auto i, auto r, auto s, auto c) {
      int64_t own = s - i / outputs * window.across;
      return own >= 0 && own < window.columns ? at(i % outputs, r, own, c) : 0.0f;
    });
    return found;
  }
  for (int64_t a = 0; a < window.down; ++a)
    for (int64_t b = 0; b < window.across; ++b) {
      int64_t rows = reaching(window.rows, window.down, a);
      int64_t columns = reaching(window.columns, window.across, b), wide = columns + window.together - 1;
      next = put_filters(next, rows, wide, outputs, to, [&](auto i, auto r, auto s, auto k) {
        int64_t own = s - i / inputs;
        if (own < 0 || own >= columns) return 0.0f;
        return at(
            k, a + window.down * (rows - 1 - r), b + window.across * (columns - 1 - own), i % inputs);
      });
    }
  return found;
}

// The bias of each of some neighbours' channels, in whole vectors.
std::vector<float> biases(const Given& bias, int64_t channels, int64_t together) {
  std::vector<float> found(whole_vectors(channels * together));
  auto given = floats(bias);
  for (int64_t i = 0; given.defined() && i < together; ++i)
    std::copy_n(data_of(given), channels, found.data() + i * channels);
  return found;
}

template <bool counting>
Tensor convolve(
    const Tensor& given, const Tensor& filters, const Given& bias, int64_t outputs,
    at::IntArrayRef how, SumsOfPieces* sums) {
  Window window(how);
  auto x = channels_last(given);
  int64_t samples = x.size(0), inputs = x.size(1), height = x.size(2), width = x.size(3);
  int64_t high = height + 2 * window.above, wide = width + 2 * window.left;
  int64_t down = (high - window.rows) / window.down + 1;
  int64_t across = (wide - window.columns) / window.across + 1;
  auto y = pooled({samples, outputs, down, across}, x.scalar_type());
  int64_t together = window.together, made = outputs * together, step = window.across * inputs * together;
  auto added = biases(bias, outputs, together);
  // Results of less than a vector must be made in order: see finish_row.
  int64_t pieces = made % kLane == 0 ? kMostPieces : 1;
  with_type(x, [&](auto sample) {
    using T = decltype(sample);
    in_pieces(samples, [&](Piece piece) {
      Framed frame(high, wide, inputs, step);
      float* row = room(1).of((across + kPixels) * whole_vectors(made));
      T* to = y.template data_ptr<T>() + piece.first * down * across * outputs;
      for (int64_t n = piece.first; n < piece.last; ++n) {
        frame.fill(x.const_data_ptr<T>() + n * height * width * inputs, height, width, inputs,
                   window.above, window.left);
        for (int64_t i = 0; i < down; ++i, to += across * outputs) {
          make_row(frame.data + i * window.down * frame.line, frame.line, step, filters.const_data_ptr<float>(),
                   window.rows, window.reach() * inputs, row, across / together, made);
          finish_row<counting>(
              row, across / together, made, added.data(), to, counting ? &(*sums)[piece.number] : nullptr);
        }
      }
    }, pieces);
  });
  return y;
}

Tensor direct(
    const Tensor& x, const Tensor& filters, const Given& bias, int64_t outputs,
    at::IntArrayRef window) {
  return convolve<false>(x, filters, bias, outputs, window, nullptr);
}

// With what a batch-norm behind it asks of its results: see norm_parts.
std::tuple<Tensor, Tensor> direct_parts(
    const Tensor& x, const Tensor& filters, const Given& bias, int64_t outputs,
    at::IntArrayRef window) {
  SumsOfPieces sums(outputs);
  auto y = convolve<true>(x, filters, bias, outputs, window, &sums);
  return {y, sums.table()};
}

// Results of one phase in one direction: how many filter rows reach them, and which they are.
struct Phase {
  int64_t reach, first, count, start;  // start: of the first one's place in the image

  Phase(int64_t phase, int64_t filter, int64_t stride, int64_t padding, int64_t size) {
    reach = reaching(filter, stride, phase);
    first = (padding - phase + stride - 1) / stride;  // padding > phase - stride, so not below 0
    start = first * stride + phase - padding;
    count = start < size ? (size - 1 - start) / stride + 1 : 0;
  }
};

Tensor direct_error(
    const Tensor& given, const Tensor& filters, int64_t inputs, at::IntArrayRef size, at::IntArrayRef how) {
  Window window(how);
  auto dy = channels_last(given);
  int64_t samples = dy.size(0), outputs = dy.size(1), down = dy.size(2), across = dy.size(3);
  int64_t height = size[0], width = size[1], together = window.together, made = inputs * together;
  int64_t above = reaching(window.rows, window.down, 0) - 1;
  int64_t left = reaching(window.columns, window.across, 0) - 1;
  int64_t rows = std::max(down, (height - 1 + window.above) / window.down + 1) + above;
  int64_t columns = std::max(across, (width - 1 + window.left) / window.across + 1) + left;
  Framed frame(rows, columns, outputs, outputs * together);
  float* row = room(1).of((width + kPixels) * whole_vectors(made));
  auto dx = pooled({samples, inputs, height, width}, dy.scalar_type());
  auto nothing = biases(std::nullopt, inputs, together);
  with_type(dy, [&](auto sample) {
    using T = decltype(sample);
    std::vector<T> line(width * inputs + kLane);
    for (int64_t n = 0; n < samples; ++n) {
      T* image = dx.template data_ptr<T>() + n * height * width * inputs;
      frame.fill(dy.const_data_ptr<T>() + n * down * across * outputs, down, across, outputs, above, left);
      const float* next = filters.const_data_ptr<float>();
      for (int64_t a = 0; a < window.down; ++a)
        for (int64_t b = 0; b < window.across; ++b) {
          Phase y(a, window.rows, window.down, window.above, height);
          Phase x(b, window.columns, window.across, window.left, width);
          const float* from = frame.data + (x.first - x.reach + 1 + left) * outputs;
          for (int64_t i = 0; i < y.count; ++i) {
            make_row(from + (y.first + i - y.reach + 1 + above) * frame.line, frame.line, outputs * together,
                     next, y.reach, (x.reach + together - 1) * outputs, row, x.count / together, made);
            T* to = image + ((y.start + i * window.down) * width + x.start) * inputs;
            if (window.across == 1 && window.down == 1) {
              finish_row<false>(row, x.count / together, made, nothing.data(), to, nullptr);
              continue;
            }
            finish_row<false>(row, x.count / together, made, nothing.data(), line.data(), nullptr);
            for (int64_t k = 0; k < x.count; ++k)
              std::copy_n(line.data() + k * inputs, inputs, to + k * window.across * inputs);
          }
          next += y.reach * (x.reach + together - 1) * outputs * whole_vectors(made);
        }
    }
  });
  return dx;
}

Tensor direct_gradient(const Tensor& given_dy, const Tensor& given_x, at::IntArrayRef how) {
  Window window(how);
  auto dy = channels_last(given_dy), x = channels_last(given_x);
  int64_t samples = x.size(0), inputs = x.size(1), height = x.size(2), width = x.size(3);
  int64_t outputs = dy.size(1), down = dy.size(2), across = dy.size(3), together = window.together;
  int64_t made = outputs * together, held = whole_vectors(made), some = across / together;
  int64_t places = window.reach() * inputs, step = window.across * inputs * together;
  Framed frame(height + 2 * window.above, width + 2 * window.left, inputs, step);
  float* errors = room(1).of(down * some * held);
  float* sums = room(4).of(window.rows * whole_vectors(places) * held);
  std::fill_n(sums, window.rows * whole_vectors(places) * held, 0.0f);
  auto found = pooled({outputs, inputs, window.rows, window.columns}, x.scalar_type());
  with_type(x, [&](auto sample) {
    using T = decltype(sample);
    for (int64_t n = 0; n < samples; ++n) {
      frame.fill(x.const_data_ptr<T>() + n * height * width * inputs, height, width, inputs, window.above,
                 window.left);
      const T* from = dy.const_data_ptr<T>() + n * down * across * outputs;
      for (int64_t i = 0; i < down * some; ++i)
        for (int64_t k = 0; k < held; ++k) errors[i * held + k] = k < made ? float(from[i * made + k]) : 0.0f;
      for (int64_t r = 0; r < window.rows; ++r)
        for (int64_t j = 0; j < places; j += kLane) {
          const float* in = frame.data + r * frame.line + j;
          float* to = sums + (r * whole_vectors(places) + j) * held;
          int64_t left = places - j, line = window.down * frame.line;
          for (int64_t k = 0; k < held; k += kLane)
            if (left <= 8)
              correlate<8, 1>(in, line, step, errors + k, held, down, some, to + k);
            else if (left <= 12)
              correlate<12, 1>(in, line, step, errors + k, held, down, some, to + k);
            else
              correlate<16, 1>(in, line, step, errors + k, held, down, some, to + k);
        }
    }
    T* to = found.template data_ptr<T>();
    for (int64_t k = 0; k < outputs; ++k)
      for (int64_t r = 0; r < window.rows; ++r)
        for (int64_t j = 0; j < window.columns * inputs; ++j) {
          float sum = 0;
          for (int64_t i = 0; i < together; ++i)
            sum += sums[(r * whole_vectors(places) + j + i * window.across * inputs) * held + i * outputs + k];
          *to++ = T(sum);
        }
  });
  return found;
}

// The bias' gradient: each channel's sum. Sixteen results at a time are as many vectors as there are
// channels, in which each channel comes back to the same places.
Tensor bias_gradient(const Tensor& given) {
  auto dy = channels_last(given);
  int64_t channels = dy.size(1), all = dy.numel(), block = channels * kLane;
  std::vector<double> total(channels);
  auto found = pooled({channels}, dy.scalar_type());
  with_type(dy, [&](auto sample) {
    using T = decltype(sample);
    const T* from = dy.const_data_ptr<T>();
    float* sums = room(1).of(block);
    int64_t i = 0;
    while (i + block <= all) {
      std::fill_n(sums, block, 0.0f);
      for (int64_t stop = std::min(all, i + 64 * block); i + block <= stop; i += block)
        for (int64_t j = 0; j < block; j += kLane) store(sums + j, load(sums + j) + load(from + i + j));
      for (int64_t j = 0; j < block; ++j) total[j % channels] += double(sums[j]);
    }
    for (; i < all; ++i) total[i % channels] += double(float(from[i]));
    for (int64_t c = 0; c < channels; ++c) found.template data_ptr<T>()[c] = T(total[c]);
  });
  return found;
}

}  // namespace

}  // namespace convoy

TORCH_LIBRARY_IMPL(convoy, CPU, m) {
  m.impl("direct_filters", &convoy::direct_filters);
  m.impl("direct", &convoy::direct);
  m.impl("direct_parts", &convoy::direct_parts);
  m.impl("direct_error", &convoy::direct_error);
  m.impl("direct_gradient", &convoy::direct_gradient);
  m.impl("bias_gradient", &convoy::bias_gradient);
}
