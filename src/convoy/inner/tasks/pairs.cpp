// Convolutions of 3x3 in bf16, for processors that multiply its numbers in pairs or in tiles.
//
// Images lie channels last, so a row of a filter covers one stretch of numbers. An image in a frame
// of zeros is one long row of places: the result at place p is made of the stretches at p, p + a
// frame's width and p + two, whatever row p is in (what comes out for places of the frame is thrown
// away). That is a product of matrices with no copying: neighbouring places are its rows, which
// overlap. With a stride of two, every second place is asked for. The error is the same with turned
// filters, after a stride with zeros between what flows back. For the filters' gradient the places
// are what is added up, so errors are turned (a row for each channel) and neighbours are paired.
//
// Products are exact and added up in fp32, as PyTorch's are; results are rounded once. What is no
// number, or too large for one, reaches a few places further than it would: zeros are multiplied, too.

#include <torch/library.h>

#include <cstring>

#include "passing.h"
#include "products.h"

namespace convoy {

namespace {

using c10::BFloat16;

constexpr int64_t kRows = 8;    // of results that are made together, so that they stay in a core's cache
constexpr int64_t kOver = 40;   // places behind a frame that products may read
constexpr bool kInside[4] = {true, true, true, true};

// Places that a stride reaches.
int64_t reached(int64_t size, int64_t stride) { return (size + stride - 1) / stride; }

// Memory of its own: read as fp32, pairs of bf16 may be no numbers.
Half* halves(int which, int64_t count) {
  static thread_local Room rooms[5];
  return reinterpret_cast<Half*>(rooms[which].of((count + 1) / 2));
}

const Half* bits_of(const BFloat16* numbers) { return reinterpret_cast<const Half*>(numbers); }

// Pairs of what stands in the same place of two rows.
Words paired(const Half* first, const Half* second) {
  return widened(load_halves(first)) | widened(load_halves(second)) << 16;
}

// ---------------------------------------------------------------- matrix units

#ifdef CONVOY_AMX

// Both kinds of products of some numbers, for as many tiles as there are ways to work on them.
template <typename P>
std::vector<float> products_of_some() {
  constexpr int64_t kMost = 4 * kLane;  // places
  Walk walk{kLane, kLane, 5 * kLane, 3 * kLane};
  std::vector<Half> in((kMost + 3) * kLane + 2 * walk.line + kTileRow);
  std::vector<Half> others(walk.outputs / kLane * kFilterRows * walk.steps() * kTile);
  for (size_t i = 0; i < in.size(); ++i) in[i] = Half(0x3f80 + i % 7);
  for (size_t i = 0; i < others.size(); ++i) others[i] = Half(0xbf00 + i % 5);
  std::vector<float> found(5 * kMost * walk.outputs);
  [[maybe_unused]] typename P::Turn turn;
  float* to = found.data();
  for (int64_t places = kLane; places <= kMost; places += kLane, to += kMost * walk.outputs)
    P::multiply(walk, in.data(), others.data(), places, to);
  P::correlate(in.data(), kTileRow, others.data(), others.data() + 2 * kTileRow, kTileRow, to,
               kFilterRows * kLane, kLane);
  return found;
}

// Whether tiles add up what vectors do: if not, they are not used.
bool tiles_are_right() {
  auto tiles = products_of_some<TileProducts<Amx>>(), vectors = products_of_some<VectorProducts>();
  return std::equal(tiles.begin(), tiles.end(), vectors.begin(), [](float a, float b) {
    return std::abs(a - b) <= 1e-4f * std::abs(b);
  });
}

bool has_tiles() {
  static const bool has = Amx::ask() && tiles_are_right();
  return has;
}

template <typename F>
void with_products(const F& f) {
  if (has_tiles()) f(TileProducts<Amx>());
  else f(VectorProducts());
}

#else

bool has_tiles() { return false; }

template <typename F>
void with_products(const F& f) {
  f(VectorProducts());
}

#endif

// ---------------------------------------------------------------- images and errors

// Copies an image to where its places lie `spread` apart, in rows of `line` numbers.
void lay(
    const Half* image, int64_t height, int64_t width, int64_t channels, int64_t spread, Half* to, int64_t line) {
  int64_t together = spread == 1 ? width : 1;  // neighbours that stay neighbours
  for (int64_t y = 0; y < height; ++y)
    for (int64_t x = 0; x < width; x += together, image += together * channels)
      std::memcpy(to + (y * line + x * channels) * spread, image, together * channels * sizeof(Half));
}

// An image in a frame of zeros; its rows are of even length, so that pairs begin where they do.
struct Frame {
  int64_t height, width, channels, spread, across;
  Half* data;

  Frame(int64_t height, int64_t width, int64_t channels, int64_t spread)
      : height(height), width(width), channels(channels), spread(spread), across(round_up(width + 2, 2)) {
    int64_t count = ((round_up(height, 2) + 2) * across + kOver) * channels + kTileRow;
    data = halves(0, count);
    if (spread == 1) clear_around(count);
    else std::fill_n(data, count, Half(0));  // also what lies between the image's places
  }

  int64_t line() const { return across * channels; }
  int64_t places() const { return height * across; }  // of results, and of those in the frame

  void fill(const BFloat16* image, Plain) const {
    lay(bits_of(image), reached(height, spread), reached(width, spread), channels, spread,
        data + line() + channels, line());
  }

  void fill(const BFloat16* image, Normed read) const {
    for (int64_t c = 0; c < channels; c += kLane) {
      read.begin(c, kInside);
      for (int64_t y = 0; y < height; ++y) {
        const BFloat16* from = image + y * width * channels + c;
        Half* to = data + (y + 1) * line() + channels + c;
        for (int64_t i = 0; i < width * channels; i += channels)
          store_halves(to + i, rounded(read(1, from + i)));
      }
    }
  }

 private:
  // The image is written over all else.
  void clear_around(int64_t count) const {
    Half *image = data + line() + channels, *end = data + count;
    std::fill(data, image, Half(0));
    for (int64_t y = 0; y < height; ++y, image += line())
      std::fill(image + width * channels, y + 1 < height ? image + line() : end, Half(0));
  }
};

// [channel / 16][pair of places][channel of 16][place of pair], beginning with place 0 or 1.
struct Neighbours {
  int64_t pairs;
  Half* data;

  // So many that a filter's last row still finds its own behind `count` places.
  Neighbours(const Frame& frame, int64_t count, int which)
      : pairs(count / 2 + frame.across + 2), data(halves(which, frame.channels * pairs * 2)) {}

  void fill(const Frame& frame, int64_t first) const {
    Half* to = data;
    for (int64_t c = 0; c < frame.channels; c += kLane) {
      const Half* from = frame.data + first * frame.channels + c;
      for (int64_t i = 0; i < pairs; ++i, from += 2 * frame.channels, to += kTileRow)
        store_words(to, paired(from, from + frame.channels));
    }
  }

  const Half* at(int64_t c, int64_t place) const { return data + (c / kLane * pairs + place / 2) * kTileRow; }
};

// Turns a block of 16 x 16 words, by turning ever larger blocks in it.
void turn(Words rows[kLane]) {
  for_each_of<4>([&](auto power) {
    constexpr int64_t apart = 1 << power();
    Words upper, lower;
    for (int64_t i = 0; i < kLane; ++i) {
      upper[i] = uint32_t(i & apart ? kLane + i - apart : i);
      lower[i] = uint32_t(i & apart ? kLane + i : i + apart);
    }
    for (int64_t i = 0; i < kLane; ++i) {
      if (i & apart) continue;
      Words a = rows[i], b = rows[i + apart];
      rows[i] = mixed(a, b, upper);
      rows[i + apart] = mixed(a, b, lower);
    }
  });
}

// Errors as [channel][place], with zeros for places in the frame and those that a stride left out.
struct Turned {
  const Tensor& errors;
  int64_t stride, line, count;
  Half *flat, *data;

  Turned(const Tensor& errors, int64_t stride, const Frame& frame, int64_t count)
      : errors(errors), stride(stride), line(frame.across * errors.size(1)), count(count),
        flat(halves(3, count * errors.size(1))), data(halves(4, count * errors.size(1))) {
    std::fill_n(flat, count * errors.size(1), Half(0));
  }

  void fill(int64_t sample) const {
    int64_t channels = errors.size(1), height = errors.size(2), width = errors.size(3);
    const Half* image = bits_of(errors.const_data_ptr<BFloat16>()) + sample * height * width * channels;
    lay(image, height, width, channels, stride, flat, line);
    for (int64_t k = 0; k < channels; k += kLane)
      for (int64_t p = 0; p < count; p += kTileRow) {
        Words rows[kLane];
        const Half* from = flat + p * channels + k;
        for (auto& row : rows) {
          row = paired(from, from + channels);
          from += 2 * channels;
        }
        turn(rows);
        for (int64_t i = 0; i < kLane; ++i) store_words(data + (k + i) * count + p, rows[i]);
      }
  }
};

// ---------------------------------------------------------------- filters

// The order of products.h. Of results: a row of a filter is one stretch, of which pairs are turned.
void put_filters(const Half* weight, int64_t outputs, int64_t inputs, Half* to) {
  int64_t places = kFilterRows * inputs;
  for (int64_t k = 0; k < outputs; k += kLane)
    for (int64_t r = 0; r < kFilterRows; ++r)
      for (int64_t j = 0; j < places; j += kTileRow, to += kTile) {
        Words rows[kLane];
        for (int64_t i = 0; i < kLane; ++i) {
          alignas(64) Half row[kTileRow] = {};
          const Half* from = weight + ((k + i) * kFilterRows + r) * places + j;
          std::copy_n(from, std::min(kTileRow, places - j), row);
          rows[i] = load_words(row);
        }
        turn(rows);
        for (int64_t i = 0; i < kLane; ++i) store_words(to + i * kTileRow, rows[i]);
      }
}

// Of errors: inputs and outputs change places, and filters are turned by half a circle.
void put_turned_filters(const Half* weight, int64_t outputs, int64_t inputs, Half* to) {
  int64_t places = kFilterRows * outputs, taps = kFilterRows * kFilterRows;
  for (int64_t c = 0; c < inputs; c += kLane)
    for (int64_t r = 0; r < kFilterRows; ++r)
      for (int64_t j = 0; j < round_up(places, kTileRow); j += 2, to += kTileRow) {
        int64_t k = j % outputs, tap = taps - 1 - r * kFilterRows - j / outputs;
        const Half* from = weight + (k * taps + tap) * inputs + c;
        store_words(to, j < places ? paired(from, from + taps * inputs) : Words{});
      }
}

// ---------------------------------------------------------------- what the engine calls

bool matrix_tiles() { return has_tiles(); }

Tensor pairs_filters(const Tensor& given, bool error) {
  auto weight = channels_last(given.to(at::kBFloat16));
  int64_t outputs = weight.size(0), inputs = weight.size(1);
  int64_t from = error ? outputs : inputs, to = error ? inputs : outputs;
  auto filters = pooled({to / kLane, kFilterRows * Walk{from, 0, 0, to}.steps(), kTile}, at::kBFloat16);
  auto* data = reinterpret_cast<Half*>(filters.data_ptr<BFloat16>());
  auto put = error ? put_turned_filters : put_filters;
  put(bits_of(weight.const_data_ptr<BFloat16>()), outputs, inputs, data);
  return filters;
}

struct Pairs {
  int64_t height, width;  // of the image
  int64_t stride = 1;     // of the results
  int64_t spread = 1;     // what there is of the image lies so far apart

  static Pairs forth(const Tensor& x, int64_t stride) { return {x.size(2), x.size(3), stride, 1}; }
  static Pairs back(at::IntArrayRef size, int64_t stride) { return {size[0], size[1], 1, stride}; }

  int64_t outputs(const Tensor& filters) const { return filters.size(0) * kLane; }

  template <typename F>
  Tensor convolve(const Tensor& x, const Norm& norm, const Tensor& filters, const F& make_finish) const {
    int64_t made = outputs(filters), down = reached(height, stride), across = reached(width, stride);
    auto y = pooled({x.size(0), made, down, across}, at::kBFloat16);
    const auto* images = x.const_data_ptr<BFloat16>();
    const Half* by = bits_of(filters.const_data_ptr<BFloat16>());
    in_pieces(x.size(0), [&](Piece piece) {
      Frame frame(height, width, x.size(1), spread);
      Walk walk{frame.channels, frame.channels * stride, frame.line(), made};
      float* results = room(1).of(round_up(kRows * frame.across, kLane) * made);
      auto finish = make_finish(BFloat16(), piece.number);
      with_products([&](auto products) {
        using P = decltype(products);
        [[maybe_unused]] typename P::Turn turn;
        for (int64_t n = piece.first; n < piece.last; ++n) {
          with_reader(norm, [&](auto read) { frame.fill(images + n * (x.numel() / x.size(0)), read); });
          for (int64_t row = 0; row < down; row += kRows) {
            int64_t rows = std::min(kRows, down - row), places = round_up(rows * frame.across, kLane);
            P::multiply(walk, frame.data + row * stride * frame.line(), by, places, results);
            Kept kept{rows, across, frame.across, made, (n * down + row) * across * made};
            hand_over(results, kept, y.template data_ptr<BFloat16>(), finish);
          }
        }
      });
    });
    return y;
  }

 private:
  // Some rows of results, among those of the frame.
  struct Kept {
    int64_t rows, across, across_frame, channels, first;
  };

  template <typename Finish>
  static void hand_over(const float* results, const Kept& kept, BFloat16* y, Finish& finish) {
    int64_t channels = kept.channels;
    for (int64_t k = 0; k < channels; k += kLane) {
      finish.begin(k, load(results + k));
      int64_t at = kept.first + k;
      for (int64_t row = 0; row < kept.rows; ++row) {
        const float* from = results + row * kept.across_frame * channels + k;
        for (int64_t i = 0; i < kept.across; ++i, at += channels, from += channels)
          store(y + at, finish(at, load(from)));
      }
      finish.end(k);
    }
  }
};

Tensor pairs(
    const Tensor& x, const Tensor& filters, const Given& bias, const Given& total, const Given& weight,
    const Given& shift, int64_t stride) {
  return convolution(Pairs::forth(x, stride), x, filters, bias, Norm(total, weight, shift));
}

std::tuple<Tensor, Tensor> pairs_parts(
    const Tensor& x, const Tensor& filters, const Given& bias, const Given& total, const Given& weight,
    const Given& shift, int64_t stride) {
  return convolution_parts(Pairs::forth(x, stride), x, filters, bias, Norm(total, weight, shift));
}

Tensor pairs_error(const Tensor& dy, const Tensor& filters, at::IntArrayRef size, int64_t stride) {
  return convolution(Pairs::back(size, stride), dy, filters, std::nullopt, Norm());
}

std::tuple<Tensor, Tensor> pairs_back(
    const Tensor& dy, const Tensor& filters, const Tensor& x, const Tensor& total, const Given& weight,
    const Given& shift, int64_t stride) {
  auto way = Pairs::back(x.sizes().slice(2), stride);
  return convolution_back(way, dy, filters, x, Norm(total, weight, shift));
}

// The filters' gradient.
Tensor pairs_gradient(
    const Tensor& given_dy, const Tensor& given_x, const Given& total, const Given& weight,
    const Given& shift, int64_t stride) {
  auto dy = channels_last(given_dy), x = channels_last(given_x);
  Norm norm(total, weight, shift);
  Frame frame(x.size(2), x.size(3), x.size(1), 1);
  int64_t outputs = dy.size(1), inputs = x.size(1), taps = kFilterRows * kFilterRows;
  int64_t count = round_up(frame.places(), kTileRow);
  Neighbours even(frame, count, 1), odd(frame, count, 2);
  Turned errors(dy, stride, frame, count);
  float* sums = room(0).of(outputs * taps * inputs);
  std::fill_n(sums, outputs * taps * inputs, 0.0f);
  with_products([&](auto products) {
    using P = decltype(products);
    [[maybe_unused]] typename P::Turn turn;
    for (int64_t n = 0; n < x.size(0); ++n) {
      const auto* image = x.const_data_ptr<BFloat16>() + n * frame.height * frame.width * inputs;
      with_reader(norm, [&](auto read) { frame.fill(image, read); });
      even.fill(frame, 0);
      odd.fill(frame, 1);
      errors.fill(n);
      for (int64_t k = 0; k < outputs; k += kLane)
        for (int64_t c = 0; c < inputs; c += kLane)
          for (int64_t r = 0; r < kFilterRows; ++r)
            P::correlate(
                errors.data + k * count, count, even.at(c, r * frame.across), odd.at(c, r * frame.across),
                count, sums + (k * taps + kFilterRows * r) * inputs + c, taps * inputs, inputs);
    }
  });
  auto found = pooled({outputs, inputs, kFilterRows, kFilterRows}, at::kBFloat16);
  auto* to = found.data_ptr<BFloat16>();
  for (int64_t i = 0; i < found.numel(); i += kLane) store(to + i, load(sums + i));
  return found;
}

}  // namespace

}  // namespace convoy

TORCH_LIBRARY_IMPL(convoy, CPU, m) {
  m.impl("pairs_filters", &convoy::pairs_filters);
  m.impl("pairs", &convoy::pairs);
  m.impl("pairs_parts", &convoy::pairs_parts);
  m.impl("pairs_error", &convoy::pairs_error);
  m.impl("pairs_back", &convoy::pairs_back);
  m.impl("pairs_gradient", &convoy::pairs_gradient);
}

TORCH_LIBRARY_IMPL(convoy, CompositeImplicitAutograd, m) {
  m.impl("matrix_tiles", &convoy::matrix_tiles);
}
