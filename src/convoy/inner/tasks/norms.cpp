// Batch-norm over a batch that is computed in groups: what each group adds, and what all of it
// makes of each group. Also the sum of what the groups found, in a fixed order.
//
// The same in torch's own operations, with the formulas: tasks/norms.py.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "pieces.h"
#include "pool.h"

namespace convoy {

using at::Tensor;

constexpr int kLanes = 16;
constexpr int64_t kFlush = 512;  // so many numbers are added up as they are, then as doubles

template <typename T>
struct Sum {
  using type = float;
};
template <>
struct Sum<double> {
  using type = double;
};

// How a tensor's numbers lie: outer x channels x inner.
struct Layout {
  int64_t outer, channels, inner;
};

Tensor dense(const Tensor& x) {
  return x.is_contiguous(at::MemoryFormat::ChannelsLast) ? x : x.contiguous();
}

Tensor dense_like(const Tensor& other, const Tensor& x) {
  if (other.sizes() == x.sizes() && other.strides() == x.strides()) return other;
  auto made = at::empty_like(x, x.options().dtype(other.scalar_type()));
  return made.copy_(other);
}

Layout layout_of(const Tensor& x) {
  int64_t channels = x.size(1), places = x.numel() / std::max<int64_t>(channels, 1);
  if (x.dim() == 2 || (x.dim() == 4 && x.is_contiguous(at::MemoryFormat::ChannelsLast)))
    return {places, channels, 1};
  int64_t samples = x.size(0);
  return {samples, channels, samples ? places / samples : 0};
}

// ---------------------------------------------------------------- loops

// Several sums at once, which f gives as an array; sums[k][c] are K rows of all channels.
template <typename A, int W, int K, typename F>
inline void sum_block(int64_t rows, int64_t channels, int64_t first, double* sums, const F& f) {
  double total[K][W] = {};
  for (int64_t start = 0; start < rows; start += kFlush) {
    A some[K][2][W] = {};
    int64_t stop = std::min(rows, start + kFlush), row = start;
    for (; row + 1 < stop; row += 2)
      for (int half = 0; half < 2; ++half)
#pragma GCC ivdep
        for (int w = 0; w < W; ++w) {
          auto found = f((row + half) * channels + first + w, first + w);
          for (int k = 0; k < K; ++k) some[k][half][w] += found[k];
        }
    for (; row < stop; ++row)
      for (int w = 0; w < W; ++w) {
        auto found = f(row * channels + first + w, first + w);
        for (int k = 0; k < K; ++k) some[k][0][w] += found[k];
      }
    for (int k = 0; k < K; ++k)
      for (int w = 0; w < W; ++w) total[k][w] += double(some[k][0][w]) + double(some[k][1][w]);
  }
  for (int k = 0; k < K; ++k)
    for (int w = 0; w < W; ++w) sums[k * channels + first + w] = total[k][w];
}

template <typename A, int K, typename F>
inline void sum_plane(
    int64_t start, int64_t count, int64_t channel, int64_t channels, double* sums, const F& f) {
  for (int64_t from = 0; from < count; from += kFlush) {
    A some[K][kLanes] = {};
    int64_t stop = std::min(count, from + kFlush), i = from;
    for (; i + kLanes <= stop; i += kLanes)
#pragma GCC ivdep
      for (int w = 0; w < kLanes; ++w) {
        auto found = f(start + i + w, channel);
        for (int k = 0; k < K; ++k) some[k][w] += found[k];
      }
    for (int w = 0; i < stop; ++i, ++w) {
      auto found = f(start + i, channel);
      for (int k = 0; k < K; ++k) some[k][w] += found[k];
    }
    for (int k = 0; k < K; ++k)
      for (int w = 0; w < kLanes; ++w) sums[k * channels + channel] += some[k][w];
  }
}

// sums[k][c] = the sum of f(place, c)[k] over all places of channel c.
template <typename A, int K, typename F>
void sum_by_channel(const Layout& at, double* sums, const F& f) {
  if (at.inner == 1) {
    int64_t c = 0;
    for (; c + kLanes <= at.channels; c += kLanes)
      sum_block<A, kLanes, K>(at.outer, at.channels, c, sums, f);
    for (; c < at.channels; ++c) sum_block<A, 1, K>(at.outer, at.channels, c, sums, f);
    return;
  }
  std::fill_n(sums, K * at.channels, 0.0);
  for (int64_t c = 0; c < at.channels; ++c)
    for (int64_t n = 0; n < at.outer; ++n)
      sum_plane<A, K>((n * at.channels + c) * at.inner, at.inner, c, at.channels, sums, f);
}

// f(place, c) for every number.
template <typename F>
void for_each(const Layout& at, const F& f) {
  if (at.inner == 1) {
    in_pieces(at.outer, [&](Piece piece) {
      for (int64_t row = piece.first; row < piece.last; ++row) {
        int64_t c = 0, base = row * at.channels;
        for (; c + kLanes <= at.channels; c += kLanes)
#pragma GCC ivdep
          for (int w = 0; w < kLanes; ++w) f(base + c + w, c + w);
        for (; c < at.channels; ++c) f(base + c, c);
      }
    });
    return;
  }
  for (int64_t plane = 0; plane < at.outer * at.channels; ++plane) {
    int64_t c = plane % at.channels, base = plane * at.inner;
#pragma GCC ivdep
    for (int64_t i = 0; i < at.inner; ++i) f(base + i, c);
  }
}

template <typename F>
auto by_type(const Tensor& x, const F& f) {
  switch (x.scalar_type()) {
    case at::kFloat: return f(float());
    case at::kDouble: return f(double());
    case at::kBFloat16: return f(c10::BFloat16());
    default: TORCH_CHECK(false, "batch-norm by groups is not for ", x.scalar_type());
  }
}

// A few numbers, of any type: without a call of torch's, which would take longer than the rest.
std::vector<double> numbers(const std::optional<Tensor>& given, int64_t count, double otherwise) {
  std::vector<double> found(count, otherwise);
  if (given.has_value() && given->defined()) {
    TORCH_CHECK(given->is_contiguous() && given->numel() == count);
    by_type(*given, [&](auto sample) {
      auto* from = given->const_data_ptr<decltype(sample)>();
      for (int64_t i = 0; i < count; ++i) found[i] = double(from[i]);
    });
  }
  return found;
}

Tensor table(int64_t channels) { return pooled({2, channels}, at::kDouble); }

std::vector<const double*> data_of(at::TensorList parts) {
  std::vector<const double*> found;
  for (const auto& part : parts) found.push_back(part.const_data_ptr<double>());
  return found;
}

// ---------------------------------------------------------------- forward

// Of each channel the mean, and the squared distances from it added up.
Tensor norm_parts(const Tensor& given) {
  auto x = dense(given);
  auto at = layout_of(x);
  auto found = table(at.channels);
  auto* mean = found.data_ptr<double>();
  auto* squares = mean + at.channels;
  by_type(x, [&](auto sample) {
    using T = decltype(sample);
    using A = typename Sum<T>::type;
    const T* from = x.const_data_ptr<T>();
    sum_by_channel<A, 1>(at, mean, [=](int64_t i, int64_t) { return std::array{A(from[i])}; });
    std::vector<A> middle(at.channels);
    for (int64_t c = 0; c < at.channels; ++c) {
      mean[c] /= double(at.outer * at.inner);
      middle[c] = A(mean[c]);
    }
    const A* m = middle.data();
    sum_by_channel<A, 1>(at, squares, [=](int64_t i, int64_t c) {
      A d = A(from[i]) - m[c];
      return std::array{d * d};
    });
    // The mean was rounded to subtract it: tell which one the distances belong to.
    for (int64_t c = 0; c < at.channels; ++c) mean[c] = double(middle[c]);
  });
  return found;
}

void blend(const std::optional<Tensor>& running, const std::vector<double>& now, double momentum) {
  if (!running.has_value() || !running->defined()) return;
  by_type(*running, [&](auto sample) {
    using T = decltype(sample);
    T* held = running->data_ptr<T>();
    for (size_t c = 0; c < now.size(); ++c)
      held[c] = T((1 - momentum) * double(held[c]) + momentum * now[c]);
  });
}

// Mean and 1 / deviation of the whole batch; moves the running statistics.
Tensor norm_total(
    at::TensorList parts,
    at::IntArrayRef counts,
    const std::optional<Tensor>& running_mean,
    const std::optional<Tensor>& running_var,
    double momentum,
    double eps) {
  int64_t channels = parts[0].size(1);
  double all = 0;
  for (auto count : counts) all += double(count);
  auto found = table(channels);
  std::vector<double> means(channels), variances(channels);
  auto from = data_of(parts);
  auto* to = found.data_ptr<double>();
  for (size_t g = 0; g < from.size(); ++g)
    for (int64_t c = 0; c < channels; ++c) means[c] += double(counts[g]) * from[g][c];
  for (auto& mean : means) mean /= all;
  for (size_t g = 0; g < from.size(); ++g)
    for (int64_t c = 0; c < channels; ++c) {
      double off = from[g][c] - means[c];
      variances[c] += from[g][channels + c] + double(counts[g]) * off * off;
    }
  for (int64_t c = 0; c < channels; ++c) {
    to[c] = means[c];
    to[channels + c] = 1 / std::sqrt(variances[c] / all + eps);
    variances[c] /= std::max(all - 1, 1.0);
  }
  blend(running_mean, means, momentum);
  blend(running_var, variances, momentum);
  return found;
}

// (x - mean) / deviation * weight + bias + plus, and what is below zero cut off where asked for.
Tensor norm_apply(
    const Tensor& given,
    const Tensor& total,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& given_plus,
    bool relu) {
  auto x = dense(given);
  bool adds = given_plus.has_value() && given_plus->defined();
  auto plus = adds ? dense_like(*given_plus, x) : Tensor();
  auto at = layout_of(x);
  auto y = pooled_like(x);
  auto* mean = total.const_data_ptr<double>();
  auto* scale = mean + at.channels;
  by_type(x, [&](auto sample) {
    using T = decltype(sample);
    using A = typename Sum<T>::type;
    auto a = numbers(weight, at.channels, 1), b = numbers(bias, at.channels, 0);
    std::vector<A> slope(at.channels), shift(at.channels);
    for (int64_t c = 0; c < at.channels; ++c) {
      slope[c] = A(a[c] * scale[c]);
      shift[c] = A(b[c] - mean[c] * a[c] * scale[c]);
    }
    const T* from = x.const_data_ptr<T>();
    const A *s = slope.data(), *t = shift.data();
    T* to = y.template data_ptr<T>();
    auto apply = [&](auto value) {
      if (relu)
        for_each(at, [=](int64_t i, int64_t c) {
          A v = value(i, c);
          to[i] = T(v < A(0) ? A(0) : v);  // what is no number stays none
        });
      else
        for_each(at, [=](int64_t i, int64_t c) { to[i] = T(value(i, c)); });
    };
    if (adds) {
      const T* more = plus.template const_data_ptr<T>();
      apply([=](int64_t i, int64_t c) { return A(from[i]) * s[c] + t[c] + A(more[i]); });
    } else {
      apply([=](int64_t i, int64_t c) { return A(from[i]) * s[c] + t[c]; });
    }
  });
  return y;
}

// ---------------------------------------------------------------- backward

// What flows back to the norm: nothing where a rectifier behind it had cut a number off. Both
// numbers are read in any case, so that the compiler need not branch.
template <typename A, typename T>
inline A through(const T* dy, const T* y, int64_t i) {
  A flow = A(dy[i]), height = A(y[i]);
  return height <= A(0) ? A(0) : flow;
}

// Of each channel the sum of what flows back, and of that times (x - mean). What flows to a place
// is told by `flow`, which is asked once for each.
template <typename T, typename F>
Tensor back_parts(const Tensor& x, const Tensor& total, const F& flow) {
  using A = typename Sum<T>::type;
  auto at = layout_of(x);
  auto found = table(at.channels);
  auto* middle = total.const_data_ptr<double>();
  std::vector<A> mean(middle, middle + at.channels);
  const A* m = mean.data();
  const T* from = x.const_data_ptr<T>();
  sum_by_channel<A, 2>(at, found.data_ptr<double>(), [=](int64_t i, int64_t c) {
    A now = flow(i);
    return std::array{now, now * (A(from[i]) - m[c])};
  });
  return found;
}

Tensor norm_back_parts(
    const Tensor& given_dy,
    const Tensor& given_x,
    const Tensor& total,
    const std::optional<Tensor>& given_y) {
  auto x = dense(given_x), dy = dense_like(given_dy, x);
  bool cut = given_y.has_value() && given_y->defined();
  auto y = cut ? dense_like(*given_y, x) : Tensor();
  return by_type(x, [&](auto sample) {
    using T = decltype(sample);
    using A = typename Sum<T>::type;
    const T *d = dy.template const_data_ptr<T>(), *z = cut ? y.template const_data_ptr<T>() : nullptr;
    return cut ? back_parts<T>(x, total, [=](int64_t i) { return through<A>(d, z, i); })
               : back_parts<T>(x, total, [=](int64_t i) { return A(d[i]); });
  });
}

// The same for a norm whose rectifier has others behind it, too: they also want what flows back.
// `more` comes by another way, and is added.
std::tuple<Tensor, Tensor> rectified_parts(
    const Tensor& given_dy,
    const std::optional<Tensor>& given_more,
    const Tensor& given_y,
    const Tensor& given_x,
    const Tensor& total) {
  auto x = dense(given_x), dy = dense_like(given_dy, x), y = dense_like(given_y, x);
  bool adds = given_more.has_value() && given_more->defined();
  auto more = adds ? dense_like(*given_more, x) : Tensor();
  auto flow = pooled_like(x);
  auto parts = by_type(x, [&](auto sample) {
    using T = decltype(sample);
    using A = typename Sum<T>::type;
    const T *d = dy.template const_data_ptr<T>(), *z = y.template const_data_ptr<T>();
    T* to = flow.template data_ptr<T>();
    auto cut = [=](int64_t i, A now) {
      to[i] = T(A(z[i]) <= A(0) ? A(0) : now);
      return A(to[i]);
    };
    if (!adds) return back_parts<T>(x, total, [=](int64_t i) { return cut(i, A(d[i])); });
    const T* e = more.template const_data_ptr<T>();
    // Rounded where torch's own sum would have been.
    return back_parts<T>(
        x, total, [=](int64_t i) { return cut(i, A(T(A(d[i]) + A(e[i])))); });
  });
  return {flow, parts};
}

// The sums over all groups, and from them the gradients of weight and bias.
std::tuple<Tensor, Tensor, Tensor> norm_back_total(
    at::TensorList parts, const Tensor& total, const Tensor& like) {
  int64_t channels = total.size(1);
  auto sums = table(channels);
  auto* to = sums.data_ptr<double>();
  auto* scale = total.const_data_ptr<double>() + channels;
  std::fill_n(to, 2 * channels, 0.0);
  for (auto* part : data_of(parts))
    for (int64_t i = 0; i < 2 * channels; ++i) to[i] += part[i];
  auto weight = pooled({channels}, like.scalar_type()), bias = pooled_like(weight);
  by_type(like, [&](auto sample) {
    using T = decltype(sample);
    T *w = weight.data_ptr<T>(), *b = bias.data_ptr<T>();
    for (int64_t c = 0; c < channels; ++c) {
      w[c] = T(to[channels + c] * scale[c]);
      b[c] = T(to[c]);
    }
  });
  return {sums, weight, bias};
}

// What flows back to x.
Tensor norm_back_apply(
    const Tensor& given_dy,
    const Tensor& given_x,
    const Tensor& total,
    const Tensor& sums,
    const std::optional<Tensor>& weight,
    int64_t count,
    const std::optional<Tensor>& given_y) {
  auto x = dense(given_x), dy = dense_like(given_dy, x);
  bool cut = given_y.has_value() && given_y->defined();
  auto y = cut ? dense_like(*given_y, x) : Tensor();
  auto at = layout_of(x);
  auto dx = pooled_like(x);
  auto *mean = total.const_data_ptr<double>(), *scale = mean + at.channels;
  auto *flow = sums.const_data_ptr<double>(), *with_x = flow + at.channels;
  by_type(x, [&](auto sample) {
    using T = decltype(sample);
    using A = typename Sum<T>::type;
    auto a = numbers(weight, at.channels, 1);
    std::vector<A> by_dy(at.channels), by_x(at.channels), rest(at.channels);
    for (int64_t c = 0; c < at.channels; ++c) {
      double slope = a[c] * scale[c];
      double pull = slope * scale[c] * scale[c] * with_x[c] / double(count);
      by_dy[c] = A(slope);
      by_x[c] = A(-pull);
      rest[c] = A(pull * mean[c] - slope * flow[c] / double(count));
    }
    const A *p = by_dy.data(), *q = by_x.data(), *r = rest.data();
    const T* from = x.const_data_ptr<T>();
    const T *d = dy.template const_data_ptr<T>(), *z = cut ? y.template const_data_ptr<T>() : nullptr;
    T* to = dx.template data_ptr<T>();
    if (cut)
      for_each(at, [=](int64_t i, int64_t c) {
        to[i] = T(p[c] * through<A>(d, z, i) + (q[c] * A(from[i]) + r[c]));
      });
    else
      for_each(at, [=](int64_t i, int64_t c) {
        to[i] = T(p[c] * A(d[i]) + (q[c] * A(from[i]) + r[c]));
      });
  });
  return dx;
}

// ---------------------------------------------------------------- sums of all groups

// out = part 0 + part 1 + ..., in this order; of the parts as many rows as out has, from one on.
void sum_parts(Tensor out, at::TensorList parts, int64_t first) {
  const int64_t skipped = first ? first * out.stride(0) : 0;
  std::vector<Tensor> moved;  // parts that lie in memory in another way
  by_type(out, [&](auto sample) {
    using T = decltype(sample);
    using A = typename Sum<T>::type;
    std::vector<const T*> from;
    for (const auto& part : parts) {
      if (part.strides() == out.strides()) {
        from.push_back(part.const_data_ptr<T>() + skipped);
      } else {
        moved.push_back(dense_like(part.narrow(0, first, out.size(0)), out));
        from.push_back(moved.back().template const_data_ptr<T>());
      }
    }
    T* to = out.data_ptr<T>();
    constexpr int64_t kBlock = 64;
    for (int64_t start = 0; start < out.numel(); start += kBlock) {
      A some[kBlock] = {};
      int64_t count = std::min(kBlock, out.numel() - start);
      for (const T* part : from)
        if (count == kBlock)
          for (int64_t i = 0; i < kBlock; ++i) some[i] += A(part[start + i]);
        else
          for (int64_t i = 0; i < count; ++i) some[i] += A(part[start + i]);
      for (int64_t i = 0; i < count; ++i) to[start + i] = T(some[i]);
    }
  });
}

}  // namespace convoy

TORCH_LIBRARY_IMPL(convoy, CPU, m) {
  m.impl("norm_parts", &convoy::norm_parts);
  m.impl("norm_total", &convoy::norm_total);
  m.impl("norm_apply", &convoy::norm_apply);
  m.impl("norm_back_parts", &convoy::norm_back_parts);
  m.impl("rectified_parts", &convoy::rectified_parts);
  m.impl("norm_back_total", &convoy::norm_back_total);
  m.impl("norm_back_apply", &convoy::norm_back_apply);
  m.impl("sum_parts", &convoy::sum_parts);
}
