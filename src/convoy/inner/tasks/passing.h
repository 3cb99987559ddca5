// What numbers go through on their way into a convolution, and what its results go through on their
// way out, and so the calls that all kinds of convolutions have in common.

#pragma once

#include "lanes.h"

namespace convoy {

// ---------------------------------------------------------------- in

// How numbers of an image are read: as they are,
struct Plain {
  void begin(int64_t, const bool[4]) {}

  template <typename T>
  Lanes operator()(int, const T* from) const {
    return load(from);
  }
};

// or as what a batch-norm and a rectifier make of them. What lies outside of the image stays 0.
struct Normed {
  const Norm& norm;
  Lanes slope[3], shift[3];  // of the first row of a tile, those inside, and the last

  explicit Normed(const Norm& norm) : norm(norm) {}

  void begin(int64_t c, const bool inside[4]) {
    for (int k = 0; k < 3; ++k) {
      bool there = inside[k == 2 ? 3 : k];
      slope[k] = there ? load(norm.slope.data() + c) : Lanes{};
      shift[k] = there ? load(norm.shift.data() + c) : Lanes{};
    }
  }

  template <typename T>
  Lanes operator()(int row, const T* from) const {
    int k = row == 0 ? 0 : row == 3 ? 2 : 1;
    return above_zero(load(from) * slope[k] + shift[k]);
  }
};

// Calls f with the way in which the inputs are read.
template <typename F>
void with_reader(const Norm& norm, const F& f) {
  if (norm.slope.empty()) f(Plain());
  else f(Normed(norm));
}

// ---------------------------------------------------------------- out

// What is done to results on their way out: a bias is added,
struct Biased {
  const float* bias;
  Lanes more;

  void begin(int64_t c, Lanes) { more = bias ? load(bias + c) : Lanes{}; }
  Lanes operator()(int64_t, Lanes y) { return y + more; }
  void end(int64_t) {}
};

// they are counted for a batch-norm behind, as it will read them,
template <typename T>
struct Counted {
  Biased biased;
  Sums& sums;
  Lanes middle, some, squared;
  int64_t count;

  void begin(int64_t c, Lanes first) {
    biased.begin(c, first);
    count = 0;
    some = squared = Lanes{};
    middle = c < sums.known ? load(sums.middle.data() + c) : as_stored<T>(biased(0, first));
  }

  Lanes operator()(int64_t at, Lanes y) {
    y = as_stored<T>(biased(at, y));
    Lanes off = y - middle;
    some += off;
    squared += off * off;
    ++count;
    return y;
  }

  void end(int64_t c) {
    store(sums.middle.data() + c, middle);
    sums.known = std::max(sums.known, c + kLane);
    sums.add(c, some, squared);
    if (c == 0) sums.count += count;
  }
};

// or, being errors, they go back through a rectifier and are counted for the norm before it.
template <typename T>
struct Returned {
  const Norm& norm;
  const T* x;    // what the norm had been given
  double* sums;  // of flows, then of flows times distances
  Lanes slope, shift, mean, flow, with_x;

  void begin(int64_t c, Lanes) {
    slope = load(norm.slope.data() + c);
    shift = load(norm.shift.data() + c);
    mean = load(norm.mean.data() + c);
    flow = with_x = Lanes{};
  }

  Lanes operator()(int64_t at, Lanes dy) {
    Lanes in = load(x + at);
    Lanes now = in * slope + shift <= 0 ? Lanes{} : dy;
    flow += now;
    with_x += now * (in - mean);
    return now;
  }

  void end(int64_t c) {
    for (int64_t i = 0; i < kLane; ++i) {
      sums[c + i] += double(flow[i]);
      sums[norm.mean.size() + c + i] += double(with_x[i]);
    }
  }
};

// ---------------------------------------------------------------- what the engine calls

// `way` is a kind of convolution: `convolve(x, norm, filters, make_finish)` does it in pieces, to x as
// the norm says, with results as `finish` says, which is made for their type and for each piece;
// `outputs(filters)` counts channels.

template <typename Way>
Tensor convolution(const Way& way, const Tensor& x, const Tensor& filters, const Given& bias, const Norm& norm) {
  auto more = floats(bias);
  return way.convolve(channels_last(x), norm, filters, [&](auto, int64_t) { return Biased{data_of(more), {}}; });
}

// With what a batch-norm behind it asks of its results: see norm_parts.
template <typename Way>
std::tuple<Tensor, Tensor> convolution_parts(
    const Way& way, const Tensor& x, const Tensor& filters, const Given& bias, const Norm& norm) {
  SumsOfPieces sums(way.outputs(filters));
  auto more = floats(bias);
  auto y = way.convolve(channels_last(x), norm, filters, [&](auto sample, int64_t piece) {
    return Counted<decltype(sample)>{{data_of(more), {}}, sums[piece], {}, {}, {}, 0};
  });
  return {y, sums.table()};
}

// The error, back through a rectifier to a norm that was given x, and what it adds to that: see
// norm_back_parts.
template <typename Way>
std::tuple<Tensor, Tensor> convolution_back(
    const Way& way, const Tensor& dy, const Tensor& filters, const Tensor& given_x, const Norm& norm) {
  auto x = channels_last(given_x);
  const int64_t channels = norm.mean.size(), count = 2 * channels;
  std::vector<double> sums(kMostPieces * count);
  auto flow = way.convolve(channels_last(dy), Norm(), filters, [&](auto sample, int64_t piece) {
    using T = decltype(sample);
    return Returned<T>{norm, x.const_data_ptr<T>(), sums.data() + piece * count, {}, {}, {}, {}, {}};
  });
  auto parts = pooled({2, channels}, at::kDouble);
  double* to = parts.data_ptr<double>();
  std::copy_n(sums.data(), count, to);
  for (int64_t i = count; i < kMostPieces * count; ++i) to[i % count] += sums[i];
  return {flow, parts};
}

}  // namespace convoy
