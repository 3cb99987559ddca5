// What convolutions by our own hands have in common.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "pieces.h"
#include "pool.h"
#include "vectors.h"

namespace convoy {

using at::Tensor;

// Images may be of bf16; what is computed is fp32 all the same.
inline Lanes load(const c10::BFloat16* from) { return as_lanes(widened(load_halves(from)) << 16); }
inline void store(c10::BFloat16* to, Lanes value) { store_halves(to, rounded(value)); }

// Numbers as they are read again after they were stored.
template <typename T>
Lanes as_stored(Lanes value) {
  if constexpr (std::is_same_v<T, float>) return value;
  else return as_lanes(widened(rounded(value)) << 16);
}

// ---------------------------------------------------------------- tensors

inline Tensor channels_last(const Tensor& x) { return x.contiguous(at::MemoryFormat::ChannelsLast); }

template <typename F>
void with_type(const Tensor& x, const F& f) {
  if (x.scalar_type() == at::kFloat) f(float());
  else if (x.scalar_type() == at::kBFloat16) f(c10::BFloat16());
  else TORCH_CHECK(false, "these convolutions are not for ", x.scalar_type());
}

inline int64_t whole_vectors(int64_t channels) { return round_up(channels, kLane); }

// So many vectors of one side of a product are held at a time.
inline int64_t vectors_for(int64_t channels) {
  return channels % (4 * kLane) == 0 ? 4 : channels % (2 * kLane) == 0 ? 2 : 1;
}

// Calls f with the number as a constant.
template <typename F>
void with_vectors(int64_t vectors, const F& f) {
  if (vectors == 4) f(std::integral_constant<int, 4>());
  else if (vectors == 2) f(std::integral_constant<int, 2>());
  else f(std::integral_constant<int, 1>());
}

// Memory for numbers in between, at the start of a cache line; it is kept for the next time.
class Room {
 public:
  float* of(int64_t count) {
    if (count > count_) {
      count_ = 0;
      held_.reset();
      held_.reset(static_cast<float*>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64)));
      if (!held_) throw std::bad_alloc();
      std::fill_n(held_.get(), count, 0.0f);  // what nobody fills is multiplied, too
      count_ = count;
    }
    return held_.get();
  }

 private:
  struct Free {
    void operator()(float* held) const { std::free(held); }
  };
  std::unique_ptr<float, Free> held_;
  int64_t count_ = 0;
};

inline Room& room(int which) {
  static thread_local Room rooms[5];
  return rooms[which];
}

// What batch-norm wants to know of each channel, taken while the numbers are at hand: sums of the
// distances from some number of the channel, and of their squares.
struct Sums {
  int64_t channels;
  std::vector<float> middle;  // this and the others in whole vectors
  std::vector<double> distances, squares;
  int64_t known = 0;  // channels whose middle is chosen
  int64_t count = 0;  // of numbers of each channel

  explicit Sums(int64_t channels)
      : channels(channels),
        middle(whole_vectors(channels)),
        distances(middle.size()),
        squares(middle.size()) {}

  void add(int64_t c, Lanes some, Lanes squared) {
    for (int64_t i = 0; i < kLane; ++i) {
      distances[c + i] += double(some[i]);
      squares[c + i] += double(squared[i]);
    }
  }

  // Adds what is known of other numbers, whose distances are from another middle.
  void add(const Sums& other) {
    if (!count) *this = other;
    else if (other.count) {
      auto n = double(other.count);
      for (int64_t c = 0; c < channels; ++c) {
        double apart = double(other.middle[c]) - double(middle[c]);
        squares[c] += other.squares[c] + apart * (2 * other.distances[c] + n * apart);
        distances[c] += other.distances[c] + n * apart;
      }
      count += other.count;
    }
  }

  // Mean, and squared distances from it.
  Tensor table() const {
    auto found = pooled({2, channels}, at::kDouble);
    auto* to = found.data_ptr<double>();
    for (int64_t c = 0; c < channels; ++c) {
      to[c] = double(middle[c]) + distances[c] / double(count);
      to[channels + c] = std::max(0.0, squares[c] - distances[c] * distances[c] / double(count));
    }
    return found;
  }
};

// The same for each piece of some work, and put together in their order.
class SumsOfPieces {
 public:
  explicit SumsOfPieces(int64_t channels) : sums_(kMostPieces, Sums(channels)) {}

  Sums& operator[](int64_t piece) { return sums_[piece]; }

  Tensor table() {
    for (int64_t i = 1; i < kMostPieces; ++i) sums_[0].add(sums_[i]);
    return sums_[0].table();
  }

 private:
  std::vector<Sums> sums_;
};

// ---------------------------------------------------------------- batch-norms

using Given = std::optional<Tensor>;

inline Tensor floats(const Given& given) {
  return given.has_value() && given->defined() ? given->to(at::kFloat).contiguous() : Tensor();
}

inline const float* data_of(const Tensor& given) {
  return given.defined() ? given.const_data_ptr<float>() : nullptr;
}

// What a batch-norm makes of each channel: slope * x + shift. Without statistics: nothing.
struct Norm {
  std::vector<float> slope, shift, mean;

  Norm() = default;
  Norm(const Given& total, const Given& given_weight, const Given& given_bias) {
    if (!total.has_value() || !total->defined()) return;
    auto weight = floats(given_weight), bias = floats(given_bias);
    const double *middle = total->const_data_ptr<double>(), *scale = middle + total->size(1);
    for (int64_t c = 0; c < total->size(1); ++c) {
      double a = weight.defined() ? double(weight.const_data_ptr<float>()[c]) : 1.0;
      double b = bias.defined() ? double(bias.const_data_ptr<float>()[c]) : 0.0;
      slope.push_back(float(a * scale[c]));
      shift.push_back(float(b - middle[c] * a * scale[c]));
      mean.push_back(float(middle[c]));
    }
  }
};

}  // namespace convoy
